"""Attention over context ranks and documents equals the formula on whole sequences, with equal work.

`tests/equal.py` compares what context ranks train with one process.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.documents import pairs
from megacore.context_parallel import attention
from megacore.context_parallel import ring_blocks as blocks
from megacore.context_parallel.attention import Sequences
from megacore.context_parallel.sharding import (
    EVEN,
    Documents,
    Run,
    Runs,
    parts,
    positions_of,
    runs_by_rank,
    runs_of,
)
from megacore.distributed.communicator import SOLO, Group
from megacore.tools.launchers import place_from_environment
from tests.attention_checks import HEADS, SCALE, inputs, masked, standing_in
from tests.build import mesh_of, run_of
from tests.training import write_config


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_ranks_have_equal_work_within_documents(ranks: int) -> None:
    """Documents of all lengths: with early and late pieces alone, one rank has a third more than the mean,
    and all wait for it. A twentieth is what counts as even.
    """
    assert EVEN <= 1.05
    seq, generator = 8192, np.random.default_rng(ranks)
    for _ in range(5):
        ends = np.cumsum(generator.lognormal(6.0, 1.4, 200).astype(int) + 2)
        documents = ((0, *ends[ends < seq].tolist(), seq),)
        everything = (Run(0, seq, 0),)

        def work(runs: Runs, documents: Documents = documents, everything: Runs = everything) -> int:
            return pairs(parts(runs, everything, documents))

        found, plain = runs_by_rank(seq, ranks, documents), runs_by_rank(seq, ranks)
        assert sorted(np.concatenate([positions_of(runs) for runs in found]).tolist()) == list(range(seq))
        assert {len(positions_of(runs)) for runs in found} == {seq // ranks}
        loads = [work(runs) for runs in found]
        assert sum(loads) == work(everything) and max(loads) * ranks / sum(loads) < EVEN
        assert found == plain or max(map(work, plain)) * ranks / sum(loads) > EVEN
    assert runs_by_rank(seq, ranks, ((0, seq),)) == plain, "one document is divided as none is"


HEAD, BATCH = 8, 2


def largest_error(method: str, seq: int, documents: Documents | None, group: Group) -> float:
    """The largest difference of this rank's output and gradients from those of
    the formula on whole sequences.
    """
    whole = [x.requires_grad_() for x in inputs(BATCH, seq, HEAD)[:3]]
    grad = inputs(BATCH, seq, HEAD)[3]
    right = masked(*whole, documents)
    right.backward(grad)
    own = torch.cat(
        [torch.arange(run.start, run.stop) for run in runs_of(seq, group.size, group.rank, documents)]
    )
    here = [x.detach()[:, :, own].clone().requires_grad_() for x in whole]
    out = attention.attend(*here, Sequences(seq, group, method, documents), SCALE)
    out.backward(grad[:, :, own])
    pairs = [(out, right), *((a.grad, b.grad) for a, b in zip(here, whole, strict=True))]
    return max(float((a - b[:, :, own]).detach().abs().max()) for a, b in pairs)  # type: ignore[operator, index]


def errors(config_path: str, seq: int) -> dict[str, float]:
    """`largest_error` of every method, without documents and with them; also as a GPU's kernel
    would compute them in few calls.
    """
    place = place_from_environment()
    config = run_of(config_path, f"parallel.context={place.world_size}", world=place.world_size)
    mesh = mesh_of(config)
    # of one token, of most of a piece, across pieces, over all ranks
    rows = ((0, 1, 3, seq), (0, seq - 1, seq))
    methods = [m for m in ("gather", "ring", "ulysses") if m != "ulysses" or HEADS % place.world_size == 0]
    found = {f"{m} {d is not None}": largest_error(m, seq, d, mesh.cp) for m in methods for d in (None, rows)}
    with standing_in():
        found |= {f"{m} packed": largest_error(m, seq, rows, mesh.cp) for m in methods}
    mesh.close()
    return found


@pytest.mark.parametrize(("ranks", "seq"), [(2, 4), (2, 20), (3, 6), (4, 8), (4, 24)])
def test_attention_equals_the_formula(run_ranks: Any, tmp_path: Path, ranks: int, seq: int) -> None:
    """Also where a piece is one token, so that some parts have no keys. fp64 rounds sums of
    some dozen terms near 1 to 1e-15.
    """
    config = write_config(
        tmp_path, "unused", train={"seq_len": seq, "global_batch_size": 2, "micro_batch_size": 2}
    )
    for found in run_ranks(ranks, errors, config, seq):
        assert max(found.values()) < 1e-13, found


def low_precision_inputs(dtype: torch.dtype) -> dict[str, list[Tensor]]:
    """q, k, v and the gradient of the output by name; in `dtype`, values that
    strain its rounding and its range.
    """
    generator = torch.Generator().manual_seed(1)
    q, k, v, grad = (torch.randn(BATCH, HEADS, 64, 32, generator=generator) for _ in range(4))
    along = 3 * torch.randn(BATCH, HEADS, 1, 32, generator=generator)
    some = grad * (torch.arange(64) % 3 > 0)[:, None]
    found = {
        "any": [q, k, v, grad],
        "values and gradients alike": [q, k, v + along, grad + along],  # their products nearly cancel
        "equal gradients": [q, k, v + 3, grad[..., :1].expand_as(grad)],
        "some gradients zero": [q, k, v + along, some],
        "gradients of one element": [q, k, v + along, grad * (torch.arange(32) == 5)],
    }
    if dtype == torch.float16:
        found["gradients near the largest number"] = [q, k, v + 3, 6000 * (grad + 1)]
    else:
        found["tiny gradients"] = [q, k, v + along, 1e-25 * grad]
    return {name: [x.to(dtype) for x in tensors] for name, tensors in found.items()}


def relative_errors(config_path: str, dtype: torch.dtype) -> dict[str, dict[str, list[float]]]:
    """By input and method, the error of the gradients of q, k and v on this rank, beside fp64's."""
    mesh = mesh_of(run_of(config_path, "parallel.context=2", world=2))
    own = torch.cat([torch.arange(run.start, run.stop) for run in runs_of(64, 2, mesh.cp.rank)])
    found: dict[str, dict[str, list[float]]] = {}
    for name, tensors in low_precision_inputs(dtype).items():
        right = [x.double().requires_grad_() for x in tensors[:3]]
        torch.nn.functional.scaled_dot_product_attention(*right, is_causal=True, scale=0.3).backward(
            tensors[3].double()
        )
        for method in ("gather", "ring", "ulysses"):
            here = [x[:, :, own].clone().requires_grad_() for x in tensors[:3]]
            attention.attend(*here, Sequences(64, mesh.cp, method), 0.3).backward(tensors[3][:, :, own])
            pairs = [(x.grad.double(), y.grad[:, :, own]) for x, y in zip(here, right, strict=True)]  # type: ignore[union-attr, index]
            found.setdefault(name, {})[method] = [float((x - y).norm() / y.norm()) for x, y in pairs]
    mesh.close()
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_every_method_rounds_alike(run_ranks: Any, tmp_path: Path, dtype: torch.dtype) -> None:
    """A sum in 16 bits, or an output's product with its gradient in 16 bits, would err
    several times as much, or overflow.

    Where products cancel, an error may be many times the dtype's rounding. So methods are compared with each
    other; they may differ by a factor of two, because they add in different orders.
    """
    config = write_config(
        tmp_path, "unused", train={"seq_len": 64, "global_batch_size": 2, "micro_batch_size": 2}
    )
    for found in run_ranks(2, relative_errors, config, dtype):
        for name, by_method in found.items():
            for at, errors in enumerate(zip(*by_method.values(), strict=True)):
                assert max(errors) <= 2 * min(errors), (name, "qkv"[at], by_method)


def test_documents_on_one_rank_equal_the_formula() -> None:
    assert largest_error("gather", 16, ((0, 1, 2, 9, 16), (0, 16)), SOLO) < 1e-13
    assert largest_error("gather", 16, None, SOLO) < 1e-13


def test_plain_products_equal_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """What devices without a kernel that gives the log-sum-exp compute."""
    q, k, v, grad = inputs(BATCH, 12, HEAD)
    for causal in (False, True):
        ours = blocks.forward(q, k, v, causal, 0.3)
        back = blocks.backward(grad, q, k, v, *ours, causal, 0.3)
        with monkeypatch.context() as patched:
            patched.setattr(blocks, "has_kernel", lambda q: False)
            plain = blocks.forward(q, k, v, causal, 0.3)
            plain_back = blocks.backward(grad, q, k, v, *ours, causal, 0.3)
        for a, b in zip((*ours, *back), (*plain, *plain_back), strict=True):
            assert a.shape == b.shape and float((a - b).abs().max()) < 1e-13
