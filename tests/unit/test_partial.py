"""A preparation that was killed goes on from what is done, and writes the same bytes as one that was
not, with any number of processes.
"""

import errno
import gzip
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megacore.errors import ConfigError, DataError
from megacore.tools.prepare import prepare as prepare_module
from megacore.tools.prepare.indexed_writer import IndexedWriter
from megacore.tools.prepare.partial import Partial, folder_of
from megacore.tools.prepare.prepare import Prepared, prepare
from tests.pool import PATIENCE
from tests.unit.test_streams import TALKS, as_if_large, as_lines  # noqa: F401 (the fixture, for every test here too)

ROOT = Path(__file__).resolve().parents[2]
TEXTS = [f"{n} " + "é" * (n % 90) for n in range(300)]
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt "
    "%}assistant: {% endif %}"
)
INPUTS = {
    "lines.jsonl": as_lines(TEXTS),
    "one.txt": "\n".join(TEXTS).encode(),  # one document, whose end comes after the kill
    "packed.jsonl.gz": gzip.compress(as_lines(TEXTS)),
    "talks.jsonl": as_lines(TALKS * 6, "messages"),
}


def written(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


class Preparing:
    """A preparation of an input, into a folder of its own each time."""

    def __init__(self, root: Path, name: str) -> None:
        (root / name).write_bytes(INPUTS[name])
        (root / "t.jinja").write_text(TEMPLATE)
        self.root, self.input = root, root / name
        self.tokenizer = "sentencepiece:300" if name == "one.txt" else "bytes"
        self.more: dict[str, Any] = (
            {"chat": True, "template": str(root / "t.jinja")} if name == "talks.jsonl" else {}
        )

    def run(self, folder: str, **more: Any) -> Prepared:
        return prepare(
            [str(self.input)],
            str(self.root / folder / "x"),
            self.tokenizer,
            **{"valid_fraction": 0.2} | self.more | more,
        )

    def killed(
        self, folder: str, after: int, how: type[BaseException] = KeyboardInterrupt, **more: Any
    ) -> None:
        """Ends it after so many tasks; nothing is at the final name then."""
        done = iter([False] * (after + 1) + [True])  # the first call is for what an earlier start has done

        def on_bytes(size: int) -> None:
            if next(done):
                raise how

        with pytest.raises(how):
            self.run(folder, on_bytes=on_bytes, **more)
        assert [path.name for path in (self.root / folder).iterdir()] == [".x.partial"]


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How many tasks were done, one number a process."""
    count, encode = [0], prepare_module.encode_task

    def counting(*arguments: Any) -> Any:
        count[0] += 1
        return encode(*arguments)

    monkeypatch.setattr(prepare_module, "encode_task", counting)
    yield count


@pytest.mark.parametrize("name", INPUTS)
def test_killed_twice_it_writes_the_same(name: str, tmp_path: Path, counted: list[int]) -> None:
    """What is done is not done again, and neither lost nor there twice; the last start has two processes."""
    job = Preparing(tmp_path, name)
    job.run("whole")
    tasks, counted[0] = counted[0], 0
    job.killed("cut", after=5)
    job.killed("cut", after=3, how=SystemExit)
    first, counted[0] = counted[0], 0
    result = job.run("cut")
    assert tasks > 10 and first >= 7 and counted[0] <= tasks - 5
    assert 0 < result.resumed <= result.input_bytes
    whole = written(tmp_path / "whole")
    assert (
        written(tmp_path / "cut") == {n: d.replace(b"/whole/", b"/cut/") for n, d in whole.items()}
        and len(whole) >= 6
    )


def test_processes_change_nothing(tmp_path: Path) -> None:
    """Of a start, and of going on from one with another number of them."""
    job = Preparing(tmp_path, "lines.jsonl")
    job.run("one")
    job.killed("two", after=6, workers=2)
    assert job.run("two", workers=2).resumed
    assert written(tmp_path / "two") == {
        n: d.replace(b"/one/", b"/two/") for n, d in written(tmp_path / "one").items()
    }


def lost_task(monkeypatch: pytest.MonkeyPatch) -> None:
    commit = Partial.commit
    monkeypatch.setattr(Partial, "commit", lambda self, tasks, splits: commit(self, tasks + 1, splits))


def repeated_task(monkeypatch: pytest.MonkeyPatch) -> None:
    commit = Partial.commit
    monkeypatch.setattr(Partial, "commit", lambda self, tasks, splits: commit(self, tasks - 1, splits))


def lost_boundaries(monkeypatch: pytest.MonkeyPatch) -> None:
    commit = IndexedWriter.commit

    def dropping(self: IndexedWriter) -> dict[str, int]:
        state = commit(self)
        return state | {"boundaries": max(state["boundaries"] - 1, 1)}

    monkeypatch.setattr(IndexedWriter, "commit", dropping)


def lost_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    commit = IndexedWriter.commit
    monkeypatch.setattr(
        IndexedWriter,
        "commit",
        lambda self: (state := commit(self)) | {"tokens": max(state["tokens"] - 1, 0)},
    )


def swapped_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results as they come, and not in their order."""
    monkeypatch.setattr(
        prepare_module,
        "ordered_map",
        lambda function, items, workers: (each for each in [*map(function, items)][::-1]),
    )


@pytest.mark.parametrize("fault", [lost_task, repeated_task, lost_boundaries, lost_tokens, swapped_order])
def test_planted_faults_show(
    fault: Callable[[pytest.MonkeyPatch], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That the comparison above would find them."""
    job = Preparing(tmp_path, "lines.jsonl")
    job.run("whole")
    fault(monkeypatch)
    if fault is not swapped_order:
        job.killed("cut", after=5)
    job.run("cut")
    cut, whole = written(tmp_path / "cut"), written(tmp_path / "whole")
    assert any(cut.get(name) != data for name, data in whole.items() if name.endswith((".bin", ".idx")))


def changed_text(job: Preparing) -> dict[str, Any]:
    job.input.write_bytes(INPUTS["lines.jsonl"].replace(b"\\u00e9", b"\\u00e8"))
    os.utime(job.input, ns=(1, 1))
    return {}


def cut_file(job: Preparing) -> dict[str, Any]:
    file = next(folder_of(str(job.root / "cut/x")).glob("0.bin"))
    file.write_bytes(file.read_bytes()[:100])
    return {}


@pytest.mark.parametrize(
    "change", [changed_text, cut_file, lambda job: {"valid_fraction": 0.5}], ids=["text", "file", "setting"]
)
def test_what_no_longer_fits_is_not_gone_on_from(
    change: Callable[[Preparing], dict[str, Any]], tmp_path: Path
) -> None:
    job = Preparing(tmp_path, "lines.jsonl")
    job.killed("cut", after=6)
    more = change(job)
    folders = [job.run(folder, **more).resumed for folder in ("cut", "whole")]
    assert folders == [0, 0]
    assert written(tmp_path / "cut") == {
        n: d.replace(b"/whole/", b"/cut/") for n, d in written(tmp_path / "whole").items()
    }


def test_a_full_disk_keeps_what_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is one line, and the final name holds nothing; with room again, the same call goes on."""
    job = Preparing(tmp_path, "lines.jsonl")
    write, left = IndexedWriter.write, [200]

    def full(self: IndexedWriter, *arguments: Any) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(IndexedWriter, "write", full)
        with pytest.raises(
            DataError,
            match=r"x: cannot be written: No space left on device \(.*resumes from what is done, in "
            r"\S+/.x.part",
        ):
            job.run("cut")
    assert [path.name for path in (tmp_path / "cut").iterdir()] == [".x.partial"]
    assert (
        job.run("cut").resumed
        and [path for path in (tmp_path / "cut").iterdir() if path.name.startswith(".")] == []
    )


def test_an_error_of_the_text_leaves_nothing(tmp_path: Path) -> None:
    """The same command would meet it again."""
    job = Preparing(tmp_path, "lines.jsonl")
    job.input.write_bytes(INPUTS["lines.jsonl"] + b"{\n")
    with pytest.raises(DataError, match="line 301 is not JSON"):
        job.run("cut")
    assert not (tmp_path / "cut").exists()


def test_one_preparation_at_a_time(tmp_path: Path) -> None:
    """Two with one output would write into each other's files."""
    job = Preparing(tmp_path, "lines.jsonl")
    (tmp_path / "cut").mkdir()
    with (
        Partial(str(tmp_path / "cut/x"), "other"),
        pytest.raises(ConfigError, match="--output: another process prepares"),
    ):
        job.run("cut")
    job.run("cut")


KILLED = """
import os, signal, sys
from megacore.tools.prepare import prepare

prepare.TASK_BYTES = 1000
prepare.COMMIT_BYTES = 1500
done = iter([False] * 9 + [True])
prepare.prepare(sys.argv[2:], sys.argv[1], "bytes", workers=2, on_bytes=lambda _: next(done) and os.kill(os.getpid(), signal.SIGKILL))
"""  # noqa: E501


def test_after_kill_9(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of Python's runs then, and the processes that worked for it end too."""
    for name, rows in (("a", TEXTS * 20), ("b", TEXTS)):
        (tmp_path / f"{name}.jsonl").write_bytes(as_lines(rows))
    command = [
        sys.executable,
        "-c",
        KILLED,
        str(tmp_path / "cut/x"),
        str(tmp_path / "a.jsonl"),
        str(tmp_path / "b.jsonl"),
    ]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    killed = subprocess.run(
        command, env=environment, timeout=PATIENCE, stdout=subprocess.PIPE, check=False
    )  # to the end of all that hold the pipe
    assert killed.returncode == -signal.SIGKILL and [path.name for path in (tmp_path / "cut").iterdir()] == [
        ".x.partial"
    ]
    monkeypatch.undo()
    monkeypatch.setattr(prepare_module, "TASK_BYTES", 1000)
    inputs = [str(tmp_path / f"{name}.jsonl") for name in "ab"]
    resumed = [prepare(inputs, str(tmp_path / folder / "x"), "bytes").resumed for folder in ("cut", "whole")]
    assert resumed[0] > 0 == resumed[1]
    assert written(tmp_path / "cut") == written(tmp_path / "whole")
