"""What a layer keeps, needs and sends for a microbatch, measured: the real layer runs once on `meta`,
where tensors have no content.

A layer is measured once for all layouts in which it is the same; what a stage or a step needs is composed of
its layers (`activations.py`, `traffic.py`).
"""

import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, replace
from functools import cache
from itertools import count
from math import gcd
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils._pytree import tree_iter

from megacore.config import Config
from megacore.config.engine import EngineConfig
from megacore.config.implied import attention_of, splits_backward
from megacore.config.schema import DataConfig
from megacore.config.source import blaming
from megacore.distributed.axes import AXES
from megacore.distributed.collectives import Done
from megacore.distributed.communicator import Communicator, Group, observed
from megacore.distributed.communicator import Work as Begun
from megacore.distributed.events import Listeners, Operation
from megacore.distributed.topology import Topology, alone
from megacore.model.batch import Microbatch, Samples
from megacore.model.choose import layers_of
from megacore.model.expert_block import MixtureOfExperts
from megacore.model.layers import DTYPES, Layers, fields_of
from megacore.model.stage import Stage, run
from megacore.pipeline.schedule import Op
from megacore.tensor_parallel.gradient import MainGradient, WeightGradQueue, finish_in_turn
from megacore.tools.choices.layer_cost import Attended, BlockLoad, LayerCost, Sent, Work
from megacore.tools.choices.meta_watch import MetaWatch
from megacore.tools.choices.resolve_auto import context_method_of, fuses
from megacore.tools.choices.torch_patches import on_meta

META = torch.device("meta")
_numbers = count(1)
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")
WHOLE = ("1f1b", "gpipe", "interleaved")  # schedules that split no backward


class Unanswered(Communicator):
    """A communicator of ranks that are not there: listeners hear of its operations, and nothing is sent."""

    def __init__(self, size: int, listeners: Listeners) -> None:
        self.size, self.shared, self.listeners, self.key = (
            size,
            None,
            listeners,
            f"unanswered {next(_numbers)}",
        )

    @observed
    def all_reduce(self: Communicator, x: Tensor, op: Any) -> None:
        """See `Communicator`."""

    @observed
    def start_all_reduce(self: Communicator, x: Tensor) -> Begun:
        """See `Communicator`."""
        return Done()

    @observed
    def start_all_gather(self: Communicator, x: Tensor, out: Tensor) -> Begun:
        """See `Communicator`."""
        return Done()

    @observed
    def start_reduce_scatter(self: Communicator, x: Tensor, out: Tensor) -> Begun:
        """See `Communicator`."""
        return Done()

    @observed
    def start_all_to_all(self: Communicator, x: Tensor, out: Tensor) -> Begun:
        """See `Communicator`."""
        return Done()

    @observed
    def start_exchange(self: Communicator, x: Tensor, out: Tensor, sent: Any, received: Any) -> Begun:
        """See `Communicator`."""
        return Done()

    @observed
    def start_shift(self: Communicator, x: Tensor, out: Tensor, after: int, before: int) -> Begun:
        """See `Communicator`."""
        return Done()


class Unconnected(Topology):
    """The ranks with which one process would compute."""

    def __init__(self, config: Config, listeners: Listeners) -> None:
        self.listeners = listeners
        super().__init__(config)

    def _create(self, name: str, ranks: tuple[int, ...]) -> Group:
        return Group(
            name,
            ranks,
            ranks.index(self.rank),
            Unanswered(len(ranks), self.listeners) if len(ranks) > 1 else None,
        )


class LayerWatch(MetaWatch):
    """Counts what a layer makes and does, and hears what it sends."""

    def __init__(self) -> None:
        super().__init__()
        self.work = Work()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        name, given = func.overloadpacket.__name__, [x for x in tree_iter(args) if isinstance(x, Tensor)]
        if name in PRODUCTS:
            a, b = given[-2:]
            self.work.products[a.shape[:-1].numel(), a.shape[-1], b.shape[-1]] += 1
        elif name.startswith("_scaled_dot_product"):
            backward = "backward" in name
            q, k = given[backward : backward + 2]
            at = [argument.name for argument in func._schema.arguments].index("is_causal")
            causal = args[at] if at < len(args) else (kwargs or {}).get("is_causal", False)
            self.work.attention[
                Attended(q.shape[0] * q.shape[2], k.shape[2], q.shape[1] * q.shape[3], causal, backward)
            ] += 1
        elif not name.startswith(("empty", "new_empty")) and self.makes(func):
            self.launched((*given, *(x for x in tree_iter(result) if isinstance(x, Tensor))))
        return result

    def launched(self, arguments: Iterable[Any]) -> None:
        """Counts what a kernel reads and writes."""
        tensors = {id(x): x for x in arguments if isinstance(x, Tensor)}
        self.work.moved += sum(x.numel() * x.itemsize for x in tensors.values())

    def on_collective(self, operation: Operation) -> None:
        """A shift is a send, as seen from one rank."""
        largest, group = max(operation.tensors, key=Tensor.numel), operation.group
        name = {"shift": "send"}.get(operation.name, operation.name)
        self.work.sent[Sent(group.name, name, group.size, largest.numel(), largest.dtype.itemsize)] += 1

    def begin(self) -> None:
        """What lives now, parameters and their sums, counts no more."""
        self.live = 0

    def most_of(self, action: Callable[[], object]) -> int:
        """The bytes that live while an action runs, when they are most. Its `work` is known behind it."""
        self.peak, self.work = self.live, Work()
        action()
        return self.peak


class Given(torch.autograd.Function):
    """What a layer is given: nobody but the layer holds it, nor the gradient that its outputs get."""

    @staticmethod
    def forward(ctx: Any, start: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=META)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None]:
        return None, None, None


class Taken(torch.autograd.Function):
    """Stands for the layers behind, which give the gradient of what a layer hands on."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.shape, ctx.dtype = x.shape, x.dtype
        return torch.empty((), device=META)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return torch.empty(ctx.shape, dtype=ctx.dtype, device=META)


def cost_of(config: Config, layer: int, load: BlockLoad | None = None) -> LayerCost:
    """What a layer costs, by its number in the model's list, with this load of its experts or a balanced one.

    Raises `ConfigError` if it is a user's own, and does not run on `meta`.
    """
    own = by_itself(config)
    if config.model.is_custom:
        layer = _alike(on_one_rank(own))[layer]
    elif 0 < layer <= config.model.num_layers:
        layer = 1 + config.model.alike(layer - 1)
    return _measured(own, layer, splits_backward(config) and config.parallel.schedule not in WHOLE, load)


@cache
def _alike(config: Config) -> tuple[int, ...]:
    """For each layer of a model of the user's own the first of its class that does the same.

    Others may differ in all.
    """
    first: list[tuple[int, object, LayerCost]] = []
    found = []
    for number, spec in enumerate(layers_of(config)):
        cost = _measured(config, number, False)
        same = (at for at, kind, other in first if kind is spec.kind and asdict(cost) == asdict(other))
        found.append(at := next(same, number))
        first += [(number, spec.kind, cost)] if at == number else []
    return tuple(found)


@cache
def first_trained(config: Config) -> int:
    """The first layer with a parameter that is not frozen: what stands before it
    hands on no tensor with a gradient.
    """
    layers, where = layers_of(config), (config, alone(config), DTYPES[config.train.precision], META)
    trained = (
        any(parameter.requires_grad for parameter in spec.build(*where).parameters()) for spec in layers
    )
    return next((number for number, found in enumerate(trained) if found), len(layers))


def on_one_rank(own: Config) -> Config:
    """A config (`by_itself`) of the same layers on one rank, with one sequence."""
    sizes = {axis.title: 1 for axis in AXES} | {"sequence": False}
    train = own.train.model_copy(update={"micro_batch_size": 1, "global_batch_size": 1, "recompute": "none"})
    return own.model_copy(update={"train": train, "parallel": own.parallel.model_copy(update=sizes)})


def by_itself(config: Config) -> Config:
    """The config with what a layer's cost depends on, and nothing else: the same for all layouts in
    which its layers are the same.
    """
    model, train, parallel, c = config.model, config.train, config.parallel, config.parallel.context
    method = context_method_of(config) if c > 1 else "gather"
    experts = (
        parallel.expert * (parallel.expert_tensor or parallel.tensor) if model.num_experts is not None else 1
    )
    # the fewest from which experts can have their ranks
    data = experts // gcd(experts, parallel.context * parallel.tensor)
    axes = {"pipeline": 1, "data": data, "chunks": 1, "schedule": "1f1b", "context_method": method}
    layer = {"attention": attention_of(config), "kernels": "triton" if fuses(config) else "eager"}
    device = train.device if train.device == "cpu" else "cuda"
    plain = {
        "global_batch_size": train.micro_batch_size,
        "offload_activations": False,
        "compile": False,
        "device": device,
    }
    return config.model_copy(
        update={
            "model": model.model_copy(update=layer),
            "train": train.model_copy(update=plain),
            "parallel": parallel.model_copy(update=axes),
            # Autograd gives fsdp gradients that others add to sums: they count with what is gathered.
            "engine": EngineConfig(kind="deepspeed" if config.engine.kind == "deepspeed" else "native"),
            "data": DataConfig(document_mask=config.data.document_mask),
        }
    )


@cache
def _measured(config: Config, layer: int, splits: bool, load: BlockLoad | None = None) -> LayerCost:
    if not splits:
        one = _Run(config, layer, load)
        return LayerCost(one.kept, 0, one.most, one.work, one.parameters)
    whole, parts = _measured(config, layer, False, load), _Run(config, layer, load, split=True)
    return replace(whole, waiting=parts.waiting, most={**whole.most, **parts.most})


class _Run:
    """A layer's forward and backward."""

    def __init__(
        self, config: Config, layer: int, load: BlockLoad | None = None, *, split: bool = False
    ) -> None:
        """`split`: its backward runs in two parts."""
        watch, layers = LayerWatch(), layers_of(config)
        mesh = Unconnected(config, Listeners([watch]))
        blamed = blaming(config, f", {layers[layer].name} on tensors without content")
        with blamed, on_meta(config.train.device, watch.launched), watch:
            stage, queue = Stage(config, range(layer, layer + 1), mesh, META, layers), WeightGradQueue()
            stage.compute_on(META)
            for _, mixture in mixtures_of(stage):
                mixture.expected = load or mixture.expected
            for parameter in stage.parameters():
                if parameter.requires_grad:
                    _sum_elsewhere(parameter, queue if config.engine.kind == "native" else None)
            own, recompute = stage.layers[0], config.train.recompute == "full" and stage.layers == stage.inner
            start = torch.empty(
                (), device=META, requires_grad=not config.model.is_custom or layer > first_trained(config)
            )
            losses = {
                loss.name: torch.empty((), dtype=_loss_dtype(config), device=META) for loss in own.losses
            }
            context = stage.context(batch_on_meta(config, layers), gradients=losses)

            def forward() -> None:
                flow = {
                    name: Given.apply(
                        start, stage.takes[name].shape(config), DTYPES[stage.takes[name].precision(config)]
                    )
                    for name in own.reads
                }
                found = dict[str, Tensor]()
                run(own, flow, found, context, recompute=recompute)
                given = [flow[name] for name in own.writes if flow[name].requires_grad]
                self.roots = [get_gradient_edge(Taken.apply(x)) for x in given] + [
                    get_gradient_edge(x) for x in found.values()
                ]

            def backward() -> None:
                gradients = [*(start for _ in self.roots[len(losses) :]), *losses.values()]
                roots, self.roots = self.roots, []
                torch.autograd.backward(roots, gradients)

            watch.begin()
            self.parameters = sum(parameter.numel() for parameter in stage.parameters())
            self.most, self.work = {Op.FORWARD: watch.most_of(forward)}, {Op.FORWARD: watch.work}
            self.kept = watch.live
            if not split:
                self.most[Op.BACKWARD] = watch.most_of(backward)
                self.work[Op.BACKWARD] = watch.work
            else:
                with queue.collect() as later:
                    self.most[Op.BACKWARD_INPUT] = watch.most_of(backward)
                self.waiting = watch.live
                self.most[Op.BACKWARD_WEIGHT] = watch.most_of(lambda: deque(finish_in_turn(later), 0))


def mixtures_of(stage: nn.Module) -> Iterator[tuple[int, MixtureOfExperts]]:
    """The mixtures of experts of a stage's blocks, with the blocks' numbers.

    One that a layer of the user's own has elsewhere is passed over.
    """
    for name, module in stage.named_modules():
        if isinstance(module, MixtureOfExperts) and (found := re.match(r"blocks\.(\d+)\.", name)):
            yield int(found[1]), module


def _sum_elsewhere(parameter: nn.Parameter, queue: WeightGradQueue | None) -> None:
    """Gives the parameter a sum of its gradients, as the native engine does if there is a queue; what
    autograd makes of it is freed.
    """

    def freed(parameter: Tensor) -> None:
        parameter.grad = None

    parameter.register_post_accumulate_grad_hook(freed)
    if queue is not None:
        total = torch.empty(
            parameter.shape, dtype=torch.promote_types(parameter.dtype, torch.float32), device=META
        )
        parameter.main_gradient = MainGradient(total, queue)  # type: ignore[attr-defined]


def _loss_dtype(config: Config) -> torch.dtype:
    return torch.float64 if config.train.precision == "fp64" else torch.float32


def batch_on_meta(config: Config, layers: Layers, key: int = 0) -> Microbatch:
    """A rank's microbatch without content, with the fields that its layers declare."""
    train, parts = config.train, config.parallel.context
    zeros = np.zeros((train.micro_batch_size, train.seq_len), np.int64)
    tokens = torch.empty(train.micro_batch_size, train.seq_len // parts, dtype=torch.int64, device=META)
    found = {name: source(Samples(zeros, zeros)) for name, source in fields_of(layers).items()}
    more = {
        name: torch.from_numpy(x[:, : tokens.shape[1]] if x.shape[1] == train.seq_len else x).to(META)
        for name, x in found.items()
    }
    return Microbatch(tokens, more.pop("targets", tokens), key, more=more)
