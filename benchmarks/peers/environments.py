"""Each peer's environment: a virtual environment of its own in a cache folder, made when it is first needed.

It stands before that of the interpreter that runs the benchmark: what a peer needs in another version is
installed there, and torch, which all must share to be comparable, is found behind it. A peer that needs
nothing more has no folder. The folder is ``~/.cache/megacore-peers``, or what ``MEGACORE_PEERS`` names.
"""

import hashlib
import os
import subprocess
import sys
import sysconfig
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

# What each peer is installed from. 0.16.1 is the last of megatron-core for Python 3.11.
REQUIREMENTS: dict[str, tuple[str, ...]] = {
    "torch": (),  # nothing beside what all share
    "transformers": ("transformers==5.23.0",),
    "deepspeed": ("deepspeed==0.19.8", "transformers==5.23.0"),
    "megatron-core": ("megatron-core==0.16.1",),
    "torchtitan": ("torchtitan==0.3.0",),
}


def folder() -> Path:
    """Where environments are kept."""
    return Path(os.environ.get("MEGACORE_PEERS") or Path.home() / ".cache" / "megacore-peers")


def python_of(peer: str) -> str:
    """The peer's interpreter; makes its environment where there is none for these requirements.

    Raises `RuntimeError` with pip's reason.
    """
    if all(installed(requirement) for requirement in REQUIREMENTS[peer]):
        return sys.executable
    wanted = (f"torch=={version('torch')}", *REQUIREMENTS[peer], sys.executable)
    home = folder() / f"{peer}-{hashlib.sha256(repr(wanted).encode()).hexdigest()[:8]}"
    python, done = home / "bin" / "python", home / "installed"
    if not done.is_file():
        _run([sys.executable, "-m", "venv", "--clear", str(home)])
        packages = _run([str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]).strip()
        Path(packages, "beside.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
        constraints = home / "constraints.txt"
        constraints.write_text(f"{wanted[0].partition('+')[0]}\n", encoding="utf-8")
        _run([str(python), "-m", "pip", "install", "-q", "-c", str(constraints), *REQUIREMENTS[peer]])
        done.write_text("\n".join(wanted) + "\n", encoding="utf-8")
    return str(python)


def installed(requirement: str) -> bool:
    """Whether the interpreter that runs has exactly what ``name==version`` asks for."""
    name, _, wanted = requirement.partition("==")
    try:
        return version(name) == wanted
    except PackageNotFoundError:
        return False


def _run(command: list[str]) -> str:
    """The command's output; raises `RuntimeError` with the last line of its complaint."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        complaint = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        raise RuntimeError(
            complaint[-1] if complaint else f"{' '.join(command)} ended with status {done.returncode}"
        )
    return done.stdout
