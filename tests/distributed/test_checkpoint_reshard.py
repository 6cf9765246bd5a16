"""A checkpoint written in one layout is read in any other, bitwise. Ranks are threads: saving needs a barrier, not a process group."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megacore.checkpoint import LocalTensor, Reader, write
from megacore.distributed.shard import Along, Shard
from megacore.errors import CheckpointError
from tests.checkpoints import find_latest, save
from tests.pieces import piece
from tests.thread_ranks import ThreadRanks, run_threads

LAYERS = 3
# Logical shape, and the dim that tensor parallelism cuts. 65 rows are pieces of ceil(65 / tp); 5 rows over 4 ranks leave the last empty.
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
    names = [(f"{kind}/{name}", shape, dtype) for kind, dtype in KINDS.items() for name, (shape, _) in SHAPES.items()]
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape, dtype in names}


def cut(whole: Tensor, dim: int | None, rank: int, count: int) -> Tensor:
    """The piece of a rank, by torch's own rule for uneven chunks and not by `Shard`'s."""
    if dim is None:
        return whole
    chunks = torch.chunk(whole, count, dim)
    return chunks[rank] if rank < len(chunks) else whole.narrow(dim, 0, 0)


def on_rank(stage: int, tp_rank: int, pp: int, tp: int) -> dict[str, LocalTensor]:
    """What a rank holds: its tensor-parallel pieces of its stage; the tied embedding again, as a copy, on the last stage."""
    stages = {"embedding.weight": [0, pp - 1], "head.bias": [pp - 1]}
    stages |= {name: [int(name.split(".")[1]) * pp // LAYERS] for name in SHAPES if name.startswith("blocks")}
    pieces = {}
    for name, whole in logical().items():
        key = name.split("/")[1]
        dim = SHAPES[key][1]
        if stage in stages[key]:
            along = (Along("tp", tp_rank, tp, dim=dim), Along("tied", stages[key].index(stage), len(stages[key]), partial=True))
            pieces[name] = (cut(whole, dim, tp_rank, tp), Shard(tuple(whole.shape), along))
    return pieces


def save_as(
    directory: Path, tp: int, pp: int, dp: int = 1, change: Callable[[int, dict[str, LocalTensor]], None] = lambda *_: None
) -> Path:
    """Save from tp × dp × pp ranks at once; `change(rank, pieces)` plants faults."""

    def rank_saves(ranks: ThreadRanks) -> Path:
        tp_rank, dp_rank, stage = ranks.rank % tp, ranks.rank // tp % dp, ranks.rank // (tp * dp)
        pieces = on_rank(stage, tp_rank, pp, tp)
        if dp_rank > 0:  # a copy of what the first data rank writes
            copies = Along("dp", dp_rank, dp)
            pieces = {name: (held, replace(shard, along=(*shard.along, copies))) for name, (held, shard) in pieces.items()}
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
        for dim in (SHAPES[name.split("/")[1]][1], *range(whole.ndim)):  # also along a dim it was not cut along
            for index in range(count):
                read = reader.read(name, piece(tuple(whole.shape), dim, index, count))
                assert read.dtype == whole.dtype and torch.equal(read, cut(whole, dim, index, count)), f"{name} dim {dim} piece {index}"


def test_copies_are_not_written(tmp_path):
    """Data ranks beyond the first, replicated and tied tensors: each element is on disk once."""
    path = save_as(tmp_path, tp=2, pp=2, dp=2)
    manifest = Reader(path).manifest
    assert sorted(manifest.files) == [f"rank_{rank:05d}.safetensors" for rank in (0, 1, 4, 5)]
    assert [piece.file for piece in manifest.tensors["model/blocks.0.norm.weight"].slices] == ["rank_00000.safetensors"]
    assert [piece.file[:10] for piece in manifest.tensors["model/embedding.weight"].slices] == ["rank_00000", "rank_00001"]


def lose_a_piece(rank: int, pieces: dict[str, LocalTensor]) -> None:
    if rank == 1:
        del pieces["adam_v/embedding.weight"]


def write_a_copy(rank: int, pieces: dict[str, LocalTensor]) -> None:
    if rank == 3:  # as if the tied embedding of the last stage were not marked as a copy
        held, shard = pieces["model/embedding.weight"]
        along = tuple(along for along in shard.along if along.axis != "tied")
        pieces["model/embedding.weight"] = (held, Shard(shard.global_shape, along))


def widen(rank: int, pieces: dict[str, LocalTensor]) -> None:
    if rank == 1:
        piece, shard = pieces["model/blocks.0.qkv.weight"]
        pieces["model/blocks.0.qkv.weight"] = (piece.float(), shard)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lose_a_piece, r"tensor adam_v/embedding\.weight has slices for 264 of its 520 elements"),
        (write_a_copy, r"tensor model/embedding\.weight has overlapping slices.* in rank_00001.* in rank_00003"),
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
    with pytest.raises(CheckpointError, match=r"step_00000007: was not saved: rank 2 of 4: No space left on device"):
        save_as(tmp_path, tp=2, pp=2)
    assert find_latest(tmp_path) is None
