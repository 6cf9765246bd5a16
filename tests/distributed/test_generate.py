"""`launch/generate.py` writes the same text in every layout, drawn or not, beyond the model's positions too; and transformers' text."""

import contextlib
import io
from pathlib import Path
from typing import Any

import pytest
import torch

from launch.generate import run
from megacore.config.load import resolve
from megacore.distributed.place import place_from_environment
from megacore.interchange.exporter import export_hf
from tests import training

LAYOUTS = {
    "tp2": ["parallel.tensor=2"],
    "pp2": ["parallel.pipeline=2"],
    "tp2pp2": ["parallel.tensor=2", "parallel.pipeline=2"],
}
# A vocabulary that does not divide, and reaches beyond the tokenizer's 256; weights large enough for every token to matter.
SIZES = {"num_layers": 3, "hidden_size": 32, "num_heads": 4, "vocab_size": 259, "init_std": 0.2}
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "llama": {"position": "rope", "norm": "rmsnorm", "activation": "swiglu", "bias": False, "tie_embeddings": False, "num_kv_heads": 2},
}


def text_of(arguments: list[str]) -> str:
    """What this rank prints."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert run(arguments, place_from_environment()) == 0
    return out.getvalue()


@pytest.fixture(scope="module", params=MODELS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    raw = {"model": SIZES | MODELS[request.param], "train": {"seq_len": 24}, "data": {"tokenizer": "bytes"}}
    return training.write_weights(tmp_path_factory.mktemp("weights"), resolve(raw, [], "test", 1).config)


@pytest.mark.parametrize("choice", [["--temperature", "0"], ["--temperature", "1", "--top-p", "0.95", "--seed", "5"]])
def test_every_layout_writes_the_same_text(pool: Any, checkpoint: Path, choice: list[str]) -> None:
    arguments = ["--checkpoint", str(checkpoint), "--prompt", "déjà vu", "--tokens", "60", *choice]
    (alone,) = pool.run(1, text_of, arguments)
    assert alone.startswith("déjà vu") and alone.endswith("\n") and len(set(alone)) > 10
    for layout in LAYOUTS.values():
        ranks = 2 ** len(layout)
        first, *others = pool.run(ranks, text_of, [*arguments, *layout])
        assert first == alone and others == [""] * (ranks - 1), "only rank 0 prints"


@pytest.mark.parametrize("model", MODELS)
def test_the_exported_model_writes_the_same_text(pool: Any, tmp_path: Path, model: str) -> None:
    """transformers' greedy continuation of 50 tokens, by its own code and cache, from the export; ours from the original, as tp2pp2."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install -e '.[test]'")
    sizes = SIZES | MODELS[model] | {"vocab_size": 256}
    raw = {"model": sizes, "train": {"seq_len": 64, "precision": "fp32"}, "data": {"tokenizer": "bytes"}}
    original = training.write_weights(tmp_path / "original", resolve(raw, [], "test", 1).config)
    export_hf(original, tmp_path / "exported", torch.float32, 1 << 30, None, None, lambda line: None)

    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    prompt = torch.tensor([list(b"def f(")])
    ids = theirs.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=50, do_sample=False, eos_token_id=None)[0]
    text = bytes(ids.tolist()).decode("utf-8", errors="replace") + "\n"
    assert len(set(text)) > 5 and len(ids) == 56

    arguments = ["--checkpoint", str(original), "--prompt", "def f(", "--tokens", "50", "--temperature", "0"]
    assert pool.run(4, text_of, [*arguments, *LAYOUTS["tp2pp2"]])[0] == pool.run(1, text_of, arguments)[0] == text
