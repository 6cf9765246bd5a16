"""What engines hold is what `megacore.tools.planner.memory` predicts: the
benchmark's measurement, on real ranks.
"""

from typing import Any

import pytest

from benchmarks.memory import ENGINES, PARTS, ROOT, measure
from megacore.tools.launchers import place_from_environment
from megacore.tools.machine.device import pick_device
from tests.build import mesh_of, run_of
from tests.engines import missing

# Large enough that what is padded, to divide or to align, stays below a percent.
SMALL = [
    "model.num_layers=2",
    "model.hidden_size=64",
    "model.vocab_size=512",
    "train.seq_len=16",
    "train.global_batch_size=16",
]


def measuring_rank(overrides: list[str]) -> dict[str, Any]:
    place = place_from_environment()
    config = run_of(ROOT / "benchmarks" / "memory.json", *SMALL, *overrides, world=place.world_size)
    mesh = mesh_of(config, device=pick_device(config, place))
    result = measure(config, mesh)
    mesh.close()
    return result


@pytest.mark.parametrize("engine", ENGINES)
def test_held_bytes_are_predicted(pool: Any, engine: str) -> None:
    """A copy that an engine keeps and nobody counts, or a part that is not divided, at four data ranks."""
    if why := missing(engine):
        pytest.skip(why)
    result = pool.run(4, measuring_rank, [*ENGINES[engine], "train.precision=bf16"])[0]
    measured, predicted = result["measured"], result["predicted"]
    # DeepSpeed's buffers count as gradients.
    for part in ("parameters", "optimizer", "together") if "deepspeed" in engine else (*PARTS, "together"):
        assert measured[part] == pytest.approx(predicted[part], rel=0.05), part
    assert measured["other"] < 0.05 * measured["together"]


def test_bytes_at_work_are_predicted(pool: Any) -> None:
    """Activations, and what is gathered: had blocks stayed gathered, or all gradients waited,
    there would be 1.6 times as much.
    """
    result = pool.run(2, measuring_rank, ["engine.kind=fsdp", "model.num_layers=8", "train.precision=fp32"])[
        0
    ]
    assert result["measured"]["at work"] == pytest.approx(result["predicted"]["at work"], rel=0.1)
