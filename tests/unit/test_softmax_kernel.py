"""The fused causal softmax against fp64 autograd, run by Triton's interpreter, and compiled for Hopper, both without a GPU.

The checks are plain functions of a device: tests/gpu runs the same ones on a real GPU. Here they run in a worker that
was started with TRITON_INTERPRET=1, because Triton reads it once, at its import.
"""

import importlib.util
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from megacore.kernels import softmax
from tests.pool import Pool

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")

ONE_BLOCK, CROSSING = (2, 2, 5, 7), (1, 1, 3, softmax.MAX_BLOCK + 809)
SHAPES = [
    (1, 1, 1, 1),  # one score: probability 1, gradient 0
    (1, 2, 1, 13),  # one query of a longer sequence, as in generation
    ONE_BLOCK,
    (2, 1, 31, 31),
    (1, 1, 16, 16),  # exactly one block
    (1, 1, 2, softmax.MAX_BLOCK + 1),  # the last row crosses into the second block, the first just does not
    CROSSING,
]
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
INTERPRETED_TOLERANCE = TOLERANCE | {torch.bfloat16: 1.6e-2}  # the interpreter truncates to bf16 where hardware rounds
SCALE = 0.37


def expected(scores: torch.Tensor, grad_output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities and gradient in fp64, with no code of the kernel's: row by row over the visible slice, by autograd."""
    exact = scores.double().requires_grad_()
    query_size, key_size = exact.shape[-2:]
    rows = []
    for i in range(query_size):
        seen = i + 1 + key_size - query_size
        rows.append(torch.nn.functional.pad(torch.softmax(exact[:, :, i, :seen] * SCALE, -1), (0, key_size - seen)))
    probabilities = torch.stack(rows, 2)
    return probabilities.detach(), torch.autograd.grad(probabilities, exact, grad_output.double())[0]


def error_against_fp64(implementation: str, device: str, shape: tuple[int, ...], dtype: torch.dtype, spread: float = 3.0) -> float:
    """Largest error of probabilities and gradient, relative to the largest value of each."""
    generator = torch.Generator().manual_seed(sum(shape))
    scores = (torch.randn(shape, generator=generator) * spread).to(device, dtype).requires_grad_()
    grad_output = torch.randn(shape, generator=generator).to(device, dtype)
    probabilities = softmax.causal_softmax(scores, SCALE, implementation)
    assert probabilities.dtype == dtype and probabilities.shape == scores.shape
    beyond = torch.ones(shape[-2:], dtype=torch.bool, device=device).triu(1 + shape[-1] - shape[-2])
    (grad_scores,) = torch.autograd.grad(probabilities, scores, grad_output)
    assert not probabilities[..., beyond].any() and not grad_scores[..., beyond].any(), "not exactly zero beyond the diagonal"
    errors = []
    for got, exact in zip((probabilities, grad_scores), expected(scores.detach(), grad_output), strict=True):
        errors.append(((got.double() - exact).abs().max() / exact.abs().max().clamp_min(1e-30)).item())
    return max(errors)


def check_extremes(device: str) -> None:
    """Scores that overflow a naive exp, equal ones, and -inf ones (a whole first block of them) stay exact and finite."""
    for shape in (ONE_BLOCK, CROSSING):
        huge = torch.full(shape, -3e38, device=device)
        huge[..., 1] = 3e38
        one_hot = softmax.causal_softmax(huge, 1.0, "triton")
        assert torch.equal(one_hot, softmax.causal_softmax_eager(huge, 1.0)) and one_hot[..., 1].min() == 1
        flat = softmax.causal_softmax(torch.full(shape, 7e37, device=device), 1.0, "triton")
        torch.testing.assert_close(flat[0, 0, -1], torch.full_like(flat[0, 0, -1], 1 / shape[-1]))
        blocked = torch.zeros(shape, device=device)
        blocked[..., : shape[-1] - shape[-2]] = float("-inf")
        torch.testing.assert_close(softmax.causal_softmax(blocked, 1.0, "triton"), softmax.causal_softmax_eager(blocked, 1.0))


def check_strided_and_empty(device: str) -> None:
    """A transposed view and a transposed gradient give what their contiguous copies give; no rows are no error."""
    scores = torch.randn(2, 7, 3, 5, device=device).transpose(1, 3).requires_grad_()  # [2, 5, 3, 7]
    grad_output = torch.randn(2, 7, 3, 5, device=device).transpose(1, 3)
    fused, eager = softmax.causal_softmax(scores, SCALE, "triton"), softmax.causal_softmax_eager(scores, SCALE)
    torch.testing.assert_close(fused, eager)
    torch.testing.assert_close(*(torch.autograd.grad(y, scores, grad_output)[0] for y in (fused, eager)))
    assert softmax.causal_softmax(torch.empty(0, 2, 3, 3, device=device), SCALE, "triton").shape == (0, 2, 3, 3)


@pytest.fixture(scope="module")
def interpreted() -> Iterator[Callable[..., Any]]:
    """Runs a function in a process whose Triton kernels are interpreted on the CPU."""
    pool = Pool()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        pool.run(1, os.getpid)  # starts the worker, which keeps this environment
    yield lambda function, *args: pool.run(1, function, *args)[0]
    pool.close()


@needs_triton
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_triton_equals_fp64(interpreted, shape, dtype):
    assert interpreted(error_against_fp64, "triton", "cpu", shape, dtype) < INTERPRETED_TOLERANCE[dtype]


@needs_triton
@pytest.mark.parametrize("check", [check_extremes, check_strided_and_empty])
def test_triton_corner_cases(interpreted, check):
    interpreted(check, "cpu")


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_eager_equals_fp64(shape, dtype):
    assert error_against_fp64("eager", "cpu", shape, dtype) < TOLERANCE[dtype]


def test_eager_keeps_fp64():
    """precision=fp64 is for proofs: statistics in fp32 would show as an error of about 1e-7."""
    assert error_against_fp64("auto", "cpu", (2, 2, 5, 7), torch.float64) < 1e-14


def mask_off_by_one(scores: torch.Tensor, scale: float, implementation: str) -> torch.Tensor:
    return torch.softmax((scores * scale).masked_fill(torch.ones(scores.shape[-2:]).triu(2).bool(), float("-inf")), -1)


def wrong_gradient_scale(scores: torch.Tensor, scale: float, implementation: str) -> torch.Tensor:
    return softmax.causal_softmax_eager(scores * scale + (scores - scores.detach()) * 1e-4, 1.0)


@pytest.mark.parametrize("fault", [mask_off_by_one, wrong_gradient_scale])
def test_the_check_catches_planted_faults(monkeypatch, fault):
    """A query that sees one key too many, or a gradient 0.03 % off, must not pass the comparison above."""
    monkeypatch.setattr(softmax, "causal_softmax", fault)
    with pytest.raises(AssertionError):
        assert error_against_fp64("eager", "cpu", (1, 2, 9, 9), torch.float32) < TOLERANCE[torch.float32]


def test_refusals():
    scores = torch.zeros(1, 1, 3, 2)
    with pytest.raises(ValueError, match=r"scores are \[1, 1, 3, 2\]"):
        softmax.causal_softmax(scores, 1.0)
    with pytest.raises(ValueError, match="no implementation 'fast'"):
        softmax.causal_softmax(scores.mT, 1.0, "fast")
    with pytest.raises(ValueError, match=r"Triton (kernel for torch.float64|is not installed)"):
        softmax.causal_softmax(scores.mT.double(), 1.0, "triton")


def test_missing_triton_on_a_gpu_is_said_once():
    """Silently unfused attention would be a slow run nobody can explain; a line per call would bury the log."""
    softmax._notice_missing_triton.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        softmax._notice_missing_triton()
        softmax._notice_missing_triton()
    assert [str(warning.message) for warning in caught] == [
        "Triton is not installed: causal_softmax runs unfused on this GPU (pip install triton)"
    ]


@needs_triton
@pytest.mark.parametrize("element", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("key_size", [1000, softmax.MAX_BLOCK + 1])
@pytest.mark.parametrize("kernel, pointers", [("_forward_kernel", 2), ("_backward_kernel", 3)])
def test_compiles_for_hopper(kernel, pointers, key_size, element, monkeypatch, tmp_path):
    """The interpreter accepts what the compiler may not: every variant becomes machine code for sm_90, no GPU needed."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))  # else a stale entry could answer
    function = getattr(softmax, kernel)
    options = softmax.launch_options(key_size)
    warps = options.pop("num_warps")
    types = [f"*{element}"] * pointers + ["fp32", "i32", "i32"] + ["constexpr"] * len(options)
    source = ASTSource(function, signature=dict(zip(function.arg_names, types, strict=True)), constexprs=options)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps, "enable_fp_fusion": True})
    assert ".target sm_90" in compiled.asm["ptx"] and compiled.asm["cubin"]
    assert ".f64" not in compiled.asm["ptx"], "fp64 arithmetic crept in: half speed or worse"
