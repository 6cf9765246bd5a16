"""Named axes over the ranks: pipeline × data × tensor, and the process groups along them.

Rank ``(pp · dp_size + dp) · tp_size + tp``: tensor ranks are neighbours (on one node, where the links are
fastest and every layer communicates), data next, pipeline outermost (least traffic). A `Mesh` is built
once, after the config is checked, and handed down; a layer takes the `Group` that it needs.
"""

import os
from dataclasses import dataclass, field, replace
from datetime import timedelta

import torch
import torch.distributed as dist

from megacore.config import Config
from megacore.errors import ConfigError
from megacore.ledger import Channel, Ledger
from megacore.place import Place
from megacore.plan.memory import ELEMENT_BYTES
from megacore.shared_memory import SharedMemory, join


@dataclass(frozen=True)
class Group:
    """The ranks along some axes that share the other coordinates.

    `process_group` is None for a group of one, over which every collective is the identity.
    """

    name: str
    ranks: tuple[int, ...]
    rank: int  # this process's position in `ranks`
    process_group: dist.ProcessGroup | None = None
    channel: Channel = field(default_factory=lambda: Channel(Ledger(), ()), compare=False, repr=False)  # notes what is begun over it
    shared: SharedMemory | None = field(default=None, compare=False, repr=False)  # that carries what fits into it

    @property
    def size(self) -> int:
        return len(self.ranks)


SOLO = Group("solo", (0,), 0)


class Mesh:
    """The process groups of one rank, and its coordinates.

    Groups: `tp`, `dp`, `pp` along one axis; `shard` and `replicate`, into which the fsdp engine divides dp; `model` over tp × pp
    (one whole copy of the model, over which norms add up); `tied` with the first and the last stage if they share embeddings
    (None elsewhere); `world`.
    """

    def __init__(self, config: Config, place: Place, device: torch.device) -> None:
        """Joins the ranks; collective. Raises nothing of its own: `config` is already checked against the world size."""
        p = config.parallel
        assert isinstance(p.data, int)
        self.place, self.device = place, device
        self.ledger = Ledger()
        self.store: dist.Store | None = None  # through which the ranks have met
        self.shape = (p.pipeline, p.data, p.tensor)
        self.timeout = timedelta(seconds=p.timeout_seconds)
        self.backend = ("nccl" if device.type == "cuda" else "gloo") if p.backend == "auto" else p.backend
        if place.world_size > 1:
            os.environ.setdefault("MASTER_ADDR", place.master_address)
            os.environ.setdefault("MASTER_PORT", str(place.master_port))
            self.store, *_ = next(dist.rendezvous("env://", place.rank, place.world_size, timeout=self.timeout))
            # No device_id: with it NCCL would split each group off the world, which needs every rank at every split.
            dist.init_process_group(self.backend, store=self.store, rank=place.rank, world_size=place.world_size, timeout=self.timeout)
        self.pp_rank, self.dp_rank, self.tp_rank = coordinates(place.rank, self.shape)
        # Same order on every rank: with local synchronisation only a group's members meet to create it,
        # so a rank creates its handful of groups, not the whole cluster's.
        everyone = tuple(range(place.world_size))
        whole = dist.group.WORLD if place.world_size > 1 else None
        self.world = Group("world", everyone, place.rank, whole, self.ledger.channel(everyone))
        self.groups: dict[tuple[int, ...], dist.ProcessGroup | None] = {everyone: self.world.process_group}
        self.tp = self._share(self._group("tp", "tp"), config)
        self.dp = self._group("dp", "dp")
        self.pp = self._group("pp", "pp")
        # Neighbours share: they are on one node, and what is gathered most often moves least far.
        share = config.shard_size
        first = self.dp_rank // share * share
        self.shard = self._create("shard", self.dp.ranks[first : first + share])
        self.replicate = self._create("replicate", self.dp.ranks[self.dp_rank % share :: share])
        self.model = self._group("model", "pp", "tp")
        self.tied: Group | None = None
        if config.model.tie_embeddings and self.pp.size > 1 and self.pp_rank in (0, self.pp.size - 1):
            self.tied = self._create("tied", (self.pp.ranks[0], self.pp.ranks[-1]))
        if self.backend == "nccl":
            self._connect()

    def _connect(self) -> None:
        """Lets NCCL set up its communicators now, in one order on every rank: a group whose first operation were a batch of
        sends and receives would need all of its ranks in that batch, and a pipeline's first batch has two."""
        for group in (self.world, self.tp, self.dp, self.pp, self.shard, self.replicate, self.model, self.tied):
            if group is not None and group.process_group is not None:
                dist.all_reduce(torch.zeros(1, device=self.device), group=group.process_group)

    def _group(self, name: str, *axes: str) -> Group:
        return self._create(name, ranks_along(axes, self.place.rank, self.shape))

    def _create(self, name: str, ranks: tuple[int, ...]) -> Group:
        if len(ranks) == 1:
            return Group(name, ranks, 0, None, self.ledger.channel(ranks))
        if ranks not in self.groups:  # a communicator costs memory and start-up time: equal ranks share one
            self.groups[ranks] = dist.new_group(
                ranks, timeout=self.timeout, backend=self.backend, use_local_synchronization=True, group_desc=name
            )
        return Group(name, ranks, ranks.index(self.place.rank), self.groups[ranks], self.ledger.channel(ranks))

    def _share(self, group: Group, config: Config) -> Group:
        """The group, with memory shared among its ranks for what they exchange in every layer, if they compute on one machine's CPU."""
        if not (config.parallel.shared_memory and group.size > 1 and self.device.type == "cpu"):
            return group
        assert group.process_group is not None and self.store is not None
        size = config.train.micro_batch_size * config.train.seq_len * config.model.hidden_size * ELEMENT_BYTES[config.train.precision]
        key = "shared/" + "-".join(map(str, group.ranks))
        crowded = self.place.local_world_size > len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else True
        timeout = config.parallel.timeout_seconds
        shared = join(group.process_group, key, group.rank, group.size, size, self.store, crowded=crowded, timeout=timeout)
        return replace(group, shared=shared)

    def barrier(self) -> None:
        """Waits for every rank."""
        if self.world.process_group is not None:
            with self.world.channel.during("world", "barrier", torch.empty(0)):
                dist.barrier(device_ids=[self.device.index] if self.device.type == "cuda" else None)

    def close(self) -> None:
        """Leaves the groups, unless an engine has done so."""
        if self.world.process_group is not None and dist.is_initialized():
            dist.destroy_process_group()

    def describe(self) -> str:
        """One line: the axes and their sizes."""
        pp, dp, tp = self.shape
        world = self.place.world_size
        return f"pipeline {pp} × data {dp} × tensor {tp} = " + (
            f"{world} ranks, {self.backend}{' and shared memory' if self.tp.shared else ''}" if world > 1 else "1 rank"
        )


AXES = ("pp", "dp", "tp")


def coordinates(rank: int, shape: tuple[int, int, int]) -> tuple[int, int, int]:
    """(pp, dp, tp) of a rank."""
    _, dp, tp = shape
    return rank // (dp * tp), rank // tp % dp, rank % tp


def ranks_along(axes: tuple[str, ...], rank: int, shape: tuple[int, int, int]) -> tuple[int, ...]:
    """The ranks, ascending, that agree with `rank` on every axis but `axes`."""
    fixed = [i for i, axis in enumerate(AXES) if axis not in axes]
    here = coordinates(rank, shape)
    world = range(shape[0] * shape[1] * shape[2])
    return tuple(r for r in world if all(coordinates(r, shape)[i] == here[i] for i in fixed))


def pick_device(config: Config, place: Place) -> torch.device:
    """The device that this rank computes on; raises `ConfigError` where `train.device` cannot be had."""
    wanted = config.train.device
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        if config.model.kernels == "triton" and os.environ.get("TRITON_INTERPRET") != "1":
            raise ConfigError("model.kernels", "triton needs a GPU, and this rank computes on the CPU", "auto, or TRITON_INTERPRET=1")
        if config.parallel.backend == "nccl":
            raise ConfigError("parallel.backend", "nccl needs GPUs, and this rank computes on the CPU", "auto or gloo")
        return torch.device("cpu")
    if config.parallel.backend == "gloo":
        raise ConfigError("parallel.backend", "gloo moves no GPU tensors between stages", "auto or nccl; or train.device=cpu")
    if not torch.cuda.is_available():
        raise ConfigError("train.device", "cuda was asked for and PyTorch sees no GPU", "auto or cpu")
    if place.local_rank >= torch.cuda.device_count():
        wrong = f"local rank {place.local_rank} has no GPU of its own: this machine has {torch.cuda.device_count()}"
        raise ConfigError("train.device", wrong, "at most one rank a GPU, or cpu")
    device = torch.device("cuda", place.local_rank)
    torch.cuda.set_device(device)
    return device
