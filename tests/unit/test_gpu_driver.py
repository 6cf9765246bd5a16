"""`benchmarks.gpu`, without a GPU: everything that it runs at tiny sizes, and what it makes of parts
that fail, hang or say nothing.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import before, running, wheels
from benchmarks.gpu.communicator import timed
from benchmarks.gpu.kernels import Calls, eager, said_by
from benchmarks.gpu.parts import SLICES, START_UP, Part, Slice
from benchmarks.gpu.report import Report
from benchmarks.gpu.running import Runner, StopRequest
from benchmarks.gpu.speed import class_of
from benchmarks.gpu.steps import same
from megacore.distributed.processes import ENDED, process_state
from megacore.errors import ConfigError
from megacore.kernels.gelu import bias_gelu
from tests.pool import PATIENCE, ROOT

MACHINE = {"date": "today", "machine": {"gpus": [], "processor": "none"}, "versions": {"torch": "none"}}
HERE = "tests.planted_parts"


def run_parts(folder: Path, *own: Part, seconds: int = PATIENCE, lines: list[str] | None = None) -> Report:
    """Runs parts as a slice, dry; `lines` gets what is printed."""
    report = Report("planted", "Planted", folder, True, MACHINE)
    say = (lambda line: None) if lines is None else lines.append
    Runner(report, say, StopRequest()).run(Slice("Planted", seconds, own), time.monotonic())
    return report


THREADS_STARTED = """
import importlib, os, sys
import torch

before = os.listdir("/proc/self/task")
for module in sys.argv[1].split(","):
    importlib.import_module(module)
exec(sys.argv[2])
print(len(os.listdir("/proc/self/task")) - len(before))
"""


@pytest.mark.parametrize(("computation", "threads"), [("", 0), ("torch.zeros(50304).double()", 1)])
def test_processes_are_forked_before_torch_has_threads(computation: str, threads: int) -> None:
    """A part would wait forever for threads of the process that it was forked from.

    Planted: a tensor that is computed while a module is imported.
    """
    modules = ",".join(running.PRELOADED + running.PRELOADED_IN_DRY_RUNS)
    done = subprocess.run(
        [sys.executable, "-c", THREADS_STARTED, modules, computation],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "2"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    assert int(done.stdout) == threads


def test_all_slices_run_dry(tmp_path: Path) -> None:
    """A typing mistake would cost a lease of the GPU: every line that a CPU can run is run.

    The PATH is empty: a bare machine may lack git, a compiler and nvidia-smi.
    """
    command = [sys.executable, "-m", "benchmarks.gpu", "all", "--dry-run", "--output", str(tmp_path)]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | {"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("failed: nothing\n")
    assert json.loads((tmp_path / "gpu_first.json").read_text())["versions"]["megacore commit"] is None
    for name, whole in SLICES.items():
        report = json.loads((tmp_path / f"gpu_{name}.json").read_text())
        assert report["complete"] and report["dry_run"] and not report["failed"]
        assert list(report["parts"]) == [part.name for part in whole.parts if part.dry]
        assert all(part["rows"] for part in report["parts"].values())
        table = (tmp_path / f"gpu_{name}.md").read_text()
        assert all(f"## {part.name}\n" in table for part in whole.parts if part.dry) and table.endswith(
            "Failed: nothing.\n"
        )
    files = list(tmp_path.iterdir())
    assert len(files) == 12 and all(
        re.fullmatch(r"[\w.-]+", file.name) and file.stat().st_size < 2**24 for file in files
    )


def test_the_budget() -> None:
    """The documents promise these minutes.

    In the first slice, and in a comparison of two checkouts, all parts have their whole time.
    """
    assert all(whole.seconds <= 9 * 60 for whole in SLICES.values())
    assert 33 * 60 < sum(whole.seconds for whole in SLICES.values()) <= 34 * 60
    assert all(part.seconds <= whole.seconds for whole in SLICES.values() for part in whole.parts)
    assert next(iter(SLICES)) == "first"
    first = SLICES["first"].parts
    together = max(part.seconds for part in first if part.together)
    alone = sum(part.seconds for part in first if not part.together)
    assert START_UP + together + alone <= SLICES["first"].seconds
    compared = before.alternating_parts(ROOT, ())
    assert START_UP + sum(part.seconds for part in compared) <= SLICES["first"].seconds


# --- parts that do not do what they should ------------------------------------------------------------------


@pytest.mark.parametrize("together", [False, True], ids=["alone", "together"])
def test_a_slice_continues_after_failures_and_writes_as_it_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, together: bool
) -> None:
    """What a part found before it failed, hung or was killed must be in the files, and
    others must still run. The time of `endless` is over once it has written what this test looks for.
    """
    monkeypatch.setattr(
        running.RunningPart, "is_late", property(lambda each: {"seen": True} in each.entry["rows"])
    )
    own = (
        Part("broken", PATIENCE, f"{HERE}:broken", together=together),
        Part("endless", 10, f"{HERE}:endless", (str(tmp_path / "gpu_planted.json"),), together=together),
        Part("wrong", PATIENCE, f"{HERE}:wrong", together=together),
        Part("good", PATIENCE, f"{HERE}:good", together=together),
    )
    said: list[str] = []
    run_parts(tmp_path, *own, lines=said)
    report = json.loads((tmp_path / "gpu_planted.json").read_text())
    assert report["complete"] and report["failed"] == ["broken", "endless", "wrong"]
    found = report["parts"]
    assert found["broken"]["rows"] == [{"name": "before"}, {"failed": "OSError: a disk is gone"}]
    assert "second line" in found["broken"]["log"], "the whole traceback is kept"
    assert found["endless"]["status"] == "out of time (10 s)" and found["endless"]["rows"][1] == {
        "seen": True
    }
    assert is_gone(found["endless"]["rows"][0]["child"]), "what it had started must be ended too"
    assert found["wrong"]["why"] == "off by 3" and found["wrong"]["rows"][1] == {"name": "y", "found": 2}
    assert found["good"]["status"] == "ok" and len(said) == 4
    table = (tmp_path / "gpu_planted.md").read_text()
    assert "| number | name |" in table and "| 1.5 | a |" in table and "|  | b / c |" in table
    assert table.endswith("Failed: broken, endless, wrong.\n")


def test_a_slice_ends_in_its_time(tmp_path: Path) -> None:
    """Parts that find no time left are named: their absence is no success."""
    report = run_parts(tmp_path, Part("good", 30, f"{HERE}:good"), seconds=4)
    assert report.content["failed"] == ["good"]
    assert report.entry("good")["status"] == "no time was left"


def test_start_up_is_in_the_time_of_a_slice(tmp_path: Path) -> None:
    """Or `timeout` would end a run whose packages took long to install before its caches are packed."""
    report = Report("planted", "Planted", tmp_path, True, MACHINE)
    runner = Runner(report, lambda line: None, StopRequest())
    part = Part("good", PATIENCE, f"{HERE}:good")
    runner.run(Slice("Planted", PATIENCE, (part,)), time.monotonic() - PATIENCE)
    assert report.entry("good")["status"] == "no time was left"


@pytest.mark.parametrize("together", [False, True], ids=["alone", "together"])
def test_parts_run_at_the_same_time_only_if_they_say_so(tmp_path: Path, together: bool) -> None:
    """Each of two parts waits for a file of the other: alone, the first one waits in vain."""
    files = str(tmp_path / "a"), str(tmp_path / "b")
    seconds = PATIENCE if together else 1
    parts = (
        Part("a", seconds, f"{HERE}:meets", files, together=together),
        Part("b", seconds, f"{HERE}:meets", files[::-1], together=together),
    )
    report = run_parts(tmp_path, *parts)
    assert report.entry("a")["status"] == ("ok" if together else "out of time (1 s)")


# --- a run that is ended ------------------------------------------------------------------------------------

PLANTED_SLICE = """
import sys
from benchmarks.gpu.__main__ import main
from benchmarks.gpu.parts import SLICES, Part, Slice
from megacore.tools.cli import exit_with
together = sys.argv.pop(1) == "together"
names = ("good", "waits", "never")
parts = [Part(n, 900, f"tests.planted_parts:{n}", together=together and n != "never") for n in names]
SLICES["first"] = Slice("Planted", 900, tuple(parts))
exit_with(main)
"""


@pytest.mark.parametrize("phase", ["together", "alone"])
def test_a_run_that_is_ended_keeps_its_rows_and_names_what_is_unfinished(tmp_path: Path, phase: str) -> None:
    """SIGTERM goes to the whole process group, as `timeout` sends it."""
    command = [sys.executable, "-c", PLANTED_SLICE, phase, "first", "--dry-run", "--output", str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    driver = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    path = tmp_path / "gpu_first.json"
    try:
        while not has_begun(path):
            assert driver.poll() is None
            time.sleep(0.05)
        os.killpg(driver.pid, signal.SIGTERM)
        printed, _ = driver.communicate(timeout=PATIENCE)
    finally:
        driver.kill()
    assert driver.returncode == 128 + signal.SIGTERM
    ending = "ended by SIGTERM; unfinished: first: waits; first: never; failed: nothing"
    assert printed.splitlines()[-1] == f"results in {tmp_path}; {ending}"
    report = json.loads(path.read_text())
    assert not report["complete"] and report["ended_by"] == "SIGTERM" and report["failed"] == []
    assert report["unfinished"] == ["waits", "never"]
    statuses = {name: part["status"] for name, part in report["parts"].items()}
    assert statuses == {"good": "ok", "waits": "stopped", "never": "not begun"}
    assert len(report["parts"]["good"]["rows"]) == 2
    assert "Unfinished: waits, never." in (tmp_path / "gpu_first.md").read_text()
    assert is_gone(report["parts"]["waits"]["rows"][0]["child"])


SLOW_START_UP = """
import subprocess, sys, time
from benchmarks.gpu import wheels
from benchmarks.gpu.__main__ import main
from megacore.tools.cli import exit_with

def installs(folder, target):
    subprocess.run(["sh", "-c", "echo $$ > pid.new; mv pid.new pid; exec sleep 10000"])

wheels.provide = installs
exit_with(main)
"""


def test_a_signal_before_the_first_part_ends_the_run_and_what_it_has_started(tmp_path: Path) -> None:
    """Only the driver gets it: the command that installs packages must end too, and no part begins."""
    out = tmp_path / "out"
    command = [sys.executable, "-c", SLOW_START_UP, "first", "--dry-run", "--output", str(out)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    driver = subprocess.Popen(command, cwd=tmp_path, env=environment, start_new_session=True)
    pid = tmp_path / "pid"
    try:
        while not pid.exists():
            assert driver.poll() is None
            time.sleep(0.05)
        driver.send_signal(signal.SIGTERM)
        assert driver.wait(timeout=PATIENCE) == 128 + signal.SIGTERM
        assert is_gone(int(pid.read_text()))
    finally:
        with suppress(ProcessLookupError):
            os.killpg(driver.pid, signal.SIGKILL)
    assert not list(out.iterdir())


def test_after_a_signal_no_part_of_a_batch_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: a signal that arrives while the first of three parts is started."""
    start = Runner.start

    def start_and_signal(runner: Runner, *args: Any) -> running.RunningPart:
        runner.stop.receive(signal.SIGTERM, None)
        return start(runner, *args)

    monkeypatch.setattr(Runner, "start", start_and_signal)
    parts = [Part(name, PATIENCE, f"{HERE}:{name}", together=True) for name in ("waits", "never", "good")]
    report = run_parts(tmp_path, *parts)
    statuses = [report.entry(part.name)["status"] for part in parts]
    assert statuses == ["stopped", "not begun", "not begun"]


def has_begun(path: Path) -> bool:
    """Whether the part `good` has ended, and `waits` has a row."""
    if not path.exists():
        return False
    found = json.loads(path.read_text())["parts"]
    return found["good"]["status"] == "ok" and bool(found["waits"]["rows"])


def is_gone(pid: int) -> bool:
    """Wait until a process has ended; False if it never does."""
    deadline = time.monotonic() + PATIENCE
    while process_state(pid) not in ENDED:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


# --- packages -----------------------------------------------------------------------------------------------


def test_what_is_missing_is_named_in_one_line() -> None:
    """Of a machine that has PyTorch and no pydantic, nobody should see a traceback."""
    script = "import runpy, sys; sys.modules['pydantic'] = None; sys.argv = ['x', 'all', '--dry-run']; "
    script += "runpy.run_module('benchmarks.gpu', run_name='__main__', alter_sys=True)"
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(
        r"config error: packages: not installed: pydantic \(fetch them with `.*pip download .* "
        r"pydantic==[\d.]+`.*\)\n",
        done.stderr,
    )


def test_wheels_are_installed_for_this_process_and_those_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Into a folder of its own: the machine's environment may not be writable, and stays as it is."""
    folder, target = tmp_path / "wheels", tmp_path / "target"
    folder.mkdir()
    monkeypatch.setattr(wheels, "NEEDED", ("brought",))
    monkeypatch.setattr(wheels, "PINS", tmp_path / "pins")
    (tmp_path / "pins").write_text("brought==1.0\nabsent==2\n")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PYTHONPATH", "/before")
    with pytest.raises(ConfigError, match="no wheels in"):
        wheels.provide(folder, target)
    monkeypatch.setattr(wheels, "HELPFUL", {"quick-tests": "quick_tests", "not-there": "not_there"})
    write_wheel(folder, "brought", requires="its_own")
    for name in ("its_own", "quick_tests", "unrelated"):
        write_wheel(folder, name)
    wheels.provide(folder, target)
    assert wheels.missing() == []
    assert {path.stem for path in target.glob("*.py")} == {"brought", "its_own", "quick_tests"}
    say = [sys.executable, "-c", "import brought; print(brought.value)"]
    assert subprocess.run(say, capture_output=True, text=True, check=True).stdout == "3\n"
    del sys.modules["brought"]
    monkeypatch.setattr(wheels, "NEEDED", ("brought", "absent"))
    with pytest.raises(ConfigError, match="pip cannot install from .*: .*absent"):
        wheels.provide(folder, target)
    (folder / "absent-2-py3-none-any.whl").write_text("no wheel")
    with pytest.raises(ConfigError, match="pip cannot install"):
        wheels.provide(folder, target)


def write_wheel(folder: Path, name: str, requires: str = "") -> None:
    """A wheel of one module."""
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"
    metadata += f"Requires-Dist: {requires}\n" if requires else ""
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}.py", "value = 3\n")
        wheel.writestr(f"{name}-1.0.dist-info/METADATA", metadata)
        wheel.writestr(
            f"{name}-1.0.dist-info/WHEEL",
            "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        wheel.writestr(f"{name}-1.0.dist-info/RECORD", "")


# --- what parts compute from what they see ------------------------------------------------------------------

SANITIZED = """
operation rope, rows of 256
========= COMPUTE-SANITIZER
operation gelu, rows of 256
========= Invalid __global__ read of size 2 bytes
=========     at _forward_kernel+0x120
========= Invalid __global__ read of size 2 bytes
"""


def test_sanitizers_complaints_belong_to_the_operation_that_ran() -> None:
    """Or a bad access would be nobody's, and a tool that ended half way would look clean."""
    complaint = {
        "operation": "gelu, rows of 256",
        "failed": "Invalid __global__ read of size 2 bytes",
        "lines": 2,
    }
    whole = said_by(SANITIZED + "operation end\n========= ERROR SUMMARY: 2 errors\n", 1)
    assert whole == [complaint, {"operation": "2 operations and widths", "complaints": 1}]
    assert said_by(SANITIZED, 124) == [
        complaint,
        {"operation": "gelu, rows of 256", "failed": "not all operations ran, out of time"},
    ]
    assert "status 1: no GPU" in said_by("no GPU\n", 1)[0]["failed"]


@pytest.mark.parametrize(
    "name, kind",
    [
        ("nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_NTN", "product"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute", "product"),
        (
            "void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<64, 128>>",
            "attention",
        ),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7", "attention"),
        ("triton_poi_fused_add_gelu_0", "Inductor's"),
        ("_loss_and_gradient_kernel", "loss"),
        ("_adamw_kernel", "optimizer"),
        ("_backward_kernel", "fused passes"),
        ("Memcpy DtoD (Device -> Device)", "copies"),
        (
            "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>",
            "elementwise",
        ),
        ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", "communication"),
    ],
)
def test_kernels_are_told_by_their_names(name: str, kind: str) -> None:
    assert class_of(name) == kind


def test_a_replacement_that_nobody_calls_is_no_measurement() -> None:
    """Models hold functions by name: one that is put where nobody looks would be as
    fast as what it replaces.
    """
    with eager("gelu") as calls:
        assert calls.count == 0
        bias_gelu(torch.zeros(2, 8))
        assert calls.count == 1
    bias_gelu(torch.zeros(2, 8))
    assert calls.count == 1 and isinstance(calls, Calls)


def test_wrong_results_are_failures() -> None:
    """Of a collective, and of a run whose stream was late."""
    x = torch.arange(4.0)
    assert "failed" in timed(lambda x: x + 1, x) and "failed" not in timed(lambda x: x.clone(), x)
    assert "failed" in same([x, x + 1e-7], [x, x]) and "failed" not in same([x], [x.clone()])


ASKS = """
import sys, torch
asked = []
for name in ("is_available", "device_count", "_lazy_init"):
    setattr(torch.cuda, name, lambda name=name: asked.append(name) or 0)
for module in sys.argv[1].split():
    __import__(module)
print(asked)
open("opens.py", "w").write("import torch; torch.cuda.device_count()")
sys.path.append("")
import opens
print(asked)
"""


def test_the_process_that_parts_come_from_knows_no_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fork of one that has opened a GPU could not use it.

    What it imports must not ask for one; a module that does is noticed.
    """
    assert running.CONTEXT.get_start_method() == "forkserver"
    imported: list[str] = []
    monkeypatch.setattr(running.CONTEXT, "set_forkserver_preload", imported.extend)
    running.prepare_processes(dry=False)
    command, paths = [sys.executable, "-c", ASKS, " ".join(imported)], os.pathsep.join([str(ROOT), *sys.path])
    environment = os.environ | {"PYTHONPATH": paths}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=PATIENCE, check=True
    )
    assert imported and done.stdout == "[]\n['device_count']\n"
