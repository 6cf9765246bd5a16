"""What preflight makes of the facts of machines: each check, with the fault that it is
for planted among healthy hosts.
"""

import copy
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megacore.errors import ConfigError
from megacore.tools.diagnosis.watchdog import START_UP
from megacore.tools.preflight import devices, facts, launching, reach
from megacore.tools.preflight.facts import Question
from megacore.tools.preflight.host_report import (
    as_json,
    lines,
    readable,
    settings_lines,
    table,
    together_lines,
    verdict,
)
from megacore.tools.preflight.judge import HostFinding, excluded, judge, judge_together
from megacore.tools.preflight.launching import dry_run, launch_together, reason_in
from megacore.tools.preflight.patience import patience
from megacore.tools.preflight.rank_checks import VERDICT_SECONDS, short
from megacore.tools.preflight.reach import Hosts, forwarded
from tests.build import run_of
from tests.pool import PATIENCE, ROOT

GIB = 1 << 30
GPU = {
    "name": "GPU of a kind",
    "tflops": 700.0,
    "right": True,
    "error": "",
    "free": 79 * GIB,
    "memory": 80 * GIB,
}
HEALTHY: dict[str, Any] = {
    "ahead": 0.01,
    "code": {"commit": "0123456789ab", "files": "aaaaaaaaaaaa"},
    "versions": {"python": "3.12.3", "torch": "2.13.0", "deepspeed": "0.19.8", "numpy": "2.4.6"},
    "config": {"digest": "cccccccccccc"},
    "needs": {"disk": 10 * GIB, "memory": 40 * GIB},
    "log_dir": {
        "path": "/runs/a",
        "free": 100 * GIB,
        "write": 1e9,
        "seen": ["a", "b", "c", "d"],
        "error": "",
    },
    "memory": {"total": 1024 * GIB, "available": 1000 * GIB, "shared": 512 * GIB},
    "limits": {"open files": 65536, "locked memory": None, "processes": None},
    "ports": {"29500": False},
    "network": {
        "interfaces": {"eth0": 100000},
        "infiniband": ["mlx5_0"],
        "own": "10.0.0.1",
        "first": "10.0.0.1",
    },
    "settings": {"NCCL_SOCKET_IFNAME": "eth0"},
    "devices": {"model": "CPU of a kind", "gpus": [GPU] * 8, "cores": {}},
}
SLOTS = dict.fromkeys("abcd", 8)


def with_fault(path: str, value: Any, host: str = "c") -> dict[str, Any]:
    """Four healthy hosts, and one value changed on one of them; `path` is the
    value's, such as `memory.total`.
    """
    hosts = {name: copy.deepcopy(HEALTHY) for name in SLOTS}
    at: Any = hosts[host]
    *way, last = [int(key) if key.isdigit() else key for key in path.split(".")]
    for key in way:
        at = at[key]
    at[last] = value
    return hosts


def test_healthy_hosts_have_no_findings() -> None:
    hosts = {name: copy.deepcopy(HEALTHY) for name in SLOTS}
    assert judge(hosts, SLOTS, need_sharing=True) == [] and verdict(hosts, [], "") == "all 4 hosts pass"
    assert verdict({"a": HEALTHY}, [], "") == "this host passes"


CORES = {"model": "CPU of a kind", "gpus": [], "cores": {"0": 100.0, "1": 40.0}}
FAULTS: list[tuple[str, Any, str, str, bool]] = [
    ("unreached", "no answer within 15 s", "reached", "no answer within 15 s", True),
    (
        "code.commit",
        "ffffffffffff",
        "code",
        "commit ffffffffffff (sources aaaaaaaaaaaa), and commit 0123456789ab",
        True,
    ),
    ("code.files", "bbbbbbbbbbbb", "code", "(sources bbbbbbbbbbbb)", True),
    ("versions.torch", "2.9.1", "versions", "torch 2.9.1, and torch 2.13.0 on a and 2 more", True),
    ("versions.numpy", "absent", "versions", "numpy absent", True),
    ("config", {"error": "config error: --config: cannot read x"}, "config", "cannot read x", True),
    ("config.digest", "dddddddddddd", "config", "digest dddddddddddd, and digest cccccccccccc", True),
    ("ahead", 60.0, "clock", "60.0 s ahead of the others", True),
    ("ahead", -3.0, "clock", "3.0 s behind the others", True),
    ("log_dir.free", GIB, "disk", "1 GiB free in /runs/a, and a checkpoint needs 10 GiB", True),
    (
        "log_dir.error",
        "Read-only file system",
        "disk",
        "cannot write in /runs/a: Read-only file system",
        True,
    ),
    ("log_dir.write", 1e7, "disk", "9.537 MiB/s written in /runs/a, and 953.7 MiB/s on most hosts", False),
    ("log_dir.seen", ["c"], "shared", "/runs/a is not the folder that a, b, c and 1 more have", True),
    ("memory.total", 512 * GIB, "memory", "512 GiB, and 1 TiB on most hosts", False),
    ("memory.shared", 64 << 20, "memory", "/dev/shm has 64 MiB", False),
    ("needs.memory", 8 * 80 * GIB, "memory", "79 GiB free on a GPU, and the run needs 80 GiB", True),
    ("limits", HEALTHY["limits"] | {"open files": 256}, "limits", "ulimit -n is 256", True),
    ("limits", HEALTHY["limits"] | {"locked memory": 65536}, "limits", "ulimit -l is 64 KiB", True),
    ("ports.29500", True, "ports", "port 29500 is taken", True),
    ("network.first", None, "network", "does not know the first host's name", True),
    (
        "network.first",
        "10.9.9.9",
        "network",
        "the first host's address is 10.9.9.9, and the first host's address is 10.0.0.1",
        True,
    ),
    ("network.own", "127.0.1.1", "network", "its own name leads to 127.0.1.1", False),
    ("devices.gpus", [GPU] * 7, "devices", "7 GPUs are visible, and the run has 8 ranks there", True),
    ("devices.gpus", [], "devices", "0 GPUs are visible", True),
    (
        "devices.gpus.3",
        GPU | {"tflops": 560.0},
        "devices",
        "GPU 3 is slow: 560 TFLOP/s, and 700 is usual (GPU of a kind)",
        True,
    ),
    (
        "devices.gpus.5",
        GPU | {"right": False},
        "devices",
        "GPU 5 (GPU of a kind): computes a wrong product",
        True,
    ),
    (
        "devices.gpus.0",
        GPU | {"tflops": 0.0, "error": "ECC error"},
        "devices",
        "GPU 0 (GPU of a kind): ECC error",
        True,
    ),
    (
        "devices",
        {"error": "no answer within 40 s"},
        "devices",
        "cannot be tried: no answer within 40 s",
        True,
    ),
]


@pytest.mark.parametrize(("path", "value", "check", "text", "fatal"), FAULTS)
def test_a_fault_is_named(path: str, value: Any, check: str, text: str, fatal: bool) -> None:
    """And only on the host that has it, and only by the check that is for it."""
    if path == "unreached":
        hosts = with_fault("ports", {}) | {"c": {"unreached": value}}
    else:
        hosts = with_fault(path, value)
    found = judge(hosts, SLOTS, need_sharing=True)
    named = {(finding.host, finding.check, finding.fatal) for finding in found if text in finding.text}
    assert named == {("c", check, fatal)}, found
    assert {finding.host for finding in found} == {"c"} and excluded(found) == ("c" if fatal else "")
    assert table(hosts, found).row_count == 4 and any(text in line for line in lines(found))


def test_a_slow_core_among_equals() -> None:
    hosts = with_fault("devices", CORES)
    for host in "abd":
        hosts[host]["devices"] = CORES | {"cores": {"0": 100.0, "1": 95.0}}
    found = judge(hosts, SLOTS, need_sharing=True)
    assert [(f.host, f.text) for f in found] == [
        ("c", "core 1 is slow: 40 GFLOP/s, and 100 is usual (CPU of a kind)")
    ]
    hosts["c"]["devices"] = CORES | {"model": "older CPU", "cores": {"0": 40.0, "1": 40.0}}
    assert judge(hosts, SLOTS, need_sharing=True) == []  # another kind has no equals here


def test_folders_of_their_own_are_no_fault_of_a_run_without_checkpoints() -> None:
    hosts = {name: copy.deepcopy(HEALTHY) for name in SLOTS}
    for name, about in hosts.items():
        about["log_dir"]["seen"] = [name]
    assert [f.fatal for f in judge(hosts, SLOTS, need_sharing=True)] == [True] * 3
    found = judge(hosts, SLOTS, need_sharing=False)
    assert (
        [f.fatal for f in found] == [False] * 3
        and excluded(found) == ""
        and "needs none that is shared" in found[0].text
    )


def test_the_verdict_has_what_exclude_takes() -> None:
    hosts = with_fault("ahead", 60.0)
    hosts["a"]["ports"] = {"29500": True}
    found = judge(hosts, SLOTS, need_sharing=True)
    assert verdict(hosts, found, "z") == "2 of 4 hosts should be left out: --exclude z@c@a"
    said = as_json(hosts, found, "", "")
    assert json.loads(json.dumps(said)) == said and not said["passed"] and said["exclude"] == "c@a"


def test_hundreds_of_hosts_have_a_short_table() -> None:
    hosts = {
        f"n{i}": HEALTHY | {"network": HEALTHY["network"] | {"own": f"10.0.{i // 250}.{i % 250}"}}
        for i in range(500)
    } | {"bad": HEALTHY | {"ports": {"29500": True}}}
    found = judge(hosts, dict.fromkeys(hosts, 8), need_sharing=True)
    assert table(hosts, found).row_count == 1 and len(settings_lines(hosts)) == 1


def test_facts_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is compared with what another program, or a planted change, says."""
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    head = subprocess.run(
        ["git", "-C", str(facts.ROOT), "rev-parse", "HEAD"], capture_output=True, text=True
    ).stdout.strip()
    assert head.startswith(facts.code()["commit"])
    here = facts.versions()
    assert here["python"] == ".".join(map(str, sys.version_info[:3])) and here["torch"].startswith("2.")
    (tmp_path / ".name").mkdir()
    (tmp_path / ".name" / "other.here").touch()
    disk = facts.disk(tmp_path, ".name", "host")
    assert (
        disk["seen"] == ["other"]
        and disk["write"] > 0
        and disk["error"] == ""
        and len(list((tmp_path / ".name").iterdir())) == 1
    )
    (tmp_path / "file").touch()
    assert facts.disk(tmp_path / "file", ".name", "host")["error"] == "Not a directory"
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        assert facts.taken(port)
    assert not facts.taken(port)
    assert facts.settings()["NCCL_DEBUG"] == "INFO"
    assert (
        0
        < facts.memory()["available"]
        <= facts.memory()["total"]
        == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    )
    assert (
        facts.network("host.invalid")["first"] is None and facts.network("localhost")["first"] == "127.0.0.1"
    )


def test_a_disks_speed_is_that_of_its_best_try(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another program's writes, in the midst of one try, would make a healthy disk a slow one."""
    clock, waits = [0.0], [0.2, 0.1, 0.4, 0.05, 0.8]
    monkeypatch.setattr(facts.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(facts.os, "fsync", lambda _: clock.append(clock.pop() + waits.pop()))
    monkeypatch.setattr(facts, "WRITTEN_BYTES", 3 << 20)
    assert facts.disk(tmp_path, "some", "a")["write"] == pytest.approx((3 << 20) / 0.05)
    waits[:] = [9.0]  # slow in its first try: there is no second
    assert facts.disk(tmp_path, "slow", "a")["write"] == pytest.approx((3 << 20) / 9)


def test_all_cores_are_measured_and_given_back() -> None:
    mine = os.sched_getaffinity(0)
    assert set(devices.cores()) == {str(core) for core in mine} and os.sched_getaffinity(0) == mine


QUESTION = Question("config.json", [], 2, "a", 29500, ".preflight-x")
SHELLS = {
    "whole": ("""echo "{\\"clock\\": $(($(date +%s) + 10000))}"; echo Welcome; cat {facts}""", ""),
    # A login shell may say anything, before and after.
    "talking": (
        """echo 3; echo '"a"'; echo '[{"clock": 1}]'; echo null; echo '{"clock": "noon"}'
        printf '%050000d\\n' 0 | tr 0 '['; printf '\\377\\n'
        echo "{\\"clock\\": $(($(date +%s) + 10000))}"; cat {facts}; echo 7; echo '{}'; echo '["devices"]'""",
        "",
    ),
    "another version": (
        'echo \'{"clock": 1}\'; echo \'{"devices": {"gpus": []}, "code": 3}\'',
        "answers, but its answer cannot be judged: TypeError: 'int' object is not subscriptable",
    ),
    "dead": ("echo no route to {host} >&2; exit 255", "no route to a"),
    "half": (
        'echo \'{"clock": 1}\'; [ -z "${2##*facts*}" ] && echo Killed >&2 && exit 137; true',
        "answers, but cannot be looked at: Killed",
    ),
    "mute": ("true", "answers, but cannot be looked at: its answer cannot be read"),
}


@pytest.mark.parametrize("name", SHELLS)
def test_what_a_host_answers(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that is not there, one that breaks off, one whose shell greets: the
    others' answers count all the same.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(reach, "REACH_SECONDS", PATIENCE)
    monkeypatch.setattr(reach, "FACTS_SECONDS", PATIENCE)
    script, wrong = SHELLS[name]
    (tmp_path / "facts").write_text(json.dumps(HEALTHY) + "\n")
    (tmp_path / "shell").write_text(
        script.replace("{host}", "$1").replace("{facts}", str(tmp_path / "facts"))
    )
    found = Hosts({"a": 1}, f"sh {tmp_path}/shell {{host}}").ask(QUESTION, "run", lambda line: None)["a"]
    assert found.get("unreached", "") == wrong
    if not wrong:
        assert found["ahead"] == pytest.approx(10_000, abs=1000)


def test_the_variables_that_the_launcher_takes_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line without `=` lets the launcher itself end with a traceback."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "nobody"))
    (tmp_path / ".deepspeed_env").write_text("NCCL_SOCKET_IFNAME=ib0\nTEXT=a b=c\n")
    assert forwarded({"PYTHONHASHSEED": "1", "SECRET": "2"}) == {
        "PYTHONHASHSEED": "1",
        "PYTHONPATH": str(tmp_path),
        "NCCL_SOCKET_IFNAME": "ib0",
        "TEXT": "a b=c",
    }
    (tmp_path / ".deepspeed_env").write_text("export\n")
    with pytest.raises(ConfigError, match=r"\.deepspeed_env: has a line `export`"):
        forwarded({})
    for content, wrong in ((b"A=\xff\xfe\n", "is not UTF-8 text"), (b"A=b\0c\n", r"has a line `A=b\\0c`")):
        (tmp_path / ".deepspeed_env").write_bytes(content)
        with pytest.raises(ConfigError, match=rf"\.deepspeed_env: {wrong}"):
            forwarded({})


def rounds(count: int, slow: dict[tuple[int, int], float]) -> dict[str, Any]:
    """The links of so many machines, 1 GB/s but for those that are given."""
    steps = [1 << i for i in range(20) if 1 << i < count]
    pairs = [(a, (a + step) % count) for step in steps for a in range(count)]
    found = [{"from": a, "to": b, "bytes_per_second": slow.get((a, b), 1e9)} for a, b in pairs]
    groups = [{"axis": "dp", "ranks": list(range(count)), "seconds": 0.002, "right": True}]
    return {"machines": [[i] for i in range(count)], "groups": groups, "links": found, "mesh": "data 8"}


def test_links_are_judged_against_the_median() -> None:
    """A machine whose links are all slow is named, its neighbours are not; a single
    slow link is only told.
    """
    names = [f"n{i}" for i in range(8)]
    assert judge_together(rounds(8, {}), names) == []
    sends = {(3, 4): 1e8, (3, 5): 1e8, (3, 7): 1e8}
    found = judge_together(rounds(8, sends), names)
    assert [(f.host, f.text, f.fatal) for f in found] == [
        ("n3", "95.37 MiB/s from it, and 953.7 MiB/s is usual", True)
    ]
    takes = {(2, 3): 1e8, (1, 3): 1e8, (7, 3): 1e8}
    assert [(f.host, f.text[:18]) for f in judge_together(rounds(8, takes), names)] == [
        ("n3", "95.37 MiB/s to it,")
    ]
    found = judge_together(rounds(8, {(3, 4): 1e8}), names)
    assert [(f.host, f.fatal) for f in found] == [("n3", False)] and found[
        0
    ].text == "95.37 MiB/s to n4, and 953.7 MiB/s is usual"
    assert len(rounds(1024, {})["links"]) == 10 * 1024  # ten rounds, and not a million pairs
    assert together_lines(rounds(8, sends), names)[-1].endswith("the slowest, n3 to n4, 95.37 MiB/s")


def test_a_fault_of_all_together_leaves_no_host_out() -> None:
    hosts = {name: copy.deepcopy(HEALTHY) for name in SLOTS}
    found = [HostFinding("all hosts together", "links", "pdsh is not installed on this machine")]
    assert (
        excluded(found) == ""
        and verdict(hosts, found, "") == "each host passes by itself, and all together do not"
    )
    assert not as_json(hosts, found, "", "pdsh is not installed")["passed"]


FACTS: list[str] = [
    "code",
    "versions",
    "config",
    "log_dir",
    "memory",
    "limits",
    "ports",
    "network",
    "settings",
    "devices",
    "needs",
]


@pytest.mark.parametrize("key", FACTS)
def test_an_answer_that_cannot_be_judged_is_its_hosts_fault(key: str) -> None:
    """One host with another version of the code would end preflight, and hide what all others have."""
    for value in (None, 5, "text", [], [1], {"a": 1}, {"gpus": 3}, {"open files": "many"}):
        hosts = with_fault(key, value)
        read = {host: readable(about, 8) for host, about in hosts.items()}
        assert read["a"] == HEALTHY
        found = judge(read, SLOTS, need_sharing=True)
        assert table(read, found).row_count == 4 and settings_lines(read) and as_json(read, found, "", "")


PLAYED = """import sys, time
for done in range(int(sys.argv[1])):
    print("node0: preflight: groups of axis", done, flush=True)
time.sleep(float(sys.argv[2]))
print('node0: preflight-together {"links": []}', flush=True)
"""


def test_ranks_may_take_long_if_they_get_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """512 ranks that set up their groups for the first time take minutes: a limit for all of it ends
    them, or nobody sees them hang.
    """
    monkeypatch.setattr(launching.shutil, "which", lambda name: name)
    monkeypatch.setattr(launching, "END_SECONDS", 0.0)
    monkeypatch.setattr(launching, "patience", lambda ranks: 1000.0)
    monkeypatch.setattr(launching, "LOOK_SECONDS", 0.05)
    (tmp_path / "runner.py").write_text(PLAYED)
    for marks, silent, passes, expected in (
        (8, 0, 600.0, {"links": []}),
        (1, 3600, 1200.0, "nothing more within 1000 s after: groups of axis 0"),
    ):
        monkeypatch.setattr(
            launching, "LAUNCHER", [sys.executable, str(tmp_path / "runner.py"), str(marks), str(silent)]
        )
        said: list[str] = []
        # So much time passes after each mark, and next to none meanwhile.
        clock = SimpleNamespace(monotonic=lambda: passes * len(said), sleep=time.sleep)  # noqa: B023
        monkeypatch.setattr(launching, "time", clock)
        assert launch_together({"a": 8}, "c.json", [], 29500, True, said.append) == expected
        assert said[1:] == [f"groups of axis {done}" for done in range(marks)]


@pytest.mark.parametrize("world", [1, 512, 16384])
def test_limits_grow_with_the_world_and_keep_their_order(world: int) -> None:
    """Setting up 2,048 GPUs has taken 1,047 s.

    The watchdog speaks before a rank is ended, and that before the launcher is.
    """
    limits = dict(word.split("=") for word in short(world))
    verdict = START_UP * float(limits["parallel.hang_seconds"])
    assert verdict >= 1047 / 2048 * world * 0.97 and verdict >= 60
    assert verdict < patience(world) + VERDICT_SECONDS < patience(world) + launching.END_SECONDS
    assert run_of(ROOT / "configs/gpt_tiny.json", *short(world)).parallel.hang_seconds == verdict / START_UP


def test_a_dry_run_needs_no_script_on_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment that is not activated has DeepSpeed beside its interpreter, and
    nothing of it on PATH.
    """
    runner = tmp_path / "deepspeed" / "launcher" / "runner.py"
    runner.parent.mkdir(parents=True)
    for package in (runner.parent, runner.parent.parent):
        (package / "__init__.py").touch()
    runner.write_text(
        "import os\nos.execvp('pdsh', ['pdsh', '-w', 'a', 'cd /;', 'python', '-u', '-m', 'x'])\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    assert shutil.which("deepspeed") is None
    found = dry_run({"a": 2}, "hostfile", "", 29500, ["--config", "c.json"])
    assert (
        found[1] == "which runs: pdsh -w a 'cd /;' python -u -m x"
        and len([line for line in found if "LOCAL_RANK" in line]) == 2
    )


def test_what_failed_ranks_say() -> None:
    text = (
        "node1: warning: x\nnode0: hang watchdog: the network between node0 and node1 is cut\n"
        "pdsh@node0: node0: ssh exited\n"
    )
    assert reason_in(text) == "node0: hang watchdog: the network between node0 and node1 is cut"
    assert reason_in("Traceback\nRuntimeError: no\n\n") == "RuntimeError: no"
