"""Train a GPT under Ray Train: as launch/pretrain.py does, with one Ray worker for every rank."""

import os
import sys

# so that a checkout runs without being installed; an installed script has no such folder
if os.path.isdir(os.path.dirname(os.path.realpath(__file__)) + "/../megacore"):
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.realpath(__file__))))

import megacore.tools.interrupt  # noqa: F401  (first: Ctrl-C during the other imports prints no traceback)

# isort: split
import argparse
import json
import queue
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megacore.config import Config
from megacore.config.schema import resolved
from megacore.errors import ConfigError, UserError
from megacore.files import ROOT, check_folder, open_plain
from megacore.tools.cli import Parser, add_config, add_overrides, exit_with, unwind_on_sigterm
from megacore.tools.launchers import place_from_environment
from megacore.tools.local_ranks import free_port
from megacore.tools.metrics_file import LINE_BYTES, recorded
from megacore.tools.relaunch.hosts import load_any, plan
from megacore.tools.relaunch.ray_cluster import RayCluster
from megacore.tools.relaunch.scaling import add_options, rules_of, size_of
from megacore.tools.relaunch.supervisor import Supervisor
from megacore.tools.settings.launcher_settings import check_launcher
from megacore.tools.settings.load import load
from megacore.tools.stop_request import StopRequest

if TYPE_CHECKING:
    from ray.train.torch import TorchTrainer

EXAMPLE = "python launch/ray_train.py --world 8 --config configs/gpt_7b.json checkpoint.every=500"
NOTES = (
    "Ray places the workers on its cluster (RAY_ADDRESS, or this machine alone), and restarts them after a "
    "failure from the newest checkpoint. With a range such as --world 8:16 the run also uses machines that "
    "join and continues without machines that leave. To stop it, create a file STOP in log.dir."
)
STATUS = (
    "0 finished, 2 bad config, data or arguments, 75 stopped on request after saving, 130 or 143 after "
    "Ctrl-C or SIGTERM, any other: failed"
)
# Ray's, of checkpoints that we may have removed since: it would then start no run
SNAPSHOT = "checkpoint_manager_snapshot.json"
REFUSED = "megacore refuses: "  # begins the message of an error that another start would meet again


def parser() -> Parser:
    """Return the parser of the command line."""
    parser = Parser(
        "Train a GPT model under Ray Train, with one worker for every rank.",
        example=EXAMPLE,
        notes=NOTES,
        status=STATUS,
        page="docs/operations.md",
    )
    add_config(parser)
    parser.add_argument(
        "--world",
        metavar="N|MIN:MAX",
        help="number of ranks, or the fewest and the most (default: one for each GPU of the cluster, or for "
        "each CPU without GPUs)",
    )
    parser.add_argument("--cpus", type=int, default=1, metavar="N", help="CPU cores for each worker")
    restarts = (
        "failures after which the run is given up; with MIN:MAX, failures in a row without progress; -1: "
        "never"
    )
    parser.add_argument("--restarts", type=int, default=3, metavar="N", help=restarts)
    add_options(parser)
    add_overrides(parser)
    parser.add_alias("--workers", "--world")
    return parser


def parse(argv: list[str]) -> argparse.Namespace:
    """Return the parsed command line. Raises `ConfigError`."""
    args = parser().parse_intermixed_args(argv)
    args.world = None if args.world is None else size_of("--world", args.world)
    args.elastic = args.world is not None and args.world[0] < args.world[1]
    args.rules = rules_of(args, args.world)
    if args.ranks_command is not None and not args.elastic:
        raise ConfigError("--ranks-command", "the number of ranks is fixed", "a range such as --world 8:16")
    for option, least in (("cpus", 1), ("restarts", -1)):
        if getattr(args, option) < least:
            raise ConfigError(f"--{option}", f"{getattr(args, option)} is not usable", f"{least} or more")
    return args


def scale(
    wanted: tuple[int, int] | None, gpu: bool, cpus: int, resources: dict[str, float]
) -> tuple[int, int]:
    """The least and the most workers on a cluster with these resources.

    Raises `ConfigError` if they are not enough.
    """
    room = int(resources.get("CPU", 0) // cpus)
    if gpu:
        room = min(room, int(resources.get("GPU", 0)))
    least, most = wanted or (max(1, room), max(1, room))
    if least > room:
        each = f"{cpus} CPU{'s' * (cpus > 1)}{' and a GPU' * gpu}"
        wrong = (
            f"{least} workers of {each} do not fit on the cluster, which has {' and '.join(has(resources))}"
        )
        raise ConfigError("--world", wrong, f"at most {room}" if room else "machines that have them")
    return least, most


def has(resources: dict[str, float]) -> list[str]:
    """What a cluster has, in words."""
    return [f"{int(resources.get(name, 0))} {name}s" for name in ("CPU", "GPU")]


def run(argv: list[str]) -> int:
    """Trains, and returns the exit status."""
    args = parse(argv)
    device = load_any(args.config, args.overrides).train.device
    for workers in args.world or ():  # refused before Ray starts anything
        plan(args.config, args.overrides, workers) if args.elastic else load(
            args.config, args.overrides, workers
        )
    # workers wait as long as there is no checkpoint to report
    os.environ.setdefault("RAY_TRAIN_COLLECTIVE_WARN_INTERVAL_S", "86400")
    os.environ.setdefault("RAY_TRAIN_ENABLE_PRINT_PATCH", "0")  # it would print each line twice
    os.environ["RAY_CHDIR_TO_TRIAL_DIR"] = "0"  # a config's paths count from where the command was typed
    try:
        import ray
        from ray.train import TrainingFailedError
    except ImportError as error:
        raise ConfigError(
            "ray", f"Ray Train cannot be imported ({error})", "pip install -e '.[ray]'"
        ) from None
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    try:
        ray.init(logging_level="WARNING", runtime_env={"env_vars": {"PYTHONPATH": path}})
    except Exception as error:
        refuse_connection(error)
        raise
    except SystemExit:  # by Ray's handler of SIGTERM, whose status is 15
        raise KeyboardInterrupt(signal.SIGTERM) from None
    unwind_on_sigterm()
    try:
        resources = ray.cluster_resources()
        gpu = device == "cuda" or (device == "auto" and resources.get("GPU", 0) > 0)
        workers = scale(args.world, gpu, args.cpus, resources)
        config = (
            load_any(args.config, args.overrides)
            if args.elastic
            else load(args.config, args.overrides, workers[0]).config
        )
        folder = Path(resolved(config.log.dir)).absolute()
        check_folder("log.dir", folder)
        if args.elastic:
            return supervised(args, config, folder, gpu)
        start = {
            "cwd": os.getcwd(),
            "config": args.config,
            "overrides": args.overrides,
            "folder": str(folder),
        }
        print(
            f"ray_train: waiting for {workers[0]} workers; the cluster has {' and '.join(has(resources))}",
            file=sys.stderr,
            flush=True,
        )
        (folder / SNAPSHOT).unlink(missing_ok=True)
        status: int = trainer(start, workers[0], gpu, args.cpus, args.restarts).fit().return_value
        return status
    except TrainingFailedError as error:
        status, line = end_of(error)
    finally:
        ray.shutdown()  # behind which nobody else speaks
    print(line, file=sys.stderr)
    return status


def refuse_connection(error: Exception) -> None:
    """Raise `ConfigError` if Ray could not reach its cluster, or has not the token that the cluster asks for.

    Ray itself ends with a traceback. Without RAY_AUTH_MODE it sends no token to an address that is given, and
    of a wrong token or none it says only that it cannot connect.
    """
    token = "the cluster's token in ~/.ray/auth_token or RAY_AUTH_TOKEN"
    if type(error).__name__ == "AuthenticationError":  # of ray.exceptions, from Ray 2.52 on
        raise ConfigError("ray", "this machine has no token for RAY_AUTH_MODE=token", token) from None
    if isinstance(error, ConnectionError):
        address = os.environ.get("RAY_ADDRESS", "its address")
        right = "a cluster that runs there"
        if os.environ.get("RAY_AUTH_MODE", "").lower() == "token":
            right += f", and {token}"
        else:
            right += f"; if it asks for a token, RAY_AUTH_MODE=token and {token}"
        raise ConfigError("ray", f"cannot connect to a Ray cluster at {address}", right) from None


def supervised(args: argparse.Namespace, config: Config, folder: Path, gpu: bool) -> int:
    """Keeps the run going on as many workers as the rules allow: each start is this
    script, with a fixed number of them.
    """
    import ray

    os.environ.setdefault("RAY_ADDRESS", ray.get_runtime_context().gcs_address)
    each = {"CPU": args.cpus} | ({"GPU": 1} if gpu else {})
    cluster = RayCluster(args.config, args.overrides, args.rules, each)
    script = [
        sys.executable,
        str(Path(__file__).resolve()),
        "--config",
        args.config,
        "--cpus",
        str(args.cpus),
        "--restarts",
        "0",
    ]
    restarts = sys.maxsize if args.restarts < 0 else args.restarts
    return Supervisor(script, folder, fleet=cluster, restarts=restarts, steps=config.train.steps).run()


def end_of(error: Exception) -> tuple[int, str]:
    """The exit status after Ray has given up with this error, and the line that says why."""
    _, refused, line = str(error).partition(REFUSED)
    if refused:
        return 2, line.splitlines()[0]
    failures: dict[int, Exception] = getattr(error, "worker_failures", {})
    # Other workers end when one has failed; Ray knows only that they died.
    for rank, failure in sorted(
        failures.items(), key=lambda failed: ("actor died" in str(failed[1]), failed[0])
    ):
        return 1, f"rank {rank} failed: {str(failure).strip().splitlines()[-1]}"
    return 1, f"failed: {error}"


def trainer(start: dict[str, Any], workers: int, gpu: bool, cpus: int, restarts: int) -> "TorchTrainer":
    """Ray's trainer, which calls `work(start)` in every worker."""
    from ray.train import FailureConfig, RunConfig, ScalingConfig, UserCallback
    from ray.train.backend import Backend
    from ray.train.torch import TorchConfig, TorchTrainer

    class NoGroup(Backend):
        """Makes no process group: the mesh makes its own."""

        share_cuda_visible_devices = True  # as under torchrun: a rank takes the GPU of its local rank

    class Ranks(TorchConfig):
        """Ray's settings for PyTorch, with that."""

        backend_cls = property(lambda self: NoGroup)

    class Refusals(UserCallback):
        """Ends the run at a mistake that every start would meet again."""

        def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
            for error in worker_exceptions.values():
                _, refused, line = str(error).partition(REFUSED)
                if refused:
                    raise RuntimeError(REFUSED + line)

    class Interruptible(TorchTrainer):
        """Ray's trainer without its handler of Ctrl-C, which waits for workers and ends with status 1."""

        def _register_sigint_handler(self, controller: Any) -> None:
            """Leave Ctrl-C to the command, whose end also ends the workers."""

    folder = Path(start["folder"])
    # Without restarts nothing is waited for either, such as a machine that has just been lost: whoever
    # started this knows better.
    limits = {"controller_failure_limit": 0, "max_preemption_failures": 0} if restarts == 0 else {}
    return Interruptible(
        work,
        train_loop_config=start,
        torch_config=Ranks(),
        scaling_config=ScalingConfig(
            num_workers=workers,
            use_gpu=gpu,
            resources_per_worker={"CPU": cpus} | ({"GPU": 1} if gpu else {}),
        ),
        # log.dir is Ray's folder of the run too: it refers to our checkpoints there, and copies none.
        run_config=RunConfig(
            name=folder.name,
            storage_path=str(folder.parent),
            failure_config=FailureConfig(max_failures=restarts, **limits),
            callbacks=[Refusals()],
        ),
    )


def work(start: dict[str, Any]) -> int:
    """One worker's part in the run, in a thread of a process of Ray's.

    Returns the exit status of launch/pretrain.py.
    """
    from ray.train import get_context
    from ray.train.collective import broadcast_from_rank_zero
    from ray.util import get_node_ip_address

    os.chdir(start["cwd"])
    context, folder = get_context(), Path(start["folder"])
    rank, local_rank = context.get_world_rank(), context.get_local_rank()
    address, port = broadcast_from_rank_zero((get_node_ip_address(), free_port()))
    reports = Reports(rank, folder)
    try:
        overrides = [*start["overrides"], f"log.dir={folder}"]
        world, beside = context.get_world_size(), context.get_local_world_size()
        config = load(start["config"], overrides, world).config
        check_launcher(config)
        numbers = {
            "RANK": rank,
            "WORLD_SIZE": world,
            "LOCAL_RANK": local_rank,
            "LOCAL_WORLD_SIZE": beside,
            "MASTER_PORT": port,
        }
        os.environ.update({"MASTER_ADDR": address} | {name: str(number) for name, number in numbers.items()})
        from megacore.launch.pretrain import train
        from megacore.train.callbacks import Callback

        class ReportCheckpoints(Callback):
            def on_checkpoint(self, path: Path) -> None:
                reports.waiting.put(path)

        place = replace(place_from_environment(), guest=True)
        # Only a main thread can take signals, so the file alone stops the run.
        stop = StopRequest(folder if rank == 0 else None)
        return reports.during(lambda: train(config, place, stop, [ReportCheckpoints()]))
    except UserError as error:
        raise RuntimeError(f"{REFUSED}{error}") from error


class Reports:
    """Tells Ray of checkpoints.

    All workers must make each report together, so a thread makes them and training waits for none.
    """

    def __init__(self, rank: int, folder: Path) -> None:
        """`folder`: the run's."""
        self.rank, self.folder = rank, folder
        # checkpoints to be reported by rank 0; None after the last
        self.waiting: queue.SimpleQueue[Path | None] = queue.SimpleQueue()
        self.error: BaseException | None = None

    def during(self, training: Callable[[], int]) -> int:
        """Trains, and reports meanwhile. Returns what training returns, once all is reported."""
        thread = threading.Thread(target=self._send, name="reports", daemon=True)
        thread.start()
        status = training()
        self.waiting.put(None)
        thread.join()
        if self.error is not None:
            raise self.error
        return status

    def _send(self) -> None:
        try:
            self.send()
        except BaseException as error:  # raised at the end of training
            self.error = error

    def send(self) -> None:
        """Makes all reports. The folder that Ray is told of is the checkpoint itself."""
        from ray.train import Checkpoint, CheckpointUploadMode, report
        from ray.train.collective import broadcast_from_rank_zero

        while path := broadcast_from_rank_zero(str(self.waiting.get() or "") if self.rank == 0 else None):
            metrics, checkpoint = (
                (figures(self.folder, Path(path)), Checkpoint.from_directory(path))
                if self.rank == 0
                else ({}, None)
            )
            report(metrics, checkpoint, checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD)


def figures(folder: Path, checkpoint: Path) -> dict[str, Any]:
    """What a run has logged of a checkpoint's step; the step alone where it has logged nothing."""
    step = int(checkpoint.name.rpartition("_")[2])
    with suppress(OSError, ValueError, IndexError), open_plain(folder / "metrics.jsonl") as file:
        found = [
            line for logged, line in recorded(file, 2 * LINE_BYTES) if logged == step and b'"loss"' in line
        ]
        return {
            name: figure for name, figure in json.loads(found[-1]).items() if not isinstance(figure, list)
        }
    return {"step": step}


if __name__ == "__main__":
    exit_with(run)
