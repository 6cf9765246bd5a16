"""The learning rate of each step (`optim.schedule`). `tools/verify/replay.py` has its independent twin."""

import math

from megacore.config.optim import OptimConfig
from megacore.config.schema import resolved


def learning_rate(optim: OptimConfig, step: int, steps: int) -> float:
    """The learning rate of `step` (from 1) of `steps`: warmup from `warmup_lr`, then the schedule.

    Warmup is linear, or as log(1 + step) / log(warmup_steps). cosine and linear fall to `min_lr` at
    `decay_steps` and stay there; wsd holds `lr` and falls linearly over the last `decay_steps` (Hu et al.
    2024, MiniCPM); constant holds.
    """
    decay_steps, warmup = resolved(optim.decay_steps), optim.warmup_steps
    at, step = (max(0, step - lag) for lag in optim.lag)
    if max(at, step) <= warmup and warmup:
        done, whole = (
            (at, warmup)
            if optim.warmup == "linear"
            else (math.log(min(at + 1, max(2, warmup))), math.log(max(2, warmup)))
        )
        return optim.warmup_lr + (optim.lr - optim.warmup_lr) * done / whole
    if optim.schedule == "constant":
        return optim.lr
    if optim.schedule == "wsd":
        done = (step - (steps - decay_steps)) / decay_steps
    else:
        done = (step - warmup) / max(1, decay_steps - warmup)
    done = min(max(done, 0.0), 1.0)
    remaining = 0.5 * (1.0 + math.cos(math.pi * done)) if optim.schedule == "cosine" else 1.0 - done
    return optim.min_lr + remaining * (optim.lr - optim.min_lr)
