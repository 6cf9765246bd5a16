"""Prove that every layout computes what one process computes: every gradient, parameter, moment, loss and
norm.
"""

import os
import sys

# so that a checkout runs without being installed; an installed script has no such folder
if os.path.isdir(os.path.dirname(os.path.realpath(__file__)) + "/../megacore"):
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.realpath(__file__))))

import megacore.tools.interrupt  # noqa: F401  (first: Ctrl-C during the other imports prints no traceback)

# isort: split
import argparse
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from megacore.errors import ConfigError
from megacore.tools.cli import Parser, add_config, add_overrides, exit_with, unwind_on_sigterm

EXAMPLES = (
    "python launch/verify.py --config configs/gpt_1b.json --layouts tp2,pp2,tp2pp2dp2sp",
    "python launch/verify.py --config configs/gpt_tiny.json --changed main",
)
NOTES = (
    "A small version of the model, with the same structure, is trained for three steps by gloo ranks on this "
    "machine's CPU in each layout, and by plain code on one process in fp64. Differences up to 1e-9 pass, "
    "larger ones only if rounding explains them. Otherwise the first module and tensor that differ are "
    "reported."
)
STATUS = (
    "0 equal (in bf16 the last line may say what could not be checked), 1 not equal, not proved or a "
    "self-check failed, 2 wrong arguments"
)


def parser() -> Parser:
    """Return the parser of the command line."""
    parser = Parser(
        "Prove that a config computes the same in parallel layouts as on one process.",
        example=EXAMPLES,
        notes=NOTES,
        status=STATUS,
        page="docs/proving.md",
    )
    add_config(parser, "config to prove; a small version of its model is trained")
    parser.add_argument(
        "--layouts",
        metavar="LAYOUT,LAYOUT",
        help="layouts such as tp2,pp4,tp2pp2dp2sp or pp4@zb_v; schedules: each schedule in several "
        "(default: all axes, on up to 8 ranks)",
    )
    parser.add_argument(
        "--precision",
        default="fp64",
        choices=("fp64", "bf16"),
        help="bf16: after fp64, also check that differences in bf16 are those of rounding",
    )
    parser.add_argument(
        "--changed",
        metavar="COMMIT",
        help="add the layouts that files which differ from this commit may break",
    )
    against = (
        "folder of another version of the code to compare with, layout by layout, instead of one process"
    )
    parser.add_argument("--against", type=Path, metavar="CHECKOUT", help=against)
    plant = "enter this context manager in every process, to plant a bug and see that it is found"
    parser.add_argument("--plant", metavar="MODULE:FUNCTION", help=plant)
    add_overrides(parser)
    return parser


def parse(argv: list[str]) -> argparse.Namespace:
    """Return the parsed command line. Raises `ConfigError`."""
    return parser().parse_intermixed_args(argv)


def default(args: argparse.Namespace) -> tuple[str, ...]:
    """The layouts that are proved if none are named."""
    from megacore.tools.verify.layouts import DEFAULT, EXPERTS
    from megacore.tools.verify.shrink import load_whole

    return (
        DEFAULT if load_whole(args.config, args.overrides).model.num_experts is None else (*DEFAULT, *EXPERTS)
    )


def changed_since(commit: str) -> list[str]:
    """The files of this checkout that differ from a commit, and those that git does not know yet."""
    root = Path(__file__).resolve().parents[1]
    found = []
    for command in (["diff", "--name-only", commit, "--"], ["ls-files", "--others", "--exclude-standard"]):
        try:
            done = subprocess.run(["git", *command], cwd=root, capture_output=True, text=True)
        except OSError as error:
            raise ConfigError(
                "--changed", f"git cannot be started: {error}", "an installed git; or --layouts"
            ) from error
        if done.returncode:
            raise ConfigError(
                "--changed",
                f"git says: {done.stderr.strip().splitlines()[0]}",
                "a commit or branch, such as main",
            )
        found += done.stdout.splitlines()
    return found


def main(argv: list[str]) -> int:
    """Runs the proof, and returns the exit status."""
    from rich.console import Console

    from megacore.files import ROOT
    from megacore.tools.verify.layouts import SCHEDULES, besides
    from megacore.tools.verify.layouts import parse as parse_layout
    from megacore.tools.verify.proof_report import show
    from megacore.tools.verify.run import Options, checked_layouts, prove, run_export_check, run_self_checks
    from megacore.tools.verify.self_check.report import lines as self_check_lines
    from megacore.tools.verify.workers import ProofWorkers, RankFailed

    args = parse(argv)
    given = (
        [name for name in args.layouts.split(",") if name]
        if args.layouts is not None
        else list(default(args))
    )
    if args.changed is not None:
        given += besides(changed_since(args.changed))
    names = [layout for name in given for layout in (SCHEDULES if name == "schedules" else [name])]
    if not names:
        raise ConfigError("--layouts", "names none", "such as tp2,pp2")
    layouts = [parse_layout(name) for name in dict.fromkeys(names)]
    options = Options(args.config, args.overrides, layouts, args.precision, args.against, args.plant)
    # The threads below load the config too, and two threads must not import the same package at once.
    checked_layouts(options)
    report = None
    try:
        with (
            ThreadPoolExecutor(max_workers=1) as background,
            ProofWorkers(ROOT) as exporter,
            # one process for the self-checks and then the reference, so that torch is imported once
            ProofWorkers(ROOT) as workers,
            Console(stderr=True).status("starting") as status,
        ):
            export = background.submit(run_export_check, options, exporter)
            report = run_self_checks(options, workers)
            status.update("self-check done")
            proof = prove(options, lambda result: status.update(f"{result.layout.name} done"), workers)
            report = replace(report, findings=(*report.findings, *export.result()))
    except RankFailed as failure:  # with nothing to compare with, there is no table
        if report is not None:
            print(*self_check_lines(report), sep="\n")
        print(
            f"{failure.report.strip()}\nthe reference does not run on one process: {failure}", file=sys.stderr
        )
        return 1
    show(proof, report)
    return 0 if proof.holds and not report.wrong else 1


if __name__ == "__main__":
    unwind_on_sigterm()
    exit_with(main)
