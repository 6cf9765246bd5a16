"""What an exported model writes: the same tokens of the same text, and the same text after it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from launch.generate import run as generate
from megacore.distributed.rank_info import RankInfo
from megacore.errors import CheckpointError, ConfigError
from megacore.tools.interchange import export_tokenizer as tokenizer
from megacore.tools.text.stream import TextStream
from megacore.tools.text.tokenizer import SentencePieceTokenizer, train_sentencepiece
from tests.commands import run_script
from tests.conversion import export, random_run, take_in
from tests.training import write_corpus

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


# What config.json and generation_config.json of a model say of special tokens; None: there is no such file.
# A key that is missing is not the same as null: transformers then takes the default of the architecture.
SPECIAL: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
    "several end tokens": (
        {"bos_token_id": 1, "eos_token_id": [2, 5], "pad_token_id": 7},
        {"bos_token_id": 1, "eos_token_id": [2, 5], "pad_token_id": 7, "temperature": 0.6, "do_sample": True},
    ),
    "more end tokens for generation": (
        {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None},
        {"eos_token_id": [2, 5], "top_k": 20, "_from_model_config": True},
    ),
    "without a generation_config.json": ({"eos_token_id": 2, "pad_token_id": 3}, None),
    "only in generation_config.json": ({}, {"eos_token_id": [5, 2], "max_new_tokens": 9}),
}


def special_tokens(folder: Path) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """The token ids in config.json, and the content of generation_config.json, of a model folder."""
    settings = json.loads((folder / "config.json").read_text())
    generation = folder / "generation_config.json"
    ids = {key: value for key, value in settings.items() if key.endswith("_token_id")}
    return ids, json.loads(generation.read_text()) if generation.is_file() else None


def model_with(folder: Path, ids: dict[str, Any], generation: dict[str, Any] | None) -> Path:
    """Replace the special tokens of the model in `folder`."""
    settings = json.loads((folder / "config.json").read_text())
    settings = {key: value for key, value in settings.items() if not key.endswith("_token_id")} | ids
    (folder / "config.json").write_text(json.dumps(settings))
    (folder / "generation_config.json").unlink(missing_ok=True)
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


@pytest.mark.parametrize("name", SPECIAL)
@pytest.mark.parametrize("with_tokenizer", [True, False], ids=["tokenizer", "no tokenizer"])
def test_special_tokens_come_back(trained: Path, tmp_path: Path, name: str, with_tokenizer: bool) -> None:
    """An exported model that stops at other tokens than the imported one talks on and on."""
    random_run(tmp_path / "made", {"tokenizer": str(trained)} if with_tokenizer else None, vocab_size=400)
    theirs = model_with(export(tmp_path / "made", tmp_path / "theirs"), *SPECIAL[name])
    run = take_in(theirs, tmp_path / "run")
    assert special_tokens(export(run, tmp_path / "at once")) == SPECIAL[name]
    # launch/generate.py looks for the file next to the tokenizer
    kept = run / "tokenizer/generation_config.json"
    assert kept.is_file() == (SPECIAL[name][1] is not None)


def test_special_tokens_come_back_after_training(tmp_path: Path) -> None:
    """Every checkpoint has them, also those of a run that was resumed and of a run from its weights."""
    random_run(tmp_path / "made", vocab_size=400)
    theirs = model_with(export(tmp_path / "made", tmp_path / "theirs"), *SPECIAL["several end tokens"])
    run = take_in(theirs, tmp_path / "run")
    small = ["train.seq_len=8", "train.global_batch_size=1", "train.micro_batch_size=1", "train.device=cpu"]
    settings = ["--config", f"{run}/config.json", f"data.train={write_corpus(tmp_path)}", *small]
    for steps in (1, 2):
        done = run_script(
            "launch/pretrain.py", *settings, f"log.dir={tmp_path}/tuned", f"train.steps={steps}"
        )
        assert done.returncode == 0, done.stdout + done.stderr
    weights = [f"checkpoint.weights={tmp_path}/tuned", f"log.dir={tmp_path}/further", "train.steps=1"]
    done = run_script("launch/pretrain.py", *settings, *weights)
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("tuned", "further"):
        exported = export(tmp_path / name, tmp_path / f"exported {name}")
        assert special_tokens(exported) == SPECIAL["several end tokens"]


def test_special_tokens_of_another_tokenizer(trained: Path, tmp_path: Path) -> None:
    """Tokens of the imported model's tokenizer mean something else in another one."""
    random_run(tmp_path / "made", vocab_size=400)
    ids, generation = {"bos_token_id": 7, "eos_token_id": 8}, {"eos_token_id": [8, 9]}
    theirs = model_with(export(tmp_path / "made", tmp_path / "theirs"), ids, generation)
    run = take_in(theirs, tmp_path / "run", f"data.tokenizer={json.dumps(str(trained))}")
    assert special_tokens(export(run, tmp_path / "same")) == (ids, generation)
    again = take_in(theirs, tmp_path / "again")
    exported = export(again, tmp_path / "other", "--tokenizer", trained)
    end = SentencePieceTokenizer(str(trained)).end_of_document
    other_ids, other_generation = special_tokens(exported)
    assert other_ids["eos_token_id"] == end
    assert other_generation is not None and other_generation["eos_token_id"] == end


def test_a_generation_config_that_is_none(tmp_path: Path) -> None:
    random_run(tmp_path / "made", vocab_size=400)
    theirs = export(tmp_path / "made", tmp_path / "theirs")
    (theirs / "generation_config.json").write_text("[2, 5]")
    with pytest.raises(CheckpointError, match=r"generation_config\.json: holds no JSON object"):
        take_in(theirs, tmp_path / "run")
    assert not (tmp_path / "run").exists()
