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
from collections.abc import Mapping
from pathlib import Path

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

    corpus, length = tokens_of(config.data.train), train.seq_len
    count = (len(corpus) - 1) // length  # samples in an epoch: a proof needs only one
    order = permute(np.arange(count), count, derive_key(train.seed, 0, 0))
    for step in range(1, train.steps + 1):
        loss = 0.0
        with Trace([model], out if step == traced_step else None) as trace:
            for index in range(train.global_batch_size // train.micro_batch_size):
                start = (step - 1) * train.global_batch_size + index * train.micro_batch_size
                starts = order[start : start + train.micro_batch_size] * length
                tokens = torch.from_numpy(np.stack([corpus[first : first + length + 1] for first in starts]))
                trace.enter(index, "forward")
                logits = model.logits(model(tokens[:, :-1], key_of(train.seed, step, index)))
                losses = F.cross_entropy(logits, tokens[:, 1:].flatten(), reduction="sum")
                part = losses / (train.global_batch_size * train.seq_len)
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
    record.figures(train.steps, valid_loss=validate(model, tokens_of(config.data.valid), length))
    record.close()


def direction(optim: Optim, step: int, g: Tensor, held: dict[str, Tensor]) -> Tensor:
    """The update of a parameter with gradient `g`, at a rate of one and before its sign. Also updates the optimizer's state `held`."""
    if optim.kind == "sgd":
        return held["momentum"].mul_(optim.momentum).add_(g)
    first = held["adam_m"].lerp_(g, 1 - optim.beta1) / (1 - optim.beta1**step)
    second = held["adam_v"].mul_(optim.beta2).addcmul_(g, g, value=1 - optim.beta2) / (1 - optim.beta2**step)
    return first / (second.sqrt() + optim.eps)


def tokens_of(prefix: object) -> np.ndarray:
    """Reads a corpus of the proof as int64. `write_case` writes 16-bit numbers without a header."""
    return np.fromfile(f"{prefix}.bin", np.uint16).astype(np.int64)


@torch.no_grad()
def validate(model: Stage, corpus: np.ndarray, seq_len: int) -> float:
    """The mean loss over every token of the corpus but the first, in pieces of `seq_len` targets."""
    model.eval()
    total = 0.0
    for start in range(0, len(corpus) - 1, seq_len):
        tokens = torch.from_numpy(corpus[start : start + seq_len + 1])
        total += float(F.cross_entropy(model.logits(model(tokens[None, :-1])), tokens[1:], reduction="sum"))
    model.train()
    return total / (len(corpus) - 1)


def whole(tensors: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Shard]]:
    """Whole tensors, each with a `Shard` that says so."""
    return {name: (tensor, Shard(tuple(tensor.shape))) for name, tensor in tensors.items()}
