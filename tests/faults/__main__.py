"""The command line of the catalogue."""

import tests.faults
from megacore.errors import ConfigError
from megacore.tools.cli import Parser, exit_with
from tests.faults.checks import FAULTS, ROOT, Checks, document


def main(argv: list[str]) -> int:
    """Plants every fault, or runs the checks without; returns the exit status."""
    parser = Parser("python -m tests.faults", tests.faults.__doc__)
    parser.add_argument(
        "--silent",
        type=int,
        default=0,
        metavar="TIMES",
        help="run the checks without any fault, this many times",
    )
    parser.add_argument(
        "--write",
        action="store_true",
        help="write tests/faults/README.md, if every fault is caught as the catalogue says",
    )
    parser.add_argument("names", nargs="*", metavar="FAULT", help="some faults only")
    args = parser.parse_intermixed_args(argv)
    if unknown := set(args.names) - {fault.name for fault in FAULTS}:
        raise ConfigError(
            "FAULT", f"there is no {', '.join(sorted(unknown))}", "the name of a function in tests/faults/"
        )
    if args.write and (args.names or args.silent):
        raise ConfigError("--write", "writes what was found of all faults", "--write alone")
    chosen = [fault for fault in FAULTS if not args.names or fault.name in args.names]
    checks, wrong = Checks(), 0
    try:
        if args.silent:
            cases = {fault.case: fault for fault in chosen}
            for times in range(1, args.silent + 1):
                spoke = [
                    (fault, said) for fault in cases.values() if (said := checks.run(fault, as_it_is=True))
                ]
                wrong += len(spoke)
                print(
                    f"{times}: {len(cases) - len(spoke)} of {len(cases)} checks silent",
                    *spoke,
                    sep="\n  ",
                    flush=True,
                )
            return int(wrong > 0)
        for fault in chosen:
            said = checks.run(fault)
            wrong += said != fault.found
            verdict = f"caught by {fault.check}: {said}" if said else "NOT CAUGHT"
            print(f"{fault.name} ({fault.layout})\n  {fault.mistake}\n  {verdict}", flush=True)
            if said and said != fault.found:
                print(f"  but expected: {fault.found}", flush=True)
    finally:
        checks.close()
    print(f"{len(chosen) - wrong} of {len(chosen)} faults caught as the catalogue says")
    if args.write and not wrong:
        (ROOT / "tests/faults/README.md").write_text(document(), encoding="utf-8")
    return int(wrong > 0)


if __name__ == "__main__":
    exit_with(main)
