"""Other trainers' learning-rate formulas, against the settings that docs/migrating.md gives for them."""

import math
from collections.abc import Callable

import pytest

from megacore.config.optim import OptimConfig
from megacore.engine.learning_rate import learning_rate
from tests.documents.pages import ROOT

PEAK, LOW = 1e-3, 1e-4
WARMUP, STEPS = 10, 100


def cosine(fraction: float, low: float) -> float:
    return low + (PEAK - low) * 0.5 * (1 + math.cos(math.pi * fraction))


def megatron(step: int) -> float:
    """Return Megatron-LM's rate, which depends on the number of finished steps."""
    finished = step - 1
    if finished <= WARMUP:
        return PEAK * finished / WARMUP
    return cosine((finished - WARMUP) / (STEPS - WARMUP), LOW)


def torchtitan(step: int) -> float:
    """Return torchtitan's rate: one step at the peak lies between warmup and a linear decay to 0."""
    if step <= WARMUP + 1:
        return PEAK * min(1.0, step / WARMUP)
    return PEAK * (1 - (step - WARMUP - 1) / (STEPS - WARMUP))


def nanogpt(step: int) -> float:
    """Return nanoGPT's rate, whose iterations count from 0."""
    iteration = step - 1
    if iteration < WARMUP:
        return PEAK * (iteration + 1) / (WARMUP + 1)
    return cosine((iteration - WARMUP) / (STEPS - WARMUP), LOW)


def trainer(step: int) -> float:
    """Return the rate of the Hugging Face Trainer, which decays linearly to 0 by default."""
    finished = step - 1
    if finished < WARMUP:
        return PEAK * finished / WARMUP
    return PEAK * (STEPS - finished) / (STEPS - WARMUP)


TO_LOW = OptimConfig(lr=PEAK, min_lr=LOW, warmup_steps=WARMUP, decay_steps=STEPS)
TO_ZERO = OptimConfig(lr=PEAK, min_lr=0, warmup_steps=WARMUP, decay_steps=STEPS, schedule="linear")


@pytest.mark.parametrize(
    ("formula", "optim", "changes", "section", "words"),
    [
        (megatron, TO_LOW, {"lag": (1, 1)}, "Megatron-LM", ["optim.lag=[1,1]"]),
        (torchtitan, TO_ZERO, {"lag": (0, 1)}, "torchtitan", ["optim.schedule=linear", "optim.lag=[0,1]"]),
        (
            nanogpt,
            TO_LOW,
            {"warmup_steps": WARMUP + 1, "decay_steps": STEPS + 1},
            "nanoGPT",
            ["optim.warmup_steps=2001", "optim.decay_steps=600001"],
        ),
        (trainer, TO_ZERO, {"lag": (1, 1)}, "Hugging Face", ["optim.schedule=linear", "optim.lag=[1,1]"]),
    ],
    ids=["megatron", "torchtitan", "nanogpt", "trainer"],
)
def test_the_settings_of_the_page_give_the_other_trainers_rates(
    formula: Callable[[int], float],
    optim: OptimConfig,
    changes: dict[str, object],
    section: str,
    words: list[str],
) -> None:
    """A migrated run would differ from the first step on, and its loss would not show why."""

    def error(config: OptimConfig) -> float:
        return max(abs(learning_rate(config, step, STEPS) - formula(step)) for step in range(1, STEPS + 1))

    assert error(optim.model_copy(update=changes)) < 1e-12
    assert error(optim) > 1e-5, "the page's settings change nothing"
    page = (ROOT / "docs/migrating.md").read_text(encoding="utf-8")
    text = page.split(f"## From {section}")[1].split("\n## ")[0]
    assert all(word in text for word in words)
