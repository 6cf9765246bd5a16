"""Host memory in which a checkpoint waits to be written, while training goes on."""

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor


class Staging:
    """Copies tensors into one buffer that is made at the first save and used again.

    On a GPU it is pinned, and a stream of its own copies beside the next forward and backward: only the next update of what is
    copied must wait (`hold_update`).
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.buffer = torch.empty(0, dtype=torch.uint8)
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.copied = torch.cuda.Event() if device.type == "cuda" else None
        self.sources: Sequence[Tensor] = ()  # kept until they are copied: some engines give out copies of their own

    @torch.no_grad()
    def copy(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The tensors in host memory, once `wait` returns; the copies before them are overwritten. Widest dtype first, or views
        would not be aligned."""
        nbytes = sum(tensor.nbytes for tensor in tensors)
        if self.buffer.nbytes < nbytes:
            self.buffer = torch.empty(nbytes, dtype=torch.uint8)
            if self.device.type == "cuda":
                pin(self.buffer)
        copies, start = [], 0
        for tensor in tensors:
            part = self.buffer[start : start + tensor.nbytes]
            copies.append(part.view(tensor.dtype).view(tensor.shape))
            start += tensor.nbytes
        if self.stream is None:
            for copy, tensor in zip(copies, tensors, strict=True):
                copy.copy_(tensor)
            return copies
        assert self.copied is not None
        self.sources = tensors
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            for copy, tensor in zip(copies, tensors, strict=True):
                copy.copy_(tensor, non_blocking=True)
            self.copied.record()
        return copies

    def hold_update(self) -> None:
        """Lets the device, not the host, wait until the copies are made. Before anything writes into the tensors."""
        if self.copied is not None and self.sources:
            torch.cuda.current_stream(self.device).wait_event(self.copied)

    def wait(self) -> None:
        """Returns when the copies are made; from any thread."""
        if self.copied is not None:
            self.copied.synchronize()
            self.sources = ()


def pin(buffer: Tensor) -> None:
    """Page-locks memory where it is: PyTorch's own pinned tensors are rounded up to a power of two, half of it wasted at worst."""
    cuda = torch.cuda.cudart()
    portable = 1
    torch.cuda.check_error(cuda.cudaHostRegister(buffer.data_ptr(), buffer.nbytes, portable))
    weakref.finalize(buffer, cuda.cudaHostUnregister, buffer.data_ptr())
