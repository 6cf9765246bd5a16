"""AdamW against its formulas in fp64, through Triton's interpreter; tests/gpu runs the
same checks on a GPU.
"""

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from megacore.kernels import adamw
from tests.kernel_checks import (
    INTERPRETED_TOLERANCE,
    TOLERANCE,
    needs_triton,
    relative_error,
    seeded,
    with_fault,
)

# less than a block, none, one, and one with a rest
SIZES = [(5,), (7, 3), (0,), (adamw.BLOCK,), (1,), (adamw.BLOCK + 13,)]
DECAYS = [0.1, 0.0, 0.3, 0.2, 0.1, 0.0]
BETA1, BETA2, EPS = 0.9, 0.999, 1e-6
RATES = [3e-2, 1e-2, 2e-2]
GRADIENTS = [torch.float32, torch.bfloat16]


def tensors(device: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> list[Tensor]:
    return [seeded(size, device, dtype, seed=seed) for size in SIZES]


def optimizer(
    implementation: str, masters: list[Tensor], gradients: list[Tensor], copies: list[Tensor] | None = None
) -> adamw.AdamW:
    """Moments that begin as those of a run under way, second moments positive."""
    first, second = (tensors(str(masters[0].device), masters[0].dtype, seed) for seed in (1, 2))
    for v in second:
        v.square_()
    state = (masters, gradients, first, second)
    return adamw.AdamW(
        *state,
        weight_decay=DECAYS,
        beta1=BETA1,
        beta2=BETA2,
        eps=EPS,
        copies=copies,
        implementation=implementation,
    )  # type: ignore[arg-type]


def error_against_fp64(
    implementation: str,
    device: str,
    dtype: torch.dtype,
    scale: float | None = 3.0,
    wide: torch.dtype = torch.float32,
) -> float:
    """Largest error of masters and moments after three steps, relative to the largest value of
    each; the second step is skipped.
    """
    masters, copies = tensors(device, wide), tensors(device, torch.bfloat16)
    gradients = [seeded(size, device, dtype, seed=3) for size in SIZES]
    optim = optimizer(implementation, masters, gradients, copies)
    exact = [
        [t.double().clone() for t in column]
        for column in (masters, optim.first_moments, optim.second_moments)
    ]
    finite = [g.clone() for g in gradients]
    for number, lr in enumerate(RATES):
        skipped = number == 1
        for g, right in zip(gradients, finite, strict=True):
            g.copy_(right).mul_(float("nan") if skipped else 1.0)
        divisor = None if scale is None else torch.tensor(scale, dtype=torch.float64, device=device)
        optim.step(lr, divisor, torch.tensor(float(skipped), device=device))
        if skipped:
            continue
        t = max(number, 1)
        for p, m, v, right, decay in zip(*exact, finite, DECAYS, strict=True):
            g = right.double() / (scale or 1.0)
            m.copy_(BETA1 * m + (1 - BETA1) * g)
            v.copy_(BETA2 * v + (1 - BETA2) * g * g)
            p.copy_((1 - lr * decay) * p - lr * (m / (1 - BETA1**t)) / ((v / (1 - BETA2**t)).sqrt() + EPS))
    others = [relative_error(optim.updates, torch.tensor(2.0))]
    rounding = INTERPRETED_TOLERANCE[torch.bfloat16]
    others += [
        max(relative_error(copy, master) - rounding, 0.0)
        for copy, master in zip(copies, masters, strict=True)
    ]
    got = (masters, optim.first_moments, optim.second_moments)
    return max(
        *others,
        *(
            relative_error(a, b)
            for columns in zip(got, exact, strict=True)
            for a, b in zip(*columns, strict=True)
        ),
    )


def check_first_update(device: str) -> None:
    """From moments of zero, the first update is lr times the gradient's sign: 1 - b2 in
    fp32 alone would be off by 1e-5.

    A decay rate of 0 is a legal one: its logarithm is not.
    """
    for implementation, betas in product(("triton", "eager"), ((0.9, 0.9999), (0.0, 0.9999), (0.9, 0.0))):
        master, gradient = (torch.zeros(3, device=device), torch.tensor([2.0, -0.5, 1e-3], device=device))
        zeros = [torch.zeros(3, device=device) for _ in range(2)]
        settings: dict[str, Any] = {
            "beta1": betas[0],
            "beta2": betas[1],
            "eps": 0.0,
            "implementation": implementation,
        }
        optim = adamw.AdamW([master], [gradient], *([z] for z in zeros), weight_decay=0.0, **settings)
        optim.step(0.25)
        assert relative_error(master, torch.tensor([-0.25, 0.25, -0.25])) < 1e-6 and optim.updates == 1


def check_unaligned(device: str) -> None:
    """Tensors that do not start on 16 bytes take another path; no element is written outside of them."""
    results = []
    for first in (0, 1):
        wholes = [torch.ones(32, device=device) for _ in range(4)]
        columns = [[whole[first : first + 17]] for whole in wholes]
        optim = adamw.AdamW(
            *columns, weight_decay=0.1, beta1=BETA1, beta2=BETA2, eps=EPS, implementation="triton"
        )  # type: ignore[misc]
        assert optim.table is not None and optim.table.aligned is (first == 0)
        optim.step(0.1)
        results.append(columns[0][0].clone())
        assert wholes[0][:first].tolist() == [1.0] * first and wholes[0][first + 17 :].tolist() == [1.0] * (
            15 - first
        )
    assert torch.equal(*results)


@needs_triton
@pytest.mark.parametrize("dtype", GRADIENTS, ids=str)
def test_triton_equals_fp64(interpreted, dtype):
    assert interpreted(error_against_fp64, "triton", "cpu", dtype) < TOLERANCE[torch.float32]


@needs_triton
@pytest.mark.parametrize("check", [check_first_update, check_unaligned])
def test_triton_corner_cases(interpreted, check):
    interpreted(check, "cpu")


@pytest.mark.parametrize("dtype", GRADIENTS, ids=str)
@pytest.mark.parametrize("scale", [None, 3.0])
def test_eager_equals_fp64(dtype, scale):
    """fp32 gradients go through PyTorch's own kernel, bf16 ones through the reference."""
    assert error_against_fp64("eager", "cpu", dtype, scale) < TOLERANCE[torch.float32]


def test_eager_keeps_fp64():
    assert error_against_fp64("auto", "cpu", torch.float64, wide=torch.float64) < 1e-14


def test_skipped_first_step_leaves_no_nan():
    """Before the first update there is no bias to correct, only 0 / 0."""
    master = torch.ones(3)
    columns = [
        [master],
        [torch.full((3,), float("nan"), dtype=torch.bfloat16)],
        [torch.zeros(3)],
        [torch.zeros(3)],
    ]
    adamw.AdamW(*columns, weight_decay=0.1, beta1=BETA1, beta2=BETA2, eps=EPS).step(
        0.1, None, torch.tensor(1.0)
    )
    assert master.tolist() == [1.0] * 3


FAULTS = {
    "another tensor's weight decay": ("tl.load(decays + tensor)", "tl.load(decays)"),
    "bias correction one update late": ("update = tl.load(updates) + 1.0", "update = tl.load(updates) + 2.0"),
    "a skipped step is counted": ("update - 1.0 + done", "update"),
    "a skipped step is done": ("tl.load(factors + 3) == 0.0", "tl.load(factors + 3) == 2.0"),
    "the gradient is not unscaled": (".to(tl.float32) * inverse", ".to(tl.float32)"),
    "eps within the root": ("tl.sqrt(v) * unbias + eps", "tl.sqrt(v + eps) * unbias"),
    "moments mixed up": ("v += weight2 * (g * g - v)", "v += weight1 * (g * g - v)"),
    "only the first block of a tensor": ("+ 1).to(tl.int64) * BLOCK", "+ 1).to(tl.int64) * 0"),
}


@needs_triton
@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_caught(interpreted, fault):
    error = interpreted(
        with_fault, "adamw", *FAULTS[fault], error_against_fp64, "triton", "cpu", torch.float32
    )
    assert error > TOLERANCE[torch.float32]


REFUSALS = {
    "masters is empty": lambda p: {"masters": []},
    "gradients has 2 tensors": lambda p: {"gradients": [p, p]},
    r"second_moments\[0\] is \[3\]": lambda p: {"second_moments": [p[:3]]},
    r"gradients\[0\] is torch.float32 on meta": lambda p: {"gradients": [p.to("meta")]},
    r"first_moments\[0\] .* stride \(2,\)": lambda p: {"first_moments": [p.repeat(2)[::2]]},
    "first_moments are torch.bfloat16": lambda p: {"first_moments": [p.bfloat16()]},
    "copies are torch.float32": lambda p: {"copies": [p]},
    "weight_decay has 2 numbers": lambda p: {"weight_decay": [0.1, 0.2]},
    "masters is torch.float64|not installed": lambda p: {
        name: [p.double()] for name in ("masters", "first_moments", "second_moments")
    },
}


@pytest.mark.parametrize("message", REFUSALS)
def test_refusals(message):
    p = torch.zeros(4)
    arguments = {
        name: [p] for name in ("masters", "gradients", "first_moments", "second_moments")
    } | REFUSALS[message](p)
    implementation = "triton" if "installed" in message else "auto"
    with pytest.raises(ValueError, match=message):
        adamw.AdamW(
            **{"weight_decay": 0.1, **arguments},
            beta1=0.9,
            beta2=0.95,
            eps=1e-8,
            implementation=implementation,
        )
