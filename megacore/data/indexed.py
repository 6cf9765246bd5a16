"""Token files on disk, in Megatron's indexed format (`MMIDIDX` version 1), so that
existing corpora work unchanged.

``PREFIX.bin`` holds all tokens, one after another. ``PREFIX.idx``, little-endian, says where sequences begin
and end::

    magic b"MMIDIDX\\0\\0" | version u64 = 1 | dtype code u8 | sequences u64 | document boundaries u64
    sizes i32[sequences], in tokens | pointers i64[sequences], in bytes | boundaries i64[documents + 1], in
    sequences

A document is one or more sequences. (Multimodal files end with one more byte a sequence, which is not read
here.)

``PREFIX.mask.bin`` is megacore's own and optional: a byte a token of ``PREFIX.bin``, 1 if the token is
learned and 0 if not.
"""

import os
import struct

import numpy as np
import numpy.typing as npt

from megacore.config.schema import MASK
from megacore.errors import DataError
from megacore.files import open_plain

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
DTYPES = {
    1: np.uint8,
    2: np.int8,
    3: np.int16,
    4: np.int32,
    5: np.int64,
    6: np.float64,
    7: np.float32,
    8: np.uint16,
}
SCAN_BYTES = 256 << 20  # the most that a scan reads
SCAN_BLOCK = 1 << 20
PREPARE_AGAIN = "prepare or copy it again"


class IndexedTokens:
    """The tokens of ``PREFIX.bin``, memory-mapped and read as one stream.

    Opening takes the same time at any size.

    Attributes:
        prefix: the path without `.bin` and `.idx`.
        num_tokens: length of the stream.
        num_documents: documents in it.
        dtype: of a token on disk.
        masked: whether a ``PREFIX.mask.bin`` says which tokens are learned.

    Raises:
        DataError: a file is missing, truncated or not of this format, or the two do not belong together.
    """

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        bin_path, idx_path = f"{prefix}.bin", f"{prefix}.idx"
        if prefix.endswith((".bin", ".idx")) and not os.path.exists(bin_path):
            raise DataError(prefix, "names one file, and a corpus has two", f"their prefix, {prefix[:-4]}")
        bin_size, idx_size = _size_of(bin_path), _size_of(idx_path)
        with open(idx_path, "rb") as file:
            header = file.read(HEADER.size)
        if len(header) < HEADER.size:
            raise DataError(
                idx_path, f"truncated: {idx_size} bytes", f"at least {HEADER.size} bytes; {PREPARE_AGAIN}"
            )
        magic, version, code, sequences, boundaries = HEADER.unpack(header)
        if magic != MAGIC:
            raise DataError(idx_path, f"starts with {magic!r}", f"{MAGIC!r}: an index in Megatron's format")
        if version != 1:
            raise DataError(idx_path, f"is of version {version}", "version 1")
        if code not in DTYPES or not np.issubdtype(DTYPES[code], np.integer):
            raise DataError(idx_path, f"dtype code {code}", "an integer type: 1, 2, 3, 4, 5 or 8")
        whole = HEADER.size + 12 * sequences + 8 * boundaries
        if idx_size not in (whole, whole + sequences):
            wrong = (
                f"has {idx_size} bytes, but its header announces {sequences} sequences and "
                f"{boundaries} boundaries"
            )
            raise DataError(idx_path, wrong, f"{whole} bytes; {PREPARE_AGAIN}")
        if sequences == 0 or boundaries < 2 or bin_size == 0:
            raise DataError(f"{prefix}.bin", "holds no tokens", "at least one document")

        self.dtype = np.dtype(DTYPES[code])
        self.num_tokens = bin_size // self.dtype.itemsize
        self.num_documents = boundaries - 1
        self._pointers = _mapped(idx_path, "<i8", HEADER.size + 4 * sequences, sequences)
        self._boundaries = _mapped(idx_path, "<i8", HEADER.size + 12 * sequences, boundaries)
        # the others in `check_index`, and when they are read
        if not 0 <= self._boundaries[0] <= self._boundaries[-1] <= sequences:
            raise self._disorder()
        self._sizes = _mapped(idx_path, "<i4", HEADER.size, sequences)
        # Only the end of the last sequence is checked: checking each would read an index of many GB.
        end = int(self._pointers[-1]) + int(self._sizes[-1]) * self.dtype.itemsize
        if end != bin_size:
            raise DataError(
                bin_path,
                f"has {bin_size} bytes, but its .idx ends at byte {end}",
                f"{end} bytes; {PREPARE_AGAIN}",
            )
        self._tokens = _mapped(bin_path, self.dtype.newbyteorder("<"))
        self.masked = os.path.lexists(prefix + MASK)
        if self.masked:
            if (size := _size_of(prefix + MASK)) != self.num_tokens:
                wrong = f"has {size} bytes, and the corpus {self.num_tokens} tokens"
                raise DataError(prefix + MASK, wrong, f"a byte a token; {PREPARE_AGAIN}")
            self._mask = _mapped(prefix + MASK, np.uint8)

    def read(self, start: int, length: int) -> np.ndarray:
        """Tokens `start` to `start + length` of the stream, read-only and not copied:
        [length], of `dtype`.
        """
        assert 0 <= start and start + length <= self.num_tokens, (
            f"[{start}, {start + length}) of {self.num_tokens} tokens"
        )
        return self._tokens[start : start + length]

    def learned(self, start: int, length: int) -> np.ndarray:
        """Which tokens from `start` on are learned where they are targets: bool [length]; all of
        them in a corpus without a mask.
        """
        if not self.masked:
            return np.ones(length, dtype=np.bool_)
        mask = self._mask[start : start + length]
        if mask.max() > 1:
            raise DataError(
                self.prefix + MASK, f"holds the byte {mask.max()}", f"0 or 1 for each token; {PREPARE_AGAIN}"
            )
        return mask.astype(np.bool_)

    def check_learned(self) -> None:
        """Raises `DataError` if the mask leaves out every token.

        Reads it, in blocks, up to the first that is learned.
        """
        starts = range(0, self.num_tokens, SCAN_BLOCK)
        if self.masked and not any(
            self.learned(start, min(SCAN_BLOCK, self.num_tokens - start)).any() for start in starts
        ):
            raise DataError(
                self.prefix + MASK, "leaves out every token, so nothing is learned", "a corpus with answers"
            )

    def check_index(self) -> None:
        """Raises `DataError` unless sequences and documents follow one another.

        Reads up to 256 MiB of the index: all of it, or of a larger one as much in evenly spread blocks.
        """
        for count, check in (
            (len(self._pointers), self._check_sequences),
            (len(self._boundaries), self._check_boundaries),
        ):
            blocks = -(-count // SCAN_BLOCK)
            most = SCAN_BYTES // (SCAN_BLOCK * 20)  # of a sequence 12 bytes are read, and of a document 8
            for block in np.linspace(0, blocks - 1, num=min(blocks, most), dtype=np.int64).tolist():
                check(block * SCAN_BLOCK, min((block + 1) * SCAN_BLOCK, count))

    def _check_sequences(self, first: int, stop: int) -> None:
        """Raises `DataError` unless each of the sequences `first` to `stop - 1`
        ends where the next one begins.
        """
        sizes, begins = self._sizes[first:stop].astype(np.int64), self._pointers[first : stop + 1]
        if stop == len(self._pointers):
            begins = np.append(begins, self.num_tokens * self.dtype.itemsize)
        ends = begins[:-1] + sizes * self.dtype.itemsize
        if sizes.min() < 0 or (first == 0 and begins[0]) or (ends != begins[1:]).any():
            raise self._disorder()

    def _check_boundaries(self, first: int, stop: int) -> None:
        """The same of documents' boundaries."""
        bounds = self._boundaries[first : stop + 1]
        if bounds.min() < 0 or bounds.max() > len(self._pointers) or (np.diff(bounds) < 0).any():
            raise self._disorder()

    def _sequence_at(self, position: int) -> int:
        """The number of the sequence with the token at `position`.

        Raises `DataError` if the index leads elsewhere.
        """
        byte = position * self.dtype.itemsize
        sequence = int(np.searchsorted(self._pointers, byte, side="right") - 1)
        if not 0 <= byte - int(self._pointers[sequence]) < int(self._sizes[sequence]) * self.dtype.itemsize:
            raise self._disorder()
        return sequence

    def document_at(self, position: int) -> int:
        """The number, from 0, of the document with the token at `position` of the stream.

        Raises:
            DataError: the documents do not follow one another.
        """
        sequence = self._sequence_at(position)
        document = int(np.searchsorted(self._boundaries, sequence, side="right") - 1)
        begin, end = self._boundaries[max(document, 0)], self._boundaries[document + 1 : document + 2]
        if not 0 <= begin <= sequence or (end <= sequence).any() or (end > len(self._pointers)).any():
            raise self._disorder()
        return document

    def document_starts(self, first: int, stop: int) -> np.ndarray:
        """The positions from `first` up to `stop`, which is left out, at which a document begins; ascending.

        Raises:
            DataError: the documents do not follow one another.
        """
        if first >= stop:
            return np.empty(0, dtype=np.int64)
        sequences = self._sequence_at(first), self._sequence_at(stop - 1)
        if sequences[0] > sequences[1]:
            raise self._disorder()
        self._check_sequences(sequences[0], sequences[1] + 1)
        documents = self._boundaries[self.document_at(first) : self.document_at(stop - 1) + 1]
        if not len(documents) or documents.max() > sequences[1] or np.diff(documents).min(initial=0) < 0:
            raise self._disorder()
        starts = np.unique(self._pointers[documents[documents >= sequences[0]]] // self.dtype.itemsize)
        return starts[starts >= first]

    def documents(self, first: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Where documents `first` to `stop - 1` begin in the stream, and their
        tokens: int64 ``[documents]`` both.

        Raises:
            DataError: the documents do not follow one another.
        """
        sequences, size = len(self._pointers), self.dtype.itemsize
        bounds = self._boundaries[first : stop + 1]
        if 0 <= bounds.min() and bounds.max() <= sequences:
            ends = np.where(
                bounds < sequences, self._pointers[np.minimum(bounds, sequences - 1)] // size, self.num_tokens
            )
            lengths = np.diff(ends)
            if 0 <= ends[0] and ends[-1] <= self.num_tokens and lengths.min() >= 0:
                return ends[:-1], lengths
        raise self._disorder()

    def _disorder(self) -> DataError:
        return DataError(
            f"{self.prefix}.idx",
            "its documents do not follow one another",
            f"an intact index; {PREPARE_AGAIN}",
        )

    def document_and_offset(self, position: int) -> tuple[int, int]:
        """The document of the token at `position` of the stream and the token's offset in it, both from 0."""
        document = self.document_at(position)
        return document, position - int(self._pointers[self._boundaries[document]]) // self.dtype.itemsize


def _mapped(path: str, dtype: npt.DTypeLike, offset: int = 0, count: int | None = None) -> np.ndarray:
    """A file's numbers, read-only and read when they are looked at.

    Raises `DataError` if the process has no room for them.
    """
    try:
        return np.memmap(
            path, dtype=dtype, mode="r", offset=offset, shape=None if count is None else (count,)
        )
    except OSError as error:
        raise DataError(
            path,
            f"cannot be mapped into memory: {error.strerror}",
            "room for its size in addresses: ulimit -v",
        ) from None


def _size_of(path: str) -> int:
    try:
        with open_plain(path) as file:  # refuses a folder, or a file that may not be read
            return os.fstat(file.fileno()).st_size
    except OSError as error:
        right = "a prefix of .bin and .idx files, as launch/prepare.py writes them"
        wrong = "missing" if isinstance(error, FileNotFoundError) else str(error.strerror)
        raise DataError(path, wrong, right) from None
