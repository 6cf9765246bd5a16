"""The planner's prediction beside the measured step, for layouts of one config on this machine.

First it measures what the planner asks for: a large product and a copy on every rank at once
(`benchmarks.throughput --peak --gpu-file`), and then, layout by layout, the links between its ranks
(`benchmarks.collectives --cluster-file`) and its steps. The first layout calibrates the prediction, as
`launch/plan.py --calibrate` does with a run; the others are predicted from it, and nothing is fitted to them.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from benchmarks import machine
from benchmarks.throughput import ROOT, start
from megacore.config import Config
from megacore.config.precision import ELEMENT_BYTES
from megacore.errors import ConfigError
from megacore.tools.cli import Parser, add_config, add_overrides, count, exit_with
from megacore.tools.output_files import check_output
from megacore.tools.planner.calibrate import calibrated
from megacore.tools.planner.devices import Cluster, DeviceSpec, Level, read_cluster, read_device
from megacore.tools.planner.profile import profile
from megacore.tools.planner.step_time import predict
from megacore.tools.planner.workload import setting_of
from megacore.tools.settings.load import load
from megacore.tools.verify.layouts import Layout
from megacore.tools.verify.layouts import parse as parse_layout

EXAMPLE = (
    "python -m benchmarks.predicted --config configs/gpt_tiny.json --layouts one,dp2,tp2,pp2 "
    "--output predicted.json"
)


ALONE = Cluster("none", (Level("none", None, 1.0, 0.0),))


@dataclass(frozen=True)
class Beside:
    """Seconds of a layout's step."""

    layout: str
    measured: float
    spread: float  # the width of the middle half, as a fraction of the median
    estimated: float  # from the measured device and links, with constants that are estimates for GPUs
    calibrated: float

    @property
    def error(self) -> float:
        """Of the calibrated prediction, relative."""
        return self.calibrated / self.measured - 1


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = Parser(
        "Compare the planner's prediction with measured steps of several layouts on this machine.",
        example=EXAMPLE,
        page="docs/planning.md",
    )
    add_config(parser)
    parser.add_argument(
        "--layouts",
        required=True,
        metavar="LAYOUT,LAYOUT",
        help="layouts such as one,dp2,tp2,pp2; the first calibrates the prediction",
    )
    parser.add_argument("--steps", type=count, default=10, metavar="N", help="measured steps of each layout")
    parser.add_argument("--output", type=Path, metavar="FILE.json", help="write the results")
    add_overrides(parser)
    args = parser.parse_intermixed_args(argv)
    # options of benchmarks.throughput that are not asked for
    args.peak = args.real_data = args.profile = args.timeline = None
    if args.output is not None:
        check_output("--output", str(args.output))
    return args


def ranks_of(world: int, module: str, arguments: list[str]) -> None:
    """Runs a benchmark on so many ranks. Raises `ConfigError` with the end of what it said, if it fails."""
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(world), "-m", module]
    command = [sys.executable, "-m", *(launcher if world > 1 else [module]), *arguments]
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise ConfigError(
            module, (done.stderr.strip().splitlines() or ["it said nothing"])[-1], "a machine that it runs on"
        )


def measured_device(args: argparse.Namespace, world: int) -> DeviceSpec:
    """The device, while `world` ranks work here: cores of one machine share its memory."""
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "device.json")
        ranks_of(
            world,
            "benchmarks.throughput",
            ["--config", args.config, "--steps", "1", "--peak", "--gpu-file", path, *args.overrides],
        )
        return read_device(path)


def measured_links(args: argparse.Namespace, layout: Layout, config: Config) -> Cluster:
    """The links between a layout's ranks, by messages up to those of its layers; of one
    rank none are used.
    """
    largest = (
        config.rank_tokens * config.model.hidden_size * ELEMENT_BYTES[config.train.precision]
        if config.parallel.tensor > 1
        else 2**22
    )
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "cluster.json")
        output = [
            "--output",
            str(Path(folder) / "links.json"),
            "--largest",
            str(largest / 2**20),
            "--cluster-file",
            path,
        ]
        ranks_of(
            layout.world,
            "benchmarks.collectives",
            ["--config", args.config, *output, *args.overrides, *layout.overrides()],
        )
        return read_cluster(path)


def compare(args: argparse.Namespace) -> list[Beside]:
    """Measures every layout, and predicts it. Raises `ConfigError`."""
    layouts = [parse_layout(name) for name in args.layouts.split(",")]
    configs = [
        load(args.config, [*args.overrides, *layout.overrides()], layout.world).config for layout in layouts
    ]
    device = measured_device(args, max(layout.world for layout in layouts))
    found = []
    constants = guess = profile()
    for number, (layout, config) in enumerate(zip(layouts, configs, strict=True)):
        result = start(args, layout.name)
        if "failed" in result:
            raise ConfigError("--layouts", f"{layout.name}: {result['failed']}", "layouts that run here")
        setting, seconds = setting_of(config), result["step_seconds"]
        cluster = measured_links(args, layout, config) if layout.world > 1 else ALONE
        if number == 0:
            fitted = calibrated(guess, setting, seconds["median"], device, cluster)
            if fitted is None:
                raise ConfigError(
                    "--layouts",
                    f"no factor explains {seconds['median']:.4g} s of {layout.name}",
                    "another first",
                )
            constants = fitted
        steps = [predict(setting, device, cluster, known).step for known in (guess, constants)]
        found.append(Beside(layout.name, seconds["median"], seconds["spread"], *steps))
    return found


def table(found: list[Beside]) -> str:
    """As Markdown."""
    lines = [
        "| layout | measured | middle half | estimated | calibrated | error |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for i, row in enumerate(found):
        error = "calibrates" if i == 0 else f"{row.error:+.0%}"
        cells = [
            f"{row.measured:.3f} s",
            f"±{row.spread / 2:.1%}",
            f"{row.estimated:.3f} s",
            f"{row.calibrated:.3f} s",
            error,
        ]
        lines.append(f"| {row.layout} | {' | '.join(cells)} |")
    return "\n".join(lines)


def run(argv: list[str]) -> None:
    """Everything that the command does."""
    args = parse(argv)
    found = compare(args)
    print(table(found))
    if args.output is not None:
        report = machine.describe() | {
            "config_file": args.config,
            "overrides": args.overrides,
            "layouts": [vars(row) for row in found],
        }
        args.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    exit_with(run)
