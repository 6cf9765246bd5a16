"""What starting a run on thousands of ranks costs, and saving its checkpoints: the real code of
each rank, one after the other.

No rank is a process of its own. Process groups are PyTorch's fake ones, and tensors have shapes only. What is
real: every rank's mesh, stages, engine and pieces, its index of them, the manifest that rank 0 makes of all
indexes, and what ranks do with it when they resume. Left out are the tensors' bytes (files are sparse, their
digests random), the network and what communicators cost. Linux only.

The model is one eighth as wide as the config's, with buckets to match, so that ranks hold as many slices as
they would, and a file's address range fits into this machine's memory.
"""

import argparse
import json
import multiprocessing
import os
import secrets
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from math import prod
from pathlib import Path
from time import perf_counter, process_time
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks import machine
from megacore.checkpoint import Reader, write
from megacore.checkpoint.folder import commit, partial_of
from megacore.checkpoint.format import DTYPE_CODES, File
from megacore.checkpoint.write import Layout, index_file, places_of, write_rank
from megacore.config import Config
from megacore.distributed.mesh import Mesh
from megacore.distributed.rank_info import RankInfo
from megacore.distributed.shard import logical_name
from megacore.engine.choose import build_engine, build_stages
from megacore.engine.protocol import Engine
from megacore.tools.choices.settle import settled_alone
from megacore.tools.cli import Parser, add_overrides, exit_with
from megacore.tools.deepspeed.engine import ENGINES
from megacore.tools.settings.load import load

EXAMPLE = "python -m benchmarks.start_up --world 64,512"
LAYOUT = [
    "parallel.tensor=8",
    "parallel.pipeline=8",
    "engine.shard_optimizer=true",
    "train.global_batch_size=1536",
]
NARROW = ["model.hidden_size=1536", "engine.bucket_mib=0.4"]
STEP, NODE = 10, 8  # ranks of a node


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = Parser(
        "Measure what starting a run on thousands of ranks and saving its checkpoints cost, simulated.",
        example=EXAMPLE,
        page="benchmarks/README.md",
    )
    parser.add_argument("--config", default="configs/gpt_175b.json", metavar="FILE", help="config of the run")
    parser.add_argument(
        "--world", default="64,512,4096", metavar="N,N", help="numbers of ranks to simulate in turn"
    )
    parser.add_argument(
        "--folder",
        type=Path,
        metavar="FOLDER",
        help="folder to save in (default: the temporary folder)",
    )
    add_overrides(parser, f"values that replace the file's, after {' '.join(LAYOUT)}")
    parser.add_alias("--ranks", "--world")
    return parser.parse_intermixed_args(argv)


@contextmanager
def fake_rank(config: Config, rank: int, world: int) -> Iterator[Mesh]:
    """The mesh of one of so many ranks, whose groups reach nobody, on the meta device."""
    real_init, real_new = dist.init_process_group, dist.new_group

    def init(backend: str, **options: Any) -> None:
        real_init("fake", **options)

    def new_group(ranks: Any, *, backend: str, **options: Any) -> Any:
        return real_new(ranks, backend="fake", **options)

    with (
        patch.object(dist, "init_process_group", init),
        patch.object(dist, "new_group", new_group),
    ):
        mesh = Mesh(
            settled_alone(config),
            RankInfo(rank, world, rank % NODE, NODE),
            torch.device("meta"),
            store=FakeStore(),
        )
        yield mesh
    mesh.close()


def engine_of(config: Config, mesh: Mesh) -> Engine:
    """The engine of a fake rank."""
    return build_engine(config, build_stages(settled_alone(config), mesh), mesh, ENGINES)


def sparse_safetensors(
    file: Path, layout: Layout, tensors: Iterator[Tensor], note: Callable[[Tensor], None]
) -> File:
    """`write.write_safetensors` without the tensors' bytes: a header, and a hole."""
    header, end = {}, 0
    for (name, (dtype, shape)), tensor in zip(layout.items(), tensors, strict=True):
        note(tensor)
        start, end = end, end + dtype.itemsize * prod(shape)
        header[name] = {"dtype": DTYPE_CODES[dtype], "shape": shape, "data_offsets": [start, end]}
    head = json.dumps(header).encode()
    with file.open("wb") as opened:
        opened.write(len(head).to_bytes(8, "little") + head)
        opened.truncate(8 + len(head) + end)
    return File(bytes=8 + len(head) + end, hash="xxh3_128", digest=secrets.token_hex(16))


def begin(config: Config, world: int, folder: Path) -> dict[str, Any]:
    """Lets every rank build what it has in a run, and save it up to its index."""
    seconds, slices, largest = dict.fromkeys(("mesh", "engine", "index"), 0.0), 0, 0
    groups: dict[tuple[int, ...], str] = {}
    made = 0
    folder.mkdir(parents=True)
    with ExitStack() as stack:
        stack.enter_context(patch.object(write, "write_safetensors", sparse_safetensors))
        stack.enter_context(patch.object(write, "content_digest", lambda *args: secrets.randbits(64)))
        stack.enter_context(
            patch.object(write, "replace_file", lambda path, content: path.write_bytes(content))
        )
        for rank in range(world):
            started = perf_counter()
            with fake_rank(config, rank, world) as mesh:
                meshed = perf_counter()
                named = [mesh.world, *mesh.groups.values(), *mesh.shared.values()]
                for group in reversed(named):  # by the name that asked first
                    if group.size > 1:
                        groups[group.ranks] = group.name
                made += sum(communicator is not None for communicator in mesh.communicators.values())
                tensors = engine_of(config, mesh).tensors()
                built = perf_counter()
                places = places_of(tensors)
                write_rank(folder, rank, places, (tensors[key][0] for key in places))
                taken = (meshed - started, built - meshed, perf_counter() - built)
                seconds = {name: seconds[name] + part for name, part in zip(seconds, taken, strict=True)}
                slices += len(places)
                largest = max(largest, index_file(folder, rank).stat().st_size)
    return {
        "slices": slices,
        "groups": dict(Counter(groups.values())),
        "group_sizes": {name: len(ranks) for ranks, name in groups.items()},
        "communicators_a_rank": made / world,
        "index_bytes": largest,
        "seconds_a_rank": {name: total / world for name, total in seconds.items()},
    }


class Nothing:
    """A slice on disk whose content is left out."""

    def __getitem__(self, box: tuple[slice, ...]) -> Tensor:
        return torch.empty([s.stop - s.start for s in box], device="meta")


def restore(config: Config, world: int, reader: Reader) -> float:
    """Seconds in which a rank in the middle finds and asks for all slices that it needs."""
    with (
        fake_rank(config, world // 2, world) as mesh,
        patch.object(Reader, "_stored", lambda *args: Nothing()),
    ):
        tensors = engine_of(config, mesh).tensors()
        started = perf_counter()
        for key, (tensor, box) in tensors.items():
            reader.read_into(logical_name(key), box, tensor)
        return perf_counter() - started


def alone(work: Callable[[], Any]) -> dict[str, Any]:
    """Runs `work` in a process of its own.

    Returns its result, the seconds and how many of them on a core, the MiB beyond what the process began
    with, and how many files it looked at.
    """
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()

    def status(field: str) -> int:
        return int(
            next(
                line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field)
            ).split()[1]
        )

    def child() -> None:
        looked, real = Counter[str](), os.lstat

        def lstat(path: Any, **options: Any) -> Any:
            looked["files"] += 1
            return real(path, **options)

        before = status("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # forgets the highest so far
        with patch.object(os, "lstat", lstat):
            started, busy = perf_counter(), process_time()
            result = work()
            seconds, busy = perf_counter() - started, process_time() - busy
        figures = {
            "seconds": seconds,
            "core_seconds": busy,
            "mib": (status("VmHWM") - before) / 1024,
            "looked_at": looked["files"],
        }
        theirs.send(figures | {"result": result if isinstance(result, float) else None})

    process = context.Process(target=child)
    process.start()
    theirs.close()
    found: dict[str, Any] = ours.recv()
    process.join()
    return found


def measure(config: Config, world: int, folder: Path) -> dict[str, Any]:
    """All figures of so many ranks."""
    partial = partial_of(folder, STEP, "fake")
    result = begin(config, world, partial)
    state = {"model": config.model.model_dump(), "config": config.model_dump(by_alias=True)}
    result["commit"] = alone(lambda: commit(partial, STEP, state, world))
    path = folder / f"step_{STEP:08d}"
    result["manifest_bytes"] = (path / "manifest.json").stat().st_size
    result["resume, rank 0"] = alone(lambda: Reader(path))
    text = (path / "manifest.json").read_bytes()
    result["resume, other ranks"] = alone(lambda: Reader(path, text=text))
    reader = Reader(path, trusted=True, text=text)
    result["restore"] = alone(lambda: restore(config, world, reader))
    return result


def show(world: int, result: dict[str, Any]) -> None:
    """A few lines a number of ranks, on stderr."""
    from rich.console import Console

    say = Console(stderr=True, highlight=False, markup=False, soft_wrap=True).print
    a_rank = ", ".join(f"{name} {seconds * 1e3:.1f} ms" for name, seconds in result["seconds_a_rank"].items())
    groups = ", ".join(
        f"{count} {name} of {result['group_sizes'][name]}" for name, count in result["groups"].items()
    )
    say(f"{world} ranks, {result['slices']:,} slices")
    say(f"  a rank              {a_rank}; an index of at most {result['index_bytes'] / 1024:.1f} KiB")
    say(f"  communicators       {result['communicators_a_rank']:.2f} a rank; in all {groups}")
    say(f"  manifest            {result['manifest_bytes'] / 2**20:.1f} MiB")
    for name in ("commit", "resume, rank 0", "resume, other ranks"):
        figures = result[name]
        took = f"{figures['seconds']:.2f} s, {figures['core_seconds']:.2f} on a core"
        say(f"  {name:19} {took}, {figures['mib']:.0f} MiB, {figures['looked_at']} files looked at")
    say(f"  a rank's slices     found in {result['restore']['result']:.2f} s")


def run(argv: list[str]) -> None:
    """Measures, and prints JSON."""
    args = parse(argv)
    results = {}
    for world in map(int, args.world.split(",")):
        config = load(args.config, [*LAYOUT, *NARROW, *args.overrides], world).config
        with tempfile.TemporaryDirectory(dir=args.folder or tempfile.gettempdir()) as folder:
            results[world] = measure(config, world, Path(folder))
        show(world, results[world])
    print(
        json.dumps(machine.describe() | {"overrides": [*LAYOUT, *NARROW, *args.overrides], "ranks": results})
    )


if __name__ == "__main__":
    exit_with(run)
