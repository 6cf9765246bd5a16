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

NEEDED = (
    "numpy",
    "pydantic",
    "safetensors",
    "xxhash",
    "rich",
    "jinja2",
    "einops",
    "pytest",
)  # their modules have their names
PINS = Path(__file__).resolve().parents[2] / "requirements.txt"


def missing() -> list[str]:
    """What is not installed."""
    importlib.invalidate_caches()
    return [name for name in NEEDED if find_spec(name) is None]


def command(names: Sequence[str], folder: str = "WHEELS") -> str:
    """What fetches packages, and what they need, for this machine's Python on a machine with a network."""
    pins = dict(re.findall(r"^([\w-]+)==(\S+)", PINS.read_text(encoding="utf-8"), re.MULTILINE))
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    options = ["--only-binary=:all:", "--python-version", version, "--implementation", "cp"]
    for kind in ("manylinux_2_28", "manylinux_2_17", "manylinux2014"):
        options += ["--platform", f"{kind}_{platform.machine()}"]
    return " ".join(
        ["python3 -m pip download", *options, "-d", folder, *(f"{name}=={pins[name]}" for name in names)]
    )


def provide(folder: Path | None, target: Path) -> None:
    """Brings what is missing: installs the wheels of `folder` into `target`, for this process and those that it starts.

    Raises:
        ConfigError: something is missing without a folder, or is not in it, or pip cannot install it.
    """
    lacking = missing()
    if not lacking:
        return
    if folder is None:
        right = f"fetch them with `{command(lacking)}`, then --wheels WHEELS"
        raise ConfigError("packages", f"not installed: {', '.join(lacking)}", right)
    wheels = sorted(map(str, folder.glob("*.whl")))
    if not wheels:
        raise ConfigError("--wheels", f"no wheels in {folder}", command(lacking, str(folder)))
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--no-index",
        "--no-deps",
        "--quiet",
        "--no-compile",
        "--target",
        str(target),
        *wheels,
    ]
    done = subprocess.run(pip, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip() or "pip said nothing").splitlines()[-1]
        raise ConfigError("--wheels", f"pip cannot install {folder}: {said}", command(lacking, str(folder)))
    sys.path.insert(0, str(target))
    os.environ["PYTHONPATH"] = os.pathsep.join([str(target), *filter(None, [os.environ.get("PYTHONPATH")])])
    if still := missing():
        raise ConfigError("--wheels", f"not in {folder}: {', '.join(still)}", command(still, str(folder)))
    for name in NEEDED:
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise ConfigError(
                "--wheels", f"{name} cannot be imported: {error}", command(lacking, str(folder))
            ) from None
