"""Turns text into token files, in parallel and in order. No half-written file is left.

Workers read, check and encode about a MiB of text at a time, so only tokens pass between processes. This process writes them.
Memory depends on the number of texts, never on their size.
"""

import functools
import os
import signal
import tempfile
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import TypeVar

import numpy as np

from megacore.data.indexed import MASK, Sidecar
from megacore.data.shuffle import derive_key, permute
from megacore.errors import ConfigError, DataError
from megacore.tools.output_files import made_folder
from megacore.tools.prepare.chat import LINE, Chat, WrongConversation, chat_of
from megacore.tools.prepare.chat import encode as encode_chat
from megacore.tools.prepare.indexed_writer import IndexedWriter
from megacore.tools.prepare.input_files import LeftOut
from megacore.tools.prepare.sources import Piece, ReadBlock, TextBlock, Texts, parts, place, read_block
from megacore.tools.text.tokenizer import TRAINED, Tokenizer, load_tokenizer, train_sentencepiece, trained_vocab_size

TASK_BYTES = 1 << 20  # of text that a worker gets at a time
SAMPLE_BYTES = 8 << 20  # of text on which a tokenizer is trained

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class Prepared:
    """The result: the sidecar of each prefix, the training split's first."""

    splits: dict[str, Sidecar]
    tokenizer: str  # as a config's data.tokenizer would name it
    left_out: list[LeftOut]  # what folders hold and was not read
    input_bytes: int  # of what was read
    end: str | None  # the token that ends every document; None: there is none


@dataclass
class Encoded:
    """A task's part of one split: its sequences, which of them end a document, and the bytes of text they came from."""

    sequences: list[np.ndarray] = field(default_factory=list)
    learned: list[np.ndarray | None] = field(default_factory=list)  # which tokens of each, bool; None: all
    ends: list[bool] = field(default_factory=list)
    text_bytes: int = 0


class Split:
    """One of the two outputs, while it is written."""

    def __init__(self, prefix: str, writer: IndexedWriter, vocab_size: int) -> None:
        self.prefix, self.writer = prefix, writer
        self.counts = np.zeros(vocab_size, dtype=np.int64)  # how often each token id is learned
        self.text_bytes = self.max_token = 0

    def add(self, encoded: Encoded) -> None:
        """Appends a task's sequences."""
        self.text_bytes += encoded.text_bytes
        for tokens, learned, ends in zip(encoded.sequences, encoded.learned, encoded.ends, strict=True):
            self.writer.write(tokens, learned)
            self.counts += np.bincount(tokens if learned is None else tokens[learned], minlength=len(self.counts))
            self.max_token = max(self.max_token, int(tokens.max(initial=0)))
            if ends:
                self.writer.end_document()


def prepare(
    inputs: list[str],
    prefix: str,
    tokenizer: str,
    *,
    text_key: str = "text",
    chat: bool = False,
    template: str | None = None,
    valid_fraction: float = 0.0,
    workers: int = 1,
    on_start: Callable[[int], object] = lambda total: None,
    on_bytes: Callable[[int], object] = lambda size: None,
) -> Prepared:
    """Tokenizes `inputs` into ``prefix.bin/.idx/.json``, ``prefix_valid.*`` and, if one is trained, ``prefix.model``.

    The result does not depend on `workers`.

    Args:
        inputs: files, folders, globs, `python-stdlib` (see `sources`).
        prefix: what to write; its folder is made.
        tokenizer: `bytes`, ``sentencepiece:VOCAB_SIZE`` or a model's path.
        text_key: the key of the text in ``.jsonl`` files, or the column of tables.
        chat: the inputs are conversations; also writes ``prefix.mask.bin`` (`tools.prepare.chat`).
        template: a file with a chat template; None: the model's own, beside its tokenizer.
        valid_fraction: the fraction of the text for validation, see `Texts`; 0 writes no ``prefix_valid.*``.
        workers: processes; with 1 this process does the work.
        on_start, on_bytes: called with the bytes of all inputs once, and with the bytes just done.

    Raises:
        DataError, ConfigError: the user got something wrong. No output has appeared or changed.
    """
    vocab_to_train = trained_vocab_size(tokenizer) if tokenizer.startswith(TRAINED) else None
    if vocab_to_train is None:
        loaded = load_tokenizer(tokenizer)  # refuses a wrong one before any text is read
    elif chat:
        raise ConfigError("--tokenizer", f"{tokenizer} would be trained on conversations", "one that exists, such as the model's")
    form = chat_of(tokenizer, template) if chat else None
    prefixes = [prefix, f"{prefix}_valid"] if valid_fraction else [prefix]
    texts = opened(inputs, prefixes, tokenizer, valid_fraction, trains=vocab_to_train is not None, chat=form)
    try:
        texts.divide(None if chat else text_key)
        with ExitStack() as stack:
            stack.enter_context(made_folder(Path(prefix).parent))
            name = tokenizer
            if vocab_to_train is not None:
                folder = stack.enter_context(tempfile.TemporaryDirectory(prefix=".prepare-", dir=Path(prefix).parent))
                name = f"{folder}/{Path(prefix).name}.model"
                Path(name).write_bytes(train_sentencepiece(sample_lines(texts, text_key), vocab_to_train))
                loaded = load_tokenizer(name)
            vocab_size = loaded.vocab_size
            dtype = np.dtype(np.uint8 if vocab_size <= 2**8 else np.uint16 if vocab_size <= 2**16 else np.int32)
            splits = [Split(p, stack.enter_context(IndexedWriter(p, dtype, chat)), vocab_size) for p in prefixes]
            on_start(texts.num_bytes)
            encode = functools.partial(encode_task, loaded, dtype, text_key, form)
            with closing(ordered_map(encode, tasks(texts, None if chat else text_key), workers)) as results:
                for size, encoded in results:
                    for split, part in zip(splits, encoded, strict=False):
                        split.add(part)
                    on_bytes(size)
            refuse_empty(splits)
            for split in splits:
                split.writer.finish()
            if vocab_to_train is not None:
                os.replace(name, f"{prefix}.model")
                name = f"{prefix}.model"
        # The sidecars come last, because a sidecar that is older than its .bin does not count.
        sidecars = {split.prefix: sidecar(split, splits[0], name) for split in splits}
        for p, written in sidecars.items():
            written.save(p)
    except BrokenProcessPool:
        raise DataError(prefix, "cannot be prepared: one of its processes was ended", "enough memory, or fewer --workers") from None
    except OSError as error:
        raise DataError(prefix, f"cannot be written: {error.strerror}", "a prefix in a writable folder with space left") from None
    end = None if loaded.end_of_document is None else f"token {loaded.end_of_document} {loaded.chat_tokens['eos_token']}".strip()
    return Prepared(sidecars, name, texts.left_out, texts.num_bytes, end)


def opened(inputs: list[str], prefixes: list[str], tokenizer: str, valid_fraction: float, *, trains: bool, chat: Chat | None) -> Texts:
    """The texts to read. Refuses outputs that would overwrite one of them. `trains`: a tokenizer's model is written too."""
    if Path(prefixes[0]).name in ("", "..") or prefixes[0].endswith(("/", "/.")):
        wrong = f"`{prefixes[0]}` names no file"
        raise ConfigError("--output", wrong, "a prefix such as data/mine, of the files data/mine.bin and .idx")
    texts = Texts(inputs, valid_fraction)
    if chat and (others := [source.path for source in texts.sources if source.one_document]):
        raise DataError(others[0], "holds no conversations", f"tables, or files whose names end with .jsonl, with {LINE}")
    outputs = [f"{p}{suffix}" for p in prefixes for suffix in (".bin", MASK, ".idx", ".json")] + [f"{prefixes[0]}.model"] * trains
    read = [*inputs, *(source.path for source in texts.sources), tokenizer, *([chat.path] if chat else [])]
    refuse_overwriting([prefixes[0], *outputs], read)
    return texts


def sample_lines(texts: Texts, text_key: str) -> Iterator[str]:
    """Yields training text for a tokenizer, line by line: whole blocks in a fixed random order, up to `SAMPLE_BYTES`."""
    left = SAMPLE_BYTES
    for number in permute(np.arange(len(texts)), len(texts), derive_key(0)).tolist():
        most = max(SAMPLE_BYTES // len(texts.sources), TASK_BYTES)  # of what can only be read in order: from its beginning
        for piece in (piece for part in parts(texts[number], text_key) for piece in read_block(part, text_key)):
            if not piece.valid:
                yield from piece.text.split("\n")
                left -= len(piece.text)
                most -= len(piece.text)
            if texts[number].source.form and most <= 0:
                break
        if left <= 0:
            break


def tasks(texts: Texts, text_key: str | None) -> Iterator[list[TextBlock | ReadBlock]]:
    """Yields all blocks in order, in lists of about `TASK_BYTES` of text."""
    task: list[TextBlock | ReadBlock] = []
    size = 0
    for block in (part for number in range(len(texts)) for part in parts(texts[number], text_key)):
        task.append(block)
        size += sum(map(len, block.texts)) if isinstance(block, ReadBlock) else block.size
        if size >= TASK_BYTES:
            yield task
            task, size = [], 0
    if task:
        yield task


def encode_task(
    tokenizer: Tokenizer, dtype: np.dtype, text_key: str, chat: Chat | None, task: list[TextBlock | ReadBlock]
) -> tuple[int, list[Encoded]]:
    """Encodes the training and the validation text of some blocks; also returns the blocks' size in bytes."""
    train, valid = Encoded(), Encoded()
    for block in task:
        pieces = list(read_block(block, None if chat else text_key))
        for piece, tokens, learned, size in texts_of(tokenizer, pieces) if chat is None else conversations(tokenizer, block, pieces, chat):
            split = valid if piece.valid else train
            split.sequences.append(tokens.astype(dtype, copy=False))
            split.learned.append(learned)
            split.ends.append(piece.ends)
            split.text_bytes += size
    return sum(block.size for block in task), [train, valid]


def texts_of(tokenizer: Tokenizer, pieces: list[Piece]) -> Iterator[tuple[Piece, np.ndarray, np.ndarray | None, int]]:
    """Pieces of text, each with its tokens, which of them are learned (None: all), and its bytes."""
    for piece in pieces:
        tokens = tokenizer.encode(piece.text)
        if piece.ends and tokenizer.end_of_document is not None:
            tokens = np.append(tokens, tokenizer.end_of_document)
        yield piece, tokens, None, len(piece.text.encode("utf-8"))


def conversations(
    tokenizer: Tokenizer, block: TextBlock | ReadBlock, pieces: list[Piece], chat: Chat
) -> Iterator[tuple[Piece, np.ndarray, np.ndarray | None, int]]:
    """The same of conversations. Raises `DataError` that names the line."""
    encoded = encode_chat(chat, tokenizer, [piece.text for piece in pieces]) if pieces else iter(())
    for piece in pieces:
        try:
            yield piece, *next(encoded)
        except WrongConversation as error:
            wrong, right = error.args
            raise DataError(block.source.path, f"{place(block.source, piece.start)} {wrong}", right) from None


def ordered_map(function: Callable[[T], R], items: Iterable[T], workers: int) -> Generator[R, None, None]:
    """`map` over processes, with results in order. Unlike `Pool.imap` it has at most four items a worker under way."""
    if workers == 1:
        yield from map(function, items)
        return
    # Spawned, not forked: a fork copies the locks of the progress bar's thread. Ctrl-C is left to this process.
    pool = ProcessPoolExecutor(workers, get_context("spawn"), signal.signal, (signal.SIGINT, signal.SIG_IGN))
    try:
        pending: deque[Future[R]] = deque()
        for item in items:
            pending.append(pool.submit(function, item))
            if len(pending) == 4 * workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def refuse_overwriting(outputs: list[str], inputs: list[str]) -> None:
    """Raises `ConfigError` if an output is the same file as an input, under whatever name."""
    found: dict[object, str] = {identity: path for path in outputs if (identity := identity_of(path)) is not None}
    for path in inputs if found else ():
        if (output := found.get(identity_of(path))) is not None:
            what = "is" if output == outputs[0] else f"would overwrite {output}, which is"
            raise ConfigError("--output", f"{outputs[0]} {what} an input", "a prefix apart from the inputs and the tokenizer")


def identity_of(path: str) -> tuple[int, int] | None:
    """The device and inode of the file or folder at `path`; None if there is none."""
    try:
        found = os.stat(path)
    except (OSError, ValueError):
        return None
    return found.st_dev, found.st_ino


def refuse_empty(splits: list[Split]) -> None:
    """Raises an error that says what to change if a split got no text."""
    for split in splits:
        if split.writer.num_tokens == 0:
            which = "validation" if split is not splits[0] else "training"
            if len(splits) == 1:
                raise DataError(split.prefix, "no document has any text", "at least one character")
            right = "a fraction nearer to one half, or more documents"
            raise ConfigError("--valid-fraction", f"no document falls to the {which} split", right)


def sidecar(split: Split, train: Split, tokenizer: str) -> Sidecar:
    """The sidecar of a split that was written."""
    return Sidecar(
        tokens=split.writer.num_tokens,
        documents=split.writer.num_documents,
        max_token=split.max_token,
        tokenizer=tokenizer,
        vocab_size=len(split.counts),
        unigram_entropy=cross_entropy(split.counts, train.counts + (split is not train)),
        text_bytes=split.text_bytes,
        learned=int(split.counts.sum()) if split.writer.masked else None,
    )


def cross_entropy(counts: np.ndarray, model: np.ndarray) -> float:
    """The loss, in nats a token, on tokens with `counts` ``[vocab]`` of a model that predicts frequencies `model` ``[vocab]``."""
    seen = counts > 0
    return float(-(counts[seen] * np.log(model[seen] / model.sum())).sum() / counts.sum())
