"""Lets one process play a rank of a mesh of any size, on a device that holds
nothing and with nobody to talk to.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

from megacore.config import Config
from megacore.config.implied import attention_of
from megacore.distributed.events import Listeners
from megacore.distributed.mesh import Mesh
from megacore.distributed.rank_info import RankInfo
from megacore.errors import ConfigError
from megacore.tools.choices.meta_watch import MetaWatch
from megacore.tools.choices.partition import partitioned
from megacore.tools.choices.settle import settled_alone
from megacore.tools.choices.torch_patches import fsdp_on_meta, on_meta
from megacore.tools.planner.fsdp_units import divides_parameters

META = torch.device("meta")


def as_on_its_device(config: Config) -> Config:
    """The config with what its `auto` settings would choose on the device that it is
    for, because here they see `meta`.

    Raises `ConfigError` for an engine whose own code does not run on such tensors.
    """
    engine, train = config.engine, config.train
    if engine.kind == "deepspeed":
        wrong = "DeepSpeed asks for a real device"
        raise ConfigError(
            "engine.kind",
            wrong,
            "native or fsdp; without --simulate-ranks its memory is predicted by formula",
        )
    if engine.cpu_offload:
        raise ConfigError(
            "engine.cpu_offload",
            "a dry run has no host memory for parameters",
            "false; it is predicted by formula",
        )
    kernels = config.model.kernels
    if kernels == "auto":
        fused = train.device != "cpu" and train.precision != "fp64"
        kernels = "triton" if fused else "eager"
    model = config.model.model_copy(update={"attention": attention_of(config), "kernels": kernels})
    return settled_alone(
        config.model_copy(update={"model": model, "train": train.model_copy(update={"compile": False})})
    )


class DryMesh(Mesh):
    """A rank's mesh, with communicators that nobody answers. Each host has `host_size` consecutive ranks."""

    def __init__(self, config: Config, rank: int, watch: MetaWatch, host_size: int) -> None:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        world = config.world_size
        self.host_size = host_size
        store = FakeStore() if world > 1 else None
        super().__init__(
            partitioned(config),
            RankInfo(rank, world),
            META,
            store=store,
            backend="fake",
            listeners=Listeners([watch]),
        )

    def hosts(self, name_here: str | None = None) -> list[tuple[int, int]]:
        return [divmod(rank, self.host_size) for rank in self.world.ranks]


@contextmanager
def playing(config: Config, rank: int, watch: MetaWatch, host_size: int = 8) -> Iterator[Mesh]:
    """The mesh of a rank, see `DryMesh`.

    Within, kernels that need a device are not launched, and `watch` sees what is done.
    """
    fsdp = fsdp_on_meta(watch.release, watch.note) if divides_parameters(config) else nullcontext()
    with on_meta("cpu" if config.train.device == "cpu" else "cuda"), fsdp, watch:
        mesh = DryMesh(config, rank, watch, host_size)
        try:
            yield mesh
        finally:
            mesh.close()
