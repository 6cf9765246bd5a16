"""Does the training steps in plain code, in fp64, on one process. Every layout must compute the same.

It has no mesh, schedule, engine or loader. It runs the whole model on one microbatch after the other, with PyTorch's cross entropy,
each optimizer in plain numpy (`Rule.reference_state`), its own learning rate and rule of weight decay, and tokens read from the file
as numbers. It computes attention by the plain formula (`model.attention=eager`), without recomputation or offload.

It shares the following with the layouts, and other tests compare these parts with something independent:

- the model's forward pass, and with it how dropout turns a key into a mask (tests/unit/test_model.py, test_dropout_kernel.py);
- the initial weights as a function of names (tests/unit/test_rng.py, test_model.py);
- the order of samples in an epoch, and the keys made of (seed, step, microbatch) (tests/unit/test_shuffle.py, test_rng.py,
  launch/samples.py --prove).
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from megacore.config import Config
from megacore.config.optim_groups import ParameterGroups
from megacore.config.schema import IGNORED, MASK
from megacore.data.shuffle import derive_key, permute
from megacore.distributed.buffers import buffers_of
from megacore.distributed.shard import Shard, shard_of
from megacore.model.batch import FieldSource, Microbatch, Samples
from megacore.model.choose import layers_of
from megacore.model.head import Head
from megacore.model.layers import DTYPES, fields_of, losses_of
from megacore.model.stage import Stage, whole_model
from megacore.optimizers.rule import AVERAGE, ReferenceStep
from megacore.rng import key_of
from megacore.tools.verify.compare import ROUTING
from megacore.tools.verify.matrix_rules import reference_direction, reference_state, zeros
from megacore.tools.verify.record import ProofRecord, noise
from megacore.tools.verify.replay import decays, rate
from megacore.tools.verify.routing import Choices
from megacore.tools.verify.trace import Trace

# Overrides of the case's config that choose the plainest way to compute. `worker.py` applies them.
PLAIN = (
    "train.precision=fp64",
    "engine.reduce_dtype=fp32",
    "engine.compression=null",
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
    take_plain(model)
    record = ProofRecord(out)
    parameters, buffers = dict(model.named_parameters()), buffers_of([model])
    record.tensors("parameter 0", whole(parameters))
    trained = {name: p for name, p in parameters.items() if p.requires_grad}
    shards = {name: shard_of(p) for name, p in trained.items()}
    groups = {name: ParameterGroups(optim).of(name, shard) for name, shard in shards.items()}
    means = {name: np.zeros(tuple(p.shape)) for name, p in trained.items()}  # for `optim.ema`
    state = {name: zeros(groups[name].rule, tuple(p.shape), shards[name]) for name, p in trained.items()}

    choices = Choices([model])
    losses, sources = losses_of(layers_of(config)), fields_of(layers_of(config))
    sizes = batch_sizes(config)
    every = training_samples(config, sum(sizes))
    for step in range(1, train.steps + 1):
        model.at_step(step)
        loss, first, size = 0.0, sum(sizes[: step - 1]), sizes[step - 1]
        of_step = every[first : first + size]
        together = microbatch(batch_of(of_step), sources)
        counts = {name: int((together[of.over] != IGNORED).sum()) for name, of in losses.items()}
        for head in (
            layer for layer in model.behind if getattr(type(layer), "loss", None) is Head.loss
        ):  # else it is the user's own
            head.sums = partial(plain_sums, head)  # type: ignore[assignment]
        with Trace([model], out if step == traced_step else None) as trace:
            for index in range(size // train.micro_batch_size):
                batch = batch_of(
                    of_step[index * train.micro_batch_size : (index + 1) * train.micro_batch_size]
                )
                trace.enter(index, "forward")
                trace.note(
                    "documents", "positions", batch.documents[1]
                )  # context ranks divide a batch by its documents
                _, sums = model({}, microbatch(batch, sources, key_of(train.seed, step, index)))
                part = sum(of.coefficient * sums[name] / max(counts[name], 1) for name, of in losses.items())
                trace.enter(index, "backward")
                part.backward()
                loss += part.item()
        # A parameter on which no loss depends has no gradient, and decays nevertheless.
        gradients = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in trained.items()}
        norm = math.sqrt(sum(float(g.square().sum()) for g in gradients.values()))
        record.figures(step, loss, norm)
        record.tensors(f"gradient {step}", whole(gradients))
        clip = min(1.0, optim.grad_clip / (norm + 1e-6)) if optim.grad_clip else 1.0
        for name, p in trained.items():
            group, gradient = groups[name], (gradients[name] * clip).numpy()
            lr, decay = rate(optim, step, train.steps, group.lr), group.weight_decay * decays(name, p.dim())
            taken = ReferenceStep(step, state[name], gradient, p.detach().numpy(), lr, decay)
            state[name] = reference_state(group.rule, taken, shards[name])
            direction = reference_direction(group.rule, taken, state[name], shards[name])
            # NumPy makes a plain number of a scalar: `as_tensor` takes that too.
            p.data.copy_(p.data * (1 - lr * decay) - lr * torch.as_tensor(direction))
            p.grad = None
            if optim.ema is not None:
                means[name] = optim.ema * means[name] + (1 - optim.ema) * p.detach().numpy()
                state[name][AVERAGE] = means[name] / (1 - optim.ema**step)
        for buffer in buffers.values():
            buffer.value.copy_(buffer.rule(buffer.value, buffer.take()))
        record.tensors(f"parameter {step}", whole(parameters))
        record.tensors(f"{ROUTING} {step}", choices.differences())
        record.tensors(f"buffer {step}", whole({name: buffer.value for name, buffer in buffers.items()}))
        for name, held in state.items():
            for kind, numbers in held.items():
                record.tensors(f"{kind} {step}", whole({name: torch.as_tensor(numbers)}))
    for name, p in trained.items():
        p.data.copy_(torch.as_tensor(state[name].get(AVERAGE, p.detach().numpy())))
    record.figures(train.steps, valid_loss=validate(model, Corpus(config.data.valid, config)))
    record.close()
    choices.write(out)


def take_plain(model: torch.nn.Module) -> None:
    """Lets a module of the user's own that has a method ``plain_X`` compute by it, where it would by its method ``X``."""
    for module in model.modules():
        for name in [name for name in dir(type(module)) if name.startswith("plain_")]:
            setattr(module, name.removeprefix("plain_"), getattr(module, name))


def plain_sums(
    head: Any, x: Tensor, targets: Tensor, gradient: Tensor | None = None, z_loss: float | None = None
) -> tuple[Tensor, ...]:
    """What `Head.sums` is, by PyTorch."""
    logits, flat = head.logits(x), targets.flatten()
    loss = F.cross_entropy(logits, flat, reduction="sum")
    return (loss,) if z_loss is None else (loss, logits.logsumexp(1)[flat != IGNORED].square().sum())


def microbatch(batch: "Batch", sources: Mapping[str, FieldSource], key: int = 0) -> Microbatch:
    """A batch as the model's layers take it, with the fields that they declare."""
    samples = Samples(batch.inputs.numpy(), batch.targets.numpy(), batch.documents[0])
    more = {name: torch.from_numpy(np.ascontiguousarray(source(samples))) for name, source in sources.items()}
    return Microbatch(batch.inputs, more.pop("targets", batch.targets), key, *batch.documents, more)


@dataclass(frozen=True)
class Batch:
    """Inputs and targets ``[batch, seq]``. If documents are apart: where they begin in each sequence, and the positions in them."""

    inputs: Tensor
    targets: Tensor
    documents: tuple[Any, Tensor | None] = (None, None)


Sample = list[tuple[int, int]]  # the tokens that it has: from a first one up to a last, which is left out


class Corpus:
    """A corpus of the proof, as `write_case` writes it: 16-bit numbers without a header, beside them where documents begin, and maybe
    which tokens are learned.

    Attributes:
        training: its samples.
        validation: samples with every token as a target, but the first.
    """

    def __init__(self, prefix: object, config: Config) -> None:
        self.tokens = np.fromfile(f"{prefix}.bin", np.uint16).astype(np.int64)
        self.starts = {0, *np.fromfile(f"{prefix}.starts", np.int64).tolist()}
        mask = Path(f"{prefix}{MASK}")
        self.learned = np.fromfile(mask, np.uint8) if mask.exists() else np.ones(len(self.tokens))
        self.apart = config.data.document_mask  # whether attention and targets stay within a document
        self.length, end = config.train.seq_len, len(self.tokens)
        if config.data.packing == "best_fit":
            self.training = self.validation = self.packed()
        else:
            self.validation = [
                [(first, min(first + self.length + 1, end))] for first in range(0, end - 1, self.length)
            ]
            self.training = self.validation[: (end - 1) // self.length]

    def packed(self) -> list[Sample]:
        """Whole documents, the longest first, each into the first of the fullest samples that have room for it."""
        ends = [*sorted(self.starts - {0}), len(self.tokens)]
        pieces = [
            (first, min(first + self.length + 1, end))
            for start, end in zip(sorted(self.starts), ends, strict=True)
            for first in range(start, end - 1, self.length)
        ]
        samples: list[Sample] = []
        rooms: list[int] = []
        for first, stop in sorted(pieces, key=lambda piece: piece[0] - piece[1]):
            fitting = [i for i, room in enumerate(rooms) if room >= stop - first]
            if not fitting:
                fitting = [len(rooms)]
                rooms.append(self.length + 1)
                samples.append([])
            best = min(fitting, key=lambda i: rooms[i])
            rooms[best] -= stop - first
            samples[best].append((first, stop))
        return [sorted(sample) for sample in samples]


def batch_sizes(config: Config) -> list[int]:
    """The samples of each step's global batch."""
    train, sizes = config.train, list[int]()
    for last, size in train.batch_ramp:
        sizes += [size] * (last - len(sizes))
    return [*sizes, *[train.global_batch_size] * train.steps][: train.steps]


def training_samples(config: Config, count: int) -> list[tuple[Corpus, Sample]]:
    """The first `count` samples, in order, within the first epoch of each corpus. Of the first n samples the corpus with the largest share
    has its share, rounded; the next largest has its part of the rest, and so on."""
    train, spec = config.train, config.data.train
    weighted = [(1.0, spec)] if isinstance(spec, str) else list(spec or [])
    corpora = [(Fraction(weight), Corpus(prefix, config)) for weight, prefix in weighted]
    orders = []
    for number, (_, corpus) in enumerate(corpora):
        size = len(corpus.training)
        orders.append(permute(np.arange(size), size, derive_key(train.seed, number, 0)))
    found = []
    for index in range(count):
        rest = sum(weight for weight, _ in corpora)
        for number, (weight, corpus) in sorted(enumerate(corpora), key=lambda entry: -entry[1][0]):
            before, behind = (math.floor(n * weight / rest + Fraction(1, 2)) for n in (index, index + 1))
            if behind > before:
                found.append((corpus, corpus.training[orders[number][before]]))
                break
            index, rest = index - before, rest - weight
    return found


def batch_of(samples: Iterable[tuple[Corpus, Sample]]) -> Batch:
    """Some samples, with 0 behind those that are shorter than others."""
    tokens, targets, positions, bounds = [], [], [], []
    for corpus, sample in samples:
        row = [position for first, stop in sample for position in range(first, stop)]
        firsts = {first for first, _ in sample}
        padding = corpus.length + 1 - len(row)
        tokens.append([*corpus.tokens[row], *[0] * padding])
        # A token is no target if nothing before it in its sample, or with documents apart in its document, says what it is.
        known = [
            bool(corpus.learned[p]) and p not in firsts and not (corpus.apart and p in corpus.starts)
            for p in row
        ]
        targets.append([*np.where(known, corpus.tokens[row], IGNORED), *[IGNORED] * padding][1:])
        begins = [i for i, p in enumerate(row) if p in firsts or p in corpus.starts] + [len(row)] * (
            padding > 0
        )
        begins = [i for i in begins if i < corpus.length]
        bounds.append((*begins, corpus.length))
        positions.append([i - max(begin for begin in begins if begin <= i) for i in range(corpus.length)])
    documents = (tuple(bounds), torch.tensor(positions)) if corpus.apart else (None, None)
    return Batch(torch.tensor(np.array(tokens))[:, :-1], torch.tensor(np.array(targets)), documents)


@torch.no_grad()
def validate(model: Stage, corpus: Corpus) -> float:
    """The mean loss over every token of the corpus that is learned."""
    model.eval()
    total, learned, sources = 0.0, 0, fields_of(layers_of(model.config))
    for sample in corpus.validation:
        batch = microbatch(batch_of([(corpus, sample)]), sources)
        logits = model.logits(model({}, replace(batch, targets=None))[0]["hidden"])
        total += float(F.cross_entropy(logits, batch["targets"].flatten(), reduction="sum"))
        learned += int((batch["targets"] != IGNORED).sum())
    model.train()
    return total / learned


def whole(tensors: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Shard]]:
    """Whole tensors, each with a `Shard` that says so."""
    return {name: (tensor, Shard(tuple(tensor.shape))) for name, tensor in tensors.items()}
