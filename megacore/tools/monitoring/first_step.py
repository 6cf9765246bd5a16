"""Says how far a run's first step is, if it takes long: until it is done nothing
else tells how long a step takes.
"""

import time

from megacore.config import Config
from megacore.distributed.mesh import Mesh
from megacore.pipeline.schedule import Action, Op
from megacore.tools.stop_request import StopRequest
from megacore.train.callbacks import Callback
from megacore.train.step import TrainStep

LONG_SECONDS = 30.0  # between lines
BACKWARDS = (Op.BACKWARD, Op.BACKWARD_INPUT)


class FirstStep(Callback):
    """Prints a line now and then, behind the backward of a microbatch.

    It waits for no device: a GPU may not have done yet what was launched.
    """

    def on_built(self, train_step: TrainStep) -> None:
        """Count the backwards of this rank's part of a step."""
        self.backwards = train_step.config.num_microbatches * len(train_step.stages)
        self.done = 0
        self.what = "done" if train_step.mesh.device.type == "cpu" else "launched"
        self.step: int | None = None
        self.last_line = 0.0

    def on_step_begin(self, step: int, logged: bool) -> None:
        """Begins with the first step that it hears of."""
        if self.step is None:
            self.step, self.last_line = step, time.monotonic()

    def on_action_end(self, action: Action) -> None:
        """Counts backwards."""
        if action.op not in BACKWARDS:
            return
        self.done += 1
        if self.done < self.backwards and (now := time.monotonic()) - self.last_line > LONG_SECONDS:
            self.last_line = now
            print(
                f"step {self.step}: {self.done} of {self.backwards} backwards of microbatches {self.what} "
                "on rank 0",
                flush=True,
            )


class StartUp(Callback):
    """Calls `StopRequest.begin` at the first step, from which on a request to stop saves a checkpoint.

    A first step that compiles the model takes minutes, and counts as start-up.
    """

    def __init__(self, stop: StopRequest) -> None:
        self.stop = stop
        self.steps = 0  # that have begun

    def on_start(self, config: Config, mesh: Mesh) -> None:
        self.start_up_steps = 1 if config.train.compile is True else 0

    def on_step_begin(self, step: int, logged: bool) -> None:
        self.steps += 1
        if self.steps > self.start_up_steps:
            self.stop.begin()

    def on_pause_begin(self, phase: str) -> None:
        """A validation or a save after the only step."""
        if self.steps:
            self.stop.begin()
