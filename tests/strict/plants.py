"""Mistakes that gloo forgives, each a context manager that changes the code of a running
process, and where each shows.
"""

from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from itertools import chain, count, cycle
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from megacore.context_parallel import attention
from megacore.distributed import communicator as wire
from megacore.distributed.mesh import Mesh
from megacore.engine import param_all_gather as gather
from megacore.engine import reduce
from megacore.pipeline import runtime
from tests.strict.device import Rules
from tests.strict.runs import BATCH, MICRO_BATCH, STEPS, Case

patch = mock.patch.object
RULES = Rules(seed=1, patience=6.0)


@dataclass(frozen=True)
class Plant:
    """A mistake, and the run in which it shows."""

    mistake: str
    function: Any
    case: Case
    found: str  # what the strict wire's verdict contains
    rules: Rules = RULES

    @property
    def path(self) -> str:
        """As `launch/verify.py --plant` takes it."""
        return f"{__name__}:{self.function.__name__}"


def missing_wait() -> Any:
    """The first bucket's sum is not waited for: those behind it in the same communicator are."""
    finish = reduce.GradientReducer.finish

    def hasty(self: Any) -> None:
        for buffer, bucket in self.buckets[self.next :]:
            self._start(buffer, bucket)
        self.next = len(self.buckets)
        del self.work[0]
        finish(self)

    return patch(reduce.GradientReducer, "finish", hasty)


def buffer_reused() -> Any:
    """From the second step on, a rank sends from six buffers in turn, and lets eight
    messages be under way.
    """
    rings: dict[tuple[int, torch.Size], Any] = {}
    send = wire.Communicator.send

    def reuse(self: Any, x: Tensor, peer: int) -> Any:
        if (peer, x.shape) not in rings:
            # of a step and its validation
            first = [torch.empty_like(x) for _ in range(2 * BATCH // MICRO_BATCH)]
            rings[peer, x.shape] = chain(first, cycle([torch.empty_like(x) for _ in range(6)]))
        return send(self, next(rings[peer, x.shape]).copy_(x), peer)

    return both(patch(wire.Communicator, "send", reuse), patch(runtime, "IN_FLIGHT", 8))


def collectives_swapped() -> Any:
    """Rank 0 begins a bucket's sum over dp × cp behind its next gather over cp, and all others before it."""
    held: list[Any] = []
    start, gathering = reduce.all_reduce_start, attention.all_gather

    class Later:
        """The handle of a sum that may not have begun."""

        def __init__(self, begin: Any) -> None:
            self.begin, self.work = begin, None

        def start(self) -> None:
            self.work = self.work or self.begin()

        def wait(self) -> None:
            self.start()
            self.work.wait()

    def late(x: Tensor, group: Any) -> Any:
        if dist.get_rank():
            return start(x, group)
        held.append(Later(lambda: start(x, group)))
        return held[-1]

    def gathered(x: Tensor, group: Any) -> Any:
        found = gathering(x, group)
        while held:
            held.pop(0).start()
        return found

    return both(patch(reduce, "all_reduce_start", late), patch(attention, "all_gather", gathered))


def one_communicator() -> Any:
    """Messages in both directions share a communicator, in which receives are posted ahead of sends."""
    connect = Mesh._connect_stages

    def together(self: Any, config: Any) -> None:
        connect(self, config)
        self.pp.communicator.downward = self.pp.communicator.process_group

    return patch(Mesh, "_connect_stages", together)


def downward_behind_tied() -> Any:
    """As it was: NCCL's pipelines had a second group, and their middle ranks had made one
    group less than the ends before it.
    """
    create, holders, connect = Mesh._communicator, Mesh._holders, Mesh._connect_stages

    def fewer(self: Any, name: str, ranks: tuple[int, ...]) -> Any:
        return None if name == "not tied" else create(self, name, ranks)

    def pipeline_first(self: Any, config: Any) -> Any:
        self.groups.setdefault(("pp",), self._create("pp", self._ranks_along(("pp",))))
        return holders(self, config)

    def on_nccl(self: Any, config: Any) -> None:
        if self.backend != "gloo":
            connect(self, config)

    changes = {"_communicator": fewer, "_holders": pipeline_first, "_connect_stages": on_nccl}
    return mock.patch.multiple(Mesh, **changes)


def gather_before_evaluation() -> Any:
    """What a step gathers is awaited by the next step and by a save, and not by a validation in between."""
    init = gather.ParameterGatherer.__init__

    def careless(self: Any, stages: Any, *rest: Any) -> None:
        wait = self._wait
        self._wait = lambda wanted: wait(wanted) if stages[0].training else None
        init(self, stages, *rest)

    return patch(gather.ParameterGatherer, "__init__", careless)


def bucket_begun_early() -> Any:
    """In the last step, one rank begins a bucket's sum when the last of its gradients is still to come."""
    rearm, armed = reduce.GradientReducer._rearm, count(1)

    def hasty(self: Any) -> None:
        rearm(self)
        if next(armed) == STEPS and dist.get_rank() == 0:
            bucket = id(self.buckets[1][1])
            self.waiting_for[bucket] = max(1, self.waiting_for[bucket] - 1)

    return patch(reduce.GradientReducer, "_rearm", hasty)


def both(*plants: AbstractContextManager[Any]) -> Any:
    """Several changes that make one mistake."""
    stack = ExitStack()
    for plant in plants:
        stack.enter_context(plant)
    return stack


PLANTS = [
    Plant("a sum that is not waited for, because a later one is", missing_wait, Case("dp2"), "NaN"),
    Plant(
        "a buffer that is filled again while it is being sent",
        buffer_reused,
        Case("pp2@gpipe"),
        "off by",
        replace(RULES, lag=0.1),
    ),
    Plant(
        "two collectives of different communicators, swapped on one rank",
        collectives_swapped,
        Case("cp2dp2", ("parallel.context_method=gather",)),
        "in vain",
        replace(RULES, queues=8),
    ),
    Plant(
        "a receive ahead of a send in one communicator",
        one_communicator,
        Case("pp2"),
        "differing in operation",
    ),
    Plant(
        "a pipeline's second group, made when its middle ranks have made one group less",
        downward_behind_tied,
        Case("pp3"),
        "by one name",
    ),
    Plant(
        "a gather that a validation does not wait for",
        gather_before_evaluation,
        Case("dp2", ("engine.shard_optimizer=true",)),
        "NaN",
    ),
    Plant(
        "a bucket's sum that one rank begins one gradient early, in one step",
        bucket_begun_early,
        Case("dp2"),
        "off by",
    ),
]
