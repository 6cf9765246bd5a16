"""Applies the rules of `megacore/optimizers` to the tensors that a rank holds.

A rule with a fused form gets long flat tensors. Any other is asked for the direction of one tensor after the
other: of each range that the rank holds, or with `Rule.whole` of each logical tensor, which is then put
together from the pieces of all ranks.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from math import prod

import torch
from torch import Tensor

from megacore.config.optim_groups import ParameterGroup
from megacore.distributed.collectives import Done, broadcast_start, exchange_start, joined
from megacore.distributed.communicator import Work
from megacore.distributed.shard import TensorSlice
from megacore.engine.held_tensors import HeldTensors
from megacore.engine.owners import Dealing, Task
from megacore.engine.whole_matrices import matrices_of, own_views
from megacore.kernels.dispatch import Implementation
from megacore.optimizers.rule import ParameterShard, ParameterShards, Update

Pieces = Mapping[str, Sequence[tuple[Tensor, TensorSlice]]]  # of parameters, by name
STAGES = 4  # of a round of `WholeUpdate`


class GroupedUpdate:
    """The updates of all groups of parameters that a rank holds, each with the factor
    on the rate that its group has.
    """

    def __init__(
        self,
        held: HeldTensors,
        dealings: Mapping[ParameterGroup, Sequence[Dealing]],
        device: torch.device,
        implementation: Implementation,
    ) -> None:
        """`dealings`: see `owners.dealings_of`. `device` computes what needs whole matrices."""
        self.parts: list[tuple[float, Update]] = []
        for group, names in held.names.items():
            if group.rule.whole and names:
                self.parts += [
                    (group.factor, WholeUpdate(group, held, dealing, device)) for dealing in dealings[group]
                ]
            elif tensors := shards_of(held, group):
                numbers = {kind: held.own[kind][names[0]] for kind in group.rule.numbers}
                self.parts.append(
                    (
                        group.factor,
                        group.rule.fused(tensors, implementation) or RangeUpdate(group, tensors, numbers),
                    )
                )

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
        given = [
            (part, lr * factor, scale.to(part.updates.device), skip.to(part.updates.device))
            for factor, part in self.parts
        ]
        for part, rate, by, skips in given:  # while the rest is updated, the first matrices travel
            if isinstance(part, WholeUpdate):
                part.begin(rate, by, skips)
        for part, rate, by, skips in given:
            part.step(rate, by, skips)


def shards_of(held: HeldTensors, group: ParameterGroup) -> ParameterShards | None:
    """The ranges of a group, for its rule; None if this rank has none."""
    own = [i for i, r in enumerate(held.ranges) if r.group is group]
    if not own:
        return None
    ranges = [held.ranges[i] for i in own]
    return ParameterShards(
        [r.master for r in ranges],
        [r.gradient for r in ranges],
        {
            kind: [state for i in own if (state := held.state[kind][i]) is not None]
            for kind in group.rule.kinds
        },
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
        for i, (master, gradient, decay) in enumerate(
            zip(tensors.masters, tensors.gradients, tensors.decays, strict=True)
        ):
            state = {kind: held[i] for kind, held in tensors.states.items()}
            gradient, updates = (
                gradient.to(master.dtype) / scale.to(master.dtype),
                self.updates.to(master.dtype),
            )
            given = ParameterShard(
                gradient, state | self.numbers, updates, partial(master.view_as, master), lr, decay
            )
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
    """Updates parameters by a rule that needs their matrices whole.

    Each rank does the elementwise part on what it holds. The result goes to each parameter's owner, which
    computes the direction once, and returns to every holder its part of it: first to those that hold the
    owner's copy together, and from these to other copies. While an owner computes, parameters of the next
    round come, and directions of the one before go.
    """

    def __init__(
        self, group: ParameterGroup, held: HeldTensors, dealing: Dealing, device: torch.device
    ) -> None:
        self.group, self.held, self.dealing = group, held, dealing
        self.device, self.empty = device, torch.empty(0, dtype=held.ranges[0].master.dtype, device=device)
        self.updates = torch.zeros((), dtype=torch.float32, device=device)
        self.pieces = {kind: held.of(kind, group) for kind in ("model", "copy", *group.rule.kinds)}
        self.rounds: list[Iterator[None]] = []

    @torch.no_grad()
    def begin(self, lr: float, scale: Tensor, skip: Tensor) -> None:
        """Begins the first round of a step."""
        gradients, taken = self.held.of("gradient", self.group), skip == 0
        self.updates += taken
        self.rounds = [self._round(tasks, gradients, lr, scale, taken) for tasks in self.dealing.rounds]
        next(self.rounds[0])

    @torch.no_grad()
    def step(self, lr: float, scale: Tensor, skip: Tensor) -> None:
        """See `Update`.

        Collective over the parameters' holders; `begin` comes before it, with the same arguments.
        """
        for moment in range(1, len(self.rounds) + STAGES - 1):
            for tasks in self.rounds[max(0, moment - STAGES + 1) : moment + 1][::-1]:
                next(tasks, None)

    def _round(
        self, tasks: list[Task], gradients: Pieces, lr: float, scale: Tensor, taken: Tensor
    ) -> Iterator[None]:
        """The updates of some parameters, in `STAGES`.

        At the end of each but the last something is under way.
        """
        dealing, within, places = self.dealing, self.dealing.within, range(self.dealing.within.size)
        here, owned = dealing.here(tasks), dealing.owned(tasks)
        prepared = {
            task.name: self._prepared(task.name, gradients.get(task.name, []), scale, taken) for task in tasks
        }
        to: list[list[Tensor]] = [[] for _ in places]
        for task in here:
            if dealing.sends(task, within.rank):
                to[task.owner] += prepared[task.name]
        sizes = [
            sum(part.size for task in owned for place, part in dealing.senders(task) if place == source)
            for source in places
        ]
        parts, work = exchange_start(to, sizes, within, self.empty) if here else ([], Done())
        del prepared, to  # four rounds are under way at once
        yield

        work.wait()
        directions = self._directions(owned, parts, taken)
        to = [
            [
                directions[task.name][box.slices]
                for task in owned
                for box in dealing.part(task.name, place).boxes
            ]
            for place in places
        ]
        own = {task.name: dealing.part(task.name, within.rank).size for task in tasks}
        sizes = [sum(own[task.name] for task in here if task.owner == place) for place in places]
        parts, work = exchange_start(to, sizes, within, self.empty) if here else ([], Done())
        del directions, to
        yield

        work.wait()
        between, spread = dealing.between, dict[int, tuple[Tensor, Work]]()
        in_turn = sorted(tasks, key=lambda task: (task.copy, task.owner))  # of one owner as they were sent
        for copy in dict.fromkeys(task.copy for task in in_turn):
            numbers = sum(own[task.name] for task in tasks if task.copy == copy)
            flat = joined(parts, self.empty) if copy == between.rank else self.empty.new_empty(numbers)
            spread[copy] = flat, broadcast_start(flat, between, copy)
        parts = []
        yield

        for copy, (flat, work) in spread.items():
            work.wait()
            names = [task.name for task in in_turn if task.copy == copy]
            for name, direction in zip(names, flat.split([own[name] for name in names]), strict=True):
                self._apply(name, direction, lr, taken)

    def _prepared(
        self, name: str, gradients: Sequence[tuple[Tensor, TensorSlice]], scale: Tensor, taken: Tensor
    ) -> list[Tensor]:
        """The elementwise part of a parameter's update, on what this rank holds of it."""
        rule, found = self.group.rule, []
        for i, (gradient, _) in enumerate(gradients):
            master, state = (
                self.pieces["model"][name][i][0],
                {kind: self.pieces[kind][name][i][0] for kind in rule.kinds},
            )
            gradient, updates = gradient.to(master.dtype) / scale.to(master), self.updates.to(master)
            prepared, after = rule.prepare(
                ParameterShard(gradient, state, updates, partial(master.view_as, master))
            )
            for kind, tensor in state.items():
                tensor.copy_(torch.where(taken.to(tensor.device), after[kind], tensor))
            found.append(prepared.to(self.device))
        return found

    def _directions(self, owned: list[Task], parts: list[Tensor], taken: Tensor) -> dict[str, Tensor]:
        """The directions of the parameters that this rank owns, which came in flat parts from each rank."""
        found, at = {}, [0] * len(parts)
        for task in owned:
            whole, senders = (
                self.empty.new_empty(self.held.shards[task.name].global_shape),
                [*self.dealing.senders(task)],
            )
            assert sum(part.size for _, part in senders) == whole.numel(), f"a piece of {task.name}"
            for place, part in senders:
                for box in part.boxes:
                    end = at[place] + prod(box.local_shape)
                    whole[box.slices] = parts[place][at[place] : end].view(box.local_shape)
                    at[place] = end
            found[task.name] = self._direction(task.name, whole, taken)
        return found

    def _direction(self, name: str, prepared: Tensor, taken: Tensor) -> Tensor:
        """The update of a whole parameter: of each of its matrices."""
        rule, shard = self.group.rule, self.held.shards[name]
        direction = torch.zeros_like(prepared)
        own = {kind: tensors[name] for kind, tensors in self.held.own.items() if name in tensors}
        for matrix, state in zip(matrices_of(rule, shard), own_views(rule, shard, own), strict=True):
            given = ParameterShard(
                matrix.view(prepared), state, self.updates.to(prepared.dtype), weights_elsewhere
            )
            maps, after = rule.direction(given)
            part = matrix.part(direction)
            part.copy_(maps.reshape(part.shape))
            for kind, tensor in state.items():
                tensor.copy_(torch.where(taken, after[kind], tensor))
        return direction

    def _apply(self, name: str, direction: Tensor, lr: float, taken: Tensor) -> None:
        """Moves what this rank holds of a parameter; `direction`, flat, has a
        number for each of its elements.
        """
        pieces, at = self.pieces["model"].get(name, []), 0
        decay = self.group.weight_decay if self.held.shards[name].decay else 0.0
        for piece, _ in pieces:
            before, own = piece.to(self.device), direction[at : at + piece.numel()].view(piece.shape)
            piece.copy_(torch.where(taken, before * (1.0 - lr * decay) - lr * own, before))
            at += piece.numel()
        for (copy, _), (piece, _) in zip(self.pieces["copy"].get(name, []), pieces, strict=False):
            copy.copy_(piece)


def weights_elsewhere() -> Tensor:
    """The weights, for a rule's `direction` on whole matrices."""
    raise AssertionError("weights are on the ranks that hold them: read them in `prepare`")
