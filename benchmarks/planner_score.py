"""What predictions are worth: their errors, the regret of choosing by them, and
the baseline that knows one MFU.
"""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from benchmarks.planner_rows import Row
from megacore.tools.planner.workload import Setting


def operations(s: Setting) -> float:
    """Model FLOPs of a step, with attention counted causally, as vendors do for the baseline's MFU."""
    block = 2 * s.attention_weights + 2 * s.active_weights + 2 * s.seq * s.attention_size
    return (
        3
        * s.global_batch
        * s.seq
        * (s.layers * block + 2 * s.hidden * s.vocab)
        * (4 / 3 if s.recompute == "full" else 1)
    )


def baseline(rows: Sequence[Row], known: Sequence[Row]) -> np.ndarray:
    """Seconds by one MFU a device and precision: the median of the known rows."""

    def busy(row: Row) -> float:
        return operations(row.setting) / row.setting.world / row.device.peak_flops[row.setting.precision]

    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for row in known:
        found[row.device.name, row.setting.precision].append(busy(row) / (row.seconds or 1.0))
    every = float(np.median([value for values in found.values() for value in values]))
    return np.array(
        [
            busy(row) / float(np.median(found.get((row.device.name, row.setting.precision), [every])))
            for row in rows
        ]
    )


def errors(predicted: np.ndarray, rows: Sequence[Row]) -> dict[str, float]:
    """Median and 90th percentile of the relative error, and its median with sign."""
    relative = predicted / np.array([row.seconds for row in rows]) - 1
    return {
        "rows": len(rows),
        "median": float(np.median(np.abs(relative))),
        "p90": float(np.quantile(np.abs(relative), 0.9)),
        "bias": float(np.median(relative)),
    }


def regret(predicted: np.ndarray, rows: Sequence[Row]) -> dict[str, float]:
    """Time of the layout with the least predicted time over the least measured time, of
    every model and number of devices.
    """
    groups: dict[tuple[str, str, int], list[int]] = defaultdict(list)
    for i, row in enumerate(rows):
        groups[row.group].append(i)
    chosen = []
    for members in groups.values():
        measured: dict[Setting, list[float]] = defaultdict(list)
        for i in members:
            measured[rows[i].setting].append(rows[i].seconds or 0.0)
        if len(measured) > 1:
            mean = {setting: float(np.mean(values)) for setting, values in measured.items()}
            least = min(predicted[i] for i in members)
            # the baseline knows many equal ones
            picks = {rows[i].setting for i in members if predicted[i] <= least * (1 + 1e-9)}
            chosen.append(float(np.mean([mean[setting] for setting in picks])) / min(mean.values()))
    if not chosen:
        return {}
    return {
        "choices": len(chosen),
        "median": float(np.median(chosen)),
        "p90": float(np.quantile(chosen, 0.9)),
        "worst": max(chosen),
    }
