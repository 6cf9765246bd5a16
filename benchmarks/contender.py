"""One process of a contender of benchmarks.speed or benchmarks.peers: for every line on stdin it takes a step
and answers with a line of JSON.

It waits asleep in between, so that contenders can take turns on the same cores. A rank reads its place from
the environment.
"""

import json
import os
import sys
import traceback
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

from benchmarks.peers.process import EQUAL, OWN, SETTINGS, equalise, observed
from benchmarks.training import LoneStage, Training, join
from megacore.tools.cli import Parser, add_overrides, exit_with
from megacore.tools.launchers import place_from_environment
from megacore.tools.settings.load import load
from megacore.train.metrics import peak_memory

EXAMPLE = "yes | head -3 | python -m benchmarks.contender megacore benchmarks/speed.json train.precision=fp32"

# Peers by kind: module and class, which takes a config and has methods `step`, which returns seconds, and
# `loss`. Imported only where it is asked for: each is at home in an environment of its own.
PEERS = {
    "transformers": ("benchmarks.peers.transformers_loop", "PlainLoop"),
    "transformers-compiled": ("benchmarks.peers.transformers_loop", "CompiledLoop"),
    "plain-gpt-compiled": ("benchmarks.peers.plain_gpt", "PlainGPTLoop"),
    "transformers-low": ("benchmarks.peers.transformers_loop", "LowPrecisionLoop"),
    "deepspeed": ("benchmarks.peers.deepspeed_loop", "DeepSpeedLoop"),
    "megatron-core": ("benchmarks.peers.megatron_loop", "MegatronLoop"),
    "torchtitan": ("benchmarks.peers.torchtitan_loop", "TorchtitanLoop"),
    "products": ("benchmarks.peers.products", "ProductsLoop"),
}
STAGES = {"two-stages": 2, "four-stages": 4}
BY_PART = "megacore-by-part"
KINDS = ("megacore", BY_PART, *STAGES, *PEERS)


def build(
    kind: str, path: str, overrides: list[str]
) -> tuple[Callable[[], list[float]], Callable[[], float | None], dict[str, Any]]:
    """What a turn does: a step's seconds; for `STAGES` what `LoneStage.measure` gives, for each stage; for
    `BY_PART` its parts too. What the last step's loss was, by this rank's microbatches, if it has any. And
    what a run settled on by itself.
    """
    if kind in STAGES:
        stages = [LoneStage(path, overrides, index, STAGES[kind]) for index in range(STAGES[kind])]
        return lambda: [seconds for stage in stages for seconds in stage.measure()], lambda: None, {}
    place = place_from_environment()
    config = load(path, overrides, place.world_size).config
    if kind == "megacore":
        training = Training(config, join(config, place))
        return lambda: [training.step()], training.loss, {"train.compile": training.config.train.compile}
    if kind == BY_PART:
        from benchmarks.layer_parts import ByPart

        by_part = ByPart(config, place)
        return by_part.turn, by_part.training.loss, {}
    module, name = PEERS[kind]
    loop = getattr(import_module(module), name)(config)
    return lambda: [loop.step()], loop.loss, {}


def main(argv: list[str]) -> None:
    """Builds the contender, says what its process has, and serves; what it cannot
    do it answers with the reason.
    """
    parser = Parser(
        "Take one training step and print its time for each line on standard input.",
        example=EXAMPLE,
        notes="One process of benchmarks.speed or benchmarks.peers.",
        page="benchmarks/README.md",
    )
    parser.add_argument("kind", choices=KINDS, metavar="KIND", help=", ".join(KINDS))
    parser.add_argument("config", metavar="FILE", help="config of the run")
    parser.add_argument(
        "--settings",
        choices=SETTINGS,
        default=OWN,
        help=f"process settings of other libraries; {EQUAL}: those of megacore",
    )
    add_overrides(parser)
    args = parser.parse_intermixed_args(argv)
    # Answers alone go to the real stdout; what libraries print there joins stderr.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        if args.settings == EQUAL:
            equalise(place_from_environment().local_world_size)
        turn, loss, settled = build(args.kind, args.config, args.overrides)
        print(json.dumps({"ready": True, "process": observed() | settled}), file=answers)
        for _ in sys.stdin:
            seconds = turn()
            print(
                json.dumps({"seconds": seconds, "memory_bytes": peak_memory(device), "loss": loss()}),
                file=answers,
            )
    except Exception as error:
        traceback.print_exc()
        print(
            json.dumps(
                {
                    "failed": f"{type(error).__name__}: "
                    f"{str(error).strip().splitlines()[0] if str(error).strip() else ''}"
                }
            ),
            file=answers,
        )
        raise


if __name__ == "__main__":
    exit_with(main)
