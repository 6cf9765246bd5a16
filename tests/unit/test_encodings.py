"""A tokenizer that tiktoken knows by name becomes a tokenizer.json that gives the same tokens."""

import json
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megacore.data.indexed import IndexedTokens
from megacore.errors import UserError
from megacore.tools.corpora import Sidecar
from megacore.tools.prepare.prepare import prepare
from megacore.tools.text import encodings
from megacore.tools.text.encodings import PROBE, converted

WORDS = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| "
    r"?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s"
)
END = "<|endoftext|>"
SAMPLE = "the other lather, 1234512345 there\n\n  here they'll be: 日本é " * 3


def encoding(pattern: str = WORDS) -> Any:
    """A small one, with ids that are not in the order of lengths, learned by plain counting of neighbours."""
    tiktoken = pytest.importorskip(
        "tiktoken", reason="tiktoken is not installed: pip install -e '.[datasets]'"
    )
    pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    ids = {bytes([byte]): byte for byte in range(256)}
    parts = [bytes([byte]) for byte in SAMPLE.encode()]
    while len(parts) > 3:
        pairs = list(pairwise(parts))
        union = b"".join(max(pairs, key=pairs.count))
        ids.setdefault(union, len(ids))
        at, merged = 0, []
        while at < len(parts):
            size = 2 if b"".join(parts[at : at + 2]) == union else 1
            merged.append(b"".join(parts[at : at + size]))
            at += size
        parts = merged
    return tiktoken.Encoding("gpt2", pat_str=pattern, mergeable_ranks=ids, special_tokens={END: len(ids)})


def test_it_gives_the_same_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prepared by name, beside the corpus stands the tokenizer, and the token that ends
    a document is known.
    """
    theirs = encoding()
    monkeypatch.setattr("tiktoken.get_encoding", lambda name: theirs)
    rng = np.random.default_rng(0)
    texts = [PROBE, SAMPLE, *("".join(rng.choice([*SAMPLE, "aé", "\n", " "], size=80)) for _ in range(200))]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    prefix = str(tmp_path / "out/x")
    prepared = prepare([str(tmp_path / "a.jsonl")], prefix, "gpt2")
    tokens, end = IndexedTokens(prefix), theirs.encode(END, allowed_special="all")[0]
    expected = [token for text in texts for token in [*theirs.encode_ordinary(text), end]]
    assert tokens.read(0, tokens.num_tokens).tolist() == expected and len(set(expected)) > 60
    assert prepared.tokenizer == f"{prefix}.tokenizer.json" and Path(prepared.tokenizer).is_file()
    prepare([str(tmp_path / "a.jsonl")], f"{prefix}2", prepared.tokenizer)  # the file, given
    assert Path(f"{prefix}2.bin").read_bytes() == Path(f"{prefix}.bin").read_bytes()
    known = Sidecar.load(prefix)
    assert known is not None and (known.tokenizer, known.vocab_size) == (prepared.tokenizer, end + 1)


@pytest.mark.parametrize("fault", ["merges", "pattern"])
def test_a_conversion_that_gives_other_tokens_is_refused(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: pairs in another order, and a repeated group of digits, as other engines read "{1,3}+"."""
    theirs = encoding()
    monkeypatch.setattr(encodings, "PROBE", SAMPLE)
    converted(theirs)
    if fault == "merges":
        monkeypatch.setattr(
            encodings, "sorted", lambda values, key=None: sorted(values, key=key)[::-1], raising=False
        )
    else:
        theirs._pat_str = WORDS.replace("{1,3}+", "+")
    with pytest.raises(UserError, match="becomes a tokenizer.json that gives other tokens"):
        converted(theirs)


def test_without_a_network_or_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line, and nothing written. A file of that name is a file."""
    encoding()

    def unreachable(name: str) -> None:
        raise ConnectionError("Max retries exceeded\nwith url")

    monkeypatch.setattr("tiktoken.get_encoding", unreachable)
    (tmp_path / "a.txt").write_text("text")
    arguments: Any = ([str(tmp_path / "a.txt")], str(tmp_path / "out/x"), "gpt2")
    with pytest.raises(
        UserError,
        match=r"^data error: gpt2: cannot be fetched by tiktoken: Max retries exceeded with url \(a "
        r"network, or",
    ):
        prepare(*arguments)
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    with pytest.raises(
        UserError,
        match=r"gpt2: needs the package tiktoken, which is not installed \(pip install "
        r"'megacore\[datasets\]'",
    ):
        prepare(*arguments)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gpt2").write_text("no model")
    with pytest.raises(UserError, match="gpt2: is no sentencepiece model"):
        prepare(*arguments)
    assert not (tmp_path / "out").exists()
