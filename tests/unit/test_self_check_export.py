"""The self-check of the exported model."""

import dataclasses
import sys
from pathlib import Path

import pytest

from megacore.config.implied import has_masks
from megacore.tools.interchange import export_hf as exporter
from megacore.tools.verify.layouts import Layout
from megacore.tools.verify.line_workers import Workers
from megacore.tools.verify.self_check.case import EXACT, Case
from megacore.tools.verify.self_check.export import check_export
from megacore.tools.verify.self_check.finding import Finding
from megacore.tools.verify.shrink import load_whole, shrink, write_case
from tests import forks
from tests.build import run_of

TINY, MOE = "configs/gpt_tiny.json", "configs/moe_tiny.json"


def exported(folder: Path, config: str, *overrides: str) -> Finding:
    """What the check finds of a config's small case."""
    user = load_whole(str(forks.ROOT / config), list(overrides))
    path = write_case(folder, shrink(user, [Layout("one")], 3, "fp64"), has_masks(user))
    (finding,) = check_export(Case(run_of(path, *EXACT), folder))
    return finding


def test_a_mapping_that_is_wrong_both_ways_is_found(tmp_path, monkeypatch):
    """Such an export reads back as what was written, and other projects' text would be wrong."""
    pytest.importorskip("transformers", reason="transformers is not installed: pip install -e '.[test]'")
    (tmp_path / "right").mkdir()
    assert exported(tmp_path / "right", TINY).summary == "export as LlamaForCausalLM"
    right = exporter.family_for_config

    def with_swapped_gate(config):
        family = right(config)
        mapped = [
            dataclasses.replace(
                tensor,
                split=lambda ours, split=tensor.split: split(ours.flip(0)),
                join=lambda theirs, join=tensor.join: join(theirs).flip(0),
            )
            if tensor.name == "blocks.1.feed_forward.up.weight"
            else tensor
            for tensor in family.mapped(config)
        ]
        return dataclasses.replace(family, mapped=lambda config: mapped)

    monkeypatch.setattr(exporter, "family_for_config", with_swapped_gate)
    (tmp_path / "wrong").mkdir()
    finding = exported(tmp_path / "wrong", TINY)
    assert finding.status == "wrong"
    assert "differ from LlamaForCausalLM's by" in finding.summary


def test_a_model_without_a_family_is_not_checked(tmp_path):
    """A model that no other project has is no mistake."""
    finding = exported(tmp_path, MOE)
    assert finding.status == "not checked"
    assert finding.summary.startswith("no known architecture has this model")


def test_without_transformers_nothing_is_checked(tmp_path, monkeypatch):
    """transformers is an extra: verify works without it, and says what it left out."""
    monkeypatch.setitem(sys.modules, "transformers", None)
    finding = exported(tmp_path, TINY)
    assert (finding.status, finding.summary) == ("not checked", "transformers is not installed")


def test_workers_are_ended_once_by_two_threads():
    """Ctrl-C closes the export's worker while a thread waits for it, and this thread closes it as well."""
    ended = []

    class Worker:
        def end(self) -> None:
            ended.append(self)
            workers.close()  # as the thread does whose worker has ended

    workers = Workers(lambda rank: Worker())
    workers.running = [Worker(), Worker()]
    both = list(workers.running)
    workers.close()
    assert ended == both
