"""Train a GPT: the script that a launcher starts once for every rank."""

import os
import sys

# so that a checkout runs without being installed; an installed script has no such folder
if os.path.isdir(os.path.dirname(os.path.realpath(__file__)) + "/../megacore"):
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.realpath(__file__))))

import megacore.tools.interrupt  # noqa: F401  (first: Ctrl-C during the other imports prints no traceback)

# isort: split
import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megacore.config import Config
from megacore.config.schema import resolved
from megacore.distributed.rank_info import RankInfo
from megacore.errors import ConfigError
from megacore.tools.choices.partition import partitioned
from megacore.tools.cli import Parser, StandardStream, add_config, add_overrides, count, exit_rank_with
from megacore.tools.launchers import launcher_of
from megacore.tools.settings.ds_config import print_note
from megacore.tools.settings.launcher_settings import check_launcher
from megacore.tools.settings.load import Resolved, load
from megacore.tools.settings.print_config import config_table, printed_world
from megacore.tools.stop_request import StopRequest

if TYPE_CHECKING:  # mistakes in a config are found before torch is imported
    import torch

    from megacore.distributed.events import Listener
    from megacore.tools.inputs import Inputs
    from megacore.tools.mirror import Mirror

EXAMPLES = (
    "python launch/pretrain.py --config configs/gpt_tiny.json",
    "deepspeed --num_gpus 8 launch/pretrain.py --config configs/gpt_1b.json train.steps=1000",
)
NOTES = (
    "A launcher (deepspeed, torchrun, srun, mpirun) starts the script once for every rank; python alone "
    "trains on one rank."
)
STATUS = (
    "0 finished, 2 bad config, data or arguments, 75 stopped on request after saving a checkpoint, 128 + "
    "signal if a signal ended the run before the first step or a second Ctrl-C did, any other: failed"
)


DEEPSPEED = ("--deepspeed", "--deepspeed_config")


def parser() -> Parser:
    """Return the parser of the command line."""
    parser = Parser(
        "Train a GPT model.",
        example=EXAMPLES,
        notes=NOTES,
        status=STATUS,
        page="docs/training.md",
        ranks=True,
    )
    add_config(parser)
    short = "DeepSpeed config; short for engine.kind=deepspeed engine.config=FILE"
    parser.add_argument(DEEPSPEED[0], metavar="FILE", help=short)
    parser.add_alias(DEEPSPEED[1], DEEPSPEED[0])
    parser.add_argument(
        "--print-config", action="store_true", help="print every value and where it comes from, and stop"
    )
    parser.add_argument(
        "--describe", action="store_true", help="with --print-config: print the meaning of every key too"
    )
    parser.add_argument(
        "--world",
        type=count,
        metavar="N",
        help="with --print-config: number of ranks to resolve the config for, without a launcher (default: "
        "the fewest that it fits)",
    )
    add_overrides(parser)
    return parser


def parse(argv: list[str]) -> argparse.Namespace:
    """Return the parsed command line. Raises `ConfigError`."""
    args = parser().parse_intermixed_args(argv)
    if not args.print_config and (args.describe or args.world is not None):
        option = "--describe" if args.describe else "--world"
        raise ConfigError(option, "is an option of --print-config", f"--print-config, or no {option}")
    if args.deepspeed is not None:
        args.overrides = [*with_deepspeed(args.deepspeed), *args.overrides]
    return args


def with_deepspeed(file: str) -> list[str]:
    """The overrides that `--deepspeed FILE` is short for."""
    return ["engine.kind=deepspeed", f"engine.config={json.dumps(file)}"]


def run(argv: list[str], place: RankInfo) -> int:
    """Runs one rank. Returns its exit status, or raises `UserError`."""
    args = parse(argv)
    # What can be wrong is found here, before torch is imported and before any rank waits for another.
    world_size, note = place.world_size, ""
    if args.print_config:
        is_launched = place.world_size > 1 or launcher_of(os.environ) is not None
        launched = place.world_size if is_launched else None
        world_size, note = printed_world(args.config, args.overrides, args.world, launched)
    loaded = load(args.config, args.overrides, world_size)
    check_launcher(loaded.config)
    if loaded.config.parallel.schedule.startswith("file:"):
        partitioned(loaded.config)
    refuse_overwriting(args.config, loaded)
    if args.print_config:
        if place.rank == 0:
            print_config(loaded, note, describe=args.describe)
        return 0
    folder = Path(resolved(loaded.config.log.dir))
    with StopRequest(folder if place.rank == 0 else None) as stop:
        return train(loaded.config, place, stop)


def print_config(loaded: Resolved, note: str, *, describe: bool) -> None:
    """Print every value and its origin, and which parameters have which optimizer if they differ."""
    parts = [note, config_table(loaded, describe=describe)]
    if loaded.config.optim.groups or loaded.config.model.parametrization == "mup":
        from megacore.tools.settings.group_table import group_table

        parts.append(group_table(loaded.config))
    print("\n\n".join(filter(None, parts)))


def refuse_overwriting(path: str, loaded: Resolved) -> None:
    """Raises `ConfigError` if the run would write its record, `config.json`, over the user's file.

    A record states what is derived.
    """
    record = f"{resolved(loaded.config.log.dir)}/config.json"
    if "derived" in loaded.origins.values() and os.path.exists(record) and os.path.samefile(record, path):
        raise ConfigError(
            "log.dir",
            f"the run would write its record over {path}",
            "another folder, or another name for the file",
        )


def train(config: Config, place: RankInfo, stop: StopRequest, callbacks: Sequence["Listener"] = ()) -> int:
    """Join the mesh and train, with these `callbacks` too. Return the exit status."""
    from megacore.checkpoint.weights import DOCUMENTS_BOS
    from megacore.distributed.init import joined, own_mistakes
    from megacore.tools.choices.check_engine import check_engine
    from megacore.tools.choices.run import trainer_of
    from megacore.tools.crowd import share_cores
    from megacore.tools.diagnosis.failure_note import NOT_MET, FailureNote
    from megacore.tools.diagnosis.guardians import Guardians
    from megacore.tools.folder_lock import FolderLock, apart_from_owner
    from megacore.tools.inputs import Inputs
    from megacore.tools.machine.device import take_device
    from megacore.tools.mirror import Mirror
    from megacore.tools.startup_lines import startup_lines
    from megacore.tools.text.vocabulary import corpora_begin_with_bos, prefixes_of

    with own_mistakes():
        device = take_device(config, place)
        config = partitioned(config)
        check_engine(config, device)
        folder = Path(resolved(config.log.dir))
        lock = FolderLock(folder) if place.rank == 0 else None
        if lock is not None:
            lock.take()  # of a run that goes on: before its newest checkpoint is looked for
            FailureNote(folder, NOT_MET).begin()  # the reason of an earlier run would outlive a failure below
        mirror = Mirror(config, place)
        inputs = Inputs(config, place.rank, scan=place.local_rank == 0)
        if place.rank == 0:
            print_warnings(config, inputs)
        callbacks = [*callbacks_of(config, place, device, stop, mirror), *callbacks]
        if lock is not None:
            lock.take()  # of a new one, whose folder is there only now
    guard = Guardians(config, place, device, folder)
    with joined(config, place, device, guard, callbacks) as mesh, mirror:
        if place.rank == 0:
            StandardStream.continues = "training"
        trainer = trainer_of(config, mesh, inputs, apart_from_owner(folder, mesh))
        mesh.listeners.add(*share_cores(trainer.config, place.world_size, device))
        if place.rank == 0:  # whose state is saved
            prefixes = prefixes_of(config.data.train)
            trainer.extra_state[DOCUMENTS_BOS] = corpora_begin_with_bos(prefixes, config.data.tokenizer)
        mirror.begin(trainer.step, trainer.latest)
        for line in startup_lines(trainer, inputs):
            mesh.print(line)
        status = trainer.run(lambda: stop.requested)
        if stop.found:  # rank 0 alone looks for the file
            print(f"remove {stop.file} before you start the run again", flush=True)
        return status


def callbacks_of(
    config: Config, place: RankInfo, device: "torch.device", stop: StopRequest, mirror: "Mirror"
) -> list["Listener"]:
    """Return the callbacks of one rank of a run, in the order in which they are called."""
    from megacore.tools.drift import Drift
    from megacore.tools.garbage import Garbage
    from megacore.tools.monitoring import attach
    from megacore.tools.monitoring.best import BestKept
    from megacore.tools.monitoring.first_step import FirstStep, StartUp

    callbacks: list[Listener] = [
        Garbage(),  # collects Python's garbage after the same steps on all ranks
        StartUp(stop),  # from the first step on, a request to stop saves a checkpoint
        mirror,  # copies checkpoints to checkpoint.mirror
    ]
    if config.parallel.tensor > 1:
        callbacks.append(Drift())  # compares the parameters that tensor ranks hold alike
    if place.rank == 0:
        callbacks.append(FirstStep())  # prints how far a long first step is
    if place.rank == 0 and config.checkpoint.best:
        callbacks.append(BestKept())  # keeps the checkpoint with the least validation loss
    # Console, TensorBoard, wandb, Prometheus, profiler and statistics, then those of a custom model's file.
    callbacks += attach.callbacks_of(config, place, device)
    return callbacks


def print_warnings(config: Config, inputs: "Inputs") -> None:
    """Print what a user may want to change before a long run."""
    from megacore.tools.choices.bubble import bubble_warning
    from megacore.tools.settings.validation import warmup_warning
    from megacore.tools.text.vocabulary import vocabulary_warnings

    warnings = [
        *vocabulary_warnings(config),
        warmup_warning(config),
        bubble_warning(config),
        inputs.unread_weights,
        print_note(config),
    ]
    for warning in filter(None, warnings):
        print(warning, flush=True)


if __name__ == "__main__":
    exit_rank_with(run)
