"""What is said while a run goes on: the time that is left, who holds up the others,
and TensorBoard behind a resume.
"""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from megacore.config import Config
from megacore.config.schema import LogConfig
from megacore.distributed.communicator import SOLO
from megacore.distributed.events import Listeners, Slow
from megacore.distributed.mesh import Mesh
from megacore.distributed.rank_info import RankInfo, host_name
from megacore.pipeline.schedule import Action, Op
from megacore.records import FIGURES
from megacore.tools.diagnosis.stragglers import REPORTS, Stragglers
from megacore.tools.metrics_file import as_json
from megacore.tools.monitoring.expert_load import Rows
from megacore.tools.monitoring.first_step import FirstStep
from megacore.tools.monitoring.slow_ranks import SlowRanks, reason
from megacore.tools.monitoring.tags import THEMES, tagged
from megacore.tools.monitoring.tensorboard import Board
from megacore.tools.records import Console, open_metrics
from megacore.train.callbacks import Callback, Report
from megacore.train.metrics import Reporter, unknown_utilisation
from tests.build import mesh_of, run_of
from tests.training import run_rank, write_config, write_corpus


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """Of a run of 200 steps."""
    return run_of(write_config(tmp_path, "unused", train={"steps": 200}), f"log.dir={tmp_path}/run")


def figures(step: int, **others: Any) -> dict[str, Any]:
    of_device = {"tokens_per_second": 1000.0, "step_seconds": 1.0, "mfu": None, "memory_bytes": 3 << 29}
    return {"step": step, "loss": 2.0, "grad_norm": 0.25, "lr": 6e-4} | of_device | others


def test_a_line_says_what_people_look_for(config: Config, capsys: pytest.CaptureFixture[str]) -> None:
    """A run that diverges, warms up or is slow would look like any other.

    Where no peak is known, no utilisation is said.
    """
    for mfu, said in ((0.4126, "  MFU 41.3%"), (None, "")):
        logs = console(config, 1)
        logs.on_log(report(1, {}, mfu))
        line = f"step 1/200  loss 2.0000  lr 0.0006  norm 0.25  1,000 tokens/s{said}  1.5 GiB  0 s left\n"
        assert capsys.readouterr().out == line


def test_figures_are_arranged_by_theme_and_chosen_by_pattern() -> None:
    """Thirty charts in one heap; or a figure of the user's own that has a theme would
    get another before it.
    """
    line = figures(1, valid_loss=3.0, name="x", mfu=0.5) | {"rms/head": 1.0, "balance": 2}
    tags = (
        "train/loss train/grad_norm train/lr speed/tokens_per_second speed/step_seconds speed/mfu "
        "memory/memory_bytes eval/valid_loss"
    )
    assert list(tagged(line, ["*"])) == [*tags.split(), "rms/head", "train/balance"]
    assert tagged(line, ["eval/*", "*/mfu"]) == {"speed/mfu": 0.5, "eval/valid_loss": 3.0}
    assert {name for names in THEMES.values() for name in names} < FIGURES, "a figure has another name by now"


def console(config: Config, first_step: int) -> Console:
    """The console of a run on one process that begins with `first_step`."""
    opened = Console()
    opened.on_start(config, mesh_of(config))
    opened.on_records_open(Path("unused"), first_step)
    return opened


def mesh_of_one() -> Any:
    """What `SlowRanks` needs of a mesh."""
    return SimpleNamespace(device=torch.device("cpu"), world=SOLO, print=print)


def report(step: int, stragglers: dict[int, Slow], mfu: float | None = None) -> Report:
    return Report(figures(step, mfu=mfu), {}, {}, stragglers, 0, 0.0)


def test_the_time_left_is_that_of_the_steps_since_the_start(
    config: Config, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that went on from step 100 has done ten steps in twenty seconds, not 110: 90
    are left, of two seconds each.
    """
    now = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    logs = console(config, 101)
    now[0] += 20.0
    logs.on_log(report(110, {}))
    assert capsys.readouterr().out.strip().endswith(" 180 s left")


def test_the_time_left_behind_a_rollback_to_before_the_start(
    config: Config, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that resumed step 100 and went back to 90, because 100 is damaged: counted from 101 it
    has done -10, and then 0 steps.
    """
    now = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    logs = console(config, 101)
    now[0] = 2000.0  # behind steps that do not count any more
    logs.on_rewind(91)
    for step in (91, 100, 101):
        now[0] = 2000.0 + 10.0 * (step - 90)
        logs.on_log(report(step, {}))
    assert [line.split()[-3] for line in capsys.readouterr().out.splitlines()] == ["1090", "1000", "990"]


def test_a_long_first_step_says_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Minutes without a word: nobody could tell a slow machine from one that hangs."""
    now = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    for device in ("cpu", "cuda"):
        first = FirstStep()
        built: Any = SimpleNamespace(
            config=SimpleNamespace(num_microbatches=8),
            stages=[None, None],
            mesh=SimpleNamespace(device=torch.device(device)),
        )
        first.on_built(built)
        for step in (1, 2):  # of which the second says nothing
            first.on_step_begin(step, True)
            for _ in range(16):
                now[0] += 10.0
                first.on_action_end(Action(Op.FORWARD, 0))
                first.on_action_end(Action(Op.BACKWARD, 0))
    said = capsys.readouterr().out.splitlines()
    assert said[:3] == [f"step 1: {n} of 16 backwards of microbatches done on rank 0" for n in (4, 8, 12)]
    assert said[3:] == [line.replace("done", "launched") for line in said[:3]]


def test_who_holds_up_the_others_again_is_said_again(
    config: Config, capsys: pytest.CaptureFixture[str]
) -> None:
    """Once while it lasts; but a machine that is slow every night would otherwise
    be named on the first alone.
    """
    logs = SlowRanks()
    logs.on_start(config, mesh_of_one())
    logs.hosts *= 4
    for step, slow in enumerate(([3], [3], [], [3, 2], [2]), 1):
        logs.on_log(report(step, dict.fromkeys(slow, Slow(0.9, 0.3))))
    said = [line.split(f": slow host: host {host_name()} ") for line in capsys.readouterr().out.splitlines()]
    behind = "holds up the others, busy for 0.90 s of 1.00 s"
    assert said == [[f"step {step}", f"rank {rank} {behind}"] for step, rank in ((1, 3), (4, 3), (4, 2))]


def test_rows_explain_a_rank_that_is_no_slower_than_they_are_many() -> None:
    """A device that is three times as slow as others, with a third more rows, would be called the router's;
    or one that has few rows, because most others have none. Of many blocks the fullest are named.
    """
    own = {block: 1.0 + block / 10 for block in range(11)}  # 1.5 in the mean
    for seconds, usual, rows, said in (
        (
            1.8,
            0.75,
            own,
            "slow by routing: rank 3 got 1.55 times the mean of rows in blocks 3, 4, 5, 6, 7, 8, 9, 10 "
            "and 2 more and holds up the others",
        ),
        (2.2, 0.75, own, "slow host: rank 3 holds up the others with 1.50 times the mean of rows"),
        (2.2, 0.0, {1: 0.9}, "slow host: rank 3 holds up the others with 0.90 times the mean of rows"),
        (
            2.2,
            0.0,
            {1: 2.0, 2: 0.5},
            "slow by routing: rank 3 got 2.00 times the mean of rows in block 1 and holds up the others",
        ),
    ):
        assert reason("rank 3", Slow(seconds, 1.0), Rows(rows, usual)) == said
    assert reason("rank 3", Slow(2.0, 1.0, "device"), None) == "slow device: rank 3 holds up the others"


def test_on_gpus_rows_explain_devices_alone(config: Config, capsys: pytest.CaptureFixture[str]) -> None:
    """A host whose data or Python is slow would be called the router's, or its device,
    and a good GPU would be taken out.
    """
    stragglers = Stragglers()
    for _ in range(REPORTS):
        found = stragglers.named([0.1, 0.1, 0.9, 0.1], [0.5, 0.5, 0.5, 0.9], 1.0)
    assert {rank: slow.of for rank, slow in found.items()} == {2: "host", 3: "device"}
    logs = SlowRanks(SimpleNamespace(rows_of=lambda rank, step: Rows({1: 9.0}, 1.0)))  # type: ignore[arg-type]
    logs.on_start(config, mesh_of_one())
    logs.hosts, logs.computes = ["a"] * 4, "device"
    logs.on_log(report(1, found))
    assert [line.split(":")[1] for line in capsys.readouterr().out.splitlines()] == [
        " slow host",
        " slow by routing",
    ]


class NoNumbers(Callback):
    """A user's callback that returns something else than numbers."""

    def metrics(self, metrics: Any, stages: Any) -> Any:
        return {"own/x": [object()]}


def test_a_list_of_metrics_is_of_numbers(config: Config, capsys: pytest.CaptureFixture[str]) -> None:
    """Otherwise metrics.jsonl, which has no JSON for an object, would be blamed for a mistake in a user's
    callback, and end the run.
    """
    mesh = Mesh(config, RankInfo(), torch.device("cpu"), listeners=Listeners([NoNumbers()]))
    reporter = Reporter(config, mesh, saving=Mock(), utilisation=unknown_utilisation)
    metrics: dict[str, Any] = {"step": 1}
    reporter.add_metrics(metrics, [])
    assert metrics == {"step": 1}
    assert "WARNING: rank 0: NoNumbers failed in metrics and is left out" in capsys.readouterr().err
    assert as_json({"own/x": [1.0, math.nan]}) == '{"own/x": [1.0, null]}'


def test_tensorboard_forgets_what_is_done_again_and_no_more(tmp_path: Path) -> None:
    """Behind a resume a step would be shown twice, or the one before it not at all."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    said: list[str] = []
    mesh: Any = SimpleNamespace(print=said.append)
    for first, last, loss in ((1, 5, 3.0), (4, 6, 2.0)):
        board = Board()
        board.on_start(Config(log=LogConfig(figures=("train/*", "sped/*"))), mesh)
        board.on_records_open(tmp_path, first)
        for step in range(first, last + 1):
            board.on_record({"step": step, "loss": loss, "mfu": 0.5})
        board.on_end()
    shown = EventAccumulator(str(tmp_path / "tensorboard"))
    shown.Reload()
    assert [(event.step, event.value) for event in shown.Scalars("train/loss")] == [
        (1, 3.0),
        (2, 3.0),
        (3, 3.0),
        (4, 2.0),
        (5, 2.0),
        (6, 2.0),
    ]
    assert shown.Tags()["scalars"] == ["train/loss"], "log.figures names no other"
    assert said == ["WARNING: log.figures: no figure of this run is named by sped/*"] * 2


def test_lines_that_are_no_records_do_not_end_a_resume(tmp_path: Path) -> None:
    """A run that cannot be resumed because of a line in its log: a disk that was full left half of one."""
    file = tmp_path / "metrics.jsonl"
    damage = [
        "[1]",
        "3",
        "null",
        '"x"',
        '{"step": "2"}',
        '{"step": [1]}',
        '{"broken": }',
        '{"step": ' + "9" * 5000 + "}",
        "",
        "\ufffd",
    ]
    file.write_text("\n".join(['{"step": 1}', *damage, '{"step": 2}', '{"step": 3}', '{"ste']))
    open_metrics(file, 3).close()
    assert file.read_text() == '{"step": 1}\n{"step": 2}\n'


@pytest.mark.parametrize("shown", [True, False])
def test_a_run_ends_with_the_records_that_it_wrote(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], shown: bool
) -> None:
    """Whoever follows the last line would find TensorBoard empty."""
    path = write_config(tmp_path, write_corpus(tmp_path), train={"steps": 1})
    run_rank(path, [f"log.tensorboard={str(shown).lower()}"], str(tmp_path / "run"))
    said = capsys.readouterr().out.splitlines()[-1]
    assert said == f"records: {tmp_path}/run/metrics.jsonl" + (
        f", and tensorboard --logdir {tmp_path}/run" if shown else ""
    )
    assert (tmp_path / "run/tensorboard").exists() == shown
