"""Turns files of token ids into a corpus: nanoGPT's train.bin and val.bin, the shards of llm.c and
modded-nanogpt, and numpy's arrays.

A header says how wide a token is. nanoGPT's files have none, so the ids are checked against the vocabulary: a
file that was written in another type would be read as other tokens, without any error.
"""

import glob
import os
import signal
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megacore.errors import ConfigError, DataError
from megacore.files import open_plain
from megacore.tools.output_files import made_folder, replaced
from megacore.tools.prepare.indexed_writer import IndexedWriter
from megacore.tools.prepare.input_files import FORMATS
from megacore.tools.prepare.prepare import Prepared
from megacore.tools.prepare.split import Encoded, Split, refuse_empty, sidecar
from megacore.tools.processes import hold_signals
from megacore.tools.text.encodings import ENCODING, encoding_json, is_encoding
from megacore.tools.text.tokenizer import Tokenizer, load_tokenizer

TRAIN, VALID = "train.bin", "val.bin"
CHARACTERS = "meta.pkl"  # in folders of nanoGPT whose tokens are characters, which only this file numbers
BLOCK = 1 << 20  # tokens at a time
SAMPLE = 1 << 18  # tokens at a file's beginning, middle and end, from which its type is judged
MIN_TOKENS = 4  # with fewer, a wider type may fit by chance
TEXT_BYTES = 1024  # of a file without a zero among them: real tokens have zeros in their upper bytes
# types that files of tokens have, in either byte order
LIKELY = [np.dtype(f"{order}{kind}") for order in "<>" for kind in ("u2", "u4", "i8")]
# llm.c's header: 256 numbers of 4 bytes, beginning with the magic, the version and the tokens
HEADER = np.dtype("<i4")
HEADER_BYTES = 256 * HEADER.itemsize
MAGICS: dict[tuple[int, int], np.dtype] = {(20240520, 1): np.dtype("<u2"), (20240801, 7): np.dtype("<u4")}
LLM_C = {magic for magic, _ in MAGICS} | {20240522}  # the last is of files to evaluate with
NUMPY = b"\x93NUMPY"
RIGHT = f"a folder with nanoGPT's {TRAIN}, and {VALID} next to it, or files of tokens"


@dataclass(frozen=True)
class TokenFile:
    """A file of token ids: where they begin, how many there are, and in which type.

    `declared`: the type comes from a header.
    """

    path: str
    dtype: np.dtype
    offset: int
    count: int
    declared: bool

    def read(self, start: int, stop: int) -> np.ndarray:
        """Return the tokens from `start` to `stop` as they are in the file."""
        offset = self.offset + start * self.dtype.itemsize
        return np.fromfile(self.path, self.dtype, min(stop, self.count) - start, offset=offset)


def convert_tokens(inputs: list[str], prefix: str, tokenizer: str, dtype: str | None = None) -> Prepared:
    """Write ``prefix.bin/.idx/.json``, and ``prefix_valid.*`` if the input is a folder with a ``val.bin``.

    Several files become one corpus, in their order. A document ends with the tokenizer's own end. `dtype` is
    the type of the tokens in files without a header; None: uint16, nanoGPT's.

    Raises:
        DataError, ConfigError: nothing has been written.
    """
    files_by_prefix: dict[str, list[TokenFile]] = {}
    size = 0
    for split_prefix, paths in _find_paths(inputs, prefix).items():
        files_by_prefix[split_prefix] = [_open(path, dtype) for path in paths]
        size += sum(os.path.getsize(path) for path in paths)
    for file in (file for files in files_by_prefix.values() for file in files):
        for split_prefix in files_by_prefix:
            output = f"{split_prefix}.bin"
            if os.path.exists(output) and os.path.samefile(file.path, output):
                wrong = f"{prefix} would overwrite {file.path}"
                raise ConfigError("--output", wrong, "a prefix apart from the input")
    try:
        with ExitStack() as stack:
            stack.enter_context(made_folder(Path(prefix).parent))
            tokenizer_path, loaded = tokenizer, None
            if is_encoding(tokenizer):
                tokenizer_path = f"{prefix}{ENCODING}"
                temporary_path = stack.enter_context(replaced(tokenizer_path))
                Path(temporary_path).write_bytes(encoding_json(tokenizer))
                loaded = load_tokenizer(temporary_path)
            loaded = loaded or load_tokenizer(tokenizer)
            output_dtype = np.uint16 if loaded.vocab_size <= 1 << 16 else np.int32
            splits = []
            for split_prefix, files in files_by_prefix.items():
                writer = stack.enter_context(IndexedWriter(split_prefix, output_dtype))
                splits.append(Split(writer, loaded.vocab_size))
                for file in files:
                    _check_type(file, loaded.vocab_size, tokenizer)
                    _copy(file, splits[-1], loaded, tokenizer)
                _count_bytes(splits[-1], loaded)
            refuse_empty(splits)
            for split in splits:
                split.writer.finish()
            with hold_signals(signal.SIGINT, signal.SIGTERM):  # all files get their names, or none does
                stack.close()
                sidecars = {
                    split.writer.prefix: sidecar(split, splits[0], tokenizer_path) for split in splits
                }
                for split_prefix, described in sidecars.items():
                    described.save(split_prefix)
    except OSError as error:
        raise DataError(
            prefix, f"cannot be written: {error.strerror}", "a prefix in a writable folder with space left"
        ) from None
    end = None if loaded.end_of_document is None else f"token {loaded.end_of_document}"
    return Prepared(sidecars, tokenizer_path, [], size, end)


def _find_paths(inputs: list[str], prefix: str) -> dict[str, list[str]]:
    """The files of each output, each once. Raises `ConfigError`, `DataError`."""
    folders = [path for path in inputs if os.path.isdir(path)]
    if len(folders) < len(inputs) and folders:
        raise ConfigError("--input", f"{folders[0]} is a folder, next to other inputs", RIGHT)
    if len(folders) > 1:
        raise ConfigError("--input", f"{folders[0]} is a folder, and so is {folders[1]}", RIGHT)
    if folders:
        folder = folders[0]
        if os.path.lexists(os.path.join(folder, CHARACTERS)):
            wrong = f"has a {CHARACTERS}, which numbers characters as no tokenizer's file does"
            raise DataError(folder, wrong, "its text, prepared with --tokenizer bytes")
        paths = {prefix: [os.path.join(folder, TRAIN)]}
        if os.path.lexists(valid := os.path.join(folder, VALID)):
            paths[f"{prefix}_valid"] = [valid]
        return paths
    unique_paths: dict[str, None] = {}
    for name in inputs:
        matches = sorted(glob.glob(name)) if glob.has_magic(name) and not os.path.exists(name) else [name]
        unique_paths.update(dict.fromkeys(matches or [name]))
    return {prefix: list(unique_paths)}


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
        return _open_plain(path, head, size, np.dtype(dtype or "uint16").newbyteorder("<"))
    if dtype is not None and np.dtype(dtype) != token_file.dtype.newbyteorder("="):
        wrong = f"{dtype} contradicts the header of {path}, whose tokens are {token_file.dtype.name}"
        raise ConfigError("--dtype", wrong, "without it")
    if token_file.offset + token_file.count * token_file.dtype.itemsize != size:
        wrong = f"has {size:,} bytes, and its header says {token_file.count:,} tokens"
        raise DataError(path, wrong, "a whole file")
    if token_file.count == 0:
        raise DataError(path, "has a header and no token", RIGHT)
    return token_file


def _open_plain(path: str, head: bytes, size: int, dtype: np.dtype) -> TokenFile:
    """A file without a header."""
    if size == 0 or size % dtype.itemsize:
        right = f"{dtype.itemsize} a token of --dtype {dtype.name}; {RIGHT}"
        raise DataError(path, f"has {size:,} bytes", right)
    for start, magic, what, _ in FORMATS:
        # two bytes are tokens as often as not
        if len(magic) > 2 and head[start : start + len(magic)] == magic:
            raise DataError(path, f"is {what}", RIGHT)
    if dtype.itemsize > 1 and len(head) >= TEXT_BYTES and b"\0" not in head:
        raise DataError(path, "is text, and not tokens", "the same command without --nanogpt")
    return TokenFile(path, dtype, 0, size // dtype.itemsize, declared=False)


def _open_numpy(path: str) -> TokenFile:
    """A file that numpy.save has written."""
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise DataError(path, f"is not a whole numpy array: {error}", RIGHT) from None
    if array.ndim != 1 or array.dtype.kind not in "iu":
        wrong = f"is a numpy array of {array.dtype} with {array.ndim} dimensions"
        raise DataError(path, wrong, "whole numbers in one dimension")
    offset = (
        array.offset if isinstance(array, np.memmap) else os.path.getsize(path)
    )  # an empty one is not mapped
    return TokenFile(path, array.dtype, offset, len(array), declared=True)


def _open_llm_c(path: str, head: bytes, size: int) -> TokenFile:
    """A file that a script of llm.c or modded-nanogpt has written."""
    if len(head) < HEADER_BYTES:
        raise DataError(path, f"has {size:,} bytes, less than llm.c's header", "a whole file")
    magic, version, count = np.frombuffer(head, HEADER)[:3].tolist()
    if (magic, version) not in MAGICS:
        known = ", ".join(f"{number} version {version}" for number, version in MAGICS)
        raise DataError(path, f"has llm.c's header {magic} of version {version}", f"one of {known}")
    return TokenFile(path, MAGICS[magic, version], HEADER_BYTES, count, declared=True)


def _fits(path: str, dtype: np.dtype, vocab_size: int) -> bool:
    """Whether samples of a file without a header hold ids of the vocabulary in this type."""
    size = os.path.getsize(path)
    count = size // dtype.itemsize
    if size % dtype.itemsize:
        return False
    for start in {0, max(count // 2 - SAMPLE // 2, 0), max(count - SAMPLE, 0)}:
        tokens = np.fromfile(path, dtype, SAMPLE, offset=start * dtype.itemsize)
        if not ((tokens < vocab_size) & (tokens >= 0)).all():
            return False
    return True


def _check_type(file: TokenFile, vocab_size: int, tokenizer: str) -> None:
    """Raise `DataError` if the bytes of a file without a header contradict its type.

    A file whose bytes also fit a wider type has that type: two 16-bit ids read as one 32-bit id exceed the
    vocabulary unless the upper one is 0.
    """
    if file.declared:
        return
    size = os.path.getsize(file.path)
    fitting = [
        dtype
        for dtype in LIKELY
        if size >= MIN_TOKENS * dtype.itemsize and _fits(file.path, dtype, vocab_size)
    ]
    if _fits(file.path, file.dtype, vocab_size):
        fitting = [dtype for dtype in fitting if dtype.itemsize > file.dtype.itemsize]
    if not fitting:
        return  # the type is right, or the ids are of another vocabulary, which `_copy` reports
    actual = max(fitting, key=lambda dtype: (dtype.str.startswith("<"), dtype.itemsize))
    wrong = f"does not hold tokens of {file.dtype.name}: as {actual.name} "
    if actual.str.startswith(">"):
        right = f"np.fromfile(…, '{actual.str}').astype('{actual.newbyteorder('<').str}').tofile(…)"
        raise DataError(file.path, wrong + f"in the other byte order all are ids of {tokenizer}", right)
    raise DataError(file.path, wrong + f"all are ids of {tokenizer}", f"--dtype {actual.name}")


def _copy(file: TokenFile, split: Split, tokenizer: Tokenizer, name: str) -> None:
    """Add a file's tokens, cut after each that ends a document. Raises `DataError`."""
    if file.dtype.itemsize == 2 and not file.declared and tokenizer.vocab_size > 1 << 16:
        wrong = f"has two bytes a token, which cannot hold the {tokenizer.vocab_size:,} tokens of {name}"
        raise DataError(file.path, wrong, "the tokenizer that made it, or --dtype uint32")
    for start in range(0, file.count, BLOCK):
        block = file.read(start, start + BLOCK)
        for token in (int(block.min()), int(block.max())):
            if not 0 <= token < tokenizer.vocab_size:
                wrong = f"holds token id {token}, and {name} has {tokenizer.vocab_size:,} tokens"
                raise DataError(file.path, wrong, "the tokenizer that made it")
        block = block.astype(split.writer.dtype, copy=False)
        end = tokenizer.end_of_document
        parts = np.split(block, np.flatnonzero(block == end) + 1 if end is not None else [])
        ends = [True] * (len(parts) - 1) + [False]
        split.add(Encoded(parts, [None] * len(parts), ends))


def _count_bytes(split: Split, tokenizer: Tokenizer) -> None:
    """Set the bytes of text that the split's tokens stand for."""
    pieces = np.array([len(tokenizer.token_bytes(token)) for token in range(tokenizer.vocab_size)])
    split.text_bytes = int((split.counts * pieces).sum())
