"""What `launch/plan.py` says of a model of the user's own (`model.source` or `model.hf`) whose layers need
content: they run on no `meta`.
"""

import sys

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from megacore.config import Config
from megacore.distributed.axes import AXES
from megacore.model.stage import whole_model
from megacore.pipeline.partition import placement_of, stage_layers
from megacore.tools.choices.counting import why_uncounted
from megacore.tools.planner.parameters import parameters, rank_parameters


def check(config: Config) -> None:
    """Raises `ConfigError` if a layer cannot be made."""
    whole_model(config, "meta")


def report(config: Config) -> None:
    """Prints what follows from the parameters alone."""
    console = Console(
        highlight=False, markup=False, soft_wrap=True, width=None if sys.stdout.isatty() else 120
    )
    console.print(f"parameters    {parameters(config):,}, of the layers of {config.model.custom_name}")
    console.print(
        "FLOPs, bubble, memory and what is sent are unknown: the layers do not run on tensors without "
        "content:"
    )
    console.print(why_uncounted(config))
    table, layers = Table(box=SIMPLE_HEAD, collapse_padding=True, pad_edge=False), stage_layers(config)
    axis = next(axis.name for axis in AXES if axis.layers)
    for name in (axis, "layers", "parameters"):
        table.add_column(name, justify="right", no_wrap=True)
    for rank, (stages, held) in enumerate(zip(placement_of(config), rank_parameters(config), strict=True)):
        table.add_row(
            str(rank),
            " ".join(f"{layers[stage].start}–{layers[stage].stop - 1}" for stage in stages),
            f"{held:,}",
        )
    console.print(table)
