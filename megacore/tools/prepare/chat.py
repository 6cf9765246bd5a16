"""Conversations as training text: a Jinja chat template writes them out, and the tokens of the
assistant's answers are learned.

A template that marks answers with ``{% generation %}``, as transformers has it, says itself what is learned.
With any other template an answer is what the text of the conversation up to it gains: from the text before
it, which ends with the words that ask for an answer, to the text with it, its end-of-turn token included.
Keys of the data can leave out an answer or add other messages (`tools.prepare.conversations`).

Templates run in the sandbox of `tools.text.sandbox`, and there in Jinja's, which lets them reach nothing but
what they are given.
"""

import functools
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass
from datetime import date
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from megacore.errors import ConfigError, DataError
from megacore.files import read_json, read_text
from megacore.tools.prepare.conversations import (
    ASSISTANT,
    BEGIN,
    END,
    LINE,
    Conversation,
    WrongConversation,
    read_conversation,
)
from megacore.tools.prepare.sources import why_not_json
from megacore.tools.text.sandbox import Answer, Failure, call, one_line
from megacore.tools.text.sandboxed import opened
from megacore.tools.text.tokenizer import Tokenizer

MARKING = re.compile(r"\{%[-+]?\s*generation\b")
MARKED = "a template with {% generation %} … {% endgeneration %} around its answers"
TEMPLATE = "a file with a Jinja template that goes through `messages`"
PLACE = "\ufdd2"  # a code point that stands for no character, to find where a template writes a content
# texts of a message that templates may leave out, which is reported
TEXTS = ("content", "reasoning_content", "reasoning", "thinking", "name")

Span = tuple[int, int]
Render = Callable[..., str]


class EncodedChat(NamedTuple):
    """The tokens of a conversation."""

    tokens: np.ndarray  # [tokens]
    learned: np.ndarray  # bool, [tokens]
    text_bytes: int
    # how often a key was not used ("key NAME"), and a text was not written by the template ("unwritten …")
    notes: dict[str, int]


@dataclass(frozen=True)
class Chat:
    """How conversations are read and written.

    `path` is where the template comes from, `today` the day that templates are told, such as 2026-01-31, and
    `ignored` the keys of the data that the user says do not matter.
    """

    template: str
    path: str
    today: str
    ignored: tuple[str, ...] = ()


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


def chat_of(tokenizer: str, template: str | None, ignored: tuple[str, ...] = ()) -> Chat:
    """The template in the file `template`, or the model's own, beside its tokenizer.

    Raises:
        ConfigError, DataError: there is none, or it cannot be read as one.
    """
    text, path = (_read(Path(template)), template) if template is not None else _beside(Path(tokenizer))
    chat = Chat(text, path, str(date.today()), ignored)
    try:
        call(_tried, *astuple(chat))
    except Failure as error:
        raise DataError(path, f"is no template: it {error}", TEMPLATE) from None
    return chat


def encode(chat: Chat, tokenizer: Tokenizer, lines: list[str]) -> Iterator[EncodedChat]:
    """Yield the tokens of conversations, each a line of JSON.

    The text is cut where an answer begins or ends, and its parts are encoded on their own. So a token is of
    an answer or it is not, and an answer's tokens are those that a model finds when it is given the prompt
    before them. As in transformers, words that spell a special token are that token.

    Raises:
        WrongConversation: the next line is not a conversation, nothing of it is learned, or the template
            fails or takes too much.
    """
    try:
        yield from _ask_encoded(chat, tokenizer, lines)
    except Failure as error:
        if len(lines) == 1:
            wrong = f"makes {chat.path}, or the tokenizer, fail: it {error}"
            raise WrongConversation(wrong, "messages that the template takes") from None
        for line in lines:  # one of them did; each may take as much as all together
            yield from encode(chat, tokenizer, [line])


class RenderedChat(NamedTuple):
    """The text of a conversation."""

    parts: list[tuple[str, bool]]  # and whether each part is learned
    notes: dict[str, int]  # as in `EncodedChat`


def rendered_chat(chat: Chat, tokenizer: Tokenizer, line: str) -> RenderedChat:
    """Return the text that is encoded of a conversation.

    Raises `WrongConversation` as `encode` does.
    """
    try:
        [parts, notes, wrong], _ = call(
            _rendered, *astuple(chat), tokenizer.name, tokenizer.serial, body=line.encode("utf-8")
        )
    except Failure as error:
        raise WrongConversation(f"makes {chat.path} fail: it {error}", TEMPLATE) from None
    if wrong:
        raise WrongConversation(*wrong)
    return RenderedChat([(text, learned) for text, learned in parts], notes)


def _ask_encoded(chat: Chat, tokenizer: Tokenizer, lines: list[str]) -> Iterator[EncodedChat]:
    """Yield the sandbox's answers.

    Raises `Failure` before the first, or `WrongConversation` in place of one.
    """
    (described, wrong), body = call(
        _encoded, *astuple(chat), tokenizer.name, tokenizer.serial, body="\n".join(lines).encode("utf-8")
    )
    offset = 0
    for count, text_bytes, notes in described:
        tokens = np.frombuffer(body, "<i4", count, offset)
        learned = np.frombuffer(body, np.bool_, count, offset + 4 * count)
        yield EncodedChat(tokens, learned, text_bytes, notes)
        offset += 5 * count
    if wrong:
        raise WrongConversation(*wrong)


# What follows runs in the sandbox.


def _tried(template: str, path: str, today: str, ignored: list[str]) -> Answer:
    try:
        _compiled(template, today)
    except TemplateError as error:
        raise DataError(path, f"is no template: {one_line(error)}", TEMPLATE) from None
    return None, b""


def _encoded(
    template: str, path: str, today: str, ignored: list[str], name: str, serial: int, lines: bytes
) -> Answer:
    chat, tokenizer = Chat(template, path, today, tuple(ignored)), opened(name, serial)
    described, parts = list[tuple[int, int, dict[str, int]]](), list[bytes]()
    try:
        for line in lines.split(b"\n"):
            encoded = _encode_line(chat, tokenizer, line)
            described.append((len(encoded.tokens), encoded.text_bytes, encoded.notes))
            parts += [encoded.tokens.astype("<i4").tobytes(), encoded.learned.tobytes()]
    except WrongConversation as error:
        return [described, error.args], b"".join(parts)
    return [described, None], b"".join(parts)


def _rendered(
    template: str, path: str, today: str, ignored: list[str], name: str, serial: int, line: bytes
) -> Answer:
    chat, tokenizer = Chat(template, path, today, tuple(ignored)), opened(name, serial)
    try:
        text, spans, notes = _text_and_spans(chat, tokenizer, line)
    except WrongConversation as error:
        return [[], {}, error.args], b""
    parts = [(text[start:stop], learned) for start, stop, learned in _cut(spans, len(text))]
    return [parts, notes, None], b""


def _encode_line(chat: Chat, tokenizer: Tokenizer, line: bytes) -> EncodedChat:
    """The tokens of a line. Raises `WrongConversation`."""
    text, spans, notes = _text_and_spans(chat, tokenizer, line)
    try:
        text_bytes = len(text.encode("utf-8"))
    except UnicodeEncodeError:
        raise WrongConversation("holds half a surrogate pair, which is no text", LINE) from None
    parts = [
        (tokenizer.encode(text[start:stop], special_tokens=True), learned)
        for start, stop, learned in _cut(spans, len(text))
    ]
    learned = np.concatenate([np.full(len(tokens), learned) for tokens, learned in parts])
    if not learned.any():
        raise WrongConversation("has answers without a token", LINE)
    return EncodedChat(np.concatenate([tokens for tokens, _ in parts]), learned, text_bytes, notes)


def _text_and_spans(chat: Chat, tokenizer: Tokenizer, line: bytes) -> tuple[str, list[Span], dict[str, int]]:
    """The text of a conversation, the spans of it that are learned, and what was not used."""
    try:
        record = read_json(line.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise WrongConversation(why_not_json(error), LINE) from None
    conversation = read_conversation(record, chat.ignored)
    marks_answers = MARKING.search(chat.template) is not None

    def render(messages: list[dict[str, Any]], ask: bool = False) -> str:
        return _render(chat, tokenizer, conversation, messages, ask)

    rendered = render(conversation.messages)
    if _writes_escaped_arguments(rendered, conversation):
        _parse_arguments(conversation)
        rendered = render(conversation.messages)
    text, spans = _unmarked(rendered) if marks_answers else (rendered, [])

    assistants = [m["role"] == ASSISTANT for m in conversation.messages]
    if marks_answers:
        if not any(start < stop for start, stop in spans):
            raise WrongConversation(f"{chat.path} writes none of its answers", MARKED)
        spans = _learned_of_marked(spans, conversation)
        # the template marks answers only; where other messages are learned is looked for
        sought = [
            learned and not assistant
            for learned, assistant in zip(conversation.learned, assistants, strict=True)
        ]
        spans += _spans_by_prefix(
            text, lambda *args, **options: _unmarked(render(*args, **options))[0], conversation, sought
        )
    else:
        spans = _spans_by_prefix(text, render, conversation, conversation.learned)
    spans = _joined(spans)
    if not any(start < stop for start, stop in spans):
        raise WrongConversation(f"{chat.path} writes none of its answers", MARKED)
    notes = Counter({f"key {key}": count for key, count in conversation.unused.items()})
    return text, spans, dict(notes + _unwritten(text, conversation))


def _render(
    chat: Chat, tokenizer: Tokenizer, conversation: Conversation, messages: list[dict[str, Any]], ask: bool
) -> str:
    """What the template writes for some messages; with `ask`, also the words that ask for an answer."""
    variables = {"tools": None, "documents": None} | conversation.variables
    try:
        return _compiled(chat.template, chat.today).render(
            messages=messages, add_generation_prompt=ask, **variables, **tokenizer.chat_tokens
        )
    except MemoryError:
        raise
    except Exception as error:  # a template raises whatever its expressions lead to
        raise WrongConversation(
            f"makes {chat.path} fail: {one_line(error)}", "messages that the template takes"
        ) from None


def _functions(conversation: Conversation) -> Iterator[dict[str, Any]]:
    """The functions that assistants call, each with its name and arguments."""
    for message in conversation.messages:
        calls = message.get("tool_calls")
        for called in calls if isinstance(calls, list) else []:
            function = called.get("function", called) if isinstance(called, dict) else None
            if isinstance(function, dict):
                yield function


def _writes_escaped_arguments(text: str, conversation: Conversation) -> bool:
    """Whether the template writes the arguments of calls as JSON of a text that is JSON already.

    OpenAI stores arguments as text, and some templates take that; others expect an object, and would teach
    the model to escape its quotes.
    """
    arguments = [function.get("arguments") for function in _functions(conversation)]
    return any(
        isinstance(value, str) and value not in text and json.dumps(value, ensure_ascii=False) in text
        for value in arguments
    )


def _parse_arguments(conversation: Conversation) -> None:
    """Turn the arguments of calls from text into objects."""
    for function in _functions(conversation):
        if isinstance(function.get("arguments"), str):
            try:
                function["arguments"] = json.loads(function["arguments"])
            except (ValueError, RecursionError):
                raise WrongConversation(
                    "has arguments of a tool call that are not JSON", '{"name": "…", "arguments": {…}}'
                ) from None


def _unwritten(text: str, conversation: Conversation) -> Counter[str]:
    """Count what the conversation says and the template does not write. Raises `WrongConversation`."""
    counts: Counter[str] = Counter()
    for message in conversation.messages:
        for key in TEXTS:
            value = message.get(key)
            if isinstance(value, str) and value.strip() not in text:
                counts[f"unwritten {key} of the role {message['role']}"] += 1
    for function in _functions(conversation):
        if str(function.get("name")) not in text:
            raise WrongConversation("has tool calls, which the template does not write", "another --template")
    for key in ("tools", "documents"):
        entries = conversation.variables.get(key) or []
        if entries and not any(_mentions(text, entry) for entry in entries):
            counts[f"unwritten {key}"] += 1
    return counts


def _mentions(text: str, entry: Any) -> bool:
    """Whether the text has the name of a tool, or some text of a document."""
    if isinstance(entry, dict):
        function = entry.get("function", entry)
        values = [function["name"]] if isinstance(function, dict) and "name" in function else entry.values()
    else:
        values = [entry]
    return any(isinstance(value, str) and value.strip() in text for value in values)


def _unmarked(marked: str) -> tuple[str, list[Span]]:
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


def _learned_of_marked(spans: list[Span], conversation: Conversation) -> list[Span]:
    """The spans of the answers that are learned, of all that the template marks."""
    learned = [
        is_learned
        for message, is_learned in zip(conversation.messages, conversation.learned, strict=True)
        if message["role"] == ASSISTANT
    ]
    if all(learned):
        return spans
    if len(spans) != len(learned):
        wrong = f"leaves out some of {len(learned)} answers, and the template marks {len(spans)}"
        raise WrongConversation(wrong, "a template that marks each answer once")
    return [span for span, is_learned in zip(spans, learned, strict=True) if is_learned]


def _spans_by_prefix(text: str, render: Render, conversation: Conversation, sought: list[bool]) -> list[Span]:
    """The spans of the sought messages: what each adds to the text of the messages before it.

    An answer begins after the words that ask for it, another message where its content does.
    """
    messages, spans = conversation.messages, list[Span]()
    for index in [index for index, is_sought in enumerate(sought) if is_sought]:
        message = messages[index]
        is_answer = message["role"] == ASSISTANT
        before = render(messages[:index], ask=is_answer) if index or is_answer else ""
        after = render(messages[: index + 1])
        if not after.startswith(before) or not text.startswith(after):
            wrong = (
                f"is written otherwise up to message {index + 1} than as a whole, so the "
                f"{'answer' if is_answer else 'message'} cannot be found"
            )
            raise WrongConversation(wrong, MARKED)
        start = len(before) if is_answer else _content_start(text, render, messages[: index + 1])
        spans.append((start, len(after)))
    return spans


def _content_start(text: str, render: Render, messages: list[dict[str, Any]]) -> int:
    """Where the content of the last of these messages begins in the text. Raises `WrongConversation`."""
    *earlier, message = messages
    probe = render([*earlier, message | {"content": PLACE}])
    start = probe.find(PLACE)
    if start < 0 or text[:start] != probe[:start] or not text.startswith(message["content"].strip(), start):
        wrong = f"has message {len(messages)}, which the template does not write as it is"
        raise WrongConversation(wrong, "another --template")
    return start


def _joined(spans: list[Span]) -> list[Span]:
    """The spans in the order of the text. Raises `WrongConversation` if two overlap."""
    spans = sorted(spans)
    if any(first[1] > second[0] for first, second in pairwise(spans)):
        raise WrongConversation("is written with messages within each other", MARKED)
    return spans


def _cut(spans: list[Span], length: int) -> Iterator[tuple[int, int, bool]]:
    """The text in parts, and whether each is an answer; none is empty."""
    edges = [0, *(edge for span in spans for edge in span), length]
    for i, (start, stop) in enumerate(pairwise(edges)):
        if start < stop:
            yield start, stop, i % 2 == 1


@functools.lru_cache(maxsize=1)
def _compiled(template: str, today: str) -> Any:
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
    environment.globals |= {"raise_exception": fail, "strftime_now": date.fromisoformat(today).strftime}
    return environment.from_string(template)


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
