"""Writes token files in Megatron's indexed format, as `data.indexed` reads them."""

import contextlib
import errno
import os
from array import array
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Literal

import numpy as np
import numpy.typing as npt

from megacore.config.schema import MASK
from megacore.data.indexed import DTYPES, HEADER, MAGIC

READ_TOKENS = 1 << 22  # at a time


class IndexedWriter:
    """Writes ``PREFIX.bin`` and ``PREFIX.idx`` as a stream, and if `masked` ``PREFIX.mask.bin``.

    They appear, whole, when it is closed.

    Until then the data is in temporary files beside them. A failure removes these. Use it in a `with`
    statement.
    Memory: 4 bytes a sequence and 8 a document.

    With `aside` the temporary files are those that begin so, and a failure leaves them: another writer can go
    on from what `commit` has put there (`resume`).
    """

    def __init__(
        self, prefix: str, dtype: npt.DTypeLike, masked: bool = False, aside: str | None = None
    ) -> None:
        self.prefix, self.dtype = prefix, np.dtype(dtype)
        self.num_tokens, self.masked = 0, masked
        self._code = next(code for code, known in DTYPES.items() if known == self.dtype)
        self._sizes = array("i")
        self._boundaries = array("q", [0])
        beside = f"{prefix}{{}}.{os.getpid()}.tmp" if aside is None else f"{aside}{{}}"
        self._temporary = {
            suffix: beside.format(suffix) for suffix in (".bin", *([MASK] if masked else []), ".idx")
        }
        self._kept = aside is not None
        self._committed = {".sizes": 0, ".boundaries": 1}  # how much of either is in a file of this name
        self._beside = beside
        mode: Literal["ab", "wb"] = "ab" if self._kept else "wb"
        self._bin = open(self._temporary[".bin"], mode)  # noqa: SIM115 (closed by `close` or `abort`)
        self._mask = open(self._temporary[MASK], mode) if masked else None  # noqa: SIM115

    @property
    def num_documents(self) -> int:
        """The number of finished documents."""
        return len(self._boundaries) - 1

    def write(self, tokens: np.ndarray, learned: np.ndarray | None = None) -> None:
        """Appends one sequence [length] to the open document; an empty one is left out.

        `learned` [length], bool, is for a masked one.
        """
        assert (learned is None) == (self._mask is None) and (
            learned is None or learned.shape == tokens.shape
        )
        if tokens.size:
            if self._mask is not None and learned is not None:
                self._mask.write(learned.astype(np.uint8).tobytes())
            self._bin.write(tokens.astype(self.dtype.newbyteorder("<"), copy=False).tobytes())
            self._sizes.append(tokens.size)
            self.num_tokens += tokens.size

    def end_document(self) -> None:
        """Closes the open document, unless nothing was written to it."""
        if len(self._sizes) > self._boundaries[-1]:
            self._boundaries.append(len(self._sizes))

    def commit(self) -> dict[str, int]:
        """Puts all that was written on the disk, and returns what `resume` needs to go on from here.

        Only with `aside`.
        """
        for file in filter(None, (self._bin, self._mask)):
            file.flush()
            os.fsync(file.fileno())
        for name, values in ((".sizes", self._sizes), (".boundaries", self._boundaries)):
            with open(self._beside.format(name), "ab") as more:
                values[self._committed[name] :].tofile(more)
                more.flush()
                os.fsync(more.fileno())
            self._committed[name] = len(values)
        return {"tokens": self.num_tokens, "sequences": len(self._sizes), "boundaries": len(self._boundaries)}

    def resume(self, state: dict[str, int]) -> None:
        """Goes on from a `commit`, or from nothing: what was written later is cut off.

        Raises `OSError` if a file lacks something.
        """
        tokens, sequences, boundaries = (state[key] for key in ("tokens", "sequences", "boundaries"))
        lengths = {
            ".bin": tokens * self.dtype.itemsize,
            ".sizes": 4 * sequences,
            ".boundaries": 8 * (boundaries - 1),
        }
        for name, length in (lengths | ({MASK: tokens} if self.masked else {})).items():
            with open(self._beside.format(name), "ab") as file:
                if file.tell() < length:
                    raise OSError(errno.EIO, "is shorter than it was", file.name)
                file.truncate(length)
        for name, values, count in (
            (".sizes", self._sizes, sequences),
            (".boundaries", self._boundaries, boundaries - 1),
        ):
            with open(self._beside.format(name), "rb") as file:
                values.fromfile(file, count)
        self.num_tokens, self._committed = tokens, {".sizes": sequences, ".boundaries": boundaries}

    def read(self) -> Iterator[tuple[np.ndarray, np.ndarray | None]]:
        """What the last `commit` or `resume` left on the disk, in parts: tokens, and which of
        them are learned, as for `write`.
        """
        for start in range(0, self.num_tokens, READ_TOKENS):
            count = min(READ_TOKENS, self.num_tokens - start)
            tokens = np.fromfile(
                self._temporary[".bin"],
                self.dtype.newbyteorder("<"),
                count,
                offset=start * self.dtype.itemsize,
            )
            yield (
                tokens,
                np.fromfile(self._temporary[MASK], np.bool_, count, offset=start) if self.masked else None,
            )

    def finish(self) -> None:
        """Writes all data to the disk, still under temporary names. `close` then needs no more space."""
        self.end_document()
        _flush(self._bin)
        if self._mask is not None:
            _flush(self._mask)
        with open(self._temporary[".idx"], "wb") as idx:
            sizes = np.array(self._sizes, dtype="<i4")
            ends = np.cumsum(sizes, dtype="<i8") * self.dtype.itemsize
            idx.write(HEADER.pack(MAGIC, 1, self._code, len(sizes), len(self._boundaries)))
            for part in (
                sizes,
                ends - sizes.astype("<i8") * self.dtype.itemsize,
                np.array(self._boundaries, dtype="<i8"),
            ):
                idx.write(part.tobytes())
            _flush(idx)

    def close(self) -> None:
        """Finishes both files if necessary, and gives them their names."""
        if not self._bin.closed:
            self.finish()
        Path(self.prefix + MASK).unlink(missing_ok=True)  # an earlier corpus's
        # .idx last: a reader that finds the new one also finds what it describes.
        for suffix, temporary in self._temporary.items():
            os.replace(temporary, self.prefix + suffix)

    def abort(self) -> None:
        """Removes what was written, unless it is kept `aside`. Earlier files of that name stay."""
        for temporary in () if self._kept else self._temporary.values():
            Path(temporary).unlink(missing_ok=True)
        for file in filter(None, (self._bin, self._mask)):
            # a full disk, which does not take what is still in memory either
            with contextlib.suppress(OSError):
                file.close()

    def __enter__(self) -> "IndexedWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self.close()
        finally:
            self.abort()  # nothing is left to remove after a `close` that worked


def _flush(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
    file.close()
