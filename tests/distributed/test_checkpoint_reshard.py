"""A checkpoint written in one layout is read in any other, bitwise.

Ranks are threads: saving needs a barrier, not a process group.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megacore.checkpoint import LocalTensor, Reader, write
from megacore.distributed.shard import AxisPlacement, Shard
from megacore.errors import CheckpointError
from tests.checkpoints import find_latest, save
from tests.pieces import piece
from tests.thread_ranks import ThreadRanks, run_threads

LAYERS = 3
# Logical shape, and the dim that tensor parallelism cuts. 65 rows are pieces of ceil(65 / tp); 5 rows over 4
# ranks leave the last empty.
SHAPES: dict[str, tuple[tuple[int, ...], int | None]] = {
    "embedding.weight": ((65, 8), 0),
    **{f"blocks.{layer}.qkv.weight": ((24, 8), 0) for layer in range(LAYERS)},
    **{f"blocks.{layer}.project.weight": ((8, 10), 1) for layer in range(LAYERS)},
    **{f"blocks.{layer}.norm.weight": ((8,), None) for layer in range(LAYERS)},
    "head.bias": ((5,), 0),
}
KINDS = {"model": torch.bfloat16, "adam_m": torch.float32, "adam_v": torch.float64}


def logical() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    names = [
        (f"{kind}/{name}", shape, dtype)
        for kind, dtype in KINDS.items()
        for name, (shape, _) in SHAPES.items()
    ]
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape, dtype in names}


def cut(whole: Tensor, dim: int | None, rank: int, count: int) -> Tensor:
    """The piece of a rank, by torch's own rule for uneven chunks and not by `Shard`'s."""
    if dim is None:
        return whole
    chunks = torch.chunk(whole, count, dim)
    return chunks[rank] if rank < len(chunks) else whole.narrow(dim, 0, 0)


def on_rank(stage: int, tp_rank: int, pp: int, tp: int) -> dict[str, LocalTensor]:
    """What a rank holds: its tensor-parallel pieces of its stage; the tied embedding
    again, as a copy, on the last stage.
    """
    stages = {"embedding.weight": sorted({0, pp - 1}), "head.bias": [pp - 1]}
    stages |= {name: [int(name.split(".")[1]) * pp // LAYERS] for name in SHAPES if name.startswith("blocks")}
    pieces = {}
    for name, whole in logical().items():
        key = name.split("/")[1]
        dim = SHAPES[key][1]
        if stage in stages[key]:
            along = (
                AxisPlacement("tp", tp_rank, tp, dim=dim),
                AxisPlacement("tied", stages[key].index(stage), len(stages[key]), partial=True),
            )
            pieces[name] = (cut(whole, dim, tp_rank, tp), Shard(tuple(whole.shape), along))
    return pieces


def save_as(
    directory: Path,
    tp: int,
    pp: int,
    dp: int = 1,
    change: Callable[[int, dict[str, LocalTensor]], None] = lambda *_: None,
) -> Path:
    """Save from tp × dp × pp ranks at once; `change(rank, pieces)` plants faults."""

    def rank_saves(ranks: ThreadRanks) -> Path:
        tp_rank, dp_rank, stage = ranks.rank % tp, ranks.rank // tp % dp, ranks.rank // (tp * dp)
        pieces = on_rank(stage, tp_rank, pp, tp)
        copies = AxisPlacement("dp", dp_rank, dp)
        pieces = {
            name: (held, replace(shard, along=(*shard.along, copies)))
            for name, (held, shard) in pieces.items()
        }
        change(ranks.rank, pieces)
        return save(directory, 7, pieces, {}, ranks=ranks, keep=1)

    return run_threads(tp * dp * pp, rank_saves)[0]


@pytest.mark.parametrize("saved", [(1, 1, 1), (2, 2, 1), (4, 1, 2)], ids="tp{0[0]}pp{0[1]}dp{0[2]}".format)
@pytest.mark.parametrize("count", [1, 2, 3, 4, 7])
def test_any_layout_reads_what_any_other_wrote(saved, count, tmp_path):
    reader = Reader(save_as(tmp_path, *saved))
    reader.verify()
    assert reader.names == sorted(logical())
    for name, whole in logical().items():
        # also along a dim it was not cut along
        for dim in (SHAPES[name.split("/")[1]][1], *range(whole.ndim)):
            for index in range(count):
                read = reader.read(name, piece(tuple(whole.shape), dim, index, count))
                assert read.dtype == whole.dtype and torch.equal(read, cut(whole, dim, index, count)), (
                    f"{name} dim {dim} piece {index}"
                )


def test_copies_are_written_once_and_dealt_out(tmp_path):
    """Data ranks', replicated and tied tensors: each element is on disk once, and no rank writes much more
    than another, or a save of unsharded state would wait for the first data rank alone.
    """
    path = save_as(tmp_path, tp=2, pp=2, dp=4)
    manifest = Reader(path).manifest
    assert len(list(manifest.pieces("model/blocks.0.norm.weight"))) == 1
    assert len(list(manifest.pieces("model/embedding.weight"))) == 2
    assert len(manifest.files) == 16
    for stage in (0, 1):
        sizes = [
            manifest.files[f"rank_{rank:05d}.safetensors"].bytes for rank in range(8 * stage, 8 * stage + 8)
        ]
        assert max(sizes) - min(sizes) <= 65 * 8 // 2 * 8 + 1024, "the largest tensor's piece, and headers"


@pytest.mark.parametrize("large", [0, 30, 64])
def test_dealing_is_even(tmp_path, large):
    """By bytes, and not by number: of one large and many small tensors the large one is a rank's
    whole part, wherever it stands.
    """
    sizes = [64] * 64
    sizes.insert(large, 4096)

    def rank_saves(ranks: ThreadRanks) -> None:
        copies = (AxisPlacement("dp", ranks.rank, ranks.world),)
        save(
            tmp_path,
            1,
            {f"w{i}": (torch.ones(size), Shard((size,), copies)) for i, size in enumerate(sizes)},
            {},
            ranks=ranks,
            keep=1,
        )

    run_threads(2, rank_saves)
    manifest = Reader(tmp_path / "step_00000001").manifest
    held = [{piece.file for piece in manifest.pieces(f"w{i}")} for i in range(len(sizes))]
    assert held.pop(large) == {"rank_00000.safetensors"} and set.union(*held) == {"rank_00001.safetensors"}


def lose_a_piece(rank: int, pieces: dict[str, LocalTensor]) -> None:
    if rank == 1:
        del pieces["adam_v/blocks.0.qkv.weight"]


def write_a_copy(rank: int, pieces: dict[str, LocalTensor]) -> None:
    if rank == 3:  # as if the tied embedding of the last stage were not marked as a copy
        held, shard = pieces["adam_v/embedding.weight"]
        along = tuple(along for along in shard.along if along.axis != "tied")
        pieces["adam_v/embedding.weight"] = (held, Shard(shard.global_shape, along))


def widen(rank: int, pieces: dict[str, LocalTensor]) -> None:
    if rank == 1:
        piece, shard = pieces["model/blocks.0.qkv.weight"]
        pieces["model/blocks.0.qkv.weight"] = (piece.float(), shard)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lose_a_piece, r"tensor adam_v/blocks\.0\.qkv\.weight has slices for 96 of its 192 elements"),
        (
            write_a_copy,
            r"tensor adam_v/embedding\.weight has overlapping slices.* in rank_00001.* in rank_00003",
        ),
        (widen, r"tensor model/blocks\.0\.qkv\.weight is float32 .* on rank 1 \(bfloat16"),
    ],
)
def test_ranks_that_disagree_commit_nothing(change, message, tmp_path):
    with pytest.raises(CheckpointError, match=message):
        save_as(tmp_path, tp=2, pp=2, change=change)
    assert find_latest(tmp_path) is None


def test_the_failing_rank_gives_its_reason(tmp_path, monkeypatch):
    """Rank 2 cannot write its file: its reason comes out, and nothing is committed."""
    original = write.write_safetensors

    def full(file: Path, *rest: Any) -> int:
        if file.name == "rank_00002.safetensors":
            raise OSError(28, "No space left on device")
        return original(file, *rest)

    monkeypatch.setattr(write, "write_safetensors", full)
    with pytest.raises(
        CheckpointError, match=r"step_00000007: was not saved: rank 2 of 4: No space left on device"
    ):
        save_as(tmp_path, tp=2, pp=2)
    assert find_latest(tmp_path) is None
