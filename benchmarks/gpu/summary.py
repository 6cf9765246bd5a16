"""The table at the end of a slice: speeds as a README would show them, or two checkouts compared.

Standard library only.
"""

from collections.abc import Iterable
from statistics import median
from typing import Any

CONTENDERS = {
    "eager": "megacore",
    "text": "megacore, tokens as frequent as in text",
    "compiled": "megacore, compiled",
    "plain": "plain PyTorch GPT, compiled",
}
MISSING = "–"
TIME = ", ms"  # the end of a label whose measurement is a time


def summary(content: dict[str, Any]) -> list[str]:
    """Lines of Markdown for the results of a slice; none where it has no speeds."""
    if content["slice"] == "first":
        return speeds(content)
    if content["slice"] == "before":
        return comparison(content)
    return []


def speeds(content: dict[str, Any]) -> list[str]:
    """A line for each model and way to run it, next to the compiled plain GPT of the same model."""
    rows = [row for part in content["parts"].values() for row in part["rows"] if "tokens_a_second" in row]
    if not rows:
        return []
    plain = {row["model"]: row["tokens_a_second"] for row in rows if row["contender"] == "plain"}
    columns = ["model", "code", "tokens/s", "MFU", "memory (GiB)", "speed next to the plain GPT's"]
    lines = ["", f"## Speed on one {gpu(content)}", "", *heading(columns, texts=2)]
    for row in rows:
        speed, mfu = row["tokens_a_second"], row["mfu"]
        cells = [
            row["model"],
            CONTENDERS[row["contender"]],
            f"{speed:,.0f}",
            MISSING if mfu is None else f"{mfu:.1%}",
            f"{row['allocated_GiB']:.1f}",
            f"{speed / plain[row['model']]:.2f}" if row["model"] in plain else MISSING,
        ]
        lines.append(line(cells))
    return lines


def comparison(content: dict[str, Any]) -> list[str]:
    """A line for each measurement of both checkouts: the medians over the rounds, and the speedup.

    The speedup is above 1 where this checkout is faster, whether the measurement is a speed or a time.
    """
    measurements: dict[str, dict[str, list[float]]] = {}
    for part_name, part in content["parts"].items():
        _, side, _ = part_name.split(", ")
        for row in part["rows"]:
            for label, value in measured(row).items():
                measurements.setdefault(label, {}).setdefault(side, []).append(value)
    both = {label: sides for label, sides in measurements.items() if len(sides) == 2}
    if not both:
        return []
    columns = ["measured", "here", "before", "speedup", "rounds"]
    lines = ["", f"## Both checkouts on one {gpu(content)}", "", *heading(columns, texts=1)]
    for label, sides in both.items():
        here, before = median(sides["here"]), median(sides["before"])
        speedup = before / here if label.endswith(TIME) else here / before
        rounds = min(len(values) for values in sides.values())
        lines.append(line([label, number(here), number(before), f"{speedup:.3f}", str(rounds)]))
    return lines


def measured(row: dict[str, Any]) -> dict[str, float]:
    """What a row measures, by a label that is the same in both checkouts."""
    if "tokens_a_second" in row:
        return {f"{row['model']}, {CONTENDERS[row['contender']]}, tokens/s": row["tokens_a_second"]}
    if "triton_ms" in row:
        return {f"{row['operation']} {row['direction']}, {row['size']}{TIME}": row["triton_ms"]}
    return {}


def number(value: float) -> str:
    """With four digits at least."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def gpu(content: dict[str, Any]) -> str:
    """The name of the GPU, with PyTorch's version."""
    names = content["machine"]["gpus"] or [f"CPU ({content['machine']['processor']}; a dry run)"]
    return f"{names[0]}, PyTorch {content['versions']['torch']}"


def heading(columns: list[str], texts: int) -> list[str]:
    """The first two lines of a table, with `texts` columns of text and then numbers."""
    rules = ["---" if index < texts else "---:" for index in range(len(columns))]
    return [line(columns), line(rules)]


def line(cells: Iterable[str]) -> str:
    """A line of a table."""
    return f"| {' | '.join(cells)} |"
