"""Preflight on two hosts: it passes when they are healthy, and names each thing
that can be wrong with the second.
"""

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import distribution
from pathlib import Path

import pytest

from tests.cluster.hosts import Hosts, hosts, missing
from tests.pool import PATIENCE, ROOT
from tests.training import write_config, write_corpus

WHY_NOT = missing("pdsh")
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=f"hosts: {WHY_NOT}")
slow = pytest.mark.skipif(
    not os.environ.get("MEGACORE_CLUSTER"), reason="minutes long: bash tests/cluster/run.sh"
)
PORT = 29611
EVEN = {"PYTHONPATH": os.pathsep.join([str(ROOT / "tests/cluster/even_hosts"), str(ROOT)])}  # its clocks
# Takes four fifths of a core in every millisecond, before all other programs.
HOG = """import os, time
print("preflight-fault", flush=True)
os.sched_setaffinity(0, {1})
while True:
    end = time.perf_counter() + 0.0008
    while time.perf_counter() < end:
        pass
    time.sleep(0.0002)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A shared folder with a config, a corpus and a hostfile."""
    found = tmp_path_factory.mktemp("shared")
    own = {"log": {"dir": str(found / "run")}, "parallel": {"tensor": 2}}
    write_config(found, write_corpus(found), train={"steps": 2}, checkpoint={"last": True}, **own)
    (found / "hostfile").write_text("node0 slots=2\nnode1 slots=2\n")
    (found / "run").mkdir()
    return found


def preflight(two: Hosts, folder: Path, **variables: str) -> tuple[int, dict]:
    """The status and the JSON of a preflight from the first host."""
    command = [
        "python",
        str(ROOT / "launch" / "preflight.py"),
        "--hostfile",
        "hostfile",
        "--config",
        "config.json",
        "--json",
    ]
    done = two.run(0, *command, "--port", str(PORT), cwd=folder, **variables)
    assert done.stdout, done.stderr[-3000:]
    return done.returncode, json.loads(done.stdout)


def test_healthy_hosts_pass(two: Hosts, folder: Path) -> None:
    """A preflight that names healthy hosts is soon left out itself; and it leaves
    nothing in the run's folder.
    """
    status, said = preflight(two, folder, **EVEN)
    assert (status, said["passed"], said["exclude"], said["findings"]) == (0, True, "", []), said["findings"]
    assert list(said["hosts"]) == ["node0", "node1"]
    assert not [path for path in (folder / "run").iterdir() if path.name.startswith(".")]
    together = said["together"]
    assert together["machines"] == [[0, 1], [2, 3]] and len(together["links"]) == 2
    assert [(group["axis"], group["ranks"]) for group in together["groups"]] == [
        ("dp", [0, 2]),
        ("dp", [1, 3]),
        ("tp", [0, 1]),
        ("tp", [2, 3]),
    ]


@contextmanager
def mounted(two: Hosts, what: Path | str, where: Path, *options: str) -> Iterator[None]:
    """Something else in a file's or a folder's place, on the second host alone."""
    assert two.run(1, "mount", *(options or ("--bind",)), str(what), str(where)).returncode == 0
    try:
        yield
    finally:
        assert two.run(1, "umount", str(where)).returncode == 0


@contextmanager
def other_commit(two: Hosts, folder: Path) -> Iterator[None]:
    """HEAD names the commit before."""
    ask = ["git", "-C", str(ROOT), "rev-parse"]
    head, before = (
        subprocess.run([*ask, *words], capture_output=True, text=True, check=True).stdout.strip()
        for words in (["--path-format=absolute", "--git-path", "HEAD"], ["HEAD~1"])
    )
    (folder / "HEAD").write_text(before + "\n")
    with mounted(two, folder / "HEAD", Path(head)):
        yield


@contextmanager
def other_source(two: Hosts, folder: Path) -> Iterator[None]:
    """A file that somebody has edited."""
    file = ROOT / "megacore" / "rng.py"
    (folder / "edited.py").write_text(file.read_text() + "\n# mine\n")
    with mounted(two, folder / "edited.py", file):
        yield


@contextmanager
def other_torch(two: Hosts, folder: Path) -> Iterator[None]:
    """Its metadata name another version."""
    found = next(file for file in distribution("torch").files or [] if file.name == "METADATA")
    file = Path(str(distribution("torch").locate_file(found)))
    lines = file.read_text().splitlines()
    (folder / "METADATA").write_text(
        "\n".join("Version: 2.9.1" if line.startswith("Version: ") else line for line in lines)
    )
    with mounted(two, folder / "METADATA", file):
        yield


@contextmanager
def other_config(two: Hosts, folder: Path) -> Iterator[None]:
    """An older copy of the file."""
    old = json.loads((folder / "config.json").read_text())
    old["train"]["seed"] = 99
    (folder / "old.json").write_text(json.dumps(old))
    with mounted(two, folder / "old.json", folder / "config.json"):
        yield


@contextmanager
def full_disk(two: Hosts, folder: Path) -> Iterator[None]:
    """A small disk in log.dir, full."""
    with mounted(two, "none", folder / "run", "-t", "tmpfs", "-o", "size=1m"):
        two.run(1, "dd", "if=/dev/zero", f"of={folder}/run/fill", "bs=1M", "count=2")
        yield


@contextmanager
def own_folder(two: Hosts, folder: Path) -> Iterator[None]:
    """Room, and nobody else's files."""
    with mounted(two, "none", folder / "run", "-t", "tmpfs"):
        yield


@contextmanager
def clock_ahead(two: Hosts, folder: Path) -> Iterator[None]:
    """Every shell that sshd starts there is a minute ahead."""
    library = next(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"), None)
    if library is None:
        pytest.skip("faketime is not installed (apt-get install faketime)")
    Path("/root/.bashrc").touch()
    (folder / "bashrc").write_text(f"export LD_PRELOAD={library} FAKETIME=+60s\n")
    with mounted(two, folder / "bashrc", Path("/root/.bashrc")):
        yield


@contextmanager
def background(two: Hosts, *command: str) -> Iterator[None]:
    """A program on the second host, which says a line when it is ready."""
    process = two.popen(1, *command)
    try:
        assert process.stdout is not None and process.stdout.readline()
        yield
    finally:
        # in the host's own process namespace
        for line in two.run(1, "pgrep", "-f", "preflight-fault").stdout.split():
            two.run(1, "kill", "-9", line)
        process.wait(PATIENCE)


@contextmanager
def port_taken(two: Hosts, folder: Path) -> Iterator[None]:
    """Somebody listens where ranks would meet."""
    code = (
        f"import socket,time\ns=socket.create_server(('',{PORT}))\n"
        "print('preflight-fault',flush=True)\ntime.sleep(3600)"
    )
    with background(two, "python", "-c", code):
        yield


@contextmanager
def slow_core(two: Hosts, folder: Path) -> Iterator[None]:
    """A core that computes in a fifth of the time."""
    with background(two, "chrt", "-f", "50", "python", "-c", HOG):
        yield


@contextmanager
def down(two: Hosts, folder: Path) -> Iterator[None]:
    """Without a network."""
    two.cut(1)
    try:
        yield
    finally:
        two.mend(1)


FAULTS: list[tuple[Callable, str, str]] = [
    (other_commit, "code", "commit "),
    (other_source, "code", "(sources "),
    (other_torch, "versions", "torch 2.9.1, and torch 2."),
    (other_config, "config", "digest "),
    (full_disk, "disk", "free in "),
    (own_folder, "shared", "run is not the folder that node0 has"),
    (clock_ahead, "clock", "s ahead of the others"),
    (port_taken, "ports", f"port {PORT} is taken"),
    (down, "reached", "connect to host node1"),
    (slow_core, "devices", "core 1 is slow: "),
]


@slow
@pytest.mark.parametrize(
    ("fault", "check", "text"), [pytest.param(*row, id=row[0].__name__) for row in FAULTS]
)
def test_each_fault_is_named(two: Hosts, folder: Path, fault: Callable, check: str, text: str) -> None:
    """What would otherwise be found by a run that hangs, or not at all."""
    if fault is slow_core and len(os.sched_getaffinity(0)) < 2:
        pytest.skip("needs two cores")
    with fault(two, folder):
        status, said = preflight(two, folder, **({} if fault is slow_core else EVEN))
    named = [(finding["host"], finding["check"]) for finding in said["findings"] if text in finding["text"]]
    assert ("node1", check) in named, said["findings"]
    assert status == 1 and "node1" in said["exclude"].split("@")
    if fault is not slow_core:  # hosts on one machine share its cores
        assert said["exclude"] == "node1"


@slow
@pytest.mark.skipif(bool(missing("tc")), reason=f"hosts: {missing('tc')}")
def test_a_slow_link_is_named(tmp_path: Path) -> None:
    """One host of four sends at 20 Mbit/s: every step of a run would wait for it."""
    with hosts(tmp_path, 4) as four:
        write_config(tmp_path, write_corpus(tmp_path), log={"dir": str(tmp_path / "run")})
        (tmp_path / "hostfile").write_text("".join(f"node{i} slots=1\n" for i in range(4)))
        limit = [
            "tc",
            "qdisc",
            "add",
            "dev",
            "eth0",
            "root",
            "tbf",
            "rate",
            "20mbit",
            "burst",
            "64k",
            "latency",
            "50ms",
        ]
        assert four.run(2, *limit).returncode == 0
        status, said = preflight(four, tmp_path, **EVEN, PYTHON_LINKS="measured")
    # On a busy machine another link may be slow too.
    found = [finding["host"] for finding in said["findings"] if "from it, and" in finding["text"]]
    assert status == 1 and "node2" in found and "node2" in said["exclude"].split("@"), said["findings"]


def on_both(two: Hosts, folder: Path, hosts_there: tuple[int, ...] = (0, 1)) -> tuple[int, dict]:
    """Preflight in ranks that torchrun starts, on both hosts or on fewer; the status of
    the first host and rank 0's JSON.
    """
    torchrun = [
        "torchrun",
        "--nnodes",
        "2",
        "--nproc-per-node",
        "2",
        "--master-addr",
        "node0",
        "--master-port",
        str(PORT),
    ]
    script = [str(ROOT / "launch" / "preflight.py"), "--config", "config.json", "--json"]
    started = [
        two.popen(host, *torchrun, "--node-rank", str(host), *script, cwd=folder, **EVEN)
        for host in hosts_there
    ]
    ended = [process.communicate(timeout=PATIENCE) for process in started]
    assert "{" in ended[0][0], ended[0]
    return started[0].returncode, json.loads(ended[0][0][ended[0][0].index("{") :])


@slow
def test_ranks_of_a_launcher(two: Hosts, folder: Path) -> None:
    """They tell their facts where they meet; healthy machines then try their links, others are named."""
    status, said = on_both(two, folder)
    assert (status, said["findings"], list(said["hosts"])) == (0, [], ["node0", "node1"]), said["findings"]
    assert len(said["together"]["links"]) == 2
    with other_torch(two, folder):
        status, said = on_both(two, folder)
    assert status == 1 and {finding["check"] for finding in said["findings"]} == {"versions"}, said[
        "findings"
    ]
    assert said["exclude"] == "node1" and isinstance(said["together"], str)


@slow
def test_a_dry_run_prints_what_a_launch_does(two: Hosts, folder: Path) -> None:
    """Word for word, and variable for variable; and it starts nothing on any host."""
    (folder / ".deepspeed_env").write_text("NCCL_DEBUG=WARN\n")
    command = [
        "python",
        str(ROOT / "launch" / "preflight.py"),
        "--dry-run",
        "--hostfile",
        "hostfile",
        "--config",
        "config.json",
    ]
    two.cut(1)
    try:
        printed = two.run(0, *command, "--port", str(PORT), "train.seed=5", cwd=folder)
    finally:
        two.mend(1)
    assert printed.returncode == 0, printed.stderr
    lines = printed.stdout.splitlines()
    assert lines[0].startswith("here: deepspeed --hostfile hostfile --master_addr node0")
    # The command of the first line, with a script in pretrain's place that tells what it was given.
    teller = folder / "tell.py"
    names = [
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_SIZE",
        "CROSS_RANK",
        "CROSS_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
    ]
    teller.write_text(
        f"import os, sys\nvariables = [name + '=' + os.environ[name] for name in {names}]\n"
        "line = ['told', *variables, sys.executable, '-u', *sys.argv, os.environ['NCCL_DEBUG']]\n"
        "sys.stdout.write(' '.join(line) + '\\n')\n"  # in one write: the ranks of a host share a pipe
    )
    words = [
        str(teller) if word.endswith("pretrain.py") else word
        for word in lines[0].removeprefix("here: ").split()
    ]
    done = two.run(0, *words, cwd=folder)
    (folder / ".deepspeed_env").unlink()
    told = sorted(line.partition("told ")[2] for line in done.stdout.splitlines() if "told " in line)
    expected = sorted(line.strip() + " WARN" for line in lines if line.startswith("  RANK="))
    assert len(told) == 4 and told == [
        line.replace(str(ROOT / "launch" / "pretrain.py"), str(teller)) for line in expected
    ], done.stderr[-2000:]
    assert all("export NCCL_DEBUG=WARN" in line for line in lines if line.startswith("node"))
