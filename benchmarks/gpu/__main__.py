"""What one GPU can show in 34 minutes, in five slices of at most 8 minutes each.

first: the most valuable minutes: a step is right, speeds of three models, bandwidth of kernels, attention.
right: tests, one NCCL communicator, no waiting for the device, streams that are late.
kernels: tests, bandwidth, each in the step, compute-sanitizer.
speed: steps of three models, compiled or not, and where their time goes.
choices: attention, products, shards, held multiprocessors, and the prediction next to the measurement.
Each writes gpu_SLICE.json and gpu_SLICE.md while it runs, and continues after a failure.

Exit status 0: all is well; 1: something failed, which the last line names; 2: it could not begin;
143 or 130: SIGTERM or Ctrl-C ended it. If parts had begun, the last line also names what is unfinished.
"""

import argparse
import re
import shutil
import signal
import subprocess
import tempfile
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import FrameType
from typing import Any

from benchmarks.gpu import before, caches, prepare, wheels
from benchmarks.gpu.parts import SLICES, Part, Slice
from benchmarks.gpu.report import Report
from benchmarks.gpu.running import Runner, StopRequest, prepare_processes
from megacore.errors import ConfigError
from megacore.tools.cli import Parser, exit_with

EXAMPLE = "python3 -m benchmarks.gpu first --output results --wheels wheels"
ROOT = Path(__file__).resolve().parents[2]
PYTHON, TRITON = "3.12", "3.6.0"  # of the GPU's machine, unless `--target-...` says otherwise
TOOLS = ("git", "gcc", "nvidia-smi", "compute-sanitizer")
QUERY = (
    "nvidia-smi",
    "--query-gpu=name,driver_version,clocks.sm,clocks.mem,power.limit",
    "--format=csv,noheader",
)


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = Parser(
        "Run one of five slices of measurements on a GPU, each in at most 8 minutes.",
        example=EXAMPLE,
        status="0 done, 1 a part failed, 2 it could not begin, 130 or 143 ended by Ctrl-C or SIGTERM",
        page="benchmarks/README.md",
    )
    parser.add_argument(
        "slice",
        choices=[*SLICES, "all"],
        metavar="SLICE",
        help="first: a correct step, speed of three models, kernels, attention; right: tests; kernels: "
        "bandwidth and each in the step; speed: steps compiled or not; choices: what the defaults choose; "
        "all",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FOLDER",
        help="folder for gpu_SLICE.json and .md (default: benchmarks/results, in a dry run a temporary one)",
    )
    parser.add_argument(
        "--wheels",
        type=Path,
        metavar="FOLDER",
        help="packages and compiled kernels that --prepare made, and caches.tar.xz of an earlier run",
    )
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="NAME", help="only these parts of the slice, in this order"
    )
    parser.add_argument(
        "--before",
        type=Path,
        metavar="CHECKOUT",
        help="with first: measure only gpt_124m and bandwidth, in turns with another checkout",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="run every part at tiny sizes on a CPU, with kernels interpreted",
    )
    parser.add_argument(
        "--prepare",
        type=Path,
        metavar="FOLDER",
        help="with first: fill FOLDER for --wheels, on a machine with a network; needs no GPU",
    )
    parser.add_argument(
        "--target-python", metavar="3.N", help=f"Python of the GPU's machine (default: {PYTHON})"
    )
    parser.add_argument(
        "--target-triton", metavar="N.N.N", help=f"Triton of the GPU's machine (default: {TRITON})"
    )
    parser.add_alias("--out", "--output")
    args = parser.parse_args(argv)
    args.only = list(dict.fromkeys(args.only))
    check_options(args)
    check_parts(args)
    args.target_python = args.target_python or PYTHON
    args.target_triton = args.target_triton or TRITON
    return args


def check_options(args: argparse.Namespace) -> None:
    """Raise `ConfigError` for a value that cannot be right, and for an option that would be ignored."""
    for option in ("before", "prepare"):
        if getattr(args, option) is not None and args.slice != "first":
            raise ConfigError(f"--{option}", f"{args.slice} does not have it", "the slice first")

    ignored, right = ["target_python", "target_triton"], "only with --prepare"
    if args.prepare is not None:
        ignored, right = ["output", "wheels", "only", "before", "dry_run"], "without --prepare"
    for name in ignored:
        if getattr(args, name):
            raise ConfigError(f"--{name.replace('_', '-')}", "it would be ignored", right)

    if args.target_python and not re.fullmatch(r"3\.\d+", args.target_python):
        raise ConfigError("--target-python", f"{args.target_python!r} is not a version", "such as 3.12")
    if args.target_triton and not re.fullmatch(r"\d+\.\d+\.\d+", args.target_triton):
        raise ConfigError("--target-triton", f"{args.target_triton!r} is not a version", "such as 3.6.0")


def check_parts(args: argparse.Namespace) -> None:
    """Raise `ConfigError` if a part of `--only` is unknown, or cannot run dry in a dry run."""
    parts = [part for name in chosen(args.slice) for part in SLICES[name].parts]
    names = dict.fromkeys(part.name for part in parts)
    names_in_dry_runs = {part.name for part in parts if part.dry}
    for name in args.only:
        if name not in names:
            raise ConfigError("--only", f"{name!r} is no part of {args.slice}", ", ".join(names))
        if args.dry_run and name not in names_in_dry_runs:
            raise ConfigError("--only", f"{name} has no dry run", "a part that has one, or no --dry-run")


def chosen(name: str) -> list[str]:
    """The slices of a name."""
    return list(SLICES) if name == "all" else [name]


def slices_of(args: argparse.Namespace) -> dict[str, Slice]:
    """The slices to run, by the names of their results, with the parts that were asked for."""
    if args.before is not None:
        parts = before.alternating_parts(args.before, args.only)
        return {"before": Slice(f"Compared with {args.before}", SLICES["first"].seconds, parts)}
    slices = {name: select(SLICES[name], args.only, args.dry_run) for name in chosen(args.slice)}
    return {name: slice_ for name, slice_ in slices.items() if slice_.parts}


def select(slice_: Slice, only: list[str], dry: bool) -> Slice:
    """A slice with the parts that a dry run has, and with those in `only`, in its order; without it all."""
    parts: list[Part] = [part for part in slice_.parts if part.dry or not dry]
    if only:
        parts = sorted((part for part in parts if part.name in only), key=lambda part: only.index(part.name))
    return Slice(slice_.title, slice_.seconds, tuple(parts))


def machine_of(dry: bool) -> dict[str, Any]:
    """What results are of. Raises `ConfigError` without a GPU."""
    import torch

    from benchmarks import machine

    if not dry and not torch.cuda.is_available():
        raise ConfigError("benchmarks.gpu", "PyTorch sees no GPU here", "a machine with one, or --dry-run")
    return machine.describe() | {"tools": {name: shutil.which(name) for name in TOOLS}, "driver": driver()}


def driver() -> str | None:
    """The GPUs' driver, clocks and power limit by nvidia-smi; None where it does not work."""
    try:
        return subprocess.run(QUERY, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def interpreter_note() -> str | None:
    """A warning if a dry run must fail here: Triton 3.6 interprets kernels with NumPy before 2.4 only."""
    try:
        triton, numpy = version("triton"), version("numpy")
    except PackageNotFoundError:
        return None
    if triton.startswith("3.6.") and tuple(map(int, numpy.split(".")[:2])) >= (2, 4):
        return f"fused kernels will fail: Triton {triton} interprets them with NumPy before 2.4, not {numpy}"
    return None


def main(argv: list[str]) -> int:
    """Runs slices; returns the exit status."""
    began = time.monotonic()
    args = parse(argv)
    signal.signal(signal.SIGTERM, end_start_up)
    if args.prepare is not None:
        use_folder("--prepare", args.prepare, caches.PREPARED)
        for line in prepare.prepare(args.prepare, args.target_python, args.target_triton):
            say(line)
        return 0
    slices = slices_of(args)
    folder = args.output or (Path(tempfile.mkdtemp()) if args.dry_run else ROOT / "benchmarks" / "results")
    use_folder("--output", folder, *(f"gpu_{name}.*" for name in slices))
    with tempfile.TemporaryDirectory() as scratch:
        bring(args, Path(scratch))
        prepare_processes(args.dry_run)
        machine = machine_of(args.dry_run)
        patience = 10.0 if args.dry_run else 1.0  # a CPU may be busy, and its time is not lent
        reports = []
        stop = StopRequest()
        stop.listen()
        for name, slice_ in slices.items():
            report = Report(name, slice_.title, folder, args.dry_run, machine)
            Runner(report, say, stop, patience).run(slice_, began)
            say(report.markdown.read_text(encoding="utf-8"))
            reports.append(report)
            began = time.monotonic()  # start-up takes time of the first slice only
    say(last_line(folder, reports, stop))
    if stop.signal is not None:
        return 128 + stop.signal
    return int(any(report.content["failed"] for report in reports))


def end_start_up(number: int, frame: FrameType | None) -> None:
    """Handle SIGTERM before there are parts: like Ctrl-C, an exception, which also ends pip."""
    raise SystemExit(128 + number)


def use_folder(option: str, folder: Path, *files: str) -> None:
    """Create `folder` where it is missing.

    Raises:
        ConfigError: no file can be written there, or one of `files` (patterns) is a folder.
    """
    right = "a folder in which files can be written"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(option, f"{folder} cannot be used: {error.strerror}", right) from None
    for pattern in files:
        for path in folder.glob(pattern):
            if path.is_dir():
                raise ConfigError(option, f"{path} is a folder, not a file", right)


def bring(args: argparse.Namespace, scratch: Path) -> None:
    """Make ready what processes need before they start: packages, and the caches of kernels."""
    wheels.provide(args.wheels, scratch / "packages")
    if args.dry_run:
        caches.use_folders_in(scratch)
        if note := interpreter_note():
            say(note)
    caches.choose_folders()
    if args.wheels is not None:
        for line in caches.unpack_all(args.wheels):
            say(line)


def last_line(folder: Path, reports: list[Report], stop: StopRequest) -> str:
    """Where the results are, what failed, and after a signal what is unfinished."""

    def names(key: str) -> str:
        return "; ".join(f"{r.name}: {part}" for r in reports for part in r.content[key]) or "nothing"

    ended = "" if stop.signal is None else f"ended by {stop.signal.name}; unfinished: {names('unfinished')}; "
    return f"results in {folder}; {ended}failed: {names('failed')}"


def say(line: str) -> None:
    """Prints at once: a killed run has said what it did."""
    print(line, flush=True)


if __name__ == "__main__":
    exit_with(main)
