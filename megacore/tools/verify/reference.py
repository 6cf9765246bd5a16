"""Does the training steps in plain code, in fp64, on one process. Every layout must compute the same.

It has no mesh, schedule, engine or loader. It runs the whole model on one microbatch after the other, with
PyTorch's cross entropy, each optimizer in plain numpy (`Rule.reference_state`), its own learning rate and
rule of weight decay, and tokens read from the file as numbers. It computes attention by the plain formula
(`model.attention=eager`), without recomputation or offload. If there is an untouched module (`untouched`),
that computes instead of the model.

Without one, it shares the following with the layouts, and with one, all but the forward pass. Other tests
compare these parts with something independent:

- the model's forward pass, and with it how dropout turns a key into a mask (tests/unit/test_model.py,
  test_dropout_kernel.py);
- the initial weights as a function of names (tests/unit/test_rng.py, test_model.py);
- the order of samples in an epoch, and the keys made of (seed, step, microbatch) (tests/unit/test_shuffle.py,
  test_rng.py, launch/samples.py --prove).
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
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
from megacore.tools.verify.untouched import UntouchedReference

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


def run_reference(
    config: Config,
    out: Path,
    rounding: str,
    traced_step: int | None,
    unmoved: Path | None = None,
    *,
    with_untouched: bool = False,
) -> None:
    """Train for `train.steps` in fp64 from weights rounded to the precision `rounding`, and write the record
    to `out`.

    `traced_step`: also writes what every module computes in that step. `unmoved`: the folder of the reference
    itself, in a run that starts one unit in the last place away from its weights, to measure how far the
    model carries rounding. Routers then choose as they did there. `with_untouched`: the untouched module, if
    there is one, computes instead of megacore's layers.
    """
    train = config.train
    model = whole_model(config)
    round_first_weights(model, rounding)
    if unmoved is not None:
        move_by_one_unit(model.parameters())
    take_plain(model)
    take_plain_loss(model)
    untouched = UntouchedReference.of(model) if with_untouched else None

    record = ProofRecord(out)
    parameters, buffers = dict(model.named_parameters()), buffers_of([model])
    record.tensors("parameter 0", whole(parameters))
    trained = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
    optimizer = PlainOptimizer(config, trained)
    passes = Passes(model, untouched, Choices([model], unmoved))

    sizes = batch_sizes(config)
    samples = training_samples(config, sum(sizes))
    for step in range(1, train.steps + 1):
        model.at_step(step)
        first = sum(sizes[: step - 1])
        step_samples = samples[first : first + sizes[step - 1]]
        with Trace([model], out if step == traced_step else None) as trace:
            loss = passes.take(step, step_samples, trace)
        if untouched is not None:
            untouched.add_gradients()

        # A parameter on which no loss depends has no gradient, and decays nevertheless.
        gradients = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in trained.items()}
        norm = math.sqrt(sum(float(gradient.square().sum()) for gradient in gradients.values()))
        record.figures(step, loss, norm)
        record.tensors(f"gradient {step}", whole(gradients))

        optimizer.update(step, gradients, norm)
        for buffer in buffers.values():
            buffer.value.copy_(buffer.rule(buffer.value, buffer.take()))
        if untouched is not None:
            untouched.copy_weights()

        record.tensors(f"parameter {step}", whole(parameters))
        record.tensors(f"{ROUTING} {step}", passes.choices.differences())
        record.tensors(f"buffer {step}", whole({name: buffer.value for name, buffer in buffers.items()}))
        for name, state in optimizer.states.items():
            for kind, numbers in state.items():
                record.tensors(f"{kind} {step}", whole({name: torch.as_tensor(numbers)}))

    optimizer.take_averages()
    if untouched is not None:
        untouched.copy_weights()
        untouched.comparison().write(out)
    valid_loss = validate(model, Corpus(config.data.valid, config), untouched)
    record.figures(train.steps, valid_loss=valid_loss)
    record.close()
    passes.choices.write(out)


class Passes:
    """The forward and backward passes of a step, one microbatch after the other.

    The untouched module computes what it can, if there is one, and the model the rest.
    """

    def __init__(self, model: Stage, untouched: UntouchedReference | None, choices: Choices) -> None:
        layers = layers_of(model.config)
        self.model, self.untouched, self.choices = model, untouched, choices
        self.losses, self.sources = losses_of(layers), fields_of(layers)
        # Layouts need the choices of routers and updates of buffers, which only the model makes.
        self.always_runs_model = untouched is None or bool(choices.names or untouched.buffers)

    def take(self, step: int, samples: Sequence[tuple["Corpus", "Sample"]], trace: Trace) -> float:
        """Run all microbatches of a step; gradients are added up. Returns the loss."""
        train = self.model.config.train
        together = microbatch(batch_of(samples), self.sources)
        weights = {}
        for name, loss in self.losses.items():
            count = int((together[loss.over] != IGNORED).sum())
            weights[name] = loss.coefficient / max(count, 1)

        total = 0.0
        for index in range(len(samples) // train.micro_batch_size):
            first = index * train.micro_batch_size
            batch = batch_of(samples[first : first + train.micro_batch_size])
            trace.enter(index, "forward")
            # context ranks divide a batch by its documents
            trace.note("documents", "positions", batch.documents[1])
            sums = self._sums(microbatch(batch, self.sources, key_of(train.seed, step, index)))
            part = sum((weights[name] * sums[name] for name in self.losses), torch.zeros(()))
            trace.enter(index, "backward")
            with nullcontext() if self.untouched is None else self.untouched.computing():
                part.backward()
            total += part.item()
        return total

    def _sums(self, batch: Microbatch) -> dict[str, Tensor]:
        """The sum of each loss of a microbatch."""
        sums = {} if self.untouched is None else self.untouched.sums(batch)
        lacks_some = any(name not in sums for name in self.losses)
        if self.always_runs_model or lacks_some:
            with torch.set_grad_enabled(lacks_some):
                _, model_sums = self.model({}, batch)
            sums = model_sums | sums
        return sums


class PlainOptimizer:
    """Each rule's update in plain numpy (`Rule.reference_state`), and the averages of `optim.ema`.

    Attributes:
        states: of each parameter, its optimizer state by kind.
    """

    def __init__(self, config: Config, trained: Mapping[str, torch.nn.Parameter]) -> None:
        self.optim, self.steps, self.trained = config.optim, config.train.steps, trained
        self.shards = {name: shard_of(parameter) for name, parameter in trained.items()}
        groups = ParameterGroups(config.optim)
        self.groups = {name: groups.of(name, shard) for name, shard in self.shards.items()}
        self.states = {
            name: zeros(self.groups[name].rule, tuple(parameter.shape), self.shards[name])
            for name, parameter in trained.items()
        }
        self.means = {name: np.zeros(tuple(parameter.shape)) for name, parameter in trained.items()}

    def update(self, step: int, gradients: Mapping[str, Tensor], norm: float) -> None:
        """Clip the gradients, whose norm is `norm`; update the parameters, and drop their gradients."""
        optim = self.optim
        clip = min(1.0, optim.grad_clip / (norm + 1e-6)) if optim.grad_clip else 1.0
        for name, parameter in self.trained.items():
            group, shard = self.groups[name], self.shards[name]
            lr = rate(optim, step, self.steps, group.lr)
            decay = group.weight_decay * decays(name, parameter.dim())
            gradient = (gradients[name] * clip).numpy()
            weights = parameter.detach().numpy()
            taken = ReferenceStep(step, self.states[name], gradient, weights, lr, decay)
            self.states[name] = reference_state(group.rule, taken, shard)
            direction = reference_direction(group.rule, taken, self.states[name], shard)

            # NumPy makes a plain number of a scalar: `as_tensor` takes that too.
            parameter.data.copy_(parameter.data * (1 - lr * decay) - lr * torch.as_tensor(direction))
            parameter.grad = None
            if optim.ema is not None:
                self.means[name] = optim.ema * self.means[name] + (1 - optim.ema) * parameter.detach().numpy()
                self.states[name][AVERAGE] = self.means[name] / (1 - optim.ema**step)

    def take_averages(self) -> None:
        """Let the averages of the weights be the weights, where there are any: those validate."""
        for name, parameter in self.trained.items():
            average = self.states[name].get(AVERAGE, parameter.detach().numpy())
            parameter.data.copy_(torch.as_tensor(average))


def round_first_weights(model: Stage, rounding: str) -> None:
    """Round a model's first weights to a precision, after noise is added to those that start constant, or as
    a module draws them.
    """
    dtype = DTYPES[rounding]
    for name, parameter in model.named_parameters():
        parameter.data.copy_(parameter.data.to(dtype))
        if shard_of(parameter).init_std is None:
            noisy = parameter.data + noise(name, tuple(parameter.shape), dtype)
            parameter.data.copy_(noisy.to(dtype))


def move_by_one_unit(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Moves every number to the next above or below it, which of the two is drawn; zeros stay zeros."""
    generator = torch.Generator().manual_seed(0)
    for parameter in parameters:
        is_up = torch.rand(parameter.shape, generator=generator) < 0.5
        target = torch.where(is_up, math.inf, -math.inf).to(parameter.dtype)
        parameter.data.copy_(torch.where(parameter == 0, 0.0, torch.nextafter(parameter.data, target)))


def take_plain(model: torch.nn.Module) -> None:
    """Lets a module of the user's own that has a method ``plain_X`` compute by it,
    where it would by its method ``X``.
    """
    for module in model.modules():
        for name in [name for name in dir(type(module)) if name.startswith("plain_")]:
            setattr(module, name.removeprefix("plain_"), getattr(module, name))


def take_plain_loss(model: Stage) -> None:
    """Let the last layer compute its loss by PyTorch, unless the loss is the user's own."""
    for head in model.behind:
        if getattr(type(head), "loss", None) is Head.loss:
            head.sums = partial(plain_sums, head)  # type: ignore[assignment]


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
    """Inputs and targets ``[batch, seq]``.

    If documents are apart: where they begin in each sequence, and the positions in them.
    """

    inputs: Tensor
    targets: Tensor
    documents: tuple[Any, Tensor | None] = (None, None)


Sample = list[tuple[int, int]]  # the tokens that it has: from a first one up to a last, which is left out


class Corpus:
    """A corpus of the proof, as `write_case` writes it: 16-bit numbers without a header, beside them where
    documents begin, and maybe which tokens are learned.

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
        """Whole documents, the longest first, each into the first of the fullest
        samples that have room for it.
        """
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
    """The first `count` samples, in order, within the first epoch of each corpus.

    Of the first n samples the corpus with the largest share has its share, rounded; the next largest has its
    part of the rest, and so on.
    """
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
        # A token is no target if nothing before it in its sample, or with documents apart in its document,
        # says what it is.
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
def validate(model: Stage, corpus: Corpus, untouched: UntouchedReference | None = None) -> float:
    """Return the mean loss over every token of the corpus that is learned."""
    model.eval()
    total, learned, sources = 0.0, 0, fields_of(layers_of(model.config))
    for sample in corpus.validation:
        batch = microbatch(batch_of([(corpus, sample)]), sources)
        if untouched is None:
            logits = model.logits(model({}, replace(batch, targets=None))[0]["hidden"])
        else:
            logits = untouched.logits(batch)
        total += float(F.cross_entropy(logits, batch["targets"].flatten(), reduction="sum"))
        learned += int((batch["targets"] != IGNORED).sum())
    model.train()
    return total / learned


def whole(tensors: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Shard]]:
    """Whole tensors, each with a `Shard` that says so."""
    return {name: (tensor, Shard(tuple(tensor.shape))) for name, tensor in tensors.items()}
