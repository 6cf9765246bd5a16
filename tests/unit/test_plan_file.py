"""Plans as files: what is written is read again, and what cannot be run is refused before a rank starts."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megacore.errors import ConfigError
from megacore.pipeline.generators import GENERATORS, build, generated
from megacore.pipeline.partition import plan_of
from megacore.tools.choices.partition import partitioned
from megacore.tools.schedules.plan_file import write_plan
from megacore.tools.settings.load import load
from tests.training import write_config


@pytest.mark.parametrize("name", GENERATORS)
def test_a_plan_comes_back_as_it_was(name: str, tmp_path: Path) -> None:
    """A schedule that was looked at and written down would not be the one that runs."""
    path = str(tmp_path / "plan.json")
    plan = build(name, 2, 4, shared=[(0, generated(name, 2, 4).stages - 1)])
    write_plan("--output", path, plan)
    layout = [
        "parallel.pipeline=2",
        "model.num_layers=4",
        "train.global_batch_size=4",
        "train.micro_batch_size=1",
    ]
    config = load(write_config(tmp_path, "unused"), [*layout, f"parallel.schedule=file:{path}"], 2).config
    assert config.chunks == len(plan.placement[0]) and plan_of(partitioned(config)) == plan


def first_row(change: Callable[[list[str]], object]) -> Callable[[Any], object]:
    return lambda content: change(content["actions"][0])


FAULTS: dict[str, tuple[Callable[[Any], object], str]] = {
    "another version": (lambda c: c.update(version=2), "it must be an object with version 1"),
    "no actions": (lambda c: c.pop("actions"), "actions must be a list of a list for each rank"),
    "a stage twice": (
        lambda c: c.update(placement=[[0], [0]]),
        "each of the stages 0, 1, 2, … must have one place",
    ),
    "no stage": (
        lambda c: c.update(placement=[[], []], actions=[[], []]),
        "each of the stages 0, 1, 2, … must have one place",
    ),
    "no such letter": (
        first_row(lambda row: row.append("X0.0")),
        'pp rank 0 has the action "X0.0", which is none like F0.0',
    ),
    "no such chunk": (first_row(lambda row: row.append("F0.1")), 'pp rank 0 has the action "F0.1"'),
    "no text": (first_row(lambda row: row.append(1)), "pp rank 0 has the action 1"),
    "lost": (
        first_row(lambda row: row.remove("W1.0")),
        "pp rank 0, backward_weight of microbatch 1: is missing",
    ),
    "doubled": (
        first_row(lambda row: row.append("W1.0")),
        "pp rank 0, backward_weight of microbatch 1: done 2 times",
    ),
    "weights before input": (
        first_row(lambda row: row.insert(0, row.pop(row.index("W1.0")))),
        "backward_weight of microbatch 1: comes before",
    ),
    "a hang": (
        first_row(lambda row: row.insert(1, row.pop(row.index("I0.0")))),
        "deadlock: pp rank 0 waits in",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_plan_that_cannot_run_is_refused(fault: str, tmp_path: Path) -> None:
    """It would lose gradients, or hang with every rank waiting: the refusal names the
    rank, the action and the reason.
    """
    spoil, message = FAULTS[fault]
    plan = build("zb_h1", 2, 4)
    path = tmp_path / "plan.json"
    write_plan("--output", str(path), plan)
    content = json.loads(path.read_text(encoding="utf-8"))
    if fault == "a hang":  # the other rank wants two forwards first
        row = content["actions"][1]
        row.insert(0, row.pop(row.index("F1.0")))
        row.insert(0, row.pop(row.index("F0.0")))
    spoil(content)
    path.write_text(json.dumps(content), encoding="utf-8")
    layout = [
        "parallel.pipeline=2",
        "train.global_batch_size=4",
        "train.micro_batch_size=1",
        f"parallel.schedule=file:{path}",
    ]
    config = load(write_config(tmp_path, "unused"), layout, 2).config
    with pytest.raises(ConfigError) as error:
        partitioned(config)
    assert (
        "parallel.schedule: " in str(error.value)
        and message in str(error.value)
        and "\n" not in str(error.value)
    )


def test_a_plan_that_the_engine_cannot_hold_is_refused(tmp_path: Path) -> None:
    """FSDP would fail in the first step, in an embedding that two chunks of one rank share."""
    path = str(tmp_path / "plan.json")
    write_plan("--output", path, build("zb_v", 2, 2))
    layout = [
        "parallel.pipeline=2",
        "model.num_layers=4",
        "train.global_batch_size=4",
        "train.micro_batch_size=1",
    ]
    layout += ["engine.kind=fsdp", f"parallel.schedule=file:{path}"]
    tied, apart = (
        load(write_config(tmp_path, "unused"), [*layout, f"model.tie_embeddings={tie}"], 4).config
        for tie in ("true", "false")
    )
    with pytest.raises(ConfigError, match="parallel.schedule: .* gives one rank both ends"):
        partitioned(tied)
    assert plan_of(partitioned(apart)).placement == ((0, 3), (1, 2))
