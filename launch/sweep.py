"""Run trainings over a grid or random search of settings, on this machine or under Slurm; then report a
table, a picture, and the best config.
"""

import os
import sys

# so that a checkout runs without being installed; an installed script has no such folder
if os.path.isdir(os.path.dirname(os.path.realpath(__file__)) + "/../megacore"):
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.realpath(__file__))))

import megacore.tools.interrupt  # noqa: F401  (first: Ctrl-C during the other imports prints no traceback)

# isort: split
import argparse
import math
import shutil
from functools import partial
from pathlib import Path

from megacore.distributed.processes import available_cores
from megacore.errors import ConfigError
from megacore.files import check_folder
from megacore.tools.cli import Parser, count, exit_with
from megacore.tools.sweep.before import check_data, places
from megacore.tools.sweep.folder import SweepFolder
from megacore.tools.sweep.results import Results, Row, metric_of, rows_of, show, write
from megacore.tools.sweep.slurm import check_job, submit, write_job
from megacore.tools.sweep.spec import read_spec
from megacore.tools.sweep.trials import trials_of

EXAMPLES = (
    "python launch/sweep.py configs/sweeps/learning_rate.json --dry-run",
    "python launch/sweep.py configs/sweeps/learning_rate.json",
)
NOTES = (
    "The file has a config, overrides for all trials, and a grid of values or a random search. Running the "
    "same command again keeps finished trials, resumes others from their checkpoints, and runs values that "
    "were added."
)


def parser() -> Parser:
    """Return the parser of the command line."""
    parser = Parser(
        "Train with every combination of some settings, and report the best one.",
        example=EXAMPLES,
        notes=NOTES,
        status="0 all trials finished, 1 some failed, 2 wrong arguments, 75 stopped on request (Ctrl-C)",
        page="docs/research.md",
    )
    parser.add_argument(
        "spec", metavar="FILE.json", help="the sweep, such as configs/sweeps/learning_rate.json"
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="start nothing; check every trial and print how long all of them will take",
    )
    parser.add_argument(
        "--report",
        action="store_true",
        help="start nothing; write table, picture and files of the trials so far",
    )
    parser.add_argument(
        "--at-once",
        type=count,
        metavar="N",
        help="trials to run at a time (default: as many as this machine has cores or GPUs for)",
    )
    parser.add_argument(
        "--gpu",
        metavar="NAME",
        help="predict times for this GPU instead of this machine: h100, or a file, as for launch/plan.py",
    )
    parser.add_argument("--cluster", metavar="NAME", help="links of the GPUs, as for launch/plan.py")
    parser.add_argument(
        "--price",
        type=float,
        metavar="PRICE",
        help="price of one GPU for one hour, to predict the cost (default: log.price_per_device_hour)",
    )
    parser.add_argument(
        "--slurm",
        action="store_true",
        help="start nothing here; write a Slurm job array into the sweep's folder",
    )
    parser.add_argument("--submit", action="store_true", help="with --slurm: submit it with sbatch")
    parser.add_argument(
        "--host-size", type=count, default=8, metavar="N", help="with --slurm: ranks on a host"
    )
    parser.add_alias("--device", "--gpu")
    return parser


def parse(argv: list[str]) -> argparse.Namespace:
    """Return the parsed command line. Raises `ConfigError`."""
    args = parser().parse_args(argv)
    if args.price is not None and not 0 <= args.price < math.inf:
        raise ConfigError("--price", f"{args.price} is not usable", "0 or more")
    if args.submit and not args.slurm:
        raise ConfigError("--submit", "there is no job to submit", "also --slurm")
    if args.submit and shutil.which("sbatch") is None:
        raise ConfigError("--submit", "there is no sbatch here", "a machine of a Slurm cluster")
    for option in ("dry_run", "slurm"):
        if args.report and getattr(args, option):
            raise ConfigError("--report", f"stands beside --{option.replace('_', '-')}", "one of the two")
    return args


def report(folder: SweepFolder, results: Results) -> None:
    """Prints the tables, and writes the files and the picture."""
    from megacore.tools.output_files import replaced
    from megacore.tools.sweep.picture import draw

    show(results)
    write(results, folder)
    path = str(folder.path / "sweep.png")
    try:
        with replaced(path) as aside:
            drawn = draw(results, aside)
            if not drawn:
                Path(aside).touch()
        if not drawn:
            Path(path).unlink()
    except OSError as error:
        raise ConfigError("folder", f"cannot write {path}: {error.strerror}", "a folder with room") from None
    files = ["results.json", "results.csv", *(["sweep.png"] if drawn else [])]
    files += ["best.json, which launch/pretrain.py --config takes"] if results.best is not None else []
    print(f"\nin {folder.path}: {', '.join(files)}")


def status_of(rows: list[Row]) -> int:
    """The exit status; names the trials that failed."""
    failed = [row for row in rows if row.status.startswith("failed")]
    if failed:
        names = ", ".join(row.trial.name or "the config" for row in failed[:10])
        print(
            f"{len(failed)} of {len(rows)} trials failed: {names}{' …' if len(failed) > 10 else ''}",
            file=sys.stderr,
        )
    return 1 if failed else 0


def run(argv: list[str]) -> int:
    """Everything that the script does."""
    args = parse(argv)
    spec = read_spec(args.spec)
    trials = trials_of(spec)
    metric = metric_of(trials, spec.metric)
    folder = SweepFolder(Path(spec.folder or Path("runs") / Path(args.spec).stem), trials)
    found = partial(rows_of, folder, spec.last)
    if args.report:
        if not (folder.path / "sweep.json").exists():
            raise ConfigError("--report", f"{folder.path} holds no sweep yet", "first the sweep")
        report(folder, Results(found(), metric, spec.last))
        return status_of(found())
    check_data(trials)
    if not args.dry_run or folder.path.exists():
        check_folder("folder", folder.path)

    from megacore.tools.sweep import price
    from megacore.tools.sweep.local import Local, Stopping

    at_once, gpus, gpu = (
        (args.at_once or len(trials), [], None) if args.slurm else places(args.at_once, trials)
    )
    ranks = max(trial.ranks for trial in trials)
    if args.slurm:
        check_job(folder, found(), args.host_size)
    if args.slurm and args.gpu is None:
        machine = None
    else:
        machine = price.machine_of(
            args.gpu, args.cluster, trials, max(1, available_cores() // (at_once * ranks)), gpu
        )
    price.show(found(), machine, at_once, args.price)
    if args.dry_run:
        return 0

    from megacore.tools.folder_lock import FolderLock

    with Stopping() as stop:
        lock = FolderLock(folder.path, patience=1.0)
        try:
            lock.take()
        except ConfigError as error:
            raise ConfigError(
                "folder", error.wrong.replace("a run that", "a sweep that"), "its end, or --report"
            ) from None
        folder = SweepFolder(folder.path, trials)  # once more: another sweep may have ended meanwhile
        found = partial(rows_of, folder, spec.last)
        folder.write()
        if args.slurm:
            return slurm(args, folder, found())
        Local(folder, at_once, gpus, spec.last).run([row.trial for row in found() if not row.finished], stop)
        stopped = stop.requested
    rows = found()
    print()
    report(folder, Results(rows, metric, spec.last))
    if stopped and not all(row.finished for row in rows):
        print("stopped on request; the same command resumes")
        return 75
    return status_of(rows)


def slurm(args: argparse.Namespace, folder: SweepFolder, rows: list[Row]) -> int:
    """Writes the job, and submits it if asked."""
    if all(row.finished for row in rows):
        print("all trials are finished")
        return 0
    job = write_job(folder, rows, args.host_size, args.at_once)
    if args.submit:
        submit(job)
    else:
        print(f"sbatch {job}")
    return 0


if __name__ == "__main__":
    exit_with(run)
