"""Conversations as training text: a Jinja chat template writes them out, and the tokens of the
assistant's answers are learned.

A template that marks answers with ``{% generation %}``, as transformers has it, says itself what is learned.
With any other template an answer is what the text of the conversation up to it gains: from the text before
it, which ends with the words that ask for an answer, to the text with it, its end-of-turn token included.
Keys of the data can leave out an answer or add other messages (`tools.prepare.conversations`).
"""

import contextlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass
from datetime import date
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from jinja2 import TemplateError

from megacore.errors import DataError
from megacore.files import read_json
from megacore.tools.prepare.conversations import (
    ASSISTANT,
    LINE_FORM,
    Conversation,
    UnknownKeys,
    WrongConversation,
    read_conversation,
)
from megacore.tools.prepare.sources import why_not_json
from megacore.tools.prepare.split import IGNORED, UNUSED, UNWRITTEN, Tokenized
from megacore.tools.prepare.template import (
    BEGIN,
    END,
    MARKED,
    MARKING,
    PLACE,
    TEMPLATE,
    Span,
    compile_template,
    find_template,
    read_template,
    split_marks,
)
from megacore.tools.text.sandbox import Answer, Failure, call, one_line
from megacore.tools.text.sandboxed import opened
from megacore.tools.text.tokenizer import Tokenizer

# what a line must not hold, as JSON may write them
MARKS = [form.encode() for mark in (BEGIN, END, PLACE) for form in (mark, ascii(mark)[1:-1])]
# texts of a message that templates may leave out, which is reported
TEXTS = ("content", "reasoning_content", "reasoning", "thinking", "name")


class Render(Protocol):
    """Writes some messages by the template; with `ask`, also the words that ask for an answer."""

    def __call__(self, messages: list[dict[str, Any]], ask: bool = False) -> str: ...


@dataclass(frozen=True)
class Chat:
    """How conversations are read and written.

    `path` is where the template comes from, `today` the day that templates are told, such as 2026-01-31, and
    `ignored` the keys of the data that the user says do not matter.
    """

    template: str
    path: str
    today: str
    ignored: Sequence[str] = ()


def chat_of(tokenizer: str, template: str | None, ignored: Sequence[str] = ()) -> Chat:
    """The template in the file `template`, or the model's own, beside its tokenizer.

    Raises:
        ConfigError, DataError: there is none, or it cannot be read as one.
    """
    if template is not None:
        text, path = read_template(Path(template)), template
    else:
        text, path = find_template(Path(tokenizer))
    chat = Chat(text, path, str(date.today()), ignored)
    try:
        call(_tried, astuple(chat))
    except Failure as error:
        raise DataError(path, f"is no template: it {error}", TEMPLATE) from None
    return chat


def encode(chat: Chat, tokenizer: Tokenizer, lines: list[str]) -> Iterator[Tokenized]:
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
    notes: dict[str, int]  # what was not used, and how often (`split.notes_of`)


def rendered_chat(chat: Chat, tokenizer: Tokenizer, line: str) -> RenderedChat:
    """Return the text that is encoded of a conversation.

    Raises `WrongConversation` as `encode` does.
    """
    try:
        [rendered, wrong], _ = call(
            _rendered, astuple(chat), tokenizer.name, tokenizer.serial, body=line.encode("utf-8")
        )
    except Failure as error:
        raise WrongConversation(f"makes {chat.path} fail: it {error}", TEMPLATE) from None
    if wrong:
        raise WrongConversation(*wrong)
    return RenderedChat(*rendered)


def _ask_encoded(chat: Chat, tokenizer: Tokenizer, lines: list[str]) -> Iterator[Tokenized]:
    """Yield the sandbox's answers.

    Raises `Failure` before the first, or `WrongConversation` in place of one.
    """
    (described, wrong), body = call(
        _encoded, astuple(chat), tokenizer.name, tokenizer.serial, body="\n".join(lines).encode("utf-8")
    )
    offset = 0
    for count, text_bytes, notes in described:
        tokens = np.frombuffer(body, "<i4", count, offset)
        learned = np.frombuffer(body, np.bool_, count, offset + 4 * count)
        yield Tokenized(tokens, learned, text_bytes, notes)
        offset += 5 * count
    if wrong:
        raise WrongConversation(*wrong)


# What follows runs in the sandbox.


def _tried(fields: list[Any]) -> Answer:
    chat = Chat(*fields)
    try:
        compile_template(chat.template, chat.today)
    except TemplateError as error:
        raise DataError(chat.path, f"is no template: {one_line(error)}", TEMPLATE) from None
    return None, b""


def _encoded(fields: list[Any], name: str, serial: int, body: bytes) -> Answer:
    chat, tokenizer = Chat(*fields), opened(name, serial)
    described: list[tuple[int, int, dict[str, int]]] = []
    parts: list[bytes] = []
    lines = body.split(b"\n")
    try:
        for number, line in enumerate(lines):
            try:
                encoded = _encode_line(chat, tokenizer, line)
            except UnknownKeys as error:
                raise UnknownKeys(error.keys, _unknown_keys(lines[number:], chat.ignored)) from None
            assert encoded.learned is not None
            described.append((len(encoded.tokens), encoded.text_bytes, encoded.notes))
            parts += [encoded.tokens.astype("<i4").tobytes(), encoded.learned.tobytes()]
    except WrongConversation as error:
        return [described, error.args], b"".join(parts)
    return [described, None], b"".join(parts)


def _unknown_keys(lines: list[bytes], ignored: Sequence[str]) -> list[str]:
    """The keys of some lines that may change what is learned."""
    keys: dict[str, str] = {}
    for line in lines:
        try:
            read_conversation(json.loads(line), ignored)
        except UnknownKeys as error:
            keys |= error.keys
        except (ValueError, RecursionError):  # wrong in another way, which is reported when it is reached
            continue
    return [*keys]


def _rendered(fields: list[Any], name: str, serial: int, line: bytes) -> Answer:
    chat, tokenizer = Chat(*fields), opened(name, serial)
    try:
        text, spans, notes = _text_and_spans(chat, tokenizer, line)
    except WrongConversation as error:
        return [None, error.args], b""
    parts = [(text[start:stop], learned) for start, stop, learned in _cut(spans, len(text))]
    return [[parts, notes], None], b""


def _encode_line(chat: Chat, tokenizer: Tokenizer, line: bytes) -> Tokenized:
    """The tokens of a line. Raises `WrongConversation`."""
    text, spans, notes = _text_and_spans(chat, tokenizer, line)
    try:
        text_bytes = len(text.encode("utf-8"))
    except UnicodeEncodeError:
        raise WrongConversation("holds half a surrogate pair, which is no text", LINE_FORM) from None
    parts = [
        (tokenizer.encode(text[start:stop], special_tokens=True), learned)
        for start, stop, learned in _cut(spans, len(text))
    ]
    learned = np.concatenate([np.full(len(tokens), learned) for tokens, learned in parts])
    if not learned.any():
        raise WrongConversation("has answers without a token", LINE_FORM)
    return Tokenized(np.concatenate([tokens for tokens, _ in parts]), learned, text_bytes, notes)


def _text_and_spans(chat: Chat, tokenizer: Tokenizer, line: bytes) -> tuple[str, list[Span], dict[str, int]]:
    """The text of a conversation, the spans of it that are learned, and what was not used."""
    if any(mark in line.lower() for mark in MARKS):
        raise WrongConversation("holds U+FDD0, U+FDD1 or U+FDD2", "text; these stand for no character")
    try:
        record = read_json(line.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise WrongConversation(why_not_json(error), LINE_FORM) from None
    conversation = read_conversation(record, chat.ignored)

    def render(messages: list[dict[str, Any]], ask: bool = False) -> str:
        return _render(chat, tokenizer, messages, conversation.variables, ask)

    def render_plain(messages: list[dict[str, Any]], ask: bool = False) -> str:
        return split_marks(render(messages, ask))[0]

    conversation.messages = _with_readable_arguments(render, conversation.messages)
    text, marked_spans = split_marks(render(conversation.messages))
    probe = _Probe(conversation)
    # A template that parses contents may fail on markers: then only the texts are compared.
    with contextlib.suppress(WrongConversation):
        probe.rendered = _render(chat, tokenizer, probe.messages, probe.variables, ask=False)
    unwritten = _unwritten(text, conversation, probe)

    wanted = conversation.learned
    spans: list[Span] = []
    if MARKING.search(chat.template) is not None:
        spans = _select_learned(marked_spans, conversation, probe)
        # The template marks answers only, so the place of other learned messages is looked for.
        wanted = [
            learned and message["role"] != ASSISTANT
            for message, learned in zip(conversation.messages, wanted, strict=True)
        ]
    spans = _sort_spans(spans + _spans_by_prefix(text, render_plain, conversation.messages, wanted))
    if not any(start < stop for start, stop in spans):
        raise WrongConversation(f"{chat.path} writes none of its answers", MARKED)

    notes = Counter({f"{UNUSED} {key}": count for key, count in conversation.report.unused.items()})
    notes.update({f"{IGNORED} {key}": count for key, count in conversation.report.ignored.items()})
    notes.update({f"{UNWRITTEN} {name}": count for name, count in unwritten.items()})
    return text, spans, dict(notes)


def _render(
    chat: Chat,
    tokenizer: Tokenizer,
    messages: list[dict[str, Any]],
    variables: dict[str, Any],
    ask: bool,
) -> str:
    """What the template writes for some messages; with `ask`, also the words that ask for an answer."""
    variables = {"tools": None, "documents": None} | variables
    try:
        return compile_template(chat.template, chat.today).render(
            messages=messages, add_generation_prompt=ask, **variables, **tokenizer.chat_tokens
        )
    except MemoryError:
        raise
    except Exception as error:  # a template raises whatever its expressions lead to
        raise WrongConversation(
            f"makes {chat.path} fail: {one_line(error)}", "messages that the template takes"
        ) from None


def _with_readable_arguments(render: Render, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with the arguments of calls as the template takes them: as text, or as objects.

    OpenAI stores arguments as text that is JSON. Some templates write that text; others expect an object, and
    would fail, or teach the model to escape the quotes.
    """
    if not any(isinstance(f.get("arguments"), str) for m in messages for f in _functions(m)):
        return messages
    marker = f'{{"{PLACE}": 1}}'
    try:
        rendered = render([_with_functions(m, lambda f: f | {"arguments": marker}) for m in messages])
    except WrongConversation:
        rendered = ""
    if f'{{"{PLACE}"' in rendered:
        return messages
    return [_with_functions(message, _parse_arguments) for message in messages]


def _functions(message: dict[str, Any]) -> list[dict[str, Any]]:
    """The functions that a message calls, each with its name and arguments."""
    return [call.get("function", call) for call in message.get("tool_calls", [])]


def _with_functions(
    message: dict[str, Any], change: Callable[[dict[str, Any]], dict[str, Any]]
) -> dict[str, Any]:
    """The message with each function that it calls changed."""
    if "tool_calls" not in message:
        return message
    calls = [call | {"function": change(call["function"])} for call in message["tool_calls"]]
    return message | {"tool_calls": calls}


def _parse_arguments(function: dict[str, Any]) -> dict[str, Any]:
    """The function with its arguments as an object."""
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        return function
    try:
        return function | {"arguments": read_json(arguments or "{}")}
    except (ValueError, RecursionError):
        right = '{"name": "…", "arguments": {…}}'
        raise WrongConversation("has arguments of a tool call that are not JSON", right) from None


class _Probe:
    """The conversation with a marker in place of each text, to see which of them the template writes.

    `names` gives for each marker what it stands for, and the index of its message (-1: of no message).
    """

    def __init__(self, conversation: Conversation) -> None:
        self.names: dict[str, tuple[str, int]] = {}
        self.rendered: str | None = None  # None: the template does not take markers
        self.messages = [self._message(i, message) for i, message in enumerate(conversation.messages)]
        self.variables = dict(conversation.variables)
        for key in ("tools", "documents"):
            if key in self.variables:
                self.variables[key] = [self._entry(key, entry) for entry in self.variables[key]]

    def _marker(self, name: str, index: int) -> str:
        marker = f"{PLACE}{len(self.names)}{PLACE}"
        self.names[marker] = name, index
        return marker

    def _message(self, index: int, message: dict[str, Any]) -> dict[str, Any]:
        def changed(function: dict[str, Any]) -> dict[str, Any]:
            marked = function | {"name": self._marker("call", index)}
            if function.get("arguments"):
                marker = self._marker("call", index)
                marked["arguments"] = (
                    f'{{"{marker}": 1}}' if isinstance(function["arguments"], str) else {marker: marker}
                )
            return marked

        texts = [key for key in TEXTS if isinstance(message.get(key), str) and message[key].strip()]
        marked = message | {key: self._marker(key, index) for key in texts}
        return _with_functions(marked, changed)

    def _entry(self, key: str, entry: Any) -> Any:
        """A tool with a marker as its name, or a document with markers as its texts."""
        if isinstance(entry, str):
            return self._marker(key, -1)
        if not isinstance(entry, dict):
            return entry
        if isinstance(entry.get("function"), dict):
            return entry | {"function": entry["function"] | {"name": self._marker(key, -1)}}
        if "name" in entry:
            return entry | {"name": self._marker(key, -1)}
        return {k: self._marker(key, -1) if isinstance(v, str) else v for k, v in entry.items()}

    def written(self) -> dict[tuple[str, int], list[bool]]:
        """Whether the template writes each text; empty if it does not take markers."""
        found: dict[tuple[str, int], list[bool]] = {}
        for marker, name in self.names.items() if self.rendered is not None else ():
            forms = marker, ascii(marker)[1:-1]  # JSON may escape what is not ASCII
            found.setdefault(name, []).append(any(form in str(self.rendered) for form in forms))
        return found


def _unwritten(text: str, conversation: Conversation, probe: _Probe) -> Counter[str]:
    """Count what the conversation says and the template does not write.

    Raises `WrongConversation` if that is a call, or an answer that is to be learned.
    """
    written = probe.written()
    counts: Counter[str] = Counter()
    for index, message in enumerate(conversation.messages):
        if not all(written.get(("call", index), [])):
            wrong = f"has tool calls in message {index + 1} that the template does not write"
            raise WrongConversation(wrong, "another --template")
        is_written = all(written.get(("content", index), []))
        if conversation.learned[index] and not is_written and "tool_calls" not in message:
            wrong = f"has message {index + 1}, which is to be learned and which the template does not write"
            raise WrongConversation(wrong, "another --template")
        for key in TEXTS:
            value = message.get(key)
            if not isinstance(value, str):
                continue
            if not all(written.get((key, index), [])) or value.strip() not in text:
                counts[f"{key} of the role {message['role']}"] += 1
    for key in ("tools", "documents"):
        if (key, -1) in written and not any(written[key, -1]):
            counts[key] += 1
    return counts


def _select_learned(spans: list[Span], conversation: Conversation, probe: _Probe) -> list[Span]:
    """The spans of the answers that are learned, of all that the template marks."""
    if not any(start < stop for start, stop in spans):
        raise WrongConversation("has answers, and the template writes none of them", MARKED)
    answers = [index for index, message in enumerate(conversation.messages) if message["role"] == ASSISTANT]
    if all(conversation.learned[index] for index in answers):
        return spans
    rendered, probe_spans = split_marks(probe.rendered or "")
    owners = [
        {index for marker, (_, index) in probe.names.items() if marker in rendered[start:stop]}
        for start, stop in probe_spans
    ]
    if len(owners) != len(spans) or any(len(indices) != 1 for indices in owners):
        wrong = "leaves out some of its answers, and the template does not mark each on its own"
        raise WrongConversation(wrong, "a template that marks each answer once")
    return [span for span, indices in zip(spans, owners, strict=True) if conversation.learned[min(indices)]]


def _spans_by_prefix(
    text: str, render: Render, messages: list[dict[str, Any]], wanted: list[bool]
) -> list[Span]:
    """The spans of the wanted messages: what each adds to the text of the messages before it.

    An answer begins after the words that ask for it, another message where its content does.
    """
    spans: list[Span] = []
    for index, message in enumerate(messages):
        if not wanted[index]:
            continue
        is_answer = message["role"] == ASSISTANT
        before = render(messages[:index], ask=is_answer) if index or is_answer else ""
        after = render(messages[: index + 1])
        if not after.startswith(before) or not text.startswith(after):
            wrong = (
                f"is written otherwise up to message {index + 1} than as a whole, so the "
                f"{'answer' if is_answer else 'message'} cannot be found"
            )
            right = MARKED if is_answer else "a template that writes each message after those before it"
            raise WrongConversation(wrong, right)
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


def _sort_spans(spans: list[Span]) -> list[Span]:
    """The spans in the order of the text. Raises `WrongConversation` if two overlap."""
    spans = sorted(spans)
    if any(first[1] > second[0] for first, second in pairwise(spans)):
        raise WrongConversation("has messages that overlap in the text", MARKED)
    return spans


def _cut(spans: list[Span], length: int) -> Iterator[tuple[int, int, bool]]:
    """Yield (start, stop, learned) of the pieces between the edges of spans that are not empty."""
    edges = [0, *(edge for span in spans for edge in span), length]
    for i, (start, stop) in enumerate(pairwise(edges)):
        if start < stop:
            yield start, stop, i % 2 == 1
