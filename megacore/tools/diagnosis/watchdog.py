"""The hang watchdog notices that training stands still, finds out which rank causes
it, and says so in a sentence.

Each rank has a thread that checks every few seconds whether its flight recorder has grown, and whether some
rank has raised the alarm. Both checks are too cheap to slow a step. After an alarm every rank publishes its
record through the store in which the ranks met, over a connection of its own, because the main thread's may
be waiting. One rank judges. If waiting is of no use, all end.
"""

import contextlib
import faulthandler
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch
import torch.distributed as dist

from megacore.distributed.init import START_UP
from megacore.distributed.processes import ENDED, STOPPED, process_state
from megacore.distributed.rank_info import RankInfo
from megacore.distributed.rendezvous import use_device
from megacore.tools.diagnosis.beats import QUIET
from megacore.tools.diagnosis.flight_recorder import FlightRecorder, line_of
from megacore.tools.diagnosis.hang_diagnosis import (
    Diagnosis,
    RankProcess,
    Snapshot,
    judge,
    operation_text,
    silence_text,
)
from megacore.tools.diagnosis.heartbeat_client import HeartbeatClient
from megacore.tools.diagnosis.store_kv import StoreKV
from megacore.tools.error_report import record
from megacore.tools.processes import machine

ANSWER_SECONDS = 3.0  # for a rank to publish its record
LINGER_SECONDS = 1.0  # after a verdict: the process that holds the store ends last
LAST_SECONDS = 30.0  # for all that a rank does once it is to end
TRIES = 3  # looks in a row that may fail during an alarm
STORE_SECONDS = 10.0  # what a slow store may add to a verdict
HUNG = 1  # exit status


NOBODY = RankProcess(0, "unknown", 0, "still joining")


class Watchdog:
    """One rank's watchdog, from when the rank has reached the store.

    Call `close` before the rank leaves the mesh.
    """

    def __init__(
        self,
        store: dist.Store,
        place: RankInfo,
        where: str,
        recorder: FlightRecorder,
        seconds: float,
        device: torch.device,
        folder: Path | None = None,
        heartbeats: HeartbeatClient | None = None,
    ) -> None:
        """Starts watching. A hang is `seconds` in which nothing happens.

        `where`: the rank's coordinates. `folder`: NCCL's flight recorder is written there at a hang; None
        without NCCL. `heartbeats`: knows the ranks of other hosts, and records why this rank ends.
        """
        self.heartbeats = heartbeats
        self.recorder, self.rank, self.world_size, self.seconds = (
            recorder,
            place.rank,
            place.world_size,
            seconds,
        )
        self.device, self.folder, self.local_rank = device, folder, place.local_rank
        self.main = threading.get_ident()
        self.tick = min(5.0, max(0.1, seconds / 60))
        self.seat = RankProcess(self.rank, socket.gethostname(), os.getpid(), where)
        self.notices = StoreKV(store)
        self.notices.write(f"seat/{self.rank}", asdict(self.seat))
        self.host = f"host/{machine()}"  # under which its ranks stand, which need not follow each other
        self.notices.note(self.host, self.rank)
        # rank 0's, which may hold the store: asked for while it answers
        self.first: RankProcess | None = None
        self.failed = ""
        self.asked, self.closed = threading.Event(), threading.Event()
        self.round, self.alarmed = 0, False
        self.progress, self.idle, self.first_step = -1, 0.0, 0
        self.thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self.thread.start()
        threading.Thread(target=self._watch_store, name="watchdog of the store", daemon=True).start()

    @property
    def settle_seconds(self) -> float:
        """How long the ranks of a host that is down may count as running; 0 if hosts are not watched."""
        return 0.0 if self.heartbeats is None else self.heartbeats.settle_seconds

    @property
    def patience(self) -> float:
        """Seconds for a verdict: more than twice what its judge waits."""
        return 2 * max(ANSWER_SECONDS + 2 * self.tick, self.settle_seconds) + STORE_SECONDS

    def close(self) -> None:
        """Stops watching."""
        self.closed.set()
        self.asked.set()
        self.thread.join(self.seconds)  # it may wait for the store

    def ask(self, failed: str) -> None:
        """Called when this rank has lost its peer.

        Ends the process with a verdict on the cause; returns if none comes in time.
        """
        self.failed = failed
        self.asked.set()
        self.thread.join(self.patience + ANSWER_SECONDS)

    def last_words(self, reason: str) -> None:
        """Called when this rank has failed and said why: lets the others end silently."""
        try:
            self.notices.write("words", reason)
            self.notices.write(f"alarm/{self.round}", 1)
            if self.rank == 0:
                time.sleep(LINGER_SECONDS)
        except dist.DistError as error:
            sys.stderr.write(f"the other ranks could not be told: {error}\n")

    def _watch(self) -> None:
        use_device(self.device)
        failures = 0
        while not self.closed.is_set():
            try:
                self._look()
                failures = 0
            except Exception as error:
                # this rank must not outlive the others for a mistake in here, nor hang unseen
                failures += 1
                reason = f"rank {self.rank} could not look: {type(error).__name__}: {error}"
                if failures == 1:
                    say(f"hang watchdog: {reason}")
                if self.alarmed and failures == TRIES:
                    self._report(reason, [self.rank])
                    os._exit(HUNG)
            self.asked.wait(self.tick)

    def _look(self) -> None:
        """Raises the alarm where nothing happens, and examines the run after an alarm."""
        try:
            self.alarmed = self.notices.is_there(f"alarm/{self.round}")
            if self.first is None and (first := self._seats(range(1))[0]).pid:
                self.first = first
            if (self.asked.is_set() and not self.closed.is_set()) or self._stands_still():
                self.notices.write(f"alarm/{self.round}", 1)
                self.alarmed = True
            if self.alarmed and not self.closed.is_set():
                self._examine()
        except dist.DistError:
            self._lost_store()

    def _watch_store(self) -> None:
        """Notices a store whose process was stopped, where every question waits for ever.

        Counts looks, as `_stands_still` does.
        """
        answers, late = -1, 0.0
        while not self.closed.wait(self.tick) and self.thread.is_alive():
            late = late + self.tick if self.notices.answers == answers else 0.0
            answers = self.notices.answers
            if late >= self.seconds:
                self._lost_store()
                late = 0.0

    def _stands_still(self) -> bool:
        """Whether too many looks in a row found nothing new.

        It counts looks, not seconds: a suspended job has not been idle. A rank that compiles notes nothing
        for minutes, and is not idle either.
        """
        recorder, progress = self.recorder, self.recorder.progress()
        self.first_step = self.first_step or recorder.step
        is_idle = progress == self.progress and not recorder.compilations
        self.idle = self.idle + self.tick if is_idle else 0.0
        self.progress = progress
        return self.idle >= self.seconds * (START_UP if recorder.step == self.first_step else 1.0)

    def snapshot(self) -> Snapshot:
        """This rank's record now."""
        recorder = self.recorder
        waiting, (phase, microbatch, chunk) = recorder.waiting, recorder.phase
        open_channels = list(recorder.channels.items())
        keys = {id(channel): key for key, channel in open_channels}
        channels = {}
        for key, channel in open_channels:
            notes = tuple(channel.recent)  # the main thread may add to them
            channels[key] = (notes[-1][0] if notes else 0, [operation_text(*note[1:]) for note in notes])
        return Snapshot(
            self.rank,
            recorder.step,
            phase
            if microbatch < 0
            else f"{phase} of microbatch {microbatch}" + (f", chunk {chunk}" if chunk else ""),
            line_of(recorder.worker or self.main),
            self.idle,
            None if waiting is None or id(waiting) not in keys else (keys[id(waiting)], waiting.wanted),
            channels,
            self._processes(),
            None if recorder.device is None else (recorder.device.look(), recorder.device.standing()),
            self.failed,
            recorder.compiling_seconds(),
        )

    def _processes(self) -> dict[str, str]:
        """The state of every rank's process on this host now."""
        return {
            str(seat.rank): process_state(seat.pid)
            for seat in self._seats(self.notices.noted(self.host)).values()
        }

    def _reported(self, ranks: Iterable[int]) -> dict[int, str]:
        """The states of ranks' processes on any host, as far as the heartbeats of the hosts know them."""
        if self.heartbeats is None:
            return {}
        states = {rank: self.heartbeats.state(rank) for rank in ranks}
        return {rank: state for rank, state in states.items() if state != "?"}

    def _report(self, reason: str, ranks: Sequence[int]) -> None:
        """Record why this rank ends, before it does. `ranks` are those to blame."""
        if self.heartbeats is not None:
            self.heartbeats.report(reason, ranks)

    def _publish(self, folder: str) -> None:
        self.notices.write(f"{folder}/{self.rank}", asdict(self.snapshot()))

    def _published(self, folder: str, ranks: Iterable[int]) -> dict[int, Snapshot]:
        """What those of some ranks have published that have done so."""
        found = self.notices.read([f"{folder}/{rank}" for rank in ranks])
        return {int(key.rpartition("/")[2]): Snapshot(**value) for key, value in found.items()}

    def _seats(self, ranks: Sequence[int]) -> dict[int, RankProcess]:
        """The seats of the ranks that have come so far; others get a seat without a place."""
        found = self.notices.read([f"seat/{rank}" for rank in ranks])
        return {
            rank: RankProcess(**found[key])
            if (key := f"seat/{rank}") in found
            else replace(NOBODY, rank=rank)
            for rank in ranks
        }

    def _examine(self) -> None:
        """Publishes this rank's record and waits for the verdict, or makes it if this rank is the judge."""
        folder = f"round/{self.round}"
        self._publish(folder)
        if self.notices.is_first(f"{folder}/judge", str(self.rank)):
            verdict = self._judge(folder)
            if verdict.cause != "failed":  # a failed rank has printed its reason itself
                say(f"hang watchdog: {verdict.text}")
                if verdict.fatal:
                    record(f"hang watchdog: {verdict.text}")
            self.notices.write(f"{folder}/verdict", asdict(verdict))
        else:
            deadline = time.monotonic() + self.patience
            while not (found := self.notices.read([f"{folder}/verdict"])):
                if time.monotonic() > deadline:
                    reason = f"rank {self.rank} was promised a verdict and got none"
                    say(f"hang watchdog: {reason}")
                    self._report(reason, [self.rank])
                    os._exit(HUNG)
                time.sleep(self.tick)
                self._publish(folder)  # once more: a process that was about to die may be dead by now
            verdict = Diagnosis(**found[f"{folder}/verdict"])
        self.idle = 0.0
        self.round += 1
        if verdict.fatal:
            self._end(verdict)

    def _judge(self, folder: str) -> Diagnosis:
        """Collects the others' records and judges. Does not wait for ranks that cannot answer."""
        snapshots: dict[int, Snapshot] = {}
        began = time.monotonic()
        while True:
            missing = [rank for rank in range(self.world_size) if rank not in snapshots]
            snapshots |= self._published(folder, missing)
            if words := self.notices.read(["words"]):
                return Diagnosis("failed", [], words["words"])
            silent = {rank for rank in missing if rank not in snapshots}
            reported = self._reported(silent)
            states = [snapshot.processes for snapshot in snapshots.values()]
            if silent:
                states += [self._processes(), {str(rank): state for rank, state in reported.items()}]
            cannot_answer = {
                int(rank)
                for processes in states
                for rank, state in processes.items()
                if state in ENDED + STOPPED
            }
            if silent <= cannot_answer:
                break
            # A rank that was reported to run may be on a host that went down a moment ago.
            may_be_down = any(state not in (*ENDED, *STOPPED, QUIET) for state in reported.values())
            patience = ANSWER_SECONDS + 2 * self.tick
            if time.monotonic() - began >= max(patience, self.settle_seconds if may_be_down else 0.0):
                break
            time.sleep(0.05)
        seats = self._seats(range(self.world_size))
        hosts = {seat.host for rank, seat in seats.items() if rank not in snapshots}
        # they have looked again
        beside = self._published(folder, [rank for rank in snapshots if seats[rank].host in hosts])
        for rank, again in beside.items():
            snapshots[rank] = replace(
                snapshots[rank], processes=self._processes() if rank == self.rank else again.processes
            )
        reported = self._reported(rank for rank in seats if rank not in snapshots)
        return judge(seats, snapshots, self.seconds, reported)

    def _end(self, verdict: Diagnosis) -> None:
        """Ends this process, and those on this machine that cannot end themselves.

        The launcher or supervisor starts the job anew.

        The process ends whatever fails on the way, even if something waits for ever and holds the
        interpreter.
        """
        faulthandler.dump_traceback_later(LAST_SECONDS, exit=True, file=open(os.devnull, "w"))  # noqa: SIM115 (open until the end)
        try:
            self._report(verdict.text, verdict.ranks)
            if verdict.cause in ("stopped", "silent"):
                for seat in self._seats(self.notices.noted(self.host)).values():
                    if seat.rank in verdict.ranks and process_state(seat.pid) not in ENDED:
                        with contextlib.suppress(ProcessLookupError):  # another rank did it
                            os.kill(seat.pid, signal.SIGKILL)
            if self.folder is not None:
                dump_flight_recorder(self.folder / f"nccl_rank_{self.rank:05d}.json")
            if self.rank == 0:
                time.sleep(LINGER_SECONDS)
            sys.stdout.flush()
        except Exception as error:
            say(f"hang watchdog: at the end of rank {self.rank}: {type(error).__name__}: {error}")
        finally:
            os._exit(HUNG)

    @property
    def _is_first_here(self) -> bool:
        """Whether rank 0 is on this host."""
        return self.first is not None and self.first.host == self.seat.host

    def _first_state(self) -> str:
        """The state of rank 0's process; ? if it is not known."""
        if self.first is not None and self._is_first_here:
            return process_state(self.first.pid)
        return "?" if self.heartbeats is None else self.heartbeats.state(0)

    def _is_store_lost(self) -> bool:
        """Waits whether the store answers after all, or this rank is closed.

        At the end of a run a store that is gone is normal: `close` then comes soon. If not, the heartbeats
        are given the time to find out how rank 0 is.
        """
        answers, began = self.notices.answers, time.monotonic()
        while True:
            state = self._first_state()
            is_known = state in (*ENDED, *STOPPED, QUIET)
            seconds = 0.5 if self.failed or state in STOPPED else 2 * ANSWER_SECONDS
            if not is_known:
                seconds = max(seconds, self.settle_seconds)
            if time.monotonic() - began >= seconds:
                return True
            if self.closed.wait(0.1) or self.notices.answers != answers:
                return False

    def _lost_store(self) -> None:
        """Ends this rank if the store is gone or out of reach, with what is known of rank 0."""
        if not self._is_store_lost():
            return
        first, state = self.first or NOBODY, self._first_state()
        if state in ENDED:
            reason = silence_text("dead", [first])
        elif state in STOPPED:
            reason = silence_text("stopped", [first]) + ", and with it the store in which the ranks met"
        elif state == QUIET:
            reason = silence_text("unreachable", [first])
        else:
            reason = (
                f"the store in which the ranks met, next to {first}, does not answer: dead, or the network "
                "to it is cut"
            )
        if self.local_rank == 0 or self.rank == 1:
            say(f"hang watchdog: {reason}")
        self._report(reason, [0])
        if state in STOPPED and self._is_first_here:
            with contextlib.suppress(ProcessLookupError):  # another rank did it
                os.kill(first.pid, signal.SIGKILL)
        os._exit(HUNG)


def say(line: str) -> None:
    """Writes a line to stderr in one write, so that lines of several ranks do not mix.

    Nobody may read it any more.
    """
    with contextlib.suppress(OSError):
        sys.stderr.write(line + "\n")
        sys.stderr.flush()


def prepare_flight_recorder() -> None:
    """Makes NCCL's process groups record their last operations, unless the environment says otherwise."""
    os.environ.setdefault("TORCH_NCCL_TRACE_BUFFER_SIZE", "2000")


def dump_flight_recorder(file: Path) -> None:
    """Writes the last operations of NCCL's process groups to a file, and names it."""
    from torch._C import _distributed_c10d

    file.write_bytes(_distributed_c10d._dump_nccl_trace_json(includeCollectives=True, onlyActive=False))  # type: ignore[attr-defined]
    say(f"NCCL's flight recorder is in {file}")
