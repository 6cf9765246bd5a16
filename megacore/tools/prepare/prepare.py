"""Turns text into token files, in parallel and in order. No half-written file is left.

Workers read, check and encode about a MiB of text at a time, so only tokens pass between processes. This
process writes them. Memory depends on the number of texts, never on their size.
"""

import functools
import os
import signal
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from hashlib import sha256
from itertools import islice
from multiprocessing import active_children, get_context, parent_process, resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar

import numpy as np

from megacore.config.schema import MASK
from megacore.data.indexed import IndexedTokens
from megacore.data.shuffle import derive_key, permute
from megacore.errors import ConfigError, DataError
from megacore.tools.corpora import Sidecar
from megacore.tools.output_files import made_folder
from megacore.tools.prepare import sources
from megacore.tools.prepare.chat import Chat, RenderedChat, chat_of, rendered_chat
from megacore.tools.prepare.chat import encode as encode_chat
from megacore.tools.prepare.conversations import LINE_FORM, WrongConversation
from megacore.tools.prepare.indexed_writer import IndexedWriter
from megacore.tools.prepare.input_files import LeftOut
from megacore.tools.prepare.partial import COMMIT_BYTES, Partial, kept
from megacore.tools.prepare.sources import Piece, ReadBlock, TextBlock, Texts, parts, place, read_block
from megacore.tools.prepare.split import SPELLED_END, Encoded, Split, Tokenized, refuse_empty, sidecar
from megacore.tools.processes import hold_signals
from megacore.tools.text.encodings import ENCODING, encoding_json, is_encoding
from megacore.tools.text.special_tokens import BESIDE
from megacore.tools.text.tokenizer import (
    TRAINED,
    UNJOINED,
    Tokenizer,
    load_tokenizer,
    train_sentencepiece,
    trained_vocab_size,
)
from megacore.tools.text.vocabulary import chosen_begin, describe

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
    resumed: int = 0  # bytes of the input that an earlier start had done
    notes: Counter[str] = field(default_factory=Counter)  # what was not used, and how often
    begin: str | None = None  # the tokens that begin every document; None: there are none
    usual_begin: str | None = None  # the tokens that the tokenizer's own library puts there


def prepare(
    inputs: list[str],
    prefix: str,
    tokenizer: str,
    *,
    text_key: str = "text",
    chat: bool = False,
    template: str | None = None,
    ignored_keys: tuple[str, ...] = (),
    valid_fraction: float = 0.0,
    bos: str = "auto",
    special_tokens: bool = False,
    workers: int = 1,
    on_start: Callable[[int], object] = lambda total: None,
    on_bytes: Callable[[int], object] = lambda size: None,
) -> Prepared:
    """Tokenizes `inputs` into ``prefix.bin/.idx/.json``, ``prefix_valid.*`` and, if one is trained or
    fetched, ``prefix.model`` or ``prefix.tokenizer.json``.

    The result does not depend on `workers`. If this process is killed, the next call with the same arguments
    goes on from what is done (`Partial`), and writes the same.

    Args:
        inputs: files, folders, globs, `python-stdlib` (see `sources`).
        prefix: what to write; its folder is made.
        tokenizer: `bytes`, ``sentencepiece:VOCAB_SIZE``, a model's path, or an encoding's name
            (`tools.text.encodings`).
        text_key: the key of the text in ``.jsonl`` files, or the column of tables.
        chat: the inputs are conversations; also writes ``prefix.mask.bin`` (`tools.prepare.chat`).
        template: a file with a chat template; None: the model's own, beside its tokenizer.
        ignored_keys: keys of conversations that the user says do not matter.
        valid_fraction: the fraction of the text for validation, see `Texts`; 0 writes no ``prefix_valid.*``.
        bos: whether a BOS token begins every document: `auto` (as the tokenizer's own library does), `always`
            or `never`. Conversations are left to their template.
        special_tokens: text that spells a special token becomes that token, and one that ends documents ends
            one; otherwise it is encoded as any other text. Conversations always have such tokens.
        workers: processes; with 1 this process does the work.
        on_start, on_bytes: called with the bytes of all inputs once, and with the bytes just done.

    Raises:
        DataError, ConfigError: the user got something wrong. No output has appeared or changed.
    """
    vocab_to_train = trained_vocab_size(tokenizer) if tokenizer.startswith(TRAINED) else None
    written = (
        ".model" if vocab_to_train is not None else ENCODING if is_encoding(tokenizer) else ""
    )  # behind the prefix: a tokenizer's file
    if not written:
        loaded = load_tokenizer(tokenizer)  # refuses a wrong one before any text is read
        tokenizer = loaded.name
        check_special_tokens(loaded, bos, special_tokens)
    elif vocab_to_train is not None and chat:
        raise ConfigError(
            "--tokenizer",
            f"{tokenizer} would be trained on conversations",
            "one that exists, such as the model's",
        )
    form = chat_of(tokenizer, template, ignored_keys) if chat else None
    prefixes = [prefix, f"{prefix}_valid"] if valid_fraction else [prefix]
    texts = opened(inputs, prefixes, tokenizer, valid_fraction, written=written, text_key=text_key, chat=form)
    try:
        texts.divide(None if chat else text_key)
        with ExitStack() as stack:
            stack.enter_context(made_folder(Path(prefix).parent))
            partial = stack.enter_context(
                Partial(prefix, key_of(texts, tokenizer, text_key, form, bos, special_tokens), texts.in_files)
            )
            name = tokenizer
            if written:
                name = str(partial.folder / f"{Path(prefix).name}{written}")
                if not partial.tasks:
                    lines = sample_lines(texts, text_key)
                    content = (
                        encoding_json(tokenizer)
                        if vocab_to_train is None
                        else train_sentencepiece(lines, vocab_to_train)
                    )
                    Path(name).write_bytes(content)
                loaded = load_tokenizer(name)
                check_special_tokens(loaded, bos, special_tokens)
            begin = chosen_begin(loaded, bos)
            if special_tokens:
                texts.keep_whole(loaded.special_tokens)
            vocab_size = loaded.vocab_size
            # before the work: a tokenizer that cannot write its tokens is an error
            token_bytes = [0 if chat else len(loaded.token_bytes(token)) for token in range(vocab_size)]
            dtype = np.dtype(
                np.uint8 if vocab_size <= 2**8 else np.uint16 if vocab_size <= 2**16 else np.int32
            )
            writers = [
                stack.enter_context(IndexedWriter(p, dtype, chat, f"{partial.folder}/{i}"))
                for i, p in enumerate(prefixes)
            ]
            splits = [Split(writer, vocab_size) for writer in writers]
            partial.resume(splits)
            on_start(texts.num_bytes)
            work = tasks(texts, None if chat else text_key)
            resumed = sum(block.size for task in islice(work, partial.tasks) for block in task)
            on_bytes(resumed)
            encode = functools.partial(encode_task, loaded, dtype, text_key, form, begin, special_tokens)
            with closing(ordered_map(encode, work, workers)) as results:
                waiting = 0
                for number, (size, encoded) in enumerate(results, partial.tasks + 1):
                    for split, part in zip(splits, encoded, strict=False):
                        split.add(part)
                    waiting += sum(part.text_bytes for part in encoded)
                    if waiting >= COMMIT_BYTES:
                        partial.commit(number, splits)
                        waiting = 0
                    on_bytes(size)
            refuse_empty(splits)
            for split in splits:
                split.writer.finish()
            with hold_signals(signal.SIGINT, signal.SIGTERM):  # all files get their names, or none does
                if written:
                    os.replace(name, f"{prefix}{written}")
                    name = f"{prefix}{written}"
                stack.close()
                # The sidecars come last, because each has a digest of its corpus.
                sidecars = {}
                for split in splits:
                    described = sidecar(split, splits[0], name)
                    if chat:
                        has_bos = begins_with(split.writer.prefix, loaded.begin_of_document)
                        described = replace(described, bos=has_bos)
                    else:
                        spelled_bytes = int(split.counts @ np.array(token_bytes))
                        described = replace(described, bos=bool(begin), spelled_bytes=spelled_bytes)
                    sidecars[split.writer.prefix] = described
                for p, described in sidecars.items():
                    described.save(p)
    except BrokenProcessPool:
        raise DataError(
            prefix,
            "cannot be prepared: one of its processes was ended",
            "enough memory, or fewer --workers" + kept(prefix),
        ) from None
    except OSError as error:
        right = "a prefix in a writable folder with space left" + kept(prefix)
        raise DataError(prefix, f"cannot be written: {error.strerror}", right) from None
    end = None
    if loaded.end_of_document is not None:
        end = f"token {loaded.end_of_document} {loaded.end_text}".strip()
    return Prepared(
        sidecars,
        name,
        texts.left_out,
        texts.num_bytes,
        end,
        resumed,
        sum((split.notes for split in splits), Counter[str]()),
        begin=describe(loaded, begin) if begin else None,
        usual_begin=describe(loaded, loaded.begin_of_document) if loaded.begin_of_document else None,
    )


def show_conversations(
    inputs: list[str],
    tokenizer: str,
    count: int,
    *,
    template: str | None = None,
    ignored_keys: tuple[str, ...] = (),
) -> Iterator[tuple[str, RenderedChat]]:
    """Yield the first conversations, each with its place in the data.

    Raises `UserError`.
    """
    loaded = load_tokenizer(tokenizer)
    chat = chat_of(loaded.name, template, ignored_keys)
    texts = Texts(inputs, 0.0, None)
    check_holds_conversations(texts)
    blocks = (block for number in range(len(texts)) for block in parts(texts[number], None))
    pieces = ((block, piece) for block in blocks for piece in read_block(block, None))
    for block, piece in islice(pieces, count):
        where = f"{block.source.path}, {place(block.source, piece.start)}"
        try:
            yield where, rendered_chat(chat, loaded, piece.text)
        except WrongConversation as error:
            raise wrong_line(block, piece, error) from None


def check_special_tokens(tokenizer: Tokenizer, bos: str, special_tokens: bool) -> None:
    """Raise `ConfigError` if the tokenizer has no tokens for these settings."""
    chosen_begin(tokenizer, bos)
    if special_tokens and not tokenizer.special_tokens:
        raise ConfigError(
            "--special-tokens",
            f"{tokenizer.name} has no special tokens",
            "a tokenizer that has some, or prepare without it",
        )


def begins_with(prefix: str, begin: tuple[int, ...]) -> bool:
    """Return whether the first document of a corpus begins with these tokens, which are at least one."""
    tokens = IndexedTokens(prefix)
    first = tokens.read(0, min(len(begin), tokens.num_tokens))
    return bool(begin) and tuple(first.tolist()) == begin


def key_of(
    texts: Texts, tokenizer: str, text_key: str, chat: Chat | None, bos: str, special_tokens: bool
) -> list[Any]:
    """Whatever decides what is written: work of a start with another key is of no use."""
    files = [
        (os.path.abspath(source.path), source, os.stat(source.path).st_mtime_ns)
        for source in texts.sources
        if texts.in_files
    ]
    beside = [
        file
        for file in (Path(tokenizer), *(Path(tokenizer).with_name(name) for name in BESIDE))
        if file.is_file()
    ]
    digests = [sha256(file.read_bytes()).hexdigest() for file in beside]
    settings = [tokenizer, digests, text_key, chat, bos, special_tokens]
    return [sources.SIZES, TASK_BYTES, SAMPLE_BYTES, files, *settings]


def opened(
    inputs: list[str],
    prefixes: list[str],
    tokenizer: str,
    valid_fraction: float,
    *,
    written: str,
    text_key: str,
    chat: Chat | None,
) -> Texts:
    """The texts to read.

    Refuses outputs that would overwrite one of them. `written`: the ending of a tokenizer that is written
    too.
    """
    if Path(prefixes[0]).name in ("", "..") or prefixes[0].endswith(("/", "/.")):
        wrong = f"`{prefixes[0]}` names no file"
        raise ConfigError(
            "--output", wrong, "a prefix such as data/mine, of the files data/mine.bin and .idx"
        )
    texts = Texts(inputs, valid_fraction, None if chat else text_key)
    if chat:
        check_holds_conversations(texts)
    outputs = [f"{p}{suffix}" for p in prefixes for suffix in (".bin", MASK, ".idx", ".json")] + [
        f"{prefixes[0]}{written}"
    ] * bool(written)
    read = [*inputs, *(source.path for source in texts.sources), tokenizer, *([chat.path] if chat else [])]
    refuse_overwriting([prefixes[0], *outputs], read)
    return texts


def check_holds_conversations(texts: Texts) -> None:
    """Raise `DataError` if an input is a text and so does not hold conversations."""
    for source in texts.sources:
        if source.one_document:
            right = f"tables, or files whose names end with .jsonl or .json, with {LINE_FORM}"
            raise DataError(source.path, "holds no conversations", right)


def sample_lines(texts: Texts, text_key: str) -> Iterator[str]:
    """Yields training text for a tokenizer, line by line: whole blocks in a fixed
    random order, up to `SAMPLE_BYTES`.
    """
    left = SAMPLE_BYTES
    for number in permute(np.arange(len(texts)), len(texts), derive_key(0)).tolist():
        # of what can only be read in order: from its beginning
        most = max(SAMPLE_BYTES // len(texts.sources), TASK_BYTES)
        for piece in (
            piece for part in parts(texts[number], text_key) for piece in read_block(part, text_key)
        ):
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
    tokenizer: Tokenizer,
    dtype: np.dtype,
    text_key: str,
    chat: Chat | None,
    begin: tuple[int, ...],
    special_tokens: bool,
    task: list[TextBlock | ReadBlock],
) -> tuple[int, list[Encoded]]:
    """Encodes the training and the validation text of some blocks; also returns the blocks' size in bytes."""
    train, valid = Encoded(), Encoded()
    for block in task:
        pieces = list(read_block(block, None if chat else text_key))
        for piece, (tokens, learned, size, notes) in (
            texts_of(tokenizer, pieces, begin, special_tokens)
            if chat is None
            else conversations(tokenizer, block, pieces, chat)
        ):
            split = valid if piece.valid else train
            split.sequences.append(tokens.astype(dtype, copy=False))
            split.learned.append(learned)
            split.ends.append(piece.ends)
            split.text_bytes += size
            split.notes.update(notes)
    return sum(block.size for block in task), [train, valid]


def texts_of(
    tokenizer: Tokenizer, pieces: list[Piece], begin: tuple[int, ...], special_tokens: bool
) -> Iterator[tuple[Piece, Tokenized]]:
    """Yield pieces of text with their tokens.

    A piece in which a special token ends a document (`special_tokens`) is given as several.
    """
    end = tokenizer.end_of_document
    is_divided = special_tokens and end is not None
    counts_ends = not special_tokens and tokenizer.end_text in tokenizer.special_tokens
    for piece in pieces:
        tokens = encode_piece(tokenizer, piece, special_tokens)
        size = len(piece.text.encode("utf-8"))
        notes = {}
        if counts_ends:
            notes[f"{SPELLED_END} {tokenizer.end_text}"] = piece.text.count(tokenizer.end_text)
        if special_tokens:
            # Such a token is no text, so its letters are not among the bytes that are predicted.
            size -= sum(
                piece.text.count(text) * len(text.encode("utf-8")) for text in tokenizer.special_tokens
            )

        is_new = not piece.before
        if is_divided and not is_new:
            is_new = end in tokenizer.encode(piece.before, special_tokens)[-1:]
        if is_new and piece.ends and not tokens.size:
            continue  # nothing follows the token that ended the last document
        for document in split_at_end(tokens, end) if is_divided else [tokens]:
            has_end = is_divided and end in document[-1:]
            if is_new and tuple(document[: len(begin)].tolist()) != begin:
                document = np.concatenate([np.array(begin, dtype=document.dtype), document])
            if piece.ends and not has_end and end is not None:
                document = np.append(document, end)
            yield replace(piece, ends=piece.ends or has_end), Tokenized(document, None, size, notes)
            is_new, size, notes = True, 0, {}


def split_at_end(tokens: np.ndarray, end: int | None) -> list[np.ndarray]:
    """Return the tokens of each document in ``[tokens]``, in which every `end` token ends one.

    Only the last document may lack that token. There is none after a final `end`.
    """
    documents = np.split(tokens, np.flatnonzero(tokens == end) + 1)
    has_rest = documents[-1].size > 0 or len(documents) == 1
    return documents if has_rest else documents[:-1]


def encode_piece(tokenizer: Tokenizer, piece: Piece, special_tokens: bool) -> np.ndarray:
    """Return the tokens that a piece of a document has in the document as a whole.

    Where a token of the whole would span the cut, the piece follows a character that does not join it.
    """
    before = [piece.before, "\n", UNJOINED] if piece.before else []
    return tokenizer.encode_after(before, piece.text, special_tokens)


def conversations(
    tokenizer: Tokenizer, block: TextBlock | ReadBlock, pieces: list[Piece], chat: Chat
) -> Iterator[tuple[Piece, Tokenized]]:
    """Yield conversations with their tokens. Raises `DataError` that names the line."""
    encoded = encode_chat(chat, tokenizer, [piece.text for piece in pieces]) if pieces else iter(())
    for piece in pieces:
        try:
            yield piece, next(encoded)
        except WrongConversation as error:
            raise wrong_line(block, piece, error) from None


def wrong_line(block: TextBlock | ReadBlock, piece: Piece, error: WrongConversation) -> DataError:
    """The error for a conversation that cannot be learned from, with its place in the data."""
    wrong, right = error.args
    return DataError(block.source.path, f"{place(block.source, piece.start)} {wrong}", right)


def ordered_map(function: Callable[[T], R], items: Iterable[T], workers: int) -> Generator[R, None, None]:
    """`map` over processes, with results in order.

    Unlike `Pool.imap` it has at most four items a worker under way.
    """
    if workers == 1:
        yield from map(function, items)
        return
    # Spawned, not forked: a fork copies the locks of the progress bar's thread.
    resource_tracker.ensure_running()  # else it starts with the first worker, and unblocks SIGINT
    pool = ProcessPoolExecutor(workers, get_context("spawn"), begin_worker)
    other_children = active_children()
    try:
        pending: deque[Future[R]] = deque()
        for item in items:
            with hold_signals(signal.SIGINT):  # the pool starts a worker when it needs one
                pending.append(pool.submit(function, item))
            if len(pending) == 4 * workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except BaseException:
        # After Ctrl-C or an error the rest is not needed, and waiting for it may take many seconds.
        for worker in active_children():
            if worker not in other_children:
                worker.kill()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def begin_worker() -> None:
    """End this process when the one that started it ends, in whatever way: a killed process ends no other."""

    def end_with(parent: BaseProcess) -> None:
        parent.join()
        os._exit(1)

    parent = parent_process()
    assert parent is not None
    Thread(target=end_with, args=(parent,), daemon=True).start()


def refuse_overwriting(outputs: list[str], inputs: list[str]) -> None:
    """Raises `ConfigError` if an output is the same file as an input, under whatever name."""
    found: dict[object, str] = {
        identity: path for path in outputs if (identity := identity_of(path)) is not None
    }
    for path in inputs if found else ():
        if (output := found.get(identity_of(path))) is not None:
            what = "is" if output == outputs[0] else f"would overwrite {output}, which is"
            raise ConfigError(
                "--output",
                f"{outputs[0]} {what} an input",
                "a prefix apart from the inputs and the tokenizer",
            )


def identity_of(path: str) -> tuple[int, int] | None:
    """The device and inode of the file or folder at `path`; None if there is none."""
    try:
        found = os.stat(path)
    except (OSError, ValueError):
        return None
    return found.st_dev, found.st_ino
