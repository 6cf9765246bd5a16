"""What a checkpoint costs the training loop, saved in it and beside it, and how fast its parts are.

Blocks of training steps take turns: without a save, with one behind the first step in the loop, and with one
beside it, on the same state. What a save costs is by how much its block is longer than the block without: how
long the loop stands still, and by how much the steps beside a save are slower (memory, caches, the
interpreter's lock). A block is long enough for a save beside it. Where Linux tells, the time for which the
loop was ready and had to wait for a core is left out: on a machine that is shared it is other programs', and
a save beside the loop needs a core that training leaves free. Differences are taken within each round; their
median counts, and half of them lie in the span beside it.
"""

import argparse
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any

import numpy as np
import torch

from benchmarks import machine
from benchmarks.training import Training, join
from megacore.checkpoint import Ranks, Saver
from megacore.checkpoint.digest import content_digest, new_file_hash
from megacore.checkpoint.disk import file_digest, size_text, write_file
from megacore.checkpoint.write import bytes_of, places_of
from megacore.distributed.mesh import Mesh
from megacore.distributed.rank_info import RankInfo
from megacore.files import check_folder
from megacore.tools.cli import Parser, add_overrides, count, exit_rank_with
from megacore.tools.diagnosis.failure import fail
from megacore.tools.retention import retention
from megacore.tools.settings.load import load

EXAMPLES = (
    "python -m benchmarks.checkpoint --rounds 3",
    "torchrun --nproc-per-node 2 -m benchmarks.checkpoint parallel.tensor=2",
)
TARGET = 0.1  # of what a save in the loop costs it
SCHEDULED = Path("/proc/thread-self/schedstat")  # nanoseconds on a core, and waiting for one
WAYS = ("none", "in the loop", "beside it")


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = Parser(
        "Measure how much longer training steps take while a checkpoint is saved.",
        example=EXAMPLES,
        notes="Blocks of steps without a save, with one in the loop and with one in the background take "
        "turns.",
        page="benchmarks/README.md",
        ranks=True,
    )
    parser.add_argument(
        "--config", default="benchmarks/checkpoint.json", metavar="FILE", help="config of the run"
    )
    parser.add_argument(
        "--folder", type=Path, metavar="FOLDER", help="folder to save in (default: the temporary folder)"
    )
    parser.add_argument(
        "--rounds", type=count, default=5, metavar="N", help="measured blocks of steps of each kind"
    )
    add_overrides(parser)
    args = parser.parse_intermixed_args(argv)
    args.folder = args.folder or Path(tempfile.gettempdir())
    check_folder("--folder", args.folder)
    return args


def clock() -> float:
    """Seconds, but not those for which this thread waited for a core."""
    waited = 0.0
    if SCHEDULED.exists():
        waited = int(SCHEDULED.read_text().split()[1]) / 1e9
    return perf_counter() - waited


class Block:
    """So many steps, of which the first may be saved."""

    def __init__(self, training: Training, mesh: Mesh, folder: Path) -> None:
        self.training, self.mesh = training, mesh
        clean = retention(folder, keep=1)
        self.savers = {
            way: Saver(folder, Ranks(mesh), clean=clean, background=way == WAYS[2], device=mesh.device)
            for way in WAYS[1:]
        }
        self.steps = 2

    def run(self, way: str) -> tuple[float, float, float]:
        """Seconds of the block, of the loop's standing still in it, and (on the wall) from
        the save's beginning to its end.
        """
        saver, stood, saved = self.savers.get(way), 0.0, None
        self.training.before_update = (lambda: None) if saver is None else saver.hold_update
        started = clock()
        for step in range(self.steps):
            self.training.step()
            if step == 0 and saver is not None:
                before = clock()
                saver.start(self.training.steps, self.training.engine.tensors(), {})
                if way == "in the loop":
                    saved = saver.finish()
                stood += clock() - before
        before = clock()
        if saver is not None:
            saved = saved or saver.finish()
        stood += clock() - before
        return clock() - started, stood, saved.seconds if saved else 0.0

    def fit(self) -> None:
        """Chooses `steps`: all saving is done within a block, with as much to spare."""
        for way in WAYS:
            self.run(way)
        step = median(self.training.step() for _ in range(5))
        longest = max(self.run(way)[2] for way in WAYS[1:])
        steps = torch.tensor(2 + int(2 * longest / step))
        if self.mesh.world.process_group is not None:
            torch.distributed.broadcast(steps, 0)
        self.steps = int(steps)


def measure(block: Block, rounds: int) -> dict[str, Any]:
    """Seconds a save costs."""
    block.fit()
    took: dict[str, list[float]] = {way: [] for way in WAYS}
    stood: dict[str, list[float]] = {way: [] for way in WAYS}
    for index in range(rounds):
        for way in (WAYS, WAYS[::-1])[index % 2]:
            seconds, still, _ = block.run(way)
            took[way].append(seconds)
            stood[way].append(still)
    longer = {
        way: [with_save - without for with_save, without in zip(took[way], took["none"], strict=True)]
        for way in WAYS[1:]
    }
    costs = {way: median(longer[way]) for way in WAYS[1:]}
    return {
        "steps a block": block.steps,
        "block_seconds": took,
        "cost_seconds": costs,
        "cost_quartiles": {way: np.quantile(longer[way], [0.25, 0.75]).tolist() for way in WAYS[1:]},
        "stood_still_seconds": {way: median(stood[way]) for way in WAYS[1:]},
        "cost_ratio": costs["beside it"] / costs["in the loop"],
        "stood_still_ratio": median(stood["beside it"]) / costs["in the loop"],
    }


def speeds(folder: Path) -> dict[str, float]:
    """GB/s of CPU time for what needs a core, and of wall time for the disk."""
    values = torch.randn(16, 1024, 1024)
    raw = values.view(-1).view(torch.uint8).numpy().data
    file = folder / "speed"

    def rate(work: Callable[[], object], clock: Callable[[], float]) -> float:
        times = []
        for _ in range(3):
            started = clock()
            work()
            times.append(clock() - started)
        return values.nbytes / 1e9 / min(times)

    def parts() -> Iterator[memoryview]:
        yield raw

    result = {
        "content digest": rate(lambda: content_digest(values, (0, 0, 0), 0), process_time),
        "file digest": rate(lambda: new_file_hash(raw), process_time),
        "copy to staging": rate(lambda: torch.empty_like(values).copy_(values), process_time),
        "write, fsync, read back": rate(lambda: write_file(file, parts()), perf_counter),
        "read and compare": rate(lambda: file_digest(file), perf_counter),
    }
    file.unlink()
    return result


def show(result: dict[str, Any]) -> None:
    """The tables."""
    from rich.console import Console
    from rich.table import Table

    console = Console(stderr=True, highlight=False, markup=False)
    table = Table("a save", "longer block", "loop stands still")
    for way in WAYS[1:]:
        low, high = result["cost_quartiles"][way]
        table.add_row(
            way,
            f"{result['cost_seconds'][way]:.3f} s ({low:.3f} to {high:.3f})",
            f"{result['stood_still_seconds'][way]:.4f} s",
        )
    table.add_row("beside / in the loop", f"{result['cost_ratio']:.1%}", f"{result['stood_still_ratio']:.1%}")
    console.print(
        f"{result['state']} of state, blocks of {result['steps a block']} steps; target: below {TARGET:.0%}"
    )
    console.print(table)
    table = Table("one core, one file", "GB/s")
    for name, speed in result["speeds"].items():
        table.add_row(name, f"{speed:.2f}")
    console.print(table)


def main(argv: list[str], place: RankInfo) -> None:
    """One rank's part."""
    args = parse(argv)
    config = load(args.config, args.overrides, place.world_size).config
    mesh = join(config, place)
    try:
        training = Training(config, mesh)
        ranks = Ranks(mesh)
        own = bytes_of(places_of(training.engine.tensors()))
        folder = Path(ranks.first(tempfile.mkdtemp(dir=args.folder) if place.rank == 0 else ""))
        result = {"state": size_text(ranks.total(own))} | measure(Block(training, mesh, folder), args.rounds)
        if place.rank == 0:
            show(result | {"speeds": (figures := speeds(folder))})
            shutil.rmtree(folder)
            print(
                json.dumps(
                    machine.describe()
                    | {"config": config.model_dump(by_alias=True)}
                    | result
                    | {"speeds": figures}
                )
            )
    except BaseException as error:
        fail(error, place, mesh)
        raise
    mesh.close()


if __name__ == "__main__":
    exit_rank_with(main)
