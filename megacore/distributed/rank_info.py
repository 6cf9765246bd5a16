"""The place of a process among all ranks of a run.

Standard library only: it is read before torch is imported.
"""

import os
import socket
from dataclasses import dataclass


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


def host_name() -> str:
    """The name of this machine; MEGACORE_HOST gives another, where several have one
    name or one stands for several.
    """
    return os.environ.get("MEGACORE_HOST") or socket.gethostname()
