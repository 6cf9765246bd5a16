"""Preflight's part in ranks that a launcher has started: one rank of every machine tells rank 0 its
facts, then all try the links.

The facts go through the store in which ranks meet. Nobody waits there for anybody but rank 0: a machine that
does not come, or that is broken, is named and does not hide the others.
"""

import contextlib
import json
import secrets
import shutil
import signal
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megacore.distributed.rank_info import RankInfo
from megacore.errors import ConfigError
from megacore.tools.preflight.facts import Question, facts
from megacore.tools.preflight.host_report import readable
from megacore.tools.preflight.patience import Count, patience, say
from megacore.tools.settings.load import load

if TYPE_CHECKING:
    from torch.distributed import Store

# for a machine to look at itself once its rank has come, and to look who else has
FACTS_SECONDS, LOOK_SECONDS = 10.0, 10.0
VERDICT_SECONDS = 30.0  # for the hang watchdog to judge, after which a rank ends, whatever holds it


class Meeting:
    """What ranks tell each other before they have a mesh."""

    def __init__(self, place: RankInfo) -> None:
        from megacore.distributed.rendezvous import meet

        self.place, come = place, patience(place.world_size)
        self.facts_seconds = come + FACTS_SECONDS  # from when rank 0 has come
        try:
            store = meet(
                place, timedelta(seconds=come + self.facts_seconds + LOOK_SECONDS), timedelta(seconds=come)
            )
        except TimeoutError as error:
            raise ConfigError(
                "preflight",
                f"rank {place.rank} on {socket.gethostname()}: {error}",
                "the first host's name and port",
            ) from None
        assert store is not None
        self.store: Store = store
        self.came: dict[int, float] = {}  # by this machine's clock, when a rank's first word came

    def ask(self, question: Question, folder: Path) -> tuple[dict[str, dict[str, Any]], dict[str, int]]:
        """On rank 0 the facts of all machines (`judge.judge`), and their slots; nothing on the others."""
        place, store = self.place, self.store
        if place.rank == 0:
            store.set("preflight/name", question.name)
            threading.Thread(target=self._listen, daemon=True).start()
        question = replace(question, name=store.get("preflight/name").decode())
        mine = folder / question.name
        if place.local_rank == 0:
            store.set(f"preflight/clock/{place.rank}", repr(time.time()))
            with contextlib.suppress(OSError):  # the facts will say it
                mine.mkdir(parents=True, exist_ok=True)
                (mine / f"{place.rank}.here").touch()
            found = facts(question, str(place.rank), place.local_world_size)
            store.set(f"preflight/facts/{place.rank}", json.dumps(found | {"slots": place.local_world_size}))
        else:
            store.set(f"preflight/facts/{place.rank}", "null")
        told = self._gather("facts", list(range(place.world_size)), self.facts_seconds)
        leaders = [rank for rank, about in told.items() if about is not None]
        if place.rank == 0:
            store.set("preflight/look", "now")  # every machine has left its file
        if place.local_rank == 0:
            store.wait(["preflight/look"])
            store.set(
                f"preflight/seen/{place.rank}", json.dumps(sorted(path.stem for path in mine.glob("*.here")))
            )
        seen = self._gather("seen", leaders, LOOK_SECONDS)
        if place.rank != 0:
            return {}, {}
        hosts, slots = {}, {}
        for rank in leaders:
            about = told[rank]
            ahead = float(store.get(f"preflight/clock/{rank}")) - self.came[rank]
            if "log_dir" in about:
                about["log_dir"]["seen"] = seen.get(rank, [])
            name = about["name"] if about["name"] not in hosts else f"{about['name']}({rank})"
            hosts[name], slots[name] = readable(about | {"ahead": ahead}, about["slots"]), about["slots"]
        if missing := [rank for rank in range(place.world_size) if rank not in told]:
            hosts[words(missing)] = {
                "unreached": f"did not come to where ranks meet within {self.facts_seconds:.0f} s"
            }
        return hosts, slots

    def agree(self, go_on: bool, folder: Path, name: str) -> bool:
        """Whether rank 0 goes on, on every rank; preflight's files are removed."""
        if self.place.rank == 0:
            self.store.set("preflight/done", f"{name} {go_on}")
        name, _, answer = self.store.get("preflight/done").decode().partition(" ")
        if self.place.local_rank == 0:
            shutil.rmtree(folder / name, ignore_errors=True)
        return answer == "True"

    def _listen(self) -> None:
        """Notes when each rank's clock has come, while rank 0 looks at its own machine."""
        pending, end = set(range(self.place.world_size)), time.monotonic() + self.facts_seconds
        while pending and time.monotonic() < end:
            for rank in [rank for rank in pending if self.store.check([f"preflight/clock/{rank}"])]:
                self.came[rank] = time.time()
                pending.discard(rank)
            pending -= {rank for rank in pending if self.store.check([f"preflight/facts/{rank}"])}
            time.sleep(0.02)

    def _gather(self, what: str, ranks: Sequence[int], seconds: float) -> dict[int, Any]:
        """On rank 0, what each rank has told in time."""
        found: dict[int, Any] = {}
        end, count = time.monotonic() + seconds, Count(len(ranks), f"ranks have told their {what}", say)
        while self.place.rank == 0 and len(found) < len(ranks) and time.monotonic() < end:
            count(len(found))
            for rank in ranks:
                if rank not in found and self.store.check([f"preflight/{what}/{rank}"]):
                    found[rank] = json.loads(self.store.get(f"preflight/{what}/{rank}"))
            time.sleep(0.02)
        return found


def words(ranks: list[int]) -> str:
    """Ranks as text."""
    return (
        f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]} ({len(ranks)} of them)"
    )


def try_links(config: str, overrides: list[str], place: RankInfo) -> dict[str, Any]:
    """Joins the mesh of the run and tries it (`links.together`); collective."""
    from megacore.distributed.init import joined, own_mistakes
    from megacore.tools.choices.partition import partitioned
    from megacore.tools.diagnosis.guardians import Guardians
    from megacore.tools.machine.device import take_device
    from megacore.tools.preflight.links import together

    def mark(done: str) -> None:
        """Tells that something is done; whatever holds this rank for too long from now on, it ends."""
        signal.setitimer(signal.ITIMER_REAL, patience(place.world_size) + VERDICT_SECONDS)
        if place.rank == 0:
            say(done)

    mark(
        f"{place.world_size} ranks meet; each thing that they do may take {patience(place.world_size):.0f} s"
    )
    loaded = load(config, [*overrides, *short(place.world_size)], place.world_size).config
    with own_mistakes():
        device, loaded = take_device(loaded, place), partitioned(loaded)
    with joined(loaded, place, device, Guardians(loaded, place, device)) as mesh:
        found = together(mesh, mark)
        signal.setitimer(signal.ITIMER_REAL, VERDICT_SECONDS)
        return found


def short(world: int) -> list[str]:
    """Overrides for a run that tries links alone: nobody wants to wait longer for a verdict.

    The watchdog judges after `patience`.
    """
    return [f"parallel.timeout_seconds={patience(world) / 2}", f"parallel.hang_seconds={patience(world) / 4}"]


def fresh_name() -> str:
    """A name for this preflight's folder in log.dir, which no other has."""
    return f".preflight-{secrets.token_hex(4)}"
