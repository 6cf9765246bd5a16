"""Sums buckets of gradients as matrices of low rank (PowerSGD; Vogels, Karimireddy and
Jaggi 2019, arXiv 1905.13727).

The sum M of all ranks' matrices ``[n, m]``, n ≤ m, is replaced by P Qᵀ with r columns each, which are what
travels:

    P = M Q, of the Q of the step before, summed over ranks; made orthonormal on each of them
    Q = Mᵀ P, summed over ranks

Both are linear in M, so ranks compute them from their own gradients. With r = n, P Pᵀ is the identity and the
sum is M.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megacore.config.engine import LowRankCompression
from megacore.distributed.collectives import (
    all_gather_inside,
    all_reduce_start,
    own_part,
    reduce_scatter_inside,
)
from megacore.distributed.communicator import Work
from megacore.distributed.hierarchical_reduce import Levels
from megacore.distributed.shard import LogicalMatrix, TensorSlice
from megacore.engine.compression import BASIS, CompressedBucket, Residual
from megacore.engine.flat_buffer import Bucket, FlatBuffer, ParameterRange
from megacore.rng import normal_runs


@dataclass(frozen=True)
class Factors:
    """One kind of matrices of a parameter, and where their factors lie in what travels."""

    slot: ParameterRange
    matrix: LogicalMatrix
    batch: int
    short: int  # the shorter side, n
    long: int
    flipped: bool  # whether that is the columns
    rank: int
    p: int  # where P ``[batch, n, rank]`` begins in the first message
    q: int  # where Q ``[batch, m, rank]`` begins in the second

    def p_of(self, message: Tensor) -> Tensor:
        """P."""
        return message[self.p : self.p + self.batch * self.short * self.rank].view(
            self.batch, self.short, self.rank
        )

    def q_of(self, message: Tensor) -> Tensor:
        """Q."""
        return message[self.q : self.q + self.batch * self.long * self.rank].view(
            self.batch, self.long, self.rank
        )

    def of(self, weight: Tensor) -> Tensor:
        """The matrices ``[batch, n, m]`` in a tensor of the parameter's shape."""
        maps = self.matrix.view(weight)
        return maps.mT if self.flipped else maps

    def write(self, product: Tensor, weight: Tensor) -> None:
        """Writes ``[batch, n, m]`` there."""
        part = self.matrix.part(weight)
        part.copy_((product.mT if self.flipped else product).reshape(part.shape))


class Messages:
    """What the two sums of a bucket carry: factors, and behind them in the first the
    parameters that are not compressed.
    """

    def __init__(self, slots: list[ParameterRange], rank: int | None, parts: int) -> None:
        """`rank`: None for that of the matrices. `parts`: into which the messages can be divided."""
        self.factors: list[Factors] = []
        self.plain: list[tuple[ParameterRange, int]] = []
        first = second = 0
        for slot in slots:
            maps = [(matrix, *matrix.sizes(slot.shard.local_shape)) for matrix in slot.shard.logical_matrices]
            ranks = [min(rank or min(n, m), n, m) for _, _, n, m in maps]
            numbers = sum(batch * r * (n + m) for (_, batch, n, m), r in zip(maps, ranks, strict=True))
            covered = sum(batch * n * m for _, batch, n, m in maps) == slot.parameter.numel()
            if not covered or not maps or (rank is not None and numbers >= slot.parameter.numel()):
                self.plain.append((slot, first))
                first += slot.parameter.numel()
                continue
            for (matrix, batch, n, m), r in zip(maps, ranks, strict=True):
                short, long = min(n, m), max(n, m)
                self.factors.append(Factors(slot, matrix, batch, short, long, n > m, r, first, second))
                first, second = first + batch * short * r, second + batch * long * r
        self.sizes = tuple(-(-size // parts) * parts for size in (first, second))


class LowRankBucket(CompressedBucket):
    """Sums a bucket by the factors of its matrices.

    What P Qᵀ lacks of a rank's own matrices, with its own Q, is its residual.

    A tensor rank's piece of a matrix is a matrix by itself. Parameters that are no matrices, or would not
    become smaller, travel whole.
    """

    def __init__(self, settings: LowRankCompression, buffer: FlatBuffer, bucket: Bucket) -> None:
        super().__init__(buffer, bucket)
        messages = Messages(bucket.slots, settings.rank, self.levels.within.size)
        self.factors, self.plain = messages.factors, messages.plain
        self.first, self.second = (self.gradients.new_zeros(size) for size in messages.sizes)
        self.residual = Residual.of(self.gradients, self.levels.owners.rank)
        self.residuals = [self.residual]
        # every Q of the step before, the same on all ranks of the sum
        self.basis = torch.zeros_like(self.second)
        for factors in self.factors:
            q = factors.q_of(self.basis)
            for start, run in normal_runs(
                (BASIS, factors.slot.name, factors.matrix.name), q.numel(), 1.0, q.numel()
            ):
                q.view(-1)[start : start + run.numel()] = run.to(q)

    @property
    def count(self) -> int:
        return self.levels.size

    def operations(self) -> list[Callable[[], Work]]:
        return [
            *behind(self._project, self.first, self.levels),
            *behind(self._factor, self.second, self.levels),
        ]

    def updates(self) -> Iterator[tuple[Tensor, Tensor]]:
        yield from super().updates()
        yield self.basis, self.second

    def tensors(self, found: dict[str, tuple[Tensor, TensorSlice]]) -> None:
        super().tensors(found)
        for slot in {id(factors.slot): factors.slot for factors in self.factors}.values():
            own = [factors for factors in self.factors if factors.slot is slot]
            held = self.basis[own[0].q : own[-1].q + own[-1].batch * own[-1].long * own[-1].rank]
            apart = [
                a for a in slot.shard.along if a.count > 1 and (a.dim is not None or a.axis == slot.name)
            ]
            place, shape = ", ".join(f"{a.axis} {a.index} of {a.count}" for a in apart), (held.numel(),)
            found[f"{BASIS}{slot.name} {place}".rstrip()] = (
                held,
                TensorSlice(shape, (0,), shape, slot.shard.copied_along(but=(slot.name,))),
            )

    def _in(self, flat: Tensor, slot: ParameterRange) -> Tensor:
        """A parameter's part of a tensor of the bucket's size, in its shape."""
        start = slot.start - self.bucket.start
        return flat[start : start + slot.parameter.numel()].view(slot.parameter.shape)

    def _project(self) -> None:
        sent = torch.addcmul(self.gradients, self.residual.kept, self.loss_scale, out=self.residual.coming)
        for factors in self.factors:
            torch.bmm(
                factors.of(self._in(sent, factors.slot)),
                factors.q_of(self.basis),
                out=factors.p_of(self.first),
            )
        for slot, start in self.plain:
            self.first[start : start + slot.parameter.numel()].copy_(self._in(sent, slot).view(-1))

    def _factor(self) -> None:
        for factors in self.factors:
            p = factors.p_of(self.first)
            p.copy_(torch.linalg.qr(p)[0])
            sent, q = self._in(self.residual.coming, factors.slot), factors.q_of(self.second)
            maps = factors.of(sent)
            torch.bmm(maps.mT, p, out=q)
            factors.write(torch.baddbmm(maps, p, q.mT, alpha=-1), sent)

    def finish(self) -> None:
        for factors in self.factors:
            product = torch.bmm(factors.p_of(self.first), factors.q_of(self.second).mT)
            factors.write(product, self._in(self.gradients, factors.slot))
        for slot, start in self.plain:
            self._in(self.gradients, slot).view(-1).copy_(self.first[start : start + slot.parameter.numel()])
            self._in(self.residual.coming, slot).zero_()
        self.residual.coming.div_(self.loss_scale)


def behind(prepare: Callable[[], None], x: Tensor, levels: Levels) -> list[Callable[[], Work]]:
    """The operations that sum `x` over all ranks of `levels`, in the first of which `prepare` has made it."""
    if not x.numel():
        return []
    within, between = levels.within, levels.between
    part = own_part(x, within)
    operations: list[Callable[[], Work]] = [lambda: all_reduce_start(part, between)]
    if within.size > 1:
        operations = [
            lambda: reduce_scatter_inside(x, within),
            *operations,
            lambda: all_gather_inside(x, within),
        ]
    first = operations[0]

    def begin() -> Work:
        prepare()
        return first()

    return [begin, *operations[1:]]
