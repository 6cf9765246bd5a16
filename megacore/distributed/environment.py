"""Reads a launcher's variables from the environment, each within its bounds. Anybody may have set them, also by hand."""

import ipaddress
import re
from collections.abc import Iterator, Mapping

from megacore.errors import ConfigError

MOST_RANKS = 1 << 24  # far above any job
LABEL = r"(?!-)[A-Za-z0-9_-]{1,63}"  # of a host's name, between dots
HOST = re.compile(rf"(?=.{{1,253}}$){LABEL}(\.{LABEL})*\.?")
TASKS = re.compile(r"([0-9]{1,8})(?:\(x([1-9][0-9]{0,7})\))?")  # an entry of Slurm's tasks a machine: 4, or 4(x2) for two machines


def refusal(env: Mapping[str, str], name: str, wrong: str, right: str) -> ConfigError:
    """The error of a variable's value."""
    return ConfigError("environment", f"{name}={env.get(name, '')[:100]} {wrong}", right)


def number(env: Mapping[str, str], name: str, right: str, default: int = 0, least: int = 0, most: int = MOST_RANKS) -> int:
    """A whole number, or the default where the variable is not set. `right`: what to do where it is none. Raises `ConfigError`."""
    text = env.get(name, str(default))
    if not re.fullmatch(r"-?[0-9]{1,18}", text, re.ASCII):
        raise refusal(env, name, "is not a number", right)
    if not least <= int(text) <= most:
        raise refusal(env, name, f"is not from {least} to {most}", right)
    return int(text)


def host(env: Mapping[str, str], name: str) -> str | None:
    """A host's name or address; None where the variable is not set or empty. Raises `ConfigError`."""
    if not (text := env.get(name)):
        return None
    if not is_host(text):
        raise refusal(env, name, "is no host", "a name of labels of 1 to 63 letters, digits, - and _ with dots between, or an address")
    return text


def is_host(text: str) -> bool:
    """Whether it can be a host's name or its address."""
    if HOST.fullmatch(text):
        return True
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def tasks_here(env: Mapping[str, str], name: str, right: str) -> int:
    """How many ranks Slurm has started on this machine, of the list of all machines: ``4(x2),3``, on machine 2 there are 3. The
    machine's number is needed only where they differ. Raises `ConfigError`."""
    counts = list(_runs(env, name, right))
    if len({count for count, _ in counts}) == 1:
        return counts[0][0]
    left = number(env, "SLURM_NODEID", right, default=-1)
    for count, machines in counts:
        if 0 <= left < machines:
            return count
        left -= machines
    raise refusal(env, "SLURM_NODEID", f"is none of the machines of {name}={env[name][:100]}", right)


def _runs(env: Mapping[str, str], name: str, right: str) -> Iterator[tuple[int, int]]:
    """Pairs of tasks and machines that have as many."""
    for entry in env.get(name, "1").split(","):
        if (found := TASKS.fullmatch(entry)) is None:
            raise refusal(env, name, "is not a number of tasks for each machine", right)
        yield int(found[1]), int(found[2] or 1)


def first_host(env: Mapping[str, str], right: str) -> str | None:
    """The first host of Slurm's step: ``node003`` of ``node[003-007,9]``, ``rack2-node1`` of ``rack[2,5]-node[1-4]``; None on one
    machine. Raises `ConfigError`."""
    nodes = "SLURM_STEP_NUM_NODES" if "SLURM_STEP_NUM_NODES" in env else "SLURM_NNODES"
    name = "SLURM_STEP_NODELIST" if env.get("SLURM_STEP_NODELIST") else "SLURM_NODELIST"
    if number(env, nodes, right, 1) <= 1 or not env.get(name):
        return None
    first = re.match(r"(?:[^,\[\]]|\[[^\[\]]*\])+(?=,|$)", env[name])  # up to the first comma outside brackets
    found = "" if first is None else re.sub(r"\[([^\]\-,]+)[^\]]*\]", r"\1", first.group())
    if not is_host(found):
        raise refusal(env, name, "does not begin with a host", "hosts such as node[003-007,9], as Slurm writes them")
    return found
