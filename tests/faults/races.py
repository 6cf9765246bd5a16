"""Mistakes that are there in some runs and not in others. Here a race is lost in every other run, so that a test is the same each time."""

from itertools import count
from typing import Any
from unittest import mock

from torch import Tensor

from megacore.distributed import comm
from megacore.engine import gather, reduce
from tests.faults import both, fault

patch = mock.patch.object


def lost_at_first(owner: Any, wrong: dict[str, Any]) -> Any:
    """Methods of the objects of a class that are wrong in the first, third, … object that a process makes, and right in the others."""
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
    """A reduction that has read `x` before the last gradient came, as one that is begun too early may."""

    def __init__(self, x: Tensor, group: Any) -> None:
        self.x, self.read = x, x.clone()
        self.work = comm.all_reduce_start(self.read, group)

    def wait(self) -> None:
        """Loses what came later."""
        self.work.wait()
        self.x.copy_(self.read)


@fault(
    "a bucket is begun one gradient early, and at times read before that gradient is there",
    "dp2",
    "a race: two runs differ; in flight: 5 × all_reduce over dp (begun: backward, awaited: reduce gradients)",
)
def bucket_begun_early() -> Any:
    rearm, start = reduce.GradientReducer._rearm, reduce.GradientReducer._start

    def hasty(self: Any) -> None:
        rearm(self)
        self.waiting_for = {bucket: max(1, gradients - 1) for bucket, gradients in self.waiting_for.items()}

    def early(self: Any, buffer: Any, bucket: Any) -> None:
        with patch(reduce, "all_reduce_start", Early):
            start(self, buffer, bucket)

    return lost_at_first(reduce.GradientReducer, {"_rearm": hasty, "_start": early})


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
            self.work[i] = comm.all_gather_inside(arriving, self.levels.between), arriving

    return lost_at_first(gather.ParameterGatherer, {"start": start, "_wait": lambda self, wanted: None})
