"""Builds the engine that a config asks for, and the stages for that engine."""

from collections.abc import Sequence

import torch

from megacore.config import Config
from megacore.config.optim_groups import ParameterGroups
from megacore.distributed.buffers import buffers_of
from megacore.distributed.mesh import Mesh
from megacore.distributed.shard import shard_of
from megacore.distributed.topology import alone
from megacore.engine.deepspeed import DeepSpeedEngine, check_machine
from megacore.engine.native import NativeEngine
from megacore.engine.protocol import Engine
from megacore.errors import ConfigError
from megacore.model.layers import Layers
from megacore.model.stage import Stage, share_by_name, whole_model
from megacore.pipeline.partition import layer_ranges, placement_of, shared_parameters


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
    if config.model.source is not None:
        check_shared(config)
    if config.engine.kind == "deepspeed":
        check_machine(config, device)


def check_shared(config: Config) -> None:
    """Raises `ConfigError` if stages hold parameters of one name whose gradients nobody would sum, or wait for a sum that others do not
    have: a file of the user's own may name its parameters as it likes."""
    ranges, shared = layer_ranges(config), shared_parameters(config)
    if len(ranges) == 1:
        return
    held: dict[str, list[int]] = {}
    for number, own in enumerate(ranges):
        for name, _ in Stage(config, own, alone(config), "meta").named_parameters():
            held.setdefault(name, []).append(number)
    for name, stages in shared.items():
        if tuple(held.get(name, ())) != stages:
            wrong = f"says that the first and the last layer share {name}, and they do not both have it"
            raise ConfigError("model.tie_embeddings", wrong, "false, for layers that share nothing")
    for name, numbers in held.items():
        if len(numbers) > 1 and name not in shared:
            wrong = f"layers in stages {' and '.join(map(str, numbers))} of the pipeline have a parameter of one name, {name}"
            raise ConfigError("model.source", wrong, "names of their own, or parallel.pipeline=1")


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
