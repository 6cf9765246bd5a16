"""The `megacore` command: `megacore plan …` is launch/plan.py, wherever megacore is installed."""

import megacore.tools.interrupt  # noqa: F401  (first: Ctrl-C during the other imports prints no traceback)

# isort: split
import ast
import difflib
import re
import runpy
import sys
import textwrap
from pathlib import Path

from megacore.errors import ConfigError
from megacore.files import LAUNCH
from megacore.tools import cli

USAGE = "usage: megacore COMMAND ..."
NOTES = """`megacore COMMAND -h` explains a command. `megacore plan` is launch/plan.py of a checkout.
Launchers start `python -m megacore`: torchrun -m megacore pretrain, deepspeed --module megacore pretrain."""


def main() -> None:
    """Run a command with the process's arguments, and end the process with its exit status."""
    words = command_first(sys.argv[1:])
    script = scripts().get(words[0]) if words else None
    if script is not None:
        cli.started_command = f"megacore {words[0]}"
        sys.argv = [str(script), *words[1:]]
        runpy.run_path(str(script), run_name="__main__")
        return
    cli.exit_with(lambda _: show_commands(words))


def command_first(words: list[str]) -> list[str]:
    """Move the --local_rank of the deepspeed launcher, which it adds before all words, to the end."""
    for index, word in enumerate(words):
        if not word.startswith(("--local_rank=", "--local-rank=")):
            return [*words[index:], *words[:index]]
    return words


def scripts() -> dict[str, Path]:
    """The scripts by the names of their commands: those of a subfolder are such as kubernetes/render."""
    paths = sorted(LAUNCH.glob("*.py")) + sorted(LAUNCH.glob("*/*.py"))
    return {str(path.relative_to(LAUNCH).with_suffix("")): path for path in paths}


def show_commands(words: list[str]) -> int:
    """Print all commands. Raises `ConfigError` for words that are not a request for help."""
    commands = scripts()
    if words and words[0] not in ("-h", "--help"):
        near = difflib.get_close_matches(words[0], commands, n=1)
        right = f"did you mean {near[0]}?" if near else "megacore -h lists the commands"
        raise ConfigError("COMMAND", f"megacore has no command {words[0]}", right)
    width = max(map(len, commands))
    print(f"{USAGE}\n\nPlan, prepare, train, prove and inspect GPTs.\n\ncommands:")
    for name, path in commands.items():
        print(textwrap.fill(f"  {name:{width}}  {purpose(path)}", 100, subsequent_indent=" " * (width + 4)))
    print(f"\n{NOTES}")
    return 0


def purpose(path: Path) -> str:
    """The first sentence of a script's docstring."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    first = " ".join(text.partition("\n\n")[0].split())
    return re.split(r"(?<=[.?]) ", first)[0]


if __name__ == "__main__":
    main()
