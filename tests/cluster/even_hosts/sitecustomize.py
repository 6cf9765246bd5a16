"""On PYTHONPATH: clocks by which everything that preflight times takes equally long on all hosts.

Hosts of one machine share its cores: by real clocks one of them is slow, or a link or a disk is, whenever
other programs take the cores at that moment. With PYTHON_LINKS=measured, links are timed by the real clock.
"""

import os
import sys
import threading
import time


class Clock(threading.local):
    """A millisecond passes with each look, for each thread by itself."""

    now = 0.0

    def __call__(self) -> float:
        self.now += 1e-3
        return self.now


FACTS, DEVICES = (f"megacore.tools.preflight.{name}" for name in ("facts", "devices"))
if os.environ.get("PYTHON_LINKS") != "measured" or DEVICES in sys.orig_argv:
    time.perf_counter = Clock()
if FACTS in sys.orig_argv:  # which times the disk by this one
    time.monotonic = Clock()
