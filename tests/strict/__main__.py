"""The command line of the strict wire."""

import tempfile
from pathlib import Path

import tests.strict
from megacore.errors import ConfigError
from megacore.tools.cli import Parser, exit_with
from tests.strict.cases import CASES
from tests.strict.plants import PLANTS
from tests.strict.report import FOUND, run_case, run_plant, write_found
from tests.strict.runs import Runs


def main(argv: list[str]) -> int:
    """Prints a line for each layout and mistake; returns the exit status."""
    parser = Parser("python -m tests.strict", tests.strict.__doc__)
    parser.add_argument(
        "--seeds", type=int, nargs=3, default=(1, 2, 3), metavar="S", help="with own queues, 8 and 1 (1 2 3)"
    )
    parser.add_argument(
        "--only", nargs="+", metavar="LAYOUT", help="some layouts, such as pp4 or cp2, and no mistakes"
    )
    parser.add_argument("--mistakes", action="store_true", help="the mistakes alone")
    parser.add_argument(
        "--write",
        action="store_true",
        help=f"write tests/strict/{FOUND.name}, which README.md there is generated from",
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
                layouts[case.name] = run_case(runs, case, args.seeds)
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
