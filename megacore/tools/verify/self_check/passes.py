"""Compares passes of the model with each other: later tokens, other documents, single samples, a second time,
and evaluation.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from megacore.model.batch import Microbatch
from megacore.model.stage import Stage
from megacore.tools.verify.self_check.case import Case
from megacore.tools.verify.self_check.finding import Finding
from megacore.tools.verify.self_check.layer_outputs import LayerOutputs, difference

BOUND = 1e-12  # relative; products of other shapes round otherwise
DIFFERS = "a second pass gives another"
LOOK_AHEAD, ADDITIVITY, REPEAT, EVALUATION = "look ahead", "additivity", "repeat", "training is evaluation"


def check_look_ahead(case: Case) -> list[Finding]:
    """Check that later tokens, and those of other documents, change no logit.

    Fields of the batch besides the tokens stay as they are. A model that declares that it differs in training
    is checked as it evaluates.
    """
    note, case = capacity_note(case), case.without_drops
    model, batch = case.build(), case.microbatches[0]
    differing = differing_modules(model)
    if differing:
        model.eval()
    if not hasattr(model.behind[0], "logits"):
        return [Finding(LOOK_AHEAD, "not checked", "the last layer has no method logits")]
    with torch.no_grad():
        logits = case.logits(model, batch)
    seq = batch.tokens.shape[1]
    positions = torch.arange(seq).expand_as(batch.tokens)

    # The tokens that are changed: only logits at these positions may change.
    changes = [(positions > cut, f"tokens from position {cut + 1} on") for cut in (0, seq // 2, seq - 2)]
    if batch.documents is not None and any(len(bounds) > 2 for bounds in batch.documents):
        ends = torch.tensor([bounds[1] for bounds in batch.documents])[:, None]
        changes.append((positions < ends, "tokens of the first document"))

    wrong, has_effect = list[str](), False
    for changed, what in changes:
        tokens = torch.where(changed, (batch.tokens + 1) % case.config.model.vocab_size, batch.tokens)
        other = replace(batch, tokens=tokens)
        with torch.no_grad():
            distances = (case.logits(model, other) - logits).abs().amax(1).view(positions.shape)
        has_effect |= bool(distances.any())
        distances = (distances / logits.abs().max()).masked_fill(changed, 0.0)
        apart = ~(distances <= BOUND)  # NaN too
        if apart.any():
            position = int(positions[apart].min())
            place = first_layer_apart(case, [(model, batch), (model, other)], rows=~changed)
            wrong.append(
                f"other {what} change the logits of position {position} by {distances.max():.0e}, "
                f"relative; {place}"
            )
    if wrong:
        return [Finding(LOOK_AHEAD, "wrong", wrong[0], tuple(wrong[1:]))]
    if not has_effect:
        return [Finding(LOOK_AHEAD, "not checked", "no logit depends on the tokens that were changed")]
    return [Finding(LOOK_AHEAD, "right", f"no look-ahead{note}{evaluation_note(differing)}")]


@torch.no_grad()
def check_additivity(case: Case) -> list[Finding]:
    """Check that each loss's sum over a batch is the sum over its samples.

    Otherwise it would depend on the size of a microbatch and on the number of data ranks.
    """
    if case.rounds_to is not None:
        return [Finding(ADDITIVITY, "not checked", f"a layer rounds to {case.rounds_to}, and sums with it")]
    note, case = capacity_note(case), case.without_drops
    model = case.build()
    differing = differing_modules(model)
    if differing:
        model.eval()
    samples = case.samples[: max(2, case.config.train.micro_batch_size)]
    whole = case.loss_sums(model, case.microbatch(samples))
    alone = [case.loss_sums(model, case.microbatch([sample])) for sample in samples]
    wrong = []
    for name, value in whole.items():
        parts = torch.stack([sums[name] for sums in alone])
        distance = float((value - parts.sum()).abs() / parts.abs().sum().clamp(min=1e-300))
        if case.losses[name].additive and not distance <= BOUND:
            wrong.append(
                f"{name} of {len(samples)} samples is {float(value):.6g}, and the sum over each alone "
                f"{float(parts.sum()):.6g}"
            )
    if wrong:
        return [Finding(ADDITIVITY, "wrong", wrong[0], tuple(wrong[1:]))]
    declared = [name for name in whole if not case.losses[name].additive]
    exempt = f" (not {', '.join(declared)}, by its declaration)" if declared else ""
    return [Finding(ADDITIVITY, "right", f"additive{exempt}{note}{evaluation_note(differing)}")]


def check_repeat(case: Case) -> list[Finding]:
    """Check that a second pass over a microbatch gives the same bits, with dropout and backward."""
    model, batch = case.build(), case.microbatches[0]
    first, second = (loss_and_gradients(case, model, batch) for _ in range(2))
    apart = [name for name, value in first.items() if not torch.equal(value, second[name])]
    if apart:
        place = first_layer_apart(case, [(model, batch), (model, batch)], bound=0.0)
        summary = f"{DIFFERS} {apart[0]}; {place}"
        return [Finding(REPEAT, "wrong", summary, tuple(apart[1:]))]
    return [Finding(REPEAT, "right", "repeatable")]


def check_training_is_evaluation(case: Case) -> list[Finding]:
    """Check that without dropout training and evaluation give the same losses and logits."""
    note, case = capacity_note(case), case.without_drops
    model, batch = case.build(), case.microbatches[0]
    if differing := differing_modules(model):
        return [
            Finding(EVALUATION, "not checked", f"{', '.join(differing)} differs in training by declaration")
        ]
    with_logits = hasattr(model.behind[0], "logits")

    def values(training: bool) -> dict[str, Tensor]:
        model.train(training)
        sums = case.loss_sums(model, batch, case.weights if training else None)
        return dict(sums) | ({"logits": case.logits(model, batch)} if with_logits else {})

    trained = {name: value.detach() for name, value in values(training=True).items()}
    with torch.no_grad():
        evaluated = values(training=False)
    wrong = []
    for name in trained.keys() & evaluated.keys():
        distance = difference(evaluated[name], trained[name])
        if not distance <= BOUND:
            wrong.append(f"{name} in training and in evaluation are {distance:.0e} apart")
    if wrong:
        other = case.build().eval()
        place = first_layer_apart(case, [(model.train(), batch), (other, batch)])
        return [Finding(EVALUATION, "wrong", f"{sorted(wrong)[0]}; {place}", tuple(sorted(wrong)[1:]))]
    return [Finding(EVALUATION, "right", f"training = evaluation{note}")]


def differing_modules(model: Stage) -> list[str]:
    """Return the classes of the modules that declare that they differ in training, each once."""
    modules = (module for layer in model.layers for module in layer.modules())
    return list(
        dict.fromkeys(
            type(module).__name__ for module in modules if getattr(module, "differs_in_training", False)
        )
    )


def capacity_note(case: Case) -> str:
    """Return what `Case.without_drops` leaves out by design, in words for a summary."""
    return " (without model.capacity_factor)" if case.config.model.capacity_factor is not None else ""


def evaluation_note(differing: Sequence[str]) -> str:
    """Return that a check ran in evaluation and why, in words for a summary."""
    return f" (as it evaluates: {', '.join(differing)} differs in training)" if differing else ""


def loss_and_gradients(case: Case, model: Stage, batch: Microbatch) -> dict[str, Tensor]:
    """Run one microbatch as training does; return its loss, and its gradients by parameter."""
    model.zero_grad()
    loss = case.loss(model, batch, case.weights)
    loss.backward()
    gradients = {
        f"gradient of {name}": parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    return {"loss": loss.detach()} | gradients


@torch.no_grad()
def first_layer_apart(
    case: Case, passes: Sequence[tuple[Stage, Microbatch]], bound: float = BOUND, rows: Tensor | None = None
) -> str:
    """Return in which layer two passes differ first, in words.

    `rows`: a mask of the tokens ``[batch, seq]`` to compare; None is all.
    """
    outputs = list[LayerOutputs]()
    for model, batch in passes:
        with LayerOutputs(model) as layers:
            case.loss_sums(model, batch)
        outputs.append(layers)
    name = outputs[0].first_apart(outputs[1], bound, None if rows is None else rows.flatten())
    return f"first in {name}" if name else "in no layer's output"
