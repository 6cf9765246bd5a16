"""Mistakes that are there in some runs and not in others.

Here a race is lost in every other run, so that a test is the same each time.
"""

from itertools import count
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from megacore.distributed import collectives as comm
from megacore.distributed.communicator import Communicator, observed
from megacore.engine import param_all_gather as gather
from megacore.engine import reduce
from tests.faults import both, fault

patch = mock.patch.object


def lost_at_first(owner: Any, wrong: dict[str, Any]) -> Any:
    """Methods of the objects of a class that are wrong in the first, third, … object that a process
    makes, and right in the others.
    """
    init, made = owner.__init__, RACED.setdefault(owner, count(1))
    right = {name: getattr(owner, name) for name in wrong}

    def counted(self: Any, *rest: Any) -> None:
        self.loses = next(made) % 2 == 1
        init(self, *rest)

    def either(name: str) -> Any:
        return lambda self, *rest: (wrong if self.loses else right)[name](self, *rest)

    return both(patch(owner, "__init__", counted), *(patch(owner, name, either(name)) for name in wrong))


RACED: dict[Any, Any] = {}  # of each class, how many were made in this process


class Early:
    """A reduction of `x` into `out` that has read `x` before the last gradient came, as
    one that is begun too early may.
    """

    def __init__(self, start: Any, wire: Communicator, x: Tensor, out: Tensor) -> None:
        self.out, read = out, x.clone()
        self.result = read if out is x else torch.empty_like(out)
        self.work = start(wire, read, *([] if out is x else [self.result]))

    def wait(self) -> None:
        """Loses what came later."""
        self.work.wait()
        self.out.copy_(self.result)


def begun_early() -> Any:
    """Buckets are begun one gradient early; what listeners hear of is an operation on the bucket's memory."""
    rearm, start = reduce.GradientReducer._rearm, reduce.GradientReducer._start
    all_reduce, reduce_scatter = (
        wrapped.__wrapped__ for wrapped in (Communicator.start_all_reduce, Communicator.start_reduce_scatter)
    )
    now = [False]  # whether a bucket is begun

    def hasty(self: Any) -> None:
        rearm(self)
        self.waiting_for = {bucket: max(1, gradients - 1) for bucket, gradients in self.waiting_for.items()}

    def early(self: Any, buffer: Any, bucket: Any) -> None:
        now[0] = True
        start(self, buffer, bucket)
        now[0] = False

    @observed
    def start_all_reduce(wire: Communicator, x: Tensor) -> Any:
        return Early(all_reduce, wire, x, x) if now[0] else all_reduce(wire, x)

    @observed
    def start_reduce_scatter(wire: Communicator, x: Tensor, out: Tensor) -> Any:
        return Early(reduce_scatter, wire, x, out) if now[0] else reduce_scatter(wire, x, out)

    in_wire = (
        patch(Communicator, method.__name__, method) for method in (start_all_reduce, start_reduce_scatter)
    )
    return both(*in_wire, lost_at_first(reduce.GradientReducer, {"_rearm": hasty, "_start": early}))


@fault(
    "a bucket is begun one gradient early, and at times read before that gradient is there",
    "dp2",
    "a race: two runs differ; in flight: 1 × all_reduce over dp on what differs (begun: backward, "
    "awaited: reduce gradients), "
    "4 × all_reduce over dp (begun: backward, awaited: reduce gradients)",
)
def bucket_begun_early() -> Any:
    return begun_early()


@fault(
    "a bucket is begun one gradient early, while unrelated gathers are in flight",
    "dp2",
    "a race: two runs differ; in flight: 1 × reduce_scatter over dp on what differs (begun: backward, "
    "awaited: reduce gradients), "
    "5 × all_gather over dp (begun: drawing weights, awaited: forward), "
    "4 × reduce_scatter over dp (begun: backward, awaited: reduce gradients)",
    "engine.shard_optimizer=true",
)
def bucket_scattered_early() -> Any:
    return begun_early()


@fault(
    "the gather of updated parameters is not awaited, and at times comes too late",
    "dp2",
    "a race: two runs differ; in flight: 10 × all_gather over dp (begun: drawing weights, awaited: never)",
    "engine.shard_optimizer=true",
)
def gather_not_awaited() -> Any:
    def start(self: Any) -> None:
        """What is gathered arrives when the next gather begins."""
        for i, (buffer, bucket) in enumerate(self.buckets):
            values = buffer.values[bucket.start : bucket.stop]
            own = buffer.part(bucket)
            arriving = values.clone()
            if self.work[i] is not None:
                work, late = self.work[i]
                work.work.wait()
                mine = buffer.values[own].clone()
                values.copy_(late)
                buffer.values[own] = mine
            self.work[i] = comm.all_gather_inside(arriving, buffer.sum.levels.between), arriving

    return lost_at_first(gather.ParameterGatherer, {"start": start, "_wait": lambda self, wanted: None})
