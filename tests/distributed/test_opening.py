"""What a run prints before its first step about where its ranks are."""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from megacore.tools import startup_lines
from megacore.tools.launchers import place_from_environment
from megacore.tools.machine.device import pick_device
from tests import training
from tests.build import mesh_of, run_of

IN_TURN = "put a host's ranks next to each other: mpirun --map-by slot, srun --distribution=block"


def warning_of_rank(config_path: str, layout: list[str], machines: str) -> str:
    """What this rank would print if the ranks ran on these machines, a letter each."""
    place = place_from_environment()
    config = run_of(config_path, *layout, world=place.world_size)
    mesh = mesh_of(config, device=pick_device(config, place))
    name = machines[place.rank]
    with mock.patch.multiple(startup_lines, machine=lambda: f"{name}/boot", host_name=lambda: f"node-{name}"):
        return startup_lines.tensor_warning(mesh)


@pytest.mark.parametrize(
    ("layout", "machines", "expected"),
    [
        ("parallel.tensor=2", "aaaa", ""),
        ("parallel.tensor=2", "aabb", ""),
        ("parallel.context=2", "abab", ""),
        (
            "parallel.tensor=4",
            "aabb",
            "WARNING: tensor ranks 0-3 are on 2 hosts (node-a, node-b): every layer waits for the network "
            "(parallel.tensor=2 fits on a host)",
        ),
        (
            "parallel.tensor=2",
            "aaab",
            "WARNING: tensor ranks 2-3 are on 2 hosts (node-a, node-b): every layer waits for the network "
            "(parallel.tensor=1 fits on a host)",
        ),
        (
            "parallel.tensor=2",
            "abab",
            "WARNING: tensor ranks 0-1 are on 2 hosts (node-a, node-b), and 1 more tensor group spans hosts: "
            f"every layer waits for the network ({IN_TURN})",
        ),
    ],
)
def test_tensor_ranks_on_several_hosts_are_reported(
    pool: Any, tmp_path: Path, layout: str, machines: str, expected: str
) -> None:
    """Such a run is several times slower, and looks healthy."""
    config = training.write_config(tmp_path, "nothing")
    assert pool.run(4, warning_of_rank, config, [layout], machines) == [expected] * 4


def test_thousands_of_tensor_groups_are_one_line() -> None:
    """4,096 ranks that are dealt to 512 hosts in turn."""
    machines = [rank % 512 for rank in range(4096)]
    groups, right = startup_lines.split_groups(machines, "tp", {"pp": 4, "dp": 128, "cp": 1, "tp": 8})
    assert len(groups) == 512 and groups[0] == tuple(range(8)) and right == IN_TURN
    assert startup_lines.split_groups(sorted(machines), "tp", {"pp": 4, "dp": 128, "cp": 1, "tp": 8})[0] == []
