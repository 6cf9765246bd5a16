"""How long the watchdog needs for its verdict on many ranks, which are made up here: a real
store, a real watchdog, no training.

python -m benchmarks.judging --world 4096
"""

import multiprocessing
import time
from dataclasses import asdict, replace
from datetime import timedelta

import torch
import torch.distributed as dist

from megacore.distributed.axes import ranks_along
from megacore.distributed.rank_info import RankInfo
from megacore.tools.cli import Parser, count, exit_with
from megacore.tools.diagnosis.flight_recorder import KEPT, FlightRecorder
from megacore.tools.diagnosis.hang_diagnosis import Diagnosis, RankProcess
from megacore.tools.diagnosis.watchdog import Watchdog
from megacore.tools.local_ranks import free_port

TENSOR, PIPELINE, ON_HOST = 8, 8, 8
WAIT = timedelta(seconds=60)


def store_of(port: int, opens: bool) -> dist.Store:
    """The store in which the ranks meet, or a connection to it."""
    return dist.TCPStore("127.0.0.1", port, None, opens, WAIT, wait_for_workers=False)


def hold(port: int) -> None:
    """A process that has the store, as the launcher's has."""
    store = store_of(port, opens=True)
    store.wait(["end"], timedelta(days=1))


def record_of(rank: int, sizes: dict[str, int], behind: int) -> FlightRecorder:
    """What a rank has noted in the middle of a run; `behind`: the operations that it has
    not begun over its tensor group.
    """
    recorder = FlightRecorder()
    recorder.step, recorder.phase = 12, ("backward", 3, 0)
    x = torch.empty(4096, 2048, device="meta", dtype=torch.bfloat16)
    for axes in (tuple(sizes), ("tp",), ("dp",), ("pp",)):
        name, count = "×".join(axes), 100 - (behind if axes == ("tp",) else 0)
        channel = recorder.channel(ranks_along(axes, rank, sizes))
        for _ in range(count):
            channel.begin(name, "all_reduce", x)
    stage = rank // (sizes["dp"] * sizes["tp"])
    for other in (stage - 1, stage + 1):
        if 0 <= other < sizes["pp"]:
            peer = rank + (other - stage) * sizes["dp"] * sizes["tp"]
            for link in (recorder.link(rank, peer), recorder.link(peer, rank)):
                for _ in range(KEPT):
                    link.begin("pp", "transfer", x)
    return recorder


def judged(ranks: int, port: int) -> tuple[Diagnosis, float, int]:
    """The verdict on so many ranks of which one is held up, the seconds that it took,
    and the questions to the store.
    """
    sizes = {"pp": PIPELINE, "dp": ranks // (TENSOR * PIPELINE), "tp": TENSOR}
    held_up = ranks // 3
    device = torch.device("cpu")
    watchdog = Watchdog(
        store_of(port, opens=False),
        RankInfo(0, ranks, 0, ON_HOST),
        "pp 0, dp 0, tp 0",
        FlightRecorder(),
        3600.0,
        device,
    )
    for rank in range(ranks):
        seat = RankProcess(rank, f"host{rank // ON_HOST}", 1000 + rank, f"rank {rank}")
        watchdog.notices.write(f"seat/{rank}", asdict(seat))
        watchdog.recorder = record_of(rank, sizes, behind=int(rank == held_up))
        snapshot = replace(watchdog.snapshot(), rank=rank, idle=4000.0, line="data/samples.py:88 (samples)")
        watchdog.notices.write(f"round/0/{rank}", asdict(snapshot))
    asked, started = watchdog.notices.answers, time.perf_counter()
    verdict = watchdog._judge("round/0")
    seconds = time.perf_counter() - started
    watchdog.close()
    return verdict, seconds, watchdog.notices.answers - asked


def main(argv: list[str]) -> int:
    """The command line; returns the exit status."""
    parser = Parser(
        "Measure how long the hang watchdog takes to find the slow rank among many.",
        example="python -m benchmarks.judging --world 4096",
        status="0 the right rank is found, 1 otherwise, 2 wrong arguments",
        page="benchmarks/README.md",
    )
    parser.add_argument(
        "--world",
        type=count,
        default=4096,
        metavar="N",
        help=f"number of ranks, a multiple of {TENSOR * PIPELINE}",
    )
    parser.add_alias("--ranks", "--world")
    args = parser.parse_args(argv)
    port = free_port()
    holder = multiprocessing.get_context("spawn").Process(target=hold, args=(port,), daemon=True)
    holder.start()
    try:
        verdict, seconds, questions = judged(args.world, port)
    finally:
        holder.kill()
    print(f"{args.world} ranks: {seconds:.2f} s, {questions} questions to the store")
    print(verdict.text)
    return int(verdict.ranks != [args.world // 3])


if __name__ == "__main__":
    exit_with(main)
