"""Paths that a clumsy or hostile user may give a script: see test_bad_inputs.py."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO
from unittest.mock import Mock

import numpy as np
import pytest

from launch import checkpoint, generate, plan, prepare, pretrain
from megacore.checkpoint.manifest import MANIFEST
from megacore.data.indexed import IndexedTokens
from megacore.distributed.rank_info import RankInfo
from megacore.errors import UserError
from megacore.tools.cli import guarded
from megacore.tools.prepare.indexed_writer import IndexedWriter
from megacore.tools.records import Records
from megacore.tools.settings.load import load
from tests.bad_inputs import EXPORT, SCRIPTS, SUPERVISED, ZERO, Row, bounded, config, rows
from tests.build import run_of
from tests.conftest import Refused
from tests.pool import PATIENCE

NOBODY = 65534  # a user id


PATHS: list[Row] = [
    ("pretrain", config('log.dir="a\\u0000b"'), "config error: log.dir: holds a NUL"),
    ("pretrain", config("log.dir=@" + "x" * 300), "config error: log.dir: cannot write in @xxx"),
    ("pretrain", config("log.dir=@file"), "config error: log.dir: cannot write in @file"),
    ("pretrain", config("log.dir=@loop/x"), "Too many levels of symbolic links"),
    ("pretrain", config("checkpoint.resume=@" + "x" * 300), "cannot be read: File name too long"),
    ("pretrain", config("checkpoint.weights=@" + "x" * 300), "cannot be read: File name too long"),
    (
        "pretrain",
        config("checkpoint.resume=@run_pipe"),
        "step_00000003: has no manifest.json, and no checkpoint before it is whole",
    ),
    ("supervise", ("nosuch", *SUPERVISED, "log.dir=@file"), "config error: log.dir: cannot write in @file"),
    ("supervise", ("nosuch", *SUPERVISED, "log.dir=@" + "x" * 300), "File name too long"),
    (
        "plan",
        config("--plot", "@folder.png"),
        "config error: --plot: cannot write @folder.png: Not a plain file",
    ),
    ("plan", config("--plot", "@folder.png/a.gantt"), "its ending names no image format"),
    ("plan", config("--plot", ""), "config error: --plot: cannot write"),
    ("plan", config("--output", "/proc/x.json"), "config error: --output: cannot write /proc/x.json: "),
    ("samples", config("--step", "1", "--json", "/proc/x"), "config error: --json: cannot write /proc/x: "),
    (
        "evaluate",
        ("--checkpoint", "@run", "--json", "/proc/x"),
        "config error: --json: cannot write /proc/x: ",
    ),
    (
        "coordinates",
        ("--config", "@config.json", "--plot", "/proc/x.png"),
        "config error: --plot: cannot write /proc/x.png: ",
    ),
    ("checkpoint", (*EXPORT[:-1], "/proc/x"), "config error: --output: "),
    (
        "plan",
        config("--simulate-ranks", "0", "--plot", "@new.png", "--compare-schedules"),
        "--compare-schedules, --plot would have no effect",
    ),
    (
        "plan",
        config("--search", "--world", "2", "--simulate-ranks", "0"),
        "config error: --search: --simulate-ranks would have no effect beside it",
    ),
    (
        "plan",
        config("--search", "--world", "2", "--price", "2"),
        "config error: --price: money is that of a whole run (also --tokens",
    ),
    (
        "plan",
        config("--tokens", "1e9"),
        "config error: --tokens: days and money follow from a predicted step (also --gpu and --cluster)",
    ),
    (
        "plan",
        config("--simulate-ranks", "0", "--world", "2", *ZERO),
        "config error: engine.kind: DeepSpeed asks for a real device",
    ),
    (
        "plan",
        config("--simulate-ranks", "0", "--world", "2", "engine.kind=fsdp", "engine.cpu_offload=true"),
        "config error: engine.cpu_offload",
    ),
    (
        "plan",
        config("--simulate-ranks", "9"),
        "config error: --simulate-ranks: 9 is beyond the 1 ranks (ranks from 0 to 0, such as 0 or 0-0)",
    ),
    ("plan", config("--plot", "@nowhere/a.png"), "No such file or directory"),
    ("plan", config("--plot", f"@{'x' * 252}.png"), "File name too long"),
    (
        "plan",
        config("--cluster", "@nowhere"),
        "config error: --cluster: @nowhere is not known, and cannot be read as a file: No such file",
    ),
    (
        "plan",
        config("--cluster", "@pipe"),
        "@pipe is not known, and cannot be read as a file: Not a plain file",
    ),
    *(
        ("plan", config("--cluster", f"@links_{name}.json"), "is no cluster file")
        for name in ("null", "text", "negative", "nan", "call")
    ),
    ("plan", config("--cluster", "@deep.json"), "@deep.json is not JSON"),
    (
        "plan",
        config("--calibrate", "@run"),
        "config error: --gpu: a step is predicted for a device (also --gpu",
    ),
    (
        "plan",
        config("--gpu", "h100", "--cluster", "p5", "--compare-schedules"),
        "--compare-schedules: --cluster would have no effect",
    ),
    (
        "samples",
        config("--step", "1", "--json", "@folder.png"),
        "config error: --json: cannot write @folder.png: Not a plain file",
    ),
    ("samples", config("--step", "1", "--json", "@" + "x" * 300), "File name too long"),
    ("evaluate", ("--checkpoint", "@run", "--json", "@loop"), "Too many levels of symbolic links"),
    (
        "generate",
        ("--checkpoint", "@run", "--tokens", f"1{'0' * 30}"),
        "is not a whole number from 1 to 999999999",
    ),
    (
        "generate",
        ("--checkpoint", "@run", "--tokens", "0"),
        "config error: --tokens: '0' is not a whole number",
    ),
    (
        "generate",
        ("--checkpoint", "@run", "--prompt-file", "@zero"),
        "data error: @zero: cannot be read: Not a plain file",
    ),
    (
        "generate",
        ("--checkpoint", "@run", "--prompt-file", "@pipe"),
        "data error: @pipe: cannot be read: Not a plain file",
    ),
    ("generate", ("--checkpoint", "@run", "--tokenizer", ""), "cannot be read: No such file"),
    (
        "drill",
        config("--fault", "kill:step=2", "--output", "@file"),
        "config error: --output: cannot write in @file",
    ),
    ("drill", config("--fault", "kill:step=2", "--output", ""), "config error: --output: . is not usable"),
    ("checkpoint", ("info", "@" + "x" * 300), "cannot be read: File name too long"),
    ("checkpoint", (*EXPORT[:-1], "/"), "config error: --output: / is there already"),
    ("checkpoint", (*EXPORT[:-1], "@" + "x" * 300), "File name too long"),
    ("checkpoint", (*EXPORT, "--tokenizer", "@pipe"), "data error: @pipe: cannot be read: Not a plain file"),
]


@pytest.mark.parametrize(("script", "arguments", "line"), rows(PATHS))
def test_bad_input_is_one_line(script: str, arguments: tuple[str, ...], line: str, refused: Refused) -> None:
    """A traceback, silence, or a result that is none in place of one clear line."""
    refused(script, arguments, line)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small disk")
def test_a_full_disk_is_one_line(tree: Path, tmp_path: Path) -> None:
    """The run's folder can be made there, and nothing in it be written."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(disk)], capture_output=True, check=False
    ).returncode:
        pytest.skip("this machine mounts no tmpfs")
    try:
        (disk / "run").mkdir()
        with pytest.raises(OSError, match="No space"):
            (disk / "fill").write_bytes(bytes(1 << 17))
        for script, words in (("pretrain", []), ("supervise", ["nosuch"])):
            for folder in ("new", "run"):
                arguments = [*words, "--config", str(tree / "config.json"), f"log.dir={disk / folder}"]
                with (
                    bounded(),
                    pytest.raises(
                        UserError,
                        match=rf"config error: log\.dir: cannot write in \S+/{folder}: No space left",
                    ),
                ):
                    SCRIPTS[script](arguments)
    finally:
        subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user for a moment")
@pytest.mark.parametrize(
    "closed", ["", "checkpoints", "checkpoints/step_00000003", f"checkpoints/step_00000003/{MANIFEST}"]
)
def test_a_checkpoint_without_permission_is_one_line(closed: str, tree: Path) -> None:
    """It would be taken for a run without checkpoints, and training begin anew beside it."""
    checkpoint.run(["info", str(tree / "run")])  # imports what another user may not read
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        shutil.copytree(tree / "run", run)
        Path(folder).chmod(0o755)
        (run / closed).chmod(0)
        os.seteuid(NOBODY)
        try:
            with pytest.raises(UserError, match="Permission denied") as caught:
                checkpoint.run(["info", str(run)])
        finally:
            os.seteuid(0)
        (run / closed).chmod(0o755)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("command", "status", "said"),
    [
        ("launch/compare.py -h >&-", 2, "config error: stdout: cannot be written: Bad file descriptor"),
        ("launch/compare.py -h 2>&-", 0, "usage:"),
        ("launch/compare.py one 2>&-", 2, ""),
        ("launch/compare.py one >&- 2>&1", 2, ""),
        ("launch/compare.py one <&- >&- 2>&-", 2, ""),
    ],
)
def test_closed_streams_leave_the_status(command: str, status: int, said: str) -> None:
    """A traceback, the status of success for a result that nobody got, or a mistake
    that is told on standard output.
    """
    root = Path(__file__).parents[2]
    done = subprocess.run(
        f"{sys.executable} {command}", shell=True, cwd=root, capture_output=True, text=True, timeout=PATIENCE
    )
    text = done.stdout + done.stderr
    assert done.returncode == status and said in text and (said or not text) and "Traceback" not in text


def test_a_name_that_a_terminal_cannot_write_is_written_in_its_letters(tmp_path: Path) -> None:
    """A traceback behind a corpus that was whole: its name was no UTF-8, or the terminal's
    encoding ASCII and the name was not.
    """
    with open(tmp_path / "said", "w", encoding="ascii") as stream:
        print("a\udcff é", file=guarded(stream, stream.fileno()), flush=True)
    assert (tmp_path / "said").read_text() == "a\\udcff \\xe9\n"


@pytest.mark.parametrize("full", ["config.json", "metrics.jsonl"])
def test_a_disk_that_fills_while_records_begin_is_one_line(
    full: str, tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """4,096 bytes free are enough to find the folder fit, and not for what a run writes
    first: a traceback, and half a file.
    """
    write_text, folder = Path.write_text, tmp_path / "run"
    folder.mkdir()
    (folder / "config.json").write_text("before")
    (folder / "metrics.jsonl").write_text('{"step": 1}\n')

    no_space = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def refuse(path: Path, text: str, **options: str) -> int:
        write_text(path, text[:10], **options)
        raise no_space

    def lines(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
        yield 1, b"{"
        raise no_space

    if full == "config.json":
        monkeypatch.setattr(Path, "write_text", refuse)
    else:
        monkeypatch.setattr("megacore.tools.records.recorded", lines)
    with pytest.raises(
        UserError,
        match=r"^log error: \S+/run: its records cannot be begun: No space left on device \([^\n]*\)$",
    ):
        Records().open(run_of(tree / "config.json", f"log.dir={folder}", "log.tensorboard=false"), Mock(), 2)
    assert (folder / full).read_text() in ("before", '{"step": 1}\n') and sorted(os.listdir(folder)) == [
        "config.json",
        "metrics.jsonl",
    ]


def test_a_disk_that_fills_keeps_no_half_of_a_corpus(tmp_path: Path) -> None:
    """Closing the file failed once more, so the part that had been written stayed, on a disk without room."""
    with (
        pytest.raises(OSError, match="No space left"),
        IndexedWriter(str(tmp_path / "c"), np.uint16) as writer,
    ):
        writer._bin.close()
        writer._bin = open("/dev/full", "wb")  # noqa: SIM115 (closed by the writer)
        writer.write(np.arange(4))
    assert not os.listdir(tmp_path)


def test_a_disk_that_fills_keeps_no_half_of_a_picture(tmp_path: Path) -> None:
    """And the one that was there before stays."""
    (tmp_path / "a.png").write_text("before")

    def draw(path: str) -> None:
        Path(path).write_text("half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(UserError, match=r"--plot: cannot write \S+/a\.png: No space left"):
        plan.drawn("schedule", str(tmp_path / "a.png"), draw)
    assert os.listdir(tmp_path) == ["a.png"] and (tmp_path / "a.png").read_text() == "before"


HOOK = """import os, runpy, signal, sys
signal.signal(getattr(signal, sys.argv[2]), signal.SIG_DFL)  # under nohup it is ignored
class Finder:
    def find_spec(name, *rest):
        if name == sys.argv[1]:
            os.kill(os.getpid(), getattr(signal, sys.argv[2]))
sys.meta_path.insert(0, Finder)
sys.path.insert(0, os.getcwd())
runpy.run_path("launch/pretrain.py", run_name="__main__")
"""


@pytest.mark.parametrize(
    ("module", "number"),
    [
        ("megacore.tools.cli", "SIGTERM"),
        ("megacore.tools.stop_request", "SIGTERM"),
        ("megacore.config", "SIGHUP"),
    ],
)
def test_a_signal_during_imports_ends_what_has_begun_nothing(
    module: str, number: str, tmp_path: Path
) -> None:
    """The system's own end, at once: a handler would have to wait for imports, and
    there is nothing to save.
    """
    words = [sys.executable, "-c", HOOK, module, number, f"log.dir={tmp_path / 'run'}"]
    done = subprocess.run(
        words, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=PATIENCE
    )
    assert (
        done.returncode == -getattr(signal, number)
        and not done.stdout + done.stderr
        and not (tmp_path / "run").exists()
    )


@pytest.mark.parametrize("whole", [False, True], ids=["a user's file", "a record"])
def test_a_run_does_not_write_over_the_config_that_it_was_given(
    whole: bool, tree: Path, tmp_path: Path
) -> None:
    """What the user had written was gone, and in its place stood every default.

    A run's own record may start it again.
    """
    config, place = tmp_path / "config.json", RankInfo()
    settings = json.loads((tree / "config.json").read_text()) | {"log": {"dir": str(tmp_path)}}
    config.write_text(json.dumps(settings))
    loaded = load(str(config))
    if whole:
        config.write_text(loaded.config.model_dump_json(by_alias=True))
        assert pretrain.run(["--config", str(config), "--print-config"], place) == 0
        return
    with pytest.raises(
        UserError,
        match=r"^config error: log\.dir: the run would write its record over \S+/config\.json \([^\n]*\)$",
    ):
        pretrain.run(["--config", str(config), "--print-config"], place)
    elsewhere = f"log.dir={tmp_path / 'run'}"
    assert pretrain.run(["--config", str(config), "--print-config", elsewhere], place) == 0


def test_a_corpus_without_room_in_memory_is_one_line(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under `ulimit -v` the system refuses to map a large file: a traceback of every rank."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(np, "memmap", refuse)
    with pytest.raises(
        UserError,
        match=r"^data error: \S+/data\.idx: cannot be mapped into memory: Cannot allocate memory \([^\n]*\)$",
    ):
        IndexedTokens(str(tree / "data"))


@pytest.mark.parametrize("before", [(), ("a",)], ids=["all new", "one there"])
def test_a_refused_preparation_leaves_no_folder(before: tuple[str, ...], tmp_path: Path) -> None:
    """An empty folder stayed where nothing had been written. One that was there before is the user's."""
    (tmp_path / "text").write_text("x")
    for name in before:
        (tmp_path / name).mkdir()
    arguments = [
        "--input",
        str(tmp_path / "text"),
        "--output",
        str(tmp_path / "a/b/c"),
        "--tokenizer",
        "sentencepiece:4000",
        "--workers",
        "1",
    ]
    with pytest.raises(UserError):
        prepare.run(arguments)
    assert sorted(path.name for path in tmp_path.rglob("*")) == sorted([*before, "text"])


def test_a_model_that_lies_about_its_positions_makes_tables_for_the_text_alone() -> None:
    """A forged checkpoint of a small model made rotary tables of gigabytes, and a cache
    of as many tokens in every layer.
    """
    model = {"num_layers": 1, "hidden_size": 24, "num_heads": 4, "vocab_size": 256, "max_positions": 2**24}
    for position, wanted in (("rope", 14), ("learned", 2**24)):
        config = run_of({"model": model | {"position": position}, "train": {"seq_len": 16}})
        assert generate.for_length(config, 13).max_positions == wanted
        assert generate.for_length(config, 2**24 + 1) == config
