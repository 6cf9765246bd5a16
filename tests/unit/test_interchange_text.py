"""What an exported model writes: the same tokens of the same text, and the same text after it."""

import json
from pathlib import Path

import pytest
import torch

from launch.generate import run as generate
from megacore.distributed.rank_info import RankInfo
from megacore.errors import ConfigError
from megacore.tools.interchange import export_tokenizer as tokenizer
from megacore.tools.text.stream import TextStream
from megacore.tools.text.tokenizer import SentencePieceTokenizer, train_sentencepiece
from tests.conversion import export, random_run, take_in

transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed: pip install -e '.[test]'"
)

SOURCE = Path(__file__).read_text(encoding="utf-8")
TEXTS = [
    SOURCE,
    "",
    " ",
    "\n\n  \n",
    "  lead and trail  ",
    "tab\tcr\r\n",
    "naïve 日本語 😀 \U0010ffff\0",
    "<s> </s> <unk> <0x0A>",
    "\u2581 ▁▁ _",
]
LLAMA = {"position": "rope", "norm": "rmsnorm", "activation": "swiglu", "bias": False, "num_kv_heads": 2}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "mine.model"
    path.write_bytes(train_sentencepiece(SOURCE.split("\n"), 400))
    return path


@pytest.mark.parametrize("model", [{}, LLAMA], ids=["gpt2", "llama"])
def test_the_greedy_text_is_the_same(model, tmp_path, monkeypatch, capsys):
    """50 tokens by transformers' generate from the exported model, and by
    launch/generate.py from the original.
    """
    sizes = {"vocab_size": 256, "max_positions": 80, "tie_embeddings": False, "init_std": 0.5}
    random_run(tmp_path / "run", {"tokenizer": "bytes"}, **model | sizes)
    folder = export(tmp_path / "run", tmp_path / "out")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, local_files_only=True
    )
    prompt = torch.tensor([list(b"def main(")])
    ids = theirs.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=50, do_sample=False)[
        0, 9:
    ].tolist()
    assert len(ids) == 50 and len(set(ids)) > 10, "a text of one token would prove nothing"
    capsys.readouterr()
    # bytes that are no UTF-8 would all look alike
    monkeypatch.setattr(TextStream, "push", lambda self, token: f" {token}")
    options = [
        "--checkpoint",
        str(tmp_path / "run"),
        "--prompt",
        "def main(",
        "--tokens",
        "50",
        "--temperature",
        "0",
    ]
    assert generate(options, RankInfo()) == 0
    assert capsys.readouterr().out == " ".join(["def main(", *map(str, ids)]) + "\n"


def test_sentencepiece_for_autotokenizer(trained, tmp_path, capsys):
    """AutoTokenizer gives the ids that the model was trained on, spelt-out special tokens and
    unknown characters among them.
    """
    random_run(tmp_path / "run", {"tokenizer": str(trained)}, vocab_size=400)
    folder = export(tmp_path / "run", tmp_path / "out")
    ours, theirs = (
        SentencePieceTokenizer(str(trained)),
        transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True),
    )
    for text in TEXTS:
        ids = ours.encode(text).tolist()
        assert theirs.encode(text, add_special_tokens=False) == theirs.encode(text) == ids
        assert theirs.decode(ids) == ours.decode(ids)
    assert (
        json.loads((folder / "config.json").read_text())["eos_token_id"]
        == ours.end_of_document
        == theirs.eos_token_id
    )
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == ours.end_of_document
    assert "gives the same ids" in capsys.readouterr().out
    again = take_in(folder, tmp_path / "again")
    name = json.loads((again / "config.json").read_text())["data"]["tokenizer"]
    assert Path(name).read_bytes() == trained.read_bytes()
    back = export(again, tmp_path / "back")  # with the files that came along
    assert all(
        (back / file).read_bytes() == (folder / file).read_bytes()
        for file in ("tokenizer.json", "tokenizer_config.json")
    )


def test_a_tokenizer_that_would_differ_is_not_pretended(trained, tmp_path, monkeypatch, capsys):
    """A rule of the merges is lost: the comparison finds it, and the sentencepiece model alone is written."""
    right = tokenizer.fast_tokenizer

    def wrong(model):
        fast = right(model)
        fast["model"]["merges"].pop(20)
        return fast

    monkeypatch.setattr(tokenizer, "fast_tokenizer", wrong)
    random_run(tmp_path / "run", {"tokenizer": str(trained)}, vocab_size=400)
    folder = export(tmp_path / "run", tmp_path / "out")
    assert sorted(file.name for file in folder.iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.model",
    ]
    assert "transformers would give other ids for some texts" in capsys.readouterr().out


def test_other_tokenizers(trained, tmp_path, capsys):
    """Bytes have no file; one given on the command line counts; one with more tokens
    than the model is another model's.
    """
    random_run(tmp_path / "run", {"tokenizer": "bytes"}, vocab_size=256)
    export(tmp_path / "run", tmp_path / "bytes")
    assert "bytes are their own ids, so there is no file to write" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="--tokenizer: .* has 400 tokens, and the model 256"):
        export(tmp_path / "run", tmp_path / "out", "--tokenizer", trained)
    with pytest.raises(ConfigError, match="--tokenizer: .* holds no tokenizer files"):
        export(tmp_path / "run", tmp_path / "out", "--tokenizer", tmp_path / "run")
    assert not (tmp_path / "out").exists()
