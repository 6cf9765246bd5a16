"""Gradients summed over hosts in two levels, and sent in 16 bits: the right sum, the same
bits on every rank, within the bound.
"""

import os
from typing import Any

import pytest
import torch
from torch import Tensor

from megacore.distributed.collectives import all_gather
from megacore.distributed.communicator import SOLO, Group
from megacore.distributed.hierarchical_reduce import Levels, by_host
from megacore.engine.param_all_gather import start_gather
from megacore.engine.reduce import start_sum
from megacore.tools.launchers import place_from_environment
from megacore.tools.machine.device import pick_device
from tests.build import mesh_of, run_of

UNIT = 2.0**-8  # bf16's unit roundoff
ELEMENTS = 64
SETTINGS = [
    "train.device=cpu",
    "train.global_batch_size=8",
    "train.micro_batch_size=1",
    "parallel.timeout_seconds=600",
]


def parts_of(rank: int) -> Tensor:
    """A rank's gradients: half of them random, half such that a sum in bf16 stays where
    the first rank began.
    """
    random = torch.randn(ELEMENTS // 2, generator=torch.Generator().manual_seed(rank))
    return torch.cat([random, torch.full((ELEMENTS // 2,), 1.0 if rank == 0 else 0.9 * UNIT)])


def sums_on_a_rank(levels: int, narrow: torch.dtype | None, hosts: list[str]) -> list[Tensor]:
    """What each rank of the group has as the whole sum; the sum put together from the ranks' own
    parts; and the sizes of both levels."""
    place = place_from_environment()
    os.environ["MEGACORE_HOST"] = hosts[place.rank]
    config = run_of({}, *SETTINGS, f"engine.reduce_levels={levels}", world=place.world_size)
    mesh = mesh_of(config, device=pick_device(config, place))
    whole, scattered = parts_of(place.rank), parts_of(place.rank)
    start_sum(whole, mesh.levels, narrow, whole=True).wait()
    start_sum(scattered, mesh.levels, narrow, whole=False).wait()
    start_gather(scattered, mesh.levels).wait()
    found = [
        all_gather(whole, mesh.gradient_group).view(-1, ELEMENTS),
        all_gather(scattered, mesh.gradient_group).view(-1, ELEMENTS),
    ]
    mesh.close()
    return [*found, torch.tensor([mesh.levels.within.size, mesh.levels.between.size])]


TURNS, UNEVEN = ["a", "b"] * 4, ["a", "b", "b", "b"]


@pytest.mark.parametrize(
    ("levels", "narrow", "hosts", "sizes"),
    [
        (1, torch.bfloat16, TURNS, (1, 8)),
        (2, None, TURNS, (4, 2)),
        (2, torch.bfloat16, TURNS, (4, 2)),
        (2, torch.bfloat16, UNEVEN, (1, 4)),
    ],
)
def test_sums_are_right_and_alike(
    pool: Any, levels: int, narrow: torch.dtype | None, hosts: list[str], sizes: tuple[int, int]
) -> None:
    """A rank's part lost or doubled, another order of parts on some rank, ranks that round
    apart, or a sum that is not in fp32.
    """
    world = len(hosts)
    parts = torch.stack([parts_of(rank) for rank in range(world)])
    exact, size = parts.double().sum(0), parts.double().abs().sum(0)
    fp32 = world * 2.0**-24 * size
    bound = fp32 if narrow is None else fp32 + UNIT * size * (2 + UNIT)
    for whole, scattered, found in pool.run(world, sums_on_a_rank, levels, narrow, hosts):
        assert tuple(found.tolist()) == sizes
        for sums in (whole, scattered):
            assert all(torch.equal(row, sums[0]) for row in sums)
            assert bool(((sums[0].double() - exact).abs() <= bound).all())
    if narrow is not None and world == 8:  # the bound would have caught a sum in 16 bits
        in_16_bits = parts[0].to(narrow)
        for part in parts[1:]:
            in_16_bits = in_16_bits + part.to(narrow)
        assert bool(((in_16_bits.double() - exact).abs() > bound).any())


def test_ranks_are_divided_by_host() -> None:
    """Ranks of a host that are no neighbours; and hosts by which nothing can be divided."""
    hosts = [7, 8, 8, 7, 7, 8, 8, 7]
    assert by_host((0, 1, 2, 3), hosts, 3) == ((0, 3), (2, 3))
    assert by_host((0, 1, 2, 3), hosts, 0) == ((0, 3), (0, 1))
    assert by_host((0, 2, 4, 6), hosts, 6) == ((2, 6), (4, 6))
    assert by_host((0, 3), hosts, 0) is None  # one host
    assert by_host((0, 1), hosts, 0) is None  # one rank on each
    assert by_host((0, 1, 3), hosts, 1) is None  # two and one


def test_owners_divide_the_whole() -> None:
    """Two ranks that own one part, or a part that nobody owns."""
    groups = [(Group("w", (0, 1, 2), i), Group("b", (0, 1), j)) for i in range(3) for j in range(2)]
    assert sorted(Levels(*pair).owners.rank for pair in groups) == list(range(6))
    assert Levels(SOLO, Group("b", (0, 1), 1)).owners.rank == 1
