"""`benchmarks.gpu`, without a GPU: everything that it runs at tiny sizes, and what it makes of parts that fail, hang or say nothing."""

import json
import os
import re
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import parts, running, wheels
from benchmarks.gpu.communicator import timed
from benchmarks.gpu.kernels import Calls, eager, said_by
from benchmarks.gpu.parts import SLICES, Part, Slice
from benchmarks.gpu.running import run_slice
from benchmarks.gpu.speed import class_of
from benchmarks.gpu.steps import same
from megacore.errors import ConfigError
from megacore.kernels.gelu import bias_gelu
from tests.pool import ROOT

MACHINE = {"date": "today", "machine": {"gpus": [], "processor": "none"}, "versions": {"torch": "none"}}
HERE = "tests.planted_parts"


def test_all_slices_run_dry(tmp_path: Path) -> None:
    """A typing mistake would cost a lease of the GPU: every line that a CPU can run is run."""
    command = [sys.executable, "-m", "benchmarks.gpu", "all", "--dry-run", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("failed: nothing\n")
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
    assert len(files) == 9 and all(
        re.fullmatch(r"[\w.-]+", file.name) and file.stat().st_size < 2**24 for file in files
    )


def test_the_budget() -> None:
    """Half an hour is lent, and no command may take ten minutes."""
    assert (
        all(whole.seconds <= 9 * 60 for whole in SLICES.values())
        and sum(whole.seconds for whole in SLICES.values()) == 26 * 60
    )
    assert all(part.seconds <= whole.seconds for whole in SLICES.values() for part in whole.parts)


# --- parts that do not do what they should -----------------------------------------------------------------------------


def test_a_slice_goes_on_after_failures_and_writes_as_it_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a part found before it failed, hung or was killed must be in the files, and others must still run."""
    own = (
        Part("broken", 30, f"{HERE}:broken"),
        Part("endless", 10, f"{HERE}:endless", (str(tmp_path / "gpu_right.json"),)),
        Part("wrong", 30, f"{HERE}:wrong"),
        Part("good", 30, f"{HERE}:good"),
    )
    monkeypatch.setitem(parts.SLICES, "right", Slice("Planted", 100, own))
    said: list[str] = []
    assert run_slice("right", tmp_path, True, [], MACHINE, said.append) == ["broken", "endless", "wrong"]
    report = json.loads((tmp_path / "gpu_right.json").read_text())
    found = report["parts"]
    assert found["broken"]["rows"] == [{"name": "before"}, {"failed": "OSError: a disk is gone"}]
    assert "second line" in found["broken"]["log"], "the whole traceback is kept"
    assert found["endless"]["status"] == "out of time (10 s)" and found["endless"]["rows"][1] == {
        "seen": True
    }
    with pytest.raises(ProcessLookupError):  # what it had started is gone too
        for _ in range(50):
            state = Path(f"/proc/{found['endless']['rows'][0]['child']}/stat")
            if not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z":
                raise ProcessLookupError
            time.sleep(0.1)
    assert found["wrong"]["why"] == "off by 3" and found["wrong"]["rows"][1] == {"name": "y", "found": 2}
    assert found["good"]["status"] == "ok" and len(said) == 4
    table = (tmp_path / "gpu_right.md").read_text()
    assert "| number | name |" in table and "| 1.5 | a |" in table and "|  | b / c |" in table
    assert table.endswith("Failed: broken, endless, wrong.\n")


def test_a_slice_ends_in_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts that find no time left are named: their absence is no success."""
    monkeypatch.setitem(parts.SLICES, "right", Slice("Planted", 4, (Part("good", 30, f"{HERE}:good"),)))
    assert run_slice("right", tmp_path, True, [], MACHINE, lambda line: None) == ["good"]
    assert (
        json.loads((tmp_path / "gpu_right.json").read_text())["parts"]["good"]["status"] == "no time was left"
    )


# --- packages ----------------------------------------------------------------------------------------------------------


def test_what_is_missing_is_named_in_one_line() -> None:
    """Of a machine that has PyTorch and no pydantic, nobody should see a traceback."""
    script = "import runpy, sys; sys.modules['pydantic'] = None; sys.argv = ['x', 'all', '--dry-run']; "
    script += "runpy.run_module('benchmarks.gpu', run_name='__main__', alter_sys=True)"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(
        r"config error: packages: not installed: pydantic \(fetch them with `.*pip download .* pydantic==[\d.]+`.*\)\n",
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
    with zipfile.ZipFile(folder / "brought-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("brought.py", "value = 3\n")
        wheel.writestr(
            "brought-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: brought\nVersion: 1.0\n"
        )
        wheel.writestr(
            "brought-1.0.dist-info/WHEEL",
            "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        wheel.writestr("brought-1.0.dist-info/RECORD", "")
    wheels.provide(folder, target)
    assert (target / "brought.py").is_file() and wheels.missing() == []
    say = [sys.executable, "-c", "import brought; print(brought.value)"]
    assert subprocess.run(say, capture_output=True, text=True, check=True).stdout == "3\n"
    del sys.modules["brought"]
    monkeypatch.setattr(wheels, "NEEDED", ("brought", "absent"))
    with pytest.raises(ConfigError, match="not in .*: absent"):
        wheels.provide(folder, target)
    (folder / "brought-1.0-py3-none-any.whl").write_text("no wheel")
    with pytest.raises(ConfigError, match="pip cannot install"):
        wheels.provide(folder, target)


# --- what parts compute from what they see -----------------------------------------------------------------------------

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
    """Models hold functions by name: one that is put where nobody looks would be as fast as what it replaces."""
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
    """A fork of one that has opened a GPU could not use it. What it imports must not ask for one; a module that does is noticed."""
    assert running.CONTEXT.get_start_method() == "forkserver"
    imported: list[str] = []
    monkeypatch.setattr(running.CONTEXT, "set_forkserver_preload", imported.extend)
    running.prepare_processes(dry=False)
    command, paths = [sys.executable, "-c", ASKS, " ".join(imported)], os.pathsep.join([str(ROOT), *sys.path])
    environment = os.environ | {"PYTHONPATH": paths}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    assert imported and done.stdout == "[]\n['device_count']\n"
