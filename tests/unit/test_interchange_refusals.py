"""What cannot be converted is named in one line, with status 2, and nothing is written."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from launch.checkpoint import run
from megacore.checkpoint import locate
from megacore.checkpoint.manifest import sealed
from megacore.errors import UserError
from tests.conversion import assert_nothing_written, random_run
from tests.pool import PATIENCE

SCRIPT = Path(__file__).parents[2] / "launch" / "checkpoint.py"
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 31,
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 12,
    "max_position_embeddings": 16,
    "rms_norm_eps": 1e-5,
}
LAYER = "model.layers.0."
SHAPES = {
    "model.embed_tokens.weight": (31, 8),
    "model.norm.weight": (8,),
    "lm_head.weight": (31, 8),
    f"{LAYER}input_layernorm.weight": (8,),
    f"{LAYER}post_attention_layernorm.weight": (8,),
    f"{LAYER}self_attn.q_proj.weight": (8, 8),
    f"{LAYER}self_attn.k_proj.weight": (4, 8),
    f"{LAYER}self_attn.v_proj.weight": (4, 8),
    f"{LAYER}self_attn.o_proj.weight": (8, 8),
    f"{LAYER}mlp.gate_proj.weight": (12, 8),
    f"{LAYER}mlp.up_proj.weight": (12, 8),
    f"{LAYER}mlp.down_proj.weight": (8, 12),
}


def write_model(folder: Path) -> Path:
    """A tiny Llama's folder."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file({name: torch.randn(shape) for name, shape in SHAPES.items()}, folder / "model.safetensors")
    return folder


def refused(*arguments: object) -> str:
    """The one line of a refusal."""
    with pytest.raises(UserError) as caught:
        run([*map(str, arguments)])
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_model_itself_is_taken(tmp_path):
    """Else the refusals below might be for something else."""
    run(["import", str(write_model(tmp_path / "model")), "--format", "hf", "--output", str(tmp_path / "run")])


def weights(edit: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    """Damage to the tensors."""

    def damage(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        edit(tensors)
        save_file(tensors, folder / "model.safetensors")

    return damage


def config(**changes: Any) -> Callable[[Path], None]:
    """Damage to config.json."""
    return lambda folder: (folder / "config.json").write_text(json.dumps(CONFIG | changes)) and None


def truncate(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])


def shards(weight_map: Any) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))

    return write


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


K = f"{LAYER}self_attn.k_proj.weight"
K_A = torch.ones(2, 8)


def linked(name: str, *over: str, elsewhere: bool = True) -> Callable[[Path], None]:
    """A file of the model, or another, is a link to one beside the model's folder,
    perhaps `over` a link within it.
    """

    def damage(folder: Path) -> None:
        there = folder.parent / "elsewhere"
        there.mkdir()
        if (folder / name).exists():
            (folder / name).rename(there / name)
        elif name == "more":
            (there / name).mkdir()
        elif elsewhere:
            (there / name).write_text("{}")
        for link in over:
            (folder / link).symlink_to(there / name)
        (folder / name).symlink_to(folder / over[-1] if over else Path("../elsewhere") / name)

    return damage


def text(name: str, content: str = "root:$6$x$y:19000:0:99999:7:::\n") -> Callable[[Path], None]:
    """A file that is not what its name says: by default a line of /etc/shadow."""
    return lambda folder: (folder / name).write_text(content) and None


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "tensor missing": (weights(lambda w: w.pop(K)), rf"model: has no tensor {K} of shape \(4, 8\)"),
    "tensor of another shape": (
        weights(lambda w: w.update({K: torch.ones(8, 8)})),
        rf"tensor {K} has shape \(8, 8\), not \(4, 8\)",
    ),
    "tensor too many": (
        weights(lambda w: w.update({f"{K}.lora": torch.ones(2)})),
        rf"holds the tensor {K}\.lora",
    ),
    "quantized": (
        weights(lambda w: w.update({K: torch.ones(4, 8, dtype=torch.int8)})),
        rf"model\.safetensors: tensor {K} is I8",
    ),
    "truncated": (truncate, r"model/model\.safetensors: is damaged or cut off"),
    "no weights": (
        lambda folder: (folder / "model.safetensors").unlink(),
        r"model: has neither model\.safetensors nor",
    ),
    "a pickle": (pickled, r"model: holds pytorch_model\.bin, a pickle.*convert it to safetensors"),
    "missing shard": (
        shards({name: f"model-0000{1 + (name == K)}-of-00002.safetensors" for name in SHAPES}),
        r"index\.json: names model-00002-of-00002\.safetensors, which is missing",
    ),
    "shard elsewhere": (
        shards({K: "../model.safetensors"}),
        r"index\.json: has no weight_map from tensors to files of this folder",
    ),
    "no weight map": (shards(None), r"index\.json: has no weight_map"),
    "config missing": (lambda folder: (folder / "config.json").unlink(), r"model/config\.json: is missing"),
    "config no JSON": (
        lambda folder: (folder / "config.json").write_text("{"),
        r"model/config\.json: is no JSON",
    ),
    "config no object": (
        lambda folder: (folder / "config.json").write_text("[1]"),
        r"model/config\.json: holds no JSON object",
    ),
    "config not UTF-8": (
        lambda folder: (folder / "config.json").write_bytes(b"\xff{}"),
        r"model/config\.json: is no JSON",
    ),
    "unknown architecture": (
        config(architectures=["BertModel"]),
        r"model/config\.json: is of the architecture BertModel, .*LlamaFor",
    ),
    "no architecture and no type": (
        config(architectures=None, model_type=None),
        r"model/config\.json: has no architectures, and its model_type None is not known here",
    ),
    "no architecture and an unknown type": (
        config(architectures=[], model_type="bert"),
        r"model/config\.json: has no architectures, and its model_type 'bert' is not known here",
    ),
    "an architecture that is no list": (
        config(architectures=5),
        r"model/config\.json: is of the architecture 5",
    ),
    "an adapter of PEFT": (
        text("adapter_config.json", '{"peft_type": "LORA"}'),
        r"model: holds an adapter of PEFT \(adapter_config\.json\) \(a merged model: .*merge_and_unload",
    ),
    "LoRA that is not merged": (
        weights(lambda w: w.update({f"base_model.model.{LAYER}self_attn.k_proj.lora_A.default.weight": K_A})),
        r"k_proj\.lora_A\.default\.weight, of an adapter of PEFT that is not merged \(a merged model",
    ),
    "the weight under a LoRA": (
        weights(lambda w: w.update({f"base_model.model.{LAYER}self_attn.k_proj.base_layer.weight": K_A})),
        r"k_proj\.base_layer\.weight, of an adapter of PEFT that is not merged",
    ),
    "a module that PEFT trains": (
        weights(lambda w: w.update({"base_model.model.lm_head.modules_to_save.default.weight": K_A})),
        r"lm_head\.modules_to_save\.default\.weight, of an adapter of PEFT that is not merged",
    ),
    "a tensor with and without a wrapper": (
        weights(lambda w: w.update({f"_orig_mod.{K}": torch.ones(4, 8)})),
        rf"holds the tensor {K} a second time",
    ),
    "unknown setting": (config(hidden_act="relu"), r"model/config\.json: hidden_act is 'relu'"),
    "setting of another type": (
        config(num_hidden_layers="1"),
        r"model/config\.json: num_hidden_layers is '1'",
    ),
    "a link for config": (
        linked("config.json"),
        r"model/config\.json: is a link to .*/elsewhere/config\.json, out of the model's folder",
    ),
    "a link for weights": (
        linked("model.safetensors"),
        r"model/model\.safetensors: is a link to .*/elsewhere/",
    ),
    "a link for a tokenizer": (
        linked("tokenizer.json"),
        r"model/tokenizer\.json: is a link to .*/elsewhere/",
    ),
    "a link for what transformers reads": (
        linked("generation_config.json"),
        r"model/generation_config\.json: is a link to .*/elsewhere/",
    ),
    "a link over a link": (linked("vocab.json", "own.json"), r"model/own\.json: is a link to .*/elsewhere/"),
    "a link to nothing": (
        linked("merges.txt", elsewhere=False),
        r"model/merges\.txt: is a link to .*/elsewhere/",
    ),
    "a link to a folder": (linked("more"), r"model/more: is a link to .*/elsewhere/more"),
    "a pipe": (
        lambda folder: os.mkfifo(folder / "special_tokens_map.json"),
        r"special_tokens_map\.json: is neither a file nor a folder",
    ),
    "no sentencepiece": (text("tokenizer.model"), r"model/tokenizer\.model: is no sentencepiece model"),
    "no tokenizer.json": (text("tokenizer.json"), r"model/tokenizer\.json: is no JSON"),
    "another tokenizer.json": (
        text("tokenizer.json", '{"root": 0}'),
        r"model/tokenizer\.json: holds no model of a tokenizer",
    ),
    "a wrong tokenizer.json": (
        text("tokenizer.json", '{"model": {"type": "none"}}'),
        r"model/tokenizer\.json: is no tokenizer",
    ),
    "no tokenizer_config": (
        text("tokenizer_config.json", "[1]"),
        r"model/tokenizer_config\.json: holds no JSON object",
    ),
    "no special tokens": (text("special_tokens_map.json"), r"model/special_tokens_map\.json: is no JSON"),
    "no added tokens": (
        text("added_tokens.json", '{"a": "b"}'),
        r"model/added_tokens\.json: holds something else than the ids",
    ),
    "no vocabulary": (
        text("vocab.json", '{"a": 0.5}'),
        r"model/vocab\.json: holds something else than the ids",
    ),
    "no merges": (text("merges.txt"), r"model/merges\.txt: is no list of merges"),
    "merges that are no text": (
        lambda folder: (folder / "merges.txt").write_bytes(b"\xff"),
        r"model/merges\.txt: is no text",
    ),
    "no template": (text("chat_template.jinja"), r"model/chat_template\.jinja: is no template of a chat"),
    "another size": (
        config(intermediate_size=16),
        rf"tensor {LAYER}mlp\.gate_proj\.weight has shape \(12, 8\), not \(16, 8\)",
    ),
    "heads that do not divide": (config(num_attention_heads=3, head_dim=2, num_key_value_heads=2), "num_"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_import_names_what_is_wrong(damage, tmp_path):
    folder = write_model(tmp_path / "model")
    edit, message = DAMAGES[damage]
    edit(folder)
    line = refused("import", folder, "--format", "hf", "--output", tmp_path / "run")
    assert re.search(message, line), line
    assert_nothing_written(tmp_path / "run")


GOOD = {
    "tokenizer_config.json": '{"eos_token": {"content": "b"}}',
    "special_tokens_map.json": "{}",
    "added_tokens.json": '{"c": 2}',
    "vocab.json": '{"a": 0, "b": 1}',
    "merges.txt": "#version: 0.2\na b\n",
    "chat_template.jinja": "{% for m in messages %}{{ m }}{% endfor %}",
    "tokenizer.json": '{"added_tokens": [], "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, '
    '"unk_token": "a"}}',
}


def test_a_folder_of_the_hubs_cache_is_taken(tmp_path):
    """Its files are links to blobs, which revisions share: the very layout that a download leaves.

    A tokenizer's good files come along.
    """
    cache = tmp_path / "hub" / "models--somebody--model"
    (cache / "snapshots").mkdir(parents=True)
    folder = write_model(cache / "snapshots" / "0123abcd")
    (cache / "blobs").mkdir()
    for name, content in GOOD.items():
        (folder / name).write_text(content)
    for number, file in enumerate(sorted(folder.iterdir())):
        file.rename(cache / "blobs" / str(number))
        file.symlink_to(f"../../blobs/{number}")
    (tmp_path / "model").symlink_to(folder)
    for source in (folder, tmp_path / "model"):
        output = tmp_path / f"run_{source.name}"
        run(["import", str(source), "--format", "hf", "--output", str(output)])
        copied = {
            file.name: file.read_text() for file in (output / "tokenizer").iterdir() if not file.is_symlink()
        }
        assert copied == GOOD


@pytest.mark.parametrize(
    "lie", ["another name", "no snapshot", "blobs elsewhere", "a blob elsewhere", "below the blobs"]
)
def test_what_only_looks_like_the_hubs_cache(lie, tmp_path):
    cache = tmp_path / ("model" if lie == "another name" else "models--somebody--model")
    group = "revisions" if lie == "no snapshot" else "snapshots"
    (cache / group).mkdir(parents=True)
    folder = write_model(cache / group / "0123abcd")
    secret = tmp_path / "blobs" / "secret"
    secret.parent.mkdir()
    secret.write_text("{}")
    if lie == "blobs elsewhere":
        (cache / "blobs").symlink_to(secret.parent)
    else:
        (cache / "blobs" / "below").mkdir(parents=True)
        (cache / "blobs" / "below" / "secret").write_text("{}")
        (cache / "blobs" / "secret").symlink_to(secret) if lie == "a blob elsewhere" else (
            cache / "blobs" / "secret"
        ).write_text("{}")
    (folder / "added_tokens.json").symlink_to(
        f"../../blobs/{'below/' if lie == 'below the blobs' else ''}secret"
    )
    line = refused("import", folder, "--format", "hf", "--output", tmp_path / "run")
    assert re.search(r"added_tokens\.json: is a link to .*secret, out of the model's folder", line), line
    assert_nothing_written(tmp_path / "run")


def test_an_export_takes_no_links_either(tmp_path):
    random_run(tmp_path / "run")
    secret, tokenizer = tmp_path / "secret", tmp_path / "tokenizer"
    secret.write_text("{}")
    tokenizer.mkdir()
    (tokenizer / "vocab.json").symlink_to(secret)
    line = refused(
        "export", tmp_path / "run", "--format", "hf", "--output", tmp_path / "out", "--tokenizer", tokenizer
    )
    assert "vocab.json: is a link to" in line
    (tokenizer / "vocab.json").unlink()
    (tokenizer / "vocab.json").write_text("{}")  # which is no whole tokenizer
    line = refused(
        "export", tmp_path / "run", "--format", "hf", "--output", tmp_path / "out", "--tokenizer", tokenizer
    )
    assert "transformers cannot open it" in line
    assert_nothing_written(tmp_path / "out")


def edit_manifest(folder: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    manifest = locate(folder) / "manifest.json"
    content = json.loads(manifest.read_text())
    del content["manifest_sha256"]
    edit(content)
    manifest.write_bytes(sealed(content))


EMPTY = {"shape": [0], "dtype": "float32", "digest": "0" * 16, "slices": 0}
EXPORTS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "tensor left out": (lambda m: m["tensors"].pop("model/norm.bias"), "none of its 1 checkpoints is whole"),
    "tensor missing": (
        lambda m: [
            model.update(num_layers=9) for model in (m["state"]["model"], m["state"]["config"]["model"])
        ],
        "has no tensor model/blocks.",
    ),
    "tensor too many": (
        lambda m: m["tensors"].update({"model/extra": EMPTY}),
        "holds the tensor model/extra",
    ),
    "tensor of two names": (
        lambda m: m["tensors"].update({"model/extra": m["tensors"]["model/norm.bias"]}),
        "checkpoints is whole",
    ),
    "another shape": (
        lambda m: m["state"]["config"]["model"].update(hidden_size=32, head_size=8),
        "hidden_size",
    ),
    "no config": (lambda m: m["state"].pop("config"), "does not hold the run's config"),
}


@pytest.mark.parametrize("damage", EXPORTS)
def test_export_names_what_is_wrong(damage, tmp_path):
    random_run(tmp_path / "run")
    edit, message = EXPORTS[damage]
    edit_manifest(tmp_path / "run", edit)
    line = refused("export", tmp_path / "run", "--format", "hf", "--output", tmp_path / "out")
    assert message in line
    assert_nothing_written(tmp_path / "out")


def test_a_model_that_no_family_has(tmp_path):
    random_run(tmp_path / "run", norm="rmsnorm")
    assert "config error: model." in refused(
        "export", tmp_path / "run", "--format", "hf", "--output", tmp_path / "out"
    )
    assert_nothing_written(tmp_path / "out")


ARGUMENTS = [
    ("export {} --format hf", "the following arguments are required: --output"),
    ("export {} --format gguf --output {}/out", "config error: --format: invalid choice: 'gguf'"),
    ("export {} --format hf --output {}/out --shard-gib 0", "config error: --shard-gib: 0.0 is not usable"),
    (
        "export {} --format hf --output {}/out --compare-layers 3",
        "--compare-layers: 3 is not usable (from 1 to the model's 2)",
    ),
    ("export {} --format hf --output {}/out train.steps=1", "unrecognized arguments: train.steps=1"),
    ("export {}/nowhere --format hf --output {}/out", "nowhere: holds no checkpoint"),
    ("import {}/nowhere --format hf --output {}/out", "nowhere: there is no such folder"),
    (
        "import {}/nowhere --format nanogpt --output {}/out",
        "nowhere: cannot be read: No such file or directory",
    ),
    ("verify {} --format hf", "unrecognized arguments: --format hf"),
]


@pytest.mark.parametrize("arguments, message", ARGUMENTS)
def test_arguments(arguments, message, tmp_path):
    random_run(tmp_path / "run")
    assert message in refused(
        *arguments.replace("{}/", f"{tmp_path}/").replace("{}", str(tmp_path / "run")).split()
    )
    assert_nothing_written(tmp_path / "out")


def test_a_wrong_override_of_an_import(tmp_path):
    folder = write_model(tmp_path / "model")
    for override, message in (
        ("model.hidden_size=16", "has shape"),
        ("train.seq_len=17", "train.seq_len"),
        ("nothing", "is no override"),
    ):
        assert message in refused("import", folder, "--format", "hf", "--output", tmp_path / "run", override)
    assert_nothing_written(tmp_path / "run")


def test_status_and_the_line(tmp_path):
    """What a shell sees: status 2, the line on stderr, no traceback."""
    folder = write_model(tmp_path / "model")
    truncate(folder)
    command = [sys.executable, SCRIPT, "import", folder, "--format", "hf", "--output", tmp_path / "run"]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=PATIENCE)
    assert (done.returncode, done.stdout) == (2, "")
    assert (
        done.stderr.startswith(f"checkpoint error: {folder}/model.safetensors: is damaged")
        and done.stderr.count("\n") == 1
    )
    assert_nothing_written(tmp_path / "run")
