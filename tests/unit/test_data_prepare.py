"""Preparation: every byte of text arrives once and in order, and a failure leaves no trace."""

import json
import os
import signal
import subprocess
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from launch.prepare import parse, run, training_command
from megacore.data.indexed import IndexedTokens
from megacore.errors import ConfigError, DataError, UserError
from megacore.tools.corpora import Sidecar
from megacore.tools.inputs import Inputs
from megacore.tools.prepare import partial, sources
from megacore.tools.prepare import prepare as prepare_module
from megacore.tools.prepare.prepare import Prepared, prepare
from megacore.tools.prepare.split import cross_entropy
from megacore.tools.text.tokenizer import load_tokenizer
from tests.build import run_of
from tests.commands import run_script
from tests.training import write_config

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A few KiB of short lines, characters of one to four bytes, and no newline at the end."""
    rng = np.random.default_rng(0)
    lines = ["".join(rng.choice(list("abc dé日😀"), size=rng.integers(31))) for _ in range(300)]
    path = tmp_path / "in" / "text.txt"
    path.parent.mkdir()
    path.write_text("\n".join([*lines, "the end"]), encoding="utf-8", newline="")
    return path


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    return str(tmp_path / "out" / "corpus")


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if texts were large: many blocks and many tasks."""
    monkeypatch.setattr(sources, "BLOCK_BYTES", 256)
    monkeypatch.setattr(sources, "CUT_WINDOW", 128)
    monkeypatch.setattr(prepare_module, "TASK_BYTES", 1000)


def tokens_of(prefix: str) -> np.ndarray:
    tokens = IndexedTokens(prefix)
    return tokens.read(0, tokens.num_tokens)


def documents_of(prefix: str) -> list[bytes]:
    tokens = IndexedTokens(prefix)
    owner = np.array([tokens.document_at(i) for i in range(tokens.num_tokens)])
    return [bytes(tokens_of(prefix)[owner == d]) for d in range(tokens.num_documents)]


@pytest.mark.usefixtures("small_blocks")
def test_text_arrives_whole(text: Path, prefix: str) -> None:
    """Cut into blocks and put together again, a file is the same bytes, and one document."""
    done: list[int] = []
    prepare([str(text)], prefix, "bytes", on_start=lambda total: done.append(-total), on_bytes=done.append)
    assert tokens_of(prefix).tobytes() == text.read_bytes()
    assert IndexedTokens(prefix).num_documents == 1
    assert len(done) > 5 and sum(done) == 0


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(
    "content",
    ["x" * 5000, "日" * 2000, "\n" * 3000, "a" * 256 + "\n" + "b" * 127 + "\n", "one line\r\n" * 200],
)
def test_cuts(tmp_path: Path, prefix: str, content: str) -> None:
    """Lines longer than a block are cut between characters; nothing is lost where a cut
    meets a block's end.
    """
    (tmp_path / "t.txt").write_bytes(content.encode())
    prepare([str(tmp_path / "t.txt")], prefix, "bytes")
    assert documents_of(prefix) == [content.encode()]


@pytest.mark.parametrize("fraction", [0.1, 0.5, 0.999])
def test_single_file_is_split_at_its_end(text: Path, prefix: str, fraction: float) -> None:
    """The last part of the text is the validation set, cut between two characters: the
    two make up the text.
    """
    prepare([str(text)], prefix, "bytes", valid_fraction=fraction)
    whole, train, valid = (
        text.read_bytes(),
        tokens_of(prefix).tobytes(),
        tokens_of(f"{prefix}_valid").tobytes(),
    )
    assert train + valid == whole
    assert 0 <= len(train) - int(len(whole) * (1 - fraction)) < 4
    valid.decode(), train.decode()


def test_documents_are_split_whole(tmp_path: Path, prefix: str) -> None:
    """Of several documents about the fraction is chosen, each as a whole; copies stay
    on one side, whatever the order.
    """
    lines = [json.dumps({"text": f"document {i % 1000}"}) for i in range(2000)]
    for name, content in (("a", lines), ("b", lines[::-1])):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(content))
        prepare([str(tmp_path / f"{name}.jsonl")], prefix + name, "bytes", valid_fraction=0.2)
    train, valid = documents_of(f"{prefix}a"), documents_of(f"{prefix}a_valid")
    assert len(train) + len(valid) == 2000 and not set(train) & set(valid)
    assert 320 < len(valid) < 480
    assert set(documents_of(f"{prefix}b_valid")) == set(valid)


@pytest.mark.usefixtures("small_blocks")
def test_a_long_document_is_on_one_side(tmp_path: Path, prefix: str) -> None:
    """Files of many blocks: each block chosen by itself, most of the validation text would stand
    between texts that were trained on.
    """
    rng = np.random.default_rng(0)
    texts = ["\n".join("".join(rng.choice(list("abcdef "), 40)) for _ in range(50)) for _ in range(12)]
    for i, text in enumerate(texts):
        (tmp_path / f"{i:02}.txt").write_text(text)
    prepare([str(tmp_path / "*.txt")], prefix, "bytes", valid_fraction=0.5)
    train, valid = documents_of(prefix), documents_of(f"{prefix}_valid")
    assert train and valid and sorted(train + valid) == sorted(text.encode() for text in texts)


@pytest.mark.usefixtures("small_blocks")
def test_jsonl(tmp_path: Path, prefix: str) -> None:
    """Each line is a document, however lines and blocks meet; blank lines and empty texts are none."""
    texts = ["é" * n + f" {n}" for n in (1, 500, 3, 0, 1000, 120, 7)] + ["two\nlines"]
    lines = [json.dumps({"body": t, "id": i}, ensure_ascii=i % 2 == 0) for i, t in enumerate(texts)]
    (tmp_path / "d.jsonl").write_text(
        "\n\n".join([*lines, json.dumps({"body": ""})]) + "\n", encoding="utf-8"
    )
    prepare([str(tmp_path / "d.jsonl")], prefix, "bytes", text_key="body")
    assert documents_of(prefix) == [t.encode() for t in texts]


def test_folders_and_globs(tmp_path: Path, prefix: str) -> None:
    """Text files below a folder in the order of their paths, each once; hidden and binary ones are
    left out, empty ones no documents.
    """
    for name, content in {
        "b.txt": b"B",
        "a/z.md": b"Z",
        "a/a.txt": b"A",
        ".git/x": b"X",
        "i.png": b"\x89\0",
        "empty": b"",
    }.items():
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_bytes(content)
    folder = str(tmp_path / "in")
    left_out = prepare([folder, f"{folder}/b.txt"], prefix, "bytes").left_out
    assert [(entry.path, entry.what, entry.size) for entry in left_out] == [
        (f"{folder}/.git", "hidden", 1),
        (f"{folder}/i.png", "binary", 2),
    ]
    assert documents_of(prefix) == [b"A", b"Z", b"B"]
    prepare([f"{folder}/**/*.txt"], prefix, "bytes")
    assert documents_of(prefix) == [b"A", b"B"]


def test_standard_library() -> None:
    """The corpus that every machine has: only Python's own files, in a fixed order."""
    paths, _ = sources.find_files(["python-stdlib"])
    assert len(paths) > 300 and paths == sorted(paths) and all(p.endswith(".py") for p in paths)
    assert any(p.endswith("/argparse.py") for p in paths)
    assert not any("site-packages" in p or "/test/" in p for p in paths)


@pytest.mark.usefixtures("small_blocks")
def test_trained_tokenizer(text: Path, prefix: str) -> None:
    """The tokens decode to the text with the model written beside them, and are
    those of the text encoded at once.
    """
    prepared = prepare([str(text)], prefix, "sentencepiece:280", valid_fraction=0.1)
    tokenizer = load_tokenizer(f"{prefix}.model")
    assert prepared.tokenizer == f"{prefix}.model" and tokenizer.vocab_size == 280
    ids = tokens_of(prefix)
    assert ids[-1] == tokenizer.end_of_document and np.count_nonzero(ids == tokenizer.end_of_document) == 1
    whole = tokenizer.decode(ids) + tokenizer.decode(tokens_of(f"{prefix}_valid"))
    assert whole == text.read_text(encoding="utf-8")
    assert np.array_equal(ids[:-1], tokenizer.encode(tokenizer.decode(ids)))

    prepare([str(text)], f"{prefix}2", f"{prefix}.model", valid_fraction=0.1)  # the same model, given
    assert np.array_equal(tokens_of(f"{prefix}2"), ids)


def word_tokenizer(path: Path, size: int) -> str:
    """A tokenizer.json in which the word `w7` is token 7, and token 0, `w0`, ends
    a document; returns its path.
    """
    words = {f"w{i}": i for i in range(size)}
    model = {"type": "WordLevel", "vocab": words, "unk_token": "w1"}
    path.write_text(
        json.dumps(
            {"version": "1.0", "pre_tokenizer": {"type": "Whitespace"}, "model": model, "added_tokens": []}
        )
    )
    path.with_name("tokenizer_config.json").write_text('{"eos_token": "w0"}')
    return str(path)


@pytest.mark.parametrize(
    ("size", "dtype"), [(256, "uint8"), (257, "uint16"), (65536, "uint16"), (65537, "int32")]
)
def test_the_largest_id_fits_and_token_0_may_end_documents(
    tmp_path: Path, prefix: str, size: int, dtype: str
) -> None:
    """One id too many for the dtype becomes token 0 without a word; and an end of documents that
    is token 0 is one all the same.
    """
    pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    (tmp_path / "t.jsonl").write_text(f'{{"text": "w3 w{size - 1}"}}\n{{"text": "w5"}}\n')
    prepare([str(tmp_path / "t.jsonl")], prefix, word_tokenizer(tmp_path / "tokenizer.json", size))
    tokens = IndexedTokens(prefix)
    assert tokens.dtype == dtype and tokens.num_documents == 2
    assert tokens_of(prefix).tolist() == [3, size - 1, 0, 5, 0]


def test_training_text_excludes_validation(tmp_path: Path, prefix: str) -> None:
    """The tokenizer must not have seen the validation text."""
    (tmp_path / "t.txt").write_text("train words here\n" * 90 + "unseen\n" * 23)
    prepare([str(tmp_path / "t.txt")], prefix, "sentencepiece:280", valid_fraction=0.1)
    tokenizer = load_tokenizer(f"{prefix}.model")
    assert tokenizer.encode("train words").size < 6 and tokenizer.encode("unseen").size >= 6


def test_sidecars(text: Path, prefix: str) -> None:
    """Counts and entropies against a plain count; validation is measured with the
    frequencies of training, plus one.
    """
    prepare([str(text)], prefix, "bytes", valid_fraction=0.25)
    train, valid = text.read_bytes()[: len(tokens_of(prefix))], text.read_bytes()[len(tokens_of(prefix)) :]
    expected = {
        prefix: (train, -sum(np.log(train.count(b) / len(train)) for b in train) / len(train)),
        f"{prefix}_valid": (
            valid,
            -sum(np.log((train.count(b) + 1) / (len(train) + 256)) for b in valid) / len(valid),
        ),
    }
    for name, (data, entropy) in expected.items():
        sidecar = Sidecar.load(name)
        assert sidecar is not None and sidecar.unigram_entropy == pytest.approx(entropy, rel=1e-12)
        assert (sidecar.tokens, sidecar.documents, sidecar.max_token, sidecar.text_bytes) == (
            len(data),
            1,
            max(data),
            len(data),
        )
        assert (sidecar.tokenizer, sidecar.vocab_size) == ("bytes", 256)


def test_cross_entropy() -> None:
    """Uniform tokens cost ln(4); tokens that the model expects half as often cost ln 2 more."""
    assert cross_entropy(np.full(4, 7), np.full(4, 3)) == pytest.approx(np.log(4))
    assert cross_entropy(np.array([0, 5]), np.array([3, 1])) == pytest.approx(np.log(4))


def test_the_entropy_of_a_blend_counts_tokens(tmp_path: Path) -> None:
    """What a run prints beside its validation loss: the mean over all corpora's tokens, as
    that loss is, not over corpora.
    """
    sizes = {"long": 5000, "short": 200}
    for name, size in sizes.items():
        (tmp_path / f"{name}.txt").write_text(
            "".join(np.random.default_rng(size).choice(list("abcdefgh")[: size // 100], size))
        )
        prepare([str(tmp_path / f"{name}.txt")], str(tmp_path / name), "bytes")
    blend = [[1.0, str(tmp_path / name)] for name in sizes]
    config = write_config(
        tmp_path,
        str(tmp_path / "long"),
        model={"vocab_size": 256},
        data={"train": str(tmp_path / "long"), "valid": blend},
    )
    known = [Sidecar.load(str(tmp_path / name)) for name in sizes]
    entropies = [sidecar.unigram_entropy for sidecar in known if sidecar is not None]
    assert entropies[0] > 1.5 * entropies[1] > 1.0
    found = Inputs(run_of(config, f"log.dir={tmp_path}/run"), rank=0).unigram_entropy()
    assert found == pytest.approx((5000 * entropies[0] + 200 * entropies[1]) / 5200, rel=1e-12)


BAD_TEXT: list[tuple[str, bytes, str]] = [
    ("t.txt", b"fine\nbad \xff here", "t.txt: is not UTF-8 at byte 9"),
    ("t.txt", "é".encode()[:1], "t.txt: is not UTF-8 at byte 0"),
    ("t.txt", b"", "t.txt: the text is empty"),
    ("t.jsonl", b'{"text": "a"}\n{"text": \n', "t.jsonl: line 2 is not JSON"),
    ("t.jsonl", b'{"text": "a"}\n\n{"body": "b"}\n', "t.jsonl: line 3 has no text under the key text"),
    ("t.jsonl", b'{"text": 7}\n', "t.jsonl: line 1 has no text under the key text"),
    ("t.jsonl", b'["text"]\n', "t.jsonl: line 1 has no text under the key text"),
    ("t.jsonl", b'{"text": "\\ud800"}\n', "t.jsonl: line 1 holds half a surrogate pair"),
    ("t.jsonl", b'{"text": "a"}\n{"text": "\xe9"}\n', "t.jsonl: is not UTF-8 at byte 24"),
    ("t.jsonl", b'{"text": ""}\n', "no document has any text"),
]


@pytest.mark.parametrize(("name", "content", "message"), BAD_TEXT)
@pytest.mark.parametrize("tokenizer", ["bytes", "sentencepiece:300"])
def test_bad_text(
    tmp_path: Path, prefix: str, name: str, content: bytes, message: str, tokenizer: str
) -> None:
    """One line that says where, and nothing written, also when the tokenizer's training meets it first."""
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError) as error:
        prepare([str(tmp_path / name)], prefix, tokenizer)
    if tokenizer == "bytes" or "learned from" not in str(error.value):
        assert message in str(error.value) and isinstance(error.value, DataError)
    assert "\n" not in str(error.value)
    assert not os.path.isdir(os.path.dirname(prefix)) or not os.listdir(os.path.dirname(prefix))


@pytest.mark.parametrize(
    ("inputs", "tokenizer", "message"),
    [
        (["nowhere.txt"], "bytes", "data error: nowhere.txt: missing"),
        (["*.nothing"], "bytes", "data error: *.nothing: names no text file"),
        (["TEXT"], "nothing.model", "data error: nothing.model: cannot be read"),
        (["TEXT"], "TEXT", "is no sentencepiece model"),
        (["TEXT"], "sentencepiece:x", "config error: --tokenizer: x is no usable vocabulary size"),
        (["TEXT"], "sentencepiece:60000", "config error: --tokenizer: sentencepiece:60000 cannot be trained"),
    ],
)
def test_bad_arguments(text: Path, prefix: str, inputs: list[str], tokenizer: str, message: str) -> None:
    """Each kind of mistake is one line in the user's terms, and leaves nothing behind."""
    with pytest.raises(UserError) as error:
        prepare(
            [name.replace("TEXT", str(text)) for name in inputs], prefix, tokenizer.replace("TEXT", str(text))
        )
    assert message in str(error.value) and "\n" not in str(error.value)
    assert not os.path.isdir(os.path.dirname(prefix)) or not os.listdir(os.path.dirname(prefix))


@pytest.mark.parametrize(
    ("inputs", "output", "tokenizer", "message"),
    [
        (["own/x.json"], "own/x", "bytes", "own/x would overwrite own/x.json, which is an input"),
        (["own"], "own/x", "bytes", "own/x.bin, which is an input"),
        (["own/*.json"], "./own/../own/x", "bytes", "own/x.json, which is an input"),
        (["link.json"], "own/x", "bytes", "own/x.json, which is an input"),
        (["own/x.json"], "link", "bytes", "link.json, which is an input"),
        (["own/x.bin"], "own/x", "bytes", "own/x.bin, which is an input"),
        (["own/x.idx"], "own/x", "bytes", "own/x.idx, which is an input"),
        (["own/x.model"], "own/x", "sentencepiece:300", "own/x.model, which is an input"),
        (["own/x_valid.json"], "own/x", "bytes", "own/x_valid.json, which is an input"),
        (["text"], "own/x", "own/x.json", "own/x.json, which is an input"),  # a tokenizer's file
        (["text"], "text", "bytes", "text is an input"),
        (["own"], "own", "bytes", "own is an input"),
        (["text"], "", "bytes", "`` names no file"),
        (["text"], "own/", "bytes", "`own/` names no file"),
        (["text"], "new/.", "bytes", "`new/.` names no file"),
        (["text"], "..", "bytes", "`..` names no file"),
    ],
)
def test_an_output_that_is_an_input(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    inputs: list[str],
    output: str,
    tokenizer: str,
    message: str,
) -> None:
    """Whatever is read is not written over, under whatever name; and an output without a name
    would be `.bin`, a hidden file.
    """
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own").mkdir()
    for name in ("text", "own/x.json", "own/x.bin", "own/x.idx", "own/x.model", "own/x_valid.json"):
        (tmp_path / name).write_text("of the user\n" * 99)
    if tokenizer == "own/x.json":
        tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
        tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a")).save(tokenizer)
    (tmp_path / "link.json").symlink_to("own/x.json")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(ConfigError) as error:
        prepare(inputs, output, tokenizer, valid_fraction=0.1)
    assert str(error.value).startswith("config error: --output: ") and message in str(error.value)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_tokenizer_given_again(text: Path, prefix: str) -> None:
    """The model that an earlier preparation has trained beside its output is read and
    not written: no reason to refuse.
    """
    prepare([str(text)], prefix, "sentencepiece:280")
    trained = Path(f"{prefix}.model").read_bytes()
    prepare([str(text)], prefix, f"{prefix}.model")
    assert Path(f"{prefix}.model").read_bytes() == trained


def test_failure_keeps_what_was_there(text: Path, prefix: str) -> None:
    """A second preparation that fails half-way leaves the first one's files as they were."""
    prepare([str(text)], prefix, "bytes", valid_fraction=0.1)
    folder = Path(prefix).parent
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    (text.parent / "zzz.txt").write_bytes(b"\xff")
    with pytest.raises(DataError, match="not UTF-8"):
        prepare([str(text.parent)], prefix, "bytes", valid_fraction=0.1)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_empty_split(tmp_path: Path, prefix: str) -> None:
    """Documents that are all alike are on one side: said, not written."""
    for i in range(3):
        (tmp_path / f"{i}.txt").write_text("a document")
    with pytest.raises(ConfigError, match="--valid-fraction: no document falls to the validation split"):
        prepare([str(tmp_path / "*.txt")], prefix, "bytes", valid_fraction=1e-6)
    assert not os.path.exists(os.path.dirname(prefix))


def test_unwritable_output(text: Path) -> None:
    """A prefix below a file, for one."""
    with pytest.raises(DataError, match="cannot be written: (Not a directory|File exists)"):
        prepare([str(text)], f"{text}/corpus", "bytes")


def test_help_names_every_tokenizer(capsys: pytest.CaptureFixture[str]) -> None:
    """What `--tokenizer` takes is what `tools.text.tokenizer` takes, and one to be trained."""
    with pytest.raises(SystemExit):
        parse(["-h"])
    said = capsys.readouterr().out
    assert all(name in said for name in ("bytes", "sentencepiece:VOCAB_SIZE", "FILE.model", "tokenizer.json"))


def command_line(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run_script("launch/prepare.py", *arguments)


def test_command_line(text: Path, prefix: str) -> None:
    """Two workers write what one does, and the last line can be typed."""
    lines = "".join(f"{line}\n" for line in text.read_text(encoding="utf-8").split("\n") * 300)
    text.write_text(lines, encoding="utf-8")
    done = command_line(
        "--input", str(text), "--output", prefix, "--tokenizer", "sentencepiece:280", "--workers", "2"
    )
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert (  # 280 rows, padded to a multiple of 64; not the config's own validation corpus
        f"data.train={prefix} data.valid=null data.tokenizer={prefix}.model model.vocab_size=320"
        in done.stdout.splitlines()[-1]
    )
    prepare([str(text)], f"{prefix}1", "sentencepiece:280")
    assert len(lines.encode()) > 2 * prepare_module.TASK_BYTES
    for suffix in (".bin", ".idx", ".model"):
        assert Path(f"{prefix}{suffix}").read_bytes() == Path(f"{prefix}1{suffix}").read_bytes()


def test_the_next_command_has_a_config_of_the_size_of_the_corpus(prefix: str) -> None:
    """A small model for a text, and GPT-2's size from 20 tokens for each of its parameters."""
    args = parse(["--input", "x", "--output", prefix, "--tokenizer", "gpt2", "--valid-fraction", "0.01"])
    for tokens, model in ((2_499_999_999, "gpt_tiny"), (2_500_000_000, "gpt_124m")):
        train = Sidecar(tokens, 9, 50256, "gpt2", 50257, 7.0, 4 * tokens)
        valid = Sidecar(tokens // 100, 9, 50256, "gpt2", 50257, 7.0, tokens // 25)
        splits = {prefix: train, f"{prefix}_valid": valid}
        prepared = Prepared(splits, f"{prefix}.tokenizer.json", [], 4 * tokens, None)
        _, script, _, config, *settings = training_command(args, prepared)
        assert (script, config) == ("launch/pretrain.py", f"configs/{model}.json")
        loaded = run_of(ROOT / config, *settings)
        assert (loaded.data.train, loaded.data.valid) == (prefix, f"{prefix}_valid")
        assert loaded.model.vocab_size == 50304


@pytest.mark.parametrize(
    ("tokenizer", "advice"), [("sentencepiece:500", "--tokenizer bytes"), ("bytes", None)]
)
def test_a_vocabulary_that_is_too_large_for_the_text_is_reported(
    text: Path, prefix: str, capsys: pytest.CaptureFixture[str], tokenizer: str, advice: str | None
) -> None:
    """With a few tokens for each entry, rare entries are never learned."""
    text.write_text(" ".join(f"word{number}" for number in range(3000)))
    run(["--input", str(text), "--output", prefix, "--tokenizer", tokenizer, "--workers", "1"])
    warning = capsys.readouterr().err
    assert warning == "" if advice is None else "tokens for each entry of the vocabulary" in warning
    assert (advice or "") in warning


def test_a_split_by_documents_says_what_to_expect_of_its_loss(
    tmp_path: Path, prefix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Users took the higher loss on whole new documents for overfitting."""
    (tmp_path / "one.txt").write_text("abc" * 100)
    (tmp_path / "many.jsonl").write_text("".join(f'{{"text": "document {i}"}}\n' for i in range(20)))
    for name, has_advice in (("one.txt", False), ("many.jsonl", True)):
        words = ["--output", prefix, "--tokenizer", "bytes", "--valid-fraction", "0.2", "--workers", "1"]
        run(["--input", str(tmp_path / name), *words])
        assert ("may be higher without overfitting" in capsys.readouterr().out) == has_advice


def test_command_line_errors(text: Path, prefix: str) -> None:
    """Status 2 and one line, also from a worker process and for the arguments themselves."""
    text.write_bytes(text.read_bytes() + b"\xff")
    given = ["--input", str(text), "--output", prefix, "--tokenizer", "bytes"]
    for arguments, message in (
        ([*given, "--workers", "2"], f"data error: {text}: is not UTF-8"),
        ([*given, "--valid-fraction", "1"], "config error: --valid-fraction: 1.0 is"),
        ([*given, "--valid-fraction", "nan"], "config error: --valid-fraction: nan is"),
        ([*given, "--workers", "x"], "config error: --workers: invalid int value"),
        (given[:2], "config error: arguments: the following arguments are required: --tokenizer"),
        ([*given[:2], *given[4:]], "config error: --output: is missing"),
    ):
        done = command_line(*arguments)
        assert done.returncode == 2 and done.stderr.startswith(message) and done.stderr.count("\n") == 1, (
            done.stderr
        )
        assert done.stdout == "" and not list(Path(prefix).parent.glob("*"))


def test_an_interrupted_preparation_does_not_wait_for_its_workers() -> None:
    """Ctrl-C would seem to be ignored: with a slow tokenizer, the tasks in hand take many seconds."""
    results = prepare_module.ordered_map(time.sleep, [0.0, *[10.0] * 7], 2)
    next(results)
    began = time.monotonic()
    results.close()
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_between_two_files_leaves_no_half_corpus(
    tmp_path: Path, prefix: str, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    """The .bin of this preparation next to the .idx of an earlier one would be read as a corpus."""
    (tmp_path / "text").write_text("a" * 1000)
    prepare([str(tmp_path / "text")], prefix, "bytes")
    (tmp_path / "text").write_text("b" * 3000)
    replace = os.replace

    def replace_and_signal(source: str, target: str) -> None:
        replace(source, target)
        if target.endswith(".bin"):
            os.kill(os.getpid(), number)
            time.sleep(0.01)  # for another thread to receive it, if any does not block it

    monkeypatch.setattr(os, "replace", replace_and_signal)
    previous = signal.signal(number, signal.default_int_handler)
    done = threading.Event()
    other_thread = threading.Thread(target=done.wait)
    other_thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            prepare([str(tmp_path / "text")], prefix, "bytes")
    finally:
        done.set()
        signal.signal(number, previous)
    assert set(tokens_of(prefix)[:3000].tolist()) == {ord("b")} and Sidecar.load(prefix) is not None
    assert not Path(partial.folder_of(prefix)).exists()
