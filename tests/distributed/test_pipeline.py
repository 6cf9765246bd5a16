"""Four stages: as many live activations as the schedule says, whatever the number of
microbatches, and sent memory is freed.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from megacore.engine.choose import build_stages
from megacore.engine.native import NativeEngine
from megacore.model.batch import Microbatch
from megacore.pipeline import generators
from megacore.pipeline.runtime import Runtime
from megacore.pipeline.schedule import IN_FLIGHT, Action, Op
from megacore.tools.choices.held import peak_live
from megacore.tools.launchers import place_from_environment
from tests.build import mesh_of, run_of
from tests.training import VOCAB_SIZE, write_config

STAGES = 4


class Watched(Runtime):
    """Counts what is still in memory after every forward, without keeping it."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.seen: dict[str, list[StorageWeakRef]] = {"outputs": [], "sent": []}
        self.most = dict.fromkeys(self.seen, 0)

    def _forward(self, action: Action) -> None:
        super()._forward(action)
        if self.outputs:
            self.seen["outputs"].append(
                StorageWeakRef(self.outputs[action.microbatch, action.chunk]["hidden"].untyped_storage())
            )
        for kind, storages in self.seen.items():
            self.most[kind] = max(self.most[kind], sum(not storage.expired() for storage in storages))

    def _send(self, action: Action, held: Any) -> None:
        super()._send(action, held)
        if action.op is Op.SEND_GRADIENT:
            self.seen["sent"].append(StorageWeakRef(self.sending[action.peer][-1][0][1].untyped_storage()))


def run_steps(config_path: str, name: str, numbers: list[int]) -> list[dict[str, Any]]:
    """For each number of microbatches: one step, and what was held at once, and after it."""
    place = place_from_environment()
    config = run_of(config_path, "parallel.pipeline=4", world=place.world_size)
    mesh = mesh_of(config)
    results = []
    for microbatches in numbers:
        stages = build_stages(config, mesh)
        runtime = Watched(stages, NativeEngine(config, stages, mesh), mesh.pp)
        plan = generators.build(name, STAGES, microbatches, shared=[(0, STAGES - 1)])
        shape = (microbatches, 2, config.train.micro_batch_size, config.train.seq_len)
        tokens = torch.randint(VOCAB_SIZE, shape, generator=torch.Generator().manual_seed(0))
        batch = [Microbatch(inputs, targets) for inputs, targets in tokens]
        loss = runtime.run(plan, batch, {"cross_entropy": 1.0})["cross_entropy"]
        left = {kind: sum(not s.expired() for s in storages) for kind, storages in runtime.seen.items()}
        kept = (
            runtime.inputs,
            runtime.outputs,
            runtime.roots,
            runtime.input_gradients,
            runtime.output_gradients,
        )
        results.append(
            {
                "peak_live": runtime.peak_live,
                "most": runtime.most,
                "left": left,
                "held": sum(map(len, (*kept, *runtime.sending.values()))),
                "loss": loss.item(),
                "seen": {kind: len(storages) for kind, storages in runtime.seen.items()},
            }
        )
    return results


@pytest.mark.parametrize("name", ["1f1b", "gpipe"])
def test_live_activations(run_ranks: Callable[..., Any], tmp_path: Path, name: str) -> None:
    """Peak memory of stage i would grow with the microbatches instead of with
    min(stages - i, microbatches).
    """
    numbers = [2, 8, 16]
    by_stage = run_ranks(STAGES, run_steps, write_config(tmp_path, "unused"), name, numbers)
    for i, microbatches in enumerate(numbers):
        found = [results[i] for results in by_stage]
        live = [f["peak_live"] for f in found]
        assert live == peak_live(generators.build(name, STAGES, microbatches))
        assert live == [
            microbatches if name == "gpipe" else min(STAGES - stage, microbatches) for stage in range(STAGES)
        ]
        for stage, f in enumerate(found):
            sends, receives = stage < STAGES - 1, stage > 0
            assert f["seen"] == {"outputs": microbatches * sends, "sent": microbatches * receives}, (
                "or nothing was watched"
            )
            assert f["held"] == 0 and not any(f["left"].values()), "a step must leave nothing behind"
            # The one just computed, and those on their way.
            most = f["most"]
            assert most["outputs"] <= 1 + IN_FLIGHT and most["sent"] <= IN_FLIGHT, (
                f"stage {stage} keeps what it has sent: {most}"
            )
            assert (f["loss"] > 0) == (stage == STAGES - 1)
