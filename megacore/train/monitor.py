"""What a run tells those who watch its figures, besides its own records: TensorBoard, Weights & Biases, Prometheus
(`tools/monitoring`). Whoever starts a run attaches them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the process that talks to wandb needs no torch
    from megacore.config import Config
    from megacore.distributed.mesh import Mesh
    from megacore.distributed.observer import Waits


@dataclass(frozen=True)
class Report:
    """What a logged step brings, on every rank."""

    figures: dict[str, Any]  # a line of metrics.jsonl
    by_rank: Mapping[str, Sequence[float]]  # what each rank has of its own, by name
    by_part: Mapping[str, Sequence[float]]  # seconds of each rank's step, by what they were spent on: what its monitors said (`parts`)
    saved_step: int  # of the newest checkpoint
    save_seconds: float  # that its save took


class Monitor:
    """Is told a run's figures. These methods do nothing: a monitor has those that it needs.

    A monitor that fails says so once, and training goes on without it.
    """

    def start(self, config: "Config", mesh: "Mesh") -> None:
        """Before the first step. Collective."""

    def open(self, config: "Config", folder: Path, first_step: int, say: Callable[[str], None]) -> None:
        """On rank 0, before the first record, and again if the run's `folder` was deleted. `config`: without any `auto` that the run has
        settled. `say` prints a line."""

    def record(self, figures: dict[str, Any]) -> None:
        """On rank 0: a line of metrics.jsonl."""

    def parts(self, computed: float, waits: "Waits", steps: int) -> Mapping[str, float]:
        """On every rank, before each report: seconds of this rank's step by what they were spent on, under names that all ranks have.
        `computed`: seconds a step that it worked itself. `waits`: its waits in so many `steps`."""
        return {}

    def report(self, report: Report) -> None:
        """On every rank: a logged step."""

    def validation(self, loss: float) -> None:
        """On every rank: a validation's loss, nats a token."""

    def close(self, *, quietly: bool = False) -> None:
        """On every rank, at the end; on rank 0 also before `open` is called again, `quietly` then. It may be called twice."""
