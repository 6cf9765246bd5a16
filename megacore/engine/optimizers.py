"""Applies the rules of `megacore/optimizers` to the tensors that a rank holds.

A rule with a fused form gets long flat tensors. Any other is asked for the direction of one tensor after the other: of each range that
the rank holds, or with `Rule.whole` of each logical tensor, which is then put together from the pieces of all ranks.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from megacore.config.optim_groups import ParameterGroup
from megacore.distributed.collectives import all_reduce
from megacore.distributed.communicator import Group
from megacore.distributed.shard import Shard, TensorSlice
from megacore.engine.held_tensors import HeldTensors
from megacore.engine.whole_matrices import matrices_of, own_views
from megacore.kernels.dispatch import Implementation
from megacore.optimizers.rule import ParameterShard, ParameterShards, Update

Pieces = Sequence[tuple[Tensor, TensorSlice]]


class GroupedUpdate:
    """The updates of all groups of parameters that a rank holds, each with the factor on the rate that its group has."""

    def __init__(
        self, held: HeldTensors, divided_among: Callable[[Shard], list[Group]], device: torch.device, implementation: Implementation
    ) -> None:
        """`divided_among`: the groups of which each rank holds another part of a parameter. `device` computes what needs whole tensors."""
        self.parts: list[tuple[float, Update]] = []
        for group, names in held.names.items():
            if group.rule.whole and names:
                self.parts.append((group.factor, WholeUpdate(group, held, divided_among, device)))
            elif tensors := shards_of(held, group):
                numbers = {kind: held.own[kind][names[0]] for kind in group.rule.numbers}
                self.parts.append((group.factor, group.rule.fused(tensors, implementation) or RangeUpdate(group, tensors, numbers)))

    @property
    def updates(self) -> Tensor:
        """How many steps were taken, see `Update`. All groups take or skip a step together."""
        return self.parts[0][1].updates

    def set_updates(self, count: float) -> None:
        """Sets `updates`."""
        for _, part in self.parts:
            part.updates.fill_(count)

    def step(self, lr: float, scale: Tensor, skip: Tensor) -> None:
        """See `Update`; `lr` is that of `optim`."""
        for factor, part in self.parts:
            part.step(lr * factor, scale.to(part.updates.device), skip.to(part.updates.device))


def shards_of(held: HeldTensors, group: ParameterGroup) -> ParameterShards | None:
    """The ranges of a group, for its rule; None if this rank has none."""
    own = [i for i, r in enumerate(held.ranges) if r.group is group]
    if not own:
        return None
    ranges = [held.ranges[i] for i in own]
    return ParameterShards(
        [r.master for r in ranges],
        [r.gradient for r in ranges],
        {kind: [state for i in own if (state := held.state[kind][i]) is not None] for kind in group.rule.kinds},
        [group.weight_decay if r.decay else 0.0 for r in ranges],
        None if ranges[0].copy is None else [r.copy for r in ranges if r.copy is not None],
    )


class RangeUpdate(Update):
    """Updates ranges of elements by a rule without a fused form, one after the other."""

    def __init__(self, group: ParameterGroup, tensors: ParameterShards, numbers: dict[str, Tensor]) -> None:
        """`numbers`: see `Rule.numbers`."""
        self.rule, self.tensors, self.numbers = group.rule, tensors, numbers
        self.updates = torch.zeros((), dtype=torch.float32, device=tensors.masters[0].device)

    @torch.no_grad()
    def step(self, lr: float, scale: Tensor, skip: Tensor) -> None:
        """See `Update`."""
        tensors, taken = self.tensors, skip == 0
        self.updates += taken
        for i, (master, gradient, decay) in enumerate(zip(tensors.masters, tensors.gradients, tensors.decays, strict=True)):
            state = {kind: held[i] for kind, held in tensors.states.items()}
            gradient, updates = gradient.to(master.dtype) / scale.to(master.dtype), self.updates.to(master.dtype)
            given = ParameterShard(gradient, state | self.numbers, updates, partial(master.view_as, master), lr, decay)
            direction, after = self.rule.direction(given)
            # A skipped step may have infinite gradients, so `where` selects and nothing is multiplied.
            for kind, held in state.items():
                held.copy_(torch.where(taken, after[kind], held))
            master.copy_(torch.where(taken, master * (1.0 - lr * decay) - lr * direction, master))
            if tensors.copies is not None:
                tensors.copies[i].copy_(master)
        for kind, number in self.numbers.items():  # every range has given the same
            number.copy_(torch.where(taken, after[kind], number))


class WholeUpdate(Update):
    """Updates logical tensors by a rule that needs them whole. Each rank computes the update of all of it, and keeps its own pieces."""

    def __init__(
        self, group: ParameterGroup, held: HeldTensors, divided_among: Callable[[Shard], list[Group]], device: torch.device
    ) -> None:
        self.group, self.held, self.divided_among = group, held, divided_among
        self.dtype, self.device = held.ranges[0].master.dtype, device
        self.updates = torch.zeros((), dtype=torch.float32, device=device)

    @torch.no_grad()
    def step(self, lr: float, scale: Tensor, skip: Tensor) -> None:
        """See `Update`. Collective over the ranks that hold parts of the same parameters, of which each takes them in one order."""
        held, taken = self.held, skip == 0
        self.updates += taken
        pieces = {kind: held.of(kind, self.group) for kind in ("model", "gradient", "copy", *self.group.rule.kinds)}
        for name in held.names[self.group]:
            shard, own = held.shards[name], {kind: found.get(name, []) for kind, found in pieces.items()}
            direction = self._direction(name, self._whole(self._prepared(own, scale, taken), shard), taken)
            decay = self.group.weight_decay if shard.decay else 0.0
            for piece, box in own["model"]:
                before = piece.to(self.device)
                piece.copy_(torch.where(taken, before * (1.0 - lr * decay) - lr * direction[box.slices], before))
            for (copy, _), (piece, _) in zip(own["copy"], own["model"] if own["copy"] else [], strict=True):
                copy.copy_(piece)

    def _prepared(self, own: Mapping[str, Pieces], scale: Tensor, taken: Tensor) -> Pieces:
        """The elementwise part of a parameter's update, on what this rank holds of it."""
        rule, found = self.group.rule, []
        for i, (gradient, box) in enumerate(own["gradient"]):
            master, state = own["model"][i][0], {kind: own[kind][i][0] for kind in rule.kinds}
            gradient, updates = gradient.to(self.dtype) / scale.to(gradient), self.updates.to(gradient)
            prepared, after = rule.prepare(ParameterShard(gradient, state, updates, partial(master.view_as, master)))
            for kind, tensor in state.items():
                tensor.copy_(torch.where(taken.to(tensor.device), after[kind], tensor))
            found.append((prepared, box))
        return found

    def _direction(self, name: str, prepared: Tensor, taken: Tensor) -> Tensor:
        """The update of a whole parameter: of each of its matrices."""
        rule, shard = self.group.rule, self.held.shards[name]
        assert prepared.shape == shard.global_shape, f"a piece of {name}"
        direction = torch.zeros_like(prepared)
        own = {kind: tensors[name] for kind, tensors in self.held.own.items() if name in tensors}
        for matrix, state in zip(matrices_of(rule, shard), own_views(rule, shard, own), strict=True):
            given = ParameterShard(matrix.view(prepared), state, self.updates.to(self.dtype), weights_elsewhere)
            maps, after = rule.direction(given)
            part = matrix.part(direction)
            part.copy_(maps.reshape(part.shape))
            for kind, tensor in state.items():
                tensor.copy_(torch.where(taken, after[kind], tensor))
        return direction

    def _whole(self, pieces: Pieces, shard: Shard) -> Tensor:
        """A logical tensor. Of the ranks among which it is divided, one holds each element, so a sum puts it together exactly."""
        groups = self.divided_among(shard)
        if not groups:
            ((tensor, _),) = pieces
            return tensor.to(self.device)
        found = torch.zeros(shard.global_shape, dtype=self.dtype, device=self.device)
        for tensor, box in pieces:
            found[box.slices] = tensor.to(self.device)
        for group in groups:
            all_reduce(found, group)
        return found


def weights_elsewhere() -> Tensor:
    """The weights, for a rule's `direction` on whole matrices."""
    raise AssertionError("weights are on the ranks that hold them: read them in `prepare`")
