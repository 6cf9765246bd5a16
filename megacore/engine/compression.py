"""Sums buckets of gradients that travel compressed: in 8 bits, or as matrices of low rank (`low_rank.py`).

What compression loses of a rank's gradient is not lost: it is the rank's *residual*, and is added to its
gradient in the next step (error feedback; Seide et al. 2014, Karimireddy et al. 2019). A skipped step leaves
the residual as it was. All ranks get the same bits.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megacore.config.engine import Compression, Int8Compression
from megacore.distributed.collectives import all_gather_inside, own_part, reduce_scatter_inside
from megacore.distributed.communicator import Staged, Work, side_stream
from megacore.distributed.shard import TensorSlice, piece_key
from megacore.engine.flat_buffer import Bucket, FlatBuffer, pieces_of_range

RESIDUAL = "residual/"  # the prefix of residuals' names in a checkpoint
BASIS = "basis/"  # and of what `low_rank.py` starts from
STATE = (RESIDUAL, BASIS)


@dataclass
class Residual:
    """What compression has lost of some of a bucket's elements, without the loss scale."""

    start: int  # the first of them, in the buffer
    # among those that ranks have of the same elements: all of them together are what the sum lacks
    number: int
    kept: Tensor  # before the step
    coming: Tensor  # behind it, if it is not skipped; while the sum is under way, what is to be sent

    @classmethod
    def of(cls, x: Tensor, number: int) -> "Residual":
        """That of a part of a buffer's gradients, which nothing has lost yet."""
        return cls(int(x.storage_offset()), number, torch.zeros_like(x), torch.zeros_like(x))


class CompressedBucket(ABC):
    """A bucket whose sum travels compressed. All memory that lasts is made here."""

    def __init__(self, buffer: FlatBuffer, bucket: Bucket) -> None:
        self.buffer, self.bucket, self.levels = buffer, bucket, buffer.sum.levels
        self.gradients = buffer.gradients[bucket.start : bucket.stop]
        self.loss_scale = torch.ones((), dtype=torch.float64, device=self.gradients.device)
        self.residuals: list[Residual] = []

    @property
    @abstractmethod
    def count(self) -> int:
        """How many residuals of each element the ranks that sum it have (`Residual.number`)."""

    @abstractmethod
    def operations(self) -> list[Callable[[], Work]]:
        """What begins one after the other; see `Staged`."""

    @abstractmethod
    def finish(self) -> None:
        """Makes the sum of what the last operation has brought."""

    def start_sum(self) -> Staged:
        """Begins the sum, as `reduce.start_sum` does."""
        return Staged(self.operations(), self.finish, side_stream(self.gradients.device))

    def updates(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The state, and what it is behind a step that is not skipped."""
        return ((residual.kept, residual.coming) for residual in self.residuals)

    def tensors(self, found: dict[str, tuple[Tensor, TensorSlice]]) -> None:
        """Adds this rank's pieces of the state, see `Engine.tensors`: of each parameter all residuals are one
        tensor ``[count, …]``. Where stages share the parameter, the ranks of each have their own.
        """
        last = self.buffer.sum.last
        holders, holder = (1, 0) if last is None else (last.size, last.rank)
        for residual in self.residuals:
            for slot, view, box in pieces_of_range(self.bucket.slots, residual.start, residual.kept):
                number = holder * self.count + residual.number
                copied = slot.shard.copied_along(but=(*self.buffer.sum.tokens, slot.name))
                shape, offset = (holders * self.count, *box.global_shape), (number, *box.offset)
                placed = replace(
                    box, global_shape=shape, offset=offset, local_shape=(1, *box.local_shape), copied=copied
                )
                found[piece_key(f"{RESIDUAL}{slot.name}", found)] = (view.unsqueeze(0), placed)


class GradientCompression:
    """All buckets of a rank that are summed over several ranks."""

    def __init__(self, settings: Compression, buffers: Sequence[FlatBuffer]) -> None:
        summed = [
            (buffer, bucket) for buffer in buffers if buffer.sum.levels.size > 1 for bucket in buffer.buckets
        ]
        self.buckets = {id(bucket): compressed(settings, buffer, bucket) for buffer, bucket in summed}

    def scaled_by(self, loss_scale: Tensor) -> None:
        """Tells the factor on gradients, a scalar on the device that changes from step to step."""
        for bucket in self.buckets.values():
            bucket.loss_scale = loss_scale

    @torch.no_grad()
    def keep(self, skip: Tensor) -> None:
        """Ends a step: the next one begins with its residuals, or if `skip` is not 0 with those before it."""
        for bucket in self.buckets.values():
            for kept, coming in bucket.updates():
                torch.where(skip > 0, kept, coming, out=kept)

    def tensors(self) -> dict[str, tuple[Tensor, TensorSlice]]:
        """This rank's pieces of the state, see `Engine.tensors`."""
        found: dict[str, tuple[Tensor, TensorSlice]] = {}
        for bucket in self.buckets.values():
            bucket.tensors(found)
        return found


class Blocks:
    """Numbers ``[rows, blocks, block]`` as codes, and the scale of each block, in one tensor of bytes."""

    LARGEST = 127  # of a code

    def __init__(
        self, rows: int, numbers: int, settings: Int8Compression, dtype: torch.dtype, device: torch.device
    ) -> None:
        """`numbers`: of a row. `dtype`: that of the numbers, and of the scales."""
        blocks, code = numbers // settings.block, torch.int8 if settings.rounding == "nearest" else dtype
        codes = numbers * code.itemsize
        self.bytes = torch.zeros(rows, codes + blocks * dtype.itemsize, dtype=torch.int8, device=device)
        self.codes = self.bytes[:, :codes].view(code).unflatten(1, (blocks, settings.block))
        self.scales = self.bytes[:, codes:].view(dtype).unsqueeze(-1)

    def encode(self, x: Tensor, scratch: Tensor, rows: slice) -> None:
        """Takes over the numbers of some rows; both arguments have as many elements,
        and what `scratch` had is lost.

        A number that is not finite makes its block's scale so, and with it every number of the block.
        """
        codes, scales = self.codes[rows], self.scales[rows]
        x, scratch = x.view(codes.shape), scratch.view(codes.shape)
        torch.amax(torch.abs(x, out=scratch), -1, keepdim=True, out=scales)
        scales.div_(self.LARGEST).clamp_min_(torch.finfo(scales.dtype).tiny)
        torch.div(x, scales, out=scratch)
        codes.copy_(scratch if codes.is_floating_point() else scratch.round_())

    def decode(self, out: Tensor, rows: slice) -> None:
        """Writes the numbers of some rows."""
        torch.mul(self.codes[rows], self.scales[rows], out=out.view(self.codes[rows].shape))


class Int8Bucket(CompressedBucket):
    """Sums a bucket whose numbers travel in blocks of 8 bits (`Blocks`), within a host in their own dtype.

    within     reduce-scatter: a rank sums its part of the host's gradients
    between    encodes its part, exchanges parts of it with each host, adds up in the order of hosts what it
               decodes
    between    encodes the sum, gathers it from all hosts, decodes it, its own too (with a sharded optimizer
               it keeps the sum)
    within     all-gather

    What is lost in the second and the third is a residual each. Nearest rounding loses at most 1/254 of the
    largest number of a block.
    """

    def __init__(self, settings: Int8Compression, buffer: FlatBuffer, bucket: Bucket) -> None:
        super().__init__(buffer, bucket)
        within, between = self.levels.within, self.levels.between
        self.whole = buffer.owners.size == 1
        self.part = own_part(self.gradients, within)
        self.own = own_part(self.part, between)
        layout = between.size, self.own.numel(), settings, self.part.dtype, self.part.device
        self.sent, self.received = Blocks(*layout), Blocks(*layout)
        self.of_part, self.of_sum = Residual.of(self.part, between.rank), Residual.of(self.own, between.size)
        self.residuals = [self.of_part, self.of_sum] if self.whole else [self.of_part]
        ends = [bucket.start, *(slot.start + slot.parameter.numel() for slot in bucket.slots)]
        starts = [*(slot.start for slot in bucket.slots), bucket.stop]
        self.gaps = [buffer.gradients[a:b] for a, b in zip(ends, starts, strict=True) if a < b]

    @property
    def count(self) -> int:
        return self.levels.between.size + self.whole

    def operations(self) -> list[Callable[[], Work]]:
        within = self.levels.within
        hosts = [self._exchange, self._gather] if self.whole else [self._exchange]
        if within.size == 1:
            return hosts
        return [
            lambda: reduce_scatter_inside(self.gradients, within),
            *hosts,
            *([self._gather_within] if self.whole else []),
        ]

    def _exchange(self) -> Work:
        communicator = self.levels.between.communicator
        assert communicator is not None
        torch.addcmul(self.part, self.of_part.kept, self.loss_scale, out=self.of_part.coming)
        self._encode(self.of_part, slice(None), self.part)
        return communicator.start_all_to_all(self.sent.bytes, self.received.bytes)

    def _gather(self) -> Work:
        self._add_up()
        self.of_sum.coming.addcmul_(self.of_sum.kept, self.loss_scale)
        rank = self.levels.between.rank
        self._encode(self.of_sum, slice(rank, rank + 1), self.own)
        return all_gather_inside(self.sent.bytes, self.levels.between)

    def _gather_within(self) -> Work:
        self.sent.decode(self.part, slice(None))
        return all_gather_inside(self.gradients, self.levels.within)

    def finish(self) -> None:
        if not self.whole:
            self._add_up()
            self.own.copy_(self.of_sum.coming)
        elif self.levels.within.size == 1:
            self.sent.decode(self.part, slice(None))
        # a block that is not finite fills them, and no gradient is ever written over that
        for gap in self.gaps:
            gap.zero_()

    def _encode(self, residual: Residual, rows: slice, scratch: Tensor) -> None:
        """Encodes what is to be sent, and leaves what that loses."""
        self.sent.encode(residual.coming, scratch, rows)
        self.sent.decode(scratch, rows)
        residual.coming.sub_(scratch).div_(self.loss_scale)

    def _add_up(self) -> None:
        """The sum of what hosts have sent."""
        self.received.decode(self.part, slice(None))
        torch.sum(self.part.view(self.levels.between.size, -1), 0, out=self.of_sum.coming)


def compressed(settings: Compression, buffer: FlatBuffer, bucket: Bucket) -> CompressedBucket:
    """A bucket as its kind of compression sums it."""
    if settings.kind == "int8":
        return Int8Bucket(settings, buffer, bucket)
    from megacore.engine.low_rank import LowRankBucket  # which only such runs load

    return LowRankBucket(settings, buffer, bucket)
