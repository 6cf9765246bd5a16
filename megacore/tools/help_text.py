"""The text of `-h`, written from a parser's actions.

argparse's own formatter differs between versions of Python, and the reference of all scripts is generated
from these texts, so they must be the same everywhere.
"""

import argparse
import math
import re
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

COLUMN = 24  # where the meaning of an option begins
WIDEST = 100  # columns; a longer line is hard to read, and documents show the text
SHORT_CHOICES = 40  # characters of choices that the option itself lists
WORD = r"(?:'[^']*'|\"[^\"]*\"|\S)+"  # of a command: text between quotes is kept together
PART = re.compile(rf"--[\w-]+ (?!-){WORD}|{WORD}")  # a word, or an option with its value


def usage(parser: argparse.ArgumentParser, width: int) -> str:
    """Return the usage line, wrapped: required and optional arguments in the order of the help."""
    start = f"usage: {parser.prog} "
    lines, line = [], start
    for number, part in enumerate(usage_parts(parser)):
        if number and len(line) + len(part) > width:
            lines.append(line.rstrip())
            line = " " * min(len(start), COLUMN)
        line += f"{part} "
    return "\n".join([*lines, line.rstrip()])


def usage_parts(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Yield each option and argument as the usage line shows it; options of which one is given, together."""
    groups = {
        id(action): group for group in parser._mutually_exclusive_groups for action in group._group_actions
    }
    for action in shown_actions(parser):
        group = groups.get(id(action))
        if group is not None:
            if action is group._group_actions[0]:
                choice = " | ".join(invocation(member) for member in group._group_actions)
                yield f"({choice})" if group.required else f"[{choice}]"
        elif action.option_strings:
            yield invocation(action) if action.required else f"[{invocation(action)}]"
        else:
            yield arguments(action)


def shown_actions(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """Return the actions that the help shows: options first, then the arguments without a flag."""
    actions = [
        action
        for action in parser._actions
        if action.help != argparse.SUPPRESS and not isinstance(action, argparse._HelpAction)
    ]
    return sorted(actions, key=lambda action: not action.option_strings)


def invocation(action: argparse.Action) -> str:
    """Return an option with its value, or an argument, as it is typed."""
    if not action.option_strings:
        return name_of(action)
    values = arguments(action)
    return f"{action.option_strings[0]} {values}".rstrip()


def arguments(action: argparse.Action) -> str:
    """Return the values that an action takes, such as `N`, `[RUN ...]` or `FILE FILE`."""
    name = name_of(action)
    # While options and arguments may be mixed, argparse hides how many values an argument takes.
    count = getattr(action, "save_nargs", None) if action.nargs == argparse.SUPPRESS else action.nargs
    if count == 0:
        return ""
    if count == "*":
        return f"[{name} ...]"
    if count == "+":
        return f"{name} [{name} ...]"
    if count in (argparse.REMAINDER, argparse.PARSER):
        return f"{name} ..."
    return " ".join([name] * count) if isinstance(count, int) else name


def name_of(action: argparse.Action) -> str:
    """Return the metavar of an action, or its choices if they are few."""
    if action.choices is not None and not isinstance(action, argparse._SubParsersAction):
        choices = "|".join(map(str, action.choices))
        if action.metavar is None or len(choices) <= SHORT_CHOICES:
            return choices
    return str(action.metavar or action.dest.upper())


def meaning(action: argparse.Action) -> str:
    """Return what an option means, ending with its default in one form."""
    text = (action.help or "") % vars(action) if "%(" in (action.help or "") else action.help or ""
    default = default_text(action.default)
    return text if "(default: " in text or not default else f"{text} (default: {default})"


def default_text(default: Any) -> str:
    """Return a default as it is typed; empty if there is nothing to say."""
    if default is None or default is False or default is True or default == argparse.SUPPRESS:
        return ""
    if isinstance(default, float):
        return "" if math.isinf(default) else f"{default:g}"
    if isinstance(default, list | tuple):
        return " ".join(map(str, default))
    return str(default) if isinstance(default, str | int | Path) else ""


def section(title: str, rows: Iterable[tuple[str, str]], width: int) -> str:
    """Return a titled table of options and their meanings; empty without rows."""
    lines: list[str] = []
    for left, right in rows:
        texts = textwrap.wrap(right, max(width - COLUMN, 20), break_long_words=False, break_on_hyphens=False)
        first = f"  {left}"
        if len(first) > COLUMN - 2 and texts:
            lines.append(first)
            first = ""
        lines.append(f"{first:<{COLUMN}}{texts[0] if texts else ''}".rstrip())
        lines += [" " * COLUMN + text for text in texts[1:]]
    return "\n".join([f"{title}:", *lines]) if lines else ""


def command_lines(command: str, width: int) -> str:
    """Return an example, indented; a long command continues on the next line after a backslash."""
    lines, line = [], " "
    for word in PART.findall(command):
        if len(line) + len(word) + 3 > width:
            lines.append(f"{line} \\")
            line = "     "
        line += f" {word}"
    return "\n".join([*lines, line])


def commands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Return the parsers of a script's subcommands, by name."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return {}


def help_text(
    parser: argparse.ArgumentParser, examples: Iterable[str], epilogue: Iterable[str], width: int
) -> str:
    """Return the whole text: usage, purpose, arguments, options, examples, epilogue; lines of `width`."""
    width = max(40, min(width, WIDEST))
    subcommands = commands(parser)
    actions = shown_actions(parser)
    positionals = [action for action in actions if not action.option_strings]
    rows = [(name_of(action), meaning(action)) for action in positionals if not subcommands]
    options = [(invocation(action), meaning(action)) for action in actions if action.option_strings]
    purposes = [(name, purpose(parser.description)) for name, parser in subcommands.items()]
    parts = [
        usage(parser, width),
        textwrap.fill(parser.description or "", width, break_on_hyphens=False),
        section("commands", purposes, width),
        section("arguments", rows, width),
        section("options", [*options, ("-h, --help", "show this help and exit")], width),
        "\n".join(["example:", *(command_lines(example, width) for example in examples)]),
        "\n".join(
            textwrap.fill(text, width, break_long_words=False, break_on_hyphens=False).replace("\xa0", " ")
            for text in epilogue
            if text
        ),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def purpose(description: str | None) -> str:
    """Return a subcommand's purpose as a row of a table: without the capital letter and the full stop."""
    text = (description or "").rstrip(".")
    return text[:1].lower() + text[1:]
