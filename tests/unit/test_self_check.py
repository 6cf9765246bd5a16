"""The self-checks of launch/verify.py: mistakes that layouts and reference share are found and placed, and
right models raise no alarm.
"""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from launch import verify
from megacore.config.implied import has_masks
from megacore.tools.verify import line_workers
from megacore.tools.verify.layouts import Layout
from megacore.tools.verify.self_check import gradient
from megacore.tools.verify.self_check.case import EXACT, Case
from megacore.tools.verify.self_check.finding import Finding, Report
from megacore.tools.verify.self_check.gradient import examine
from megacore.tools.verify.self_check.report import lines
from megacore.tools.verify.self_check.run import run_check, self_check
from megacore.tools.verify.shrink import load_whole, shrink, write_case
from tests import forks
from tests.build import run_of
from tests.commands import Prover
from tests.faults import self_check as faults

TINY = "configs/gpt_tiny.json"


def checked(folder: Path, config: str, *overrides: str) -> Report:
    """What the self-checks of a config's small case say, in this process."""
    user = load_whole(str(forks.ROOT / config), list(overrides))
    case = write_case(folder, shrink(user, [Layout("one")], 3, "fp64"), has_masks(user))
    return self_check(run_of(case, *EXACT), folder)


def by_check(report: Report, check: str) -> Finding:
    """The one finding of a check."""
    (finding,) = (finding for finding in report.findings if finding.check == check)
    return finding


PLANTED = [
    (faults.detached_gate, ["model.attention_gate=headwise"], "gradient", "blocks.3.*qkv.gate: .* 0.0e"),
    (faults.norm_without_mean_square, [], "gradient", "wrong gradient: blocks.3"),
    (faults.cap_without_gradient, ["model.logit_cap=3.0"], "gradient", "wrong gradient: head"),
    (
        faults.cap_of_scores_without_gradient,
        ["model.attention_cap=2.0"],
        "gradient",
        "wrong gradient: blocks.3",
    ),
    (faults.scaled_backward, [], "gradient", "wrong gradient: blocks.1"),
    (faults.mask_shifted_by_one, [], "look ahead", "the logits of position 0 by .* first in blocks.0"),
    (faults.documents_see_each_other, ["data.document_mask=true"], "look ahead", "document .* in blocks.0"),
    (faults.loss_of_microbatch, [], "additivity", "cross_entropy of 2 samples"),
    (faults.random_numbers, [], "repeat", "first in blocks.1"),
    (faults.factor_in_training, [], "training is evaluation", "first in blocks.1"),
]


@pytest.mark.parametrize(("plant", "overrides", "check", "words"), PLANTED)
def test_a_planted_mistake_is_found_and_placed(plant, overrides, check, words, tmp_path):
    """A layout shares it with the reference, so nothing else that verify does would say so."""
    with plant():
        finding = by_check(checked(tmp_path, TINY, *overrides), check)
    assert finding.status == "wrong"
    assert re.search(words, finding.summary), finding


def test_a_model_that_does_not_repeat_is_compared_with_nothing(tmp_path):
    """Each check would report its own mistake, such as a token that sees a later one, and none is there."""
    with faults.random_numbers():
        report = checked(tmp_path, TINY)
    assert report.wrong == ("repeat",)
    reasons = {finding.summary for finding in report.findings if finding.status == "not checked"}
    assert reasons == {"two passes of the model differ"}


def test_verify_reports_what_is_equally_wrong_in_every_layout(monkeypatch, capsys):
    """Its table shows no difference: without the last line and the status a script would call it proved."""
    monkeypatch.setattr(line_workers, "LineWorker", lambda *_: Prover())
    plant = ["--plant", "tests.faults.self_check:cap_without_gradient", "model.logit_cap=3.0"]
    status = verify.main(["--config", TINY, "--layouts", "one", *plant])
    first, second, *_, equal, last = capsys.readouterr().out.strip().splitlines()
    assert re.match(r"self-check \([\d.]+ s\): repeatable · no look-ahead · additive", first)
    assert re.match(r"WRONG gradient: norm.weight: backward gives .* wrong gradient: head", second)
    assert equal.startswith("EQUAL to one process in fp64")
    assert last == "WRONG: the model's self-check failed: gradient"
    assert status == 1


def test_a_check_that_raises_is_a_finding(tmp_path):
    """An exception that is swallowed would look like a check that found nothing."""

    def check_nothing(case: Case) -> list[Finding]:
        raise ValueError(f"no {case}")

    def check_half(case: Case) -> list[Finding]:
        raise TypeError("unsupported dtype float64")

    wrong, unchecked = (run_check(check, "case")[0] for check in (check_nothing, check_half))
    assert wrong == Finding("nothing", "wrong", "ValueError: no case")
    assert (unchecked.check, unchecked.status) == ("half", "not checked")
    report = Report((wrong, unchecked), 1.0)
    report.write(tmp_path)
    assert Report.read(tmp_path) == report and report.wrong == ("nothing",)


def test_a_gradient_at_a_jump_is_not_checked():
    """A choice that flips within every difference says nothing about backward, and is no alarm."""
    parameter = nn.Parameter(torch.ones(5, dtype=torch.float64))
    parameter.grad = torch.zeros_like(parameter)
    comparison = examine(lambda: (parameter.sum() > 5.0).double(), "p", parameter)
    assert not comparison.is_settled and not comparison.is_right
    smooth = examine(lambda: parameter.sum(), "p", parameter)
    assert smooth.is_settled and not smooth.is_right


def declared(folder: Path, *edits: tuple[str, str]) -> Report:
    """The report of tests/declared_model.py, with some of its text replaced."""
    text = (forks.ROOT / "tests/declared_model.py").read_text(encoding="utf-8")
    for before, after in edits:
        assert before in text
        text = text.replace(before, after)
    (folder / "declared.py").write_text(text, encoding="utf-8")
    return checked(folder, TINY, f"model.source={folder}/declared.py")


def test_what_a_layer_declares_is_exempt_by_name(tmp_path):
    """A declared exemption is no alarm, and what comes after it is still checked."""
    report = declared(tmp_path)
    assert report.wrong == ()
    said = "\n".join(lines(report))
    assert "gradient 13 of 26 parameters" in said
    assert "NOT CHECKED gradient: 13 parameters up to blocks.1, which declares a surrogate gradient" in said
    assert "additive (not spread, by its declaration) (as it evaluates: Reading differs in training)" in said
    assert "NOT CHECKED training is evaluation: Reading differs in training by declaration" in said


@pytest.mark.parametrize(
    ("declaration", "check"),
    [
        ("surrogate_gradient = True", "gradient"),
        (", additive=False", "additivity"),
        ("differs_in_training = True", "training is evaluation"),
    ],
)
def test_without_its_declaration_the_same_is_wrong(declaration, check, tmp_path):
    """Otherwise the exemption above would exempt nothing, and its test could not fail."""
    assert check in declared(tmp_path, (declaration, "" if declaration[0] == "," else "pass")).wrong


def test_what_rounds_to_fewer_bits_is_not_compared_in_fp64(tmp_path):
    """`x.float()` is usual in a norm; its rounding, divided by a small step, would be called a mistake."""
    report = declared(tmp_path, ("(64 * y).round() / 64", "y.float()"), ("surrogate_gradient = True", "pass"))
    reason = "a layer rounds to torch.float32"
    for check in ("gradient", "additivity"):
        finding = by_check(report, check)
        assert finding.status == "not checked" and reason in finding.summary
    assert report.wrong == ()


def test_a_flow_without_gradient_is_held_constant(tmp_path, monkeypatch):
    """Differences see through a detached tensor: its readers' inputs would raise a false alarm."""
    exact = ("surrogate_gradient = True", "pass"), ("(64 * y).round() / 64", "y.detach()")
    assert "gradient 26 of 26 parameters" in "\n".join(lines(declared(tmp_path, *exact)))
    monkeypatch.setattr(gradient, "hold_undifferentiated", lambda model: None)
    assert "gradient" in declared(tmp_path, *exact).wrong


RIGHT = [
    ("configs/gpt_tiny.json", ["model.attention_gate=headwise", "model.logit_cap=3.0", "model.dropout=0.1"]),
    ("configs/gpt_tiny.json", ["model.norm=layernorm", "model.bias=true", "model.zero_init=true"]),
    ("configs/gpt_tiny.json", ["data.document_mask=true", "model.window=8", "model.attention_cap=5.0"]),
    ("configs/gpt_tiny.json", ["train.recompute=full", "model.attention=sdpa", "model.chunked_loss=true"]),
    ("configs/moe_tiny.json", ["train.seed=1"]),
    ("configs/moe_tiny.json", ["model.capacity_factor=1.0", "model.dropout=0.1"]),
    ("configs/latent_tiny.json", []),
    ("configs/forks/hybrid.json", []),
    ("configs/forks/lora.json", []),
    ("configs/forks/multi_token.json", ["model.ahead=2", "model.ahead_kind=heads"]),
    ("configs/forks/speedrun.json", []),
    ("configs/forks/vision.json", ["model.patches=4"]),
]


@pytest.mark.parametrize(("config", "overrides"), RIGHT)
def test_a_right_model_raises_no_alarm(config, overrides, tmp_path):
    """Whoever sees a false alarm once does not believe the next one. All parameters are checked."""
    report = checked(tmp_path, config, *overrides)
    assert [finding for finding in report.findings if finding.status != "right"] == []
    assert len(report.findings) == 9


SOURCES = [("documented", []), ("values", ["train.seed=2"]), ("values", ["model.tie_embeddings=false"])]


@pytest.mark.parametrize(("name", "overrides"), SOURCES)
def test_a_right_model_of_a_file_raises_no_alarm(name, overrides, tmp_path):
    """The file of docs/blocks.md, and one whose layers share parameters, say nothing to the checks."""
    source = forks.written(tmp_path) if name == "documented" else forks.ROOT / "tests/value_embeddings.py"
    report = checked(tmp_path, TINY, f"model.source={source}", *overrides)
    assert [finding for finding in report.findings if finding.status != "right"] == []


def test_a_detach_in_a_file_is_placed(tmp_path):
    """The proof says EQUAL of it, because it compares the file's layers with themselves."""
    source = forks.written(tmp_path, ("F.relu(self.up(x))", "F.relu(self.up(x.detach()))"))
    finding = by_check(checked(tmp_path, TINY, f"model.source={source}"), "gradient")
    assert finding.summary.startswith("blocks.3.norm2.weight: backward gives 0.0e+00")
    assert finding.summary.endswith("last layer with a wrong gradient: blocks.3")
