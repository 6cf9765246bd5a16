"""Builds the engine that a config asks for, and the stages for that engine."""

from collections import Counter
from collections.abc import Sequence

import torch
from torch import nn

from megacore.config import Config
from megacore.config.optim_groups import ParameterGroups
from megacore.config.source import source_of
from megacore.distributed.buffers import buffers_of
from megacore.distributed.mesh import Mesh
from megacore.distributed.shard import shard_of
from megacore.engine.deepspeed import DeepSpeedEngine, check_machine
from megacore.engine.native import NativeEngine
from megacore.engine.protocol import Engine
from megacore.errors import ConfigError
from megacore.model.choose import layers_of
from megacore.model.layers import Layers, sharing
from megacore.model.stage import Stage, share_by_name, whole_model
from megacore.pipeline.partition import layer_ranges, placement_of, shared_parameters, stages_of


def build_stages(config: Config, mesh: Mesh, layers: Layers | None = None) -> list[Stage]:
    """Builds this rank's stages of a model, by default the config's, with parameters on `meta`: the engine, or whoever loads weights,
    makes what the rank keeps of them."""
    ranges, layers = layer_ranges(config), layers_of(config) if layers is None else layers
    shared = {name: stages_of(users, ranges) for name, users in sharing(layers, config).items()}
    if mesh.pp.size > 1 and shared != (known := shared_parameters(config)):
        raise ValueError(f"stages share {shared}, and the config's own layers {known}: for others nobody sums gradients")
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
    """Raises `ConfigError` if layers of a user's file do not share what they say, or have parameters of one name whose gradients nobody
    would sum; or if the engine cannot divide what they share."""
    source, shared = source_of(config), shared_parameters(config)
    assert source is not None
    with source.blamed(", layers"):
        model = whole_model(config, "meta")
    places = [place for place, _ in nn.Module.named_parameters(model, remove_duplicate=False)]
    own = Counter(model.logical_name(place) for place in places if place not in model.shared)
    if strangers := shared.keys() - own.keys():
        raise ConfigError("model.source", f"a layer shares {min(strangers)}, which no layer has", "the full name of another's parameter")
    pipeline = len(layer_ranges(config)) > 1
    if pipeline and config.model.tie_embeddings and "embedding.weight" not in shared:
        right = "false, or a last layer that does"
        raise ConfigError("model.tie_embeddings", "says that layers share embedding.weight, and none does", right)
    if pipeline and (twice := [name for name, count in own.items() if count > 1]):
        wrong = f"several layers have a parameter of one name, {twice[0]}, and do not share it"
        raise ConfigError("model.source", wrong, "names of their own, `shares` (docs/blocks.md), or parallel.pipeline=1")
    rank_of = {stage: rank for rank, stages in enumerate(placement_of(config)) for stage in stages}
    if config.engine.kind == "fsdp" and config.token_ranks > 1:
        for name, stages in shared.items():
            if len({rank_of[stage] for stage in stages}) < len(stages):
                wrong = f"{config.parallel.schedule} gives one rank stages that share {name}, which fsdp cannot divide"
                raise ConfigError("parallel.schedule", wrong, "1f1b, or engine.kind=native")


def parameter_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """The logical shape of every parameter of a config's model, by name. Of megacore's own blocks, which differ in their names alone,
    one is built."""
    model, alike = config.model, config.model.source is None
    built = config.model_copy(update={"model": model.model_copy(update={"num_layers": 1})}) if alike else config
    shapes = {name: shard_of(parameter).global_shape for name, parameter in whole_model(built, "meta").named_parameters()}
    block = [name for name in shapes if alike and name.startswith("blocks.0.")]
    found: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        if block and name == block[0]:
            found |= {own.replace(".0.", f".{i}.", 1): shapes[own] for i in range(model.num_layers) for own in block}
        elif name not in block:
            found[name] = shape
    return found


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
