"""Every tensor-parallel layer against plain torch on one process, in fp64: outputs,
gradients of inputs and of parameters.

The ranks return what they hold; the test puts the pieces together, by torch's own rule for chunks, and
compares.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from megacore.config.schema import IGNORED
from megacore.distributed.communicator import Communicator, Group
from megacore.distributed.shard import shard_of
from megacore.kernels.swiglu import swiglu
from megacore.rng import key_of
from megacore.tensor_parallel import embedding, linear
from megacore.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from megacore.tensor_parallel.embedding import VocabParallelEmbedding
from megacore.tensor_parallel.linear import ColumnLinear, RowLinear, column_linear
from tests.pieces import dim_of

TOKENS, HIDDEN, FFN, VOCAB = 8, 12, 16, 13  # 13 rows over 4 ranks: 4 + 4 + 4 + 1
TOLERANCE = 1e-12
GELU = partial(F.gelu, approximate="tanh")


def numbers(name: str, *shape: int) -> Tensor:
    """The same fp64 numbers wherever they are asked for."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(key_of(name)), dtype=torch.float64)


def gated(x: Tensor) -> Tensor:
    """swiglu of ``[tokens, 2, features]``, written another way."""
    return x[:, 0] * torch.sigmoid(x[:, 0]) * x[:, 1]


@dataclass(frozen=True)
class Case:
    """A layer, its plain counterpart, and how its input and output are cut over the ranks.

    A cut is a dim, None for what every rank has whole, or "tokens" for what is cut along the tokens with
    sequence parallelism and whole without.
    """

    build: Callable[..., nn.Module]
    plain: Callable[[Tensor, dict[str, Tensor]], Tensor]
    x: tuple[int, ...]
    x_cut: int | str | None
    y_cut: int | str | None


def row_case(plain_activation: Callable[[Tensor], Tensor], **options: Any) -> Case:
    def plain(x: Tensor, p: dict[str, Tensor]) -> Tensor:
        y = plain_activation(x) @ p["weight"].T
        return y + p["bias"] if "bias" in p else y

    shape = (TOKENS, 2, FFN) if plain_activation is gated else (TOKENS, FFN)
    return Case(
        partial(RowLinear, FFN, HIDDEN, **{"bias": True, **options}), plain, shape, len(shape) - 1, "tokens"
    )


class Apart(ColumnLinear):
    """Its results' rows have gaps between them, as the head's may."""

    def forward(self, x: Tensor) -> Tensor:
        y = column_linear(x, self.weight, None, self.group, self.sequence, 64)
        assert y.stride() == (64, 1)
        return y


COLUMN = partial(ColumnLinear, HIDDEN)
CASES = {
    "column": Case(
        partial(COLUMN, (FFN,), bias=True),
        lambda x, p: x @ p["weight"].T + p["bias"],
        (TOKENS, HIDDEN),
        "tokens",
        1,
    ),
    "column, several dims": Case(
        partial(COLUMN, (4, 3, 2), bias=False),
        lambda x, p: torch.einsum("ti,abci->tabc", x, p["weight"]),
        (TOKENS, HIDDEN),
        "tokens",
        1,
    ),
    "column, gate and up": Case(
        partial(COLUMN, (2, FFN), dim=1, bias=True),
        lambda x, p: torch.einsum("ti,goi->tgo", x, p["weight"]) + p["bias"],
        (TOKENS, HIDDEN),
        "tokens",
        2,
    ),
    "column, rows apart": Case(
        partial(Apart, HIDDEN, (FFN,), bias=False),
        lambda x, p: x @ p["weight"].T,
        (TOKENS, HIDDEN),
        "tokens",
        1,
    ),
    "row": row_case(lambda x: x),
    "row, no bias": row_case(lambda x: x, bias=False),
    "row of gelu": row_case(GELU, activation=GELU),
    "row of gelu, recomputed": row_case(GELU, activation=GELU, recompute=True),
    "row of swiglu": row_case(gated, activation=swiglu),
    "row of swiglu, recomputed": row_case(gated, activation=swiglu, recompute=True, bias=False),
    "embedding": Case(
        partial(VocabParallelEmbedding, VOCAB, HIDDEN),
        lambda tokens, p: p["weight"][tokens],
        (TOKENS,),
        None,
        "tokens",
    ),
}


def join() -> Group:
    """All ranks as one tensor group."""
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    assert dist.group.WORLD is not None
    return Group(
        "tp",
        tuple(range(world)),
        dist.get_rank(),
        Communicator(dist.group.WORLD, world) if world > 1 else None,
    )


def own(whole: Tensor, cut: int | str | None, group: Group, sequence: bool) -> Tensor:
    """This rank's part of a logical tensor."""
    if cut is None or (cut == "tokens" and not sequence):
        return whole
    return whole.chunk(group.size, 0 if cut == "tokens" else int(cut))[group.rank]


def inputs(name: str, case: Case) -> Tensor:
    if name == "embedding":
        return torch.tensor([0, 12, 3, 4, 11, 12, 7, 0])  # first and last rows of pieces, and repeats
    return numbers(name + " x", *case.x)


@dataclass(frozen=True)
class Held:
    """What a rank has after backward: output, gradient of its input, and of its
    parameters with dim and `partial`.
    """

    y: Tensor
    x_grad: Tensor | None
    grads: dict[str, tuple[Tensor, int | None, bool]]


def run_layers(sequence: bool, fault: str = "") -> dict[str, Held]:
    """One rank's part of every case."""
    group = join()
    with pytest.MonkeyPatch.context() as patch:
        if fault:
            FAULTS[fault][0](patch)
        return {name: run_layer(name, case, group, sequence) for name, case in CASES.items()}


def run_layer(name: str, case: Case, group: Group, sequence: bool) -> Held:
    options = {
        "init_std": 1.0,
        "group": group,
        "sequence": sequence,
        "dtype": torch.float64,
        "device": torch.device("cpu"),
    }
    module = case.build(**options)
    for key, parameter in module.named_parameters():
        shard = shard_of(parameter)
        parameter.data.copy_(own(numbers(name + key, *shard.global_shape), dim_of(shard), group, sequence))
    x = own(inputs(name, case), case.x_cut, group, sequence).contiguous()
    if x.is_floating_point():
        x.requires_grad_()
    y = module(x.flatten(1) if x.dim() > 2 else x)
    upstream = own(numbers(name + " dy", *plain_result(name, case)[0].shape), case.y_cut, group, sequence)
    y.backward(upstream.reshape(y.shape))
    grads = {}
    for key, parameter in module.named_parameters():
        assert parameter.grad is not None
        grads[key] = parameter.grad, dim_of(shard_of(parameter)), bool(shard_of(parameter).partial_over)
    return Held(y.detach().view(upstream.shape), x.grad, grads)


def plain_result(name: str, case: Case) -> tuple[Tensor, Tensor | None, dict[str, Tensor]]:
    """Output, gradient of the input, and of the parameters, on one process in plain torch."""
    solo = Group("tp", (0,), 0)
    meta = case.build(
        init_std=1.0, group=solo, sequence=False, dtype=torch.float64, device=torch.device("meta")
    )
    parameters = {
        key: numbers(name + key, *shard_of(p).global_shape).requires_grad_()
        for key, p in meta.named_parameters()
    }
    x = inputs(name, case)
    if x.is_floating_point():
        x.requires_grad_()
    y = case.plain(x, parameters)
    y.backward(numbers(name + " dy", *y.shape))
    return y.detach(), x.grad, {key: p.grad for key, p in parameters.items() if p.grad is not None}


def assemble(pieces: list[Tensor], cut: int | str | None, sequence: bool) -> list[Tensor]:
    """The logical tensor; every rank's own, where each should have it whole."""
    if cut is None or (cut == "tokens" and not sequence):
        return pieces
    return [torch.cat(pieces, 0 if cut == "tokens" else int(cut))]


def differences(held: list[dict[str, Held]], sequence: bool) -> dict[str, float]:
    """The largest difference from plain torch, by case and tensor."""
    found: dict[str, float] = {}

    def compare(what: str, tensors: list[Tensor], right: Tensor) -> None:
        found[what] = max(float((tensor - right).abs().max()) for tensor in tensors)

    for name, case in CASES.items():
        ranks = [rank[name] for rank in held]
        y, x_grad, grads = plain_result(name, case)
        compare(f"{name}: y", assemble([r.y for r in ranks], case.y_cut, sequence), y)
        if x_grad is not None:
            compare(
                f"{name}: x",
                assemble([r.x_grad for r in ranks if r.x_grad is not None], case.x_cut, sequence),
                x_grad,
            )
        for key, right in grads.items():
            _, dim, partial_sum = ranks[0].grads[key]
            pieces = [r.grads[key][0] for r in ranks]
            compare(
                f"{name}: {key}",
                [torch.stack(pieces).sum(0)] if partial_sum else assemble(pieces, dim, sequence),
                right,
            )
    return found


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("world", [2, 4])
def test_layers_equal_plain_torch(run_ranks: Callable[..., Any], world: int, sequence: bool) -> None:
    """A forward or backward that forgets, repeats or misplaces a part of the work trains a
    different model than one device.
    """
    found = differences(run_ranks(world, run_layers, sequence), sequence)
    assert len(found) == 10 * 2 + 1 + 17  # outputs and input gradients (tokens have none), and all parameters
    assert max(found.values()) < TOLERANCE, found


# Planted faults: mistakes that people make, and the tensors in which each must show, with or without sequence
# parallelism.


def bias_on_every_rank(patch: pytest.MonkeyPatch) -> None:
    def forward(self: RowLinear, x: Tensor) -> Tensor:
        part = F.linear(x if self.activation is None else self.activation(x), self.weight, self.bias)
        return linear.leave_tensor_parallel(part, self.group, self.sequence)

    patch.setattr(RowLinear, "forward", forward)


def input_gradient_not_summed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(linear, "all_reduce_start", lambda x, group: linear.Done())


def gradient_of_own_tokens_only(patch: pytest.MonkeyPatch) -> None:
    """The weight's gradient from this rank's tokens, zero elsewhere, instead of from gathered ones."""

    def gather_nothing(x: Tensor, group: Group) -> tuple[Tensor, linear.Done]:
        full = x.new_zeros(group.size, *x.shape)
        full[group.rank] = x
        return full.flatten(0, 1), linear.Done()

    patch.setattr(linear, "all_gather_start", gather_nothing)


def rows_cut_by_rounding_down(patch: pytest.MonkeyPatch) -> None:
    """An embedding that takes floor(vocab / ranks) for the step of the first rows, where
    pieces are of ceil(vocab / ranks).
    """
    build = embedding.VocabParallelEmbedding.__init__

    def wrong(self: embedding.VocabParallelEmbedding, *sizes: int, group: Group, **options: Any) -> None:
        build(self, *sizes, group=group, **options)
        self.first_row = group.rank * (VOCAB // group.size)

    patch.setattr(embedding.VocabParallelEmbedding, "__init__", wrong)


FAULTS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], bool, set[str]]] = {
    "bias on every rank": (bias_on_every_rank, False, {"row: y", "row of gelu: y", "row of swiglu: y"}),
    "input gradient not summed": (input_gradient_not_summed, False, {"column: x", "column, gate and up: x"}),
    "gradient of own tokens only": (
        gradient_of_own_tokens_only,
        True,
        {"column: weight", "column, several dims: weight"},
    ),
    "rows cut by rounding down": (rows_cut_by_rounding_down, True, {"embedding: y", "embedding: weight"}),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_shows(run_ranks: Callable[..., Any], fault: str) -> None:
    """The comparison itself: were it blind to one of these, it would prove nothing."""
    _, sequence, shows = FAULTS[fault]
    found = differences(run_ranks(2, run_layers, sequence, fault), sequence)
    wrong = {what for what, difference in found.items() if difference > 1e-3}
    assert shows <= wrong
    assert wrong < found.keys(), "a fault in one layer must not spoil the others"


def losses() -> dict[str, tuple[Tensor, Tensor]]:
    """Full logits and targets of each case of the loss."""
    targets = torch.tensor([0, 12, 3, 4, 11, 12, 7, 6])
    some = torch.where(torch.arange(TOKENS) % 3 == 0, IGNORED, targets)
    extreme = numbers("extreme", TOKENS, VOCAB).sign() * 1e4
    return {
        "ordinary": (numbers("logits", TOKENS, VOCAB), targets),
        "some ignored": (numbers("logits", TOKENS, VOCAB), some),
        "all ignored": (numbers("logits", TOKENS, VOCAB), torch.full_like(targets, IGNORED)),
        "extreme": (extreme + numbers("logits", TOKENS, VOCAB), some),
        "one logit far above all others": (F.one_hot(targets, VOCAB).double() * 1e4, targets.flip(0)),
    }


def run_losses(fault: str = "") -> dict[str, tuple[Tensor, Tensor]]:
    """Loss of every token and this rank's gradient of the logits, and in bf16
    their dtypes' names and the loss.
    """
    group = join()
    first_row = group.rank * -(-VOCAB // group.size) + (fault == "first row off by one" and group.rank > 0)
    out = {}
    cases = losses() | {
        "bf16": tuple(t.bfloat16() if t.is_floating_point() else t for t in losses()["ordinary"])
    }
    for name, (logits, targets) in cases.items():
        part = logits.chunk(group.size, 1)[group.rank].clone().requires_grad_()
        loss = vocab_parallel_cross_entropy(part, targets, group, first_row)
        loss.backward(numbers("weights", TOKENS).to(loss.dtype))
        assert part.grad is not None
        out[name] = loss.detach(), part.grad
    return out


def loss_differences(ranks: list[dict[str, tuple[Tensor, Tensor]]]) -> dict[str, float]:
    """From torch's cross entropy over full logits: losses relative to their size, gradients."""
    found = {}
    for name, (logits, targets) in losses().items():
        logits.requires_grad_()
        right = F.cross_entropy(logits, targets, reduction="none", ignore_index=IGNORED)
        right.backward(numbers("weights", TOKENS))
        assert logits.grad is not None
        scale = right.detach().abs().clamp(min=1.0)
        loss = max(float(((rank[name][0] - right.detach()) / scale).abs().max()) for rank in ranks)
        grad = float((torch.cat([rank[name][1] for rank in ranks], 1) - logits.grad).abs().max())
        found[name] = max(loss, grad)
    return found


@pytest.mark.parametrize("world", [1, 2, 4])
def test_cross_entropy_equals_plain_torch(run_ranks: Callable[..., Any], world: int) -> None:
    """A loss that misses other ranks' rows, counts ignored targets, or overflows where torch's does not."""
    ranks = run_ranks(world, run_losses)
    found = loss_differences(ranks)
    assert max(found.values()) < TOLERANCE, found
    assert all(not rank["all ignored"][i].any() for rank in ranks for i in range(2))

    # bf16 logits: statistics in fp32, so the loss is that of the rounded logits up to fp32's rounding, not
    # bf16's.
    logits, targets = losses()["ordinary"]
    right = F.cross_entropy(logits.bfloat16().double(), targets, reduction="none")
    for rank in ranks:
        loss, grad = rank["bf16"]
        assert (loss.dtype, grad.dtype) == (torch.float32, torch.bfloat16)
        assert (loss - right).abs().max() < 1e-5


def test_planted_fault_in_the_loss_shows(run_ranks: Callable[..., Any]) -> None:
    """Targets at the wrong row of a rank's piece."""
    found = loss_differences(run_ranks(2, run_losses, "first row off by one"))
    assert min(found[name] for name in found if name != "all ignored") > 1e-3
