"""Reads one line of a chat data set: its messages, and which of them are learned.

Data sets come in several forms and carry keys of other trainers. The tables below say what each key means
here. A key that is in no table is an error, because it may say what must not be learned.
"""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

ASSISTANT = "assistant"
ROLES = ("system", "developer", "user", ASSISTANT, "tool")
# ShareGPT's names of the speakers, as its data sets and LLaMA-Factory, axolotl and Hermes spell them
SPEAKERS = {
    "human": "user",
    "gpt": ASSISTANT,
    "chatgpt": ASSISTANT,
    "bing": ASSISTANT,
    "bard": ASSISTANT,
    "model": ASSISTANT,
    "function_call": ASSISTANT,
    "observation": "tool",
    "function_response": "tool",
}
LINE = (
    'one conversation a line, such as {"messages": [{"role": "user", "content": "…"}, {"role": '
    '"assistant", "content": "…"}]}'
)
FORMS = "messages, conversations, instruction and output, or prompt and completion"
# code points that stand for no character: they mark answers in what a template writes
BEGIN, END = "\ufdd0", "\ufdd1"


class Use(Enum):
    """What is done with a key of a line or of a message."""

    READ = auto()  # the conversation itself
    TEMPLATE = auto()  # given to the chat template
    LEARN = auto()  # whether the message is learned: true, false, 1 or 0
    MASK = auto()  # the opposite: true if the message is not learned
    NONE = auto()  # does not change what is learned
    UNSUPPORTED = auto()  # would change what is learned, in a way that is not supported


BOOKKEEPING = dict.fromkeys(
    (
        *("id", "idx", "index", "uuid", "conversation_id", "conversation_hash", "prompt_id", "message_id"),
        *("source", "dataset", "dataset_name", "split", "url", "license", "metadata", "meta"),
        *("timestamp", "time", "date", "created", "created_at", "updated_at"),
    ),
    (Use.NONE, "where the line comes from"),
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
    "weight": (Use.LEARN, "the message's weight in the loss (OpenAI, Mistral, Together)"),
    "train": (Use.LEARN, "whether the message is learned (axolotl)"),
    "training": (Use.LEARN, "whether the message is learned (axolotl)"),
    "loss": (Use.LEARN, "whether the message is learned (ms-swift, XTuner)"),
    "loss_weight": (Use.LEARN, "the message's weight in the loss"),
    "loss_scale": (Use.LEARN, "the message's weight in the loss"),
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
    "system": (Use.READ, "the system message"),
    "tools": (Use.TEMPLATE, "the functions that may be called, a list or its JSON"),
    "documents": (Use.TEMPLATE, "documents that the answer may use"),
    "chat_template_kwargs": (Use.TEMPLATE, "further variables of the template (TRL)"),
    "unmask": (Use.LEARN, "if true, all but the system message is learned (InstructLab)"),
    "weight": (Use.LEARN, "the line's weight in the loss (Fireworks): 1"),
    "mask": (Use.READ, "the speaker who is left out of the loss (NeMo): the user"),
    "parallel_tool_calls": (Use.NONE, "a setting of OpenAI's API"),
    "functions": (Use.UNSUPPORTED, "functions in OpenAI's older form; tools is the newer one"),
    "chosen": (Use.UNSUPPORTED, "the better of two answers, for preference training"),
    "rejected": (Use.UNSUPPORTED, "the worse of two answers, for preference training"),
    "kto_tag": (Use.UNSUPPORTED, "a judgement, for preference training"),
    "images": (Use.UNSUPPORTED, "pictures"),
    "videos": (Use.UNSUPPORTED, "videos"),
    "audios": (Use.UNSUPPORTED, "sound"),
}
# keys of lines without a list of messages: Alpaca's, and pairs of prompt and completion
ALPACA = ("instruction", "input", "output", "history", "system", "text")
PAIR = ("prompt", "completion", "system")


class WrongConversation(ValueError):
    """A conversation that cannot be learned from; `args`: what is wrong, what would be right."""


@dataclass
class Conversation:
    """What a line says, in the form that chat templates take."""

    messages: list[dict[str, Any]]  # each with a known role, and its content
    learned: list[bool]  # for each message
    variables: dict[str, Any] = field(default_factory=dict)  # what the template is given besides
    unused: Counter[str] = field(default_factory=Counter)  # keys that were present and do not matter


def read_conversation(record: Any, ignored: tuple[str, ...] = ()) -> Conversation:
    """Return the conversation of a line, whatever its form.

    `ignored` are keys that the user says do not matter. Raises `WrongConversation`.
    """
    if not isinstance(record, dict):
        raise WrongConversation("is not an object", LINE)
    unused: Counter[str] = Counter()
    record = _without(record, ignored, unused)
    turns, consumed, prompt_turns = _turns(record)
    if record.get("system"):
        turns = [{"role": "system", "content": record["system"]}, *turns]
        prompt_turns += 1

    messages, marks = [], []
    unknown: dict[str, str] = {}
    for number, turn in enumerate(turns, 1):
        message, mark = _message(turn, number, ignored, unused, unknown)
        messages.append(message)
        marks.append(mark)

    learned_roles = {ASSISTANT}
    variables: dict[str, Any] = {}
    for key, value in record.items():
        if key in consumed or key == "system":
            continue
        use, meaning = LINE_KEYS.get(key, (None, ""))
        if key in ("messages", "conversations", "conversation"):
            use = None  # a second conversation in one line
        if use is None:
            unknown[key] = ""
        elif use is Use.UNSUPPORTED:
            raise _unsupported(key, meaning, "")
        elif use is Use.NONE:
            unused[key] += 1
        elif use is Use.TEMPLATE:
            variables |= _variables(key, value)
        elif key == "mask":
            _check_masked_role(value)
        elif key == "unmask":
            if _flag(key, value, ""):
                learned_roles = set(ROLES) - {"system", "developer"}
        elif not _flag(key, value, ""):  # the line's weight
            raise WrongConversation(f"has {key} {value}, so nothing of it is learned", "no such line")

    if unknown:
        raise _unknown(unknown)
    if not any(message["role"] == ASSISTANT for message in messages):
        raise WrongConversation(f"has no answer: no message is of the role {ASSISTANT}", LINE)
    learned = [
        (index >= prompt_turns and message["role"] in learned_roles) if mark is None else mark
        for index, (message, mark) in enumerate(zip(messages, marks, strict=True))
    ]
    if not any(learned):
        raise WrongConversation("marks every answer as not learned", "one that is learned, or no such line")
    return Conversation(messages, learned, variables, unused)


def _without(record: dict[str, Any], ignored: tuple[str, ...], unused: Counter[str]) -> dict[str, Any]:
    """The keys that say something, less the `ignored` ones, which are counted in `unused`."""
    stated = {key: value for key, value in record.items() if value not in (None, "", [], {})}
    unused.update(key for key in stated if key in ignored)
    return {key: value for key, value in stated.items() if key not in ignored}


def _turns(record: dict[str, Any]) -> tuple[list[Any], tuple[str, ...], int]:
    """The turns of a line, oldest first, the keys that they were read from, and how many are the prompt's.

    The prompt of a pair is not learned, even where it has answers; in other forms every answer is.
    """
    for key in ("messages", "conversations", "conversation"):
        if key in record:
            turns = record[key]
            if isinstance(turns, str):
                turns = _parsed(turns)
            if not isinstance(turns, list):
                raise WrongConversation(f"has no list of messages under {key}", LINE)
            return turns, (key,), 0
    if "instruction" in record and "output" in record:
        question = "\n".join(_text(record[key], key) for key in ("instruction", "input") if key in record)
        return [*_history(record.get("history", [])), *_pair(question, record["output"])], ALPACA, 0
    if "prompt" in record and "completion" in record:
        prompt, completion = record["prompt"], record["completion"]
        if isinstance(prompt, list) and isinstance(completion, list):
            return [*prompt, *completion], PAIR, len(prompt)
        return _pair(_text(prompt, "prompt"), completion), PAIR, 1
    keys = ", ".join(map(str, record))[:200]
    with_keys = f"; its keys are {keys}" if keys else ""
    raise WrongConversation(f"has no list of messages{with_keys}", f"{FORMS}; {LINE}")


def _pair(question: str, answer: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": question}, {"role": ASSISTANT, "content": answer}]


def _history(pairs: Any) -> list[dict[str, Any]]:
    """Earlier questions and answers of an Alpaca line, as LLaMA-Factory has them."""
    if not isinstance(pairs, list) or any(not isinstance(p, list) or len(p) != 2 for p in pairs):
        raise WrongConversation("has a history that is not a list of pairs", '[["question", "answer"], …]')
    return [message for question, answer in pairs for message in _pair(question, answer)]


def _message(
    turn: Any, number: int, ignored: tuple[str, ...], unused: Counter[str], unknown: dict[str, str]
) -> tuple[dict[str, Any], bool | None]:
    """A message as templates take it, and whether it is learned; None: as its role says.

    Keys that do not matter are counted in `unused`; of `unknown` ones the first place is kept.
    """
    place = f" in message {number}"
    speaker = turn.get("role", turn.get("from")) if isinstance(turn, dict) else None
    if not isinstance(speaker, str):
        raise WrongConversation(f"has no role{place}", LINE)
    role = SPEAKERS.get(speaker, speaker)
    if role not in ROLES:
        names = ", ".join((*ROLES, *SPEAKERS))
        raise WrongConversation(f"has the unknown role {speaker!r:.40}{place}", f"one of {names}")

    stated = _without(turn, ignored, unused)
    content = turn.get("content", turn.get("value"))
    if isinstance(content, list) and content:
        content = "".join(_part(part, place) for part in content)
    if speaker == "function_call":
        stated["tool_calls"] = _calls(content, place)
        content = None

    message: dict[str, Any] = {"role": role, "content": content}
    mark: bool | None = None
    for key, value in stated.items():
        use, meaning = MESSAGE_KEYS.get(key, (None, ""))
        if use is None:
            unknown.setdefault(key, place)
        elif use is Use.UNSUPPORTED:
            raise _unsupported(key, meaning, place)
        elif use is Use.NONE:
            unused[key] += 1
        elif use is Use.TEMPLATE:
            message[key] = value
        elif use is not Use.READ:
            learned = _flag(key, value, place) is (use is Use.LEARN)
            if mark is not None and mark is not learned:
                raise WrongConversation(f"has keys{place} of which {key} contradicts another", "one of them")
            mark = learned
    _check_content(message, place)
    return message, mark


def _check_content(message: dict[str, Any], place: str) -> None:
    """Raise `WrongConversation` unless the message says something."""
    content, calls = message["content"], message["role"] == ASSISTANT and message.get("tool_calls")
    if not isinstance(content, str) and not (content is None and calls):
        raise WrongConversation(f"has no text as the content{place.replace(' in', ' of')}", LINE)
    if message["role"] == ASSISTANT and not calls and not str(content).strip():
        right = "an answer of at least one word, or no such conversation"
        raise WrongConversation(f"has an empty answer,{place.removeprefix(' in')}", right)
    if any(mark in str(content) for mark in (BEGIN, END)):
        raise WrongConversation(f"holds U+FDD0 or U+FDD1{place}", "text; these two stand for no character")


def _part(part: Any, place: str) -> str:
    """The text of one part of a content that is a list, as OpenAI's API has it."""
    if isinstance(part, dict) and part.get("type", "text") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    raise WrongConversation(f"has a part of the type {kind!r:.40}{place}", "parts of the type text")


def _calls(content: Any, place: str) -> list[dict[str, Any]]:
    """The tool calls of a ShareGPT turn of `function_call`, whose text is their JSON."""
    calls = _parsed(content)
    calls = calls if isinstance(calls, list) else [calls]
    if not all(isinstance(call, Mapping) and "name" in call for call in calls):
        right = '{"name": "…", "arguments": {…}}'
        raise WrongConversation(f"has a function call{place} that is not JSON", right)
    return [{"type": "function", "function": call} for call in calls]


def _variables(key: str, value: Any) -> dict[str, Any]:
    """What a key of the line adds to the variables of the template."""
    if key == "chat_template_kwargs":
        reserved = {"messages", "tools", "documents", "add_generation_prompt"}
        if not isinstance(value, dict) or reserved & value.keys():
            raise WrongConversation(f"has a wrong {key}", f"an object without {', '.join(sorted(reserved))}")
        return value
    # some sets store the list as JSON, of which a template would write the characters
    parsed = _parsed(value) if isinstance(value, str) else value
    if not isinstance(parsed, list):
        raise WrongConversation(f"has {key} that are not a list", "a list of objects, or its JSON")
    return {key: parsed}


def _check_masked_role(value: Any) -> None:
    if not isinstance(value, str) or SPEAKERS.get(value.lower(), value.lower()) != "user":
        raise WrongConversation(f"has mask {value!r:.40}", "User: answers are learned, and nothing else")


def _flag(key: str, value: Any, place: str) -> bool:
    """A value that says yes or no."""
    if isinstance(value, bool) or (isinstance(value, int | float) and value in (0, 1)):
        return bool(value)
    raise WrongConversation(
        f"has {key} {value!r:.40}{place}", "true or false, 1 or 0: a token is learned or it is not"
    )


def _text(value: Any, key: str) -> str:
    if not isinstance(value, str):
        raise WrongConversation(f"has no text under {key}", LINE)
    return value


def _parsed(text: Any) -> Any:
    """The value of JSON text; None if it is not JSON."""
    try:
        return json.loads(text)
    except (TypeError, ValueError, RecursionError):
        return None


def _unknown(keys: dict[str, str]) -> WrongConversation:
    """The error for keys, each with its place, that may change what is learned."""
    places = ", ".join(f"{key}{place}" for key, place in keys.items())
    wrong = f"has the key{'s' * (len(keys) > 1)} {places}, which may change what is learned"
    return WrongConversation(wrong, f"--ignore-keys {','.join(keys)}, if that does not matter")


def _unsupported(key: str, meaning: str, place: str) -> WrongConversation:
    """The error for a key that would change what is learned."""
    wrong = f"has the key {key}{place} ({meaning}), which is not supported"
    return WrongConversation(wrong, f"lines without it, or --ignore-keys {key}")
