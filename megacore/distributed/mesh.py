"""The mesh of ranks has named axes (`axes.AXES`), and process groups along products of axes.

A `Mesh` is built once, after the config is checked, and handed down. A block takes its groups from it.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megacore.config import Config
from megacore.config.optim_groups import ParameterGroups
from megacore.config.precision import ELEMENT_BYTES
from megacore.distributed.axes import AXES, Axis, called, describe, ranks_along, sums_of
from megacore.distributed.communicator import Communicator, Group
from megacore.distributed.events import Listeners
from megacore.distributed.hierarchical_reduce import Levels, by_host
from megacore.distributed.rank_info import RankInfo, host_name
from megacore.distributed.rendezvous import meet
from megacore.distributed.shared_memory import join
from megacore.distributed.topology import Topology, fsdp_holders, fsdp_products
from megacore.pipeline.partition import placement_of


class Unconnected(Communicator):
    """Stands for the wire of ranks that never communicate with each other.

    A communicator would cost memory and start-up time.
    """

    def __init__(self, name: str) -> None:
        self.key = name

    def __getattribute__(self, operation: str) -> Any:
        key = object.__getattribute__(self, "key")
        if operation == "key":
            return key
        raise AssertionError(f"{operation} over {key}, which `Mesh._used` does not list")


def prioritised(backend: str) -> Any:
    """Options that let the device prefer a communicator's work to what it computes meanwhile.

    Else a large product that was begun first holds up a transfer, and overlap depends on luck. None for
    backends without such streams.
    """
    return dist.ProcessGroupNCCL.Options(is_high_priority_stream=True) if backend == "nccl" else None


class Mesh(Topology):
    """The process groups of one rank, and its coordinates.

    All groups of equal ranks have one communicator. `_used` lists the products along which a config
    communicates, by the axes alone. Only these are made, before there is a parameter, in one order on every
    rank.
    """

    def __init__(
        self,
        config: Config,
        place: RankInfo,
        device: torch.device,
        axes: Sequence[Axis] = AXES,
        sizes: Mapping[str, int] | None = None,
        used: Sequence[tuple[str, ...]] = (),
        views: Sequence[Sequence[Axis]] = (),
        store: dist.Store | None = None,
        backend: str | None = None,
        listeners: Listeners | None = None,
    ) -> None:
        """Joins the ranks; collective. `config` must be checked against the world size.

        If you add to `axes` or `views`, give the `sizes` that `config.parallel` does not have. `used`:
        further products of axes, for layers that communicate along more than one axis at once.
        `store`: in which the ranks have met, if they have (`rendezvous.meet`). `backend`: one that no config
        can name.
        `listeners`: who is told what this rank does, from the first operation on.
        """
        p = config.parallel
        self.place, self.device = place, device
        self.listeners = Listeners(rank=place.rank) if listeners is None else listeners
        self.timeout = timedelta(seconds=p.timeout_seconds)
        usual = ("nccl" if device.type == "cuda" else "gloo") if p.backend == "auto" else p.backend
        self.backend = backend or usual
        self.store = meet(place, self.timeout) if store is None else store  # in which the ranks have met
        if self.store is not None:
            # No device_id: with it NCCL would split each group off the world, which needs every rank at every
            # split.
            dist.init_process_group(
                self.backend,
                store=self.store,
                rank=place.rank,
                world_size=place.world_size,
                timeout=self.timeout,
                pg_options=prioritised(self.backend),
            )
        self.communicators: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
        self.silent: dict[tuple[str, ...], Group] = {}  # groups that are only asked for their ranks
        self.used, self.divides = used, config.engine.kind == "fsdp"
        self.levels_of: dict[tuple[int, ...], Levels] = {}  # by the ranks that they divide
        super().__init__(config, place.rank, axes, sizes, views)
        if config.engine.reduce_levels == 2:
            self._divide_by_host()
        self._connect()
        self.groups.setdefault(("pp",), self._create("pp", self._ranks_along(("pp",))))
        self._connect_stages(config)
        if config.parallel.shared_memory:
            self._share_memory(config)

    def group(self, *axes: str) -> Group:
        """The group of this rank along a product of axes.

        Its ranks can communicate if `_used` lists the product.
        """
        axes = self._several(axes)
        if axes not in self.groups:
            name, ranks = "×".join(axes), self._ranks_along(axes)
            if len(ranks) > 1 and ranks not in self.communicators:
                return self.silent.setdefault(
                    axes, Group(name, ranks, ranks.index(self.rank), Unconnected(name))
                )
            self.groups[axes] = self._create(name, ranks)
        return self.groups[axes]

    def _create_groups(self, config: Config) -> None:
        # communicators that this process has made
        everyone, self.made = tuple(range(self.place.world_size)), 0
        self.communicators[everyone] = dist.group.WORLD if len(everyone) > 1 else None
        self.world = self._create("world", everyone)
        for product in map(self._several, (*self._used(config), *self.used)):
            self.groups[product] = self._create("×".join(product), self._ranks_along(product))
        # a rank that is in some takes its place among those of the others
        for ranks in dict.fromkeys(self._holders(config).values()):
            if self.rank in ranks:
                self._create("tied", ranks)
            else:
                self._communicator("not tied", (self.rank,))  # unused: it keeps the number of groups equal
        super()._create_groups(config)

    def _used(self, config: Config) -> Iterator[tuple[str, ...]]:
        """The products of axes along which a config has collectives.

        The pipeline's ranks only send messages, see `_connect_stages`.
        """
        for view, sizes in zip(self.views, self.sizes_of_views, strict=True):
            for axis in reversed(view):  # layers communicate along it
                if sizes[axis.name] > 1 and (axis.splits or not (axis.layers or axis.samples)):
                    yield (axis.name,)
            for product in sums_of(view):
                yield from (
                    fsdp_products(product, self.token_axes) if config.engine.kind == "fsdp" else (product,)
                )
                # its matrices go to owners
                if any(group.rule.whole for group in ParameterGroups(config.optim).every):
                    beside = tuple(axis.name for axis in view if not axis.layers and axis.name not in product)
                    divided = config.engine.shard_optimizer
                    yield (
                        fsdp_holders(product, self.token_axes)
                        if config.engine.kind == "fsdp"
                        else (*(product if divided else ()), *beside)
                    )
        if config.model.num_experts is not None:
            # tokens go to parts of experts; a sequence's tokens are counted
            yield from (("ep", "etp"), ("cp", "tp"))
        if config.engine.kind == "deepspeed":
            yield tuple(axis.name for axis in self.axes if not axis.tokens)

    def _create(self, name: str, ranks: tuple[int, ...]) -> Group:
        """Makes a group.

        It makes a communicator only if none has the same ranks: each costs memory and start-up time.
        """
        # FSDP2 takes no weight without a communicator
        connected = len(ranks) > 1 or name.startswith("shard×")
        if connected and ranks not in self.communicators:
            self.communicators[ranks] = self._communicator(name, ranks)
        process_group = self.communicators[ranks] if connected else None
        wire = (
            None
            if process_group is None
            else Communicator(process_group, len(ranks), listeners=self.listeners)
        )
        return Group(name, ranks, ranks.index(self.rank), wire)

    def _communicator(self, name: str, ranks: tuple[int, ...]) -> dist.ProcessGroup:
        """Makes a communicator, which only its ranks meet to do: a rank makes its own few, and
        not those of the whole cluster.

        Its members find each other by a name that PyTorch makes of the ranks and of how many groups this
        process has. So every rank makes equally many, in one order.
        """
        self.made += 1
        return dist.new_group(
            ranks,
            timeout=self.timeout,
            backend=self.backend,
            pg_options=prioritised(self.backend),
            use_local_synchronization=True,
            group_desc=name,
        )

    def owner_index(self, rank: int, axes: Sequence[str]) -> int:
        """See `Topology`. In two levels the ranks on one place of all hosts are neighbours."""
        ranks = ranks_along(axes, rank, self.sizes_of_views[self._view(axes)])
        if self._ranks_along(axes) not in self.levels_of:
            return super().owner_index(rank, axes)
        found = by_host(ranks, self.host_of, rank)
        assert found is not None
        within, between = found
        return within.index(rank) * len(between) + between.index(rank)

    @property
    def levels(self) -> Levels:
        """The ranks of `gradient_group`, as they sum gradients."""
        return self.levels_along(*self.token_axes)

    def levels_along(self, *axes: str) -> Levels:
        """See `Topology`.

        There are two levels if `engine.reduce_levels` asks for them and hosts allow them, and under the fsdp
        engine: the ranks that hold the shards of one copy, and those that hold copies of one shard.
        """
        if axes and self.divides:
            shard, replicate = fsdp_products(axes, self.token_axes)
            return Levels(self.group(*shard), self.group(*replicate))
        one = super().levels_along(*axes)
        return self.levels_of.get(one.between.ranks, one)

    def _divide_by_host(self) -> None:
        """Makes the groups of two levels for each product of axes, if the hosts of all ranks that sum
        along it have as many of them.
        """
        self.host_of = hosts = [host for host, _ in self.hosts()]
        for view, sizes in zip(self.views, self.sizes_of_views, strict=True):
            for product in sums_of(view):
                summing = {ranks_along(product, rank, sizes) for rank in self.world.ranks}
                own = next(ranks for ranks in summing if self.rank in ranks)
                if own in self.levels_of or not all(by_host(ranks, hosts, ranks[0]) for ranks in summing):
                    continue
                found = by_host(own, hosts, self.rank)
                assert found is not None
                names = (
                    f"{called(product, self.axes)} within a host",
                    f"{called(product, self.axes)} between hosts",
                )
                made = self.made
                groups = [self._create(name, ranks) for name, ranks in zip(names, found, strict=True)]
                # where a level is a group that is there already, which may be so on some ranks alone
                while self.made < made + len(names):
                    # unused: it keeps the number of groups equal
                    self._communicator("no level", (self.rank,))
                self.groups |= {(group.name,): group for group in groups}
                self.levels_of[own] = Levels(*groups)

    def hosts(self, name_here: str | None = None) -> list[tuple[int, int]]:
        """For each rank of the world, a number for its host, and its local rank there; collective.

        `name_here`: a name of this rank's host, instead of `host_name`.
        """
        name = hashlib.sha256((name_here or host_name()).encode()).digest()[:7]
        own = torch.tensor([int.from_bytes(name), self.place.local_rank], device=self.device)
        hosts = own if self.world.communicator is None else own.new_empty(2 * self.world.size)
        if self.world.communicator is not None:
            self.world.communicator.start_all_gather(own, hosts).wait()
        return [(host, local) for host, local in hosts.view(-1, 2).tolist()]

    def _share_memory(self, config: Config) -> None:
        """Gives tensor ranks on one machine's CPU shared memory for the exchanges of every layer."""
        train, tp, timeout = config.train, self.tp, config.parallel.timeout_seconds
        if tp.communicator is None or self.device.type != "cpu":
            return
        assert self.store is not None
        size = config.rank_tokens * config.model.hidden_size * ELEMENT_BYTES[train.precision]
        key = "shared/" + "-".join(map(str, tp.ranks))
        tp.communicator.shared = join(
            tp.communicator.process_group, key, tp.rank, tp.size, size, self.store, timeout=timeout
        )

    def _connect(self) -> None:
        """Sets up the communicators now, in one order on every rank: NCCL does so at the first
        operation, for which it needs all ranks.
        """
        for communicator in self.communicators.values():
            if communicator is not None:
                dist.all_reduce(torch.zeros(1, device=self.device), group=communicator)

    def _connect_stages(self, config: Config) -> None:
        """Gives each direction between two ranks of the pipeline a stream of its own, and sets them up now.

        Operations of one communicator run one after the other, so a receive that is posted ahead would hold
        up every send behind it. On NCCL, PyTorch makes a communicator for each pair of ranks that send and
        receive one by one, in each process group: with a second group, for messages to lower ranks, there are
        two. Setting one up takes both ranks, which is no part of the plan's order.
        """
        pp, place = (
            self.pp,
            {stage: rank for rank, stages in enumerate(placement_of(config)) for stage in stages},
        )
        if pp.communicator is None:
            return
        pp.communicator.downward = self._communicator("pp downward", pp.ranks)
        pairs = {tuple(sorted((place[stage - 1], place[stage]))) for stage in place if stage}
        for low, high in sorted(pair for pair in pairs if pair[0] != pair[1]):
            for sender, receiver in ((low, high), (high, low)):
                token = torch.zeros(1, device=self.device)
                if pp.rank == sender:
                    pp.communicator.send(token, pp.ranks[receiver]).wait()
                elif pp.rank == receiver:
                    pp.communicator.receive(token, pp.ranks[sender]).wait()

    def print(self, line: str) -> None:
        """Print a line once for the run: on rank 0."""
        if self.rank == 0:
            print(line, flush=True)

    def barrier(self) -> None:
        """Waits for every rank."""
        if self.world.communicator is not None:
            self.world.communicator.barrier([self.device.index] if self.device.type == "cuda" else None)

    def close(self) -> None:
        """Destroys the groups, unless an engine has done so."""
        self.listeners.close()
        if self.world.process_group is not None and dist.is_initialized():
            dist.destroy_process_group()

    def describe(self) -> str:
        """One line: the axes and their sizes, what ranks communicate by, and on a
        CPU how many threads each has.
        """
        memory = (
            " and shared memory" if self.tp.communicator is not None and self.tp.communicator.shared else ""
        )
        ranks = (
            f"{self.place.world_size} ranks, {self.backend}{memory}"
            if self.place.world_size > 1
            else "1 rank"
        )
        if (levels := self.levels_of.get(self.gradient_group.ranks)) is not None:
            ranks += (
                f", gradients summed within hosts ({levels.within.size} ranks) and between them "
                f"({levels.between.size})"
            )
        threads = f", threads {torch.get_num_threads()}" if self.device.type == "cpu" else ""
        views = "".join(
            f", also {describe(v, sizes)}"
            for v, sizes in zip(self.views[1:], self.sizes_of_views[1:], strict=True)
        )
        return f"{describe(self.axes, self.sizes)} = {ranks}{views}{threads}"
