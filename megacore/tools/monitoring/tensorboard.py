"""Writes TensorBoard's event files. If that fails, it says so once and training goes on."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megacore.config import Config
from megacore.tools.monitoring.tags import tagged, unmatched
from megacore.train.logs import Monitor


class Board(Monitor):
    """Scalars for TensorBoard."""

    writer: Any = None

    def open(self, config: Config, folder: Path, first_step: int, say: Callable[[str], None]) -> None:
        """Removes what was written of `first_step` and later steps.

        `say` gets the one line about a failure.
        """
        self.say, self.patterns, self.seen = say, config.log.figures, set[str]()
        self.hook = threading.excepthook
        threading.excepthook = self._hear
        self._try(lambda: self._open(folder / "tensorboard", first_step))

    def record(self, figures: dict[str, Any]) -> None:
        """Writes the numbers among a step's figures."""
        self.seen |= {name for name, figure in figures.items() if not isinstance(figure, list)}
        if self.writer is not None:
            self._try(lambda: self._add(figures))

    def close(self, *, quietly: bool = False) -> None:
        """Writes what is left and ends. With `quietly` a failure is not reported."""
        writer, self.writer = self.writer, None
        if quietly:
            self.say = lambda line: None
        if writer is not None:
            self._try(writer.close)
            if self.seen and (unused := unmatched(self.seen, self.patterns)):
                self.say(f"WARNING: log.figures: no figure of this run is named by {' '.join(unused)}")
        if threading.excepthook == self._hear:
            threading.excepthook = self.hook

    def _open(self, folder: Path, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # seconds to import: only where it is wanted

        self.writer = SummaryWriter(str(folder), purge_step=first_step)

    def _add(self, figures: dict[str, Any]) -> None:
        for tag, value in tagged(figures, self.patterns).items():
            self.writer.add_scalar(tag, value, figures["step"])

    def _try(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # any error of the libraries below
            self.writer = None
            self.say(
                f"WARNING: TensorBoard's files cannot be written ({type(error).__name__}: {error}); "
                "training continues without them"
            )

    def _hear(self, failure: threading.ExceptHookArgs) -> None:
        """Hides tracebacks of TensorBoard's thread: the next `add_scalar` raises its error again."""
        if not type(failure.thread).__module__.startswith("tensorboard."):
            self.hook(failure)
