"""Finds ranks that hold up the others, because their own part of a step takes longer."""

from collections.abc import Sequence
from statistics import median

from megacore.distributed.events import Slow

FACTOR = 2.0  # times the median of hosts, whose own seconds vary
DEVICE_FACTOR = 1.15  # times the median of devices that do the same work, whose seconds vary little
PART = 0.3  # a rank must exceed the median by this part of the step: less is not worth a warning
DEVICE_PART = 0.05  # the same for devices
REPORTS = 3  # reports in a row in which a rank must stand out: one may be chance


class Stragglers:
    """Ranks that stand out again and again."""

    def __init__(self, stages: int = 1) -> None:
        """`stages`: among how many the ranks are divided, in equal parts; each
        computes other layers than the others.
        """
        self.stages = stages
        self.in_a_row: dict[int, int] = {}

    def named(self, own: Sequence[float], devices: Sequence[float], step_seconds: float) -> dict[int, Slow]:
        """Takes a report's figures by rank, the hosts' `own` seconds in a step (waiting for others left out)
        and the devices' for forwards and backwards; returns the ranks that stood out in the last `REPORTS`.
        """
        found = outliers(own, step_seconds)
        peers = len(devices) // self.stages
        for first in range(0, len(devices), peers):
            late = outliers(devices[first : first + peers], step_seconds, DEVICE_FACTOR, DEVICE_PART)
            found |= {first + rank: slow._replace(of="device") for rank, slow in late.items()}
        self.in_a_row = {rank: self.in_a_row.get(rank, 0) + 1 for rank in found}
        return {rank: slow for rank, slow in found.items() if self.in_a_row[rank] >= REPORTS}


def outliers(
    seconds: Sequence[float], step_seconds: float, factor: float = FACTOR, part: float = PART
) -> dict[int, Slow]:
    """Ranks whose own seconds in a step stand out. Waiting for others is not counted.

    In a synchronous step all ranks take equally long: a slow rank waits less than the others do.
    """
    usual = median(seconds)
    return {
        rank: Slow(own, usual)
        for rank, own in enumerate(seconds)
        if own > factor * usual and own - usual > part * step_seconds
    }
