"""Finds the machines of a hostfile that answer, and lays a run out on them."""

import re
import shlex
import socket
import subprocess
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import NamedTuple

from megacore.config import Config
from megacore.distributed.axes import divisors
from megacore.errors import ConfigError
from megacore.files import read_text, write_whole
from megacore.pipeline.partition import plan_of
from megacore.tools.choices.partition import partitioned
from megacore.tools.hostfile import HOSTFILE, named_hostfile
from megacore.tools.settings.load import load, smallest_world

SSH = "ssh -o BatchMode=yes -o ConnectTimeout=5 -- {host}"
PROBE = f"{SSH} true"
PROBE_SECONDS = 15.0
FILTER = re.compile(r"(--include|--exclude|-i|-e)(=(.*))?")  # options of the deepspeed launcher
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
        if int(found[2]) == 0:
            raise ConfigError("--hostfile", f"{path} gives {found[1]} no slots", "slots=1 or more, or no line for it")
        hosts[found[1]] = int(found[2])
    if not hosts:
        raise ConfigError("--hostfile", f"{path} names no host", LINES)
    return hosts


def chosen_hosts(hosts: dict[str, int], include: str, exclude: str, *, known: bool = True) -> dict[str, int]:
    """The hosts that the deepspeed launcher's `--include` or `--exclude` leave. Raises `ConfigError`, with `known` also for a host that
    the hostfile does not name."""
    if include and exclude:
        raise ConfigError("--include", "stands beside --exclude", "one of the two")
    option, names = ("--include", include.split("@")) if include else ("--exclude", exclude.split("@") if exclude else [])
    for name in names:
        if ":" in name and name not in hosts:
            raise ConfigError(option, f"`{name:.200}` names single slots", "whole hosts, such as node1@node2, and slots=N in the hostfile")
        if known and name not in hosts:
            raise ConfigError(option, f"the hostfile does not name `{name:.200}`", f"hosts such as {'@'.join(list(hosts)[:3])}")
    left = {host: slots for host, slots in hosts.items() if not names or (host in names) == bool(include)}
    if not left and known and hosts:
        raise ConfigError(option, "leaves no host", "one host or more")
    return left


def filters_in(command: list[str]) -> tuple[list[str], str, str]:
    """The deepspeed launcher's command without its filters of hosts, and the values of `--include` and `--exclude`."""
    script = next((i for i, word in enumerate(command) if word.endswith(".py")), len(command))
    words, values, i = [], {"i": "", "e": ""}, 0
    while i < script:
        if found := FILTER.fullmatch(command[i]):
            inline = found[3] is not None
            values[found[1].lstrip("-")[0]] = found[3] if inline else "".join(command[i + 1 : i + 2])
            i += 1 if inline else 2
        else:
            words.append(command[i])
            i += 1
    return [*words, *command[script:]], values["i"], values["e"]


def check_ranks(hosts: dict[str, int], config: str, overrides: list[str]) -> None:
    """Raises `ConfigError` if the config needs more ranks than the hosts have slots."""
    needed, there = smallest_world(config, overrides), sum(hosts.values())
    if needed > there:
        p = load_any(config, overrides).parallel
        wrong = f"its hosts have {there} slots, and the config needs {needed} ranks ({p.described()})"
        raise ConfigError("--hostfile", wrong, "more hosts")


def write_hostfile(file: Path, hosts: Mapping[str, int], ranks: int) -> int:
    """Writes a hostfile with as many of the hosts and their slots as `ranks` need; returns the number of hosts in it."""
    left, lines = ranks, []
    for host, slots in hosts.items():
        if used := min(slots, left):
            lines.append(f"{host} slots={used}\n")
        left -= used
    try:
        write_whole(file, "".join(lines))
    except OSError as error:
        raise ConfigError("log.dir", f"cannot write {file}: {error.strerror}", "a folder with room, that can be written") from None
    return len(lines)


def hostfile_option(command: list[str]) -> tuple[int, Path] | None:
    """The position of the hostfile in the deepspeed launcher's command, and its path. Raises `ConfigError` for the hostfile of
    another launcher, whose command also gives the number of ranks elsewhere."""
    if Path(command[0]).name in ("mpirun", "mpiexec", "srun"):
        if any(re.fullmatch(r"-?-(machine|host)file(=.*)?", word) for word in command):
            right = "leave it to the job's own machines, or use the deepspeed launcher"
            raise ConfigError("--hostfile", f"only the deepspeed launcher's can be changed, not {command[0]}'s", right)
        return None
    named = named_hostfile(command)
    if named is not None and not named[1]:
        raise ConfigError("--hostfile", "its name is empty", "a file with lines such as `node1 slots=8`, or no --hostfile")
    return named and (named[0], Path(named[1]))


class Planned(NamedTuple):
    """The number of ranks that a run gets, and the overrides that lay it out on them."""

    ranks: int
    overrides: list[str]


class Fleet:
    """The machines of a launcher's hostfile. They are asked again before every start."""

    def __init__(
        self,
        hostfile: Path,
        config: str,
        overrides: list[str],
        probe: str = PROBE,
        *,
        spares: int = 0,
        include: str = "",
        exclude: str = "",
    ) -> None:
        """`probe`: a command that succeeds if `{host}` answers; this machine always does. `spares`: so many hosts are only used in the
        place of others. `include`, `exclude`: see `chosen_hosts`."""
        self.hostfile, self.config, self.overrides, self.filters = hostfile, config, overrides, (include, exclude)
        self.spares = spares
        self.losses = Counter[str]()  # how often each host was lost
        try:
            self.words = shlex.split(probe)
            if not self.words:
                raise ValueError("it is empty")
        except ValueError as error:
            raise ConfigError("--probe", f"{probe} is no command: {str(error).lower()}", PROBE) from None
        self.named = chosen_hosts(read_hostfile(hostfile), *self.filters)
        check_ranks(self.named, config, overrides)

    def changed(self) -> bool:
        """Whether the hostfile names other machines than at the last start."""
        try:
            return self._read() != self.named
        except ConfigError:
            return False  # somebody is writing it

    def command(self, command: list[str], folder: Path) -> list[str]:
        """The launcher's command for the machines that answer now. Raises `ConfigError` if they are not enough."""
        self.named = self._read()
        with ThreadPoolExecutor(64) as pool:
            reasons = dict(zip(self.named, pool.map(self._silence, self.named), strict=True))
        answering = [host for host, reason in reasons.items() if reason is None]
        # What was lost comes last, though it answers again: a spare is better.
        chosen = sorted(answering, key=self.losses.__getitem__)[: max(1, len(self.named) - self.spares)]
        hosts = {host: slots for host, slots in self.named.items() if host in chosen}
        if not hosts:
            names = ", ".join(list(self.named)[:8]) + (f" and {len(self.named) - 8} more" if len(self.named) > 8 else "")
            why = f"no host answered: {names}"
            raise ConfigError("--hostfile", why, f"machines that answer `{shlex.join(self.words)}`")
        planned = plan(self.config, self.overrides, sum(hosts.values()))
        file = folder / "hostfile"
        folder.mkdir(parents=True, exist_ok=True)
        used = write_hostfile(file, hosts, planned.ranks)
        silent = [f"{host} ({reason})" for host, reason in reasons.items() if reason is not None]
        said = f"{planned.ranks} ranks on {used} of {len(self.named)} hosts: {' '.join(planned.overrides)}"
        said += f"; no answer from {', '.join(silent)}" if silent else ""
        spare = [host for host in answering if host not in hosts]
        print("supervise: " + said + (f"; spare: {', '.join(spare)}" if spare else ""), flush=True)
        option = hostfile_option(command)
        assert option is not None
        at, _ = option
        word = f"{command[at].partition('=')[0]}={file}" if HOSTFILE.fullmatch(command[at]) else str(file)
        return [*command[:at], word, *command[at + 1 :], *planned.overrides]

    def _read(self) -> dict[str, int]:
        return chosen_hosts(read_hostfile(self.hostfile), *self.filters, known=False)

    def _silence(self, host: str) -> str | None:
        """Why a host does not answer; None if it does."""
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


def plan(config: str, overrides: list[str], ranks: int) -> Planned:
    """The layout of a run on at most `ranks` ranks. It is the config's own if that uses most of the ranks; otherwise, of the layouts
    that use the most ranks, the one most like it. The global batch stays; microbatches may become smaller, context ranks fewer, and where
    a schedule from a file does not fit, 1F1B takes its place.

    Raises:
        ConfigError: no layout fits.
    """
    own = load_any(config, overrides)
    if own.parallel.schedule.startswith("file:"):
        if (planned := fits(config, overrides, own, ranks, own.parallel.tensor, own.parallel.pipeline)) is not None:
            return planned
        other = ["parallel.schedule=1f1b", "parallel.chunks=null"]
        found = plan(config, [*overrides, *other], ranks)
        return Planned(found.ranks, [*found.overrides, *other])
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
    if ranks < 1:
        return None
    for context, size in product(*(reversed(divisors(most)) for most in (own.parallel.context, own.train.micro_batch_size))):
        data, left = divmod(ranks, tensor * pipeline * context)  # `load` says so too, in a thousand times the time
        if left or pipeline > own.model.num_layers or own.train.global_batch_size % (size * data):
            continue
        laid = [f"parallel.tensor={tensor}", f"parallel.pipeline={pipeline}", "parallel.data=auto", f"train.micro_batch_size={size}"]
        laid += [f"parallel.context={context}"] if own.parallel.context > 1 else []
        try:
            resolved = load(config, [*overrides, *laid], ranks).config
            if resolved.parallel.schedule.startswith("file:"):
                plan_of(partitioned(resolved))
        except ConfigError:
            continue
        return Planned(ranks, laid)
    return None
