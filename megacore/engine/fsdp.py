"""PyTorch's FSDP2 as an engine: it divides parameters, gradients and optimizer state among
the data ranks (ZeRO stage 3).

`fully_shard` (Zhao et al. 2023) replaces every parameter by this rank's rows of it in fp32, the masters. Its
hooks gather a block in the compute dtype before the block runs, and sum its gradients in fp32 after its
backward. Each tensor rank and each stage has its own data ranks, for which its piece of a tensor is simply a
tensor.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor

from megacore.config import Config
from megacore.config.implied import reshards
from megacore.config.optim_groups import ParameterGroups
from megacore.distributed.buffers import buffers_of
from megacore.distributed.collectives import all_reduce
from megacore.distributed.communicator import Group
from megacore.distributed.hierarchical_reduce import GradientSum
from megacore.distributed.mesh import Mesh
from megacore.distributed.shard import Shard, TensorSlice, boxes_of_range, piece_key, replicated, shard_of
from megacore.engine.flat_buffer import accumulation_dtype
from megacore.engine.held_tensors import MasterRange
from megacore.engine.owners import Holders, Part, divided_holders, part_of_rows
from megacore.engine.stepper import OptimizerStep
from megacore.errors import ConfigError
from megacore.kernels.grad_norm import ROW
from megacore.model.layers import DTYPES
from megacore.model.stage import Stage
from megacore.tensor_parallel.linear import flatten_rows


@dataclass(frozen=True)
class ShardRows:
    """This rank's part of a parameter."""

    name: str
    shard: Shard
    sum: GradientSum
    replicate: Group  # the ranks that hold it too, of those that sum its gradient
    parameter: DTensor
    master: Tensor
    gradient: Tensor  # of the same shape
    start: int  # the first element in the tensor-parallel piece

    def norm_weights(self) -> Tensor:
        """The weight in the norm of each row of `ROW` elements of the gradient (see `SumOfSquares`)."""
        weight = 1.0 / (self.shard.copies(but=self.sum.tokens) * self.replicate.size)
        return torch.full(
            (-(-self.gradient.numel() // ROW),), weight, dtype=torch.float64, device=self.gradient.device
        )

    def pieces(self, tensor: Tensor) -> Iterator[tuple[Tensor, TensorSlice]]:
        """The boxes of `tensor`, which has an element for each of `master`."""
        flat = tensor.flatten()
        for first, box in boxes_of_range(self.shard, self.start, self.start + flat.numel()):
            yield flat[first - self.start :][: prod(box.local_shape)].view(box.local_shape), box


class FSDPEngine(OptimizerStep):
    """An `Engine` for the parameters of a rank's stages (see `protocol`)."""

    def __init__(self, config: Config, stages: Sequence[Stage], mesh: Mesh) -> None:
        self.modules = self.stages = stages
        self.mesh = mesh
        self.reshard = reshards(config)
        self.offloads = config.engine.cpu_offload
        # modules that are gathered as a whole: each block, and a stage with its other parameters
        self.units: list[FSDPModule] = []
        self.rows: list[ShardRows] = []
        self.untrained: list[ShardRows] = []  # without gradients
        mesh.listeners.phase("dividing parameters")
        for stage in stages:
            self._divide(stage, config)
        mesh.listeners.phase("making the optimizer's state")
        self.groups = ParameterGroups(config.optim)
        ranges = [
            MasterRange(
                rows.master,
                rows.gradient,
                rows.norm_weights(),
                self.groups.of(rows.name, rows.shard),
                rows.shard.decay,
            )
            for rows in self.rows
        ]
        super().__init__(config, mesh, stages, ranges)

    def holders(self, shard: Shard) -> Holders:
        return divided_holders(self.mesh, shard)

    def part_at(self, shards: Mapping[str, Shard]) -> Callable[[str, int], Part]:
        by_name = {rows.name: rows for rows in self.rows}

        def part(name: str, rank: int) -> Part:
            rows, number = by_name[name], self.mesh.owner_index(rank, by_name[name].sum.tokens)
            shards = rows.sum.levels.within.size
            return part_of_rows(
                self.mesh.shard_at(rows.shard, rank), rows.parameter.dim(), shards, number % shards
            )

        return part

    @torch.no_grad()
    def _divide(self, stage: Stage, config: Config) -> None:
        """Gives a stage on `meta` to FSDP2, block by block.

        Then only this rank's part of each parameter gets memory.
        """
        shards = {name: shard_of(parameter) for name, parameter in stage.named_parameters()}
        sums = {name: self.mesh.gradient_sum(shard) for name, shard in shards.items()}
        units = self._units(stage, sums)
        flatten_rows(stage)
        compute, offload = DTYPES[config.train.precision], config.engine.cpu_offload
        master = accumulation_dtype(next(stage.parameters()))
        for module, over in units.items():
            for parameter in module.parameters():
                if not isinstance(parameter, DTensor) and parameter.requires_grad:
                    parameter.data = parameter.data.to(master)
            unit = fully_shard(
                module,
                mesh=self._device_mesh(over),
                # The stage's own parameters stay until the last backward: the loss needs them, outside the
                # stage's forward.
                reshard_after_forward=self.reshard and module is not stage,
                mp_policy=MixedPrecisionPolicy(compute, master, cast_forward_inputs=False),
                offload_policy=CPUOffloadPolicy(pin_memory=self.mesh.device.type == "cuda")
                if offload
                else OffloadPolicy(),
            )
            # The loss is weighted for the mean over the global batch, so data ranks add up.
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)
            if not self.reshard:
                # Nothing to fetch ahead for a backward. FSDP2 would fetch, in vain, what the last backward
                # has just given back: it goes by the order of forwards, of which a pipeline has several under
                # way.
                unit.set_modules_to_backward_prefetch([unit])
            self.units.append(unit)
        stage.to_empty(device=torch.device("cpu") if offload else self.mesh.device)
        for buffer in buffers_of([stage]).values():
            buffer.fill(self.mesh.device)
        for name, parameter in stage.named_parameters():
            assert isinstance(parameter, DTensor)
            parameter.shard = shards[name]  # type: ignore[attr-defined]
            held, replicate = sums[name].levels.within, sums[name].levels.between
            each = -(-parameter.shape[0] // held.size)
            first = min(each * held.rank, parameter.shape[0])
            gradient = torch.zeros_like(parameter.zero_()) if parameter.requires_grad else parameter.zero_()
            assert isinstance(gradient, DTensor)
            if not self.offloads and parameter.requires_grad:
                # FSDP2 adds to a gradient that exists. This tensor stays, because kernels keep its address.
                parameter.grad = gradient
            start = first * prod(parameter.shape[1:])
            (self.rows if parameter.requires_grad else self.untrained).append(
                ShardRows(
                    name,
                    shards[name],
                    sums[name],
                    replicate,
                    parameter,
                    parameter.to_local(),
                    gradient.to_local(),
                    start,
                )
            )

    def _units(self, stage: Stage, sums: Mapping[str, GradientSum]) -> dict[nn.Module, GradientSum]:
        """The modules that FSDP2 gathers, inner ones first, and over which ranks each sums its gradients:
        every block, the stage with its other parameters, and each module whose weights are summed over
        others. Raises `ConfigError` if a module has both.

        A block that shares a parameter with another layer of the stage is gathered with the stage: FSDP2
        divides it once.
        """
        units: dict[nn.Module, GradientSum] = {}
        usual = self.mesh.token_axes
        for name, module in reversed(list(stage.named_modules())):
            own = (
                [stage.logical_name(f"{name}.{p}") for p, _ in module.named_parameters(recurse=False)]
                if module is not stage
                else []
            )
            over = {sums[parameter].tokens: sums[parameter] for parameter in own}
            if len(over) > 1:
                right = "a module of its own for what is summed over other ranks, or engine.kind=native"
                raise ConfigError(
                    "engine.kind",
                    f"fsdp sums the gradients of a module as one, and those of {name} differ",
                    right,
                )
            if over and usual not in over:
                if module in stage.inner:
                    right = (
                        "a module within the layer for what is summed over other ranks, or engine.kind=native"
                    )
                    raise ConfigError(
                        "engine.kind",
                        f"fsdp sums the gradients of a layer with its neighbours', and those of {name} "
                        "differ",
                        right,
                    )
                units |= {module: next(iter(over.values()))}
        first = next(over for over in sums.values() if over.tokens == usual)
        uses = Counter(parameter for layer in stage.layers for parameter in layer.parameters())
        alone = [
            layer for layer in stage.inner if all(uses[parameter] == 1 for parameter in layer.parameters())
        ]
        return units | dict.fromkeys((*alone, stage), first)

    def _device_mesh(self, over: GradientSum) -> DeviceMesh:
        """The ranks of a sum as PyTorch's mesh: shards of one copy, and copies."""
        shard, replicate, kind = over.levels.within, over.levels.between, self.mesh.device.type
        assert shard.process_group is not None
        if replicate.process_group is None:
            return DeviceMesh.from_group(shard.process_group, kind)
        ranks = torch.tensor(self.mesh.group(*over.tokens).ranks).view(replicate.size, shard.size)
        groups = [replicate.process_group, shard.process_group]
        return DeviceMesh.from_group(groups, kind, ranks, mesh_dim_names=("replicate", "shard"))

    def backward(
        self, chunk: int, root: list[GradientEdge], gradients: Sequence[Tensor], *, last: bool
    ) -> None:
        stage: Any = self.stages[chunk]  # its methods reach every unit in it
        stage.set_is_last_backward(last)
        stage.set_requires_gradient_sync(last or self.reshard)
        stage.set_requires_all_reduce(last)  # copies are summed once
        stage.set_reshard_after_backward(last, recurse=not self.reshard)
        torch.autograd.backward(root, gradients)

    @torch.no_grad()
    def reduce_gradients(self) -> None:
        """See `Engine`. Sums over ranks that see other tokens are done after each block's backward."""
        if self.offloads:
            self._take_gradients()
        # Of two axes with the same ranks the sums are one.
        for ranks, group in {group.ranks: group for rows in self.rows for group in rows.sum.first}.items():
            self._sum(
                [rows.gradient for rows in self.rows if any(own.ranks == ranks for own in rows.sum.first)],
                group,
            )

    def _take_gradients(self) -> None:
        """Takes over what FSDP2 has brought to host memory.

        With a gradient there to add to, the host would have waited for every block's on its way, and added
        them up itself.
        """
        for rows in self.rows:
            found = rows.parameter.grad
            taken: Tensor = found.to_local() if isinstance(found, DTensor) else torch.zeros_like(rows.master)
            rows.gradient.set_(taken)  # type: ignore[call-overload]
            rows.parameter.grad = None

    @torch.no_grad()
    def reduce_tied(self) -> None:
        """See `Engine`. All ranks divide their copies in the same way."""
        for group in self.mesh.shared.values():
            self._sum([rows.gradient for rows in self.rows if rows.sum.last == group], group)

    def _sum(self, gradients: Sequence[Tensor], group: Group) -> None:
        """Sums gradients over the group's ranks as one tensor, on the device even
        if they rest in host memory.
        """
        if group.size == 1 or not gradients:
            return
        flat = torch.cat([gradient.flatten() for gradient in gradients]).to(self.mesh.device)
        parts = all_reduce(flat, group).split([gradient.numel() for gradient in gradients])
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.copy_(part.view_as(gradient))

    def gradients(self) -> dict[str, tuple[Tensor, TensorSlice]]:
        return self.pieces("", [rows.gradient for rows in self.rows])

    def settle(self) -> None:
        """See `Engine`. Nothing is under way, because parameters are gathered when they are used."""

    def behind_step(self, skip: Tensor) -> None:
        for rows in self.rows:
            if self.offloads:  # zeros without memory, of which backward takes as much
                rows.gradient.set_(rows.gradient.new_zeros(()).expand(rows.gradient.shape))  # type: ignore[call-overload]
            else:
                rows.gradient.zero_()

    def behind_loading(self) -> None:
        for unit in self.units:
            unit.reshard()  # else parameters that a validation has gathered would be used once more

    def frozen(self) -> dict[str, tuple[Tensor, TensorSlice]]:
        return pieces_of("", self.untrained, [rows.master for rows in self.untrained])

    def pieces(self, prefix: str, tensors: Sequence[Tensor | None]) -> dict[str, tuple[Tensor, TensorSlice]]:
        """See `OptimizerStep`: one tensor for each parameter's rows."""
        return pieces_of(prefix, self.rows, tensors)


def pieces_of(
    prefix: str, every: Sequence[ShardRows], tensors: Sequence[Tensor | None]
) -> dict[str, tuple[Tensor, TensorSlice]]:
    """The pieces of `tensors`, one for each parameter's rows or None, by prefix and name."""
    found: dict[str, tuple[Tensor, TensorSlice]] = {}
    for rows, tensor in zip(every, tensors, strict=True):
        for view, box in rows.pieces(tensor) if tensor is not None else ():
            copied = (*rows.shard.copied_along(but=rows.sum.tokens), replicated(rows.replicate))
            found[piece_key(f"{prefix}{rows.name}", found)] = (view, replace(box, copied=copied))
    return found
