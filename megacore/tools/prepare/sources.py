"""Reads text from files, folders, globs and the standard library, in blocks that any process can read.

A block of a plain file is a span of bytes with a number. Its reader moves both ends to the next line, so
readers of neighbouring blocks agree without communicating, and no process passes text to another. Of what can
only be read in order (`streams`), a block holds the text.
"""

import json
import math
import os
import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import accumulate, islice
from typing import Any, BinaryIO

from megacore.errors import ConfigError, DataError
from megacore.files import RepeatedKey, read_json
from megacore.tools.prepare.input_files import LINES, find_files, head_form
from megacore.tools.prepare.streams import (
    BOM,
    HUB,
    HUB_NAME,
    JSON,
    MOST_LINE,
    PACKED,
    PART_BYTES,
    PART_ROWS,
    TABLES,
    bare,
    hub_parts,
    json_parts,
    json_records,
    line_too_long,
    packed_parts,
    table_parts,
    unpacked,
)

BLOCK_BYTES = 128 << 10  # of text: BPE takes longer a byte if more is encoded at once
CUT_WINDOW = BLOCK_BYTES // 2  # how far after a block's nominal end a newline may be
BEFORE_BYTES = 128  # of the text before a part of a document, for the tokenizer
BETWEEN_WORDS = re.compile(r"[^\W\d_] (?=[^\W\d_])")  # a letter, a space, a letter
HEAD_BYTES = 64 << 10  # of a document, whose hash decides whether it is for validation
ALL = 1 << 64  # beyond every hash
SIZES = BLOCK_BYTES, CUT_WINDOW, HEAD_BYTES, PART_BYTES, PART_ROWS  # that decide where texts are cut


@dataclass(frozen=True)
class Source:
    """A span of a file's bytes: one document, or with `jsonl` one document a line.

    Its documents whose hash is below `valid_below` are for validation; 0 means none and `ALL` all.
    """

    path: str
    start: int
    stop: int
    jsonl: bool
    valid_below: int
    form: str = ""  # of `streams`; empty: a plain file
    spellings: tuple[str, ...] = ()  # of special tokens, within which a text is not cut

    @property
    def one_document(self) -> bool:
        """Whether it is a single text."""
        return not self.jsonl and self.form in ("", *PACKED)


@dataclass(frozen=True)
class TextBlock:
    """Bytes `start` to `stop` of a source, before the ends are moved; of one that can
    only be read in order, all of it.
    """

    source: Source
    start: int
    stop: int

    @property
    def size(self) -> int:
        """Its bytes."""
        return self.stop - self.start


@dataclass(frozen=True)
class ReadBlock:
    """What was read of a source that can only be read in order: its lines, the texts of
    its rows, or a part of its text.

    `size` is what it took of the file. `start` is the number, from 1, of the first line or row. `ends`: the
    text ends with it.
    """

    source: Source
    size: int
    texts: Sequence[bytes | str]
    start: int = 1
    drawn: int = 0  # of a text: the hash of its beginning
    ends: bool = True
    before: str = ""  # of a text: as in `Piece`


@dataclass(frozen=True)
class Piece:
    """A document's text, or a part of it; `ends` marks the last part.

    Of a line it is the text under the key, or the line itself. `before` is the end of the document's text
    before this part; it is empty for the part that begins the document.
    """

    text: str
    drawn: int  # the hash of the document's beginning
    valid: bool
    ends: bool
    # the byte of the file at which the line begins; the number of the line or row in a `ReadBlock`
    start: int = 0
    before: str = ""


class Texts:
    """The text of a corpus, in a fixed order, as ``len(texts)`` blocks.

    Of a single text file the *last* `valid_fraction` is for validation. Of several documents that fraction
    is, chosen by a hash of each document's beginning. This choice needs no count of documents, does not
    depend on their order, and puts exact copies of a document on the same side. Where it would leave one side
    empty, the document that is nearest to it goes there (`divide`).

    Raises:
        DataError: an input is missing, cannot be read or names no text file, or all text is empty.
    """

    def __init__(self, inputs: list[str], valid_fraction: float, text_key: str | None) -> None:
        try:
            paths, self.left_out = find_files(inputs, text_key)
            below = math.ceil(valid_fraction * ALL)
            self.sources = [_source(path, below, text_key) for path in paths]
            if len(paths) == 1 and self.sources[0].one_document:
                self.sources = _split(self.sources[0], valid_fraction)
        except OSError as error:
            raise DataError(
                str(error.filename), f"cannot be read: {error.strerror}", "text that this user may read"
            ) from None
        self.num_bytes = sum(s.stop - s.start for s in self.sources)
        if self.num_bytes == 0 and not any(source.form for source in self.sources):
            raise DataError(", ".join(inputs), "the text is empty", "at least one character")
        self._number_blocks()

    def _number_blocks(self) -> None:
        blocks = (1 if s.form else -(-(s.stop - s.start) // BLOCK_BYTES) for s in self.sources)
        self._first = [0, *accumulate(blocks)]

    @property
    def in_files(self) -> bool:
        """Whether all of it lies in files, and not on the hub."""
        return all(source.form != HUB for source in self.sources)

    def keep_whole(self, spellings: tuple[str, ...]) -> None:
        """Cut texts from now on, also for validation, only where that divides no special token."""
        self.sources = [replace(source, spellings=spellings) for source in self.sources]
        if len(self.sources) == 2 and self.sources[0].stop == self.sources[1].start > 0:
            train, valid = self.sources  # of one file
            whole = replace(train, stop=valid.stop)
            with open(train.path, "rb") as file:
                middle = _outside_spellings(file, train.stop, train.stop - CUT_WINDOW, whole)
            self.sources = [replace(train, stop=middle), replace(valid, start=middle)]
        self._number_blocks()

    def divide(self, text_key: str | None) -> None:
        """Moves the bound between training and validation, if all documents are on one
        side of it and not all are alike.

        It reads until it has met a document of each side: of a large corpus a little, of a small one all.
        Raises `DataError`.
        """
        below = self.sources[0].valid_below
        if len({source.valid_below for source in self.sources}) > 1 or not 0 < below < ALL:
            return
        least, most = ALL, -1
        for drawn in (drawn for source in self.sources for drawn in self._drawn(source, text_key)):
            least, most = min(least, drawn), max(most, drawn)
            if least < below <= most:
                return
        if least < most:
            below = least + 1 if least >= below else most
            self.sources = [replace(source, valid_below=below) for source in self.sources]

    def _drawn(self, source: Source, text_key: str | None) -> Iterator[int]:
        """The hash of each document of a source."""
        if source.one_document and not source.form:
            with open(source.path, "rb") as file:
                head = file.read(HEAD_BYTES)
            yield from [_hash(head)] if head else []
        else:
            for number in range(len(self)):
                if (block := self[number]).source == source:
                    drawn = (
                        piece.drawn for part in parts(block, text_key) for piece in read_block(part, text_key)
                    )
                    yield from islice(drawn, 1) if source.one_document else drawn

    def __len__(self) -> int:
        return self._first[-1]

    def __getitem__(self, number: int) -> TextBlock:
        i = bisect_right(self._first, number) - 1
        source = self.sources[i]
        if source.form:
            return TextBlock(source, source.start, source.stop)
        start = source.start + (number - self._first[i]) * BLOCK_BYTES
        return TextBlock(source, start, min(start + BLOCK_BYTES, source.stop))


def parts(block: TextBlock, text_key: str | None) -> Iterator[TextBlock | ReadBlock]:
    """A block that any process can read; of a source that can only be read in order, what is read here.

    Raises `DataError`.
    """
    source, number = block.source, 1
    if not source.form:
        yield block
    elif source.one_document:
        yield from _text_parts(source)
    else:
        read_parts: Iterator[tuple[Sequence[bytes | str], int]]
        if source.form in PACKED:
            read_parts = (
                (raw.removesuffix(b"\n").split(b"\n"), size)
                for raw, size in packed_parts(source.path, source.form, lines=True)
            )
        elif source.form == HUB:
            read_parts = hub_parts(source.path, text_key)
        elif source.form == JSON:
            read_parts = json_parts(source.path, text_key)
        else:
            read_parts = table_parts(source.path, source.form, text_key)
        for texts, size in read_parts:
            yield ReadBlock(source, size, texts, number)
            number += len(texts)


def _text_parts(source: Source) -> Iterator[ReadBlock]:
    """Yield a compressed text in parts, which are cut as `_cut` cuts a plain one; the last ends the text."""
    with unpacked(source.path, source.form) as (text, _):
        drawn = _hash(text.read(HEAD_BYTES))
    rest, before, read_bytes = b"", "", 0
    for raw, size in packed_parts(source.path, source.form, lines=False):
        whole = rest + raw
        read_bytes += size
        stop = _last_outside(whole, _last_cut(whole), source.spellings)
        if stop:
            yield ReadBlock(source, read_bytes, [whole[:stop]], drawn=drawn, ends=False, before=before)
            before = _last_characters(whole[:stop])
            read_bytes = 0
        rest = whole[stop:]
    yield ReadBlock(source, read_bytes, [rest], drawn=drawn, before=before)


def read_block(block: TextBlock | ReadBlock, text_key: str | None) -> Iterator[Piece]:
    """The text of a block; without a `text_key` whole lines of JSON. Raises `DataError`."""
    source = block.source
    if isinstance(block, ReadBlock):
        yield from _read_texts(block, text_key)
        return
    try:
        with open(source.path, "rb") as file:
            if source.jsonl:
                yield from _read_lines(file, block, text_key)
                return
            start, stop = (
                _outside_spellings(file, _cut(file, offset, source), offset - CUT_WINDOW, source)
                for offset in (block.start, block.stop)
            )
            file.seek(start)
            raw = file.read(stop - start)
            if start == 0:
                raw = raw.removeprefix(BOM)
            if raw:
                file.seek(source.start)
                drawn = _hash(file.read(HEAD_BYTES))
                file.seek(max(source.start, start - BEFORE_BYTES))
                before = _last_characters(file.read(start - file.tell()))
                yield Piece(
                    _decode(raw, source.path, start),
                    drawn,
                    drawn < source.valid_below,
                    ends=stop == source.stop,
                    before=before,
                )
    except OSError as error:
        raise DataError(
            source.path, f"cannot be read: {error.strerror}", "text that this user may read"
        ) from None


def _read_lines(file: BinaryIO, block: TextBlock, text_key: str | None) -> Iterator[Piece]:
    """The documents of the lines that begin in a block of JSON lines.

    A line is read by the block that it begins in, and by no other: a block in which none begins reads no
    more than its own bytes. So the time is linear in the length of a line.
    """
    source, start = block.source, block.start
    if start > source.start:
        file.seek(start - 1)
        newline = file.read(block.stop - start).find(b"\n")
        if newline < 0:
            return
        start += newline
    file.seek(start)
    raw = file.read(max(block.stop - start, 0))
    if block.stop < source.stop and not raw.endswith(b"\n"):
        rest = file.readline(MOST_LINE + 1)
        if len(rest) > MOST_LINE:
            raise line_too_long(source.path, line_number(source.path, start))
        raw += rest
    for line in raw.split(b"\n"):
        text = line.removeprefix(BOM) if start == 0 else line
        yield from _read_line(source, text, text_key, start, start)
        start += len(line) + 1


def _read_texts(block: ReadBlock, text_key: str | None) -> Iterator[Piece]:
    """The documents, or the part of one, in what was read."""
    source = block.source
    for number, text in enumerate(block.texts, block.start):
        if isinstance(text, bytes):
            if source.jsonl:
                yield from _read_line(source, text, text_key, number, None)
            else:
                yield Piece(
                    _decode(text, source.path, None),
                    block.drawn,
                    block.drawn < source.valid_below,
                    block.ends,
                    before=block.before,
                )
        elif text:
            try:
                drawn = _hash(text.encode("utf-8")[:HEAD_BYTES])
            except UnicodeEncodeError as error:
                wrong, right = _why(error, None, text_key)
                raise DataError(source.path, f"{place(source, number)} {wrong}", right) from None
            yield Piece(text, drawn, drawn < source.valid_below, True, number)


def _read_line(
    source: Source, line: bytes, text_key: str | None, start: int, offset: int | None
) -> Iterator[Piece]:
    """The document of a line, or nothing.

    `start` is the piece's, and `offset` the line's in the file, if it can be told.
    """
    if not line.strip():
        return
    text = record = _decode(line, source.path, offset)
    try:
        if text_key is not None:
            record = read_json(text)
            text = record[text_key]
        head = text.encode("utf-8")[:HEAD_BYTES]  # fails for half a surrogate pair, which JSON can write
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        # ValueError: also of thousands of digits
        wrong, right = _why(error, record, text_key)
        raise DataError(source.path, f"{place(source, start)} {wrong}", right) from None
    if text:
        drawn = _hash(head)
        yield Piece(text, drawn, drawn < source.valid_below, True, start)


def place(source: Source, start: int) -> str:
    """Where in a source the line or row with a piece's `start` is."""
    if source.form:
        return f"line {start}" if source.form in PACKED else f"row {start}"
    return f"line {line_number(source.path, start)}"


def _hash(head: bytes) -> int:
    """A number below `ALL` for the beginning of a document."""
    return int.from_bytes(blake2b(head, digest_size=8).digest(), "little")


def _source(path: str, below: int, text_key: str | None) -> Source:
    """A file, or a data set of the hub. Raises `OSError`, `DataError`."""
    if path.startswith(HUB_NAME):
        return Source(path, 0, 0, False, below, HUB)
    form = head_form(path)
    if not form and json_records(path, text_key) is not None:
        form = JSON
    jsonl = bare(path, form).lower().endswith(LINES) and form not in TABLES
    return Source(path, 0, os.stat(path).st_size, jsonl, below, form)


def _split(source: Source, valid_fraction: float) -> list[Source]:
    """Cuts a text file into its first and last part, between two characters.

    Of a compressed one that place is not known.
    """
    if source.form:
        if valid_fraction:
            wrong = (
                f"the last part of a single compressed text, {source.path}, cannot be told before it is read"
            )
            raise ConfigError("--valid-fraction", wrong, "the text unpacked, or several documents")
        return [source]
    with open(source.path, "rb") as file:
        middle = _character(file, int(source.stop * (1 - valid_fraction)))
    return [replace(source, stop=middle, valid_below=0), replace(source, start=middle, valid_below=ALL)]


def _cut(file: BinaryIO, offset: int, source: Source) -> int:
    """Return the real position of a block boundary of a text that is nominally at `offset`.

    A text is cut before a space between two words, where tokenizers of all kinds begin a token. If there is
    none close by, it is cut after a newline, or else between two characters.
    """
    if offset <= source.start or offset >= source.stop:
        return min(max(offset, source.start), source.stop)
    file.seek(offset - 1)
    near = file.read(CUT_WINDOW)
    newline = near.find(b"\n") + 1
    character = _character(file, offset)
    # Bytes that are not UTF-8 keep their number, so positions are right; reading the block reports them.
    text = near[character - (offset - 1) :].decode("utf-8", errors="surrogateescape")
    if (words := BETWEEN_WORDS.search(text)) is not None:
        letters = text[: words.start() + 1].encode("utf-8", errors="surrogateescape")
        return min(character + len(letters), source.stop)
    return min(offset - 1 + newline if newline else character, source.stop)


def _outside_spellings(file: BinaryIO, cut: int, least: int, source: Source) -> int:
    """Return the last position up to `cut`, and from `least` on, that is within no special token.

    A block's neighbour is not cut beyond `least`, so cuts keep their order whatever the text is.
    """
    if not source.spellings or cut in (source.start, source.stop):
        return cut
    least = max(least, source.start)
    longest = max(len(spelling.encode("utf-8")) for spelling in source.spellings)
    file.seek(least)
    text = file.read(min(cut + longest, source.stop) - least)
    return least + _last_outside(text, cut - least, source.spellings)


def _last_outside(text: bytes, cut: int, spellings: tuple[str, ...]) -> int:
    """Return the last position of a text up to `cut` that is within no spelling of a special token.

    What the end of the text leaves of a spelling counts as one, because the text may continue.
    """
    encoded = [spelling.encode("utf-8") for spelling in spellings]
    longest = max(map(len, encoded), default=0)
    first_bytes = {spelling[0] for spelling in encoded if spelling}  # of few places, so the search is short
    is_divided = True
    while is_divided:
        is_divided = False
        for start in range(max(0, cut - longest + 1), cut):
            if text[start] in first_bytes and any(
                len(spelling) > cut - start and spelling.startswith(text[start : start + len(spelling)])
                for spelling in encoded
            ):
                cut = start  # which may be within another spelling
                is_divided = True
                break
    return cut


def _last_cut(raw: bytes) -> int:
    """Return where a text that goes on is cut best near its end, in bytes."""
    first = max(0, len(raw) - CUT_WINDOW)
    text = raw[first:].decode("utf-8", errors="surrogateescape")
    last = max((words.start() for words in BETWEEN_WORDS.finditer(text)), default=None)
    if last is not None:
        return first + len(text[: last + 1].encode("utf-8", errors="surrogateescape"))
    return raw.rfind(b"\n") + 1 or len(raw)


def _last_characters(raw: bytes) -> str:
    """Return the end of a text from the bytes before a cut."""
    return raw[-BEFORE_BYTES:].decode("utf-8", errors="ignore")


def _character(file: BinaryIO, offset: int) -> int:
    """The first position, from `offset` on, at which a UTF-8 character begins."""
    file.seek(offset)
    return offset + next((i for i, byte in enumerate(file.read(4)) if byte & 0xC0 != 0x80), 0)


def _decode(raw: bytes, path: str, start: int | None) -> str:
    """The text of bytes that begin at a place in the file, if it is known."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        at = "" if start is None else f" at byte {start + error.start}"
        raise DataError(path, f"is not UTF-8{at}", "UTF-8 text; iconv converts other encodings") from None


def line_number(path: str, offset: int) -> int:
    """The number, from 1, of the line that begins at byte `offset` of a file."""
    lines = 1
    with open(path, "rb") as file:
        while offset > 0 and (chunk := file.read(min(offset, 1 << 20))):
            lines += chunk.count(b"\n")
            offset -= len(chunk)
    return lines


def _why(error: Exception, record: Any, text_key: str | None) -> tuple[str, str]:
    """What is wrong with a line, and what would be right."""
    right = f'one object a line, such as {{"{text_key}": "…"}}'
    if isinstance(error, UnicodeEncodeError):
        return "holds half a surrogate pair, which is no text", right
    if isinstance(error, ValueError | RecursionError):
        return why_not_json(error), right
    wrong = f"has no text under the key {text_key}"
    if isinstance(record, dict) and (
        keys := [key for key, value in record.items() if isinstance(value, str)]
    ):
        return (
            wrong,
            f"--text-key with the key of its text; there {'are' if len(keys) > 1 else 'is'} "
            f"{', '.join(keys)[:200]}",
        )
    return wrong, right


def why_not_json(error: ValueError | RecursionError) -> str:
    """Why a line cannot be read as JSON, from what json or `read_json` raised."""
    if isinstance(error, json.JSONDecodeError):
        return f"is not JSON ({error.msg})"
    if isinstance(error, RecursionError):
        return "has brackets nested too deep"
    if isinstance(error, RepeatedKey):
        return f"has {error}"
    return "holds a number of too many digits"
