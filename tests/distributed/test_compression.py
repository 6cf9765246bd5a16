"""Gradients that travel compressed: the plain sum where nothing is lost, the same bits on every
rank, and nothing lost for good.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from megacore.checkpoint import Reader
from megacore.distributed.shard import TensorSlice, logical_name
from megacore.engine.compression import RESIDUAL, STATE
from megacore.tools.launchers import place_from_environment
from megacore.tools.planner.memory import rank_memory
from megacore.train import checkpointing
from megacore.train.checkpointing import read_residuals
from tests import training
from tests.build import step_of
from tests.compressed_sums import INT8, LOW_RANK, check_sums, started, sums_on_a_rank, write_config
from tests.steps import Found, apart, train

FULL_RANK = 'engine.compression={"kind": "low_rank", "rank": null}'
EXACT_BLOCKS = 'engine.compression={"kind": "int8", "block": 64, "rounding": "none"}'
TWO_LEVELS, SHARDED = "engine.reduce_levels=2", "engine.shard_optimizer=true"


@pytest.fixture(scope="module")
def config_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_config(tmp_path_factory.mktemp("compression"))


# Where nothing is lost


def trained(config_path: str, overrides: list[str]) -> tuple[Found, float]:
    """Some steps, without the state of compression, and the largest number in residuals."""
    found = train(*started(config_path, overrides))
    lost = [
        float(piece.tensor.abs().max()) for key, piece in found.pieces.items() if key.startswith(RESIDUAL)
    ]
    return Found(
        found.figures, {key: piece for key, piece in found.pieces.items() if not key.startswith(STATE)}
    ), max(lost, default=0.0)


@pytest.fixture(scope="module")
def one(pool: Any, config_path: str) -> Found:
    """One process, in fp64."""
    return pool.run(1, trained, config_path, ["train.precision=fp64"])[0][0]


LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "dp4, two levels": (4, [TWO_LEVELS]),
    "dp4, two levels, sharded": (4, [TWO_LEVELS, SHARDED]),
    "dp2 tp2, sequence, sharded": (4, ["parallel.tensor=2", "parallel.sequence=true", SHARDED]),
    "cp2 pp2, tied, zb_v": (4, ["parallel.context=2", "parallel.pipeline=2", "parallel.schedule=zb_v"]),
}


@pytest.mark.parametrize("compression", [EXACT_BLOCKS, FULL_RANK], ids=["int8", "low rank"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_where_nothing_is_lost_it_is_the_plain_sum(
    pool: Any, config_path: str, one: Found, layout: str, compression: str
) -> None:
    """A part that is sent twice or never, to the wrong place, or with another's
    scale; a residual of something else.
    """
    world, overrides = LAYOUTS[layout]
    ranks = pool.run(world, trained, config_path, [*overrides, "train.precision=fp64", compression])
    assert apart([found for found, _ in ranks], one) < 1e-9
    assert all(lost < 1e-12 for _, lost in ranks)


def memory(config_path: str, overrides: list[str]) -> tuple[int, int]:
    """The bytes that compression keeps on this rank, and what the planner says."""
    config, mesh = started(config_path, overrides)
    compression = step_of(config, mesh).engine.compression  # type: ignore[attr-defined]
    held = {
        tensor.untyped_storage() for bucket in compression.buckets.values() for tensor in tensors_in(bucket)
    }
    gradients = {bucket.gradients.untyped_storage().data_ptr() for bucket in compression.buckets.values()}
    found = {storage.data_ptr(): storage.nbytes() for storage in held}
    return sum(size for at, size in found.items() if at not in gradients), rank_memory(config)[
        mesh.pp.rank
    ].compression


def tensors_in(bucket: Any) -> Iterator[Tensor]:
    """Those of a bucket's fields, and of the fields of these. (A loss scale is everybody's.)"""
    values = [
        value
        for name, value in vars(bucket).items()
        if name not in ("buffer", "bucket", "levels", "loss_scale")
    ]
    values += [
        value
        for each in (*bucket.residuals, *values)
        if hasattr(each, "__dict__")
        for value in vars(each).values()
    ]
    return (value for value in values if isinstance(value, Tensor))


@pytest.mark.parametrize("compression", [INT8, LOW_RANK], ids=["int8", "low rank"])
@pytest.mark.parametrize("layout", [[], ["parallel.pipeline=2"]], ids=["dp4", "pp2dp2"])
def test_what_it_keeps_is_planned(pool: Any, config_path: str, layout: list[str], compression: str) -> None:
    """Eight bytes a parameter and more, which nobody would have counted, and the device would lack."""
    for held, planned in pool.run(4, memory, config_path, [*layout, compression]):
        assert held == planned > 0


# Where something is lost

SUMS: dict[str, tuple[int, list[str], int | None]] = {
    "int8": (2, [INT8], 2),
    "int8, two levels": (4, [TWO_LEVELS, INT8], 2),
    "int8, two levels, sharded": (4, [TWO_LEVELS, SHARDED, INT8], 2),
    "low rank": (2, [LOW_RANK], None),
    "low rank, two levels, sharded": (4, [TWO_LEVELS, SHARDED, LOW_RANK], None),
}


@pytest.mark.parametrize("name", SUMS)
def test_what_a_sum_lacks_comes_later(pool: Any, config_path: str, name: str) -> None:
    """Ranks that round apart, an error beyond that of rounding, a residual that is dropped, of
    another bucket, with a loss scale that is gone, or of a step that was skipped; and an infinity
    that nobody sees, or that stays.
    """
    world, overrides, hosts = SUMS[name]
    check_sums(pool.run(world, sums_on_a_rank, config_path, overrides), hosts)


# Checkpoints


def run_on_hosts(config_path: str, overrides: list[str], log_dir: str, forgets: bool = False) -> None:
    """A run; ranks take turns on two hosts. `forgets`: the planted fault, it resumes without residuals."""
    os.environ["MEGACORE_HOST"] = "ab"[place_from_environment().rank % 2]
    with mock.patch.object(checkpointing, "read_residuals", (lambda *_: []) if forgets else read_residuals):
        training.run_rank(config_path, overrides, log_dir)


def digests(folder: Path, step: int) -> dict[str, str]:
    """The contents of a checkpoint, by tensor."""
    return {
        name: tensor.digest
        for name, tensor in Reader(folder / f"checkpoints/step_{step:08d}").manifest.tensors.items()
    }


def residuals(folder: Path, step: int) -> dict[str, Tensor]:
    """The residuals of a checkpoint, by tensor: of each parameter all that ranks have, added up."""
    reader = Reader(folder / f"checkpoints/step_{step:08d}")
    shapes = {
        name: tensor.shape for name, tensor in reader.manifest.tensors.items() if name.startswith(RESIDUAL)
    }
    return {
        name: reader.read(name, TensorSlice(shape, (0,) * len(shape), shape)).double().sum(0)
        for name, shape in shapes.items()
    }


def read_on_a_rank(
    config_path: str, overrides: list[str], checkpoint: str
) -> tuple[dict[str, tuple[Tensor, TensorSlice]], list[str]]:
    """What a rank of any layout reads of a checkpoint's residuals, and what it says of them."""
    step = step_of(*started(config_path, overrides))
    held = {key: piece for key, piece in step.engine.tensors().items() if key.startswith(RESIDUAL)}
    said = read_residuals(Reader(Path(checkpoint)), held)
    step.engine.close()
    step.mesh.close()
    return held, said


@pytest.mark.parametrize("compression", [INT8, LOW_RANK], ids=["int8", "low rank"])
def test_a_run_goes_on_bit_by_bit_and_in_another_layout_with_the_same_sum(
    pool: Any, config_path: str, tmp_path: Path, compression: str
) -> None:
    """A residual that is not saved, or not restored, or of another parameter or rank; one that a
    change of layout loses or doubles.
    """
    overrides = [TWO_LEVELS, compression, "checkpoint.every=2", "checkpoint.keep=3"]
    whole, forgetful = tmp_path / "whole", tmp_path / "forgetful"
    pool.run(4, run_on_hosts, config_path, overrides, str(whole))
    second = whole / "checkpoints/step_00000002"
    for folder, forgets in ((tmp_path / "again", False), (forgetful, True)):
        pool.run(
            4, run_on_hosts, config_path, [*overrides, f"checkpoint.resume={second}"], str(folder), forgets
        )
    assert digests(whole, 4) == digests(tmp_path / "again", 4)
    assert digests(whole, 4) != digests(forgetful, 4)

    saved = residuals(whole, 2)
    assert saved and any(float(total.abs().max()) > 0 for total in saved.values())
    others = {2: [], 8: ["parallel.tensor=2", "parallel.pipeline=2", SHARDED]}
    for world, layout in others.items():
        found = {name: torch.zeros_like(total) for name, total in saved.items()}
        for held, said in pool.run(world, read_on_a_rank, config_path, [*layout, compression], str(second)):
            for key, (tensor, box) in held.items():
                if box.counted:
                    found[logical_name(key)][box.slices[1:]] += tensor[0].double()
            if compression == INT8:
                # two hosts are two hosts
                assert [line.endswith("with the same sum") for line in said] == [True] * (world == 8)
            else:
                assert said[0].endswith("4 of each parameter became 2, with the same sum")
        for name, total in saved.items():
            assert float((found[name] - total).abs().max()) <= 1e-6 * float(total.abs().max()), name
    ((held, said),) = pool.run(1, read_on_a_rank, config_path, [], str(second))
    assert (
        not held and len(said) == 1 and said[0].startswith("WARNING: the checkpoint's residuals are left out")
    )
