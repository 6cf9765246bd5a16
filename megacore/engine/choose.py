"""Builds the engine that a config asks for, and the stages for that engine."""

from collections.abc import Sequence

import torch

from megacore.config import Config
from megacore.config.optim_groups import ParameterGroups
from megacore.distributed.buffers import buffers_of
from megacore.distributed.mesh import Mesh
from megacore.distributed.shard import shard_of
from megacore.engine.deepspeed import DeepSpeedEngine, check_machine
from megacore.engine.native import NativeEngine
from megacore.engine.protocol import Engine
from megacore.model.layers import Layers
from megacore.model.stage import Stage, share_by_name, whole_model
from megacore.pipeline.partition import layer_ranges, placement_of


def build_stages(config: Config, mesh: Mesh, layers: Layers | None = None) -> list[Stage]:
    """Builds this rank's stages of a model, by default the config's, with parameters on `meta`: the engine, or whoever loads weights,
    makes what the rank keeps of them."""
    ranges = layer_ranges(config)
    stages = [Stage(config, ranges[stage], mesh, "meta", layers) for stage in placement_of(config)[mesh.pp.rank]]
    share_by_name(stages)
    for buffer in buffers_of(stages).values():
        buffer.shard = mesh.placed(buffer.shard)
    for stage in stages:
        stage.compute_on(mesh.device)
        for name, parameter in stage.named_parameters():
            parameter.shard = mesh.placed(shard_of(parameter), name)  # type: ignore[attr-defined]
    return stages


def check_engine(config: Config, device: torch.device) -> None:
    """Raises `ConfigError` if this machine lacks what `engine.kind` needs, or the model the parameters that `optim.groups` names."""
    groups = ParameterGroups(config.optim)
    if config.optim.groups or groups.every[-1].rule.whole:
        groups.check(parameter_shapes(config))
    if config.engine.kind == "deepspeed":
        check_machine(config, device)


def parameter_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """The logical shape of every parameter of a config's model, by name."""
    return {name: shard_of(parameter).global_shape for name, parameter in whole_model(config, "meta").named_parameters()}


def group_table(config: Config) -> str:
    """Which parameters have which optimizer and settings, as text; "" if all have the same. Raises `ConfigError` as `check_engine`."""
    if not config.optim.groups:
        return ""
    groups, shapes = ParameterGroups(config.optim), parameter_shapes(config)
    groups.check(shapes)
    return groups.table(shapes)


def build_engine(config: Config, stages: Sequence[Stage], mesh: Mesh) -> Engine:
    """Builds the engine over the parameters of a rank's stages, which it may move or replace; collective.

    Parameters on `meta` are then zeros, for somebody to draw or read (`Engine.tensors`).
    """
    if config.engine.kind == "deepspeed":
        return DeepSpeedEngine(config, stages, mesh)
    if config.engine.kind == "fsdp" and config.token_ranks != 1:  # one has nothing to divide
        from megacore.engine.fsdp import FSDPEngine  # it imports DTensor, for seconds that no other run should wait

        return FSDPEngine(config, stages, mesh)
    return NativeEngine(config, stages, mesh)
