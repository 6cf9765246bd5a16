"""Machines that answer, and a layout for them with the same global batch."""

import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from megacore.errors import ConfigError
from megacore.tools.folder_lock import FolderLock
from megacore.tools.relaunch import hosts
from megacore.tools.relaunch.fleet import PROBE, Fleet
from megacore.tools.relaunch.hosts import hostfile_option, plan, read_hostfile
from tests.build import run_of
from tests.commands import run_script

MODEL = {"num_layers": 4, "hidden_size": 64, "num_heads": 4, "vocab_size": 128}
TRAIN = {"seq_len": 16, "micro_batch_size": 4, "global_batch_size": 32}


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model": MODEL, "train": TRAIN, "data": {"train": "nothing"}}))
    return str(path)


@pytest.mark.parametrize(
    ("layout", "ranks", "used", "shape"),
    [
        ((2, 2), 8, 8, (2, 2, 2, 4)),
        ((2, 2), 4, 4, (2, 2, 1, 4)),
        ((2, 2), 2, 2, (2, 1, 1, 4)),  # as many parts as two ranks can hold, tensor as it was
        # 4 of 7 would idle too many; six ranks divide the batch with three stages
        ((2, 2), 7, 6, (1, 3, 2, 4)),
        ((1, 1), 16, 16, (1, 1, 16, 2)),  # a smaller microbatch, for the same batch
        ((1, 1), 12, 12, (1, 3, 4, 4)),
        ((4, 1), 1, 1, (1, 1, 1, 4)),
    ],
)
def test_a_layout_is_found_for_what_is_left(
    config: str, layout: tuple[int, int], ranks: int, used: int, shape: tuple[int, ...]
) -> None:
    overrides = [f"parallel.tensor={layout[0]}", f"parallel.pipeline={layout[1]}"]
    planned = plan(config, overrides, ranks)
    there = run_of(config, *overrides, *planned.overrides, world=planned.ranks)
    found = (
        there.parallel.tensor,
        there.parallel.pipeline,
        there.parallel.data,
        there.train.micro_batch_size,
    )
    assert (planned.ranks, found) == (used, shape)
    assert there.train.global_batch_size == TRAIN["global_batch_size"]


def test_thousands_of_slots_are_laid_out_at_once(config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each number of ranks was tried with a whole config, for minutes and without a word, though
    arithmetic says that it cannot be.
    """
    loaded, load_config = [0], hosts.load

    def counted(*arguments: Any) -> Any:
        loaded[0] += 1
        return load_config(*arguments)

    monkeypatch.setattr(hosts, "load", counted)
    assert plan(config, [], 4096).ranks == 128 and loaded[0] < 200


def test_context_ranks_become_fewer(config: str) -> None:
    """A run over long texts would end for good with the host that held a part of its sequences."""
    for ranks, context, data in ((4, 4, 1), (2, 2, 1), (1, 1, 1), (8, 4, 2)):
        planned = plan(config, ["parallel.context=4"], ranks)
        there = run_of(config, "parallel.context=4", *planned.overrides, world=planned.ranks).parallel
        assert (planned.ranks, there.context, there.data) == (ranks, context, data)


def test_a_schedule_from_a_file_gives_way(config: str, tmp_path: Path) -> None:
    """A plan is for so many ranks and microbatches; on others every rank would refuse
    it, and no restart would help.
    """
    file = tmp_path / "plan.json"
    own = ["parallel.pipeline=2", "parallel.schedule=zb_h1"]
    assert run_script("launch/plan.py", "--config", config, *own, "--output", str(file)).returncode == 0
    overrides = ["parallel.pipeline=2", f"parallel.schedule=file:{file}"]
    assert not any("schedule" in word for word in plan(config, overrides, 2).overrides)
    planned = plan(config, overrides, 1)
    there = run_of(config, *overrides, *planned.overrides, world=planned.ranks)
    assert (planned.ranks, there.parallel.schedule) == (1, "1f1b")


def test_no_machine_is_no_layout(config: str) -> None:
    with pytest.raises(ConfigError, match="no layout fits on 0 ranks"):
        plan(config, [], 0)


@pytest.mark.parametrize(
    ("command", "found"),
    [
        ("deepspeed --hostfile hosts x.py", (2, "hosts")),
        ("deepspeed --hostfile=hosts x.py", (1, "hosts")),
        ("deepspeed -H hosts x.py", (2, "hosts")),
        ("torchrun x.py", None),
    ],
)
def test_the_hostfile_of_a_command(command: str, found: tuple[int, str] | None) -> None:
    assert hostfile_option(command.split()) == (found and (found[0], Path(found[1])))


def test_machines_that_do_not_answer_are_left_out(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hostfile = tmp_path / "hosts"
    hostfile.write_text("# ours\nlocalhost slots=4\nnode1 slots=4 # new\n\nnode2 slots=4\n")
    assert read_hostfile(hostfile) == {"localhost": 4, "node1": 4, "node2": 4}
    probe = f"{sys.executable} -c 'import sys; sys.exit(sys.argv[1] != \"node2\")' {{host}}"
    fleet = Fleet(hostfile, config, [], probe)
    command = fleet.command(["deepspeed", "--hostfile", str(hostfile), "x.py", "--config", config], tmp_path)
    assert command[:3] == ["deepspeed", "--hostfile", str(tmp_path / "hostfile")]
    assert read_hostfile(tmp_path / "hostfile") == {"localhost": 4, "node2": 4}
    assert "parallel.data=auto" in command and not fleet.look()
    assert "; no answer from node1 (status 1)\n" in capsys.readouterr().out
    hostfile.write_text("localhost slots=2\n")
    assert fleet.look()
    fleet.command(command, tmp_path)
    assert read_hostfile(tmp_path / "hostfile") == {"localhost": 2} and not fleet.look()
    hostfile.write_text("localhost\n")
    with pytest.raises(ConfigError, match="slots"):
        read_hostfile(hostfile)


@pytest.mark.parametrize(
    ("line", "slots"),
    [
        ("node1 slots=4 max_slots=8", 4),
        ("node1 slots=4 max-slots=8", 4),
        ("node1\tslots=2  max_slots=2 # all of them", 2),
        ("node1 slots=4 max_slots=3", "max_slots=3, below its slots=4"),
        ("node1 max_slots=8", "has a line `node1 max_slots=8`"),
        ("node1 max_slots=8 slots=4", "has a line"),  # the deepspeed launcher does not read it either
        ("node1 slots=4 max_slots=many", "has a line"),
        ("node1 slots=4 cores=8", "has a line"),
    ],
)
def test_a_hostfile_of_open_mpi(line: str, slots: int | str, tmp_path: Path) -> None:
    """Open MPI's limit is accepted and not used; the slots are what the deepspeed launcher reads too."""
    hostfile = tmp_path / "hosts"
    hostfile.write_text(f"{line}\nnode2 slots=1\n")
    if isinstance(slots, str):
        with pytest.raises(ConfigError, match=slots) as error:
            read_hostfile(hostfile)
        assert "\n" not in str(error.value)
        return
    assert read_hostfile(hostfile) == {"node1": slots, "node2": 1}
    if find_spec("deepspeed") is not None:
        from deepspeed.launcher.runner import fetch_hostfile

        assert dict(fetch_hostfile(str(hostfile))) == {"node1": slots, "node2": 1}


def test_preflight_warns_of_a_mark_in_a_hostfile(tmp_path: Path) -> None:
    """megacore reads over it, but the deepspeed launcher looks for a host with it in its name."""
    hostfile = tmp_path / "hosts"
    for mark, warned in ((b"", False), (b"\xef\xbb\xbf", True)):
        hostfile.write_bytes(mark + b"node1 slots=2\n")
        arguments = ["--hostfile", str(hostfile), "--config", "configs/gpt_tiny.json", "--dry-run"]
        done = run_script("launch/preflight.py", *arguments)
        assert done.returncode == 0, done.stderr
        assert ("begins with a byte order mark" in done.stderr) is warned
        assert "node1" in done.stdout


@pytest.mark.parametrize(
    "host", ["-oProxyCommand=touch${IFS}pwned", "-v", "node1;touch", "$(touch)", "user@node1", "node\u0661"]
)
def test_a_host_that_is_no_name_reaches_no_command(config: str, tmp_path: Path, host: str) -> None:
    """ssh takes `-oProxyCommand=…` for an option and runs it: whoever could write
    a hostfile could run anything.
    """
    hostfile = tmp_path / "hosts"
    hostfile.write_text(f"{host.replace('pwned', str(tmp_path / 'pwned'))} slots=2\n", encoding="utf-8")
    done = run_script(
        "launch/supervise.py",
        "--backoff",
        "0",
        "deepspeed",
        "--hostfile",
        str(hostfile),
        "x.py",
        "--config",
        config,
    )
    assert (done.returncode, done.stdout) == (2, "") and done.stderr.count("\n") == 1
    assert done.stderr.startswith(f"config error: --hostfile: {hostfile} names the host `")
    assert not (tmp_path / "pwned").exists()


def test_a_host_stands_behind_the_options_of_ssh() -> None:
    """Should a name ever slip through, ssh must take it for a name."""
    words = PROBE.split()
    assert words[0] == "ssh" and words[words.index("{host}") - 1] == "--"


def test_one_run_a_folder(tmp_path: Path) -> None:
    first, second = FolderLock(tmp_path, patience=0.0), FolderLock(tmp_path, patience=0.0)
    first.take()
    first.take()  # which it has
    with pytest.raises(
        ConfigError, match=r"log\.dir: .* belongs to a run that is still running \(process \d+ on "
    ):
        second.take()
    first.file.close()
    second.take()
    second.file.close()
    FolderLock(tmp_path / "not there yet").take()
