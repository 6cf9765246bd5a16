"""Reads one line of a chat data set: its messages, and which of them are learned.

Data sets come in several forms and carry keys of other trainers. The tables below say what each key means
here. A key that is in no table is an error, because it may say what must not be learned.
"""

import json
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

ASSISTANT = "assistant"
ROLES = ("system", "developer", "user", ASSISTANT, "tool")
# other names of the speakers, as ShareGPT, LLaMA-Factory, axolotl, ms-swift and Hermes spell them
SPEAKERS = {
    "human": "user",
    "gpt": ASSISTANT,
    "chatgpt": ASSISTANT,
    "bing": ASSISTANT,
    "bard": ASSISTANT,
    "model": ASSISTANT,
    "function_call": ASSISTANT,
    "tool_call": ASSISTANT,
    "observation": "tool",
    "function_response": "tool",
    "tool_response": "tool",
}
CALLS = ("function_call", "tool_call")  # speakers whose text is the JSON of a call
LINE_FORM = (
    'one conversation a line, such as {"messages": [{"role": "user", "content": "…"}, {"role": '
    '"assistant", "content": "…"}]}'
)
FORMS = "messages, conversations, instruction and output, or prompt and completion"


class Use(Enum):
    """What is done with a key of a line or of a message."""

    READ = auto()  # the conversation itself
    TEMPLATE = auto()  # given to the chat template
    LEARN = auto()  # whether the message is learned: true, false, 1 or 0
    WEIGHT = auto()  # the same, of answers only
    MASK = auto()  # the opposite: true if the message is not learned
    UNUSED = auto()  # does not change what is learned
    UNSUPPORTED = auto()  # would change what is learned, in a way that is not supported


BOOKKEEPING = dict.fromkeys(
    (
        *("id", "idx", "index", "uuid", "conversation_id", "conversation_hash", "prompt_id", "message_id"),
        *("source", "dataset", "dataset_name", "split", "group", "url", "license", "metadata", "meta"),
        *("timestamp", "time", "date", "created", "created_at", "updated_at"),
    ),
    (Use.UNUSED, "where the line comes from"),
)

# key of a message -> what is done with it, and what it means to those who write it
MESSAGE_KEYS: dict[str, tuple[Use, str]] = BOOKKEEPING | {
    "role": (Use.READ, "who speaks"),
    "from": (Use.READ, "who speaks (ShareGPT)"),
    "content": (Use.READ, "what is said"),
    "value": (Use.READ, "what is said (ShareGPT)"),
    "tool_calls": (Use.TEMPLATE, "calls of functions"),
    "tool_call_id": (Use.TEMPLATE, "which call this is the result of"),
    "name": (Use.TEMPLATE, "the name of the speaker or of the function"),
    "reasoning_content": (Use.TEMPLATE, "reasoning before the answer (DeepSeek, Qwen)"),
    "reasoning": (Use.TEMPLATE, "reasoning before the answer (OpenRouter)"),
    "thinking": (Use.TEMPLATE, "reasoning before the answer (gpt-oss)"),
    "weight": (Use.WEIGHT, "the answer's weight in the loss (OpenAI, Mistral, Together)"),
    "loss_weight": (Use.WEIGHT, "the answer's weight in the loss"),
    "loss_scale": (Use.WEIGHT, "the answer's weight in the loss"),
    "train": (Use.LEARN, "whether the message is learned (axolotl)"),
    "training": (Use.LEARN, "whether the message is learned (axolotl)"),
    "loss": (Use.LEARN, "whether the message is learned (ms-swift, XTuner)"),
    "trainable": (Use.LEARN, "whether the message is learned"),
    "masked": (Use.MASK, "whether the message is left out of the loss (torchtune)"),
    "train_detail": (Use.UNSUPPORTED, "which characters are learned (axolotl)"),
    "training_detail": (Use.UNSUPPORTED, "which characters are learned (axolotl)"),
    "function_call": (Use.UNSUPPORTED, "a call in OpenAI's older form; tool_calls is the newer one"),
    "images": (Use.UNSUPPORTED, "pictures"),
    "audio": (Use.UNSUPPORTED, "sound"),
}

# key of a line -> the same
LINE_KEYS: dict[str, tuple[Use, str]] = BOOKKEEPING | {
    "messages": (Use.READ, "the conversation"),
    "conversations": (Use.READ, "the conversation (ShareGPT)"),
    "conversation": (Use.READ, "the conversation (ShareGPT)"),
    "instruction": (Use.READ, "the question (Alpaca)"),
    "input": (Use.READ, "what the question is about (Alpaca)"),
    "output": (Use.READ, "the answer (Alpaca)"),
    "query": (Use.READ, "the question (ms-swift)"),
    "response": (Use.READ, "the answer (ms-swift)"),
    "history": (Use.READ, "earlier questions and answers (LLaMA-Factory)"),
    "prompt": (Use.READ, "the question, or earlier messages (TRL)"),
    "completion": (Use.READ, "the answer (TRL)"),
    "system": (Use.READ, "the system message"),
    "tools": (Use.TEMPLATE, "the functions that may be called, a list or its JSON"),
    "documents": (Use.TEMPLATE, "documents that the answer may use"),
    "chat_template_kwargs": (Use.TEMPLATE, "further variables of the template (TRL)"),
    "unmask": (Use.LEARN, "if true, all but the system message is learned (InstructLab)"),
    "weight": (Use.WEIGHT, "the line's weight in the loss (Fireworks)"),
    "mask": (Use.MASK, "the speaker who is left out of the loss (NeMo)"),
    "text": (Use.UNUSED, "the conversation as one text (Alpaca)"),
    "parallel_tool_calls": (Use.UNUSED, "a setting of OpenAI's API"),
    "functions": (Use.UNSUPPORTED, "functions in OpenAI's older form; tools is the newer one"),
    "chosen": (Use.UNSUPPORTED, "the better of two answers, for preference training"),
    "rejected": (Use.UNSUPPORTED, "the worse of two answers, for preference training"),
    "kto_tag": (Use.UNSUPPORTED, "a judgement, for preference training"),
    "images": (Use.UNSUPPORTED, "pictures"),
    "videos": (Use.UNSUPPORTED, "videos"),
    "audios": (Use.UNSUPPORTED, "sound"),
}
# the question and the answer of lines that hold one pair
PAIRS = (("instruction", "output"), ("query", "response"), ("prompt", "completion"))
# variables of templates that a line cannot set
RESERVED = ("messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token")


class WrongConversation(ValueError):
    """A conversation that cannot be learned from; `args`: what is wrong, what would be right."""


class UnknownKeys(WrongConversation):
    """A conversation with `keys`, each with its place, that may change what is learned.

    The advice names the keys of other lines too, those `elsewhere`, so that one more start is enough.
    """

    def __init__(self, keys: Mapping[str, str], elsewhere: Sequence[str] = ()) -> None:
        places = ", ".join(f"{key}{place}" for key, place in keys.items())
        names = shlex.quote(",".join(dict.fromkeys([*keys, *elsewhere])))
        wrong = f"has the key{'s' * (len(keys) > 1)} {places}, which may change what is learned"
        super().__init__(wrong, f"--ignore-keys {names}, if that does not matter")
        self.keys = keys


@dataclass
class KeyReport:
    """Keys of a line that are not used."""

    unused: Counter[str] = field(default_factory=Counter)  # that do not matter
    ignored: Counter[str] = field(default_factory=Counter)  # that the user says do not matter
    unknown: dict[str, str] = field(default_factory=dict)  # each with its place


@dataclass
class Conversation:
    """What a line says, in the form that chat templates take."""

    messages: list[dict[str, Any]]  # each with a known role, and its content
    learned: list[bool]  # for each message
    variables: dict[str, Any]  # further variables of the template
    report: KeyReport


@dataclass
class Turns:
    """The turns of a line as they are in the data; those of the prompt are not learned."""

    messages: list[Any]
    prompt_length: int = 0
    first_number: int = 1  # of the first turn; 0 if that is the line's system message


def read_conversation(record: Any, ignored: Sequence[str] = ()) -> Conversation:
    """Return the conversation of a line, whatever its form.

    `ignored` are keys that the user says do not matter. Raises `WrongConversation`.
    """
    if not isinstance(record, dict):
        raise WrongConversation("is not an object", LINE_FORM)
    report = KeyReport()
    record = _drop_ignored(record, ignored, report)
    keys = _stated_keys(record)
    turns = _pop_turns(keys, record)
    variables, learned_roles = _read_line_keys(keys, report)

    messages: list[dict[str, Any]] = []
    learned: list[bool] = []
    for index, turn in enumerate(turns.messages):
        message, mark = _read_message(turn, turns.first_number + index, ignored, report)
        is_learned = index >= turns.prompt_length and message["role"] in learned_roles
        messages.append(message)
        learned.append(is_learned if mark is None else mark)

    if report.unknown:
        raise UnknownKeys(report.unknown)
    if turns.first_number == 0 and any(message["role"] == "system" for message in messages[1:]):
        raise WrongConversation(
            "has a system message under system and another in its messages", "one of them"
        )
    if not any(message["role"] == ASSISTANT for message in messages):
        raise WrongConversation(f"has no answer: no message is of the role {ASSISTANT}", LINE_FORM)
    if not any(learned):
        raise WrongConversation("marks every answer as not learned", "one that is learned, or no such line")
    return Conversation(messages, learned, variables, report)


def _drop_ignored(record: dict[str, Any], ignored: Sequence[str], report: KeyReport) -> dict[str, Any]:
    """The record without the keys that the user says do not matter, which are counted."""
    report.ignored.update(key for key in record if key in ignored)
    return {key: value for key, value in record.items() if key not in ignored}


def _stated_keys(record: dict[str, Any]) -> dict[str, Any]:
    """The keys that say something: in tables, every row has every key."""
    return {key: value for key, value in record.items() if value not in (None, "", [], {})}


def _pop_turns(keys: dict[str, Any], record: dict[str, Any]) -> Turns:
    """Take the turns of a line out of its `keys`; the whole record tells which form it has."""
    lists = [key for key in ("messages", "conversations", "conversation") if key in keys]
    if len(lists) > 1:
        raise WrongConversation(f"has conversations under {' and '.join(lists)}", "one of them")
    if lists:
        messages = _parse_if_text(keys.pop(lists[0]))
        if not isinstance(messages, list):
            raise WrongConversation(f"has no list of messages under {lists[0]}", LINE_FORM)
        turns = Turns(messages)
    else:
        turns = _pop_pair(keys, record)
    if "system" in keys:
        turns.messages = [_turn("system", keys.pop("system")), *turns.messages]
        turns.first_number = 0
        turns.prompt_length += 1
    return turns


def _pop_pair(keys: dict[str, Any], record: dict[str, Any]) -> Turns:
    """Take a question and its answer out of `keys`. Raises `WrongConversation` if the line has none."""
    pair = next((pair for pair in PAIRS if all(key in record for key in pair)), None)
    if pair is None:
        names = ", ".join(map(str, record))[:200]
        with_keys = f"; its keys are {names}" if names else ""
        raise WrongConversation(f"has no list of messages{with_keys}", f"{FORMS}; {LINE_FORM}")
    question = keys.pop(pair[0], "")
    answer = keys.pop(pair[1], "")
    if pair[0] == "prompt":
        asked = question if isinstance(question, list) else [_turn("user", _require_text(question, "prompt"))]
        if asked and isinstance(asked[-1], dict) and asked[-1].get("role") == ASSISTANT:
            raise WrongConversation(
                "has a prompt that ends with an answer", "a prompt that ends with a question"
            )
        answers = answer if isinstance(answer, list) else [_turn(ASSISTANT, answer)]
        return Turns([*asked, *answers], prompt_length=len(asked))

    question = _require_text(question, pair[0])
    if pair[0] == "instruction":
        about = _require_text(keys.pop("input", ""), "input")
        question = "\n".join(text for text in (question, about) if text)
    turns = _history(keys.pop("history", []))
    return Turns([*turns, _turn("user", question), _turn(ASSISTANT, answer)])


def _turn(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


def _history(pairs: Any) -> list[dict[str, Any]]:
    """Earlier questions and answers, as LLaMA-Factory and ms-swift have them."""
    if not isinstance(pairs, list) or any(not isinstance(p, list) or len(p) != 2 for p in pairs):
        raise WrongConversation("has a history that is not a list of pairs", '[["question", "answer"], …]')
    return [
        turn for question, answer in pairs for turn in (_turn("user", question), _turn(ASSISTANT, answer))
    ]


def _read_line_keys(keys: dict[str, Any], report: KeyReport) -> tuple[dict[str, Any], set[str]]:
    """The variables that a line gives to the template, and the roles whose messages are learned."""
    variables: dict[str, Any] = {}
    learned_roles = {ASSISTANT}
    for key, value in keys.items():
        use, meaning = LINE_KEYS.get(key, (Use.READ, ""))
        if use is Use.READ:  # of another form than the line's, or not in the table
            report.unknown[key] = ""
        elif use is Use.UNSUPPORTED:
            report.unknown[key] = f" ({meaning}: not supported)"
        elif use is Use.UNUSED:
            report.unused[key] += 1
        elif use is Use.TEMPLATE:
            variables |= _template_variables(key, value)
        elif use is Use.MASK:
            if not isinstance(value, str) or _role(value) != "user":
                right = "User: answers are learned, and nothing else"
                raise WrongConversation(f"has {key} {value!r:.40}", right)
        elif use is Use.WEIGHT:
            if not _flag(key, value, ""):
                raise WrongConversation(f"has {key} {value}, so nothing of it is learned", "no such line")
        elif _flag(key, value, ""):
            learned_roles = set(ROLES) - {"system", "developer"}
    return variables, learned_roles


def _template_variables(key: str, value: Any) -> dict[str, Any]:
    """What a key of the line adds to the variables of the template."""
    # Some sets store JSON as text, and a template would write its characters one by one.
    value = _parse_if_text(value)
    if key == "chat_template_kwargs":
        if not isinstance(value, dict) or not value.keys().isdisjoint(RESERVED):
            raise WrongConversation(f"has a wrong {key}", f"an object without {', '.join(RESERVED)}")
        return value
    if not isinstance(value, list):
        raise WrongConversation(f"has {key} that are not a list", "a list of objects, or its JSON")
    return {key: value}


def _read_message(
    turn: Any, number: int, ignored: Sequence[str], report: KeyReport
) -> tuple[dict[str, Any], bool | None]:
    """A message as templates take it, and whether a key says that it is learned or not."""
    place = f" in message {number}" if number else " in the system message"
    if not isinstance(turn, dict):
        raise WrongConversation(f"has no role{place}", LINE_FORM)
    turn = _drop_ignored(turn, ignored, report)
    keys = _stated_keys(turn)
    speaker = _one_of(turn, "role", "from", place)
    if not isinstance(speaker, str):
        raise WrongConversation(f"has no role{place}", LINE_FORM)
    role = _role(speaker)
    if role not in ROLES:
        names = ", ".join((*ROLES, *SPEAKERS))
        raise WrongConversation(f"has the unknown role {speaker!r:.40}{place}", f"one of {names}")

    content = _one_of(turn, "content", "value", place)
    if isinstance(content, list) and content:
        content = "".join(_part_text(part, place) for part in content)
    if speaker in CALLS:
        keys["tool_calls"], content = content, None
    message = _turn(role, content)
    mark: bool | None = None
    for key, value in keys.items():
        use, meaning = MESSAGE_KEYS.get(key, (None, ""))
        if use is None:
            report.unknown.setdefault(key, place)
        elif use is Use.UNSUPPORTED:
            report.unknown.setdefault(key, f"{place} ({meaning}: not supported)")
        elif use is Use.UNUSED:
            report.unused[key] += 1
        elif key == "tool_calls":
            message[key] = _read_calls(value, place)
        elif use is Use.TEMPLATE:
            message[key] = value
        elif use is not Use.READ:
            is_learned = _is_learned(key, use, value, role, place)
            if mark is not None and mark is not is_learned:
                raise WrongConversation(f"has keys{place} of which {key} contradicts another", "one of them")
            mark = is_learned
    _check_content(message, number)
    return message, mark


def _role(speaker: str) -> str:
    """The role of a speaker; NeMo writes them with a capital."""
    return SPEAKERS.get(speaker.lower(), speaker.lower())


def _one_of(turn: dict[str, Any], key: str, other: str, place: str) -> Any:
    """What a turn says under one of two keys that mean the same."""
    values = [turn[name] for name in (key, other) if turn.get(name) not in (None, "")]
    if len(values) == 2 and values[0] != values[1]:
        raise WrongConversation(f"has {key} and {other}{place}, which differ", "one of them")
    return values[0] if values else turn.get(key, turn.get(other))


def _is_learned(key: str, use: Use, value: Any, role: str, place: str) -> bool:
    """Whether a key says that its message is learned."""
    is_set = _flag(key, value, place)
    if use is Use.MASK:
        return not is_set
    if use is Use.WEIGHT and is_set and role != ASSISTANT:
        wrong = f"has {key} {value}{place}, which is not an answer"
        raise WrongConversation(wrong, f'"train": true to learn it, or --ignore-keys {key}')
    return is_set


def _check_content(message: dict[str, Any], number: int) -> None:
    """Raise `WrongConversation` unless the message says something."""
    content = message["content"]
    has_calls = message["role"] == ASSISTANT and bool(message.get("tool_calls"))
    if not isinstance(content, str) and not (content is None and has_calls):
        raise WrongConversation(f"has no text as the content of message {number}", LINE_FORM)
    if message["role"] == ASSISTANT and not has_calls and not (content or "").strip():
        right = "an answer of at least one word, or no such conversation"
        raise WrongConversation(f"has an empty answer, message {number}", right)


def _part_text(part: Any, place: str) -> str:
    """The text of one part of a content that is a list, as OpenAI's API has it."""
    if (
        not isinstance(part, dict)
        or part.get("type", "text") != "text"
        or not isinstance(part.get("text"), str)
    ):
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        raise WrongConversation(f"has a part of the type {kind!r:.40}{place}", "parts of the type text")
    others = [key for key in part if key not in ("type", "text", "cache_control")]
    if others:
        wrong = f"has {', '.join(others)} in a part of the content{place}"
        raise WrongConversation(wrong, "such keys in the message, or one message for each part")
    return str(part["text"])


def _read_calls(value: Any, place: str) -> list[dict[str, Any]]:
    """The calls of a message, each in the form that OpenAI and templates have."""
    right = '[{"type": "function", "function": {"name": "…", "arguments": {…}}}], or its JSON'
    calls = _parse_if_text(value)
    calls = calls if isinstance(calls, list) else [calls]
    read: list[dict[str, Any]] = []
    for call in calls:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise WrongConversation(f"has tool_calls{place} without the name of a function", right)
        others = {*call, *function} - {"id", "index", "type", "function", "name", "arguments"}
        if others:
            raise WrongConversation(f"has {', '.join(sorted(others))} in tool_calls{place}", right)
        read.append(call if function is not call else {"type": "function", "function": call})
    return read


def _flag(key: str, value: Any, place: str) -> bool:
    """A value that says yes or no."""
    if isinstance(value, bool) or (isinstance(value, int | float) and value in (0, 1)):
        return bool(value)
    right = "true or false, 1 or 0: a token is learned or it is not"
    raise WrongConversation(f"has {key} {value!r:.40}{place}", right)


def _require_text(value: Any, key: str) -> str:
    if not isinstance(value, str):
        raise WrongConversation(f"has no text under {key}", LINE_FORM)
    return value


def _parse_if_text(value: Any) -> Any:
    """The value of JSON that is stored as text; what is not JSON stays as it is."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value
