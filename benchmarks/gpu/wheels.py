"""The packages that a machine with PyTorch may lack, from a folder of wheels; the standard library only."""

import importlib
import os
import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from megacore.errors import ConfigError

# their modules have their names
NEEDED = ("numpy", "pydantic", "safetensors", "xxhash", "rich", "jinja2", "einops", "pytest")
HELPFUL = {"pytest-xdist": "xdist"}  # packages that only make it faster, and their modules
PINS = Path(__file__).resolve().parents[2] / "requirements.txt"


def missing() -> list[str]:
    """What is not installed."""
    importlib.invalidate_caches()
    return [name for name in NEEDED if find_spec(name) is None]


def python_version() -> str:
    """Of this process, such as 3.12."""
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def pinned(names: Sequence[str]) -> list[str]:
    """The packages at the versions of requirements.txt."""
    pins = dict(re.findall(r"^([\w-]+)==(\S+)", PINS.read_text(encoding="utf-8"), re.MULTILINE))
    return [f"{name}=={pins[name]}" for name in names]


def download_command(requirements: Sequence[str], folder: str, python: str, machine: str) -> list[str]:
    """What fetches packages, and what they need, for a version of Python on `machine`, such as x86_64."""
    command = ["python3", "-m", "pip", "download", "--only-binary=:all:"]
    command += ["--python-version", python, "--implementation", "cp"]
    for kind in ("manylinux_2_28", "manylinux_2_17", "manylinux2014"):
        command += ["--platform", f"{kind}_{machine}"]
    return [*command, "-d", folder, *requirements]


def advice(names: Sequence[str], folder: str = "WHEELS") -> str:
    """The command that fetches packages for this machine on another one, which has a network."""
    return " ".join(download_command(pinned(names), folder, python_version(), platform.machine()))


def provide(folder: Path | None, target: Path) -> None:
    """Brings what is missing: installs wheels of `folder` into `target`, for this
    process and those that it starts.

    Raises:
        ConfigError: `folder` is not a folder, something is missing without one or is not in it, or pip cannot
            install it.
    """
    if folder is not None and not folder.is_dir():
        raise ConfigError("--wheels", f"{folder} is not a folder", "a folder that --prepare filled")
    lacking = missing()
    if folder is None:
        if not lacking:
            return
        right = f"fetch them with `{advice(lacking)}`, then --wheels WHEELS"
        raise ConfigError("packages", f"not installed: {', '.join(lacking)}", right)
    wanted = lacking + helpful(folder)
    if not wanted:
        return
    if not any(folder.glob("*.whl")):
        raise ConfigError("--wheels", f"no wheels in {folder}", advice(lacking, str(folder)))
    pip = [sys.executable, "-m", "pip", "install", "--no-index", "--find-links", str(folder)]
    pip += ["--quiet", "--no-compile", "--target", str(target), *wanted]
    done = subprocess.run(pip, capture_output=True, text=True, check=False)
    if done.returncode:
        message = (done.stderr.strip() or done.stdout.strip() or "pip said nothing").splitlines()[-1]
        raise ConfigError(
            "--wheels", f"pip cannot install from {folder}: {message}", advice(wanted, str(folder))
        )
    sys.path.insert(0, str(target))
    os.environ["PYTHONPATH"] = os.pathsep.join([str(target), *filter(None, [os.environ.get("PYTHONPATH")])])
    for name in NEEDED:
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise ConfigError(
                "--wheels", f"{name} cannot be imported: {error}", advice([name], str(folder))
            ) from None


def helpful(folder: Path) -> list[str]:
    """Packages of `folder` that are not needed, but make it faster."""
    absent = [name for name, module in HELPFUL.items() if find_spec(module) is None]
    return [name for name in absent if any(folder.glob(f"{name.replace('-', '_')}-*.whl"))]
