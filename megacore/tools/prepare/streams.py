"""Texts that are not in plain text files or JSON lines: compressed by gzip or Zstandard, in tables (Parquet,
Arrow), in one list of JSON objects, or in a data set of the Hugging Face hub.

None of them can be read from any place, as a plain file can. So one process unpacks them in order, and hands
their documents to those that tokenize. Each part says how many bytes of its file it took, by which progress
is counted.
"""

import functools
import gzip
import json
import logging
import os
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from decimal import Decimal
from typing import Any, BinaryIO

from megacore.errors import ConfigError, DataError, UserError
from megacore.files import open_plain, read_json, read_text
from megacore.tools.text.encodings import needed

GZIP, ZSTD, PARQUET, ARROW, ARROW_STREAM, JSON, HUB = (
    "gzip",
    "Zstandard",
    "Parquet",
    "Arrow",
    "an Arrow stream",
    "JSON",
    "hub",
)
PACKED, TABLES = (GZIP, ZSTD), (PARQUET, ARROW, ARROW_STREAM)
BOM = b"\xef\xbb\xbf"  # a byte order mark in UTF-8, which some editors put at the beginning of a file
# bytes 1 to 3 of a skippable frame (byte 0 is 0x50 to 0x5F); files of pzstd begin with one
SKIPPABLE = b"\x2a\x4d\x18"
MAGIC = {
    b"\x1f\x8b": GZIP,
    b"\x28\xb5\x2f\xfd": ZSTD,
    b"PAR1": PARQUET,
    b"ARROW1\0\0": ARROW,
    b"\xff\xff\xff\xff": ARROW_STREAM,
}
ENDINGS = {
    ".gz": (GZIP,),
    ".zst": (ZSTD,),
    ".parquet": (PARQUET,),
    ".arrow": (ARROW, ARROW_STREAM),
    ".feather": (ARROW,),
}
HUB_NAME = "hf:"  # followed by NAME[:CONFIG][:SPLIT]

PART_BYTES = 128 << 10  # of text, about: as much as a block of a plain file
PART_ROWS = 256  # of a table
HUB_METADATA = "dataset_infos.json"  # in folders of the hub, next to the data
MOST_LINE = 256 << 20  # bytes: more is no document, and would fill the memory
# of unpacked to packed bytes, looked at from so many unpacked ones on
MOST_RATIO, SUSPECT_BYTES = 500, 1 << 30
INTACT = "an intact file, such as another copy of it"
HUB_FORM = f"{HUB_NAME}NAME, {HUB_NAME}NAME:CONFIG or {HUB_NAME}NAME:CONFIG:SPLIT, with a network"


def form_of(path: str, head: bytes) -> str:
    """Which of `PACKED` and `TABLES` a file is, by its first bytes; empty: none.

    Raises `DataError` if its name says something else.
    """
    form = next((form for magic, form in MAGIC.items() if head.startswith(magic)), "")
    if path.endswith(".zst") and head[1:4] == SKIPPABLE and head[0] & 0xF0 == 0x50:
        form = ZSTD
    for ending, forms in ENDINGS.items():
        if path.endswith(ending) and form not in forms:
            raise DataError(
                path, f"does not begin as a file of {forms[0]} does, whatever its name says", INTACT
            )
    return form


def bare(path: str, form: str) -> str:
    """The name of a file without what says that it is compressed."""
    return path.removesuffix(".gz").removesuffix(".zst") if form in PACKED else path


@contextmanager
def _damage(path: str) -> Iterator[None]:
    """Turns what readers raise for a damaged file into a `DataError`."""
    try:
        yield
    except (EOFError, zlib.error, OSError, ValueError, NotImplementedError) as error:
        # pyarrow's own are OSError and ValueError
        if isinstance(error, UserError) or (isinstance(error, OSError) and error.strerror):
            raise
        raise DataError(
            path, f"cannot be read to its end: {' '.join(str(error).split())[:200]}", INTACT
        ) from None


@contextmanager
def unpacked(path: str, form: str) -> Iterator[tuple[Any, BinaryIO]]:
    """What a file holds, to be read in order, and the file itself.

    Raises `DataError`, also while it is read.
    """
    with open_plain(path) as file, _damage(path):
        if form == GZIP:
            yield gzip.GzipFile(fileobj=file), file
        elif form == ZSTD:
            yield needed(path, "pyarrow").CompressedInputStream(file, "zstd"), file
        else:
            yield file, file


def packed_parts(path: str, form: str, lines: bool) -> Iterator[tuple[bytes, int]]:
    """Yield the bytes of a compressed file in parts that end after a newline, and what each took of the file.

    Only `lines` may be long: a text without newlines is cut between two characters.
    """
    pending = list[bytes]()  # the beginning of a line, in chunks: joined once, when its end is found
    pending_bytes = taken = unpacked_bytes = 0
    line_number = 1
    with unpacked(path, form) as (text, file):
        while chunk := text.read(PART_BYTES):
            unpacked_bytes += len(chunk)
            if unpacked_bytes > SUSPECT_BYTES and unpacked_bytes > MOST_RATIO * file.tell():
                raise DataError(
                    path, f"unpacks to more than {MOST_RATIO} times its size, as no text does", INTACT
                )
            if unpacked_bytes == len(chunk):
                chunk = chunk.removeprefix(BOM)
            cut = chunk.rfind(b"\n") + 1
            if not cut and not lines and pending_bytes + len(chunk) > PART_BYTES:
                # before a character that continues in the next chunk
                pending, chunk = [], b"".join([*pending, chunk])
                cut = len(chunk) - next((i for i in range(1, 4) if chunk[-i] & 0xC0 == 0xC0), 0)
            if not cut and pending_bytes + len(chunk) > MOST_LINE:
                raise line_too_long(path, line_number)
            if cut:
                line_number += chunk.count(b"\n")
                yield b"".join([*pending, chunk[:cut]]), file.tell() - taken
                pending, pending_bytes, taken = [], 0, file.tell()
            pending.append(chunk[cut:])
            pending_bytes += len(chunk) - cut
        yield b"".join(pending), file.tell() - taken


def line_too_long(path: str, number: int) -> DataError:
    """The error for a line, counted from 1, that is longer than a document can be."""
    return DataError(path, f"line {number} has more than {MOST_LINE:,} bytes", "a document a line")


def json_records(path: str, key: str | None) -> list[dict[str, Any]] | None:
    """Return the objects of a .json file that is one object or a list of objects.

    None if the file is to be read as text, or as JSON lines: with a `key`, if it is not JSON objects or the
    first has no text under the key. Without one it holds conversations, and anything else raises `DataError`.
    """
    if not path.lower().endswith(".json") or os.path.basename(path) == HUB_METADATA:
        return None
    with open_plain(path) as file:
        head = file.read(PART_BYTES).removeprefix(BOM).lstrip()
        size = os.fstat(file.fileno()).st_size
    if not head.startswith((b"{", b"[")):
        return None
    if size > MOST_LINE:
        if key is None:
            right = "one object a line in a .jsonl file"
            raise DataError(path, f"has {size:,} bytes, more than {MOST_LINE:,}, in one JSON value", right)
        return None
    try:
        value = _json_value(path, os.stat(path).st_mtime_ns, size)
    except (ValueError, RecursionError) as error:
        is_lines = isinstance(error, json.JSONDecodeError) and error.msg == "Extra data"
        if key is None and not is_lines:
            raise DataError(path, f"is not JSON: {error}", "conversations in JSON") from None
        return None
    records = value if isinstance(value, list) else [value]
    if not records or not all(isinstance(record, dict) for record in records):
        if key is None:
            raise DataError(path, "is not a list of objects", "a list of conversations, or one conversation")
        return None
    return records if key is None or isinstance(records[0].get(key), str) else None


@functools.lru_cache(maxsize=1)
def _json_value(path: str, changed: int, size: int) -> Any:
    """The value of a JSON file of that size, last `changed` at that time: it is asked for several times."""
    return read_json(read_text(path, MOST_LINE).removeprefix("\ufeff"))


def json_parts(path: str, key: str | None) -> Iterator[tuple[list[str], int]]:
    """Yield the texts under `key` of the objects of a .json file, or without one its conversations as JSON,
    and what each part took of the file.
    """
    records = json_records(path, key)
    if records is None:
        raise DataError(path, "has changed while it was read", "a file that does not change")
    size = os.path.getsize(path)
    taken = 0
    for start in range(0, len(records), PART_ROWS):
        part = records[start : start + PART_ROWS]
        texts = [json.dumps(record) if key is None else record.get(key) for record in part]
        done = size * (start + len(part)) // len(records)
        yield checked_texts(path, texts, key, start), done - taken
        taken = done


def checked_texts(path: str, texts: list[Any], key: str | None, row: int) -> list[str]:
    """Return the texts of the rows from `row` on, from 0. Raise `DataError` if one has no text."""
    for number, text in enumerate(texts, row + 1):
        if not isinstance(text, str):
            wrong = f"row {number} has no text in the column {key}"
            raise DataError(path, wrong, "a text in every row, perhaps an empty one")
    return texts


def table_parts(path: str, form: str, key: str | None) -> Iterator[tuple[list[str], int]]:
    """The texts of a table's column `key`, or without one its conversations as JSON, and
    what each part took of the file.
    """
    with open_plain(path) as file, _damage(path):
        size = file.seek(0, 2)
        file.seek(0)
        schema, count, batches = _opened(path, form, file)
        columns = _chat_columns(path, schema) if key is None else [_checked(path, schema, key)]
        row = taken = 0
        for batch in batches(columns):
            for start in range(0, batch.num_rows, PART_ROWS):
                part = batch.slice(start, PART_ROWS).select(columns)
                row += part.num_rows
                done = size * row // count if count else file.tell()
                yield _texts(path, part, key, row - part.num_rows), done - taken
                taken = done
        yield [], size - taken


def _opened(path: str, form: str, file: BinaryIO) -> tuple[Any, int, Callable[[list[str]], Iterator[Any]]]:
    """A table's schema, its rows (0: not known), and a function that reads some of
    its columns, as record batches.
    """
    if form == PARQUET:
        table = needed(path, "pyarrow.parquet").ParquetFile(file)
        return (
            table.schema_arrow,
            table.metadata.num_rows,
            lambda columns: table.iter_batches(PART_ROWS, columns=columns),
        )
    ipc = needed(path, "pyarrow").ipc
    if form == ARROW_STREAM:
        stream = ipc.open_stream(file)
        return stream.schema, 0, lambda columns: iter(stream)
    whole = ipc.open_file(file)
    return whole.schema, 0, lambda columns: (whole.get_batch(i) for i in range(whole.num_record_batches))


def _checked(path: str, schema: Any, key: str) -> str:
    """The name of the column `key`. Raises `DataError` unless there is one, of text."""
    types = needed(path, "pyarrow").types

    def is_text(kind: Any) -> bool:
        kind = kind.value_type if types.is_dictionary(kind) else kind
        return types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)

    named = [field.name for field in schema if is_text(field.type)]
    right = (
        f"--text-key with the column of its text; there {'are' if len(named) > 1 else 'is'} "
        f"{', '.join(named)[:200] or 'none'}"
    )
    found = schema.get_all_field_indices(key)
    if len(found) != 1:
        raise DataError(path, f"has {len(found) or 'no'} column{'s' * (len(found) > 1)} {key}", right)
    if not is_text(schema.field(found[0]).type):
        raise DataError(path, f"has a column {key} of {schema.field(found[0]).type}, which is no text", right)
    return key


def _chat_columns(path: str, schema: Any) -> list[str]:
    """All columns: each is a key of the conversations. Raises `DataError` if two have one name."""
    for name, count in Counter(schema.names).items():
        if count > 1:
            raise DataError(path, f"has {count} columns {name}", "each column once")
    return list(schema.names)


def _texts(path: str, part: Any, key: str | None, row: int) -> list[str]:
    """The texts of a part of a table that begins at a row."""
    if key is None:
        return [_as_json(record) for record in part.to_pylist()]
    return checked_texts(path, part.column(0).to_pylist(), key, row)


def _as_json(record: dict[str, Any]) -> str:
    """A row as a line of JSON."""

    def plain(value: Any) -> Any:
        if isinstance(value, bytes):  # how some writers of tables store text
            return value.decode("utf-8")
        if isinstance(value, Decimal):
            return int(value) if value == int(value) else float(value)
        return str(value)  # a date

    return json.dumps(_filled(record), default=plain)


def _filled(value: Any) -> Any:
    """A record as JSON would have it: a table has every key in every row, empty where a record had none."""
    if isinstance(value, dict):
        return {key: _filled(each) for key, each in value.items() if each is not None}
    return [_filled(each) for each in value] if isinstance(value, list) else value


def hub_parts(name: str, key: str | None) -> Iterator[tuple[list[str], int]]:
    """The texts of a data set of the Hugging Face hub, as they come over the network;
    or of one that lies in a folder.
    """
    path, config, split = ([*name.removeprefix(HUB_NAME).split(":"), "", ""])[:3]
    if not path or name.count(":") > 3:
        raise ConfigError("--input", f"{name} names no data set", HUB_FORM)
    datasets = needed(name, "datasets")
    # its tries, a line each: the last one's error is told below
    logging.getLogger("huggingface_hub").setLevel(logging.CRITICAL)
    row = 0
    try:
        rows = datasets.load_dataset(path, config or None, split=split or "train", streaming=True)
        for batch in rows.iter(PART_ROWS):
            if key is None:
                records = zip(*batch.values(), strict=True)
                texts = [_as_json(dict(zip(batch, record, strict=True))) for record in records]
            elif key in batch:
                texts = batch[key]
            else:
                right = f"--text-key with the column of its text; there are {', '.join(batch)}"
                raise DataError(name, f"has no column {key}", right)
            yield checked_texts(name, texts, key, row), 0
            row += len(texts)
    except UserError:
        raise
    except Exception as error:  # of the hub, of the network, and of every format that it can read
        why = " ".join(str(error).split())[:200] or type(error).__name__
        raise DataError(name, f"cannot be streamed: {why}", HUB_FORM) from None


def saved_files(folder: str) -> list[str]:
    """The Arrow files of a folder that the package datasets has saved, in their order. Raises `DataError`."""
    right = "a folder that datasets.save_to_disk(…) has written"
    if os.path.lexists(splits := os.path.join(folder, "dataset_dict.json")):
        named = _read_names(splits, "splits", right)
        if len(named) != 1:
            raise DataError(
                folder,
                f"holds the splits {', '.join(named)}",
                f"one of them, such as {os.path.join(folder, named[0])}",
            )
        folder = os.path.join(folder, named[0])
    return [
        os.path.join(folder, name)
        for name in _read_names(os.path.join(folder, "state.json"), "_data_files", right)
    ]


def _read_names(path: str, key: str, right: str) -> list[str]:
    """Names of files or folders beside a JSON file, which lists them under a key."""
    try:
        found = json.loads(read_text(path))
        names = [entry["filename"] if isinstance(entry, dict) else entry for entry in found[key]]
    except (OSError, ValueError, RecursionError, KeyError, TypeError):
        names = []
    if not names or not all(
        isinstance(name, str) and name == os.path.basename(name) and name not in ("", ".", "..")
        for name in names
    ):
        raise DataError(path, f"names no files under {key}", right)
    return names
