"""Reads a hostfile and options that name hosts, and lays a run out on so many ranks."""

import re
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import NamedTuple

from megacore.config import Config
from megacore.distributed.axes import divisors
from megacore.errors import ConfigError
from megacore.files import read_text, write_whole
from megacore.tools.choices.partition import partitioned
from megacore.tools.hostfile import named_hostfile
from megacore.tools.settings.load import load, smallest_world

SSH = "ssh -o BatchMode=yes -o ConnectTimeout=5 -- {host}"
FILTER = re.compile(r"(--include|--exclude|-i|-e)(=(.*))?")  # options of the deepspeed launcher
# goes into commands: nothing that ssh or a shell takes for more than a name
HOST = re.compile(r"[A-Za-z0-9._:][A-Za-z0-9._:-]*")
LINES = "lines such as `node1 slots=8` or `node1 slots=8 max_slots=16`"  # of a hostfile
# The deepspeed launcher reads up to the slots. Open MPI's hostfiles may also have a limit that only counts if
# more processes than slots are wanted, which no run here does.
LINE = re.compile(r"(\S+)\s+slots=([0-9]{1,4})(?:\s+max[_-]slots=([0-9]{1,4}))?")
KEPT = 0.75  # a layout that uses this part of the ranks is not changed for one that uses more


def read_hostfile(path: Path) -> dict[str, int]:
    """Reads a hostfile: slots by host. Raises `ConfigError` if it cannot be read."""
    try:
        text = read_text(path)
    except OSError as error:
        raise ConfigError("--hostfile", f"cannot read {path}: {error.strerror}", LINES) from None
    except UnicodeDecodeError:
        raise ConfigError("--hostfile", f"{path} is not UTF-8 text", LINES) from None
    return hosts_in(text, "--hostfile", str(path))


def hosts_in(text: str, option: str, source: str) -> dict[str, int]:
    """Slots by host in the text of a hostfile, which `source` has given. Raises `ConfigError`."""
    hosts: dict[str, int] = {}
    for line in filter(None, (line.partition("#")[0].strip() for line in text.splitlines())):
        match = LINE.fullmatch(line)
        if match is None:
            raise ConfigError(option, f"{source} has a line `{line:.200}`", LINES)
        if not HOST.fullmatch(match[1]):
            right = "a name or an address of letters, digits and . _ : -, which does not begin with -"
            raise ConfigError(option, f"{source} names the host `{match[1]:.200}`", right)
        if match[1] in hosts:
            raise ConfigError(
                option, f"{source} names {match[1]} twice", "a line for each host, with all of its slots"
            )
        if int(match[2]) == 0:
            raise ConfigError(
                option, f"{source} gives {match[1]} no slots", "slots=1 or more, or no line for it"
            )
        if match[3] is not None and int(match[3]) < int(match[2]):
            wrong = f"{source} gives {match[1]} max_slots={match[3]}, below its slots={match[2]}"
            raise ConfigError(option, wrong, f"max_slots={match[2]} or more, or none")
        hosts[match[1]] = int(match[2])
    if not hosts:
        raise ConfigError(option, f"{source} names no host", LINES)
    return hosts


def chosen_hosts(hosts: dict[str, int], include: str, exclude: str, *, known: bool = True) -> dict[str, int]:
    """The hosts that the deepspeed launcher's `--include` or `--exclude` leave.

    Raises `ConfigError`, with `known` also for a host that the hostfile does not name.
    """
    if include and exclude:
        raise ConfigError("--include", "stands beside --exclude", "one of the two")
    option, names = (
        ("--include", include.split("@")) if include else ("--exclude", exclude.split("@") if exclude else [])
    )
    for name in names:
        if ":" in name and name not in hosts:
            raise ConfigError(
                option,
                f"`{name:.200}` names single slots",
                "whole hosts, such as node1@node2, and slots=N in the hostfile",
            )
        if known and name not in hosts:
            raise ConfigError(
                option,
                f"the hostfile does not name `{name:.200}`",
                f"hosts such as {'@'.join(list(hosts)[:3])}",
            )
    left = {host: slots for host, slots in hosts.items() if not names or (host in names) == bool(include)}
    if not left and known and hosts:
        raise ConfigError(option, "leaves no host", "one host or more")
    return left


def filters_in(command: list[str]) -> tuple[list[str], str, str]:
    """The deepspeed launcher's command without its filters of hosts, and the values
    of `--include` and `--exclude`.
    """
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


def filled(hosts: Mapping[str, int], ranks: int) -> dict[str, int]:
    """As many of the hosts and their slots as `ranks` need."""
    used, left = {}, ranks
    for host, slots in hosts.items():
        if taken := min(slots, left):
            used[host] = taken
        left -= taken
    return used


def write_hostfile(file: Path, hosts: Mapping[str, int], ranks: int) -> int:
    """Writes a hostfile with as many of the hosts and their slots as `ranks` need;
    returns the number of hosts in it.
    """
    used = filled(hosts, ranks)
    try:
        write_whole(file, "".join(f"{host} slots={slots}\n" for host, slots in used.items()))
    except OSError as error:
        raise ConfigError(
            "log.dir", f"cannot write {file}: {error.strerror}", "a folder with room, that can be written"
        ) from None
    return len(used)


def hostfile_option(command: list[str]) -> tuple[int, Path] | None:
    """The position of the hostfile in the deepspeed launcher's command, and its path.

    Raises `ConfigError` for the hostfile of another launcher, whose command also gives the number of ranks
    elsewhere.
    """
    if Path(command[0]).name in ("mpirun", "mpiexec", "srun"):
        if any(re.fullmatch(r"-?-(machine|host)file(=.*)?", word) for word in command):
            right = "leave it to the job's own machines, or use the deepspeed launcher"
            raise ConfigError(
                "--hostfile", f"only the deepspeed launcher's can be changed, not {command[0]}'s", right
            )
        return None
    named = named_hostfile(command)
    if named is not None and not named[1]:
        raise ConfigError(
            "--hostfile", "its name is empty", "a file with lines such as `node1 slots=8`, or no --hostfile"
        )
    return named and (named[0], Path(named[1]))


class Planned(NamedTuple):
    """The number of ranks that a run gets, the overrides that lay it out on them, and
    how many of them are data ranks.
    """

    ranks: int
    overrides: list[str]
    data: int


def plan(config: str, overrides: list[str], ranks: int) -> Planned:
    """The layout of a run on at most `ranks` ranks.

    It is the config's own if that uses most of the ranks; otherwise, of the layouts that use the most ranks,
    the one most like it. The global batch stays; microbatches may become smaller, context ranks fewer, and
    where a schedule from a file does not fit, 1F1B takes its place.

    Raises:
        ConfigError: no layout fits.
    """
    own = load_any(config, overrides)
    if own.parallel.schedule.startswith("file:"):
        if (
            planned := fits(config, overrides, own, ranks, own.parallel.tensor, own.parallel.pipeline)
        ) is not None:
            return planned
        other = ["parallel.schedule=1f1b", "parallel.chunks=null"]
        found = plan(config, [*overrides, *other], ranks)
        return Planned(found.ranks, [*found.overrides, *other], found.data)
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
    """Pairs (tensor, pipeline) that divide `ranks`.

    Those come first that divide the model into nearly as many parts as `shape` does: fewer would not fit in
    memory, more would be slow.
    """
    tensor, pipeline = shape
    pairs = [(t, p) for t in divisors(ranks) if t <= tensor for p in divisors(ranks // t)]
    yield from sorted(
        pairs, key=lambda pair: (abs(pair[0] * pair[1] - tensor * pipeline), abs(pair[0] - tensor))
    )


def fits(
    config: str, overrides: list[str], own: Config, ranks: int, tensor: int, pipeline: int
) -> Planned | None:
    """The layout on exactly `ranks` ranks with the largest microbatch that the config
    allows there, if any.
    """
    if ranks < 1:
        return None
    for context, size in product(
        *(reversed(divisors(most)) for most in (own.parallel.context, own.train.micro_batch_size))
    ):
        # `load` says so too, in a thousand times the time
        data, left = divmod(ranks, tensor * pipeline * context)
        if left or pipeline > own.model.num_layers or own.train.global_batch_size % (size * data):
            continue
        laid = [
            f"parallel.tensor={tensor}",
            f"parallel.pipeline={pipeline}",
            "parallel.data=auto",
            f"train.micro_batch_size={size}",
        ]
        laid += [f"parallel.context={context}"] if own.parallel.context > 1 else []
        try:
            resolved = load(config, [*overrides, *laid], ranks).config
            if resolved.parallel.schedule.startswith("file:"):
                partitioned(resolved)
        except ConfigError:
            continue
        return Planned(ranks, laid, data)
    return None
