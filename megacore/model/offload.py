"""Activations that wait for their backward in host memory, copied while the device computes.

What autograd saves is copied out behind the operation that made it, on a stream of its own, and its memory on the device is free
for the next. Backward, which wants the tensors in about the reverse order, has the next few copied back ahead of their use.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

SMALLEST = 1024  # bytes that are worth a copy
AHEAD = 8  # tensors that are on their way back at a time: about those of one half of a block


@dataclass(eq=False)
class Away:
    """A tensor in host memory."""

    host: Tensor
    stored: Any  # event: the copy out is done
    before: "Away | None"  # saved just before this one, so wanted next
    back: Tensor | None = None  # on the device again, behind the event `loaded`
    loaded: Any = None
    used: bool = False


class ActivationOffload:
    """The streams of a device, and `around` each forward pass the hooks that use them. On a CPU it makes copies to no avail."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.module = device, torch.get_device_module(device)
        self.out, self.back = self.module.Stream(), self.module.Stream()

    def around(self) -> saved_tensors_hooks:
        """Enter it around a forward pass."""
        latest: Away | None = None

        def pack(tensor: Tensor) -> Tensor | Away:
            nonlocal latest
            # Parameters stay where they are, and where their engine wants them.
            weight = isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)
            if weight or tensor.device != self.device or tensor.nbytes < SMALLEST:
                return tensor
            latest = self._store(tensor, latest)
            return latest

        def unpack(saved: Tensor | Away) -> Tensor:
            return saved if isinstance(saved, Tensor) else self._fetch(saved)

        return saved_tensors_hooks(pack, unpack)

    @torch.no_grad()
    def _store(self, tensor: Tensor, before: Away | None) -> Away:
        host = torch.empty_like(tensor, device="cpu", pin_memory=self.device.type == "cuda")
        self.out.wait_stream(self.module.current_stream())
        with self.module.stream(self.out):
            host.copy_(tensor, non_blocking=True)
            stored = self.out.record_event()
        self._keep(tensor, self.out)
        return Away(host, stored, before)

    @torch.no_grad()
    def _load(self, away: Away) -> None:
        if away.back is None:
            self.back.wait_event(away.stored)
            with self.module.stream(self.back):
                away.back = away.host.to(self.device, non_blocking=True, copy=True)
                away.loaded = self.back.record_event()

    def _fetch(self, away: Away) -> Tensor:
        """The tensor; and has those that will be wanted next on their way."""
        self._load(away)
        following = away.before
        for _ in range(AHEAD):
            if following is None:
                break
            if not following.used:
                self._load(following)
            following = following.before
        tensor = away.back
        assert tensor is not None
        away.back, away.used = None, True
        self.module.current_stream().wait_event(away.loaded)
        self._keep(tensor, self.module.current_stream())
        return tensor

    def _keep(self, tensor: Tensor, stream: Any) -> None:
        """Has the allocator wait for what `stream` does with the tensor by now, before it gives its memory to another."""
        if self.device.type == "cuda":
            tensor.record_stream(stream)
