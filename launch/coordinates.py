"""Check muP for a model: the sizes of activations and updates over the width, next to the standard
parametrization.
"""

import os
import sys

# so that a checkout runs without being installed; an installed script has no such folder
if os.path.isdir(os.path.dirname(os.path.realpath(__file__)) + "/../megacore"):
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.realpath(__file__))))

import megacore.tools.interrupt  # noqa: F401  (first: Ctrl-C during the other imports prints no traceback)

# isort: split
import argparse

from megacore.errors import ConfigError
from megacore.tools.cli import Parser, add_config, add_overrides, exit_with, unwind_on_sigterm

EXAMPLE = "python launch/coordinates.py --config configs/gpt_tiny.json --layouts one,tp2 optim.lr=0.01"
NOTES = (
    "A small version of the model is trained at each width, by gloo ranks on this machine's CPU, once with "
    "model.parametrization=standard and once with mup. A slope is d log(size) / d log(width), and with mup "
    "it is about 0. Every layout must compute the sizes of the first one."
)


def parser() -> Parser:
    """Return the parser of the command line."""
    parser = Parser(
        "Check muP for a model: train it at several widths and compare the sizes of activations and updates.",
        example=EXAMPLE,
        notes=NOTES,
        status="0 all slopes within --limit and all layouts equal, 1 otherwise, 2 wrong arguments",
        page="docs/research.md",
    )
    add_config(parser)
    parser.add_argument(
        "--widths", default="64,128,256", metavar="N,N", help="values of model.hidden_size to train"
    )
    parser.add_argument(
        "--layouts", default="one", metavar="LAYOUT,LAYOUT", help="layouts to train in, such as one,tp2,pp2"
    )
    parser.add_argument("--steps", type=int, default=4, metavar="N", help="training steps of each run")
    parser.add_argument(
        "--limit", type=float, default=0.4, metavar="SLOPE", help="largest slope that passes with mup"
    )
    parser.add_argument("--plot", metavar="FILE.png", help="draw the sizes over the width")
    plant = "enter this context manager in every process, to plant a bug and see that it is found"
    parser.add_argument("--plant", metavar="MODULE:FUNCTION", help=plant)
    add_overrides(parser)
    return parser


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    return parser().parse_intermixed_args(argv)


def numbers(text: str) -> list[int]:
    """The widths. Raises `ConfigError`."""
    parts = [part for part in text.split(",") if part]
    if wrong := next(
        (part for part in parts if not part.isascii() or not part.isdigit() or not 0 < int(part) <= 2**16),
        None,
    ):
        raise ConfigError(
            "--widths", f"{wrong!r} is no width", f"whole numbers from 1 to {2**16}, such as 64,128,256"
        )
    return list(map(int, parts))


def main(argv: list[str]) -> int:
    """Runs the check, and returns the exit status."""
    args = parse(argv)
    widths = numbers(args.widths)
    if not 1 <= args.steps <= 1000:
        raise ConfigError("--steps", f"{args.steps} is no number of steps", "from 1 to 1000")
    if not 0 < args.limit < float("inf"):
        raise ConfigError("--limit", f"{args.limit} is no slope", "a number above 0, such as 0.4")

    from rich.console import Console

    from megacore.tools.planner.plot import check_plot
    from megacore.tools.verify.coordinate_report import plot, show
    from megacore.tools.verify.coordinates import measure
    from megacore.tools.verify.layouts import parse as parse_layout
    from megacore.tools.verify.workers import RankFailed

    if args.plot is not None:
        check_plot("--plot", args.plot)
    layouts = [parse_layout(name) for name in dict.fromkeys(name for name in args.layouts.split(",") if name)]
    if not layouts:
        raise ConfigError("--layouts", "names none", "such as one,tp2")
    try:
        with Console(stderr=True).status("starting") as status:
            check = measure(
                args.config,
                args.overrides,
                widths,
                layouts,
                args.steps,
                args.limit,
                args.plant,
                lambda done: status.update(f"{done} done"),
            )
    except RankFailed as failure:
        print(f"{failure.report.strip()}\nthe model does not run: {failure}", file=sys.stderr)
        return 1
    if args.plot is not None:
        plot(check, args.plot, args.steps)
    show(check, args.steps)
    return 1 if check.faults() else 0


if __name__ == "__main__":
    unwind_on_sigterm()
    exit_with(main)
