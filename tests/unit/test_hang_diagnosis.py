"""What the hang watchdog says: of every kind of hang, from records made up here, it
must name the cause and the rank.
"""

import json
import time
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from megacore.distributed.events import Listeners, Operation, Waits
from megacore.distributed.rank_info import RankInfo
from megacore.tools.deepspeed import engine
from megacore.tools.diagnosis.flight_recorder import FOR_DEVICE, KEPT, FlightRecorder, line_of
from megacore.tools.diagnosis.hang_diagnosis import Diagnosis, RankProcess, Snapshot, judge, operation_text

PATIENCE = 60.0
TP = {0: "0-1", 1: "0-1", 2: "2-3", 3: "2-3"}  # channels of the tensor groups of tp 2 × pp 2, ranks 0–3
WORLD = "0-3"


def seats(*hosts: str) -> dict[int, RankProcess]:
    return {
        rank: RankProcess(rank, host, 100 + rank, f"pp {rank // 2}, dp 0, tp {rank % 2}")
        for rank, host in enumerate(hosts)
    }


HERE = seats("a", "a", "a", "a")
APART = seats("a", "a", "b", "b")


def state(
    channel: str, begun: int, operation: str = "all_reduce", shape: tuple[int, ...] = (16, 32)
) -> tuple[int, list[str]]:
    """A channel in which `begun` operations were begun, the last two remembered."""
    name = {WORLD: "world", "0>2": "pp", "1>3": "pp"}.get(channel, "tp")
    return begun, [operation_text(name, operation, shape, torch.float32)] * min(begun, 2)


def rank(
    number: int,
    idle: float = 90.0,
    waiting: tuple[str, int] | None = None,
    begun: dict[str, int] | None = None,
    **other: Any,
) -> Snapshot:
    channels = {
        channel: state(channel, count) for channel, count in ({TP[number]: 7} | (begun or {})).items()
    }
    here = {
        "step": 12,
        "phase": "forward of microbatch 3",
        "line": "pipeline/runtime.py:90 (_forward)",
    } | other
    return Snapshot(number, idle=idle, waiting=waiting, channels=channels, **here)


def world(*ranks: Snapshot) -> dict[int, Snapshot]:
    """As they come out of the store: through JSON."""
    return {each.rank: Snapshot(**json.loads(json.dumps(asdict(each)))) for each in ranks}


IN_PYTHON = rank(1, begun={"0-1": 6}, line="data/samples.py:88 (samples)", phase="data")
WAITS = rank(0, waiting=("0-1", 7))
BEHIND = [rank(2, waiting=("0>2", 5), begun={"0>2": 5}), rank(3, waiting=("2-3", 8), begun={"2-3": 8})]
REST = (rank(2), rank(3))
PROCESSES = {"0": "S", "1": "S", "2": "S", "3": "S"}

CASES: dict[str, tuple[dict[int, RankProcess], dict[int, Snapshot], Diagnosis]] = {
    "in python": (
        HERE,
        world(replace(WAITS, channels=WAITS.channels | {"0>2": state("0>2", 4)}), IN_PYTHON, *BEHIND),
        Diagnosis(
            "python",
            [1],
            "rank 1 (host a, pp 0, dp 0, tp 1) never entered tp all_reduce #7 of [16, 32] float32; it is "
            "in data/samples.py:88 (samples)"
            " for 90 s (step 12, data); rank 0 waits there",
        ),
    ),
    "slow but moving": (
        HERE,
        world(WAITS, replace(IN_PYTHON, idle=3.0), *REST),
        Diagnosis("slow", [1], "slow, but moving: rank 1", fatal=False),
    ),
    "compiling": (
        HERE,
        world(WAITS, replace(IN_PYTHON, idle=0.0, compiling=45.4), *BEHIND),
        Diagnosis(
            "compiling",
            [1],
            "rank 1 (host a, pp 0, dp 0, tp 1) compiles for 45 s (step 12); rank 0 waits in tp all_reduce "
            "#7 of [16, 32] float32",
            fatal=False,
        ),
    ),
    "several compile, and one waits": (
        HERE,
        world(rank(0, compiling=45.0), rank(1, compiling=30.0), rank(2), rank(3, phase=FOR_DEVICE)),
        Diagnosis(
            "compiling",
            [0, 1],
            "rank 0 (host a, pp 0, dp 0, tp 0) compiles for 45 s (step 12). The same holds for rank 1",
            fatal=False,
        ),
    ),
    "one compiles, and another hangs": (
        HERE,
        world(
            rank(0, waiting=(WORLD, 2), begun={WORLD: 2}),
            rank(1, begun={WORLD: 1}, idle=0.0, compiling=45.0),
            rank(2, begun={WORLD: 1}, line="data/samples.py:88 (samples)"),
            rank(3, waiting=(WORLD, 2), begun={WORLD: 2}),
        ),
        Diagnosis("python", [2], "rank 2 (host a, pp 1, dp 0, tp 0) never entered world all_reduce #2"),
    ),
    "dead": (
        HERE,
        world(replace(WAITS, processes=PROCESSES | {"1": "gone"}), *REST),
        Diagnosis("dead", [1], "rank 1 (host a, pp 0, dp 0, tp 1) is dead"),
    ),
    "dead, not reaped yet": (
        HERE,
        world(replace(WAITS, processes=PROCESSES | {"1": "Z"}), *REST),
        Diagnosis("dead", [1], "rank 1"),
    ),
    "dead, by whoever looked last": (
        HERE,
        world(
            replace(WAITS, processes=PROCESSES | {"1": "Z"}),
            *(replace(each, processes=PROCESSES) for each in REST),
        ),
        Diagnosis("dead", [1], "rank 1"),
    ),
    "stopped": (
        HERE,
        world(replace(WAITS, processes=PROCESSES | {"1": "T"}), *REST),
        Diagnosis(
            "stopped",
            [1],
            "rank 1 (host a, pp 0, dp 0, tp 1) is stopped (by SIGSTOP or a debugger); rank 0 waits in tp all",
        ),
    ),
    "interpreter held": (
        HERE,
        world(replace(WAITS, processes=PROCESSES), *REST),
        Diagnosis(
            "silent", [1], "rank 1 (host a, pp 0, dp 0, tp 1) does not answer, though the process runs"
        ),
    ),
    "host cut off": (
        APART,
        world(WAITS, rank(1)),
        Diagnosis(
            "unreachable",
            [2, 3],
            "rank 2 (host b, pp 1, dp 0, tp 0) and rank 3 (host b, pp 1, dp 0, tp 1) do not answer, nor does",
        ),
    ),
    "a death explains silence": (  # of one rank, and not the other way round
        APART,
        world(replace(WAITS, processes={"1": "gone"})),
        Diagnosis("dead", [1], "rank 1 "),
    ),
    "order": (
        HERE,
        world(
            replace(WAITS, channels={"0-1": state("0-1", 7, "all_gather")}),
            rank(1, waiting=("0-1", 7)),
            *REST,
        ),
        Diagnosis(
            "order",
            [0, 1],
            "operations over tp are in different order: #6 is all_gather of [16, 32] float32 on rank 0 ",
        ),
    ),
    "shapes": (
        HERE,
        world(
            replace(WAITS, channels={"0-1": state("0-1", 7, shape=(8, 32))}),
            rank(1, waiting=("0-1", 7)),
            *REST,
        ),
        Diagnosis(
            "shapes",
            [0, 1],
            "operations over tp have different shapes: #6 is all_reduce of [8, 32] float32 on rank 0 ",
        ),
    ),
    "network between hosts": (
        seats("a", "b", "a", "b"),
        world(WAITS, rank(1, waiting=("0-1", 7)), *REST),
        Diagnosis(
            "transport",
            [0, 1],
            "ranks 0 and 1 have all entered tp all_reduce #7 of [16, 32] float32, which does not end for "
            "90 s:",
        ),
    ),
    "the last has just come": (
        HERE,
        world(WAITS, rank(1, idle=0.0, waiting=("0-1", 7)), *REST),
        Diagnosis("slow", [0, 1], "ranks 0 and 1 have all entered tp all_reduce #7", fatal=False),
    ),
    "circle": (
        HERE,
        world(
            rank(0, waiting=("0>2", 5), begun={"0>2": 5, WORLD: 1}),
            rank(1, waiting=(WORLD, 2), begun={WORLD: 2}),
            rank(2, waiting=(WORLD, 2), begun={"0>2": 4, WORLD: 2}),
            rank(3, waiting=(WORLD, 2), begun={WORLD: 2}),
        ),
        Diagnosis(
            "deadlock",
            [0, 2],
            "ranks wait for each other in a circle: rank 0 (host a, pp 0, dp 0, tp 0) waits in pp "
            "all_reduce #5",
        ),
    ),
    "no host waits, as under NCCL": (
        HERE,
        world(rank(0), rank(1, begun={"0-1": 6}, line="data/samples.py:88 (samples)"), *REST),
        Diagnosis("python", [1], "rank 1 (host a, pp 0, dp 0, tp 1) never entered tp all_reduce #7"),
    ),
    "devices do not end what all have begun": (
        APART,
        world(*(rank(each, phase=FOR_DEVICE, line="train/metrics.py:60 (take)") for each in range(4))),
        Diagnosis(
            "transport",
            [0, 1, 2, 3],
            "all ranks have begun the same operations and wait for their devices, for 90 s: a cut in",
        ),
    ),
    "one device holds up the others": (
        HERE,
        world(
            *(
                rank(
                    each,
                    phase=FOR_DEVICE,
                    device=(6 - (each == 2), f"backward of microbatch {each} (step 7)"),
                )
                for each in range(4)
            )
        ),
        Diagnosis(
            "transport",
            [0, 1, 2, 3],
            "all ranks have begun the same operations and wait for their devices, for 90 s: a cut in the"
            " network, or a hung device; furthest behind is the device of rank 2, in backward of "
            "microbatch 2 (step 7)",
        ),
    ),
    "never joined": (
        {**HERE, 3: RankProcess(3, "unknown", 0, "still joining")},
        world(WAITS, rank(1), rank(2)),
        Diagnosis("absent", [3], "rank 3 (host unknown, still joining) has not come to where the ranks meet"),
    ),
    "devices wait for a host": (
        HERE,
        world(
            *(rank(each, phase=FOR_DEVICE) for each in (0, 1, 2)),
            rank(3, phase="data", line="data/samples.py:88 (samples)"),
        ),
        Diagnosis(
            "python",
            [3],
            "rank 3 (host a, pp 1, dp 0, tp 1) is in data/samples.py:88 (samples) for 90 s (step 12, data)",
        ),
    ),
    "an engine's own collectives": (
        HERE,
        world(rank(0), rank(1), rank(2, phase="data", line="data/samples.py:88 (samples)"), rank(3)),
        Diagnosis(
            "python",
            [2],
            "rank 2 (host a, pp 1, dp 0, tp 0) is in data/samples.py:88 (samples) for 90 s (step 12, data)",
        ),
    ),
    "connection lost, all alive": (
        HERE,
        world(
            rank(0, idle=1.0),
            rank(1, idle=1.0, failed="RuntimeError: timed out"),
            rank(2, idle=1.0),
            rank(3, idle=1.0),
        ),
        Diagnosis(
            "transport",
            [1],
            "rank 1 (host a, pp 0, dp 0, tp 1) lost its connection, though every rank is there: "
            "RuntimeError:",
        ),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_every_cause_is_named(case: str) -> None:
    places, snapshots, expected = CASES[case]
    found = judge(places, snapshots, PATIENCE)
    assert (found.cause, found.ranks, found.fatal) == (expected.cause, expected.ranks, expected.fatal), found
    assert found.text.startswith(expected.text), found.text


ALONE = seats("a", "b", "c", "d")  # a rank a host: no neighbour sees how its process is


@pytest.mark.parametrize(
    ("reported", "cause", "text"),
    [
        ("gone", "dead", "rank 1 (host b, pp 0, dp 0, tp 1) is dead: no such process any more"),
        ("T", "stopped", "rank 1 (host b, pp 0, dp 0, tp 1) is stopped (by SIGSTOP or a debugger)"),
        ("R", "silent", "rank 1 (host b, pp 0, dp 0, tp 1) does not answer, though the process runs"),
        (
            "quiet",
            "unreachable",
            "rank 1 (host b, pp 0, dp 0, tp 1) does not answer, nor does any rank of host b",
        ),
        (
            None,
            "unreachable",
            "rank 1 (host b, pp 0, dp 0, tp 1) does not answer, nor does any rank of host b",
        ),
    ],
)
def test_heartbeats_tell_a_rank_from_its_host(reported: str | None, cause: str, text: str) -> None:
    """A host that beats is not down because its only rank is stopped or dead: it would be left out."""
    verdict = judge(ALONE, world(WAITS, *REST), PATIENCE, {} if reported is None else {1: reported})
    assert (verdict.cause, verdict.ranks, verdict.fatal) == (cause, [1], True)
    assert verdict.text.startswith(text)


def test_a_host_that_no_other_answers_is_the_one_that_is_cut_off() -> None:
    """As with heartbeats: that all others went down together is less likely."""
    verdict = judge(ALONE, world(WAITS), PATIENCE, dict.fromkeys((1, 2, 3), "quiet"))
    assert (verdict.cause, verdict.ranks) == ("unreachable", [0])
    assert verdict.text.startswith("no rank of another host answers: the network of host a is cut")


def over(name: str, operation: str, x: torch.Tensor, key: str = "") -> Operation:
    """An operation of ranks 0 and 1."""
    group: Any = SimpleNamespace(name=name, ranks=(0, 1), rank=0, key=key or name)
    return Operation(group, operation, (x,), 1)


def test_a_recorder_counts_what_its_rank_begins_and_where_it_waits() -> None:
    recorder, x = FlightRecorder(), torch.zeros(3, 2)
    for _ in range(KEPT + 1):
        token = recorder.on_collective(over("tp", "all_reduce", x))
        recorder.on_wait_begin(token)
        channel = recorder.channel((0, 1))
        assert recorder.waiting is channel and channel.wanted == channel.begun
        recorder.on_wait_end(token)
    assert recorder.channel((0, 1)) is channel and recorder.link(0, 1) is not channel, (
        "one channel a communicator, and one a link"
    )
    assert recorder.waiting is None and channel.begun == KEPT + 1
    assert [note[0] for note in channel.recent] == list(range(2, KEPT + 2))
    assert channel.recent[-1] == (KEPT + 1, "tp", "all_reduce", x.shape, torch.float32)
    first, _ = (recorder.on_collective(over("tp", "all_gather", x)) for _ in range(2))
    events = recorder.events
    recorder.on_wait_begin(first)
    assert channel.wanted == channel.begun - 1, "it waits for the first of two that are under way"
    recorder.on_wait_end(first)
    assert recorder.events > events, "a rank that waits and goes on is no rank that stands still"
    recorder.on_collective(over("pp", "send", x))
    recorder.on_collective(over("pp", "receive", x))
    assert {key: own.begun for key, own in recorder.channels.items()} == {"0-1": KEPT + 3, "0>1": 1, "1>0": 1}


def test_a_recorder_counts_compilations_within_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some versions of PyTorch report each nested compilation: the rank would count as done after the
    innermost one, or never.
    """
    now = [10.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    recorder = FlightRecorder()
    assert recorder.compiling_seconds() is None
    recorder.on_compile_begin()
    now[0] = 12.0
    recorder.on_compile_begin()
    recorder.on_compile_end()
    assert recorder.compiling_seconds() == 2.0
    events = recorder.events
    recorder.on_compile_end()
    assert recorder.compiling_seconds() is None and recorder.events > events
    recorder.on_compile_end()  # of a compilation that began before the recorder listened
    recorder.on_compile_begin()
    assert recorder.compiling_seconds() == 0.0


def test_listeners_hear_the_compiler_until_they_are_closed() -> None:
    """A later run in the same process would notify the listeners of an earlier one; and after a reset of the
    compiler, which drops its listeners, the watchdog would take a compilation for a hang.
    """
    torch.compile(lambda: None, backend="eager")  # loads the compiler
    from torch._dynamo.callback import CompilationCallbackHandler

    handler = CompilationCallbackHandler()
    with mock.patch("torch._dynamo.callback.callback_handler", handler):
        listeners = Listeners([recorder := FlightRecorder()])
        for phase in ("measuring compiled blocks", "data"):
            listeners.phase(phase)
            assert len(handler.start_callbacks) == len(handler.end_callbacks) == 1
        handler.clear()
        listeners.phase("data")
        assert len(handler.start_callbacks) == len(handler.end_callbacks) == 1

        for arguments in ((), ("a trigger",)):  # older PyTorch passes nothing
            handler.start_callbacks[0](*arguments)
            assert recorder.compiling_seconds() is not None
            handler.end_callbacks[0](*arguments)
            assert recorder.compiling_seconds() is None

        listeners.close()
        listeners.close()
        assert not handler.start_callbacks and not handler.end_callbacks


def test_a_build_of_deepspeed_is_a_compilation(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The first start on a machine builds CPU Adam for minutes, and was ended as a hang."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    recorder = FlightRecorder()
    seconds: list[float | None] = []
    builder = SimpleNamespace(name="cpu_adam", load=lambda: seconds.append(recorder.compiling_seconds()))
    package: Any = SimpleNamespace(ops=SimpleNamespace(__compatible_ops__={}))
    mesh: Any = SimpleNamespace(place=RankInfo(), device=torch.device("cpu"), listeners=Listeners([recorder]))
    with (
        mock.patch.multiple(engine, import_deepspeed=lambda _: package, builders=lambda *_: [builder]),
        mock.patch("torch.distributed.is_initialized", lambda: True),
        mock.patch.dict("os.environ"),
    ):
        engine.prepare({}, mesh)
    assert seconds[0] is not None and recorder.compiling_seconds() is None


def test_a_recorder_says_which_group_it_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups with equal ranks share a channel: their waits would be one group's, or an
    earlier operation's.
    """
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    recorder, x = FlightRecorder(), torch.zeros(3)
    earlier, later = (recorder.on_collective(over(name, "all_reduce", x)) for name in ("dp", "world"))
    for token, seconds in ((later, 1.0), (earlier, 2.0)):
        recorder.on_wait_begin(token)
        now[0] += seconds
        recorder.on_wait_end(token)
    with Listeners([recorder]).pause("validation"):
        recorder.on_wait_begin(earlier)
        now[0] += 4.0
        recorder.on_wait_end(earlier)
    recorder.on_host_wait_begin("data", 1)
    now[0] += 8.0
    recorder.on_host_wait_end("data")
    assert (
        recorder.step_waits() == Waits(3.0, {"world": 1.0, "dp": 2.0, "data": 8.0})
        and recorder.step_waits() == Waits()
    )


def test_a_line_is_that_of_our_code() -> None:
    """Inside a library's function, the line that called it says more than the library's."""
    import threading

    found: list[str] = []
    thread = threading.get_ident()
    helper = threading.Thread(target=lambda: found.append(line_of(thread)))
    helper.start()
    helper.join()
    assert "test_hang_diagnosis.py" in found[0] and "test_a_line_is_that_of_our_code" in found[0]
