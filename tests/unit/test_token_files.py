"""Files of tokens become a corpus: the same tokens, with documents where their end is."""

import io
from pathlib import Path

import numpy as np
import pytest

from launch import prepare as script
from megacore.data.indexed import IndexedTokens
from megacore.errors import UserError
from megacore.tools.corpora import Sidecar
from megacore.tools.prepare import token_files
from tests.unit.test_data_prepare import word_tokenizer

SIZE = 50_000  # words; `w0` ends a document
DOCUMENTS = [[3, 4, 0], [49_999, 0], [5] * 700 + [0], [7, 8]]  # the last one is cut, as nanoGPT may leave it


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With both files; blocks are so small that documents go over several."""
    pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    monkeypatch.setattr(token_files, "BLOCK", 100)
    np.concatenate(DOCUMENTS).astype("<u2").tofile(tmp_path / "train.bin")
    np.concatenate(DOCUMENTS[:2]).astype("<u2").tofile(tmp_path / "val.bin")
    return tmp_path


def llm_c(tokens: list[int], version: int = 1, magic: int = 20240520, dtype: str = "<u2") -> bytes:
    """A file as llm.c's scripts write it."""
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(tokens)
    return header.tobytes() + np.array(tokens, dtype).tobytes()


def saved(array: np.ndarray) -> bytes:
    """A file as numpy.save writes it."""
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def run(folder: Path, given: str, *more: str, size: int = SIZE) -> str:
    (folder / "model").mkdir(exist_ok=True)
    tokenizer = word_tokenizer(folder / "model/tokenizer.json", size)
    prefix = str(folder / "out/x")
    script.run(
        ["--nanogpt", "--input", str(folder / given), "--output", prefix, "--tokenizer", tokenizer, *more]
    )
    return prefix


def test_tokens_and_documents(folder: Path) -> None:
    prefix = run(folder, "")
    for name, documents in ((prefix, DOCUMENTS), (f"{prefix}_valid", DOCUMENTS[:2])):
        corpus = IndexedTokens(name)
        starts, lengths = corpus.documents(0, corpus.num_documents)
        assert [
            corpus.read(int(s), int(n)).tolist() for s, n in zip(starts, lengths, strict=True)
        ] == documents
        known = Sidecar.load(name)
        assert known is not None and (known.vocab_size, known.max_token) == (SIZE, 49_999)
        assert known.text_bytes == sum(len(f" w{token}") for document in documents for token in document)
    assert Path(f"{prefix}.bin").read_bytes() == (folder / "train.bin").read_bytes()


def test_a_file_alone(folder: Path) -> None:
    prefix = run(folder, "val.bin")
    assert IndexedTokens(prefix).num_documents == 2 and not Path(f"{prefix}_valid.bin").exists()


@pytest.mark.parametrize(
    ("content", "size", "complaint"),
    [
        (b"", SIZE, "train.bin: has 0 bytes (2 a token of --dtype uint16"),
        (b"abc", SIZE, "train.bin: has 3 bytes"),
        (np.array([3, SIZE], "<u2").tobytes(), SIZE, "train.bin: holds token id 50000, and "),
        (b"\3\0", (1 << 16) + 1, "train.bin: has two bytes a token, which cannot hold the 65,537 tokens of "),
        (np.array([20240520, 1], "<i4").tobytes(), SIZE, "train.bin: has 8 bytes, less than llm.c's header"),
        (llm_c([3, 4, 0], 2), SIZE, "train.bin: has llm.c's header 20240520 of version 2"),
        (llm_c([3, 4, 0])[:-2], SIZE, "train.bin: has 1,028 bytes, and its header says 3 tokens"),
        (llm_c([3, SIZE, 0]), SIZE, "train.bin: holds token id 50000, and "),
        (saved(np.ones(9)), SIZE, "train.bin: is a numpy array of float64 with 1 dimensions"),
        (saved(np.ones((3, 3), int)), SIZE, "train.bin: is a numpy array of int64 with 2 dimensions"),
        (saved(np.arange(9))[:-8], SIZE, "train.bin: is not a whole numpy array"),
        (
            np.arange(40, dtype="<u4").tobytes(),
            SIZE,
            "does not hold tokens of uint16: as uint32 all are ids of",
        ),
        (
            np.arange(40, dtype="<i8").tobytes(),
            SIZE,
            "does not hold tokens of uint16: as int64 all are ids of",
        ),
        (np.arange(300, dtype=">u2").tobytes(), SIZE, "as uint16 in the other byte order all are ids of"),
        (np.arange(70, dtype=">u4").tobytes(), SIZE, "as uint32 in the other byte order all are ids of"),
        (np.arange(70_000, dtype="<u4").tobytes(), 100_000, "as uint32 all are ids of"),
        (b"Call me Ishmael. " * 100, SIZE, "train.bin: is text, and not tokens"),
        (b"PK\3\4" + bytes(100), SIZE, "train.bin: is a zip archive"),
        (llm_c([]), SIZE, "train.bin: has a header and no token"),
        (saved(np.array([], np.uint16)), SIZE, "train.bin: has a header and no token"),
        (b"MMIDIDX\0\0\0", SIZE, "train.bin: is a corpus with an index already"),
        (None, SIZE, "train.bin: cannot be read: No such file"),
    ],
)
def test_what_is_none_of_its_files(folder: Path, content: bytes | None, size: int, complaint: str) -> None:
    """The ids of a larger vocabulary would have wrapped round in two bytes: nothing in the file
    says so, but the tokenizer does.
    """
    (folder / "train.bin").unlink()
    if content is not None:
        (folder / "train.bin").write_bytes(content)
    with pytest.raises(UserError) as caught:
        run(folder, "", size=size)
    assert complaint in str(caught.value) and "\n" not in str(caught.value) and not (folder / "out").exists()


IDS = [3, 4, 0, 49_999, 0, *range(5, 40), 0]


@pytest.mark.parametrize(
    ("content", "dtype"),
    [
        (llm_c(IDS), None),
        (llm_c(IDS, 7, 20240801, "<u4"), None),
        (llm_c(IDS), "uint16"),
        (saved(np.array(IDS, np.uint16)), None),
        (saved(np.array(IDS, ">i8")), None),
        (saved(np.array(IDS, np.uint32)), "uint32"),
        (np.array(IDS, "<u2").tobytes(), None),
        (np.array(IDS, "<u2").tobytes(), "uint16"),
        (np.array(IDS, "<u4").tobytes(), "uint32"),
        (np.array(IDS, "<i4").tobytes(), "int32"),
        (np.array(IDS, "<i8").tobytes(), "int64"),
        (np.array(IDS, "<u8").tobytes(), "uint64"),
    ],
)
def test_every_type_and_header_gives_the_same_tokens(content: bytes, dtype: str | None, folder: Path) -> None:
    """int64 and uint32 were read as uint16: 8,427 ids became 33,708 tokens, without a word."""
    (folder / "a.bin").write_bytes(content)
    prefix = run(folder, "a.bin", *(["--dtype", dtype] if dtype else []))
    corpus = IndexedTokens(prefix)
    assert corpus.read(0, corpus.num_tokens).tolist() == IDS and corpus.num_documents == 3


def test_shards_become_one_corpus(folder: Path) -> None:
    for name in ("train.bin", "val.bin"):
        (folder / name).unlink()
    for name in ("a.bin", "b.bin"):
        (folder / name).write_bytes(llm_c(IDS))
    # each is read once, however often it is given
    prefix = run(
        folder, "a.bin", "--input", str(folder / "a.bin"), str(folder / "*.bin"), str(folder / "a.bin")
    )
    corpus = IndexedTokens(prefix)
    assert corpus.read(0, corpus.num_tokens).tolist() == IDS * 2


def test_a_vocabulary_beyond_two_bytes(folder: Path) -> None:
    (folder / "a.bin").write_bytes(np.array([3, 99_999, 0] * 9, "<u4").tobytes())
    corpus = IndexedTokens(run(folder, "a.bin", "--dtype", "uint32", size=100_000))
    assert corpus.read(0, 3).tolist() == [3, 99_999, 0]


@pytest.mark.parametrize(
    ("content", "dtype", "complaint"),
    [
        (llm_c(IDS), "uint32", "--dtype: uint32 contradicts the header of .*, whose tokens are uint16"),
        (
            np.array(IDS, "<u2").tobytes() * 2,
            "uint32",
            "does not hold tokens of uint32: as uint16 all are ids",
        ),
        (np.array(IDS, "<i8").tobytes(), "uint32", "does not hold tokens of uint32: as int64 all are ids"),
        (np.array(IDS, "<u2").tobytes()[:-2], "int64", "has 80 bytes|does not hold"),
        (np.array([-1, *IDS], "<i4").tobytes(), "int32", "holds token id -1"),
    ],
)
def test_a_type_that_the_bytes_contradict(content: bytes, dtype: str, complaint: str, folder: Path) -> None:
    (folder / "a.bin").write_bytes(content)
    with pytest.raises(UserError, match=complaint):
        run(folder, "a.bin", "--dtype", dtype)
    assert not (folder / "out").exists()


def test_options_that_do_not_fit(folder: Path) -> None:
    for more in (("--chat",), ("--valid-fraction", "0.1"), ("--text-key", "text")):
        with pytest.raises(UserError, match="--nanogpt: tokens are taken as they are"):
            run(folder, "", *more)
    with pytest.raises(UserError, match="--output: .* would overwrite .*train.bin"):
        script.run(
            ["--nanogpt", "--input", str(folder), "--output", f"{folder}/train", "--tokenizer", "bytes"]
        )
    assert (folder / "train.bin").stat().st_size == 2 * sum(map(len, DOCUMENTS))


@pytest.mark.parametrize("dtype", ["uint16", "uint32", "int64"])
@pytest.mark.parametrize("count", [1, 3, 8, 15])
def test_short_files_are_read_in_their_type(dtype: str, count: int, folder: Path) -> None:
    """Eight tokens of uint32 were taken for uint16, and the advice was wrong."""
    (folder / "a.bin").write_bytes(np.arange(3, 3 + count, dtype=dtype).tobytes())
    corpus = IndexedTokens(run(folder, "a.bin", "--dtype", dtype))
    assert corpus.read(0, corpus.num_tokens).tolist() == list(range(3, 3 + count))


def test_zeros_at_the_beginning_are_no_other_type(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding there fits every type; the rest of the file does not."""
    monkeypatch.setattr(token_files, "SAMPLE", 100)
    tokens = [*[0] * 1000, *IDS * 9]
    (folder / "a.bin").write_bytes(np.array(tokens, "<u2").tobytes())
    corpus = IndexedTokens(run(folder, "a.bin"))
    assert corpus.read(0, corpus.num_tokens).tolist() == tokens


def test_tokens_that_are_characters(folder: Path) -> None:
    """meta.pkl numbers them, and no tokenizer that is given here does."""
    (folder / "meta.pkl").write_bytes(b"")
    with pytest.raises(UserError, match=r"has a meta\.pkl, .*--tokenizer bytes"):
        run(folder, "")
