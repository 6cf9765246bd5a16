"""How long preflight waits for ranks, and what it says meanwhile.

Nobody knows how long a cold start takes, so each thing that is done is told, and a limit holds from one to
the next. It grows with
the number of ranks: setting up all groups took PyTorch 1,047 s on 2,048 GPUs (Jiang and others, MegaScale,
2024), and gloo 46 minutes on 8,192 ranks (facebookincubator/gloo, pull request 408). That is half a second a
rank or less, beside what a small job takes.
"""

import sys
import time
from collections.abc import Callable

SMALL_SECONDS, RANK_SECONDS = 60.0, 0.5
SAY_SECONDS = 10.0  # between two lines about one thing

Say = Callable[[str], None]


def patience(world: int) -> float:
    """Seconds in which one thing more is done by all ranks, the slowest of which may
    be a verdict on those that hang.
    """
    return SMALL_SECONDS + RANK_SECONDS * world


def say(line: str) -> None:
    """Writes what is being done to stderr."""
    print(f"preflight: {line}", file=sys.stderr, flush=True)


class Count:
    """Says now and then how many of many have done something."""

    def __init__(self, whole: int, what: str, say: Say) -> None:
        self.whole, self.what, self.say = whole, what, say
        self.told = time.monotonic()
        self.last = 0

    def __call__(self, done: int) -> None:
        """`done`: how many have so far."""
        if done != self.last and time.monotonic() - self.told >= SAY_SECONDS:
            self.told, self.last = time.monotonic(), done
            self.say(f"{done} of {self.whole} {self.what}")
