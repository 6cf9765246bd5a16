"""megacore: GPT pretraining over named parallel axes, written to be read, changed and proved.

What stands in `__all__` is a library for a notebook or a script; docs/library.md shows it. Nothing is
imported before it is used.
"""

from importlib import import_module

TYPE_CHECKING = False  # typing takes longer to import than all that a script runs before it handles Ctrl-C
if TYPE_CHECKING:
    from typing import Any

__version__ = "0.1.0"

PLACES = {
    "Config": "megacore.config",
    "Mesh": "megacore.distributed.mesh",
    "ColumnLinear": "megacore.tensor_parallel.linear",
    "RowLinear": "megacore.tensor_parallel.linear",
    "Stage": "megacore.model.stage",
    "TrainStep": "megacore.train.step",
    "plan_of": "megacore.pipeline.partition",
} | dict.fromkeys(
    ("load_config", "one_process", "batches", "generate", "prove", "predict", "memory"),
    "megacore.tools.library",
)

__all__ = sorted(PLACES)


def __getattr__(name: str) -> "Any":
    if name not in PLACES:
        raise AttributeError(f"megacore has no {name}; it has {', '.join(__all__)}")
    return getattr(import_module(PLACES[name]), name)
