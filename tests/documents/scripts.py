"""Parses a command's words by the script's own parser, without running the script."""

import argparse
import contextlib
import io
import os
import runpy
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import megacore.tools.cli as cli
from megacore.distributed.rank_info import RankInfo
from megacore.errors import UserError
from tests.documents.pages import ROOT

METHODS = ("parse_args", "parse_known_args", "parse_intermixed_args", "parse_known_intermixed_args")
LAUNCHER_OPTION = "--local_rank"


class WrongWordsError(Exception):
    """Words that the script's parser rejects."""


class ParsedError(Exception):
    """Ends a script as soon as it has parsed its words."""

    def __init__(self, parser: argparse.ArgumentParser, values: Any) -> None:
        super().__init__()
        self.parser = parser
        namespace, rest = values if isinstance(values, tuple) else (values, [])
        self.values: dict[str, Any] = dict(vars(namespace))
        self.rest: list[str] = rest


@dataclass(frozen=True)
class Script:
    """A file that has a parser, and the words that precede its arguments."""

    path: Path
    module: str | None = None

    @property
    def name(self) -> str:
        """How a user types it: launch/plan.py, or python -m benchmarks.speed."""
        return str(self.path.relative_to(ROOT)) if self.module is None else f"python -m {self.module}"

    @property
    def has_parser(self) -> bool:
        text = self.path.read_text(encoding="utf-8")
        return "Parser(" in text or "parse(argv)" in text


def script_at(word: str) -> Script | None:
    """The script of this path, or None if the checkout has none."""
    path = ROOT / word
    return Script(path) if path.is_file() else None


def script_of_module(name: str) -> Script | None:
    """The script that `python -m NAME` runs, or None if the project has none."""
    try:
        spec = find_spec(f"{name}.__main__") if is_package(name) else find_spec(name)
    except ModuleNotFoundError:
        return None
    if spec is None or spec.origin is None:
        return None
    return Script(Path(spec.origin), name)


def is_package(name: str) -> bool:
    spec = find_spec(name)
    return spec is not None and spec.submodule_search_locations is not None


def script_of_command(name: str) -> Script | None:
    """The script that `megacore NAME` runs."""
    return script_at(f"launch/{name}.py")


def parse(script: Script, words: list[str], *, fragment: bool = False) -> ParsedError:
    """Return what the script's parser makes of `words`. Raises `WrongWordsError` with the parser's message.

    A `fragment` may lack what the script requires: it shows some options of a command.
    """
    with entered(script, words):
        try:
            with stopping_after_parsing(fragment):
                run(script)
        except ParsedError as parsed:
            return parsed
        except UserError as error:
            raise WrongWordsError(str(error)) from error
        except SystemExit as error:
            raise WrongWordsError(f"ends with status {error.code} before it has parsed its words") from error
        except Exception as error:
            raise WrongWordsError(f"fails before it has parsed its words: {error!r}") from error
    raise WrongWordsError("never parses its words")


def run(script: Script) -> None:
    if script.module is None:
        runpy.run_path(str(script.path), run_name="__main__")
    else:
        runpy.run_module(script.module, run_name="__main__")


@contextlib.contextmanager
def entered(script: Script, words: list[str]) -> Iterator[None]:
    """Make this process look as if it had started the script, in an empty folder, and undo all of it."""
    argv, path, environment, folder = sys.argv, list(sys.path), dict(os.environ), os.getcwd()
    output = io.StringIO()
    try:
        with (
            tempfile.TemporaryDirectory() as empty,
            contextlib.redirect_stderr(output),
            contextlib.redirect_stdout(output),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            sys.argv = [str(script.path), *words]
            os.chdir(empty)
            try:
                yield
            finally:
                os.chdir(folder)
    finally:
        sys.argv = argv
        sys.path[:] = path
        os.environ.clear()
        os.environ.update(environment)


@contextlib.contextmanager
def stopping_after_parsing(fragment: bool) -> Iterator[None]:
    """Let the outermost parse of any parser raise `ParsedError`, and errors reach the caller."""
    kept = [(cls, name, vars(cls)[name]) for cls in parsers() for name in METHODS if name in vars(cls)]
    depth = 0

    def stop_after(method: Callable[..., Any]) -> Callable[..., Any]:
        def parse_and_stop(parser: argparse.ArgumentParser, *args: Any, **keywords: Any) -> Any:
            nonlocal depth
            if fragment and depth == 0:
                require_nothing(parser)
            depth += 1
            try:
                values = method(parser, *args, **keywords)
            finally:
                depth -= 1
            if depth == 0:
                raise ParsedError(parser, values)
            return values

        return parse_and_stop

    entries = (cli.exit_with, cli.exit_rank_with)
    for cls, name, method in kept:
        setattr(cls, name, stop_after(method))
    vars(cli)["exit_with"] = lambda script: script(sys.argv[1:])
    vars(cli)["exit_rank_with"] = lambda script: script(sys.argv[1:], RankInfo())
    try:
        yield
    finally:
        for cls, name, method in kept:
            setattr(cls, name, method)
        cli.exit_with, cli.exit_rank_with = entries


@cache
def parsers() -> tuple[type[argparse.ArgumentParser], ...]:
    return (argparse.ArgumentParser, cli.Parser)


def every_parser(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """A parser and those of its subcommands."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in {id(inner): inner for inner in action.choices.values()}.values():
                yield from every_parser(inner)


def require_nothing(parser: argparse.ArgumentParser) -> None:
    for each in every_parser(parser):
        for action in each._actions:
            action.required = False
        for group in each._mutually_exclusive_groups:
            group.required = False


def hidden_options(parsed: ParsedError, words: list[str]) -> list[str]:
    """The options among `words` that the script accepts but does not show in its help."""
    shown, known = {LAUNCHER_OPTION}, set[str]()
    for parser in every_parser(parsed.parser):
        known.update(parser._option_string_actions)
        for action in parser._actions:
            if action.help != argparse.SUPPRESS:
                shown.update(action.option_strings)
    typed = [word.partition("=")[0] for word in words]
    return [word for word in typed if word in known and word not in shown]
