"""log.prometheus_port: what is served, by whom, and that rules and dashboard ask for it."""

import errno
import json
import math
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock
from urllib.parse import parse_qs, urlparse

import pytest
import torch
import yaml

from launch.monitoring import picture
from megacore.distributed.axes import AXES
from megacore.distributed.rank_info import RankInfo
from megacore.errors import ConfigError
from megacore.tools.choices.run import trainer_of
from megacore.tools.inputs import Inputs
from megacore.tools.launchers import place_from_environment
from megacore.tools.local_ranks import free_port
from megacore.tools.monitoring import prometheus as exporter_module
from megacore.tools.monitoring import scrapes, step_parts
from megacore.tools.monitoring.prometheus import DEVICES, OTHERS, PARTS, RANKS, RUN, Exporter
from megacore.tools.monitoring.scrapes import MOST, ScrapeServer
from megacore.tools.monitoring.step_parts import StepParts
from megacore.tools.settings.load import resolve
from megacore.tools.stop_request import STOP
from megacore.train.callbacks import Report
from megacore.train.trainer import STOPPED
from tests.build import mesh_of, run_of
from tests.commands import run_script
from tests.pool import PATIENCE, ROOT
from tests.training import write_config, write_corpus

CPU = torch.device("cpu")
MONITORING = ROOT / "launch" / "monitoring"


def scrape(port: int) -> dict[str, float]:
    """Figures by their name and labels."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=PATIENCE) as answer:
        lines = [line for line in answer.read().decode().splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


def test_a_machine_serves_its_ranks() -> None:
    """Figures of another machine's ranks, or a null that reads as 0, would send people
    to the wrong machine.
    """
    port = free_port()
    exporter = Exporter(port, RankInfo(rank=1, world_size=4, local_rank=0, local_world_size=2), CPU)
    exporter.watch([1, 3])
    try:
        assert math.isnan(scrape(port)["megacore_loss"]), (
            "no step has been logged yet, and a loss of 0 would be drawn"
        )
        figures = {"step": 30, "loss": None, "mfu": 0.4, "memory_bytes": 9}
        by_rank = [1.0, 2.0, 3.0, 4.0]
        exporter.on_log(
            Report(
                figures,
                dict.fromkeys(RANKS, by_rank),
                {"dp": by_rank},
                {},
                checkpoint_step=20,
                checkpoint_seconds=7.0,
            )
        )
        exporter.on_validation(3.5)
        found = scrape(port)
    finally:
        exporter.on_end()
    assert (
        found["megacore_step"] == 30 and found["megacore_mfu"] == 0.4 and found["megacore_valid_loss"] == 3.5
    )
    assert found["megacore_loss"] != found["megacore_loss"], "null is not a number"
    assert {name: found[f'megacore_rank_memory_bytes{{rank="{name}"}}'] for name in (1, 3)} == {
        1: 2.0,
        3: 4.0,
    }
    assert found['megacore_rank_part_seconds{part="dp",rank="3"}'] == 4.0
    assert not any('rank="0"' in name or 'rank="2"' in name for name in found)
    assert found["megacore_checkpoint_step"] == 20 and found["megacore_checkpoint_seconds"] == 7.0
    assert abs(found["megacore_checkpoint_timestamp_seconds"] - time.time()) < 60
    with socket.socket() as again:
        again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        again.bind(("127.0.0.1", port))  # nobody listens there any more
        again.listen()


def served_by_rank(config_path: str, log_dir: str, hosts: list[str]) -> list[str]:
    """The samples of ranks that this rank serves at the end of a run over `hosts`."""
    place = place_from_environment()
    host = hosts[place.rank]
    os.environ["MEGACORE_HOST"] = host
    place = replace(place, local_rank=hosts[: place.rank].count(host), local_world_size=hosts.count(host))
    port = free_port()  # here all hosts are one machine
    config = run_of(config_path, f"log.dir={log_dir}", f"log.prometheus_port={port}", world=place.world_size)
    exporter = Exporter(port, place, CPU)
    mesh = mesh_of(config, place)
    mesh.listeners.add(exporter)
    trainer = trainer_of(config, mesh, Inputs(config, place.rank))
    served: list[str] = []
    end = exporter.on_end
    with mock.patch.object(
        exporter, "on_end", lambda: (served.extend(scrape(port) if exporter.serving else []), end())
    ):
        trainer.run()
    trainer.mesh.close()
    return [name for name in served if "rank_memory_bytes" in name]


def test_ranks_of_a_machine_need_not_be_neighbours(
    run_ranks: Callable[..., list[Any]], tmp_path: Path
) -> None:
    """Slurm's cyclic distribution, or machines with unequally many: one machine would serve another's
    ranks, or end in an IndexError.
    """
    train = {"steps": 2, "global_batch_size": 8}
    config = write_config(tmp_path, write_corpus(tmp_path), model={"num_layers": 2}, train=train)
    found = run_ranks(4, served_by_rank, config, str(tmp_path / "run"), ["a", "b", "a", "a"])
    name = 'megacore_rank_memory_bytes{{rank="{}"}}'.format
    assert found == [[name(0), name(2), name(3)], [name(1)], [], []]


def test_only_the_first_rank_of_a_machine_serves() -> None:
    """Ranks of one machine would fight for the port."""
    port = free_port()
    Exporter(port, RankInfo(1, 2, 1, 2), CPU).on_log(Report({}, {}, {}, {}, 0, 0.0))
    with pytest.raises(OSError):
        scrape(port)


def test_a_port_that_is_taken_is_one_line() -> None:
    """A run would end in a traceback, or train unwatched."""
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(
            ConfigError,
            match=f"log.prometheus_port: port {port} cannot be served: Address already in use \\(",
        ):
            Exporter(port, RankInfo(), CPU)


def test_strangers_neither_use_up_descriptors_nor_keep_scrapes_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A save could open no file any more, and nobody would see the run's figures: connections idle,
    slow, garbled and never ending.
    """
    monkeypatch.setattr(scrapes, "LONGEST_SECONDS", PATIENCE)
    between_looks, look = threading.Lock(), ScrapeServer._look

    def alone(server: ScrapeServer) -> None:
        with between_looks:
            look(server)

    def ask() -> socket.socket:
        """A scrape whose request comes at once, however busy the machine is."""
        with between_looks:
            connection = socket.create_connection(("127.0.0.1", port))
            connection.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        return connection

    monkeypatch.setattr(ScrapeServer, "_look", alone)
    exporter = Exporter(port := free_port(), RankInfo(), CPU)
    before = len(os.listdir("/proc/self/fd"))
    stranger = subprocess.Popen(
        [sys.executable, "-m", "tests.strangers", "3600", f"tcp:127.0.0.1:{port}"], cwd=ROOT
    )
    try:
        deadline = time.monotonic() + PATIENCE
        while (most := len(os.listdir("/proc/self/fd"))) < before + MOST:
            assert time.monotonic() < deadline, "the stranger does not come"
        for _ in range(5):
            with ask() as scraper, scraper.makefile("rb") as answer:
                assert b"megacore_loss" in answer.read()
            most = max(most, len(os.listdir("/proc/self/fd")))
        assert most <= before + MOST + 2, "beside them the connection of this process's own scrape"
        assert stranger.poll() is None
        with (
            socket.create_connection(("127.0.0.1", port)) as cut,
            socket.create_connection(("127.0.0.1", port)) as slow,
        ):
            cut.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n")
            slow.sendall(b"GET / HTTP/1.1\r\n\r\n")
            assert slow.recv(17) == b"HTTP/1.1 200 OK\r\n", (
                "an answer goes to who asks, however slowly it is read"
            )
    finally:
        stranger.kill()
        stranger.wait()
        exporter.on_end()


def test_a_connection_ends_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that sends a byte at a time, or never reads, would hold a descriptor for ever
    where no other comes.
    """
    monkeypatch.setattr(scrapes, "LONGEST_SECONDS", 0.2)
    server = ScrapeServer(port := free_port(), lambda: b"x" * (1 << 25))
    try:
        with (
            socket.create_connection(("127.0.0.1", port)) as idle,
            socket.create_connection(("127.0.0.1", port)) as deaf,
        ):
            idle.sendall(b"G")
            deaf.sendall(b"GET / HTTP/1.1\r\n\r\n")
            idle.settimeout(PATIENCE)
            assert idle.recv(1) == b""
            while server.scrapes:
                time.sleep(0.02)
        monkeypatch.setattr(scrapes, "LONGEST_SECONDS", PATIENCE)
        server.text = lambda: 1 // 0  # type: ignore[assignment, return-value]
        with pytest.raises(OSError):
            scrape(port)
        server.text = lambda: b"a 1\n"
        assert scrape(port) == {"a": 1.0}, "a fault in one answer does not end it"
    finally:
        server.close()


def test_an_answer_is_not_older_than_its_request() -> None:
    """Who asks again at once would be shown figures of before the step that was just logged."""
    port, later = free_port(), socket.socket()

    def text() -> bytes:
        asked.append(1)
        if len(asked) == 1:
            later.connect(("127.0.0.1", port))  # while the first is answered
            later.sendall(b"GET / HTTP/1.1\r\n\r\n")
        return b"asked %d" % len(asked)

    asked: list[int] = []
    server = ScrapeServer(port, text)
    try:
        with socket.create_connection(("127.0.0.1", port)) as first, later:
            first.sendall(b"GET / HTTP/1.1\r\n\r\n")
            answers = [connection.makefile("rb").read() for connection in (first, later)]
    finally:
        server.close()
    assert [answer[-7:] for answer in answers] == [b"asked 1", b"asked 2"]


def test_a_connection_that_the_kernel_cannot_watch_does_not_end_the_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Watches and their memory are limited for each user; the run's figures would be gone until its end."""
    server = ScrapeServer(port := free_port(), lambda: b"a 1\n")
    register, refused = server.selector.register, []

    def once(connection: Any, events: int) -> Any:
        if not refused:
            refused.append(connection.fileno())
            raise OSError(errno.ENOSPC, "No space left on device")
        return register(connection, events)

    monkeypatch.setattr(server.selector, "register", once)
    try:
        with pytest.raises(OSError):
            scrape(port)
        assert refused and scrape(port) == {"a": 1.0}
    finally:
        server.close()


WAITED_FOR_DATA = 'megacore_rank_part_seconds{part="data",rank="0"}'


def test_a_run_is_served(tmp_path: Path) -> None:
    """The trainer would not hand its figures over, or hand over others than it writes down."""
    port, run = free_port(), tmp_path / "run"
    config = write_config(
        tmp_path,
        write_corpus(tmp_path),
        train={"steps": 1_000_000, "compile": False},  # until all has been seen
        log={"dir": str(run), "prometheus_port": port},
    )
    ended: list[Any] = []
    thread = threading.Thread(
        target=lambda: ended.append(run_script("launch/pretrain.py", "--config", config))
    )
    thread.start()
    seen: list[dict[str, float]] = []
    while thread.is_alive():
        try:
            seen.append(found := scrape(port))
            if found["megacore_step"] > 0 and found.get(WAITED_FOR_DATA, 0.0) > 0.0:
                (run / STOP).touch()
        except OSError:
            time.sleep(0.02)
    assert ended[0].returncode == STOPPED, ended[0].stderr
    lines = {
        line["step"]: line
        for text in (run / "metrics.jsonl").read_text().splitlines()
        if "loss" in (line := json.loads(text))
    }
    # The last scrape may be cut off by the run's end.
    compared = [
        (found["megacore_loss"], lines[int(found["megacore_step"])]["loss"])
        for found in seen
        if found.get("megacore_step", 0) > 0
    ]
    assert compared and any(ours == theirs for ours, theirs in compared)
    assert any('megacore_rank_busy_seconds{rank="0"}' in found for found in seen)
    assert any(found.get(WAITED_FOR_DATA, 0.0) > 0.0 for found in seen)


def expressions() -> list[str]:
    """All that rules and dashboard ask Prometheus for."""
    rules = yaml.safe_load((MONITORING / "alerts.yml").read_text())["groups"][0]["rules"]
    panels = json.loads((MONITORING / "dashboard.json").read_text())["panels"]
    return [rule["expr"] for rule in rules] + [
        target["expr"] for panel in panels for target in panel["targets"]
    ]


def test_rules_and_dashboard_ask_for_what_is_served() -> None:
    """A renamed figure would leave an empty panel and an alert that never fires."""
    asked = {name for expression in expressions() for name in re.findall(r"megacore_(\w+)", expression)}
    assert asked <= {*RUN, *RANKS, *OTHERS, *PARTS, *DEVICES} and len(asked) > 10


DP, DATA, BUBBLE = (f'megacore_rank_part_seconds,rank="0",part="{part}"' for part in ("dp", "data", "bubble"))
SERIES = {
    "NoStep": ["megacore_logged_timestamp_seconds", "0x60"],
    "MachineGone": ["up", "1x3 0x60"],
    "LossNotFinite": ["megacore_loss", "3 2.5" + " Inf" * 60],
    "Skipping": ["megacore_skipped", "0+1x60"],
    "CheckpointOld": ["megacore_checkpoint_timestamp_seconds", "1x200"],
    "ExposedCommunication": [DP, "0.5x60"],
    "WaitingForData": [DATA, "0.06x60"],
    "GpusIdle": ["megacore_rank_gpu_utilisation", "0.8x60"],
    "UtilisationFell": ["megacore_mfu", "0.5x10 0.3x60"],
    "Straggler": ["megacore_rank_straggler", "1x60"],
    "MemoryNearlyFull": ["megacore_rank_memory_bytes", "99x60"],
    "Restarted": ["megacore_started_timestamp_seconds", "1x5 900x60"],
}
HEALTHY = {"megacore_step_seconds": "1x200", "megacore_memory_limit_bytes": "100x200"}


class Answering(BaseHTTPRequestHandler):
    """A Prometheus that has two points of every series but those of GPUs."""

    def do_GET(self) -> None:
        asked = parse_qs(urlparse(self.path).query)
        at, series = float(asked["start"][0]), {"metric": {"rank": "3"}, "values": []}
        series["values"] = [[at, "1"], [at + 60, "NaN"], [at + 61, "2.5"]]
        body = json.dumps({"data": {"result": [] if "gpu" in asked["query"][0] else [series]}}).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Nothing."""


def test_the_dashboard_is_drawn(tmp_path: Path) -> None:
    """The command of the documents would end in a traceback, or draw nothing and not say so."""
    with HTTPServer(("127.0.0.1", 0), Answering) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url, out = f"http://127.0.0.1:{server.server_address[1]}", tmp_path / "dashboard.png"
        done = run_script(
            "launch/monitoring/picture.py", "--url", url, "--minutes", "5", "--output", str(out)
        )
        server.shutdown()
    assert done.returncode == 0 and "left out: GPU utilisation, by rank" in done.stdout, done.stderr
    assert out.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    done = run_script("launch/monitoring/picture.py", "--url", url, "--output", str(out))
    assert done.returncode == 2 and done.stderr.startswith(
        f"config error: --url: no Prometheus answers at {url}"
    ), done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_the_learning_rate_has_an_axis_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside a norm of 1 a rate of 0.0006 is a line on the ground, whatever it does."""
    panels = json.loads((ROOT / "launch/monitoring/dashboard.json").read_text(encoding="utf-8"))["panels"]
    [panel] = [
        panel for panel in panels if any("megacore_lr" in target["expr"] for target in panel["targets"])
    ]
    legends = [target["legendFormat"] for target in panel["targets"]]
    drawn: list[Any] = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, out: drawn.append(figure))
    picture.draw(
        [
            (
                panel,
                [
                    (legend, {0.0: size, 60.0: 2 * size})
                    for legend, size in zip(legends, (1.0, 6e-4), strict=True)
                ],
            )
        ],
        0,
        60,
        "",
    )
    left, _, right = drawn[0].axes  # and the empty place beside it
    assert right.get_ylabel() == "learning rate" and right.get_ylim()[1] < 0.01 < left.get_ylim()[1]
    assert [text.get_text() for text in left.get_legend().get_texts()] == legends


def test_gpus_are_asked_when_somebody_scrapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's utilisation under another rank's name; or a run that ends because a driver does not answer."""
    answers = {0: 90, 1: 40}
    monkeypatch.setattr(torch.cuda, "utilization", lambda index: answers[index])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(exporter_module, "memory_limit", lambda device: 1.0)
    exporter = Exporter(
        port := free_port(),
        RankInfo(rank=1, world_size=4, local_rank=0, local_world_size=2),
        torch.device("cuda"),
    )
    exporter.watch([1, 3])
    try:
        assert {rank: scrape(port)[f'megacore_rank_gpu_utilisation{{rank="{rank}"}}'] for rank in (1, 3)} == {
            1: 0.9,
            3: 0.4,
        }
        answers.clear()
        assert math.isnan(scrape(port)['megacore_rank_gpu_utilisation{rank="3"}'])
    finally:
        exporter.on_end()
    exporter = Exporter(port := free_port(), RankInfo(), torch.device("cuda"))
    exporter.watch([0])  # NVML does not answer from the start
    try:
        assert not any("gpu" in name for name in scrape(port))
    finally:
        exporter.on_end()


def test_parts_of_a_step() -> None:
    """A bubble that counts as communication as well, a group without a part, or the mean
    of several steps taken for one.
    """
    mesh: Any = SimpleNamespace(token_axes=("dp",), axes=AXES, pp=SimpleNamespace(size=2, rank=1))
    config = resolve(
        {"model": {"num_layers": 4, "tie_embeddings": False}, "parallel": {"pipeline": 2}},
        ["train.global_batch_size=8"],
        "x",
        2,
    )
    parts = StepParts(config.config, mesh)
    parts.idle = 0.25
    waits = {
        "pp": 2.0,
        "dp between hosts": 2.0,
        "dp within a host": 4.0,
        "pp×tp": 1.0,
        "world": 1.0,
        "data": 0.5,
    }
    found = parts.of(2.0, waits, 2, {"tp": 3.0})
    assert found == {
        "bubble": 0.5,
        "data": 0.25,
        "pp": 0.5,
        "tp": 3.0,
        "cp": 0.0,
        "dp": 3.0,
        "tied": 0.0,
        "world": 1.0,
    }
    found = parts.of(8.0, waits, 2, {})  # the bubble is more than the waits for the pipeline
    assert found["bubble"] == 2.0 and found["pp"] == 0.0 and found["world"] == 0.0 and found["dp"] == 3.0
    with_more = run_of(
        {"parallel": {"pipeline": 2}}, "train.global_batch_size=64", "train.micro_batch_size=1", world=2
    )
    assert 0 < StepParts(with_more, mesh).idle < 0.2, "one round of two stages over 64 microbatches"
    with mock.patch.object(step_parts, "step_times", lambda config: (12.0, [12.0, 4.0])):
        assert StepParts(with_more, mesh).idle == 2.0, (
            "of a rank that computes a third of the time, for each second of it"
        )


@pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not installed (apt-get install prometheus)"
)
@pytest.mark.parametrize("alert", SERIES)
def test_alerts_fire(tmp_path: Path, alert: str) -> None:
    """An alert that cannot fire, or one that fires for a healthy run."""
    name, values = SERIES[alert]
    good = {
        "up": "1x200",
        "megacore_loss": "3x200",
        "megacore_mfu": "0.5x200",
        DP: "0.1x200",
        DATA: "0.01x200",
        BUBBLE: "0.5x200",
    }
    good |= {
        "megacore_logged_timestamp_seconds": "0+60x200",
        "megacore_skipped": "0x200",
        "megacore_rank_straggler": "0x200",
    }
    good |= {
        "megacore_checkpoint_timestamp_seconds": "0+60x200",
        "megacore_rank_memory_bytes": "50x200",
    } | HEALTHY
    good |= {"megacore_rank_gpu_utilisation": "0.95x200", "megacore_step": "0+10x200"}
    at = "70m" if alert == "CheckpointOld" else "30m"
    for series, fires in ((good, False), (good | {name: values}, True)):
        labelled = [(*key.partition(","), values) for key, values in series.items()]
        common = 'job="megacore",instance="node0:9400"'
        inputs = [
            {"series": f"{name}{{{common}{comma}{labels}}}", "values": values}
            for name, comma, labels, values in labelled
        ]
        expected = [{"exp_labels": {"alertname": alert}}] if fires else []
        check = {"eval_time": at, "alertname": alert, "exp_alerts": expected}
        test = {
            "rule_files": [str(MONITORING / "alerts.yml")],
            "tests": [{"interval": "1m", "input_series": inputs, "alert_rule_test": [check]}],
        }
        (tmp_path / "test.yml").write_text(yaml.safe_dump(test))
        done = subprocess.run(
            ["promtool", "test", "rules", tmp_path / "test.yml"], capture_output=True, text=True
        )
        said = done.stdout + done.stderr
        # promtool compares all labels and annotations, and so refuses what fires too: what it got is in its
        # message.
        assert ("got:[]" not in said and "got:" in said) if fires else done.returncode == 0, said
