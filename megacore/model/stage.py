"""The part of a model that one pipeline stage holds, or all of it."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megacore.caches import keep_inductor_private
from megacore.config import Config
from megacore.config.implied import compiles, scores_otherwise, settled_context_method
from megacore.context_parallel.attention import Sequences
from megacore.context_parallel.sharding import Documents, positions_of
from megacore.distributed.buffers import buffers_of, plain_buffers
from megacore.distributed.shard import shard_of
from megacore.distributed.topology import Topology, alone
from megacore.errors import ConfigError
from megacore.model.batch import Microbatch
from megacore.model.choose import layers_of
from megacore.model.context import Context, TextCache, Watch
from megacore.model.flow import Flow
from megacore.model.initial import initialise
from megacore.model.layers import DTYPES, Layer, Layers, crossing
from megacore.model.offload import ActivationOffload
from megacore.model.parametrization import scale_by_width
from megacore.model.rotary import rope_tables

Flows = Mapping[str, Tensor]  # by name: what layers hand on


class Stage(nn.Module):
    """Consecutive layers of a model.

    A parameter has the same name in every layout: its layer's name in the list, and its own name in the
    layer. Initialisation, checkpoints and comparisons use this name. A parameter that layers share
    (`Layer.shares`) has one name. On one rank it is one; ranks that hold it each have a copy, and the engine
    sums their gradients.
    """

    def __init__(
        self,
        config: Config,
        own: range,
        mesh: Topology,
        device: torch.device | str,
        layers: Layers | None = None,
    ) -> None:
        """`own`: the numbers of its layers in the list, `layers` or else the config's
        (`pipeline.partition.layer_ranges`).

        `mesh`: the whole cluster's, or one of a single process (`topology.alone`). On the device `meta` the
        stage has only names and
        shapes: somebody gives its parameters memory, and calls `compute_on`.
        """
        super().__init__()
        layers = layers_of(config) if layers is None else layers
        device, dtype = torch.device(device), DTYPES[config.train.precision]
        self.config, self.group, self.cp = config, mesh.tp, mesh.cp
        self.first, self.last = own.start == 0, own.stop == len(layers)
        # what comes from the stage before, and goes on
        self.takes, self.gives = crossing(layers, own.start), crossing(layers, own.stop)
        self.losses = tuple(
            dict.fromkeys(
                loss.name for spec in layers[own.start : own.stop] for loss in spec.declared("losses")
            )
        )
        self.sequence = config.parallel.sequence and mesh.tp.size > 1
        self.layers = [
            self._register(layers[i].name, layers[i].build(config, mesh, dtype, device)) for i in own
        ]
        if config.model.parametrization == "mup":
            scale_by_width(config, zip(own, self.layers, strict=True))
        # The ends of the model, and the layers between, which are compiled, recomputed, offloaded and
        # gathered one by one.
        self.before, self.behind = (
            self.layers[: int(self.first)],
            self.layers[len(self.layers) - int(self.last) :],
        )
        self.inner = self.layers[len(self.before) : len(self.layers) - len(self.behind)]
        self.bare = tuple(f"{layers[i].name}." for i in own if layers[i].declared("bare"))
        self.shared = {
            f"{layers[i].name}.{name}": other for i in own for name, other in layers[i].shares(config).items()
        }
        self.watch: Watch | None = None
        share_by_name([self])
        if device.type != "meta":
            self.compute_on(device)
            held = {name: (parameter, shard_of(parameter)) for name, parameter in self.named_parameters()}
            initialise(held, {name: shard for name, (_, shard) in held.items()}, config.train.seed, dtype)
        if compiles(config):
            keep_inductor_private()
            for buffer in buffers_of([self]).values():  # a graph would be compiled for every microbatch's key
                buffer.note_outside_graphs()
            # Inductor may time variants of a reduction or a product and keep the fastest, and some of them
            # round differently. If each tensor rank chose by itself, replicated values would drift apart.
            options = {"deterministic": True} if mesh.tp.size > 1 else None
            for layer in self.inner:
                layer.compile(options=options)

    def at_step(self, step: int) -> None:
        """Tells modules that have an `at_step`, because a setting of theirs depends on the step, that it is
        this one. They keep it for evaluations behind the step.
        """
        for module in self.of_steps:
            module.at_step(step)

    @cached_property
    def of_steps(self) -> list[Any]:
        """Those modules. To ask all of them costs milliseconds, so it is done once."""
        return [module for layer in self.layers for module in layer.modules() if hasattr(module, "at_step")]

    def _register(self, name: str, layer: Layer) -> Layer:
        *rooms, own = name.split(".")
        module: nn.Module = self
        for room in rooms:
            if room not in dict(module.named_children()):
                module.add_module(room, nn.ModuleDict())
            module = module.get_submodule(room)
        module.add_module(own, layer)
        return layer

    def named_parameters(self, *args: Any, **options: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """See `nn.Module`. Those of a bare layer are named without the layer's name."""
        for name, parameter in super().named_parameters(*args, **options):
            yield self.logical_name(name), parameter

    def logical_name(self, name: str) -> str:
        """A parameter's name in every layout, from its place among the modules."""
        if name in self.shared:
            return self.shared[name]
        return next((name.removeprefix(prefix) for prefix in self.bare if name.startswith(prefix)), name)

    def compute_on(self, device: torch.device) -> None:
        """Makes all but the parameters on the device. The engine brings these when they are used."""
        model, train = self.config.model, self.config.train
        self.device = device
        for buffer in buffers_of([self]).values():
            buffer.fill(device)
        for path, module, name in plain_buffers(self):
            constant = module._buffers[name]
            assert constant is not None
            if constant.is_meta and device.type != "meta":
                wrong = f"the torch buffer {path} is made on the device that the constructor is given"
                right = "on the CPU, and megacore moves it: that device may be meta, which keeps no numbers"
                raise ConfigError(model.custom_key, wrong, right)
            module._buffers[name] = constant.to(device)
        self.sequences, self.positions = None, None
        own = np.arange(train.seq_len)
        if self.cp.size == 1 and scores_otherwise(self.config):
            self.sequences = Sequences(train.seq_len, self.cp, "gather")
        if self.cp.size > 1:
            self.sequences = Sequences(train.seq_len, self.cp, settled_context_method(self.config))
            own = positions_of(self.sequences.own)
            self.positions = torch.from_numpy(own).expand(train.micro_batch_size, -1).to(device)
        self.rope: tuple[tuple[Tensor, Tensor], ...] = ()
        if model.position == "rope":
            at_least_fp32 = torch.float64 if train.precision == "fp64" else torch.float32
            in_tables = np.arange(train.seq_len) if self.config.data.document_mask else own
            self.rope = self.rope_tables(in_tables, at_least_fp32)

    @cached_property
    def text_rope(self) -> tuple[tuple[Tensor, Tensor], ...]:
        """The rotary tables of all positions, for texts that are written."""
        if self.cp.size == 1:
            return self.rope
        return self.rope_tables(np.arange(self.config.max_positions), self.rope[0][0].dtype)

    def rope_tables(self, positions: np.ndarray, dtype: torch.dtype) -> tuple[tuple[Tensor, Tensor], ...]:
        """The rotary tables of some positions, on the stage's device; and those of blocks
        with a window, if they are others.
        """
        model, where = self.config.model, (dtype, self.device)
        bases = [(model.rope_theta, model.rope_scaling)]
        if model.window_rope_theta is not None:
            bases.append((model.window_rope_theta, None))
        size, share = self.config.head_size, model.rotary_share
        return tuple(rope_tables(positions, size, theta, *where, scaling, share) for theta, scaling in bases)

    @cached_property
    def offload(self) -> ActivationOffload:
        """The offload of activations to host memory, made when `train.offload_activations` first needs it."""
        return ActivationOffload(self.device)

    def forward(
        self, flow: Flows, batch: Microbatch, cache: TextCache | None = None, gradients: Flows | None = None
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """What the stage before hands on, and the batch → what goes on to the next, and the sums
        of this stage's losses, by name.

        Hidden states are ``[batch · seq, hidden]``, with sequence parallelism this rank's tokens. With a
        `cache` the tokens follow those that it holds, and are added to it. `gradients`: what backward will
        start with at each loss, if it is known. Without targets layers that only give losses do not run, and
        what the last would read goes on.
        """
        context, train = self.context(batch, cache, gradients), self.config.train
        flow, losses = dict(flow), dict[str, Tensor]()
        for layer in self.before:
            run(layer, flow, losses, context, self.watch)
        with self.offload.around() if train.offload_activations and self.training else nullcontext():
            for layer in self.inner:
                run(
                    layer,
                    flow,
                    losses,
                    context,
                    self.watch,
                    recompute=train.recompute == "full" and self.training,
                )
        for layer in self.behind:
            run(layer, flow, losses, context, self.watch)
        if cache is not None:
            cache.advance(context.seq_len)
        return (
            flow if self.last and batch.targets is None else {name: flow[name] for name in self.gives}
        ), losses

    def empty(self, flows: Mapping[str, Flow], *sizes: int) -> dict[str, Tensor]:
        """A new tensor for each of some flows, to receive it; `sizes` as in `Flow.shape`."""
        return {
            name: torch.empty(
                flow.shape(self.config, *sizes), dtype=DTYPES[flow.precision(self.config)], device=self.device
            )
            for name, flow in flows.items()
        }

    def context(
        self, batch: Microbatch, cache: TextCache | None = None, gradients: Flows | None = None
    ) -> Context:
        """What a pass over `batch` is told.

        Context ranks hold the tokens ``sequences.own`` of each sequence; attention stays within the batch's
        documents.
        """
        model, (batch_size, seq), start = (
            self.config.model,
            batch.tokens.shape,
            0 if cache is None else cache.length,
        )
        sequences, positions = self.sequences, batch.positions
        if cache is not None:
            sequences, positions = cache.sequences, cache.positions
        elif batch.documents is not None:
            sequences = Sequences(
                self.config.train.seq_len, self.cp, settled_context_method(self.config), batch.documents
            )
        elif positions is None:
            positions = self.positions
            # a validation's, or a text's
            if sequences is not None and self.cp.size == 1 and seq != sequences.seq_len:
                sequences = Sequences(seq, self.cp, sequences.method)
        ropes: list[tuple[Tensor, Tensor]] = []
        if self.rope:
            by_position = positions is not None and (batch.documents is not None or cache is not None)
            rows = positions.flatten() if by_position else slice(start, start + seq)  # type: ignore[union-attr]
            ropes = [(cos[rows], sin[rows]) for cos, sin in (self.rope if cache is None else self.text_rope)]
        rope, window_rope = (ropes[0], ropes[-1]) if ropes else (None, None)
        dropout = model.dropout if self.training else 0.0
        shape, where = (
            (batch_size, seq, rope, self.group, self.sequence),
            (start, cache, model.kernels, sequences, positions),
        )
        watch = None if compiles(self.config) else self.watch
        own: dict[str, Any] = {"gradients": gradients or {}, "watch": watch, "window_rope": window_rope}
        return Context(*shape, dropout, batch.key, *where, batch=batch, **own)

    def hidden(
        self,
        tokens: Tensor,
        key: int = 0,
        documents: Documents | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """Tokens ``[batch, seq]`` → a whole model's last hidden states, for `logits` or `loss`."""
        return self({}, Microbatch(tokens, None, key, documents, positions))[0]["hidden"]

    def logits(self, x: Tensor) -> Tensor:
        """Of the last layer, see `Head.logits`.

        Raises `ConfigError` if it is of a user's own and has none.
        """
        if not hasattr(self.behind[0], "logits"):
            wrong = (
                f"its last layer is a {type(self.behind[0]).__name__} without a method logits, which "
                "texts and proofs need"
            )
            raise ConfigError(
                self.config.model.custom_key, wrong, "a method logits, as megacore.model.head.Head has it"
            )
        return self.behind[0].logits(x)  # type: ignore[operator]

    def loss(self, x: Tensor, targets: Tensor, gradient: Tensor | None = None) -> Tensor:
        """Of the last layer, see `Head.loss`."""
        return self.behind[0].loss(x, targets, gradient)  # type: ignore[operator]


def run(
    layer: Layer,
    flow: dict[str, Tensor],
    losses: dict[str, Tensor],
    context: Context,
    watch: Watch | None = None,
    *,
    recompute: bool = False,
) -> None:
    """Runs a layer: its tensors come from `flow` and go there, and what it adds to losses to `losses`."""
    if not layer.writes and context.batch.targets is None:
        return
    read = *(flow[name] for name in layer.reads), context
    result = (
        checkpoint(layer, *read, use_reentrant=False, preserve_rng_state=False) if recompute else layer(*read)
    )
    outputs = result if isinstance(result, tuple) else (result,)
    expected = (*layer.writes, *(loss.name for loss in layer.losses))
    if len(outputs) != len(expected) or not all(isinstance(x, Tensor) for x in outputs):
        kinds = ", ".join(type(x).__name__ for x in outputs) or "nothing"
        wrong = f"{layer.layer_name} returns {kinds}, and declares {', '.join(expected) or 'nothing'}"
        right = "a tensor for each of its `writes` and then of its `losses`; a tuple, if they are several"
        raise ConfigError("model.source", wrong, right)
    for (name, declared), x in zip(layer.writes.items(), outputs, strict=False):  # losses follow
        flow[name] = x if declared.gradient else x.detach()  # as where a pipeline is cut
    for loss, value in zip(layer.losses, outputs[len(layer.writes) :], strict=True):
        losses[loss.name] = losses[loss.name] + value if loss.name in losses else value
    if watch is not None:
        watch.on_layer_output(layer, flow)


def share_by_name(stages: Iterable[Stage]) -> None:
    """Let the layers of one rank that share a parameter hold the same one.

    Raises `ValueError` if what they make differs, or if two layers make parameters of one name without
    sharing them.
    """
    held: dict[str, nn.Parameter] = {}
    makers: dict[str, str] = {}  # by the parameter's name, the path of the one that no layer shares
    for stage in stages:
        for prefix, module in stage.named_modules():
            for attribute, parameter in module._parameters.items():
                if parameter is None:
                    continue
                path = f"{prefix}.{attribute}"
                name = stage.logical_name(path)
                if path not in stage.shared and makers.setdefault(name, path) != path:
                    raise ValueError(
                        f"several layers have a parameter of one name, {name}, and do not share it: "
                        f"{makers[name]} and {path}; give them names of their own, or let one layer share "
                        "the other's (`shares`)"
                    )
                shared = held.setdefault(name, parameter)
                if shard_of(shared) != shard_of(parameter):
                    raise ValueError(
                        f"{path} is to be {name}, and is of another shape, placement or first value"
                    )
                module._parameters[attribute] = shared


def whole_model(config: Config, device: torch.device | str = "cpu", layers: Layers | None = None) -> Stage:
    """The whole model on one device: a stage with all layers."""
    layers = layers_of(config) if layers is None else layers
    return Stage(config, range(len(layers)), alone(config), device, layers)
