"""A rank makes and draws what it keeps of its stage, and nothing else; weights
that are read are not drawn first.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from megacore.checkpoint import Reader
from megacore.checkpoint.folder import locate
from megacore.distributed.events import Listener
from megacore.distributed.shard import logical_name
from megacore.engine.choose import build_stages
from megacore.rng import RUN
from megacore.tools.checkpoint_weights import load_weights
from megacore.tools.launchers import place_from_environment
from tests import training
from tests.build import mesh_of, model_of, run_of, step_of
from tests.memory import Allocated

FSDP, SHARDED = "engine.kind=fsdp", "engine.shard_optimizer=true"
ZERO1, ZERO3 = (
    f'engine.config={{"zero_optimization": {{"stage": {stage}, "reduce_bucket_size": "auto"}}}}'
    for stage in (1, 3)
)


@dataclass(frozen=True)
class Built:
    """What a rank built."""

    weights: list[tuple[str, Tensor, tuple[int, ...]]]  # name, piece and its offset
    # the parameters that compute, where a rank has them whole
    copies: dict[str, tuple[Tensor, tuple[int, ...]]]
    undivided: int  # bytes of the stage before an engine has it
    kept: int  # bytes of what the rank keeps
    peak: int  # bytes that were alive at once
    notes: Counter[str]  # what it said of its progress


def build(config_path: str, overrides: list[str]) -> Built:
    """One rank's first weights, as training starts from them; drawn in one thread, the
    one that is counted.
    """
    place = place_from_environment()
    config = run_of(config_path, *overrides, world=place.world_size)
    mesh = mesh_of(config)
    notes: Counter[str] = Counter()

    class Notes(Listener):
        def on_phase(self, phase: str) -> None:
            notes.update([phase])

    mesh.listeners.add(Notes())
    with Allocated() as before:
        build_stages(config, mesh)
    with mock.patch("megacore.train.step.own_cores", lambda ranks: 1), Allocated() as allocated:
        step = step_of(config, mesh)
    step.engine.settle()
    held = step.engine.tensors()
    weights = [
        (logical_name(key)[6:], held[key][0].clone(), held[key][1].offset)
        for key in held
        if key.startswith("model/")
    ]
    named = {name: parameter for stage in step.stages for name, parameter in stage.named_parameters()}
    whole = config.engine.kind == "native" or ZERO1 in overrides
    copies = {name: (p.detach().clone(), p.shard.offset) for name, p in named.items()} if whole else {}  # type: ignore[attr-defined]
    built = Built(weights, copies, before.peak, allocated.live, allocated.peak, notes)
    step.engine.close()
    mesh.close()
    return built


@pytest.fixture(scope="module")
def config_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("corpus")
    return training.write_config(folder, training.write_corpus(folder))


def slice_of(whole: Tensor, offset: tuple[int, ...], shape: torch.Size) -> Tensor:
    return whole[tuple(slice(start, start + n) for start, n in zip(offset, shape, strict=True))]


# Vocabulary, heads and hidden size in pieces that do not divide among rows, columns and ranks alike.
@pytest.mark.parametrize(
    ("world", "overrides"),
    [
        (4, [FSDP]),
        (4, [FSDP, "parallel.tensor=2", "train.precision=bf16", "engine.cpu_offload=true"]),
        (4, [FSDP, "parallel.pipeline=2", "engine.shard_size=2"]),
        (2, ["parallel.tensor=2", "train.precision=fp64"]),
        (2, ["parallel.pipeline=2", "train.precision=bf16", "model.position=rope"]),
        (2, [SHARDED, "train.precision=bf16", "engine.bucket_mib=0.01"]),
        (2, ["engine.kind=deepspeed", ZERO1, "train.precision=bf16"]),
        (2, ["engine.kind=deepspeed", ZERO3]),
        (4, ["engine.kind=deepspeed", ZERO3, "parallel.tensor=2", "train.precision=bf16"]),
    ],
)
def test_every_layout_starts_from_the_bits_of_one_process(
    pool: Any, config_path: str, world: int, overrides: list[str]
) -> None:
    """Each element of each tensor is drawn by some rank; masters and the copies
    that compute are the same numbers.
    """
    ranks = pool.run(world, build, config_path, overrides)
    single = [override for override in overrides if override.startswith(("train.precision", "model."))]
    whole = {
        name: parameter.detach()
        for name, parameter in model_of(run_of(config_path, *single)).named_parameters()
    }
    covered = {name: torch.zeros_like(parameter, dtype=torch.bool) for name, parameter in whole.items()}
    for built in ranks:
        for name, piece, offset in built.weights:
            assert torch.equal(piece, slice_of(whole[name], offset, piece.shape).to(piece.dtype)), name
            slice_of(covered[name], offset, piece.shape).fill_(True)
        for name, (copy, offset) in built.copies.items():
            assert torch.equal(copy, slice_of(whole[name], offset, copy.shape)), name
        assert built.notes["drawing weights"] > 0, "the hang watchdog would take a long start for a hang"
    assert [name for name, seen in covered.items() if not seen.all()] == []


# 3.2 million parameters in 12.7 MB of fp32, most of them in the blocks.
LARGE = ["model.hidden_size=256", "model.num_layers=4", "model.vocab_size=257"]


@pytest.mark.parametrize("overrides", [[FSDP], [FSDP, "parallel.tensor=2"], ["engine.kind=deepspeed", ZERO3]])
def test_building_takes_no_more_than_what_a_rank_keeps(
    pool: Any, config_path: str, overrides: list[str]
) -> None:
    """A stage of 70 billion parameters, made whole by each of a machine's 8 ranks before it is
    divided, has no room in its memory.
    """
    config = run_of(config_path, *LARGE, *overrides, world=4)
    stage = 4 * sum(p.numel() for p in model_of(config, "meta").parameters()) // config.parallel.tensor
    largest = 4 * max(p.numel() for p in model_of(config, "meta").parameters())
    for built in pool.run(4, build, config_path, [*LARGE, *overrides]):
        # Weights, gradients and two moments; DeepSpeed keeps masters beside the weights, and small parameters
        # whole.
        assert built.kept < (4.5 if FSDP in overrides else 6) * stage * config.parallel.tensor / 4
        assert built.undivided < 0.01 * stage
        assert built.peak - built.kept < max(4 * RUN, 2 * largest) * 1.1, (
            "a run of random numbers, or a parameter that is divided"
        )


def without_drawing(function: Callable[..., Any], *args: Any) -> None:
    """Calls it with random numbers out of reach."""
    with mock.patch("megacore.model.initial.normal_runs", side_effect=AssertionError("weights are drawn")):
        function(*args)


def read_weights(config_path: str, folder: str) -> None:
    """Reads a run's weights alone, as to write text."""
    place = place_from_environment()
    config = run_of(config_path, "parallel.tensor=2", world=place.world_size)
    mesh = mesh_of(config)
    stages = build_stages(config, mesh)
    load_weights(Reader(locate(Path(folder))), stages)
    assert all(parameter.device == mesh.device for stage in stages for parameter in stage.parameters())
    mesh.close()


def test_weights_that_are_read_are_not_drawn_first(pool: Any, config_path: str, tmp_path: Path) -> None:
    """Every start after a failure would wait for minutes for numbers that are thrown away."""
    run, tuned = str(tmp_path / "run"), str(tmp_path / "tuned")
    pool.run(2, training.run_rank, config_path, [FSDP, "train.steps=1"], run)
    pool.run(2, without_drawing, training.run_rank, config_path, [FSDP, "train.steps=2"], run)
    pool.run(2, without_drawing, training.run_rank, config_path, [SHARDED, "train.steps=3"], run)
    pool.run(
        2,
        without_drawing,
        training.run_rank,
        config_path,
        [FSDP, "train.steps=1", f"checkpoint.weights={run}"],
        tuned,
    )
    pool.run(2, without_drawing, read_weights, config_path, tuned)
