"""Asks every host of a hostfile over ssh, as pdsh would reach it: the same folder, the
same Python, the same variables.
"""

import json
import os
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from megacore.errors import ConfigError
from megacore.files import ROOT, read_text
from megacore.tools.preflight.facts import Question, asked, last_line
from megacore.tools.preflight.host_report import readable
from megacore.tools.preflight.patience import Count, Say
from megacore.tools.relaunch.hosts import SSH

AT_ONCE = 64  # connections
REACH_SECONDS, FACTS_SECONDS = 15.0, 60.0
# variables that the deepspeed launcher takes along (NCCL: where it sees GPUs)
FORWARDED = ("PYTHON", "MLFLOW", "MV2", "UCX", "NCCL")
SETTINGS_FILE = ".deepspeed_env"  # holds those that it sets on every host


def forwarded(env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables that ranks on other hosts get from the deepspeed launcher.

    Raises `ConfigError` for a bad line of its file.
    """
    found = {name: value for name, value in env.items() if name.startswith(FORWARDED)}
    found["PYTHONPATH"] = os.pathsep.join([str(Path.cwd()), *filter(None, [env.get("PYTHONPATH")])])
    for folder in (Path.home(), Path.cwd()):
        file = folder / env.get("DS_ENV_FILE", SETTINGS_FILE)
        if not file.is_file():
            continue
        right = "lines such as `NCCL_DEBUG=INFO`, which the deepspeed launcher reads"
        try:
            lines = read_text(file).splitlines()
        except OSError as error:
            raise ConfigError(str(file), f"cannot be read: {error.strerror}", right) from None
        except UnicodeDecodeError:
            raise ConfigError(str(file), "is not UTF-8 text", right) from None
        for line in lines:
            name, equals, value = line.partition("=")
            if not equals or not name.strip().isidentifier() or "\0" in value:
                raise ConfigError(str(file), f"has a line `{line:.200}`".replace("\0", "\\0"), right)
            found[name.strip()] = value
    return found


class Hosts:
    """The hosts of a job, as this machine reaches them."""

    def __init__(self, slots: Mapping[str, int], shell: str = SSH) -> None:
        """`slots`: ranks by host. `shell`: a command that runs its last argument on `{host}`."""
        self.slots = slots
        try:
            self.shell = shlex.split(shell)
            if not self.shell:
                raise ValueError("it is empty")
        except ValueError as error:
            raise ConfigError("--ssh", f"{shell} is no command: {str(error).lower()}", SSH) from None
        self.exports = "".join(f"export {name}={shlex.quote(value)}; " for name, value in forwarded().items())

    def ask(self, question: Question, log_dir: str, say: Say) -> dict[str, dict[str, Any]]:
        """The facts of every host (`judge.judge`). Each host is asked by itself, many at a time."""
        here, go = shlex.quote(f"{log_dir}/{question.name}"), f"cd {shlex.quote(os.getcwd())} && "
        say(f"reaching {len(self.slots)} hosts")
        # Every host leaves a file in log.dir before any host looks there.
        leave = {
            host: f"{go} mkdir -p {here} && : > {here}/{shlex.quote(host)}.here; true" for host in self.slots
        }
        found: dict[str, dict[str, Any]] = {}
        try:
            first = self._all(leave, REACH_SECONDS, say)
            found = {host: {"unreached": said} for host, (status, _, said) in first.items() if status}
            there = [host for host in self.slots if host not in found]
            say(f"{len(there)} answer; each looks at itself")
            ask = f"{self.exports}{go}PYTHONPATH={shlex.quote(str(ROOT))}:$PYTHONPATH "
            ask += (
                f"{shlex.quote(sys.executable)} -m megacore.tools.preflight.facts "
                f"{shlex.quote(asked(question))}"
            )
            asking = {host: f"{ask} {shlex.quote(host)} {self.slots[host]}" for host in there}
            for host, (status, lines, said) in self._all(asking, FACTS_SECONDS, say).items():
                about = facts_in(lines, said if status else "its answer cannot be read")
                found[host] = readable(about, self.slots[host])
        finally:
            self._all(
                {
                    host: f"{go}rm -rf {here}"
                    for host in self.slots
                    if host not in found or "devices" in found[host]
                },
                REACH_SECONDS,
                say,
            )
        return {host: found[host] for host in self.slots}

    def _all(
        self, commands: Mapping[str, str], seconds: float, say: Say
    ) -> dict[str, tuple[int, list[tuple[float, str]], str]]:
        count, found = Count(len(commands), "hosts have answered or are too late", say), {}
        with ThreadPoolExecutor(AT_ONCE) as pool:
            for host, answer in zip(
                commands,
                pool.map(lambda host: self._run(host, commands[host], seconds), commands),
                strict=True,
            ):
                found[host] = answer
                count(len(found))
        return found

    def _run(self, host: str, command: str, seconds: float) -> tuple[int, list[tuple[float, str]], str]:
        """The status, the lines of output with the time at which each came, and what else was said."""
        words = [word.replace("{host}", host) for word in self.shell]
        pipes: dict[str, Any] = {
            "stdin": subprocess.DEVNULL,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
        }
        try:
            process = subprocess.Popen(
                [*words, command], text=True, errors="replace", start_new_session=True, **pipes
            )
        except OSError as error:
            raise ConfigError("--ssh", f"{words[0]} cannot be started: {error.strerror}", SSH) from None
        assert process.stdout is not None and process.stderr is not None
        late = threading.Event()

        def end() -> None:
            late.set()
            process.kill()

        timer = threading.Timer(seconds, end)
        timer.start()
        with ThreadPoolExecutor(1) as beside:
            errors = beside.submit(process.stderr.read)
            lines = [(time.time(), line) for line in process.stdout]
            status = process.wait()
            timer.cancel()
            said = f"no answer within {seconds:.0f} s" if late.is_set() else last_line(errors.result())
        return status, lines, said


def facts_in(lines: Iterable[tuple[float, str]], said: str) -> dict[str, Any]:
    """The facts in a host's answer, or why there are none.

    The first line has the host's time, and came without delay.
    """
    ahead, about = None, None
    for came, line in lines:
        try:
            answer = json.loads(line)
        except (ValueError, RecursionError):
            continue  # what a login shell says
        if isinstance(answer, dict) and isinstance(clock := answer.get("clock"), float | int):
            ahead = clock - came
        elif isinstance(answer, dict) and "devices" in answer:
            about = answer
    if ahead is None or about is None:
        return {"unreached": f"answers, but cannot be looked at: {said}"}
    return about | {"ahead": ahead}
