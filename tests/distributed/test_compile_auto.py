"""`train.compile=auto`: what rank 0 measures before the first step holds on every rank, in
the records, and at each resume.
"""

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from megacore.checkpoint import Reader
from megacore.distributed.mesh import Mesh
from megacore.distributed.rank_info import RankInfo
from megacore.tools.choices import compiling, resolve_auto
from megacore.tools.choices.compiling import Small, Times, can_compile, settled
from megacore.tools.choices.settle import settled_alone
from megacore.tools.launchers import place_from_environment
from megacore.tools.settings.load import resolve
from megacore.train.step import TrainStep
from tests import training

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("auto")
    return training.write_config(folder, training.write_corpus(folder))


def planted_rank(
    config: str, overrides: list[str], log_dir: str, seconds: float, ratio: float | None
) -> tuple[int, bool]:
    """One rank's run, in which a step takes so many `seconds`, and a compiled one `ratio` as long (None:
    nobody may ask). Returns how many of its blocks were compiled, and whether this rank measured.
    """
    blocks: list[nn.Module] = []
    times = mock.Mock(return_value=Times(1.0, ratio or 0.5))
    with (
        mock.patch.object(nn.Module, "compile", lambda block, **options: blocks.append(block)),
        mock.patch.multiple(Small, seconds=mock.Mock(return_value=seconds), times=times),
        mock.patch.object(compiling, "LEAST_STEPS", 2),
    ):
        assert training.run_rank(config, overrides, log_dir) == 0
    assert ratio is not None or not times.called
    return len(blocks), times.called


def choices(log_dir: Path, step: int, section: str = "train", key: str = "compile") -> list[Any]:
    """What config.json and the checkpoint of a step say."""
    state = Reader(log_dir / "checkpoints" / f"step_{step:08}").state
    return [json.loads((log_dir / "config.json").read_text())[section][key], state["config"][section][key]]


@pytest.mark.parametrize(("ratio", "chosen"), [(0.9, True), (0.99, False)])
def test_what_rank_0_measures_holds_everywhere_and_at_a_resume(
    pool: Any, config: str, tmp_path: Path, ratio: float, chosen: bool
) -> None:
    """Ranks that measured each for itself would choose otherwise, and a resumed run would
    round otherwise than it began.
    """
    blocks = 5 if chosen else 0
    found = pool.run(2, planted_rank, config, ["train.steps=2"], str(tmp_path), 1e4, ratio)
    assert found == [(blocks, True), (blocks, False)], "only rank 0 measures"
    assert choices(tmp_path, 2) == [chosen, chosen]
    assert (
        pool.run(2, planted_rank, config, ["train.steps=3"], str(tmp_path), 1e4, None)
        == [(blocks, False)] * 2
    )
    assert choices(tmp_path, 3) == [chosen, chosen]


def test_a_short_run_is_neither_measured_nor_compiled(pool: Any, config: str, tmp_path: Path) -> None:
    """Inductor works for half a minute: a run of a few minutes would end later than without it."""
    assert pool.run(1, planted_rank, config, ["train.steps=2"], str(tmp_path), 1e-3, None) == [(0, False)]
    assert choices(tmp_path, 2) == [False, False]


EXCLUDED: dict[str, dict[str, Any]] = {
    "dropout": {"model": {"dropout": 0.1}},
    "offload": {"train": {"offload_activations": True}},
    "bits that repeat": {"train": {"deterministic": True}},
    "fp64": {"train": {"precision": "fp64"}},
    "few steps": {"train": {"steps": 199}},
    "tensor ranks": {"parallel": {"tensor": 2}},
    "context ranks": {"parallel": {"context": 2}},
    "fsdp": {"engine": {"kind": "fsdp"}},
    "split backwards": {"parallel": {"pipeline": 2, "schedule": "zb_h1"}},
}


def test_what_excludes_compiled_blocks_is_left_out() -> None:
    """And does not end as a mistake of the user, who asked for nothing."""
    base: dict[str, Any] = {
        "model": {"num_layers": 4},
        "train": {"steps": 200, "seq_len": 32, "precision": "fp32"},
    }
    assert can_compile(resolve(dict(base), [], "x", 1).config, CPU)
    assert not can_compile(resolve(dict(base), [], "x", 1).config, torch.device("cuda"))
    for name, sections in EXCLUDED.items():
        raw = {key: base.get(key, {}) | sections.get(key, {}) for key in base.keys() | sections.keys()}
        assert not can_compile(resolve(raw, [], "x", 2 if "parallel" in sections else 1).config, CPU), name


def test_who_says_true_or_false_is_obeyed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "can_compile", pytest.fail)
    for said in (True, False):
        config = settled_alone(
            resolve({"train": {"compile": said}, "model": {"attention": "sdpa"}}, [], "x", 1).config
        )
        assert settled(config, Mesh(config, RankInfo(), CPU), None) == (config, "")


def test_the_cut_is_that_of_the_mesh() -> None:
    """Its groups of shared parameters follow from the cut: by another one, the step would
    sum what no group was made for.
    """
    config = settled_alone(
        resolve({"train": {"compile": False, "seq_len": 64, "precision": "fp32"}}, [], "x", 1).config
    )
    found, _ = settled(config, Mesh(config, RankInfo(), CPU), None)
    assert (config.model.attention, found.model.attention) == ("auto", "eager")
    assert found.partition is config.partition is not None


def test_a_machine_that_cannot_compile_goes_on_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody asked for a compiler."""
    config = resolve({"train": {"steps": 10**6}}, [], "x", 1).config
    monkeypatch.setattr(Small, "seconds", lambda self, config: 10.0)
    monkeypatch.setattr(Small, "times", mock.Mock(side_effect=RuntimeError("Python.h is missing\nmore")))
    monkeypatch.setattr(compiling, "which", lambda name: name)
    assert compiling.measure(config, mock.Mock()) == (
        False,
        "train.compile=auto is false: Python.h is missing",
    )
    monkeypatch.setattr(compiling, "which", lambda name: None)
    assert compiling.measure(config, mock.Mock()) == (
        False,
        "train.compile=auto is false: there is no C++ compiler",
    )


def other_device(config: str, overrides: list[str], log_dir: str, attention: str, method: str) -> list[str]:
    """One rank's run on a device for which the rules say so. Returns what its model does."""
    seen: list[str] = []
    started = TrainStep.__init__

    def noted(step: TrainStep, config: Any, *args: Any, **options: Any) -> None:
        seen.extend([config.model.attention, config.parallel.context_method])
        started(step, config, *args, **options)

    # another rank's rule, which nobody may ask
    own = attention if place_from_environment().rank == 0 else "fused"
    chosen = mock.patch.multiple(resolve_auto, attention_of=lambda *_: own, fastest=lambda *_, **__: method)
    with chosen, mock.patch.object(TrainStep, "__init__", noted):
        assert training.run_rank(config, overrides, log_dir) == 0
    return seen


def test_what_rank_0_chooses_is_recorded_and_kept(pool: Any, config: str, tmp_path: Path) -> None:
    """Ranks that chose each for its own device would send each other what nobody expects; a
    resumed run would round otherwise.
    """
    whole, divided = ["parallel.data=2"], ["parallel.context=2"]
    folder = str(tmp_path / "whole")
    assert (
        pool.run(2, other_device, config, [*whole, "train.steps=2"], folder, "eager", "ring")
        == [["eager", "auto"]] * 2
    )
    assert choices(tmp_path / "whole", 2, "model", "attention") == ["eager"] * 2
    assert (
        pool.run(2, other_device, config, [*whole, "train.steps=3"], folder, "sdpa", "ring")
        == [["eager", "auto"]] * 2
    )
    folder = str(tmp_path / "divided")
    assert (
        pool.run(2, other_device, config, [*divided, "train.steps=2"], folder, "sdpa", "ring")
        == [["sdpa", "ring"]] * 2
    )
    assert choices(tmp_path / "divided", 2, "parallel", "context_method") == ["ring"] * 2
    assert (
        pool.run(2, other_device, config, [*divided, "train.steps=3"], folder, "sdpa", "gather")
        == [["sdpa", "ring"]] * 2
    )


def measured(config_path: str) -> list[Any]:
    """What steps of the measurement are like; nothing is compiled."""
    place = place_from_environment()
    config = training.load(config_path, ["model.num_layers=12", "parallel.data=2"], place.world_size).config
    with (
        mock.patch.object(nn.Module, "compile", lambda block, **options: None),
        mock.patch.object(compiling, "SECONDS", 0.0),
    ):
        mesh = Mesh(config, place, CPU)
        small = Small(config, mesh)
        if place.rank == 1:
            return []
        return [
            len(small.step(config).stages[0].blocks),
            small.seconds(config) > 0,
            small.times(config).compiled > 0,
        ]


def test_few_layers_are_measured_on_one_rank_alone(pool: Any, config: str) -> None:
    """The others wait meanwhile: a step that needed them would hang."""
    assert pool.run(2, measured, config) == [[compiling.LAYERS, True, True], []]
