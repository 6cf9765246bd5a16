"""What a run computes, tensor by tensor, in one file a rank."""

import json
import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from megacore.checkpoint.weights import WEIGHTS
from megacore.comm import all_reduce
from megacore.config import load
from megacore.engine.optimizer import learning_rate
from megacore.mesh import Mesh, pick_device
from megacore.model.gpt import DTYPES
from megacore.pipeline.schedule import Action, Op
from megacore.place import place_from_environment
from megacore.rng import normal_slice
from megacore.tensor_parallel.shard import Box, Shard, logical_name, shard_of
from megacore.train.inputs import Inputs
from megacore.train.trainer import Trainer
from megacore.verify.trace import Trace

SPREAD = 0.1  # of what is added to parameters that start constant


class Record:
    """Tensors by kind and logical name with their place in the logical tensor, and the figures of each step."""

    def __init__(self, folder: Path, rank: int = 0) -> None:
        self.path = folder / f"record_{rank}.safetensors"
        self.held: dict[str, Tensor] = {}
        self.places: dict[str, list[list[int]]] = {}  # offset, and the logical tensor's shape
        self.by_step: dict[str, dict[str, float]] = {}

    def tensors(self, kind: str, values: Mapping[str, tuple[Tensor, Box | Shard]]) -> None:
        """Adds this rank's pieces, copied as they are now."""
        for name, (tensor, box) in values.items():
            key = f"{kind}|{name}"
            self.held[key] = tensor.detach().clone().contiguous()
            self.places[key] = [list(box.offset), list(box.global_shape)]

    def figures(self, step: int, loss: float | None = None, grad_norm: float | None = None, valid_loss: float | None = None) -> None:
        """Adds what is measured at a step."""
        given = {"loss": loss, "grad_norm": grad_norm, "valid_loss": valid_loss}
        self.by_step.setdefault(str(step), {}).update({name: value for name, value in given.items() if value is not None})

    def close(self) -> None:
        """Writes the file."""
        save_file(self.held, self.path, {"places": json.dumps(self.places), "figures": json.dumps(self.by_step)})


def run_layout(config_path: str, overrides: list[str], out: Path, traced_step: int | None) -> None:
    """One rank of the real trainer, for `train.steps` steps; writes this rank's record to `out`.

    The rank is the environment's, as a launcher sets it. `traced_step`: also writes what every module computes then.
    """
    place = place_from_environment()
    config = load(config_path, [*overrides, f"log.dir={out}/run"], place.world_size).config
    mesh = Mesh(config, place, pick_device(config, place))
    trainer = Trainer(config, mesh, Inputs(config, place.rank))
    engine, stage, methods = trainer.engine, trainer.stage, trainer.runtime.methods
    starts_constant = {name for name, p in stage.named_parameters() if shard_of(p).init_std is None}
    tensors = engine.tensors()
    weights = {key.removeprefix(WEIGHTS): piece for key, piece in tensors.items() if key.startswith(WEIGHTS)}
    for key, (held, box) in weights.items():
        if (name := logical_name(key)) in starts_constant:
            held.add_(noise(name, box.global_shape, DTYPES[config.train.precision])[box_slices(box)])
    engine.load_state(engine.state(), tensors)
    record = Record(out, place.rank)
    record.tensors("parameter 0", weights)

    plain = {op: methods[op] for op in (Op.FORWARD, Op.BACKWARD)}

    def announced(op: Op, trace: Trace, action: Action) -> None:
        trace.enter(action.microbatch * mesh.dp.size + mesh.dp.rank, op.value)
        plain[op](action)

    for trainer.step in range(1, config.train.steps + 1):
        with Trace(stage, out if trainer.step == traced_step else None, place.rank) as trace:
            methods.update({op: partial(announced, op, trace) for op in plain})
            loss = all_reduce(trainer.forward_backward(), mesh.world).item()
        record.tensors(f"gradient {trainer.step}", engine.gradients())
        statistics = engine.step(learning_rate(config.optim, trainer.step, config.train.steps))
        record.figures(trainer.step, loss, statistics.grad_norm.item())
        for name, piece in engine.tensors().items():
            kind, _, logical = name.partition("/")
            record.tensors(f"{'parameter' if kind == 'model' else kind} {trainer.step}", {logical: piece})
    record.figures(trainer.step, valid_loss=trainer.validate())
    record.close()
    engine.settle()
    trainer.logs.close()
    engine.close()
    mesh.close()


def noise(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """What is added to a logical tensor that starts constant (a bias, a norm): zeros and ones hide many a mistake.

    Rounded so that the sum is exact in `dtype`.
    """
    size = math.prod(shape)  # 1 for a scalar
    whole = normal_slice(("verify", name), (size,), SPREAD, 0, 0, size).view(shape)
    return ((1.0 + whole).to(dtype) - 1.0).double()


def box_slices(box: Box | Shard) -> tuple[slice, ...]:
    """Where a piece stands, to index the logical tensor with."""
    return tuple(slice(start, start + size) for start, size in zip(box.offset, box.local_shape, strict=True))
