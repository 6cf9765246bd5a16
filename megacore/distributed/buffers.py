"""Buffers: state of a model that no gradient updates, such as the biases of a router.

They are placed, saved and restored as parameters are.

A layer makes one with `new_buffer`, reads its `value`, and notes what it counts in each microbatch. Once
behind every step the counts are summed over microbatches, and over the ranks over which the gradient of a
parameter with this placement would be; or their largest is taken, such as a scale of 8-bit numbers needs.
From that every rank computes the same next value. A step that is skipped leaves it.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megacore.distributed.collectives import all_reduce
from megacore.distributed.hierarchical_reduce import GradientSum
from megacore.distributed.shard import Shard, TensorSlice
from megacore.distributed.topology import Topology

BUFFERS = "buffer/"  # the prefix of their names in a checkpoint

Rule = Callable[[Tensor, Tensor], Tensor]  # the value and the counts of a step, of one shape → the next value
SAVED_STATE = (
    "make it by megacore.distributed.buffers.new_buffer, or if it never changes with persistent=False"
)
REDUCTIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


class ShardedBuffer(nn.Module):
    """This rank's piece of a buffer, in `value`.

    It is a module so that whatever moves tensors or makes them anew keeps its record.
    """

    value: Tensor

    def __init__(
        self, shard: Shard, rule: Rule, dtype: torch.dtype, device: torch.device | str, reduction: str = "sum"
    ) -> None:
        super().__init__()
        self.shard, self.rule, self.reduction = shard, rule, reduction
        self.noted: dict[int, Tensor] = {}
        self.register_buffer("value", torch.empty(shard.local_shape, dtype=dtype))
        self.fill(torch.device(device))

    def fill(self, device: torch.device) -> None:
        """Gives it memory on a device, with the value that it starts with."""
        self.value = torch.full(
            self.shard.local_shape, self.shard.fill, dtype=self.value.dtype, device=device
        )

    def note(self, key: int, counts: Tensor) -> None:
        """Notes what this rank counted in the microbatch `key` (`Context.key`), in the shape of the value.

        It is not noted in validation, and what a recomputed pass counts again counts once.
        """
        if self.training:
            self.noted[key] = counts.detach()

    def note_outside_graphs(self) -> None:
        """Lets compiled blocks call `note` as it is."""
        self.note = torch.compiler.disable(self.note)  # type: ignore[method-assign]

    def take(self) -> Tensor:
        """The sum of what was noted since the last time, or its largest: of nothing the
        least that there is.
        """
        noted, self.noted = list(self.noted.values()), {}
        if self.reduction == "sum":
            return torch.stack(noted).sum(0) if noted else torch.zeros_like(self.value)
        return torch.stack(noted).amax(0) if noted else torch.full_like(self.value, -torch.inf)

    @property
    def piece(self) -> tuple[Tensor, TensorSlice]:
        """The value and its position, as an engine gives those of parameters."""
        return self.value, self.shard.box


def new_buffer(
    shard: Shard, rule: Rule, dtype: torch.dtype, device: torch.device | str, reduction: str = "sum"
) -> ShardedBuffer:
    """A buffer that is `shard.fill` at first, and is updated by `rule`; for a layer's constructor.

    `reduction`: one of `REDUCTIONS`, of what is noted; "max" of floating-point numbers.
    """
    return ShardedBuffer(shard, rule, dtype, device, reduction)


def plain_buffers(module: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield the torch buffers of a module and of those within it, without the values of `ShardedBuffer`s: the
    path of each, the module that has it, and its name there.
    """
    for prefix, inner in module.named_modules():
        if not isinstance(inner, ShardedBuffer):
            for name, buffer in inner._buffers.items():
                if buffer is not None:
                    yield f"{prefix}.{name}".removeprefix("."), inner, name


def unsaved_state(module: nn.Module) -> list[str]:
    """Return a description of each piece of state that torch would save with a module, and a checkpoint of a
    run does not: it is neither a parameter nor a `ShardedBuffer`.
    """
    buffers = [
        f"the torch buffer {path}"
        for path, inner, name in plain_buffers(module)
        if name not in inner._non_persistent_buffers_set
    ]
    states = [
        f"the state of {path or type(inner).__name__} (get_extra_state)"
        for path, inner in module.named_modules()
        if type(inner).get_extra_state is not nn.Module.get_extra_state
    ]
    return buffers + states


def buffers_of(modules: Iterable[nn.Module]) -> dict[str, ShardedBuffer]:
    """The buffers of a rank's stages, by name."""
    return {
        name: own
        for module in modules
        for name, own in module.named_modules()
        if isinstance(own, ShardedBuffer)
    }


@torch.no_grad()
def update_buffers(buffers: Mapping[str, ShardedBuffer], mesh: Topology, skip: Tensor | float = 0.0) -> None:
    """Reduces what this step counted, and updates the buffers unless `skip`, a scalar on
    the device, is not 0; collective.
    """
    alike: dict[tuple[GradientSum, str, torch.dtype], list[tuple[ShardedBuffer, Tensor]]] = defaultdict(list)
    for buffer in buffers.values():
        counts = buffer.take()
        alike[mesh.gradient_sum(buffer.shard), buffer.reduction, counts.dtype].append((buffer, counts))
    for (over, reduction, _), pairs in alike.items():
        total = torch.cat([counts.flatten() for _, counts in pairs])
        for group in (*over.first, over.levels.within, over.levels.between):
            all_reduce(total, group, REDUCTIONS[reduction])
        for (buffer, _), part in zip(
            pairs, total.split([counts.numel() for _, counts in pairs]), strict=True
        ):
            after = buffer.rule(buffer.value, part.view_as(buffer.value))
            buffer.value.copy_(
                torch.where(torch.as_tensor(skip, device=after.device) == 0, after, buffer.value)
            )
