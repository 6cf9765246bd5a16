"""Reads the figures of a run's metrics.jsonl again."""

from typing import Annotated

from pydantic import Field, ValidationError

from megacore.records import Amount, Count, Record, Whole, complaint

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


class Validation(Record):
    """A validation's loss."""

    step: Count
    valid_loss: Figure | None


def read_metrics(text: str) -> tuple[list[Training], list[Validation]]:
    """The records of a metrics.jsonl, each kind in the order of its steps; of a step that stands twice the last. A last line that is being
    written is left out. Raises `ValueError`, which names the line."""
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
