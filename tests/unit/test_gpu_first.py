"""The first call of `benchmarks.gpu`: what it is prepared with, what it measures,
and the tables that it ends with.
"""

import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from benchmarks import machine
from benchmarks.gpu import __main__ as command_line
from benchmarks.gpu import before, caches, prepare, running, summary, wheels
from benchmarks.gpu.parts import SLICES
from megacore.errors import ConfigError
from tests.pool import ROOT

# An archive of kernels is unpacked by the filter of tarfile, which Python 3.11.4 brought.
unpacks = pytest.mark.skipif(
    not hasattr(tarfile, "data_filter"), reason="this Python unpacks no archive: it is older than 3.11.4"
)


def names(argv: str) -> dict[str, list[str]]:
    """The parts that a command runs, by slice."""
    slices = command_line.slices_of(command_line.parse(argv.split()))
    return {name: [part.name for part in slice_.parts] for name, slice_ in slices.items()}


def test_parts_run_in_the_order_in_which_they_are_named() -> None:
    """A short call should begin with what matters most."""
    assert names("first --only bandwidth gpt_124m") == {"first": ["bandwidth", "gpt_124m"]}
    assert names("first --only bandwidth gpt_124m bandwidth") == {"first": ["bandwidth", "gpt_124m"]}
    assert names("all --only attention") == {"first": ["attention"], "choices": ["attention"]}


def test_a_machine_without_git_has_no_commit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It is no reason not to measure."""
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    for command in ("init -q", "-c user.name=a -c user.email=b commit -q --allow-empty --no-gpg-sign -m c"):
        subprocess.run(["git", *command.split()], cwd=tmp_path, check=True)
    assert machine.commit(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert machine.commit(tmp_path) is None and command_line.driver() is None


# --- another checkout ---------------------------------------------------------------------------------------


def test_two_checkouts_take_turns() -> None:
    """Each side is first as often as last, so that a GPU that gets slower favours neither."""
    assert names(f"first --before {ROOT}") == {
        "before": [
            *("gpt_124m, here, round 1", "gpt_124m, before, round 1"),
            *("gpt_124m, before, round 2", "gpt_124m, here, round 2"),
            *("bandwidth, here, round 1", "bandwidth, before, round 1"),
            *("bandwidth, before, round 2", "bandwidth, here, round 2"),
        ]
    }
    assert len(names(f"first --before {ROOT} --only bandwidth bandwidth")["before"]) == 4


@pytest.mark.parametrize(
    "argv, message",
    [
        ("first --only products", "'products' is no part of first"),
        ("first --only gpt_124m gpt_1b --dry-run", "--only: gpt_1b has no dry run"),
        ("first --before {tmp}", "has no benchmarks/gpu/before.py .*this version of megacore or a newer one"),
        ("first --before {root} --only attention", "attention is not compared"),
        ("right --before {root}", "right does not have it"),
        ("all --prepare {tmp}", "all does not have it"),
        ("first --prepare {tmp} --output {tmp}", "--output: it would be ignored"),
        ("first --prepare {tmp} --wheels {tmp}", "--wheels: it would be ignored"),
        ("first --prepare {tmp} --before {root}", "--before: it would be ignored"),
        ("first --prepare {tmp} --only bandwidth", "--only: it would be ignored"),
        ("first --prepare {tmp} --dry-run", "--dry-run: it would be ignored"),
        ("first --target-python 3.11", "--target-python: it would be ignored"),
        ("first --target-triton 3.6.0", "--target-triton: it would be ignored"),
        ("first --prepare {tmp} --target-python 3", "--target-python: '3' is not a version"),
        ("first --prepare {tmp} --target-triton 3.6", "--target-triton: '3.6' is not a version"),
    ],
)
def test_a_command_that_cannot_do_what_it_says_is_an_error(tmp_path: Path, argv: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        names(argv.format(tmp=tmp_path, root=ROOT))


@pytest.mark.parametrize("planted", ["nothing", "no megacore", "kernels from elsewhere", "a failure"])
def test_a_part_of_another_checkout_runs_its_code(tmp_path: Path, planted: str) -> None:
    """Without its own megacore or kernels, this checkout's would be measured twice: that must not pass."""
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    (checkout / "benchmarks").symlink_to(ROOT / "benchmarks")
    if planted == "kernels from elsewhere":  # a linked megacore finds the kernels next to the original
        (checkout / "megacore").symlink_to(ROOT / "megacore")
    elif planted != "no megacore":
        for package in ("megacore", "kernels"):
            shutil.copytree(ROOT / package, checkout / package)
    (checkout / "probe.py").write_text(
        "import megacore\ndef where(rows, word):\n    rows.add(file=megacore.__file__, word=word)\n"
        "def fails(rows, word):\n    raise OSError('a disk is gone')\n"
    )
    rows = running.Rows(tmp_path / "rows", True, 1e9, tmp_path)
    before.run_in(rows, str(checkout), "probe:fails" if planted == "a failure" else "probe:where", "word")
    (row,) = running.read(rows.path)
    if planted == "nothing":
        assert row == {"file": str(checkout / "megacore" / "__init__.py"), "word": "word"}
    elif planted == "a failure":
        assert row == {"failed": "OSError: a disk is gone"}
    else:
        module = "megacore" if planted == "no megacore" else "megacore.kernels.gelu"
        assert row["failed"].startswith(f"ImportError: {module} is imported from {ROOT}")


@pytest.mark.parametrize(
    "argv, message",
    [
        ("--output {tmp}/file", "--output: {tmp}/file cannot be used"),
        ("--output {tmp}/file/below", "--output: {tmp}/file/below cannot be used"),
        ("--output {tmp}", "--output: {tmp}/gpu_first.json is a folder"),
        ("--prepare {tmp}/file", "--prepare: {tmp}/file cannot be used"),
        ("--prepare /proc/zz", "--prepare: /proc/zz cannot be used"),
        ("--output {tmp}/out --wheels {tmp}/wheles", "--wheels: {tmp}/wheles is not a folder"),
    ],
)
def test_a_folder_that_cannot_be_used_is_an_error_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, argv: str, message: str
) -> None:
    """Planted: a machine without packages, which would be reported if it were looked at first."""
    (tmp_path / "file").write_text("a file")
    (tmp_path / "gpu_first.json").mkdir()
    monkeypatch.setattr(wheels, "missing", lambda: ["numpy"])
    monkeypatch.setattr(signal, "signal", lambda *args: None)  # this process keeps its handlers
    with pytest.raises(ConfigError, match=message.format(tmp=tmp_path)):
        command_line.main(["first", *argv.format(tmp=tmp_path).split()])


# --- tables -------------------------------------------------------------------------------------------------


def content(slice_name: str, parts: dict[str, list[dict[str, object]]]) -> dict[str, object]:
    """What a report has, of an H100."""
    return {
        "slice": slice_name,
        "machine": {"gpus": ["NVIDIA H100"], "processor": "a CPU"},
        "versions": {"torch": "2.11.0"},
        "parts": {name: {"rows": rows} for name, rows in parts.items()},
    }


def row(model: str, contender: str, speed: float, mfu: float | None = 0.451) -> dict[str, object]:
    """Of a model's part."""
    fields = {"model": model, "contender": contender, "tokens_a_second": speed, "mfu": mfu}
    return fields | {"allocated_GiB": 12.34}


def test_the_table_of_speeds() -> None:
    """A ratio needs both sides; a model without the plain GPT has none, and one that failed no line."""
    rows = [row("gpt_124m", "eager", 520e3), row("gpt_124m", "compiled", 530e3, None)]
    rows += [row("gpt_124m", "plain", 500e3), {"model": "gpt_124m", "contender": "eager", "class": "all"}]
    failed = {"model": "gpt_350m", "contender": "eager", "failed": "out of memory"}
    lines = summary.summary(
        content("first", {"gpt_124m": rows, "gpt_1b": [row("gpt_1b", "eager", 64e3)], "gpt_350m": [failed]})
    )
    assert lines == [
        "",
        "## Speed on one NVIDIA H100, PyTorch 2.11.0",
        "",
        "| model | code | tokens/s | MFU | memory (GiB) | speed next to the plain GPT's |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
        "| gpt_124m | megacore | 520,000 | 45.1% | 12.3 | 1.04 |",
        "| gpt_124m | megacore, compiled | 530,000 | – | 12.3 | 1.06 |",
        "| gpt_124m | plain PyTorch GPT, compiled | 500,000 | 45.1% | 12.3 | 1.00 |",
        "| gpt_1b | megacore | 64,000 | 45.1% | 12.3 | – |",
    ]
    assert summary.summary(content("first", {"gpt_350m": [failed]})) == []


def test_the_table_of_two_checkouts() -> None:
    """Of medians: twice as fast is 2, for a speed and for a time. What one side lacks is left out."""
    kernel = {"operation": "adamw", "direction": "forward", "size": "8 × 8"}
    parts = {
        "gpt_124m, here, round 1": [row("gpt_124m", "eager", 110e3)],
        "gpt_124m, before, round 1": [row("gpt_124m", "eager", 100e3)],
        "gpt_124m, before, round 2": [row("gpt_124m", "eager", 102e3), row("gpt_124m", "compiled", 1.0)],
        "gpt_124m, here, round 2": [row("gpt_124m", "eager", 112e3)],
        "bandwidth, here, round 1": [kernel | {"triton_ms": 0.5}],
        "bandwidth, before, round 1": [kernel | {"triton_ms": 1.0}, kernel | {"error": 1e-3}],
    }
    assert summary.summary(content("before", parts))[3:] == [
        "| measured | here | before | speedup | rounds |",
        "| --- | ---: | ---: | ---: | ---: |",
        "| gpt_124m, megacore, tokens/s | 111,000 | 101,000 | 1.099 | 2 |",
        "| adamw forward, 8 × 8, ms | 0.5 | 1 | 2.000 | 1 |",
    ]


@pytest.mark.parametrize(
    "triton, numpy, warns", [("3.6.0", "2.4.6", True), ("3.6.0", "2.3.5", False), ("3.9.0", "2.4.6", False)]
)
def test_a_dry_run_warns_of_an_interpreter_that_cannot_work(
    monkeypatch: pytest.MonkeyPatch, triton: str, numpy: str, warns: bool
) -> None:
    monkeypatch.setattr(command_line, "version", {"triton": triton, "numpy": numpy}.__getitem__)
    assert bool(command_line.interpreter_note()) == warns


# --- preparing ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("same_python", [True, False])
@pytest.mark.parametrize("processor", ["x86_64", "aarch64"])
def test_preparing_asks_for_the_packages_of_the_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, same_python: bool, processor: str
) -> None:
    """Without a network: commands are recorded, and what they would fetch is made up."""
    monkeypatch.setattr(platform, "machine", lambda: processor)
    commands: list[list[str]] = []
    environments: list[dict[str, str] | None] = []

    def record(command: list[str], environment: dict[str, str] | None = None) -> str:
        commands.append(command)
        environments.append(environment)
        if "download" in command:
            folder = Path(command[command.index("-d") + 1])
            folder.mkdir(exist_ok=True)
            (folder / "triton-3.6.0-cp399.whl").write_text("a wheel")
        if environment is not None:
            kernel = Path(environment["TRITON_CACHE_DIR"]) / "KEY"
            kernel.mkdir(parents=True)
            (kernel / "kernel.cubin").write_text("code")
        return "19 kernels compiled"

    monkeypatch.setattr(prepare, "run", record)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    python = wheels.python_version() if same_python else "3.99"
    lines = prepare.prepare(tmp_path / "wheels", python, "3.6.0")
    assert lines[0] == "19 kernels compiled" and "1 wheels and triton_cache.tar.xz" in lines[1]
    with tarfile.open(tmp_path / "wheels" / "triton_cache.tar.xz") as tar:
        assert tar.getnames() == ["triton/KEY/kernel.cubin"]

    packages, compiler, *other, compiling = commands
    assert packages[packages.index("--python-version") + 1] == python
    assert "manylinux_2_28_x86_64" in packages, "the target's processor, not this machine's"
    wanted = packages[packages.index("-d") + 2 :]
    assert [requirement.partition("==")[0] for requirement in wanted] == [*wheels.NEEDED, "pytest-xdist"]
    assert all("==" in requirement for requirement in wanted)
    assert compiler[-2:] == ["triton==3.6.0", "--no-deps"] and "--target" in compiler
    assert compiling[2:6] == ["benchmarks.gpu.compile_ahead", "gpt_124m", "gpt_350m", "gpt_1b"]
    environment = environments[-1]
    assert environment is not None and "TRITON_INTERPRET" not in environment, "nothing would be compiled"
    first = environment["PYTHONPATH"].split(os.pathsep)[:2]
    assert first == [compiler[compiler.index("--target") + 1], str(ROOT)]
    if same_python and processor == "x86_64":
        assert other == [] and "--wheel" not in compiling
    else:
        assert other[0][-2:] == ["triton==3.6.0", "--no-deps"] and compiling[-1].endswith(".whl")


def test_a_command_that_fails_is_one_line() -> None:
    with pytest.raises(ConfigError, match=r"--prepare: `.*` failed: no network"):
        prepare.run([sys.executable, "-c", "import sys; sys.exit('first line\\nno network')"])


def compile_ahead(cache: Path, *options: str) -> str:
    """What a process that compiles the kernels of the smallest model into a cache prints."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    environment |= {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "benchmarks.gpu.compile_ahead", "gpt_124m", *options]
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    ).stdout


def kernels(cache: Path) -> dict[str, int]:
    """The machine code in a cache, by key, with the time at which it was written."""
    return {path.parent.name: path.stat().st_mtime_ns for path in cache.glob("*/*.cubin")}


@unpacks
def test_packed_kernels_are_found_in_another_folder_by_the_same_triton_only(tmp_path: Path) -> None:
    """Triton's paths are absolute, and its keys contain a digest of its library:
    another Python's is another file.
    """
    pytest.importorskip("triton", reason="Triton is not installed")
    made, carried = tmp_path / "made", tmp_path / "carried"
    count = int(compile_ahead(made).split()[0])
    assert len(kernels(made)) == count > 10
    caches.pack(tmp_path / "cache.tar.xz", {"triton": made})
    made.rename(tmp_path / "moved")
    caches.unpack(tmp_path / "cache.tar.xz", {"triton": carried, "inductor": tmp_path / "none"})
    arrived = kernels(carried)
    assert arrived.keys() == kernels(tmp_path / "moved").keys()

    compile_ahead(carried)
    assert kernels(carried) == arrived, "kernels were compiled again"

    with zipfile.ZipFile(tmp_path / "other.whl", "w") as wheel:
        wheel.writestr("triton/_C/libtriton.so", "of another Python")
    compile_ahead(carried, "--wheel", str(tmp_path / "other.whl"))
    added = kernels(carried).keys() - arrived.keys()
    assert len(added) == count, "the keys are not those of the other Python's Triton"


# --- caches -------------------------------------------------------------------------------------------------


def write_cache(folder: Path, keys: int = 2) -> None:
    """A cache as Triton keeps it, with absolute paths; each kernel has incompressible code."""
    for key in range(keys):
        kernel = folder / f"KEY{key}"
        kernel.mkdir(parents=True)
        (kernel / "k.cubin").write_bytes(os.urandom(100_000))
        (kernel / "__grp__k.json").write_text(
            json.dumps({"child_paths": {"k.cubin": str(kernel / "k.cubin")}})
        )


@unpacks
def test_caches_are_packed_and_unpacked(tmp_path: Path) -> None:
    source = {"triton": tmp_path / "triton", "inductor": tmp_path / "inductor"}
    write_cache(source["triton"])
    (source["inductor"] / "ab").mkdir(parents=True)
    (source["inductor"] / "ab" / "code.py").write_text("x = 1\n")
    assert caches.pack(tmp_path / "caches.tar.xz", source) == {"files": 5, "left_out": 0}

    target = {"triton": tmp_path / "there", "inductor": tmp_path / "too"}
    caches.unpack(tmp_path / "caches.tar.xz", target)
    assert (target["inductor"] / "ab" / "code.py").read_text() == "x = 1\n"
    for key in ("KEY0", "KEY1"):
        group = json.loads((target["triton"] / key / "__grp__k.json").read_text())
        assert group == {"child_paths": {"k.cubin": str(target["triton"] / key / "k.cubin")}}


@pytest.mark.parametrize("out_of_time", [True, False])
def test_what_does_not_fit_is_left_out_kernel_by_kernel(tmp_path: Path, out_of_time: bool) -> None:
    """A kernel without some of its files would be worse than none: Triton would take it for whole."""
    write_cache(tmp_path / "triton", keys=100)
    folders, archive = {"triton": tmp_path / "triton"}, tmp_path / "caches.tar.xz"
    looks = iter(range(1000))
    counts = caches.pack(
        archive,
        folders,
        most_bytes=2**30 if out_of_time else 2**20,
        has_time=(lambda: next(looks) < 20) if out_of_time else (lambda: True),
    )
    assert counts["files"] + counts["left_out"] == 200 and counts["files"] and counts["left_out"]
    with tarfile.open(archive) as tar:
        packed = [Path(name).parent.name for name in tar.getnames()]
    assert len(packed) == counts["files"] and all(packed.count(key) == 2 for key in packed)
    assert out_of_time or archive.stat().st_size < 2**24, "15 MiB and what xz holds back must be under 16"
    assert [path.name for path in tmp_path.iterdir() if path.suffix == ".new"] == []


def test_a_cache_that_cannot_be_written_is_reported_and_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in caches.KINDS.values():
        monkeypatch.setenv(variable, str(tmp_path / "cache"))
    rows = running.Rows(tmp_path / "rows", True, 1e12, tmp_path / "gone")
    caches.keep(rows)
    (found,) = running.read(rows.path)
    assert "it cannot be written" in found["skipped_because"] and "failed" not in found


@unpacks
@pytest.mark.parametrize("member", ["elsewhere/x", "triton", "triton/../../x", None])
def test_an_archive_that_is_no_cache_is_an_error(tmp_path: Path, member: str | None) -> None:
    """It must not write outside the caches' folders."""
    archive = tmp_path / "wheels" / "caches.tar.xz"
    archive.parent.mkdir()
    if member is None:
        archive.write_text("no archive")
    else:
        (tmp_path / "file").write_text("x")
        with tarfile.open(archive, "w:xz") as tar:
            tar.add(tmp_path / "file", member)
    with pytest.raises(caches.BadArchive):
        caches.unpack(archive, {"triton": tmp_path / "a" / "triton", "inductor": tmp_path / "a" / "inductor"})
    assert not (tmp_path / "x").exists()


def pack_and_unpack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Pack `triton` and `inductor` of a folder; return the line about unpacking them into `here`."""
    for kind, variable in caches.KINDS.items():
        monkeypatch.setenv(variable, str(tmp_path / "here" / kind))
    with tarfile.open(tmp_path / caches.KEPT, "w:xz") as tar:
        for top in sorted(path for path in tmp_path.iterdir() if path.is_dir()):
            tar.add(top, top.name)
    (line,) = caches.unpack_all(tmp_path)
    return line


@unpacks
@pytest.mark.parametrize("group", [b"{not json", b"{}", b"[]", b'{"child_paths": [1]}', b"\xff"])
def test_a_damaged_group_of_files_leaves_the_archive_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group: bytes
) -> None:
    """It must not come into the cache, where it would stop every later run."""
    write_cache(tmp_path / "triton")
    (tmp_path / "triton" / "KEY1" / "__grp__k.json").write_bytes(group)
    line = pack_and_unpack(tmp_path, monkeypatch)
    assert line.startswith("caches.tar.xz is left out: KEY1/__grp__k.json is damaged")
    assert not (tmp_path / "here").exists()


@unpacks
def test_groups_of_the_users_own_cache_stay_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file in the cache that the archive does not bring is not read, even if it is damaged."""
    write_cache(tmp_path / "triton")
    own = tmp_path / "own" / "KEY7" / "__grp__k.json"
    own.parent.mkdir(parents=True)
    own.write_text("{not json")
    caches.pack(tmp_path / caches.KEPT, {"triton": tmp_path / "triton"})
    caches.unpack(tmp_path / caches.KEPT, {"triton": tmp_path / "own"})
    assert own.read_text() == "{not json" and (tmp_path / "own" / "KEY1").is_dir()


@unpacks
@pytest.mark.parametrize("planted", ["dangling link", "unknown kind", "unusable folder"])
def test_an_archive_is_checked_before_a_cache_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, planted: str
) -> None:
    write_cache(tmp_path / "triton")
    if planted == "dangling link":
        (tmp_path / "triton" / "KEY1" / "link").symlink_to("nowhere")
    elif planted == "unknown kind":
        write_cache(tmp_path / "zzz")
        listing = Path.iterdir
        monkeypatch.setattr(Path, "iterdir", lambda path: iter(sorted(listing(path))))  # triton is first
    else:
        (tmp_path / "here").write_text("a file")
    line = pack_and_unpack(tmp_path, monkeypatch)
    messages = {"dangling link": "it has links", "unknown kind": "is no cache"}
    assert line.startswith("caches.tar.xz is left out: ")
    assert messages.get(planted, "cannot be written") in line
    assert not (tmp_path / "here").is_dir()


@unpacks
def test_both_archives_of_the_wheels_folder_are_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind, variable in caches.KINDS.items():
        monkeypatch.setenv(variable, str(tmp_path / "here" / kind))
    for name, key in ((caches.PREPARED, "prepared"), (caches.KEPT, "kept")):
        write_cache(tmp_path / key / key, keys=1)
        caches.pack(tmp_path / name, {"triton": tmp_path / key})
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / caches.KEPT).write_bytes((tmp_path / caches.KEPT).read_bytes()[:5000])
    (line,) = caches.unpack_all(tmp_path / "damaged")
    assert line.startswith("caches.tar.xz is left out: ")
    assert not list((tmp_path / "here").rglob("*")), "half a kernel would be taken for whole"
    lines = caches.unpack_all(tmp_path)
    assert [line.partition(":")[0] for line in lines] == [
        "triton_cache.tar.xz is unpacked",
        "caches.tar.xz is unpacked",
    ]
    found = {path.parent.parent.name for path in (tmp_path / "here" / "triton").rglob("*.cubin")}
    assert found == {"prepared", "kept"}
    assert "has no archive of kernels" in caches.unpack_all(tmp_path / "prepared")[0]


def test_the_first_slice_measures_last_what_it_can_lose() -> None:
    """Parts that check come first and together; the caches come last."""
    marks = [part.together for part in SLICES["first"].parts]
    assert marks == sorted(marks, reverse=True) and True in marks
    assert SLICES["first"].parts[-1].name == "caches"
