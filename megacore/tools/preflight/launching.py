"""Starts ranks on the hosts that are well, through the deepspeed launcher, so that links are tried as a run
would use them; and says what a launch would start, without starting it.
"""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from megacore.errors import ConfigError
from megacore.files import LAUNCH
from megacore.tools.preflight.facts import last_line
from megacore.tools.preflight.patience import Say, patience
from megacore.tools.preflight.reach import forwarded
from megacore.tools.relaunch.hosts import plan, write_hostfile

SCRIPT = LAUNCH / "preflight.py"
LAUNCHER = [sys.executable, "-m", "deepspeed.launcher.runner"]  # its script need not be on PATH
# between looks at what ranks have said; more than a rank takes to end by itself
LOOK_SECONDS, END_SECONDS = 0.2, 40.0
COMPOSE_SECONDS = 100.0  # for the launcher, which starts nothing
MARK = "preflight-together "  # before the line with the result, in the output of all ranks
DONE = re.compile(r"preflight: (.*)\n")  # what rank 0 says by `patience.say`


def launch_together(
    slots: Mapping[str, int], config: str, overrides: list[str], port: int, whole: bool, say: Say
) -> dict[str, Any] | str:
    """What the ranks on all these hosts find out together (`links.together`), or why they cannot.

    `whole`: whether these are all the hosts of the job; if not, another layout is tried, that which
    `launch/supervise.py` would take.
    """
    if shutil.which("pdsh") is None:
        return "pdsh is not installed on this machine; the deepspeed launcher needs it (apt-get install pdsh)"
    ranks, laid = sum(slots.values()), list[str]()
    if not whole:
        ranks, laid, _ = plan(config, overrides, ranks)
    say(f"{ranks} ranks on {len(slots)} hosts try their groups and links {' '.join(laid)}".rstrip())
    with tempfile.TemporaryDirectory() as folder:
        write_hostfile(Path(folder) / "hostfile", slots, ranks)
        launcher = [*LAUNCHER, "--hostfile", f"{folder}/hostfile", "--force_multi"]
        command = [
            *launcher,
            "--master_port",
            str(port),
            str(SCRIPT),
            "--together",
            "--config",
            config,
            *overrides,
            *laid,
        ]
        text, why = watched(command, Path(folder) / "said", patience(ranks) + END_SECONDS, say)
    found = re.search(rf"{MARK}(\{{.*\}})$", text, re.MULTILINE)
    return json.loads(found[1]) if found and not why else why or reason_in(text)


def watched(command: list[str], said: Path, seconds: float, say: Say) -> tuple[str, str]:
    """Runs a command, and passes on what rank 0 says that is done.

    Returns all that was said, and why it was ended, if it was: nothing more was done for `seconds`.
    """
    with said.open("wb") as out, said.open("r", encoding="utf-8", errors="replace") as lines:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
        text, seen, why = "", 0, ""
        done, deadline = "it was started", time.monotonic() + seconds
        while not why:
            ended = process.poll() is not None
            text += lines.read()
            for found in DONE.finditer(text, seen):
                seen, done, deadline = found.end(), found[1], time.monotonic() + seconds
                say(done)
            if ended:
                break
            if time.monotonic() > deadline:
                os.killpg(process.pid, signal.SIGKILL)  # the ranks end by themselves, a little earlier
                process.wait()
                why = f"nothing more within {seconds:.0f} s after: {done}"
            time.sleep(LOOK_SECONDS)
    return text, why


def reason_in(text: str) -> str:
    """The line that says most of why ranks failed."""
    lines = [line.strip() for line in text.splitlines()]
    telling = [line for line in lines if re.search(r"hang watchdog: |(config|data) error: | failed: ", line)]
    return telling[0][:500] if telling else last_line(text)


# Stands where the deepspeed launcher looks for pdsh: it writes down what it is given.
STAND_IN = """#!/bin/sh
printf '%s\\0' "$@" > {file}
"""


def dry_run(
    slots: Mapping[str, int], hostfile: str, exclude: str, port: int, arguments: list[str]
) -> list[str]:
    """The command of a launch, and what it would run on every host and in every rank.

    The deepspeed launcher itself composes the commands, but gets a stand-in for pdsh: nothing is started on
    any host.

    Raises:
        ConfigError: its file of variables has a bad line, or the launcher fails.
    """
    forwarded()
    first, script = next(iter(slots)), [str(LAUNCH / "pretrain.py"), *arguments]
    options = [
        "--hostfile",
        hostfile,
        *(["--exclude", exclude] if exclude else []),
        *(["--force_multi"] if len(slots) == 1 else []),
    ]
    options += ["--master_addr", first, "--master_port", str(port)]
    with tempfile.TemporaryDirectory() as folder:
        file, pdsh = Path(folder) / "given", Path(folder) / "pdsh"
        pdsh.write_text(STAND_IN.format(file=shlex.quote(str(file))))
        pdsh.chmod(0o700)
        if find_spec("deepspeed") is None:
            raise ConfigError("--dry-run", "DeepSpeed is not installed", "pip install deepspeed")
        command = [*LAUNCHER, "--no_ssh_check", *options, *script]
        env = os.environ | {"PATH": f"{folder}{os.pathsep}{os.environ.get('PATH', '')}"}
        done = subprocess.run(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=COMPOSE_SECONDS,
        )
        if not file.exists():
            raise ConfigError(
                "--dry-run",
                f"the deepspeed launcher fails: {last_line(done.stderr)}",
                "a launch that it can compose",
            )
        given = file.read_text().split("\0")[:-1]
    python = given[given.index("-u") - 1]
    remote = " ".join(given[given.index("-w") + 2 :])
    found = [
        f"here: {shlex.join(['deepspeed', *options, *script])}",
        f"which runs: {shlex.join(['pdsh', *given])}",
    ]
    rank = 0
    for node, (host, count) in enumerate(slots.items()):
        found += ["", f"{host}: {remote.replace('%n', str(node))}"]
        for _ in range(count):
            own: dict[str, int | str] = {
                "RANK": rank,
                "LOCAL_RANK": rank % count,
                "WORLD_SIZE": sum(slots.values()),
                "LOCAL_SIZE": count,
            }
            own |= {"CROSS_RANK": node, "CROSS_SIZE": len(slots), "MASTER_ADDR": first, "MASTER_PORT": port}
            words = [python, "-u", script[0], f"--local_rank={rank % count}", *arguments]
            found.append(
                "  " + " ".join(f"{name}={value}" for name, value in own.items()) + " " + shlex.join(words)
            )
            rank += 1
    return found
