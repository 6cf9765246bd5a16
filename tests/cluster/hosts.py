"""Several hosts on one machine: each has its own network, processes, mounts, host name and sshd; a
bridge joins them. Needs root.

The checkout and all folders are shared, as over a network file system; `Hosts.own_folder` gives every host a
folder of its own.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

from tests.pool import PATIENCE, ROOT

PROGRAMS = ("ip", "unshare", "nsenter", "mount", "ssh", "ssh-keygen", "sshd")
NETWORK = "10.77.0"
NUMBERS = count()  # of the sets of hosts that this process has made

SSHD = """HostKey {folder}/host_key
AuthorizedKeysFile {folder}/authorized
PidFile none
UsePAM no
StrictModes no
PermitRootLogin prohibit-password
PasswordAuthentication no
UseDNS no
SetEnv {variables}
"""
SSH = """Host *
 IdentityFile {folder}/key
 StrictHostKeyChecking no
 UserKnownHostsFile /dev/null
 LogLevel ERROR
 BatchMode yes
"""
INIT = """hostname $1
mount --bind {folder}/hosts /etc/hosts
mount --bind {folder}/ssh_config /etc/ssh/ssh_config
mount -t tmpfs none /run && mkdir /run/sshd
ip link set lo up
exec /usr/sbin/sshd -D -e -f {folder}/sshd_config_$1
"""


def missing(*more: str) -> str:
    """Why there can be no hosts here; empty if there can. `more`: programs that a test needs besides."""
    if os.geteuid() != 0:
        return "needs root"
    absent = [
        name
        for name in (*PROGRAMS, *more)
        if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin") is None
    ]
    return (
        f"{', '.join(absent)} not installed (apt-get install iproute2 openssh-server pdsh openmpi-bin mpich)"
        if absent
        else ""
    )


class Hosts:
    """Hosts node0, node1, …, which can be cut off, ended and started again."""

    def __init__(self, folder: Path, number: int, variables: dict[int, dict[str, str]] | None = None) -> None:
        """`variables`: what the environment holds of commands that come to a host by ssh."""
        self.folder, self.count = folder, number
        self.prefix = f"mc{os.getpid()}-{next(NUMBERS)}n"  # of the network namespaces
        self.inits: dict[int, subprocess.Popen[bytes]] = {}
        self.pids: dict[int, int] = {}  # of every host's first process
        for name in ("key", "host_key"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
        shutil.copy(folder / "key.pub", folder / "authorized")
        (folder / "authorized").chmod(0o600)
        path = f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
        lines = ["127.0.0.1 localhost", *(f"{self.address(i)} node{i}" for i in range(number))]
        files = {
            "hosts": "\n".join(lines) + "\n",
            "ssh_config": SSH.format(folder=folder),
            "init.sh": INIT.format(folder=folder),
        }
        for host in range(number):
            own = {"PATH": path} | (variables or {}).get(host, {})
            settings = " ".join(f"{name}={value}" for name, value in own.items())
            files[f"sshd_config_node{host}"] = SSHD.format(folder=folder, variables=settings)
        for name, text in files.items():
            (folder / name).write_text(text)

    def address(self, host: int) -> str:
        """A host's address on the bridge."""
        return f"{NETWORK}.{host + 1}"

    def start(self) -> None:
        """Makes the bridge and all hosts, and waits until each answers."""
        ip("netns", "add", f"{self.prefix}sw")
        self._switch("link", "add", "br0", "type", "bridge")
        self._switch("link", "set", "br0", "up")
        for host in range(self.count):
            self.boot(host)

    def boot(self, host: int) -> None:
        """Starts a host, and waits until its sshd answers."""
        space = f"{self.prefix}{host}"
        ip("netns", "add", space)
        self._switch("link", "add", f"p{host}", "type", "veth", "peer", "name", "eth0", "netns", space)
        self._switch("link", "set", f"p{host}", "master", "br0", "up")
        # The same card when it comes back: the others remember its number.
        ip("-n", space, "link", "set", "eth0", "address", f"02:77:00:00:00:{host + 1:02x}")
        ip("-n", space, "addr", "add", f"{self.address(host)}/24", "dev", "eth0")
        ip("-n", space, "link", "set", "eth0", "up")
        inside = [
            "unshare",
            "-m",
            "-p",
            "-u",
            "-f",
            "--kill-child",
            "--mount-proc",
            "bash",
            self.folder / "init.sh",
            f"node{host}",
        ]
        with (self.folder / f"sshd{host}.log").open("ab") as log:
            self.inits[host] = subprocess.Popen(
                ["ip", "netns", "exec", space, *inside],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        pid, deadline = self.inits[host].pid, time.monotonic() + PATIENCE
        children = Path(f"/proc/{pid}/task/{pid}/children")
        while not children.exists() or not children.read_text().split() or self._ssh(host) != 0:
            assert time.monotonic() < deadline, (self.folder / f"sshd{host}.log").read_text()
            time.sleep(0.2)

    def _ssh(self, host: int) -> int:
        """Notes the host's first process, and tries its sshd."""
        pid = self.inits[host].pid
        self.pids[host] = int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])
        return subprocess.run(self.inside(host, "ssh", f"node{host}", "true"), capture_output=True).returncode

    def inside(self, host: int, *command: str) -> list[str]:
        """The command line that runs a command on a host, in this process's working directory."""
        return ["nsenter", "-t", str(self.pids[host]), "-n", "-m", "-p", "-u", "--wd=.", *command]

    def run(
        self, host: int, *command: str, cwd: Path = ROOT, timeout: float = PATIENCE, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """What a command on a host prints, and its status.

        All that it started there on hosts ends with it when it takes too long.
        """
        process = self.popen(host, *command, cwd=cwd, **variables)
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, err = process.communicate()
            raise AssertionError(
                f"{' '.join(command)} took more than {timeout:.0f} s\n{out[-3000:]}\n{err[-3000:]}"
            ) from None
        return subprocess.CompletedProcess(command, process.returncode, out, err)

    def popen(self, host: int, *command: str, cwd: Path = ROOT, **variables: str) -> "subprocess.Popen[str]":
        """A command on a host, started."""
        own = {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1",
            "DS_ACCELERATOR": "cpu",
        }
        ranks = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        environment = (
            {name: value for name, value in os.environ.items() if name not in ranks} | own | variables
        )
        return subprocess.Popen(
            self.inside(host, *command),
            cwd=cwd,
            env=environment,
            text=True,
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def cut(self, host: int) -> None:
        """Takes a host's link away; its processes go on."""
        self._switch("link", "set", f"p{host}", "down")

    def mend(self, host: int) -> None:
        """Gives it back."""
        self._switch("link", "set", f"p{host}", "up")

    def end(self, host: int) -> None:
        """Ends a host with all its processes, as a power cut does."""
        os.kill(self.pids[host], signal.SIGKILL)
        self.inits.pop(host).wait(PATIENCE)
        self._switch("link", "del", f"p{host}")
        ip("netns", "del", f"{self.prefix}{host}")

    def processes(self, host: int, word: str) -> list[str]:
        """The command lines on a host that hold a word: who was left behind."""
        said = subprocess.run(
            self.inside(host, "ps", "-ww", "-eo", "args", "--no-headers"), capture_output=True, text=True
        ).stdout
        return [line for line in said.splitlines() if word in line]

    def own_folder(self, path: Path) -> None:
        """Puts an empty folder of each host's own in a shared one's place."""
        for host in range(self.count):
            subprocess.run(self.inside(host, "mount", "-t", "tmpfs", "none", str(path)), check=True)

    def stop(self) -> None:
        """Ends all hosts and the bridge."""
        for host in list(self.inits):
            self.end(host)
        ip("netns", "del", f"{self.prefix}sw")

    def _switch(self, *words: str) -> None:
        ip("-n", f"{self.prefix}sw", *words)


def ip(*words: str) -> None:
    """Runs ip(8)."""
    subprocess.run(["ip", *words], check=True, capture_output=True)


@contextmanager
def hosts(folder: Path, number: int, variables: dict[int, dict[str, str]] | None = None) -> Iterator[Hosts]:
    """Hosts that end with the block."""
    found = Hosts(folder, number, variables)
    try:
        found.start()
        yield found
    finally:
        found.stop()
