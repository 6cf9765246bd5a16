"""The scoreboard by size of run, and whether its error bars hold on rows that they were not computed from."""

import json
import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from benchmarks.planner_rows import Row
from megacore.tools.planner.error_bars import SIZES, Ratios, interval, of_size
from megacore.tools.planner.profile import profile, profile_names, unexplained

FOLDS = 10


def ratios(held_out: Sequence[tuple[Row, float]]) -> Ratios:
    """Measured over predicted seconds of rows that nothing was fitted to."""
    found: Ratios = {}
    for row, predicted in held_out:
        assert row.seconds is not None
        models = found.setdefault(row.framework, {})
        models.setdefault(row.model, {}).setdefault(str(row.setting.world), []).append(round(row.seconds / predicted, 3))
    return found


def as_text(found: Ratios, command: str) -> str:
    """The file of error bars, a line for each model."""
    lines = []
    for framework, models in sorted(found.items()):
        own = (
            f"   {json.dumps(model)}: {json.dumps({n: sorted(runs[n]) for n in sorted(runs, key=int)})}" for model, runs in models.items()
        )
        lines.append(f"  {json.dumps(framework)}: {{\n" + ",\n".join(sorted(own)) + "\n  }")
    return f'{{\n "command": {json.dumps(command)},\n "measured over predicted": {{\n' + ",\n".join(lines) + "\n }\n}\n"


def bars(found: Ratios) -> dict[str, Any]:
    """Of each size the bar, and the part of rows that lie in the bar of the others: of other rows, and of other models."""
    report = {}
    for size in SIZES:
        if len(runs := of_size(size, found)) > 1:
            low, high = interval(runs)
            covered: dict[str, float | None] = {
                "rows left out": coverage(row_folds(runs)),
                "models left out": coverage(model_folds(size, found)),
            }
            report[size] = {"rows": len(runs), "low": low, "high": high, **covered}
    return report


def coverage(folds: Iterator[tuple[list[float], list[float]]]) -> float | None:
    """The part of all rows left out that lie in the bar of the rest; None if there is no rest."""
    inside: list[bool] = []
    for left_out, rest in folds:
        if len(rest) > 1:
            low, high = interval(rest)
            inside += [low <= ratio <= high for ratio in left_out]
    return float(np.mean(inside)) if inside else None


def row_folds(runs: Sequence[float]) -> Iterator[tuple[list[float], list[float]]]:
    """A tenth of the rows and the others, ten times."""
    order = sorted(runs)
    random.Random(0).shuffle(order)
    for fold in range(FOLDS):
        yield order[fold::FOLDS], [ratio for i, ratio in enumerate(order) if i % FOLDS != fold]


def model_folds(size: str, found: Ratios) -> Iterator[tuple[list[float], list[float]]]:
    """The rows of a framework's model and all others."""
    for framework, models in found.items():
        for model in models:
            rest = {f: {m: runs for m, runs in own.items() if (f, m) != (framework, model)} for f, own in found.items()}
            yield of_size(size, {framework: {model: models[model]}}), of_size(size, rest)


def markdown(report: dict[str, Any]) -> list[str]:
    """The tables by size."""
    lines = ["", "By size of run, rows held out. Of 80 % of them the measured time lies within the bar around the predicted one."]
    lines += ["Whether bars hold is asked of rows, and of whole models, that are left out when a bar is computed.", ""]
    lines += ["| size | rows | error, median | 90th percentile | bias | bar | holds, rows left out | holds, models left out |"]
    lines += ["|---|---:|---:|---:|---:|---:|---:|---:|"]
    errors = report["held out, by size"]
    for size, own in report["bars"].items():
        held = ("" if own[key] is None else f"{own[key]:.0%}" for key in ("rows left out", "models left out"))
        figures = (f"{errors[size][key]:+.1%}" if key == "bias" else f"{errors[size][key]:.1%}" for key in ("median", "p90", "bias"))
        bar = f"{own['low'] - 1:+.0%} … {own['high'] - 1:+.0%}"
        lines.append(f"| {size} | {own['rows']} | {' | '.join((*figures, bar, *held))} |")
    by_framework = report["held out, by framework and size"]
    lines += [
        "",
        "Median error of rows held out, and how many there are:",
        "",
        f"| framework | {' | '.join(SIZES)} |",
        "|---|---:|---:|---:|",
    ]
    for name in dict.fromkeys(key.partition(" ")[0] for key in by_framework):
        cells = (by_framework.get(f"{name} {size}") for size in SIZES)
        figures = (f"{own['median']:.1%} ({own['rows']})" if own else "" for own in cells)
        lines.append(f"| {name} | {' | '.join(figures)} |")
    if report["memory, by size"]:
        lines += ["", "What is said of nanotron's runs that failed for memory, and of those that ran:", ""]
        lines += ["| size | failed | recall | of those that fill half | ran | false alarms |", "|---|---:|---:|---:|---:|---:|"]
    for size, own in report["memory, by size"].items():
        recall = f"{own['recall']:.2f} | {own['recall where half is full']:.2f}"
        lines.append(f"| {size} | {own['failed']} | {recall} | {own['rows']} | {own['false alarms']:.1%} |")
    odd = ((name, unexplained(profile(name))) for name in profile_names())
    lines += ["", "Fitted constants that no physics explains; what the model leaves out has gone into them:", ""]
    return lines + [f"- {name}: {', '.join(constants)}." for name, constants in odd if constants]
