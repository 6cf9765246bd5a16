"""Shows steps on a terminal, in a line that is drawn again with each."""

import os
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column

from megacore.config import Config
from megacore.distributed.mesh import Mesh
from megacore.tools.records import in_brief
from megacore.train.callbacks import Callback


def has_terminal() -> bool:
    """Whether there is a terminal to draw on. mpirun gives rank 0 one of its own,
    wherever its output goes.
    """
    return Console().is_terminal and "OMPI_COMM_WORLD_RANK" not in os.environ


class ProgressLine(Callback):
    """The live line of rank 0. What is printed meanwhile stands above it."""

    shows_steps = True

    def __init__(self) -> None:
        self.progress: Progress | None = None

    def on_start(self, config: Config, mesh: Mesh) -> None:
        self.steps = config.train.steps

    def on_records_open(self, folder: Path, first_step: int) -> None:
        """Begin to draw."""
        self.on_end()  # if the run's folder was deleted
        self.progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=20),
            # which wraps where the terminal is narrow
            TextColumn("{task.description}", table_column=Column()),
            TimeRemainingColumn(),
            TextColumn("left"),
            console=Console(highlight=False, soft_wrap=True),
        )
        self.task = self.progress.add_task("", total=self.steps, completed=first_step - 1)
        self.progress.start()

    def on_record(self, record: dict[str, Any]) -> None:
        """Draw a logged step."""
        if self.progress is not None and "tokens_per_second" in record:
            self.progress.update(self.task, completed=record["step"], description=in_brief(record))

    def on_end(self) -> None:
        """Ends the line, and releases the terminal."""
        if self.progress is not None:
            self.progress.stop()
