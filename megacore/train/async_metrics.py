"""Brings a step's figures from the device to the host, without a step that waits for them."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from megacore.distributed.observer import Observer, Observers

LAG = 2  # steps after which a GPU's figures are read: by then they have long arrived


@dataclass(frozen=True)
class StepMetrics:
    """Figures of a step, the same on every rank."""

    step: int
    loss: float  # the global batch's mean
    stops: float  # ranks that were asked to stop
    failures: float  # ranks on which the save under way has failed
    grad_norm: float
    skipped: float  # steps skipped so far
    drifted: float  # tensor ranks on which parameters differ that all hold alike
    losses: dict[str, float] = field(default_factory=dict)  # by name, if there are several


class AsyncMetrics:
    """Holds the figures of the last steps. Which of them are due does not depend on a rank's device, so all ranks take the same.

    On a CPU a step's figures are due at once. On a GPU they are due `LAG` steps later, and the host is never further ahead.
    """

    def __init__(self, device: torch.device, observers: Observers | None = None, losses: Sequence[str] = ()) -> None:
        """`losses`: the names of those that each step's figures bring one by one."""
        self.observers, self.losses = Observers() if observers is None else observers, losses
        self.lag = LAG if device.type == "cuda" else 0
        self.waiting: deque[tuple[int, Tensor, torch.cuda.Event | None]] = deque()
        self.pinned = [torch.empty(6 + len(losses), dtype=torch.float64, pin_memory=True) for _ in range(self.lag + 1)] if self.lag else []

    def post(self, step: int, figures: Tensor) -> None:
        """Begins to copy a step's `[loss, stops, failures, grad_norm, skipped, drifted, *losses]`, fp64 on the device, to the host."""
        if not self.lag:
            self.waiting.append((step, figures, None))
            return
        host, arrived = self.pinned[step % len(self.pinned)], torch.cuda.Event()
        host.copy_(figures, non_blocking=True)
        arrived.record()
        self.waiting.append((step, host, arrived))

    def take(self, *, all_of_them: bool = False) -> list[StepMetrics]:
        """The figures that are due, in order. With `all_of_them` it waits for the device and takes the others too."""
        due = []
        while len(self.waiting) > (0 if all_of_them else self.lag):
            step, figures, arrived = self.waiting.popleft()
            if arrived is not None:
                self.wait(arrived)
            numbers = figures.tolist()
            losses = dict(zip(self.losses, numbers[6:], strict=True))
            due.append(replace(StepMetrics(step, *numbers[:6]), losses=losses))
        return due

    def wait(self, arrived: torch.cuda.Event) -> None:
        """Waits until the device has sent a step's figures. A host that is late does not wait here."""
        self.observers.tell(Observer.host_wait_begins, "device")
        arrived.synchronize()
        self.observers.tell(Observer.host_wait_ends, "device")
