"""A mixture of experts on one process: against a plain one written here, token by
token, and what its settings refuse.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megacore.config import Config
from megacore.config.precision import ELEMENT_BYTES
from megacore.distributed.collectives import Done
from megacore.distributed.communicator import SOLO, Group
from megacore.errors import ConfigError
from megacore.expert_parallel.capacity import within_capacity
from megacore.expert_parallel.dispatch import sum_of
from megacore.expert_parallel.experts import grouped_linear
from megacore.expert_parallel.router import Router
from megacore.kernels.grouped_product import grouped_product
from megacore.model.batch import Microbatch
from megacore.model.expert_block import MixtureOfExperts
from megacore.model.stage import Stage
from megacore.tensor_parallel.gradient import MainGradient, WeightGradQueue, finish_in_turn
from megacore.tools.choices.flops import block_flops
from megacore.tools.monitoring.expert_load import ExpertLoad, Rows
from megacore.tools.planner.parameters import parameters, rank_parameters
from megacore.tools.planner.traffic import rank_traffic
from tests.build import model_of, run_of, topology_of
from tests.training import write_config

MODEL = {
    "num_layers": 1,
    "hidden_size": 16,
    "num_heads": 2,
    "bias": False,
    "activation": "swiglu",
    "num_experts": 8,
    "expert_ffn_size": 6,
    "init_std": 0.3,
}
VARIANTS = {
    "softmax": "",
    "three of eight, not normalised": "model.experts_per_token=3 model.router_normalised=false",
    "shared, plain activation": "model.shared_experts=2 model.activation=gelu",
    "deepseek": "model.router_scores=sigmoid model.router_scale=2.5 model.expert_groups=4 "
    "model.groups_per_token=2 "
    "model.router_bias_rate=0.1 model.shared_experts=1 model.router_balance=sequence",
    "capacity": "model.capacity_factor=0.5 model.router_normalised=true",
    "groups of softmax": "model.expert_groups=4 model.groups_per_token=2 model.router_balance=global "
    "model.router_z_loss=0.1",
}
Configure = Callable[..., Config]


@pytest.fixture
def configure(tmp_path: Path) -> Configure:
    """`configure(overrides, world=1)`: a small config in fp64, resolved."""
    path = write_config(tmp_path, "unused", model=MODEL, train={"precision": "fp64"})
    return lambda overrides="", world=1: run_of(path, *overrides.split(), world=world)


def mixture(config: Config) -> tuple[Stage, MixtureOfExperts]:
    """A model, and its one mixture, whose biases and counts are not those that they begin with."""
    stage = model_of(config)
    own = stage.blocks["0"].feed_forward  # type: ignore[union-attr, index]
    for buffer in (own.router.load, own.router.bias):
        if buffer is not None:
            buffer.value.copy_(torch.linspace(0.1, -0.1, len(buffer.value)).double())
    return stage, own


def ffn(config: Config, x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """One expert."""
    if config.model.gated:
        return down @ (F.silu(up[0] @ x) * (up[1] @ x))
    return down @ F.gelu(up @ x, approximate="tanh")


def plainly(config: Config, own: MixtureOfExperts, x: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Token by token: the result, and the means of the losses."""
    model, experts = config.model, own.experts
    every, chosen_by, shares, rows = [], [], [], []
    z = x.new_zeros(())
    for token in x:
        logits = own.router.weight @ token
        scores = logits.softmax(0) if model.router_scores == "softmax" else logits.sigmoid()
        ranked = scores.detach() + (own.router.bias.value if own.router.bias is not None else 0)
        size = len(ranked) // model.expert_groups
        groups = [
            sorted(range(g * size, (g + 1) * size), key=lambda e: -float(ranked[e]))
            for g in range(model.expert_groups)
        ]
        best = [float(ranked[own[: 1 if model.router_scores == "softmax" else 2]].sum()) for own in groups]
        kept = sorted(range(len(groups)), key=lambda g: -best[g])[: model.groups_per_token]
        chosen = sorted((e for g in kept for e in groups[g]), key=lambda e: -float(ranked[e]))[
            : model.experts_per_token
        ]
        weights = scores[chosen]
        weights = model.router_scale * (weights / weights.sum() if model.router_normalised else weights)
        rows += [(e, -float(w.detach()), len(every), w) for w, e in zip(weights, chosen, strict=True)]
        shared = own.shared
        every.append(
            torch.zeros_like(token)
            if shared is None
            else ffn(config, token, shared.up.weight, shared.down.weight)
        )
        chosen_by.append(F.one_hot(torch.tensor(chosen), 8).sum(0).double())
        shares.append(scores / scores.sum())
        z = z + torch.log(logits.exp().sum()) ** 2 / len(x)
    rows.sort(key=lambda row: row[:3])
    for number, (e, _, at, w) in enumerate(rows):
        first = next(i for i, row in enumerate(rows) if row[0] == e)
        if model.capacity_factor is None or number - first < math.ceil(model.capacity_factor * len(rows) / 8):
            every[at] = every[at] + w * ffn(config, x[at], experts.up[e], experts.down[e])
    losses = []
    sequences = zip(
        torch.stack(chosen_by).split(config.train.seq_len),
        torch.stack(shares).split(config.train.seq_len),
        strict=True,
    )
    if model.router_balance == "sequence":
        losses.append(
            torch.stack(
                [8 / model.experts_per_token * (f.mean(0) * p.mean(0)).sum() for f, p in sequences]
            ).mean()
        )
    elif model.router_balance == "global":
        losses.append((own.router.load.value * torch.stack(shares).mean(0)).sum())
    return torch.stack(every), losses + ([z] if model.router_z_loss else [])


def other_than_plain(config: Config) -> str:
    """What of a mixture, its losses and their gradients is not that of the plain formula; empty if all is."""
    stage, own = mixture(config)
    tokens = torch.zeros(config.train.micro_batch_size, config.train.seq_len, dtype=torch.int64)
    x = torch.randn(
        tokens.numel(),
        16,
        dtype=torch.float64,
        generator=torch.Generator().manual_seed(3),
        requires_grad=True,
    )
    y, *sums = own(x, stage.context(Microbatch(tokens, tokens)))
    right, losses = plainly(config, own, x)
    named = dict(own.named_parameters())
    toward = torch.randn(y.shape, dtype=y.dtype, generator=torch.Generator().manual_seed(4))
    found = [(y * toward).sum() + sum(s / len(x) for s in sums), (right * toward).sum() + sum(losses)]
    assert len(sums) == len(losses)
    of_losses = {
        f"the loss number {i}": (s / len(x), loss)
        for i, (s, loss) in enumerate(zip(sums, losses, strict=True), 1)
    }
    gradients = zip(*(torch.autograd.grad(one, [x, *named.values()]) for one in found), strict=True)
    of_gradients = {
        f"the gradient of {name}": pair for name, pair in zip(["x", *named], gradients, strict=True)
    }
    pairs = {"the result": (y, right)} | of_losses | of_gradients
    within = {
        name: torch.allclose(*pair, rtol=0, atol=1e-10 if "gradient" in name else 1e-12)
        for name, pair in pairs.items()
    }
    return next((name for name, close in within.items() if not close), "")


@pytest.mark.parametrize("variant", VARIANTS)
def test_it_is_the_plain_formula(configure: Configure, variant: str) -> None:
    """A row under another token's weight, a gate without its gradient, shares of
    another routing than the dispatch's.
    """
    assert other_than_plain(configure(VARIANTS[variant])) == ""


def test_small_parts_of_a_sum_are_not_lost() -> None:
    """Of more than two ranks that have parts of an expert, each sum in bf16 would be rounded."""
    total = sum_of([torch.tensor([256.0, 1.0, 1.0][i], dtype=torch.bfloat16) for i in range(3)])
    assert total.dtype == torch.bfloat16 and total == 258


def test_a_token_whose_sigmoids_are_all_zero_is_a_number(configure: Configure) -> None:
    """Their sum divides them."""
    router = mixture(configure("model.router_scores=sigmoid"))[1].router
    weights = router.weights(torch.zeros(1, 8, dtype=torch.float64), torch.tensor([[0, 1]]))
    assert weights.tolist() == [[0, 0]]


def test_of_equal_experts_the_first_is_chosen(configure: Configure) -> None:
    """Else another layout, whose kernels see other shapes, would choose otherwise."""
    router = mixture(configure())[1].router
    scores = torch.tensor([[0.1, 0.3, 0.1, 0.3, 0.3, 0.0, 0.0, 0.3], [0.2] * 8], dtype=torch.float64)
    assert router.choose(router.ranked(scores)).tolist() == [[1, 3], [0, 1]]


def test_rows_of_least_weight_are_dropped_first() -> None:
    """And of equal ones, up to rounding, the last of the microbatch, whatever order its
    tokens stand in here.
    """
    weights = torch.tensor([[0.9, 0.1], [0.3, 0.7], [0.3 + 1e-7, 0.6], [0.3, 0.5]])
    chosen = torch.tensor([[0, 1], [0, 1], [0, 1], [0, 2]])
    fits = [[True, False], [True, True], [False, True], [False, True]]
    for places in ([0, 1, 2, 3], [3, 0, 1, 2]):
        at = torch.tensor(places)
        found = within_capacity(weights[at], chosen[at], 3, 0.7, at, SOLO)  # 0.7 · 8 / 3 rows, rounded up
        assert torch.equal(found, torch.tensor(fits)[at])
    least = within_capacity(weights, chosen, 3, 1e-6, torch.arange(4), SOLO)
    assert least.tolist() == [[True, False], [False, True], [False, False], [False, True]], (
        "an expert takes one row at least"
    )


def with_biases(experts: Any, given: tuple[Tensor, Tensor], y: Tensor) -> Tensor:
    """What experts with biases may make of rows that belong to none of them."""
    behind = torch.arange(len(y)) >= given[1][-1]
    return y.masked_fill(behind[:, None], 5.0)


def test_what_is_not_dropped_has_the_same_bits(configure: Configure) -> None:
    """With room for all rows; while a text is written or validated; and with room for few, of tokens that
    lose none of their experts. Those that lose all have zero, and a pass that is run again drops the same.
    """
    tokens = torch.zeros(2, 16, dtype=torch.int64)
    x = torch.randn(32, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    found = dict[str, Tensor]()
    for capacity in ("null", "4", "1e-6"):
        stage, own = mixture(configure(f"model.capacity_factor={capacity} train.recompute=full"))
        context = stage.context(Microbatch(tokens, tokens, key=5))
        own.experts.register_forward_hook(with_biases)
        found[capacity] = own(x, context)[0].detach()
        ((route,),) = own.kept.values()
        assert torch.equal(own(x, context)[0], found[capacity])
        if capacity == "1e-6":
            dropped, rows = own.router.take_drops()
            assert (int(dropped), rows) == (64 - len(route.chosen.unique()), 64)
            assert own.router.load.take().sum() == 64, "balance is of what was chosen"
        assert torch.equal(own.eval()(x, context)[0], found["null"])
    assert torch.equal(found["4"], found["null"])
    whole = (found["1e-6"] == found["null"]).all(1).sum()
    none = (found["1e-6"] == 0).all(1).sum()
    assert none >= 32 - 8 and whole <= 8


class Told:
    """Two ranks that send each other the same: what begins and what is waited
    for, by number, and what is computed.
    """

    key = "told"

    def __init__(self) -> None:
        self.told, self.begun = list[str](), 0

    def start_all_to_all(self, x: Tensor, out: Tensor) -> Done:
        out.copy_(x)
        return Done()

    def start_exchange(
        self, x: Tensor, out: Tensor, sent: Sequence[int], received: Sequence[int]
    ) -> SimpleNamespace:
        out.copy_(x)
        self.begun += 1
        self.told.append(f"begin {self.begun}")
        return SimpleNamespace(wait=partial(self.told.append, f"wait {self.begun}"))

    def computes(self, name: str) -> None:
        self.told += [] if self.told[-1:] == [name] else [name]


ORDER = {
    "false": (
        "begin 1, shared, wait 1, experts, begin 2, wait 2",
        "begin 3, wait 3, experts, begin 4, shared, wait 4",
    ),
    "true": (
        "begin 1, begin 2, shared, wait 1, experts, begin 3, wait 2, experts, begin 4, wait 3, wait 4",
        "begin 5, begin 6, wait 5, experts, begin 7, wait 6, experts, begin 8, shared, wait 7, wait 8",
    ),
}


@pytest.mark.parametrize("halves", ORDER)
def test_rows_travel_while_others_are_computed(
    configure: Configure, monkeypatch: pytest.MonkeyPatch, halves: str
) -> None:
    """An exchange that is waited for at once hides nothing, forward or backward."""
    stage, own = mixture(configure("model.shared_experts=1"))
    told, own.halves = Told(), halves == "true"
    own.group, own.parts = Group("both", (0, 1), 0, told), 2  # type: ignore[arg-type]

    def product(*args: Any, **options: Any) -> Tensor:
        told.computes("experts")
        return grouped_product(*args, **options)

    monkeypatch.setattr("megacore.expert_parallel.experts.grouped_product", product)
    assert own.shared is not None
    own.shared.register_forward_hook(lambda *_: told.computes("shared"))
    own.shared.up.weight.register_hook(lambda _: told.computes("shared"))
    tokens = torch.zeros(2, 16, dtype=torch.int64)
    x = torch.randn(32, 16, dtype=torch.float64, requires_grad=True)
    y = own(x, stage.context(Microbatch(tokens, tokens)))[0]
    forward, told.told = told.told, []
    y.sum().backward()
    assert (", ".join(forward), ", ".join(told.told)) == ORDER[halves]


def test_counts_and_the_bias_that_follows(configure: Configure) -> None:
    """It grows where an expert has less than the mean; a recomputed pass counts once,
    and a validation never: its tokens are others, and so are the keys of its microbatches.
    """
    config = configure("model.router_bias_rate=0.25 train.recompute=full")
    stage, own = mixture(config)
    context = stage.context(Microbatch(torch.zeros(2, 16, dtype=torch.int64), key=5))
    x = torch.randn(32, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    own(x, context)
    assert list(own.kept) == [5], "the backward runs the layer again"
    own(-x, context)  # and replays the choice, whatever its scores would be now
    assert not own.kept
    validation = stage.context(Microbatch(torch.ones(2, 16, dtype=torch.int64), key=6))
    own.eval()(x.flip(1), validation)
    assert not own.kept, "there is no backward that would take them"
    counts = torch.zeros(8, dtype=torch.float64)
    for expert in own.router.choose(own.router.ranked(own.router.score(x).scores)).flatten():
        counts[expert] += 1
    before, bias = own.router.bias.value.clone(), own.router.bias
    noted = bias.take()
    assert torch.equal(noted, counts) and counts.sum() == 64
    assert torch.equal(bias.rule(before, noted), before + 0.25 * torch.sign(8 - counts))
    assert torch.allclose(own.router.load.rule(before, own.router.load.take()), counts / 8)


@pytest.mark.parametrize("parts", [1, 8])
def test_of_a_routers_gradient_in_bf16_each_part_is_rounded_once(configure: Configure, parts: int) -> None:
    """Each rank and microbatch has a part p: an error of 2^-8 |p|, and in fp32 of n products n
    2^-24 of their magnitudes. Scores or their gradients in bf16 would err by 2^-8 of these
    magnitudes, of which p is a small part.
    """
    _, own = mixture(configure("train.precision=bf16"))
    generator, weight = torch.Generator().manual_seed(0), own.router.weight
    x, toward = torch.randn(64, 16, generator=generator).bfloat16(), torch.randn(64, 8, generator=generator)
    main, exact, bound = (
        MainGradient(torch.full(weight.shape, torch.nan)),
        torch.zeros(8, 16).double(),
        torch.zeros(8, 16).double(),
    )
    for part in range(parts):
        d, rows = toward[part::parts], x[part::parts]
        (own.router.score(rows).logits * d).sum().backward()
        main.take(weight)
        p = d.double().t() @ rows.double()
        exact += p
        bound += 2**-8 * p.abs() + 64 * 2**-24 * (d.double().abs().t() @ rows.double().abs())
    assert ((main.total - exact).abs() <= bound).all()


def test_an_expert_without_rows_has_a_gradient_of_zero() -> None:
    """What stands in memory that nobody has written would be one; so would the step
    before's sum, which is written over.
    """
    ends = torch.tensor([0, 3, 3, 5])  # the first and the third have none
    x, weight = torch.randn(5, 4), torch.nn.Parameter(torch.randn(4, 3, 4))
    main = MainGradient(torch.full((4, 3, 4), torch.nan), WeightGradQueue())
    weight.main_gradient = main  # type: ignore[attr-defined]
    with main.deferral.collect() as parts:
        y = grouped_linear(x.requires_grad_(), weight, (4, 3, 4), ends)
        y.sum().backward()
    assert len(parts) == 1 and main.empty, "a schedule may leave it for later"
    assert len(list(finish_in_turn(parts))) == 1
    right = torch.stack([x[a:b].sum(0).expand(3, 4) for a, b in ((0, 0), (0, 3), (3, 3), (3, 5))])
    assert torch.allclose(main.total, right) and torch.allclose(y[:3], x[:3] @ weight[1].t(), atol=1e-6)


def test_a_frozen_weight_costs_no_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is as long as each of the two that its layer needs, and its result would be thrown away."""
    monkeypatch.setattr("megacore.expert_parallel.experts.grouped_outer", None)
    x, weight = torch.randn(5, 4, requires_grad=True), torch.randn(2, 3, 4)
    grouped_linear(x, weight, (2, 3, 4), torch.tensor([2, 5])).sum().backward()
    assert x.grad is not None and torch.allclose(x.grad[4], weight[1].sum(0))


def test_a_pass_without_gradients_keeps_no_route(configure: Configure) -> None:
    """Nobody would run it again and take the route: the next microbatch of its key
    would go the ways of other tokens.
    """
    config = configure("train.recompute=full")
    model, shape = model_of(config), (config.train.micro_batch_size, config.train.seq_len)
    tokens = torch.zeros(shape, dtype=torch.int64)
    with torch.no_grad():
        model({}, Microbatch(tokens, tokens, 0))
    assert not any(m.kept for m in model.modules() if isinstance(m, MixtureOfExperts))


def test_a_frozen_mixture_keeps_no_route(configure: Configure) -> None:
    """No backward runs it again: what it keeps of every microbatch would never be freed."""
    config = configure("train.recompute=full")
    model, shape = model_of(config), (config.train.micro_batch_size, config.train.seq_len)
    tokens = torch.zeros(shape, dtype=torch.int64)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith("norm") or "head" in name)
    assert any(p.requires_grad for p in model.parameters())
    _, losses = model({}, Microbatch(tokens, tokens, 0))
    sum(losses.values(), torch.zeros(())).backward()
    assert not any(m.kept for m in model.modules() if isinstance(m, MixtureOfExperts))


REFUSED = [
    ("model.num_experts=null model.experts_per_token=3", 1, r"model.experts_per_token: there are no experts"),
    (
        "model.num_experts=null model.expert_ffn_size=null parallel.expert=2",
        2,
        r"parallel.expert: there are no experts",
    ),
    ("model.experts_per_token=9", 1, "model.experts_per_token: a token cannot go to 9 of 8 experts"),
    ("model.first_dense=1", 1, "model.first_dense: none of 1 blocks has experts"),
    ("model.expert_groups=3", 1, "model.num_experts: 8 is not a multiple of model.expert_groups 3"),
    (
        "model.expert_groups=8 model.groups_per_token=1",
        1,
        "model.groups_per_token: 1 of 8 groups have 1 experts",
    ),
    (
        "model.expert_groups=2 model.groups_per_token=4",
        1,
        "model.groups_per_token: a token cannot choose 4 of 2 groups",
    ),
    (
        "model.norm_place=both",
        1,
        "model.norm_place: both puts norms behind the branches, where blocks with experts have none",
    ),
    ("model.norm_place=post", 1, "model.norm_place: post puts norms behind"),
    ("model.branches=parallel", 1, "model.branches: parallel branches read the same"),
    ("engine.kind=deepspeed", 1, "engine.kind: DeepSpeed sums"),
    (
        "parallel.expert=3 parallel.data=3 train.global_batch_size=12",
        3,
        "model.num_experts: 8 is not a multiple of parallel.expert 3",
    ),
    ("model.balance_coefficient=0.1", 1, "model.balance_coefficient: router_balance is none"),
    (
        "model.num_experts=null model.expert_ffn_size=null parallel.expert_halves=true",
        1,
        "parallel.expert_halves: there are no experts",
    ),
    (
        "parallel.expert=4",
        2,
        "parallel.expert: expert 4 × expert_tensor 1 do not divide the 2 ranks of data × context × tensor",
    ),
    (
        "parallel.expert_tensor=4 parallel.data=4",
        4,
        "model.expert_ffn_size: 6 is not a multiple of parallel.expert_tensor 4",
    ),
    (
        "model.shared_experts=1 model.expert_ffn_size=5 parallel.tensor=2 parallel.expert_tensor=1",
        2,
        "model.shared_experts: 5 features of",
    ),
    (
        "model.shared_experts=10000000000000",
        1,
        "model.shared_experts: with model.hidden_size 16 makes a tensor",
    ),
    (
        "model.num_experts=1048576 model.expert_ffn_size=268435456",
        1,
        "model.num_experts: with model.hidden_size 16 makes a tensor",
    ),
]


@pytest.mark.parametrize(("overrides", "world", "said"), REFUSED)
def test_what_does_not_fit_is_refused(configure: Configure, overrides: str, world: int, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        configure(overrides, world)


def test_a_plan_counts_what_a_token_goes_through(configure: Configure) -> None:
    """An MFU of all experts would be a multiple of the true one."""
    config = configure(
        "model.num_layers=4 model.first_dense=1 model.ffn_size=48 model.shared_experts=1 parallel.expert=2", 2
    )
    own, dense = (2 * 16 * (3 * 16) + 2 * 16 * 16 + 4 * 16 * 16), 3 * 2 * 16 * 48
    routed = 3 * 2 * 16 * 6 * (2 + 1) + 2 * 16 * 8
    assert block_flops(config, causal=False) == own + (dense + 3 * routed) / 4
    built = sum(p.numel() for p in model_of(config, "meta").parameters())
    assert parameters(config) == built
    experts = 3 * 8 * 3 * 6 * 16  # of three blocks, of which two ranks hold halves
    assert rank_parameters(config) == [built - experts // 2]


def test_the_load_of_every_expert_is_logged(configure: Configure) -> None:
    """Of the block that it is of, and of the rank that has most."""
    config = configure("model.num_layers=2 model.first_dense=1 parallel.expert=2 model.capacity_factor=1", 2)
    stage, mesh = model_of(config), SimpleNamespace(device="cpu", pp=SOLO, world=SOLO)
    stage.blocks["1"].feed_forward.router.note_drops(torch.tensor([[True, False], [True, True]]))  # type: ignore[union-attr, index]
    stage.blocks["1"].feed_forward.router.load.value.copy_(torch.tensor([0.0, 4.0, 0, 0, 1, 1, 1, 1]))  # type: ignore[union-attr, index]
    expert_load = ExpertLoad()
    expert_load.on_start(config, mesh)  # type: ignore[arg-type]
    found = expert_load.metrics({"step": 1}, [stage])
    assert (
        found["expert_load_max/blocks.1"],
        found["expert_load_min/blocks.1"],
        found["expert_rank_load/blocks.1"],
    ) == (4, 0, 1)
    assert found["expert_load/blocks.1"] == [0, 4, 0, 0, 1, 1, 1, 1] and found[
        "expert_entropy/blocks.1"
    ] == pytest.approx(2 / 3)
    assert (
        found["expert_drops/blocks.1"] == 0.25
        and expert_load.metrics({"step": 2}, [stage])["expert_drops/blocks.1"] == 0
    )
    stage.blocks["1"].feed_forward.router.load.value.copy_(torch.tensor([0.0, 2.0, 0, 0, 1, 1, 2, 2]))  # type: ignore[union-attr, index]
    later = expert_load.metrics({"step": 2}, [stage])
    # the second of the two holds the last four
    assert (later["expert_rank_load/blocks.1"], later["expert_rank/blocks.1"]) == (1.5, 1)


def test_the_rows_of_a_rank_are_those_of_its_experts_on_its_stage(configure: Configure) -> None:
    """A rank of another stage, or of other experts, would be called slow by what the router
    sends to this one; with a capacity no more travels than it lets through, and what a router
    did at another step says nothing.
    """
    config = configure("model.num_layers=3 model.first_dense=1 parallel.expert=2 model.capacity_factor=1", 2)
    stage, mesh = (
        model_of(config),
        SimpleNamespace(device="cpu", pp=SOLO, world=SOLO, group=lambda _: Group("ep", (0, 1), 1)),
    )
    for block, loads in ("1", [0.0, 4.0, 0, 0, 1, 1, 1, 1]), ("2", [0.0, 0.0, 0, 0, 2, 2, 2, 2]):
        stage.blocks[block].feed_forward.router.load.value.copy_(torch.tensor(loads))  # type: ignore[union-attr, index]
    expert_load = ExpertLoad()
    expert_load.on_start(config, mesh)  # type: ignore[arg-type]
    expert_load.on_built(SimpleNamespace(stages=[stage]))  # type: ignore[arg-type]
    expert_load.held += [[0, 0, 1], [1, 0, 0]]  # as two other ranks say
    expert_load.metrics({"step": 3}, [stage])
    assert expert_load.rows_of(0, 3) == Rows({1: 1.6, 2: 2.0}, 1.0) and expert_load.rows_of(1, 3) == Rows(
        {2: 0.0}, 1.0
    )
    assert expert_load.rows_of(2, 3) is None and expert_load.rows_of(0, 4) is None


def test_a_router_outside_of_the_blocks_with_experts_is_passed_over(configure: Configure) -> None:
    """A model of one's own may have one anywhere: the run would end before its first step, or wait
    for a pipeline rank without one.
    """
    config = configure("model.num_layers=3 model.first_dense=2", 1)
    stage, mesh = (
        model_of(config),
        SimpleNamespace(device="cpu", pp=SOLO, world=SOLO, group=lambda _: SOLO),
    )
    router = Router(config, topology_of(config), torch.float32, torch.device("cpu"))
    stage.blocks["1"].add_module("router", router)  # type: ignore[union-attr, index]
    expert_load = ExpertLoad()
    expert_load.on_start(config, mesh)  # type: ignore[arg-type]
    expert_load.on_built(SimpleNamespace(stages=[stage]))  # type: ignore[arg-type]
    assert {name for name in expert_load.metrics({"step": 1}, [stage]) if "_max/" in name} == {
        "expert_load_max/blocks.2"
    }


def test_rows_travel_over_the_ranks_that_hold_experts(configure: Configure) -> None:
    """Each of two ranks keeps half of its rows; gradients of experts go over the ranks that hold
    the same ones, others' over all.
    """
    config = configure("parallel.expert=2 train.global_batch_size=16", 4)
    (transfers,) = rank_traffic(config)
    rows, own, others = (
        sum(t.sent_bytes for t in transfers if t.group == name) for name in ("ep", "edp", "dp")
    )
    tokens, each = config.rank_tokens * config.num_microbatches, ELEMENT_BYTES[config.train.precision]
    # of rows, 8 bytes for each expert: half of them to the other rank
    counts = 2 * 8 * config.num_microbatches
    assert rows == 4 * tokens * 2 * 16 * each / 2 + counts * 2
    experts = 8 * 3 * 6 * 16 // 2
    assert own == pytest.approx(2 * experts * each / 2, rel=0.05) and others > own
