"""The planner's scoreboard: compare predicted step times with a table of publicly measured ones.

Errors are reported for rows that the constants were fitted on and for rows that were held out, next to a
baseline that knows one MFU for each framework, device and precision and is fitted on the same rows.
`benchmarks/planner_fit.py` lists which models or sizes of a framework are held out.
With --fit the constants are fitted again and written to megacore/tools/planner/fitted.json.
"""

import argparse
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import machine, planner_memory, planner_sizes, planner_weak_scaling
from benchmarks.planner_charts import draw_ablation, draw_measured
from benchmarks.planner_fit import CASES, SWEEPS, fit, steps
from benchmarks.planner_rows import Row, read
from benchmarks.planner_score import baseline, errors, regret
from megacore.errors import ConfigError
from megacore.tools.cli import Parser, exit_with
from megacore.tools.output_files import check_output
from megacore.tools.planner.error_bars import FILE as ERROR_BARS
from megacore.tools.planner.profile import FITTED, Profile, fitted, profile
from megacore.tools.planner.step_time import predict

EXAMPLE = "python -m benchmarks.planner --output benchmarks/results/planner"
ROOT = Path(__file__).resolve().parents[1]
MEASURED = ROOT / "benchmarks/measured_steps.csv"
WEAK_SCALING = ROOT / "benchmarks/a100_weak_scaling.csv"
INTRODUCTION = """\
How far predicted step times are from publicly measured ones, for rows that the constants were fitted on and
rows that were held out. The predictions do not depend on the machine that computes them.

The measurements are in [measured_steps.csv](../measured_steps.csv) and, for the weak scaling,
[a100_weak_scaling.csv](../a100_weak_scaling.csv). A row's `source` is the repository, commit, file and line
that published it; an empty cell means that the source does not state the value.
[Where the predictions are wrong](planner_errors.md) discusses the errors. The same numbers are in
[planner.json](planner.json).

The baseline is one MFU for each framework, device and precision, fitted on the same rows. Regret is the
measured time of the layout that the planner would choose, divided by the best measured time.
"""
SWITCHES = (
    "shape",
    "attention",
    "passes",
    "tensor",
    "context",
    "launch",
    "pipeline",
    "bubble",
    "data",
    "optimizer",
    "host",
    "stragglers",
)


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = Parser(
        "Compare predicted step times with a table of measured ones.",
        example=EXAMPLE,
        page="docs/planning.md",
    )
    parser.add_argument(
        "data",
        type=Path,
        nargs="?",
        default=MEASURED,
        metavar="FILE.csv",
        help="table of measured steps (default: benchmarks/measured_steps.csv)",
    )
    parser.add_argument(
        "--fit",
        action="store_true",
        help="fit the planner's constants again and write them to megacore/tools/planner/fitted.json",
    )
    parser.add_argument(
        "--weak-scaling",
        type=Path,
        default=WEAK_SCALING,
        metavar="FILE.csv",
        help="table 1 of Narayanan et al. 2021, also predicted (default: benchmarks/a100_weak_scaling.csv)",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="PREFIX",
        help="write PREFIX.json, PREFIX.md, the charts in docs/figures, and the error bars",
    )
    return parser.parse_args(argv)


def of_framework(rows: Sequence[Row], name: str) -> list[Row]:
    """The rows of a framework that ran."""
    return [row for row in rows if row.framework == name and row.seconds is not None]


def command_of(data: Path, *options: str) -> str:
    """Return the command that reads this table; the project's own table is the default and is left out."""
    table = [] if data == MEASURED else [data.name]
    return " ".join(["python -m benchmarks.planner", *options, *table])


def fit_all(rows: Sequence[Row], data: Path) -> None:
    """Fits every framework's constants, and freezes them with the command and the split."""
    frozen = fitted()
    report: dict[str, Any] = {
        "command": command_of(data, "--fit"),
        "profiles": dict(frozen["profiles"]),  # a framework without rows keeps its constants
        "memory": frozen.get("memory", {}),
    }
    for name, case in CASES.items():
        own = [row for row in of_framework(rows, name) if not case.held_out(row)]
        if own:
            found = fit(own, case, name)
            report["profiles"][name] = {"split": case.split, "fitted_rows": len(own)} | constants_of(
                found, case.start, case.free
            )
    freeze(report)
    measured = [
        row
        for row in of_framework(rows, "nanotron")
        if row.memory_gib and not CASES["nanotron"].held_out(row)
    ]
    if measured:  # with the times that were just fitted
        freeze(report | {"memory": {"nanotron": planner_memory.fit(measured, "nanotron")}})


def freeze(report: dict[str, Any]) -> None:
    """Writes the file of fitted constants."""
    FITTED.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    fitted.cache_clear()


def constants_of(found: Profile, start: dict[str, Any], free: Sequence[str]) -> dict[str, Any]:
    """The constants that differ from the defaults, to four digits."""
    names = {name.partition("/")[0] for name in (*start, *free)}

    def short(value: Any) -> Any:
        return (
            {key: short(v) for key, v in value.items()}
            if isinstance(value, dict)
            else float(f"{value:.4g}")
            if isinstance(value, float)
            else value
        )

    return {name: short(getattr(found, name)) for name in sorted(names)}


def score(rows: Sequence[Row]) -> dict[str, Any]:
    """Errors and regret of every framework and of all tuned tables together, by rows fitted and held out."""
    table: dict[str, Any] = {}
    tuned: dict[str, list[tuple[Row, float, float]]] = defaultdict(list)
    for name, case in CASES.items():
        own = of_framework(rows, name)
        if not own:
            continue
        known = [row for row in own if not case.held_out(row)] or own
        scored = list(zip(own, steps(own, profile(name)), baseline(own, known), strict=True))
        table[name] = {"split": case.split}
        for part, wanted in (("fitted", False), ("held out", True)):
            chosen = [one for one in scored if case.held_out(one[0]) is wanted]
            table[name] |= part_of(part, chosen)
            if name not in SWEEPS:
                tuned[part] += chosen
    table["all tuned tables"] = {"split": f"all but the sweeps, {' and '.join(SWEEPS)}"}
    for part, chosen in tuned.items():
        table["all tuned tables"] |= part_of(part, chosen)
    return table


def part_of(part: str, scored: Sequence[tuple[Row, float, float]]) -> dict[str, Any]:
    """Errors and regret of some rows by prediction, and by the baseline."""
    if not scored:
        return {}
    chosen, *values = zip(*scored, strict=True)
    found = [errors(np.array(v), chosen) | {"regret": regret(np.array(v), chosen)} for v in values]
    return {part: found[0], f"{part}, baseline": found[1]}


def predicted(rows: Sequence[Row], wanted: Callable[[str, bool], bool]) -> list[tuple[Row, float]]:
    """Rows that ran, with their predicted seconds, of which is wanted what a
    framework and "it is held out" say.
    """
    found = []
    for name, case in CASES.items():
        own = [row for row in of_framework(rows, name) if wanted(name, case.held_out(row))]
        found += [(row, float(value)) for row, value in zip(own, steps(own, profile(name)), strict=True)]
    return found


def by(held: Sequence[tuple[Row, float]], key: Callable[[Row], Any]) -> dict[str, Any]:
    """Errors of rows, by anything."""
    groups: dict[Any, list[tuple[float, Row]]] = defaultdict(list)
    for row, value in held:
        groups[key(row)].append((value, row))
    return {
        str(k): errors(np.array([v for v, _ in groups[k]]), [row for _, row in groups[k]])
        for k in sorted(groups)
    }


def of_mixtures(mixtures: Sequence[Row], rows: Sequence[Row]) -> dict[str, Any]:
    """Errors of models with experts, by model, device and whose table it is, and of one MFU that is that
    of the framework's other rows.
    """
    found: dict[str, list[tuple[Row, float, float]]] = defaultdict(list)
    for name in CASES:
        own = of_framework(mixtures, name)
        if own:
            plain = baseline(own, of_framework(rows, name) or own)
            for one in zip(own, steps(own, profile(name)), plain, strict=True):
                row = one[0]
                for key in ("all", f"{row.model} on {row.device.name}, {row.source}"):
                    found[key].append(one)
    return {
        key: errors(np.array([p for _, p, _ in own]), [row for row, _, _ in own])
        | {"baseline": errors(np.array([b for _, _, b in own]), [row for row, _, _ in own])["median"]}
        for key, own in found.items()
    }


def ablation(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    """Median error on rows held out, whole and with each term left out, without fitting again."""
    report = {}
    for name, case in CASES.items():
        own, found = [row for row in of_framework(rows, name) if case.held_out(row)], profile(name)
        if not own:
            continue
        measured = np.array([row.seconds for row in own])
        predictions = [predict(row.setting, row.device, row.cluster, found) for row in own]
        whole = np.array([p.step for p in predictions])
        smooth = [
            predict(row.setting, replace(row.device, multiprocessors=None), row.cluster, found).step
            for row in own
        ]
        without = {
            term: whole - np.array([p.terms[term] for p in predictions])
            for term in SWITCHES
            if term != "shape"
        }
        table = {"nothing": whole, "shape": np.array(smooth), **without}
        report[name] = {
            term: float(np.median(np.abs(values / measured - 1))) for term, values in table.items()
        }
    return report


def worst(rows: Sequence[Row], count: int = 3) -> list[dict[str, Any]]:
    """Of rows held out, the furthest off in each of the largest frameworks."""
    found = []
    for name in ("nanotron", "megatron-2023", "nemo"):
        case = CASES[name]
        own = [row for row in of_framework(rows, name) if case.held_out(row)]
        predicted = steps(own, profile(name))
        off = np.abs(np.log(predicted / np.array([row.seconds for row in own])))
        for i in np.argsort(-off)[:count]:
            s = own[i].setting
            layout = (
                f"tp{s.tensor} pp{s.pipeline} cp{s.context} dp{s.data} micro batch {s.micro_batch} × "
                f"{s.microbatches}, zero {s.zero}"
            )
            terms = {
                k: round(v, 3)
                for k, v in predict(s, own[i].device, own[i].cluster, profile(name)).terms.items()
                if v > 1e-3
            }
            found.append(
                {
                    "framework": name,
                    "model": own[i].model,
                    "layout": layout,
                    "measured": own[i].seconds,
                    "terms": terms,
                }
            )
    return found


def markdown(report: dict[str, Any]) -> str:
    """The scoreboard as a page."""
    command = f"{report['command']} --output benchmarks/results/planner"
    lines = machine.heading("Predicted and measured step times", command, report)
    lines += [*INTRODUCTION.splitlines(), ""]
    lines += [
        "| framework | rows | error, median | 90th percentile | baseline, median | 90th | regret, median "
        "| worst | baseline's |"
    ]
    lines += ["|---|---|---:|---:|---:|---:|---:|---:|---:|"]
    for name, entry in report["frameworks"].items():
        for part in ("fitted", "held out"):
            if part in entry:
                own, plain = entry[part], entry[f"{part}, baseline"]
                r, q = own["regret"], plain["regret"]
                cells = [
                    f"{own['median']:.1%}",
                    f"{own['p90']:.1%}",
                    f"{plain['median']:.1%}",
                    f"{plain['p90']:.1%}",
                ]
                cells += (
                    [f"{r['median']:.2f}", f"{r['worst']:.2f}", f"{q['median']:.2f}"] if r else ["", "", ""]
                )
                lines.append(f"| {name} | {own['rows']} {part} | {' | '.join(cells)} |")
    lines += ["", "How each was split:", ""] + [
        f"- {name}: {entry['split']}." for name, entry in report["frameworks"].items()
    ]
    columns = (
        "rows | median | 90th percentile | rejected | failed | recall | of runs that fill half | false alarms"
    )
    lines += ["", f"| nanotron's memory | {columns} |"]
    lines += ["|---|---:|---:|---:|---:|---:|---:|---:|---:|"]
    for part, m in report["memory"].items():
        cells = [
            str(m["rows"]),
            f"{m['median']:.1%}",
            f"{m['p90']:.1%}",
            str(m["refused"]),
            str(m["failed"]),
            f"{m['recall']:.2f}",
        ]
        cells += [f"{m['recall where half is full']:.2f}", f"{m['false alarms']:.1%}"]
        lines.append(f"| {part} | {' | '.join(cells)} |")
    lines += planner_weak_scaling.markdown(report["weak scaling"])
    lines += planner_sizes.markdown(report)
    lines += ["", "Median error on rows held out, with one term left out and nothing fitted again:", ""]
    names = list(report["ablation"])
    lines += [f"| without | {' | '.join(names)} |", f"|---|{'---:|' * len(names)}"]
    for term in ("nothing", *SWITCHES):
        lines.append(f"| {term} | {' | '.join(f'{own[term]:.1%}' for own in report['ablation'].values())} |")
    lines += [
        "",
        "MoE models, to which nothing is fitted:",
        "",
        "| model, source | rows | median | with sign | one MFU, median |",
    ]
    lines += ["|---|---:|---:|---:|---:|"]
    for name, m in report["mixtures of experts"].items():
        lines.append(f"| {name} | {m['rows']} | {m['median']:.1%} | {m['bias']:+.1%} | {m['baseline']:.1%} |")
    lines += ["", "Rows that cannot be predicted:", ""] + [
        f"- {count} of {source}: {why}." for (source, why), count in report["skipped"]
    ]
    return "\n".join(lines) + "\n"


def run(argv: list[str]) -> None:
    """Everything that the command does."""
    args = parse(argv)
    if args.output is not None:
        check_output("--output", f"{args.output}.json")
    every, skipped = read(args.data)
    rows, mixtures = (
        [row for row in every if (row.setting.mixture is not None) is wanted] for wanted in (False, True)
    )
    if not any(of_framework(rows, name) for name in CASES):
        raise ConfigError(
            "DATA.csv",
            f"{args.data} has no row whose step can be predicted",
            "the columns of benchmarks/measured_steps.csv",
        )
    if args.fit:
        fit_all(rows, args.data)
    counts = Counter((row.source, row.why) for row in skipped)
    held, known = predicted(rows, lambda _, out: out), predicted(rows, lambda _, out: not out)
    ratios = planner_sizes.ratios(predicted(rows, lambda name, out: out or name in SWEEPS))
    tails = planner_sizes.tails(ratios)
    report: dict[str, Any] = machine.describe() | {
        "command": command_of(args.data),
        "frameworks": score(rows),
        "fitted, by size": by(known, lambda row: planner_sizes.row_kind(row)[0]),
        "held out, by size": by(held, lambda row: planner_sizes.row_kind(row)[0]),
        "held out, by framework and size": by(
            held, lambda row: f"{row.framework} {planner_sizes.row_kind(row)[0]}"
        ),
        "held out, by devices": by(held, lambda row: row.setting.world),
        "held out, by source": by(held, lambda row: row.source),
        "bars": planner_sizes.bars(ratios, tails),
        "bars hold": planner_sizes.held(ratios, tails),
        "memory": planner_memory.score(rows),
        "memory, by size": planner_memory.by_size(rows),
        "ablation": ablation(rows),
        "worst": worst(rows),
        "mixtures of experts": of_mixtures(mixtures, rows),
        "skipped": list(counts.items()),
        "weak scaling": planner_weak_scaling.score(args.weak_scaling),
    }
    print(markdown(report))
    if args.output is not None:
        args.output.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        args.output.with_suffix(".md").write_text(markdown(report), encoding="utf-8")
        ERROR_BARS.write_text(planner_sizes.as_text(ratios, tails, report["command"]), encoding="utf-8")
        points = {}
        for name, case in CASES.items():
            own = of_framework(rows, name)
            points[name] = [
                (row.seconds or 0.0, float(p), case.held_out(row))
                for row, p in zip(own, steps(own, profile(name)), strict=True)
            ]
        draw_measured(ROOT / "docs/figures/planner_measured.png", points)
        if report["ablation"]:
            draw_ablation(ROOT / "docs/figures/planner_ablation.png", report["ablation"])
        print(
            f"written to {args.output}.json and .md, and docs/figures; error bars to {ERROR_BARS.name}",
            file=sys.stderr,
        )


if __name__ == "__main__":
    exit_with(run)
