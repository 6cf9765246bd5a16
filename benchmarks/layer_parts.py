"""Which part of a model's layers a step's time goes to: attention, feed-forward layers, and
what a mixture of experts does.

Forward is charged by the call, and backward by the nodes of the graph that the call made. So it needs eager
layers.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import wraps
from types import FunctionType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from benchmarks.breakdown import Stopwatch
from benchmarks.training import Training, join
from benchmarks.wire import EXPERTS, Wire
from megacore.config import Config
from megacore.distributed.collectives import all_reduce
from megacore.distributed.rank_info import RankInfo
from megacore.expert_parallel.experts import Experts
from megacore.expert_parallel.router import Router
from megacore.model import expert_block
from megacore.model.attention import Attention
from megacore.model.block import FeedForward
from megacore.model.expert_block import MixtureOfExperts

EXCHANGE = "exchange"
LAYERS = ("router", "permute", EXCHANGE, "experts", "shared", "feed-forward", "attention")
PARTS = (*LAYERS, "optimizer", "communication", "rest")
ROUTING = ("score", "ranked", "choose", "note", "weights", "losses")  # a router's methods
# whose functions put rows where they are needed
MOVES = ("megacore.expert_parallel.dispatch", "megacore.kernels.permute")


class LayerParts(AbstractContextManager["LayerParts"]):
    """Charges a stage's layers to parts of a stopwatch while it is entered."""

    def __init__(self, stages: Sequence[nn.Module], watch: Stopwatch) -> None:
        self.stages, self.watch, self.patches = stages, watch, ExitStack()

    def __enter__(self) -> "LayerParts":
        for owner, name, part in self._calls():
            self.patches.enter_context(patch.object(owner, name, self._charged(getattr(owner, name), part)))
        return self

    def __exit__(self, *_: object) -> None:
        self.patches.close()

    def _calls(self) -> Iterator[tuple[Any, str, str]]:
        """What is called for each part: an owner and the name there."""
        modules = [module for stage in self.stages for module in stage.modules()]
        shared = {module.shared for module in modules if isinstance(module, MixtureOfExperts)}
        for module in modules:
            if isinstance(module, Router):
                yield from ((module, name, "router") for name in ROUTING)
            elif isinstance(module, Experts):
                yield module, "forward", "experts"
            elif isinstance(module, FeedForward):
                yield module, "forward", "shared" if module in shared else "feed-forward"
            elif isinstance(module, Attention):
                yield module, "forward", "attention"
        for name, value in vars(expert_block).items():
            if isinstance(value, FunctionType) and value.__module__ in MOVES:
                yield expert_block, name, "permute"

    def _charged(self, call: Callable[..., Any], part: str) -> Callable[..., Any]:
        @wraps(call)
        def charged(*args: Any, **options: Any) -> Any:
            with self.watch.part(part):
                found = call(*args, **options)
            stops = {given.grad_fn for given in tensors(args) if given.grad_fn is not None}
            self._charge_backward(
                [made.grad_fn for made in tensors(found) if made.grad_fn is not None], stops, part
            )
            return found

        return charged

    def _charge_backward(self, nodes: list[Any], stops: set[Any], part: str) -> None:
        """Charges all nodes from these on, down to the stops and the parameters; one that is
        charged already is an inner part's.
        """
        while nodes:
            node = nodes.pop()
            if node in stops or node.name().endswith("AccumulateGrad") or "charged" in node.metadata:
                continue
            node.metadata["charged"] = part
            within = self.watch.part(part)
            node.register_prehook(lambda _, within=within: within.__enter__())
            node.register_hook(lambda *_, within=within: (within.__exit__(None, None, None), None)[1])
            nodes += [following for following, _ in node.next_functions if following is not None]


def tensors(found: Any) -> Iterator[Tensor]:
    """All of what a call takes or returns, in tuples, lists and objects that hold them."""
    if isinstance(found, Tensor):
        yield found
    elif isinstance(found, tuple | list):
        for one in found:
            yield from tensors(one)


class ByPart:
    """megacore's steps: of each turn a plain one, and the parts of one more (`PARTS`), the mean of
    ranks, which add up to that one.
    """

    def __init__(self, config: Config, place: RankInfo) -> None:
        self.training = Training(config, join(config, place))

    def turn(self) -> list[float]:
        """Seconds: of a plain step, and by part."""
        plain = self.training.step()
        mesh, watch = self.training.mesh, Stopwatch(self.training.mesh.device)
        self.training.meet()
        mesh.listeners.add(watch)
        wire = Wire(mesh, lambda name: watch.part(EXCHANGE if name == EXPERTS else "communication"))
        with wire, LayerParts(self.training.train_step.stages, watch):
            watch.mark()
            self.training.work()
            watch.mark()
            self.training.wait()
        mesh.listeners.remove(watch)
        totals = watch.totals()
        rest = sum(seconds for name, seconds in totals.items() if name not in PARTS)
        own = [totals[name] for name in PARTS[:-1]] + [rest]
        mean = (
            all_reduce(torch.tensor(own, dtype=torch.float64, device=mesh.device), mesh.world)
            / mesh.world.size
        )
        return [plain, *mean.tolist()]
