"""The native engine on one process: a small model, its batches, and steps without a trainer."""

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from megacore.config import Config
from megacore.distributed.communicator import SOLO
from megacore.engine.native import NativeEngine
from megacore.model.batch import Microbatch
from megacore.model.stage import Stage
from megacore.pipeline import generators
from megacore.pipeline.runtime import Runtime
from tests.build import mesh_of, model_of, run_of
from tests.training import BASE, VOCAB_SIZE

CPU = torch.device("cpu")
SMALL = BASE | {"model": BASE["model"] | {"num_layers": 2}}


def configure(overrides: str = "") -> Config:
    """Return the config of a run of two layers. `overrides` are separated by spaces."""
    return run_of(SMALL, *overrides.split())


def engine_of(config: Config) -> tuple[Stage, NativeEngine]:
    stage = model_of(config)
    return stage, NativeEngine(config, [stage], mesh_of(config))


def batch_of(config: Config, step: int) -> list[Microbatch]:
    """A global batch: the same sequences, however they are cut into microbatches."""
    train = config.train
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(VOCAB_SIZE, (2, train.global_batch_size, train.seq_len), generator=generator)
    parts = zip(*(t.split(train.micro_batch_size) for t in tokens), strict=True)
    return [Microbatch(inputs, targets, key) for key, (inputs, targets) in enumerate(parts)]


def accumulate(config: Config, stage: Stage, engine: NativeEngine, step: int) -> Tensor:
    """Forward and backward of a step's whole batch; its mean loss."""
    plan = generators.build(config.parallel.schedule, 1, config.num_microbatches)
    weight = 1 / (config.train.global_batch_size * config.train.seq_len)
    return (
        Runtime([stage], engine, SOLO).run(plan, batch_of(config, step), {"cross_entropy": weight})[
            "cross_entropy"
        ]
        * weight
    )


def backward_of(engine: NativeEngine, stage: Stage, gradient: float, times: int = 1) -> None:
    """Accumulates `times` × `gradient` into every element of every parameter, through
    autograd in the parameters' dtype.
    """
    for i in range(times):
        total = sum(
            (p.sum() * 1.0 for p in stage.parameters()), torch.zeros((), dtype=next(stage.parameters()).dtype)
        )
        engine.backward(0, get_gradient_edge(total), torch.full_like(total, gradient), last=i == times - 1)
    engine.reduce_gradients()
