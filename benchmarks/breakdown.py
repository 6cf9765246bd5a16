"""Where a rank's step goes: every moment of it is charged to one part, so that the parts add up to the whole.

On a CPU the parts are host time. On a GPU they are time on the stream that computes, between events recorded in it: what is
launched there and runs there, and how long the stream stands waiting for communication that nothing hides.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import mean
from time import perf_counter
from typing import Any
from unittest.mock import patch

import torch
from torch.profiler import record_function

from benchmarks.training import Training
from benchmarks.wire import Wire
from megacore.distributed.comm import all_gather, all_reduce
from megacore.distributed.mesh import Mesh
from megacore.plan.schedule import Op
from megacore.plan.simulate import simulate
from megacore.plan.traffic import Transfer
from megacore.train import step as train_step

COMMUNICATION = ("tp", "dp", "pp", "tied", "loss", "norm")  # by group, as in `Transfer`
PARTS = ("compute", *COMMUNICATION, "bubble", "optimizer", "data", "other")
FORWARD, BACKWARD = "forward", "backward"
# Where a stage waits for others because the schedule has nothing for it to do, in the order in which that is taken out:
# for what it receives, and when it is done early, in the first sum that others join later.
IDLE_IN = ("pp", "tied", "loss", "norm", "dp")


class Stopwatch:
    """Marks in time, or in the computing stream; each begins a part, and the one behind it ends it."""

    def __init__(self, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"
        self.marks: list[tuple[Any, str]] = []
        self.open = ["other"]
        self.spans: list[tuple[str, int, int]] = []  # (name, first mark, mark behind the last) of parts with all that is in them

    def mark(self) -> None:
        """From here on time is the innermost open part's."""
        moment: Any = perf_counter()
        if self.on_gpu:
            moment = torch.cuda.Event(enable_timing=True)
            moment.record()
        self.marks.append((moment, self.open[-1]))

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Charges the block to `name`, less what is opened within; a trace shows it under that name."""
        first = len(self.marks)
        self.open.append(name)
        self.mark()
        try:
            with record_function(name):
                yield
        finally:
            self.open.pop()
            self.mark()
            self.spans.append((name, first, len(self.marks) - 1))

    def between(self, first: int, last: int) -> float:
        """Seconds from one mark to another; the device must have been waited for."""
        a, b = self.marks[first][0], self.marks[last][0]
        return a.elapsed_time(b) / 1e3 if self.on_gpu else b - a

    def totals(self) -> defaultdict[str, float]:
        """Seconds by part."""
        seconds: defaultdict[str, float] = defaultdict(float)
        for i in range(len(self.marks) - 1):
            seconds[self.marks[i][1]] += self.between(i, i + 1)
        return seconds

    def durations(self, name: str) -> list[float]:
        """Of each block of a name, with all that is in it."""
        return [self.between(first, last) for span, first, last in self.spans if span == name]


@dataclass(frozen=True)
class Breakdown:
    """One rank's step: its seconds by the host's clock, by part (`PARTS`: they add up), and what it sent."""

    total: float
    seconds: dict[str, float]
    transfers: list[Transfer]


def measured_step(training: Training) -> Breakdown:
    """Runs a step with its parts measured; collective.

    The bubble is what the simulated schedule, fed with the stages' own seconds of this step, says that this stage idles: it is taken
    out of its waits, and what remains of them is communication that was not hidden.
    """
    watch = Stopwatch(training.mesh.device)
    wire = Wire(training.mesh, watch.part)
    training.meet()
    with wire, _named(training, watch, wire):
        started = perf_counter()
        watch.mark()
        training.work()
        watch.mark()
        training.wait()
        total = perf_counter() - started
    totals = watch.totals()
    seconds = dict.fromkeys(PARTS, 0.0) | {name: totals[name] for name in totals if name in PARTS}
    seconds["compute"] = totals[FORWARD] + totals[BACKWARD]
    left = _idle(training, watch)
    for name in IDLE_IN:
        taken = min(left, seconds[name])
        seconds[name] -= taken
        seconds["bubble"] += taken
        left -= taken
    return Breakdown(total, seconds, wire.transfers())


@contextmanager
def _named(training: Training, watch: Stopwatch, wire: Wire) -> Iterator[None]:
    """Names what the runtime, the engine and the loader do, for as long as the block runs."""

    def within(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def named(*args: Any) -> Any:
            with watch.part(name):
                return function(*args)

        return named

    methods = training.train_step.runtime.methods
    named = {
        Op.FORWARD: within(FORWARD, methods[Op.FORWARD]),
        Op.BACKWARD: within(BACKWARD, methods[Op.BACKWARD]),
        Op.REDUCE_TIED: wire.summing("tied", methods[Op.REDUCE_TIED]),
    }
    step = wire.summing("norm", within("optimizer", training.engine.step))
    with (
        patch.dict(methods, named),
        patch.object(training.engine, "step", step),
        patch.object(train_step, "all_reduce", wire.summing("loss", all_reduce)),
        patch.object(training, "batch_of", within("data", training.batch_of)),
    ):
        yield


def _idle(training: Training, watch: Stopwatch) -> float:
    """Seconds that the simulated schedule leaves this stage without work; collective over the pipeline."""
    pp = training.mesh.pp
    if pp.size == 1:
        return 0.0
    own = torch.tensor([[mean(watch.durations(FORWARD)), mean(watch.durations(BACKWARD))]], device=training.mesh.device)
    forward, backward = all_gather(own, pp).t().tolist()
    timeline = simulate(training.train_step.plan, forward, backward)
    return max(spans[-1].end for spans in timeline.spans) - timeline.busy[pp.rank]


def shares(steps: list[Breakdown], mesh: Mesh) -> dict[str, float]:
    """Each part's share of the steps, in per cent, of all ranks together; collective."""
    own = [sum(step.total for step in steps), *(sum(step.seconds[part] for step in steps) for part in PARTS)]
    total, *parts = all_reduce(torch.tensor(own, dtype=torch.float64, device=mesh.device), mesh.world).tolist()
    return {part: 100 * seconds / total for part, seconds in zip(PARTS, parts, strict=True)}
