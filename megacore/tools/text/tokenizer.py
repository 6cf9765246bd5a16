"""Tokenizers turn text into token ids and back: bytes, a sentencepiece model (given, or
trained here), or a tokenizer.json.

Those of files run in a process of their own (`tools.text.sandboxed`): `load_tokenizer` is the way to all of
them.
"""

import io
import json
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from megacore.errors import ConfigError, DataError
from megacore.files import read_plain, read_text

TRAINED = "sentencepiece:"  # followed by the vocabulary size of a model to train
SMALLEST_VOCAB = 256 + 4 + 1  # bytes; <unk>, <s>, </s> and the newline; one piece
MOST_TOKENS = 10**7
# files beside a tokenizer.json that name its special tokens
NAMING = ("tokenizer_config.json", "special_tokens_map.json")
# of documents, in known models
ENDS = ("<|endoftext|>", "</s>", "<eos>", "<|end_of_text|>", "<|eos|>", "<｜end▁of▁sentence｜>", "[EOS]")
KINDS = (
    "bytes, a FILE.model, a tokenizer.json or a folder with one; launch/prepare.py --tokenizer "
    f"{TRAINED}VOCAB_SIZE trains one"
)


class Tokenizer(ABC):
    """The interface of a tokenizer."""

    name: str  # `bytes`, or the path of its file
    serial = 0  # tells tokenizers apart that had the same file at different times
    vocab_size: int  # the largest id, and 1
    # a token that ends every document; None: documents follow each other without one
    end_of_document: int | None = None
    # what a chat template writes for them; empty: there is none
    chat_tokens: Mapping[str, str] = {"bos_token": "", "eos_token": ""}

    @abstractmethod
    def encode(self, text: str) -> np.ndarray:
        """The token ids of a text, ``[tokens]``, without special tokens."""

    def encode_chat(self, text: str) -> np.ndarray:
        """As `encode`; text that spells a special token, as chat templates write them, is that token."""
        return self.encode(text)

    @abstractmethod
    def token_bytes(self, token: int) -> bytes:
        """The UTF-8 bytes that a token stands for, perhaps a part of a character.

        A special token has none.
        """

    def decode(self, ids: Iterable[int]) -> str:
        """The text of token ids. Bytes that are not a whole UTF-8 character become U+FFFD."""
        return b"".join(self.token_bytes(int(i)) for i in ids).decode("utf-8", errors="replace")


class BytesTokenizer(Tokenizer):
    """A tokenizer for which every byte of the UTF-8 text is a token."""

    name = "bytes"
    vocab_size = 256

    def encode(self, text: str) -> np.ndarray:
        """The bytes of the text: uint8 ``[bytes]``."""
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8)

    def token_bytes(self, token: int) -> bytes:
        """The byte itself."""
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
        eos = self._processor.eos_id()
        self.end_of_document = eos if eos >= 0 else None
        ids = {"bos_token": self._processor.bos_id(), "eos_token": eos}
        self.chat_tokens = {name: self._processor.id_to_piece(i) if i >= 0 else "" for name, i in ids.items()}
        self._spelt = {self.chat_tokens[name]: i for name, i in ids.items() if i >= 0}

    def encode(self, text: str) -> np.ndarray:
        """The pieces of the text: int32 ``[tokens]``."""
        return np.array(self._processor.encode(text), dtype=np.int32)

    def encode_chat(self, text: str) -> np.ndarray:
        """Parts of the text between `chat_tokens`, and these tokens: int32 ``[tokens]``."""
        parts = re.split(f"({'|'.join(map(re.escape, self._spelt))})", text) if self._spelt else [text]
        return np.concatenate(
            [[self._spelt[part]] if part in self._spelt else self.encode(part) for part in parts]
        ).astype(np.int32)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of the pieces; special tokens have none."""
        return self._processor.decode([int(i) for i in ids])

    def token_bytes(self, token: int) -> bytes:
        """The piece's text, with spaces for ▁. A byte piece, such as ``<0x0A>``, gives the byte."""
        if self._processor.is_byte(token):
            return bytes([int(self._processor.id_to_piece(token)[3:-1], 16)])
        if self._processor.is_control(token):
            return b""
        if self._processor.is_unknown(token):
            return self._processor.decode([token]).encode("utf-8")
        return self._processor.id_to_piece(token).replace("\u2581", " ").encode("utf-8")


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
        added = json.loads(text).get("added_tokens", [])
        self._special = {int(token["id"]) for token in added if token.get("special")}
        self._bytes = byte_characters() if '"ByteLevel"' in text else None
        self.chat_tokens = self._named(Path(path))
        end = self.chat_tokens["eos_token"]
        if not end:  # no file beside this one says: by its name, if only one has such a name
            known = [token["content"] for token in added if token.get("special") and token["content"] in ENDS]
            end = known[0] if len(known) == 1 else ""
        self.end_of_document = self._tokenizer.token_to_id(end) if end else None

    def _named(self, path: Path) -> dict[str, str]:
        """The text of the tokens that begin and end a text, each from the first of the files in `NAMING`
        beside this one that says it; empty where none does.
        """
        texts = dict(Tokenizer.chat_tokens)
        for settings in (path.with_name(name) for name in NAMING):
            if settings.is_file():
                try:
                    found = json.loads(read_text(settings))
                except (OSError, ValueError, RecursionError) as error:
                    raise DataError(
                        str(settings), f"is no JSON: {error}", f"a {settings.name} as transformers writes it"
                    ) from None
                for name in texts if isinstance(found, dict) else ():
                    token = found.get(name)
                    text = token.get("content") if isinstance(token, dict) else token
                    if isinstance(text, str) and not texts[name]:
                        texts[name] = text
        return texts

    def encode(self, text: str) -> np.ndarray:
        """The ids of the text: int32 ``[tokens]``."""
        return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.int32)

    def token_bytes(self, token: int) -> bytes:
        """The bytes of the token's characters: byte by byte, or as text with ▁ for
        spaces and ``<0x0A>`` for a byte.
        """
        piece = self._tokenizer.id_to_token(token)
        if piece is None or token in self._special:
            return b""
        if self._bytes is not None:
            return b"".join(self._bytes.get(c, c.encode("utf-8")) for c in piece)
        if re.fullmatch(r"<0x[0-9A-F]{2}>", piece):
            return bytes([int(piece[3:-1], 16)])
        return piece.replace("\u2581", " ").encode("utf-8")


def byte_characters() -> dict[str, bytes]:
    """The printable characters that byte-level encodings write for bytes (Radford et al. 2019, GPT-2).

    Characters that are printable in Latin-1 stand for themselves; the other bytes have characters 256, 257, …
    in their order.
    """
    plain = [b for b in range(256) if chr(b).isprintable() and b != 0x20]
    others = [b for b in range(256) if b not in plain]
    return {chr(b): bytes([b]) for b in plain} | {chr(256 + i): bytes([b]) for i, b in enumerate(others)}


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


def open_tokenizer(name: str) -> Tokenizer:
    """As `load_tokenizer`, in this process, which is the sandbox."""
    if name == "bytes":
        return BytesTokenizer()
    return JsonTokenizer(name) if name.endswith(".json") else SentencePieceTokenizer(name)


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
