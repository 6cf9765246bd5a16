"""JSON that somebody else may have written, as typed records whose numbers have bounds; and those of a run's metrics.jsonl."""

import json
import math
import os
from collections.abc import Iterator
from typing import Annotated, Any, BinaryIO

from pydantic import BaseModel, ConfigDict, Field, ValidationError

LINE_BYTES = 1 << 20  # more than any record has, though it may name all ranks
LARGEST = 2**53  # the largest whole number that all readers of JSON keep exact

Whole = Annotated[int, Field(ge=0, le=LARGEST)]
Count = Annotated[int, Field(ge=1, le=LARGEST)]
Amount = Annotated[float, Field(ge=0, le=1e30)]


class Record(BaseModel):
    """Numbers are not coerced (`"20"` is not 20). Keys that nobody reads are passed over: another version may have written them."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")


def complaint(error: ValidationError) -> str:
    """The first thing that is wrong, in a few words: where, and what."""
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    where = ".".join(map(str, first["loc"]))
    return f"{where}: {first['msg']}"[:200] if where else first["msg"][:200]


class Step(Record):
    """What every record has."""

    step: Count


def step_of(line: str | bytes) -> int | None:
    """The step of a line of metrics.jsonl; None where it is no record, or not whole."""
    try:
        return Step.model_validate_json(line).step
    except ValidationError:
        return None


def recorded(file: BinaryIO, last: int | None = None) -> Iterator[tuple[int, bytes]]:
    """Step and text of every record in a metrics.jsonl, as the file has them; for whoever must go on whatever stands there. Passes over
    what is no record: half a line, a damaged one, another program's, one longer than `LINE_BYTES`. `last`: only in so many bytes at its
    end.
    """
    begin = max(0, file.seek(0, os.SEEK_END) - last) if last is not None else 0
    file.seek(begin)
    at_start = begin == 0  # of a line
    while part := file.readline(LINE_BYTES):
        ended = part.endswith(b"\n") or len(part) < LINE_BYTES
        if at_start and ended and (step := step_of(part)) is not None:
            yield step, part.rstrip(b"\r\n")
        at_start = part.endswith(b"\n")


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


def as_json(figures: dict[str, Any]) -> str:
    """Figures as JSON, with null for NaN, which JSON does not have."""
    return json.dumps({name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in figures.items()})
