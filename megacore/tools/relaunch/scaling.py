"""When a healthy run is started again on more or fewer ranks, and on how many: what a user states,
and commands of the user's own.
"""

import argparse
import math
import os
import re
import shlex
import signal
import subprocess
from contextlib import suppress
from dataclasses import dataclass

from megacore.errors import ConfigError
from megacore.tools.cli import Parser

COMMAND_SECONDS = 30.0  # that a command of the user's own may take


@dataclass(frozen=True)
class Rules:
    """What a user states about the size of a run."""

    least: int = 0  # ranks below which the run waits; 0: it never waits
    most: int = 1 << 20
    poll: float = 0.0  # seconds between checks of the machines
    pause: float = 0.0  # seconds after a start in which a run is not stopped to use other machines
    command: tuple[str, ...] = ()  # prints how many ranks there shall be

    def ranks(self, room: int, answer: int | None = None) -> int:
        """How many ranks may be used where there is room for `room`, and the user's command has
        given this answer; 0: too few.
        """
        wanted = self.most if answer is None else min(self.most, max(self.least, answer))
        return min(room, wanted) if room >= self.least else 0

    def asked(self, ranks: int, room: int, folder: str) -> int | None:
        """What the user's command says; None without one.

        Raises `ConfigError` if it fails, or prints no number.
        """
        if not self.command:
            return None
        variables = {"MEGACORE_RANKS": str(ranks), "MEGACORE_ROOM": str(room), "MEGACORE_LOG_DIR": folder}
        said = output("--ranks-command", self.command, variables).strip()
        if not re.fullmatch(r"[1-9][0-9]{0,8}", said, re.ASCII):
            raise ConfigError(
                "--ranks-command",
                f"`{shlex.join(self.command)}` printed `{said:.100}`",
                "a number of ranks, 1 or more",
            )
        return int(said)


def change(used: dict[str, int], there: dict[str, int], then: dict[str, int], due: bool) -> str:
    """Why a run shall be started again; empty if it shall not.

    `used`: slots by host at its last start. `there`: those that hosts have now. `then`: those that it would
    be given now. `due`: whether it may be stopped to use more. Machines that leave are left at once: to wait
    would cost the steps since the last checkpoint.
    """
    left = [host for host, slots in used.items() if there.get(host, 0) < slots]
    before, after = sum(used.values()), sum(then.values())
    if not after or (not left and (before == after or not due)):
        return ""
    gone = [host for host in left if host not in there]
    words = [f"{', '.join(gone)} {'leaves' if len(gone) == 1 else 'leave'}"] if gone else []
    joined = [host for host in then if host not in used]
    words += [f"{', '.join(joined)} {'joins' if len(joined) == 1 else 'join'}"] if joined else []
    other = [
        host
        for host, slots in used.items()
        if there.get(host, slots) < slots or (not joined and then.get(host, 0) > slots)
    ]
    words += [f"{host} has {there[host]} slots" for host in other]
    return f"{'; '.join(words) or 'another size is wanted'}: {before} ranks become {after}"


def output(option: str, words: tuple[str, ...], variables: dict[str, str]) -> str:
    """What a command prints.

    Raises `ConfigError` if it cannot be started, fails, or takes too long; then all that it started is ended.
    """
    name = f"`{shlex.join(words)}`"
    pipe = subprocess.PIPE
    try:
        child = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=pipe,
            stderr=pipe,
            env=os.environ | variables,
            start_new_session=True,
        )
    except OSError as error:
        raise ConfigError(option, f"{name} cannot be started: {error.strerror}", "a command") from None
    try:
        out, err = child.communicate(timeout=COMMAND_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):  # somebody has left the group, and holds the pipe
            child.communicate(timeout=1.0)
        raise ConfigError(
            option, f"{name} has not ended within {COMMAND_SECONDS:.0f} s", "a command that does"
        ) from None
    if child.returncode:
        last = (err.decode(errors="replace").strip().splitlines() or [""])[-1]
        raise ConfigError(
            option, f"{name} ended with status {child.returncode}{': ' * bool(last)}{last:.200}", "status 0"
        )
    try:
        return out.decode()
    except UnicodeDecodeError:
        raise ConfigError(option, f"{name} printed what is not UTF-8 text", "text") from None


def words_of(option: str, command: str, right: str) -> tuple[str, ...]:
    """The words of a command, as a shell would divide it. Raises `ConfigError` if there are none."""
    try:
        words = tuple(shlex.split(command))
        if not words:
            raise ValueError("it is empty")
    except ValueError as error:
        raise ConfigError(option, f"{command} is no command: {str(error).lower()}", right) from None
    return words


def add_options(parser: Parser) -> None:
    """Add the options for the size of a run, which supervise.py and ray_train.py share."""
    parser.add_argument(
        "--ranks-command",
        metavar="COMMAND",
        help="command that prints the number of ranks to use; it runs at each start and poll",
    )
    parser.add_argument(
        "--poll",
        type=float,
        default=10.0,
        metavar="SECONDS",
        help="time between checks for machines that join or leave, in seconds; inf: never",
    )
    parser.add_argument(
        "--resize-pause",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="time after a start before the run may be stopped to grow, in seconds",
    )
    parser.add_alias("--look", "--poll")


def rules_of(args: argparse.Namespace, size: tuple[int, int] | None) -> Rules:
    """The rules that the options state. `size`: the least and the most ranks."""
    for option, bad, right in (
        ("poll", not args.poll > 0, "seconds, above 0"),
        ("resize-pause", not 0 <= args.resize_pause < math.inf, "seconds, 0 or more"),
    ):
        if bad:
            raise ConfigError(
                f"--{option}", f"{getattr(args, option.replace('-', '_'))} is not usable", right
            )
    command = (
        ()
        if args.ranks_command is None
        else words_of("--ranks-command", args.ranks_command, "a command that prints a number")
    )
    least, most = size or (Rules.least, Rules.most)
    return Rules(least, most, args.poll, args.resize_pause, command)


def size_of(option: str, text: str) -> tuple[int, int]:
    """The least and the most ranks. Raises `ConfigError` for what is neither N nor MIN:MAX."""
    found = re.fullmatch(r"([1-9][0-9]{0,5})(?::([1-9][0-9]{0,5}))?", text, re.ASCII)
    least, most = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
    if least > most:
        raise ConfigError(
            option, f"{text} is not a number of ranks", "a number such as 8, or least:most such as 8:16"
        )
    return least, most
