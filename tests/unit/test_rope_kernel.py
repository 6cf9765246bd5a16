"""Rotary positions against complex numbers in fp64, through Triton's interpreter; tests/gpu
runs the same checks on a GPU.
"""

import pytest
import torch

from megacore.kernels import rope
from tests.kernel_checks import (
    INTERPRETED_TOLERANCE,
    TOLERANCE,
    needs_triton,
    relative_error,
    seeded,
    with_fault,
)

# [batch, seq, kv heads, group + 2, head]; rope's x is cut out of it as the model cuts it
SHAPES = [
    (1, 1, 1, 3, 2),
    (2, 5, 3, 3, 8),  # multi-head
    (1, 7, 2, 6, 10),  # grouped queries, a half that is no power of two
    (2, 3, 1, 5, 6),
    (1, 2, 40, 3, 128),  # more heads than a tile holds
]


EPS = 1e-2  # as large as makes its place in the formula show


def tables(
    seq: int, head_size: int, device: str, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [seq, head] of angles that no two features or positions share."""
    angles = 0.3 + torch.outer(
        torch.arange(seq, dtype=torch.float64) + 1,
        1.7 / (1 + torch.arange(head_size // 2, dtype=torch.float64)),
    )
    angles = angles.repeat(1, 2)
    return angles.cos().to(device, dtype), angles.sin().to(device, dtype)


def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """[batch, heads, seq, head] in fp64 as complex numbers times exp(i angle)."""
    half = x.shape[-1] // 2
    y = torch.complex(x[..., :half], x[..., half:]) * torch.complex(cos.double(), sin.double())[:, :half]
    return torch.cat((y.real, y.imag), -1)


def split(qkv: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """As megacore.model.attention takes the projection apart."""
    return tuple(t.flatten(2, 3).transpose(1, 2) for t in qkv.split([qkv.shape[3] - 2, 1, 1], dim=3))


def rope_error(
    implementation: str, device: str, shape: tuple[int, ...], dtype: torch.dtype, in_place: bool = False
) -> float:
    """Largest error of `rope` on a strided view, and of its gradient, relative to the
    largest value of each.
    """
    qkv = seeded(shape, device, dtype).requires_grad_()
    cos, sin = tables(shape[1], shape[4], device, torch.promote_types(dtype, torch.float32))
    key = (qkv * 1)[:, :, :, -2].transpose(1, 2)  # times 1: what changes in place must not be a leaf
    exact = split(qkv.detach().double())[1].requires_grad_()
    y = rope.rope(key, cos, sin, in_place=in_place, implementation=implementation)
    assert y.dtype == dtype and y.shape == exact.shape and (y.data_ptr() == key.data_ptr()) == in_place
    grad = seeded(tuple(y.shape), device, dtype, seed=1)
    (grad_qkv,), exact_y = torch.autograd.grad(y, qkv, grad), turned(exact, cos, sin)
    (exact_grad,) = torch.autograd.grad(exact_y, exact, grad.double())
    return max(relative_error(y, exact_y), relative_error(split(grad_qkv)[1], exact_grad))


def rope_qkv_error(implementation: str, device: str, shape: tuple[int, ...], dtype: torch.dtype) -> float:
    """Largest error of `rope_qkv` and of its gradient, from gradients in another layout;
    infinite unless values keep every bit.
    """
    qkv = seeded(shape, device, dtype).requires_grad_()
    cos, sin = tables(shape[1], shape[4], device, torch.promote_types(dtype, torch.float32))
    results = rope.rope_qkv(qkv, cos, sin, implementation=implementation)
    exact = qkv.detach().double().requires_grad_()
    q, k, v = split(exact)
    exact_results = turned(q, cos, sin), turned(k, cos, sin), v
    assert all(y.dtype == dtype for y in results)
    grads = [seeded(tuple(y.shape), device, dtype, seed=i).contiguous() for i, y in enumerate(results)]
    (grad_qkv,) = torch.autograd.grad(results, qkv, grads)
    (exact_grad,) = torch.autograd.grad(exact_results, exact, [grad.double() for grad in grads])
    if not (torch.equal(results[2], split(qkv)[2]) and torch.equal(split(grad_qkv)[2], grads[2])):
        return float("inf")
    return max(
        relative_error(grad_qkv, exact_grad),
        *(relative_error(*pair) for pair in zip(results, exact_results, strict=True)),
    )


def normed_error(implementation: str, device: str, shape: tuple[int, ...], dtype: torch.dtype) -> float:
    """Largest error of `rope_qkv` with norms, of its gradient and of those of both weights,
    relative to the largest value of each.
    """
    qkv = seeded(shape, device, dtype).requires_grad_()
    cos, sin = tables(shape[1], shape[4], device, torch.promote_types(dtype, torch.float32))
    weights = [
        (1.0 + 0.3 * seeded(shape[4:], device, seed=seed)).to(dtype).requires_grad_() for seed in (5, 6)
    ]
    results = rope.rope_qkv(qkv, cos, sin, norms=(weights[0], weights[1], EPS), implementation=implementation)
    exact = [x.detach().double().requires_grad_() for x in (qkv, *weights)]
    q, k, v = split(exact[0])
    q, k = (
        x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight
        for x, weight in zip((q, k), exact[1:], strict=True)
    )
    exact_results = turned(q, cos, sin), turned(k, cos, sin), v
    assert all(y.dtype == dtype for y in results)
    grads = [seeded(tuple(y.shape), device, dtype, seed=i) for i, y in enumerate(results)]
    found = torch.autograd.grad(results, (qkv, *weights), grads)
    right = torch.autograd.grad(exact_results, exact, [grad.double() for grad in grads])
    return max(
        relative_error(*pair) for pair in zip((*results, *found), (*exact_results, *right), strict=True)
    )


def check_nan_and_empty(device: str) -> None:
    """What is not finite stays in its pair, and in values in its place; no tokens are no error."""
    cos, sin = tables(2, 4, device)
    qkv = torch.ones(1, 2, 1, 3, 4, device=device)
    qkv[0, 0, 0, :, 1] = float("inf")
    qkv[0, 1, 0, :, 0] = float("nan")
    q, k, v = rope.rope_qkv(qkv, cos, sin, implementation="triton")
    for y in (q, k):
        assert (~y.isfinite())[0, 0].tolist() == [[False, True, False, True], [True, False, True, False]]
    assert (~v.isfinite())[0, 0].tolist() == [[False, True, False, False], [True, False, False, False]]
    assert rope.rope(torch.empty(0, 2, 2, 4, device=device), cos, sin, implementation="triton").shape == (
        0,
        2,
        2,
        4,
    )
    transposed = seeded((1, 2, 4, 2), device).transpose(2, 3)  # heads that are no rows in memory
    for in_place in (False, True):
        expected = rope.rope_eager(transposed, cos, sin)
        torch.testing.assert_close(
            rope.rope(transposed, cos, sin, in_place=in_place, implementation="triton"), expected
        )


@needs_triton
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_triton_equals_fp64(interpreted, shape, dtype):
    for check in (rope_error, rope_qkv_error, normed_error):
        assert interpreted(check, "triton", "cpu", shape, dtype) < INTERPRETED_TOLERANCE[dtype], (
            check.__name__
        )


@needs_triton
def test_triton_corner_cases(interpreted):
    interpreted(check_nan_and_empty, "cpu")
    assert (
        interpreted(rope_error, "triton", "cpu", SHAPES[2], torch.float32, True) < TOLERANCE[torch.float32]
    ), "in place"


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_eager_equals_fp64(dtype):
    for shape in SHAPES[:3]:
        assert rope_qkv_error("eager", "cpu", shape, dtype) < TOLERANCE[dtype]
        assert rope_error("eager", "cpu", shape, dtype, in_place=True) < TOLERANCE[dtype]
        # normed, weighted and turned: rounded three times
        assert normed_error("eager", "cpu", shape, dtype) < 3 * TOLERANCE[dtype]
        assert (
            max(check("auto", "cpu", shape, torch.float64) for check in (rope_qkv_error, normed_error))
            < 1e-14
        )


FAULTS = [
    ("second * c + first * s", "second * c - first * s"),
    ("        s = -s", "        s = s"),
    ("tl.where(is_v, second, turned_second)", "turned_second"),
    ("kv_head * GROUP + member", "kv_head + member"),
    ("position.to(tl.int64) * (2 * HALF) + pair", "(position.to(tl.int64) + 1) * (2 * HALF) + pair"),
]


@needs_triton
@pytest.mark.parametrize("right, wrong", FAULTS)
def test_planted_faults_are_caught(interpreted, right, wrong):
    """A sign, values turned too, heads in another order, the next position's angle."""
    error = interpreted(
        with_fault, "rope", right, wrong, rope_qkv_error, "triton", "cpu", SHAPES[2], torch.float32
    )
    assert error > TOLERANCE[torch.float32]


NORM_FAULTS = [
    ("/ (2 * HALF) + eps)", "/ (2 * HALF))"),
    ("tl.where(is_q, of_q, of_k)", "of_q"),
    ("tl.where(is_k, own_first, 0.0)", "own_first"),
    ("(tl.sum(g_first * x_first, 1) + tl.sum(g_second * x_second, 1))", "(tl.sum(g_first * x_first, 1))"),
    ("tl.store(parts + 3 * HALF", "tl.store(parts + HALF"),
]


@needs_triton
@pytest.mark.parametrize("right, wrong", NORM_FAULTS)
def test_planted_faults_of_norms_are_caught(interpreted, right, wrong):
    """No eps, one weight for both, values in the keys' gradient, half of a head's mean, a half of
    a gradient in another's place.
    """
    error = interpreted(
        with_fault, "rope", right, wrong, normed_error, "triton", "cpu", SHAPES[2], torch.float32
    )
    assert error > TOLERANCE[torch.float32]


def test_in_place_is_refused_where_it_would_spoil_a_gradient():
    """Another reader of x that needs it in backward is told by autograd; a leaf that
    requires grad is named at once.
    """
    cos, sin = tables(2, 4, "cpu")
    leaf = torch.zeros(1, 1, 2, 4, requires_grad=True)
    with pytest.raises(ValueError, match="rope: x is a leaf that requires grad"):
        rope.rope(leaf, cos, sin, in_place=True)
    x = leaf * 1
    reader = (x * x).sum()
    rope.rope(x, cos, sin, in_place=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        reader.backward()


def test_refusals():
    cos, sin = tables(3, 4, "cpu")
    x, qkv = torch.zeros(1, 2, 3, 4), torch.zeros(1, 3, 2, 3, 4)
    with pytest.raises(ValueError, match=r"rope: x is \[1, 2, 3, 5\]"):
        rope.rope(torch.zeros(1, 2, 3, 5), cos, sin)
    with pytest.raises(ValueError, match=r"rope: cos is \[2, 4\] \(right: \[3, 4\]"):
        rope.rope(x, cos[:2], sin)
    with pytest.raises(ValueError, match=r"rope: sin is torch.bfloat16"):
        rope.rope(x, cos, sin.bfloat16())
    with pytest.raises(ValueError, match=r"rope_qkv: qkv is \[1, 3, 2, 2, 4\]"):
        rope.rope_qkv(qkv[:, :, :, :2], cos, sin)
    with pytest.raises(ValueError, match=r"rope_qkv: the keys' weight is \[3\] \(right: \[4\]"):
        rope.rope_qkv(qkv, cos, sin, norms=(torch.ones(4), torch.ones(3), 0.0))
    with pytest.raises(ValueError, match=r"rope_qkv: qkv has strides"):
        rope.rope_qkv(torch.zeros(1, 3, 2, 4, 4)[:, :, :, :3], cos, sin)
