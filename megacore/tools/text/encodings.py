"""OpenAI's tokenizers by name, as the package tiktoken fetches them, written as a
tokenizer.json, a file as any other.
"""

import json
import os
import re
from importlib import import_module
from typing import Any

from megacore.errors import DataError
from megacore.tools.text.json_tokenizer import byte_characters
from megacore.tools.text.tokenizer import KINDS

NAMES = ("gpt2", "r50k_base", "p50k_base", "p50k_edit", "cl100k_base", "o200k_base", "o200k_harmony")
ENCODING = ".tokenizer.json"  # behind the prefix of a corpus
EXTRA = "pip install 'megacore[datasets]', or in a checkout: pip install -e '.[datasets]'"
PROBE = "I'll SHE'LL\t1234567 0,5%  \n\n  naïve don't 日本語 😀👍🏽 __init__(self):\r\n\t\tx=+1\u00a0…\x00 Über𝔘𝔫𝔦 "  # noqa: E501


def needed(where: str, module: str) -> Any:
    """A module of the extra `datasets`. Raises `DataError` if it is not installed."""
    try:
        return import_module(module)
    except ImportError:
        raise DataError(
            where, f"needs the package {module.partition('.')[0]}, which is not installed", EXTRA
        ) from None


def is_encoding(name: str) -> bool:
    """Whether a tokenizer's name is one of `NAMES`, and no file or folder."""
    return name in NAMES and not os.path.exists(name)


def encoding_json(name: str) -> bytes:
    """The tokenizer.json of one of `NAMES`. Raises `DataError` if it cannot be fetched."""
    tiktoken = needed(name, "tiktoken")
    try:
        encoding = tiktoken.get_encoding(name)
    except Exception as error:
        # of requests, of the file system, and of a download that is not what it should be
        why = " ".join(str(error).split())[:200] or type(error).__name__
        right = "a network, or TIKTOKEN_CACHE_DIR with what tiktoken has fetched elsewhere"
        raise DataError(name, f"cannot be fetched by tiktoken: {why}", right) from None
    return converted(encoding)


def converted(encoding: Any) -> bytes:
    """An encoding of tiktoken as a tokenizer.json.

    Raises `DataError` if the two encode a probe in different ways.

    tiktoken joins the neighbours whose union has the smallest id. A tokenizer.json lists the pairs to join,
    the first ones first: so it lists all pairs of tokens that make up a token, in the order of what they
    make.
    """
    characters = {byte[0]: character for character, byte in byte_characters().items()}
    ids: dict[bytes, int] = encoding._mergeable_ranks

    def written(token: bytes) -> str:
        return "".join(characters[byte] for byte in token)

    merges = []
    for token in sorted(ids, key=ids.__getitem__):
        pairs = [
            (token[:i], token[i:]) for i in range(1, len(token)) if token[:i] in ids and token[i:] in ids
        ]
        merges += [
            [written(left), written(right)]
            for left, right in sorted(pairs, key=lambda pair: (ids[pair[0]], ids[pair[1]]))
        ]
    # Of "{1,3}+" tokenizers would repeat the group; at the end of an alternative, as in all of these, "{1,3}"
    # is the same.
    pattern = re.sub(r"(\{\d+,\d+\})\+", r"\1", encoding._pat_str)
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    bytewise = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    content = {
        "version": "1.0",
        "added_tokens": [
            {"id": i, "content": text} | flags
            for text, i in sorted(encoding._special_tokens.items(), key=lambda t: t[1])
        ],
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False},
                bytewise,
            ],
        },
        "decoder": bytewise,
        "model": {
            "type": "BPE",
            "ignore_merges": True,
            "vocab": {written(t): i for t, i in ids.items()},
            "merges": merges,
        },
    }
    text = json.dumps(content, ensure_ascii=False)
    theirs = (
        needed(encoding.name, "tokenizers")
        .Tokenizer.from_str(text)
        .encode(PROBE, add_special_tokens=False)
        .ids
    )
    if theirs != encoding.encode_ordinary(PROBE):
        raise DataError(encoding.name, "becomes a tokenizer.json that gives other tokens", KINDS)
    return text.encode("utf-8")
