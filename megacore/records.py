"""JSON that somebody else may have written, as typed records whose numbers have bounds; and
the figures of a run's records.
"""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

LARGEST = 2**53  # the largest whole number that all readers of JSON keep exact

Whole = Annotated[int, Field(ge=0, le=LARGEST)]
Count = Annotated[int, Field(ge=1, le=LARGEST)]
Amount = Annotated[float, Field(ge=0, le=1e30)]


class Record(BaseModel):
    """Numbers are not coerced (`"20"` is not 20).

    Keys that nobody reads are passed over: another version may have written them.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")


def complaint(error: ValidationError) -> str:
    """The first thing that is wrong, in a few words: where, and what."""
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    where = ".".join(map(str, first["loc"]))
    return f"{where}: {first['msg']}"[:200] if where else first["msg"][:200]


# What every line of metrics.jsonl has, or a validation's; a model's losses need other names.
FIGURES = frozenset(
    [
        "step",
        "loss",
        "grad_norm",
        "lr",
        "tokens",
        "tokens_per_second",
        "step_seconds",
        "mfu",
        "mfu_causal",
        "save_seconds",
        "memory_bytes",
        "memory_reserved_bytes",
        "skipped",
        "stragglers",
        "valid_loss",
    ]
)
