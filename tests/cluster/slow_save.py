"""launch/pretrain.py whose saves take SLOW_SAVE seconds: a run can be struck while one is under way."""

import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from launch.pretrain import run
from megacore.checkpoint import saver
from megacore.tools.cli import exit_rank_with

write_rank = saver.write_rank


def slow(*args: Any) -> None:
    write_rank(*args)
    time.sleep(float(os.environ.get("SLOW_SAVE", "3")))


if __name__ == "__main__":
    saver.write_rank = slow
    exit_rank_with(run)
