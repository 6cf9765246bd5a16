"""What a run's folder says of the steps it has done: their figures, the samples they were dealt, and
from which checkpoint they follow.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from megacore.checkpoint import Reader, checkpoints_in, newest_whole
from megacore.checkpoint.folder import step_of
from megacore.checkpoint.weights import recorded_sections
from megacore.config.schema import TrainConfig
from megacore.errors import CheckpointError, ConfigError, LogError
from megacore.files import read_json, read_text
from megacore.records import Count, Record, Whole, complaint
from megacore.tools.metrics_file import Figure, read_metrics


class Skipped(Record):
    """A line of skipped.jsonl. A loss or norm that is not finite is null."""

    step: Count
    first_sample: Whole
    loss: Figure | None
    grad_norm: Figure | None


@dataclass(frozen=True)
class Deal:
    """From step `first` on, a step reads the batch that is `ahead` of it: so many
    were passed over by going back.
    """

    first: int
    ahead: int


@dataclass(frozen=True)
class Attempt:
    """The steps behind a checkpoint up to `last`, as they were done: behind each return to a
    checkpoint a run makes another attempt.
    """

    deals: tuple[Deal, ...]
    last: int

    def ahead(self, step: int) -> int:
        """By how many batches the samples of `step` were ahead of it."""
        return [deal.ahead for deal in self.deals if deal.first <= step][-1]


class History:
    """The records in a run's `folder`, read only.

    Raises `LogError` where it has none, or they are damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            self.logged = {line.step: line for line in read_metrics(self._text("metrics.jsonl"))[0]}
        except ValueError as error:
            if isinstance(error, LogError):
                raise
            raise LogError(f"{folder}/metrics.jsonl", str(error), "as the run wrote it") from None
        self.skipped = list(self._skipped()) if (folder / "skipped.jsonl").exists() else []
        copies = checkpoints_in(self.mirror) if self.mirror is not None else []
        # of a step the run's own first
        self.checkpoints = sorted([*checkpoints_in(folder), *copies], key=step_of, reverse=True)
        self.last = max(
            [*self.logged, *(line.step for line in self.skipped), *map(step_of, self.checkpoints)], default=0
        )

    def _text(self, name: str) -> str:
        try:
            return read_text(self.folder / name)
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "no text"
            raise LogError(
                str(self.folder / name), f"cannot be read: {why}", "the folder of a run, its log.dir"
            ) from None

    def _skipped(self) -> Iterator[Skipped]:
        for number, line in enumerate(self._text("skipped.jsonl").rpartition("\n")[0].splitlines(), 1):
            try:
                yield Skipped.model_validate_json(line)
            except ValidationError as error:
                wrong = f"line {number} is no record of a skipped step: {complaint(error)}"
                raise LogError(f"{self.folder}/skipped.jsonl", wrong, "as the run wrote it") from None

    def before(self, step: int) -> Reader:
        """The newest whole checkpoint before `step`, all of which was read and compared with its digests.

        Damaged ones are warned of.

        Raises:
            ConfigError: the run has not done the step, or has no checkpoint before it.
            CheckpointError: none before it is whole.
        """
        if not 1 <= step <= self.last:
            raise ConfigError(
                "--step",
                f"the run has done no step {step}",
                f"1 to {self.last}" if self.last else "a run that has logged one",
            )
        steps = sorted(map(step_of, self.checkpoints))
        if not steps or steps[0] >= step:
            wrong = f"there is no checkpoint before step {step} in {self.folder}"
            can = steps and steps[0] < self.last
            right = (
                f"a step from {steps[0] + 1} to {self.last}: its first checkpoint is of step {steps[0]}"
                if can
                else "checkpoint.every"
            )
            raise ConfigError("--step", wrong, right)
        reader, faults = newest_whole([path for path in self.checkpoints if step_of(path) < step], deep=True)
        if reader is None:
            wrong = f"{faults[0].wrong}, and no checkpoint before it is whole"
            raise CheckpointError(faults[0].where, wrong, "a step behind a whole checkpoint")
        return reader

    def sections(self, step: int) -> dict[str, Any]:
        """The sections of the config that `step` was done with: of the first checkpoint that was saved
        behind it, or else the newest.
        """
        for path in sorted((path for path in self.checkpoints if step_of(path) >= step), key=step_of):
            try:
                return recorded_sections(Reader(path))
            except CheckpointError:  # another one tells
                continue
        return self._config()

    @property
    def mirror(self) -> Path | None:
        """Where the run's second copies are; None if it has none, or does not say."""
        try:
            said = self._config().get("checkpoint", {}).get("mirror")
        except LogError:  # only a run whose checkpoints do not say its settings needs the file
            return None
        return Path(said) if isinstance(said, str) else None

    def _config(self) -> dict[str, Any]:
        """The sections of the run's config.json."""
        try:
            raw = read_json(self._text("config.json"))
        except (json.JSONDecodeError, ValueError, RecursionError) as error:
            if isinstance(error, LogError):
                raise
            raise LogError(
                f"{self.folder}/config.json", f"is no config: {error}", "as the run wrote it"
            ) from None
        if not isinstance(raw, dict) or not all(
            isinstance(raw.get(name), dict) for name in ("model", "train", "data", "optim")
        ):
            raise LogError(
                f"{self.folder}/config.json", "is no config: it lacks sections", "as the run wrote it"
            )
        return raw

    def past(self, base: Reader, sections: dict[str, Any]) -> "Past":
        """What was done behind the checkpoint `base`."""
        return Past(self, base, sections)


class Past:
    """The steps behind a checkpoint, with all attempts at them."""

    def __init__(self, history: History, base: Reader, sections: dict[str, Any]) -> None:
        self.history, self.base = history, base
        train = sections["train"]
        self.batches = TrainConfig.model_construct(
            global_batch_size=train["global_batch_size"], batch_ramp=train.get("batch_ramp", ())
        )
        self.limits = sections["optim"].get("max_skips", 0), sections["optim"].get("max_rollbacks", 0)
        self.every = sections.get("checkpoint", {}).get("every", 0)
        self.ahead = self._ahead(base)
        skips = [
            (line, self.batches.batches_in(line.first_sample) - line.step + 1)
            for line in history.skipped
            if line.step > base.step
        ]
        self.skips = {(line.step, ahead): line for line, ahead in skips if ahead >= self.ahead}

    def _ahead(self, reader: Reader) -> int:
        return self.batches.batches_in(int(reader.state["samples"])) - reader.step

    @cached_property
    def attempts(self) -> list[Attempt]:
        """In order; of those that went back, `last` is the step before that."""
        deals, found = [Deal(self.base.step + 1, self.ahead)], list[Attempt]()
        aheads = sorted({self.ahead, *(ahead for _, ahead in self.skips), *self._saved_aheads()})
        for ahead, following in pairwise(aheads):
            steps = [step for step, own in self.skips if own == ahead]
            if not steps:
                wrong = f"lacks the steps for which the run went back, to be {following} batches ahead"
                raise LogError(f"{self.history.folder}/skipped.jsonl", wrong, "as the run wrote it")
            found.append(Attempt(tuple(deals), max(steps)))
            deals = behind(deals, max(steps) + ahead - following, following)
        if (returned := self._untold_return(aheads)) is not None:
            found.append(Attempt(tuple(deals), returned[0]))
            deals = behind(deals, *returned[1:])
        return [*found, Attempt(tuple(deals), self.history.last)]

    def _saved_aheads(self) -> Iterator[int]:
        for path in self.history.checkpoints:
            if step_of(path) > self.base.step:
                try:
                    yield max(self.ahead, self._ahead(Reader(path)))
                except (CheckpointError, KeyError):  # a damaged one tells nothing
                    continue

    def _untold_return(self, aheads: list[int]) -> tuple[int, int, int] | None:
        """The step before the last return, the one that it went back to, and the batches ahead since,
        where nothing came to tell of it.
        """
        limit, returns = self.limits
        in_a_row = sorted(step for step, ahead in self.skips if ahead == aheads[-1])[-limit:] if limit else []
        if len(in_a_row) < limit or not limit or in_a_row[-1] - in_a_row[0] >= limit:
            return None
        if self.base.state["rollbacks"] + len(aheads) - 1 >= returns:
            return None
        last = in_a_row[-1]
        back_to = max(self.base.step, (last - 1) // self.every * self.every if self.every else 0)
        return last, back_to, last + aheads[-1] - back_to

    def attempt(self, step: int, skipped: bool) -> Attempt:
        """The last attempt that did `step`; if `skipped`, the last that skipped it.

        Raises `ConfigError` if none did.
        """
        found = [
            each
            for each in self.attempts
            if each.last >= step and (not skipped or (step, each.ahead(step)) in self.skips)
        ]
        if not found:
            raise ConfigError("--skipped", f"skipped.jsonl has no step {step}", "leave it out")
        return found[-1]

    def recorded(self, step: int, attempt: Attempt) -> tuple[float | None, float | None] | None:
        """Loss and gradient norm of a step as recorded, None where one was not finite; None
        if nobody has recorded the step.
        """
        line = self.skips.get((step, attempt.ahead(step)))
        if line is not None:
            return line.loss, line.grad_norm
        logged = self.history.logged.get(step)
        if logged is None or attempt.ahead(step) != self.attempts[-1].ahead(step):
            return None
        return logged.loss, logged.grad_norm


def behind(deals: list[Deal], step: int, ahead: int) -> list[Deal]:
    """The deals of an attempt that goes on behind `step` of another one."""
    return [*(deal for deal in deals if deal.first <= step), Deal(step + 1, ahead)]
