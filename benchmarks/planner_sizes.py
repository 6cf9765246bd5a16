"""The scoreboard by kind of run, and whether its error bars hold on rows, and on whole models,
that they were not computed from.
"""

import json
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from benchmarks.planner_rows import Row
from megacore.tools.planner.error_bars import (
    KINDS,
    SHARE,
    SIZES,
    STALL,
    TAIL_STEP,
    Interval,
    Kind,
    Ratios,
    interval,
    key_of,
    kind_of,
    named,
    of_kind,
)
from megacore.tools.planner.profile import profile, profile_names, unexplained

FOLDS = 10
MOST_TAIL = 0.15  # a tail that is tried


def across(row: Row) -> bool:
    """Whether the row's pipeline crosses machines."""
    return row.setting.pipeline > 1 and row.setting.world > row.cluster.node_ranks


def row_kind(row: Row) -> Kind:
    """The kind of a row's run."""
    return kind_of(row.setting.world, across(row))


def ratios(predicted: Sequence[tuple[Row, float]]) -> Ratios:
    """Measured over predicted seconds."""
    found: Ratios = {}
    for row, value in predicted:
        assert row.seconds is not None
        models = found.setdefault(row.framework, {})
        models.setdefault(row.model, {}).setdefault(key_of(row.setting.world, across(row)), []).append(
            round(row.seconds / value, 3)
        )
    return found


def as_text(found: Ratios, cut: dict[str, float], command: str) -> str:
    """The file of error bars, a line for each model."""
    lines = []
    for framework, models in sorted(found.items()):
        own = (
            f"   {json.dumps(model)}: "
            f"{json.dumps({key: sorted(runs[key]) for key in sorted(runs, key=_in_order)})}"
            for model, runs in models.items()
        )
        lines.append(f"  {json.dumps(framework)}: {{\n" + ",\n".join(sorted(own)) + "\n  }")
    head = (
        f'{{\n "command": {json.dumps(command)},\n "tails": {json.dumps(cut)},\n "measured over '
        f'predicted": {{\n'
    )
    return head + ",\n".join(lines) + "\n }\n}\n"


def _in_order(key: str) -> tuple[int, str]:
    devices, _, rest = key.partition(" ")
    return int(devices), rest


def tails(found: Ratios) -> dict[str, float]:
    """By size, what share of the rows lies below a bar, and what above, so that bars
    hold `SHARE` of a new run's rows.

    A new run is something between a row of a known model and one of a model unlike all of them. So of rows
    left out as many more lie in the bar as of models left out fewer.
    """
    every = [round(n * TAIL_STEP, 3) for n in range(1, round(MOST_TAIL / TAIL_STEP) + 1)]

    def off(size: str, tail: float) -> float:
        rows, models = (covered(size, found, tail, folds) for folds in (row_folds, model_folds))
        return abs((rows or 0.0) + (models or 0.0) - 2 * SHARE)

    return {
        size: min(every, key=lambda tail: off(size, tail))
        for size in SIZES
        if any(len(of_kind(k, found)) > 1 for k in kinds(size))
    }


def kinds(size: str) -> list[Kind]:
    """The kinds of a size."""
    return [kind for kind in KINDS if kind[0] == size]


def bars(found: Ratios, cut: dict[str, float]) -> dict[str, Any]:
    """Of each kind the bars and the share that stalls, and the part of rows that lie in the bar: of its own
    rows, of rows that are left out when it is computed, and of models that are.
    """
    report = {}
    for kind in KINDS:
        if len(runs := of_kind(kind, found)) > 1:
            tail = cut[kind[0]]
            usual = [ratio for ratio in runs if ratio < STALL]
            report[named(kind)] = {
                "rows": len(runs),
                "bar": interval(runs, tail),
                "stalled": 1 - len(usual) / len(runs),
                "bar of the others": interval(usual, tail),
                "its own rows": part_inside(runs, interval(runs, tail)),
                "rows left out": coverage(row_folds(kind, found), tail),
                "models left out": coverage(model_folds(kind, found), tail),
            }
    return report


def held(found: Ratios, cut: dict[str, float]) -> dict[str, Any]:
    """The same of all kinds of a size together."""
    return {
        size: {
            "its own rows": covered(size, found, tail, own_rows),
            "rows left out": covered(size, found, tail, row_folds),
            "models left out": covered(size, found, tail, model_folds),
        }
        for size, tail in cut.items()
    }


Folds = Iterator[tuple[list[float], list[float]]]


def covered(size: str, found: Ratios, tail: float, folds: Callable[[Kind, Ratios], Folds]) -> float | None:
    """The part of all rows of a size that lie in the bar of what is left of their kind."""
    return coverage((fold for kind in kinds(size) for fold in folds(kind, found)), tail)


def part_inside(runs: Sequence[float], bar: Interval) -> float:
    """The part of rows that lie in a bar."""
    return float(np.mean([bar[0] <= ratio <= bar[1] for ratio in runs]))


def coverage(folds: Folds, tail: float) -> float | None:
    """The part of all rows left out that lie in the bar of the rest; None if there is no rest."""
    inside: list[bool] = []
    for left_out, rest in folds:
        if len(rest) > 1:
            low, high = interval(rest, tail)
            inside += [low <= ratio <= high for ratio in left_out]
    return float(np.mean(inside)) if inside else None


def own_rows(kind: Kind, found: Ratios) -> Folds:
    """All rows, with nothing left out."""
    runs = of_kind(kind, found)
    yield runs, runs


def row_folds(kind: Kind, found: Ratios) -> Folds:
    """A tenth of the rows and the others, ten times."""
    order = sorted(of_kind(kind, found))
    random.Random(0).shuffle(order)
    for fold in range(FOLDS):
        yield order[fold::FOLDS], [ratio for i, ratio in enumerate(order) if i % FOLDS != fold]


def model_folds(kind: Kind, found: Ratios) -> Folds:
    """The rows of a framework's model and all others."""
    for framework, models in found.items():
        for model in models:
            rest = {
                f: {m: runs for m, runs in own.items() if (f, m) != (framework, model)}
                for f, own in found.items()
            }
            yield of_kind(kind, {framework: {model: models[model]}}), of_kind(kind, rest)


def markdown(report: dict[str, Any]) -> list[str]:
    """The tables by size."""
    lines = ["", "By size of run: rows that were fitted, and rows held out.", ""]
    lines += [
        "| size | rows fitted | error, median | 90th percentile | bias | rows held out | error, median | "
        "90th percentile | bias |"
    ]
    lines += ["|---|---:|---:|---:|---:|---:|---:|---:|---:|"]
    for size in SIZES:
        cells = []
        for part in ("fitted", "held out"):
            own = report[f"{part}, by size"].get(size)
            cells += (
                [f"{own['rows']}", f"{own['median']:.1%}", f"{own['p90']:.1%}", f"{own['bias']:+.1%}"]
                if own
                else [""] * 4
            )
        lines.append(f"| {size} | {' | '.join(cells)} |")
    lines += [
        "",
        "What bars are computed from: rows held out, and all of the two sweeps, whose many rows a dozen "
        "constants cannot follow.",
    ]
    lines += ["A run that takes 1.5 times its prediction, or more, counts as stalled.", ""]
    lines += [
        "| runs | rows | bar | stalled | bar of the others | holds its own rows | rows left out | models "
        "left out |"
    ]
    lines += ["|---|---:|---:|---:|---:|---:|---:|---:|"]
    whole = [
        (
            name,
            own,
            f"{own['rows']} | {_bar(own['bar'])} | {own['stalled']:.0%} | {_bar(own['bar of the others'])}",
        )
        for name, own in report["bars"].items()
    ]
    whole += [(f"all {size}", own, " | | | ") for size, own in report["bars hold"].items()]
    for name, own, cells_text in whole:
        inside = (
            "" if own[key] is None else f"{own[key]:.0%}"
            for key in ("its own rows", "rows left out", "models left out")
        )
        lines.append(f"| {name} | {cells_text} | {' | '.join(inside)} |")
    by_framework = report["held out, by framework and size"]
    lines += [
        "",
        "Median error of rows held out, and how many there are:",
        "",
        f"| framework | {' | '.join(SIZES)} |",
        "|---|---:|---:|---:|",
    ]
    for name in dict.fromkeys(key.partition(" ")[0] for key in by_framework):
        found = [by_framework.get(f"{name} {size}") for size in SIZES]
        cells = [f"{own['median']:.1%} ({own['rows']})" if own else "" for own in found]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    if report["memory, by size"]:
        lines += ["", "What is said of nanotron's runs that failed for memory, and of those that ran:", ""]
        lines += [
            "| size | failed | recall | of those that fill half | ran | false alarms |",
            "|---|---:|---:|---:|---:|---:|",
        ]
    for size, own in report["memory, by size"].items():
        recall = f"{own['recall']:.2f} | {own['recall where half is full']:.2f}"
        lines.append(f"| {size} | {own['failed']} | {recall} | {own['rows']} | {own['false alarms']:.1%} |")
    odd = ((name, unexplained(profile(name))) for name in profile_names())
    lines += [
        "",
        "Fitted constants that no physics explains; what the model leaves out has gone into them:",
        "",
    ]
    return lines + [f"- {name}: {', '.join(constants)}." for name, constants in odd if constants]


def _bar(own: Interval) -> str:
    return f"{own[0] - 1:+.0%} … {own[1] - 1:+.0%}"
