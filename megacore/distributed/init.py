"""Joins a rank to its run: the process group and the mesh, with a guard where
whoever starts the run brings one.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from megacore.caches import keep_triton_local
from megacore.config import Config
from megacore.distributed.collectives import all_reduce, broadcast_text
from megacore.distributed.events import Listener, Listeners
from megacore.distributed.mesh import Mesh
from megacore.distributed.rank_info import RankInfo, host_name
from megacore.distributed.rendezvous import claim, meet
from megacore.errors import ConfigError, UserError

# until the first step is done, a rank may stand still this many times as long as later: it compiles, or reads
# a checkpoint
START_UP = 4.0


class Guard:
    """Looks after a rank from when it joins until it leaves, such as `tools.diagnosis.guardians`.

    This one does nothing.
    """

    listeners: Sequence[Listener] = ()  # its own, which are told of the first operation too

    def met(self, store: dist.Store) -> None:
        """The ranks have met in `store`.

        The devices are claimed and the groups made next, for which they wait for each other.
        """

    def failed(self, error: BaseException, mesh: Mesh | None) -> None:
        """The rank cannot go on. This may end the process; if it returns, the exception is raised."""

    def close(self) -> None:
        """The rank has done its part, and leaves the mesh next."""


@contextmanager
def own_mistakes() -> Iterator[None]:
    """A context around files that every rank opens by itself.

    A `UserError` in it may concern this machine alone, and names it.
    """
    try:
        yield
    except UserError as error:
        error.of_this_machine = True
        raise


def check_source(config: Config, mesh: Mesh) -> None:
    """Raises `ConfigError` on all ranks unless every rank has the same custom layers: the same file of
    `model.source`, and of `model.hf` the same config.json and version of transformers.

    Collective, if there is one.
    """
    model = config.model
    if not model.is_custom:
        return
    described = []
    if model.source is not None:
        described.append(f"a file of the digest {model.source_digest}")
    if model.hf is not None:
        described.append(f"transformers {model.hf_version} and a config.json of the digest {model.hf_digest}")
    model_here = " and ".join(described)
    first, size = broadcast_text(model_here, mesh.world, mesh.device), mesh.world.size
    other = torch.tensor(size if model_here == first else mesh.world.rank, device=mesh.device)
    if (lowest := int(all_reduce(other, mesh.world, dist.ReduceOp.MIN))) < size:
        wrong = f"rank {lowest} on {host_name()} has {model_here}, and rank 0 {first}"
        raise ConfigError(
            model.custom_key,
            broadcast_text(wrong, mesh.world, mesh.device, source=lowest),
            "the same file on all machines" if model.hf is None else "the same on all machines",
        )


@contextmanager
def joined(
    config: Config,
    place: RankInfo,
    device: torch.device,
    guard: Guard | None = None,
    listeners: Sequence[Listener] = (),
) -> Iterator[Mesh]:
    """Return a context with the mesh, for a process that is set up (`tools.machine`).

    `guard` watches this rank meanwhile. Its listeners and `listeners` are told what the rank does, from the
    first operation on.
    """
    guard = guard or Guard()
    mesh, parallel = None, config.parallel
    all_listeners = Listeners([*guard.listeners, *listeners], place.rank)
    try:
        if device.type == "cuda":
            keep_triton_local()
        patience = (
            None if parallel.hang_seconds is None else timedelta(seconds=START_UP * parallel.hang_seconds)
        )
        store = meet(place, timedelta(seconds=parallel.timeout_seconds), patience)
        if store is not None:
            guard.met(store)
            claim(device, place, store)
        mesh = Mesh(config, place, device, store=store, listeners=all_listeners)
        check_source(config, mesh)
        yield mesh
    except BaseException as error:
        guard.failed(error, mesh)
        all_listeners.close()  # in another program's process
        raise
    guard.close()
    mesh.close()
