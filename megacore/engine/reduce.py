"""Bucketed gradient accumulation and reduction, overlapped with the last microbatch's backward."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from megacore.distributed.collectives import (
    all_gather_inside,
    all_reduce,
    all_reduce_start,
    own_part,
    reduce_scatter_inside,
    reduce_scatter_into,
)
from megacore.distributed.communicator import Staged, Work, side_stream
from megacore.distributed.hierarchical_reduce import Levels
from megacore.engine.flat_buffer import Bucket, FlatBuffer, ParameterRange
from megacore.tensor_parallel.gradient import MainGradient, WeightGradQueue

if TYPE_CHECKING:
    from megacore.engine.compression import CompressedBucket


class GradientReducer:
    """Accumulates each parameter's gradient in fp32.

    Sums each bucket over its own ranks (`FlatBuffer.sum`) as soon as it is complete.

    Collectives must match, so buckets start in one order on every rank: the order in which backward completes
    them, because a late bucket must not hold up others. Buckets that are summed over further axes (tensor
    ranks) are summed over these first, and go last. With a sharded optimizer a bucket is reduce-scattered: a
    rank then has only the sum of the part that it updates.
    """

    def __init__(
        self,
        buffers: list[FlatBuffer],
        narrow: torch.dtype | None = None,
        compressed: Mapping[int, "CompressedBucket"] = MappingProxyType({}),
    ) -> None:
        """`narrow`: the dtype in which gradients travel, if not their own (see `start_sum`).

        `compressed`: by identity, the buckets that have a sum of their own kind.
        """
        self.buffers, self.narrow, self.compressed = buffers, narrow, compressed
        self.buckets = [(buffer, bucket) for buffer in buffers for bucket in buffer.buckets]
        self.buckets.sort(key=lambda pair: (bool(pair[0].sum.first), pair[1].completes))
        # by bucket's identity: gradients that are not complete, each once for a chunk that uses it
        self.waiting_for: dict[int, int] = {}
        self.in_last = False  # whether the last backward of a chunk is running
        self.deferral = WeightGradQueue()
        self.places: dict[Tensor, tuple[ParameterRange, Bucket]] = {}  # by the tensor that holds the sum
        self.next = 0
        self.work: list[Work] = []
        self.sums: list[tuple[MainGradient, nn.Parameter]] = []
        self.nodes: list[Node] = []
        self.hooks: list[RemovableHandle] = []
        for buffer, bucket in self.buckets:
            for slot in bucket.slots:
                self._watch(buffer, slot, bucket)
        self._rearm()

    def _watch(self, buffer: FlatBuffer, slot: ParameterRange, bucket: Bucket) -> None:
        parameter = slot.parameter
        main = MainGradient(slot.view(buffer.gradients), self.deferral)
        parameter.main_gradient = main  # type: ignore[attr-defined]
        self.sums.append((main, parameter))
        self.places[main.total] = slot, bucket

        def accumulated(*_: object) -> None:
            main.take(parameter)
            if self.in_last:
                self.complete([main.total])

        # What ends a parameter's part of every graph. It runs once a backward pass, behind all that gives a
        # part of the gradient, also if all of them added theirs to the main gradient and it is given nothing.
        # Autograd itself holds it weakly.
        node = get_gradient_edge(parameter).node
        self.nodes.append(node)
        self.hooks.append(node.register_hook(accumulated))

    def _rearm(self) -> None:
        self.next = 0
        self.waiting_for = {
            id(bucket): sum(len(slot.chunks) for slot in bucket.slots) for _, bucket in self.buckets
        }

    @contextmanager
    def completing(self, last: bool) -> Iterator[None]:
        """A context for a backward pass.

        If it is the `last` of its chunk, every gradient that it adds to is then complete in the chunk.
        """
        self.in_last = last
        yield
        self.in_last = False

    def totals_of(self, chunk: int) -> list[Tensor]:
        """The sums to which a chunk's backward adds."""
        return [total for total, (slot, _) in self.places.items() if chunk in slot.chunks]

    def complete(self, totals: Iterable[Tensor]) -> None:
        """Declares that a chunk adds no more to these sums in this step, and starts the
        buckets that wait for nothing else.
        """
        for total in totals:
            self.waiting_for[id(self.places[total][1])] -= 1
        self._start_ready()

    def _start_ready(self) -> None:
        while self.next < len(self.buckets):
            buffer, bucket = self.buckets[self.next]
            if buffer.sum.first or self.waiting_for[id(bucket)]:
                return
            self._start(buffer, bucket)
            self.next += 1

    def _start(self, buffer: FlatBuffer, bucket: Bucket) -> None:
        gradients = buffer.gradients[bucket.start : bucket.stop]
        for group in buffer.sum.first:
            all_reduce(gradients, group)
        whole, levels = buffer.owners.size == 1, buffer.sum.levels
        compressed = self.compressed.get(id(bucket))
        if compressed is None and levels.within.size == 1 and (self.narrow is None or levels.size == 1):
            self.work.append(
                (all_reduce_start if whole else reduce_scatter_inside)(gradients, levels.between)
            )
            return
        # Buckets start in one order on every rank, so this order of their later operations is the same
        # everywhere too. By now the operation of an earlier bucket, for which the next one waits, has usually
        # ended. Only a CPU's host waits here.
        for work in self.work:
            if isinstance(work, Staged):
                work.advance()
        self.work.append(
            start_sum(gradients, levels, self.narrow, whole=whole)
            if compressed is None
            else compressed.start_sum()
        )

    def finish(self) -> None:
        """Starts the remaining buckets, and waits until every gradient is the global sum."""
        for main, parameter in self.sums:
            main.take(parameter)  # zero for a parameter on which no loss depends
        for buffer, bucket in self.buckets[self.next :]:
            self._start(buffer, bucket)
        staged = [work for work in self.work if isinstance(work, Staged)]
        # in turn, so that one bucket travels while another is added up
        while any(bucket_sum.left for bucket_sum in staged):
            for bucket_sum in staged:
                bucket_sum.advance()
        for work in self.work:
            work.wait()
        self.work.clear()
        self._rearm()

    def close(self) -> None:
        """Removes the hooks from the parameters: Python cannot free a cycle through
        hooks that PyTorch holds.
        """
        for hook in self.hooks:
            hook.remove()
        for _, parameter in self.sums:
            del parameter.main_gradient  # type: ignore[attr-defined]

    def clear(self) -> None:
        """Begins new sums: the next part of each gradient is written over the last sum."""
        for main, _ in self.sums:
            main.empty = True


def start_sum(x: Tensor, levels: Levels, narrow: torch.dtype | None, *, whole: bool) -> Staged:
    """Begins to sum `x` ``[levels.size · n]`` over all ranks of `levels`.

    Afterwards `x` holds the sum, or with `whole` false this rank's ``[n]`` of it
    (`hierarchical_reduce.Levels.owners`); the rest is undefined. All ranks get the same bits.

    within     reduce-scatter: a rank sums its part of the host's gradients
    between    sum of that part over hosts
    within     all-gather, if `whole`

    With `narrow`, a 16-bit dtype, numbers travel between hosts (in one level: between all ranks) rounded to
    it: their parts are exchanged and added up in the dtype of `x`, and if `whole` the sums are rounded and
    gathered. With a unit roundoff u (2^-8 in bf16) each element of the sum of parts p errs by at most
    u·Σ|p|·(2 + u), however many ranks there are. In a sum that is itself in 16 bits, each addition would
    round once more.
    """
    within, between = levels.within, levels.between
    part, arrived = own_part(x, within), x
    operations: list[Callable[[], Work]] = []
    if within.size > 1:
        operations.append(lambda: reduce_scatter_inside(x, within))
    if narrow is None:
        operations.append(lambda: (all_reduce_start if whole else reduce_scatter_inside)(part, between))
    elif between.size > 1:
        arrived = torch.empty_like(x, dtype=narrow)
        rounded = own_part(arrived, within)

        def exchange() -> Work:
            return reduce_scatter_into(rounded.copy_(part), own_part(part, between), between)

        def gather() -> Work:
            own_part(rounded, between).copy_(own_part(part, between))
            return all_gather_inside(rounded, between)

        operations += [exchange, gather] if whole else [exchange]
    if whole and within.size > 1:
        operations.append(lambda: all_gather_inside(arrived, within))
    finish = (lambda: x.copy_(arrived)) if whole and arrived is not x else (lambda: None)
    return Staged(operations, finish, side_stream(x.device))
