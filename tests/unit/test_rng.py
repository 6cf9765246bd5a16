"""Random numbers depend on what they are for: any rank draws the part of a tensor, or the mask, that one process would."""

import random

import pytest
import torch

from megacore import rng
from megacore.rng import BLOCKS, key_of, normal_slice

CPU = torch.device("cpu")


def whole(key: tuple[object, ...], shape: tuple[int, ...], dim: int, std: float = 1.0) -> torch.Tensor:
    return normal_slice(key, shape, std, dim, 0, shape[dim])


# Around the number of blocks, where their size changes from one to two and the last block may be short or missing.
@pytest.mark.parametrize("size", [1, 2, 7, 63, 64, 65, 100, 127, 128, 129, 1000])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_any_cut_is_that_part_of_the_whole(size: int, dim: int) -> None:
    """A layout that cuts elsewhere would start from other weights."""
    shape = tuple(size if d == dim else n for d, n in enumerate((3, 2, 5)))
    full = whole(("w",), shape, dim)
    assert full.shape == shape
    cut = random.Random(size)
    cuts = [(0, 1), (size - 1, size), *(sorted(cut.sample(range(size + 1), 2)) for _ in range(20))]
    for start, stop in cuts:
        assert torch.equal(normal_slice(("w",), shape, 1.0, dim, start, stop), full.narrow(dim, start, stop - start))
    for ranks in (2, 3, 4, 8):
        step = -(-size // ranks)
        pieces = [normal_slice(("w",), shape, 1.0, dim, r, min(r + step, size)) for r in range(0, size, step)]
        assert torch.equal(torch.cat(pieces, dim), full)


def test_a_rank_draws_little_more_than_its_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing the whole tensor on every rank would make start-up grow with the model instead of with its part."""
    drawn: list[tuple[object, ...]] = []

    def count(*parts: object) -> int:
        drawn.append(parts)
        return key_of(*parts)

    monkeypatch.setattr(rng, "key_of", count)
    normal_slice(("w",), (50304, 2), 1.0, 0, 50304 // 8, 50304 // 4)
    assert 0 < len(drawn) <= BLOCKS // 8 + 1


def test_numbers_are_normal() -> None:
    """Mean, deviation and tails of a tensor, and no block like another: four standard errors of 600,000 numbers."""
    x = whole(("embedding.weight",), (1000, 600), 0, std=0.02).double() / 0.02
    error = x.numel() ** -0.5
    assert abs(x.mean()) < 4 * error
    assert abs(x.square().mean() - 1) < 4 * 2**0.5 * error
    assert abs((x.abs() > 1.959964).double().mean() - 0.05) < 4 * 0.05**0.5 * error
    blocks = x[: 1000 // 16 * 16].view(-1, 16 * 600)  # as the blocks are cut: ceil(1000 / 64) rows each
    correlation = torch.corrcoef(blocks) - torch.eye(len(blocks))
    assert correlation.abs().max() < 6 * (16 * 600) ** -0.5


def test_another_name_seed_or_block_is_another_stream() -> None:
    """Two layers with equal weights would stay equal for ever, where they see the same input."""
    tensors = [whole(key, (40, 8), 0) for key in ((0, "blocks.0.w"), (0, "blocks.1.w"), (1, "blocks.0.w"), (0, "blocks.0.w", 1))]
    for i, a in enumerate(tensors):
        assert all(not (a == b).any() for b in tensors[:i])
    assert torch.equal(tensors[0], whole((0, "blocks.0.w"), (40, 8), 0))


def test_keys_do_not_run_together() -> None:
    """("a", 12) and ("a1", 2), or 1 and "1", would share their numbers if parts were only joined."""
    parts: list[tuple[object, ...]] = [("a", 12), ("a1", 2), ("a", 1, 2), ("a", "12"), (("a", 12),), ("a12",)]
    keys = [key_of(*p) for p in parts]
    assert len(set(keys)) == len(keys)
    assert all(0 <= key < 2**63 for key in keys), "a generator's seed must fit"


def test_a_key_is_the_same_in_every_process() -> None:
    """Python's own `hash` of a string is another in each process: ranks would draw different masks. The value is fixed for ever,
    or an old run would resume with other dropout."""
    assert key_of(0, "embedding.weight", 64) == 201941048195853859
