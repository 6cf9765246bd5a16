"""The tokenizers of files, as other processes use them: each question goes to
`tools.text.sandbox`, which has read the file.
"""

import functools
import itertools
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from megacore.errors import DataError
from megacore.tools.text.json_tokenizer import JsonTokenizer
from megacore.tools.text.sandbox import Answer, Failure, call
from megacore.tools.text.tokenizer import KINDS, BytesTokenizer, SentencePieceTokenizer, Tokenizer

_serials = itertools.count(1)


class SandboxedTokenizer(Tokenizer):
    """A tokenizer of a file. It can be sent between processes: each has a sandbox of its own.

    Raises:
        DataError: there is no such file, it is no tokenizer, or it takes too much, now or on some text later.
    """

    def __init__(self, name: str) -> None:
        self.name, self.serial = name, next(_serials)
        described, _ = self._ask("is no tokenizer", _described)
        self.vocab_size = described["vocab_size"]
        self.bos = described["bos"]
        self.begin_of_document = tuple(described["begin_of_document"])
        self.end_of_document = described["end_of_document"]
        self.end_text = described["end_text"]
        self.generation_ends = frozenset(described["generation_ends"])
        self.special_tokens = tuple(described["special_tokens"])
        self.chat_tokens = described["chat_tokens"]

    def encode(self, text: str, special_tokens: bool = False) -> np.ndarray:
        """Return the ids of the text: int32 ``[tokens]``."""
        data = text.encode("utf-8")
        wrong = f"is no tokenizer for a text of {len(data):,} bytes"
        return np.frombuffer(self._ask(wrong, _encoded, special_tokens, body=data)[1], dtype="<i4")

    def token_bytes(self, token: int) -> bytes:
        """The bytes that the token stands for."""
        return self._pieces[token]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of token ids, as the tokenizer itself writes it."""
        return self._ask("cannot write text", _decoded, [int(i) for i in ids])[1].decode(
            "utf-8", errors="replace"
        )

    @functools.cached_property
    def _pieces(self) -> list[bytes]:
        lengths, text = self._ask("cannot write its tokens", _listed)
        edges = list(itertools.accumulate(lengths, initial=0))
        return [text[start:stop] for start, stop in itertools.pairwise(edges)]

    def _ask(self, wrong: str, function: Callable[..., Answer], *arguments: Any, body: bytes = b"") -> Answer:
        try:
            return call(function, self.name, self.serial, *arguments, body=body)
        except Failure as error:
            raise DataError(self.name, f"{wrong}: it {error}", KINDS) from None


# What follows runs in the sandbox.


@functools.lru_cache(maxsize=2)
def opened(name: str, serial: int) -> Tokenizer:
    """The tokenizer of a file, read once."""
    if name == "bytes":
        return BytesTokenizer()
    return JsonTokenizer(name) if name.endswith(".json") else SentencePieceTokenizer(name)


def _described(name: str, serial: int) -> Answer:
    tokenizer = opened(name, serial)
    described = {
        "vocab_size": tokenizer.vocab_size,
        "bos": tokenizer.bos,
        "begin_of_document": tokenizer.begin_of_document,
        "end_of_document": tokenizer.end_of_document,
        "end_text": tokenizer.end_text,
        "generation_ends": sorted(tokenizer.generation_ends),
        "special_tokens": tokenizer.special_tokens,
        "chat_tokens": dict(tokenizer.chat_tokens),
    }
    return described, b""


def _encoded(name: str, serial: int, special_tokens: bool, text: bytes = b"") -> Answer:
    ids = opened(name, serial).encode(text.decode("utf-8"), special_tokens)
    return None, ids.astype("<i4").tobytes()


def _decoded(name: str, serial: int, ids: list[int]) -> Answer:
    return None, opened(name, serial).decode(ids).encode("utf-8", errors="replace")


def _listed(name: str, serial: int) -> Answer:
    tokenizer = opened(name, serial)
    pieces = [tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)]
    return [len(piece) for piece in pieces], b"".join(pieces)
