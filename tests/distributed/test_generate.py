"""`launch/generate.py` writes the same text in every layout, drawn or not, beyond the model's
positions too; and transformers' text.
"""

import contextlib
import io
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from launch.generate import run
from megacore.errors import UserError
from megacore.model.stage import Stage
from megacore.pipeline.partition import layer_ranges
from megacore.tools.diagnosis.flight_recorder import FlightRecorder
from megacore.tools.interchange.export_hf import export_hf
from megacore.tools.launchers import place_from_environment
from megacore.tools.text.decoding import Decoder
from megacore.tools.text.sampling import Sampler
from tests import training
from tests.build import mesh_of, run_of

LAYOUTS = {
    "tp2": ["parallel.tensor=2"],
    "pp2": ["parallel.pipeline=2"],
    "tp2pp2": ["parallel.tensor=2", "parallel.pipeline=2"],
    "cp2tp2": ["parallel.context=2", "parallel.tensor=2", "parallel.context_method=ulysses"],
    "cp2pp2": ["parallel.context=2", "parallel.pipeline=2", "parallel.context_method=gather"],
}
# A vocabulary that does not divide, and reaches beyond the tokenizer's 256; weights large enough for every
# token to matter.
SIZES = {"num_layers": 3, "hidden_size": 32, "num_heads": 4, "vocab_size": 259, "init_std": 0.2}
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "llama": {
        "position": "rope",
        "norm": "rmsnorm",
        "activation": "swiglu",
        "bias": False,
        "tie_embeddings": False,
        "num_kv_heads": 2,
    }
    | {"rope_scaling": {"type": "yarn", "factor": 3.0, "original_max_position_embeddings": 8}},
    "gemma2": {
        "position": "rope",
        "norm": "rmsnorm",
        "norm_offset": True,
        "norm_place": "both",
        "activation": "geglu",
        "bias": False,
        "window": 5,
        "global_every": 2,
        "attention_cap": 0.5,
        "logit_cap": 2.0,
        "embedding_scale": SIZES["hidden_size"] ** 0.5,
        "attention_scale": 0.25,
        "tie_embeddings": False,
    },
    "gpt_neox": {
        "position": "rope",
        "rotary_share": 0.5,
        "branches": "parallel",
        "activation": "gelu_erf",
        "tie_embeddings": False,
    },
    "smollm3": {
        "position": "rope",
        "norm": "rmsnorm",
        "activation": "swiglu",
        "bias": False,
        "nope_every": 2,
    },
}
# Other families, of which only the exported model's text is compared with transformers'.
FAMILIES: dict[str, dict[str, Any]] = MODELS | {
    "gemma3": {
        "position": "rope",
        "norm": "rmsnorm",
        "norm_offset": True,
        "norm_place": "both",
        "activation": "geglu",
        "bias": False,
        "window": 5,
        "global_every": 2,
        "window_rope_theta": 100.0,
        "qk_norm": True,
        "embedding_scale": SIZES["hidden_size"] ** 0.5,
        "attention_scale": 0.25,
    },
    "olmo2": {
        "position": "rope",
        "norm": "rmsnorm",
        "norm_place": "post",
        "activation": "swiglu",
        "bias": False,
        "qk_norm": True,
        "qk_norm_heads": "all",
        "tie_embeddings": False,
    },
    "qwen3_moe": {
        "position": "rope",
        "norm": "rmsnorm",
        "activation": "swiglu",
        "bias": False,
        "qk_norm": True,
        "num_experts": 4,
        "first_dense": 1,
        "expert_ffn_size": 24,
        "tie_embeddings": False,
    },
}


def text_of(arguments: list[str]) -> str:
    """What this rank prints."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert run(arguments, place_from_environment()) == 0
    return out.getvalue()


def texts_of(commands: list[list[str]]) -> list[str]:
    """What this rank prints for each command."""
    return [text_of(arguments) for arguments in commands]


@pytest.fixture(scope="module", params=MODELS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    raw = {"model": SIZES | MODELS[request.param], "train": {"seq_len": 24}, "data": {"tokenizer": "bytes"}}
    return training.write_weights(tmp_path_factory.mktemp("weights"), run_of(raw))


GREEDY, DRAWN = ["--temperature", "0"], ["--temperature", "1", "--top-p", "0.95", "--seed", "5"]


# What is chosen of logits does not depend on the model; each model's greedy text is compared with its
# export's, below.
@pytest.mark.parametrize(
    ("checkpoint", "choice"),
    [*((model, DRAWN) for model in MODELS), ("gpt2", GREEDY)],
    indirect=["checkpoint"],
)
def test_every_layout_writes_the_same_text(pool: Any, checkpoint: Path, choice: list[str]) -> None:
    # beyond the model's 24 positions
    arguments = ["--checkpoint", str(checkpoint), "--prompt", "déjà vu", "--tokens", "20", *choice]
    (alone,) = pool.run(1, text_of, arguments)
    assert alone.startswith("déjà vu") and alone.endswith("\n") and len(set(alone)) > 10
    for layout in LAYOUTS.values():
        ranks = 2 ** sum(setting.endswith("=2") for setting in layout)
        first, *others = pool.run(ranks, text_of, [*arguments, *layout])
        assert first == alone and others == [""] * (ranks - 1), "only rank 0 prints"


def error_of(arguments: list[str]) -> str:
    """The line with which this rank ends."""
    with pytest.raises(UserError) as raised:
        run(arguments, replace(place_from_environment(), guest=True))
    return str(raised.value)


@pytest.mark.parametrize("layout", [LAYOUTS["tp2"], LAYOUTS["pp2"]])
def test_all_ranks_end_if_the_checkpoint_has_diverged(pool: Any, tmp_path: Path, layout: list[str]) -> None:
    """Only the rank that chooses a token sees the logits: the others would wait for its choice."""
    raw = {"model": dict(SIZES), "train": {"seq_len": 24}, "data": {"tokenizer": "bytes"}}
    path = training.write_weights(tmp_path, run_of(raw), value=math.nan)
    errors = pool.run(2, error_of, ["--checkpoint", str(path), *GREEDY, *layout])
    wrong = "its logits are not finite: the run has diverged"
    assert errors == [f"checkpoint error: {path}: {wrong} (an earlier checkpoint)"] * 2


PROMPTS = ["long " * 8, "déjà vu"]
SEVERAL = ["--tokens", "9", "--temperature", "1", "--seed", "5", "--samples", "2", *LAYOUTS["tp2"]]
TYPED = [word for prompt in PROMPTS for word in ("--prompt", prompt)]


def test_every_prompt_has_texts_of_its_own(pool: Any, checkpoint: Path) -> None:
    """Keys that are kept of the text before, its seed that goes on, or tables that fit the
    first prompt alone: another text.
    """
    common = ["--checkpoint", str(checkpoint), "--tokens", "9", "--temperature", "1"]
    (alone,) = pool.run(
        1, texts_of, [[*common, "--prompt", prompt, "--seed", seed] for prompt in PROMPTS for seed in "56"]
    )
    assert len(set(alone)) == 4
    shown = pool.run(2, text_of, ["--checkpoint", str(checkpoint), *SEVERAL, *TYPED])[0]
    assert shown == "".join(f"--- text {number} of 4\n{text}" for number, text in enumerate(alone, 1))


def test_prompts_may_stand_in_files(pool: Any, tmp_path: Path) -> None:
    """In lines, or as JSON, whatever the model: the same texts as typed; and as lines
    of JSON, with prompts and seeds.
    """
    raw = {"model": dict(SIZES), "train": {"seq_len": 24}, "data": {"tokenizer": "bytes"}}
    several = [
        "--checkpoint",
        str(training.write_weights(tmp_path, run_of(raw))),
        *SEVERAL,
    ]
    (tmp_path / "p.txt").write_text("\n".join((PROMPTS[0], "", PROMPTS[1])) + "\n")
    (tmp_path / "p.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in ({"prompt": PROMPTS[0], "id": 3}, PROMPTS[1]))
    )
    ways = [TYPED, ["--prompts", str(tmp_path / "p.txt")], ["--prompts", str(tmp_path / "p.jsonl")]]
    (shown, *others), _ = pool.run(
        2, texts_of, [[*several, *way, *form] for form in ([], ["--json"]) for way in ways]
    )
    assert others[:2] == [shown] * 2 and others[2:] == [others[2]] * 3
    found = [json.loads(line) for line in others[2].splitlines()]
    assert (
        "".join(f"--- text {n} of 4\n{text['prompt']}{text['text']}\n" for n, text in enumerate(found, 1))
        == shown
    )
    assert [(text["prompt"], text["seed"]) for text in found] == [
        (prompt, seed) for prompt in PROMPTS for seed in (5, 6)
    ]


@pytest.mark.parametrize("model", FAMILIES)
def test_the_exported_model_writes_the_same_text(pool: Any, tmp_path: Path, model: str) -> None:
    """transformers' greedy continuation of 30 tokens, by its own code and cache, from the export;
    ours from the original, as tp2pp2.
    """
    transformers = pytest.importorskip(
        "transformers", reason="transformers is not installed: pip install -e '.[test]'"
    )
    sizes = SIZES | FAMILIES[model] | {"vocab_size": 256}
    raw = {"model": sizes, "train": {"seq_len": 64, "precision": "fp32"}, "data": {"tokenizer": "bytes"}}
    original = training.write_weights(tmp_path / "original", run_of(raw))
    export_hf(original, tmp_path / "exported", torch.float32, 1 << 30, None, None, lambda line: None)

    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    prompt = torch.tensor([list(b"def f(")])
    ids = theirs.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=30, do_sample=False, eos_token_id=None
    )[0]
    text = bytes(ids.tolist()).decode("utf-8", errors="replace") + "\n"
    assert len(set(text)) > 5 and len(ids) == 36

    arguments = ["--checkpoint", str(original), "--prompt", "def f(", "--tokens", "30", "--temperature", "0"]
    assert (
        pool.run(4, text_of, [*arguments, *LAYOUTS["tp2pp2"]])[0]
        == pool.run(1, text_of, arguments)[0]
        == text
    )


def greedy(model: dict[str, Any], overrides: list[str], lengths: list[int]) -> tuple[list[list[int]], int]:
    """The tokens that follow prompts of some lengths, and the most positions of which
    this rank keeps keys.
    """
    place = place_from_environment()
    raw = {
        "model": SIZES | model,
        "train": {"seq_len": 24, "precision": "fp64", "global_batch_size": 1, "micro_batch_size": 1},
    }
    config = run_of(raw, *overrides, world=place.world_size)
    mesh = mesh_of(config)
    stage = Stage(config, range(config.model.num_layers + 2), mesh, mesh.device)
    decoder = Decoder([stage.eval()], mesh)
    sampler = Sampler(0.0, 1, 1.0, 0, SIZES["vocab_size"])
    found = [list(decoder.generate([(7 * i) % 256 for i in range(n)], 6, sampler)) for n in lengths]
    kept = max(keys.shape[2] for cache in decoder.caches for keys, _ in cache._layers.values())
    mesh.close()
    return found, kept


@pytest.mark.parametrize("method", ["gather", "ring"])
@pytest.mark.parametrize("model", MODELS)
def test_prompts_of_any_length_are_divided(pool: Any, model: str, method: str) -> None:
    """Shorter than there are pieces, with an end in any piece, and as long as the model sees;
    three ranks keep a third each.

    A token that sees what is behind the prompt's end, or a key that no rank keeps or two do, would make
    another text.
    """
    lengths = [1, 2, 5, 6, 7, 13, 24]
    ((alone, _),) = pool.run(1, greedy, MODELS[model], [], lengths)
    assert len({tuple(tokens) for tokens in alone}) == len(lengths)
    for found, kept in pool.run(
        3, greedy, MODELS[model], ["parallel.context=3", f"parallel.context_method={method}"], lengths
    ):
        assert found == alone and kept == 24 // 3


def transfers_seen() -> dict[str, int]:
    """How many transfers of a text's generation the watchdog's record has, by link."""
    place = place_from_environment()
    raw = {"model": dict(SIZES), "train": {"seq_len": 24}, "parallel": {"pipeline": 3}}
    config = run_of(raw, world=place.world_size)
    mesh = mesh_of(config)
    recorder = FlightRecorder()
    mesh.listeners.add(recorder)
    stage = Stage(config, layer_ranges(config)[place.rank], mesh, mesh.device)
    assert (
        len(
            list(
                Decoder([stage.eval()], mesh).generate(
                    [1, 2, 3], 4, Sampler(0.0, 1, 1.0, 0, SIZES["vocab_size"])
                )
            )
        )
        == 4
    )
    mesh.close()
    return {key: channel.begun for key, channel in recorder.channels.items() if ">" in key}


def test_what_generation_sends_is_watched(pool: Any) -> None:
    """A text that hangs between two stages is explained as a step is, because both send in one way."""
    assert pool.run(3, transfers_seen) == [{"0>1": 4}, {"0>1": 4, "1>2": 4}, {"1>2": 4}]
