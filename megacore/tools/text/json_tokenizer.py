"""The tokenizer of a tokenizer.json, as Hugging Face's package `tokenizers` reads it."""

import json
import re
from collections.abc import Iterable
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from megacore.errors import DataError
from megacore.files import read_text
from megacore.tools.text.special_tokens import all_ends, named_tokens, read_post_processor, stated_bos
from megacore.tools.text.tokenizer import UNJOINED, Tokenizer

MOST_TOKENS = 10**7
# end tokens of documents, in known models
ENDS = ("<|endoftext|>", "</s>", "<eos>", "<|end_of_text|>", "<|eos|>", "<｜end▁of▁sentence｜>", "[EOS]")
# In place of an added token while others are decoded: a code point that no text has (a noncharacter).
MARK = "\ufdd2"


class JsonTokenizer(Tokenizer):
    """A ``tokenizer.json`` of Hugging Face's `tokenizers`, such as GPT-2's and Llama 3's.

    What such a file says about the lengths of texts and about chance is for other uses, and does not count:
    texts are neither cut nor padded, and no merge is left out at random.
    """

    def __init__(self, path: str) -> None:
        try:
            from tokenizers import Tokenizer as Fast
        except ImportError:
            raise DataError(path, "needs the package tokenizers", "pip install 'megacore[hf]'") from None
        try:
            text = read_text(path)
            self._tokenizer = Fast.from_str(text)
        except OSError as error:
            raise DataError(
                path, f"cannot be read: {error.strerror}", "the path of a tokenizer.json"
            ) from None
        except MemoryError:
            raise
        except Exception as error:  # `tokenizers` raises nothing more particular
            raise DataError(
                path, f"is no tokenizer: {error}", "a tokenizer.json as transformers writes it"
            ) from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        if getattr(self._tokenizer.model, "dropout", None) is not None:
            self._tokenizer.model.dropout = None
        self.name = path
        self.vocab_size = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        if not 0 < self.vocab_size <= MOST_TOKENS:
            raise DataError(
                path, f"has ids up to {self.vocab_size - 1:,}", f"a tokenizer of 1 to {MOST_TOKENS:,} tokens"
            )
        content = json.loads(text)
        self._find_special_tokens(content)
        self._read_decoder(content)

    def _find_special_tokens(self, content: dict[str, Any]) -> None:
        """Find the added tokens, and those that begin and end a text."""
        path = Path(self.name)
        added = self._tokenizer.get_added_tokens_decoder()
        self._special = {token: entry.content for token, entry in added.items() if entry.special}
        self._written = {token: entry.content for token, entry in added.items() if not entry.special}
        self.special_tokens = tuple(filter(None, self._special.values()))
        self.chat_tokens = named_tokens(path)
        around = read_post_processor(content.get("post_processor"))

        bos_text = self.chat_tokens["bos_token"]
        self.bos = self._tokenizer.token_to_id(bos_text) if bos_text else None
        stated = stated_bos(path)
        if stated is None:
            self.begin_of_document = around.before
        elif stated:
            self.begin_of_document = around.before or (() if self.bos is None else (self.bos,))

        end_text = self.chat_tokens["eos_token"]
        known = [text for text in self.special_tokens if text in ENDS]
        if end_text:
            self.end_of_document = self._tokenizer.token_to_id(end_text)
        elif len(around.after) == 1:
            self.end_of_document = around.after[0]
        elif len(known) == 1:  # nothing says it, but only one special token has such a name
            self.end_of_document = self._tokenizer.token_to_id(known[0])
        if self.end_of_document is not None:
            self.end_text = self._tokenizer.id_to_token(self.end_of_document) or ""
        self.generation_ends = all_ends(path, self.end_of_document)

    def _read_decoder(self, content: dict[str, Any]) -> None:
        """Prepare what `decode` and `token_bytes` need of the file's decoder."""
        decoder = content.get("decoder")
        # A few files have no decoder; then the text is written as it was prepared for the model.
        kinds = json.dumps(content.get("pre_tokenizer") if decoder is None else decoder)
        self._bytes = byte_characters() if '"ByteLevel"' in kinds else None
        self._byte_fallback = '"ByteFallback"' in kinds
        self._decoder = self._tokenizer.decoder
        if self._decoder is None:
            from tokenizers import decoders

            if self._bytes is not None:
                self._decoder = decoders.ByteLevel()
            elif '"Metaspace"' in kinds:
                self._decoder = decoders.Metaspace()
        if self._bytes is None:
            self._written = {}  # other decoders leave added tokens as they are
        self._neighbours = len(self._join([MARK, MARK]))
        # CLIP's file has a byte-level decoder, which leaves the </w> that ends its words in the text.
        model = content.get("model")
        suffix = model.get("end_of_word_suffix") if isinstance(model, dict) else None
        self._suffix = suffix if self._bytes is not None and suffix else ""

    def encode(self, text: str, special_tokens: bool = False) -> np.ndarray:
        """Return the ids of the text: int32 ``[tokens]``."""
        self._tokenizer.encode_special_tokens = not special_tokens
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        if not special_tokens and (spelled := self._spelled(ids, text)):
            # The vocabulary of some models, such as T5's, has special tokens as words, too.
            starts = [match.start() + 1 for match in re.finditer("|".join(map(re.escape, spelled)), text)]
            parts = [text[i:j] for i, j in pairwise([0, *starts, len(text)])]
            encoded = [self.encode(parts[0]), *(self.encode_after([UNJOINED], part) for part in parts[1:])]
            return np.concatenate(encoded)
        return np.array(ids, dtype=np.int32)

    def _spelled(self, ids: list[int], text: str) -> list[str]:
        """Return the special tokens among `ids` that a text spells, of two characters at least."""
        found = [self._special[token] for token in self._special.keys() & set(ids)]
        return [written for written in found if len(written) > 1 and written in text]

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of token ids, by the file's own decoder.

        Special tokens have none. Other added tokens are what they are written as: a byte-level decoder would
        take their letters, such as ß, for bytes.
        """
        tokens = [int(token) for token in ids if int(token) not in self._special]
        pieces = []
        added = []
        for token, following in zip_longest(tokens, tokens[1:]):
            piece = self._tokenizer.id_to_token(token)
            if piece is None:
                continue
            if token in self._written and not self._is_first_byte(piece, following):
                added.append(self._written[token])
                piece = MARK
            pieces.append(piece)
        text = self._join(pieces)
        if self._suffix:
            text = text.replace(self._suffix, " ").removesuffix(" ")
        in_order = iter(added)
        return re.sub(MARK, lambda mark: next(in_order, mark[0]), text)

    def _is_first_byte(self, piece: str, following: int | None) -> bool:
        """Return whether an added token is the first byte of a character that the next token continues.

        An added token of one letter, such as é, has the id of the byte that is written as that letter.
        """
        assert self._bytes is not None
        if following is None or self._bytes.get(piece, b"") < b"\xc2" or following in self._written:
            return False
        letters = self._tokenizer.id_to_token(following) or " "
        return b"\x80" <= self._bytes.get(letters[0], b"") < b"\xc0"

    def _join(self, pieces: list[str]) -> str:
        """Return the text of pieces of the vocabulary; without a decoder, with spaces between them."""
        return " ".join(pieces) if self._decoder is None else self._decoder.decode(pieces)

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes that the token adds to a text in the middle of it."""
        piece = self._tokenizer.id_to_token(token)
        if piece is None or token in self._special:
            return b""
        if token in self._written:
            return self._written[token].encode("utf-8")
        if self._bytes is not None:
            word = piece.removesuffix(self._suffix)
            space = b" " if len(word) < len(piece) else b""
            return b"".join(self._bytes.get(c, c.encode("utf-8")) for c in word) + space
        if self._byte_fallback and re.fullmatch(r"<0x[0-9A-F]{2}>", piece):
            return bytes([int(piece[3:-1], 16)])
        # Between two neighbours, because decoders treat the first and the last token of a text in other ways.
        text = self._join([MARK, piece, MARK])
        return text[1 : 1 + len(text) - self._neighbours].encode("utf-8")


def byte_characters() -> dict[str, bytes]:
    """The printable characters that byte-level encodings write for bytes (Radford et al. 2019, GPT-2).

    Characters that are printable in Latin-1 stand for themselves; the other bytes have characters 256, 257, …
    in their order.
    """
    plain = [b for b in range(256) if chr(b).isprintable() and b != 0x20]
    others = [b for b in range(256) if b not in plain]
    return {chr(b): bytes([b]) for b in plain} | {chr(256 + i): bytes([b]) for i, b in enumerate(others)}
