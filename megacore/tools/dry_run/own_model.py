"""What `launch/plan.py` says of a model of the user's own (`model.source`): what follows from its layers, built without content."""

import math
import sys

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from megacore.config import Config
from megacore.distributed.axes import AXES
from megacore.distributed.shard import shard_of
from megacore.distributed.topology import Topology
from megacore.model.stage import Stage, whole_model
from megacore.pipeline.partition import layer_ranges, placement_of, stage_layers
from megacore.tools.choices.flops import counted_layers, model_flops
from megacore.tools.choices.partition import stage_costs, step_times

NOT_PREDICTED = "Memory, what is sent and the time of a step are not predicted for model.source; --dry-run counts the first two."


def parameters(config: Config) -> int:
    """The number of logical parameters of the whole model."""
    return sum(math.prod(shard_of(parameter).global_shape) for parameter in whole_model(config, "meta").parameters())


def rank_parameters(config: Config) -> list[int]:
    """Parameters that each rank of the pipeline holds, on its first tensor rank, which is the fullest."""
    layers, found = layer_ranges(config), []
    ranks = config.parallel.tensor * config.token_ranks  # of each rank of the pipeline
    for rank, stages in enumerate(placement_of(config)):
        topology = Topology(config, rank * ranks)
        held = {name: p for stage in stages for name, p in Stage(config, layers[stage], topology, "meta").named_parameters()}
        found.append(sum(parameter.numel() for parameter in held.values()))
    return found


def check(config: Config) -> None:
    """Raises `ConfigError` if a layer cannot be made."""
    whole_model(config, "meta")


def report(config: Config) -> None:
    """Prints a plan of the model."""
    console = Console(highlight=False, markup=False, soft_wrap=True, width=None if sys.stdout.isatty() else 120)
    console.print(f"parameters    {parameters(config):,}, of the layers of {config.model.source}")
    train, parallel, tokens = config.train, config.parallel, config.train.global_batch_size * config.train.seq_len
    console.print(f"ranks         {config.world_size} = {parallel.described()}")
    console.print(
        f"batch         global_batch_size {train.global_batch_size} = micro_batch_size {train.micro_batch_size}"
        f" × microbatches {config.num_microbatches} × data {parallel.data}"
    )
    table = Table(box=SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    if counted := counted_layers(config) is not None:
        makespan, busy = step_times(config)
        flops = model_flops(config, causal=False)
        assert flops is not None
        console.print(f"a step        {tokens:,} tokens, {flops * tokens:.4g} model FLOPs: three times the products of every layer")
        console.print(f"bubble        {1 - sum(busy) / (len(busy) * makespan):.1%} under {parallel.schedule}")
    else:
        console.print(f"a step        {tokens:,} tokens; FLOPs and bubble unknown: the layers do not run on tensors without content")
    axis = next(axis.name for axis in AXES if axis.layers)
    for name in (axis, "layers", "parameters", *(["GFLOP"] if counted else [])):
        table.add_column(name, justify="right", no_wrap=True)
    layers, costs = stage_layers(config), stage_costs(config)
    for rank, (stages, held) in enumerate(zip(placement_of(config), rank_parameters(config), strict=True)):
        spans = " ".join(f"{layers[stage].start}–{layers[stage].stop - 1}" for stage in stages)
        work = sum(costs[stage].total for stage in stages) * config.rank_tokens / parallel.tensor / 1e9
        table.add_row(str(rank), spans, f"{held:,}", *([f"{work:.4g}"] if counted else []))
    console.print(table)
    console.print(NOT_PREDICTED)
