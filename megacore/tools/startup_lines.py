"""The lines that a run prints before its first step."""

import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from math import gcd, prod
from typing import Any

from megacore.config import Config
from megacore.config.implied import why_whole
from megacore.config.optim_groups import ParameterGroups
from megacore.distributed.axes import ranks_along
from megacore.distributed.collectives import broadcast_text
from megacore.distributed.mesh import Mesh
from megacore.distributed.rank_info import host_name
from megacore.distributed.shard import shard_of
from megacore.optimizers.rule import AVERAGE
from megacore.pipeline.generators import GENERATORS, generated
from megacore.pipeline.partition import placement_of, stage_layers
from megacore.tools.inputs import Inputs
from megacore.tools.processes import machine
from megacore.tools.settings.validation import batch_equations
from megacore.train.trainer import Trainer

# settings of first weights: a run that resumes has its own
UNHEARD = ("model.init_std", "model.zero_init", "checkpoint.weights")
HOW = ("checkpoint.resume", "log.dir")  # settings by which the checkpoint was found
SHOWN = 4  # hosts named one by one


def startup_lines(trainer: Trainer, inputs: Inputs) -> Iterator[str]:
    """Yield what is about to run, in a few lines.

    Collective: every rank must take all lines.
    """
    config, mesh = trainer.config, trainer.mesh
    train, schedule = config.train, config.parallel.schedule
    yield f"mesh: {mesh.describe()}"
    if warning := tensor_warning(mesh):
        yield warning
    yield from (f"batch: {line}" for line in batch_equations(config))
    yield from inputs.stream.packed()
    if schedule in GENERATORS and generated(schedule, 1, 1).splits and (why := why_whole(config)):
        yield f"{schedule} runs with whole backwards, which {why}"
    held = (stage_layers(config)[stage] for stage in placement_of(config)[0])
    layers = " and ".join(f"{layers.start}–{layers.stop - 1}" for layers in held)
    own = {parameter for stage in trainer.train_step.stages for parameter in stage.parameters()}
    # an engine may hold some elsewhere
    parameters = sum(prod(shard_of(parameter).local_shape) for parameter in own)
    frozen = sum(prod(shard_of(parameter).local_shape) for parameter in own if not parameter.requires_grad)
    still = f", {frozen:,} of them frozen" if frozen else ""
    yield f"rank 0 holds layers {layers}, {parameters:,} parameters in {train.precision}{still}"
    if (model := config.model).hf is not None:
        yield (
            f"model: {model.hf}, whose config.json has the SHA-256 {model.hf_digest}, by transformers "
            f"{model.hf_version}"
        )
    if trainer.decided:
        yield trainer.decided
    yield from decayed_twice(config)
    if trainer.folder_not_shared:
        yield (
            f"WARNING: {trainer.folder_not_shared}: this run can save no checkpoint, not even when it is "
            "asked to stop"
        )
    if trainer.step == train.steps:
        yield f"all {train.steps} steps are done already (checkpoint.resume=never trains anew)"
    elif trainer.step:
        yield f"resumed after step {trainer.step} of {train.steps}"
        yield from [*changes(config, trainer.origin.config), *trainer.origin.notes]
    elif (
        origin := trainer.origin.weights or config.checkpoint.weights
    ):  # a checkpoint, or a folder of transformers
        yield f"starting from the weights of {origin}"


def tensor_warning(mesh: Mesh) -> str:
    """A warning if the ranks of a tensor group are on several machines, or "" if none are.

    Collective over the world, if there are tensor ranks. Ranks tell each other where they run, because a
    launcher may number them in any order.
    """
    if mesh.tp.size == 1:
        return ""
    machines = [number for number, _ in mesh.hosts(os.environ.get("MEGACORE_HOST") or machine())]
    groups, right = split_groups(machines, mesh.tp.name, mesh.sizes)
    if not groups:
        return ""

    ranks = groups[0]
    first_rank_of = {machines[rank]: rank for rank in reversed(ranks)}
    sources = sorted(first_rank_of.values())
    names = [broadcast_text(host_name(), mesh.world, mesh.device, source=rank) for rank in sources[:SHOWN]]
    if len(sources) > SHOWN:
        names.append("…")
    more = len(groups) - 1
    others = f", and {more} more tensor group{'s span' if more > 1 else ' spans'} hosts" if more else ""
    return (
        f"WARNING: tensor ranks {ranks[0]}-{ranks[-1]} are on {len(sources)} hosts ({', '.join(names)})"
        f"{others}: every layer waits for the network ({right})"
    )


def split_groups(
    machines: Sequence[int], axis: str, sizes: Mapping[str, int]
) -> tuple[list[tuple[int, ...]], str]:
    """The groups along the tensor axis whose ranks are on several machines, and what to change.

    `machines`: a number for the machine of each rank of the world.
    """
    groups = sorted({ranks_along((axis,), rank, sizes) for rank in range(len(machines))})
    split = [ranks for ranks in groups if len({machines[rank] for rank in ranks}) > 1]
    largest = gcd(sizes[axis], *Counter(machines).values())
    if largest == sizes[axis]:  # each machine has ranks for whole groups
        right = "put a host's ranks next to each other: mpirun --map-by slot, srun --distribution=block"
    else:
        right = f"parallel.tensor={largest} fits on a host"
    return split, right


def decayed_twice(config: Config) -> Iterator[str]:
    """A warning where the rate falls for an optimizer whose average of the weights
    stands in place of that.
    """
    optim = config.optim
    averages = sorted(
        {group.rule.name for group in ParameterGroups(optim).every if AVERAGE in group.rule.kinds}
    )
    if averages and optim.schedule != "constant" and optim.min_lr < optim.lr:
        name = " and ".join(averages)
        yield (
            f"WARNING: optim.schedule={optim.schedule} lowers the rate, in place of which {name} "
            "averages (optim.schedule=constant)"
        )


def changes(config: Config, recorded: Mapping[str, Any]) -> list[str]:
    """Which settings of a run that goes on are others than those of its checkpoint (`recorded`
    sections), in up to two lines.
    """
    heard, unheard = list[str](), list[str]()
    for name, section in config.model_dump(mode="json", by_alias=True).items():
        before = recorded.get(name)
        before = before if isinstance(before, dict) else {}
        for key, now in section.items():
            if key in before and before[key] != now and (setting := f"{name}.{key}") not in HOW:
                text = f"{setting}={json.dumps(now)} (was {json.dumps(before[key])})"
                (unheard if setting in UNHEARD else heard).append(text)
    lines = [f"changed since: {', '.join(heard)}"] if heard else []
    return lines + (
        [f"WARNING: without effect, because a checkpoint has weights: {', '.join(unheard)}"]
        if unheard
        else []
    )
