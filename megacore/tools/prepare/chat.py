"""Conversations as training text: a Jinja chat template writes them out, and the tokens of the
assistant's answers are learned.

A template that marks answers with ``{% generation %}``, as transformers has it, says itself what is learned.
With any other template an answer is what the text of the conversation up to it gains: from the text before
it, which ends with the words that ask for an answer, to the text with it, its end-of-turn token included.

Templates run in the sandbox of `tools.text.sandbox`, and there in Jinja's, which lets them reach nothing but
what they are given.
"""

import functools
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass
from datetime import date
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from megacore.errors import ConfigError, DataError
from megacore.files import read_text
from megacore.tools.prepare.sources import why_not_json
from megacore.tools.text.sandbox import Answer, Failure, call, one_line
from megacore.tools.text.sandboxed import opened
from megacore.tools.text.tokenizer import Tokenizer

ANSWERS = "assistant"
ROLES = ("system", "developer", "user", ANSWERS, "tool")
# around an answer in what a template writes: code points that no text has (Unicode, noncharacters)
BEGIN, END = "\ufdd0", "\ufdd1"
MARKING = re.compile(r"\{%[-+]?\s*generation\b")
LINE = (
    'one conversation a line, such as {"messages": [{"role": "user", "content": "…"}, {"role": '
    '"assistant", "content": "…"}]}'
)
MARKED = "a template with {% generation %} … {% endgeneration %} around its answers"
TEMPLATE = "a file with a Jinja template that goes through `messages`"

Span = tuple[int, int]
# a conversation's tokens, which are learned (bool), both [tokens], and its text's bytes
Encoded = tuple[np.ndarray, np.ndarray, int]


class WrongConversation(ValueError):
    """A conversation that cannot be learned from; `args`: what is wrong, what would be right."""


@dataclass(frozen=True)
class Chat:
    """How conversations are written: the template, where it comes from, and the
    day it is told, as 2026-01-31.
    """

    template: str
    path: str
    today: str


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


def chat_of(tokenizer: str, template: str | None) -> Chat:
    """The template in the file `template`, or the model's own, beside its tokenizer.

    Raises:
        ConfigError, DataError: there is none, or it cannot be read as one.
    """
    text, path = (_read(Path(template)), template) if template is not None else _beside(Path(tokenizer))
    chat = Chat(text, path, str(date.today()))
    try:
        call(_tried, *astuple(chat))
    except Failure as error:
        raise DataError(path, f"is no template: it {error}", TEMPLATE) from None
    return chat


def encode(chat: Chat, tokenizer: Tokenizer, lines: list[str]) -> Iterator[Encoded]:
    """The tokens of conversations, each a line of JSON.

    The text is cut where an answer begins or ends, and its parts are encoded on their own. So a token is of
    an answer or it is not, and an answer's tokens are those that a model finds when it is given the prompt
    before them. As in transformers, words that spell a special token are that token.

    Raises:
        WrongConversation: the next line is none, has no answer, or the template fails, or takes too much.
    """
    try:
        yield from _asked(chat, tokenizer, lines)
    except Failure as error:
        if len(lines) == 1:
            wrong = f"makes {chat.path}, or the tokenizer, fail: it {error}"
            raise WrongConversation(wrong, "messages that the template takes") from None
        for line in lines:  # one of them did; each may take as much as all together
            yield from encode(chat, tokenizer, [line])


def _asked(chat: Chat, tokenizer: Tokenizer, lines: list[str]) -> Iterator[Encoded]:
    """The sandbox's answer. Raises `Failure` before the first, or `WrongConversation` in the place of one."""
    (sizes, wrong), body = call(
        _encoded, *astuple(chat), tokenizer.name, tokenizer.serial, body="\n".join(lines).encode("utf-8")
    )
    at = 0
    for count, size in sizes:
        yield (
            np.frombuffer(body, "<i4", count, at),
            np.frombuffer(body, np.bool_, count, at + 4 * count),
            size,
        )
        at += 5 * count
    if wrong:
        raise WrongConversation(*wrong)


# What follows runs in the sandbox.


def _tried(template: str, path: str, today: str) -> Answer:
    try:
        _compiled(Chat(template, path, today))
    except TemplateError as error:
        raise DataError(path, f"is no template: {one_line(error)}", TEMPLATE) from None
    return None, b""


def _encoded(template: str, path: str, today: str, name: str, serial: int, lines: bytes) -> Answer:
    chat, tokenizer, sizes, parts = Chat(template, path, today), opened(name, serial), [], []
    try:
        for line in lines.split(b"\n"):
            try:
                record = json.loads(line.decode("utf-8"))
            except (ValueError, RecursionError) as error:
                raise WrongConversation(why_not_json(error), LINE) from None
            tokens, learned, size = _tokens(chat, tokenizer, record)
            sizes.append((len(tokens), size))
            parts += [tokens.astype("<i4").tobytes(), learned.tobytes()]
    except WrongConversation as error:
        return [sizes, error.args], b"".join(parts)
    return [sizes, None], b"".join(parts)


def _tokens(chat: Chat, tokenizer: Tokenizer, record: Any) -> Encoded:
    """The tokens of a conversation. Raises `WrongConversation`."""
    messages = _checked(record)
    render = functools.partial(_render, chat, tokenizer, record)
    text, spans = (
        _marked_spans(render(messages))
        if MARKING.search(chat.template)
        else _spans_by_prefix(render, messages)
    )
    try:
        size = len(text.encode("utf-8"))
    except UnicodeEncodeError:
        raise WrongConversation("holds half a surrogate pair, which is no text", LINE) from None
    if not any(start < stop for start, stop in spans):
        raise WrongConversation(f"{chat.path} writes none of its answers", MARKED)
    parts = [
        (tokenizer.encode_chat(text[start:stop]), learned) for start, stop, learned in _cut(spans, len(text))
    ]
    learned = np.concatenate([np.full(len(tokens), learned) for tokens, learned in parts])
    if not learned.any():
        raise WrongConversation("has answers without a token", LINE)
    return np.concatenate([tokens for tokens, _ in parts]), learned, size


def _checked(record: Any) -> list[dict[str, Any]]:
    """The messages of a conversation, each with a known role, and answers that say something."""
    messages = record.get("messages") if isinstance(record, dict) else None
    if not isinstance(messages, list) or not messages:
        raise WrongConversation("has no list of messages", LINE)
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict) or not isinstance(role := message.get("role"), str):
            raise WrongConversation(f"has no role in message {number}", LINE)
        if role not in ROLES:
            raise WrongConversation(
                f"has the unknown role {role!r:.40} in message {number}", f"one of {', '.join(ROLES)}"
            )
        content, calls = message.get("content"), role == ANSWERS and message.get("tool_calls")
        if not isinstance(content, str) and not (content is None and calls):
            raise WrongConversation(f"has no text as the content of message {number}", LINE)
        if role == ANSWERS and not calls and not str(content).strip():
            raise WrongConversation(
                f"has an empty answer, message {number}",
                "an answer of at least one word, or no such conversation",
            )
        if any(mark in str(content) for mark in (BEGIN, END)):
            raise WrongConversation(
                f"holds U+FDD0 or U+FDD1 in message {number}", "text; these two stand for no character"
            )
    if not any(message["role"] == ANSWERS for message in messages):
        raise WrongConversation(f"has no answer: no message is of the role {ANSWERS}", LINE)
    return messages


def _render(
    chat: Chat,
    tokenizer: Tokenizer,
    record: dict[str, Any],
    messages: list[dict[str, Any]],
    ask: bool = False,
) -> str:
    """What the template writes for some messages; with `ask`, also the words that ask for an answer."""
    given: dict[str, Any] = {"tools": record.get("tools"), "documents": record.get("documents")}
    try:
        return _compiled(chat).render(
            messages=messages, add_generation_prompt=ask, **given, **tokenizer.chat_tokens
        )
    except MemoryError:
        raise
    except Exception as error:  # a template raises whatever its expressions lead to
        raise WrongConversation(
            f"makes {chat.path} fail: {one_line(error)}", "messages that the template takes"
        ) from None


def _marked_spans(marked: str) -> tuple[str, list[Span]]:
    """The text without marks, and the spans between them."""
    text, spans, begun = "", list[Span](), -1
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


def _spans_by_prefix(render: Callable[..., str], messages: list[dict[str, Any]]) -> tuple[str, list[Span]]:
    """The text, and what each answer adds to the text before it."""
    text, spans = render(messages), list[Span]()
    for i, message in enumerate(messages):
        if message["role"] == ANSWERS:
            before, behind = render(messages[:i], ask=True), render(messages[: i + 1])
            if (
                not behind.startswith(before)
                or not text.startswith(behind)
                or (spans and len(before) < spans[-1][1])
            ):
                wrong = (
                    f"is written otherwise up to message {i + 1} than as a whole, so the answer "
                    "cannot be found"
                )
                raise WrongConversation(wrong, MARKED)
            spans.append((len(before), len(behind)))
    return text, spans


def _cut(spans: list[Span], length: int) -> Iterator[tuple[int, int, bool]]:
    """The text in parts, and whether each is an answer; none is empty."""
    edges = [0, *(edge for span in spans for edge in span), length]
    for i, (start, stop) in enumerate(pairwise(edges)):
        if start < stop:
            yield start, stop, i % 2 == 1


@functools.lru_cache(maxsize=1)
def _compiled(chat: Chat) -> Any:
    """The template, with what transformers gives templates, in an environment
    that lets them reach nothing else.
    """

    def fail(message: str) -> NoReturn:
        raise TemplateError(message)

    def dumped(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
        # jinja2's own writes "<" for HTML
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = dumped
    environment.globals |= {"raise_exception": fail, "strftime_now": date.fromisoformat(chat.today).strftime}
    return environment.from_string(chat.template)


def _beside(tokenizer: Path) -> tuple[str, str]:
    """The model's own template and the file that it is in: ``chat_template.jinja``, or an
    entry of ``tokenizer_config.json``.
    """
    if (file := tokenizer.with_name("chat_template.jinja")).is_file():
        return _read(file), str(file)
    settings = tokenizer.with_name("tokenizer_config.json")
    if settings.is_file():
        try:
            found = json.loads(_read(settings))
        except (ValueError, RecursionError) as error:
            raise DataError(
                str(settings), f"is no JSON: {error}", "a tokenizer_config.json as transformers writes it"
            ) from None
        template = found.get("chat_template") if isinstance(found, dict) else None
        if isinstance(template, list):  # several, by name
            named = {
                entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)
            }
            template = named.get("default")
        if isinstance(template, str):
            return template, str(settings)
    raise ConfigError("--template", f"there is no chat template beside {tokenizer}", TEMPLATE)


def _read(path: Path) -> str:
    try:
        return read_text(path)
    except OSError as error:
        raise DataError(str(path), f"cannot be read: {error.strerror}", TEMPLATE) from None
    except UnicodeDecodeError:
        raise DataError(str(path), "is not UTF-8", TEMPLATE) from None
