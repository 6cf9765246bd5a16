"""The fused kernels: compiled for four GPUs without any, or measured on one beside a copy of as many bytes.

On a GPU each operation is first compared with fp64, then timed forward and backward on rows of 1K to 64K, 64
MB an operand. The table, a chart and a JSON file with all figures are its results. Status 1 means that a
result is wrong, or with --compile-only that a kernel spills registers, that more programs are launched for
each multiprocessor than fit on it at once (sm_80, sm_90, sm_100), or that a kernel does not load 16 bytes at
once where rows allow it.
"""

import argparse
import json
import os
import re
import sys
import tempfile
from dataclasses import asdict, replace
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks import machine
from benchmarks.rounds import ROOT
from megacore.errors import ConfigError
from megacore.files import check_folder
from megacore.tools.cli import Parser, count, exit_with

if TYPE_CHECKING:
    from benchmarks.kernel_bandwidth import Measured
    from benchmarks.kernel_compile import Compiled
    from benchmarks.kernel_inputs import Size

EXAMPLE = "python -m benchmarks.kernels --compile-only"
WIDTHS = [4096, 1024, 16384, 65536, 2048, 8192, 32768]  # those that say most first, should time run out
OPERAND_BYTES = 2**26
COMPILED_WIDTH = 4096  # the one at which torch.compile takes part, for it takes many seconds a shape
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# told apart in greyscale too
LINES = {"triton": "#1f6fb4", "eager": "#999999", "compile": "#e6a23c", "liger": "#6aa84f"}


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = Parser(
        "Measure the fused kernels on a GPU, or compile them for four GPUs without one.",
        example=EXAMPLE,
        status="0 done, 1 a wrong result, or with --compile-only a slow kernel, 2 wrong arguments",
        page="kernels/README.md",
    )
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument(
        "--compile-only", action="store_true", help="compile at the sizes of the models, without a GPU"
    )
    kind.add_argument(
        "--dry-run",
        action="store_true",
        help="run every step at tiny sizes in Triton's interpreter, without measuring speed",
    )
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", help="operations, such as rms_norm (default: all)"
    )
    parser.add_argument(
        "--models",
        nargs="+",
        metavar="NAME",
        help="with --compile-only: names of configs/ (default: gpt_124m to gpt_175b)",
    )
    parser.add_argument(
        "--dtypes",
        nargs="+",
        choices=DTYPES,
        metavar="NAME",
        help="bf16, fp16 or fp32 (default: bf16, and to compile also fp32)",
    )
    parser.add_argument("--rounds", type=count, default=21, metavar="N", help="measurements of each kernel")
    parser.add_argument(
        "--seconds",
        type=float,
        default=float("inf"),
        metavar="SECONDS",
        help="time after which no new size is begun, in seconds",
    )
    parser.add_argument(
        "--processes", type=count, default=2, metavar="N", help="processes that compile in parallel"
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FOLDER",
        help="folder for JSON file and chart (default: benchmarks/results)",
    )
    args = parser.parse_args(argv)
    for flag in ("rounds", "processes"):
        if getattr(args, flag) < 1:
            parser.error(f"argument --{flag}: must be at least 1")
    if find_spec("triton") is None:
        raise ConfigError("triton", "it is not installed", "pip install triton")
    if not (args.compile_only or args.dry_run or torch.cuda.is_available()):
        raise ConfigError("benchmarks.kernels", "there is no GPU to measure on", "--compile-only needs none")
    if args.compile_only and os.environ.get("TRITON_INTERPRET") == "1":
        raise ConfigError("TRITON_INTERPRET", "1, with which nothing is compiled", "not set")
    if args.output is not None:
        check_folder("--output", args.output)
    return args


def chosen(names: list[str] | None) -> list[str]:
    """Operations by name."""
    from benchmarks.kernel_operations import OPERATIONS

    unknown = next((name for name in names or [] if name not in OPERATIONS), None)
    if unknown is not None:
        raise ConfigError("--only", f"{unknown!r} is no operation", ", ".join(OPERATIONS))
    return names or list(OPERATIONS)


def compile_only(args: argparse.Namespace, console: Console) -> int:
    """The compile table; 1 where a kernel is not what it should be."""
    from benchmarks.kernel_compile import TARGETS, compile_all, variants
    from benchmarks.kernel_operations import CONFIGS, MODELS, model_sizes

    for model in args.models or ():
        if not (CONFIGS / f"{model}.json").is_file():
            raise ConfigError("--models", f"configs/{model}.json does not exist", "such as gpt_7b")
    names, dtypes = chosen(args.only), [DTYPES[name] for name in args.dtypes or ("bf16", "fp32")]
    sizes = [(name, size) for name, size in model_sizes(tuple(args.models or MODELS)) if name in names]
    found = list(compile_all(variants(sizes, dtypes, list(TARGETS)), args.processes))
    console.print(compile_table(found))
    faults = [kernel for kernel in found if kernel.fault]
    for kernel in faults:
        variant = kernel.variant
        place = f"{variant.size} in {dtype_name(variant.dtype)} for {variant.target}"
        console.print(f"{variant.operation}, {kernel.kernel} at {place}: {kernel.fault}")
    console.print(f"{len(found)} kernels for {', '.join(TARGETS)}: {len(faults) or 'none'} with a fault")
    return 1 if faults else 0


def compile_table(found: "list[Compiled]") -> Table:
    """A row a kernel, dtype and target; what compiles to the same code at several sizes
    stands there once, with the first.

    Programs that fit on a multiprocessor stand next to those that are launched for each, which only kernels
    have whose grid is sized by the number of multiprocessors.
    """
    table = Table("operation", "kernel", "size", "dtype", "target")
    for column in (
        "warps",
        "registers",
        "shared B",
        "spilled B",
        "load bits",
        "store bits",
        "fit",
        "launched",
    ):
        table.add_column(column, justify="right")
    for kernel in found:
        variant = kernel.variant
        resources = (kernel.warps, kernel.registers, kernel.shared, kernel.spilled)
        programs = (kernel.fitting, kernel.resident)
        values = (*resources, kernel.load, kernel.store, *programs)
        table.add_row(
            variant.operation,
            kernel.kernel.strip("_").removesuffix("_kernel"),
            str(variant.size),
            dtype_name(variant.dtype),
            variant.target,
            *("" if value is None else str(value) for value in values),
        )
    return table


def dtype_name(dtype: torch.dtype) -> str:
    """As the command line has it."""
    return next(name for name, known in DTYPES.items() if known == dtype)


def run(args: argparse.Namespace, console: Console) -> int:
    """Compares with fp64, then measures; 1 if a result is wrong."""
    from benchmarks.kernel_bandwidth import TOLERANCE, error, measure
    from benchmarks.kernel_operations import OPERATIONS

    names, device, deadline = (
        chosen(args.only),
        torch.device("cpu" if args.dry_run else "cuda"),
        monotonic() + args.seconds,
    )
    report = machine.describe() | {
        "device": device_name(device),
        "versions": versions(),
        "dry_run": args.dry_run,
    }
    console.print(
        f"{report['device']}, "
        + ", ".join(f"{name} {value}" for name, value in report["versions"].items() if value)
    )
    errors: list[dict[str, Any]] = []
    measured: list[Measured] = []
    left: list[str] = []
    for dtype in (DTYPES[name] for name in args.dtypes or ("bf16",)):
        for name, size in dry_sizes(names) if args.dry_run else sizes(names, dtype):
            if monotonic() > deadline:
                left.append(f"{name} {size}")
                continue
            largest = error(name, replace(size, rows=min(size.rows, 64)), dtype, device)
            found = {
                "operation": name,
                "width": size.width,
                "dtype": str(dtype),
                "error": largest,
                "wrong": not largest <= TOLERANCE[dtype],
            }
            errors.append(found)
            compiled = not args.dry_run and (
                size.width == COMPILED_WIDTH or bool(OPERATIONS[name].measured_at)
            )
            measured += measure(name, size, dtype, device, 2 if args.dry_run else args.rounds, compiled)
    measured.sort(
        key=lambda found: (
            names.index(found.operation),
            found.dtype,
            found.direction == "backward",
            found.size.width,
        )
    )
    wrong = [found for found in errors if found["wrong"]]
    for table in (bandwidth_table(measured), step_table(measured)):
        if table.row_count:
            console.print(table)
    if args.dry_run:
        console.print("a dry run: nothing above is a speed")
    if left:
        console.print(f"no time was left for: {', '.join(left)}")
    report |= {
        "errors": errors,
        "not_measured": left,
        "measured": [asdict(found) | {"share": found.share("triton")} for found in measured],
    }
    console.print(f"written to {write(report, measured, args.output)}")
    for found in wrong:
        console.print(
            f"WRONG: {found['operation']} on rows of {found['width']} in {found['dtype']} is off by "
            f"{found['error']:.1e}"
        )
    return 1 if wrong else 0


def sizes(names: list[str], dtype: torch.dtype) -> "list[tuple[str, Size]]":
    """What is measured, in this order."""
    from benchmarks.kernel_inputs import Size
    from benchmarks.kernel_operations import OPERATIONS

    usual = [Size(OPERAND_BYTES // (width * dtype.itemsize), width) for width in WIDTHS]
    own = [(name, size) for name in names for size in OPERATIONS[name].measured_at]
    return own + [(name, size) for size in usual for name in names if not OPERATIONS[name].measured_at]


def dry_sizes(names: list[str]) -> "list[tuple[str, Size]]":
    """Two tiny ones each."""
    from benchmarks.kernel_inputs import Size

    return [(name, Size(16, width, head=8)) for width in (32, 64) for name in names]


def device_name(device: torch.device) -> str:
    """Of the GPU, or that there is none."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "no GPU: Triton's interpreter"


def versions() -> dict[str, str | None]:
    """Of what is measured with."""
    found: dict[str, str | None] = {}
    for package in ("torch", "triton", "liger_kernel"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found | {"megacore commit": machine.describe()["versions"]["megacore commit"]}


def bandwidth_table(measured: "list[Measured]") -> Table:
    """Shares of the copy's speed."""
    table = Table("operation", "rows", "", title="share of a copy of the same bytes")
    for column in ("GB/s", "triton", "goal", "", "eager", "compile", "liger"):
        table.add_column(column, justify="right")
    for found in measured:
        if found.moved is None:
            continue
        shares = {name: "" if (share := found.share(name)) is None else f"{share:.1%}" for name in LINES}
        share = found.share("triton") or 0.0
        remarks = [] if found.goal is None else ["reached" if share >= found.goal else "missed"]
        remarks += ["slower than eager"] if found.slower_than_eager else []
        table.add_row(
            found.operation,
            str(found.size),
            found.direction,
            f"{found.moved / found.seconds['triton'] / 1e9:,.0f}",
            shares["triton"],
            "" if found.goal is None else f"{found.goal:.0%}",
            ", ".join(remarks),
            *(shares[name] for name in ("eager", "compile", "liger")),
        )
    return table


def step_table(measured: "list[Measured]") -> Table:
    """Time and memory of what memory does not limit, relative to PyTorch's own."""
    table = Table("operation", "logits", title="forward and backward, relative to eager")
    for column in ("ms", "time", "time, compiled", "memory", "goals"):
        table.add_column(column, justify="right")
    for found in measured:
        if found.moved is None:
            eager, memory = found.seconds["eager"], found.memory
            table.add_row(
                found.operation,
                str(found.size),
                f"{1e3 * found.seconds['triton']:.2f}",
                f"{found.seconds['triton'] / eager:.2f}",
                f"{found.seconds['compile'] / eager:.2f}" if "compile" in found.seconds else "",
                f"{memory['triton'] / memory['eager']:.2f}" if memory else "",
                "1.00, 0.25",
            )
    return table


def write(report: dict[str, Any], measured: "list[Measured]", folder: Path | None) -> Path:
    """JSON and, beside it, the chart."""
    if folder is None:
        folder = Path(tempfile.mkdtemp()) if report["dry_run"] else ROOT / "benchmarks" / "results"
    folder.mkdir(parents=True, exist_ok=True)
    device = "dry_run" if report["dry_run"] else re.sub(r"[^a-z0-9]+", "_", report["device"].lower())
    path = folder / f"kernels_{device}_{report['date'][:10]}.json"
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    draw(measured, report["device"], path.with_suffix(".svg"))
    return path


def draw(measured: "list[Measured]", device: str, path: Path) -> None:
    """A chart an operation: share of a copy over the rows' width, forward solid and
    backward dashed, and the goals.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(found.operation for found in measured if found.moved is not None))
    if not names:
        return
    columns = min(len(names), 4)
    lines = -(-len(names) // columns)
    figure = Figure(figsize=(3.2 * columns, 2.6 * lines + 0.6), layout="constrained")
    FigureCanvasAgg(figure)  # no display, no global state
    grid = list(figure.subplots(lines, columns, sharey=True, squeeze=False).flat)
    for axes, name in zip(grid, names, strict=False):
        for direction, dash in (("forward", "-"), ("backward", "--")):
            points = [found for found in measured if found.operation == name and found.direction == direction]
            for contender, colour in LINES.items():
                shares = [
                    (found.size.width, share)
                    for found in points
                    if (share := found.share(contender)) is not None
                ]
                if shares:
                    axes.plot(
                        *zip(*shares, strict=True),
                        dash,
                        color=colour,
                        marker=".",
                        label=f"{contender}, {direction}",
                    )
            goals = [(found.size.width, found.goal) for found in points if found.goal is not None]
            if goals:
                axes.plot(
                    *zip(*goals, strict=True), dash, color="black", linewidth=0.5, label=f"goal, {direction}"
                )
        axes.set_title(name, loc="left", fontsize=9)
        axes.set_xscale("log", base=2)
        axes.set_ylim(0, 1.1)
        axes.spines[["top", "right"]].set_visible(False)
    for axes in grid[len(names) :]:
        axes.set_visible(False)
    labels = {
        label: line
        for axes in figure.axes
        for line, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(
        labels.values(), labels.keys(), loc="outside lower center", ncols=5, frameon=False, fontsize=8
    )
    figure.suptitle(
        f"share of a copy's speed over the elements of a row: {device}", x=0.01, ha="left", fontsize=11
    )
    figure.savefig(path)


def main(argv: list[str]) -> int:
    """Compiles or measures; returns the exit status."""
    args = parse(argv)
    if args.dry_run:
        os.environ["TRITON_INTERPRET"] = "1"  # before the kernels are imported
    console = Console(width=None if sys.stdout.isatty() else 180, highlight=False, markup=False)
    return compile_only(args, console) if args.compile_only else run(args, console)


if __name__ == "__main__":
    exit_with(main)
