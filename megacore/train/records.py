"""The seam to a run's records, which rank 0 writes (`megacore.tools.records`)."""

from collections.abc import Callable
from typing import Any, Protocol

from megacore.config import Config
from megacore.distributed.mesh import Mesh
from megacore.errors import LogError

Record = dict[str, Any]  # a line of metrics.jsonl or skipped.jsonl


class Records(Protocol):
    """The files of a run's folder. Every method raises `LogError` if it cannot write."""

    def open(self, config: Config, mesh: Mesh, first_step: int) -> None:
        """Make the folder and open the files; records from `first_step` on are dropped."""

    def write(self, record: Record) -> None:
        """Add a line to metrics.jsonl."""

    def write_skipped(self, record: Record) -> None:
        """Add a line to skipped.jsonl."""

    def rewind(self, first_step: int) -> None:
        """Drop the records from `first_step` on."""

    def close(self) -> None:
        """Close the files."""


class RecordWriter:
    """Writes records if this rank has any.

    A record that cannot be written must not be lost in silence, but one rank alone cannot end a run. So the
    first error is kept in `error`: the trainer asks all ranks to save a checkpoint and end.
    """

    def __init__(self, records: Records | None, mesh: Mesh) -> None:
        self.records = records
        self.mesh = mesh
        self.error = ""  # why records cannot be written any more

    def open(self, config: Config, first_step: int) -> None:
        """Open the files. Raises `LogError`: nothing is lost yet."""
        if self.records is not None:
            self.records.open(config, self.mesh, first_step)

    def write(self, record: Record) -> None:
        """Add a line to metrics.jsonl."""
        if self.records is not None:
            self._try(self.records.write, record)

    def write_skipped(self, record: Record) -> None:
        """Add a line to skipped.jsonl."""
        if self.records is not None:
            self._try(self.records.write_skipped, record)

    def rewind(self, first_step: int) -> None:
        """Drop the records from `first_step` on."""
        if self.records is not None:
            self._try(self.records.rewind, first_step)

    def close(self) -> None:
        """Close the files."""
        if self.records is not None:
            self.records.close()

    def _try(self, write: Callable[[Any], None], argument: Any) -> None:
        try:
            write(argument)
        except LogError as error:
            if self.error:
                return
            self.error = error.wrong
            self.mesh.print(
                f"ERROR: the run's records cannot be written any more ({error.wrong}): it saves a "
                "checkpoint and ends"
            )
