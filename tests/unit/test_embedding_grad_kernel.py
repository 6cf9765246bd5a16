"""The embedding's gradient against fp64, in Triton's interpreter; tests/gpu runs the same checks on a GPU."""

import pytest
import torch
from torch import Tensor

from benchmarks.kernel_inputs import zipf_tokens
from megacore.kernels import embedding_grad
from tests.kernel_checks import TOLERANCE, needs_triton, poisoned_memory, seeded, with_fault
from tests.unit.test_synchronisation import refusing

POSITIONS, COLUMNS = embedding_grad.POSITIONS, embedding_grad.COLUMNS
# Tokens, vocabulary, features. Two levels of partial sums take more than POSITIONS² tokens of a kind.
SIZES = {
    "one token": (1, 1, 1),
    "all alike": (POSITIONS * POSITIONS + 3, 5, 24),
    "runs that fill their blocks": (4 * POSITIONS, 4, 16),
    "runs that cross into the next block": (4 * (POSITIONS + 1), 4, 16),
    "Zipf": (20 * POSITIONS, 300, 24),
    "uniform": (20 * POSITIONS, 300, 24),
    "an odd vocabulary": (9 * POSITIONS + 5, 17, COLUMNS + 13),
}


def draw_ids(name: str, tokens: int, vocabulary: int) -> Tensor:
    """Token ids in an order without a pattern."""
    generator = torch.Generator().manual_seed(0)
    if name == "all alike":
        return torch.full((tokens,), vocabulary - 1)
    if name.startswith("runs"):
        ids = torch.arange(vocabulary).repeat_interleave(tokens // vocabulary)
        return ids[torch.randperm(tokens, generator=generator)]
    if name == "Zipf":
        return zipf_tokens(vocabulary, (tokens,), generator)
    return torch.randint(vocabulary, (tokens,), generator=generator)


def additions(implementation: str, tokens: int) -> int:
    """The most roundings that a token's gradient passes through: one an addition, on all levels."""
    if implementation != "triton":
        return tokens
    roundings, positions = 0, tokens
    while True:
        roundings += POSITIONS + 1  # of a block's sum, and of the total
        positions = -(-positions // POSITIONS)
        if positions == 1:
            return roundings


def error_in_bounds(got: Tensor, total: Tensor, grad: Tensor, ids: Tensor, roundings: int) -> float:
    """The largest error, as a fraction of what `roundings` explain: at most 1 where nothing is wrong.

    With n roundings of relative error u, the sum of x is off by at most n u / (1 - n u) times the sum of |x|.
    """
    total, grad, ids = total.cpu().double(), grad.cpu().double(), ids.cpu()
    exact = total.index_add(0, ids, grad)
    magnitude = total.abs().index_add_(0, ids, grad.abs())
    unit = torch.finfo(got.dtype).eps / 2
    bound = magnitude * roundings * unit / (1 - roundings * unit)
    fraction = ((got.cpu().double() - exact).abs() / bound).max().item()
    return float("inf") if fraction != fraction else fraction


def error_against_fp64(implementation: str, device: str, name: str, dtype: torch.dtype) -> float:
    """Of the second of two equal calls, whose bits must be alike."""
    tokens, vocabulary, features = SIZES[name]
    ids = draw_ids(name, tokens, vocabulary).to(device)
    total = seeded((vocabulary, features), device).to(torch.promote_types(dtype, torch.float32))
    grad = seeded((tokens, features), device, dtype, seed=1)
    with poisoned_memory():
        got, again = (
            embedding_grad.add_embedding_grad(total.clone(), grad, ids, implementation=implementation)
            for _ in range(2)
        )
    assert torch.equal(got.view(torch.uint8), again.view(torch.uint8)), "not the same bits again"
    return error_in_bounds(got, total, grad, ids, additions(implementation, tokens))


def error_of_tensor_ranks(implementation: str, device: str, ranks: int) -> float:
    """Of an odd vocabulary in slices: each gets all tokens, those of other slices for row 0 with zeros."""
    tokens, vocabulary, features = 9 * POSITIONS, 17, 24
    ids = draw_ids("uniform", tokens, vocabulary).to(device)
    total = seeded((vocabulary, features), device)
    grad = seeded((tokens, features), device, torch.bfloat16, seed=1)
    slices = []
    first_row = 0
    for piece in total.split(-(-vocabulary // ranks)):
        local_ids = ids - first_row
        elsewhere = (local_ids < 0) | (local_ids >= len(piece))
        local_ids = local_ids.masked_fill(elsewhere, 0)
        local_grad = grad.masked_fill(elsewhere[:, None], 0)
        got = embedding_grad.add_embedding_grad(
            piece.clone(), local_grad, local_ids, implementation=implementation
        )
        slices.append(got)
        first_row += len(piece)
    assert len(slices) == ranks
    return error_in_bounds(torch.cat(slices), total, grad, ids, additions(implementation, tokens))


def check_corners(device: str) -> None:
    """Any strides, ids of 32 bits, no tokens. Rows without tokens keep their bits; NaN stays in its row."""
    tokens, vocabulary, features = 3 * POSITIONS, 7, 5
    ids = draw_ids("uniform", tokens, vocabulary - 1).to(device)
    total = seeded((vocabulary, features), device)
    strided = {
        "columns of a wider tensor": seeded((tokens, 2 * features), device)[:, 1 : features + 1],
        "transposed": seeded((features, tokens), device).T,
        "expanded": seeded((1, 1), device).expand(tokens, features),
    }
    for name, grad in strided.items():
        results = [
            embedding_grad.add_embedding_grad(total.clone(), grad, token_ids, implementation="triton")
            for token_ids in (ids, ids.int())
        ]
        for got in results:
            assert error_in_bounds(got, total, grad, ids, additions("triton", tokens)) <= 1, name
            assert torch.equal(got[-1], total[-1]), name

    grad = seeded((tokens, features), device)
    grad[ids == 3] = torch.nan
    got = embedding_grad.add_embedding_grad(total.clone(), grad, ids, implementation="triton")
    is_nan = got.isnan()
    assert is_nan.all(1).tolist() == is_nan.any(1).tolist() == [row == 3 for row in range(vocabulary)]

    for shape in ((0, features), (tokens, 0)):
        got = total[:, : shape[1]].clone()
        embedding_grad.add_embedding_grad(
            got, torch.empty(shape, device=device), ids[: shape[0]], implementation="triton"
        )
        assert torch.equal(got, total[:, : shape[1]])


@needs_triton
@pytest.mark.parametrize("name", SIZES)
def test_triton_equals_fp64(interpreted, name):
    assert interpreted(error_against_fp64, "triton", "cpu", name, torch.float32) <= 1


@needs_triton
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_triton_equals_fp64_in_16_bits(interpreted, dtype):
    """The gradients are added in fp32, so the bounds are those of fp32."""
    assert interpreted(error_against_fp64, "triton", "cpu", "Zipf", dtype) <= 1


@needs_triton
@pytest.mark.parametrize("ranks", [2, 3])
def test_tensor_ranks(interpreted, ranks):
    assert interpreted(error_of_tensor_ranks, "triton", "cpu", ranks) <= 1


@needs_triton
def test_triton_corner_cases(interpreted):
    interpreted(check_corners, "cpu")


@pytest.mark.parametrize("dtype", [*TOLERANCE, torch.float64], ids=str)
@pytest.mark.parametrize("name", SIZES)
def test_eager_equals_fp64(name, dtype):
    assert error_against_fp64("auto", "cpu", name, dtype) <= 1
    assert error_of_tensor_ranks("auto", "cpu", 3) <= 1


FAULTS = {
    "the last partial sums are lost": ("if blocks == 1:", "if blocks <= 4:"),
    "the second level is lost": ("if blocks == 1:", "if True:"),
    "a run that crosses into a block is added there too": (
        " & (run_id != id_before), features",
        ", features",
    ),
    "a partial sum loses its id": ("tl.where(run_id == id_before, run_id, NO_ID)", "NO_ID"),
    "a block without a partial sum has an id": ("tl.where(run_id == id_before, run_id, NO_ID)", "run_id"),
    "memory without an id is added": ("tl.where(run_id != NO_ID, features, 0)", "features"),
    "the end of a block is no end": ("mask=position + 1 < stop", "mask=position + 1 < positions"),
    "a run's sum is added to the next run's too": ("sums = tl.where(ends, 0.0, sums)", "sums = sums"),
    "the total is overwritten": ("tl.store(row, old + sums", "tl.store(row, sums"),
    "gradients are not in the order of their ids": ("tl.load(order + position)", "position"),
    "the last features are lost": ("column_blocks = triton.cdiv(features, COLUMNS)", "column_blocks = 1"),
}


@needs_triton
@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_caught(interpreted, fault):
    """By one of two sizes: a run of three levels, or many runs over two blocks of features."""
    names = "all alike", "an odd vocabulary"
    errors = [
        interpreted(
            with_fault,
            "embedding_grad",
            *FAULTS[fault],
            error_against_fp64,
            "triton",
            "cpu",
            name,
            torch.float32,
        )
        for name in names
    ]
    assert max(errors) > 1, errors


def launches_without_waiting() -> int:
    """The number of launches for a microbatch on meta tensors, for whose values the host cannot wait."""
    from benchmarks.kernel_compile import recorded_launches

    total = torch.empty(50304, 768, device="meta")
    grad = torch.empty(16384, 768, dtype=torch.bfloat16, device="meta")
    ids = torch.empty(16384, dtype=torch.int64, device="meta")
    with recorded_launches() as launches, refusing():
        embedding_grad.add_embedding_grad(total, grad, ids, implementation="triton")
    return len(launches)


@needs_triton
def test_the_host_does_not_wait():
    """A loop that ends when no partial sum is left would make it wait."""
    assert launches_without_waiting() == 4
    with pytest.raises(RuntimeError, match="cannot be called on meta tensors"):
        waiting = "if not (partial_ids >= 0).any():"
        with_fault("embedding_grad", "if blocks == 1:", waiting, launches_without_waiting)


REFUSALS = {
    r"total is \[6\] \(right: \[vocabulary, features\]\)": lambda total, grad, ids: (
        total.flatten(),
        grad,
        ids,
    ),
    r"ids is \[1, 4\] \(right: \[tokens\]\)": lambda total, grad, ids: (total, grad, ids[None]),
    r"grad is \[4, 1\] \(right: \[4, 2\]: tokens as in ids": lambda total, grad, ids: (
        total,
        grad[:, :1],
        ids,
    ),
    r"total is torch.bfloat16, stride": lambda total, grad, ids: (total.bfloat16(), grad, ids),
    r"total is torch.float32, stride \(1, 3\) \(right: fp32, contig": lambda total, grad, ids: (
        total.T.contiguous().T,
        grad,
        ids,
    ),
    r"total is torch.float64, which its Triton kernel": lambda total, grad, ids: (total.double(), grad, ids),
}


@needs_triton
@pytest.mark.parametrize("message", REFUSALS)
def test_refusals(message):
    total, grad, ids = torch.zeros(3, 2), torch.zeros(4, 2), torch.zeros(4, dtype=torch.int64)
    with pytest.raises(ValueError, match=message):
        embedding_grad.add_embedding_grad(*REFUSALS[message](total, grad, ids), implementation="triton")
