"""A vocabulary that does not fit its corpora is refused or named before the first step."""

from pathlib import Path

import numpy as np
import pytest

from megacore.tools.corpora import Sidecar
from megacore.tools.prepare.indexed_writer import IndexedWriter
from megacore.tools.prepare.prepare import prepare
from megacore.tools.text.vocabulary import vocabulary_warnings
from tests.build import run_of
from tests.commands import run_script


def said(
    folder: Path, corpora: dict[str, tuple[str, int]], vocab_size: int, tokenizer: str | None
) -> list[str]:
    """What is said of corpora with such tokenizers and numbers of tokens."""
    for name, (made_with, tokens) in corpora.items():
        with IndexedWriter(str(folder / name), np.uint8) as writer:
            writer.write(np.zeros(9, dtype=np.uint8))
            writer.end_document()
        Sidecar(9, 1, 3, made_with, tokens, 1.0, 9).save(str(folder / name))
    train = [[1.0, str(folder / name)] for name in [*corpora, "without a sidecar"]]
    raw = {"model": {"vocab_size": vocab_size}, "data": {"train": train, "tokenizer": tokenizer}}
    return [line.replace(f"{folder}/", "") for line in vocabulary_warnings(run_of(raw))]


GPT2 = {"owt": ("gpt2", 50257)}


@pytest.mark.parametrize(
    ("corpora", "vocab_size", "tokenizer", "named"),
    [
        ({}, 50304, "bytes", []),
        (GPT2, 50304, None, []),  # padded, as is usual
        (
            GPT2,
            55900,
            None,
            [
                "5,643 of the 55,900 rows of model.vocab_size are never used: owt was prepared with gpt2, "
                "of 50,257"
            ],
        ),
        ({"a": ("bytes", 256)}, 256 + 128, "bytes", []),  # few rows, though many of those there are
        (
            {"a": ("bytes", 256)},
            4096,
            "bytes",
            ["3,840 of the 4,096 rows", "model.vocab_size=256, or another corpus"],
        ),
        (
            {"a": ("t.model", 4096)},
            4096,
            "bytes",
            ["data.tokenizer is bytes, and a was prepared with t.model"],
        ),
        ({"a": ("bytes", 256)}, 256, "t.model", ["data.tokenizer is t.model, and a was prepared with bytes"]),
        (
            GPT2 | {"a": ("bytes", 256)},
            50304,
            "x.json",
            ["a has a vocabulary of 256 tokens, and owt one of 50,257"],
        ),
    ],
)
def test_what_does_not_fit_is_named(
    tmp_path: Path,
    corpora: dict[str, tuple[str, int]],
    vocab_size: int,
    tokenizer: str | None,
    named: list[str],
) -> None:
    """A model would spend memory and time on rows that no text has; or its texts would be
    written with another tokenizer.
    """
    lines = said(tmp_path, corpora, vocab_size, tokenizer)
    assert len(lines) == bool(named) and all(line.startswith("WARNING: ") for line in lines)
    assert all(part in lines[0] for part in named)


def test_a_run_says_it_before_it_starts(tmp_path: Path) -> None:
    """In one line: with status 2 where a token has no row, and else as a warning above the first step."""
    (tmp_path / "t.txt").write_text("a text of some words, all of them in small letters " * 9)
    prepare([str(tmp_path / "t.txt")], f"{tmp_path}/t", "bytes")
    given = [
        f"data.train={tmp_path}/t",
        "data.valid=null",
        "data.tokenizer=bytes",
        f"log.dir={tmp_path}/run",
        "checkpoint.last=false",
    ]
    small = [
        "train.steps=1",
        "train.seq_len=16",
        "train.global_batch_size=4",
        "train.micro_batch_size=4",
        "model.num_layers=1",
    ]
    command = ["launch/pretrain.py", "--config", "configs/gpt_tiny.json", *given, *small]
    done = run_script(*command)
    warned = [
        number
        for number, line in enumerate(done.stdout.splitlines())
        if line.startswith("WARNING: 3,840 of the 4,096 rows")
    ]
    assert (
        done.returncode == 0 and warned and "step 1/1" not in "".join(done.stdout.splitlines()[: warned[0]])
    )
    done = run_script(*command, "model.vocab_size=100", f"log.dir={tmp_path}/refused")
    assert done.returncode == 2 and done.stderr.startswith(
        f"data error: {tmp_path}/t.bin: holds token id 120, beyond a vocabulary of 100"
    )
    assert done.stderr.count("\n") == 1 and not (tmp_path / "refused").exists()
