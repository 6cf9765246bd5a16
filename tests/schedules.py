"""Proves every schedule in every layout, with all that goes with it: the product
of which the tests run pairs.

python -m tests.schedules --sample 20 --seed 7    so many of them, drawn at random: minutes on two cores
python -m tests.schedules                         all: hours
python -m tests.schedules zb_v v_half             of these schedules only
"""

import itertools
import random
from collections import Counter

from megacore.config.parallel import CHUNKS
from megacore.errors import ConfigError
from megacore.files import ROOT
from megacore.tools.cli import Parser, exit_with
from megacore.tools.settings.load import load
from megacore.tools.verify.layouts import SCHEDULES, Layout, parse
from megacore.tools.verify.run import Options, Result, prove
from megacore.tools.verify.workers import ProofWorkers

CONFIG = str(ROOT / "configs/gpt_tiny.json")
SETTINGS: tuple[tuple[str, ...], ...] = (
    ("model.tie_embeddings=true", "model.tie_embeddings=false"),
    ("model.num_layers=5", "model.num_layers=8"),
    ("train.global_batch_size=32", "train.global_batch_size=8"),  # the second: fewer microbatches than stages
    ("train.recompute=none", "train.recompute=full"),
    ("engine.kind=native", "engine.shard_optimizer=true", "engine.kind=fsdp"),
)


def product(schedules: list[str]) -> tuple[list[tuple[Layout, list[str]]], Counter[str]]:
    """Each layout with each setting that a run accepts; and how many a run refuses, by the reason."""
    accepted, refused = [], Counter[str]()
    layouts = [layout for name in SCHEDULES if (layout := parse(name)).schedule in schedules]
    for layout, setting in itertools.product(layouts, itertools.product(*SETTINGS)):
        try:
            load(CONFIG, [*setting, "train.device=cpu", *layout.overrides()], layout.world)
            accepted.append((layout, list(setting)))
        except ConfigError as error:
            refused[f"{error.where}: {error.wrong}"] += 1
    return accepted, refused


def said(result: Result) -> str:
    """A result in a few words."""
    if result.failure is not None:
        return f"FAILS: {result.failure}"
    if result.impossible is not None:
        return f"IMPOSSIBLE: {result.impossible}"
    return (
        "equal"
        if result.equal
        else f"DIFFERS: first {(result.beyond[0] if result.beyond else result.missing[0])}"
    )


def main(argv: list[str]) -> int:
    """Prints a line for each proof; returns the exit status."""
    parser = Parser(
        "Prove every pipeline schedule in every layout.",
        example="python -m tests.schedules --sample 20 --seed 7",
        status="0 all equal, 1 otherwise, 2 wrong arguments",
        page="docs/schedules.md",
    )
    parser.add_argument(
        "schedules", nargs="*", metavar="SCHEDULE", help=f"some of {', '.join(CHUNKS)} (default: all)"
    )
    parser.add_argument("--sample", type=int, metavar="N", help="prove N cases, drawn at random")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the random choice")
    args = parser.parse_args(argv)
    if unknown := set(args.schedules) - CHUNKS.keys():
        raise ConfigError(
            "SCHEDULE", f"there is no {', '.join(sorted(unknown))}", f"some of {', '.join(CHUNKS)}"
        )
    chosen, refused = product(args.schedules or list(CHUNKS))
    for reason, count in refused.items():
        print(f"{count} are refused: {reason}")
    if args.sample is not None:
        if not 0 < args.sample <= len(chosen):
            raise ConfigError("--sample", f"there are {len(chosen)}", f"from 1 to {len(chosen)}")
        chosen = random.Random(args.seed).sample(chosen, args.sample)
    workers, wrong = ProofWorkers(ROOT), 0
    try:
        for number, (layout, setting) in enumerate(chosen, 1):
            (result,) = prove(Options(CONFIG, setting, [layout]), workers=workers).results
            wrong += not result.equal or result.impossible is not None
            print(f"{number} of {len(chosen)}: {layout.name} {' '.join(setting)}: {said(result)}", flush=True)
    finally:
        workers.close()
    print(f"{len(chosen) - wrong} of {len(chosen)} are equal to one process")
    return int(wrong > 0)


if __name__ == "__main__":
    exit_with(main)
