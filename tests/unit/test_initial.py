"""First weights: any rank draws its part of a tensor, and gets the numbers that one process gets."""

import random
from unittest import mock

import pytest
import torch
from torch import Tensor

from megacore.distributed.communicator import SOLO
from megacore.distributed.shard import Shard, TensorSlice, split
from megacore.model import initial
from megacore.model.initial import BLOCKS, initialise
from megacore.rng import key_of, normal_runs


def piece(
    shape: tuple[int, ...],
    dim: int,
    box: TensorSlice | None = None,
    *,
    seed: int = 0,
    name: str = "w",
    std: float = 1.0,
) -> Tensor:
    """What is drawn of a logical tensor whose blocks lie along `dim`; all of it without a box."""
    shard = Shard(shape, (split(SOLO, dim),), init_std=std)
    out = torch.full((box or shard).local_shape, torch.nan)
    initialise({name: (out, box or shard)}, {name: shard}, seed, torch.float32)
    return out


def at_once(shape: tuple[int, ...], dim: int) -> Tensor:
    """The same, block after block as a whole."""
    step = -(-shape[dim] // BLOCKS)
    blocks = []
    for first in range(0, shape[dim], step):
        block = torch.empty([min(step, n - first) if d == dim else n for d, n in enumerate(shape)])
        blocks.append(block.normal_(generator=torch.Generator().manual_seed(key_of(0, "w", first))))
    return torch.cat(blocks, dim)


# Around the number of blocks, where their size changes from one to two and the last block may be short or
# missing.
@pytest.mark.parametrize("size", [1, 2, 7, 63, 64, 65, 100, 127, 128, 129, 1000])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_any_box_is_that_part_of_the_whole(monkeypatch: pytest.MonkeyPatch, size: int, dim: int) -> None:
    """A layout that cuts elsewhere, or an engine that keeps rows of a cut, would start from other weights."""
    shape = tuple(size if d == dim else n for d, n in enumerate((3, 2, 5)))
    full = at_once(shape, dim)
    cut = random.Random(size)
    for run in (16, 1 << 20):
        monkeypatch.setattr("megacore.rng.RUN", run)
        assert torch.equal(piece(shape, dim), full)
        for _ in range(20):
            starts = tuple(cut.randrange(n) for n in shape)
            sizes = tuple(cut.randint(0, n - start) for start, n in zip(starts, shape, strict=True))
            part = full[tuple(slice(start, start + n) for start, n in zip(starts, sizes, strict=True))]
            assert torch.equal(piece(shape, dim, TensorSlice(shape, starts, sizes)), part), (starts, sizes)


def test_threads_give_the_same_numbers_and_tell_of_each_block() -> None:
    """Who watches must see that a long start moves."""
    shard, told = Shard((640, 8), (split(SOLO, 0),), init_std=1.0), []
    held = {name: (torch.empty(640, 8), shard) for name in ("a", "b")}
    initialise(held, {"a": shard, "b": shard}, 3, torch.float32, 4, lambda: told.append(1))
    assert len(told) == 2 * BLOCKS
    for name, (tensor, _) in held.items():
        assert torch.equal(tensor, piece((640, 8), 0, seed=3, name=name))


def test_masters_start_as_the_rounded_weights() -> None:
    """Masters with more bits than the weights that compute would be another model after
    a save and a resume.
    """
    shard, out = Shard((8, 8), init_std=1.0), torch.empty(8, 8)
    initialise({"w": (out, shard)}, {"w": shard}, 0, torch.bfloat16)
    assert torch.equal(out, piece((8, 8), 0).bfloat16().float())


def numbers_drawn(shape: tuple[int, ...], dim: int, box: TensorSlice) -> int:
    drawn = 0

    def counted(key: tuple[object, ...], size: int, std: float, stop: int) -> object:
        nonlocal drawn
        for first, values in normal_runs(key, size, std, stop):
            drawn += len(values)
            yield first, values

    with mock.patch.object(initial, "normal_runs", counted):
        piece(shape, dim, box)
    return drawn


def test_a_rank_draws_little_more_than_its_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing the whole tensor on every rank would make start-up grow with the
    model instead of with its part.
    """
    monkeypatch.setattr("megacore.rng.RUN", 16)
    rows = 50304
    assert (
        numbers_drawn((rows, 2), 0, TensorSlice((rows, 2), (rows // 8, 0), (rows // 8, 2)))
        <= rows * 2 * (BLOCKS // 8 + 1) / BLOCKS
    )
    # Rows of a tensor whose blocks are columns: no further than the last row.
    assert (
        numbers_drawn((800, 640), 1, TensorSlice((800, 640), (0, 0), (100, 640))) <= 100 * 640 + 16 * BLOCKS
    )
    assert numbers_drawn((800, 640), 1, TensorSlice((800, 640), (300, 0), (0, 640))) == 0


def test_numbers_are_normal() -> None:
    """Mean, deviation and tails of a tensor, and no block like another: four
    standard errors of 600,000 numbers.
    """
    x = piece((1000, 600), 0, name="embedding.weight", std=0.02).double() / 0.02
    error = x.numel() ** -0.5
    assert abs(x.mean()) < 4 * error
    assert abs(x.square().mean() - 1) < 4 * 2**0.5 * error
    assert abs((x.abs() > 1.959964).double().mean() - 0.05) < 4 * 0.05**0.5 * error
    blocks = x[: 1000 // 16 * 16].view(-1, 16 * 600)  # as the blocks are cut: ceil(1000 / 64) rows each
    correlation = torch.corrcoef(blocks) - torch.eye(len(blocks))
    assert correlation.abs().max() < 6 * (16 * 600) ** -0.5


def test_another_name_seed_or_block_is_another_stream() -> None:
    """Two layers with equal weights would stay equal for ever, where they see the same input."""
    tensors = [
        piece((40, 8), 0, seed=seed, name=name)
        for seed, name in ((0, "blocks.0.w"), (0, "blocks.1.w"), (1, "blocks.0.w"))
    ]
    for i, a in enumerate(tensors):
        assert all(not (a == b).any() for b in tensors[:i])
    assert torch.equal(tensors[0], piece((40, 8), 0, name="blocks.0.w"))
