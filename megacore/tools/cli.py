"""Shared by all scripts: the form of their help, mistakes as one line with
status 2, and the end of a process.
"""

import argparse
import atexit
import errno
import io
import os
import re
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from types import FrameType
from typing import Any, NoReturn

from megacore.distributed.rank_info import RankInfo
from megacore.errors import ConfigError, UserError
from megacore.tools import help_text
from megacore.tools.error_report import record, say_once
from megacore.tools.hostfile import missing_hostfile
from megacore.tools.interrupt import (
    PASSED_ON_SECONDS,
    SignalThread,
    end_after_grace,
    interrupt,
    interrupted_status,
    status_after_signal,
)
from megacore.tools.launchers import place_from_environment
from megacore.tools.settings.other_words import meant_option

# a setting of the config, typed as an option of the script
SETTING = re.compile(r"--([a-z_]+\.\w+)(=.*)?", re.DOTALL)
UNHEARD = 141  # what they report for a command whose reader, such as head, has ended

# Set by megacore/__main__.py if it has started the script: its command, such as "megacore plan".
started_command: str | None = None


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are `ConfigError`s, and whose help has one form in all scripts.

    The help has a usage line, `purpose` (one sentence), arguments and options with their defaults, one or
    more `example` commands, and an epilogue of a few lines: `notes`, the exit `status`, and the `page` of the
    documents that says more. The program's name in the usage line is taken from the first example. With
    `ranks`, a launcher starts the script once for every rank.
    """

    def __init__(
        self,
        purpose: str,
        *,
        example: str | Sequence[str],
        notes: str = "",
        status: str = "0 done, 2 wrong arguments",
        page: str | None = None,
        ranks: bool = False,
        **options: Any,
    ) -> None:
        examples = [example] if isinstance(example, str) else list(example)
        script, program = script_and_program(examples[0])
        options.setdefault("prog", program)
        super().__init__(description=purpose, allow_abbrev=False, **options)
        if program.startswith("megacore "):
            examples = [with_command(text, script, program) for text in examples]
        self.examples = examples
        self.notes, self.status, self.page = notes, status, page
        if ranks:  # the deepspeed launcher adds it; the script reads it from the environment
            self.add_argument("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)

    def add_alias(self, former: str, option: str) -> None:
        """Accept `former`, an earlier name of `option` with the same meaning, without showing it."""
        self._option_string_actions[former] = self._option_string_actions[option]

    def format_help(self) -> str:
        """Return the help as wide as the terminal, up to 100 columns."""
        return self.help_text(shutil.get_terminal_size((help_text.WIDEST, 24)).columns)

    def help_text(self, width: int = help_text.WIDEST) -> str:
        """Return the help, with lines of up to `width` characters: the same on every machine."""
        status = f"Exit status: {self.status}."
        page = f"More:\xa0{self.page}" if self.page else ""  # not on two lines
        return help_text.help_text(self, self.examples, [self.notes, f"{status} {page}".rstrip()], width)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """See `ArgumentParser`, whose other ways to parse come by here.

        It reads settings in any of their forms.
        """
        words = list(settings_plain(sys.argv[1:] if args is None else args))
        if "--json" in self._option_string_actions:
            words = list(json_to_terminal(words))
        return super().parse_known_args(words, namespace)

    def print_help(self, file: Any = None) -> None:
        """Prints the help; argparse itself would not notice that it cannot."""
        print(self.format_help(), end="", file=file)

    def error(self, message: str) -> NoReturn:
        flag, colon, wrong = message.removeprefix("argument ").partition(": ")
        right = "see -h; a setting of the config is written section.key=value, such as train.steps=20"
        if message.startswith("unrecognized arguments"):
            takes_overrides = any(action.dest == "overrides" for action in self._actions)
            options = [option for action in self._actions for option in action.option_strings]
            right = meant_option(message, options, takes_overrides) or right
        raise ConfigError(
            *((flag, wrong, "see -h") if colon and flag.startswith("--") else ("arguments", message, right))
        )


def settings_plain(words: Iterable[str]) -> Iterator[str]:
    """The words of a command, with `--section.key=value` and `--section.key value` as `section.key=value`."""
    rest = iter(words)
    for word in rest:
        typed = SETTING.fullmatch(word)
        if typed is None:
            yield word
        elif typed[2]:
            yield word[2:]
        elif (value := next(rest, None)) is None:
            raise ConfigError(typed[1], "has no value", f"{typed[1]}=VALUE")
        else:
            yield f"{typed[1]}={value}"


def json_to_terminal(words: Sequence[str]) -> Iterator[str]:
    """The words of a command, in which a `--json` without a file has the file `-`, the terminal."""
    for place, word in enumerate(words):
        yield word
        if word != "--json":
            continue
        following = words[place + 1] if place + 1 < len(words) else ""
        is_option = following.startswith("-") and following != "-"
        setting = SETTING.fullmatch(f"--{following}")
        is_setting = setting is not None and setting[2] is not None
        if not following or is_option or is_setting:
            yield "-"


def script_and_program(example: str) -> tuple[str, str]:
    """Return the script in an example, and its name in the usage line.

    The name is its path, `python -m MODULE`, or `megacore NAME` if it was started by that command.
    """
    words = example.split()
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if word in ("-m", "--module"):
            return f"-m {following}", f"python -m {following}"
        if word.endswith(".py"):
            command = command_of(word)
            return word, command if started_command == command else word
    return words[0], words[0]


def command_of(script: str) -> str:
    """Return the command for a script: `megacore kubernetes/render` for launch/kubernetes/render.py."""
    return f"megacore {script.removeprefix('launch/').removesuffix('.py')}"


def next_command(example: str) -> str:
    """Return a command that starts a script, in the form in which the user has started this one.

    After `megacore prepare`, `python launch/pretrain.py …` is `megacore pretrain …`.
    """
    if started_command is None:
        return example
    script, _ = script_and_program(example)
    return with_command(example, script, command_of(script))


def with_command(example: str, script: str, command: str) -> str:
    """Return an example with `command`, such as `megacore plan`, instead of the script; under a launcher as a
    module.
    """
    module = "--module" if example.startswith("deepspeed ") else "-m"
    return example.replace(f"python {script}", command).replace(script, f"{module} {command}")


def count(text: str) -> int:
    """Return the value of an argument that is a whole number of at least 1, and below a billion because a
    larger one would take for ever.
    """
    if not (text.isascii() and text.isdigit() and len(text) < 10 and int(text)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 to 999999999")
    return int(text)


def counts(text: str) -> list[int]:
    """The type of an argument that is several of them, between commas."""
    return [count(part) for part in text.split(",")]


def add_weights(parser: Parser) -> None:
    """Add the option `--weights`, for `checkpoint_weights.choose_weights`."""
    what = (
        "average: the averaged weights, which optim.ema or a schedule-free optimizer keeps; trained: the "
        "weights of the last step (default: average, if the run kept one)"
    )
    parser.add_argument("--weights", choices=("average", "trained"), help=what)


def add_checkpoint(parser: Parser) -> None:
    """Add the option `--checkpoint`, for `checkpoint.locate`."""
    what = "folder of a run, its checkpoints folder, or one step_ folder; the newest checkpoint is read"
    parser.add_argument("--checkpoint", required=True, metavar="FOLDER", help=what)


def add_device(parser: Parser) -> None:
    """Add the option `--device`, where a script computes; `train.device` has the same values."""
    what = "device to compute on; auto: a GPU if there is one"
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help=what)


def add_tokenizer(parser: Parser) -> None:
    """Add the option `--tokenizer` of a script that reads a checkpoint."""
    what = "bytes, a sentencepiece .model or a tokenizer.json (default: the run's data.tokenizer)"
    parser.add_argument("--tokenizer", metavar="FILE", help=what)


def add_source(parser: Parser) -> None:
    """Add the option `--source`, for `checkpoint_weights.sections_to_run`."""
    what = "run the code of this file, if the checkpoint is of a custom model (model.source)"
    parser.add_argument("--source", metavar="FILE", help=what)


def add_config(parser: Parser, what: str = "config of the run, such as configs/gpt_tiny.json") -> None:
    """Add the option `--config`."""
    parser.add_argument("--config", required=True, metavar="FILE", help=what)


def add_overrides(
    parser: Parser, what: str = "values that replace the file's, in JSON, such as train.steps=20"
) -> None:
    """Add the overrides of a config, `section.key=value`."""
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help=what)


def add_json(parser: Parser, what: str) -> None:
    """Add the option `--json`, for `output_files.check_json` and `output_files.write_results`."""
    parser.add_argument(
        "--json", metavar="FILE", help=f"write {what} as JSON; - prints the JSON instead of the report"
    )


def exit_with(script: Callable[[list[str]], int | None]) -> NoReturn:
    """Runs a script's body with the command line's arguments, and ends the process with what it returns
    (None: 0), with 130 after Ctrl-C, or with 2 and one line on stderr for a `UserError`.
    """
    guard_streams()
    try:
        status = script(sys.argv[1:]) or 0
    except UserError as error:
        print(error, file=sys.stderr)
        status = 2
    except BaseException as error:
        status = status_after(error)
    leave(status)


def exit_rank_with(script: Callable[[list[str], RankInfo], int | None]) -> NoReturn:
    """`exit_with` for a script that a launcher starts once for every rank.

    If any ranks raise a `UserError`, one rank prints it. SIGINT and SIGTERM end the rank with status
    128 + signal, wherever it waits.
    """
    guard_streams()
    unwind_on_sigterm()
    with SignalThread(end_after_grace):
        try:
            status = rank_status(script)
        except KeyboardInterrupt as error:  # while a mistake was printed
            status = interrupted_status(error)
        leave(status)


def rank_status(script: Callable[[list[str], RankInfo], int | None]) -> int:
    """Run a rank's script; return its exit status, after its mistake or failure is printed."""
    place = RankInfo()
    try:
        place = place_from_environment()
        if (hostfile := missing_hostfile()) is not None:
            raise ConfigError(
                "--hostfile",
                f"{hostfile} does not exist",
                "a file with lines such as `localhost slots=4`, or no --hostfile",
            )
        return script(sys.argv[1:], place) or 0
    except UserError as error:
        say_once(error, place)
        return 2
    except BaseException as error:
        return status_after(error)


def status_after(error: BaseException) -> int:
    """The exit status after an exception in a script.

    Prints a traceback, unless the user caused the end.
    """
    error = original_ending(error)
    if isinstance(error, KeyboardInterrupt):
        return interrupted_status(error)
    if isinstance(error, StdoutLost):
        if error.errno == errno.EPIPE:
            return UNHEARD
        print(
            ConfigError(
                "stdout", f"cannot be written: {error.strerror}", "a terminal, a pipe or a file with room"
            ),
            file=sys.stderr,
        )
        return 2
    if isinstance(error, SystemExit):  # such as argparse's, after -h
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    report = "".join(traceback.format_exception(error))
    sys.stderr.write(report)
    record(report)
    return 1


def original_ending(error: BaseException) -> BaseException:
    """Return the exception by which a signal ends the script, if `error` has replaced it.

    An extension module that is interrupted in its import raises another error.
    """
    if not isinstance(error, ImportError | SystemError):
        return error
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, KeyboardInterrupt | SystemExit):
        cause = cause.__cause__ or cause.__context__
    return cause or error


def unwind_on_sigterm() -> None:
    """Let SIGTERM end the script as Ctrl-C does, with status 143.

    For a script whose processes or files would outlive it, because they are ended or removed in `with`
    statements.
    """
    signal.signal(signal.SIGTERM, interrupt)


def leave(status: int) -> NoReturn:
    """Ends the process with `status`.

    It joins threads, runs exit handlers and flushes, but does not shut down the interpreter.

    A thread outside Python may still drop the last reference to a tensor, as gloo's threads do after a
    collective. While the interpreter shuts down, Python ends such a thread in the middle of a destructor, and
    the process aborts with status 134.
    """
    ignore_signals()
    # This ends executors, whose threads would wait for ever, and joins all other threads.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    if sys.stdout is not None:
        try:
            sys.stdout.flush()
        except StdoutLost as error:
            status = status or status_after(error)
    if sys.stderr is not None:
        sys.stderr.flush()
    os._exit(status)


def ignore_signals() -> None:
    """Let no signal change the status of a process that is ending, except a second Ctrl-C."""
    interrupts: list[float] = []

    def count(number: int, frame: FrameType | None) -> None:
        interrupts.append(time.monotonic())
        if interrupts[-1] - interrupts[0] > PASSED_ON_SECONDS:
            os._exit(status_after_signal(number))

    signal.set_wakeup_fd(-1)  # the signal thread would end the process
    for number, handler in ((signal.SIGINT, count), (signal.SIGTERM, lambda *_: None)):
        if callable(signal.getsignal(number)):
            signal.signal(number, handler)


class StdoutLost(OSError):
    """Standard output cannot be written: its reader has ended (EPIPE), or its disk is full.

    Raised once; later output is dropped.
    """


class StandardStream(io.FileIO):
    """Standard output or error.

    After a write fails it drops all output. Standard output first raises `StdoutLost`, which differs from the
    error of any other file or pipe. If the process can continue without it, that is printed on standard error
    instead.
    """

    continues = ""  # what continues without standard output, if anything does

    def write(self, data: Any) -> int | None:  # type: ignore[override]
        """Writes bytes."""
        try:
            return super().write(data)
        except OSError as error:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            if self.fileno() == 1 and self.continues:
                print(
                    f"standard output cannot be written any more ({error.strerror}): {self.continues} "
                    "continues without it",
                    file=sys.stderr,
                )
            elif self.fileno() == 1:
                raise StdoutLost(error.errno, error.strerror) from None
            return len(data)


def guard_streams() -> None:
    """Puts a `StandardStream` under standard output and error.

    Where one was closed by whoever started this, no file that is opened later takes its number: what is said
    on standard output is lost, as on a full disk, and on standard error it is dropped.
    """
    for descriptor, stream in enumerate((sys.stdin, sys.stdout, sys.stderr)):
        if stream is None:
            with suppress(OSError):
                os.fstat(descriptor)
                continue
            found = os.open(os.devnull, os.O_WRONLY if descriptor == 2 else os.O_RDONLY)
            os.dup2(found, descriptor)
            if found != descriptor:
                os.close(found)
    sys.stdout = sys.stdout or io.TextIOWrapper(io.FileIO(1, "w", closefd=False), encoding="utf-8")
    sys.stderr = sys.stderr or io.TextIOWrapper(
        io.FileIO(2, "w", closefd=False), encoding="utf-8", write_through=True
    )
    sys.stdout, sys.stderr = guarded(sys.stdout, 1), guarded(sys.stderr, 2)


def guarded(stream: Any, descriptor: int) -> Any:
    """The same text stream over a `StandardStream`, which writes as \\x.. or \\u.... what its encoding has
    not: a file's name may be any bytes, and a terminal's encoding ASCII. A stream that is closed or not the
    process's own is returned unchanged.
    """
    try:
        if stream.fileno() != descriptor:
            return stream
    except (AttributeError, OSError):
        return stream
    stream.flush()
    raw = StandardStream(descriptor, "w", closefd=False)
    return io.TextIOWrapper(
        raw if stream.write_through else io.BufferedWriter(raw),  # type: ignore[arg-type]
        encoding=stream.encoding,
        errors="backslashreplace" if stream.errors == "strict" else stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )
