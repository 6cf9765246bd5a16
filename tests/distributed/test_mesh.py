"""Coordinates, and groups that communicate among exactly the ranks along their axes."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megacore.distributed.axes import coordinates, ranks_along
from megacore.distributed.collectives import all_reduce, broadcast_text
from megacore.distributed.mesh import Mesh
from megacore.tools.launchers import place_from_environment
from tests.build import run_of
from tests.training import write_config

NAMES = ["pp", "dp", "cp", "tp"]
# pp, dp, cp, tp
SHAPES = [(1, 1, 1, 1), (1, 1, 1, 4), (4, 1, 1, 1), (2, 2, 1, 2), (2, 2, 2, 2), (4, 3, 1, 2), (3, 5, 2, 4)]


@pytest.mark.parametrize("shape", SHAPES)
def test_coordinates_are_those_of_a_reshape(shape: tuple[int, ...]) -> None:
    """Ranks that disagree about who is where exchange the wrong tensors."""
    mesh = np.arange(np.prod(shape)).reshape(shape)
    sizes = dict(zip(NAMES, shape, strict=True))
    assert [tuple(coordinates(rank, sizes).values()) for rank in range(mesh.size)] == list(np.ndindex(*shape))
    for rank in range(mesh.size):
        here = coordinates(rank, sizes)
        for axes in (
            ("pp",),
            ("dp",),
            ("tp",),
            ("pp", "tp"),
            ("tp", "pp"),
            ("pp", "dp", "tp"),
            ("dp", "cp"),
            (),
        ):
            along = mesh[tuple(slice(None) if axis in axes else at for axis, at in here.items())]
            assert ranks_along(axes, rank, sizes) == tuple(np.ravel(along))


@pytest.mark.parametrize("shape", SHAPES)
def test_tensor_ranks_are_neighbours(shape: tuple[int, ...]) -> None:
    """Tensor parallelism communicates in every layer: its ranks must share a node,
    aligned to their number.
    """
    tp = shape[-1]
    for rank in range(int(np.prod(shape))):
        first = rank - rank % tp
        assert ranks_along(("tp",), rank, dict(zip(NAMES, shape, strict=True))) == tuple(
            range(first, first + tp)
        )


def join(config_path: str, overrides: list[str], used: list[tuple[str, ...]] | None = None) -> Mesh:
    place = place_from_environment()
    return Mesh(
        run_of(config_path, *overrides, world=place.world_size), place, torch.device("cpu"), used=used or []
    )


def listening() -> set[int]:
    """The TCP ports on which this process listens."""
    own = {
        os.readlink(descriptor)
        for descriptor in Path("/proc/self/fd").iterdir()
        if os.path.lexists(descriptor)
    }
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == "0A" and f"socket:[{inode}]" in own:
                found.add(int(local.rpartition(":")[2], 16))
    return found


def opened_ports(config_path: str, overrides: list[str]) -> tuple[bool, int, int]:
    """Whether this rank listens on the store's port, on how many others, and how many groups it has."""
    before = listening()
    mesh = join(config_path, overrides)
    opened, groups = listening() - before, len(mesh.groups)
    mesh.close()
    return mesh.place.master_port in opened, len(opened - {mesh.place.master_port}), groups


def test_what_listens_is_what_the_document_says(run_ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    """SECURITY.md tells who sets up a firewall: the store on rank 0, and a port of
    gloo's for each group of a rank.
    """
    config = write_config(tmp_path, "nothing")
    found = run_ranks(4, opened_ports, config, ["parallel.tensor=2", "parallel.pipeline=2"])
    assert found == [(rank == 0, 4, 3) for rank in range(4)]  # all, tp, and pp, which has two


def groups_of_rank(config_path: str, overrides: list[str]) -> dict[str, Any]:
    """By group: the ranks it claims, the ranks that its sums come from, this rank's
    place in it, its timeout; and more.
    """
    mesh = join(config_path, overrides, [("pp", "tp")])
    found: dict[str, Any] = {}
    for group in (
        mesh.world,
        mesh.tp,
        mesh.group("dp"),
        mesh.pp,
        mesh.group("pp", "tp"),
        *mesh.shared.values(),
    ):
        assert group.process_group is not None and group.size == group.process_group.size()
        one_hot = torch.nn.functional.one_hot(torch.tensor(mesh.place.rank), mesh.place.world_size)
        reached = tuple(all_reduce(one_hot, group).nonzero().flatten().tolist())
        timeout = group.process_group._get_backend(torch.device("cpu")).options._timeout
        found[group.name] = group.ranks, reached, group.ranks[group.rank], timeout.total_seconds()
    text = f"from rank {mesh.place.rank}, «ü»" if mesh.place.rank in mesh.sample_group.ranks[:1] else ""
    found["text"] = broadcast_text(text, mesh.sample_group, mesh.device)
    found["description"] = mesh.describe()
    mesh.barrier()
    mesh.close()
    assert not torch.distributed.is_initialized()
    return found


def test_groups_reach_exactly_their_ranks(run_ranks: Callable[..., Any], tmp_path: Any) -> None:
    """A gradient summed over the wrong ranks is a wrong gradient, and a group with a timeout of
    its own hangs for its default.
    """
    config = write_config(
        tmp_path, "unused", parallel={"pipeline": 2, "data": 2, "tensor": 2, "timeout_seconds": 77}
    )
    mesh = np.arange(8).reshape(2, 2, 2)
    for rank, found in enumerate(run_ranks(8, groups_of_rank, config, [])):
        pp, dp, tp = (int(i) for i in np.unravel_index(rank, mesh.shape))
        right = {
            "world": mesh,
            "tp": mesh[pp, dp, :],
            "dp": mesh[pp, :, tp],
            "pp": mesh[:, dp, tp],
            "pp×tp": mesh[:, dp, :],
            "tied embedding.weight": mesh[[0, -1], dp, tp],
        }
        assert {name: found[name] for name in right} == {
            name: (tuple(ranks.ravel()), tuple(ranks.ravel()), rank, 77.0) for name, ranks in right.items()
        }
        assert found["text"] == f"from rank {mesh[pp, 0, tp]}, «ü»"
        assert (
            found["description"]
            == "pipeline 2 × data 2 × tensor 2 = 8 ranks, gloo and shared memory, threads 1"
        )


def tied_group_of_rank(config_path: str) -> tuple[int, ...] | None:
    mesh = join(config_path, ["parallel.pipeline=3"])
    return mesh.shared["embedding.weight"].ranks if mesh.shared else None


def test_only_the_end_stages_share_embeddings(run_ranks: Callable[..., Any], tmp_path: Any) -> None:
    """A middle stage in the tied group would be waited for, and never come."""
    assert run_ranks(3, tied_group_of_rank, write_config(tmp_path, "unused")) == [(0, 2), None, (0, 2)]


def mesh_of_one(config_path: str) -> list[tuple[int, bool]]:
    mesh = join(config_path, [])
    assert not mesh.shared and not torch.distributed.is_initialized()
    mesh.barrier()
    mesh.close()
    return [
        (group.size, group.process_group is None)
        for group in (mesh.world, mesh.tp, mesh.sample_group, mesh.pp, mesh.gradient_group)
    ]


def test_one_process_needs_no_process_group(run_ranks: Callable[..., Any], tmp_path: Any) -> None:
    """One device would pay for collectives over itself, or need a free port."""
    assert run_ranks(1, mesh_of_one, write_config(tmp_path, "unused")) == [[(1, True)] * 5]
