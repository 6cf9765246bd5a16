"""nanoGPT's token files become a corpus: the same tokens, with documents where their end stands."""

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
        assert known.text_bytes == sum(len(f"w{token}") for document in documents for token in document)
    assert Path(f"{prefix}.bin").read_bytes() == (folder / "train.bin").read_bytes()


def test_a_file_alone(folder: Path) -> None:
    prefix = run(folder, "val.bin")
    assert IndexedTokens(prefix).num_documents == 2 and not Path(f"{prefix}_valid.bin").exists()


@pytest.mark.parametrize(
    ("content", "size", "complaint"),
    [
        (b"", SIZE, "train.bin: has 0 bytes (two a token"),
        (b"abc", SIZE, "train.bin: has 3 bytes"),
        (np.array([3, SIZE], "<u2").tobytes(), SIZE, "train.bin: holds token id 50000, and "),
        (b"\3\0", (1 << 16) + 1, "train.bin: has two bytes a token, which cannot hold the 65,537 tokens of "),
        (np.array([20240520, 1], "<i4").tobytes(), SIZE, "train.bin: begins with a header of llm.c"),
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


def test_options_that_do_not_fit(folder: Path) -> None:
    for more in (("--chat",), ("--valid-fraction", "0.1"), ("--text-key", "text")):
        with pytest.raises(UserError, match="--nanogpt: the tokens of one input are taken as they are"):
            run(folder, "", *more)
    with pytest.raises(UserError, match="--output: .* would overwrite .*train.bin"):
        script.run(
            ["--nanogpt", "--input", str(folder), "--output", f"{folder}/train", "--tokenizer", "bytes"]
        )
    assert (folder / "train.bin").stat().st_size == 2 * sum(map(len, DOCUMENTS))
