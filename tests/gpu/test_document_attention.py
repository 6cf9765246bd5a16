"""Attention within documents on a real GPU: PyTorch's kernel for many lengths
against the plain formula in fp64.
"""

from unittest import mock

import pytest
import torch

from megacore.context_parallel import ring_blocks as blocks
from megacore.context_parallel import varlen as packed
from tests import attention_checks as checks
from tests.unit.test_varlen import ROWS, lengths

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(
        not packed.has_lengths(), reason="this PyTorch has no FlashAttention for many lengths"
    ),
]
# of the largest number: some roundings of scores, probabilities and results
TOLERANCE = {torch.bfloat16: 3e-2, torch.float16: 4e-3}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("head", [64, 128])
def test_one_call_equals_fp64(dtype: torch.dtype, head: int) -> None:
    for documents in (ROWS, lengths(1, 2048)):
        with mock.patch.object(packed, "kernel", wraps=packed.kernel) as called:
            assert checks.worst(checks.on_one_rank(documents, head, "cuda", dtype)) < TOLERANCE[dtype]
        assert called.call_count == 1


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("ranks", [2, 4])
def test_pieces_equal_fp64(dtype: torch.dtype, ranks: int) -> None:
    """Also where a document, or the whole sequence, reaches over pieces: then parts are merged,
    and some are calls by themselves.
    """
    for documents in (lengths(2, 2048), ((0, 2048), (0, 300, 2048))):
        assert checks.worst(checks.on_context_ranks(documents, ranks, 64, "cuda", dtype)) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("cudnn", [True, False], ids=["cudnn", "flash"])
def test_either_kernel_of_one_part_equals_fp64(dtype: torch.dtype, cudnn: bool) -> None:
    """Whole sequences, whose parts are merged: cuDNN's output and l, and its gradients from merged
    ones, beside FlashAttention's.
    """
    q = torch.empty(1, 4, 2048, 64, dtype=dtype, device="cuda")
    if cudnn and not blocks.prefers_cudnn(q, q, q, True, 0.3):
        pytest.skip("PyTorch does not take cuDNN's attention on this GPU")
    with (
        mock.patch.object(blocks, "prefers_cudnn", lambda *args: cudnn),
        mock.patch.object(packed, "takes_lengths", lambda q: False),
    ):
        assert (
            checks.worst(checks.on_context_ranks(((0, 2048), (0, 512, 2048)), 2, 64, "cuda", dtype))
            < TOLERANCE[dtype]
        )


def test_the_host_does_not_wait() -> None:
    """Neither for the copy of the documents' ends nor for anything else."""
    checks.on_one_rank(ROWS, 64, "cuda", torch.bfloat16)
    q, k, v = (x.to("cuda", torch.bfloat16).requires_grad_() for x in checks.inputs(2, 2048, 64)[:3])
    sequences = checks.Sequences(2048, checks.SOLO, "gather", lengths(1, 2048))
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = checks.attention.attend(q, k, v, sequences, checks.SCALE)
        out.backward(torch.ones_like(out))
    finally:
        torch.cuda.set_sync_debug_mode("default")
