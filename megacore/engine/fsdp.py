"""PyTorch's FSDP2 as an engine: parameters, gradients and optimizer state are divided among the data ranks (ZeRO stage 3).

`fully_shard` (Zhao et al. 2023) replaces every parameter by this rank's rows of it in fp32, the masters, and hangs hooks on the
blocks that gather a block in the compute dtype before it runs, and sum its gradients in fp32 after its backward. Each tensor rank
and each stage has data ranks of its own, to which its piece of a tensor is simply a tensor.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from megacore.comm import all_reduce
from megacore.config import Config
from megacore.engine.optimizer import accumulation_dtype
from megacore.engine.stepper import Stepper
from megacore.kernels.grad_norm import ROW
from megacore.mesh import Group, Mesh
from megacore.model.gpt import DTYPES, Stage
from megacore.tensor_parallel.linear import ColumnLinear
from megacore.tensor_parallel.shard import Box, Shard, boxes_of_range, piece_key, shard_of


@dataclass(frozen=True)
class Rows:
    """This rank's part of a parameter."""

    name: str
    shard: Shard
    master: Tensor
    gradient: Tensor  # of the same shape
    start: int  # the first element in the tensor-parallel piece

    def norm_weights(self, here: bool) -> Tensor:
        """Whether the gradient's rows of `ROW` elements count in the norm, `here` at all, as `SumOfSquares` takes it."""
        weight = float(self.shard.counted and here)
        return torch.full((-(-self.gradient.numel() // ROW),), weight, dtype=torch.float64, device=self.gradient.device)

    def pieces(self, tensor: Tensor) -> Iterator[tuple[Tensor, Box]]:
        """The boxes that `tensor`, which holds something for each element of `master`, consists of."""
        flat = tensor.flatten()
        for first, box in boxes_of_range(self.shard, self.start, self.start + flat.numel()):
            yield flat[first - self.start :][: prod(box.local_shape)].view(box.local_shape), box


class FSDPEngine(Stepper):
    """`Engine` over a stage's parameters (see `protocol`)."""

    def __init__(self, config: Config, stage: Stage, mesh: Mesh) -> None:
        self.module = self.stage = stage
        self.mesh = mesh
        stage.compute_on(mesh.device)
        reshard = config.engine.reshard
        self.reshard = mesh.pp.size == 1 if reshard is None else reshard
        self.units: list[FSDPModule] = []  # what is gathered as a whole: the blocks, and the stage with all that is in no block
        self.rows = self._divide(config)
        super().__init__(
            config,
            mesh.device,
            [rows.master for rows in self.rows],
            [rows.gradient for rows in self.rows],
            decay=[rows.shard.decay for rows in self.rows],
            row_weights=[rows.norm_weights(mesh.replicate.rank == 0) for rows in self.rows],
            over=mesh.world,
        )

    @torch.no_grad()
    def _divide(self, config: Config) -> list[Rows]:
        """Hands the stage to FSDP2, block by block: each is moved to the device whole, and then this rank's part is left."""
        shards = {name: shard_of(parameter) for name, parameter in self.stage.named_parameters()}
        for module in self.stage.modules():
            # Rows are what is divided, so logical dims (heads; gate and up) become rows, as the layer itself takes them.
            if isinstance(module, ColumnLinear):
                module.weight.data = module.weight.data.flatten(0, -2)
                if module.bias is not None:
                    module.bias.data = module.bias.data.flatten()
        compute, offload = DTYPES[config.train.precision], config.engine.cpu_offload
        master, mesh = accumulation_dtype(next(self.stage.parameters())), self._device_mesh()
        for module in (*self.stage.blocks.values(), self.stage):
            for parameter in module.parameters():
                if not isinstance(parameter, DTensor):
                    parameter.data = parameter.data.to(master)
            unit = fully_shard(
                module,
                mesh=mesh,
                # The stage's own stay until the last backward: the loss, which runs outside its forward, needs them.
                reshard_after_forward=self.reshard and module is not self.stage,
                mp_policy=MixedPrecisionPolicy(compute, master, cast_forward_inputs=False),
                offload_policy=CPUOffloadPolicy(pin_memory=self.mesh.device.type == "cuda") if offload else OffloadPolicy(),
            )
            # The loss is weighted for the mean over the global batch, so data ranks add up.
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)
            self.units.append(unit)
        rows = []
        for name, parameter in self.stage.named_parameters():
            assert isinstance(parameter, DTensor)
            parameter.shard = shards[name]  # type: ignore[attr-defined]
            each = -(-parameter.shape[0] // self.mesh.shard.size)
            first = min(each * self.mesh.shard.rank, parameter.shape[0])
            # FSDP2 adds to a gradient that is there already. This one stays, for kernels that look for it where it was.
            parameter.grad = gradient = torch.zeros_like(parameter)
            assert isinstance(gradient, DTensor)
            rows.append(Rows(name, shards[name], parameter.to_local(), gradient.to_local(), first * prod(parameter.shape[1:])))
        return rows

    def _device_mesh(self) -> DeviceMesh:
        """The data ranks, by groups that hold copies of each other, as PyTorch wants them."""
        shard, replicate, kind = self.mesh.shard, self.mesh.replicate, self.mesh.device.type
        assert shard.process_group is not None
        if replicate.process_group is None:
            return DeviceMesh.from_group(shard.process_group, kind)
        ranks = torch.tensor(self.mesh.dp.ranks).view(replicate.size, shard.size)
        groups = [replicate.process_group, shard.process_group]
        return DeviceMesh.from_group(groups, kind, ranks, mesh_dim_names=("replicate", "shard"))

    def backward(self, root: GradientEdge, gradient: Tensor, *, last: bool) -> None:
        """See `Engine`."""
        stage = self.units[-1]  # these say it to every unit inside it
        stage.set_is_last_backward(last)
        stage.set_requires_gradient_sync(last or self.reshard)
        stage.set_requires_all_reduce(last)  # the copies' sum is needed once
        stage.set_reshard_after_backward(last, recurse=not self.reshard)
        torch.autograd.backward([root], [gradient])

    @torch.no_grad()
    def reduce_gradients(self) -> None:
        """See `Engine`. Data ranks have been summed over behind each block's backward."""
        self._sum([rows.gradient for rows in self.rows if rows.shard.partial], self.mesh.tp)

    @torch.no_grad()
    def reduce_tied(self) -> None:
        """See `Engine`. Both stages have cut their copy alike."""
        assert self.mesh.tied is not None
        self._sum([rows.gradient for rows in self.rows if rows.name == "embedding.weight"], self.mesh.tied)

    def _sum(self, gradients: Sequence[Tensor], group: Group) -> None:
        """Sums gradients over the group's ranks as one tensor, on the device even if they rest in host memory."""
        if group.size == 1 or not gradients:
            return
        flat = torch.cat([gradient.flatten() for gradient in gradients]).to(self.mesh.device)
        parts = all_reduce(flat, group).split([gradient.numel() for gradient in gradients])
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.copy_(part.view_as(gradient))

    def gradients(self) -> dict[str, tuple[Tensor, Box]]:
        """See `Engine`."""
        return self._pieces("", [rows.gradient for rows in self.rows])

    def settle(self) -> None:
        """See `Engine`. Nothing is under way: parameters are gathered when they are used."""

    def behind_step(self) -> None:
        """See `Stepper`."""
        for rows in self.rows:
            rows.gradient.zero_()

    def behind_loading(self) -> None:
        """See `Stepper`."""
        for unit in self.units:
            unit.reshard()  # or what a validation has gathered would be used once more

    def tensors(self) -> dict[str, tuple[Tensor, Box]]:
        """See `Engine`: for every parameter its master and both moments."""
        named = self._pieces("model/", [rows.master for rows in self.rows])
        return named | self._pieces("adam_m/", self.first) | self._pieces("adam_v/", self.second)

    def _pieces(self, kind: str, tensors: Sequence[Tensor]) -> dict[str, tuple[Tensor, Box]]:
        """This rank's pieces of what `tensors` hold, one for each parameter's rows."""
        pieces: dict[str, tuple[Tensor, Box]] = {}
        for rows, tensor in zip(self.rows, tensors, strict=True):
            for view, box in rows.pieces(tensor):
                counted = box.counted and self.mesh.replicate.rank == 0  # of equal copies the first is saved
                pieces[piece_key(f"{kind}{rows.name}", pieces)] = (view, replace(box, counted=counted))
        return pieces
