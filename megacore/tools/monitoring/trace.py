"""A trace of one rank's steps by PyTorch's profiler, in Chrome's format, with the schedule's
actions and the collectives by name.
"""

import gzip
import json
import os
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from megacore.distributed.axes import place_text
from megacore.distributed.events import Listener, Operation
from megacore.distributed.mesh import Mesh
from megacore.pipeline.schedule import TRANSFERS, Action
from megacore.tools.output_files import replaced

MOST_EVENTS = 200_000  # of a GPU's allocator, that its snapshot keeps
STEP = "ProfilerStep#"  # by this name other tools find steps


class Trace(Listener):
    """Records from its construction on.

    Ranges of the trace lie within each other: a step, its phases, what a phase is made of.
    """

    def __init__(self, mesh: Mesh, memory: bool) -> None:
        self.mesh, self.memory, self.on_gpu = mesh, memory, mesh.device.type == "cuda"
        self.ranges: list[record_function] = []
        self.asides, self.recording = 0, True
        if memory and self.on_gpu:
            torch.cuda.memory._record_memory_history(max_entries=MOST_EVENTS, stacks="python")
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else it says on stderr that it begins and ends
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.on_gpu else [])]
        self.profiler = profile(activities=activities, profile_memory=memory)
        self.profiler.start()

    def on_step_begin(self, step: int, logged: bool) -> None:
        self._end(0)
        self._begin(f"{STEP}{step}")

    def on_phase(self, phase: str) -> None:
        if not self.asides:
            self._end(1)
            self._begin(phase)

    def on_pause_begin(self, phase: str) -> None:
        self.asides += 1
        self._begin(phase)

    def on_pause_end(self) -> None:
        self.asides -= 1
        self._end(len(self.ranges) - 1)

    def on_action_begin(self, action: Action) -> None:
        text = action.op.value.replace("_", " ")
        if action.microbatch >= 0:
            text += f" of microbatch {action.microbatch}, chunk {action.chunk}"
        self._begin(f"{text}, rank {action.peer} of pp" if action.op in TRANSFERS else text)

    def on_action_end(self, action: Action) -> None:
        self._end(len(self.ranges) - 1)

    def on_host_wait_begin(self, what: str, thread: int | None = None) -> None:
        self._begin(f"wait for {what}")

    def on_host_wait_end(self, what: str) -> None:
        self._end(len(self.ranges) - 1)

    def on_collective(self, operation: Operation) -> str:
        peer = f" with rank {operation.peer}" if operation.peer >= 0 else ""
        name = f"{operation.name} over {operation.group.name}{peer}"
        self._begin(name)
        return name

    def on_started(self, token: str) -> None:
        self._end(len(self.ranges) - 1)

    def on_wait_begin(self, token: str) -> None:
        self._begin(f"wait for {token}")

    def on_wait_end(self, token: str) -> None:
        self._end(len(self.ranges) - 1)

    def _begin(self, name: str) -> None:
        if self.recording:
            self.ranges.append(record_function(name))
            self.ranges[-1].__enter__()

    def _end(self, left: int) -> None:
        """Ends the innermost ranges but `left`."""
        while len(self.ranges) > left:
            self.ranges.pop().__exit__(None, None, None)

    def stop(self) -> None:
        """Ends the recording."""
        self._end(0)
        self.recording = False  # it may still hear of what begins now
        self.profiler.stop()

    def write(self, stem: str) -> list[str]:
        """Writes the trace, and a GPU's memory; returns the paths, which begin with `stem`."""
        paths = [f"{stem}.trace.json.gz"]
        with replaced(paths[0]) as aside:
            self.profiler.export_chrome_trace(aside)
            with gzip.open(aside, "rt", encoding="utf-8") as file:
                found = json.load(file)
            self._complete(found)
            with gzip.open(aside, "wt", compresslevel=3, encoding="utf-8") as file:
                json.dump(found, file)
        if self.memory and self.on_gpu:
            paths.append(f"{stem}.memory.pickle")
            with replaced(paths[1]) as aside:
                torch.cuda.memory._dump_snapshot(aside)
            torch.cuda.memory._record_memory_history(enabled=None)
        return paths

    def _complete(self, found: dict[str, Any]) -> None:
        """Adds what the profiler does not know: who this process is, and its memory as a curve."""
        place, mesh, events = self.mesh.place, self.mesh, found["traceEvents"]
        found.setdefault(
            "distributedInfo", {"backend": mesh.backend, "rank": place.rank, "world_size": place.world_size}
        )
        name = f"rank {place.rank} ({place_text(place.rank, mesh.sizes, mesh.axes)})"
        for event in events:
            if event.get("name") == "process_name" and event.get("pid") == os.getpid():
                event["args"]["name"] = name
        for event in [event for event in events if event.get("name") == "[memory]"]:
            numbers = event["args"]
            device = f"GPU {numbers['Device Id']}" if numbers["Device Type"] else "CPU"
            allocated = {"bytes": numbers["Total Allocated"]}
            events.append(
                {
                    "ph": "C",
                    "name": f"allocated, {device}",
                    "pid": event["pid"],
                    "ts": event["ts"],
                    "args": allocated,
                }
            )
