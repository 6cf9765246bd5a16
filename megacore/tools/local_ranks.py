"""What a script needs to start ranks of its own on this machine."""

import contextlib
import random
import socket


def free_port() -> int:
    """A free port, below the range that the kernel gives to clients, so that no client takes it first."""
    while True:
        port = random.SystemRandom().randrange(10_000, 32_000)
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port


def rank_environment(rank: int, world: int, port: int) -> dict[str, str]:
    """The variables that torchrun sets on one node."""
    numbers = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": world,
        "LOCAL_WORLD_SIZE": world,
        "MASTER_PORT": port,
    }
    return {"MASTER_ADDR": "127.0.0.1"} | {name: str(value) for name, value in numbers.items()}
