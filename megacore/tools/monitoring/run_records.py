"""A run's folder, read for tables and pictures of its metrics."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from megacore.errors import LogError
from megacore.files import read_text
from megacore.records import Count, Record, complaint
from megacore.tools.metrics_file import Training, Validation, read_metrics


class LogSection(Record):
    """What is checked of a config's section `log`."""

    every: Count = 1


class RunConfig(Record):
    """What is checked of a config.json; the rest is only shown."""

    log: LogSection = LogSection()


@dataclass(frozen=True)
class Run:
    """A run's flat config, and its lines of training and of validation in the order of their steps."""

    name: str
    every: int  # steps between records
    config: dict[str, Any]
    steps: list[Training]
    validations: list[Validation]

    def seconds(self) -> list[float]:
        """Return the time spent in training steps up to each logged step.

        A run that resumed from another folder's checkpoint did not do the steps before it, so its first
        record counts only the steps since the logged one before.
        """
        total = 0.0
        seconds = []
        previous_step = max(0, self.steps[0].step - self.every)
        for line in self.steps:
            total += (line.step - previous_step) * line.step_seconds
            previous_step = line.step
            seconds.append(total)
        return seconds


def read_run(folder: str) -> Run:
    """Read a run's records; a last line that is being written is left out. Raises `LogError`."""
    texts = {}
    for name in ("config.json", "metrics.jsonl"):
        path = Path(folder) / name
        try:
            texts[name] = read_text(path)
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "no text"
            raise LogError(
                str(path), f"cannot be read: {reason}", "the folder of a run, its log.dir"
            ) from None

    try:
        every = RunConfig.model_validate_json(texts["config.json"]).log.every
    except ValidationError as error:
        raise LogError(
            str(Path(folder) / "config.json"), f"is no config: {complaint(error)}", "as the run wrote it"
        ) from None

    try:
        steps, validations = read_metrics(texts["metrics.jsonl"])
    except ValueError as error:
        raise LogError(f"{folder}/metrics.jsonl", str(error), "as the run wrote it") from None
    if not steps:
        raise LogError(
            f"{folder}/metrics.jsonl", "holds no logged step yet", "a run that has logged one (log.every)"
        )
    return Run(folder, every, flatten(json.loads(texts["config.json"])), steps, validations)


def flatten(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a config's values by ``section.key``."""
    values: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, dict):
            values |= flatten(value, f"{prefix}{key}.")
        else:
            values[prefix + key] = value
    return values
