"""Turns nanoGPT's token files into a corpus: train.bin and val.bin, two bytes a token and nothing else,
as its prepare.py writes them.
"""

import os
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from megacore.errors import ConfigError, DataError
from megacore.files import open_plain
from megacore.tools.output_files import made_folder, replaced
from megacore.tools.prepare.indexed_writer import IndexedWriter
from megacore.tools.prepare.prepare import Prepared
from megacore.tools.prepare.split import Encoded, Split, refuse_empty, sidecar
from megacore.tools.text.encodings import ENCODING, encoding_json, is_encoding
from megacore.tools.text.tokenizer import Tokenizer, load_tokenizer

TRAIN, VALID = "train.bin", "val.bin"
BLOCK = 1 << 20  # tokens at a time
# the first four bytes of what llm.c's scripts write: 256 such numbers before the tokens
OTHER_MAGICS = (20240520, 20240801)
RIGHT = f"a folder with nanoGPT's {TRAIN}, and {VALID} beside it, or such a file"


def convert_tokens(given: str, prefix: str, tokenizer: str) -> Prepared:
    """Writes ``prefix.bin/.idx/.json``, and ``prefix_valid.*`` if there is a ``val.bin``.

    A document ends with the tokenizer's own end.

    Raises:
        DataError, ConfigError: nothing has been written.
    """
    folder = os.path.isdir(given)
    paths = {prefix: os.path.join(given, TRAIN) if folder else given}
    if folder and os.path.lexists(os.path.join(given, VALID)):
        paths[f"{prefix}_valid"] = os.path.join(given, VALID)
    for path in paths.values():
        _check(path)
        if any(os.path.exists(f"{p}.bin") and os.path.samefile(path, f"{p}.bin") for p in paths):
            raise ConfigError("--output", f"{prefix} would overwrite {path}", "a prefix apart from the input")
    try:
        with ExitStack() as stack:
            stack.enter_context(made_folder(Path(prefix).parent))
            name, loaded = tokenizer, None
            if is_encoding(tokenizer):
                name = f"{prefix}{ENCODING}"
                aside = stack.enter_context(replaced(name))
                Path(aside).write_bytes(encoding_json(tokenizer))
                loaded = load_tokenizer(aside)
            loaded = loaded or load_tokenizer(tokenizer)
            splits = []
            for p, path in paths.items():
                splits.append(Split(stack.enter_context(IndexedWriter(p, np.uint16)), loaded.vocab_size))
                _copy(path, splits[-1], loaded, tokenizer)
            refuse_empty(splits)
            for split in splits:
                split.writer.finish()
        sidecars = {split.writer.prefix: sidecar(split, splits[0], name) for split in splits}
        for p, described in sidecars.items():
            described.save(p)
    except OSError as error:
        raise DataError(
            prefix, f"cannot be written: {error.strerror}", "a prefix in a writable folder with space left"
        ) from None
    size = sum(os.path.getsize(path) for path in paths.values())
    return Prepared(
        sidecars,
        name,
        [],
        size,
        None if loaded.end_of_document is None else f"token {loaded.end_of_document}",
    )


def _check(path: str) -> None:
    """Raises `DataError` unless a file may hold two bytes a token."""
    try:
        with open_plain(path) as file:
            head, size = file.read(4), os.fstat(file.fileno()).st_size
    except OSError as error:
        raise DataError(path, f"cannot be read: {error.strerror}", RIGHT) from None
    if int.from_bytes(head, "little") in OTHER_MAGICS:
        raise DataError(path, "begins with a header of llm.c, which nanoGPT's files have not", RIGHT)
    if head.startswith(b"MMID") or os.path.exists(f"{path.removesuffix('.bin')}.idx"):
        raise DataError(path, "is a corpus with an index already", "data.train with its prefix")
    if size == 0 or size % 2:
        raise DataError(path, f"has {size:,} bytes", f"two a token; {RIGHT}")


def _copy(path: str, split: Split, tokenizer: Tokenizer, name: str) -> None:
    """Adds a file's tokens, cut behind each that ends a document. Raises `DataError`."""
    if tokenizer.vocab_size > 1 << 16:
        wrong = f"has two bytes a token, which cannot hold the {tokenizer.vocab_size:,} tokens of {name}"
        raise DataError(path, wrong, "the tokenizer that made it")
    tokens = np.memmap(path, dtype="<u2", mode="r")
    for start in range(0, len(tokens), BLOCK):
        block = tokens[start : start + BLOCK]
        if (largest := int(block.max())) >= tokenizer.vocab_size:
            wrong = f"holds token id {largest}, and {name} has {tokenizer.vocab_size:,} tokens"
            raise DataError(path, wrong, "the tokenizer that made it")
        end = tokenizer.end_of_document
        parts = np.split(block, np.flatnonzero(block == end) + 1 if end is not None else [])
        split.add(Encoded(parts, [None] * len(parts), [True] * (len(parts) - 1) + [False]))
    pieces = np.array([len(tokenizer.token_bytes(token)) for token in range(tokenizer.vocab_size)])
    split.text_bytes = int((split.counts * pieces).sum())
