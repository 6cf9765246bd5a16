"""Tokenizers turn text into token ids and back: bytes, a sentencepiece model (given, or
trained here), or a tokenizer.json.

Those of files run in a process of their own (`tools.text.sandboxed`): `load_tokenizer` is the way to all of
them.
"""

import io
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from megacore.errors import ConfigError, DataError
from megacore.files import read_plain
from megacore.tools.text.special_tokens import all_ends, sentencepiece_begin

TRAINED = "sentencepiece:"  # followed by the vocabulary size of a model to train
SMALLEST_VOCAB = 256 + 4 + 1  # bytes; <unk>, <s>, </s> and the newline; one piece
# A text after this one is encoded as in the middle of a document: it gets no space in front, and there are
# hardly any tokens that begin with a digit and continue with something else.
UNJOINED = "0"
KINDS = (
    "bytes, a FILE.model, a tokenizer.json or a folder with one; launch/prepare.py --tokenizer "
    f"{TRAINED}VOCAB_SIZE trains one"
)


class Tokenizer(ABC):
    """The interface of a tokenizer."""

    name: str  # `bytes`, or the path of its file
    serial = 0  # tells tokenizers apart that had the same file at different times
    vocab_size: int  # the largest id, and 1
    bos: int | None = None  # the token that its files name for the beginning of a text
    begin_of_document: tuple[int, ...] = ()  # what it puts before a text, as its own library does
    # a token that ends every document; None: documents follow each other without one
    end_of_document: int | None = None
    end_text: str = ""  # that token as it is written
    generation_ends: frozenset[int] = frozenset()  # tokens that end a generated text
    special_tokens: tuple[str, ...] = ()  # their texts
    # what a chat template writes for them; empty: there is none
    chat_tokens: Mapping[str, str] = {"bos_token": "", "eos_token": ""}

    @abstractmethod
    def encode(self, text: str, special_tokens: bool = False) -> np.ndarray:
        """Return the token ids of a text, ``[tokens]``, without tokens around it.

        With `special_tokens`, text that spells a special token, as chat templates write them, becomes that
        token. Otherwise it is encoded as any other text.
        """

    def encode_after(self, before: Iterable[str], text: str, special_tokens: bool = False) -> np.ndarray:
        """Return the token ids of a text in the middle of another, ``[tokens]``.

        Some tokenizers put a space before whatever they encode. So the text is encoded together with a text
        before it, whose tokens are then left out. `before` are such texts in the order in which they are
        tried: one is of no use if a token would span the border.
        """
        for context in before:
            front = self.encode(context, special_tokens)
            ids = self.encode(context + text, special_tokens)
            if front.size and np.array_equal(ids[: front.size], front):
                return ids[front.size :]
        return self.encode(text, special_tokens)

    @abstractmethod
    def token_bytes(self, token: int) -> bytes:
        """Return the UTF-8 bytes that a token adds to a text, perhaps a fraction of a character.

        A special token adds none.
        """

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of token ids. Bytes that are not a whole UTF-8 character become U+FFFD."""
        return b"".join(self.token_bytes(int(i)) for i in ids).decode("utf-8", errors="replace")


class BytesTokenizer(Tokenizer):
    """A tokenizer for which every byte of the UTF-8 text is a token."""

    name = "bytes"
    vocab_size = 256

    def encode(self, text: str, special_tokens: bool = False) -> np.ndarray:
        """Return the bytes of the text: uint8 ``[bytes]``."""
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8)

    def token_bytes(self, token: int) -> bytes:
        """Return the byte itself."""
        return bytes([token])


class SentencePieceTokenizer(Tokenizer):
    """A sentencepiece model (Kudo and Richardson 2018)."""

    def __init__(self, path: str) -> None:
        from sentencepiece import SentencePieceProcessor

        try:
            model = read_plain(path)
        except OSError as error:
            raise DataError(path, f"cannot be read: {error.strerror}", KINDS) from None
        try:
            if not model:  # sentencepiece would take it for a model without pieces
                raise RuntimeError
            self._processor = SentencePieceProcessor(model_proto=model)
        except RuntimeError:
            # its text names lines of sentencepiece's source, and says nothing about the file
            raise DataError(
                path, "is no sentencepiece model", "a .model that launch/prepare.py or sentencepiece trained"
            ) from None
        self.name = path
        self.vocab_size = self._processor.vocab_size()
        ids = {"bos_token": self._processor.bos_id(), "eos_token": self._processor.eos_id()}
        self.chat_tokens = {name: self._processor.id_to_piece(i) if i >= 0 else "" for name, i in ids.items()}
        self._control = {
            self._processor.id_to_piece(i): i
            for i in range(self.vocab_size)
            if self._processor.is_control(i) and self._processor.id_to_piece(i)
        }
        self.special_tokens = tuple(self._control)
        self.bos = ids["bos_token"] if ids["bos_token"] >= 0 else None
        self.begin_of_document = sentencepiece_begin(Path(path), self.bos, self.vocab_size)
        self.end_of_document = ids["eos_token"] if ids["eos_token"] >= 0 else None
        self.end_text = self.chat_tokens["eos_token"]
        self.generation_ends = all_ends(Path(path), self.end_of_document)

    def encode(self, text: str, special_tokens: bool = False) -> np.ndarray:
        """Return the pieces of the text: int32 ``[tokens]``.

        sentencepiece itself never reads a special token out of a text, so the text between them is encoded
        part by part.
        """
        if not special_tokens or not self._control:
            return np.array(self._processor.encode(text), dtype=np.int32)
        longest_first = sorted(self._control, key=len, reverse=True)
        parts = re.split(f"({'|'.join(map(re.escape, longest_first))})", text)
        ids: list[int] = []
        for part in parts:
            ids += [self._control[part]] if part in self._control else self._processor.encode(part)
        return np.array(ids, dtype=np.int32)

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of the pieces; special tokens have none."""
        return self._processor.decode([int(i) for i in ids])

    def token_bytes(self, token: int) -> bytes:
        """Return the piece's text, with spaces for ▁. A byte piece, such as ``<0x0A>``, gives the byte."""
        if self._processor.is_byte(token):
            return bytes([int(self._processor.id_to_piece(token)[3:-1], 16)])
        if self._processor.is_control(token):
            return b""
        if self._processor.is_unknown(token):
            return self._processor.decode([token]).encode("utf-8")
        return self._processor.id_to_piece(token).replace("\u2581", " ").encode("utf-8")


def load_tokenizer(name: str) -> Tokenizer:
    """`bytes`, or the tokenizer of a sentencepiece ``.model``, of a ``tokenizer.json``, or of a folder with
    one of them. Raises `DataError` if there is none.
    """
    from megacore.tools.text.sandboxed import SandboxedTokenizer

    if name == "bytes":
        return BytesTokenizer()
    return SandboxedTokenizer(inside(name) if os.path.isdir(name) else name)


def inside(folder: str) -> str:
    """The file of a folder's tokenizer: a ``tokenizer.json``, or else the only ``.model``.

    Raises `DataError` if there is none.
    """
    if os.path.isfile(file := os.path.join(folder, "tokenizer.json")):
        return file
    models = sorted(str(file) for file in Path(folder).iterdir() if file.suffix == ".model")
    if len(models) == 1:
        return models[0]
    wrong = f"holds {len(models)} .model files" if models else "holds no tokenizer.json and no .model"
    made = (
        f"transformers.AutoTokenizer.from_pretrained('{folder}').save_pretrained(…) writes a tokenizer.json"
    )
    raise DataError(folder, wrong, f"one of them: {', '.join(models[:3])}" if models else made)


def check_kind(given: str | None, recorded: str | None) -> None:
    """Raises `ConfigError` if a tokenizer given instead of the run's own cannot be the one
    that the model was trained with.
    """
    if given and recorded and (given == "bytes") != (recorded == "bytes"):
        wrong = f"{given} is of another kind than the run's {recorded}"
        raise ConfigError("--tokenizer", wrong, "the tokenizer that the model was trained with")


def trained_vocab_size(name: str) -> int:
    """The VOCAB_SIZE of ``sentencepiece:VOCAB_SIZE``. Raises `ConfigError` if no model can have it."""
    size = name.removeprefix(TRAINED)
    if not (size.isascii() and size.isdecimal()) or len(size) > 7 or int(size) < SMALLEST_VOCAB:
        wrong = f"{size or 'nothing'} is no usable vocabulary size"
        raise ConfigError(
            "--tokenizer", wrong, f"{TRAINED}N with N of at least {SMALLEST_VOCAB}, such as {TRAINED}4096"
        )
    return int(size)


def train_sentencepiece(lines: Iterable[str], vocab_size: int) -> bytes:
    """Trains a byte-pair encoding (Sennrich et al. 2016) on lines of text;
    returns the sentencepiece model file.

    The text is taken as it is: without normalisation, and without a space in front. Characters without their
    own piece become bytes. So ``decode(encode(text)) == text``, except that sentencepiece writes spaces as
    U+2581 (▁) and gives a space for a real ▁. A newline is always a piece of its own, so text that is cut
    after newlines and encoded in parts gives the same tokens.

    Raises:
        ConfigError: the text has fewer different pieces, or more different characters, than `vocab_size`.
    """
    from sentencepiece import SentencePieceTrainer

    # read here, because sentencepiece would turn an error in `lines` into one of its own
    sentences = list(lines)
    model = io.BytesIO()
    try:
        SentencePieceTrainer.train(
            sentence_iterator=iter(sentences),
            model_writer=model,
            # a unigram model saved 0.5 % of the tokens of source code, and took 14 times as long to train
            model_type="bpe",
            vocab_size=vocab_size,
            byte_fallback=True,
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,  # runs of spaces: the indentation of source code
            user_defined_symbols=["\n"],
            max_sentence_length=1 << 20,
            minloglevel=3,
        )
    except RuntimeError as error:
        wrong, right = _training_failure(str(error))
        raise ConfigError("--tokenizer", f"{TRAINED}{vocab_size} cannot be trained: {wrong}", right) from None
    return model.getvalue()


def _training_failure(message: str) -> tuple[str, str]:
    """Return sentencepiece's message in the user's terms: what is wrong, and a size that would be right."""
    if "set it to a value <= " in message:
        most = message.rpartition("<= ")[2].strip(" .")
        return "the text has too few different pieces", f"{TRAINED}{most} at most, or more text"
    if (least := re.search(r"smaller than required_chars\. \d+ vs (\d+)", message)) is not None:
        return "the text has more different characters", f"{TRAINED}{least[1]} at least"
    if "sentences_.empty()" in message:
        return "no line of the text can be learned from", "text with lines of less than 1 MiB"
    return message, KINDS
