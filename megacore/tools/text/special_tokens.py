"""Which tokens begin and end a text: a tokenizer's own file says it, and the files next to it."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megacore.errors import DataError
from megacore.files import read_text

CONFIG, MAP, FAST, GENERATION = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "tokenizer.json",
    "generation_config.json",
)
# Files of a model's folder that decide, next to the tokenizer's own file, which tokens a corpus gets.
BESIDE = (CONFIG, MAP, FAST)
# transformers' classes for sentencepiece models that are trained with a BOS token: it is their default, so
# their config need not name `add_bos_token`.
BOS_CLASSES = ("LlamaTokenizer", "CodeLlamaTokenizer", "GemmaTokenizer")


@dataclass(frozen=True)
class PostProcessor:
    """The token ids that a tokenizer.json puts before and after a single text."""

    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; an empty one if there is no such file. Raises `DataError`."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(read_text(path))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(
            str(path), f"is no JSON: {error}", f"a {path.name} as transformers writes it"
        ) from None
    return content if isinstance(content, dict) else {}


def named_tokens(path: Path) -> dict[str, str]:
    """Return the text of `bos_token` and `eos_token`, by the files next to a tokenizer's file.

    Each is from the first file that names it, and empty if none does.
    """
    texts = {"bos_token": "", "eos_token": ""}
    for settings in (read_object(path.with_name(name)) for name in (CONFIG, MAP)):
        for name in texts:
            token = settings.get(name)
            text = token.get("content") if isinstance(token, dict) else token
            if isinstance(text, str) and not texts[name]:
                texts[name] = text
    return texts


def stated_bos(path: Path) -> bool | None:
    """Return `add_bos_token` of the tokenizer_config.json next to a tokenizer's file, None without one."""
    stated = read_object(path.with_name(CONFIG)).get("add_bos_token")
    return stated if isinstance(stated, bool) else None


def sentencepiece_begin(path: Path, bos: int | None, vocab_size: int) -> tuple[int, ...]:
    """Return the ids that a model's sentencepiece tokenizer puts before a text.

    A ``.model`` has a BOS token whether or not texts begin with it; only the files next to it tell.
    """
    stated = stated_bos(path)
    if stated is None and path.with_name(FAST).is_file():
        before = read_post_processor(read_object(path.with_name(FAST)).get("post_processor")).before
        return before if all(token < vocab_size for token in before) else ()
    if stated is None:
        name = read_object(path.with_name(CONFIG)).get("tokenizer_class")
        stated = isinstance(name, str) and name.removesuffix("Fast") in BOS_CLASSES
    return (bos,) if stated and bos is not None else ()


def read_post_processor(content: Any) -> PostProcessor:
    """Return what the `post_processor` of a tokenizer.json puts around a text."""
    kind = content.get("type") if isinstance(content, dict) else None
    try:
        if kind == "Sequence":
            parts = [read_post_processor(part) for part in content["processors"]]
            before = tuple(token for part in reversed(parts) for token in part.before)
            return PostProcessor(before, tuple(token for part in parts for token in part.after))
        if kind in ("BertProcessing", "RobertaProcessing"):
            return PostProcessor((int(content["cls"][1]),), (int(content["sep"][1]),))
        if kind == "TemplateProcessing":
            return _read_template(content)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError):
        return PostProcessor()  # not what `tokenizers` writes, which itself rejects such a file
    return PostProcessor()


def _read_template(content: Mapping[str, Any]) -> PostProcessor:
    """Return the ids before and after the text in a template such as ``<s> $A </s>``."""
    before: list[int] = []
    after: list[int] = []
    side = before
    for item in content["single"]:
        if "Sequence" in item:
            side = after
        else:
            side += [int(token) for token in content["special_tokens"][item["SpecialToken"]["id"]]["ids"]]
    return PostProcessor(tuple(before), tuple(after))


def all_ends(path: Path, end_of_document: int | None) -> frozenset[int]:
    """Return the tokens that end a generated text: that of documents, and those of generation_config.json.

    The file is next to the tokenizer's. Models for conversations list several tokens in it: one for the end
    of a turn, and one for the end of a text.
    """
    settings = path.with_name(GENERATION)
    ends = read_object(settings).get("eos_token_id")
    ids = ends if isinstance(ends, list) else [] if ends is None else [ends]
    if not all(type(token) is int and token >= 0 for token in ids):
        wrong = f"eos_token_id: {ends!s:.80} is not usable"
        raise DataError(str(settings), wrong, "a token id, or a list of token ids")
    return frozenset(ids if end_of_document is None else [*ids, end_of_document])
