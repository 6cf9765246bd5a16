"""The engine that a config asks for, and the stage as that engine takes it."""

import torch

from megacore.config import Config
from megacore.config.deepspeed import ds_settings
from megacore.engine.deepspeed import DeepSpeedEngine, check_machine
from megacore.engine.native import NativeEngine
from megacore.engine.protocol import Engine
from megacore.mesh import Mesh
from megacore.model.gpt import Stage
from megacore.pipeline.partition import stage_layers


def divides_parameters(config: Config) -> bool:
    """Whether a rank holds a part of its stage's parameters only."""
    if config.engine.kind == "deepspeed":
        return ds_settings(config)["zero_optimization"]["stage"] == 3
    return config.engine.kind == "fsdp" and config.parallel.data != 1  # one data rank has nothing to divide


def build_stage(config: Config, mesh: Mesh) -> Stage:
    """This rank's stage, on the device; where its parameters will be divided in host memory, since the device may not have room."""
    device = torch.device("cpu") if divides_parameters(config) else mesh.device
    return Stage(config, stage_layers(config)[mesh.pp_rank], mesh.tp, device)


def check_engine(config: Config, device: torch.device) -> None:
    """Raises `ConfigError` if this machine lacks what `engine.kind` needs."""
    if config.engine.kind == "deepspeed":
        check_machine(config, device)


def build_engine(config: Config, stage: Stage, mesh: Mesh) -> Engine:
    """`engine.kind` over a stage's parameters, which it may move or replace; collective."""
    if config.engine.kind == "deepspeed":
        return DeepSpeedEngine(config, stage, mesh)
    if divides_parameters(config):
        from megacore.engine.fsdp import FSDPEngine  # which imports DTensor: seconds that no other run has to wait

        return FSDPEngine(config, stage, mesh)
    return NativeEngine(config, stage, mesh)
