"""The environment variables of a process that computes on a GPU.

CUDA, PyTorch's allocator and NCCL read each once, when they start.
"""

import os

from megacore.config import Config

ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # the second is the older name of the first
P2P_CHANNELS = 4


def environment(config: Config) -> dict[str, str]:
    """What megacore sets where the user has set nothing; docs/performance.md explains each.

    CUDA_DEVICE_MAX_CONNECTIONS: how many queues the host feeds; streams beyond them share one, and a kernel
    behind a receive that waits for another rank would wait too. There are 8 by default. An interleaved
    pipeline has more streams: one that computes, one for each communicator, and those of copies. The usual 1
    of other code bases makes a transfer start before the product that follows it; here the priority of the
    communicators' streams does that (`mesh.prioritised`).

    PYTORCH_ALLOC_CONF: freed blocks of several sizes become one again. Else memory that is reserved and
    cannot be used grows with every
    new size: of logits, of gathered units, of the last microbatch.

    NCCL_MAX_P2P_NCHANNELS: a receive that is posted ahead is a kernel that holds one multiprocessor a channel
    until its message comes, while blocks compute. Only where a pipeline posts receives and nothing else sends
    from rank to rank: context ranks need all channels.
    """
    found = {"CUDA_DEVICE_MAX_CONNECTIONS": "32", ALLOCATOR[0]: "expandable_segments:True"}
    if config.parallel.pipeline > 1 and config.parallel.context == 1:
        found["NCCL_MAX_P2P_NCHANNELS"] = str(P2P_CHANNELS)
    return found


def set_up_environment(config: Config) -> None:
    """Sets what the user has not set. Call it before the first call of CUDA, be it only to count devices."""
    for name, value in environment(config).items():
        if name != ALLOCATOR[0] or not any(other in os.environ for other in ALLOCATOR):
            os.environ.setdefault(name, value)
