"""Records what a run computes, tensor by tensor, in one file for each rank."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from megacore.checkpoint.weights import WEIGHTS
from megacore.config import Config
from megacore.distributed.buffers import SAVED_STATE, plain_buffers, unsaved_state
from megacore.distributed.collectives import all_reduce
from megacore.distributed.hierarchical_reduce import GradientSum
from megacore.distributed.mesh import Mesh
from megacore.distributed.shard import Shard, TensorSlice, logical_name, shard_of
from megacore.engine.compression import STATE
from megacore.errors import ConfigError
from megacore.model.initial import BLOCKS
from megacore.model.layers import DTYPES
from megacore.model.stage import Stage
from megacore.rng import normal_runs
from megacore.tensor_parallel.gradient import main_gradient_of
from megacore.tools.choices.partition import partitioned
from megacore.tools.choices.run import trainer_of
from megacore.tools.diagnosis.flight_recorder import FlightRecorder
from megacore.tools.inputs import Inputs
from megacore.tools.launchers import place_from_environment
from megacore.tools.machine.device import pick_device
from megacore.tools.monitoring.attach import source_callbacks
from megacore.tools.settings.load import load
from megacore.tools.verify.compare import ROUTING
from megacore.tools.verify.flight import Flights
from megacore.tools.verify.routing import Choices
from megacore.tools.verify.trace import GradientWatch, Trace
from megacore.train.trainer import Trainer

SPREAD = 0.1  # size of the noise that is added to parameters that start constant


class ProofRecord:
    """Tensors by kind and logical name, with their positions in the logical
    tensors, and the figures of each step.
    """

    def __init__(self, folder: Path, rank: int = 0) -> None:
        self.path = folder / f"record_{rank}.safetensors"
        self.held: dict[str, Tensor] = {}
        self.places: dict[str, list[list[int]]] = {}  # offset, and the logical tensor's shape
        self.by_step: dict[str, dict[str, float]] = {}
        self.flights: list[dict[str, Any]] = []  # see `flight`

    def tensors(self, kind: str, values: Mapping[str, tuple[Tensor, TensorSlice | Shard]]) -> None:
        """Adds copies of this rank's pieces."""
        for name, (tensor, box) in values.items():
            key = f"{kind}|{name}"
            # for numpy, without rounding
            wide = torch.float32 if tensor.dtype in (torch.bfloat16, torch.float16) else tensor.dtype
            self.held[key] = tensor.detach().to(wide, copy=True).contiguous()
            self.places[key] = [list(box.offset), list(box.global_shape)]

    def figures(
        self,
        step: int,
        loss: float | None = None,
        grad_norm: float | None = None,
        valid_loss: float | None = None,
    ) -> None:
        """Adds a step's figures."""
        given = {"loss": loss, "grad_norm": grad_norm, "valid_loss": valid_loss}
        self.by_step.setdefault(str(step), {}).update(
            {name: value for name, value in given.items() if value is not None}
        )

    def close(self) -> None:
        """Writes the file."""
        aside = {"places": self.places, "figures": self.by_step, "flights": self.flights}
        save_file(self.held, self.path, {name: json.dumps(value) for name, value in aside.items()})


def run_layout(
    config_path: str, overrides: list[str], out: Path, traced_step: int | None, reference: Path
) -> None:
    """One rank of the real trainer, for `train.steps` steps; writes this rank's record to `out`.

    The environment gives the rank, as a launcher sets it. In `traced_step` it also writes what every module
    computes. `reference`: the folder of what one process did.
    """
    place = place_from_environment()
    config = partitioned(load(config_path, [*overrides, f"log.dir={out}/run"], place.world_size).config)
    mesh = Mesh(config, place, pick_device(config, place))
    flights = Flights()
    mesh.listeners.add(flights, FlightRecorder())  # the second as in a real run
    # One process runs none of them: what they change in the model is a difference.
    callbacks = source_callbacks(config)
    for callback in callbacks:
        callback.on_error = "raise"  # a proof must not say that a callback ran if it has failed
    mesh.listeners.add(*callbacks)
    trainer = trainer_of(config, mesh, Inputs(config, place.rank))
    record = ProofRecord(out, place.rank)
    record.tensors("drawn 0", drawn(trainer))
    record.tensors("parameter 0", spread(trainer))
    exact = config.train.precision == "fp64" or config.engine.kind != "native"
    evidence = None if exact else Evidence(trainer.train_step.stages, mesh, config)
    choices = Choices(trainer.train_step.stages, reference)
    constants = Constants(trainer.train_step.stages)
    take_steps(trainer, record, evidence, choices, constants, out, traced_step)
    record.figures(trainer.step, valid_loss=trainer.validate())
    constants.check()
    mesh.listeners.remove(flights)
    record.flights = flights.spanning(lasting(trainer.train_step.stages))
    if evidence is not None:
        evidence.write(record)
    record.close()
    trainer.engine.settle()
    trainer.close()
    trainer.engine.close()
    mesh.close()


def lasting(stages: Sequence[Stage]) -> dict[str, Tensor]:
    """The parameters that compute and the sums of their gradients, where an engine keeps both in
    the same place in a whole run.
    """
    mains = {
        name: (p.data, main)
        for stage in stages
        for name, p in stage.named_parameters()
        if (main := main_gradient_of(p)) is not None
    }
    values = {f"parameter|{name}": value for name, (value, _) in mains.items()}
    return values | {f"gradient|{name}": main.total for name, (_, main) in mains.items()}


def spread(trainer: Trainer) -> dict[str, tuple[Tensor, TensorSlice]]:
    """Adds noise to parameters that start constant. Returns this rank's pieces of the first weights."""
    engine = trainer.engine
    tensors = engine.tensors()
    weights = weights_of(tensors)
    add_noise(trainer, weights)
    engine.load_state(engine.state(), tensors)
    return weights


def drawn(trainer: Trainer) -> dict[str, tuple[Tensor, TensorSlice]]:
    """This rank's pieces of the first weights as they are drawn, before an engine gathers anything: so a
    difference in what it then holds has another cause.
    """
    pieces = {key: (torch.empty_like(held), box) for key, (held, box) in trainer.engine.tensors().items()}
    trainer.train_step.draw_into(pieces)
    weights = weights_of(pieces)
    add_noise(trainer, weights)
    return weights


def weights_of(tensors: Mapping[str, tuple[Tensor, TensorSlice]]) -> dict[str, tuple[Tensor, TensorSlice]]:
    """The weights among an engine's tensors, by the names of their pieces."""
    return {key.removeprefix(WEIGHTS): piece for key, piece in tensors.items() if key.startswith(WEIGHTS)}


def add_noise(trainer: Trainer, weights: Mapping[str, tuple[Tensor, TensorSlice]]) -> None:
    """Adds noise to the weights that start constant, or as a module draws them, in place."""
    dtype = DTYPES[trainer.config.train.precision]
    stages = trainer.train_step.stages
    starts_constant = {
        name for stage in stages for name, p in stage.named_parameters() if shard_of(p).init_std is None
    }
    for key, (held, box) in weights.items():
        if (name := logical_name(key)) in starts_constant:
            here = tuple(
                slice(start, start + size) for start, size in zip(box.offset, box.local_shape, strict=True)
            )
            noisy = held.double() + noise(name, box.global_shape, dtype)[here]
            held.copy_(noisy.to(dtype))  # what computes, so that masters start as its weights


def take_steps(
    trainer: Trainer,
    record: ProofRecord,
    evidence: "Evidence | None",
    choices: Choices,
    constants: "Constants",
    out: Path,
    traced_step: int | None,
) -> None:
    """Takes and records all steps, and traces one of them."""
    has_callbacks = bool(source_callbacks(trainer.config))
    config, mesh, engine = trainer.config, trainer.mesh, trainer.engine
    trainer.reporter.start()
    for trainer.step in range(1, config.train.steps + 1):

        def before_update() -> None:
            # of others no rank has a parameter whole
            if trainer.step == 1 and config.engine.kind == "native":
                held = {
                    name: parameter
                    for stage in trainer.train_step.stages
                    for name, parameter in stage.named_parameters()
                }
                record.tensors(
                    "gathered 0",
                    {name: (parameter.double(), shard_of(parameter)) for name, parameter in held.items()},
                )
            if evidence is not None:
                evidence.take(trainer.step)
            record.tensors(f"gradient {trainer.step}", engine.gradients())

        folder = out if trainer.step == traced_step else None
        with Trace(trainer.train_step.stages, folder, mesh.place.rank, mesh.sample_group) as trace:
            mesh.listeners.add(trace)
            batch = trainer.next_batch()
            figures = trainer.train_step(trainer.step, batch, before_update=before_update)
            mesh.listeners.remove(trace)
        if has_callbacks:
            trainer.reporter.count(batch)
            trainer.log(figures.unpack(figures.pack()))
        constants.check()
        record.figures(trainer.step, figures.loss.item(), figures.grad_norm.item())
        record.tensors(f"{ROUTING} {trainer.step}", choices.differences())
        for name, piece in engine.tensors().items():
            # what compressed sums keep, which one process has not; where nothing is lost, sums show it all
            if name.startswith(STATE):
                continue
            kind, _, logical = name.partition("/")
            record.tensors(f"{'parameter' if kind == 'model' else kind} {trainer.step}", {logical: piece})


class Constants:
    """The torch buffers of a rank's stages as they were at first. None is saved, so none may change."""

    def __init__(self, stages: Sequence[Stage]) -> None:
        self.stages = stages
        self.first: dict[str, Tensor] = {}
        self.check()

    def check(self) -> None:
        """Raises `ConfigError` if a buffer is not what it was when this saw it for the first time, or if a
        layer now has state that torch would save and a run's checkpoint does not.
        """
        for stage in self.stages:
            if unsaved := unsaved_state(stage):
                wrong = f"the model has got {unsaved[0]}, which no checkpoint saves"
                raise ConfigError(
                    stage.config.model.custom_key, wrong, f"in the layer's constructor {SAVED_STATE}"
                )
            for path, module, name in plain_buffers(stage):
                value = module._buffers[name]
                assert value is not None
                first = self.first.setdefault(path, value.detach().clone())
                if not (first.shape == value.shape and torch.equal(first, value)):
                    wrong = (
                        f"the torch buffer {path} changes while the model runs, and no checkpoint saves it"
                    )
                    right = "a constant, or state made by megacore.distributed.buffers.new_buffer"
                    raise ConfigError(stage.config.model.custom_key, wrong, right)


class Evidence:
    """Collects what `replay` needs: the gradients that backward gave, and the parameters that computed."""

    def __init__(self, stages: Sequence[Stage], mesh: Mesh, config: Config) -> None:
        self.mesh = mesh
        self.rounds = config.engine.reduce_dtype == "bf16"  # gradients are rounded where they travel
        self.gathers = not config.engine.shard_optimizer  # so are their sums
        self.parameters = {
            name: parameter for stage in stages for name, parameter in stage.named_parameters()
        }
        trained = {name: parameter for name, parameter in self.parameters.items() if parameter.requires_grad}
        self.sums = {name: torch.zeros(p.shape, dtype=torch.float64) for name, p in trained.items()}
        self.watches = [GradientWatch(parameter, self.sums[name].add_) for name, parameter in trained.items()]
        self.given: dict[int, dict[str, Tensor]] = {}
        self.copies: dict[int, dict[str, Tensor]] = {}

    def take(self, step: int) -> None:
        """Takes a step's evidence, after its last backward pass and before its update."""
        for watch in self.watches:
            watch.look()
        self.given[step] = {name: total.clone() for name, total in self.sums.items()}
        self.copies[step] = self._copies()
        for total in self.sums.values():
            total.zero_()

    def write(self, record: ProofRecord) -> None:
        """Sums over ranks and writes; collective.

        It comes last, so that it does not disturb the timing of the run.
        """
        shards = {name: shard_of(parameter) for name, parameter in self.parameters.items()}
        self.copies[len(self.given) + 1] = self._copies()  # the parameters that validated
        for step, held in self.copies.items():
            record.tensors(f"copy {step}", {name: (copy, shards[name]) for name, copy in held.items()})
        for step, given in self.given.items():
            for name, total in given.items():
                self._sum(total, self.mesh.gradient_sum(shards[name]))
            for name, group in self.mesh.shared.items():  # in one order on every rank
                all_reduce(given[name], group)
            record.tensors(f"given {step}", {name: (total, shards[name]) for name, total in given.items()})

    def _sum(self, total: Tensor, over: GradientSum) -> None:
        """Sums a gradient over the ranks with its stage, in the engine's order, and
        rounds it where the engine does.
        """
        rounds = self.rounds and over.levels.size > 1
        for group in (*over.first, over.levels.within):
            all_reduce(total, group)
        if rounds:
            total.copy_(total.bfloat16())
        all_reduce(total, over.levels.between)
        if rounds and self.gathers:
            total.copy_(total.bfloat16())

    def _copies(self) -> dict[str, Tensor]:
        return {name: parameter.detach().float() for name, parameter in self.parameters.items()}


def noise(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Noise for a logical tensor that starts constant (a bias, a norm), because zeros and ones hide mistakes.

    It is rounded so that the sum with zero or one is exact in `dtype`. Others have to be rounded again.
    """
    size = math.prod(shape)  # 1 for a scalar
    # in blocks, as first weights: another checkout must draw the same, --against compares with it
    step = -(-size // BLOCKS)
    blocks = ((first, min(step, size - first)) for first in range(0, size, step))
    runs = (
        run
        for first, count in blocks
        for _, run in normal_runs(("verify", name, first), count, SPREAD, count)
    )
    whole = torch.cat(list(runs)).view(shape)
    return ((1.0 + whole).to(dtype) - 1.0).double()
