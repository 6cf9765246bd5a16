"""What `benchmarks.peers` found: as JSON, a table and a chart, always with both ratios."""

import json
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import machine
from benchmarks.charts import ratio_bars
from benchmarks.peers.contenders import BEFORE, NO_SUCH_LAYOUT, OURS, PEERS, PRODUCTS, SAME_WEIGHTS
from benchmarks.peers.process import EQUAL, OWN, SETTINGS
from benchmarks.rounds import Race, Record

GOAL = 1.15  # of the best peer's median
RATIO = "megacore_is_times_as_fast"
BOUND = "megacore_could_be_times_as_fast"  # if all but the products cost nothing
NONE = "–"

HEADER = (
    "layout",
    "",
    "tokens/s, own settings",
    "megacore is",
    "tokens/s, equal settings",
    "megacore is",
    "peak MB a rank",
    "cores busy with others",
    "loss",
    "what differs from megacore",
)


def summary(result: Race, absent: dict[str, str]) -> dict[str, Any]:
    """Of one layout, precision and kind of settings, for JSON.

    Who computed another job than megacore is absent, with its loss.
    """
    ours, products = result.records.get(OURS), result.records.get(PRODUCTS)
    entry: dict[str, Any] = {
        "contenders": {},
        "absent": absent | result.failures,
        "load_averages": result.loads,
    }
    if products is not None:
        entry[PRODUCTS] = products.summary()
    for name, record in result.records.items():
        if name == PRODUCTS:
            continue
        if ours is not None and name != OURS:
            if wrong := another_job(record, ours, SAME_WEIGHTS if name == BEFORE else PEERS[name].tolerance):
                entry["absent"][name] = wrong
                continue
            ratios = {RATIO: ours} | ({} if products is None else {BOUND: products})
            entry["contenders"][name] = record.summary() | {
                key: _by_round(record, one) for key, one in ratios.items()
            }
        else:
            entry["contenders"][name] = record.summary()
    return entry


def _by_round(theirs: Record, own: Record) -> dict[str, Any]:
    """How many times as long a contender takes as another one, round by round."""
    ratios = [slow / fast for slow, fast in zip(theirs.seconds, own.seconds, strict=True)]
    return {"median": median(ratios), "rounds": ratios}


def another_job(record: Record, ours: Record, tolerance: float | None) -> str | None:
    """What shows that a contender did not compute what megacore did: its loss,
    step by step on the same tokens.
    """
    if tolerance is None:
        return None
    if len(record.losses) != len(ours.losses):
        return f"says {len(record.losses)} losses where megacore says {len(ours.losses)}"
    for theirs, own in zip(record.losses, ours.losses, strict=True):
        if not abs(theirs - own) <= tolerance:  # not a number is neither
            return f"computes another job: its loss is {theirs:.3f} where megacore's is {own:.3f}"
    return None


def table(report: dict[str, Any]) -> str:
    """The results in Markdown: first megacore over the best peer, then every contender in every layout."""
    lines = [*_introduction(report), "", *_against_best(report), "", "| " + " | ".join(HEADER) + " |"]
    lines.append("|---|---" + "|---:" * 7 + "|---|")
    for key, entries in report["results"].items():
        ranked = sorted(
            [OURS, *([BEFORE] if "before" in report else []), *report["peers"]],
            key=lambda name: -_speed(entries, name),
        )
        lines += [_row(key, name, entries, report.get("before")) for name in ranked]
    return "\n".join(lines) + "\n"


def _introduction(report: dict[str, Any]) -> list[str]:
    """On what, with what, and how it was measured."""
    versions = ", ".join(
        f"{name} {version}" for name, version in (report["versions"] | report["peers"]).items() if version
    )
    model, train = report["setting"]["model"], report["setting"]["train"]
    experts = []
    if model["num_experts"] is not None:
        experts.append(
            f"{model['num_experts']} experts of {model['expert_ffn_size']} features in every block; a token "
            f"uses {model['experts_per_token']} of them and {model['shared_experts']} that all tokens share."
        )
    kind = "dense model" if model["num_experts"] is None else "MoE model"
    title = f"Speed compared with other libraries: {kind}, {' and '.join(report['settings'])} settings"
    lines = [
        *machine.heading(title, report["command"], report),
        "Training speed of megacore and of other libraries with the same model, tokens and layout.",
        f"Versions: {versions}.",
        "",
        f"{model['num_layers']} layers, hidden {model['hidden_size']}, {model['num_heads']} heads, "
        f"sequence {train['seq_len']}, vocabulary "
        f"{model['vocab_size']}, {train['global_batch_size'] // train['micro_batch_size']} microbatches "
        f"of {train['micro_batch_size']}.",
        *experts,
        f"{report['rounds']} interleaved rounds, medians; the loss is that of the last, on the same "
        "random tokens in every step.",
        "All contenders have the same number of ranks and of threads a rank.",
        "At most: the ratio if megacore took time only for the matrix products of the linear layers and the "
        "LM head, forward and backward.",
        "They are timed alone in the same rounds, with megacore's settings; attention's own products are "
        "left out.",
        "",
    ]
    if EQUAL in report["settings"]:
        return [
            *lines,
            "Own settings: every contender as its users get it.",
            "Equal settings: the peers' processes also get what megacore sets for its own on a CPU.",
            "Freed memory is kept, and oneDNN multiplies fp32 where it is exact.",
            "Each kind is a separate race. megacore runs in both, with its own settings; a ratio is taken "
            "within a round.",
        ]
    return [
        *lines,
        "On a GPU every process has megacore's variables: own settings are equal ones."
        if report["machine"]["gpus"]
        else "",
    ]


def _against_best(report: dict[str, Any]) -> list[str]:
    """How many times as fast megacore is as the fastest peer, for each layout and both kinds of settings."""
    lines = [f"megacore's speed over the best peer's (goal: {GOAL} in every layout):", ""]
    lines += ["| layout | " + " | ".join(SETTINGS.values()) + " |", "|---|---|---|"]
    for key, entries in report["results"].items():
        cells = []
        for kind in SETTINGS:
            found = {
                n: f
                for n, f in entries.get(kind, {}).get("contenders", {}).items()
                if RATIO in f and n != BEFORE
            }
            best = min(found, key=lambda name: found[name][RATIO]["median"], default=None)
            cells.append(
                NONE if best is None else f"{found[best][RATIO]['median']:.2f}{_at_most(found[best])}, {best}"
            )
        lines.append(f"| {key} | {' | '.join(cells)} |")
    return lines


def _at_most(figures: dict[str, Any]) -> str:
    """The bound beside a ratio, where the bare products were measured."""
    return f" (at most {figures[BOUND]['median']:.2f})" if BOUND in figures else ""


def _speed(entries: dict[str, Any], name: str) -> float:
    """Tokens a second by which a contender is ranked: its best; 0 where it did not run."""
    found = [
        entry["contenders"][name]["tokens_per_second"]["median"]
        for entry in entries.values()
        if name in entry["contenders"]
    ]
    return max(found, default=0.0)


def _row(key: str, name: str, entries: dict[str, Any], before: str | None) -> str:
    """A contender in a layout: speeds, ratios, and what differs; or why it has none."""
    cells, reasons = [key, f"**{name}**" if name == OURS else name], []
    found = {
        kind: entry["contenders"][name] for kind, entry in entries.items() if name in entry["contenders"]
    }
    for kind in (OWN, EQUAL):
        if kind not in found:
            cells += [NONE, NONE]
            reason = entries.get(kind, {}).get("absent", {}).get(name)
            reasons += (
                []
                if reason is None
                else [reason if reason == NO_SUCH_LAYOUT else f"{kind} settings: {reason}"]
            )
            continue
        figures = found[kind]
        speed, ratio = figures["tokens_per_second"], figures.get(RATIO)
        cells.append(f"{speed['median']:,.0f} ({speed['lowest']:,.0f}–{speed['highest']:,.0f})")
        cells.append("" if ratio is None else f"{ratio['median']:.2f}×{_at_most(figures)}")
    cells.append(" / ".join(f"{figures['memory_bytes'] / 1e6:,.0f}" for figures in found.values()))
    cells.append(" / ".join(f"{median(figures['cores_busy_with_others']):.1f}" for figures in found.values()))
    cells.append(
        " / ".join(f"{figures['losses'][-1]:.3f}" for figures in found.values() if figures["losses"])
    )
    if name == OURS:
        compiled = {figures.get("process", {}).get("train.compile") for figures in found.values()}
        reasons += [f"its blocks are {'' if each else 'not '}compiled" for each in sorted(compiled - {None})]
    elif found:
        reasons.append(
            f"the code of commit {before}, in this environment" if name == BEFORE else PEERS[name].differs
        )
    cells.append("; ".join(dict.fromkeys(reasons)).replace("|", "/"))
    return f"| {' | '.join(cells)} |"


def write(report: dict[str, Any], output: Path) -> None:
    """JSON, table and chart."""
    output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    links = f"All numbers: [{output.name}]({output.name})."
    if panels := ratios_by_layout(report):
        chart = output.with_suffix(".png").name
        links += f" Chart: [{chart}]({chart})."
        where = f"{report['machine']['processor']}, {report['machine']['cores']} cores, {report['date'][:10]}"
        ratio_bars(
            output.with_suffix(".png"),
            panels,
            f"megacore's speed over each peer's (1: equally fast)\n{where}",
        )
    output.with_suffix(".md").write_text(f"{table(report)}\n{links}\n", encoding="utf-8")


def ratios_by_layout(report: dict[str, Any]) -> dict[str, dict[str, dict[str, float]]]:
    """For the chart, by layout, peer and kind of settings; without layouts in which nobody else ran."""
    panels: dict[str, dict[str, dict[str, float]]] = {}
    for key, entries in report["results"].items():
        for kind, entry in entries.items():
            for name, figures in entry["contenders"].items():
                if RATIO in figures:
                    panels.setdefault(key, {}).setdefault(name, {})[SETTINGS[kind]] = figures[RATIO]["median"]
    return panels
