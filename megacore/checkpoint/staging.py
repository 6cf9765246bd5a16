"""Copies a checkpoint into host memory, where it waits to be written while training goes on."""

import threading
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from megacore.distributed.rendezvous import use_device


class Staging:
    """Copies tensors into one buffer. The first save makes it, and later saves use it again.

    Copying runs beside the next forward and backward; only the next update of the tensors must wait (`hold_update`). On a GPU the
    buffer is pinned and a stream of its own copies. On a CPU the thread that calls `wait` copies.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.buffer = torch.empty(0, dtype=torch.uint8)
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.copied = torch.cuda.Event() if device.type == "cuda" else None
        self.sources: Sequence[Tensor] = ()  # kept until they are copied: some engines hand out copies
        self.copies: list[Tensor] = []
        self.made = threading.Event()  # set when the host has made the copies
        self.made.set()

    def copy(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Returns tensors in host memory that hold the copies once `wait` returns. They overwrite the copies before. Give the widest
        dtype first, so that every tensor is aligned."""
        nbytes = sum(tensor.nbytes for tensor in tensors)
        if self.buffer.nbytes < nbytes:
            self.buffer = torch.empty(nbytes, dtype=torch.uint8)
            if self.device.type == "cuda":
                pin(self.buffer)
        self.copies, start = [], 0
        for tensor in tensors:
            part = self.buffer[start : start + tensor.nbytes]
            self.copies.append(part.view(tensor.dtype).view(tensor.shape))
            start += tensor.nbytes
        self.sources = tensors
        if self.stream is None:
            self.made.clear()
            return self.copies
        assert self.copied is not None
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            self._copy()
            self.copied.record()
        return self.copies

    @torch.no_grad()
    def _copy(self) -> None:
        for copy, tensor in zip(self.copies, self.sources, strict=True):
            copy.copy_(tensor, non_blocking=True)

    def hold_update(self) -> None:
        """Call it before anything writes into the tensors. On a GPU the device waits until the copies are made, and the host does not;
        on a CPU the host waits."""
        if self.copied is None:
            self.made.wait()
        elif self.sources:
            torch.cuda.current_stream(self.device).wait_event(self.copied)

    def wait(self) -> None:
        """Returns when the copies are made. Call it once after every `copy`, from any thread."""
        try:
            if self.copied is None:
                self._copy()
            else:
                use_device(self.device)  # a thread that has not said so opens the first that it sees
                self.copied.synchronize()
        finally:
            self.sources = ()
            self.made.set()


def pin(buffer: Tensor) -> None:
    """Page-locks memory where it is. PyTorch rounds its own pinned tensors up to a power of two, which wastes up to half."""
    cuda = torch.cuda.cudart()
    portable = 1
    torch.cuda.check_error(cuda.cudaHostRegister(buffer.data_ptr(), buffer.nbytes, portable))
    weakref.finalize(buffer, cuda.cudaHostUnregister, buffer.data_ptr())
