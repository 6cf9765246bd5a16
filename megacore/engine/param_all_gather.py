"""Gathers updated parameters from the ranks that own parts of them, while the next forward pass runs."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from megacore.config.implied import compiles
from megacore.distributed.collectives import all_gather_inside, own_part
from megacore.distributed.communicator import Staged, Work, side_stream
from megacore.distributed.hierarchical_reduce import Levels
from megacore.engine.flat_buffer import FlatBuffer
from megacore.model.stage import Stage


class ParameterGatherer:
    """Gathers every divided bucket after a step, in the order in which forward needs them.

    A module waits for its buckets before it runs.

    Every layer waits for its own parameters; where layers are compiled, the stage does.
    """

    def __init__(self, stages: Sequence[Stage], buffers: list[FlatBuffer]) -> None:
        # Buckets are laid out in the order of backward.
        buckets = [(buffer, bucket) for buffer in buffers if buffer.divided for bucket in buffer.buckets]
        self.buckets = sorted(buckets, key=lambda pair: -pair[1].completes)
        self.work: list[Work | None] = [None] * len(self.buckets)
        needs: dict[nn.Module, list[int]] = {}
        users: dict[nn.Parameter, set[nn.Module]] = {}
        for stage in stages:
            for layer in stage.layers:
                for parameter in layer.parameters():  # a hook would break a compiled layer's graph
                    users.setdefault(parameter, set()).add(stage if compiles(stage.config) else layer)
        for i, (_, bucket) in enumerate(self.buckets):
            for module in {user for slot in bucket.slots for user in users[slot.parameter]}:
                needs.setdefault(module, []).append(i)
        for module, wanted in needs.items():
            module.register_forward_pre_hook(lambda module, args, wanted=wanted: self._wait(wanted))

    def start(self) -> None:
        """Begins to gather every bucket."""
        for i, (buffer, bucket) in enumerate(self.buckets):
            self.work[i] = start_gather(buffer.values[bucket.start : bucket.stop], buffer.sum.levels)

    def _wait(self, wanted: Any) -> None:
        for i in wanted:
            work = self.work[i]
            if work is not None:
                work.wait()
                self.work[i] = None

    def finish(self) -> None:
        """Waits for whatever is under way."""
        self._wait(range(len(self.work)))


def start_gather(x: Tensor, levels: Levels) -> Work:
    """Begins to fill `x` ``[levels.size · n]`` with every rank's own ``[n]`` of it
    (`hierarchical_reduce.Levels.owners`): between hosts first, so that each link
    between hosts carries a part once.
    """
    within, between = levels.within, levels.between
    if within.size == 1:
        return all_gather_inside(x, between)
    operations = [
        lambda: all_gather_inside(own_part(x, within), between),
        lambda: all_gather_inside(x, within),
    ]
    return Staged(operations, stream=side_stream(x.device))
