"""Mistakes in sums over hosts and in 16 bits on the wire."""

from typing import Any
from unittest import mock

import torch

from megacore.distributed import communicator as wire
from megacore.distributed import hierarchical_reduce as levels
from megacore.engine import reduce
from tests.faults import fault
from tests.faults.collectives import not_started

patch = mock.patch.object
SUM_APART = (
    "every microbatch's gradients agree; their sum over microbatches and ranks does not: first "
    "embedding.weight"
)
NOT_THE_SUM = (
    "the gradients are not the sum of what backward gave, microbatch by microbatch: first embedding.weight"
)
TWO_LEVELS, NARROW = "engine.reduce_levels=2", "engine.reduce_dtype=bf16"


@fault("in two levels the sums of hosts are not added up", "dp4", SUM_APART, TWO_LEVELS)
def hosts_apart() -> Any:
    return patch(reduce, "all_reduce_start", not_started)


@fault(
    "in two levels a rank owns the part of the sum that its number says",
    "dp4",
    "first weights are drawn alike in every layout; what the engine then holds of them is not: first "
    "embedding.weight",
    TWO_LEVELS,
    "engine.shard_optimizer=true",
)
def parts_by_number() -> Any:
    def numbered(self: levels.Levels) -> levels.Group:
        return levels.Group(
            "owners", tuple(range(self.size)), self.between.rank * self.within.size + self.within.rank
        )

    return patch(levels.Levels, "owners", property(numbered))


def exchanged(total: Any) -> Any:
    """Sums of parts that travel in 16 bits are made by `total`."""
    wait = wire.Exchanged.wait

    def waited(self: Any) -> None:
        if self.parts.dtype == self.out.dtype:
            wait(self)
        else:
            self.work.wait()
            self.out.copy_(total(self.parts))

    return patch(wire.Exchanged, "wait", waited)


@fault("gradients that travel in bf16 are added up in bf16", "dp8", NOT_THE_SUM, NARROW, precision="bf16")
def summed_in_16_bits() -> Any:
    def total(parts: torch.Tensor) -> torch.Tensor:
        found = parts[0].clone()
        for part in parts[1:]:
            found += part
        return found

    return exchanged(total)


@fault("gradients in bf16 of one host are lost", "dp4", NOT_THE_SUM, NARROW, TWO_LEVELS, precision="bf16")
def host_lost() -> Any:
    return exchanged(lambda parts: parts[1:].float().sum(0))
