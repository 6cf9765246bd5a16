"""Checks what a model keeps from step to step: settings, buffers, attributes of modules, random generators.

A layer may keep anything in Python. But only what is in a checkpoint survives a resume, and training
continues with whatever an evaluation has changed.
"""

import dataclasses
import random
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from megacore.checkpoint import Ranks, Reader, Saver
from megacore.checkpoint.weights import WEIGHTS
from megacore.config import Config
from megacore.data.samples import EvalSamples
from megacore.distributed.mesh import Mesh
from megacore.distributed.rank_info import RankInfo
from megacore.distributed.shard import logical_name
from megacore.model.stage import Stage, whole_model
from megacore.tools.choices.partition import partitioned
from megacore.tools.deepspeed.engine import ENGINES
from megacore.tools.text.decoding import Decoder
from megacore.tools.text.sampling import Sampler
from megacore.tools.verify.self_check.case import Case
from megacore.tools.verify.self_check.finding import Finding
from megacore.tools.verify.self_check.layer_outputs import LayerOutputs, worst
from megacore.train.evaluation import evaluate
from megacore.train.step import TrainStep

# The same operations on the same numbers, which may be added in another order.
BOUND = 1e-12
BY_STEP = "state by step"
LAST = 1_000_000_000  # a step after all changes of settings
STEPS = (2, 3, 10, 100, 1000, 100_000, LAST)  # at which settings may be others than at step 1
GENERATED = 4  # tokens
SHOWN = 40  # characters of a value in a report


def check_state_by_step(case: Case) -> list[Finding]:
    """Check that what a model computes at a step depends on that step alone.

    A model that comes back to step 1 must compute as it did, and a new one as before or at step 1, or as
    after all steps. At each step of `model.window_schedule`, and after it, a model must compute what one
    computes whose window is always the one of that step.
    """
    model, settings = case.build(), case.config.model
    if not model.of_steps:
        return [Finding(BY_STEP, "right", "no setting by step")]
    changes = [last + more for last, _ in settings.window_schedule for more in (0, 1)]
    by_step, mistakes = {1: at_step(case, model, 1)}, list[str]()
    for step in sorted({*STEPS, *changes} - {1}):
        by_step[step] = at_step(case, model, step)
        again = at_step(case, model, 1)
        mistakes += again.mistakes([by_step[1]], f"after step {step}, step 1 is not as before")

    new, zero = at_step(case, new_model(case, case.config)), at_step(case, model, 0)
    like_none = "a new model computes as at none of the steps 0, 1 and the last"
    mistakes += new.mistakes([zero, by_step[1], by_step[LAST]], like_none)

    if settings.window_schedule:
        for step, window in (*settings.window_schedule, (LAST, settings.window)):
            fixed = settings.model_copy(update={"window": window, "window_schedule": ()})
            expected = at_step(case, new_model(case, case.config.model_copy(update={"model": fixed})))
            what = f"at step {step} it is not as a model whose window is always {window}"
            mistakes += by_step[step].mistakes([expected], what)
    if mistakes:
        return [Finding(BY_STEP, "wrong", mistakes[0], tuple(mistakes[1:]))]
    return [Finding(BY_STEP, "right", BY_STEP)]


@dataclass(frozen=True)
class Results:
    """What a model computes at one step: logits, the training loss, and each layer's outputs."""

    values: dict[str, Tensor]
    outputs: LayerOutputs

    def mistakes(self, allowed: Sequence["Results"], what: str) -> list[str]:
        """Return a line that begins with `what` if these results are none of those allowed, else nothing."""
        by_result = [(worst(self.values, expected.values), expected) for expected in allowed]
        if any(apart <= BOUND for (_, apart), _ in by_result):
            return []
        (name, apart), nearest = min(by_result, key=lambda found: found[0][1])
        layer = self.outputs.first_apart(nearest.outputs, BOUND) or "head"
        return [f"{what}: {apart:.1e} off in its {name}, first in {layer}"]


@torch.no_grad()
def at_step(case: Case, model: Stage, step: int | None = None) -> Results:
    """Return what a model computes at a step; None: it is told no step."""
    if step is not None:
        model.at_step(step)
    batch, values = case.microbatches[0], dict[str, Tensor]()
    with LayerOutputs(model) as outputs:
        if hasattr(model.behind[0], "logits"):
            values["logits"] = case.logits(model.eval(), batch)
        values["training loss"] = case.loss(model.train(), batch)
    return Results(values, outputs)


def new_model(case: Case, config: Config) -> Stage:
    """Return a model of a config like the case's, with the case's weights, that was told no step."""
    model = whole_model(config)
    model.load_state_dict(case.build().state_dict())
    return model


def check_evaluation_and_resume(case: Case) -> list[Finding]:
    """Check that training continues in the same bits after an evaluation, and after a resume.

    From the same weights, three runs of the real step and engine take two steps. Between the steps the
    second run evaluates on other tokens and generates text; the third is saved, built anew and loaded.
    """
    runs = Runs(case)
    uninterrupted, evaluated, resumed = (
        runs.two_steps(runs.continue_training),
        runs.two_steps(runs.evaluate),
        runs.two_steps(runs.resume),
    )
    return [
        evaluated.finding("evaluation", "evaluation pure", uninterrupted, strict=True),
        resumed.finding("resume", "resume", uninterrupted, strict=False),
    ]


@dataclass(frozen=True)
class Run:
    """What a run of two steps holds between and after them, and what it has computed."""

    between: dict[str, object]  # tensors and plain values by name
    after: dict[str, Tensor]  # loss, gradient norm, all tensors of a checkpoint, and modules' buffers
    at_end: dict[str, object]  # as in `between`

    def finding(self, check: str, right: str, uninterrupted: "Run", strict: bool) -> Finding:
        """Return what a comparison with the run that did nothing between its steps finds.

        `strict`: values that changed between the steps and still differ after step 2 are a mistake also where
        step 2 does not show it. What every pass overwrites, such as a metric that a layer notes, may change.
        Values that are new are none: a layer may make a table when it is first needed.
        """
        before = uninterrupted.between
        changed = changed_values(before, self.between)
        lasting = [name for name in changed_values(uninterrupted.at_end, self.at_end) if name in changed]
        apart = [
            name for name, tensor in uninterrupted.after.items() if not torch.equal(self.after[name], tensor)
        ]
        if not apart and not (lasting and strict):
            return Finding(check, "right", right)
        others = sorted({*before} ^ {*self.between}) if apart else []
        details = tuple(
            f"{name}: {shown(before, name)} before, {shown(self.between, name)} after"
            for name in (*(changed if apart else lasting), *others)
        )
        if not apart:
            return Finding(check, "wrong", f"it changes {len(lasting)} values that modules hold", details)
        differing = f"step 2 differs after it: {', '.join(apart[:3])}"
        more = f" and {len(apart) - 3} more tensors" if len(apart) > 3 else ""
        return Finding(check, "wrong", differing + more, details)


class Runs:
    """Runs of two steps of one microbatch on one process, with what happens between the steps."""

    def __init__(self, case: Case) -> None:
        train = case.config.train
        short = {"global_batch_size": train.micro_batch_size, "batch_ramp": (), "eval_batches": 2}
        config = case.config.model_copy(update={"train": train.model_copy(update=short)})
        self.config, self.folder = partitioned(config), case.folder
        self.mesh = Mesh(self.config, RankInfo(), torch.device("cpu"))
        self.batches = case.microbatches[:1], case.other_microbatches[:1]
        self.weights = {name: parameter.data for name, parameter in case.build().named_parameters()}

    def two_steps(self, between: Callable[[TrainStep], TrainStep]) -> Run:
        """Take both steps of a run from the case's weights."""
        seed_generators(1)
        step = TrainStep(self.config, self.mesh, draw=False, engines=ENGINES)
        tensors = step.engine.tensors()
        for key, (tensor, piece) in tensors.items():
            if key.startswith(WEIGHTS):
                tensor.copy_(self.weights[logical_name(key).removeprefix(WEIGHTS)][piece.slices])
        step.engine.load_state(step.engine.state(), tensors)

        step(1, self.batches[0])
        step = between(step)
        held = dict(values_held(step))
        result = step(2, self.batches[1])
        after = {"loss": result.loss, "gradient norm": result.grad_norm} | tensors_of(step)
        at_end = dict(values_held(step))
        step.engine.close()
        return Run(held, after, at_end)

    def continue_training(self, step: TrainStep) -> TrainStep:
        """Do nothing between the steps."""
        return step

    @torch.no_grad()
    def evaluate(self, step: TrainStep) -> TrainStep:
        """Evaluate on the validation corpus, and generate text, as a run does."""
        config = self.config
        vocabulary = config.model.vocab_size
        samples = EvalSamples(str(config.data.valid), config.train.seq_len, vocabulary, config.data.packing)
        prompt = samples.samples(np.arange(1))[0][0, : config.train.seq_len // 2].tolist()
        with step.engine.evaluating():
            evaluate(config, step.runtime, self.mesh, samples)
            for stage in step.stages:
                stage.eval()
            with suppress(Exception):  # `check_cache` reports a model that generates no text
                sampler = Sampler(1.0, vocabulary, 1.0, 0, vocabulary)
                list(Decoder(step.stages, self.mesh).generate(prompt, GENERATED, sampler))
            for stage in step.stages:
                stage.train()
        return step

    def resume(self, step: TrainStep) -> TrainStep:
        """Save, and load the checkpoint into a new model and engine, as the trainer does."""
        config, ranks = self.config, Ranks(self.mesh)
        with tempfile.TemporaryDirectory(prefix="megacore_resume_", dir=self.folder) as folder:
            saver = Saver(Path(folder), ranks)
            sections = config.model_dump(mode="json", by_alias=True)
            state = {"engine": step.engine.state(), "model": sections["model"], "config": sections}
            saver.start(1, step.engine.tensors(), state)
            saved = saver.finish()
            assert saved is not None
            step.engine.close()

            seed_generators(2)  # a new process does not have the old one's generators
            resumed = TrainStep(config, self.mesh, draw=False, engines=ENGINES)
            reader, tensors = Reader(saved.path), resumed.engine.tensors()
            for key, (tensor, piece) in tensors.items():
                reader.read_into(logical_name(key), piece, tensor)
            resumed.engine.load_state(reader.state["engine"], tensors)
        return resumed


def seed_generators(seed: int) -> None:
    """Seed the global random generators that a layer may use."""
    torch.manual_seed(seed)
    np.random.seed(seed)  # noqa: NPY002  (a layer may use the old generator)
    random.seed(seed)


def tensors_of(step: TrainStep) -> dict[str, Tensor]:
    """Return copies of all tensors of a checkpoint and of all buffers of modules, by name."""
    step.engine.settle()
    tensors = {key: tensor for key, (tensor, _) in step.engine.tensors().items()}
    for stage in step.stages:
        tensors |= dict(stage.named_buffers())
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def values_held(step: TrainStep) -> Iterator[tuple[str, object]]:
    """Yield what a run holds, by name: tensors, attributes of modules, and random state."""
    yield from tensors_of(step).items()
    of_every_module = vars(nn.Module()).keys() - {"training"}
    for stage in step.stages:
        for place, module in stage.named_modules():
            for name, value in vars(module).items():
                if name not in of_every_module:
                    yield from plain_values(f"{place}.{name}".removeprefix("."), value, depth=2)

    # Last: after a resume these always differ, and a report shows the first values.
    yield "torch's random state", torch.get_rng_state()
    yield "numpy's random state", str(np.random.get_state())  # noqa: NPY002
    yield "Python's random state", str(random.getstate())


def plain_values(name: str, value: object, depth: int) -> Iterator[tuple[str, object]]:
    """Yield the tensors and plain values in an attribute: itself, or in collections and data classes."""
    if isinstance(value, Tensor):
        yield name, value.detach().clone()
    elif value is None or isinstance(value, (bool, int, float, complex, str)):
        yield name, value
    elif depth:
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        elif isinstance(value, list | tuple):
            value = dict(enumerate(value))
        if isinstance(value, dict):
            for key, entry in value.items():
                yield from plain_values(f"{name}.{key}", entry, depth - 1)


def changed_values(before: Mapping[str, object], after: Mapping[str, object]) -> list[str]:
    """Return the names of the values that both have and that differ."""
    return [name for name in before if name in after and not alike(before, after, name)]


def alike(before: Mapping[str, object], after: Mapping[str, object], name: str) -> bool:
    """Return whether a value is the same in both.

    A tensor of another shape counts as the same: it was made for other tokens, such as a mask.
    """
    one, other = before[name], after[name]
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape != other.shape or (one.dtype == other.dtype and torch.equal(one, other))
    return type(one) is type(other) and one == other


def shown(values: Mapping[str, object], name: str) -> str:
    """Return a value in a few characters."""
    if name not in values:
        return "absent"
    value = values[name]
    if isinstance(value, Tensor):
        if value.numel() == 1:
            return f"{value.item():.6g}"
        return f"a tensor of norm {float(value.double().norm()):.6g}"
    return str(value) if len(str(value)) < SHOWN else "another state"
