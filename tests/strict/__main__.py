"""The command line of the strict wire."""

import tempfile
from pathlib import Path

from megacore.errors import ConfigError
from megacore.tools.cli import Parser, exit_with
from tests.strict.cases import CASES
from tests.strict.plants import PLANTS
from tests.strict.report import FOUND, run_case, run_plant, write_found
from tests.strict.runs import Runs


def main(argv: list[str]) -> int:
    """Prints a line for each layout and mistake; returns the exit status."""
    parser = Parser(
        "Prove layouts over a process group with the ordering rules of NCCL, and plant mistakes.",
        example="python -m tests.strict",
        status="0 all as expected, 1 otherwise, 2 wrong arguments",
        page="docs/proof.md",
    )
    parser.add_argument(
        "--random-seeds",
        type=int,
        nargs=3,
        default=(1, 2, 3),
        metavar="N",
        help="random seeds, for runs with own queues, 8 queues and 1 queue",
    )
    parser.add_argument(
        "--only", nargs="+", metavar="LAYOUT", help="some layouts, such as pp4 or cp2, and no mistakes"
    )
    parser.add_alias("--seeds", "--random-seeds")
    parser.add_argument("--mistakes", action="store_true", help="only the planted mistakes")
    parser.add_argument(
        "--write", action="store_true", help=f"write tests/strict/{FOUND.name} for its README.md"
    )
    args = parser.parse_args(argv)
    if args.write and (args.only or args.mistakes):
        raise ConfigError("--write", "writes what was found of all", "--write alone")
    chosen = [
        case
        for case in CASES
        if not args.mistakes and (not args.only or case.layout.partition("@")[0] in args.only)
    ]
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        runs = Runs(Path(folder))
        try:
            layouts, mistakes = {}, {}
            for case in chosen:
                layouts[case.name] = run_case(runs, case, args.random_seeds)
                wrong += any(layouts[case.name])
                print(
                    f"{case.name}: {', '.join(verdict or 'equal' for verdict in layouts[case.name])}",
                    flush=True,
                )
            for plant in [] if args.only else PLANTS:
                mistakes[plant.mistake] = over_gloo, said = run_plant(runs, plant)
                wrong += plant.found not in said
                passed = sum(not verdict for verdict in over_gloo)
                print(
                    f"{plant.mistake}: equal over gloo {passed} times of {len(over_gloo)}; "
                    f"{said or 'NOT FOUND'}",
                    flush=True,
                )
        finally:
            runs.close()
    if args.write:
        write_found(layouts, mistakes)
    return int(wrong > 0)


if __name__ == "__main__":
    exit_with(main)
