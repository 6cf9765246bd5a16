"""How ranks meet before there is any group, and that each has a device of its own."""

import os
import socket
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from megacore.distributed.rank_info import RankInfo
from megacore.errors import ConfigError

NAME_SECONDS = 10.0  # for a name server that has not answered yet


def meet(place: RankInfo, timeout: timedelta, patience: timedelta | None = None) -> dist.Store | None:
    """The store through which ranks find each other, in the launcher's process or in
    rank 0's; None for one rank alone.

    It waits for whoever holds the store, at most `patience`, and for no other rank: who has not come can then
    be told. `timeout` is that of the store's own operations.

    Raises:
        TimeoutError: nobody has opened the store, or no host has the name under which it is looked for.
    """
    if place.world_size == 1:
        return None
    patience = timeout if patience is None else min(timeout, patience)
    address, port, opens = place.master_address, place.master_port, place.rank == 0
    # PyTorch and DeepSpeed read them there
    os.environ.update({"MASTER_ADDR": address, "MASTER_PORT": str(port)})
    # The store's own client would try a wrong name for minutes. In Kubernetes a name comes with its pod,
    # which may be scheduled later.
    check_name(address, patience.total_seconds() if "KUBERNETES_SERVICE_HOST" in os.environ else NAME_SECONDS)
    try:
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # the launcher holds it
            store, *_ = next(dist.rendezvous("env://", place.rank, place.world_size, timeout=patience))
        else:
            world = place.world_size
            store = dist.TCPStore(
                address, port, world, opens, patience, wait_for_workers=False, multi_tenant=True
            )
    except dist.DistError as error:
        if opens:
            raise
        wrong = (
            f"nobody opened the store of the ranks at {address}:{port} within "
            f"{patience.total_seconds():.0f} s"
        )
        raise TimeoutError(f"{wrong}: rank 0 was not started, or the network to it is cut") from error
    store.set_timeout(timeout)
    return store


def check_name(name: str, patience: float) -> None:
    """Returns when a host's name is known here.

    Raises `TimeoutError` if it is not within `patience` seconds.
    """
    deadline = time.monotonic() + patience
    while True:
        try:
            socket.getaddrinfo(name, None)
            return
        except OSError as error:
            if time.monotonic() > deadline:
                wrong = (
                    f"{socket.gethostname()} knows no host named {name}, where the ranks are to meet "
                    f"(MASTER_ADDR): {error.strerror}"
                )
                raise TimeoutError(wrong) from None
            time.sleep(1.0)


def use_device(device: torch.device) -> None:
    """Lets the calling thread compute on a rank's device: every thread begins with the first that it sees."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def claim(device: torch.device, place: RankInfo, store: dist.Store) -> None:
    """Raises `ConfigError` where another rank has claimed this rank's GPU; asked only where not
    every rank of a machine sees one.
    """
    if device.type != "cuda" or torch.cuda.device_count() >= place.local_world_size:
        return
    key = f"gpu/{socket.gethostname()}/{torch.cuda.get_device_properties(device).uuid}"
    owner = store.compare_set(key, "", str(place.rank)).decode()
    if owner != str(place.rank):
        wrong = f"rank {place.rank} has no GPU of its own: rank {owner} computes on the one that it sees"
        raise ConfigError("train.device", wrong, "at most one rank a GPU, or cpu")
