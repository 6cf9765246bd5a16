"""The records of a run's metrics.jsonl: as text, and read again."""

import json
import math
import os
from collections.abc import Iterator
from typing import Annotated, Any, BinaryIO

from pydantic import Field, ValidationError

from megacore.records import Amount, Count, Record, Whole, complaint

LINE_BYTES = 1 << 20  # more than any record has, though it may name all ranks and the loads of all experts
TAIL_BYTES = 1 << 16  # in which the last record stands, unless it is long
Figure = Annotated[float, Field(ge=-1e100, le=1e100)]  # a figure of a run that diverges may be large


class Training(Record):
    """A step's figures that are read again. A loss or norm that is not finite is null."""

    step: Count
    loss: Figure | None
    grad_norm: Figure | None
    tokens: Whole
    tokens_per_second: Amount
    step_seconds: Amount
    mfu: Amount | None
    memory_bytes: Whole
    skipped: Whole
    lr: Amount | None = None
    cross_entropy: Figure | None = None  # of a model with several losses, of which `loss` is the sum

    @property
    def text_loss(self) -> float | None:
        """The loss of the next tokens alone."""
        return self.loss if self.cross_entropy is None else self.cross_entropy


class Validation(Record):
    """A validation's loss."""

    step: Count
    valid_loss: Figure | None


def read_metrics(text: str) -> tuple[list[Training], list[Validation]]:
    """The records of a metrics.jsonl, each kind in the order of its steps; of a step that stands twice the
    last. A last line that is being written is left out. Raises `ValueError`, which names the line.
    """
    training: dict[int, Training] = {}
    validations: dict[int, Validation] = {}
    for number, line in enumerate(text.rpartition("\n")[0].split("\n") if "\n" in text else [], 1):
        try:
            if '"valid_loss"' in line:
                validation = Validation.model_validate_json(line)
                validations[validation.step] = validation
            else:
                record = Training.model_validate_json(line)
                training[record.step] = record
        except ValidationError as error:
            raise ValueError(f"line {number} is no record of a step: {complaint(error)}") from None
    return [training[step] for step in sorted(training)], [validations[step] for step in sorted(validations)]


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
    """Step and text of every record in a metrics.jsonl, as the file has them; for whoever must go on whatever
    stands there. Passes over what is no record: half a line, a damaged one, another program's, one longer
    than `LINE_BYTES`. `last`: only in so many bytes at its end.
    """
    begin = max(0, file.seek(0, os.SEEK_END) - last) if last is not None else 0
    file.seek(begin)
    at_start = begin == 0  # of a line
    while part := file.readline(LINE_BYTES):
        ended = part.endswith(b"\n") or len(part) < LINE_BYTES
        if at_start and ended and (step := step_of(part)) is not None:
            yield step, part.rstrip(b"\r\n")
        at_start = part.endswith(b"\n")


def newest(file: BinaryIO) -> list[tuple[int, bytes]]:
    """Records at the end of a metrics.jsonl, as `recorded` gives them: at least
    the last one, however long it is.
    """
    size = TAIL_BYTES
    while not (found := list(recorded(file, size))) and size < 2 * LINE_BYTES:
        size *= 2
    return found


def as_json(figures: dict[str, Any]) -> str:
    """Figures as JSON, with null for NaN, which JSON does not have."""
    return json.dumps({name: finite(value) for name, value in figures.items()})


def finite(value: Any) -> Any:
    """A figure, or a list of them, with None for what is not finite."""
    if isinstance(value, list):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
