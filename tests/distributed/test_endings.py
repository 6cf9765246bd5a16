"""How a script's process ends: with its own status after the last step, quietly after Ctrl-C, in one
line where nobody can read it.
"""

import os
import runpy
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from megacore.tools.processes import descendants
from tests import training
from tests.build import run_of
from tests.pool import CONTEXT, PATIENCE, ROOT
from tests.unit.test_data_prepare import word_tokenizer

SCRIPTS = sorted(path.name for path in (ROOT / "launch").glob("*.py"))
BENCHMARKS = sorted(
    path.stem for path in (ROOT / "benchmarks").glob("*.py") if "__main__" in path.read_text()
)
TINY = ["--config", "configs/gpt_tiny.json"]
ENVIRONMENT = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")} | {
    "OMP_NUM_THREADS": "1"
}

# A thread of gloo's is in Python code when the run ends, and wakes while the interpreter is taken apart.
LATE = """
import sys, threading, time
from datetime import timedelta
import torch
import torch.distributed as dist
from megacore.tools.cli import exit_rank_with

class Late:
    groups = {}
    def __del__(self, sleep=time.sleep):
        sleep(1.0)

def join(rank, store):
    late.groups[rank] = dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=60))

def finished(future):
    reached.set()
    while not sys.is_finalizing():
        time.sleep(0.01)

def run(argv, place):
    store = dist.HashStore()
    ranks = [threading.Thread(target=join, args=(rank, store)) for rank in range(2)]
    for rank in ranks: rank.start()
    for rank in ranks: rank.join()
    late.groups[0].allreduce([torch.ones(4)]).get_future().then(finished)
    late.groups[1].allreduce([torch.ones(4)])
    reached.wait()
    print("the last words", end="")
    return 75

late, reached = Late(), threading.Event()
exit_rank_with(run)
"""


def run_code(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a script with this code. Ctrl-C ends it also where the suite was started to ignore Ctrl-C."""
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=ROOT,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )


def test_a_finished_run_keeps_its_status() -> None:
    """With an ordinary end: terminate called without an active exception, status 134."""
    done = run_code(LATE)
    assert (done.returncode, done.stdout, done.stderr) == (75, "the last words", "")


LATE_HANDLER = """
import atexit, os, signal, threading, time
from megacore.tools.cli import exit_rank_with

def upload():
    time.sleep(3.0)
    print("uploaded", end="")

def run(argv, place):
    atexit.register(upload)
    threading.Timer(0.3, os.kill, (os.getpid(), signal.Signals[argv[0]])).start()
    return 75

exit_rank_with(run)
"""


@pytest.mark.parametrize("number", ["SIGINT", "SIGTERM"])
def test_a_signal_after_the_end_changes_no_status(number: str) -> None:
    """A scheduler would not requeue the run, and the records of its last steps would not be uploaded."""
    done = run_code(LATE_HANDLER, number)
    assert (done.returncode, done.stdout, done.stderr) == (75, "uploaded", "")


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A checkpoint to show and to write texts with."""
    folder = tmp_path_factory.mktemp("endings")
    config = run_of(
        training.write_config(folder, "none", data={"tokenizer": "bytes"}, model={"vocab_size": 256})
    )
    return str(training.write_weights(folder, config))


OUTPUTS = {
    **{f"{script} -h": (script, ["-h"]) for script in SCRIPTS},
    "plan.py": ("plan.py", TINY),
    "pretrain.py --print-config": ("pretrain.py", [*TINY, "--print-config"]),
    "checkpoint.py info": ("checkpoint.py", ["info", "WEIGHTS"]),
    "generate.py": ("generate.py", ["--checkpoint", "WEIGHTS", "--tokens", "3"]),
}


def play(argv: list[str], stdout: str | None, stderr: Path) -> None:
    """Becomes the script `argv`, which writes to the device `stdout`; None: to a
    pipe that nobody reads any more.
    """
    reading, writing = os.pipe()
    os.close(reading)
    os.dup2(writing if stdout is None else os.open(stdout, os.O_WRONLY), 1)
    os.dup2(os.open(stderr, os.O_CREAT | os.O_TRUNC | os.O_WRONLY), 2)
    os.chdir(ROOT)
    sys.argv = argv
    runpy.run_path(argv[0], run_name="__main__")


@pytest.mark.parametrize("output", OUTPUTS)
def test_output_that_nobody_reads_or_that_has_no_room(weights: str, tmp_path: Path, output: str) -> None:
    """`| head` is no mistake, and a full disk is one line; neither is a traceback, nor
    what a finished command returns.
    """
    script, arguments = OUTPUTS[output]
    argv = [
        str(ROOT / "launch" / script),
        *(weights if argument == "WEIGHTS" else argument for argument in arguments),
    ]
    no_room = (
        "config error: stdout: cannot be written: No space left on device (a terminal, a pipe or a "
        "file with room)\n"
    )
    for stdout, expected in ((None, (141, "")), ("/dev/full", (2, no_room))):
        process = CONTEXT.Process(target=play, args=(argv, stdout, tmp_path / "stderr"))
        process.start()
        process.join(PATIENCE)
        assert (process.exitcode, (tmp_path / "stderr").read_text()) == expected


INTERRUPTED = "import os, signal, time; os.killpg(0, signal.SIGINT); time.sleep(20)"
# As torch does while it is imported.
SWALLOWED = """
import os, signal
try:
    os.killpg(0, signal.SIGINT)
except BaseException:
    pass
"""
# Commands that import torch; launch/pretrain.py takes Ctrl-C for a request to stop by then, and saves.
IMPORTS_TORCH = {
    "checkpoint.py": ["info", "nothing"],
    "evaluate.py": ["--checkpoint", "nothing"],
    "generate.py": ["--checkpoint", "nothing"],
    "verify.py": TINY,
}
WITHOUT_TORCH = {"ds_configs", "figures", "heartbeats", "planner", "planner_against"}
OTHERS = {"prepare.py", "compare.py", "instructlab.py"}  # which are asked otherwise
FORKS = ["configs/forks/merge_lora.py", "configs/forks/speculate.py"]
EARLY = [*(f"launch/{script}" for script in SCRIPTS), *FORKS]
IMPORTS = [  # compare.py imports nothing before it has read the runs
    # the first module that a script needs for itself
    *(("argparse", [script, "-h"]) for script in EARLY if script not in FORKS),
    *(("dataclasses", [script, "-h"]) for script in FORKS),
    *(("argparse", ["-m", f"benchmarks.{name}", "-h"]) for name in BENCHMARKS),
    *(
        ("pydantic", [f"launch/{script}", *TINY])
        for script in SCRIPTS
        if script not in {*IMPORTS_TORCH, *OTHERS}
    ),
    (
        "pydantic",
        [
            "launch/instructlab.py",
            "README.md",
            "--run",
            "none",
            "--data",
            "none",
            "--output",
            "TEMP/none.json",
        ],
    ),
    (
        "numpy",
        ["launch/prepare.py", "--input", "README.md", "--output", "TEMP/readme", "--tokenizer", "bytes"],
    ),
    *(("torch", [f"launch/{script}", *arguments]) for script, arguments in IMPORTS_TORCH.items()),
    *(("torch", ["-m", f"benchmarks.{name}", "-h"]) for name in BENCHMARKS if name not in WITHOUT_TORCH),
]


def test_ctrl_c_while_libraries_are_imported(tmp_path: Path) -> None:
    """In every script: seconds, in which a traceback would be of no use, and a Ctrl-C
    that is swallowed would be none.
    """
    found = {}
    for module, command in IMPORTS:
        folder = tmp_path / module
        folder.mkdir(exist_ok=True)
        (folder / f"{module}.py").write_text(SWALLOWED if module == "torch" else INTERRUPTED)
        environment = ENVIRONMENT | {"PYTHONPATH": str(folder)}
        command = [word.replace("TEMP", str(tmp_path)) for word in command]
        # also where the suite itself was started to ignore it, as by nohup
        heeds = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
        process = subprocess.Popen(
            [sys.executable, *command],
            cwd=ROOT,
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=heeds,
        )
        said = process.communicate(timeout=PATIENCE)[1]
        found[f"{module} in {' '.join(command)}"] = (
            process.returncode,
            said.removeprefix("interrupted: nothing was written\n"),
        )
    assert {command: end for command, end in found.items() if end != (130, "")} == {}


# As an extension module's first import does, which a script may reach in the middle of its work.
REPLACED = """
import signal
from megacore.tools.cli import exit_with, unwind_on_sigterm

def run(argv):
    unwind_on_sigterm()
    try:
        signal.raise_signal(signal.Signals[argv[0]])
    except BaseException as error:
        raise ImportError("initialization failed") from error

exit_with(run)
"""


@pytest.mark.parametrize(("number", "status"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_a_signal_in_the_import_of_an_extension_module(number: str, status: int) -> None:
    """sentencepiece raises another error then, whose traceback looks like a broken installation."""
    done = run_code(REPLACED, number)
    assert (done.returncode, done.stderr) == (status, "")


# In the middle of a proof and of a measurement, whose workers would otherwise outlive the script.
UNWOUND = {
    "verify.py": [*TINY, "--layouts", "tp2"],
    "coordinates.py": [*TINY, "--widths", "32,64"],
}


@pytest.mark.parametrize("script", UNWOUND)
def test_sigterm_ends_a_script_with_its_processes(tmp_path: Path, script: str) -> None:
    """A scheduler sends it to the script alone, and expects the status of that signal: 130 is Ctrl-C's."""
    started = tmp_path / "started"
    (tmp_path / "sitecustomize.py").write_text(CHILD_STARTED.format(path=str(started)))
    process = subprocess.Popen(
        [sys.executable, f"launch/{script}", *UNWOUND[script]],
        cwd=ROOT,
        env=ENVIRONMENT | {"PYTHONPATH": str(tmp_path)},
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + PATIENCE
    while not started.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    children = descendants(process.pid)
    process.terminate()
    assert process.communicate(timeout=PATIENCE)[1] == "" and process.returncode == 143
    assert children and not any(Path(f"/proc/{child}").exists() for child in children)


CHILD_STARTED = """
import sys
if sys.orig_argv[1].startswith("-"):
    open({path!r}, "w").close()
"""


# The first process that this one starts sends Ctrl-C as a terminal does: to all of them, also to itself.
FIRST_CHILD = """
import os, signal, sys
if sys.orig_argv[1].startswith("-") and "resource_tracker" not in str(sys.orig_argv):
    try:
        os.close(os.open({flag!r}, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        pass
    else:
        os.killpg(0, signal.SIGINT)
"""


@pytest.mark.parametrize(("tokenizer", "workers"), [("bytes", 2), ("tokenizer.json", 1)])
def test_ctrl_c_while_prepare_starts_processes(tmp_path: Path, tokenizer: str, workers: int) -> None:
    """Each worker, and the process that runs a tokenizer, would print a traceback of its imports."""
    flag = tmp_path / "flag"
    (tmp_path / "sitecustomize.py").write_text(FIRST_CHILD.format(flag=str(flag)))
    (tmp_path / "text").write_text("w1 w2\n" * 1000)
    word_tokenizer(tmp_path / "tokenizer.json", 9)
    words = ["--input", str(tmp_path / "text"), "--output", str(tmp_path / "out" / "x")]
    words += ["--tokenizer", tokenizer.replace("tokenizer.json", str(tmp_path / "tokenizer.json"))]
    done = subprocess.run(
        [sys.executable, "launch/prepare.py", *words, "--workers", str(workers)],
        cwd=ROOT,
        env=ENVIRONMENT | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        start_new_session=True,
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )
    assert flag.exists() and not (tmp_path / "out").exists()
    assert (done.returncode, done.stderr) == (130, "interrupted: nothing was written\n")
