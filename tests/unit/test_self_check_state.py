"""The self-checks of what a model keeps: the cache, settings by step, evaluation and resume."""

import json
import re
from pathlib import Path

import pytest

from megacore.checkpoint import Reader
from megacore.config.implied import has_masks
from megacore.tools.verify.layouts import Layout
from megacore.tools.verify.self_check import state
from megacore.tools.verify.self_check.case import EXACT, Case
from megacore.tools.verify.self_check.finding import Finding
from megacore.tools.verify.self_check.generation import check_cache
from megacore.tools.verify.self_check.state import check_evaluation_and_resume, check_state_by_step
from megacore.tools.verify.shrink import load_whole, shrink, write_case
from tests import forks
from tests.build import run_of
from tests.faults import self_check_state as faults

TINY, MOE = "configs/gpt_tiny.json", "configs/moe_tiny.json"
SCHEDULE = ["model.window=32", "model.window_schedule=[[10,8]]", "model.attention_cap=2.0"]
BIASED = ["model.router_bias_rate=0.02"]
BY_STEP, SECOND = "state by step", "blocks.1.feed_forward"


def findings_of(folder: Path, config: str, *overrides: str) -> dict[str, Finding]:
    """What these checks say of a config's small case, by check."""
    user = load_whole(str(forks.ROOT / config), list(overrides))
    path = write_case(folder, shrink(user, [Layout("one")], 3, "fp64"), has_masks(user))
    case = Case(run_of(path, *EXACT), folder)
    findings = [*check_cache(case), *check_state_by_step(case), *check_evaluation_and_resume(case)]
    return {finding.check: finding for finding in findings}


PLANTED = [
    (faults.cache_one_token_short, TINY, [], "cache", "blocks.0 .* from token 1 on"),
    (faults.rotary_position_of_the_token_before, TINY, [], "cache", "blocks.0 .* from token 1 on"),
    (faults.mixed_without_a_cache, TINY, [], "cache", "blocks.1 .* from token 1 on"),
    (faults.cap_dropped_at_steps, TINY, SCHEDULE, BY_STEP, "a new model .* first in blocks.0"),
    (faults.cap_dropped_with_a_schedule, TINY, SCHEDULE, BY_STEP, "is always 4: .* first in blocks.0"),
    (faults.window_that_only_grows, TINY, SCHEDULE, BY_STEP, "after step 3, step 1 .* first in blocks.0"),
    (faults.evaluation_is_counted, MOE, BIASED, "evaluation", f"{SECOND}.router.load.noted.0: absent before"),
    (faults.state_leaks_from_evaluation, TINY, [], "evaluation", f"{SECOND}.state: absent before"),
    (faults.passes_are_counted, TINY, [], "evaluation", f"{SECOND}.passes: 1 before, [0-9]+ after"),
    (faults.evaluation_draws_random_numbers, TINY, [], "evaluation", "torch's random state"),
    (faults.counter_lost, TINY, [], "resume", f"{SECOND}.passes: 1 before, absent after"),
    (faults.mean_lost, TINY, [], "resume", f"{SECOND}.mean: .* before, absent after"),
    (faults.buffers_not_saved, MOE, BIASED, "resume", f"{SECOND}.router.bias.value: .* before, .* after"),
]


@pytest.mark.parametrize(("plant", "config", "overrides", "check", "words"), PLANTED)
def test_a_planted_mistake_is_found_and_placed(plant, config, overrides, check, words, tmp_path):
    """A layout shares it with the reference, so nothing else that verify does would say so."""
    with plant():
        finding = findings_of(tmp_path, config, *overrides)[check]
    assert finding.status == "wrong", finding
    assert re.search(words, "\n".join((finding.summary, *finding.details))), finding


RIGHT = [
    (TINY, [*SCHEDULE, "model.global_every=2", "model.dropout=0.1", "optim.ema=0.9"]),
    (TINY, ["model.position=learned", "train.recompute=full", "model.chunked_loss=true"]),
    (TINY, ["model.window=32", "model.attention_sinks=true", "model.qk_norm=true", "optim.kind=muon"]),
    (TINY, ["data.document_mask=true", "model.attention=sdpa", "engine.kind=fsdp"]),
    (MOE, [*BIASED, "model.capacity_factor=1.0"]),
    ("configs/latent_tiny.json", []),
    ("configs/forks/hybrid.json", []),
    ("configs/forks/lora.json", []),
    ("configs/forks/multi_token.json", []),
    ("configs/forks/speedrun.json", []),
    ("configs/forks/vision.json", ["model.patches=4"]),
]


@pytest.mark.parametrize(("config", "overrides"), RIGHT)
def test_a_right_model_raises_no_alarm(config, overrides, tmp_path):
    """Whoever sees a false alarm once does not believe the next one."""
    findings = findings_of(tmp_path, config, *overrides)
    assert [finding for finding in findings.values() if finding.status != "right"] == []
    assert list(findings) == ["cache", "state by step", "evaluation", "resume"]


NOTING = """
from megacore.model.block import Block as Usual


class Block(Usual):
    def forward(self, x, context):
        y = super().forward(x, context)
        self.mean_square, self.rows = y.detach().square().mean(), len(x)
        return y
"""


def test_a_metric_that_every_pass_overwrites_raises_no_alarm(tmp_path):
    """A layer may note something for a callback: training never reads what an evaluation has left there."""
    source = tmp_path / "noting.py"
    source.write_text(NOTING)
    findings = findings_of(tmp_path, TINY, f"model.source={json.dumps(str(source))}")
    assert {finding.status for finding in findings.values()} == {"right"}


def test_a_checkpoint_is_saved_in_the_folder_of_the_proof(tmp_path, monkeypatch):
    """Ctrl-C kills the process that checks. What it has saved elsewhere would stay on the disk."""
    folders = []

    def read(path: Path) -> Reader:
        folders.append(path)
        return Reader(path)

    monkeypatch.setattr(state, "Reader", read)
    findings_of(tmp_path, TINY)
    assert [folder.is_relative_to(tmp_path) for folder in folders] == [True]


def test_a_model_without_a_cache_is_not_checked(tmp_path):
    """A model that is not meant to generate text is no mistake, and the report says what was left out."""
    with faults.no_layer_has_a_cache():
        finding = findings_of(tmp_path, TINY)["cache"]
    assert finding.status == "not checked"
    assert finding.summary.startswith("blocks.0 needs earlier tokens, and no layer keeps them")


MUTE = """
import torch.nn.functional as F

from megacore.model.gpt import gpt
from megacore.model.head import Head
from megacore.model.layers import LayerSpec


class Mute(Head):
    logits = property()

    def loss(self, x, targets, gradient=None):
        return F.cross_entropy(Head.logits(self, x), targets.flatten(), reduction="sum")


def layers(config):
    return [*gpt(config)[:-1], LayerSpec("head", Mute)]
"""


def test_a_model_without_logits_is_checked_by_its_loss(tmp_path):
    """Only the cache needs logits: settings by step, evaluation and resume show in the training loss."""
    source = tmp_path / "mute.py"
    source.write_text(MUTE)
    overrides = [f"model.source={json.dumps(str(source))}", *SCHEDULE]
    findings = findings_of(tmp_path, TINY, *overrides)
    assert findings.pop("cache").status == "not checked"
    assert {finding.status for finding in findings.values()} == {"right"}
    with faults.cap_dropped_at_steps():
        assert findings_of(tmp_path, TINY, *overrides)[BY_STEP].status == "wrong"
