"""What a machine says about itself, as one JSON object. `judge.py` decides what is wrong; nothing here does.

A machine needs no other one for this. It prints the time at once, so that a reader can compare clocks, and
the facts when it has them. Standard library only, but for the devices, which another process tries: a broken
GPU or torch must not hide the rest.
"""

import contextlib
import hashlib
import importlib.metadata
import json
import os
import platform
import resource
import signal
import socket
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megacore.config import Config
from megacore.config.schema import resolved
from megacore.errors import UserError
from megacore.files import ROOT
from megacore.tools.planner.memory import rank_memory
from megacore.tools.planner.run_cost import checkpoint_bytes
from megacore.tools.settings.load import load

CODE = ("megacore", "kernels", "launch")  # the folders whose sources ranks run
PACKAGES = ("torch", "deepspeed", "numpy")
SETTINGS = ("NCCL_", "GLOO_", "TORCH_", "UCX_", "FI_", "CUDA_", "OMP_", "MKL_", "RDMAV_", "PYTORCH_")
LONGEST_SECONDS = 50.0  # for all of it; a dead file system would hold it for ever
DEVICE_SECONDS = 40.0
WRITTEN_BYTES, WRITING_TRIES, WRITING_SECONDS = 32 << 20, 5, 3.0  # of a try; for all
LIMITS = {
    "open files": resource.RLIMIT_NOFILE,
    "locked memory": resource.RLIMIT_MEMLOCK,
    "processes": resource.RLIMIT_NPROC,
}


@dataclass(frozen=True)
class Question:
    """What every machine is asked."""

    config: str
    overrides: list[str]
    world_size: int
    first: str  # the host where ranks meet
    port: int
    name: str  # of this preflight; a folder of this name in log.dir holds a file of each machine


def facts(question: Question, host: str, slots: int) -> dict[str, Any]:
    """All facts of this machine, which the hostfile calls `host`."""
    found: dict[str, Any] = {
        "name": socket.gethostname(),
        "code": code(),
        "versions": versions(),
        "limits": limits(),
    }
    found |= {"memory": memory(), "network": network(question.first), "settings": settings()}
    ports, device, log_dir = [question.port], "auto", None
    try:
        config = load(question.config, question.overrides, question.world_size).config
        found["config"] = {
            "digest": digest(
                json.dumps(config.model_dump(mode="json", by_alias=True), sort_keys=True).encode()
            )
        }
        ports += [config.log.prometheus_port] if config.log.prometheus_port else []
        device, log_dir = config.train.device, Path(resolved(config.log.dir))
        found["needs"] = {
            "disk": saved_bytes(config),
            "memory": slots * max(rank.total for rank in rank_memory(config)),
        }
    except UserError as error:
        found["config"] = {"error": str(error)}
    found["ports"] = {str(port): taken(port) for port in ports}
    if log_dir is not None:
        found["log_dir"] = disk(log_dir, question.name, host)
    return found | {"devices": devices(device)}


def digest(content: bytes) -> str:
    """A short digest, to be compared."""
    return hashlib.sha256(content).hexdigest()[:12]


def code() -> dict[str, str]:
    """The commit of this checkout, if it is one, and a digest of the sources that are there."""
    git = ["git", "-c", "safe.directory=*", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD"]
    try:
        commit = subprocess.run(git, capture_output=True, text=True, timeout=10).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        commit = ""
    sources = hashlib.sha256()
    for path in sorted(path for folder in CODE for path in (ROOT / folder).rglob("*.py")):
        sources.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes())
    return {"commit": commit, "files": sources.hexdigest()[:12]}


def versions() -> dict[str, str]:
    """The versions of Python and of packages, by their metadata: nothing is imported, so
    that a broken package has one too.
    """
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "absent"
    return found


def disk(folder: Path, name: str, host: str) -> dict[str, Any]:
    """Free bytes of a folder, bytes a second that a new file in it takes, and the
    machines whose files are seen there.
    """
    found: dict[str, Any] = {
        "path": str(folder.absolute()),
        "free": 0,
        "write": None,
        "seen": [],
        "error": "",
    }
    file = folder / name / f"{host}.speed"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        found["seen"] = sorted(path.stem for path in file.parent.glob("*.here"))
        found["free"] = os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize
        found["write"] = write_speed(file, min(WRITTEN_BYTES, found["free"] // 4))
    except OSError as error:
        found["error"] = error.strerror or str(error)
    with contextlib.suppress(OSError):
        file.unlink()
    return found


def write_speed(file: Path, size: int) -> float | None:
    """Bytes a second of the best of some tries: other programs hold up some of them, and a disk that
    is slow itself is slow in all.
    """
    block, best = os.urandom(1 << 20), 0.0  # what is all alike, some file systems do not write
    end = time.monotonic() + WRITING_SECONDS
    for _ in range(WRITING_TRIES):
        started, written = time.monotonic(), 0
        with file.open("wb", buffering=0) as out:
            while written < size and time.monotonic() < end:
                written += out.write(block)
            os.fsync(out.fileno())
        best = max(best, written / (time.monotonic() - started))
        if time.monotonic() >= end:
            break
    return best or None


def memory() -> dict[str, int]:
    """Bytes of memory, of those that are free, and of shared memory, which NCCL and the loader use."""
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    found = {
        name: int(lines[key].split()[0]) << 10
        for name, key in (("total", "MemTotal"), ("available", "MemAvailable"))
    }
    shared = os.statvfs("/dev/shm") if Path("/dev/shm").is_dir() else None
    return found | {"shared": shared.f_blocks * shared.f_frsize if shared else 0}


def limits() -> dict[str, int | None]:
    """What the shell lets a process have (`ulimit`); None: unlimited."""
    soft = {name: resource.getrlimit(limit)[0] for name, limit in LIMITS.items()}
    return {name: None if value == resource.RLIM_INFINITY else value for name, value in soft.items()}


def taken(port: int) -> bool:
    """Whether another process listens on a port."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return True
    return False


def network(first: str) -> dict[str, Any]:
    """The interfaces with their speeds in Mbit/s, InfiniBand devices, and the addresses of this
    machine's name and of the first host.
    """
    folder, infiniband = Path("/sys/class/net"), Path("/sys/class/infiniband")
    names = [name for _, name in socket.if_nameindex()]
    found: dict[str, Any] = {
        "interfaces": {name: speed(folder / name / "speed") for name in names if name != "lo"}
    }
    found["infiniband"] = sorted(path.name for path in infiniband.iterdir()) if infiniband.is_dir() else []
    for key, name in (("own", socket.gethostname()), ("first", first)):
        try:
            found[key] = socket.gethostbyname(name)
        except OSError:
            found[key] = None
    return found


def speed(file: Path) -> int | None:
    """What the kernel says of an interface's speed; None where it does not know."""
    try:
        return max(0, int(file.read_text())) or None
    except (OSError, ValueError):
        return None


def settings() -> dict[str, str]:
    """The variables by which libraries choose networks, devices and threads."""
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(SETTINGS)}


def devices(device: str) -> dict[str, Any]:
    """What `devices.py` measures in a process of its own."""
    alone = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "megacore.tools.preflight.devices", device]
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=os.environ | alone, capture_output=True, text=True, timeout=DEVICE_SECONDS
        )
        return (
            json.loads(done.stdout.splitlines()[-1])
            if done.returncode == 0
            else {"error": last_line(done.stderr)}
        )
    except subprocess.TimeoutExpired:
        return {"error": f"no answer within {DEVICE_SECONDS:.0f} s"}
    except (OSError, ValueError, IndexError) as error:
        return {"error": str(error)}


def last_line(text: str) -> str:
    """The last line that says anything."""
    return next(
        (line.strip()[:300] for line in reversed(text.splitlines()) if line.strip()), "nothing was said"
    )


def saved_bytes(config: Config) -> int:
    """Bytes of a checkpoint; 0 for a run that saves none."""
    return checkpoint_bytes(config) if config.checkpoint.every or config.checkpoint.last else 0


def main() -> None:
    """Answers the question in the first argument, a JSON object, for the host and slots in the other two."""
    print(json.dumps({"clock": time.time()}), flush=True)
    signal.setitimer(signal.ITIMER_REAL, LONGEST_SECONDS)  # nobody may be left to end this process
    text, host, slots = sys.argv[1:]
    print(json.dumps(facts(Question(**json.loads(text)), host, int(slots))), flush=True)


def asked(question: Question) -> str:
    """The question as `main` takes it."""
    return json.dumps(asdict(question))


if __name__ == "__main__":
    main()
