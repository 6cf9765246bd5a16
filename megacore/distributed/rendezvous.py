"""How ranks meet before there is any group, and that each has a device of its own."""

import os
import socket
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from megacore.distributed.rank_info import RankInfo
from megacore.errors import ConfigError

NAME_SECONDS = 10.0  # for a name server that has not answered yet
IN_USE_SECONDS = 10.0  # for the processes of the job's previous start to end, and leave the port
ANSWER = timedelta(seconds=30)  # for a store that listens to answer thousands of ranks
PAUSE_SECONDS = 0.5
WORLD_KEY = "world size"


def meet(place: RankInfo, timeout: timedelta, patience: timedelta | None = None) -> dist.Store | None:
    """The store through which ranks find each other, in the launcher's process or in
    rank 0's; None for one rank alone.

    It waits for the process that holds the store, at most `patience`, and for no other rank, so that a rank
    that has not come can be reported. `timeout` is that of the store's own operations.

    Raises:
        TimeoutError: nobody has opened the store, or no host has the name under which it is looked for.
        ConfigError: another program or another job uses the port, and does not end within `IN_USE_SECONDS`.
    """
    if place.world_size == 1:
        return None
    patience = timeout if patience is None else min(timeout, patience)
    address, port = place.master_address, place.master_port
    # PyTorch and DeepSpeed read them there
    os.environ.update({"MASTER_ADDR": address, "MASTER_PORT": str(port)})
    # The store's own client would try a wrong name for minutes. In Kubernetes a name comes with its pod,
    # which may be scheduled later.
    check_name(address, patience.total_seconds() if "KUBERNETES_SERVICE_HOST" in os.environ else NAME_SECONDS)
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # the launcher holds it
        try:
            launcher_store, *_ = next(
                dist.rendezvous("env://", place.rank, place.world_size, timeout=patience)
            )
        except dist.DistError as error:
            raise not_opened(place, patience) from error
        # `torchrun --max-restarts` keeps its store: it still has the addresses and alarms of failed starts.
        store: dist.Store = dist.PrefixStore(
            f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", launcher_store
        )
    else:
        store = meet_at_rank_0(place, patience)
    store.set_timeout(timeout)
    return store


def meet_at_rank_0(place: RankInfo, patience: timedelta) -> dist.Store:
    """The store in rank 0's process.

    A port in use may be that of the job's previous start, whose processes are about to end.
    """
    deadline = time.monotonic() + IN_USE_SECONDS
    while True:
        try:
            store = open_store(place, patience) if place.rank == 0 else join_store(place, patience)
            claim_rank(place, store)
            return store
        except ConfigError:
            if time.monotonic() > deadline:
                raise
        time.sleep(PAUSE_SECONDS)


def open_store(place: RankInfo, patience: timedelta) -> dist.Store:
    """Opens the store in this process, which is rank 0's. Raises `ConfigError` if its port is in use."""
    address, port, world_size = place.master_address, place.master_port, place.world_size
    try:
        store = dist.TCPStore(
            address, port, world_size, True, patience, wait_for_workers=False, multi_tenant=True
        )
    except dist.DistError as error:
        if "EADDRINUSE" in str(error):
            raise port_in_use(place) from None
        raise
    store.set(WORLD_KEY, str(world_size))
    return store


def join_store(place: RankInfo, patience: timedelta) -> dist.Store:
    """Connects to the store of rank 0. Raises `ConfigError` if another program listens there.

    PyTorch's client waits for an answer for ever, without a timeout, so a thread connects. And while the
    store is not open, the client looks for it less and less often, so it starts only when the port listens.
    """
    address, port, world_size = place.master_address, place.master_port, place.world_size
    deadline = time.monotonic() + patience.total_seconds()
    while not is_listening(address, port):
        if time.monotonic() > deadline:
            raise not_opened(place, patience)
        time.sleep(PAUSE_SECONDS)

    answers: list[dist.Store | Exception] = []

    def connect() -> None:
        try:
            answers.append(
                dist.TCPStore(
                    address, port, world_size, False, ANSWER, wait_for_workers=False, multi_tenant=True
                )
            )
        except Exception as error:
            answers.append(error)

    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(ANSWER.total_seconds())
    if not answers or isinstance(answers[0], dist.DistError):
        raise port_in_use(place)
    if isinstance(answers[0], Exception):
        raise answers[0]
    return answers[0]


def claim_rank(place: RankInfo, store: dist.Store) -> None:
    """Raises `ConfigError` if the store is another job's: one of another size, or one that has this rank.

    Else this rank would read and write the other job's notices, such as an alarm. If both jobs have just
    started, the second rank to claim the number gets the error.
    """
    process = f"{socket.gethostname()} {os.getpid()}"  # one that trains twice may come again
    try:
        store.wait([WORLD_KEY], ANSWER)
        is_ours = int(store.get(WORLD_KEY)) == place.world_size
    except dist.DistError:  # of a program that is not megacore
        is_ours = False
    if not is_ours or store.compare_set(f"rank {place.rank}", "", process).decode() != process:
        raise port_in_use(place)


def is_listening(address: str, port: int) -> bool:
    """Whether a program listens on the port."""
    try:
        socket.create_connection((address, port), timeout=1.0).close()
    except OSError:
        return False
    return True


def port_in_use(place: RankInfo) -> ConfigError:
    """The error of a port that is another program's."""
    return ConfigError(
        "MASTER_PORT",
        f"port {place.master_port} of {place.master_address} is in use",
        "another job? a free port: MASTER_PORT=N, deepspeed --master_port N, torchrun --master-port N",
    )


def not_opened(place: RankInfo, patience: timedelta) -> TimeoutError:
    """The error of a store that does not exist."""
    return TimeoutError(
        f"rank 0 did not open the store of the ranks at {place.master_address}:{place.master_port} within "
        f"{patience.total_seconds():.0f} s: it was not started, or the network to it is cut"
    )


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
