"""A Slurm of two nodes on this machine: munged, slurmctld and two slurmd, which end with the test.

Needs root and Debian's slurm-wlm.
"""

import os
import shutil
import socket
import stat
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from megacore.tools.local_ranks import free_port

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "unshare")


def missing() -> str:
    """Why there can be no Slurm here; empty if there can."""
    if os.geteuid() != 0:
        return "needs root"
    absent = [name for name in PROGRAMS if shutil.which(name) is None]
    return f"{', '.join(absent)} not installed (apt-get install slurm-wlm munge)" if absent else ""


CONFIG = """ClusterName=megacore
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
MpiDefault=none
SwitchType=switch/none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
KillWait=20
SchedulerParameters=bf_interval=2,sched_interval=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
GresTypes=gpu
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={first} CPUs=2 RealMemory=4000 Gres=gpu:2
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={second} CPUs=2 RealMemory=4000 Gres=gpu:2
PartitionName=low Nodes=n1,n2 Default=YES PriorityTier=1 GraceTime=60 State=UP
PartitionName=high Nodes=n1,n2 PriorityTier=10 State=UP
"""


@dataclass(frozen=True)
class Slurm:
    """A running Slurm, and its folder, which holds its logs."""

    folder: Path

    def run(self, *command: str, cwd: Path | None = None, timeout: float = 60) -> str:
        """What a command of Slurm's prints."""
        environment = os.environ | {"SLURM_CONF": str(self.folder / "slurm.conf")}
        done = subprocess.run(
            command, capture_output=True, text=True, env=environment, cwd=cwd, timeout=timeout
        )
        assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
        return done.stdout.strip()

    def submit(self, cwd: Path, *arguments: str) -> str:
        """The number of a submitted job."""
        return self.run("sbatch", "--parsable", *arguments, cwd=cwd)

    def fields(self, job: str) -> dict[str, str]:
        """What Slurm knows of a job."""
        words = self.run("scontrol", "--oneliner", "show", "job", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait(self, job: str, *states: str, seconds: float) -> dict[str, str]:
        """The job, once it is in one of some states."""
        deadline = time.monotonic() + seconds
        while (found := self.fields(job))["JobState"] not in states:
            assert time.monotonic() < deadline, (
                f"job {job} is {found['JobState']}, not {' or '.join(states)}, after {seconds:.0f} s"
            )
            time.sleep(0.5)
        return found


@contextmanager
def slurm(folder: Path) -> Iterator[Slurm]:
    """A Slurm whose nodes n1 and n2 are this machine. Its names resolve in its own mount namespace alone."""
    (folder / "state").mkdir()
    for name in ("spool-n1", "spool-n2"):
        (folder / name).mkdir()
    (folder / "hosts").write_text(Path("/etc/hosts").read_text() + "127.0.0.1 n1 n2\n")
    names = ("controller", "first", "second")
    ports: dict[str, int] = {}
    while len(set(ports.values())) < len(names):
        ports = {name: free_port() for name in names}
    (folder / "slurm.conf").write_text(CONFIG.format(folder=folder, host=socket.gethostname(), **ports))
    # GPUs in name: Slurm counts them and tells tasks their numbers, as it does for real ones
    for i in range(2):
        os.mknod(folder / f"gpu{i}", 0o600 | stat.S_IFCHR, os.stat(os.devnull).st_rdev)
    (folder / "gres.conf").write_text(f"NodeName=n[1-2] Name=gpu File={folder}/gpu[0-1]\n")
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o600)
    own = [
        f"--{name}={folder}/munge.{ending}"
        for name, ending in (
            ("socket", "socket"),
            ("pid-file", "pid"),
            ("log-file", "log"),
            ("seed-file", "seed"),
        )
    ]
    commands = [
        ["munged", "--foreground", "--force", f"--key-file={key}", *own],
        ["slurmctld", "-D", "-i"],
        *(["slurmd", "-D", "-N", node] for node in ("n1", "n2")),
    ]
    environment = os.environ | {"SLURM_CONF": str(folder / "slurm.conf"), "OMP_NUM_THREADS": "1"}
    started = []
    with (folder / "output").open("w") as output:
        try:
            for command in commands:
                resolving = [
                    "unshare",
                    "--mount",
                    "sh",
                    "-c",
                    f'mount --bind {folder}/hosts /etc/hosts && exec "$@"',
                    "sh",
                    *command,
                ]
                started.append(subprocess.Popen(resolving, env=environment, stdout=output, stderr=output))
                if command[0] == "munged":
                    await_file(folder / "munge.socket")
            found = Slurm(folder)
            await_nodes(found)
            yield found
        finally:
            for process in reversed(started):
                process.terminate()
            for process in started:
                try:
                    process.wait(20)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()


def await_file(path: Path) -> None:
    """Waits until a program has made its file."""
    deadline = time.monotonic() + 20
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.1)


def await_nodes(found: Slurm) -> None:
    """Waits until both nodes are idle."""
    deadline = time.monotonic() + 60
    while True:
        try:
            if found.run("sinfo", "--noheader", "--Node", "--partition=low", "--format=%t").split() == [
                "idle",
                "idle",
            ]:
                return
        except AssertionError:
            if time.monotonic() > deadline:
                raise
        assert time.monotonic() < deadline, (found.folder / "slurmctld.log").read_text()[-2000:]
        time.sleep(0.5)
