"""The machines of a run: which of them it is given at a start, and whether others
should be used while it goes on.
"""

import shlex
import socket
import subprocess
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from megacore.errors import ConfigError
from megacore.tools.hostfile import HOSTFILE
from megacore.tools.relaunch.hosts import (
    SSH,
    Planned,
    check_ranks,
    chosen_hosts,
    filled,
    hostfile_option,
    hosts_in,
    load_any,
    plan,
    read_hostfile,
    write_hostfile,
)
from megacore.tools.relaunch.scaling import Rules, change, output, words_of

PROBE = f"{SSH} true"
PROBE_SECONDS = 15.0
HELD_MOST = 6  # doublings of the time for which a machine is left out


class TooFew(ConfigError):
    """There are fewer ranks than the user wants at least: the run waits."""


class Machines(ABC):
    """Hosts with slots, a rank for each. Subclasses know where they come from."""

    def __init__(self, config: str, overrides: list[str], rules: Rules, spares: int = 0) -> None:
        """`spares`: so many hosts are only used in the place of others."""
        self.config, self.overrides, self.rules, self.spares = config, overrides, rules, spares
        self.batch = load_any(config, overrides).train.global_batch_size
        self.folder = ""  # the run's
        self.used: dict[str, int] = {}  # slots by host at the last start
        self.proven: dict[str, int] = {}  # the most slots of each host with which the run has got on
        self.failures = Counter[str]()  # how often each host was lost, or joined in vain
        self.held: dict[str, float] = {}  # until when slots that are not proven are left out
        self.plans: dict[int, Planned] = {}  # by the number of ranks
        self.started = self.looked = 0.0
        self.looking: Future[str] | None = None

    answers = "machines that answer"  # what would be right where none does
    size_option = "--world"

    @abstractmethod
    def named(self) -> dict[str, int]:
        """The machines that there are now. Raises `ConfigError`."""

    def silence(self, host: str) -> str | None:
        """Why a host does not answer; None if it does."""
        return None

    @abstractmethod
    def start(self, command: list[str], hosts: dict[str, int], planned: Planned) -> list[str]:
        """The command that starts the run on these hosts."""

    def where(self, hosts: dict[str, int], named: dict[str, int]) -> str:
        """How many hosts are used, in words."""
        return f"{len(hosts)} of {len(named)} hosts"

    def changed(self, gained: bool) -> str:
        """Why the run shall be started again on other machines; empty if it shall not.

        `gained`: the last start has got further than any before. Does not wait: the machines are asked in the
        background. Raises what went wrong there.
        """
        if self.looking is None and time.monotonic() - self.looked >= self.rules.poll:
            self.looked, self.looking = time.monotonic(), Future()
            threading.Thread(target=self._look, args=(self.looking, gained), daemon=True).start()
        if self.looking is None or not self.looking.done():
            return ""
        found, self.looking = self.looking, None
        return found.result()

    def _look(self, found: "Future[str]", gained: bool) -> None:
        try:
            found.set_result(self.look(gained))
        except Exception as error:  # raised by `changed`
            found.set_exception(error)

    def look(self, gained: bool = True) -> str:
        """As `changed`, but asks now and waits.

        Hosts that are in use are not asked: heartbeats watch them.
        """
        there = self.named()
        try:
            then, *_ = self._given(there, self.used)
        except TooFew:
            return ""
        return change(self.used, there, then, gained and time.monotonic() - self.started >= self.rules.pause)

    def command(self, command: list[str], folder: Path) -> list[str]:
        """The launcher's command for the machines that answer now.

        Raises `ConfigError` if they are not enough.
        """
        self.folder = str(folder)
        self.plans.clear()
        named = self.named()
        hosts, planned, line = self._given(named, ())
        folder.mkdir(parents=True, exist_ok=True)
        words = self.start(command, hosts, planned)
        print("supervise: " + line, flush=True)
        self.used, self.looking = hosts, None
        self.started = self.looked = time.monotonic()
        return words

    def ended(self, *, gained: bool, failed: bool, lost: Iterable[str] = ()) -> None:
        """Hears whether the last start got further than any before, whether it failed, and which hosts
        were lost. A lost host, and one that joined a run which then got no further, is left out for a
        while, which doubles each time.
        """
        new = [host for host, slots in self.used.items() if self.proven.get(host, 0) < slots]
        for host in {*lost, *(new if self.proven and failed and not gained else ())}:
            self.failures[host] += 1
            self.held[host] = time.monotonic() + self.rules.pause * 2.0 ** min(
                self.failures[host] - 1, HELD_MOST
            )
        for host in lost:
            self.proven.pop(host, None)
        if gained:
            self.proven |= {
                host: max(slots, self.proven.get(host, 0))
                for host, slots in self.used.items()
                if host not in lost
            }

    def _given(self, named: dict[str, int], trusted: Iterable[str]) -> tuple[dict[str, int], Planned, str]:
        """Which slots of which hosts the run is given, its layout on them, and a line that says so.

        `trusted` hosts are not asked whether they answer.
        """
        now = time.monotonic()
        held = [
            host
            for host, slots in named.items()
            if now < self.held.get(host, 0.0) and self.proven.get(host, 0) < slots
        ]
        slots = named | {host: self.proven.get(host, 0) for host in held}
        if sum(slots.values()) < max(1, self.rules.least):
            held, slots = [], named
        asked = [host for host in named if slots[host]]
        with ThreadPoolExecutor(64) as pool:
            reasons = dict(
                zip(
                    asked,
                    pool.map(lambda host: None if host in trusted else self.silence(host), asked),
                    strict=True,
                )
            )
        answering = [host for host in asked if reasons[host] is None]
        # What was lost comes last, though it answers again: a spare is better.
        chosen = sorted(answering, key=self.failures.__getitem__)[: max(1, len(named) - self.spares)]
        room = sum(slots[host] for host in chosen)
        if not room and not self.rules.least:
            names = ", ".join(list(named)[:8]) + (f" and {len(named) - 8} more" if len(named) > 8 else "")
            raise ConfigError("--hostfile", f"no host answered: {names}", self.answers)
        wanted = self.rules.ranks(room, self.rules.asked(sum(self.used.values()), room, self.folder))
        if not wanted:
            raise TooFew(
                self.size_option,
                f"{room} ranks have room, and there shall be {self.rules.least} at least",
                "more machines",
            )
        if wanted not in self.plans:
            self.plans[wanted] = plan(self.config, self.overrides, wanted)
        planned = self.plans[wanted]
        given = filled({host: slots[host] for host in chosen}, planned.ranks)
        hosts = {host: given[host] for host in named if host in given}
        line = f"{planned.ranks} ranks on {self.where(hosts, named)}: {' '.join(planned.overrides)}"
        line += f"; data {planned.data} is the largest for {wanted} slots and a global batch of {self.batch}"
        line += f"; {wanted} of {room} slots are wanted" if wanted < room else ""
        rest = {host: slots[host] - given.get(host, 0) for host in chosen if slots[host] > given.get(host, 0)}
        silent = [f"{host} ({reason})" for host, reason in reasons.items() if reason is not None]
        for what, those in (
            ("left over:", [f"{host} ({count} slot{'s' * (count > 1)})" for host, count in rest.items()]),
            ("no answer from", silent),
            ("spare:", [host for host in answering if host not in chosen]),
            ("left out for a while:", held),
        ):
            line += f"; {what} {', '.join(those)}" if those else ""
        return hosts, planned, line


class Fleet(Machines):
    """The machines of a hostfile, or those that a command prints as a hostfile would have them."""

    def __init__(
        self,
        hostfile: Path | None,
        config: str,
        overrides: list[str],
        probe: str = PROBE,
        *,
        rules: Rules | None = None,
        printed_by: tuple[str, ...] = (),
        spares: int = 0,
        include: str = "",
        exclude: str = "",
    ) -> None:
        """`probe`: a command that succeeds if `{host}` answers; this machine always does.

        `printed_by`: the command, where there is no hostfile. `include`, `exclude`: see `chosen_hosts`.
        """
        super().__init__(config, overrides, rules or Rules(), spares)
        self.hostfile, self.printed_by, self.filters = hostfile, printed_by, (include, exclude)
        self.words = words_of("--probe", probe, PROBE)
        self.answers = f"machines that answer `{shlex.join(self.words)}`"
        check_ranks(chosen_hosts(self._read(), *self.filters), config, overrides)

    def _read(self) -> dict[str, int]:
        if self.hostfile is not None:
            return read_hostfile(self.hostfile)
        said = output(
            "--hosts-command",
            self.printed_by,
            {"MEGACORE_LOG_DIR": self.folder, "MEGACORE_HOSTS": ",".join(self.used)},
        )
        return hosts_in(said, "--hosts-command", f"`{shlex.join(self.printed_by)}`")

    def named(self) -> dict[str, int]:
        """Those that the hostfile or the command names now, and the user's filters leave."""
        return chosen_hosts(self._read(), *self.filters, known=False)

    def start(self, command: list[str], hosts: dict[str, int], planned: Planned) -> list[str]:
        """The deepspeed launcher's command with a hostfile of its own."""
        file = Path(self.folder) / "hostfile"
        write_hostfile(file, hosts, planned.ranks)
        if (option := hostfile_option(command)) is None:
            return [command[0], "--hostfile", str(file), *command[1:], *planned.overrides]
        at, _ = option
        word = f"{command[at].partition('=')[0]}={file}" if HOSTFILE.fullmatch(command[at]) else str(file)
        return [*command[:at], word, *command[at + 1 :], *planned.overrides]

    def silence(self, host: str) -> str | None:
        """What the probe says."""
        if host in ("localhost", "127.0.0.1", socket.gethostname()):
            return None
        words = [word.replace("{host}", host) for word in self.words]
        try:
            done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, timeout=PROBE_SECONDS)
        except subprocess.TimeoutExpired:
            return f"nothing within {PROBE_SECONDS:.0f} s"
        except OSError as error:
            return f"{words[0]}: {error.strerror}"
        said = done.stderr.decode(errors="replace").strip().splitlines()
        return None if done.returncode == 0 else said[-1][:200] if said else f"status {done.returncode}"
