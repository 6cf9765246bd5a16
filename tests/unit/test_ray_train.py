"""launch/ray_train.py before Ray starts anything: how a config becomes workers, and what is refused."""

import contextlib
import json
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

from launch.ray_train import end_of, figures, lay_out, parse, run, scale, work, workers_of
from megacore.config import Config
from megacore.distributed.rank_info import RankInfo
from megacore.errors import ConfigError
from megacore.tools.diagnosis.failure import fail
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
        ((9, 9), False, 1, "9 workers of 1 CPU do not fit on the cluster, which has 8 CPUs and 4 GPUs (at most 8)"),
        ((5, 9), True, 1, "5 workers of 1 CPU and a GPU do not fit on the cluster, which has 8 CPUs and 4 GPUs (at most 4)"),
        (None, False, 9, "1 workers of 9 CPUs do not fit on the cluster, which has 8 CPUs and 4 GPUs (machines that have them)"),
    ],
)
def test_more_workers_than_the_cluster_has(wanted: tuple[int, int] | None, gpu: bool, cpus: int, said: str) -> None:
    """The run would wait instead of saying so."""
    with pytest.raises(ConfigError) as error:
        scale(wanted, gpu, cpus, EIGHT)
    assert str(error.value) == f"config error: --workers: {said}"


def test_a_fixed_number_keeps_the_layout_and_a_range_adapts_it(config: str) -> None:
    """A run with a fixed layout would change it in silence; one that lost a machine would end because its layout does not fit."""
    wide = ["parallel.tensor=2", "parallel.pipeline=2"]
    fixed, ranks = lay_out(config, wide, 4, elastic=False)
    assert (fixed.parallel.tensor, fixed.parallel.pipeline, fixed.parallel.data, ranks) == (2, 2, 1, 4)
    with pytest.raises(ConfigError, match="parallel"):
        lay_out(config, wide, 6, elastic=False)
    adapted, ranks = lay_out(config, wide, 2, elastic=True)
    assert adapted.parallel.tensor * adapted.parallel.pipeline == 2 and ranks == 2
    adapted, ranks = lay_out(config, [], 3, elastic=True)  # three do not divide the global batch: one worker has nothing to do
    assert (adapted.parallel.data, adapted.train.global_batch_size, ranks) == (2, 8, 2)


@pytest.mark.parametrize("text", ["0", "8:4", "x", "", "4:", "-1", "1.5", "1:2:3", "9" * 9])
def test_workers_that_are_no_number(text: str) -> None:
    """A traceback, or a range that holds nothing."""
    with pytest.raises(ConfigError, match=rf"^config error: --workers: {re.escape(text)} is no number of workers"):
        parse(["--config", "c.json", f"--workers={text}"])


def test_workers_that_are() -> None:
    """4 means 4 to 4."""
    assert (workers_of("4"), workers_of("2:8")) == ((4, 4), (2, 8))


@pytest.mark.parametrize("option", ["--cpus=0", "--restarts=-2"])
def test_options_out_of_range(option: str) -> None:
    """Ray's own message would be a traceback."""
    with pytest.raises(ConfigError, match=option.partition("=")[0]):
        parse(["--config", "c.json", option])


def test_without_ray_and_with_a_layout_that_does_not_fit(config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A traceback from the import; and a layout that cannot be must be refused before Ray is asked for anything."""
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setenv("RAY_CHDIR_TO_TRIAL_DIR", "")
    monkeypatch.setenv("RAY_TRAIN_COLLECTIVE_WARN_INTERVAL_S", "")
    with pytest.raises(ConfigError, match=r"^config error: ray: Ray Train cannot be imported .*pip install -e '\.\[ray\]'"):
        run(["--config", config, "--workers", "2"])
    with pytest.raises(ConfigError, match="config error: parallel"):
        run(["--config", config, "--workers", "3", "parallel.tensor=2"])


@pytest.mark.parametrize(
    ("nodes", "elastic", "on_nodes"),
    [((3, 1), False, (3, 1)), ((1, 3), False, (1, 3)), ((2, 2), False, (2, 2)), ((2, 1), True, (2, 0)), ((1, 2), True, (1, 1))],
)
def test_each_worker_has_its_place(
    config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nodes: tuple[int, ...], elastic: bool, on_nodes: tuple[int, ...]
) -> None:
    """Nodes that have unequally many workers: ranks that are computed from one node's number would be there twice, or not at all. Of
    three workers that may be elastic, one is no rank."""
    places: list[RankInfo] = []

    def train(config: Config, place: RankInfo, *_: object) -> int:
        places.append(place)
        return 0

    reports = SimpleNamespace(during=lambda training: training(), send=lambda: None, waiting=SimpleNamespace(put=None))
    monkeypatch.setattr("launch.ray_train.Reports", lambda rank, folder: reports)
    monkeypatch.setattr("launch.pretrain.train", train)
    start = {"cwd": str(tmp_path), "config": config, "overrides": [], "folder": str(tmp_path / "run"), "elastic": elastic}
    workers = [(node, local) for node, count in enumerate(nodes) for local in range(count)]
    for rank, (node, local) in enumerate(workers):
        own = {"world_rank": rank, "local_rank": local, "node_rank": node, "local_world_size": nodes[node], "world_size": len(workers)}
        context = SimpleNamespace(**{f"get_{name}": lambda number=number: number for name, number in own.items()})
        modules = {
            "ray": SimpleNamespace(),
            "ray.train": SimpleNamespace(get_context=lambda context=context: context),
            "ray.train.collective": SimpleNamespace(broadcast_from_rank_zero=lambda value: ("10.0.0.1", 1234)),
            "ray.util": SimpleNamespace(get_node_ip_address=lambda node=node: f"10.0.0.{node}"),
        }
        with mock.patch.dict(sys.modules, modules), mock.patch.dict(os.environ), contextlib.chdir(tmp_path):
            assert work(start) == 0
    expected = [(node, local) for node, count in enumerate(on_nodes) for local in range(count)]
    assert places == [
        RankInfo(rank, len(expected), local, on_nodes[node], "10.0.0.1", 1234, guest=True) for rank, (node, local) in enumerate(expected)
    ]


def test_the_figures_of_a_checkpoint(tmp_path: Path) -> None:
    """Ray would show the loss of another step: records of a restart hold a step twice, and a save in the background is seen late."""
    lines = [{"step": 1, "loss": 3.0}, {"step": 2, "loss": 2.5}, {"step": 2, "valid_loss": 9.0}, {"step": 3, "loss": 2.0}]
    damage = '{"loss": }\n["loss"]\n{"step": "2", "loss": 1}\n'
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + damage)
    assert figures(tmp_path, tmp_path / "checkpoints" / "step_00000002") == {"step": 2, "loss": 2.5}
    assert figures(tmp_path, tmp_path / "checkpoints" / "step_00000007") == {"step": 7}


def test_the_end_says_why() -> None:
    """Ray's own words are pages long, and a mistake in the config would end with the status of a crash."""
    refused = RuntimeError("Training failed due to controller error:\nmegacore refuses: data error: x.bin: missing (…)\n  File …")
    assert end_of(refused) == (2, "data error: x.bin: missing (…)")
    failed = RuntimeError("Training failed")
    died, own = RuntimeError("The actor died unexpectedly.\nIt is dead."), ValueError("Traceback …\nValueError: nan")
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
