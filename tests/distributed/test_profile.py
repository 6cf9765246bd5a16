"""log.profile: which steps and ranks are traced, what the trace names, and that the
shares of a step add up to it.
"""

import gzip
import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from megacore.distributed.communicator import Group
from megacore.distributed.events import Listener, Operation
from megacore.distributed.rank_info import RankInfo
from megacore.pipeline.partition import plan_of
from megacore.pipeline.schedule import Action, Op
from megacore.tools.monitoring import step_shares
from megacore.tools.monitoring.attach import callbacks_of
from megacore.tools.monitoring.step_shares import StepShares
from megacore.train.callbacks import Callback
from megacore.train.trainer import Trainer
from tests import training
from tests.build import mesh_of, run_of

CPU = torch.device("cpu")
MODEL = {"num_layers": 2, "hidden_size": 16, "num_heads": 2}


def trace_of(path: Path) -> dict[str, Any]:
    """A written trace."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return dict(json.load(file))


def ranges(trace: dict[str, Any]) -> list[tuple[str, float, float]]:
    """The ranges that the listener named: name, begin and end in microseconds."""
    found = [event for event in trace["traceEvents"] if event.get("cat") == "user_annotation"]
    return [(event["name"], event["ts"], event["ts"] + event["dur"]) for event in found]


def steps_of(trace: dict[str, Any]) -> list[int]:
    """The steps that a trace holds."""
    return sorted(
        int(name.partition("#")[2]) for name, *_ in ranges(trace) if name.startswith("ProfilerStep#")
    )


def test_chosen_ranks_trace_every_action_and_collective(pool: Any, tmp_path: Path) -> None:
    """Ranks that nobody chose would fill the disk; an action without its name, or one that lies outside its
    step, tells nobody anything. Losses stay what they are.
    """
    config = training.write_config(tmp_path, training.write_corpus(tmp_path), model=MODEL, train={"steps": 4})
    layout = ["parallel.pipeline=2", "parallel.tensor=2", "parallel.schedule=zb_h1"]
    profile = 'log.profile={"steps": [2, 3], "memory": true, "ranks": [0, 3]}'
    for name, more in (("plain", []), ("profiled", [profile])):
        assert pool.run(4, training.run_rank, config, [*layout, *more], str(tmp_path / name)) == [0] * 4
    assert training.figures(tmp_path / "plain") == training.figures(tmp_path / "profiled")
    folder = tmp_path / "profiled/profile"
    stems = [f"steps_2-3_rank_{rank:05d}_{where}" for rank, where in ((0, "pp0_dp0_tp0"), (3, "pp1_dp0_tp1"))]
    endings = (".png", ".trace.json.gz", ".txt")
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        stem + ending for stem in stems for ending in endings
    )
    plan = plan_of(run_of(config, *layout, world=4))
    for stem, rank in zip(stems, (0, 3), strict=True):
        trace = trace_of(folder / f"{stem}.trace.json.gz")
        assert trace["distributedInfo"]["rank"] == rank and steps_of(trace) == [2, 3]
        named = Counter(name for name, *_ in ranges(trace))
        for action in plan.actions[rank // 2]:
            text = action.op.value.replace("_", " ") + (
                f" of microbatch {action.microbatch}, chunk 0" if action.microbatch >= 0 else ""
            )
            assert sum(count for name, count in named.items() if name.partition(", rank")[0] == text) == 2, (
                text
            )
        assert named["all_reduce over tp"] == named["wait for all_reduce over tp"] > 0
        assert named["optimizer step"] == 2
        (begin, _), (_, end) = [
            (a, b) for name, a, b in sorted(ranges(trace)) if name.startswith("ProfilerStep#")
        ]
        own = [(a, b) for name, a, b in ranges(trace) if not name.startswith(("gloo", "writing"))]
        assert all(begin <= a <= b <= end + 1 for a, b in own)
        curve = [event for event in trace["traceEvents"] if event["ph"] == "C"]
        assert curve and {event["name"] for event in curve} == {"allocated, CPU"}
        rows = dict(re.findall(r"^(\w[\w, ]*?) +([\d.]+) ms", (folder / f"{stem}.txt").read_text(), re.M))
        total = float(rows.pop("a step"))
        assert {"compute", "communication, tp", "waiting", "optimizer", "other"} <= rows.keys()
        assert sum(map(float, rows.values())) == pytest.approx(total, abs=0.01 * len(rows))


def failing_flags(trainer: Trainer, flags: Any = Trainer.flags) -> dict[str, bool]:
    """Raise an error in step 3, before the update."""
    if trainer.step == 3:
        raise ZeroDivisionError
    return dict(flags(trainer))


def ending_rank(config: str, overrides: list[str], folder: str, how: str) -> int:
    """A run that is asked to stop in step 3, or fails there."""
    if how == "stop":
        patch = mock.patch.object(Trainer, "must_stop", property(lambda trainer: trainer.step >= 3))
    else:
        patch = mock.patch.object(Trainer, "flags", failing_flags)
    with patch:
        return training.run_rank(config, overrides, folder)


def test_a_run_that_ends_within_the_window_writes_what_it_has(pool: Any, tmp_path: Path) -> None:
    """And the run that goes on counts steps as the run does, and writes over nothing."""
    config = training.write_config(tmp_path, training.write_corpus(tmp_path), model=MODEL, train={"steps": 6})
    options, folder = ['log.profile={"steps": [2, 5]}'], tmp_path / "run"
    assert pool.run(1, ending_rank, config, options, str(folder), "stop") == [75]
    assert pool.run(1, training.run_rank, config, options, str(folder)) == [0]
    # behind the window
    assert pool.run(1, training.run_rank, config, [*options, "train.steps=7"], str(folder)) == [0]
    with pytest.raises(Exception, match="ZeroDivisionError"):
        pool.run(1, ending_rank, config, options, str(tmp_path / "failed"), "fail")
    for run, held in (("run", {"2-3": [2, 3], "4-5": [4, 5]}), ("failed", {"2-3": [2, 3]})):
        found = {
            path.name.split("_")[1]: steps_of(trace_of(path))
            for path in (tmp_path / run / "profile").glob("*.gz")
        }
        assert found == held
    charged = (tmp_path / "failed/profile").glob("*.txt")
    assert len(list(charged)) == 1, "of step 2; step 3 was not done"


def test_nobody_listens_where_nothing_is_profiled(tmp_path: Path) -> None:
    """Another listener would be called for every action and collective of a run that profiles nothing."""
    config = run_of(
        training.write_config(tmp_path, training.write_corpus(tmp_path)), f"log.dir={tmp_path / 'run'}"
    )
    mesh = mesh_of(config)
    mesh.listeners.add(*callbacks_of(config, RankInfo(), CPU))
    mesh.listeners.notify(Callback.on_start, config, mesh)
    assert mesh.listeners.overriding(Callback.on_log), "the callbacks of a run are there"
    for event in (Listener.on_action_begin, Listener.on_action_end, Listener.on_collective):
        assert mesh.listeners.overriding(event) == ()


@pytest.fixture
def clock() -> Iterator[list[float]]:
    """A clock that only a test moves."""
    now = [0.0]
    with mock.patch.object(step_shares, "perf_counter", lambda: now[0]):
        yield now


def test_shares_are_exclusive_and_add_up(clock: list[float]) -> None:
    """A wait within a forward that counts as both, a save that counts as a step, or a late rank's
    time that is called communication.
    """
    group, link = Group("tp", (0, 1), 0), Group("pp", (0, 2), 0)
    shares = StepShares(CPU, ["compute", "tp", "pp", "waiting", "optimizer", "data", "other"], str)

    def lasting(seconds: float) -> None:
        clock[0] += seconds

    def operation(over: Group, name: str, started: float, waited: float, peer: int = -1) -> None:
        token = shares.on_collective(Operation(over, name, (torch.zeros(2),), peer))
        lasting(started)
        shares.on_started(token)
        shares.on_wait_begin(token)
        lasting(waited)
        shares.on_wait_end(token)

    def least(x: Tensor, over: Group, op: Any) -> Tensor:
        """The other rank came last to the first wait, and waited longer at the second."""
        return torch.minimum(x, x.new_tensor([9.0, 1.0, 9.0, 9.0]))

    group_key = mock.patch.object(Group, "key", property(lambda self: self.name))
    with group_key, mock.patch.object(step_shares, "all_reduce", least):
        shares.on_step_begin(7, False)
        shares.on_phase("data")
        lasting(2.0)
        shares.on_phase("forward and backward")
        for waited in (5.0, 3.0):
            operation(link, "receive", 0.0, waited, 2)
            shares.on_action_begin(Action(Op.FORWARD, 0, 0))
            lasting(10.0)
            operation(group, "all_reduce", 0.5, 4.0)
            shares.on_action_end(Action(Op.FORWARD, 0, 0))
        shares.on_phase("optimizer step")
        lasting(6.0)
        shares.on_phase("between steps")
        shares.on_pause_begin("saving")
        lasting(1000.0)
        operation(group, "all_reduce", 100.0, 100.0)
        shares.on_pause_end()
        lasting(0.25)
        shares.on_step_begin(8, False)
        lasting(50.0)
        shares.end_step()  # the run has ended within it
    late = (4.0 - 1.0) + (5.0 - 3.0)
    assert shares.steps == {
        7: {
            "compute": 20.0,
            "tp": 9.0 - 3.0,
            "pp": 8.0 - 2.0,
            "waiting": late,
            "optimizer": 6.0,
            "data": 2.0,
            "other": 0.25,
        }
    }
    assert shares.open == ["other"]
