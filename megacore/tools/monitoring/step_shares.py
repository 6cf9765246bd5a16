"""Where the time of a rank's steps goes: every moment is charged to one part, so
that the parts add up to the step.

On a CPU these are moments of the host. On a GPU they lie between events in the stream that computes, gaps
between kernels included.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megacore.distributed.collectives import all_reduce
from megacore.distributed.communicator import Group
from megacore.distributed.events import Listener, Operation
from megacore.pipeline.schedule import COMPUTE, Action

PHASES = {"data": "data", "optimizer step": "optimizer"}  # parts, by the phases that listeners hear of
ASIDE = "aside"  # what is no part of a step
COLOURS = {
    "compute": "#4e8ac9",
    "waiting": "#d9d9d9",
    "optimizer": "#6aa84f",
    "data": "#b8860b",
    "other": "#8a8a8a",
}
OF_AXES = ("#e6a23c", "#c0392b", "#8e7cc3", "#17a2b8", "#e5989b", "#7f4f24")  # communication
NARROW = 0.04  # of a bar, below which no number fits

Seconds = dict[str, float]  # by part


class Heard(NamedTuple):
    """What a listener is given back of an operation: over which group, its name, the other
    rank, and the shape of its tensor.
    """

    group: Group
    name: str
    peer: int
    shape: torch.Size


class StepShares(Listener):
    """Charges the steps that it hears of.

    What a rank waits for a collective longer than the rank that waits least is `waiting`, and not
    communication: others were late. Of messages between two ranks, that is what one takes longer than the
    fastest of its kind.
    """

    on_error = "raise"  # ranks compare their times after each step

    def __init__(self, device: torch.device, parts: Sequence[str], part_of: Callable[[str], str]) -> None:
        """`parts`: in order. `part_of`: the part of what goes over a group, by the group's name."""
        self.on_gpu, self.device, self.parts, self.part_of = device.type == "cuda", device, parts, part_of
        self.steps: dict[int, Seconds] = {}
        self.step, self.asides = 0, 0
        self._clear()

    def _clear(self) -> None:
        self.marks: list[tuple[Any, str]] = []  # a moment, and the part that begins there
        self.open = ["other"]
        # what was begun, or waited for, and the marks around that
        self.communicated: list[tuple[Heard, bool, int, int]] = []
        self.late: Seconds = defaultdict(float)  # waits for ranks that were late
        self.complete = False

    def on_step_begin(self, step: int, logged: bool) -> None:
        self.end_step()
        self.step = step
        self._mark()

    def on_phase(self, phase: str) -> None:
        if self.asides:
            return
        self.open[0] = PHASES.get(phase, "other")
        self._mark()
        if phase == "between steps":
            with self._aside():
                self._ask_others()
            self.complete = True

    def on_pause_begin(self, phase: str) -> None:
        self.asides += 1
        self._mark()

    def on_pause_end(self) -> None:
        self.asides -= 1
        self._mark()

    def on_action_begin(self, action: Action) -> None:
        self._begin("compute" if action.op in COMPUTE else "other")

    def on_action_end(self, action: Action) -> None:
        self._end()

    def on_host_wait_begin(self, what: str, thread: int | None = None) -> None:
        self._begin("data" if what == "data" else "other")

    def on_host_wait_end(self, what: str) -> None:
        self._end()

    def on_collective(self, operation: Operation) -> Heard:
        shape = operation.tensors[0].shape if operation.tensors else torch.Size()
        heard = Heard(operation.group, operation.name, operation.peer, shape)
        self.on_wait_begin(heard)
        return heard

    def on_started(self, token: Heard) -> None:
        self._done(token, waited=False)

    def on_wait_begin(self, token: Heard) -> None:
        self.began = self._begin(self.part_of(token.group.name))

    def on_wait_end(self, token: Heard) -> None:
        self._done(token, waited=True)

    def _done(self, heard: Heard, *, waited: bool) -> None:
        ended = self._end()
        if not self.asides:
            self.communicated.append((heard, waited, self.began, ended))

    def _begin(self, part: str) -> int:
        self.open.append(part)
        return self._mark()

    def _end(self) -> int:
        self.open.pop()
        return self._mark()

    def _mark(self) -> int:
        """From here on time is the innermost open part's; returns the number of the mark."""
        moment: Any = torch.cuda.Event(enable_timing=True) if self.on_gpu else perf_counter()
        if self.on_gpu:
            moment.record()
        self.marks.append((moment, ASIDE if self.asides else self.open[-1]))
        return len(self.marks) - 1

    @contextmanager
    def _aside(self) -> Iterator[None]:
        self.on_pause_begin("")
        try:
            yield
        finally:
            self.on_pause_end()

    def _between(self, first: int, last: int) -> float:
        """Seconds from one mark to another. The device must have passed them."""
        a, b = self.marks[first][0], self.marks[last][0]
        return float(a.elapsed_time(b) / 1e3 if self.on_gpu else b - a)

    def _ask_others(self) -> None:
        """Finds out by how much others were late.

        Collective: all ranks hear of the end of a step. The ranks of a group have begun the same operations
        over it in one order.
        """
        self._wait_for_device()
        alike: dict[tuple[Heard, bool], list[float]] = defaultdict(list)
        together: dict[str, tuple[Group, list[float]]] = {}
        for heard, waited, first, last in self.communicated:
            if heard.name in ("send", "receive"):
                alike[heard, waited].append(self._between(first, last))
            else:
                together.setdefault(heard.group.key, (heard.group, []))[1].append(self._between(first, last))
        for (heard, _), times in alike.items():
            self.late[self.part_of(heard.group.name)] += sum(times) - len(times) * min(times)
        for group, times in together.values():
            own = torch.tensor(times, dtype=torch.float64, device=self.device)
            self.late[self.part_of(group.name)] += float(
                (own - all_reduce(own.clone(), group, dist.ReduceOp.MIN)).sum()
            )

    def _wait_for_device(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def end_step(self) -> None:
        """Charges the step that was begun, if it was done."""
        if self.complete:
            self._mark()
            self._wait_for_device()
            seconds = dict.fromkeys(self.parts, 0.0)
            for at, (_, part) in enumerate(self.marks[:-1]):
                if part != ASIDE:
                    seconds[part] += self._between(at, at + 1)
            for part, late in self.late.items():
                seconds[part] -= late
                seconds["waiting"] += late
            self.steps[self.step] = seconds
        self._clear()


def table(steps: Mapping[int, Seconds], title: str) -> str:
    """The mean step's parts, in milliseconds and per cent; parts that take no time are left out."""
    rows = {
        part: sum(seconds[part] for seconds in steps.values()) / len(steps)
        for part in next(iter(steps.values()))
    }
    total = sum(rows.values())
    lines = [
        f"{part:<{WIDTH}} {1e3 * own:>10.2f} ms {own / total:>7.1%}" for part, own in rows.items() if own
    ]
    return "\n".join([title, *lines, f"{'a step':<{WIDTH}} {1e3 * total:>10.2f} ms {1:>7.1%}"])


WIDTH = 24  # of the names in the table


def draw(steps: Mapping[int, Seconds], title: str, path: str | Path) -> None:
    """Writes a picture: a bar a step, cut into its parts. `OSError` says why it cannot be written."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    parts = [part for part in next(iter(steps.values())) if any(seconds[part] for seconds in steps.values())]
    longest = max(sum(seconds.values()) for seconds in steps.values())
    figure = Figure(figsize=(11, 1.6 + 0.45 * len(steps)), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)  # no display, no global state
    axes = figure.add_subplot()
    names = [str(step) for step in steps]
    left = [0.0] * len(steps)
    of_axes = iter(OF_AXES * len(parts))
    for part in parts:
        widths = [seconds[part] for seconds in steps.values()]
        colour = COLOURS.get(part) or next(of_axes)
        bars = axes.barh(
            names, widths, left=left, height=0.7, label=part, color=colour, edgecolor="white", linewidth=0.5
        )
        shares = [
            w / sum(s.values()) if w > NARROW * longest else 0
            for w, s in zip(widths, steps.values(), strict=True)
        ]
        axes.bar_label(
            bars, [f"{share:.0%}" if share else "" for share in shares], label_type="center", fontsize=8
        )
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    axes.set_ylabel("step")
    axes.tick_params(axis="y", length=0)
    axes.xaxis.set_major_formatter(EngFormatter("s"))
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.set_title(title, loc="left", fontsize=11)
    figure.legend(loc="outside lower left", ncols=min(len(parts), 6), frameon=False, fontsize=9)
    figure.savefig(path)
