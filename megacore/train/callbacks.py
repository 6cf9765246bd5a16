"""What a run tells its callbacks: logged steps, validations, checkpoints and skipped steps.

Everything that watches a run is a callback: the console, TensorBoard, Prometheus, the profiler, a metric in a
custom model's file. `launch/pretrain.py` lists those of a run. Records (metrics.jsonl) are not a callback,
because a run must not continue without them: see `records`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megacore.config import Config
from megacore.distributed.events import Listener

if TYPE_CHECKING:  # the process that talks to wandb needs no torch
    from torch import nn

    from megacore.distributed.events import Slow, Waits
    from megacore.distributed.mesh import Mesh
    from megacore.train.step import StepResult, TrainStep


@dataclass(frozen=True)
class Report:
    """A logged step. Numbers are the same on every rank, except where a callback answers differently."""

    metrics: dict[str, Any]  # its line of metrics.jsonl
    by_rank: Mapping[str, Sequence[float]]  # measured by each rank, by the name of the metric
    # seconds of each rank's step, by what it spent them on (`Callback.step_parts`); NaN where unknown
    by_part: Mapping[str, Sequence[float]]
    stragglers: Mapping[int, "Slow"]  # ranks that hold up the others
    checkpoint_step: int  # step of the newest checkpoint
    checkpoint_seconds: float  # from the beginning of its save until it was on disk, as this rank knows it


class Callback(Listener):
    """Is told what a run does. Override the methods that you need, of this class or of `Listener`, such as
    `on_step_begin`, `on_phase` and `on_end`.

    An exception in a method is reported and, by default, ends this callback but not the run: see
    `Listener.on_error`. A callback that communicates with other ranks after `on_start` sets
    `on_error = "raise"`, because the others would wait for a rank whose callback has failed.
    """

    shows_steps = False  # whether it draws steps on the terminal, so that the console need not print them

    def on_start(self, config: Config, mesh: "Mesh") -> None:
        """Every rank, before the model is built. `config` has no `auto` left that the run decides."""

    def on_built(self, train_step: "TrainStep") -> None:
        """Every rank, when the model has its weights: drawn, read from a checkpoint, or resumed."""

    def on_records_open(self, folder: Path, first_step: int) -> None:
        """Rank 0: the run's `folder` exists, and the next record will be of `first_step` or later.

        Called again if the folder was deleted during the run, and is made anew.
        """

    def on_rewind(self, first_step: int) -> None:
        """Rank 0: the run went back to a checkpoint, and repeats the steps from `first_step` on."""

    def on_step(self, result: "StepResult[float]") -> None:
        """Every rank: the results of a step have arrived on the host, on a GPU up to two steps later."""

    def on_skipped(self, record: dict[str, Any]) -> None:
        """Rank 0: an update was skipped, or undone because the run goes back.

        `record` has the step, its loss and gradient norm, and the numbers of its first and last sample.
        """

    def on_record(self, record: dict[str, Any]) -> None:
        """Rank 0: a line was written to metrics.jsonl, of a logged step or a validation."""

    def on_log(self, report: Report) -> None:
        """Every rank: a step is logged."""

    def on_validation(self, loss: float) -> None:
        """Every rank: the loss of a validation, in nats a token."""

    def on_checkpoint(self, path: Path) -> None:
        """A checkpoint is on disk. Rank 0 is told first, other ranks when the next save begins or ends."""

    def metrics(
        self, metrics: Mapping[str, Any], stages: Sequence["nn.Module"]
    ) -> Mapping[str, float | list[float]]:
        """Every rank, at each logged step: return further metrics of the step.

        `metrics`: those of megacore. `stages`: this rank's part of the model. Return the same values on all
        ranks. Lists of numbers go to metrics.jsonl only.
        """
        return {}

    def step_parts(self, busy_seconds: float, waits: "Waits", steps: int) -> Mapping[str, float]:
        """Every rank, before each report: return seconds of this rank's step by what it spent them on.

        Return the same names on all ranks; names that rank 0 does not have are left out. `busy_seconds`: of a
        step, without waits for other ranks. `waits`: this rank's waits in the last `steps` steps.
        """
        return {}
