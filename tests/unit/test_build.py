"""The builders that other tests use give them the run that a user would get."""

import json
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch

from megacore.distributed.collectives import all_reduce
from megacore.pipeline.partition import stage_layers
from tests.build import mesh_of, model_of, run_of, step_of, topology_of
from tests.one_rank import batch_of
from tests.training import BASE, write_config


def test_a_file_and_its_sections_are_the_same_run(tmp_path: Path) -> None:
    """A test that states its sections would train something else than a user who writes them to a file."""
    path = Path(write_config(tmp_path, "corpus", log={"dir": "runs/same"}))
    from_file = run_of(path, "train.steps=3")
    assert from_file == run_of(json.loads(path.read_text()), "train.steps=3")
    assert from_file.train.steps == 3


def test_sections_are_not_changed() -> None:
    """Overrides of one test would apply to the next one, since they share `BASE`."""
    before = deepcopy(BASE)
    assert run_of(BASE, "train.steps=3").train.steps == 3
    assert before == BASE


def test_a_run_is_cut_and_its_context_method_chosen() -> None:
    """A test that builds stages would fail, or choose for itself how context ranks attend."""
    run = run_of(BASE, "parallel.pipeline=2", "parallel.context=2", world=4)
    assert [len(layers) for layers in stage_layers(run)] == [3, 2]
    assert run.parallel.context_method in ("ring", "ulysses", "gather")


def test_a_changed_config_is_cut_again() -> None:
    """A test that changes a config would run with the stages of another model."""
    run = run_of(BASE, "parallel.pipeline=2", world=2)
    smaller = run_of(run.model_copy(update={"model": run.model.model_copy(update={"num_layers": 2})}))
    assert [len(layers) for layers in stage_layers(smaller)] == [1, 1]


def test_a_rank_has_the_groups_of_the_layout() -> None:
    """A stage that a test builds for one rank would have another rank's parameters."""
    run = run_of(BASE, "parallel.tensor=2", "parallel.data=2", world=4)
    topology = topology_of(run, 3)
    assert topology.tp.ranks == (2, 3) and topology.tp.rank == 1
    assert topology_of(run).tp.size == 1, "without a rank, one process holds all"


def test_a_step_trains_the_model() -> None:
    """A test's step would start with other weights than the model with which its results are compared."""
    run = run_of(BASE, "model.num_layers=2", "train.global_batch_size=2")
    step = step_of(run, mesh_of(run))
    (stage,) = step.stages
    first = model_of(run).state_dict()
    assert all(torch.equal(first[name], weight) for name, weight in stage.state_dict().items())
    losses = [step(number, batch_of(run, 1)).loss.item() for number in (1, 2, 3)]
    assert losses[2] < losses[0]


def connected_ranks() -> tuple[int, tuple[int, ...], float]:
    """This rank, its tensor ranks, and the sum of their ranks."""
    mesh = mesh_of(run_of(BASE, "parallel.tensor=2", world=2))
    total = all_reduce(torch.tensor([float(mesh.rank)]), mesh.tp).item()
    mesh.close()
    return mesh.rank, mesh.tp.ranks, total


def test_ranks_find_each_other(run_ranks: Callable[..., list[Any]]) -> None:
    """Every rank of a test would train alone, as rank 0, and no test of several ranks could fail."""
    assert run_ranks(2, connected_ranks) == [(0, (0, 1), 1.0), (1, (0, 1), 1.0)]
