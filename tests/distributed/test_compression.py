"""Gradients that travel compressed: the plain sum where nothing is lost, the same bits on every rank, and nothing lost for good."""

import os
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from megacore.checkpoint import Reader
from megacore.distributed.mesh import Mesh
from megacore.distributed.shard import TensorSlice, logical_name
from megacore.engine.compression import RESIDUAL, STATE, Blocks, GradientCompression
from megacore.tools.choices.settle import settled_alone
from megacore.tools.launchers import place_from_environment
from megacore.tools.planner.memory import rank_memory
from megacore.tools.settings.load import load
from megacore.train import trainer
from megacore.train.residuals import read_residuals
from megacore.train.step import TrainStep
from tests import training
from tests.steps import Found, apart, train

BLOCK = 64
LOW_RANK, FULL_RANK = '{"kind": "low_rank", "rank": 2}', '{"kind": "low_rank", "rank": null}'
INT8, EXACT_BLOCKS = '{"kind": "int8", "block": 64}', '{"kind": "int8", "block": 64, "rounding": "none"}'
TWO_LEVELS, SHARDED = "engine.reduce_levels=2", "engine.shard_optimizer=true"


def setting(compression: str) -> str:
    return f"engine.compression={compression}"


@pytest.fixture(scope="module")
def config_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Several buckets, and parameters of odd sizes, so that there are gaps."""
    folder = tmp_path_factory.mktemp("compression")
    train = {"steps": 4, "global_batch_size": 8}
    return training.write_config(
        folder, training.write_corpus(folder), model={"num_layers": 4}, engine={"bucket_mib": 0.02}, train=train, optim={"warmup_steps": 1}
    )


def started(config_path: str, overrides: list[str]) -> tuple[Any, Mesh]:
    """A rank's config and mesh; ranks take turns on two hosts."""
    place = place_from_environment()
    os.environ["MEGACORE_HOST"] = "ab"[place.rank % 2] if place.world_size > 1 else "a"
    config = settled_alone(load(config_path, overrides, place.world_size).config)
    return config, Mesh(config, place, torch.device("cpu"))


# Where nothing is lost


def trained(config_path: str, overrides: list[str]) -> tuple[Found, float]:
    """Some steps, without the state of compression, and the largest number in residuals."""
    found = train(*started(config_path, overrides))
    lost = [float(piece.tensor.abs().max()) for key, piece in found.pieces.items() if key.startswith(RESIDUAL)]
    return Found(found.figures, {key: piece for key, piece in found.pieces.items() if not key.startswith(STATE)}), max(lost, default=0.0)


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
def test_where_nothing_is_lost_it_is_the_plain_sum(pool: Any, config_path: str, one: Found, layout: str, compression: str) -> None:
    """A part that is sent twice or never, to the wrong place, or with another's scale; a residual of something else."""
    world, overrides = LAYOUTS[layout]
    ranks = pool.run(world, trained, config_path, [*overrides, "train.precision=fp64", setting(compression)])
    assert apart([found for found, _ in ranks], one) < 1e-9
    assert all(lost < 1e-12 for _, lost in ranks)


def memory(config_path: str, overrides: list[str]) -> tuple[int, int]:
    """The bytes that compression keeps on this rank, and what the planner says."""
    config, mesh = started(config_path, overrides)
    compression = TrainStep(config, mesh).engine.compression  # type: ignore[attr-defined]
    held = {tensor.untyped_storage() for bucket in compression.buckets.values() for tensor in tensors_in(bucket)}
    gradients = {bucket.gradients.untyped_storage().data_ptr() for bucket in compression.buckets.values()}
    found = {storage.data_ptr(): storage.nbytes() for storage in held}
    return sum(size for at, size in found.items() if at not in gradients), rank_memory(config)[mesh.pp.rank].compression


def tensors_in(bucket: Any) -> Iterator[Tensor]:
    """Those of a bucket's fields, and of the fields of these. (A loss scale is everybody's.)"""
    values = [value for name, value in vars(bucket).items() if name not in ("buffer", "bucket", "levels", "loss_scale")]
    values += [value for each in (*bucket.residuals, *values) if hasattr(each, "__dict__") for value in vars(each).values()]
    return (value for value in values if isinstance(value, Tensor))


@pytest.mark.parametrize("compression", [INT8, LOW_RANK], ids=["int8", "low rank"])
@pytest.mark.parametrize("layout", [[], ["parallel.pipeline=2"]], ids=["dp4", "pp2dp2"])
def test_what_it_keeps_is_planned(pool: Any, config_path: str, layout: list[str], compression: str) -> None:
    """Eight bytes a parameter and more, which nobody would have counted, and the device would lack."""
    for held, planned in pool.run(4, memory, config_path, [*layout, setting(compression)]):
        assert held == planned > 0


# Where something is lost

ROUNDS, BAD = 5, 2  # sums, and the one in which a gradient is not finite


def forgotten(self: GradientCompression, skip: Tensor) -> None:
    """The planted fault: residuals are dropped."""


def kept_always(self: GradientCompression, skip: Tensor, keep: Any = GradientCompression.keep) -> None:
    """The planted fault: a skipped step's gradient stays in the residual."""
    keep(self, torch.zeros_like(skip))


def of_another_bucket(self: GradientCompression, skip: Tensor, keep: Any = GradientCompression.keep) -> None:
    """The planted fault: each bucket goes on with the residual of the next."""
    keep(self, skip)
    first, second = (bucket.residuals[0].kept for bucket in list(self.buckets.values())[:2])
    count = min(first.numel(), second.numel())
    first[:count], second[:count] = second[:count].clone(), first[:count].clone()


def of_another_block(self: Blocks, out: Tensor, rows: slice) -> None:
    """The planted fault: a block is decoded with the scale of the one before."""
    torch.mul(self.codes[rows], self.scales[rows].roll(1, 1), out=out.view(self.codes[rows].shape))


def unseen(self: Blocks, x: Tensor, scratch: Tensor, rows: slice, encode: Any = Blocks.encode) -> None:
    """The planted fault: what is not finite is rounded to zero."""
    encode(self, torch.nan_to_num_(x, 0.0, 0.0, 0.0), scratch, rows)


PLANTS = {
    "forgotten": (GradientCompression, "keep", forgotten),
    "kept_always": (GradientCompression, "keep", kept_always),
    "of_another_bucket": (GradientCompression, "keep", of_another_bucket),
    "of_another_block": (Blocks, "decode", of_another_block),
    "unseen": (Blocks, "encode", unseen),
}


def sums_on_a_rank(config_path: str, overrides: list[str], plant: str = "") -> dict[str, Tensor]:
    """Sums of random gradients, all buckets end to end: ``given`` and ``summed`` of every round, without the loss scale, which is another
    in every round; which elements of a sum are this rank's; and all that its residuals hold in the end."""
    step = TrainStep(*started(config_path, overrides))
    engine: Any = step.engine
    engine.settle()
    buckets = list(engine.compression.buckets.values())
    found: dict[str, list[Tensor]] = {"given": [], "summed": []}
    with mock.patch.object(*PLANTS[plant]) if plant else nullcontext():
        for number in range(ROUNDS):
            engine.loss_scale.value.fill_(2.0**number)
            random = torch.Generator().manual_seed(100 * step.mesh.place.rank + number)
            for bucket in buckets:
                for slot in bucket.bucket.slots:
                    view = slot.view(bucket.buffer.gradients)
                    view.copy_(2.0**number * torch.randn(view.shape, generator=random) * 10.0 ** (slot.position % 5))
            if number == BAD and step.mesh.place.rank == 1:
                buckets[1].bucket.slots[0].view(buckets[1].buffer.gradients).flatten()[3] = float("inf")
            found["given"].append(torch.cat([bucket.gradients for bucket in buckets]) / 2.0**number)
            works = [bucket.start_sum() for bucket in buckets]
            for work in works:
                work.wait()
            found["summed"].append(torch.cat([bucket.gradients for bucket in buckets]) / 2.0**number)
            engine.compression.keep(torch.tensor(float(number == BAD)))
    mine, held = [], []
    for bucket in buckets:
        own = torch.zeros_like(bucket.buffer.gradients)
        for part in bucket.buffer.ranges:
            own[part] = 1.0
        mine.append(own[bucket.bucket.start : bucket.bucket.stop])
        lost = torch.zeros_like(own)
        for residual in bucket.residuals:
            lost[residual.start : residual.start + residual.kept.numel()] += residual.kept
        held.append(lost[bucket.bucket.start : bucket.bucket.stop])
    gaps = sum(float(x.abs().sum()) for bucket in buckets for x in getattr(bucket, "gaps", ()))
    step.engine.close()
    step.mesh.close()
    return {name: torch.stack(rounds) for name, rounds in found.items()} | {
        "mine": torch.cat(mine), "held": torch.cat(held), "gaps": torch.tensor(gaps)
    }  # fmt: skip


def bound_of(given: list[Tensor], hosts: int) -> Tensor:
    """By how much an element of an int8 sum may err: half a code's width of each host's part, and of their sum."""

    def half_width(x: Tensor) -> Tensor:
        return (x.view(-1, BLOCK).abs().amax(1, keepdim=True) / 254).expand(-1, BLOCK).flatten()

    parts = [sum(given[host::hosts][1:], given[host]) for host in range(hosts)]
    lost = sum((half_width(part) for part in parts[1:]), half_width(parts[0]))
    return 1.001 * (lost + half_width(sum(parts[1:], parts[0])) + lost / 100)


def check_sums(ranks: list[dict[str, Tensor]], hosts: int | None) -> None:
    """`hosts`: of an int8 sum, those between which it travels."""
    given, mine = [rank["given"].double() for rank in ranks], [rank["mine"] for rank in ranks]
    exact = sum(given[1:], given[0])
    summed = torch.zeros_like(exact)
    for rank, own in zip(ranks, mine, strict=True):
        summed[:, own > 0] = rank["summed"][:, own > 0].double()
    for rank, own in zip(ranks, mine, strict=True):  # copies have the same bits
        same = rank["summed"].double()[:, own > 0], summed[:, own > 0]
        assert torch.equal(torch.nan_to_num(same[0]), torch.nan_to_num(same[1])), "ranks have different sums"
    if hosts is not None:
        assert bool(((summed[0] - exact[0]).abs() <= bound_of([g[0] for g in given], hosts)).all()), "a sum errs by more than its rounding"
    bad = ~exact[BAD].isfinite()
    assert bad.sum() == 1 and not summed[BAD, bad].isfinite().any(), "what is not finite is not seen"
    fine = [number for number in range(ROUNDS) if number != BAD]
    assert bool(summed[fine].isfinite().all()) and all(rank["gaps"] == 0 for rank in ranks), "a skipped step has left its gradient"
    lacking = exact[fine].sum(0) - summed[fine].sum(0)
    held = sum((rank["held"].double() for rank in ranks), torch.zeros_like(lacking))
    assert float((lacking - held).abs().max() / exact[fine].abs().max()) < 1e-6, "what sums lack is not in the residuals"
    assert float(lacking.abs().max()) > 0, "nothing was lost, so this proved nothing"


SUMS: dict[str, tuple[int, list[str], int | None]] = {
    "int8": (2, [setting(INT8)], 2),
    "int8, two levels": (4, [TWO_LEVELS, setting(INT8)], 2),
    "int8, two levels, sharded": (4, [TWO_LEVELS, SHARDED, setting(INT8)], 2),
    "low rank": (2, [setting(LOW_RANK)], None),
    "low rank, two levels, sharded": (4, [TWO_LEVELS, SHARDED, setting(LOW_RANK)], None),
}


@pytest.mark.parametrize("name", SUMS)
def test_what_a_sum_lacks_comes_later(pool: Any, config_path: str, name: str) -> None:
    """Ranks that round apart, an error beyond that of rounding, a residual that is dropped, of another bucket, with a loss scale that is
    gone, or of a step that was skipped; and an infinity that nobody sees, or that stays."""
    world, overrides, hosts = SUMS[name]
    check_sums(pool.run(world, sums_on_a_rank, config_path, overrides), hosts)


@pytest.mark.parametrize(
    ("plant", "found"),
    [
        ("forgotten", "what sums lack"),
        ("kept_always", "a skipped step"),
        ("of_another_bucket", "what sums lack"),
        ("of_another_block", "more than its rounding"),
        ("unseen", "not finite is not seen"),
    ],
)
def test_planted_faults_are_caught(pool: Any, config_path: str, plant: str, found: str) -> None:
    world, overrides, hosts = SUMS["int8"]
    with pytest.raises(AssertionError, match=found):
        check_sums(pool.run(world, sums_on_a_rank, config_path, overrides, plant), hosts)


# Checkpoints


def run_on_hosts(config_path: str, overrides: list[str], log_dir: str, forgets: bool = False) -> None:
    """A run; ranks take turns on two hosts. `forgets`: the planted fault, it resumes without residuals."""
    os.environ["MEGACORE_HOST"] = "ab"[place_from_environment().rank % 2]
    with mock.patch.object(trainer, "read_residuals", (lambda *_: []) if forgets else trainer.read_residuals):
        training.run_rank(config_path, overrides, log_dir)


def digests(folder: Path, step: int) -> dict[str, str]:
    """The contents of a checkpoint, by tensor."""
    return {name: tensor.digest for name, tensor in Reader(folder / f"checkpoints/step_{step:08d}").manifest.tensors.items()}


def residuals(folder: Path, step: int) -> dict[str, Tensor]:
    """The residuals of a checkpoint, by tensor: of each parameter all that ranks have, added up."""
    reader = Reader(folder / f"checkpoints/step_{step:08d}")
    shapes = {name: tensor.shape for name, tensor in reader.manifest.tensors.items() if name.startswith(RESIDUAL)}
    return {name: reader.read(name, TensorSlice(shape, (0,) * len(shape), shape)).double().sum(0) for name, shape in shapes.items()}


def read_on_a_rank(config_path: str, overrides: list[str], checkpoint: str) -> tuple[dict[str, tuple[Tensor, TensorSlice]], list[str]]:
    """What a rank of any layout reads of a checkpoint's residuals, and what it says of them."""
    step = TrainStep(*started(config_path, overrides))
    held = {key: piece for key, piece in step.engine.tensors().items() if key.startswith(RESIDUAL)}
    said = read_residuals(Reader(Path(checkpoint)), held)
    step.engine.close()
    step.mesh.close()
    return held, said


@pytest.mark.parametrize("compression", [INT8, LOW_RANK], ids=["int8", "low rank"])
def test_a_run_goes_on_bit_by_bit_and_in_another_layout_with_the_same_sum(
    pool: Any, config_path: str, tmp_path: Path, compression: str
) -> None:
    """A residual that is not saved, or not restored, or of another parameter or rank; one that a change of layout loses or doubles."""
    overrides = [TWO_LEVELS, setting(compression), "checkpoint.every=2", "checkpoint.keep=3"]
    whole, forgetful = tmp_path / "whole", tmp_path / "forgetful"
    pool.run(4, run_on_hosts, config_path, overrides, str(whole))
    second = whole / "checkpoints/step_00000002"
    for folder, forgets in ((tmp_path / "again", False), (forgetful, True)):
        pool.run(4, run_on_hosts, config_path, [*overrides, f"checkpoint.resume={second}"], str(folder), forgets)
    assert digests(whole, 4) == digests(tmp_path / "again", 4)
    assert digests(whole, 4) != digests(forgetful, 4)

    saved = residuals(whole, 2)
    assert saved and any(float(total.abs().max()) > 0 for total in saved.values())
    others = {2: [], 8: ["parallel.tensor=2", "parallel.pipeline=2", SHARDED]}
    for world, layout in others.items():
        found = {name: torch.zeros_like(total) for name, total in saved.items()}
        for held, said in pool.run(world, read_on_a_rank, config_path, [*layout, setting(compression)], str(second)):
            for key, (tensor, box) in held.items():
                if box.counted:
                    found[logical_name(key)][box.slices[1:]] += tensor[0].double()
            if compression == INT8:
                assert [line.endswith("with the same sum") for line in said] == [True] * (world == 8)  # two hosts are two hosts
            else:
                assert said[0].endswith("4 of each parameter became 2, with the same sum")
        for name, total in saved.items():
            assert float((found[name] - total).abs().max()) <= 1e-6 * float(total.abs().max()), name
    ((held, said),) = pool.run(1, read_on_a_rank, config_path, [], str(second))
    assert not held and len(said) == 1 and said[0].startswith("WARNING: the checkpoint's residuals are left out")
