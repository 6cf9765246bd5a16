"""An index that lies, anywhere in it, is one line; and no reader meets anything else,
also in a part that no scan has read.
"""

import struct
from pathlib import Path

import numpy as np
import pytest

from megacore.data import indexed
from megacore.data.indexed import HEADER, IndexedTokens
from megacore.data.samples import EvalSamples, SampleStream
from megacore.errors import DataError
from megacore.tools.corpora import check_corpora
from megacore.tools.prepare.indexed_writer import IndexedWriter

LENGTHS = [3, 1, 12, 7, 30, 2, 5, 40, 9, 1, 1, 25]
DOCUMENTS = len(LENGTHS)


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    with IndexedWriter(str(tmp_path / "c"), np.uint16) as writer:
        for length in LENGTHS:
            writer.write(np.arange(length))
            writer.end_document()
    return str(tmp_path / "c")


def lied(prefix: str, offset: int, form: str, value: int) -> None:
    """Writes a number into the index, behind its header."""
    path = Path(prefix + ".idx")
    content = bytearray(path.read_bytes())
    struct.pack_into(form, content, HEADER.size + offset, value)
    path.write_bytes(content)


POINTERS, BOUNDARIES = 4 * DOCUMENTS, 12 * DOCUMENTS
LIES = [
    *(
        (POINTERS + 8 * number, "<q", value)
        for number in (0, 1, 5, DOCUMENTS - 2)
        for value in (-2, 2, 1, 10**12, -(2**63), 2**63 - 1)
    ),
    *(
        (BOUNDARIES + 8 * number, "<q", value)
        for number in (1, 5, DOCUMENTS - 1)
        for value in (-1, 13, 10**12, -(2**63))
    ),
    *((4 * number, "<i", value) for number in (0, 4, DOCUMENTS - 2) for value in (-1, 0, 2**31 - 1)),
]


@pytest.mark.parametrize(("offset", "form", "value"), LIES)
def test_a_lie_is_refused_at_the_start(prefix: str, offset: int, form: str, value: int) -> None:
    """A pointer in the middle was believed: with data.document_mask=true it was an
    IndexError, long after the start.
    """
    lied(prefix, offset, form, value)
    for opened in (lambda: SampleStream(prefix, 8, 0, 64), lambda: EvalSamples(prefix, 8, 64)):
        with pytest.raises(DataError, match=r"c\.idx: its documents do not follow one another"):
            check_corpora(opened().corpora, 64)


@pytest.mark.parametrize("packing", ["none", "best_fit"])
@pytest.mark.parametrize(("offset", "form", "value"), LIES)
def test_no_reader_meets_more_than_one_line(
    prefix: str, offset: int, form: str, value: int, packing: str
) -> None:
    """Of a machine's ranks one scans, and of a large index it scans a part: the
    others' readers look for themselves.
    """
    lied(prefix, offset, form, value)
    refused = 0
    try:
        stream = SampleStream(prefix, 8, 0, 64, packing=packing)
    except DataError:
        return
    for index in range(len(stream.cuts) * stream.counts[0]):
        try:
            rows, bounds = stream.samples(np.array([index])), stream.documents(np.array([index]))[0]
            assert rows.shape == (1, 9) and bounds[0] == 0 and bounds[-1] == 9 and (np.diff(bounds) > 0).all()
        except DataError:
            refused += 1
    corpus = IndexedTokens(prefix)
    for position in range(corpus.num_tokens):
        try:
            corpus.document_and_offset(position)
        except DataError:
            refused += 1
    assert refused or packing == "best_fit", "a lie that no reader has met"


def test_a_large_index_is_scanned_in_part(prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks from its beginning to its end, and no more than the bound."""
    monkeypatch.setattr(indexed, "SCAN_BLOCK", 2)
    monkeypatch.setattr(indexed, "SCAN_BYTES", 3 * 40)
    seen: list[tuple[int, int]] = []
    corpus = IndexedTokens(prefix)
    monkeypatch.setattr(corpus, "_check_sequences", lambda first, stop: seen.append((first, stop)))
    corpus.check_index()
    assert seen == [(0, 2), (4, 6), (10, 12)]
    monkeypatch.undo()
    lied(prefix, POINTERS + 8 * 11, "<q", 2)
    with pytest.raises(DataError):
        IndexedTokens(prefix).check_index()
