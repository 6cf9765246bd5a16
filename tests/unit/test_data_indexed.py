"""Token files: Megatron's format in both directions, damage, and ids beyond the vocabulary."""

import dataclasses
import json
import os
import struct
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest

from megacore.data.indexed import IndexedTokens
from megacore.errors import DataError
from megacore.tools import corpora
from megacore.tools.corpora import Sidecar, check_vocabulary
from megacore.tools.prepare.indexed_writer import IndexedWriter

# Written by megatron-core 0.16.1: int32, sequences of 3, 5 and 1 tokens, the first two in one document.
MEGATRON_IDX = bytes.fromhex(
    "4d4d494449445800000100000000000000040300000000000000030000000000000003000000050000000100000000000000000000000c00"
    "0000000000002000000000000000000000000000000002000000000000000300000000000000"
)
MEGATRON_TOKENS = np.array([30, 31, 32, 50, 51, 52, 53, 54, 10], dtype="<i4")


@pytest.fixture
def megatron(tmp_path: Path) -> str:
    (tmp_path / "m.bin").write_bytes(MEGATRON_TOKENS.tobytes())
    (tmp_path / "m.idx").write_bytes(MEGATRON_IDX)
    return str(tmp_path / "m")


def test_reads_megatron(megatron: str) -> None:
    """An existing corpus works as it is."""
    tokens = IndexedTokens(megatron)
    assert (tokens.num_tokens, tokens.num_documents, tokens.dtype) == (9, 2, np.dtype(np.int32))
    assert tokens.read(2, 5).tolist() == [32, 50, 51, 52, 53]
    assert [tokens.document_at(i) for i in range(9)] == [0] * 8 + [1]


def test_writes_megatron(megatron: str, tmp_path: Path) -> None:
    """Byte for byte what Megatron writes, so it can read ours."""
    with IndexedWriter(str(tmp_path / "ours"), np.dtype(np.int32)) as writer:
        for start, stop, ends in ((0, 3, False), (3, 8, True), (8, 9, True)):
            writer.write(MEGATRON_TOKENS[start:stop])
            if ends:
                writer.end_document()
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"ours{suffix}").read_bytes() == Path(megatron + suffix).read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.bin", "m.idx", "ours.bin", "ours.idx"]


def test_reads_multimodal_index(megatron: str) -> None:
    """Such an index ends with a mode for each sequence; the tokens are the same."""
    Path(f"{megatron}.idx").write_bytes(MEGATRON_IDX + b"\0\0\1")
    assert IndexedTokens(megatron).num_tokens == 9


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int32", "int64"])
def test_dtypes(dtype: str, tmp_path: Path) -> None:
    """The largest id of every type survives; empty sequences and documents leave no trace."""
    prefix, values = str(tmp_path / "t"), np.array([0, 1, np.iinfo(dtype).max], dtype=dtype)
    with IndexedWriter(prefix, np.dtype(dtype)) as writer:
        writer.write(values[:0])
        writer.end_document()
        writer.write(values)
    tokens = IndexedTokens(prefix)
    assert np.array_equal(tokens.read(0, 3), values)
    assert tokens.num_documents == 1 and not tokens.read(0, 3).flags.writeable


def test_failure_leaves_nothing(megatron: str, tmp_path: Path) -> None:
    """A writer that fails removes its files and keeps those that were there."""
    with pytest.raises(RuntimeError, match="disk"), IndexedWriter(megatron, np.dtype(np.int32)) as writer:
        writer.write(np.arange(100))
        raise RuntimeError("disk")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.bin", "m.idx"]
    assert IndexedTokens(megatron).num_tokens == 9


def test_invisible_until_closed(tmp_path: Path) -> None:
    """A reader never finds a part of a corpus."""
    with IndexedWriter(str(tmp_path / "t"), np.dtype(np.int32)) as writer:
        writer.write(np.arange(10))
        writer.finish()
        assert not (tmp_path / "t.bin").exists() and not (tmp_path / "t.idx").exists()
    assert IndexedTokens(str(tmp_path / "t")).num_tokens == 10


def patched(offset: int, value: bytes) -> bytes:
    return MEGATRON_IDX[:offset] + value + MEGATRON_IDX[offset + len(value) :]


@pytest.mark.parametrize(
    ("suffix", "content", "message"),
    [
        (".bin", None, "m.bin: missing"),
        (".idx", None, "m.idx: missing"),
        (".bin", MEGATRON_TOKENS.tobytes()[:-4], "m.bin: has 32 bytes, but its .idx ends at byte 36"),
        (".bin", MEGATRON_TOKENS.tobytes() + b"\0", "m.bin: has 37 bytes, but its .idx ends at byte 36"),
        (".bin", b"", "m.bin: holds no tokens"),
        (".idx", MEGATRON_IDX[:20], "m.idx: truncated: 20 bytes"),
        (
            ".idx",
            MEGATRON_IDX[:-1],
            "m.idx: has 93 bytes, but its header announces 3 sequences and 3 boundaries",
        ),
        (".idx", b"NOTMIDX\0\0" + MEGATRON_IDX[9:], "m.idx: starts with b'NOTMIDX"),
        (".idx", patched(9, struct.pack("<Q", 2)), "m.idx: is of version 2"),
        (".idx", patched(17, b"\x06"), "m.idx: dtype code 6"),
        (".idx", patched(17, b"\x63"), "m.idx: dtype code 99"),
        (".idx", patched(17, b"\x08"), "m.bin: has 36 bytes, but its .idx ends at byte 34"),
    ],
)
def test_damage(megatron: str, suffix: str, content: bytes | None, message: str) -> None:
    """Each kind of damage is one line that names the file, before training starts."""
    path = Path(megatron + suffix)
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError) as error:
        IndexedTokens(megatron)
    assert message in str(error.value) and "\n" not in str(error.value)


def corpus(tmp_path: Path, values: np.ndarray) -> IndexedTokens:
    with IndexedWriter(str(tmp_path / "c"), values.dtype) as writer:
        writer.write(values)
    return IndexedTokens(str(tmp_path / "c"))


def sidecar(max_token: int) -> Sidecar:
    return Sidecar(
        tokens=3,
        documents=1,
        max_token=max_token,
        tokenizer="bytes",
        vocab_size=256,
        unigram_entropy=1.0,
        text_bytes=3,
    )


def test_vocabulary_by_scan(tmp_path: Path) -> None:
    """An id that the embedding does not have is found before the first step; one below
    the limit is no fault.
    """
    tokens = corpus(tmp_path, np.array([5, 299, 7], dtype=np.uint16))
    check_vocabulary(tokens, 300)
    with pytest.raises(DataError, match="holds token id 299, beyond a vocabulary of 299"):
        check_vocabulary(tokens, 299)


def test_vocabulary_of_large_corpora(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the limit, blocks from the first to the last are read: a corpus of
    another tokenizer cannot hide.
    """
    monkeypatch.setattr(corpora, "SCAN_BLOCK", 64)
    monkeypatch.setattr(corpora, "SCAN_BYTES", 64 * 10)
    values = np.zeros(64 * 100 + 3, dtype=np.uint16)
    values[-1] = 300
    with pytest.raises(DataError, match="token id 300"):
        check_vocabulary(corpus(tmp_path, values), 300)
    values[-1], values[::1000] = 0, 301
    with pytest.raises(DataError, match="token id 301"):
        check_vocabulary(corpus(tmp_path, values), 300)


def test_vocabulary_by_dtype(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A type that cannot hold a larger id needs no scan."""
    tokens = corpus(tmp_path, np.array([255], dtype=np.uint8))
    monkeypatch.setattr(tokens, "read", None)
    check_vocabulary(tokens, 256)


def test_vocabulary_by_sidecar(tmp_path: Path) -> None:
    """The sidecar is believed while it is of these tokens, whatever the times of the files are."""
    tokens = corpus(tmp_path, np.array([1, 2, 3], dtype=np.uint16))
    sidecar(400).save(tokens.prefix)
    for json_time in (0, time.time_ns() + 10**10):
        os.utime(f"{tokens.prefix}.json", ns=(json_time, json_time))
        with pytest.raises(DataError, match="token id 400"):
            check_vocabulary(tokens, 300)
    check_vocabulary(corpus(tmp_path, np.array([1, 2, 4], dtype=np.uint16)), 300)


def test_a_copied_folder_has_its_sidecars(tmp_path: Path) -> None:
    """`cp -r` gives the files new times, in any order."""
    folder = tmp_path / "data"
    folder.mkdir()
    tokens = corpus(folder, np.arange(70_000, dtype=np.uint16) % 300)
    known = dataclasses.replace(sidecar(299), tokens=70_000)
    known.save(tokens.prefix)
    subprocess.run(["cp", "-r", str(folder), str(tmp_path / "copy")], check=True)
    (tmp_path / "copy/c.bin").touch()
    assert Sidecar.load(f"{tmp_path}/copy/c") == known


@pytest.mark.parametrize("changed", [slice(0, 1), slice(-1, None), slice(3_000_000, 4_000_000), slice(None)])
def test_a_sidecar_of_other_tokens_does_not_count(tmp_path: Path, changed: slice) -> None:
    """A corpus that was prepared again, with as many tokens, differs at an end, in a part or everywhere."""
    values = np.zeros(7_000_000, dtype=np.uint8)
    sidecar(0).save(corpus(tmp_path, values).prefix)
    values[changed] = 1
    assert Sidecar.load(corpus(tmp_path, values).prefix) is None


def test_sidecar(tmp_path: Path) -> None:
    """It comes back as it was; a damaged one is one line with its path."""
    tokens = corpus(tmp_path, np.array([1], dtype=np.uint16))
    assert Sidecar.load(tokens.prefix) is None
    sidecar(7).save(tokens.prefix)
    assert Sidecar.load(tokens.prefix) == sidecar(7)
    path = Path(f"{tokens.prefix}.json")
    for damaged in ("{", "[]", json.dumps({**json.loads(path.read_text()), "max_token": "many"})):
        path.write_text(damaged)
        with pytest.raises(DataError, match=r"c\.json") as error:
            Sidecar.load(tokens.prefix)
        assert "\n" not in str(error.value)
