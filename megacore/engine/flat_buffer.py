"""Flat buffers: parameters, gradients and masters end to end in one tensor each, as
engines reduce and update them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

import torch
from torch import Tensor, nn

from megacore.config.engine import EngineConfig, Int8Compression
from megacore.config.optim_groups import ParameterGroup, ParameterGroups
from megacore.distributed.communicator import SOLO, Group
from megacore.distributed.hierarchical_reduce import GradientSum
from megacore.distributed.shard import Shard, TensorSlice, boxes_of_range, hold, new_parameter, shard_of
from megacore.distributed.topology import Topology
from megacore.engine.alignment import ALIGNMENT
from megacore.engine.held_tensors import MasterRange
from megacore.engine.owners import Part
from megacore.model.stage import Stage


@dataclass
class ParameterRange:
    """One parameter in a buffer."""

    name: str
    parameter: nn.Parameter
    start: int
    position: int  # in the order in which backward completes gradients
    # those that use it: its gradient is complete when the last backward of each is done
    chunks: tuple[int, ...]

    @property
    def shard(self) -> Shard:
        return shard_of(self.parameter)

    def view(self, flat: Tensor) -> Tensor:
        """This parameter's part of one of the buffer's flat tensors, in the parameter's shape."""
        return flat[self.start : self.start + self.parameter.numel()].view(self.parameter.shape)


@dataclass
class Bucket:
    """Consecutive parameters of a buffer, reduced and gathered as one tensor."""

    start: int
    stop: int = 0
    slots: list[ParameterRange] = field(default_factory=list)

    @property
    def completes(self) -> int:
        """The position, in backward's order, of the last gradient that completes it."""
        return self.slots[-1].position


@dataclass
class FlatBuffer:
    """Parameters that are treated alike, laid end to end, so that a step is a few operations on long tensors.

    The model's parameters become views of `values` (compute dtype). Gradients accumulate in `gradients` (fp32
    or fp64). The optimizer updates `masters` for the `ranges` that this rank owns: the whole buffer, or with
    a sharded optimizer its part of every bucket. If `values` are exact enough, they are the masters.
    """

    chunk: int  # the first that uses its parameters
    group: ParameterGroup
    decay: bool
    sum: GradientSum  # over which ranks gradients are summed
    owners: Group  # the ranks that divide every bucket; a group of one does not divide it
    unit: int  # elements of which every bucket is a multiple, so that its owners or the wire can divide it
    bucket_bytes: float
    device: torch.device
    slots: list[ParameterRange] = field(default_factory=list)
    buckets: list[Bucket] = field(default_factory=list)
    size: int = 0

    @property
    def divided(self) -> tuple[str, ...]:
        """The axes over which a rank's part of the optimizer's state is its own."""
        return self.sum.tokens if self.owners.size > 1 else ()

    def add(self, name: str, parameter: nn.Parameter, position: int, chunks: tuple[int, ...]) -> None:
        """Lays a parameter behind the others."""
        if not self.buckets or self.buckets[-1].stop:
            self.buckets.append(Bucket(self.size))
        slot = ParameterRange(name, parameter, self.size, position, chunks)
        self.slots.append(slot)
        self.buckets[-1].slots.append(slot)
        self.size += -(-parameter.numel() // ALIGNMENT) * ALIGNMENT
        if (self.size - self.buckets[-1].start) * accumulation_dtype(parameter).itemsize >= self.bucket_bytes:
            self.close()

    def close(self) -> None:
        """Pads the last bucket to a size that can be divided."""
        bucket = self.buckets[-1]
        if bucket.stop:
            return
        self.size = bucket.start + -(-(self.size - bucket.start) // self.unit) * self.unit
        bucket.stop = self.size

    def part(self, bucket: Bucket) -> slice:
        """The part of a bucket that this rank owns."""
        size = (bucket.stop - bucket.start) // self.owners.size
        return slice(bucket.start + self.owners.rank * size, bucket.start + (self.owners.rank + 1) * size)

    def laid_out_at(self, at: Callable[[Shard], Shard]) -> dict[str, tuple[int, int, int]]:
        """The same buffer on another rank; `at` gives a placement there.

        Of each parameter: where its bucket begins, from its own first element on, how many elements of the
        bucket each owner has, and how many it has itself.
        """
        there = replace(self, slots=[], buckets=[], size=0)
        for slot in self.slots:
            there.add(
                slot.name,
                new_parameter(at(slot.shard), slot.parameter.dtype, "meta"),
                slot.position,
                slot.chunks,
            )
        there.close()
        return {
            slot.name: (
                bucket.start - slot.start,
                (bucket.stop - bucket.start) // self.owners.size,
                slot.parameter.numel(),
            )
            for bucket in there.buckets
            for slot in bucket.slots
        }

    def allocate(self) -> None:
        """Moves the parameters into the buffer, where those on `meta` are zeros.

        The gaps between them stay zero.
        """
        first = self.slots[0].parameter
        dtype = accumulation_dtype(first)
        self.values = torch.zeros(self.size, dtype=first.dtype, device=self.device)
        self.gradients = torch.zeros(self.size, dtype=dtype, device=self.device)
        for slot in self.slots:
            if not slot.parameter.is_meta:
                slot.view(self.values).copy_(slot.parameter.detach())
            hold(slot.parameter, slot.view(self.values))
        self.ranges = (
            [slice(0, self.size)] if self.owners.size == 1 else [self.part(bucket) for bucket in self.buckets]
        )
        self.rounds = first.dtype != dtype  # whether the parameters are a rounded copy of the masters
        # Masters are made from the rounded weights, so they are exact, and a resumed run would see the same.
        self.masters = [self.values[r].to(dtype) if self.rounds else self.values[r] for r in self.ranges]

    def row_weights(self, weight: Callable[[Shard], float]) -> Tensor:
        """For each row of `ALIGNMENT` elements, the `weight` of its parameter, fp64; 0 in gaps."""
        rows = torch.zeros(self.size // ALIGNMENT, dtype=torch.float64, device=self.values.device)
        for slot in self.slots:
            first = slot.start // ALIGNMENT
            rows[first : first - (-slot.parameter.numel() // ALIGNMENT)] = weight(slot.shard)
        return rows

    def publish(self) -> None:
        """Rounds the masters into this rank's part of the parameters."""
        if self.rounds:
            for own, master in zip(self.own_values, self.masters, strict=True):
                own.copy_(master)

    @property
    def own_gradients(self) -> list[Tensor]:
        """The gradients of the parameters that this rank updates."""
        return [self.gradients[own] for own in self.ranges]

    @property
    def own_values(self) -> list[Tensor]:
        """The parameters that this rank updates."""
        return [self.values[own] for own in self.ranges]

    def master_ranges(self, row_weights: Sequence[Tensor]) -> list[MasterRange]:
        """The ranges that this rank updates, each with its weights in the norm."""
        copies = self.own_values if self.rounds else [None] * len(self.ranges)
        columns = zip(self.masters, self.own_gradients, row_weights, copies, strict=True)
        return [
            MasterRange(master, gradient, weights, self.group, self.decay, copy)
            for master, gradient, weights, copy in columns
        ]

    def pieces(
        self, tensors: Sequence[Tensor | None]
    ) -> Iterator[tuple[ParameterRange, Tensor, TensorSlice]]:
        """Every parameter's pieces of `tensors`, which have an element for each of `ranges`, or
        are None: (slot, view, position).

        A parameter that this rank owns whole is one piece.
        """
        for own, tensor in zip(self.ranges, tensors, strict=True):
            if tensor is not None:
                yield from pieces_of_range(self.slots, own.start, tensor)


def pieces_of_range(
    slots: Sequence[ParameterRange], start: int, tensor: Tensor
) -> Iterator[tuple[ParameterRange, Tensor, TensorSlice]]:
    """The parameters' pieces of a flat tensor whose first element is number `start` of the
    buffer: (slot, view, position).
    """
    for slot in slots:
        first, last = max(start, slot.start), min(start + tensor.numel(), slot.start + slot.parameter.numel())
        if first < last:
            for at, box in boxes_of_range(slot.shard, first - slot.start, last - slot.start):
                begin = slot.start + at - start
                yield slot, tensor[begin : begin + prod(box.local_shape)].view(box.local_shape), box


class PartsOfBuffers:
    """What each rank of a stage holds of parameters that lie in buffers."""

    def __init__(self, buffers: Sequence[FlatBuffer], mesh: Topology, shards: Mapping[str, Shard]) -> None:
        self.buffers, self.mesh, self.shards = (
            {slot.name: buffer for buffer in buffers for slot in buffer.slots},
            mesh,
            shards,
        )
        # alike for all ranks that divide a buffer
        self._elsewhere: dict[tuple[object, ...], dict[str, tuple[int, int, int]]] = {}

    def __call__(self, name: str, rank: int) -> Part:
        """Of a parameter, on a rank of the world."""
        buffer, mesh = self.buffers[name], self.mesh
        shard = mesh.shard_at(self.shards[name], rank)
        if not buffer.divided:
            return Part(shard, 0, prod(shard.local_shape))
        beside = mesh.axes_beside(shard)
        key = id(buffer), *(along for along in shard.along if along.axis in beside)
        if key not in self._elsewhere:
            self._elsewhere[key] = buffer.laid_out_at(lambda own: mesh.shard_at(own, rank))
        begin, each, end = self._elsewhere[key][name]
        first = begin + mesh.owner_index(rank, buffer.divided) * each
        return Part(shard, min(max(first, 0), end), min(max(first + each, 0), end))


def accumulation_dtype(parameter: Tensor) -> torch.dtype:
    """The dtype of gradients, masters and moments."""
    return torch.float64 if parameter.dtype == torch.float64 else torch.float32


def travelling_unit(engine: EngineConfig) -> int:
    """If ranks add up parts of a bucket each for itself, the elements of which a part
    is a multiple; else 0.
    """
    if isinstance(engine.compression, Int8Compression):
        return engine.compression.block
    return 0 if engine.reduce_dtype == "fp32" else ALIGNMENT


def fill_buffers(
    stages: Sequence[Stage],
    bucket_mib: float,
    groups: ParameterGroups,
    mesh: Topology,
    *,
    sharded: bool = False,
    travelling: int = 0,
) -> list[FlatBuffer]:
    """Sorts the parameters of a rank's stages into buffers, the last parameter
    first, as backward completes them.

    What differs in decay or in the ranks of the sum has a buffer of its own, so that all ranks of a sum lay
    it out alike; so has each parameter that other ranks' stages share too (`GradientSum.last`). `sharded`:
    the ranks of a sum divide the optimizer's state.
    `travelling`: see `travelling_unit`. A parameter that two stages of the rank share belongs to the first of
    them. Frozen ones, which need no gradient, are in none.
    """
    owned: dict[nn.Parameter, tuple[str, tuple[int, ...]]] = {}
    for chunk, stage in enumerate(stages):
        for name, parameter in stage.named_parameters():
            first, chunks = owned.get(parameter, (name, ()))
            if parameter.requires_grad:
                owned[parameter] = first, (*chunks, chunk)
    listed = [(name, parameter, shard_of(parameter), chunks) for parameter, (name, chunks) in owned.items()]
    buffers = lay_out(
        listed, groups, bucket_mib, mesh, stages[0].device, sharded=sharded, travelling=travelling
    )
    for buffer in buffers:
        buffer.allocate()
    return buffers


def lay_out(
    owned: Sequence[tuple[str, nn.Parameter, Shard, tuple[int, ...]]],
    groups: ParameterGroups,
    bucket_mib: float,
    mesh: Topology,
    device: torch.device,
    *,
    sharded: bool = False,
    travelling: int = 0,
) -> list[FlatBuffer]:
    """`fill_buffers` without memory, which is all that a plan needs.

    `owned`: name, parameter, its completed record, and the chunks that use it, in the order of the stages;
    layers that are alike may be one parameter under many names.
    """
    sums: dict[nn.Parameter, GradientSum] = {}
    buffers: dict[tuple[int, ParameterGroup, bool, GradientSum], FlatBuffer] = {}
    for position, (name, parameter, shard, chunks) in enumerate(reversed(owned)):
        if parameter not in sums:
            sums[parameter] = mesh.gradient_sum(shard)
        kind = chunks[0], groups.of(name, shard), shard.decay, sums[parameter]
        if kind not in buffers:
            levels = kind[-1].levels
            owners = levels.owners if sharded and levels.size > 1 else SOLO
            parts = levels.size if owners.size > 1 or travelling or levels.within.size > 1 else 1
            unit = parts * (max(travelling, ALIGNMENT) if levels.size > 1 else ALIGNMENT)
            buffers[kind] = FlatBuffer(*kind, owners, unit, bucket_mib * 2**20, device)
        buffers[kind].add(name, parameter, position, chunks)
    for buffer in buffers.values():
        buffer.close()
    return list(buffers.values())
