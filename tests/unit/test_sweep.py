"""launch/sweep.py: which trials a file makes, how they are run, stopped and gone on
with, and what is said of them.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from launch import sweep
from megacore.errors import UserError
from megacore.tools.settings.load import load
from megacore.tools.sweep import local, picture, price
from megacore.tools.sweep.folder import SweepFolder
from megacore.tools.sweep.results import Results, rows_of
from megacore.tools.sweep.spec import Spec, read_spec
from megacore.tools.sweep.trials import trials_of
from tests.build import run_of
from tests.conftest import Refused
from tests.pool import ROOT

MODEL = {"num_layers": 2, "hidden_size": 16, "num_heads": 2, "vocab_size": 256}
TRAIN = {"steps": 4, "seq_len": 16, "global_batch_size": 4, "precision": "fp32", "device": "cpu"}
CONFIG = {"model": MODEL, "train": TRAIN, "optim": {"lr": 0.01}, "log": {"every": 1}}
# In place of launch/pretrain.py: records of four steps whose loss is lr + seed / 100; two of them if it is
# asked to stop meanwhile.
STAND_IN = """
import json, os, sys, time
from pathlib import Path
config = json.loads(Path(sys.argv[2]).read_text())
folder, optim, seed = Path(config["log"]["dir"]), config["optim"], config["train"].get("seed", 0)
if optim.get("beta1") == 0.5:
    sys.exit("boom: this one cannot train")
path = folder / "metrics.jsonl"
done = len(path.read_text().splitlines()) if path.exists() else 0
print("threads", os.environ["OMP_NUM_THREADS"], "from step", done, flush=True)
for step in range(done + 1, 5):
    line = {"step": step, "loss": optim["lr"] + seed / 100, "grad_norm": 1.0, "tokens": 64 * step, "tokens_per_second": 1.0}
    line |= {"step_seconds": 0.5, "mfu": None, "memory_bytes": 1, "skipped": 0}
    with path.open("a") as out:
        out.write(json.dumps(line) + "\\n")
    if optim["lr"] > 1:
        while not (folder / "STOP").exists():
            time.sleep(0.02)
        sys.exit(75)
"""  # noqa: E501


def spec_of(tmp_path: Path, name: str = "sweep", **parts: Any) -> str:
    """A sweep's file, beside its config."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    path = tmp_path / f"{name}.json"
    path.write_text(
        json.dumps({"config": str(tmp_path / "config.json"), "folder": str(tmp_path / "out")} | parts)
    )
    return str(path)


def trials(tmp_path: Path, **parts: Any) -> list[Any]:
    return trials_of(read_spec(spec_of(tmp_path, **parts)))


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trials that take no time, and a machine that is not measured."""
    script = tmp_path / "stand_in.py"
    script.write_text(STAND_IN)
    monkeypatch.setattr(local, "SCRIPT", script)
    monkeypatch.setattr(local, "LOOK_SECONDS", 0.02)
    monkeypatch.setattr(sweep, "check_data", lambda trials: None)
    monkeypatch.setattr(price, "measured", lambda threads: None)


def test_grid_with_linked_keys_and_seeds(tmp_path: Path) -> None:
    """Every combination once; keys that belong together change together, and one
    that follows another follows it.
    """
    sizes = [{"model.hidden_size": 16, "model.num_heads": 2}, {"model.hidden_size": 32, "model.num_heads": 4}]
    linked = {
        "optim.min_lr": {"of": "optim.lr", "times": 0.5},
        "model.ffn_size": {"of": "model.hidden_size", "times": 3},
    }
    found = trials(tmp_path, grid={"size": sizes, "optim.lr": [0.01, 0.02]}, linked=linked, seeds=[3, 4])
    configs = [trial.config for trial in found]
    rows = [
        (c.model.hidden_size, c.model.num_heads, c.model.ffn_size, c.optim.lr, c.optim.min_lr, c.train.seed)
        for c in configs
    ]
    sized = ((16, 2, 48), (32, 4, 96))
    assert rows == [(*size, lr, lr / 2, seed) for size in sized for lr in (0.01, 0.02) for seed in (3, 4)]
    assert [trial.name for trial in found][:3] == [
        "size=16+2,lr=0.01,seed=3",
        "size=16+2,lr=0.01,seed=4",
        "size=16+2,lr=0.02,seed=3",
    ]


def test_random_search_repeats_and_grows(tmp_path: Path) -> None:
    """The same file draws the same; more trials, or one more key, change nothing that was drawn;
    draws keep to their distribution.
    """
    keys: dict[str, Any] = {"optim.lr": {"log_uniform": [1e-4, 1e-1]}, "optim.beta1": {"uniform": [0.8, 0.9]}}
    few, many = (trials(tmp_path, random={"trials": n, "seed": 7, "keys": keys}) for n in (5, 60))
    assert [trial.swept for trial in many[:5]] == [trial.swept for trial in few] and len(many) == 60
    more = trials(
        tmp_path,
        random={"trials": 5, "seed": 7, "keys": keys | {"model.norm": {"choice": ["layernorm", "rmsnorm"]}}},
    )
    assert [trial.swept["optim.lr"] for trial in more] == [trial.swept["optim.lr"] for trial in few]
    rates = sorted(trial.config.optim.lr for trial in many)
    assert 1e-4 <= rates[0] and rates[-1] <= 1e-1 and 10**-3.2 < rates[30] < 10**-1.8, (
        "a third of the trials for each decade"
    )
    assert all(0.8 <= trial.config.optim.beta1 <= 0.9 for trial in many)
    assert trials(tmp_path, random={"trials": 5, "seed": 8, "keys": keys})[0].swept != few[0].swept
    assert (
        len(
            trials(
                tmp_path, random={"trials": 9, "keys": {"model.norm": {"choice": ["layernorm", "rmsnorm"]}}}
            )
        )
        == 2
    )


def test_names_are_folders(tmp_path: Path) -> None:
    """Values that no folder's name can hold, or that are long, stay apart."""
    groups = [
        [],
        [{"match": ["a/b*"], "lr": 0.1}],
        [{"match": ["a?b*"], "lr": 0.1}],
        [{"match": ["x" * 300], "lr": 0.1}],
    ]
    names = [trial.name for trial in trials(tmp_path, grid={"optim.groups": groups})]
    assert len(set(names)) == 4 and all(len(name) < 120 and "/" not in name for name in names)


def test_runs_reports_and_keeps(tmp_path: Path, stand_in: None, capfd: pytest.CaptureFixture[str]) -> None:
    """A trial that fails is named and ends no other; a second start runs it alone; values that are
    added are run, and no other again.
    """
    grid: dict[str, Any] = {"optim.lr": [0.01, 0.02], "optim.beta1": [0.5, 0.9]}
    path = spec_of(tmp_path, grid=grid, seeds=[0, 1, 2])
    assert sweep.run([path, "--at-once", "2"]) == 1
    said = capfd.readouterr()
    assert (
        "failed with status 1: boom: this one cannot train" in said.err
        and "6 of 12 trials failed: lr=0.01,beta1=0.5,seed=0" in said.err
    )
    found = json.loads((tmp_path / "out/results.json").read_text())
    assert found["metric"] == "loss" and found["best"] == "lr=0.01,beta1=0.9" and len(found["trials"]) == 12
    points = {point["point"]: point for point in found["points"]}
    assert points["lr=0.02,beta1=0.9"]["losses"] == pytest.approx([0.02, 0.03, 0.04])
    assert (
        points["lr=0.02,beta1=0.9"]["median"] == pytest.approx(0.03)
        and points["lr=0.02,beta1=0.5"]["median"] is None
    )
    assert found["trials"][3] | {"loss": 0} == {
        "trial": "lr=0.01,beta1=0.9,seed=0",
        "optim.lr": 0.01,
        "optim.beta1": 0.9,
        "seed": 0,
        "status": "finished",
        "step": 4,
        "loss": 0,
        "valid_loss": None,
        "seconds": 2.0,
    }
    assert (
        (tmp_path / "out/results.csv")
        .read_text()
        .splitlines()[1]
        .startswith('"lr=0.01,beta1=0.5,seed=0",0.01,0.5,0,failed (1),0,,')
    )
    best = load(str(tmp_path / "out/best.json"), [])
    assert (best.config.optim.lr, best.config.optim.beta1, best.config.log.dir) == (0.01, 0.9, "runs/best")
    assert "The best optim.lr, 0.01, is the smallest that was tried" in said.out

    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "out/trials").glob("*0.9*/metrics.jsonl")}
    spec_of(tmp_path, grid=grid | {"optim.lr": [0.005, 0.01, 0.02]}, seeds=[0, 1, 2])
    assert sweep.run([path, "--at-once", "3"]) == 1
    assert {path: path.stat().st_mtime_ns for path in kept} == kept and len(kept) == 6
    assert json.loads((tmp_path / "out/results.json").read_text())["best"] == "lr=0.005,beta1=0.9"
    assert capfd.readouterr().out.count("9 trials") == 0
    assert sweep.run([path, "--report"]) == 1
    threads = max(1, local.available_cores() // 2)
    wanted = os.environ.get("OMP_NUM_THREADS", str(threads))
    assert (
        f"threads {wanted} from step 0"
        in (tmp_path / "out/trials/lr=0.02,beta1=0.9,seed=0/output.txt").read_text()
    )


def test_stops_and_goes_on(tmp_path: Path, stand_in: None, capfd: pytest.CaptureFixture[str]) -> None:
    """Ctrl-C lets the trials that run save and end, starts no other, and leaves no request behind; the same
    command goes on where they stood.
    """
    path = spec_of(tmp_path, grid={"optim.lr": [2.0, 3.0, 0.5]})
    running = [tmp_path / f"out/trials/lr={lr}/metrics.jsonl" for lr in (2.0, 3.0)]

    def ctrl_c() -> None:
        while not all(file.exists() for file in running):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=ctrl_c)
    thread.start()
    assert sweep.run([path, "--at-once", "2"]) == 75
    thread.join()
    assert "stopped after step 1" in capfd.readouterr().out and not (tmp_path / "out/trials/lr=0.5").exists()
    assert not list((tmp_path / "out").rglob("STOP"))
    for file in running:  # as if the stand-in had gone on
        lines = [json.loads(file.read_text()) | {"step": step} for step in (1, 2, 3, 4)]
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert sweep.run([path]) == 0
    said = capfd.readouterr().out
    assert "3 trials, of which 2 are finished" in said and "1/1 lr=0.5" in said


def test_one_sweep_at_a_time(tmp_path: Path, stand_in: None) -> None:
    """Two that started the same trials would each end the other's with an error."""
    path = spec_of(tmp_path, grid={"optim.lr": [0.1, 0.2]})
    folder = tmp_path / "out"
    folder.mkdir()
    hold = (
        f"import fcntl, time; file = open({str(folder / 'lock')!r}, 'a'); fcntl.flock(file, "
        "fcntl.LOCK_EX); print('held', flush=True); "
    )
    holder = subprocess.Popen([sys.executable, "-c", hold + "time.sleep(60)"], stdout=subprocess.PIPE)
    assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
    try:
        with pytest.raises(UserError, match="folder: .* belongs to a sweep that is still running"):
            sweep.run([path])
    finally:
        holder.kill()
        holder.wait()
        holder.stdout.close()


def test_what_ended_meanwhile_is_known(
    tmp_path: Path, stand_in: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another sweep of the folder may end between this one's first look and its lock:
    its trials would be forgotten.
    """
    path, record = spec_of(tmp_path, grid={"optim.lr": [0.01]}), tmp_path / "out/sweep.json"

    def other(*given: object) -> None:
        record.parent.mkdir(exist_ok=True)
        record.write_text(json.dumps({"trials": ["lr=0.5"]}))

    monkeypatch.setattr(price, "show", other)
    with pytest.raises(UserError, match="holds the trial lr=0.5, which the file no longer has"):
        sweep.run([path])


def test_price_before_the_first_start(
    tmp_path: Path, stand_in: None, capfd: pytest.CaptureFixture[str]
) -> None:
    """Time and money of each trial and of all, by the planner's own step; --dry-run starts nothing."""
    grid: dict[str, Any] = {"train.steps": [100, 300], "parallel.tensor": [1, 2]}
    spec = spec_of(
        tmp_path, overrides={"train.precision": "bf16", "log.price_per_device_hour": 2.0}, grid=grid
    )
    assert sweep.run([spec, "--dry-run", "--gpu", "h100", "--at-once", "1"]) == 0
    said = capfd.readouterr().out
    assert not (tmp_path / "out").exists() and "predicted by the planner for h100" in said
    found = trials_of(read_spec(spec))
    machine = price.machine_of("h100", None, found, 1, None)
    assert machine is not None
    seconds = price.seconds_of(found, machine)
    step = {trial.ranks: price.step_seconds(trial, machine) for trial in found}
    assert step[1] and step[2] and step[1] != step[2]
    assert [seconds[trial] for trial in found] == pytest.approx(
        [100 * step[1], 100 * step[2], 300 * step[1], 300 * step[2]]
    )
    hours = 400 * (step[1] + 2 * step[2]) / 3600
    clock, total, money = 400 * (step[1] + step[2]), f"{hours:,.3g}", f"{2 * hours:,.4g}"
    assert f"in all: {clock:,.3g} s on the clock, {total} device-hours, {money} in money" in said
    swept = {"optim.kind": ["adamw", "muon"], "train.batch_ramp": [[], [[2, 1], [3, 2]]]}
    seconds = price.seconds_of(
        found := trials_of(read_spec(spec_of(tmp_path, overrides={"train.precision": "bf16"}, grid=swept))),
        machine,
    )
    plain, ramped, muon, _ = (seconds[trial] or 0.0 for trial in found)
    assert muon > plain and muon == 4 * (price.step_seconds(found[2], machine) or 0.0), (
        "updates of whole matrices take time"
    )
    assert ramped == pytest.approx(plain * (1 + 1 + 2 + 4) / 16), (
        "of four steps with 4 samples each, these have fewer"
    )
    assert price.clock_seconds([3.0, 1.0, 1.0, 1.0], 2) == 3.0 and price.clock_seconds([2.0] * 3, 2) == 4.0


def test_job_array(tmp_path: Path, stand_in: None, capfd: pytest.CaptureFixture[str]) -> None:
    """Task N trains the trial in line N, whichever trials are finished or were added;
    nothing is submitted unless asked.
    """
    path = spec_of(tmp_path, grid={"optim.lr": [0.01, 0.02]})
    assert sweep.run([path]) == 0
    spec_of(tmp_path, grid={"optim.lr": [0.005, 0.01, 0.02, 0.04]}, overrides={})
    assert sweep.run([path, "--slurm", "--at-once", "2"]) == 0
    job = tmp_path / "out/sweep.sbatch"
    assert f"sbatch {job}" in capfd.readouterr().out
    assert "#SBATCH --array=3-4%2\n" in job.read_text() and "#SBATCH --ntasks-per-node=1\n" in job.read_text()
    (tmp_path / "srun").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "srun").chmod(0o755)
    variables = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_ARRAY_TASK_ID": "4",
        "MEGACORE_VENV": "none",
    }
    done = subprocess.run(["bash", str(job)], env=variables, capture_output=True, text=True, check=True)
    assert done.stdout.split()[-1] == f"{tmp_path}/out/configs/lr=0.04.json", done.stderr
    assert run_of(done.stdout.split()[-1]).optim.lr == 0.04


@pytest.mark.parametrize(("given", "cores"), [({"SLURM_CPUS_PER_TASK": "12"}, "12"), ({}, "1")])
def test_ranks_have_their_cores(tmp_path: Path, given: dict[str, str], cores: str) -> None:
    """srun takes no cores over from the job, so each rank, its loader and its heartbeats would share one."""
    script = ROOT / "launch" / "slurm" / "pretrain.sbatch"
    assert "\n#SBATCH --cpus-per-task=8\n" in script.read_text()
    (tmp_path / "srun").write_text('#!/bin/sh\necho "$OMP_NUM_THREADS $@"\n')
    (tmp_path / "srun").chmod(0o755)
    variables = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "MEGACORE_VENV": "none"} | given
    done = subprocess.run(["bash", str(script)], env=variables, capture_output=True, text=True, check=True)
    assert done.stdout.split()[0] == cores and f"--cpus-per-task={cores}" in done.stdout


def test_pictures(tmp_path: Path, stand_in: None) -> None:
    """One key, several lines, too many for lines, more than two keys, words in
    place of numbers: each is drawn.
    """
    rates = [0.01, 0.02, 0.04]
    grids: list[dict[str, Any]] = [
        {"optim.lr": rates},
        {"optim.lr": rates, "model.norm": ["layernorm", "rmsnorm"]},
        {"optim.lr": rates, "train.seed": list(range(10))},
        {"optim.lr": rates, "model.norm": ["layernorm", "rmsnorm"], "optim.beta1": [0.8, 0.9]},
        {"model.norm": ["layernorm", "rmsnorm"]},
    ]
    for number, grid in enumerate(grids):
        spec = Spec.model_validate(
            {"config": str(tmp_path / "config.json"), "grid": grid, "seeds": [] if number == 2 else [0, 1]}
        )
        spec_of(tmp_path)
        folder = SweepFolder(tmp_path / f"out{number}", trials_of(spec))
        for trial in folder.trials:
            folder.log_dir(trial).mkdir(parents=True)
            line = {
                "loss": trial.config.optim.lr,
                "grad_norm": 1.0,
                "tokens": 1,
                "tokens_per_second": 1.0,
                "step_seconds": 1.0,
            }
            line |= {"step": 4, "mfu": None, "memory_bytes": 1, "skipped": 0}
            (folder.log_dir(trial) / "metrics.jsonl").write_text(json.dumps(line) + "\n")
        path = tmp_path / f"{number}.png"
        assert (
            picture.draw(Results(rows_of(folder, 1), "loss", 1), str(path)) and path.stat().st_size > 10_000
        )
    assert (
        picture.log_spaced([1, 2, 4, 8])
        and not picture.log_spaced([1, 2, 3, 4])
        and not picture.log_spaced([0, 1, 10, 100])
    )


def test_a_real_trial(tree: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """launch/pretrain.py itself takes a trial's config, trains in the trial's folder, and is read
    again; it has the trial's threads.
    """
    data = {"data.valid": str(tree / "data"), "log.every": 1, "log.tensorboard": False}
    spec = {
        "config": str(tree / "config.json"),
        "overrides": data,
        "grid": {"optim.lr": [0.001]},
        "folder": str(tmp_path / "out"),
    }
    (tmp_path / "spec.json").write_text(json.dumps(spec))
    assert sweep.run([str(tmp_path / "spec.json"), "--at-once", "1"]) == 0
    said = capfd.readouterr().out
    found = json.loads((tmp_path / "out/results.json").read_text())
    assert (
        found["metric"] == "valid_loss"
        and found["best"] == "lr=0.001"
        and found["trials"][0]["status"] == "finished"
    )
    assert 5 < found["trials"][0]["valid_loss"] < 6 and "measured by a product and a copy" in said
    output = (tmp_path / "out/trials/lr=0.001/output.txt").read_text()
    threads = os.environ.get("OMP_NUM_THREADS", str(local.available_cores()))
    assert (
        f"threads {threads}" in output and f"validation loss {found['trials'][0]['valid_loss']:.4f}" in output
    )
    assert sweep.run([str(tmp_path / "spec.json")]) == 0, "nothing is left to do"
    assert (tmp_path / "out/trials/lr=0.001/output.txt").read_text() == output


RATE = {"optim.lr": [0.1]}
BAD: list[tuple[Any, str]] = [
    ([1], "config error: arguments: @spec.json holds no object ({"),
    ({"grid": RATE}, "config error: config: Field required (such as {"),
    (
        {"config": "@nothing.json", "grid": RATE},
        "config error: --config: cannot read @nothing.json: No such file",
    ),
    ({"config": "@config.json"}, "config error: grid: nothing is swept (grid, random, or several seeds)"),
    ({"grids": RATE}, "config error: grids: unknown key (config, overrides, grid, random"),
    ({"grid": {"optim.lr": []}}, "config error: grid.optim.lr: List should have at least 1 item"),
    ({"grid": {"optim.lr": 0.1}}, "config error: grid.optim.lr: Input should be a valid list"),
    ({"grid": {"optim.lr": [0.1, 0.1]}}, "config error: grid.optim.lr: 0.1 stands twice (each value once)"),
    (
        {"grid": {"optim.rate": [0.1]}},
        "config error: trial rate=0.1: optim.rate: unknown key (launch/pretrain.py --print-config shows",
    ),
    ({"grid": {"optim.lr": [0.1, -1]}}, "config error: trial lr=-1: optim.lr: -1 is not valid"),
    (
        {"grid": {"optim.a.b": [1]}},
        "config error: grid.optim.a.b: 'optim.a.b' is no key of a config (section.key",
    ),
    (
        {"grid": {"lr": [0.1]}},
        "config error: grid.lr: is no section.key, and 0.1 no object of them (a key such as optim.lr",
    ),
    (
        {"grid": {"a": [{"optim.lr": 1}, {"optim.eps": 1}]}},
        "config error: grid.a: its objects set optim.lr and optim.eps (the same keys",
    ),
    (
        {"grid": RATE, "overrides": {"optim.lr": 1}},
        "config error: grid.optim.lr: optim.lr is set by overrides.optim.lr too (one",
    ),
    (
        {"grid": {"log.dir": ["a", "b"]}},
        "config error: grid.log.dir: log.dir: each trial has a folder of its own (folder",
    ),
    (
        {"grid": RATE, "overrides": {"checkpoint.resume": "never"}},
        "config error: overrides.checkpoint.resume: checkpoint.resume: a tri",
    ),
    ({"grid": {"train.seed": [1]}, "seeds": [1]}, "config error: grid.train.seed: seeds sets it too"),
    (
        {"grid": {"model.source": [1, "1"]}},
        "config error: grid.model.source: 1 stands twice (each value once)",
    ),
    (
        {"grid": {"seed": [{"train.seed": 1}, {"train.seed": 2}]}},
        "config error: grid.seed: the table of results has a column seed",
    ),
    (
        {"grid": RATE, "folder": "@a%j"},
        "config error: folder: @a%j holds what a job script would have to quote (letters, digits",
    ),
    ({"grid": RATE, "seeds": [1, 1]}, "config error: seeds: 1 stands twice"),
    ({"grid": RATE, "seeds": [-1]}, "config error: seeds.0: Input should be greater than or equal to 0"),
    (
        {"grid": {"optim.lr": list(range(101)), "optim.eps": list(range(100))}},
        "config error: grid: makes 10,100 trials (at most 10,000)",
    ),
    (
        {"grid": RATE, "random": {"trials": 1, "keys": {"a.b": {}}}},
        "config error: random: stands beside grid (one of the two)",
    ),
    (
        {"random": {"trials": 0, "keys": {"optim.lr": {"uniform": [0, 1]}}}},
        "config error: random.trials: Input should be greater than or",
    ),
    (
        {"random": {"trials": 2, "keys": {"optim.lr": {"normal": [0, 1]}}}},
        "config error: random.keys.optim.lr: normal is no distribution",
    ),
    (
        {"random": {"trials": 2, "keys": {"optim.lr": {"uniform": [1, 0]}}}},
        "config error: random.keys.optim.lr: 1 is not below 0 (",
    ),
    (
        {"random": {"trials": 2, "keys": {"optim.lr": {"log_uniform": [0, 1]}}}},
        "optim.lr: log_uniform.0: Input should be greater than 0 (",
    ),
    (
        {"grid": RATE, "linked": {"optim.min_lr": {"of": "model.norm", "times": 1}}},
        "config error: linked.optim.min_lr: model.norm is no n",
    ),
    (
        {"grid": RATE, "linked": {"optim.min_lr": {"of": "optim.lr", "times": 2}}},
        "config error: trial lr=0.1: optim.min_lr: 0.2 is above",
    ),
    (
        {"grid": RATE, "metric": "valid_loss"},
        "config error: metric: valid_loss is not measured: a trial has no data.valid",
    ),
    (
        {"grid": RATE, "ranks": 3, "overrides": {"parallel.tensor": 2}},
        "config error: trial lr=0.1: parallel: tensor 2 × pipeline 1 × data",
    ),
    ({"grid": RATE, "overrides": {"data.train": "@gone"}}, "data error: trial lr=0.1: @gone.bin: missing"),
    ({"grid": RATE, "folder": "@file"}, "config error: folder: cannot write in @file"),
]


@pytest.mark.parametrize("spec, line", BAD, ids=[line.partition(": ")[2][:40] for _, line in BAD])
def test_mistakes_are_one_line(refused: Refused, tree: Path, spec: Any, line: str) -> None:
    """Each before anything is started or written."""
    text = json.dumps(
        ({"config": "@config.json"} | spec) if isinstance(spec, dict) and spec != {"grid": RATE} else spec
    )
    (tree / "spec.json").write_text(text.replace("@", f"{tree}/"))
    refused("sweep", ("@spec.json", "--dry-run") if "folder" not in line else ("@spec.json", "--slurm"), line)


@pytest.mark.parametrize(
    "arguments, line",
    [
        (("@nothing",), "config error: arguments: cannot read @nothing: No such file"),
        (("@deep.json",), "config error: arguments: @deep.json is no JSON"),
        (("@twice.json",), "config error: arguments: @twice.json is no JSON: the key steps twice"),
        (("@good.json", "--at-once", "0"), "config error: --at-once: '0' is not a whole number"),
        (("@good.json", "--price", "-1"), "config error: --price: -1.0 is not usable (0 or more)"),
        (("@good.json", "--submit"), "config error: --submit: there is no job to submit (also --slurm)"),
        (
            ("@on_a_file.json", "--dry-run"),
            "config error: folder: cannot write in @file: File exists (a folder that can be made and",
        ),
        (("@good.json", "--report"), "config error: --report: @run holds no sweep yet (first the sweep)"),
        (("@good.json", "--report", "--slurm"), "config error: --report: stands beside --slurm"),
        (("@good.json", "--dry-run", "--gpu", "h1000"), "config error: --gpu: h1000 is not known"),
        (
            ("@good.json", "--dry-run", "--cluster", "dgx_h100"),
            "config error: --cluster: links alone predict nothing (also --gpu)",
        ),
        (("@good.json", "--slurm", "--submit"), "config error: --submit: there is no sbatch here"),
    ],
)
def test_arguments(refused: Refused, tree: Path, arguments: tuple[str, ...], line: str) -> None:
    """Each is one line too."""
    for name, folder in (("good", "run"), ("on_a_file", "file")):
        spec = {"config": str(tree / "config.json"), "grid": RATE, "folder": str(tree / folder)}
        (tree / f"{name}.json").write_text(json.dumps(spec))
    refused("sweep", arguments, line)


def test_another_sweep_in_the_folder(tmp_path: Path, stand_in: None) -> None:
    """Trials that were run with other settings would stand in one table with these."""
    path = spec_of(tmp_path, grid={"optim.lr": [0.01, 0.02]})
    assert sweep.run([path]) == 0
    spec_of(tmp_path, grid={"optim.lr": [0.01, 0.02]}, overrides={"train.steps": 8})
    with pytest.raises(
        UserError,
        match=r"folder: .* holds the trial lr=0.01 with train.steps 4, and now it is 8 \(another folder",
    ):
        sweep.run([path])
    spec_of(tmp_path, grid={"optim.lr": [0.01]})
    with pytest.raises(UserError, match="holds the trial lr=0.02, which the file no longer has"):
        sweep.run([path])
