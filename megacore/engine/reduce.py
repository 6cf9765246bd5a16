"""Bucketed gradient accumulation and reduction, overlapped with the last microbatch's backward."""

from collections.abc import Collection

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from megacore.distributed.comm import all_reduce, all_reduce_start, reduce_scatter_inside
from megacore.distributed.mesh import Mesh
from megacore.distributed.wire import Work
from megacore.engine.optimizer import Bucket, FlatBuffer, Slot


class GradientReducer:
    """Accumulates each parameter's gradient in fp32, and sums buckets over the ranks that see other tokens as they are completed.

    Buckets start in one fixed order on every rank (collectives must match), that in which backward completes them:
    one that is completed late must not hold up the others. Buckets that are summed over further axes (tensor ranks) need those
    first and go last. Where the optimizer is shared, a bucket is reduce-scattered: a rank then has the sum of the part that it
    updates alone.
    """

    def __init__(self, buffers: list[FlatBuffer], mesh: Mesh) -> None:
        self.buffers, self.mesh, self.group = buffers, mesh, mesh.gradient_group
        self.buckets = [(buffer, bucket) for buffer in buffers for bucket in buffer.buckets]
        self.buckets.sort(key=lambda pair: (bool(sums_first(pair[0])), pair[1].completes))
        self.waiting_for: dict[int, int] = {}  # by bucket's identity: gradients that are not complete
        self.armed: set[int] = set()  # chunks
        self.next = 0
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
            if buffer.chunk in self.armed:
                self.waiting_for[id(bucket)] -= 1
                self._start_ready()

        self.hooks.append(slot.parameter.register_post_accumulate_grad_hook(accumulated))

    def _rearm(self) -> None:
        self.armed.clear()
        self.next = 0
        self.waiting_for = {id(bucket): len(bucket.slots) for _, bucket in self.buckets}

    def arm(self, chunk: int) -> None:
        """From here on a completed gradient of a chunk is final: its buckets may start."""
        self.armed.add(chunk)

    def _start_ready(self) -> None:
        while self.next < len(self.buckets):
            buffer, bucket = self.buckets[self.next]
            if sums_first(buffer) or self.waiting_for[id(bucket)]:
                return
            self._start(buffer, bucket)
            self.next += 1

    def _start(self, buffer: FlatBuffer, bucket: Bucket) -> None:
        gradients = buffer.gradients[bucket.start : bucket.stop]
        for axis in sums_first(buffer):
            all_reduce(gradients, self.mesh.group(axis))
        self.work.append((all_reduce_start if buffer.owners.size == 1 else reduce_scatter_inside)(gradients, self.group))

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


def sums_first(buffer: FlatBuffer) -> Collection[str]:
    """The axes over which a buffer's gradients are summed before they are summed over the ranks that see other tokens. The sum
    between the two copies of tied embeddings is the plan's own action, behind all others."""
    return [axis for axis in buffer.summed_over if axis != "tied"]
