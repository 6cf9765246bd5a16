"""Fused layer and RMS norm against fp64 autograd, run by Triton's interpreter, without a GPU.

The checks are plain functions of a device: tests/gpu runs the same ones on a real GPU.
"""

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from megacore.kernels import layernorm, partial_sums
from tests.kernel_checks import (
    INTERPRETED_TOLERANCE,
    TOLERANCE,
    launches,
    needs_triton,
    relative_error,
    seeded,
    with_fault,
)

EPS = 0.1  # large, so that a wrong one shows
# what makes rows of 17 and 9 as long as ones of 16385 and 8193
LONG = {"MAX_BLOCK": 16, "MAX_BACKWARD_BLOCK": 8}
CASES: list[tuple[tuple[int, ...], dict[str, int]]] = [
    ((1, 7), {}),  # one row
    ((2, 3, 13), {}),
    ((5, 16), {}),  # exactly one block
    ((37, 7), {"THREADS": 1}),  # backward: two rows a program's turn, two turns, the last one with one row
    ((3, 53), LONG),
    ((2, 48), LONG),
    ((19, 17), {"MAX_BACKWARD_BLOCK": 8}),  # forward in one block, backward not, several turns
]
FAULT = 1e-5
# rsqrt's own error counts twice in the gradient
TRITON_TOLERANCE = INTERPRETED_TOLERANCE | {torch.float32: 4e-6}


def expected(rms: bool, s: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The definition."""
    if not rms:
        s = s - s.mean(-1, keepdim=True)
    y = s / torch.sqrt((s * s).mean(-1, keepdim=True) + EPS) * weight
    return y if bias is None else y + bias


def fused(
    rms: bool, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, implementation: Any
) -> tuple[Tensor, ...]:
    if rms:
        result = layernorm.rms_norm(x, weight, EPS, residual=residual, implementation=implementation)
    else:
        result = layernorm.layer_norm(x, weight, bias, EPS, residual=residual, implementation=implementation)
    return (result,) if residual is None else result


def error_against_fp64(
    rms: bool,
    adds: bool,
    implementation: Any,
    device: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    sizes: dict[str, int] | None = None,
    parameters: torch.dtype | None = None,
) -> float:
    """Largest error of results and gradients, relative to the largest value of each;
    `sizes` replace the module's own.
    """
    x, residual = seeded(shape, device, dtype) + 0.5, seeded(shape, device, dtype, seed=1) if adds else None
    weight = 1 + seeded(shape[-1:], device, parameters or dtype, seed=2, spread=0.3)
    bias = None if rms else seeded(shape[-1:], device, parameters or dtype, seed=3, spread=0.3)
    inputs = [t.requires_grad_() for t in (x, weight, bias, residual) if t is not None]
    grads = [seeded(shape, device, dtype, seed=4 + i) for i in range(1 + adds)]
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (sizes or {}).items():
            patch.setattr(layernorm, name, value)
        results = fused(rms, x, weight, bias, residual, implementation)
        got = [*results, *torch.autograd.grad(results, inputs, grads)]
    assert all(t.dtype == x.dtype for t in results)
    wide = [None if t is None else t.detach().double().requires_grad_() for t in (x, weight, bias, residual)]
    total = wide[0] if wide[3] is None else wide[0] + wide[3]
    exact = [expected(rms, total, wide[1], wide[2]), *([total] if adds else [])]
    exact += torch.autograd.grad(exact, [t for t in wide if t is not None], [g.double() for g in grads])
    return max(relative_error(a, b.detach()) for a, b in zip(got, exact, strict=True))


def kernels_run(device: str, features: int, rms: bool, sizes: dict[str, int]) -> list[tuple[str, Any, Any]]:
    """Each kernel launched: its name, whether a row is one block, whether a
    program takes several rows at once.
    """
    with launches() as log:
        error_against_fp64(rms, True, "triton", device, (3, features), torch.float32, sizes)
    return [
        (name, options.get("ONE_BLOCK"), options["ROWS"] > 1 if "ROWS" in options else None)
        for name, options in log
    ]


def check_corner_cases(device: str) -> None:
    """Views, missing gradients and empty batches; rows that a naive variance loses; NaN
    where it was and nowhere else.
    """
    for rms in (False, True):
        weight, bias = torch.ones(8, device=device, requires_grad=True), torch.zeros(8, device=device)
        # Heads as they lie in the product of queries, keys and values; a transposed view; the gradient of a
        # sum.
        qkv = seeded((2, 3, 5, 24), device).requires_grad_()
        turned = seeded((8, 6), device).requires_grad_()
        for leaf, view in ((qkv, qkv[..., 8:16]), (turned, turned.T)):
            outcomes = []
            for implementation in ("triton", "eager"):
                (y,) = fused(rms, view, weight, bias, None, implementation)
                outcomes.append((y, *torch.autograd.grad((y * y).sum() + y.sum(), (leaf, weight))))
            for a, b in zip(*outcomes, strict=True):
                torch.testing.assert_close(a, b)
        # Only the sum is used, or only the norm.
        x, residual = (seeded((3, 8), device, seed=i).requires_grad_() for i in range(2))
        y, total = fused(rms, x, weight, bias, residual, "triton")
        assert torch.equal(
            torch.autograd.grad(total.sum(), residual, retain_graph=True)[0], torch.ones_like(x)
        )
        of_norm = torch.autograd.grad((y * x.detach()).sum(), (x, residual))
        assert torch.equal(*of_norm) and of_norm[0].any()
        # No rows.
        empty = torch.empty(0, 8, device=device, requires_grad=True)
        grads = torch.autograd.grad(fused(rms, empty, weight, bias, None, "triton")[0].sum(), (empty, weight))
        assert grads[0].shape == (0, 8) and not grads[1].any()
        for sizes in ({}, {"MAX_BLOCK": 4, "MAX_BACKWARD_BLOCK": 4}):
            with pytest.MonkeyPatch.context() as patch:
                for name, value in sizes.items():
                    patch.setattr(layernorm, name, value)
                # A variance from the mean of squares would be lost here: 3000² has no room for ones in fp32.
                far = (seeded((2, 8), device) + 3000.0) if not rms else seeded((2, 8), device, spread=1e-6)
                exact = expected(rms, far.double(), weight, bias).float()
                torch.testing.assert_close(
                    fused(rms, far, weight, bias, None, "triton")[0], exact, rtol=2e-3, atol=2e-3
                )
                bad = seeded((3, 8), device)
                bad[1, 5] = float("nan")
                y = fused(rms, bad, weight, bias, None, "triton")[0]
                assert y[1].isnan().all() and not y[[0, 2]].isnan().any()


def check_many_shares(device: str) -> None:
    """More programs than the last kernel takes at a turn: a GPU has hundreds, the interpreter at most 16."""
    shares = seeded((2, 300, 37), device)
    grads = partial_sums.add_parts(shares, torch.float32)
    torch.testing.assert_close(grads, shares.double().sum(1).float(), rtol=1e-5, atol=1e-5)


@needs_triton
@pytest.mark.parametrize("adds", [False, True], ids=["alone", "residual"])
@pytest.mark.parametrize("rms", [False, True], ids=["layer_norm", "rms_norm"])
@pytest.mark.parametrize("shape, sizes", CASES, ids=str)
def test_triton_equals_fp64(interpreted, shape, sizes, rms, adds):
    assert (
        interpreted(error_against_fp64, rms, adds, "triton", "cpu", shape, torch.float32, sizes)
        < TRITON_TOLERANCE[torch.float32]
    )


@needs_triton
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rms", [False, True], ids=["layer_norm", "rms_norm"])
def test_triton_in_16_bits(interpreted, rms, dtype):
    """With weights of the same type and of fp32; statistics in 16 bits would show
    as an error of a few percent.
    """
    for shape, sizes, parameters in (((5, 53), {}, dtype), ((5, 53), LONG, torch.float32)):
        error = interpreted(error_against_fp64, rms, True, "triton", "cpu", shape, dtype, sizes, parameters)
        # the sum is rounded before the norm, which is again
        assert error < 2 * INTERPRETED_TOLERANCE[dtype], (shape, sizes)


@needs_triton
@pytest.mark.parametrize("rms", [False, True], ids=["layer_norm", "rms_norm"])
def test_every_path_runs(interpreted, rms):
    """Short, whole and long rows are different code: the cases above must reach each."""
    forward, backward, last = "_forward_kernel", "_backward_kernel", ("_add_parts_kernel", None, True)
    assert interpreted(kernels_run, "cpu", 17, rms, {}) == [
        (forward, True, True),
        (backward, True, True),
        last,
    ]
    one = {"THREADS": 1}
    assert interpreted(kernels_run, "cpu", 17, rms, one) == [
        (forward, True, False),
        (backward, True, False),
        last,
    ]
    means = ("_means_kernel", None, None)
    assert interpreted(kernels_run, "cpu", 17, rms, LONG) == [
        (forward, False, False),
        means,
        (backward, False, False),
        last,
    ]


@needs_triton
@pytest.mark.parametrize("check", [check_corner_cases, check_many_shares])
def test_triton_corner_cases(interpreted, check):
    interpreted(check, "cpu")


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("rms", [False, True], ids=["layer_norm", "rms_norm"])
def test_eager_equals_fp64(rms, dtype):
    for adds in (False, True):
        for shape, _ in CASES:
            assert error_against_fp64(rms, adds, "eager", "cpu", shape, dtype) < 2 * TOLERANCE[dtype], (
                adds,
                shape,
            )


@pytest.mark.parametrize("rms", [False, True], ids=["layer_norm", "rms_norm"])
def test_eager_keeps_fp64(rms):
    assert error_against_fp64(rms, True, "auto", "cpu", (5, 7), torch.float64) < 1e-14


def worst_error(device: str) -> float:
    """Over every path; of a fault, the first error that shows it."""
    worst = 0.0
    for rms in (False, True):
        for sizes in ({}, {"THREADS": 1}, LONG):
            worst = max(worst, error_against_fp64(rms, True, "triton", device, (4, 17), torch.float32, sizes))
            if worst > FAULT:
                return worst
    return worst


@cache
def sound_error(device: str) -> float:
    return worst_error(device)


@needs_triton
@pytest.mark.parametrize(
    "right, wrong",
    [
        # the residual
        ("other=0.0).to(tl.float32)).to(\n", "other=0.0).to(tl.float32) * 1.001).to(\n"),
        ("average = tl.sum(s, 1) / features", "average = tl.sum(s, 1) / (features + 0.01)"),
        (
            "tl.rsqrt(tl.sum(s * s, 1) / features + eps)",
            "tl.rsqrt(tl.sum(s * s, 1) / features + 1.001 * eps)",
        ),
        ("average += step * (size / (start + size))", "average += step * 0.5"),
        ("step * step * (start *", "step * step * (1.01 * start *"),
        ("tl.rsqrt(squares / features + eps)", "tl.rsqrt(squares / features + 1.001 * eps)"),
        (
            "tl.store(mean_g + row, tl.sum(sum_g, 0) / features)",
            "tl.store(mean_g + row, tl.sum(sum_g, 0) / (features + 0.1))",
        ),
        ("tl.sum(sum_gs, 0) / features", "tl.sum(sum_gs, 0) / (features + 0.1)"),
        (
            "inner = tl.sum(g * x, 1)[:, None] / features",
            "inner = tl.sum(g * x, 1)[:, None] / (features + 0.1)",
        ),
        ("ds -= tl.sum(g, 1)[:, None] / features", "ds -= tl.sum(g, 1)[:, None] / (features + 0.1)"),
        ("part_w += dy * x", "part_w += 1.001 * dy * x"),
        ("part_b += dy", "part_b += 1.001 * dy"),
    ],
)
def test_the_check_catches_planted_faults(interpreted, right, wrong):
    """A constant that is a thousandth off is caught."""
    fault = interpreted(with_fault, "layernorm", right, wrong, worst_error, "cpu")
    assert fault > FAULT > TRITON_TOLERANCE[torch.float32] > interpreted(sound_error, "cpu")


@pytest.mark.parametrize(
    "module, norm", [(layernorm.LayerNorm, torch.nn.LayerNorm), (layernorm.RMSNorm, torch.nn.RMSNorm)]
)
def test_modules_are_those_of_torch(module, norm):
    """The same parameters under the same names, so that one's checkpoint loads
    into the other; the same result.
    """
    ours, theirs = module(12, eps=EPS), norm(12, eps=EPS)
    theirs.load_state_dict({name: seeded((12,), "cpu", seed=i) for i, name in enumerate(theirs.state_dict())})
    ours.load_state_dict(theirs.state_dict())
    x, residual = seeded((3, 12), "cpu", seed=5), seeded((3, 12), "cpu", seed=6)
    assert torch.equal(ours(x), theirs(x))
    y, total = ours(x, residual)
    assert torch.equal(total, x + residual) and torch.equal(y, theirs(total))


def test_refusals():
    x, weight = torch.zeros(2, 3), torch.zeros(3)
    with pytest.raises(ValueError, match=r"rms_norm: x is \[\] \(right: \[..., features\]"):
        layernorm.rms_norm(torch.zeros(()), weight)
    with pytest.raises(ValueError, match=r"layer_norm: weight is \[4\] \(right: \[3\], as x has features\)"):
        layernorm.layer_norm(x, torch.zeros(4))
    with pytest.raises(ValueError, match=r"layer_norm: bias is \[2\]"):
        layernorm.layer_norm(x, weight, torch.zeros(2))
    with pytest.raises(ValueError, match=r"layer_norm: bias is torch.float64, weight torch.float32"):
        layernorm.layer_norm(x, weight, weight.double())
    with pytest.raises(ValueError, match=r"rms_norm: residual is \[3, 2\] \(right: \[2, 3\], as x\)"):
        layernorm.rms_norm(x, weight, residual=x.mT)
    with pytest.raises(ValueError, match=r"rms_norm: residual is torch.float64, x torch.float32"):
        layernorm.rms_norm(x, weight, residual=x.double())
    with pytest.raises(ValueError, match=r"rms_norm: x is torch.int64"):
        layernorm.rms_norm(x.long(), weight)
    with pytest.raises(ValueError, match=r"rms_norm: weight is on meta, x on cpu"):
        layernorm.rms_norm(x, weight.to("meta"))
    with pytest.raises(ValueError, match=r"x is torch.float64|Triton is not installed"):
        layernorm.rms_norm(x.double(), weight.double(), implementation="triton")
