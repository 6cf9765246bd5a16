"""launch/ray_train.py before Ray starts anything: how a config becomes workers, and what is refused."""

import contextlib
import json
import os
import re
import signal
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

from launch.ray_train import end_of, figures, parse, run, scale, work
from megacore.config import Config
from megacore.distributed.rank_info import RankInfo
from megacore.errors import ConfigError
from megacore.tools.diagnosis.failure import fail
from megacore.tools.interrupt import interrupted_status
from megacore.tools.relaunch.ray_cluster import RayCluster, room_in
from megacore.tools.relaunch.scaling import Rules
from tests.training import write_config

EIGHT = {"CPU": 8.0, "GPU": 4.0, "memory": 1e9}


@pytest.fixture
def config(tmp_path: Path) -> str:
    """A config with a global batch of 8."""
    return write_config(tmp_path, "nowhere")


def test_workers_are_as_many_as_the_cluster_has_room_for() -> None:
    """Ray would wait for ever for workers that fit on no machine, or leave GPUs unused."""
    assert scale(None, False, 1, EIGHT) == (8, 8)
    assert scale(None, False, 3, EIGHT) == (2, 2)
    assert scale(None, True, 1, EIGHT) == (4, 4)
    assert scale((2, 16), True, 1, EIGHT) == (2, 16)  # more machines may come


@pytest.mark.parametrize(
    "wanted, gpu, cpus, said",
    [
        (
            (9, 9),
            False,
            1,
            "9 workers of 1 CPU do not fit on the cluster, which has 8 CPUs and 4 GPUs (at most 8)",
        ),
        (
            (5, 9),
            True,
            1,
            "5 workers of 1 CPU and a GPU do not fit on the cluster, which has 8 CPUs and 4 GPUs (at most 4)",
        ),
        (
            None,
            False,
            9,
            "1 workers of 9 CPUs do not fit on the cluster, which has 8 CPUs and 4 GPUs (machines that "
            "have them)",
        ),
    ],
)
def test_more_workers_than_the_cluster_has(
    wanted: tuple[int, int] | None, gpu: bool, cpus: int, said: str
) -> None:
    """The run would wait instead of saying so."""
    with pytest.raises(ConfigError) as error:
        scale(wanted, gpu, cpus, EIGHT)
    assert str(error.value) == f"config error: --world: {said}"


def node(cpus: float, gpus: float = 0.0, alive: bool = True) -> dict[str, object]:
    return {"Alive": alive, "Resources": {"CPU": cpus, "GPU": gpus}}


@pytest.mark.parametrize(
    ("nodes", "free", "each", "used", "room"),
    [
        # one of each node's is too few
        ([node(3), node(3), node(2, alive=False)], {"CPU": 6}, {"CPU": 2}, 0, (2, 2)),
        ([node(2), node(2)], {"CPU": 2}, {"CPU": 2}, 1, (2, 2)),
        ([node(2), node(2)], {"CPU": 1}, {"CPU": 2}, 1, (2, 1)),  # somebody else is there
        ([node(8, 2), node(8)], {"CPU": 16, "GPU": 2}, {"CPU": 1, "GPU": 1}, 0, (2, 2)),
        ([], {}, {"CPU": 1}, 0, (0, 0)),
    ],
)
def test_the_room_in_a_cluster(nodes: list, free: dict, each: dict, used: int, room: tuple[int, int]) -> None:
    """A run in good health would be stopped for workers that fit on no node, or that others have taken."""
    assert room_in(nodes, free, each, used) == room


def test_each_start_is_a_run_of_fixed_size(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A worker that fits into no layout would wait in Ray, and a run that lost a
    machine would not be laid out anew.
    """
    state = SimpleNamespace(nodes=lambda: [node(3)], available_resources=lambda: {"CPU": 3.0})
    cluster = RayCluster(config, ["train.steps=7"], Rules(1, 8), {"CPU": 1})
    with mock.patch.dict(sys.modules, {"ray": state}):
        words = cluster.command(["python", "ray_train.py"], tmp_path)
        assert (
            words[:5] == ["python", "ray_train.py", "--world", "2", "train.steps=7"]
            and "parallel.data=auto" in words
        )
        state.nodes, state.available_resources = lambda: [node(3), node(1)], lambda: {"CPU": 2.0}
        assert cluster.look() == "the Ray cluster has 4 slots: 2 ranks become 4"
        cluster.ended(gained=True, failed=True)
        state.nodes, state.available_resources = lambda: [node(3, alive=False), node(1)], lambda: {"CPU": 1.0}
        assert cluster.command([], tmp_path)[:2] == ["--world", "1"]
        state.nodes = list
        assert cluster.look() == "", "nothing is left: Ray will say so"
    said = capsys.readouterr().out
    assert "2 ranks on the Ray cluster: " in said and "left over: the Ray cluster (1 slot)" in said


class AuthenticationError(Exception):
    """As Ray 2.60 calls it."""


@pytest.mark.parametrize(
    ("error", "mode", "said"),
    [
        (
            AuthenticationError("Token authentication is enabled but no authentication token was found"),
            "token",
            "this machine has no token for RAY_AUTH_MODE=token (the cluster's token in ~/.ray/auth_token or",
        ),
        (
            ConnectionError("Failed to connect to Ray cluster at node0:6379"),
            None,
            "cannot connect to a Ray cluster at node0:6379 (a cluster that runs there; if it asks for a "
            "token, RAY_AUTH_MODE=token and the cluster's token in",
        ),
        (
            ConnectionError("Failed to connect to Ray cluster at node0:6379"),
            "token",
            "cannot connect to a Ray cluster at node0:6379 (a cluster that runs there, and the cluster's",
        ),
    ],
)
def test_a_cluster_that_asks_for_a_token(
    config: str, monkeypatch: pytest.MonkeyPatch, error: Exception, mode: str | None, said: str
) -> None:
    """Ray ends with a traceback, and of a missing token it says that it cannot connect."""

    def init(**options: object) -> None:
        raise error

    ray, train = SimpleNamespace(init=init), SimpleNamespace(TrainingFailedError=RuntimeError)
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setitem(sys.modules, "ray.train", train)
    monkeypatch.setenv("RAY_ADDRESS", "node0:6379")
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    if mode is not None:
        monkeypatch.setenv("RAY_AUTH_MODE", mode)
    with pytest.raises(ConfigError) as raised:
        run(["--config", config, "--world", "1"])
    assert str(raised.value).startswith(f"config error: ray: {said}")


def test_other_errors_of_ray_keep_their_traceback(config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**options: object) -> None:
        raise RuntimeError("the disk of the object store is full")

    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(init=init))
    monkeypatch.setitem(sys.modules, "ray.train", SimpleNamespace(TrainingFailedError=ValueError))
    with pytest.raises(RuntimeError, match="object store"):
        run(["--config", config, "--world", "1"])


@pytest.mark.parametrize("text", ["0", "8:4", "x", "", "4:", "-1", "1.5", "1:2:3", "9" * 9])
def test_workers_that_are_no_number(text: str) -> None:
    """A traceback, or a range that holds nothing."""
    with pytest.raises(
        ConfigError, match=rf"^config error: --world: {re.escape(text)} is not a number of ranks"
    ):
        parse(["--config", "c.json", f"--world={text}"])


@pytest.mark.parametrize(
    "option",
    [
        "--cpus=0",
        "--restarts=-2",
        "--poll=0",
        "--resize-pause=-1",
        "--ranks-command=echo",
        "--ranks-command=",
    ],
)
def test_options_out_of_range(option: str) -> None:
    """Ray's own message would be a traceback."""
    with pytest.raises(ConfigError, match=option.partition("=")[0]):
        parse(["--config", "c.json", option])


def test_without_ray_and_with_a_layout_that_does_not_fit(
    config: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A traceback from the import; and a layout that cannot be must be refused
    before Ray is asked for anything.
    """
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setenv("RAY_CHDIR_TO_TRIAL_DIR", "")
    monkeypatch.setenv("RAY_TRAIN_COLLECTIVE_WARN_INTERVAL_S", "")
    monkeypatch.setenv("RAY_TRAIN_ENABLE_PRINT_PATCH", "")
    with pytest.raises(
        ConfigError, match=r"^config error: ray: Ray Train cannot be imported .*pip install -e '\.\[ray\]'"
    ):
        run(["--config", config, "--world", "2"])
    with pytest.raises(ConfigError, match="config error: parallel"):
        run(["--config", config, "--world", "3", "parallel.tensor=2"])


@pytest.mark.parametrize("nodes", [(3, 1), (1, 3), (2, 2)])
def test_each_worker_has_its_place(
    config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nodes: tuple[int, ...]
) -> None:
    """Nodes that have unequally many workers: ranks that are computed from one node's number
    would be there twice, or not at all.
    """
    places: list[RankInfo] = []

    def train(config: Config, place: RankInfo, *_: object) -> int:
        places.append(place)
        return 0

    reports = SimpleNamespace(
        during=lambda training: training(), send=lambda: None, waiting=SimpleNamespace(put=None)
    )
    monkeypatch.setattr("launch.ray_train.Reports", lambda rank, folder: reports)
    monkeypatch.setattr("megacore.launch.pretrain.train", train)
    start = {"cwd": str(tmp_path), "config": config, "overrides": [], "folder": str(tmp_path / "run")}
    workers = [(node, local) for node, count in enumerate(nodes) for local in range(count)]
    for rank, (node, local) in enumerate(workers):
        own = {
            "world_rank": rank,
            "local_rank": local,
            "node_rank": node,
            "local_world_size": nodes[node],
            "world_size": len(workers),
        }
        context = SimpleNamespace(
            **{f"get_{name}": lambda number=number: number for name, number in own.items()}
        )
        modules = {
            "ray": SimpleNamespace(),
            "ray.train": SimpleNamespace(get_context=lambda context=context: context),
            "ray.train.collective": SimpleNamespace(
                broadcast_from_rank_zero=lambda value: ("10.0.0.1", 1234)
            ),
            "ray.util": SimpleNamespace(get_node_ip_address=lambda node=node: f"10.0.0.{node}"),
        }
        with mock.patch.dict(sys.modules, modules), mock.patch.dict(os.environ), contextlib.chdir(tmp_path):
            assert work(start) == 0
    expected = [(node, local) for node, count in enumerate(nodes) for local in range(count)]
    assert places == [
        RankInfo(rank, len(expected), local, nodes[node], "10.0.0.1", 1234, guest=True)
        for rank, (node, local) in enumerate(expected)
    ]


def test_the_figures_of_a_checkpoint(tmp_path: Path) -> None:
    """Ray would show the loss of another step: records of a restart hold a step twice, and a save
    in the background is seen late.
    """
    lines = [
        {"step": 1, "loss": 3.0},
        {"step": 2, "loss": 2.5},
        {"step": 2, "valid_loss": 9.0},
        {"step": 3, "loss": 2.0},
    ]
    damage = '{"loss": }\n["loss"]\n{"step": "2", "loss": 1}\n'
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + damage)
    assert figures(tmp_path, tmp_path / "checkpoints" / "step_00000002") == {"step": 2, "loss": 2.5}
    assert figures(tmp_path, tmp_path / "checkpoints" / "step_00000007") == {"step": 7}


def test_the_end_says_why() -> None:
    """Ray's own words are pages long, and a mistake in the config would end with the status of a crash."""
    refused = RuntimeError(
        "Training failed due to controller error:\nmegacore refuses: data error: x.bin: missing (…)\n  File …"
    )
    assert end_of(refused) == (2, "data error: x.bin: missing (…)")
    failed = RuntimeError("Training failed")
    died, own = (
        RuntimeError("The actor died unexpectedly.\nIt is dead."),
        ValueError("Traceback …\nValueError: nan"),
    )
    failed.worker_failures = {0: died, 3: own}  # type: ignore[attr-defined]
    assert end_of(failed) == (1, "rank 3 failed: ValueError: nan")
    failed.worker_failures = {2: died}  # type: ignore[attr-defined]
    assert end_of(failed) == (1, "rank 2 failed: It is dead.")
    assert end_of(RuntimeError("lost")) == (1, "failed: lost")


@pytest.mark.parametrize("error", [ConfigError("data", "wrong", "right"), ValueError("nan")])
def test_a_rank_in_rays_process_does_not_end_it(error: Exception, capsys: pytest.CaptureFixture[str]) -> None:
    """Ray would see a worker that died, and not the exception that says why."""
    fail(error, RankInfo(guest=True), None)
    assert ("failed: ValueError: nan" in capsys.readouterr().err) == (type(error) is ValueError)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_a_run_of_ray(
    config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, status: int
) -> None:
    """Ray takes both signals: after Ctrl-C it waits for its workers, and its statuses are 1 and 15."""
    shut_down = threading.Event()

    class Settings:
        def __init__(self, *values: object, **settings: object) -> None:
            pass

    class Trainer(Settings):
        def _register_sigint_handler(self, controller: object) -> None:
            signal.signal(signal.SIGINT, lambda *_: None)

        def fit(self) -> SimpleNamespace:
            self._register_sigint_handler(None)
            try:
                os.kill(os.getpid(), number)
                assert shut_down.wait(5)
            except SystemExit:
                pytest.fail("in its own calls, Ray ends the process with status 1")
            return SimpleNamespace(return_value=0)

    def init(**options: object) -> None:
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(number))

    names = ("FailureConfig", "RunConfig", "ScalingConfig", "UserCallback", "Backend", "TorchConfig")
    train = SimpleNamespace(**dict.fromkeys(names, Settings), TorchTrainer=Trainer)
    train.TrainingFailedError = RuntimeError
    ray = SimpleNamespace(init=init, cluster_resources=lambda: EIGHT, shutdown=shut_down.set)
    monkeypatch.setitem(sys.modules, "ray", ray)
    for module in ("ray.train", "ray.train.backend", "ray.train.torch"):
        monkeypatch.setitem(sys.modules, module, train)
    handlers = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt) as raised:
            run(["--world", "2", "--config", config, f"log.dir={tmp_path / 'run'}"])
    finally:
        for each, handler in handlers.items():
            signal.signal(each, handler)
    assert interrupted_status(raised.value) == status and shut_down.is_set()
