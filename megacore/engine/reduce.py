"""Bucketed gradient accumulation and reduction, overlapped with the last microbatch's backward."""

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from megacore.comm import Work, all_reduce, all_reduce_start, reduce_scatter_inside
from megacore.engine.optimizer import Bucket, FlatBuffer, Slot
from megacore.mesh import Group


class GradientReducer:
    """Accumulates each parameter's gradient in fp32, and sums buckets over the data ranks as they are completed.

    Buckets start in one fixed order on every rank (collectives must match), that in which backward completes them:
    one that is completed late must not hold up the others. Buckets of partial gradients need the tensor ranks first and go last.
    Where the optimizer is shared, a bucket is reduce-scattered: a rank then has the sum of the part that it updates alone.
    """

    def __init__(self, buffers: list[FlatBuffer], dp: Group, tp: Group) -> None:
        self.buffers, self.dp, self.tp = buffers, dp, tp
        self.buckets = [(buffer, bucket) for buffer in buffers for bucket in buffer.buckets]
        self.buckets.sort(key=lambda pair: (pair[0].partial, pair[1].completes))
        self.waiting_for: dict[int, int] = {}  # by bucket's identity: gradients that are not complete
        self.armed, self.next = False, 0
        self.work: list[Work] = []
        self.hooks: list[RemovableHandle] = []
        for buffer, bucket in self.buckets:
            for slot in bucket.slots:
                self._watch(buffer, slot, bucket)
        self._rearm()

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
                self.waiting_for[id(bucket)] -= 1
                self._start_ready()

        self.hooks.append(slot.parameter.register_post_accumulate_grad_hook(accumulated))

    def _rearm(self) -> None:
        self.armed, self.next = False, 0
        self.waiting_for = {id(bucket): len(bucket.slots) for _, bucket in self.buckets}

    def arm(self) -> None:
        """From here on a completed gradient is final: buckets may start."""
        self.armed = True

    def _start_ready(self) -> None:
        while self.next < len(self.buckets):
            buffer, bucket = self.buckets[self.next]
            if buffer.partial or self.waiting_for[id(bucket)]:
                return
            self._start(buffer, bucket)
            self.next += 1

    def _start(self, buffer: FlatBuffer, bucket: Bucket) -> None:
        gradients = buffer.gradients[bucket.start : bucket.stop]
        if buffer.partial:
            all_reduce(gradients, self.tp)
        self.work.append((all_reduce_start if buffer.share.size == 1 else reduce_scatter_inside)(gradients, self.dp))

    def finish(self) -> None:
        """Starts what is left and waits until every gradient is the global sum."""
        for buffer, bucket in self.buckets[self.next :]:
            self._start(buffer, bucket)
        for work in self.work:
            work.wait()
        self.work.clear()
        self._rearm()

    def close(self) -> None:
        """Lets go of the parameters: Python cannot free a circle that goes through their hooks, which PyTorch holds."""
        for hook in self.hooks:
            hook.remove()

    @torch.no_grad()
    def clear(self) -> None:
        """Zeroes the gradients."""
        for buffer in self.buffers:
            buffer.gradients.zero_()
