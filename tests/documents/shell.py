"""Splits the text of a `bash` fence into commands, without running a shell."""

import re
import shlex
from dataclasses import dataclass, field

ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
SUBSTITUTION = re.compile(r"\$\([^()]*\)")
VARIABLE = re.compile(r"\$\{?([A-Za-z_]\w*)\}?")
SEPARATORS = {"|", "||", "&", "&&", ";"}
PLACEHOLDER = "…"


@dataclass
class Command:
    """A simple command: its words, and the file to which its output is redirected."""

    line: int
    words: list[str]
    written: list[str] = field(default_factory=list)


class ShellError(Exception):
    """The text of a fence that bash would not read."""

    def __init__(self, line: int, what: str) -> None:
        super().__init__(what)
        self.line = line


def commands(lines: tuple[str, ...], first: int, variables: dict[str, str]) -> list[Command]:
    """Return the commands of a fence whose content begins at line `first`.

    `variables` are those that the page has set so far; assignments are added to them. Raises `ShellError`.
    """
    result = list[Command]()
    for number, line in logical_lines(lines, first):
        text = SUBSTITUTION.sub(PLACEHOLDER, line)
        words = split(substitute(text, variables), number)
        for part in simple_commands(words):
            command = Command(number, *redirected(part))
            assign(command.words, variables)
            if command.words or command.written:
                result.append(command)
    return result


def logical_lines(lines: tuple[str, ...], first: int) -> list[tuple[int, str]]:
    """Join continued lines, quoted text over several lines, and leave out here-documents."""
    joined = list[tuple[int, str]]()
    pending, start = "", first
    end_of_document: str | None = None
    for number, line in enumerate(lines, first):
        if end_of_document is not None:
            if line.strip() == end_of_document:
                end_of_document = None
            continue
        if not pending:
            start = number
        pending += line
        if pending.endswith("\\"):
            pending = pending[:-1]
            continue
        pending, quoted = without_comment(pending)
        if quoted:
            pending += "\n"
            continue
        document = re.search(r"<<-?\s*['\"]?(\w+)['\"]?", pending)
        if document is not None:
            end_of_document = document[1]
            pending = pending.replace(document[0], "")
        joined.append((start, pending))
        pending = ""
    if pending:
        joined.append((start, pending))
    return joined


def without_comment(text: str) -> tuple[str, bool]:
    """Remove a comment from the end of a line; also return whether a quotation is still open."""
    quote, previous = "", " "
    for index, character in enumerate(text):
        if quote:
            if character == quote and (previous != "\\" or quote == "'"):
                quote = ""
        elif character == "#" and previous.isspace():
            return text[:index], False
        elif character in "'\"" and previous != "\\":
            quote = character
        previous = character
    return text, bool(quote)


def split(text: str, line: int) -> list[str]:
    lexer = shlex.shlex(text, posix=True, punctuation_chars="|&;<>")
    lexer.whitespace_split = True
    lexer.commenters = ""
    try:
        return list(lexer)
    except ValueError as error:
        raise ShellError(line, f"bash cannot read this line: {error}") from error


def simple_commands(words: list[str]) -> list[list[str]]:
    """Divide words at `|`, `&&`, `;`."""
    parts: list[list[str]] = [[]]
    for word in words:
        if word in SEPARATORS:
            parts.append([])
        else:
            parts[-1].append(word)
    return [part for part in parts if part]


def redirected(words: list[str]) -> tuple[list[str], list[str]]:
    """Separate `> FILE` from a command's words."""
    kept, written = list[str](), list[str]()
    rest = iter(words)
    for word in rest:
        if word in (">", ">>"):
            if kept and kept[-1] in ("1", "2"):
                kept.pop()
            written.append(next(rest, ""))
        elif word in ("<", ">&", "&>"):
            target = next(rest, "")
            if word == "&>":
                written.append(target)
            elif word == ">&" and kept and kept[-1] in ("1", "2"):
                kept.pop()
        else:
            kept.append(word)
    return kept, written


def assign(words: list[str], variables: dict[str, str]) -> None:
    """Remove `NAME=value` from the front of a command; keep the values that later commands see."""
    exported = bool(words) and words[0] == "export"
    if exported:
        del words[0]
    assigned = dict[str, str]()
    while words and (match := ASSIGNMENT.fullmatch(words[0])):
        assigned[match[1]] = match[2]
        del words[0]
    if exported:
        words.clear()
    if not words:
        variables |= assigned


def substitute(text: str, variables: dict[str, str]) -> str:
    """Replace the variables that the page has set; others, such as $HOME, become a placeholder."""
    return VARIABLE.sub(lambda match: variables.get(match[1], PLACEHOLDER), text)
