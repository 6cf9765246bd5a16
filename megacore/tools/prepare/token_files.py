"""Turns files of token ids into a corpus: nanoGPT's train.bin and val.bin, the shards of llm.c and
modded-nanogpt, and numpy's arrays.

A header says how wide a token is. nanoGPT's files have none, so the ids are checked against the vocabulary: a
file that was written in another type would be read as other tokens, without any error.
"""

import os
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

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
SAMPLE = 1 << 20  # tokens from which the type of a file is judged
# types that files of tokens have, in either byte order
LIKELY = [np.dtype(f"{order}{kind}") for order in "<>" for kind in ("u2", "u4", "i8")]
# llm.c's header: 256 numbers of 4 bytes, beginning with the magic, the version and the tokens
HEADER = np.dtype("<i4")
HEADER_BYTES = 256 * HEADER.itemsize
MAGICS: dict[tuple[int, int], np.dtype] = {(20240520, 1): np.dtype("<u2"), (20240801, 7): np.dtype("<u4")}
LLM_C = {magic for magic, _ in MAGICS} | {20240522}  # the last is of files to evaluate with
NUMPY = b"\x93NUMPY"
FEWEST = 16  # tokens from which on it is no chance that a wider type fits too
RIGHT = f"a folder with nanoGPT's {TRAIN}, and {VALID} next to it, or files of tokens"


@dataclass(frozen=True)
class TokenFile:
    """A file of token ids: where they begin, how many there are, and in which type.

    `declared`: the file has a header that says so.
    """

    path: str
    dtype: np.dtype
    offset: int
    count: int
    declared: bool

    def read(self, start: int, stop: int) -> np.ndarray:
        """The tokens `start` to `stop` as they are in the file."""
        offset = self.offset + start * self.dtype.itemsize
        return np.fromfile(self.path, self.dtype, min(stop, self.count) - start, offset=offset)


def convert_tokens(inputs: list[str], prefix: str, tokenizer: str, dtype: str | None = None) -> Prepared:
    """Write ``prefix.bin/.idx/.json``, and ``prefix_valid.*`` if the input is a folder with a ``val.bin``.

    Several files become one corpus, in their order. A document ends with the tokenizer's own end. `dtype` is
    the type of the tokens in files without a header; None: uint16, nanoGPT's.

    Raises:
        DataError, ConfigError: nothing has been written.
    """
    paths = _paths(inputs, prefix)
    files = {p: [_open(path, dtype) for path in each] for p, each in paths.items()}
    for path in (path for each in paths.values() for path in each):
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
            written = np.uint16 if loaded.vocab_size <= 1 << 16 else np.int32
            splits = []
            for p, each in files.items():
                splits.append(Split(stack.enter_context(IndexedWriter(p, written)), loaded.vocab_size))
                for file in each:
                    _check_type(file, loaded.vocab_size, tokenizer)
                    _copy(file, splits[-1], loaded, tokenizer)
                _count_bytes(splits[-1], loaded)
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
    size = sum(os.path.getsize(path) for each in paths.values() for path in each)
    end = None if loaded.end_of_document is None else f"token {loaded.end_of_document}"
    return Prepared(sidecars, name, [], size, end)


def _paths(inputs: list[str], prefix: str) -> dict[str, list[str]]:
    """The files of each output. Raises `ConfigError` for a folder among several inputs."""
    folders = [path for path in inputs if os.path.isdir(path)]
    if not folders:
        return {prefix: inputs}
    if len(inputs) > 1:
        raise ConfigError("--input", f"{folders[0]} is a folder, next to other inputs", RIGHT)
    paths = {prefix: [os.path.join(folders[0], TRAIN)]}
    if os.path.lexists(valid := os.path.join(folders[0], VALID)):
        paths[f"{prefix}_valid"] = [valid]
    return paths


def _open(path: str, dtype: str | None) -> TokenFile:
    """The file of tokens, as its header or `dtype` describes it. Raises `DataError`, `ConfigError`."""
    try:
        with open_plain(path) as file:
            head, size = file.read(HEADER_BYTES), os.fstat(file.fileno()).st_size
    except OSError as error:
        raise DataError(path, f"cannot be read: {error.strerror}", RIGHT) from None
    if head.startswith(b"MMID") or os.path.exists(f"{path.removesuffix('.bin')}.idx"):
        raise DataError(path, "is a corpus with an index already", "data.train with its prefix")
    if head.startswith(NUMPY):
        token_file = _open_numpy(path)
    elif int.from_bytes(head[:4], "little") in LLM_C:
        token_file = _open_llm_c(path, head, size)
    else:
        plain = np.dtype(dtype or "uint16").newbyteorder("<")
        if size == 0 or size % plain.itemsize:
            right = f"{plain.itemsize} a token of --dtype {plain.name}; {RIGHT}"
            raise DataError(path, f"has {size:,} bytes", right)
        return TokenFile(path, plain, 0, size // plain.itemsize, declared=False)
    if dtype is not None and np.dtype(dtype) != token_file.dtype.newbyteorder("="):
        wrong = f"{dtype} contradicts the header of {path}, whose tokens are {token_file.dtype.name}"
        raise ConfigError("--dtype", wrong, "without it")
    if token_file.offset + token_file.count * token_file.dtype.itemsize != size:
        raise DataError(
            path, f"has {size:,} bytes, and its header says {token_file.count:,} tokens", "a whole file"
        )
    return token_file


def _open_numpy(path: str) -> TokenFile:
    """A file that numpy.save has written."""
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise DataError(path, f"is not a whole numpy array: {error}", RIGHT) from None
    if array.ndim != 1 or array.dtype.kind not in "iu":
        wrong = f"is a numpy array of {array.dtype} with {array.ndim} dimensions"
        raise DataError(path, wrong, "whole numbers in one dimension")
    assert isinstance(array, np.memmap)
    return TokenFile(path, array.dtype, array.offset, len(array), declared=True)


def _open_llm_c(path: str, head: bytes, size: int) -> TokenFile:
    """A file that a script of llm.c or modded-nanogpt has written."""
    if len(head) < HEADER_BYTES:
        raise DataError(path, f"has {size:,} bytes, less than llm.c's header", "a whole file")
    magic, version, count = np.frombuffer(head, HEADER)[:3].tolist()
    if (magic, version) not in MAGICS:
        known = ", ".join(f"{number} version {version}" for number, version in MAGICS)
        raise DataError(path, f"has llm.c's header {magic} of version {version}", f"one of {known}")
    return TokenFile(path, MAGICS[magic, version], HEADER_BYTES, count, declared=True)


def _fits(path: str, dtype: np.dtype, vocab_size: int, size: int) -> bool:
    """Whether a file without a header, or the beginning of it, holds ids of the vocabulary in this type."""
    if size % dtype.itemsize or size < FEWEST * dtype.itemsize:
        return False
    tokens = np.fromfile(path, dtype, SAMPLE)
    return bool((tokens < vocab_size).all() and (tokens >= 0).all())


def _check_type(file: TokenFile, vocab_size: int, name: str) -> None:
    """Raise `DataError` if the bytes of a file without a header contradict its type.

    If the ids are of the vocabulary in a wider type too, that is the right one: tokens that really have 2
    bytes would make huge numbers when two are read as one, unless every second of them were 0.
    """
    if file.declared:
        return
    size = os.path.getsize(file.path)
    fitting = [dtype for dtype in LIKELY if _fits(file.path, dtype, vocab_size, size)]
    wider = [dtype for dtype in fitting if dtype.itemsize > file.dtype.itemsize]
    if _fits(file.path, file.dtype, vocab_size, size) and not wider:
        return
    if not fitting:
        return  # too short to tell, or ids of another vocabulary, which `_copy` reports
    likely = max(fitting, key=lambda dtype: dtype.itemsize)
    wrong = f"does not hold tokens of {file.dtype.name}: as {likely.name} "
    if likely.newbyteorder("<") != likely:
        right = f"np.fromfile(…, '{likely.str}').astype('{likely.newbyteorder('<').str}').tofile(…)"
        raise DataError(file.path, wrong + f"in the other byte order all are ids of {name}", right)
    raise DataError(file.path, wrong + f"all are ids of {name}", f"--dtype {likely.name}")


def _copy(file: TokenFile, split: Split, tokenizer: Tokenizer, name: str) -> None:
    """Add a file's tokens, cut after each that ends a document. Raises `DataError`."""
    if file.dtype.itemsize == 2 and not file.declared and tokenizer.vocab_size > 1 << 16:
        wrong = f"has two bytes a token, which cannot hold the {tokenizer.vocab_size:,} tokens of {name}"
        raise DataError(file.path, wrong, "the tokenizer that made it, or --dtype uint32")
    for start in range(0, file.count, BLOCK):
        block = file.read(start, start + BLOCK)
        for bad in (int(block.min()), int(block.max())):
            if not 0 <= bad < tokenizer.vocab_size:
                wrong = f"holds token id {bad}, and {name} has {tokenizer.vocab_size:,} tokens"
                raise DataError(file.path, wrong, "the tokenizer that made it")
        end = tokenizer.end_of_document
        parts = np.split(block, np.flatnonzero(block == end) + 1 if end is not None else [])
        ends = [True] * (len(parts) - 1) + [False]
        split.add(Encoded(_as_written(parts, split.writer.dtype), [None] * len(parts), ends))


def _as_written(parts: list[np.ndarray], dtype: npt.DTypeLike) -> list[np.ndarray]:
    return [part.astype(dtype, copy=False) for part in parts]


def _count_bytes(split: Split, tokenizer: Tokenizer) -> None:
    """Set the bytes of text that the split's tokens stand for."""
    pieces = np.array([len(tokenizer.token_bytes(token)) for token in range(tokenizer.vocab_size)])
    split.text_bytes = int((split.counts * pieces).sum())
