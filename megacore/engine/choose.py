"""The engine that a config asks for."""

from megacore.config import Config
from megacore.engine.native import NativeEngine
from megacore.engine.protocol import Engine
from megacore.mesh import Mesh
from megacore.model.gpt import Stage


def build_engine(config: Config, stage: Stage, mesh: Mesh) -> Engine:
    """`engine.kind` over a stage's parameters, which it may move or replace; collective."""
    assert config.engine.kind == "native"
    return NativeEngine(config, stage, mesh)
