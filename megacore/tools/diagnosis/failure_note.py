"""The file in a run's folder that records why its last start failed, and which hosts were lost.

Rank 0 empties the file at every start, and marks it with an identifier of this start. Whoever failed in an
earlier start and writes late finds another identifier, and leaves the file alone. Standard library only,
because the heartbeat process uses it.
"""

import contextlib
import json
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from megacore.errors import shown
from megacore.files import write_whole

FAILURE = "failure.json"
WRITE_SECONDS = 2.0  # that a write may take


class Weight(IntEnum):
    """How much the author of a reason knows. A reason replaces those of less weight."""

    NONE = 0  # the file has no reason yet
    CUT_OFF = 1  # a host that does not hear rank 0's host: either of the two may be the one that is cut off
    FIRST = 2  # the first rank that reports why it ends
    DECISION = 3  # rank 0's host, which hears all others


@dataclass(frozen=True)
class FailureNote:
    """The file as one start of a run writes it. What cannot be written is not: the reason is also printed."""

    folder: Path
    start: str  # the identifier of this start, the same on all ranks

    def begin(self) -> None:
        """Empty the file at the start of a run."""
        with contextlib.suppress(OSError):
            self._write("", [], Weight.NONE)

    def add(self, reason: str, hosts: Iterable[str] = (), weight: Weight = Weight.FIRST) -> None:
        """Record a reason, unless one of this weight or more is there, and add hosts that were lost.

        A file system that hangs, which may be the failure itself, is not waited for.
        """
        writer = threading.Thread(target=self._add, args=(reason, list(hosts), weight), daemon=True)
        writer.start()
        writer.join(WRITE_SECONDS)

    def _add(self, reason: str, hosts: list[str], weight: Weight) -> None:
        try:
            note = json.loads((self.folder / FAILURE).read_text(encoding="utf-8"))
            if note["start"] != self.start:
                return
            all_hosts = [str(host) for host in dict.fromkeys([*note["hosts"], *hosts])]
            is_better = int(note["weight"]) < weight
        except (OSError, ValueError, KeyError, TypeError):
            return  # deleted, not shared with this host, or overwritten by something else
        if is_better:
            note |= {"reason": shown(reason), "weight": weight}
        if is_better or all_hosts != note["hosts"]:
            with contextlib.suppress(OSError):
                self._write(note["reason"], all_hosts, note["weight"])

    def _write(self, reason: str, hosts: list[str], weight: int) -> None:
        values = {"start": self.start, "reason": reason, "hosts": hosts, "weight": int(weight)}
        write_whole(self.folder / FAILURE, json.dumps(values) + "\n")
