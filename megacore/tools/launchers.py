"""Reads the place of a process among all that a launcher started from the environment, each
variable within its bounds: anybody may have set them, also by hand. Standard library only: it is
read before torch is imported.
"""

import ipaddress
import os
import re
from collections.abc import Iterator, Mapping

from megacore.distributed.rank_info import RankInfo
from megacore.errors import ConfigError

MOST_RANKS = 1 << 24  # far above any job
LABEL = r"(?!-)[A-Za-z0-9_-]{1,63}"  # of a host's name, between dots
HOST = re.compile(rf"(?=.{{1,253}}$){LABEL}(\.{LABEL})*\.?")
# an entry of Slurm's tasks a machine: 4, or 4(x2) for two machines
TASKS = re.compile(r"([0-9]{1,8})(?:\(x([1-9][0-9]{0,7})\))?")


def refusal(env: Mapping[str, str], name: str, wrong: str, right: str) -> ConfigError:
    """The error of a variable's value."""
    return ConfigError("environment", f"{name}={env.get(name, '')[:100]} {wrong}", right)


def number(
    env: Mapping[str, str], name: str, right: str, default: int = 0, least: int = 0, most: int = MOST_RANKS
) -> int:
    """A whole number, or the default where the variable is not set.

    `right`: what to do where it is none. Raises `ConfigError`.
    """
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
        raise refusal(
            env,
            name,
            "is no host",
            "a name of labels of 1 to 63 letters, digits, - and _ with dots between, or an address",
        )
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
    """How many ranks Slurm has started on this machine, of the list of all machines: ``4(x2),3``, on machine
    2 there are 3. The machine's number is needed only where they differ. Raises `ConfigError`.
    """
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
    """The first host of Slurm's step: ``node003`` of ``node[003-007,9]``, ``rack2-node1`` of
    ``rack[2,5]-node[1-4]``; None on one machine. Raises `ConfigError`.
    """
    nodes = "SLURM_STEP_NUM_NODES" if "SLURM_STEP_NUM_NODES" in env else "SLURM_NNODES"
    name = "SLURM_STEP_NODELIST" if env.get("SLURM_STEP_NODELIST") else "SLURM_NODELIST"
    if number(env, nodes, right, 1) <= 1 or not env.get(name):
        return None
    # up to the first comma outside brackets
    first = re.match(r"(?:[^,\[\]]|\[[^\[\]]*\])+(?=,|$)", env[name])
    found = "" if first is None else re.sub(r"\[([^\]\-,]+)[^\]]*\]", r"\1", first.group())
    if not is_host(found):
        raise refusal(
            env, name, "does not begin with a host", "hosts such as node[003-007,9], as Slurm writes them"
        )
    return found


# Each launcher's variables for (rank, world size, local rank, ranks on this machine); Slurm says the last for
# all machines, by their number. The first launcher found counts.
LAUNCHERS = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    "deepspeed": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE"),
    "mpirun": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    "mpiexec": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),  # MPICH's, and Intel's
    "srun": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
}

# a variable of all ranks
SETTING = {"mpirun": "-x MASTER_ADDR=<the first host>", "mpiexec": "-genv MASTER_ADDR <the first host>"}
# deepspeed has a name of its own for the last; srun sets MPICH's first two for programs of MPI
LOCAL_TOO = ("torchrun", "mpiexec")


def launcher_of(env: Mapping[str, str]) -> str | None:
    """Return the name of the launcher that started this process; None if no launcher did."""
    for launcher, names in LAUNCHERS.items():
        needed = (*names[:2], names[3]) if launcher in LOCAL_TOO else names[:2]
        if all(name in env for name in needed):
            return launcher
    return None


def place_from_environment(env: Mapping[str, str] = os.environ) -> RankInfo:
    """Reads the launcher's variables. A process without a launcher has none.

    Raises `ConfigError` if they are unreadable or incomplete, or if there are several machines and none is
    named as the first.
    """
    launcher = launcher_of(env)
    if launcher is None:
        refuse_half_a_place(env)
        return RankInfo()
    names = LAUNCHERS[launcher]
    right = f"start the ranks with {launcher}"
    rank, world_size, local_rank = (number(env, name, right, least=-MOST_RANKS) for name in names[:3])
    count = tasks_here if launcher == "srun" else number
    local_world_size = count(env, names[3], right) if names[3] in env else 1
    port = number(env, "MASTER_PORT", right, 29500 + number(env, "SLURM_JOB_ID", right, most=1 << 32) % 10000)
    if not 0 <= rank < world_size:
        raise ConfigError(
            "environment",
            f"rank {rank} of {world_size} ({launcher})",
            "ranks from 0 to the world size - 1",
        )
    if not 1 <= local_world_size <= world_size:
        wrong = f"{names[3]}={env.get(names[3])} of {names[1]}={world_size}"
        raise ConfigError("environment", wrong, "the ranks on this machine, one or more and at most all")
    if not 0 <= local_rank < local_world_size or local_rank > rank:
        wrong = (
            f"{names[2]}={local_rank} of {names[3]}={local_world_size} on the machine of {names[0]}={rank}"
        )
        raise ConfigError("environment", wrong, "the rank among those of its machine, from 0")
    if not 0 < port < 65536:
        raise ConfigError("environment", f"MASTER_PORT={port} is no port", "from 1 to 65535")
    address = host(env, "MASTER_ADDR") or (first_host(env, right) if launcher == "srun" else None)
    if address is None and launcher in SETTING and local_world_size < world_size:
        wrong = f"{launcher} started ranks on several machines, and MASTER_ADDR is not set"
        raise ConfigError("environment", wrong, f"{launcher} {SETTING[launcher]} …")
    return RankInfo(rank, world_size, local_rank, local_world_size, address or "127.0.0.1", port)


def refuse_half_a_place(env: Mapping[str, str]) -> None:
    """Raises `ConfigError` for a rank without a world size, or the reverse,
    because every rank would train alone.

    A batch script under Slurm has a rank but no step: it counts as one process.
    """
    for rank, world_size, *_ in LAUNCHERS.values():
        if rank == "SLURM_PROCID" and env.get(rank) == "0":
            continue
        if (rank in env) != (world_size in env):
            there, absent = (rank, world_size) if rank in env else (world_size, rank)
            wrong = f"{there}={env[there]} is set, and {absent} is not"
            raise ConfigError("environment", wrong, "both, as a launcher sets them, or neither")
