"""Builds the engine that a config asks for, and the stages for that engine."""

from collections.abc import Callable, Mapping, Sequence

from megacore.config import Config
from megacore.distributed.buffers import buffers_of
from megacore.distributed.mesh import Mesh
from megacore.distributed.shard import shard_of
from megacore.engine.native import NativeEngine
from megacore.engine.protocol import Engine
from megacore.model.choose import layers_of
from megacore.model.layers import Layers, sharing
from megacore.model.stage import Stage, share_by_name
from megacore.pipeline.partition import layer_ranges, placement_of, shared_parameters, stages_of

# Functions that build an engine, by `engine.kind`; for engines that are not part of the core.
Engines = Mapping[str, Callable[[Config, Sequence[Stage], Mesh], Engine]]


def build_stages(config: Config, mesh: Mesh, layers: Layers | None = None) -> list[Stage]:
    """Builds this rank's stages of a model, by default the config's, with parameters on `meta`: the engine,
    or whoever loads weights, makes what the rank keeps of them.
    """
    ranges, layers = layer_ranges(config), layers_of(config) if layers is None else layers
    shared = {name: stages_of(users, ranges) for name, users in sharing(layers, config).items()}
    if mesh.pp.size > 1 and shared != (known := shared_parameters(config)):
        raise ValueError(
            f"stages share {shared}, and the config's own layers {known}: for others nobody sums gradients"
        )
    stages = [
        Stage(config, ranges[stage], mesh, "meta", layers) for stage in placement_of(config)[mesh.pp.rank]
    ]
    share_by_name(stages)
    for buffer in buffers_of(stages).values():
        buffer.shard = mesh.placed(buffer.shard)
    for stage in stages:
        stage.compute_on(mesh.device)
        for name, parameter in stage.named_parameters():
            parameter.shard = mesh.placed(shard_of(parameter), name)  # type: ignore[attr-defined]
    return stages


def build_engine(
    config: Config, stages: Sequence[Stage], mesh: Mesh, engines: Engines | None = None
) -> Engine:
    """Build the engine over the parameters of a rank's stages, which it may move or replace. Collective.

    Parameters on `meta` become zeros, to be drawn or read (`Engine.tensors`). `engines`: further kinds.
    """
    kind = config.engine.kind
    if engines is not None and kind in engines:
        return engines[kind](config, stages, mesh)
    if kind == "fsdp" and config.token_ranks != 1:  # with one rank there is nothing to divide
        # Imports DTensor, which takes seconds that no other run should wait for.
        from megacore.engine.fsdp import FSDPEngine

        return FSDPEngine(config, stages, mesh)
    if kind in ("native", "fsdp"):
        return NativeEngine(config, stages, mesh)
    raise RuntimeError(
        f"engine.kind={kind} is not part of the core: pass engines=ENGINES of megacore.tools.{kind}.engine"
    )
