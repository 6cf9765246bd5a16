"""What a preparation is given and cannot read is named for what it is, and with how
much of the input it was.
"""

import gzip
import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from launch import prepare
from megacore.data.indexed import IndexedTokens
from megacore.errors import UserError
from megacore.tools.prepare import prepare as prepare_module
from megacore.tools.text.tokenizer import train_sentencepiece

ARRAY = b"\x93NUMPY" + bytes(94)
TEXT = b"To be, or not to be.\n"


def run(folder: Path, *inputs: str, tokenizer: str = "bytes", more: tuple[str, ...] = ()) -> IndexedTokens:
    words = ["--output", str(folder / "out/x"), "--tokenizer", tokenizer, "--workers", "1", *more]
    prepare.run(["--input", *(str(folder / name) for name in inputs), *words])
    return IndexedTokens(str(folder / "out/x"))


@pytest.mark.parametrize(
    ("name", "content", "what", "right"),
    [
        ("a.txt", "abc".encode("utf-16"), "is text in UTF-16", "iconv -f UTF-16"),
        ("a.zip", b"PK\3\4\0", "is a zip archive", "unzip"),
        ("a.json", b' [{"words": "a"}]', "is a JSON list", "jq -c '.[]'"),
        ("a.json.gz", gzip.compress(b'[{"text": "a"}]', mtime=0), "is a JSON list", "gunzip -c"),
        ("a.json", b'["a"]', "is a JSON list", "jq -c '.[]'"),
        ("a.json", b'{"text": "a"}\n{"text": "b"}\n', "is JSON, an object a line", ".jsonl"),
        ("a.txt", b'{"text": "a"}\n\n{"text": "b"}', "is JSON, an object a line", ".jsonl"),
    ],
)
def test_a_file_that_is_no_text_is_named_for_what_it_is(
    name: str, content: bytes, what: str, right: str, tmp_path: Path
) -> None:
    """Of a packed file it was said that it is no UTF-8, and that iconv helps; a JSON list
    was learned, brackets and all.
    """
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError) as caught:
        run(tmp_path, name)
    said = str(caught.value)
    assert (
        said.startswith(f"data error: {tmp_path / name}: {what}")
        and right in said
        and not (tmp_path / "out").exists()
    )


@pytest.mark.parametrize(
    "content", [b"[link](to)", b"{% a %}\n{{ b }}", b'{"a": 1}', b"[section]\na=1", b'{\n"a": 1\n}']
)
def test_text_with_brackets_is_text(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(content)
    corpus = run(tmp_path, "a.txt")
    assert bytes(corpus.read(0, corpus.num_tokens)) == content


def test_what_a_folder_holds_besides_text_is_named_with_its_share(tmp_path: Path, capsys: Any) -> None:
    """An array beside a text was dropped, and only counted; a link to a folder, and a folder
    that a glob finds, not even that.
    """
    for name, content in {"a.txt": TEXT * 40, "b.npy": ARRAY, ".git/x": b"x" * 60, "sub/c.txt": TEXT}.items():
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_bytes(content)
    (tmp_path / "in/gone").symlink_to("nowhere")
    (tmp_path / "in/far").symlink_to(tmp_path)
    corpus = run(tmp_path, "in")
    assert bytes(corpus.read(0, corpus.num_tokens)) == TEXT * 41
    lines = capsys.readouterr().err.splitlines()
    expected = [
        (".git", "hidden: 60 bytes, 5.9% of the input"),
        ("b.npy", "a NumPy array: 100 bytes, 9.8% of the input"),
        ("far", "a link to a folder: 0 bytes"),
        ("gone", "no plain file: 0 bytes"),
    ]
    for name, what in expected:
        assert any(
            line.startswith(f"warning: left out '{tmp_path}/in/{name}', which is {what}") for line in lines
        ), (name, lines)
    assert len(lines) == len(expected)
    for name in ("b.npy", "far"):
        (tmp_path / "in" / name).unlink()
    assert run(tmp_path, "in/*").num_tokens == len(TEXT) * 41
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables/b.npy").write_bytes(ARRAY)
    with pytest.raises(
        UserError, match=r"tables: holds no text, but \S+/tables/b.npy: a NumPy array \(UTF-8 text"
    ):
        run(tmp_path, "tables")


def test_of_thousands_that_are_left_out_the_largest_are_named(tmp_path: Path, capsys: Any) -> None:
    """A line for each picture of a folder would bury all else that is said."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.txt").write_bytes(TEXT)
    for number in range(1, 61):
        (tmp_path / f"in/{number}.png").write_bytes(b"\0" * number)
    run(tmp_path, "in")
    *named, others = capsys.readouterr().err.splitlines()
    assert len(named) == 50 and "60.png" in named[0] and "11.png" in named[-1]
    assert others.startswith("warning: left out 10 more: 55 bytes, ")


def test_a_missing_text_key_names_the_option_and_the_keys(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"body": "a", "id": 3, "title": "b"}) + "\n")
    with pytest.raises(
        UserError,
        match=r"line 1 has no text under the key text \(--text-key with the key of its text; there are "
        r"body, ti",
    ):
        run(tmp_path, "a.jsonl")


def test_a_folder_of_a_tokenizer(tmp_path: Path) -> None:
    """Its tokenizer.json, or its only .model; the sidecar names the file, which a
    run's data.tokenizer can be.
    """
    pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    (tmp_path / "model").mkdir()
    (tmp_path / "a.txt").write_bytes(TEXT)
    with pytest.raises(
        UserError,
        match=r"data error: \S+/model: holds no tokenizer.json and no .model \(transformers.AutoTokenizer",
    ):
        run(tmp_path, "a.txt", tokenizer=str(tmp_path / "model"))
    train(tmp_path / "model/a.model")
    run(tmp_path, "a.txt", tokenizer=str(tmp_path / "model"))
    assert '"tokenizer": "' + str(tmp_path / "model/a.model") in (tmp_path / "out/x.json").read_text()
    train(tmp_path / "model/b.model")
    with pytest.raises(
        UserError, match=r"model: holds 2 .model files \(one of them: \S+/a.model, \S+/b.model"
    ):
        run(tmp_path, "a.txt", tokenizer=str(tmp_path / "model"))
    content = {
        "version": "1.0",
        "added_tokens": [],
        "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"},
    }
    (tmp_path / "model/tokenizer.json").write_text(json.dumps(content))
    run(tmp_path, "a.txt", tokenizer=str(tmp_path / "model"))
    assert '"tokenizer": "' + str(tmp_path / "model/tokenizer.json") in (tmp_path / "out/x.json").read_text()


def train(path: Path) -> None:
    path.write_bytes(train_sentencepiece(["some words"] * 9, 275))


def documents(prefix: str) -> list[bytes]:
    corpus = IndexedTokens(prefix)
    starts, lengths = corpus.documents(0, corpus.num_documents)
    return sorted(
        bytes(corpus.read(int(start), int(length))) for start, length in zip(starts, lengths, strict=True)
    )


@pytest.mark.parametrize("kind", ["lines", "files"])
@pytest.mark.parametrize("fraction", ["1e-9", "0.1", "0.999999999"])
def test_both_sides_get_a_document(kind: str, fraction: str, tmp_path: Path) -> None:
    """Of 20 documents the draw for a tenth left the validation set empty in one case of
    eight; the processes do not matter.
    """
    for seed in range(6):
        folder = tmp_path / str(seed)
        folder.mkdir()
        texts = [f"document {number}" for number in np.random.default_rng(seed).integers(10**6, size=20)]
        for i, text in enumerate(texts):
            (folder / f"{i}.txt").write_text(text)
        (folder / "all.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        inputs = ["all.jsonl"] if kind == "lines" else [f"{i}.txt" for i in range(20)]
        run(folder, *inputs, more=("--valid-fraction", fraction))
        train, valid = documents(f"{folder}/out/x"), documents(f"{folder}/out/x_valid")
        assert train and valid and sorted(train + valid) == sorted(text.encode() for text in texts)
        few = valid if float(fraction) < 0.5 else train
        assert fraction == "0.1" or len(few) == 1
    run(folder, *inputs[::-1], more=("--valid-fraction", fraction, "--workers", "2"))
    assert (train, valid) == (documents(f"{folder}/out/x"), documents(f"{folder}/out/x_valid"))


def ended(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_process_that_was_ended_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the kernel, for one, when memory ends."""
    monkeypatch.setattr(prepare_module, "encode_task", ended)
    (tmp_path / "a.txt").write_bytes(TEXT)
    with pytest.raises(
        UserError, match=r"out/x: cannot be prepared: one of its processes was ended \(enough memory"
    ):
        run(tmp_path, "a.txt", more=("--workers", "2"))
    assert not (tmp_path / "out").exists()


def test_no_token_that_ends_documents_is_said(tmp_path: Path, capsys: Any) -> None:
    pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    (tmp_path / "a.txt").write_bytes(b"a")
    content = {
        "version": "1.0",
        "added_tokens": [],
        "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"},
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    run(tmp_path, "a.txt", tokenizer=str(tmp_path / "tokenizer.json"))
    assert capsys.readouterr().err.startswith("warning: no token ends a document: neither ")
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": "a"}')
    assert run(tmp_path, "a.txt", tokenizer=str(tmp_path / "tokenizer.json")).num_tokens == 2
    assert "every document ends with token 0 a\n" in capsys.readouterr().out and os.listdir(tmp_path / "out")
