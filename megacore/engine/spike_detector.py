"""Recognises steps that must not be taken by their gradient norm, on the device."""

import torch
from torch import Tensor

WINDOW = 128  # norms remembered
ENOUGH = 16  # norms needed before any norm is called a spike
SCALE = 1.4826  # standard deviation / median absolute deviation of a normal distribution
# a deviation counts as at least this part of the median: norms that hardly vary must not make spikes of each
# other
LEAST = 0.01


class SpikeGuard:
    """Calls a norm a spike if it exceeds the median of recent ones by more than `threshold` robust
    deviations (Leys et al. 2013).

    Median and deviation (1.4826 × the median absolute deviation) are taken over norms of steps that were
    taken, so a spike does not raise the bar for the next. All of it happens on the device.
    """

    def __init__(self, threshold: float, device: torch.device) -> None:
        self.threshold = threshold
        self.recent = torch.full((WINDOW,), torch.nan, dtype=torch.float64, device=device)
        self.places = torch.arange(WINDOW, device=device)
        self.known = torch.zeros((), dtype=torch.int64, device=device)  # norms seen so far

    def is_spike(self, norm: Tensor) -> Tensor:
        """Whether this norm is a spike, as a bool scalar. Ranks with the same norms get the same answer."""
        median = median_of_known(self.recent)
        deviation = torch.maximum(SCALE * median_of_known((self.recent - median).abs()), LEAST * median)
        return (norm > median + self.threshold * deviation) & (self.known >= ENOUGH)

    def remember(self, norm: Tensor, skipped: Tensor) -> None:
        """Remembers the norm of a step, unless the step was skipped."""
        here = (self.places == self.known % WINDOW) & ~skipped
        self.recent = torch.where(here, norm, self.recent)
        self.known += ~skipped

    def state(self) -> list[float]:
        """The norms remembered, oldest first. Reads the device."""
        known = int(self.known)
        values = self.recent.tolist()
        return (
            values[: min(known, WINDOW)]
            if known < WINDOW
            else values[known % WINDOW :] + values[: known % WINDOW]
        )

    def load_state(self, norms: list[float]) -> None:
        """Restores `state()`."""
        self.recent.fill_(torch.nan)
        self.recent[: len(norms)] = torch.tensor(norms, dtype=torch.float64)
        self.known.fill_(len(norms))


def median_of_known(values: Tensor) -> Tensor:
    """The lower median of those of `values` ``[n]`` that are not NaN; NaN if none is.

    `torch.nanmedian` asks a GPU how many there are, and waits for the answer.
    """
    middle = ((~values.isnan()).sum() - 1).clamp(min=0) // 2
    return values.sort().values.gather(0, middle.view(1)).squeeze(0)
