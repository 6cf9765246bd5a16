"""Who updates which whole matrices, and what that sends and takes: in dry runs of single ranks
against the plan, and by hand.
"""

from collections.abc import Callable
from math import prod
from pathlib import Path

import pytest
import torch

from megacore.config import Config
from megacore.distributed.communicator import SOLO, Group
from megacore.distributed.shard import Shard, TensorSlice, replicated, split
from megacore.engine import owners
from megacore.engine.owners import Dealing, Holders, Part, Task
from megacore.tools.choices.meta_watch import Journal
from megacore.tools.dry_run.dry_report import against_formulas
from megacore.tools.dry_run.dry_step import dry_run
from megacore.tools.planner.memory import rank_memory
from megacore.tools.planner.traffic import rank_traffic
from megacore.tools.planner.whole_updates import Place, WholeUpdates, whole_updates
from megacore.tools.planner.workload import setting_of
from tests.build import run_of
from tests.training import write_config

# Ranks, overrides, and the ranks that are run: of each kind of holders one that differs from the first.
LAYOUTS = {
    "one": (1, [], (0,)),
    "dp3": (3, ["train.global_batch_size=6"], (0, 2)),
    "tp2dp2": (4, ["parallel.tensor=2", "parallel.sequence=true"], (0, 3)),
    "tp2 sharded": (4, ["parallel.tensor=2", "engine.shard_optimizer=true"], (0, 3)),
    "in two levels, sharded": (
        8,
        ["parallel.tensor=2", "engine.shard_optimizer=true", "engine.reduce_levels=2"],
        (0, 5),
    ),
    "pp2 cp2": (4, ["parallel.pipeline=2", "parallel.context=2"], (0, 3)),
    "tp2 copies of shards": (8, ["parallel.tensor=2", "engine.kind=fsdp", "engine.shard_size=2"], (0, 3, 6)),
}


@pytest.fixture
def configure(tmp_path: Path) -> Callable[..., Config]:
    """`configure(ranks, overrides)`: the tests' small config with Muon, resolved."""
    path = write_config(tmp_path, "unused", model={"num_layers": 2}, train={"precision": "fp32"})
    return lambda ranks, overrides: run_of(
        path, "optim.kind=muon", "engine.bucket_mib=0.02", *overrides, world=ranks
    )


def updates_of(config: Config, place: Place) -> WholeUpdates:
    found = whole_updates(config, place, 4)
    assert found is not None
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_bytes_and_memory_are_those_of_the_plan(
    configure: Callable[..., Config], layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real step of a rank, in several rounds: each communicator's operations, their elements, and
    what is held from step to step.
    """
    monkeypatch.setattr(owners, "TOGETHER", 1)
    world, overrides, ranks = LAYOUTS[layout]
    config = configure(world, overrides)
    for rank in ranks:
        dry = dry_run(config, rank, 4)
        assert against_formulas(config, dry, 4) == []
        sent = {operation for _, _, operation, _ in dry.sent()}
        assert ("exchange" in sent or "broadcast" in sent) == (world > 1)
        planned = rank_memory(config, dry.tensor_rank, dry.shard_rank, dry.data_rank)[dry.stage]
        assert made_at_once(dry.journal) <= planned.update, "the room of an update"
        before = rank_memory(
            config.model_copy(update={"optim": load_adamw(config)}), dry.tensor_rank, dry.shard_rank
        )[dry.stage]
        assert before.optimizer > planned.optimizer, "the momentum alone, where AdamW has two moments"


def made_at_once(journal: Journal) -> int:
    """The most bytes that an update has made and not yet freed."""
    live = most = 0
    for event in journal.events:
        block = journal.blocks[max(event, ~event)]
        if block.moment == "update":
            live += block.size if event >= 0 else -block.size
            most = max(most, live)
    return most


def load_adamw(config: Config) -> object:
    return config.optim.model_copy(update={"kind": "adamw", "groups": ()})


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_matrix_has_one_owner_who_gets_all_of_it_once(
    configure: Callable[..., Config], layout: str
) -> None:
    """A part that is lacking, or that comes twice, would leave what was in memory, or shift all
    behind it; work would be done twice.
    """
    world, overrides, _ = LAYOUTS[layout]
    config = configure(world, overrides)
    places = [Place(0, t, d) for d in range(config.token_ranks) for t in range(config.parallel.tensor)]
    owned: list[str] = []
    work = []
    for place in places:
        updates = updates_of(config, place)
        work.append(updates.operations)
        for _, dealing in updates.each:
            for tasks in dealing.rounds:
                for task in dealing.owned(tasks):
                    owned.append(task.name)
                    times = torch.zeros(updates.shards[task.name].global_shape)
                    for _, part in dealing.senders(task):
                        for box in part.boxes:
                            times[box.slices] += 1
                    assert (times == 1).all(), task
    hidden = {name for name, shard in updates.shards.items() if shard.is_hidden}
    assert sorted(owned) == sorted(hidden)
    assert max(work) <= sum(work) / len(places) + max(costs_of(updates).values())


def costs_of(updates: WholeUpdates) -> dict[str, float]:
    return {
        task.name: owners.cost_of(group.rule, updates.shards[task.name])
        for group, dealing in updates.each
        for tasks in dealing.rounds
        for task in tasks
    }


def dealt(costs: dict[str, float], within: int, between: int) -> list[list[Task]]:
    shards = {name: Shard((2**11, 2**9)) for name in costs}
    holders = Holders(Group("tp", tuple(range(within)), 0), Group("dp", tuple(range(between)), 0), ("tp",))
    return Dealing(shards, costs, holders, lambda name, rank: Part(shards[name], 0, 2**20)).rounds


def test_the_costliest_are_dealt_first_and_to_all_copies() -> None:
    """By hand: two tensor ranks and two copies.

    In the order of names, or to one copy alone, the longest would come last or together.
    """
    costs = {"a": 1.0, "b": 1.0, "c": 9.0, "d": 5.0, "e": 4.0, "f": 6.0, "g": 2.0}
    assert dealt(costs, 2, 2) == [
        [Task("c", 0, 0), Task("f", 0, 1), Task("d", 1, 0), Task("e", 1, 1)],
        [Task("g", 1, 1), Task("a", 1, 0), Task("b", 0, 1)],
    ]
    assert dealt(costs, 1, 1) == [[Task(name, 0, 0)] for name in "cfdegab"]


def test_a_copy_sends_only_to_the_owner_that_is_as_it_is() -> None:
    """A parameter that tensor ranks hold as copies: were both to send it, the owner would have it twice."""
    groups = [Group("tp", (0, 1), rank) for rank in range(2)]
    for own, times in ((replicated, 1), (lambda group: split(group, 0), 2)):
        shards = [Shard((8, 4), (own(group),), decay=True) for group in groups]
        dealing = Dealing(
            {"w": shards[0]},
            {"w": 1.0},
            Holders(groups[0], SOLO, ("tp",)),
            lambda name, rank, shards=shards: Part(shards[rank], 0, prod(shards[rank].local_shape)),  # type: ignore[misc]
        )
        ((task,),) = dealing.rounds
        assert len([*dealing.senders(task)]) == times
        assert sum(part.size for _, part in dealing.senders(task)) == 32


def test_parts_lie_where_their_rows_do(
    configure: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planted fault: the offset of a piece is taken along the wrong dim.

    Then parts would lie over each other.
    """
    config = configure(2, ["parallel.tensor=2"])
    monkeypatch.setattr(
        TensorSlice,
        "slices",
        property(
            lambda box: tuple(slice(o, o + s) for o, s in zip(box.offset[::-1], box.local_shape, strict=True))
        ),
    )
    updates, seen = updates_of(config, Place(0)), 0
    for _, dealing in updates.each:
        for task in (
            task
            for tasks in dealing.rounds
            for task in tasks
            if len(updates.shards[task.name].global_shape) == 2
        ):
            times, seen = torch.zeros(updates.shards[task.name].global_shape), seen + 1
            for _, part in dealing.senders(task):
                for box in part.boxes:
                    times[box.slices] += 1
            assert not (times == 1).all(), task
    assert seen == 6, "two of attention's outputs, and two feed-forward layers"


def test_the_plan_has_time_and_traffic_of_the_update(configure: Callable[..., Config]) -> None:
    """Operations are dealt: four ranks have about a quarter each. Without Muon nothing is sent to owners."""
    alone, four = (updates_of(configure(n, []), Place(0)).operations for n in (1, 4))
    assert four < 0.5 * alone
    config = configure(4, ["parallel.tensor=2"])
    assert any(t.operation == "exchange" for t in rank_traffic(config)[0])
    adamw = config.model_copy(update={"optim": load_adamw(config)})
    muon, plain = (setting_of(of) for of in (config, adamw))
    assert (muon.matrix_operations, plain.matrix_operations) == (updates_of(config, Place(0)).operations, 0.0)
    assert not any(t.operation in ("exchange", "broadcast") for t in rank_traffic(adamw)[0])
