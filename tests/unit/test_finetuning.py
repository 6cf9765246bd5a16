"""The recipes that fine-tune work command by command, and all settings that do not fit are reported."""

import json
import math
import random
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import torch

from megacore.checkpoint import Reader, locate
from megacore.config import Config
from megacore.distributed.shard import Shard
from megacore.errors import CheckpointError
from megacore.tools.interchange.families import family_for_hf
from megacore.tools.settings.load import parse_override
from tests.build import run_of
from tests.checkpoints import save
from tests.commands import ROOT, run_script
from tests.conversion import random_run


def test_all_that_differs_is_named_at_once(tmp_path: Path) -> None:
    """One after the other, a user would start as many runs as there are keys.

    What is to be set can be typed as it stands.
    """
    was = {
        "num_layers": 2,
        "bias": True,
        "norm": "layernorm",
        "rope_scaling": {"type": "linear"},
        "dropout": 0.0,
        "kernels": "auto",
    }
    now = {
        "num_layers": 3,
        "bias": False,
        "norm": "rmsnorm",
        "rope_scaling": None,
        "dropout": 0.1,
        "kernels": "eager",
    }
    saved = save(
        tmp_path,
        1,
        {"model/w": (torch.zeros(1), Shard((1,)))},
        {"model": was | {"max_positions": 8, "position": "rope"}},
        keep=1,
    )
    reader = Reader(saved)
    with pytest.raises(CheckpointError) as caught:
        reader.check_model(now | {"max_positions": 16, "position": "rope"})
    assert caught.value.wrong == (
        "was written with model.num_layers=2 (the config says 3), model.bias=true (the config says "
        "false), model.norm=layernorm "
        '(the config says rmsnorm), model.rope_scaling={"type": "linear"} (the config says null)'
    )
    words = shlex.split(caught.value.right.removeprefix("set ").removesuffix(", or take another checkpoint"))
    assert dict(map(parse_override, words)) == {
        f"model.{key}": was[key] for key in ("num_layers", "bias", "norm", "rope_scaling")
    }
    with pytest.raises(CheckpointError, match=r"model\.max_positions=8 \(the config says 16\)"):
        reader.check_model({"max_positions": 16, "position": "learned"})


FREE = {
    "hf",  # where the config.json is, which is compared itself
    "hf_revision",
    "hf_version",
    "dropout",
    "attention",
    "init_std",
    "zero_init",
    "kernels",
    "chunked_loss",
    "source",
    "max_positions",
    "z_loss",
    "router_balance",
    "balance_coefficient",
    "router_z_loss",
    "router_bias_rate",
    "capacity_factor",
}  # of rotary positions, no table has them


def test_only_keys_that_change_no_function_are_free(tmp_path: Path) -> None:
    """Weights still fit a model with another epsilon, scale or base of rotary positions,
    and are another function there.
    """
    model = Config().model.model_dump(mode="json") | {"position": "rope"}
    reader = Reader(save(tmp_path, 1, {"model/w": (torch.zeros(1), Shard((1,)))}, {"model": model}, keep=1))
    reader.check_model(model | dict.fromkeys(FREE, "another"))
    for key in model.keys() - FREE:
        words = {"source_digest": "of digest another", "hf_config": "the config has a model.hf_config"}
        with pytest.raises(CheckpointError, match=words.get(key, rf"model\.{key}=")):
            reader.check_model(model | {key: "another"})


def test_weights_may_be_stretched_to_longer_texts(tmp_path: Path) -> None:
    """Only where the config asks for a scaling: a config that forgot the weights'
    own would train another function.
    """
    model = Config().model.model_dump(mode="json") | {
        "position": "rope",
        "rope_scaling": {"type": "linear", "factor": 2.0},
    }
    reader = Reader(save(tmp_path, 1, {"model/w": (torch.zeros(1), Shard((1,)))}, {"model": model}, keep=1))
    longer = model | {"rope_scaling": {"type": "ntk", "factor": 4.0}}
    reader.check_model(longer, stretch=True)
    for refused, stretch in (
        (longer, False),
        (model | {"rope_scaling": None}, True),
        (longer | {"rope_theta": 5.0}, True),
    ):
        with pytest.raises(CheckpointError, match="was written with"):
            reader.check_model(refused, stretch=stretch)


def commands_of(recipe: str) -> list[list[str]]:
    """The `python` commands of a recipe, as bash reads their words."""
    page = (ROOT / "docs/recipes.md").read_text(encoding="utf-8")
    section = page.split(f"\n## {recipe}\n")[1].split("\n## ")[0]
    lines = [
        line
        for block in re.findall(r"```bash[^\n]*\n(.*?)```", section, re.DOTALL)
        for line in block.strip().split("\n")
        if line.startswith("python ")  # models come from elsewhere in a test
    ]
    printed = [
        subprocess.run(["bash", "-c", f"printf '%s\\0' {line}"], capture_output=True, text=True, check=True)
        for line in lines
    ]
    return [done.stdout.split("\0")[:-1] for done in printed]


FEW = ["train.steps=40", "log.every=1", "optim.lr=1e-2"]  # so that little training shows


TEXT, CHAT, INSTRUCTLAB = map(commands_of, ("Fine-tune", "Chat", "InstructLab"))


def play(command: list[str], folder: Path, *more: str) -> str:
    """Run a command of the page with its files in `folder`, and return what it prints."""
    words = [
        re.sub(
            r"(?<![\w.])(runs/|data/|models/|my\.txt|my\.jsonl)", lambda found: f"{folder}/{found[1]}", word
        )
        for word in command
    ]
    assert words[0] == "python"
    done = run_script(words[1], *words[2:], *more)
    assert done.returncode == 0, (words, done.stderr)
    return done.stdout


def test_the_fine_tuning_recipe_can_be_typed(tmp_path: Path) -> None:
    """From an exported run of a byte-level tokenizer to a fine-tuned model that is exported again."""
    transformers = pytest.importorskip(
        "transformers", reason="transformers is not installed: pip install -e '.[test]'"
    )
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    steps = [
        command[1].removeprefix("launch/") + f" {command[2]}" * ("checkpoint" in command[1])
        for command in TEXT
    ]
    last = ["generate.py", "evaluate.py", "checkpoint.py export"]
    assert steps == ["checkpoint.py import", "prepare.py", "pretrain.py", *last]
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    fast = tokenizers.Tokenizer(
        tokenizers.models.BPE({piece: i for i, piece in enumerate(["<|end|>", *alphabet])}, [])
    )
    fast.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = tokenizers.decoders.ByteLevel()
    own = transformers.PreTrainedTokenizerFast(tokenizer_object=fast, eos_token="<|end|>")
    own.save_pretrained(tmp_path / "own")
    random_run(
        tmp_path / "runs/quickstart",
        {"tokenizer": str(tmp_path / "own/tokenizer.json")},
        vocab_size=257,
        max_positions=32,
    )
    (tmp_path / "my.txt").write_text("Once upon a time there was a model. " * 300, encoding="utf-8")

    export = ["python", "launch/checkpoint.py", "export", "runs/quickstart", "--format", "hf"]
    play([*export, "--output", "models/gpt2"], tmp_path)  # what the recipe downloads
    play(TEXT[0], tmp_path)
    printed = play(TEXT[1], tmp_path)
    prefix = f"{tmp_path}/"
    assert [word.replace(prefix, "") for word in shlex.split(printed.splitlines()[-1])] == TEXT[2][:-2], (
        "what to type next"
    )
    play(TEXT[2], tmp_path, *FEW)
    tuned = tmp_path / "runs/gpt2_finetuned"
    lines = [json.loads(line) for line in (tuned / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert len(losses) == 40 and losses[-1] < 0.5 * losses[0]
    assert Reader(locate(tuned)).step == 40 and Reader(locate(tmp_path / "runs/gpt2")).step == 0
    assert play(TEXT[3], tmp_path, "--temperature", "0").startswith("Once upon a time")
    assert "perplexity" in play(TEXT[4], tmp_path)
    play(TEXT[5], tmp_path)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "models/gpt2_finetuned" / file).read_bytes() == (
            tmp_path / "own" / file
        ).read_bytes()


def test_the_example_of_instructions_is_its_model() -> None:
    """configs/finetune_chat.json would refuse the model that it is for,
    SmolLM2-135M-Instruct as it is published.
    """
    sizes = {
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
    }
    rope = {
        "max_position_embeddings": 8192,
        "rope_theta": 100000,
        "rope_scaling": None,
        "rope_interleaved": False,
    }
    published = (
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_act": "silu",
            "is_llama_config": True,
        }
        | sizes
        | rope
    )
    published |= {
        "num_key_value_heads": 3,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "attention_bias": False,
    }
    config = run_of(ROOT / "configs/finetune_chat.json")
    imported, ours = family_for_hf(published, "config.json").read(published), config.model.model_dump()
    assert {key: ours[key] for key in imported} == imported and config.checkpoint.weights == "runs/chat"


TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_the_chat_recipe_can_be_typed(tmp_path: Path) -> None:
    """From a model of the Llama family with a chat template to the loss of its answers, which must
    fall far below the questions'.
    """
    transformers = pytest.importorskip(
        "transformers", reason="transformers is not installed: pip install -e '.[test]'"
    )
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    scripts = ["checkpoint.py", "prepare.py", "prepare.py", "pretrain.py", "evaluate.py", "generate.py"]
    assert [command[1].removeprefix("launch/") for command in CHAT] == scripts
    assert [command[1].removeprefix("launch/") for command in INSTRUCTLAB] == [
        "checkpoint.py",
        "prepare.py",
        "instructlab.py",
    ]
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    fast = tokenizers.Tokenizer(
        tokenizers.models.BPE({c: i for i, c in enumerate(["<|im_start|>", "<|im_end|>", *alphabet])}, [])
    )
    fast.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = tokenizers.decoders.ByteLevel()
    more = {
        "eos_token": "<|im_end|>",
        "additional_special_tokens": ["<|im_start|>"],
        "chat_template": TEMPLATE,
    }
    transformers.PreTrainedTokenizerFast(tokenizer_object=fast, **more).save_pretrained(
        tmp_path / "models/chat"
    )
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 258,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    llama = transformers.LlamaConfig(
        **sizes, num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=True
    )
    transformers.LlamaForCausalLM(llama).save_pretrained(tmp_path / "models/chat")
    draw = random.Random(0)
    questions = ["".join(draw.choices("abcdefgh", k=12)) for _ in range(200)]  # which nobody can predict
    talk = ([{"role": "user", "content": q}, {"role": "assistant", "content": "Yes."}] for q in questions)
    (tmp_path / "my.jsonl").write_text(
        "".join(json.dumps({"messages": messages}) + "\n" for messages in talk)
    )

    play(CHAT[0], tmp_path)
    assert play(CHAT[1], tmp_path).count("Yes.") == 3
    assert "tokens are learned" in play(CHAT[2], tmp_path)
    mask = (tmp_path / "data/chat.mask.bin").read_bytes()
    learned = len("Yes.") + 2  # the token that ends the turn, and the template's newline
    assert sum(mask) % learned == 0 and sum(mask) / len(mask) == pytest.approx(
        learned / (learned + len("user\nassistant\n") + 12 + 4)
    )
    play(CHAT[3], tmp_path, *FEW)
    losses = [
        json.loads(line).get("loss")
        for line in (tmp_path / "runs/chat_finetuned/metrics.jsonl").read_text().splitlines()
    ]
    assert losses[0] > 4 and [loss for loss in losses if loss][-1] < 0.5
    play(CHAT[4], tmp_path, "--json", f"{tmp_path}/figures.json")
    found = json.loads((tmp_path / "figures.json").read_text())
    valid = (tmp_path / "data/chat_valid.mask.bin").read_bytes()
    assert found["targets"] == sum(valid) and found["nats_per_token"] < 0.5 < 12 * math.log(8) / 28, (
        "less than the questions' alone"
    )
    assert play(CHAT[5], tmp_path).rstrip().endswith("assistant\nYes."), (
        "generation ends where the answer does"
    )
