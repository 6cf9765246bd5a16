"""What a run has cost: device-hours over all its processes and ranks, money, and what
the planner expected.
"""

import json
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megacore.config import Config
from megacore.tools.monitoring import cost
from megacore.tools.monitoring.cost import HOUR, HOURS, MONEY, Cost, planned_hours, spent_in
from megacore.tools.planner.run_cost import checkpoint_bytes
from tests import training
from tests.build import run_of, step_of

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def hourly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks for the time is told an hour more than the last."""
    clock = count(0, int(HOUR))
    monkeypatch.setattr(cost, "monotonic", lambda: next(clock))


def test_a_run_that_goes_on_adds_to_what_it_has_spent(
    hourly: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each restart would otherwise begin at zero, and the last figure would be the last process's alone."""
    path = training.write_config(tmp_path, training.write_corpus(tmp_path))

    def spent(*overrides: str) -> list[float]:
        training.run_rank(path, ["log.price_per_device_hour=2.5", *overrides], str(tmp_path / "run"))
        logged = training.metrics(tmp_path / "run")
        assert [figures[MONEY] for figures in logged] == [2.5 * figures[HOURS] for figures in logged]
        return [figures[HOURS] for figures in logged]

    assert spent("train.steps=2") == [1, 2]
    assert "cost: 3 device-hours (7.50 at 2.5 each) on 1 device\n" in capsys.readouterr().out
    assert spent("train.steps=4") == [1, 2, 3, 4]
    assert spent("train.steps=1", "checkpoint.resume=never") == [1]


def test_nothing_but_a_count_is_taken_for_one(tmp_path: Path) -> None:
    """A damaged record must neither end a run nor make it expensive."""
    values: list[Any] = [2.5, "9", -3, None, [7], 1e300, True]
    texts = [json.dumps({"step": step, HOURS: value}) for step, value in enumerate(values, 1)]
    (tmp_path / "metrics.jsonl").write_text("\n".join([*texts, '{"step": 8}', "{", json.dumps({HOURS: 99})]))
    assert spent_in(tmp_path) == 2.5
    assert spent_in(tmp_path / "nowhere") == 0


@pytest.mark.parametrize(
    ("price", "beside"),
    [(None, "96 device-hours on 8 devices; the planner"), (2.0, "96 device-hours (192.00 at 2")],
)
def test_the_end_says_both(
    price: float | None, beside: str, hourly: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ranks are paid for, whoever counts; on a GPU that the planner knows, its figure stands beside."""
    config = h100(f"log.dir={tmp_path}", *([] if price is None else [f"log.price_per_device_hour={price}"]))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    cost, said = Cost(), list[str]()
    mesh: Any = SimpleNamespace(
        world=SimpleNamespace(size=8, communicator=None),
        device=torch.device("cuda"),
        print=said.append,
    )
    cost.on_start(config, mesh)
    for _ in range(11):
        cost.metrics({}, [])
    cost.on_end()
    (line,) = said
    assert line.startswith(f"cost: {beside}") and f"{planned_hours(config, 'h100'):,.4g} device-hours" in line


def h100(*overrides: str) -> Config:
    return run_of(ROOT / "configs/gpt_7b.json", *overrides, world=8)


def test_the_planner_says_nothing_of_what_it_does_not_know() -> None:
    """A guess beside a bill would be believed."""
    known = planned_hours(h100(), "NVIDIA H100 80GB HBM3")
    twice = planned_hours(h100("train.steps=2000"), "h100")
    assert known and twice and twice / known == pytest.approx(2000 / h100().train.steps)
    assert planned_hours(h100(), "a card of somebody's own") is None


@pytest.mark.parametrize("optim", ["kind=adamw", "ema=0.9", "kind=muon", "kind=soap"])
def test_a_checkpoint_has_as_many_bytes_as_the_engine_gives(optim: str) -> None:
    """State that is no number for each element was left out: of SOAP all of it, so a disk without
    room for it seemed large enough.
    """
    sizes = [
        "model.num_layers=2",
        "model.hidden_size=64",
        "model.num_heads=2",
        "train.compile=false",
        "train.device=cpu",
        "train.precision=fp32",
    ]
    config = run_of(ROOT / "configs/gpt_tiny.json", *sizes, f"optim.{optim}")
    held = step_of(config, draw=False).engine.tensors()
    assert checkpoint_bytes(config) == 4 * sum(tensor.numel() for tensor, _ in held.values())


def test_a_model_of_ones_own_is_planned_by_its_layers(tmp_path: Path) -> None:
    """megacore's block, taken for the user's, costs what megacore's costs; layers that
    need content are not guessed at.
    """
    source = tmp_path / "own.py"
    source.write_text("from megacore.model.block import Block\n")
    own = h100(f"model.source={source}")
    assert planned_hours(own, "h100") == pytest.approx(planned_hours(h100(), "h100"), rel=0.03)
    needy = (
        "from megacore.model import block\n\nclass Block(block.Block):\n    def forward(self, x, context):\n"
    )
    source.write_text(
        f"{needy}        assert float(x.detach().sum()) > -1e30\n        return super().forward(x, context)\n"
    )
    assert planned_hours(h100(f"model.source={source}"), "h100") is None
