"""A step's figures on their way from the device to the host, which no step waits for."""

from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

LAG = 2  # steps after which a GPU's figures are read: by then they have long arrived


@dataclass(frozen=True)
class Figures:
    """What all ranks know of a step, the same on each."""

    step: int
    loss: float  # the global batch's mean
    stops: float  # ranks that were asked to stop
    failures: float  # ranks on which the save under way has failed
    grad_norm: float
    skipped: float  # steps skipped so far


class Mailbox:
    """Figures of the last steps. What a rank takes after a step does not depend on how far its device is, so all ranks take the same.

    On a CPU a step's figures are there at once; on a GPU they are taken `LAG` steps later, and the host is never further ahead.
    """

    def __init__(self, device: torch.device) -> None:
        self.lag = LAG if device.type == "cuda" else 0
        self.waiting: deque[tuple[int, Tensor, torch.cuda.Event | None]] = deque()
        self.pinned = [torch.empty(5, dtype=torch.float64, pin_memory=True) for _ in range(self.lag + 1)] if self.lag else []

    def post(self, step: int, figures: Tensor) -> None:
        """Sends a step's `[loss, stops, failures, grad_norm, skipped]` off, fp64 on the device."""
        if not self.lag:
            self.waiting.append((step, figures, None))
            return
        host, arrived = self.pinned[step % len(self.pinned)], torch.cuda.Event()
        host.copy_(figures, non_blocking=True)
        arrived.record()
        self.waiting.append((step, host, arrived))

    def take(self, *, all_of_them: bool = False) -> list[Figures]:
        """The figures that are due, in order; with `all_of_them` also those that the device must be waited for."""
        due = []
        while len(self.waiting) > (0 if all_of_them else self.lag):
            step, figures, arrived = self.waiting.popleft()
            if arrived is not None:
                self.wait(arrived)
            due.append(Figures(step, *figures.tolist()))
        return due

    def wait(self, arrived: torch.cuda.Event) -> None:
        """Until the device has sent a step's figures."""
        arrived.synchronize()
