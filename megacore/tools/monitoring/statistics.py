"""`log.statistics`: how large weights, gradients, updates, activations and attention's
logits are, alike in every layout.

Each figure is a root mean square over a logical tensor, matrix or layer, or over what a layer gave for all
tokens of the global batch. Every rank adds up the squares of what it holds. Where several hold the same,
which follows from its placement, one of them counts. A collective over all ranks then brings all sums, and
another one the largest logits. Nobody waits for them before the step is logged.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megacore.config import Config
from megacore.config.implied import compiles
from megacore.config.schema import resolved
from megacore.context_parallel.sharding import AttentionPart, parts
from megacore.context_parallel.whole import whole
from megacore.distributed.collectives import all_reduce
from megacore.distributed.mesh import Mesh
from megacore.distributed.shard import LogicalMatrix, TensorSlice, logical_name, overlap, relative, shard_of
from megacore.engine.stepper import OptimizerStep
from megacore.model.attention import CausalAttention
from megacore.model.choose import layers_of
from megacore.model.context import Context
from megacore.model.flow import Flow
from megacore.model.stage import whole_model
from megacore.pipeline.schedule import Action, Op
from megacore.train.callbacks import Callback
from megacore.train.step import TrainStep

TENSORS = ("weight", "gradient", "update")
ACTIVATION, LOGIT = "activation", "largest_logit"
ROWS = 512  # of queries, whose logits are in memory at once


@dataclass(frozen=True)
class Matrix:
    """What a figure is of: a whole logical tensor, or a logical matrix in it."""

    name: str
    layer: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]


class Named:
    """All figures of a model, in one order, which does not depend on the layout."""

    def __init__(self, config: Config) -> None:
        plain = config.model_copy(update={"train": config.train.model_copy(update={"compile": False})})
        layers, model = layers_of(plain), whole_model(plain, "meta")
        owners: dict[nn.Parameter, str] = {}  # the layer that makes it; others may share it
        for spec, module in zip(layers, model.layers, strict=True):
            shared = spec.shares(plain)
            for name, parameter in module.named_parameters(remove_duplicate=False):
                if name not in shared:
                    owners[parameter] = spec.name
        self.matrices: dict[str, list[tuple[int, Matrix]]] = {}  # by parameter, each with its number
        self.every: list[Matrix] = []
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue
            shape = shard_of(parameter).global_shape
            for matrix in shard_of(parameter).matrices or (LogicalMatrix(""),):
                index = [part.indices(size) for part, size in zip(matrix.index, shape, strict=False)]
                index += [(0, size, 1) for size in shape[len(index) :]]
                offset, sizes = (
                    tuple(start for start, *_ in index),
                    tuple(stop - start for start, stop, _ in index),
                )
                found = Matrix(
                    f"{name}.{matrix.name}" if matrix.name else name, owners[parameter], offset, sizes
                )
                self.matrices.setdefault(name, []).append((len(self.every), found))
                self.every.append(found)
        # by layer and tensor: number, name of the figure, declaration
        self.flows: dict[tuple[str, str], tuple[int, str, Flow]] = {}
        for spec in layers:
            for tensor, flow in spec.declared("writes").items():
                figure = spec.name if tensor == "hidden" else f"{spec.name}.{tensor}"
                self.flows[spec.name, tensor] = len(self.flows), figure, flow
        attentions = [name for name, module in model.named_modules() if isinstance(module, CausalAttention)]
        self.attentions = {} if compiles(config) else {name: number for number, name in enumerate(attentions)}

    def figures(self, sums: Sequence[float], largest: Sequence[float]) -> dict[str, float]:
        """The figures by name, from the sums of squares of all ranks (of weights, gradients, updates,
        activations; then the elements of these) and the largest logits.
        """
        found: dict[str, float] = {}
        for at, kind in enumerate(TENSORS):
            own = sums[at * len(self.every) : (at + 1) * len(self.every)]
            of_layers: dict[str, tuple[float, int]] = {}
            for matrix, squares in zip(self.every, own, strict=True):
                elements = prod(matrix.shape)
                found[f"{kind}_rms/{matrix.name}"] = (squares / elements) ** 0.5
                before, others = of_layers.get(matrix.layer, (0.0, 0))
                of_layers[matrix.layer] = before + squares, others + elements
            for layer, (squares, elements) in of_layers.items():
                found[f"{kind}_rms/{layer}"] = (squares / elements) ** 0.5
        squared, counted = sums[-2 * len(self.flows) : -len(self.flows)], sums[-len(self.flows) :]
        for number, figure, _ in self.flows.values():
            found[f"{ACTIVATION}_rms/{figure}"] = (squared[number] / counted[number]) ** 0.5
        return found | {f"{LOGIT}/{name}": largest[number] for name, number in self.attentions.items()}


class Statistics(Callback):
    """Measures every so many steps, and gives the figures to the record of the step."""

    on_error = "raise"  # it communicates in steps that it measures

    def on_start(self, config: Config, mesh: Mesh) -> None:
        self.config, self.mesh = config, mesh
        self.step = 0  # the last one that was measured
        self.measuring = self.forward = False

    def on_built(self, train_step: TrainStep) -> None:
        """Takes note of what is to be measured, and where it is on this rank."""
        assert isinstance(train_step.engine, OptimizerStep), "a deepspeed engine was refused"
        self.engine, self.stages, self.named = train_step.engine, train_step.stages, Named(self.config)
        self.names = {module: name for stage in train_step.stages for name, module in stage.named_modules()}
        tensors, flows = len(self.named.every), len(self.named.flows)
        self.sums = torch.zeros(3 * tensors + 2 * flows, dtype=torch.float64, device=self.mesh.device)
        self.activations = self.sums[3 * tensors :].view(2, flows)
        self.largest = torch.empty(len(self.named.attentions), dtype=torch.float64, device=self.mesh.device)

    def on_step_begin(self, step: int, logged: bool) -> None:
        self.measuring = step % resolved(self.config.log.statistics).every == 0
        if self.measuring:
            self.step = step
            self.sums.zero_()
            self.largest.fill_(-torch.inf)
        for stage in self.stages:
            stage.watch = self if self.measuring else None

    def on_action_begin(self, action: Action) -> None:
        self.forward = action.op is Op.FORWARD

    @torch.no_grad()
    def on_layer_output(self, layer: nn.Module, flow: Mapping[str, Tensor]) -> None:
        """Adds up the squares of what a layer wrote for this rank's tokens,
        unless another rank counts the same.
        """
        for tensor in layer.writes:  # type: ignore[union-attr]
            number, _, declared = self.named.flows[self.names[layer], tensor]
            if self.counts(declared):
                self.activations[0, number] += squares(flow[tensor])
                self.activations[1, number] += flow[tensor].numel()

    def counts(self, flow: Flow) -> bool:
        """Whether this rank's part of an activation counts: of those that have the same, one does."""
        divided = (
            (self.mesh.tp.name,) if flow.tp is not None or (flow.sp and self.config.parallel.sequence) else ()
        )
        return self.mesh.counts(*divided) and (flow.cp or self.mesh.cp.rank == 0)

    @torch.no_grad()
    def on_attention(self, attention: nn.Module, q: Tensor, k: Tensor, context: Context) -> None:
        """Takes the largest logit of this rank's queries.

        Collective over context ranks, which give their keys.
        """
        number = self.named.attentions.get(self.names.get(attention, ""))
        if self.forward and number is not None:
            assert isinstance(attention, CausalAttention)
            self.largest[number].clamp_(min=largest_logit(q, k, attention.scale, context))

    @torch.no_grad()
    def on_phase(self, phase: str) -> None:
        if self.measuring and phase == "optimizer step":
            self.before = {key: (tensor.clone(), box) for key, (tensor, box) in self.masters()}
            self.add("weight", self.before.items())
            self.add("gradient", self.engine.gradients().items(), self.engine.loss_scale.value)
        elif self.measuring and phase == "between steps":
            updates = ((key, (tensor - self.before[key][0], box)) for key, (tensor, box) in self.masters())
            self.add("update", updates)
            del self.before
            all_reduce(self.sums, self.mesh.world)
            all_reduce(self.largest, self.mesh.world, dist.ReduceOp.MAX)
            self.measuring = False
            for stage in self.stages:
                stage.watch = None

    def masters(self) -> Iterator[tuple[str, tuple[Tensor, TensorSlice]]]:
        """This rank's pieces of what the optimizer updates, by the name of their parameter."""
        return iter(self.engine.pieces("", [r.master for r in self.engine.held.ranges]).items())

    def add(self, kind: str, pieces: Any, scale: Tensor | None = None) -> None:
        """Adds up the squares of pieces of logical tensors, each divided by `scale`,
        of those that this rank counts.
        """
        first = TENSORS.index(kind) * len(self.named.every)
        for key, (tensor, box) in pieces:
            if not box.counted:
                continue
            for number, matrix in self.named.matrices[logical_name(key)]:
                inside = overlap(box.offset, box.local_shape, matrix.offset, matrix.shape)
                if inside is not None:
                    found = squares(tensor[relative(inside, box.offset)]).to(self.mesh.device)
                    self.sums[first + number] += found if scale is None else found / scale.double().square()

    def metrics(self, metrics: Mapping[str, Any], stages: Sequence[nn.Module]) -> Mapping[str, float]:
        """The step's, where it was measured. The host has waited for the device."""
        return (
            self.named.figures(self.sums.tolist(), self.largest.tolist())
            if metrics["step"] == self.step
            else {}
        )


def squares(x: Tensor) -> Tensor:
    """The sum of squares, fp64: within a row in the tensor's precision, at least fp32."""
    wide = x if x.dtype in (torch.float32, torch.float64) else x.float()
    return (
        torch.linalg.vector_norm(wide, dim=-1).double().square().sum() if x.dim() else wide.double().square()
    )


def largest_logit(q: Tensor, k: Tensor, scale: float, context: Context) -> Tensor:
    """The largest ``scale · q·k`` of a query and a key that it sees, ``[]`` fp64. q ``[batch, heads, tokens,
    head]``, k with the key/value heads.
    """
    found, here = [AttentionPart(None, slice(0, q.shape[2]), slice(0, k.shape[2]), True)], context.sequences
    if here is not None:
        k = whole(k, here)
        found = parts(here.own, here.everything, here.documents)
    q, k = (x if x.dtype == torch.float64 else x.float() for x in (q, k))
    grouped = q.unflatten(1, (k.shape[1], -1))  # [batch, key/value heads, queries of one, tokens, head]
    largest = q.new_full((), -torch.inf, dtype=torch.float64)
    for part in found:
        rows = slice(None) if part.row is None else slice(part.row, part.row + 1)
        queries, keys = grouped[rows, :, :, part.queries], k[rows, :, None, part.keys].transpose(-2, -1)
        for first in range(0, queries.shape[3], ROWS):
            some = queries[:, :, :, first : first + ROWS]
            last = first + some.shape[3] if part.causal else keys.shape[-1]
            logits = some @ keys[..., :last]
            if part.causal:
                logits.masked_fill_(
                    torch.ones(logits.shape[-2:], dtype=torch.bool, device=q.device).triu_(first + 1),
                    -torch.inf,
                )
            largest = torch.maximum(largest, logits.amax().double() * scale)
    return largest
