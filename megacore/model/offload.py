"""Keeps activations in host memory until their backward, and copies them while the device computes.

A separate stream copies each tensor that autograd saves to the host after the operation that made it. Its
memory on the device is then free. Backward needs the tensors in about the reverse order, so the next few are
copied back ahead of their use.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

SMALLEST = 1024  # bytes: a smaller tensor is not worth a copy
AHEAD = 8  # tensors that are copied back ahead: about those of half a block


@dataclass(eq=False)
class Away:
    """A tensor in host memory."""

    host: Tensor
    stored: Any  # event: the copy out is done
    before: "Away | None"  # saved just before this one, so needed next
    back: Tensor | None = None  # on the device again, after the event `loaded`
    loaded: Any = None
    used: bool = False


class ActivationOffload:
    """A device's copy streams, and the hooks that use them around a forward pass.

    On a CPU it only makes useless copies.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.module = device, torch.get_device_module(device)
        self.out, self.back = self.module.Stream(), self.module.Stream()

    def around(self) -> saved_tensors_hooks:
        """A context for a forward pass."""
        latest: Away | None = None

        def pack(tensor: Tensor) -> Tensor | Away:
            nonlocal latest
            # Parameters stay where their engine keeps them.
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
        """Returns the tensor, and begins to copy back those that are needed next."""
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
        """Makes the allocator wait for the work of `stream` on the tensor before it uses the memory again."""
        if self.device.type == "cuda":
            tensor.record_stream(stream)
