"""Bucketed gradient accumulation and reduction, overlapped with the last microbatch's backward."""

from dataclasses import dataclass

import torch
from torch import Tensor

from megacore.comm import Work, all_reduce, all_reduce_start
from megacore.engine.optimizer import FlatBuffer, Slot
from megacore.mesh import Group


@dataclass
class Bucket:
    """Consecutive parameters of a buffer whose gradients are reduced as one tensor."""

    gradients: Tensor
    partial: bool
    members: int = 0
    completes: int = 0  # when backward reaches its last member
    ready: int = 0


class GradientReducer:
    """Accumulates each parameter's gradient in fp32, and sums buckets over the data ranks as they are completed.

    Buckets start in one fixed order on every rank (collectives must match), that in which backward completes them:
    one that is completed late must not hold up the others. Buckets of partial gradients need the tensor ranks first and go last.
    """

    def __init__(self, buffers: list[FlatBuffer], dp: Group, tp: Group, bucket_mib: float) -> None:
        self.buffers, self.dp, self.tp = buffers, dp, tp
        self.buckets: list[Bucket] = []
        self.armed, self.next = False, 0
        self.work: list[Work] = []
        for buffer in buffers:
            limit = int(bucket_mib * 2**20 / buffer.gradients.element_size())
            first = 0
            for i, slot in enumerate(buffer.slots):
                stop = buffer.slots[i + 1].start if i + 1 < len(buffer.slots) else buffer.size
                if first == slot.start:
                    self.buckets.append(Bucket(buffer.gradients[first:stop], buffer.partial))
                bucket = self.buckets[-1]
                bucket.gradients = buffer.gradients[first:stop]
                bucket.members, bucket.completes = bucket.members + 1, slot.position
                self._watch(buffer, slot, bucket)
                if stop - first >= limit:
                    first = stop
        self.buckets.sort(key=lambda bucket: (bucket.partial, bucket.completes))

    def _watch(self, buffer: FlatBuffer, slot: Slot, bucket: Bucket) -> None:
        target = slot.view(buffer.gradients)
        direct = slot.parameter.dtype == target.dtype
        if direct:
            slot.parameter.grad = target  # autograd adds to it in place

        def accumulated(parameter: Tensor) -> None:
            if not direct:
                assert parameter.grad is not None
                target.add_(parameter.grad)
                parameter.grad = None
            if self.armed:
                bucket.ready += 1
                self._start_ready()

        slot.parameter.register_post_accumulate_grad_hook(accumulated)

    def arm(self) -> None:
        """From here on a completed gradient is final: buckets may start."""
        self.armed = True

    def _start_ready(self) -> None:
        while self.next < len(self.buckets):
            bucket = self.buckets[self.next]
            if bucket.partial or bucket.ready < bucket.members:
                return
            self.work.append(all_reduce_start(bucket.gradients, self.dp))
            self.next += 1

    def finish(self) -> None:
        """Starts what is left and waits until every gradient is the global sum."""
        for bucket in self.buckets[self.next :]:
            if bucket.partial:
                all_reduce(bucket.gradients, self.tp)
            self.work.append(all_reduce_start(bucket.gradients, self.dp))
        for work in self.work:
            work.wait()
        self.work.clear()
        self.armed, self.next = False, 0
        for bucket in self.buckets:
            bucket.ready = 0

    @torch.no_grad()
    def clear(self) -> None:
        """Zeroes the gradients."""
        for buffer in self.buffers:
            buffer.gradients.zero_()
