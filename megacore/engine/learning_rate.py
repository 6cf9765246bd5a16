"""The learning rate of each step (`optim.schedule`). `tools/verify/replay.py` has its independent twin."""

import math

from megacore.config.schema import OptimConfig, resolved


def learning_rate(optim: OptimConfig, step: int, steps: int) -> float:
    """The learning rate of `step` (from 1) of `steps`: linear warmup, then the schedule.

    cosine and linear fall to `min_lr` at `decay_steps` and stay there; wsd holds `lr` and falls linearly over the last
    `decay_steps` (Hu et al. 2024, MiniCPM); constant holds.
    """
    decay_steps = resolved(optim.decay_steps)
    if step <= optim.warmup_steps:
        return optim.lr * step / optim.warmup_steps
    if optim.schedule == "constant":
        return optim.lr
    if optim.schedule == "wsd":
        done = (step - (steps - decay_steps)) / decay_steps
    else:
        done = (step - optim.warmup_steps) / max(1, decay_steps - optim.warmup_steps)
    done = min(max(done, 0.0), 1.0)
    remaining = 0.5 * (1.0 + math.cos(math.pi * done)) if optim.schedule == "cosine" else 1.0 - done
    return optim.min_lr + remaining * (optim.lr - optim.min_lr)
