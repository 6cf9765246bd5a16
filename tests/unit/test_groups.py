"""Communicators follow from the config alone: each is made by all of its ranks under one name, and
every rank makes equally many.

PyTorch names a group that only its members make after its ranks and the number of groups that the process
has. Ranks that disagree about the number wait for each other under two names, until the timeout: so did every
pipeline of three stages with tied embeddings.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d

from megacore.config import Config
from megacore.distributed.mesh import Mesh
from megacore.tools.choices.meta_watch import MetaWatch
from megacore.tools.dry_run.fake import DryMesh, playing
from megacore.tools.planner.memory import communicators_of
from megacore.tools.settings.load import smallest_world
from tests import training
from tests.build import run_of

ROOT = Path(__file__).resolve().parents[2]
Made = list[tuple[str, tuple[int, ...]]]  # names and ranks, in order

LAYOUTS = [
    "pipeline=3",
    "pipeline=4 data=2",
    "pipeline=3 tensor=2 tie=false",
    "pipeline=2 schedule=interleaved chunks=2 data=2",
    "pipeline=4 schedule=interleaved chunks=2",
    "pipeline=3 schedule=zb_v data=2",
    "tensor=2 data=4 shard",
    "pipeline=3 data=4 levels",
    "pipeline=3 context=2 data=4 tensor=2 levels",
    "context=4",
    "pipeline=3 data=4 fsdp size=2",
    "pipeline=3 tensor=2 data=2 deepspeed",
    "pipeline=3 deepspeed",
]
WORDS = {
    "tie=false": "model.tie_embeddings=false",
    "shard": "engine.shard_optimizer=true",
    "levels": "engine.reduce_levels=2",
    "fsdp": "engine.kind=fsdp",
    "size=2": "engine.shard_size=2",
}
DEEPSPEED = ["engine.kind=deepspeed", f"engine.config={ROOT}/configs/deepspeed/zero1.json"]


def config_of(path: str, layout: str) -> Config:
    """A config from the words of a layout."""
    sizes = {"pipeline": 1, "data": 1, "context": 1, "tensor": 1}
    overrides = ["model.num_layers=8", "train.global_batch_size=16"]
    for word in layout.split():
        key, _, value = word.partition("=")
        if key in sizes:
            sizes[key] = int(value)
        overrides += DEEPSPEED if word == "deepspeed" else [WORDS.get(word, f"parallel.{word}")]
    return run_of(
        path, *overrides, world=sizes["pipeline"] * sizes["data"] * sizes["context"] * sizes["tensor"]
    )


@contextmanager
def recorded() -> Iterator[tuple[Made, set[Any]]]:
    """What `dist.new_group` makes within, under the names that PyTorch itself gives, and the communicators
    that NCCL would make: one for a group that sums, and in each group one for two ranks that send or receive.
    """
    made: Made = []
    connected: set[Any] = set()
    new_group, all_reduce, isend, irecv = dist.new_group, dist.all_reduce, dist.isend, dist.irecv

    def new(ranks: Any, **options: Any) -> Any:
        group = new_group(ranks, **options)
        made.append((distributed_c10d._world.pg_names[group], tuple(ranks)))
        return group

    def reduced(x: Any, group: Any) -> Any:
        connected.add(group.group_name)
        return all_reduce(x, group=group)

    def sent(x: Any, peer: int, group: Any) -> Any:
        connected.add((group.group_name, peer))
        return isend(x, peer, group=group)

    def received(x: Any, peer: int, group: Any) -> Any:
        connected.add((group.group_name, peer))
        return irecv(x, peer, group=group)

    with mock.patch.multiple(dist, new_group=new, all_reduce=reduced, isend=sent, irecv=received):
        yield made, connected


def made_by(
    config: Config, ranks: Iterable[int], host_size: int | None = None
) -> tuple[dict[int, Made], dict[int, int]]:
    """The communicators that each rank makes when it builds its mesh, and how many NCCL
    would; a host has two data ranks.
    """
    made, counts = {}, {}
    host_size = host_size or 2 * config.parallel.context * config.parallel.tensor
    for rank in ranks:
        with recorded() as (own, connected), playing(config, rank, MetaWatch(), host_size):
            made[rank], counts[rank] = own, len(connected)
    return made, counts


def complaints(made: dict[int, Made]) -> list[str]:
    """Where ranks would wait for each other in vain."""
    if len(numbers := {len(own) for own in made.values()}) > 1:
        return [f"ranks make {sorted(numbers)} communicators"]
    return [
        f"rank {rank} makes {ranks} in place {i}, and rank {other} another, or under another name"
        for rank, own in made.items()
        for i, (name, ranks) in enumerate(own)
        for other in ranks
        if other in made and made[other][i] != (name, ranks)
    ]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_members_make_a_communicator_under_one_name(layout: str, tmp_path: Path) -> None:
    """The planner counts them too: each takes memory."""
    config = config_of(training.write_config(tmp_path, "nothing"), layout)
    world = config.world_size
    made, counts = made_by(config, range(world))
    assert complaints(made) == []
    assert [
        counts[rank * world // config.parallel.pipeline] for rank in range(config.parallel.pipeline)
    ] == communicators_of(config)


@pytest.mark.parametrize("path", sorted(path.name for path in (ROOT / "configs").glob("*.json")))
def test_so_do_the_ranks_of_the_configs(path: str) -> None:
    """Those of two data ranks, of which the first tensor ranks stand for the others."""
    overrides = ["parallel.data=2", "train.global_batch_size=3072"] + ["parallel.expert=8"] * (
        path == "deepseek_v3.json"
    )
    world = smallest_world(str(ROOT / "configs" / path), overrides)
    config = run_of(ROOT / "configs" / path, *overrides, world=world)
    made, counts = made_by(config, range(0, world, config.parallel.tensor))
    assert complaints(made) == []
    assert max(counts.values()) == max(communicators_of(config)) <= 7


def test_hosts_divide_all_sums_or_none(tmp_path: Path) -> None:
    """On hosts of three ranks, the four that sum the second stage's gradients are two and two, and
    those of the first three and one.
    """
    config = config_of(training.write_config(tmp_path, "nothing"), "pipeline=2 data=4 levels")
    made, _ = made_by(config, range(8), host_size=3)
    assert complaints(made) == [] and {len(own) for own in made.values()} == {3}, (
        "dp, pp (which is tied too), and pp downward"
    )


def test_a_level_may_be_another_group_on_some_ranks_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of the first stage's ranks two hosts hold mixed ones, of the second's neighbours: there one level
    has the ranks of another group.
    """
    hosts = [0, 1, 0, 0, 1, 1, 0, 1, *[2] * 4, *[3] * 4]
    monkeypatch.setattr(DryMesh, "hosts", lambda mesh: [(host, 0) for host in hosts])
    config = config_of(training.write_config(tmp_path, "nothing"), "pipeline=2 data=4 context=2 levels")
    made, _ = made_by(config, range(16))
    assert complaints(made) == []


def test_a_rank_that_makes_one_less_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The pipeline of three stages that hung: its middle rank made no group where the ends made theirs."""
    create = Mesh._communicator

    def without(mesh: Mesh, name: str, ranks: tuple[int, ...]) -> Any:
        return None if name == "not tied" else create(mesh, name, ranks)

    monkeypatch.setattr(Mesh, "_communicator", without)
    config = config_of(training.write_config(tmp_path, "nothing"), "pipeline=3 tensor=2")
    made, _ = made_by(config, range(6))
    assert complaints(made) == ["ranks make [3, 4] communicators"]
    ends, middle = ([name for name, ranks in made[rank] if ranks == (0, 2, 4)] for rank in (0, 2))
    assert len(ends) == len(middle) == 2 and all(map(str.__ne__, ends, middle)), (
        "pp and pp downward, for which they would wait"
    )
