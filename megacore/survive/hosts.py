"""Finds the machines of a hostfile that answer, and lays a run out on them."""

import re
import shlex
import socket
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from megacore.config import Config, load
from megacore.config.load import smallest_world
from megacore.distributed.place import HOSTFILE, named_hostfile
from megacore.errors import ConfigError
from megacore.files import read_text

PROBE = "ssh -o BatchMode=yes -o ConnectTimeout=5 -- {host} true"
PROBE_SECONDS = 15.0
HOST = re.compile(r"[A-Za-z0-9._:][A-Za-z0-9._:-]*")  # goes into commands: nothing that ssh or a shell takes for more than a name
LINES = "lines such as `node1 slots=8`"  # of a hostfile
KEPT = 0.75  # a layout that uses this part of the ranks is not changed for one that uses more


def read_hostfile(path: Path) -> dict[str, int]:
    """Reads a hostfile: slots by host. Raises `ConfigError` if it cannot be read."""
    try:
        lines = read_text(path).splitlines()
    except OSError as error:
        raise ConfigError("--hostfile", f"cannot read {path}: {error.strerror}", LINES) from None
    except UnicodeDecodeError:
        raise ConfigError("--hostfile", f"{path} is not UTF-8 text", LINES) from None
    hosts: dict[str, int] = {}
    for line in filter(None, (line.partition("#")[0].strip() for line in lines)):
        found = re.fullmatch(r"(\S+)\s+slots=([0-9]{1,4})", line)
        if found is None:
            raise ConfigError("--hostfile", f"{path} has a line `{line:.200}`", LINES)
        if not HOST.fullmatch(found[1]):
            right = "a name or an address of letters, digits and . _ : -, which does not begin with -"
            raise ConfigError("--hostfile", f"{path} names the host `{found[1]:.200}`", right)
        if found[1] in hosts:
            raise ConfigError("--hostfile", f"{path} names {found[1]} twice", "a line for each host, with all of its slots")
        hosts[found[1]] = int(found[2])
    return hosts


def hostfile_option(command: list[str]) -> tuple[int, Path] | None:
    """The position of the hostfile in the deepspeed launcher's command, and its path. Raises `ConfigError` for the hostfile of
    another launcher, whose command also gives the number of ranks elsewhere."""
    if Path(command[0]).name in ("mpirun", "mpiexec", "srun"):
        if any(re.fullmatch(r"-?-(machine|host)file(=.*)?", word) for word in command):
            right = "leave it to the job's own machines, or use the deepspeed launcher"
            raise ConfigError("--hostfile", f"only the deepspeed launcher's can be changed, not {command[0]}'s", right)
        return None
    named = named_hostfile(command)
    return named and (named[0], Path(named[1]))


class Planned(NamedTuple):
    """The number of ranks that a run gets, and the overrides that lay it out on them."""

    ranks: int
    overrides: list[str]


class Fleet:
    """The machines of a launcher's hostfile. They are asked again before every start."""

    def __init__(self, hostfile: Path, config: str, overrides: list[str], probe: str = PROBE) -> None:
        """`probe`: a command that succeeds if `{host}` answers; this machine always does."""
        self.hostfile, self.config, self.overrides = hostfile, config, overrides
        try:
            self.words = shlex.split(probe)
            if not self.words:
                raise ValueError("it is empty")
        except ValueError as error:
            raise ConfigError("--probe", f"{probe} is no command: {str(error).lower()}", PROBE) from None
        self.named = read_hostfile(hostfile)

    def changed(self) -> bool:
        """Whether the hostfile names other machines than at the last start."""
        try:
            return read_hostfile(self.hostfile) != self.named
        except ConfigError:
            return False  # somebody is writing it

    def command(self, command: list[str], folder: Path) -> list[str]:
        """The launcher's command for the machines that answer now. Raises `ConfigError` if they are not enough."""
        self.named = read_hostfile(self.hostfile)
        with ThreadPoolExecutor(64) as pool:
            answers = pool.map(self._answers, self.named)
        hosts = {host: slots for (host, slots), answered in zip(self.named.items(), answers, strict=True) if answered}
        if not sum(hosts.values()):
            names = ", ".join(list(self.named)[:8]) + (f" and {len(self.named) - 8} more" if len(self.named) > 8 else "")
            why = f"none of {', '.join(hosts)} has a slot" if hosts else f"no host answered: {names or f'{self.hostfile} names none'}"
            raise ConfigError("--hostfile", why, f"machines that answer `{shlex.join(self.words)}`")
        planned = plan(self.config, self.overrides, sum(hosts.values()))
        file = folder / "hostfile"
        folder.mkdir(parents=True, exist_ok=True)
        left, lines = planned.ranks, []
        for host, slots in hosts.items():
            if used := min(slots, left):
                lines.append(f"{host} slots={used}\n")
            left -= used
        file.write_text("".join(lines), encoding="utf-8")
        silent = [host for host in self.named if host not in hosts]
        said = f"{planned.ranks} ranks on {len(lines)} of {len(self.named)} hosts: {' '.join(planned.overrides)}"
        print("supervise: " + said + (f"; no answer from {', '.join(silent)}" if silent else ""), flush=True)
        option = hostfile_option(command)
        assert option is not None
        at, _ = option
        word = f"{command[at].partition('=')[0]}={file}" if HOSTFILE.fullmatch(command[at]) else str(file)
        return [*command[:at], word, *command[at + 1 :], *planned.overrides]

    def _answers(self, host: str) -> bool:
        if host in ("localhost", "127.0.0.1", socket.gethostname()):
            return True
        try:
            words = [word.replace("{host}", host) for word in self.words]
            return subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, timeout=PROBE_SECONDS).returncode == 0
        except (OSError, subprocess.TimeoutExpired):
            return False


def plan(config: str, overrides: list[str], ranks: int) -> Planned:
    """The layout of a run on at most `ranks` ranks. It is the config's own if that uses most of the ranks; otherwise, of the layouts
    that use the most ranks, the one most like it. The global batch stays; microbatches may become smaller.

    Raises:
        ConfigError: no layout fits.
    """
    own = load_any(config, overrides)
    shape = (own.parallel.tensor, own.parallel.pipeline)
    for used in range(ranks, int(KEPT * ranks) - 1, -1):
        if (planned := fits(config, overrides, own, used, *shape)) is not None:
            return planned
    for used in range(ranks, 0, -1):
        for tensor, pipeline in layouts_like(shape, used):
            if (planned := fits(config, overrides, own, used, tensor, pipeline)) is not None:
                return planned
    raise ConfigError("parallel", f"no layout fits on {ranks} ranks", "more machines")


def load_any(config: str, overrides: list[str]) -> Config:
    """Loads the config for as many ranks as it asks for."""
    return load(config, overrides, smallest_world(config, overrides)).config


def layouts_like(shape: tuple[int, int], ranks: int) -> Iterator[tuple[int, int]]:
    """Pairs (tensor, pipeline) that divide `ranks`. Those come first that divide the model into nearly as many parts as `shape` does:
    fewer would not fit in memory, more would be slow."""
    tensor, pipeline = shape
    pairs = [(t, p) for t in divisors(ranks) if t <= tensor for p in divisors(ranks // t)]
    yield from sorted(pairs, key=lambda pair: (abs(pair[0] * pair[1] - tensor * pipeline), abs(pair[0] - tensor)))


def fits(config: str, overrides: list[str], own: Config, ranks: int, tensor: int, pipeline: int) -> Planned | None:
    """The layout on exactly `ranks` ranks with the largest microbatch that the config allows there, if any."""
    if ranks < 1 or ranks % (tensor * pipeline):
        return None
    for size in reversed(divisors(own.train.micro_batch_size)):
        laid = [f"parallel.tensor={tensor}", f"parallel.pipeline={pipeline}", "parallel.data=auto", f"train.micro_batch_size={size}"]
        try:
            load(config, [*overrides, *laid], ranks)
        except ConfigError:
            continue
        return Planned(ranks, laid)
    return None


def divisors(number: int) -> list[int]:
    """The divisors of a positive number, ascending."""
    return [d for d in range(1, number + 1) if number % d == 0]
