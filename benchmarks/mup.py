"""Does the best learning rate stay where it is when a model gets wider?

The standard parametrization beside muP.

The runs are a sweep: `python launch/sweep.py benchmarks/mup.json`, 64 short trainings on the text of Python's
standard library (`launch/prepare.py --input python-stdlib --output data/stdlib_bytes --tokenizer bytes
--valid-fraction 0.05`). This reads its results, writes a table, and draws the losses over the rate.
"""

import argparse
import json
import math
from pathlib import Path
from typing import Any

from benchmarks import machine
from megacore.errors import ConfigError
from megacore.tools.cli import Parser, exit_with
from megacore.tools.output_files import check_output

EXAMPLE = "python -m benchmarks.mup runs/mup/results.json --output benchmarks/results/mup"
TITLES = {"standard": "standard", "mup": "muP, base width {base}"}
WITHIN = 2.0  # the factor that a best rate may move

# by parametrization, width and rate; infinite where a run diverged
Losses = dict[str, dict[int, dict[float, float]]]


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = Parser(
        "Report from the sweep benchmarks/mup.json whether the best learning rate moves with the width.",
        example=EXAMPLE,
        page="docs/research.md",
    )
    parser.add_argument("results", metavar="FILE.json", help="results.json of the sweep")
    parser.add_argument("--output", metavar="PREFIX", required=True, help="write PREFIX.md and PREFIX.png")
    return parser.parse_args(argv)


def losses_of(found: dict[str, Any]) -> tuple[Losses, int]:
    """The validation losses of a sweep, and muP's base width."""
    losses: Losses = {}
    base = 0
    for point in found["points"]:
        rules, width = point["swept"]["rules"], point["swept"]["size"]["model.hidden_size"]
        base = rules["model.base_width"] or base
        if point["losses"]:  # else it is not finished
            of_width = losses.setdefault(rules["model.parametrization"], {}).setdefault(width, {})
            of_width[point["swept"]["optim.lr"]] = math.inf if point["median"] is None else point["median"]
    return losses, base


def best(by_rate: dict[float, float]) -> float:
    """The rate of least loss, of those that were tried."""
    return min(by_rate, key=lambda rate: by_rate[rate])


def moved(losses: Losses, parametrization: str) -> float:
    """By which factor the best rate moves over the widths."""
    rates = [best(by_rate) for by_rate in losses[parametrization].values() if by_rate]
    return max(rates) / min(rates)


def document(losses: Losses, base: int) -> str:
    """Return the page: a table for each parametrization, and how far the best learning rate moves."""
    widths = sorted(losses["standard"])
    lines = machine.heading("The best learning rate over model widths", EXAMPLE, machine.describe())
    lines += [
        "Validation loss by learning rate and width, with the standard parametrization and with muP.",
        "",
    ]
    for parametrization, title in TITLES.items():
        rates = sorted({rate for by_rate in losses[parametrization].values() for rate in by_rate})
        lines += [
            f"{title.format(base=base)}:",
            "",
            f"| rate | {' | '.join(f'width {width}' for width in widths)} |",
        ]
        lines.append(f"|---|{'---|' * len(widths)}")
        for rate in rates:
            cells = []
            for width in widths:
                by_rate = losses[parametrization].get(width, {})
                text = f"{by_rate[rate]:.3f}" if rate in by_rate else "–"
                cells.append(f"**{text}**" if by_rate and rate == best(by_rate) else text)
            lines.append(f"| {rate:g} | {' | '.join(cells)} |")
        lines.append("")
    for parametrization, title in TITLES.items():
        factor = moved(losses, parametrization)
        lines.append(
            f"{title.format(base=base)}: the best rate moves by a factor of {factor:g} over these widths."
        )
    holds = moved(losses, "mup") <= WITHIN < moved(losses, "standard")
    lines.append(
        f"The best rate {'stays' if holds else 'does NOT stay'} within a factor of {WITHIN:g} with muP alone."
    )
    return "\n".join(lines) + "\n"


def draw(losses: Losses, base: int, path: str) -> None:
    """Losses over the rate, a line for each width."""
    from matplotlib import colormaps
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.8), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)  # no display, no global state
    widths = sorted(losses["standard"])
    for axes, parametrization in zip(figure.subplots(1, 2, sharey=True), TITLES, strict=True):
        for number, width in enumerate(widths):
            by_rate = sorted(
                (rate, loss)
                for rate, loss in losses[parametrization].get(width, {}).items()
                if math.isfinite(loss)
            )
            if not by_rate:
                continue
            colour = colormaps["viridis"](0.9 * number / max(1, len(widths) - 1))
            axes.plot(
                *zip(*by_rate, strict=True), color=colour, marker="o", markersize=4, label=f"width {width}"
            )
            lowest = min(by_rate, key=lambda pair: pair[1])
            axes.plot(*lowest, color=colour, marker="o", markersize=12, markerfacecolor="none")
        rates = sorted({rate for by_rate in losses[parametrization].values() for rate in by_rate})
        axes.set_xscale("log", base=2)
        axes.set_xticks(rates, [f"{rate:g}" for rate in rates])
        axes.set_xlabel("learning rate (optim.lr)")
        axes.set_title(TITLES[parametrization].format(base=base), fontsize=11)
        axes.grid(alpha=0.3)
        axes.legend(frameon=False, fontsize=9)
        if parametrization == "standard":
            axes.set_ylabel("validation loss, nats a byte")
    figure.suptitle("Each width's best rate has a ring", x=0.01, ha="left", fontsize=11)
    figure.savefig(path)


def main(argv: list[str]) -> int:
    """Writes the table and the picture."""
    args = parse(argv)
    try:
        losses, base = losses_of(json.loads(Path(args.results).read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            "RESULTS.json", f"{args.results} cannot be read: {error}", "results.json of benchmarks/mup.json"
        ) from None
    if losses.keys() != TITLES.keys():
        raise ConfigError(
            "RESULTS.json", f"{args.results} has no finished runs of both", "the sweep of benchmarks/mup.json"
        )
    for ending in (".md", ".png"):
        check_output("--output", args.output + ending)
    chart = Path(f"{args.output}.png").name
    text = f"{document(losses, base)}\nChart: [{chart}]({chart}).\n"
    Path(f"{args.output}.md").write_text(text, encoding="utf-8")
    draw(losses, base, f"{args.output}.png")
    print(text, end="")
    return 0


if __name__ == "__main__":
    exit_with(main)
