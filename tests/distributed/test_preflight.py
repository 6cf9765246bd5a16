"""What ranks find out together before a run: groups, sums and links, with several machines played by one."""

from typing import Any

import pytest
import torch

from megacore.tools.launchers import place_from_environment
from megacore.tools.machine.device import pick_device
from megacore.tools.preflight import links
from megacore.tools.preflight.judge import judge_together
from tests.build import mesh_of, run_of
from tests.training import write_config


def try_together(config_path: str, layout: list[str], names: list[str], wrong: int | None) -> dict[str, Any]:
    """`links.together` in a rank of the machine that `names` tells; rank `wrong` computes wrong sums."""
    place = place_from_environment()
    config = run_of(config_path, *layout, world=place.world_size)
    mesh = mesh_of(config, device=pick_device(config, place))
    whole, own = links.all_reduce, links.socket.gethostname
    try:
        links.socket.gethostname = lambda: names[place.rank]
        if place.rank == wrong:
            links.all_reduce = lambda x, group: whole(x, group) + torch.ones(1)
        return links.together(mesh)
    finally:
        links.all_reduce, links.socket.gethostname = whole, own
        mesh.close()


@pytest.mark.parametrize("wrong", [None, 2])
def test_groups_and_links(run_ranks: Any, tmp_path: Any, wrong: int | None) -> None:
    """Every group once, by the mesh's own ranks; every machine's links; and a device that sums
    wrongly is seen in its group alone.
    """
    config = write_config(tmp_path, "nothing")
    found = run_ranks(4, try_together, config, ["parallel.tensor=2"], ["a", "a", "b", "b"], wrong)
    assert found[0] == found[3]
    result = found[0]
    assert result["machines"] == [[0, 1], [2, 3]]
    assert [(group["axis"], group["ranks"]) for group in result["groups"]] == [
        ("dp", [0, 2]),
        ("dp", [1, 3]),
        ("tp", [0, 1]),
        ("tp", [2, 3]),
    ]
    assert [group["right"] for group in result["groups"]] == (
        [True] * 4 if wrong is None else [False, True, True, False]
    )
    assert [(link["from"], link["to"]) for link in result["links"]] == [(0, 1), (1, 0)]
    assert all(link["bytes_per_second"] > 0 for link in result["links"])
    named = {finding.host for finding in judge_together(result, ["a", "b"]) if finding.fatal}
    assert named == (set() if wrong is None else {"a", "b"})


def test_three_machines_take_two_rounds(run_ranks: Any, tmp_path: Any) -> None:
    """Machines of different sizes too: a rank without a counterpart sits out."""
    config = write_config(tmp_path, "nothing", train={"global_batch_size": 8, "micro_batch_size": 1})
    result = run_ranks(4, try_together, config, [], ["a", "a", "b", "c"], None)[0]
    assert [(link["from"], link["to"]) for link in result["links"]] == [
        (0, 1),
        (1, 2),
        (2, 0),
        (0, 2),
        (1, 0),
        (2, 1),
    ]
