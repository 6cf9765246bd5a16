"""Chat templates in Jinja: where a model has its own, how it is compiled, and what of its text it marks.

They are compiled and run in the sandbox of `tools.text.sandbox`, and there in Jinja's, which lets them reach
nothing but what they are given.
"""

import functools
import json
import re
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from megacore.errors import ConfigError, DataError
from megacore.files import read_text
from megacore.tools.prepare.conversations import WrongConversation

MARKING = re.compile(r"\{%[-+]?\s*generation\b")
MARKED = "a template with {% generation %} … {% endgeneration %} around its answers"
TEMPLATE = "a file with a Jinja template that goes through `messages`"
# code points that stand for no character: around an answer in what a template writes, and in place of a text
BEGIN, END, PLACE = "\ufdd0", "\ufdd1", "\ufdd2"

Span = tuple[int, int]


class Generation(Extension):
    """The block ``{% generation %} … {% endgeneration %}``: puts `BEGIN` and `END` around what it writes."""

    tags = {"generation"}  # noqa: RUF012 (as jinja2 declares it)

    def parse(self, parser: Parser) -> nodes.Node:
        """The block's node."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller: Callable[[], str]) -> str:
        return BEGIN + caller() + END


def split_marks(marked: str) -> tuple[str, list[Span]]:
    """The text without marks, and the spans between them."""
    text = ""
    spans: list[Span] = []
    begun = -1
    for part in re.split(f"([{BEGIN}{END}])", marked):
        if (part == BEGIN and begun >= 0) or (part == END and begun < 0):
            raise WrongConversation("has answers within answers, as the template marks them", MARKED)
        if part == BEGIN:
            begun = len(text)
        elif part == END:
            spans.append((begun, len(text)))
            begun = -1
        else:
            text += part
    if begun >= 0:
        raise WrongConversation("has an answer without an end, as the template marks it", MARKED)
    return text, spans


@functools.lru_cache(maxsize=1)
def compile_template(template: str, today: str) -> Any:
    """The template, with what transformers gives templates, in an environment
    that lets them reach nothing else.
    """

    def fail(message: str) -> NoReturn:
        raise TemplateError(message)

    def refuse_none(value: Any) -> Any:
        if value is None:
            raise TemplateError("it writes a value that is null as the word None")
        return value

    def dumped(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
        # jinja2's own writes "<" for HTML
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[Generation, loopcontrols],
        finalize=refuse_none,
    )
    environment.filters["tojson"] = dumped
    environment.globals |= {"raise_exception": fail, "strftime_now": date.fromisoformat(today).strftime}
    return environment.from_string(template)


def find_template(tokenizer: Path) -> tuple[str, str]:
    """The model's own template and the file that it is in: ``chat_template.jinja``, or an
    entry of ``tokenizer_config.json``.
    """
    if (file := tokenizer.with_name("chat_template.jinja")).is_file():
        return read_template(file), str(file)
    settings = tokenizer.with_name("tokenizer_config.json")
    if settings.is_file():
        try:
            content = json.loads(read_template(settings))
        except (ValueError, RecursionError) as error:
            raise DataError(
                str(settings), f"is no JSON: {error}", "a tokenizer_config.json as transformers writes it"
            ) from None
        template = content.get("chat_template") if isinstance(content, dict) else None
        if isinstance(template, list):  # several, by name
            named = {
                entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)
            }
            template = named.get("default")
        if isinstance(template, str):
            return template, str(settings)
    raise ConfigError("--template", f"there is no chat template beside {tokenizer}", TEMPLATE)


def read_template(path: Path) -> str:
    try:
        return read_text(path)
    except OSError as error:
        raise DataError(str(path), f"cannot be read: {error.strerror}", TEMPLATE) from None
    except UnicodeDecodeError:
        raise DataError(str(path), "is not UTF-8", TEMPLATE) from None
