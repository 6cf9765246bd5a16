"""Reads text from files, folders, globs and the standard library, in blocks that any process can read.

A block is a span of bytes with a number. Its reader moves both ends to the next line, so readers of neighbouring blocks agree
without communicating, and no process passes text to another.
"""

import glob
import json
import os
import sysconfig
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import accumulate
from pathlib import Path
from typing import BinaryIO

from megacore.errors import DataError
from megacore.files import open_plain

STDLIB = "python-stdlib"
NOT_STDLIB = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
BLOCK_BYTES = 128 << 10  # of text: BPE takes longer a byte if more is encoded at once
CUT_WINDOW = BLOCK_BYTES // 2  # how far after a block's nominal end a newline may be
HEAD_BYTES = 64 << 10  # of a document, whose hash decides whether it is for validation


@dataclass(frozen=True)
class Source:
    """A span of a file's bytes: one document, or with `jsonl` one document a line.

    A hash chooses `valid_fraction` of its documents for validation; 0 means none and 1 all.
    """

    path: str
    start: int
    stop: int
    jsonl: bool
    valid_fraction: float


@dataclass(frozen=True)
class Block:
    """Bytes `start` to `stop` of a source, before the ends are moved."""

    source: Source
    start: int
    stop: int


@dataclass(frozen=True)
class Piece:
    """A document's text, or a part of it; `ends` marks the last part. Of a line it is the text under the key, or the line itself."""

    text: str
    valid: bool
    ends: bool
    start: int = 0  # the byte of the file at which the line begins


class Texts:
    """The text of a corpus, in a fixed order, as ``len(texts)`` blocks.

    Of a single text file the *last* `valid_fraction` is for validation. Of several documents that fraction is, chosen by a hash of each
    document's beginning. This choice needs no count of documents, does not depend on their order, and puts exact copies of a document
    on the same side.

    Raises:
        DataError: an input is missing, cannot be read or names no text file, or all text is empty.
    """

    def __init__(self, inputs: list[str], valid_fraction: float = 0.0) -> None:
        try:
            paths, self.skipped = find_files(inputs)
            sizes = [os.stat(path).st_size for path in paths]
            self.sources = [Source(p, 0, size, p.endswith(".jsonl"), valid_fraction) for p, size in zip(paths, sizes, strict=True)]
            for path in paths:
                open_plain(path).close()
            if len(paths) == 1 and not self.sources[0].jsonl:
                self.sources = _split(self.sources[0])
        except OSError as error:
            raise DataError(str(error.filename), f"cannot be read: {error.strerror}", "text that this user may read") from None
        self.num_bytes = sum(s.stop - s.start for s in self.sources)
        if self.num_bytes == 0:
            raise DataError(", ".join(inputs), "the text is empty", "at least one character")
        self._first = [0, *accumulate(-(-(s.stop - s.start) // BLOCK_BYTES) for s in self.sources)]

    def __len__(self) -> int:
        return self._first[-1]

    def __getitem__(self, number: int) -> Block:
        i = bisect_right(self._first, number) - 1
        source = self.sources[i]
        start = source.start + (number - self._first[i]) * BLOCK_BYTES
        return Block(source, start, min(start + BLOCK_BYTES, source.stop))


def read_block(block: Block, text_key: str | None) -> Iterator[Piece]:
    """The text of a block; without a `text_key` whole lines of JSON. Raises `DataError`."""
    source = block.source
    try:
        with open(source.path, "rb") as file:
            start, stop = _cut(file, block.start, source), _cut(file, block.stop, source)
            file.seek(start)
            raw = file.read(stop - start)
            if source.jsonl:
                yield from _read_lines(source, start, raw, text_key)
            elif raw:
                file.seek(source.start)
                valid = _for_validation(file.read(HEAD_BYTES), source.valid_fraction)
                yield Piece(_decode(raw, source.path, start), valid, ends=stop == source.stop)
    except OSError as error:
        raise DataError(source.path, f"cannot be read: {error.strerror}", "text that this user may read") from None


def _read_lines(source: Source, start: int, raw: bytes, text_key: str | None) -> Iterator[Piece]:
    """The documents of the lines in `raw`, which begins at byte `start` of the file."""
    for line in raw.split(b"\n"):
        if line.strip():
            try:
                text = _decode(line, source.path, start)
                text = text if text_key is None else json.loads(text)[text_key]
                head = text.encode("utf-8")[:HEAD_BYTES]  # fails for half a surrogate pair, which JSON can write
            except DataError:
                raise
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:  # ValueError: also of thousands of digits
                wrong = f"line {line_number(source.path, start)} {_why(error, text_key)}"
                raise DataError(source.path, wrong, f'one object a line, such as {{"{text_key or "messages"}": …}}') from None
            if text:
                yield Piece(text, _for_validation(head, source.valid_fraction), True, start)
        start += len(line) + 1


def _for_validation(head: bytes, fraction: float) -> bool:
    return int.from_bytes(blake2b(head, digest_size=8).digest(), "little") < fraction * 2**64


def find_files(inputs: list[str]) -> tuple[list[str], int]:
    """Returns the files that the inputs name, each once, and the number of binary files in folders, which are left out.

    Folders are read recursively in the order of their paths, without hidden entries.
    """
    paths: dict[str, None] = {}
    skipped = 0
    for name in inputs:
        found, binary = _expand(name)
        if not found:
            raise DataError(name, "names no text file", f"a file, a folder with text files, a glob or {STDLIB}")
        paths.update(dict.fromkeys(found))
        skipped += binary
    return list(paths), skipped


def _expand(name: str) -> tuple[list[str], int]:
    """The files that one input names, and the number of binary ones left out."""
    if name == STDLIB:
        root = Path(sysconfig.get_paths()["stdlib"])
        files = [p for p in root.rglob("*.py") if NOT_STDLIB.isdisjoint(p.relative_to(root).parts)]
        return sorted(map(str, files)), 0
    if os.path.isdir(name):
        files = [p for p in Path(name).rglob("*") if p.is_file() and not any(part.startswith(".") for part in p.relative_to(name).parts)]
        texts = [str(p) for p in sorted(files) if _looks_like_text(p)]
        return texts, len(files) - len(texts)
    if os.path.exists(name):
        return [name], 0
    if glob.has_magic(name):
        return sorted(p for p in glob.glob(name, recursive=True) if os.path.isfile(p)), 0
    raise DataError(name, "missing", f"a file, a folder, a glob or {STDLIB}")


def _looks_like_text(path: Path) -> bool:
    """Whether git would call it text: the first 8000 bytes have no NUL."""
    with open(path, "rb") as file:
        return b"\0" not in file.read(8000)


def _split(source: Source) -> list[Source]:
    """Cuts a text file into its first and last part, between two characters."""
    with open(source.path, "rb") as file:
        middle = _character(file, int(source.stop * (1 - source.valid_fraction)))
    return [replace(source, stop=middle, valid_fraction=0.0), replace(source, start=middle, valid_fraction=1.0)]


def _cut(file: BinaryIO, offset: int, source: Source) -> int:
    """The real position of a block boundary that is nominally at `offset`: after a newline, if one is close enough."""
    if offset <= source.start or offset >= source.stop:
        return min(max(offset, source.start), source.stop)
    file.seek(offset - 1)
    line = file.readline(-1 if source.jsonl else CUT_WINDOW)
    behind = offset - 1 + len(line) if source.jsonl or line.endswith(b"\n") else _character(file, offset)
    return min(behind, source.stop)


def _character(file: BinaryIO, offset: int) -> int:
    """The first position, from `offset` on, at which a UTF-8 character begins."""
    file.seek(offset)
    return offset + next((i for i, byte in enumerate(file.read(4)) if byte & 0xC0 != 0x80), 0)


def _decode(raw: bytes, path: str, start: int) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(path, f"is not UTF-8 at byte {start + error.start}", "UTF-8 text; iconv converts other encodings") from None


def line_number(path: str, offset: int) -> int:
    """The number, from 1, of the line that begins at byte `offset` of a file."""
    lines = 1
    with open(path, "rb") as file:
        while offset > 0 and (chunk := file.read(min(offset, 1 << 20))):
            lines += chunk.count(b"\n")
            offset -= len(chunk)
    return lines


def _why(error: Exception, text_key: str | None) -> str:
    if isinstance(error, UnicodeEncodeError):
        return "holds half a surrogate pair, which is no text"
    if isinstance(error, ValueError | RecursionError):
        return why_not_json(error)
    return f"has no text under the key {text_key}"


def why_not_json(error: ValueError | RecursionError) -> str:
    """Why a line cannot be read as JSON, from what json raised."""
    if isinstance(error, json.JSONDecodeError):
        return f"is not JSON ({error.msg})"
    return "has brackets nested too deep" if isinstance(error, RecursionError) else "holds a number of too many digits"
