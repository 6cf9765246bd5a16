"""Proves every schedule in every layout, with all that goes with it: the product of which the tests run pairs.

python -m tests.schedules                    hours on two cores
python -m tests.schedules zb_v v_half        of these schedules only
"""

import itertools

import tests.schedules
from megacore.cli import Parser, exit_with
from megacore.config.schema import CHUNKS
from megacore.errors import ConfigError
from megacore.verify.layouts import SCHEDULES, parse
from megacore.verify.run import ROOT, Options, prove
from megacore.verify.workers import Workers

CONFIG = str(ROOT / "configs/gpt_tiny.json")
SETTINGS: tuple[tuple[str, ...], ...] = (
    ("model.tie_embeddings=true", "model.tie_embeddings=false"),
    ("model.num_layers=5", "model.num_layers=8"),
    ("train.global_batch_size=32", "train.global_batch_size=8"),  # the second: fewer microbatches than stages
    ("train.recompute=none", "train.recompute=full"),
    ("engine.kind=native", "engine.shard_optimizer=true", "engine.kind=fsdp"),
)


def main(argv: list[str]) -> int:
    """Prints a line for each setting; returns the exit status."""
    parser = Parser("python -m tests.schedules zb_v", tests.schedules.__doc__)
    parser.add_argument("schedules", nargs="*", metavar="SCHEDULE", help=f"some of {', '.join(CHUNKS)}")
    args = parser.parse_args(argv)
    if unknown := set(args.schedules) - CHUNKS.keys():
        raise ConfigError("SCHEDULE", f"there is no {', '.join(sorted(unknown))}", f"some of {', '.join(CHUNKS)}")
    layouts = [layout for name in SCHEDULES if (layout := parse(name)).schedule in (args.schedules or CHUNKS)]
    workers, wrong = Workers(ROOT), 0
    try:
        for setting in itertools.product(*SETTINGS):
            proof = prove(Options(CONFIG, list(setting), layouts), workers=workers)
            failed = [result.layout.name for result in proof.results if not result.equal]
            left_out = [result.layout.name for result in proof.results if result.impossible]
            wrong += len(failed)
            print(" ".join(setting), "DIFFERS in " + ", ".join(failed) if failed else "equal", f"({len(left_out)} impossible)", flush=True)
    finally:
        workers.close()
    return int(wrong > 0)


if __name__ == "__main__":
    exit_with(main)
