"""Proofs against a plain module: a port that computes something else than it is a mistake in every layout."""

import contextlib
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from megacore.errors import ConfigError
from megacore.files import ROOT
from megacore.model.batch import Microbatch
from megacore.model.context import Context
from megacore.model.stage import Stage
from megacore.tools.verify.layouts import parse
from megacore.tools.verify.proof_report import explain, explain_wrong_model, verdict
from megacore.tools.verify.run import Options, Proof, prove
from megacore.tools.verify.workers import ProofWorkers
from tests.commands import provers
from tests.granite import LLAMA, MULTIPLIERS

TINY = str(ROOT / "configs/gpt_tiny.json")
GRANITE = ROOT / "tests/granite.py"
MODEL = "transformers.GraniteForCausalLM"


@pytest.fixture(scope="module")
def workers() -> Iterator[ProofWorkers]:
    with provers() as workers:
        yield workers


def proof_of(
    workers: ProofWorkers,
    layouts: str,
    *overrides: str,
    path: Path = GRANITE,
    precision: str = "fp64",
    plant: str | None = None,
) -> Proof:
    options = [f"model.source={path}", "train.global_batch_size=8", *LLAMA, *overrides]
    names = [parse(name) for name in layouts.split(",")]
    return prove(Options(TINY, options, names, precision, plant=plant), workers=workers)


def report(proof: Proof) -> str:
    lines = [line for result in proof.results for line in explain(result)]
    return "\n".join([*lines, *explain_wrong_model(proof), verdict(proof)])


def test_a_port_is_equal_to_the_class_of_transformers(workers: ProofWorkers) -> None:
    """In layouts that divide what the class has whole: its own code shares nothing with them."""
    proof = proof_of(workers, "one,tp2,pp2", *MULTIPLIERS)
    assert proof.holds, report(proof)
    assert verdict(proof).startswith(f"EQUAL to the untouched module in fp64 ({MODEL}): 14 parameters")
    assert verdict(proof).endswith("bound 1e-09")


@pytest.mark.parametrize("forgotten", MULTIPLIERS)
def test_a_forgotten_multiplier_is_found_on_one_process(forgotten: str, workers: ProofWorkers) -> None:
    """Every layout forgets it alike, so that comparing layouts with each other does not show it."""
    proof = proof_of(workers, "one", *(setting for setting in MULTIPLIERS if setting != forgotten))
    lines = report(proof).splitlines()
    assert lines[0] == (
        "one: every layer computes as on one process; the model differs from the untouched module: first "
        "gradient of model.embed_tokens.weight (here embedding.weight), step 1"
    )
    assert lines[1] == f"the model on one process and the untouched module {MODEL}:"
    assert lines[-1].startswith("NOT EQUAL: one (0 of 1 layouts equal): they compute what the model does on")


def test_a_mistake_of_a_layout_is_told_from_one_of_the_model(workers: ProofWorkers) -> None:
    """With both, the layout's is still found in its module, as without an untouched module."""
    plant = "tests.faults.tensor:row_output_unsummed"
    right = proof_of(workers, "tp2", *MULTIPLIERS, plant=plant)
    where = "tp2 parts first in module blocks.0.attention.output, its output, microbatch 0, forward"
    assert report(right).startswith(where) and "untouched" not in report(right), report(right)

    both = report(proof_of(workers, "tp2", *MULTIPLIERS[1:], plant=plant))
    assert both.startswith("tp2: on one process the model differs from the untouched module: first gradient")
    assert where in both and verdict(right).startswith("NOT EQUAL: tp2 (0 of 1 layouts equal)")


def test_in_bf16_the_port_is_compared_too(workers: ProofWorkers) -> None:
    """One process in bf16 says what bf16 costs, and must not explain a wrong model by it."""
    assert proof_of(workers, "one", *MULTIPLIERS, precision="bf16").holds
    wrong = proof_of(workers, "one", *MULTIPLIERS[1:], precision="bf16")
    assert "one: every layer computes as on one process; the model differs" in report(wrong)


@contextlib.contextmanager
def documents_are_ignored() -> Iterator[None]:
    """By the model everywhere: attention and positions go on across documents."""
    context = Stage.context

    def ignorant(self: Stage, batch: Microbatch, *arguments: object) -> Context:
        return context(self, replace(batch, documents=None, positions=None), *arguments)  # type: ignore[arg-type]

    with mock.patch.object(Stage, "context", ignorant):
        yield


def test_documents_are_sequences_of_their_own(workers: ProofWorkers) -> None:
    """The untouched module knows no masks: it reads each document alone, and so needs none."""
    settings = (*MULTIPLIERS, "data.document_mask=true", "data.packing=best_fit")
    proof = proof_of(workers, "one,tp2", *settings)
    assert proof.holds, report(proof)

    ignorant = proof_of(workers, "one", *settings, plant=f"{__name__}:documents_are_ignored")
    assert "one: every layer computes as on one process; the model differs" in report(ignorant)


SECOND_LOSS = """
from megacore.model.flow import Loss
from megacore.model.gpt import gpt
from megacore.model.head import Head
from megacore.model.layers import LayerSpec
from tests.granite import Block, Settings, Untouched
from tests.granite import untouched as granite


class TwoLosses(Head):
    losses = (*Head.losses, Loss("logit_square", coefficient=0.1))

    def forward(self, x, context):
        return super().forward(x, context), self.logits(x).square().mean(-1).sum()


def layers(config):
    return [*gpt(config, Block)[:-1], LayerSpec("head", TwoLosses)]


def untouched(config):
    plain = granite(config)

    def call(tokens):
        logits = plain.call(tokens)
        return RETURNED

    return Untouched(plain.module, call, plain.tensors)
"""


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        ("logits", r"EQUAL to .*; not compared with the untouched module: logit_square"),
        ("(logits, {'logit_square': logits.square().mean(-1).sum()})", "EQUAL to .*, bound 1e-09"),
        ("(logits, {'logit_square': logits.square().sum()})", "NOT EQUAL: one"),
    ],
    ids=["not returned", "returned", "another"],
)
def test_a_second_loss_is_compared_or_listed(
    returned: str, words: str, tmp_path: Path, workers: ProofWorkers
) -> None:
    """What no plain code computes must not be called equal to it."""
    path = tmp_path / "model.py"
    path.write_text(SECOND_LOSS.replace("RETURNED", returned))
    text = verdict(proof_of(workers, "one", *MULTIPLIERS, path=path))
    assert re.fullmatch(words, text) or ("NOT" in words and text.startswith(words)), text


def test_a_size_of_another_model_is_the_function_s_mistake(tmp_path: Path, workers: ProofWorkers) -> None:
    """verify chose the small model's sizes, but it is the function that must take them from the config."""
    path = tmp_path / "model.py"
    path.write_text(OTHER_SIZE)
    with pytest.raises(ConfigError) as raised:
        proof_of(workers, "one", path=path)
    assert raised.value.where == "model.source"
    assert "untouched: embedding.weight has the shape [17, 4] in the module" in raised.value.wrong


OTHER_SIZE = """
import torch

from megacore.model.block import Block
from megacore.tools.verify.untouched import Untouched


def untouched(config):
    module = torch.nn.ModuleDict({"embedding": torch.nn.Embedding(17, 4)})
    return Untouched(module, module["embedding"])
"""
