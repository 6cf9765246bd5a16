"""Shows steps on a terminal, in a line that is drawn again with each."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column

from megacore.config import Config
from megacore.tools.records import in_brief
from megacore.train.logs import Monitor


def has_terminal() -> bool:
    """Whether there is a terminal to draw on. mpirun gives rank 0 one of its own,
    wherever its output goes.
    """
    return Console().is_terminal and "OMPI_COMM_WORLD_RANK" not in os.environ


class ProgressLine(Monitor):
    """The live line of rank 0. What is printed meanwhile stands above it."""

    shows_steps = True

    def __init__(self) -> None:
        self.progress: Progress | None = None

    def open(self, config: Config, folder: Path, first_step: int, say: Callable[[str], None]) -> None:
        """Begins to draw."""
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
        self.task = self.progress.add_task("", total=config.train.steps, completed=first_step - 1)
        self.progress.start()

    def record(self, figures: dict[str, Any]) -> None:
        """Draws a logged step."""
        if self.progress is not None and "tokens_per_second" in figures:
            self.progress.update(self.task, completed=figures["step"], description=in_brief(figures))

    def close(self, *, quietly: bool = False) -> None:
        """Ends the line, and releases the terminal."""
        if self.progress is not None:
            self.progress.stop()
