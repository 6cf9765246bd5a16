"""The training steps written out plainly, in fp64, on one process: what every layout must compute.

No mesh, no schedule, no engine: the whole model, one microbatch after the other, PyTorch's own cross entropy, and AdamW as
its paper has it. The only thing shared with the layouts is the model's forward pass.
"""

import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from megacore.config import Config
from megacore.data.indexed import IndexedTokens
from megacore.data.samples import SampleStream
from megacore.engine.optimizer import learning_rate
from megacore.model.gpt import DTYPES, Stage, whole_model
from megacore.rng import key_of
from megacore.tensor_parallel.shard import Shard, shard_of
from megacore.verify.record import Record, noise
from megacore.verify.trace import Trace


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
    first = {name: torch.zeros_like(p) for name, p in parameters.items()}
    second = {name: torch.zeros_like(p) for name, p in parameters.items()}

    assert isinstance(config.data.train, str) and isinstance(config.data.valid, str)
    stream = SampleStream(config.data.train, train.seq_len, train.seed, config.model.vocab_size)
    for step in range(1, train.steps + 1):
        loss = 0.0
        with Trace(model, out if step == traced_step else None) as trace:
            for index in range(train.global_batch_size // train.micro_batch_size):
                start = (step - 1) * train.global_batch_size + index * train.micro_batch_size
                tokens = torch.from_numpy(stream.samples(np.arange(start, start + train.micro_batch_size)))
                trace.enter(index, "forward")
                logits = model.logits(model(tokens[:, :-1], key_of(train.seed, step, index)))
                losses = F.cross_entropy(logits, tokens[:, 1:].flatten(), reduction="sum")
                share = losses / (train.global_batch_size * train.seq_len)
                trace.note("loss", "output", losses)
                trace.enter(index, "backward")
                share.backward()
                loss += share.item()
        # What no loss depends on has no gradient, and decays all the same.
        gradients = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in parameters.items()}
        norm = math.sqrt(sum(float(g.square().sum()) for g in gradients.values()))
        record.figures(step, loss, norm)
        record.tensors(f"gradient {step}", whole(gradients))
        clip = min(1.0, optim.grad_clip / (norm + 1e-6)) if optim.grad_clip else 1.0
        lr = learning_rate(optim, step, train.steps)
        with torch.no_grad():
            for name, p in parameters.items():
                g = gradients[name] * clip
                first[name].lerp_(g, 1 - optim.beta1)
                second[name].mul_(optim.beta2).addcmul_(g, g, value=1 - optim.beta2)
                # Vectors and biases never, whatever their record says, so that a wrong one is seen; of matrices it is believed.
                decays = p.dim() > 1 and not name.endswith("bias") and shard_of(p).decay
                p.mul_(1 - lr * optim.weight_decay * decays)
                denominator = (second[name] / (1 - optim.beta2**step)).sqrt_().add_(optim.eps)
                p.addcdiv_(first[name] / (1 - optim.beta1**step), denominator, value=-lr)
                p.grad = None
        for kind, values in (("parameter", parameters), ("adam_m", first), ("adam_v", second)):
            record.tensors(f"{kind} {step}", whole(values))
    record.figures(train.steps, valid_loss=validate(model, IndexedTokens(config.data.valid), train.seq_len))
    record.close()


@torch.no_grad()
def validate(model: Stage, corpus: IndexedTokens, seq_len: int) -> float:
    """The mean loss over every token of the corpus but the first, in pieces of `seq_len` targets."""
    model.eval()
    total = 0.0
    for start in range(0, corpus.num_tokens - 1, seq_len):
        tokens = torch.from_numpy(corpus.read(start, min(seq_len + 1, corpus.num_tokens - start)).astype(np.int64))
        total += float(F.cross_entropy(model.logits(model(tokens[None, :-1])), tokens[1:], reduction="sum"))
    model.train()
    return total / (corpus.num_tokens - 1)


def whole(tensors: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Shard]]:
    """Tensors that are not cut, each with the record that says so."""
    return {name: (tensor, Shard(tuple(tensor.shape))) for name, tensor in tensors.items()}
