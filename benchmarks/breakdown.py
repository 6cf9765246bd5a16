"""Where a rank's step goes: every moment of it is charged to one part, so that the parts add up to the whole.

On a CPU the parts are host time. On a GPU they are time on the stream that computes, between events recorded
in it: what is launched there and runs there, and how long the stream stands waiting for communication that
nothing hides.
"""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from statistics import mean
from time import perf_counter
from typing import Any

import torch
from torch.profiler import record_function

from benchmarks.training import Training
from benchmarks.wire import EXPERTS, Wire
from megacore.distributed.collectives import all_gather, all_reduce
from megacore.distributed.communicator import Group
from megacore.distributed.events import Listener
from megacore.distributed.mesh import Mesh
from megacore.pipeline.schedule import Action, Op, Plan
from megacore.tools.planner.traffic import Transfer
from megacore.tools.schedules.simulate import Span, Timeline, simulate

COMMUNICATION = ("tp", "cp", EXPERTS, "dp", "pp", "tied", "loss", "norm")  # by group, as a `Wire` names them
PARTS = ("compute", *COMMUNICATION, "bubble", "optimizer", "data", "other")
COMPUTE = (Op.FORWARD, Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)
PHASES = {"data": "data", "optimizer step": "optimizer"}  # parts, by the phases that listeners hear of
# Where a stage waits for others because the schedule has nothing for it to do, in the order in which that is
# taken out: for what it receives, and when it is done early, in the first sum that others join later.
IDLE_IN = ("pp", "tied", "loss", "norm", "dp")


class Stopwatch(Listener):
    """Marks in time, or in the computing stream; each begins a part, and the one behind it ends it."""

    on_error = "raise"

    def __init__(self, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"
        self.marks: list[tuple[Any, str]] = []
        self.open = ["other"]
        self.within: list[AbstractContextManager[None]] = []  # the plan's action that is being done
        # each action of the plan, its first mark, and the mark behind its last
        self.spans: list[tuple[Action, int, int]] = []

    def mark(self) -> None:
        """From here on time is the innermost open part's."""
        moment: Any = perf_counter()
        if self.on_gpu:
            moment = torch.cuda.Event(enable_timing=True)
            moment.record()
        self.marks.append((moment, self.open[-1]))

    def on_phase(self, phase: str) -> None:
        self.open[0] = PHASES.get(phase, "other")
        self.mark()

    def on_action_begin(self, action: Action) -> None:
        if action.op in COMPUTE:
            self.within.append(self.part(action.op.value, action))
            self.within[-1].__enter__()

    def on_action_end(self, action: Action) -> None:
        if action.op in COMPUTE:
            self.within.pop().__exit__(None, None, None)

    @contextmanager
    def part(self, name: str, action: Action | None = None) -> Iterator[None]:
        """Charges the block to `name`, less what is opened within; a trace shows it under that name.

        `action`: what the block does.
        """
        first = len(self.marks)
        self.open.append(name)
        self.mark()
        try:
            with record_function(name):
                yield
        finally:
            self.open.pop()
            self.mark()
            if action is not None:
                self.spans.append((action, first, len(self.marks) - 1))

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

    def mean_of(self, op: Op, chunk: int) -> float:
        """Seconds of a chunk's mean action of a kind, with all that is in it; 0 if there is none."""
        found = [
            self.between(first, last)
            for action, first, last in self.spans
            if (action.op, action.chunk) == (op, chunk)
        ]
        return mean(found) if found else 0.0


@dataclass(frozen=True)
class Breakdown:
    """One rank's step: its seconds by the host's clock, by part (`PARTS`: they add up), and what it sent."""

    total: float
    seconds: dict[str, float]
    transfers: list[Transfer]


def measured_step(training: Training, watch: Stopwatch | None = None) -> Breakdown:
    """Runs a step with its parts measured, by `watch` if it is given; collective.

    The bubble is what the simulated schedule, fed with the stages' own seconds of this step, says that this
    stage idles: it is taken out of its waits, and what remains of them is communication that was not hidden.
    """
    watch = watch or Stopwatch(training.mesh.device)
    wire = Wire(training.mesh, watch.part)
    training.meet()
    listeners = training.mesh.listeners
    with wire:
        listeners.add(watch)
        started = perf_counter()
        watch.mark()
        training.work()
        watch.mark()
        training.wait()
        total = perf_counter() - started
        listeners.remove(watch)
    totals = watch.totals()
    seconds = dict.fromkeys(PARTS, 0.0) | {name: totals[name] for name in totals if name in PARTS}
    seconds["compute"] = sum(totals[op.value] for op in COMPUTE)
    left = _idle(training, watch)
    for name in IDLE_IN:
        taken = min(left, seconds[name])
        seconds[name] -= taken
        seconds["bubble"] += taken
        left -= taken
    return Breakdown(total, seconds, wire.transfers())


def _idle(training: Training, watch: Stopwatch) -> float:
    """Seconds that the simulated schedule leaves this stage without work; collective over the pipeline."""
    pp = training.mesh.pp
    if pp.size == 1:
        return 0.0
    plan = training.train_step.plans[training.config.num_microbatches]
    timeline = simulated(plan, watch, pp, training.mesh.device)
    return max(spans[-1].end for spans in timeline.spans) - timeline.busy[pp.rank]


def simulated(plan: Plan, watch: Stopwatch, pp: Group, device: torch.device) -> Timeline:
    """The plan with every stage's own mean seconds of a measured step; collective over the pipeline."""
    chunks = range(len(plan.placement[pp.rank]))
    own = torch.tensor([[[watch.mean_of(op, chunk) for op in COMPUTE] for chunk in chunks]], device=device)
    of_all = all_gather(own, pp).tolist()  # [ranks, chunks, ops]
    placed = (plan.where[stage] for stage in range(plan.stages))
    forward, whole, inputs, weights = zip(*(of_all[rank][chunk] for rank, chunk in placed), strict=True)
    backward = [max(parts[0], parts[1] + parts[2]) for parts in zip(whole, inputs, weights, strict=True)]
    return simulate(plan, forward, backward, weight=weights)


def beside_each_other(training: Training) -> Timeline:
    """A measured step between the rows of its simulation: two rows for each rank of the pipeline.

    Collective over the pipeline.
    """
    plan, pp, watch = (
        training.train_step.plans[training.config.num_microbatches],
        training.mesh.pp,
        Stopwatch(training.mesh.device),
    )
    measured_step(training, watch)
    actions = [[action for action in own if action.op in COMPUTE] for own in plan.actions]
    own = torch.zeros(1, max(map(len, actions)), 2, dtype=torch.float64, device=training.mesh.device)
    times = [[watch.between(0, first), watch.between(0, last)] for _, first, last in watch.spans]
    own[0, : len(times)] = torch.tensor(times, dtype=torch.float64)
    gathered = all_gather(own, pp).cpu()
    gathered -= gathered[:, 0, 0].min()  # the clock starts with the first action, as the simulation's
    expected = simulated(plan, watch, pp, training.mesh.device)
    rows = []
    for rank, held in enumerate(actions):
        rows.append(tuple(span for span in expected.spans[rank] if span.action.op in COMPUTE))
        rows.append(
            tuple(
                Span(action, start, end)
                for action, (start, end) in zip(held, gathered[rank].tolist(), strict=False)
            )
        )
    twice = Plan(
        tuple(own for own in plan.actions for _ in (0, 1)),
        tuple(own for own in plan.placement for _ in (0, 1)),
    )
    return Timeline(twice, tuple(rows))


def shares(steps: list[Breakdown], mesh: Mesh) -> dict[str, float]:
    """Each part's share of the steps, in per cent, of all ranks together; collective."""
    own = [sum(step.total for step in steps), *(sum(step.seconds[part] for step in steps) for part in PARTS)]
    total, *parts = all_reduce(
        torch.tensor(own, dtype=torch.float64, device=mesh.device), mesh.world
    ).tolist()
    return {part: 100 * seconds / total for part, seconds in zip(PARTS, parts, strict=True)}
