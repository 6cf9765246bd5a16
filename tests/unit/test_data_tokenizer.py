"""Tokenizers: no text is lost on the way through, and unusable models are refused in one line."""

import re
from pathlib import Path

import numpy as np
import pytest
from sentencepiece import SentencePieceTrainer

from megacore.errors import ConfigError, DataError
from megacore.tools.text.tokenizer import Tokenizer, load_tokenizer, train_sentencepiece, trained_vocab_size

SOURCE = Path(__file__).read_text(encoding="utf-8")
TEXTS = [
    SOURCE,
    "",
    " ",
    "\n",
    "\n\n  \n",
    "  lead and trail  ",
    "tab\tcr\r\nff\f",
    "a  b   c",
    "\0",
    "\ufeffbom",
    "naïve café e\u0301",
    "日本語 текст 😀 \U0010ffff",
    "<s> </s> <unk> <0x0A>",
    "ﬁ Ⅳ ½",
    "\u00a0\u3000\u200b",
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("tokenizer") / "t.model"
    path.write_bytes(train_sentencepiece(SOURCE.split("\n"), 400))
    return load_tokenizer(str(path))


@pytest.mark.parametrize("text", TEXTS)
def test_lossless(trained: Tokenizer, text: str) -> None:
    """Indentation, runs of spaces, characters never seen in training: all come back as they were."""
    for tokenizer in (trained, load_tokenizer("bytes")):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert ids.size == 0 or (ids.min() >= 0 and ids.max() < tokenizer.vocab_size)


@pytest.mark.parametrize("text", TEXTS)
def test_bytes_of_tokens_are_the_texts(trained: Tokenizer, text: str) -> None:
    """Text written token by token, and bits per byte, would miss or double a byte."""
    for tokenizer in (trained, load_tokenizer("bytes")):
        assert (
            b"".join(tokenizer.token_bytes(int(token)) for token in tokenizer.encode(text)) == text.encode()
        )
    assert trained.end_of_document is not None and trained.token_bytes(trained.end_of_document) == b""


def test_bytes_are_bytes() -> None:
    """The id of a byte is its value; half a character decodes to a replacement instead of failing."""
    tokenizer = load_tokenizer("bytes")
    assert tokenizer.encode("aé").tolist() == [97, 0xC3, 0xA9]
    assert (tokenizer.vocab_size, tokenizer.end_of_document) == (256, None)
    assert tokenizer.decode([97, 0xC3]) == "a\ufffd"


def test_trained(trained: Tokenizer) -> None:
    """It has the size asked for, saves tokens, and marks the end of documents with a
    token that has no text.
    """
    assert trained.vocab_size == 400
    assert trained.encode(SOURCE).size < len(SOURCE.encode()) / 1.4
    assert trained.end_of_document is not None and trained.decode([trained.end_of_document]) == ""
    assert trained.end_of_document not in trained.encode("</s>")


@pytest.mark.parametrize(("eos", "right"), [(0, 0), (2, 2), (-1, None)])
def test_the_end_of_documents_is_the_models_own(tmp_path: Path, eos: int, right: int | None) -> None:
    """Models of others have it elsewhere, as token 0 too, or not at all: taken for none,
    documents would run into each other.
    """
    ids = {"eos_id": eos, "unk_id": 1, "bos_id": -1}
    prefix = str(tmp_path / "t")
    SentencePieceTrainer.train(
        sentence_iterator=iter(SOURCE.split("\n")), model_prefix=prefix, vocab_size=300, minloglevel=3, **ids
    )
    assert load_tokenizer(f"{prefix}.model").end_of_document == right


def test_parts_encode_like_the_whole(trained: Tokenizer) -> None:
    """Documents are encoded in parts, cut behind newlines: the tokens must not depend on where."""
    parts = [trained.encode(line) for line in SOURCE.splitlines(keepends=True)]
    assert np.array_equal(np.concatenate(parts), trained.encode(SOURCE))


def test_training_is_repeatable() -> None:
    """The same text gives the same model, or two machines could not share a corpus."""
    assert train_sentencepiece(SOURCE.split("\n"), 400) == train_sentencepiece(SOURCE.split("\n"), 400)


@pytest.mark.parametrize(
    "name",
    ["sentencepiece:", "sentencepiece:many", "sentencepiece:-5", "sentencepiece:260", "sentencepiece:²"],
)
def test_bad_sizes(name: str) -> None:
    """Refused before any text is read."""
    with pytest.raises(ConfigError, match="--tokenizer: .* is no usable vocabulary size"):
        trained_vocab_size(name)


@pytest.mark.parametrize(
    ("lines", "size", "message"),
    [
        (["hello"], 4096, "too few different pieces .sentencepiece:2.. at most"),
        (
            ["".join(map(chr, range(0x4E00, 0x4F00)))],
            262,
            "more different characters .sentencepiece:... at least",
        ),
        ([""], 300, "no line of the text can be learned from"),
    ],
)
def test_bad_texts(lines: list[str], size: int, message: str) -> None:
    """What sentencepiece refuses is said in the user's terms, with the size that would do."""
    with pytest.raises(ConfigError, match=message):
        train_sentencepiece(lines, size)


@pytest.mark.parametrize("size", [262, 60_000])
@pytest.mark.parametrize(
    "lines",
    [
        ["hello"],
        ["the cat sat on the mat"] * 3,
        SOURCE.split("\n"),
        ["".join(map(chr, range(0x4E00, 0x4F00)))],
    ],
    ids=["word", "sentence", "source", "characters"],
)
def test_the_suggested_size_can_be_trained(lines: list[str], size: int) -> None:
    """A size that fails when it is typed would send the user from one error to the next."""
    with pytest.raises(ConfigError) as raised:
        train_sentencepiece(lines, size)
    suggested = re.search(r"\(sentencepiece:(\d+) at (most|least)", str(raised.value))
    assert suggested is not None
    assert train_sentencepiece(lines, int(suggested[1]))


@pytest.mark.parametrize("content", [None, b"", b"no model" * 20])
def test_bad_models(tmp_path: Path, content: bytes | None) -> None:
    """Missing, empty or other files."""
    path = tmp_path / "t.model"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(
        DataError, match=r"t\.model: (cannot be read: No such file|is no sentencepiece model)"
    ):
        load_tokenizer(str(path))


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tokenizer.json of GPT-2's kind, trained here."""
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    fast = tokenizers.Tokenizer(tokenizers.models.BPE())
    fast.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet
    )
    fast.train_from_iterator(["the cat sat on the mat", "das hör ich gern, 日本"], trainer)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    fast.save(str(path))
    (path.parent / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    return str(path)


def test_json_tokenizer_gives_the_text_back_byte_by_byte(byte_level: str) -> None:
    """A byte-level piece writes bytes as other characters: taken for text, every space
    would come out as Ġ.
    """
    tokenizer = load_tokenizer(byte_level)
    text = "the cat\n\tsat  on 日本 🐈 über \x00\xa0\xad"
    ids = tokenizer.encode(text).tolist()
    assert len(ids) < len(text.encode()) and max(ids) < tokenizer.vocab_size <= 300
    assert tokenizer.decode(ids) == text
    assert b"".join(tokenizer.token_bytes(i) for i in ids) == text.encode()
    assert tokenizer.end_of_document == 0 and tokenizer.token_bytes(0) == b""


def test_a_piece_of_text_gets_no_special_tokens(byte_level: str, tmp_path: Path) -> None:
    """A tokenizer.json of Llama's kind puts a token in front of whatever it encodes: a text comes
    in pieces, each would get one.
    """
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    fast = tokenizers.Tokenizer.from_file(byte_level)
    fast.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|endoftext|> $A <|endoftext|>", special_tokens=[("<|endoftext|>", 0)]
    )
    fast.save(str(tmp_path / "tokenizer.json"))
    assert fast.encode("the cat").ids[0] == 0
    assert np.array_equal(
        load_tokenizer(str(tmp_path / "tokenizer.json")).encode("the cat"),
        load_tokenizer(byte_level).encode("the cat"),
    )


def test_json_tokenizer_refusals(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    with pytest.raises(DataError, match="cannot be read: No such file"):
        load_tokenizer(str(tmp_path / "none.json"))
    (tmp_path / "other.json").write_text('{"model": 3}')
    with pytest.raises(DataError, match="is no tokenizer"):
        load_tokenizer(str(tmp_path / "other.json"))
