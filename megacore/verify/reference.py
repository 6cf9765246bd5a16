"""Does the training steps in plain code, in fp64, on one process. Every layout must compute the same.

It has no mesh, schedule, engine or loader. It runs the whole model on one microbatch after the other, with PyTorch's cross entropy,
AdamW as in its paper, its own learning rate and rule of weight decay, and tokens read from the file as numbers. It computes
attention by the plain formula (`model.attention=eager`), without recomputation or offload.

It shares the following with the layouts, and other tests compare these parts with something independent:

- the model's forward pass, and with it how dropout turns a key into a mask (tests/unit/test_model.py, test_dropout_kernel.py);
- the initial weights as a function of names (tests/unit/test_rng.py, test_model.py);
- the order of samples in an epoch, and the keys made of (seed, step, microbatch) (tests/unit/test_data_order.py, test_rng.py,
  launch/samples.py --prove).
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from megacore.config import Config
from megacore.config.schema import Optim
from megacore.data.order import derive_key, permute
from megacore.distributed.shard import Shard, shard_of
from megacore.model.gpt import DTYPES, Stage, whole_model
from megacore.rng import key_of
from megacore.tensor_parallel.cross_entropy import IGNORED
from megacore.verify.record import Record, noise
from megacore.verify.replay import decays, rate
from megacore.verify.trace import Trace

# Overrides of the case's config that choose the plainest way to compute. `worker.py` applies them.
PLAIN = (
    "train.precision=fp64",
    "engine.reduce_dtype=fp32",
    "train.recompute=none",
    "train.offload_activations=false",
    "model.attention=eager",
    "model.kernels=eager",
    "model.chunked_loss=false",
)


def run_reference(config: Config, out: Path, rounding: str, traced_step: int | None) -> None:
    """Trains for `train.steps` in fp64 from weights rounded to the precision `rounding`, and writes the record to `out`.

    `traced_step`: also writes what every module computes in that step.
    """
    train, optim = config.train, config.optim
    model = whole_model(config)
    for name, parameter in model.named_parameters():
        parameter.data.copy_(parameter.data.to(DTYPES[rounding]))
        if shard_of(parameter).init_std is None:
            parameter.data.add_(noise(name, tuple(parameter.shape), DTYPES[rounding]))
    record = Record(out)
    parameters = dict(model.named_parameters())
    record.tensors("parameter 0", whole(parameters))
    kinds = {"adamw": ("adam_m", "adam_v"), "sgd": ("momentum",)}[optim.kind]
    state = {name: {kind: torch.zeros_like(p) for kind in kinds} for name, p in parameters.items()}

    corpus, length = Corpus(config.data.train, config.data.document_mask), train.seq_len
    count = (len(corpus.tokens) - 1) // length  # samples in an epoch: a proof needs only one
    order = permute(np.arange(count), count, derive_key(train.seed, 0, 0))
    for step in range(1, train.steps + 1):
        loss, batch_starts = 0.0, order[(step - 1) * train.global_batch_size : step * train.global_batch_size] * length
        learned = int((corpus.samples(batch_starts, length).targets != IGNORED).sum())
        with Trace([model], out if step == traced_step else None) as trace:
            for index in range(train.global_batch_size // train.micro_batch_size):
                start = (step - 1) * train.global_batch_size + index * train.micro_batch_size
                starts = order[start : start + train.micro_batch_size] * length
                batch = corpus.samples(starts, length)
                trace.enter(index, "forward")
                logits = model.logits(model(batch.inputs, key_of(train.seed, step, index), None, None, *batch.documents))
                losses = F.cross_entropy(logits, batch.targets.flatten(), reduction="sum")
                part = losses / learned
                trace.note("loss", "output", losses)
                trace.enter(index, "backward")
                part.backward()
                loss += part.item()
        # A parameter on which no loss depends has no gradient, and decays nevertheless.
        gradients = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in parameters.items()}
        norm = math.sqrt(sum(float(g.square().sum()) for g in gradients.values()))
        record.figures(step, loss, norm)
        record.tensors(f"gradient {step}", whole(gradients))
        clip = min(1.0, optim.grad_clip / (norm + 1e-6)) if optim.grad_clip else 1.0
        lr = rate(optim, step, train.steps)
        with torch.no_grad():
            for name, p in parameters.items():
                p.mul_(1 - lr * optim.weight_decay * decays(name, p.dim()))
                p.sub_(lr * direction(optim, step, gradients[name] * clip, state[name]))
                p.grad = None
        record.tensors(f"parameter {step}", whole(parameters))
        for kind in kinds:
            record.tensors(f"{kind} {step}", whole({name: held[kind] for name, held in state.items()}))
    record.figures(train.steps, valid_loss=validate(model, Corpus(config.data.valid, config.data.document_mask), length))
    record.close()


def direction(optim: Optim, step: int, g: Tensor, held: dict[str, Tensor]) -> Tensor:
    """The update of a parameter with gradient `g`, at a rate of one and before its sign. Also updates the optimizer's state `held`."""
    if optim.kind == "sgd":
        return held["momentum"].mul_(optim.momentum).add_(g)
    first = held["adam_m"].lerp_(g, 1 - optim.beta1) / (1 - optim.beta1**step)
    second = held["adam_v"].mul_(optim.beta2).addcmul_(g, g, value=1 - optim.beta2) / (1 - optim.beta2**step)
    return first / (second.sqrt() + optim.eps)


@dataclass(frozen=True)
class Batch:
    """Inputs and targets ``[batch, seq]``. If documents are apart: where they begin in each sequence, and the positions in them."""

    inputs: Tensor
    targets: Tensor
    documents: tuple[Any, Tensor | None] = (None, None)


class Corpus:
    """A corpus of the proof, as `write_case` writes it: 16-bit numbers without a header, and beside them where documents begin."""

    def __init__(self, prefix: object, apart: bool) -> None:
        self.tokens = np.fromfile(f"{prefix}.bin", np.uint16).astype(np.int64)
        self.starts = {0, *np.fromfile(f"{prefix}.starts", np.int64).tolist()}
        self.apart = apart  # whether attention and targets stay within a document

    def samples(self, firsts: Iterable[int], length: int) -> Batch:
        """The samples of `length` targets, or as many as are left, that begin at these tokens."""
        rows = [self.tokens[first : first + length + 1] for first in firsts]
        tokens = torch.from_numpy(np.stack(rows))
        if not self.apart:
            return Batch(tokens[:, :-1], tokens[:, 1:])
        targets, positions, bounds = tokens[:, 1:].clone(), torch.zeros_like(tokens[:, 1:]), []
        for row, first in enumerate(firsts):
            begins = [0]
            for i in range(targets.shape[1]):
                if i and first + i in self.starts:
                    begins.append(i)
                positions[row, i] = i - begins[-1]
                if first + i + 1 in self.starts:
                    targets[row, i] = IGNORED
            bounds.append((*begins, targets.shape[1]))
        return Batch(tokens[:, :-1], targets, (tuple(bounds), positions))


@torch.no_grad()
def validate(model: Stage, corpus: Corpus, seq_len: int) -> float:
    """The mean loss over every token of the corpus but the first, in pieces of `seq_len` targets."""
    model.eval()
    total, learned = 0.0, 0
    for start in range(0, len(corpus.tokens) - 1, seq_len):
        batch = corpus.samples([start], seq_len)
        logits = model.logits(model(batch.inputs, 0, None, None, *batch.documents))
        total += float(F.cross_entropy(logits, batch.targets.flatten(), reduction="sum"))
        learned += int((batch.targets != IGNORED).sum())
    model.train()
    return total / learned


def whole(tensors: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Shard]]:
    """Whole tensors, each with a `Shard` that says so."""
    return {name: (tensor, Shard(tuple(tensor.shape))) for name, tensor in tensors.items()}
