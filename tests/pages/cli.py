"""Generate docs/cli.md, the help texts of all scripts."""

import contextlib
import importlib.util
import io
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from megacore.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
WIDTH = "100"  # columns of a help text
# What decides how a help text looks: its width, and no colours (argparse of Python 3.14 has them).
TERMINAL = {"COLUMNS": WIDTH, "NO_COLOR": "1", "PYTHON_COLORS": "0", "TERM": "dumb"}
SHELL_SCRIPTS = ("launch/quickstart.sh",)
# Python 3.12 and older repeat the metavar after each of several option strings.
REPEATED_METAVAR = re.compile(r"^( +-\S+) ([A-Z][\w.]*)((?:, --\S+ \2)+)", re.MULTILINE)

HEAD = """# Command-line reference

Every script prints its help with `-h`, also without a GPU and before PyTorch is loaded.
This page has all help texts.

| script | purpose |
|---|---|
"""


@dataclass(frozen=True)
class Help:
    """The help text of a command."""

    command: str  # such as `launch/checkpoint.py verify`
    purpose: str
    text: str


def page() -> str:
    """Return the text of docs/cli.md."""
    helps = all_helps()
    rows = [f"| [`{entry.command}`](#{anchor(entry.command)}) | {entry.purpose} |" for entry in helps]
    sections = [f"\n## `{entry.command}`\n\n```text\n{entry.text.rstrip()}\n```\n" for entry in helps]
    return HEAD + "\n".join(rows) + "\n" + "".join(sections)


def anchor(heading: str) -> str:
    """Return the anchor of a heading, as GitHub derives it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def all_helps() -> list[Help]:
    """Return the help texts of all scripts and subcommands, in the order of the page."""
    helps = []
    for path in sorted(ROOT.glob("launch/**/*.py")):
        script = path.relative_to(ROOT).as_posix()
        module = load_script(path)
        helps.append(help_of(module, script))
        helps += [help_of(module, script, name) for name in subcommands(module)]
    for script in SHELL_SCRIPTS:
        output = subprocess.run(["bash", ROOT / script, "-h"], capture_output=True, text=True, check=True)
        helps.append(Help(script, shell_purpose(output.stdout), output.stdout))
    return helps


def load_script(path: Path) -> ModuleType:
    """Import a script, without running it."""
    spec = importlib.util.spec_from_file_location(f"help_of_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for the module of their types
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[spec.name]
    return module


def help_of(module: ModuleType, script: str, *subcommand: str) -> Help:
    """Return the help text that a script prints on any terminal."""
    stdout = io.StringIO()
    with as_command(script), contextlib.redirect_stdout(stdout), contextlib.suppress(SystemExit):
        module.parse([*subcommand, "-h"])
    text = REPEATED_METAVAR.sub(without_repeats, stdout.getvalue())
    command = " ".join([script, *subcommand])
    return Help(command, purpose(text, command), text)


@contextlib.contextmanager
def as_command(script: str) -> Iterator[None]:
    """Make argparse format as for `python SCRIPT` on a terminal of 100 columns."""
    environment, argv = dict(os.environ), sys.argv
    os.environ.update(TERMINAL)
    os.environ.pop("FORCE_COLOR", None)
    sys.argv = [script]
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(environment)
        sys.argv = argv


def without_repeats(match: re.Match[str]) -> str:
    """Return the option strings of a help line with the metavar after the last one only."""
    first, metavar, others = match.groups()
    return f"{first}{others.replace(f' {metavar}', '')} {metavar}"


def subcommands(module: ModuleType) -> list[str]:
    """Return the names of a script's subcommands; empty if it has none."""
    try:
        module.parse(["no-such-command"])
    except (ConfigError, SystemExit) as error:
        found = re.search(r"invalid choice: 'no-such-command' \((?:choose from )?([^)]*)\)", str(error))
        return re.findall(r"[\w-]+", found[1]) if found else []
    return []


def purpose(text: str, command: str) -> str:
    """Return the first sentence of a help text that is neither its usage nor its example."""
    blocks = [block for block in text.split("\n\n") if not re.match(r"(usage|example)", block)]
    if not blocks:
        raise ConfigError(command, "its help does not say what it is for", "one sentence of purpose")
    sentence = " ".join(blocks[0].split()).split(". ")[0]
    return sentence.rstrip(".").replace("|", "\\|")


def shell_purpose(text: str) -> str:
    """Return the first sentence of a shell script's help after its example."""
    lines = [line for line in text.splitlines() if not re.match(r"(usage|example)", line)]
    return " ".join(" ".join(lines).split()).split(". ")[0].rstrip(".")
