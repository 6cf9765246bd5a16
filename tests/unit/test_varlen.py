"""All documents of a sample in one call: how parts are packed for a GPU's kernel, by an
exact stand-in for it on the CPU.
"""

from itertools import pairwise
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.documents import AttentionOperations
from megacore.context_parallel import attention
from megacore.context_parallel import ring_blocks as blocks
from megacore.context_parallel import varlen as packed
from megacore.context_parallel.attention import Sequences
from megacore.context_parallel.sharding import AttentionPart, Documents, Run, parts, positions_of, runs_of
from megacore.context_parallel.varlen import Pack, grouped
from megacore.distributed.communicator import Group
from tests import attention_checks as checks

ROWS: Documents = ((0, 1, 2, 9, 10, 16), (0, 16), (0, 5, 16))


class OperatorNames(TorchDispatchMode):
    """Notes what is called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def lengths(seed: int, seq: int, rows: int = 2) -> Documents:
    """Documents of many lengths, from one token to most of a sequence."""
    generator = np.random.default_rng(seed)
    ends = [np.cumsum(generator.lognormal(2.0, 1.4, seq).astype(int) + 1) for _ in range(rows)]
    return tuple((0, *own[own < seq].tolist(), seq) for own in ends)


def test_documents_of_a_microbatch_are_one_call_and_equal_the_formula() -> None:
    """Forward and backward in fp64: a wrong end of one of them would let tokens attend
    to another document.
    """
    calls: list[str] = []

    def counted(name: str) -> Any:
        right = getattr(checks, name)
        return lambda *args: [calls.append(name), right(*args)][1]

    with (
        checks.standing_in(),
        mock.patch.multiple(packed, kernel=counted("kernel"), kernel_backward=counted("kernel_backward")),
    ):
        for documents in (ROWS, lengths(1, 256)):
            calls.clear()
            assert checks.worst(checks.on_one_rank(documents, 8, "cpu", torch.float64)) < 1e-13
            assert calls == ["kernel", "kernel_backward"]


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("seed", range(3))
def test_documents_that_ranks_divide_equal_the_formula(ranks: int, seed: int) -> None:
    """Keys of a call then lie apart, and documents that reach over a piece's edge are in
    several parts, which are merged.
    """
    with checks.standing_in():
        for documents in (lengths(seed, 256), ((0, 256), (0, 30, 256))):
            assert checks.worst(checks.on_context_ranks(documents, ranks, 8, "cpu", torch.float64)) < 1e-13


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_calls_are_few_and_hold_every_part_once(ranks: int, seed: int) -> None:
    """One for whole sequences, and one more for documents that reach over a piece's edge,
    or two where these share tokens.
    """
    documents, everything = lengths(seed, 4096, rows=1), (Run(0, 4096, 0),)
    for rank in range(ranks):
        runs = runs_of(4096, ranks, rank, documents) if ranks > 1 else everything
        found = parts(runs, everything, documents)
        groups = grouped(found)
        assert sorted(map(str, found)) == sorted(str(part) for group in groups for part in group)
        assert len(groups) <= (3 if ranks > 1 else 1) < len(found) / 10
        for group in groups:
            assert len({part.causal for part in group}) == 1
            for slices in ([part.queries for part in group], [part.keys for part in group]):
                assert all(a.stop <= b.start for a, b in pairwise(slices)), (
                    "a token twice would lose one of its sums"
                )


def test_a_wrong_packing_is_noticed() -> None:
    """The planted faults: keys that are taken in a row from the first one on, and
    documents that end a token late.
    """
    right_tokens, right_cumsum, documents = packed.tokens, np.cumsum, lengths(1, 256)

    def in_a_row(x: Tensor, at: packed.At) -> Tensor:
        return right_tokens(x, at if isinstance(at, slice) else slice(int(at[0]), int(at[0]) + len(at)))

    def shifted(lengths: list[int]) -> np.ndarray:
        ends = right_cumsum(lengths)
        return np.concatenate([ends[:1], np.minimum(ends[1:-1] + 1, ends[-1]), ends[-1:]])

    faults = [(packed, "tokens", in_a_row), (packed.np, "cumsum", shifted)]
    for where, name, fault in faults:
        with checks.standing_in(), mock.patch.object(where, name, fault):
            try:
                found = checks.worst(checks.on_context_ranks(documents, 2, 8, "cpu", torch.float64))
            except (AssertionError, RuntimeError):  # the stand-in reads the ends as they are
                continue
            assert found > 1e-3, name


def test_parts_of_all_sequences_stay_as_they_are() -> None:
    """Without documents a part is already a call, of the whole batch."""
    found = parts((Run(0, 8, 0), Run(24, 32, 8)), (Run(0, 32, 0),))
    assert [part for group in grouped(found) for part in group] == found and all(
        len(group) == 1 for group in grouped(found)
    )
    assert packed.packed(found, torch.zeros(1, 8), 32) == found


def test_pytorchs_operators_take_what_is_packed() -> None:
    """Their arguments, shapes and dtypes on a device that is not there: a signature that changed
    would stop a GPU's first step.
    """
    packed.has_lengths.cache_clear()
    with mock.patch.object(torch.backends.cuda, "is_flash_attention_available", lambda: True):
        assert packed.has_lengths()
        packed.has_lengths.cache_clear()
        with mock.patch.object(packed, "kernel", lambda q, k, v, pack, scale: (q, q[..., 0])):
            assert not packed.has_lengths(), (
                "l of another layout, as older versions had it, would be read as other tokens'"
            )
    packed.has_lengths.cache_clear()
    with FakeTensorMode():
        q, grad = (torch.empty(64, 4, 16, dtype=torch.bfloat16, device="cuda") for _ in range(2))
        k, v = (torch.empty(80, 2, 16, dtype=torch.bfloat16, device="cuda") for _ in range(2))
        ends = torch.empty(6, dtype=torch.int32, device="cuda")
        for causal in (False, True):
            pack = Pack(causal, slice(0, 64), slice(0, 80), ends, ends, 44, 60)
            out, lse = packed.kernel(q, k, v, pack, 0.3)
            assert (out.shape, out.dtype, out.device) == (q.shape, q.dtype, q.device)
            assert (tuple(lse.shape), lse.dtype, lse.device) == ((4, 64), torch.float32, q.device)
            found = packed.kernel_backward(grad, q, k, v, out, lse, pack, 0.3)
            assert [(x.shape, x.dtype) for x in found] == [(x.shape, x.dtype) for x in (q, k, v)]


def test_cudnns_operators_take_parts_where_pytorch_prefers_them() -> None:
    """Their arguments, shapes and dtypes on a device that is not there, and which kernel is
    asked: a signature that changed would stop a GPU's first step, and l in another shape
    would be merged as another tensor.
    """
    for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):
        with (
            FakeTensorMode(),
            mock.patch.object(
                torch, "_fused_sdp_choice", lambda *args, backend=backend, **kwargs: backend.value
            ),
        ):
            q, grad = (torch.empty(2, 4, 64, 16, dtype=torch.bfloat16, device="cuda") for _ in range(2))
            k, v = (torch.empty(2, 2, 80, 16, dtype=torch.bfloat16, device="cuda") for _ in range(2))
            with OperatorNames() as called:
                out, lse = blocks.forward(q, k, v, False, 0.3)
                found = blocks.backward(grad, q, k, v, out, lse, False, 0.3)
            assert (out.shape, out.dtype) == (q.shape, q.dtype)
            assert (tuple(lse.shape), lse.dtype) == ((2, 4, 64), torch.float32)
            assert [(x.shape, x.dtype) for x in found] == [(x.shape, x.dtype) for x in (q, k, v)]
            kernels = [name for name in called.names if "attention" in name]
            assert len(kernels) == 2 and all(
                ("cudnn" in name) == (backend == SDPBackend.CUDNN_ATTENTION) for name in kernels
            )


def test_operations_of_a_call_are_counted_by_document() -> None:
    """`benchmarks.documents` would count all pairs of a sample on a GPU, or stop at
    tensors of another shape.
    """
    q, k = (torch.empty(24, heads, 16, dtype=torch.bfloat16, device="meta") for heads in (4, 2))
    ends = torch.tensor([0, 4, 24], dtype=torch.int32)
    for causal, pairs in ((True, 4 * 5 // 2 + 20 * 21 // 2), (False, 16 + 400)):
        pack = Pack(causal, slice(0, 24), slice(0, 24), ends, ends, 20, 20)
        with AttentionOperations() as counted:
            out, lse = packed.kernel(q, k, k, pack, 0.3)
            packed.kernel_backward(q, q, k, k, out, lse, pack, 0.3)
        assert counted.count == 12 * 4 * 16 * pairs


def test_other_tensors_keep_their_calls() -> None:
    """fp32, odd heads and CPUs have no such kernel: they would fail in their first step."""
    found = [
        AttentionPart(0, slice(0, 4), slice(0, 4), True),
        AttentionPart(0, slice(4, 8), slice(4, 8), True),
    ]
    for q in (torch.zeros(2, 8), torch.zeros(2, 8, dtype=torch.bfloat16)):
        assert packed.packed(found, q, 8) == found
    with FakeTensorMode(), mock.patch.object(packed, "has_lengths", lambda: True):
        for dtype, head, taken in (
            (torch.bfloat16, 16, True),
            (torch.bfloat16, 12, False),
            (torch.float32, 16, False),
        ):
            q = torch.empty(2, head, dtype=dtype, device="cuda")
            assert (packed.takes_lengths(q), blocks.has_kernel(q)) == (taken, taken)


def test_single_queries_are_not_packed() -> None:
    """With shared keys the kernel takes calls of one query a sequence for generation,
    and returns l in another order.
    """
    found = [AttentionPart(0, slice(i, i + 1), slice(10 * i, 10 * i + 10), False) for i in range(4)]
    with checks.standing_in():
        assert packed.packed(found, torch.zeros(4, 8), 40) == found


@pytest.mark.parametrize("fault", [False, True], ids=["", "narrow sums"])
def test_gradients_of_keys_in_many_parts_are_rounded_once(
    fault: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long document among short ones: the queries of many pieces see the same keys.

    Added up in bf16, each part would round the sum.
    """
    documents: Documents = ((0, *range(8, 96, 8), 96, 256),)
    sequences = Sequences(256, Group("cp", (0, 1, 2, 3), 0), "gather", documents)
    *whole, grad = (x.bfloat16() for x in checks.inputs(1, 256, 8))
    own = torch.from_numpy(positions_of(sequences.own))
    q, k, v = (x[:, :, own].requires_grad_() for x in whole)
    found = parts(sequences.own, sequences.everything, documents)
    seen, narrow = np.zeros(256, dtype=int), blocks.zeros_like
    for part in found:
        seen[part.keys] += 1
    assert seen.max() > 4, "few parts show little"
    sums: list[Tensor] = []
    monkeypatch.setattr(attention, "gathered", lambda k, v, sequences: (whole[1], whole[2]))
    monkeypatch.setattr(attention, "reduce_scatter", lambda x, group: [sums.append(x), x[:1]][1])
    if fault:
        monkeypatch.setattr(attention, "zeros_like", lambda x, *, wide=False: narrow(x))
    out = attention.GatherAttention.apply(q, k, v, sequences, checks.SCALE)
    lse = out.grad_fn.saved_tensors[4]
    out.backward(grad[:, :, own])
    exact = torch.zeros(2, *whole[1].shape, dtype=torch.float64)
    for part in found:
        at = [x[:, :, part.queries] for x in (grad[:, :, own], q.detach(), out.detach(), lse)]
        keys, values = (x[:, :, part.keys] for x in whole[1:])
        of_keys = blocks.backward(at[0], at[1], keys, values, at[2], at[3], part.causal, checks.SCALE)[1:]
        for total, own_grad in zip(exact, of_keys, strict=True):
            total[:, :, part.keys] += own_grad.double()
    expected = torch.stack([attention.by_rank(total.transpose(1, 2), sequences) for total in exact], 1)
    error = float((sums[0].double() - expected.bfloat16().double()).norm() / expected.norm())
    # fp32 sums differ from fp64 where a rounding to bf16 is near its middle, one in 2^15
    assert (error < 1e-4) is not fault, error
