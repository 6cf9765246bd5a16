"""Callbacks of a custom model's file that fail, one for each method: training continues as without them."""

import contextlib
import io
import json
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from megacore.distributed.events import Listener, Listeners
from megacore.model.batch import Microbatch
from megacore.train.callbacks import Callback
from megacore.train.metrics import Reporter
from megacore.train.step import TrainStep
from tests import training
from tests.compiling import graphs_counted
from tests.distributed.test_launch import LAUNCHERS, PRETRAIN, root_cause, start
from tests.pool import RankError, RankTimeout

WORLD = 2
STEPS, SAVED, BAD = 6, 2, (3, 4)  # steps of a run, between its checkpoints, and those whose gradient is NaN


def methods_of(*classes: type[Listener]) -> list[str]:
    """Return the public methods that these classes define, so that a new one gets its rows at once."""
    return [
        name
        for listener in classes
        for name, value in vars(listener).items()
        if callable(value) and not name.startswith("_")
    ]


METHODS = methods_of(Listener, Callback)
ON_RANK_0 = {"on_records_open", "on_rewind", "on_skipped", "on_record"}  # other ranks are not told
COMPILING = {"on_compile_begin", "on_compile_end"}  # called only in a run whose blocks are compiled
ROWS = [(method, rank) for method in METHODS for rank in range(WORLD) if rank == 0 or method not in ON_RANK_0]

MODEL = """
import json
import os
import time
from pathlib import Path

from megacore.model.block import Block  # the model stays the GPT
from megacore.train.callbacks import Callback


def note(name, text):
    with open(Path(__file__).parent / f"{name}.{os.environ['RANK']}", "a") as file:
        file.write(text)
"""

PROBE = """

class Probe(Callback):
    on_error = ON_ERROR

    def METHOD(self, *arguments, **options):
        note("calls", f"{time.time()}\\n")
        if os.environ["RANK"] == str(RANK):
            raise RuntimeError("the probe fails")
        return super().METHOD(*arguments, **options)

CALLBACKS = [Probe]
"""

# These are called only for listeners that return a token.
TOKEN = """
    def on_collective(self, operation):
        return operation.name

CALLBACKS"""


def write_probe(folder: Path, method: str, rank: int, on_error: str = "drop", source: str = PROBE) -> str:
    """Write a model's file with a callback whose `method` fails on `rank`; return the override for it."""
    folder.mkdir(exist_ok=True)
    text = MODEL + source
    if method in ("on_started", "on_wait_begin", "on_wait_end"):
        text = text.replace("\nCALLBACKS", TOKEN)
    replaced = {"METHOD": method, "RANK)": f"{rank})", "ON_ERROR": repr(on_error)}
    for name, value in replaced.items():
        text = text.replace(name, value)
    (folder / "my_model.py").write_text(text)
    return f"model.source={folder}/my_model.py"


def calls_of(folder: Path, rank: int) -> list[float]:
    """Return when the probe's method was called on a rank."""
    file = folder / f"calls.{rank}"
    return [float(line) for line in file.read_text().splitlines()] if file.exists() else []


def callback_rank(config: str, overrides: list[str], log_dir: str, plant: str = "") -> tuple[int, str]:
    """Run one rank, whose gradient is NaN in some steps, and compiled if the config says so.

    Returns its exit status and what it wrote to stderr. `plant`: a fault of the program, see `PLANTS`.
    """
    forward_backward = TrainStep.forward_backward
    calls = 0

    def poisoned(self: TrainStep, batch: Sequence[Microbatch]) -> dict[str, torch.Tensor]:
        nonlocal calls
        calls += 1
        losses = forward_backward(self, batch)
        if calls in BAD:  # steps that are repeated after the rollback are good
            for gradient, _ in self.engine.gradients().values():
                gradient.mul_(math.nan)
        return losses

    stderr = io.StringIO()
    with (
        mock.patch.object(TrainStep, "forward_backward", poisoned),
        contextlib.redirect_stderr(stderr),
        graphs_counted("eager") if "train.compile=true" in overrides else contextlib.nullcontext(),
        PLANTS[plant](),
    ):
        status = training.run_rank(config, overrides, log_dir)
    return status, stderr.getvalue()


def never_drop() -> Any:
    """Plant a fault: a callback that fails is reported, and called again."""
    fail = Listeners.fail

    def report_only(self: Listeners, listener: Listener, *arguments: Any) -> None:
        fail(self, listener, *arguments)
        if listener in self._failed:
            self._failed.remove(listener)
            self._overriding.clear()

    return mock.patch.object(Listeners, "fail", report_only)


def never_report() -> Any:
    """Plant a fault: a callback that fails is left out, and nothing is printed."""
    fail = Listeners.fail

    def drop_only(self: Listeners, *arguments: Any) -> None:
        with contextlib.redirect_stderr(io.StringIO()):
            fail(self, *arguments)

    return mock.patch.object(Listeners, "fail", drop_only)


def without_nan() -> Any:
    """Plant a fault: a rank whose callback has failed gathers fewer numbers than the others."""
    read_step_parts = Reporter.read_step_parts

    def shorter(self: Reporter, *arguments: Any) -> dict[str, float]:
        parts = read_step_parts(self, *arguments)
        return {name: seconds for name, seconds in parts.items() if not math.isnan(seconds)}

    return mock.patch.object(Reporter, "read_step_parts", shorter)


PLANTS: dict[str, Callable[[], Any]] = {
    "": contextlib.nullcontext,
    "never_drop": never_drop,
    "never_report": never_report,
    "without_nan": without_nan,
}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A run that saves, validates, skips two updates, and goes back to its first checkpoint once."""
    folder = tmp_path_factory.mktemp("callbacks")
    corpus = training.write_corpus(folder)
    return training.write_config(
        folder,
        corpus,
        data={"train": corpus, "valid": corpus},
        model={"num_layers": 2},
        train={**training.BASE["train"], "steps": STEPS, "eval_every": 3, "eval_batches": 1},
        optim={"warmup_steps": 2, "max_skips": len(BAD), "max_rollbacks": 1, "spike_threshold": 1e9},
        checkpoint={"every": SAVED},
    )


def overrides_of(method: str) -> list[str]:
    """Return the overrides of a run in which a method is called."""
    return ["train.compile=true"] if method in COMPILING else []


def records(folder: Path) -> list[tuple[Any, ...]]:
    """Return what must not depend on callbacks in a run's records: all names, and the exact numbers."""
    lines = training.lines(folder)
    rows: list[tuple[Any, ...]] = []
    for line in lines:
        names = sorted(line.keys() - {"stragglers"})  # which a busy machine has now and then
        rows.append((names, *(line.get(name) for name in ("step", "loss", "grad_norm", "lr", "valid_loss"))))
    rows.append(tuple((folder / "skipped.jsonl").read_text().splitlines()))
    return rows


@pytest.fixture(scope="module")
def expected(pool: Any, config: str, tmp_path_factory: pytest.TempPathFactory) -> dict[bool, list[Any]]:
    """The records of a run without a callback, by whether its blocks are compiled."""
    folder = tmp_path_factory.mktemp("without")
    source = write_probe(folder, "", 0, source="")
    by_compiled = {}
    for method in ("on_step", "on_compile_begin"):
        run = folder / method
        done = pool.run(WORLD, callback_rank, config, [source, *overrides_of(method)], str(run))
        assert done == [(0, "")] * WORLD
        rows = records(run)
        steps = [line["step"] for line in training.metrics(run)]
        assert steps == list(range(1, STEPS + 1)), "the run goes back and repeats steps"
        assert len(rows[-1]) == len(BAD)
        by_compiled[method in COMPILING] = rows
    return by_compiled


def check_row(
    pool: Any, config: str, folder: Path, method: str, rank: int, rows: Any, plant: str = ""
) -> None:
    """Run two ranks, let the probe of one fail in `method`, and assert what a user relies on."""
    source = write_probe(folder, method, rank)
    overrides = [source, *overrides_of(method)]
    done = pool.run(WORLD, callback_rank, config, overrides, str(folder / "run"), plant)
    assert [status for status, _ in done] == [0] * WORLD

    warning = f"WARNING: rank {rank}: Probe failed in {method} and is left out; training continues: "
    report = done[rank][1]
    assert report.count("WARNING") == 1
    assert report.endswith(f"{warning}RuntimeError: the probe fails\n")
    assert "my_model.py" in report, "the traceback says where"
    assert done[1 - rank][1] == ""

    assert len(calls_of(folder, rank)) == 1, "it is called, and not again"
    assert bool(calls_of(folder, 1 - rank)) == (method not in ON_RANK_0)
    assert records(folder / "run") == rows


@pytest.mark.parametrize(("method", "rank"), ROWS)
def test_a_callback_that_fails_changes_nothing_but_itself(
    pool: Any, config: str, expected: Any, tmp_path: Path, method: str, rank: int
) -> None:
    """A mistake in a metric would end a run of weeks, stop the other ranks, or change what is trained; a
    warning that is missing would leave the user to wonder where the metric is.
    """
    check_row(pool, config, tmp_path, method, rank, expected[method in COMPILING])


@pytest.mark.parametrize("plant", ["never_drop", "never_report"])
@pytest.mark.parametrize("method", ["on_phase", "metrics", "step_parts"])
def test_the_rows_notice_a_callback_that_is_treated_otherwise(
    pool: Any, config: str, expected: Any, tmp_path: Path, method: str, plant: str
) -> None:
    """Rows that pass whatever happens to the callback would prove nothing to a user."""
    with pytest.raises(AssertionError):
        check_row(pool, config, tmp_path, method, 1, expected[False], plant)


@pytest.mark.parametrize("rank", range(WORLD))
@pytest.mark.parametrize("method", ["on_phase", "on_wait_end", "on_log"])
def test_a_callback_that_keeps_listening_is_reported_once(
    pool: Any, config: str, expected: Any, tmp_path: Path, method: str, rank: int
) -> None:
    """A component that must see all events, as the hang watchdog does, would go silent after one mistake, or
    fill the terminal with the same traceback in every step.
    """
    source = write_probe(tmp_path, method, rank, on_error="keep")
    done = pool.run(WORLD, callback_rank, config, [source], str(tmp_path / "run"))
    assert [status for status, _ in done] == [0] * WORLD
    warning = f"WARNING: rank {rank}: Probe failed in {method} and may miss events from now on; training"
    assert done[rank][1].count("Traceback") == done[rank][1].count(warning) == 1
    assert done[1 - rank][1] == ""

    calls = [len(calls_of(tmp_path, each)) for each in range(WORLD)]
    assert min(calls) > STEPS, "it is called in every step"
    assert method != "on_log" or calls[0] == calls[1]
    assert records(tmp_path / "run") == expected[False]


# A second callback writes what every rank knows of all ranks' step.
PARTS = """

class Probe(Callback):
    def step_parts(self, computed, waits, steps):
        note("calls", f"{time.time()}\\n")
        self.calls = getattr(self, "calls", 0) + 1
        if os.environ["RANK"] == str(RANK) and self.calls == CALL:
            raise RuntimeError("the probe fails")
        return {"computing": computed, "waiting": waits.for_ranks}


class Witness(Callback):
    def step_parts(self, computed, waits, steps):
        return {"steps": steps}

    def on_log(self, report):
        by_part = {name: list(seconds) for name, seconds in report.by_part.items()}
        note("parts", json.dumps(by_part) + "\\n")

CALLBACKS = [Probe, Witness]
"""


def check_parts(pool: Any, config: str, folder: Path, call: int, plant: str = "") -> None:
    """Run two ranks, and assert what every rank is told of their parts when rank 1's callback has failed."""
    source = write_probe(folder, "step_parts", 1, source=PARTS.replace("CALL:", f"{call}:"))
    # if ranks gather different shapes, they must not wait for each other for long
    overrides = [source, "parallel.timeout_seconds=20"]
    done = pool.run(WORLD, callback_rank, config, overrides, str(folder / "run"), plant)
    assert [status for status, _ in done] == [0] * WORLD
    assert done[1][1].count("WARNING: rank 1: Probe failed in step_parts and is left out") == 1

    for rank in range(WORLD):
        lines = (folder / f"parts.{rank}").read_text().splitlines()
        reports = [json.loads(line) for line in lines]
        assert len(reports) > STEPS
        for index, report in enumerate(reports):
            assert list(report) == ["computing", "waiting", "steps"]
            assert report["steps"] == [1.0] * WORLD
            for name in ("computing", "waiting"):
                of_rank_0, of_rank_1 = report[name]
                assert math.isfinite(of_rank_0)
                assert math.isnan(of_rank_1) == (index >= call - 1), "from the failure on it is unknown"


@pytest.mark.parametrize("call", [1, 3])
def test_what_a_failed_callback_measured_is_unknown_on_its_rank(
    pool: Any, config: str, tmp_path: Path, call: int
) -> None:
    """Other callbacks' numbers would move into its place, or ranks gather different shapes and hang;
    a 0 would be shown as a measurement.
    """
    check_parts(pool, config, tmp_path, call)


def test_ranks_that_gather_different_parts_are_noticed(pool: Any, config: str, tmp_path: Path) -> None:
    """If the test above passed without the NaN, ranks of different shapes could reach users."""
    with pytest.raises((AssertionError, RankError, RankTimeout)):
        check_parts(pool, config, tmp_path, 1, plant="without_nan")


# Part of every block is frozen, as a teacher's weights are. Its callback gives it other values, and changes
# a trained weight the way that holds in every precision: in the engine's tensors, and then `load_state`.
TEACHER = """
import torch
from megacore.model import block


class Block(block.Block):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.norm1.weight.requires_grad_(False)


class Teacher(Callback):
    def on_built(self, step):
        self.frozen = step.stages[0].blocks["0"].norm1.weight
        self.trained = step.stages[0].blocks["0"].norm2.weight
        self.show("built")
        teacher, weight = json.loads((Path(__file__).parent / "values.json").read_text())
        with torch.no_grad():
            self.frozen.fill_(teacher)
            tensors = step.engine.tensors()
            for name, (piece, _) in tensors.items():
                if name == "model/blocks.0.norm2.weight":
                    piece.fill_(weight)
        step.engine.load_state(step.engine.state(), tensors)
        self.show("filled")

    def on_step(self, result):
        self.show(result.step)

    def show(self, event):
        means = [weight.float().mean().item() for weight in (self.frozen, self.trained)]
        note("weights", json.dumps([event, *means]) + "\\n")

CALLBACKS = [Teacher]
"""


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_weights_that_on_built_changes_stay(pool: Any, config: str, tmp_path: Path, precision: str) -> None:
    """A teacher that a callback loads would be overwritten by the first weights, or by the checkpoint of a
    resumed run, and the student would learn from noise.
    """
    source = write_probe(tmp_path, "on_built", -1, source=TEACHER)
    overrides = [source, f"train.precision={precision}", "optim.decay_steps=4", "data.valid=null"]
    shown = []
    for steps, values in ((2, [7.0, 5.0]), (4, [8.0, 6.0])):
        (tmp_path / "values.json").write_text(json.dumps(values))
        arguments = [*overrides, f"train.steps={steps}"]
        done = pool.run(WORLD, training.run_rank, config, arguments, str(tmp_path / "run"))
        assert done == [0] * WORLD
        for rank in range(WORLD):
            file = tmp_path / f"weights.{rank}"
            shown.append([json.loads(line) for line in file.read_text().splitlines()])
            file.unlink()

    for first, resumed in (shown[::2], shown[1::2]):
        near = 0.1  # steps move a trained weight by less
        assert [event for event, *_ in first] == ["built", "filled", 1, 2]
        assert [event for event, *_ in resumed] == ["built", "filled", 3, 4]
        assert first[0] == ["built", 1.0, 1.0], "as drawn"
        assert resumed[0][1:] == first[-1][1:], "as the checkpoint has them"
        for lines, (teacher, weight) in ((first[1:], [7.0, 5.0]), (resumed[1:], [8.0, 6.0])):
            assert all(frozen == teacher for _, frozen, _ in lines)
            assert all(trained == pytest.approx(weight, abs=near) for *_, trained in lines)
            assert precision == "bf16" or lines[-1][2] != weight, "it is still trained"


LAUNCHED = [("", 0), ("on_step_begin", 1), ("metrics", 0)]


def test_a_callback_fails_in_the_command_of_a_user(config: str, tmp_path: Path) -> None:
    """Workers of tests catch output that a launcher's ranks might print twice, or lose at their end."""
    losses = []
    for method, rank in LAUNCHED:
        folder = tmp_path / f"run_{method}"
        source = write_probe(folder, method, rank, source=PROBE if method else "")
        arguments = ["--config", config, source, "train.compile=false", f"log.dir={folder}/run"]
        done = start([*LAUNCHERS["torchrun"](WORLD), PRETRAIN, *arguments])
        assert done.returncode == 0, done.stderr
        warnings = [line for line in done.stderr.splitlines() if "WARNING: rank" in line]
        assert len(warnings) == done.stderr.count("the probe fails\n") / 2 == bool(method)
        if method:
            begin = f"WARNING: rank {rank}: Probe failed in {method} and is left out; training continues: "
            assert warnings == [f"{begin}RuntimeError: the probe fails"]
            assert [len(calls_of(folder, rank)), len(calls_of(folder, 1 - rank))] == [1, STEPS]
        losses.append(training.figures(folder / "run"))
    assert len(losses[0]) == STEPS and losses == [losses[0]] * len(LAUNCHED)


RAISES = """
import torch
from megacore.distributed.collectives import all_reduce


class Probe(Callback):
    on_error = "raise"

    def on_start(self, config, mesh):
        self.mesh = mesh

    def METHOD(self, *arguments, **options):
        self.calls = getattr(self, "calls", 0) + 1
        if os.environ["RANK"] == str(RANK) and self.calls == 2:
            note("calls", f"{time.time()}\\n")
            raise RuntimeError("the probe fails")
        all_reduce(torch.ones(1), self.mesh.world)
        return super().METHOD(*arguments, **options)

CALLBACKS = [Probe]
"""


@pytest.mark.parametrize(("method", "launcher"), [("metrics", "deepspeed"), ("on_step", "torchrun")])
def test_a_callback_that_communicates_ends_the_job(
    config: str, tmp_path: Path, method: str, launcher: str
) -> None:
    """Rank 0 waits in the callback's all-reduce: the job would hang until the watchdog ends it, and blame
    rank 0's collective instead of the callback of rank 1.
    """
    source = write_probe(tmp_path, method, 1, source=RAISES)
    arguments = ["--config", config, source, "train.compile=false", f"log.dir={tmp_path}/run"]
    done = start([*LAUNCHERS[launcher](WORLD), PRETRAIN, *arguments])
    (failed,) = calls_of(tmp_path, 1)
    assert time.time() - failed < 120, "on a busy machine too, and a hang lasts 600 seconds"
    assert done.returncode == 1, done.stderr
    reasons = [line for line in done.stderr.splitlines() if line.startswith("rank ")]
    assert len(reasons) == 1, "rank 0 only lost its peer"
    assert reasons[0].startswith("rank 1 ") and reasons[0].endswith("failed: RuntimeError: the probe fails")
    if launcher == "deepspeed":  # torchrun prints a summary after it
        assert done.stderr.rstrip().splitlines()[-1] == reasons[0]
    else:
        assert f"traceback : {reasons[0]}" in root_cause(done.stderr)
