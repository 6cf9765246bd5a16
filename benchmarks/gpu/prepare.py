"""Collect what a bare PyTorch machine with a GPU lacks, on a machine with a network and without a GPU.

`--prepare FOLDER` downloads the wheels of common packages for the GPU machine's Python, and packs Triton's
cache of the fused kernels, compiled by the GPU machine's Triton. `--wheels FOLDER` uses both there.
"""

import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.gpu import caches, wheels
from megacore.caches import TRITON
from megacore.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
MACHINE = "x86_64"  # the processor of the GPU machine, whatever this machine has
MODELS = ("gpt_124m", "gpt_350m", "gpt_1b")


def prepare(folder: Path, python: str, triton: str) -> list[str]:
    """Fill an existing folder for Linux on x86-64 with this Python ("3.12") and this Triton ("3.6.0").

    Returns lines that say what is in it.

    Raises:
        ConfigError: a package cannot be downloaded, or a kernel cannot be compiled.
    """
    packages = wheels.pinned([*wheels.NEEDED, *wheels.HELPFUL])
    run(wheels.download_command(packages, str(folder), python, MACHINE))
    with tempfile.TemporaryDirectory() as scratch:
        message = compile_kernels(Path(scratch), python, triton)
        caches.pack(folder / caches.PREPARED, {"triton": Path(scratch) / "cache"})
    sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
    count = sum(name.endswith(".whl") for name in sizes)
    return [message, f"{folder}: {count} wheels and {caches.PREPARED}, {sum(sizes.values()) / 2**20:.1f} MiB"]


def compile_kernels(scratch: Path, python: str, triton: str) -> str:
    """Compile the kernels of `MODELS` into `scratch`/cache; return what the compiling process printed.

    The process computes with this Python, its PyTorch, and a copy of the GPU machine's Triton. Where the GPU
    machine has another Python or processor, its wheel of Triton is downloaded too: the cache's keys depend on
    it.
    """
    compiler, other = scratch / "compiler", scratch / "other"
    requirement = [f"triton=={triton}", "--no-deps"]
    run([sys.executable, "-m", "pip", "install", "--quiet", "--target", str(compiler), *requirement])
    command = [sys.executable, "-m", "benchmarks.gpu.compile_ahead", *MODELS]
    if (python, MACHINE) != (wheels.python_version(), platform.machine()):
        run(wheels.download_command(requirement, str(other), python, MACHINE))
        command += ["--wheel", str(next(other.glob("triton-*.whl")))]

    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    environment[TRITON] = str(scratch / "cache")
    paths = [str(compiler), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    return run(command, environment)


def run(command: list[str], environment: dict[str, str] | None = None) -> str:
    """Run a command; return what it printed.

    Raises `ConfigError` with the command's last line if it fails.
    """
    command = [sys.executable if word == "python3" else word for word in command]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = (done.stderr.strip() or done.stdout.strip() or "it printed nothing").splitlines()
        raise ConfigError(
            "--prepare", f"`{' '.join(command)}` failed: {lines[-1]}", "a machine with a network"
        )
    return done.stdout.strip()
