"""Writes TensorBoard's event files. If that fails, it says so once and training goes on."""

import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megacore.config import Config
from megacore.tools.monitoring.tags import tagged, unmatched
from megacore.train.callbacks import Callback

if TYPE_CHECKING:
    from megacore.distributed.mesh import Mesh


class Board(Callback):
    """Scalars for TensorBoard."""

    writer: Any = None

    def on_start(self, config: Config, mesh: "Mesh") -> None:
        self.mesh = mesh
        self.patterns = config.log.figures
        self.seen = set[str]()  # names of metrics
        self.hook = threading.excepthook

    def on_records_open(self, folder: Path, first_step: int) -> None:
        """Begin to write; TensorBoard hides what it has of `first_step` and later steps."""
        if self.writer is not None:  # the folder was deleted with its files
            with suppress(Exception):
                self.writer.close()
        threading.excepthook = self._hide_traceback
        self._try(lambda: self._open(folder / "tensorboard", first_step))

    def on_record(self, record: dict[str, Any]) -> None:
        """Write the numbers of a step or a validation."""
        self.seen |= {name for name, value in record.items() if not isinstance(value, list)}
        if self.writer is not None:
            self._try(lambda: self._add(record))

    def on_end(self) -> None:
        """Write what is left."""
        writer, self.writer = self.writer, None
        if writer is not None:
            self._try(writer.close)
            if self.seen and (unused := unmatched(self.seen, self.patterns)):
                self.mesh.print(f"WARNING: log.figures: no figure of this run is named by {' '.join(unused)}")
        if threading.excepthook == self._hide_traceback:
            threading.excepthook = self.hook

    def _open(self, folder: Path, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # seconds to import: only where it is wanted

        self.writer = SummaryWriter(str(folder), purge_step=first_step)

    def _add(self, record: dict[str, Any]) -> None:
        for tag, value in tagged(record, self.patterns).items():
            self.writer.add_scalar(tag, value, record["step"])

    def _try(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # any error of the libraries below
            self.writer = None
            self.mesh.print(
                f"WARNING: TensorBoard's files cannot be written ({type(error).__name__}: {error}); "
                "training continues without them"
            )

    def _hide_traceback(self, failure: threading.ExceptHookArgs) -> None:
        """Hide tracebacks of TensorBoard's thread: the next `add_scalar` raises its error again."""
        if not type(failure.thread).__module__.startswith("tensorboard."):
            self.hook(failure)
