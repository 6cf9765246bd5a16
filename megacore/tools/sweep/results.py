"""What a sweep's trials have reached: a row each, points over their seeds, the best
one; as tables and files.
"""

import csv
import io
import math
import sys
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from megacore.errors import ConfigError
from megacore.files import OUTPUT, open_plain, read_text, write_json, write_whole
from megacore.tools.metrics_file import read_metrics
from megacore.tools.sweep.folder import SweepFolder
from megacore.tools.sweep.trials import Trial, said, short_names

FINISHED = "finished"


@dataclass(frozen=True)
class Row:
    """What became of a trial. A loss that is not finite is infinite."""

    trial: Trial
    status: str  # finished, failed (N), stopped at step N, not started
    step: int
    loss: float | None  # the mean of the last logged ones
    valid_loss: float | None  # the last one
    seconds: float  # of its steps

    @property
    def finished(self) -> bool:
        """Whether all its steps are done."""
        return self.status == FINISHED


def rows_of(folder: SweepFolder, last: int) -> list[Row]:
    """A row for each trial."""
    return [row_of(folder, trial, last) for trial in folder.trials]


def row_of(folder: SweepFolder, trial: Trial, last: int) -> Row:
    """What a trial's records say."""
    path, steps = folder.log_dir(trial) / "metrics.jsonl", trial.config.train.steps
    ended = folder.ended.get(trial.name)
    failed = f"failed ({ended})" if ended else None
    if not path.exists():
        return Row(trial, failed or "not started", 0, None, None, 0.0)
    try:
        training, validations = read_metrics(read_text(path))
    except (OSError, ValueError):
        return Row(trial, "records are damaged", 0, None, None, 0.0)
    if not training:
        return Row(trial, failed or "not started", 0, None, None, 0.0)
    step, every = training[-1].step, trial.config.log.every
    seconds, before = 0.0, 0
    for line in training:
        seconds += min(line.step - before, every) * line.step_seconds
        before = line.step
    losses = [math.inf if line.loss is None else line.loss for line in training[-last:]]
    valid = (
        None
        if not validations
        else math.inf
        if validations[-1].valid_loss is None
        else validations[-1].valid_loss
    )
    whole = step == steps and (
        trial.config.data.valid is None or (bool(validations) and validations[-1].step == steps)
    )
    status = FINISHED if whole or ended == 0 else failed or f"at step {step} of {steps}"
    return Row(trial, status, step, fmean(losses), valid, seconds)


@dataclass(frozen=True)
class Point:
    """Settings, and the losses of their finished trials over seeds."""

    name: str
    rows: list[Row]
    losses: list[float]

    @property
    def swept(self) -> dict[str, Any]:
        """What was chosen."""
        return self.rows[0].trial.swept

    @property
    def median(self) -> float:
        """Of its losses; infinite unless all its trials have finished."""
        return median(self.losses) if self.whole else math.inf

    @property
    def whole(self) -> bool:
        """Whether all its trials have finished."""
        return len(self.losses) == len(self.rows)


@dataclass(frozen=True)
class Results:
    """All that a sweep has found."""

    rows: list[Row]
    metric: str
    last: int

    def loss(self, row: Row) -> float | None:
        """What trials are judged by."""
        return row.valid_loss if self.metric == "valid_loss" else row.loss

    @property
    def points(self) -> list[Point]:
        """In the order of the trials."""
        groups: dict[str, list[Row]] = {}
        for row in self.rows:
            groups.setdefault(row.trial.point, []).append(row)
        finished = {name: [self.loss(row) for row in rows if row.finished] for name, rows in groups.items()}
        return [
            Point(name, rows, [v for v in finished[name] if v is not None]) for name, rows in groups.items()
        ]

    @property
    def best(self) -> Point | None:
        """The point of least median; None if none is whole and finite."""
        whole = [point for point in self.points if math.isfinite(point.median)]
        return min(whole, key=lambda point: point.median, default=None)

    @property
    def described(self) -> str:
        """The metric in words."""
        return (
            "validation loss after the last step"
            if self.metric == "valid_loss"
            else f"loss, mean of the last {self.last} logged steps"
        )

    @property
    def keys(self) -> list[str]:
        """What was swept."""
        return list(self.rows[0].trial.swept)

    def at_the_end(self) -> list[str]:
        """Lines for each number of which the best point has the smallest or the largest that was tried."""
        lines, best = [], self.best
        for key in self.keys if best is not None else ():
            values = sorted(
                {value for point in self.points if (value := number_of(point.swept[key])) is not None}
            )
            own = number_of(best.swept[key]) if best is not None else None
            if len(values) > 1 and own in (values[0], values[-1]):
                end = "smallest" if own == values[0] else "largest"
                lines.append(
                    f"The best {key}, {own:g}, is the {end} that was tried: the optimum may lie beyond it."
                )
        return lines


def number_of(value: Any) -> float | None:
    """A swept value as a number: of an object the first of its numbers; None if it has none."""
    if isinstance(value, dict):
        return next((number for inner in value.values() if (number := number_of(inner)) is not None), None)
    return None if isinstance(value, bool) or not isinstance(value, int | float) else float(value)


def metric_of(trials: list[Trial], wanted: str | None) -> str:
    """What trials are judged by. Raises `ConfigError` if they have no such figure."""
    valid = all(trial.config.data.valid is not None for trial in trials)
    if wanted == "valid_loss" and not valid:
        raise ConfigError(
            "metric", "valid_loss is not measured: a trial has no data.valid", "loss, or data.valid"
        )
    return wanted or ("valid_loss" if valid else "loss")


def show(results: Results) -> None:
    """Prints the table of trials, and of points where there are several seeds."""
    from rich.console import Console
    from rich.table import Table

    short = short_names(results.keys)
    console = Console(
        highlight=False, markup=False, width=None if sys.stdout.isatty() else 60 + 16 * len(short)
    )
    seeds = any(row.trial.seed is not None for row in results.rows)
    table = Table(
        "trial",
        *short.values(),
        *(["seed"] if seeds else []),
        "loss",
        "valid loss",
        "seconds",
        "status",
        box=None,
    )
    for number, row in enumerate(results.rows, 1):
        cells = [said(row.trial.swept[key]) for key in short] + ([str(row.trial.seed)] if seeds else [])
        table.add_row(
            str(number), *cells, figure(row.loss), figure(row.valid_loss), f"{row.seconds:.1f}", row.status
        )
    console.print(table)
    console.print(
        f"loss: the mean of the last {results.last} logged steps; valid loss: the last one", soft_wrap=True
    )
    if seeds:
        points = Table(*short.values(), "median", "lowest", "highest", "finished", box=None)
        for point in results.points:
            middle = (figure(f(point.losses)) if point.losses else "–" for f in (median, min, max))
            points.add_row(
                *(said(point.swept[key]) for key in short),
                *middle,
                f"{len(point.losses)} of {len(point.rows)}",
            )
        console.print(f"\nover seeds, {results.described}:", soft_wrap=True)
        console.print(points)
    best = results.best
    if best is not None:
        console.print(
            f"\nbest: {best.name or 'the config'} ({results.described}: {best.median:.4f})", soft_wrap=True
        )
    for line in results.at_the_end():
        console.print(line, soft_wrap=True)


def figure(value: float | None) -> str:
    """A loss in a table."""
    return "–" if value is None else f"{value:.4f}" if math.isfinite(value) else "not finite"


def write(results: Results, folder: SweepFolder) -> None:
    """Writes results.json, results.csv, and best.json where there is a best."""
    rows = [
        {
            "trial": row.trial.name,
            **{key: row.trial.swept[key] for key in results.keys},
            "seed": row.trial.seed,
            "status": row.status,
        }
        | {
            "step": row.step,
            "loss": finite(row.loss),
            "valid_loss": finite(row.valid_loss),
            "seconds": row.seconds,
        }
        for row in results.rows
    ]
    points = [
        {
            "point": point.name,
            "swept": point.swept,
            "median": finite(point.median),
            "losses": [finite(v) for v in point.losses],
        }
        for point in results.points
    ]
    best = results.best
    found = {"metric": results.metric, "meaning": results.described, "trials": rows, "points": points}
    write_json("folder", folder.path / "results.json", found | {"best": None if best is None else best.name})
    text = io.StringIO()
    table = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    table.writeheader()
    table.writerows(
        {key: said(value) if isinstance(value, dict | list) else value for key, value in row.items()}
        for row in rows
    )
    try:
        write_whole(folder.path / "results.csv", text.getvalue())
    except OSError as error:
        raise ConfigError(
            "folder", f"cannot write {folder.path / 'results.csv'}: {error.strerror}", OUTPUT
        ) from None
    if best is not None:
        write_json("folder", folder.path / "best.json", best.rows[0].trial.sections)


def finite(value: float | None) -> float | None:
    """A number that JSON has."""
    return value if value is not None and math.isfinite(value) else None


def last_line(folder: SweepFolder, trial: Trial) -> str:
    """The last line that a trial said."""
    try:
        with open_plain(folder.log_dir(trial) / "output.txt") as file:
            file.seek(max(0, file.seek(0, 2) - 4096))
            lines = file.read().decode("utf-8", "replace").split("\n")
    except OSError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
