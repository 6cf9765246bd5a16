"""The seam for those who watch a run's figures: monitors, which whoever starts a run
attaches (`tools/monitoring`).

The run's records, metrics.jsonl among them, are kept by one, and the lines on the console by another. A run
goes on without the others,
but not without its records: see `Monitors`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megacore.config import Config
from megacore.errors import LogError, UserError
from megacore.records import FIGURES

if TYPE_CHECKING:  # the process that talks to wandb needs no torch
    from torch import nn

    from megacore.distributed.mesh import Mesh
    from megacore.distributed.events import Slow, Waits
    from megacore.train.step import TrainStep


@dataclass(frozen=True)
class Report:
    """What a logged step brings, on every rank."""

    figures: dict[str, Any]  # a line of metrics.jsonl
    by_rank: Mapping[str, Sequence[float]]  # what each rank has of its own, by name
    # seconds of each rank's step, by what they were spent on: what its monitors said (`parts`)
    by_part: Mapping[str, Sequence[float]]
    stragglers: Mapping[int, "Slow"]  # by rank: those that hold up the others
    saved_step: int  # of the newest checkpoint
    save_seconds: float  # that its save took


class Monitor:
    """Is told a run's figures. These methods do nothing: a monitor has those that it needs.

    A monitor that fails at a figure, a record or a report is named once, and training continues without it.
    Only a `LogError` ends the run.
    """

    shows_steps = False  # whether it shows steps on the terminal, in place of lines

    def start(self, config: Config, mesh: "Mesh") -> None:
        """Before the first step. Collective."""

    def built(self, step: "TrainStep") -> None:
        """On every rank, once the model and its engine are there."""

    def open(self, config: Config, folder: Path, first_step: int, say: Callable[[str], None]) -> None:
        """On rank 0, before the first record, and again if the run's `folder` was deleted.

        `config`: without any `auto` that the run has settled. `say` prints a line.
        """

    def record(self, figures: dict[str, Any]) -> None:
        """On rank 0: a line of metrics.jsonl."""

    def skipped(self, record: dict[str, Any]) -> None:
        """On rank 0: a step that was not taken, with its `first_sample` and
        `last_sample` in the run's order.
        """

    def reopen(self, first_step: int) -> None:
        """On rank 0: the run went back, and does the steps from `first_step` on again."""

    def parts(self, computed: float, waits: "Waits", steps: int) -> Mapping[str, float]:
        """On every rank, before each report: seconds of this rank's step by what they were spent
        on, under names that all ranks have. `computed`: seconds a step that it worked itself.
        `waits`: its waits in so many `steps`.
        """
        return {}

    def figures(
        self, figures: Mapping[str, Any], stages: Sequence["nn.Module"]
    ) -> Mapping[str, float | list[float]]:
        """On every rank, for each report: further figures of a logged step, from those there are and from
        this rank's stages of the model. Lists of numbers are for metrics.jsonl alone. All ranks answer alike.
        Where that needs others' numbers, they communicate over the mesh of `start`; then none may fail alone.
        """
        return {}

    def report(self, report: Report) -> None:
        """On every rank: a logged step."""

    def validation(self, loss: float) -> None:
        """On every rank: a validation's loss, nats a token."""

    def close(self, *, quietly: bool = False) -> None:
        """On every rank, at the end; on rank 0 also before `open` is called again, `quietly` then.

        It may be called twice.
        """


class Monitors(list[Monitor]):
    """All who watch a run, on one rank."""

    def __init__(self, monitors: Sequence[Monitor], say: Callable[[str], None]) -> None:
        """`say` prints a line."""
        super().__init__(monitors)
        self.say = say
        # why the run's records cannot be written any more: the run saves a checkpoint and ends
        self.broken = ""

    def open(self, config: Config, folder: Path, first_step: int) -> None:
        """Calls the method of `Monitor` on each.

        Raises the `UserError` of one that says what the user can mend, as records do.
        """
        for monitor in tuple(self):
            try:
                monitor.open(config, folder, first_step, self.say)
            except UserError:
                raise
            except Exception as error:
                self._lose(monitor, error)

    def tell(self, event: Callable[..., None], *arguments: Any) -> None:
        """Calls a method of `Monitor` on each."""
        for monitor in tuple(self):
            with self.surviving(monitor):
                getattr(monitor, event.__name__)(*arguments)

    def add_figures(self, figures: dict[str, Any], stages: Sequence["nn.Module"]) -> None:
        """Adds those that monitors have of a logged step to `figures`."""
        for monitor in tuple(self):
            with self.surviving(monitor):
                found = monitor.figures(figures, stages)
                more = {
                    name: [*map(float, figure)] if isinstance(figure, list) else float(figure)
                    for name, figure in found.items()
                }
                if taken := sorted(more.keys() & {*FIGURES, *figures}):
                    raise ValueError(f"{taken[0]} is another figure's name")
                figures.update(more)

    def close(self) -> None:
        """Closes all."""
        for monitor in tuple(self):
            with self.surviving(monitor):
                monitor.close()

    @contextmanager
    def surviving(self, monitor: Monitor) -> Iterator[None]:
        """A context for what a monitor does. If it fails, that is said, and it is no longer among them."""
        try:
            yield
        except LogError as error:
            if not self.broken:
                self.broken = error.wrong
                self.say(
                    f"ERROR: the run's records cannot be written any more ({error.wrong}): it saves a "
                    "checkpoint and ends"
                )
        except Exception as error:  # whatever a monitor of the user's own does wrong: no run ends for it
            self._lose(monitor, error)

    def _lose(self, monitor: Monitor, error: Exception) -> None:
        if monitor in self:  # else it has failed before, at the same event
            self.remove(monitor)
            self.say(
                f"WARNING: {type(monitor).__name__} failed, and the run continues without it: "
                f"{type(error).__name__}: {error}"
            )
