"""What launch/pretrain.py must leave behind, written out plainly in fp64: weights and moments of every
step, logged figures, validations.

With the trainer it shares the model (which is held to that of transformers elsewhere), its first weights, and
the order of samples. The rate, the batch, the norm, the clipping, AdamW, the count of updates, and which
samples are validated are written here a second time.
"""

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from launch import pretrain
from megacore.checkpoint import Reader
from megacore.config import Config
from megacore.data.samples import SampleStream
from megacore.distributed.shard import Shard
from megacore.tools.launchers import place_from_environment
from megacore.train.step import TrainStep
from tests import training
from tests.build import model_of, run_of

STEPS, HALF, SKIPPED = 6, 3, 2  # of a run, of its first leg, and the step whose gradient is not finite
TOLERANCE = 1e-10  # relative, and for tensors to their largest element; measured: 1e-12
KINDS = {"model": "weights", "adam_m": "first moments", "adam_v": "second moments"}


@dataclass
class Run:
    """What is there after a run."""

    logged: dict[int, dict[str, float | None]] = field(default_factory=dict)  # by step
    valid: dict[int, float] = field(default_factory=dict)
    saved: dict[int, dict[str, Tensor]] = field(default_factory=dict)  # logical tensors, as in a checkpoint
    updates: dict[int, float] = field(default_factory=dict)


def write_config(folder: Path) -> str:
    """Rates that differ from step to step, decay, steps that are clipped and steps that are not, a checkpoint
    of each, and validations of a part of the samples; returns the config's path.
    """
    prefix = training.write_corpus(folder)
    return training.write_config(
        folder,
        prefix,
        model={"num_layers": 2},
        train={"steps": STEPS, "precision": "fp64", "eval_every": 2, "eval_batches": 3},
        optim={
            "warmup_steps": 3,
            "decay_steps": STEPS,
            "min_lr": 5e-4,
            "weight_decay": 0.3,
            "grad_clip": 1.4,
        },
        data={"train": prefix, "valid": training.write_corpus(folder, "valid", 800, seed=1)},
        checkpoint={"every": 1, "keep": 9},
    )


def run_leg(config_path: str, overrides: list[str], log_dir: str) -> int:
    """One rank of launch/pretrain.py, in which the last rank's gradient of step `SKIPPED` is
    not a number; its exit status.
    """
    place = place_from_environment()
    with poisoned():
        return pretrain.run(["--config", config_path, *overrides, f"log.dir={log_dir}"], place)


@contextmanager
def poisoned() -> Iterator[None]:
    """While entered, the last rank's gradient of step `SKIPPED` is not a number."""
    update = TrainStep.update

    def poison(self: TrainStep, number: int, *sums: Any) -> Any:
        if number == SKIPPED and self.mesh.place.rank == self.mesh.place.world_size - 1:
            for piece, _ in self.engine.gradients().values():
                piece.mul_(torch.nan)
        return update(self, number, *sums)

    with mock.patch.object(TrainStep, "update", poison):
        yield


def expected(config_path: str) -> Run:
    """A run on one process, plainly."""
    config = run_of(config_path)
    train, optim, run = config.train, config.optim, Run()
    model = model_of(config)
    parameters = dict(model.named_parameters())
    first, second = ({name: torch.zeros_like(p) for name, p in parameters.items()} for _ in range(2))
    updates = 0
    for step in range(1, train.steps + 1):
        tokens = batch(config, step)
        loss = F.cross_entropy(model.logits(model.hidden(tokens[:, :-1])), tokens[:, 1:].flatten())
        gradients = dict(zip(parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True))
        norm = math.sqrt(sum(float((g * g).sum()) for g in gradients.values()))
        lr = rate(config, step)
        if step != SKIPPED:
            updates += 1
            for name, p in parameters.items():
                g = gradients[name] * min(1.0, optim.grad_clip / (norm + 1e-6))
                first[name] = optim.beta1 * first[name] + (1 - optim.beta1) * g
                second[name] = optim.beta2 * second[name] + (1 - optim.beta2) * g * g
                m, v = first[name] / (1 - optim.beta1**updates), second[name] / (1 - optim.beta2**updates)
                decay = 0.0 if p.dim() == 1 or name.endswith("bias") else optim.weight_decay
                p.data = p.data - lr * (decay * p.data + m / (v.sqrt() + optim.eps))
        seen = step * train.global_batch_size * train.seq_len
        skips = float(step >= SKIPPED)
        run.logged[step] = {
            "loss": loss.item(),
            "grad_norm": None if step == SKIPPED else norm,
            "lr": lr,
            "tokens": seen,
            "skipped": skips,
        }
        held = {"model": parameters, "adam_m": first, "adam_v": second}
        run.saved[step] = {
            f"{kind}/{name}": tensor.detach().clone()
            for kind, named in held.items()
            for name, tensor in named.items()
        }
        run.updates[step] = updates
        if step % train.eval_every == 0 or step in (HALF, STEPS):  # and where a leg ends
            run.valid[step] = validated(config, model)
    return run


def rate(config: Config, step: int) -> float:
    """Linear warmup, then a cosine."""
    optim = config.optim
    assert optim.decay_steps is not None and optim.schedule == "cosine"
    if step <= optim.warmup_steps:
        return optim.lr / optim.warmup_steps * step
    turn = math.pi * (step - optim.warmup_steps) / (optim.decay_steps - optim.warmup_steps)
    return (optim.lr + optim.min_lr) / 2 + (optim.lr - optim.min_lr) / 2 * math.cos(turn)


def batch(config: Config, step: int) -> Tensor:
    """The tokens of a step's samples, from the corpus's file itself."""
    train, prefix = config.train, config.data.train
    assert isinstance(prefix, str)
    order = SampleStream(prefix, train.seq_len, train.seed, config.model.vocab_size)
    corpus = np.fromfile(f"{prefix}.bin", dtype=np.uint16).astype(np.int64)
    samples = range((step - 1) * train.global_batch_size, step * train.global_batch_size)
    starts = [order.where(index)[2] * train.seq_len for index in samples]
    return torch.from_numpy(np.stack([corpus[start : start + train.seq_len + 1] for start in starts]))


@torch.no_grad()
def validated(config: Config, model: Any) -> float:
    """The mean loss over `eval_batches` global batches of windows, every n /
    count-th of the n that there are.
    """
    train = config.train
    corpus = torch.from_numpy(np.fromfile(f"{config.data.valid}.bin", dtype=np.uint16).astype(np.int64))
    windows = -(-(len(corpus) - 1) // train.seq_len)
    count = train.eval_batches * train.global_batch_size
    assert count < windows, "else all of them are read"
    losses = []
    for number in range(count):
        start = math.floor(number * windows / count) * train.seq_len
        window = corpus[start : start + train.seq_len + 1]
        losses.append(
            F.cross_entropy(model.logits(model.hidden(window[None, :-1])), window[1:], reduction="none")
        )
    return float(torch.cat(losses).mean())


def found(log_dir: Path) -> Run:
    """What a run has left in its folder."""
    run = Run()
    lines = [json.loads(line) for line in (log_dir / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        if "valid_loss" in line:
            run.valid[line["step"]] = line["valid_loss"]
        else:
            run.logged[line["step"]] = {
                name: line[name] for name in ("loss", "grad_norm", "lr", "tokens", "skipped")
            }
    for path in sorted((log_dir / "checkpoints").glob("step_????????")):
        reader = Reader(path)
        shapes = {name: tensor.shape for name, tensor in reader.manifest.tensors.items()}
        run.saved[reader.step] = {name: reader.read(name, Shard(shape)) for name, shape in shapes.items()}
        run.updates[reader.step] = reader.state["engine"]["updates"]
    return run


def difference(found: Run, right: Run) -> str:
    """The first thing in which a run is not as it should be, in words; empty if nothing."""
    for what in ("logged", "valid", "saved"):
        if (steps := list(getattr(found, what))) != list(getattr(right, what)):
            return f"{what} in steps {', '.join(map(str, steps))}"
    for step, figures in right.logged.items():
        for name, value in figures.items():
            if not same(found.logged[step][name], value):
                return f"step {step} logs another {name}"
        if found.saved[step].keys() != right.saved[step].keys():
            return f"other tensors are saved after step {step}"
        for name, tensor in right.saved[step].items():
            other = found.saved[step][name]
            if other.shape != tensor.shape or (other - tensor).abs().max() > TOLERANCE * tensor.abs().max():
                return f"other {KINDS[name.partition('/')[0]]} are saved after step {step}"
        if found.updates[step] != right.updates[step]:
            return f"another count of updates is saved after step {step}"
        if step in right.valid and not same(found.valid[step], right.valid[step]):
            return f"step {step} logs another validation loss"
    return ""


def same(a: float | None, b: float | None) -> bool:
    """Whether two figures are equal but for rounding."""
    return a == b or (a is not None and b is not None and math.isclose(a, b, rel_tol=TOLERANCE))


def in_two_legs(folder: str) -> str:
    """In this process: a run that is ended after `HALF` steps and goes on; how it differs from `expected`."""
    config_path, run = write_config(Path(folder)), f"{folder}/run"
    for steps in (HALF, STEPS):
        run_leg(config_path, [f"train.steps={steps}"], run)
    return difference(found(Path(run)), expected(config_path))
