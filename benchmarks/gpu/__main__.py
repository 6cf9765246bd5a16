"""What one GPU can show in half an hour, in four slices of at most 9 minutes each, 26 in all.

right: tests, one NCCL communicator, no waiting for the device, streams that are late. kernels: tests, bandwidth, each in the step,
compute-sanitizer. speed: steps of three models, compiled or not, and where their time goes. choices: attention, products, shards,
held multiprocessors, and the prediction beside the measurement. Each writes gpu_SLICE.json and gpu_SLICE.md as it goes, and goes on
after a failure. Exit status 0: all is well; 1: something failed, which the last line names; 2: it could not begin.
"""

import argparse
import signal
import tempfile
from pathlib import Path
from typing import Any, NoReturn

from benchmarks.gpu import wheels
from benchmarks.gpu.parts import SLICES
from megacore.errors import ConfigError
from megacore.tools.cli import Parser, exit_with

EXAMPLE = "python3 -m benchmarks.gpu right --out results --wheels wheels"
ROOT = Path(__file__).resolve().parents[2]


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = Parser(EXAMPLE, __doc__)
    parser.add_argument("slice", choices=[*SLICES, "all"])
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FOLDER",
        help="for the results; default: benchmarks/results, in a dry run a new one",
    )
    parser.add_argument(
        "--wheels", type=Path, metavar="FOLDER", help="wheels of packages that are not installed here"
    )
    parser.add_argument("--only", nargs="+", default=[], metavar="PART", help="only these parts of the slice")
    parser.add_argument(
        "--dry-run", action="store_true", help="everything at tiny sizes on a CPU, kernels interpreted"
    )
    args = parser.parse_args(argv)
    known = [part.name for name in chosen(args.slice) for part in SLICES[name].parts]
    if unknown := [name for name in args.only if name not in known]:
        raise ConfigError("--only", f"{unknown[0]!r} is no part of {args.slice}", ", ".join(known))
    return args


def chosen(name: str) -> list[str]:
    """The slices of a name."""
    return list(SLICES) if name == "all" else [name]


def machine_of(dry: bool) -> dict[str, Any]:
    """What results are of. Raises `ConfigError` without a GPU."""
    import torch

    from benchmarks import machine

    if not dry and not torch.cuda.is_available():
        raise ConfigError("benchmarks.gpu", "PyTorch sees no GPU here", "a machine with one, or --dry-run")
    return machine.describe()


def stop(number: int, frame: Any) -> NoReturn:
    """Ends what is under way; what was found is written."""
    raise KeyboardInterrupt


def main(argv: list[str]) -> int:
    """Runs slices; returns the exit status."""
    args = parse(argv)
    signal.signal(signal.SIGTERM, stop)
    with tempfile.TemporaryDirectory() as target:
        wheels.provide(args.wheels, Path(target))
        from benchmarks.gpu.running import prepare_processes, run_slice

        prepare_processes(args.dry_run)
        machine = machine_of(args.dry_run)
        folder = args.out or (Path(tempfile.mkdtemp()) if args.dry_run else ROOT / "benchmarks" / "results")
        folder.mkdir(parents=True, exist_ok=True)
        failed, patience = [], 10.0 if args.dry_run else 1.0  # a CPU may be busy, and its time is not lent
        for name in chosen(args.slice):
            found = run_slice(name, folder, args.dry_run, args.only, machine, say, patience)
            failed += [f"{name}: {part}" for part in found]
            say((folder / f"gpu_{name}.md").read_text(encoding="utf-8"))
        say(f"results in {folder}; failed: {'; '.join(failed) or 'nothing'}")
    return int(bool(failed))


def say(line: str) -> None:
    """Prints at once: a killed run has said what it did."""
    print(line, flush=True)


if __name__ == "__main__":
    exit_with(main)
