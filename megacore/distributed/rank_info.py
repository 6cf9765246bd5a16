"""The place of a process among all that a launcher started. Standard library only: it is read before torch is imported."""

import contextlib
import os
import random
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from megacore.distributed.environment import MOST_RANKS, first_host, host, number, tasks_here
from megacore.errors import ConfigError


@dataclass(frozen=True)
class RankInfo:
    """A process's ranks, the world size, and where the ranks meet, as the launcher has said."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    master_address: str = "127.0.0.1"
    master_port: int = 29500
    guest: bool = False  # whether the process belongs to another program, which ends it itself


# Each launcher's variables for (rank, world size, local rank, ranks on this machine); Slurm says the last for all machines, by their
# number. The first launcher found counts.
LAUNCHERS = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    "deepspeed": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE"),
    "mpirun": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    "mpiexec": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),  # MPICH's, and Intel's
    "srun": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
}

SETTING = {"mpirun": "-x MASTER_ADDR=<the first host>", "mpiexec": "-genv MASTER_ADDR <the first host>"}  # a variable of all ranks
LOCAL_TOO = ("torchrun", "mpiexec")  # deepspeed has a name of its own for the last; srun sets MPICH's first two for programs of MPI


def place_from_environment(env: Mapping[str, str] = os.environ) -> RankInfo:
    """Reads the launcher's variables. A process without a launcher has none.

    Raises `ConfigError` if they are unreadable or incomplete, or if there are several machines and none is named as the first.
    """
    for launcher, names in LAUNCHERS.items():
        if names[0] not in env or names[1] not in env or (launcher in LOCAL_TOO and names[3] not in env):
            continue
        right = f"start the ranks with {launcher}"
        rank, world_size, local_rank = (number(env, name, right, least=-MOST_RANKS) for name in names[:3])
        count = tasks_here if launcher == "srun" else number
        local_world_size = count(env, names[3], right) if names[3] in env else 1
        port = number(env, "MASTER_PORT", right, 29500 + number(env, "SLURM_JOB_ID", right, most=1 << 32) % 10000)
        if not 0 <= rank < world_size:
            raise ConfigError("environment", f"rank {rank} of {world_size} ({launcher})", "ranks from 0 to the world size - 1")
        if not 1 <= local_world_size <= world_size:
            wrong = f"{names[3]}={env.get(names[3])} of {names[1]}={world_size}"
            raise ConfigError("environment", wrong, "the ranks on this machine, one or more and at most all")
        if not 0 <= local_rank < local_world_size or local_rank > rank:
            wrong = f"{names[2]}={local_rank} of {names[3]}={local_world_size} on the machine of {names[0]}={rank}"
            raise ConfigError("environment", wrong, "the rank among those of its machine, from 0")
        if not 0 < port < 65536:
            raise ConfigError("environment", f"MASTER_PORT={port} is no port", "from 1 to 65535")
        address = host(env, "MASTER_ADDR") or (first_host(env, right) if launcher == "srun" else None)
        if address is None and launcher in SETTING and local_world_size < world_size:
            wrong = f"{launcher} started ranks on several machines, and MASTER_ADDR is not set"
            raise ConfigError("environment", wrong, f"{launcher} {SETTING[launcher]} …")
        return RankInfo(rank, world_size, local_rank, local_world_size, address or "127.0.0.1", port)
    refuse_half_a_place(env)
    return RankInfo()


def host_name(env: Mapping[str, str] = os.environ) -> str:
    """The name of this machine; MEGACORE_HOST gives another, where several have one name or one stands for several."""
    return env.get("MEGACORE_HOST") or socket.gethostname()


def refuse_half_a_place(env: Mapping[str, str]) -> None:
    """Raises `ConfigError` for a rank without a world size, or the reverse, because every rank would train alone.

    A batch script under Slurm has a rank but no step: it counts as one process.
    """
    for rank, world_size, *_ in LAUNCHERS.values():
        if rank == "SLURM_PROCID" and env.get(rank) == "0":
            continue
        if (rank in env) != (world_size in env):
            there, absent = (rank, world_size) if rank in env else (world_size, rank)
            wrong = f"{there}={env[there]} is set, and {absent} is not"
            raise ConfigError("environment", wrong, "both, as a launcher sets them, or neither")


def free_port() -> int:
    """A free port, below the range that the kernel gives to clients, so that no client takes it first."""
    while True:
        port = random.SystemRandom().randrange(10_000, 32_000)
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port


def rank_environment(rank: int, world: int, port: int) -> dict[str, str]:
    """The variables that torchrun sets on one node."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_PORT": port}
    return {"MASTER_ADDR": "127.0.0.1"} | {name: str(value) for name, value in numbers.items()}
