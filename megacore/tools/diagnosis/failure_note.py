"""The file in a run's folder that records why its last start failed, and which hosts were lost.

Rank 0 empties the file when it has locked the folder. Once the ranks have met, the file has an identifier of
this start. A process of an earlier start that writes late sees another identifier and does not write.
Standard library only, because the heartbeat process uses it.
"""

import contextlib
import json
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from megacore.errors import shown
from megacore.files import write_whole

FAILURE = "failure.json"
NOT_MET = ""  # the identifier of a start whose ranks have not met
WRITE_SECONDS = 2.0  # that a write may take


@dataclass(frozen=True)
class FailureNote:
    """The file as one start of a run writes it.

    A write that fails is ignored, because the reason is also printed.
    """

    folder: Path
    start: str  # the identifier of this start, the same on all ranks

    def begin(self) -> None:
        """Empty the file at the start of a run."""
        with contextlib.suppress(OSError):
            self._write("", [], is_decision=False)

    def add(self, reason: str, hosts: Iterable[str] = (), is_decision: bool = False) -> None:
        """Record the reason, if there is none yet, and add hosts that were lost.

        `is_decision`: the author is rank 0's host, which hears all others. Its reason and hosts replace what
        is there, and nothing is added afterwards. A file system that hangs, which may be the failure itself,
        is not waited for.
        """
        writer = threading.Thread(target=self._add, args=(reason, list(hosts), is_decision), daemon=True)
        writer.start()
        writer.join(WRITE_SECONDS)

    def _add(self, reason: str, hosts: list[str], is_decision: bool) -> None:
        try:
            note = json.loads((self.folder / FAILURE).read_text(encoding="utf-8"))
            if note["start"] != self.start or (note["is_decision"] and not is_decision):
                return
            if not is_decision:
                reason = note["reason"] or reason
                hosts = list(dict.fromkeys([*note["hosts"], *hosts]))
            reason = shown(reason)
        except (OSError, ValueError, KeyError, TypeError):
            return  # deleted, not shared with this host, or overwritten by something else
        with contextlib.suppress(OSError):
            self._write(reason, hosts, is_decision)

    def _write(self, reason: str, hosts: list[str], is_decision: bool) -> None:
        values = {"start": self.start, "reason": reason, "hosts": hosts, "is_decision": is_decision}
        write_whole(self.folder / FAILURE, json.dumps(values) + "\n")
