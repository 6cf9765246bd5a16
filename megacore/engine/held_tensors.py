"""What a rank keeps of its parameters and of their optimizers' state, and how that stands in a checkpoint."""

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import torch
from torch import Tensor

from megacore.config.optim_groups import ParameterGroup, ParameterGroups
from megacore.distributed.shard import Shard, TensorSlice, logical_name
from megacore.engine.whole_matrices import own_state_shapes

Pieces = Mapping[str, tuple[Tensor, TensorSlice]]  # see `shard.piece_key`


@dataclass(frozen=True)
class MasterRange:
    """What an engine keeps and updates as one tensor: its part of a parameter, or
    a range of a buffer of several.
    """

    master: Tensor  # fp32 or fp64
    gradient: Tensor  # of the same shape
    row_weights: Tensor  # in the norm, see `SumOfSquares`
    group: ParameterGroup
    decay: bool  # whether weight decay applies
    copy: Tensor | None = None  # 16-bit parameters that compute, if they are not the master


class HeldTensors:
    """A rank's ranges and their state, which stay where they are.

    Attributes:
        state: by kind, a tensor of each range's shape; None where its rule has no such state.
        own: by kind and the parameter's name, state of other shapes (`Rule.own_state`), and `Rule.numbers`,
            each one tensor for a group.
        names: of the parameters of each group of which any rank with the same stages has a part.
    """

    def __init__(
        self,
        ranges: Sequence[MasterRange],
        shards: Mapping[str, Shard],
        groups: ParameterGroups,
        pieces: Callable[[str, Sequence[Tensor | None]], Pieces],
        owned: Container[str],
        device: torch.device,
    ) -> None:
        """`shards`: of all parameters of the rank's stages, by name.

        `pieces`: see `OptimizerStep`. `owned`: names of the parameters whose own state this rank has.
        `device`: computes.
        """
        self.ranges, self.shards, self.pieces = ranges, shards, pieces
        self.names: dict[ParameterGroup, list[str]] = {group: [] for group in groups.every}
        for name, shard in shards.items():
            self.names.setdefault(groups.of(name, shard), []).append(name)
        self.state: dict[str, list[Tensor | None]] = {
            kind: [torch.zeros_like(r.master) if kind in r.group.elementwise else None for r in ranges]
            for kind in dict.fromkeys(
                chain.from_iterable(group.elementwise for group, names in self.names.items() if names)
            )
        }
        self.own: dict[str, dict[str, Tensor]] = {}
        self.numbers = {kind for group in self.names for kind in group.rule.numbers}
        for group, names in self.names.items():
            for kind in group.rule.numbers if names else ():
                self.own.setdefault(kind, {}).update(dict.fromkeys(names, ranges[0].master.new_zeros(())))
            for name in names:
                for kind, shape in (
                    own_state_shapes(group.rule, shards[name]).items() if name in owned else ()
                ):
                    self.own.setdefault(kind, {})[name] = torch.zeros(
                        shape, dtype=ranges[0].master.dtype, device=device
                    )

    def memory(self) -> Iterator[Tensor]:
        """All masters and state, gaps included."""
        yield from (r.master for r in self.ranges)
        yield from (tensor for tensors in self.state.values() for tensor in tensors if tensor is not None)
        yield from (tensor for by_name in self.own.values() for tensor in by_name.values())

    def tensors(self) -> dict[str, tuple[Tensor, TensorSlice]]:
        """All that a checkpoint holds of them, see `Engine.tensors`."""
        held: Mapping[str, Sequence[Tensor | None]] = {"model": [r.master for r in self.ranges], **self.state}
        found = {
            key: piece
            for kind, tensors in held.items()
            for key, piece in self.pieces(f"{kind}/", tensors).items()
        }
        for kind, by_name in self.own.items():
            for name, tensor in by_name.items():
                shape, along = tuple(tensor.shape), self.shards[name].along
                # Every rank has its group's numbers; of own state, an owner on each of the stages that share
                # the parameter.
                copied = [a for a in along if a.count > 1 and (kind in self.numbers or a.axis == name)]
                where = tuple(replace(a, dim=None, partial=False) for a in copied)
                found[f"{kind}/{name}"] = (tensor, TensorSlice(shape, (0,) * len(shape), shape, where))
        return found

    def of(self, kind: str, group: ParameterGroup) -> dict[str, list[tuple[Tensor, TensorSlice]]]:
        """By logical name, this rank's pieces of the parameters of a group: "model",
        "gradient", "copy", or a kind of state.
        """
        columns = {"model": "master", "gradient": "gradient", "copy": "copy"}
        every = [getattr(r, columns[kind]) for r in self.ranges] if kind in columns else self.state[kind]
        own = [tensor if r.group is group else None for r, tensor in zip(self.ranges, every, strict=True)]
        found: dict[str, list[tuple[Tensor, TensorSlice]]] = {}
        for key, piece in self.pieces("", own).items():
            found.setdefault(logical_name(key), []).append(piece)
        return found
