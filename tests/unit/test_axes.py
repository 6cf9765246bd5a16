"""The axes are data: what is made of them follows, and their names stand in few rooms."""

import ast
from dataclasses import replace
from math import prod
from pathlib import Path

import pytest

from megacore.config import parallel, schema
from megacore.distributed.axes import AXES, Axis, sums_of
from megacore.distributed.shard import AxisPlacement, Shard
from megacore.distributed.topology import Topology, alone
from megacore.errors import ConfigError
from megacore.tools.settings import derive, validation
from tests import training
from tests.build import run_of

ROOT = Path(__file__).resolve().parents[2]
# Rooms that own an axis, and labels for people. A layer of an axis names it; whoever sums, saves or counts
# goes by the record.
ROOMS = {
    "megacore/distributed/": "the mesh",
    "megacore/tensor_parallel/": "its own axis",
    "megacore/context_parallel/": "its own axis",
    "megacore/expert_parallel/": "its own axes, and those whose ranks have tokens of one sequence",
    "megacore/tools/planner/traffic.py": "what layers of these axes send",
    "launch/plan.py": "columns of predicted traffic, in a fixed order",
    "launch/samples.py": "layouts as its users write them",
    "megacore/tools/settings/other_words.py": "short words that users may type for keys",
}


def named_in(path: Path) -> list[int]:
    """The lines of a module where the name of an axis is a string."""
    names = {axis.name for axis in AXES}
    return [
        node.lineno
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and node.value in names
    ]


def test_axes_are_named_in_their_rooms_alone() -> None:
    """Whoever asks for an axis by its name would leave out the next one."""
    files = {
        str(path.relative_to(ROOT)): path
        for room in ("megacore", "launch")
        for path in sorted((ROOT / room).rglob("*.py"))
    }
    found = {
        name: lines
        for name, path in files.items()
        if (lines := named_in(path)) and not name.startswith(tuple(ROOMS))
    }
    assert not found


@pytest.fixture
def topology(tmp_path: Path) -> Topology:
    overrides = ["parallel.data=2", "parallel.context=2", "parallel.tensor=2"]
    return Topology(run_of(training.write_config(tmp_path, "unused"), *overrides, world=8), 5)


def test_what_a_gradient_is_summed_over(topology: Topology) -> None:
    """By the placement alone: token axes unless it is split over them, and others where it is partial."""
    tp = topology.tp
    split, copied, partial = (
        replace(AxisPlacement("tp", tp.rank, tp.size), **how) for how in ({"dim": 0}, {}, {"partial": True})
    )
    for along, first in ((split, ()), (copied, ()), (partial, (tp,))):
        found = topology.gradient_sum(topology.placed(Shard((8, 8), (along,))))
        assert (found.tokens, found.first, found.last) == (("dp", "cp"), first, None)
        assert found.levels.between == topology.gradient_group
    over_cp = topology.gradient_sum(topology.placed(Shard((8, 8), (AxisPlacement("cp", 0, 2, dim=0), split))))
    assert over_cp.tokens == ("dp",) and over_cp.levels.between.ranks == topology.group("dp").ranks


def test_what_shares_a_parameter_follows_from_its_name(tmp_path: Path) -> None:
    """The ranks of the first and the last stage hold the embedding: it counts once, and its
    gradient is summed between them last.
    """
    config = run_of(
        training.write_config(tmp_path, "unused"), "parallel.pipeline=3", "parallel.tensor=2", world=6
    )
    for rank in range(6):
        topology = Topology(config, rank)
        placed = topology.placed(topology.placed(Shard((8, 8)), "embedding.weight"), "embedding.weight")
        other = topology.placed(Shard((8, 8)), "norm.weight")
        last, holds = topology.gradient_sum(placed).last, rank // 2 != 1
        assert topology.gradient_sum(other).last is None and other.copies() == 2
        assert last == (topology.shared["embedding.weight"] if holds else None)
        assert placed.counted == (rank == 0 if holds else rank == 2) and placed.copies() == (
            4 if holds else 2
        )
        assert last is None or last.ranks == (rank % 2, 4 + rank % 2)


def named_tied(path: Path) -> bool:
    return any(
        isinstance(n, ast.Constant) and n.value in ("tied", "tied ")
        for n in ast.walk(ast.parse(path.read_text()))
    )


def test_only_the_mechanism_knows_what_is_tied() -> None:
    """An engine that asks for the embedding's group would leave out what another model shares."""
    core = [path for path in sorted((ROOT / "megacore").rglob("*.py")) if "tools" not in path.parts]
    found = {str(path.relative_to(ROOT)) for path in core if named_tied(path)}
    assert found == {"megacore/distributed/topology.py", "megacore/distributed/mesh.py"}  # names of groups


def test_products_of_axes_are_known_from_the_axes() -> None:
    """A communicator that only some ranks make, or that is made when the first parameter
    asks for it, would hang a cluster.
    """
    assert sums_of(AXES) == [("dp", "cp")]
    assert sums_of([replace(axis, splits=axis.tokens) for axis in AXES]) == [
        ("dp", "cp"),
        ("cp",),
        ("dp",),
        (),
    ]


def test_sizes_and_their_product(tmp_path: Path) -> None:
    overrides = ["parallel.data=3", "parallel.context=2", "parallel.tensor=2", "train.global_batch_size=24"]
    config = run_of(training.write_config(tmp_path, "unused"), *overrides, world=12)
    assert config.sizes.items() >= {"pp": 1, "dp": 3, "cp": 2, "tp": 2}.items() and list(config.sizes) == [
        axis.name for axis in AXES
    ]
    assert (config.world_size, config.token_ranks, config.parallel.ranks_besides_data) == (12, 6, 4)
    assert prod(alone(config).sizes.values()) == 1


def test_an_axis_of_samples_takes_part_in_every_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that read other samples are data ranks by another name: a product that knew `data`
    alone would read samples twice.
    """
    expert = Axis("ep", "expert", samples=True, tokens=True)
    for module in (parallel, schema, derive):
        monkeypatch.setattr(module, "AXES", (*AXES[:-1], expert, AXES[-1]))

    class Experts(parallel.ParallelConfig):
        expert: int = 2

    class Run(schema.Config):
        parallel: Experts = Experts()

    raw = Run.model_validate({"parallel": {"tensor": 2}, "train": {"global_batch_size": 16}})
    derived = derive.derive(raw, "run", 16)
    assert derived["parallel.data"] == 4 and derived["engine.bucket_mib"] == max(
        derive.BUCKET_MIB, 8 * derive.PART_MIB
    )
    config = raw.model_copy(update={"parallel": raw.parallel.model_copy(update={"data": 4})})
    assert (config.data_size, config.token_ranks, config.world_size, config.num_microbatches) == (8, 8, 16, 2)
    validation.check_world(config, 16)
    with pytest.raises(
        ConfigError, match="tensor 2 × expert 2 × pipeline 1 × data 4 = 16 ranks, but there are 12 .3 or auto"
    ):
        validation.check_world(config, 12)
