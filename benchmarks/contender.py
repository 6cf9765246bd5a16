"""One process of a contender of benchmarks.speed: for every line on stdin it takes a step and answers with a line of JSON.

It waits asleep in between, so that contenders can take turns on the same cores. A rank reads its place from the environment.
"""

import json
import os
import sys
from collections.abc import Callable

import torch

from benchmarks.plain import PlainLoop
from benchmarks.training import LoneStage, Training, join
from megacore.cli import Parser, exit_status
from megacore.config import load
from megacore.place import place_from_environment
from megacore.train.meters import peak_memory

EXAMPLE = "yes | head -3 | python -m benchmarks.contender megacore benchmarks/speed.json train.precision=fp32"
KINDS = ("megacore", "plain", "plain-autocast", "stages")


def build(kind: str, path: str, overrides: list[str]) -> Callable[[], list[float]]:
    """What a turn does: a step's seconds; for `stages` the seconds of forward and backward, for each of two stages."""
    if kind == "stages":
        stages = [LoneStage(path, overrides, index, 2) for index in range(2)]
        return lambda: [seconds for stage in stages for seconds in stage.measure()]
    place = place_from_environment()
    config = load(path, overrides, place.world_size).config
    contender = Training(config, join(config, place)) if kind == "megacore" else PlainLoop(config, kind == "plain-autocast")
    return lambda: [contender.step()]


def main(argv: list[str]) -> None:
    """Builds the contender, says so, and serves."""
    parser = Parser(EXAMPLE, __doc__)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("config", metavar="FILE")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    args = parser.parse_args(argv)
    # Answers alone go to the real stdout; what libraries print there joins stderr.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    turn = build(args.kind, args.config, args.overrides)
    print("ready", file=answers)
    for _ in sys.stdin:
        seconds = turn()
        print(json.dumps({"seconds": seconds, "memory_bytes": peak_memory(torch.device("cpu"))}), file=answers)


if __name__ == "__main__":
    sys.exit(exit_status(main))
