"""Models to and from Hugging Face's format: nothing changes on the way, and a conversion that
would change something is refused.
"""

import dataclasses
import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from megacore.checkpoint import Reader, locate
from megacore.errors import CheckpointError, ConfigError
from megacore.tools.interchange import check_conversion as compare
from megacore.tools.interchange import export_hf as exporter
from megacore.tools.interchange import import_model as importer
from megacore.tools.interchange.families import family_for_hf
from megacore.tools.interchange.folder import Folder
from megacore.tools.interchange.mapped import Mapped
from tests import peers
from tests.build import run_of
from tests.conversion import (
    assert_nothing_written,
    export,
    imported_model,
    logits,
    random_run,
    relative,
    stored,
    take_in,
)
from tests.peers import PEERS

transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed: pip install -e '.[test]'"
)

# fp32 rounds to 6e-8; a few blocks and sums over some ten features leave it below this. What a wrong mapping
# makes is tested below.
TOLERANCE = 1e-5

OWN: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "gpt2, exact gelu, untied": {"activation": "gelu_erf", "tie_embeddings": False, "ffn_size": 40},
    "llama, grouped queries": {
        "position": "rope",
        "norm": "rmsnorm",
        "activation": "swiglu",
        "bias": False,
        "tie_embeddings": False,
        "num_kv_heads": 2,
    },
    "qwen2": {
        "position": "rope",
        "norm": "rmsnorm",
        "activation": "swiglu",
        "bias": False,
        "qkv_bias": True,
        "norm_eps": 1e-6,
    },
    "qwen3": {
        "position": "rope",
        "norm": "rmsnorm",
        "activation": "swiglu",
        "bias": False,
        "qk_norm": True,
        "head_size": 8,
    },
    "granite": {
        "position": "rope",
        "norm": "rmsnorm",
        "activation": "swiglu",
        "bias": False,
        "logit_scale": 0.25,
        "residual_scale": 0.5,
    },
}


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Tensor]]:
    """`theirs(name)`: the folder that transformers saved model `name` of tests/peers.py to,
    and its logits of `peers.tokens`.
    """
    made: dict[str, tuple[Path, Tensor]] = {}

    def make(name: str) -> tuple[Path, Tensor]:
        if name not in made:
            model = peers.build(name).eval()
            folder = tmp_path_factory.mktemp("theirs") / "model"
            shards = {"max_shard_size": "20KB"} if name == "llama" else {}
            model.save_pretrained(folder, **shards)
            with torch.no_grad():
                made[name] = folder, model(peers.tokens()[0]).logits
        return made[name]

    return make


def opened_by_transformers(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, local_files_only=True
    ).eval()


@pytest.mark.parametrize("name", PEERS)
def test_theirs_in_and_out_again(name, theirs, tmp_path):
    """Every family: our logits are theirs, and what comes out again is what went in, in every bit."""
    folder, expected = theirs(name)
    run = take_in(folder, tmp_path / "run")
    assert relative(logits(imported_model(run), peers.tokens()[0]), expected) < TOLERANCE
    back = export(run, tmp_path / "back")
    before, after = stored(folder), stored(back)
    # it goes out with them side by side
    moved = ("q_proj.weight", "kv_a_proj_with_mqa.weight") if name.endswith("half apart") else ()
    assert before.keys() == after.keys() and all(
        torch.equal(before[key], after[key]) for key in before if not key.endswith(moved)
    )
    with torch.no_grad():
        assert relative(opened_by_transformers(back)(peers.tokens()[0]).logits, expected) < TOLERANCE


def test_experts_in_one_tensor(theirs, tmp_path):
    """Files that transformers 5 wrote as it holds a model give the same run as files
    with a tensor for each expert.
    """
    apart, _ = theirs("mixtral")
    peers.build("mixtral").save_pretrained(tmp_path / "held", save_original_format=False)
    assert any(name.endswith(".experts.gate_up_proj") for name in stored(tmp_path / "held"))
    runs = [take_in(folder, tmp_path / name) for folder, name in ((apart, "a"), (tmp_path / "held", "b"))]
    first, second = (Reader(locate(run)).manifest.tensors for run in runs)
    assert {name: tensor.digest for name, tensor in first.items()} == {
        name: tensor.digest for name, tensor in second.items()
    }


def test_layers_that_guess_further_ahead_are_left_out(theirs, tmp_path, capsys):
    """DeepSeek's files have one behind the last block.

    Of two that its config does not count, one is another model's.
    """
    folder = shutil.copytree(theirs("deepseek_v3")[0], tmp_path / "theirs")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    weights = stored(folder)
    save_file(weights | {"model.layers.3.eh_proj.weight": torch.ones(32, 64)}, folder / "model.safetensors")
    run = take_in(folder, tmp_path / "run")
    assert "1 tensors of layers behind the last are left out" in capsys.readouterr().out
    assert relative(logits(imported_model(run), peers.tokens()[0]), theirs("deepseek_v3")[1]) < TOLERANCE
    save_file(weights | {"model.layers.4.eh_proj.weight": torch.ones(32, 64)}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"holds the tensor model\.layers\.4\.eh_proj"):
        take_in(folder, tmp_path / "other")
    for given, wrong in (
        (None, r"holds the tensor model\.layers\.4"),
        ("x", "num_nextn_predict_layers is 'x'"),
    ):
        (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": given}))
        with pytest.raises(CheckpointError, match=wrong):
            take_in(folder, tmp_path / "other")
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 10**30}))
    take_in(folder, tmp_path / "many")  # which takes no time and no memory
    assert "1 tensors of layers behind the last are left out" in capsys.readouterr().out


def test_a_bias_that_no_step_moves_comes_in_and_goes_out(theirs, tmp_path):
    """Without a rate the files' bias was refused as a tensor of no such model.

    A run without one is told of its own setting.
    """
    folder, expected = theirs("deepseek_v3")
    run = take_in(folder, tmp_path / "run", "model.router_bias_rate=0")
    assert relative(logits(imported_model(run), peers.tokens()[0]), expected) < TOLERANCE
    before, after = stored(folder), stored(export(run, tmp_path / "out"))
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)
    with pytest.raises(
        ConfigError,
        match=r"model\.router_bias: is false, and then .* holds the tensor .* without model\.router_bias\)",
    ):
        take_in(folder, tmp_path / "other", "model.router_bias_rate=0", "model.router_bias=false")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", OWN)
def test_ours_out(name, dtype, tmp_path, capsys):
    """transformers computes what our model does, whose weights are rounded alike,
    from a checkpoint in slices.
    """
    model = random_run(tmp_path / "run", **OWN[name])
    folder = export(
        tmp_path / "run", tmp_path / "out", "--dtype", {torch.float32: "fp32", torch.bfloat16: "bf16"}[dtype]
    )
    assert {tensor.dtype for tensor in stored(folder).values()} == {dtype}
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype).float()
    rows = torch.randint(61, (2, 16), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        assert relative(logits(model, rows), opened_by_transformers(folder)(rows).logits) < TOLERANCE
    said = capsys.readouterr().out
    assert re.findall(r"(\d+) tensors", said) == [str(len(stored(folder)))] * 2, (
        "what is counted is what was written, twice alike"
    )
    assert "read back: all" in said and "fp64, differ from" in said and "(at most 1e-05)" in said


def test_files_of_bounded_size(tmp_path, monkeypatch):
    """A model of many files goes out and in; ours are bounded as well."""
    random_run(tmp_path / "run", **OWN["qwen3"])
    folder = export(tmp_path / "run", tmp_path / "out", "--shard-gib", 8000 / 2**30)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert (
        set(index["weight_map"].values()) == {file.name for file in folder.glob("*.safetensors")}
        and len(list(folder.iterdir())) > 3
    )
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in stored(folder).values())
    monkeypatch.setattr(importer, "FILE_BYTES", 8000)
    again = take_in(folder, tmp_path / "again")
    assert len(list(locate(again).glob("*.safetensors"))) > 3
    rows = peers.tokens()[0]
    assert torch.equal(logits(imported_model(again), rows), logits(imported_model(tmp_path / "run"), rows))


def test_an_import_is_a_run_to_start_from(theirs, tmp_path):
    """Its config fine-tunes it, with the overrides; its checkpoint holds weights alone, and says whose."""
    run = take_in(theirs("gpt2")[0], tmp_path / "run", "train.seq_len=8", "train.precision=bf16")
    config = json.loads((run / "config.json").read_text())
    assert (config["train"]["seq_len"], config["train"]["precision"], config["log"]["dir"]) == (
        8,
        "bf16",
        f"{run}_finetuned",
    )
    on_four = run_of(run / "config.json", "data.train=x", "train.steps=70", world=4)
    assert (on_four.parallel.data, on_four.optim.decay_steps) == (4, 70), (
        "what follows from other values must follow them"
    )
    reader = Reader(locate(run))
    assert (reader.step, reader.state["weights_of"]["architecture"]) == (
        0,
        "GPT2LMHeadModel",
    ) and "engine" not in reader.state
    assert all(name.startswith("model/") for name in reader.names) and on_four.checkpoint.weights == str(run)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes_come_in(dtype, tmp_path):
    """bf16 is widened without loss, and fp64 kept where the run is fp64."""
    folder = tmp_path / "theirs"
    peers.build("qwen2").to(dtype).save_pretrained(folder)
    run = take_in(folder, tmp_path / "run", "train.precision=fp64")
    weights = stored(folder)
    assert torch.equal(
        imported_model(run).embedding.embedding.weight, weights["model.embed_tokens.weight"].double()
    )


def test_tied_heads_may_be_stored_twice_if_they_agree(theirs, tmp_path):
    folder = shutil.copytree(theirs("gpt2")[0], tmp_path / "theirs")
    weights = stored(folder)
    save_file(
        weights | {"lm_head.weight": weights["transformer.wte.weight"].clone()}, folder / "model.safetensors"
    )
    take_in(folder, tmp_path / "run")
    save_file(
        weights | {"lm_head.weight": weights["transformer.wte.weight"] + 1}, folder / "model.safetensors"
    )
    with pytest.raises(CheckpointError, match=r"holds the tensor lm_head\.weight"):
        take_in(folder, tmp_path / "other")


def test_files_of_old(theirs, tmp_path):
    """As GPT-2 itself is published: names without their prefix, and attention's masks
    among the parameters.
    """
    folder = shutil.copytree(theirs("gpt2")[0], tmp_path / "theirs")
    old = {name.removeprefix("transformer."): tensor for name, tensor in stored(folder).items()}
    save_file(
        old | {f"h.{i}.attn.bias": torch.ones(1, 1, 16, 16) for i in range(3)}, folder / "model.safetensors"
    )
    run = take_in(folder, tmp_path / "run")
    assert relative(logits(imported_model(run), peers.tokens()[0]), theirs("gpt2")[1]) < TOLERANCE


# --- planted faults -----------------------------------------------------------------------------------------


def changed(mapped: list[Mapped], name: str, **functions: Callable[..., Any]) -> list[Mapped]:
    return [dataclasses.replace(tensor, **functions) if tensor.name == name else tensor for tensor in mapped]


def change_mapping(monkeypatch: pytest.MonkeyPatch, change: Callable[[list[Mapped]], list[Mapped]]) -> None:
    """Lets the exporter take another mapping of the tensors for the family's."""
    right = exporter.family_for_config

    def wrong(config):
        family = right(config)
        return dataclasses.replace(family, mapped=lambda config: change(family.mapped(config)))

    monkeypatch.setattr(exporter, "family_for_config", wrong)


@pytest.mark.parametrize("consistent", [False, True])
def test_swapped_tensors_are_not_exported(consistent, tmp_path, monkeypatch):
    """Gate and up have one shape.

    Swapped on the way out, they are not what was read; swapped both ways, logits alone tell.
    """
    random_run(tmp_path / "run", **OWN["llama, grouped queries"])
    name = "blocks.1.feed_forward.up.weight"

    def wrong(mapped):
        (up,) = (tensor for tensor in mapped if tensor.name == name)
        functions = {"split": lambda ours: up.split(ours.flip(0))}
        return changed(
            mapped,
            name,
            **functions,
            **({"join": lambda theirs: up.join(theirs).flip(0)} if consistent else {}),
        )

    change_mapping(monkeypatch, wrong)
    message = (
        r"logits of .* differ from LlamaForCausalLM's by"
        if consistent
        else r"tensor blocks\.1\.feed_forward\.up\.weight, read back,"
    )
    with pytest.raises(CheckpointError, match=message):
        export(tmp_path / "run", tmp_path / "out")
    assert_nothing_written(tmp_path / "out")


SMALL_MISTAKES = [
    ("layer_norm_epsilon", 1e-6),
    ("activation_function", "gelu"),
    ("scale_attn_weights", False),
    ("n_head", 2),
]


def test_no_tolerance_passes_what_a_small_mistake_makes() -> None:
    """Another epsilon of a norm, or the other form of gelu, moves logits by 1e-4.

    Large models are compared in fp32; no test has one.
    """
    assert max(compare.TOLERANCE.values()) < 1e-4


@pytest.mark.parametrize("key, value", SMALL_MISTAKES)
def test_a_wrong_setting_is_not_exported(key, value, tmp_path, monkeypatch):
    """All tensors are right, and the model is another: the least of these still stands
    out of the tolerance.
    """
    random_run(tmp_path / "run")
    right = exporter.family_for_config

    def wrong(config):
        family = right(config)
        return dataclasses.replace(family, write=lambda config: family.write(config) | {key: value})

    monkeypatch.setattr(exporter, "family_for_config", wrong)
    with pytest.raises(CheckpointError, match=r"logits of .* differ .* \(at most 1e-05; nothing was kept\)"):
        export(tmp_path / "run", tmp_path / "out")
    assert_nothing_written(tmp_path / "out")


def test_a_setting_read_wrongly_is_not_imported(theirs, tmp_path, monkeypatch):
    right = importer.family_for_hf

    def wrong(hf, path):
        family = right(hf, path)
        return dataclasses.replace(family, read=lambda hf: family.read(hf) | {"rope_theta": 10000.0})

    monkeypatch.setattr(importer, "family_for_hf", wrong)
    with pytest.raises(CheckpointError, match=r"logits of .* differ from LlamaForCausalLM's"):
        take_in(theirs("llama")[0], tmp_path / "run")
    assert_nothing_written(tmp_path / "run")


@pytest.mark.parametrize("layer, refused", [(0, True), (1, False)])
def test_compare_layers_compares_the_first(layer, refused, tmp_path, monkeypatch):
    """`--compare-layers 1` sees a fault of the first block, from the written files; of
    the second it cannot.
    """
    random_run(tmp_path / "run", **OWN["llama, grouped queries"])
    name = f"blocks.{layer}.norm1.weight"
    peer = f"model.layers.{layer}.input_layernorm.weight"
    opposite = {"split": lambda ours: {peer: -ours}, "join": lambda theirs: -theirs[peer]}
    change_mapping(monkeypatch, lambda mapped: changed(mapped, name, **opposite))
    if refused:
        with pytest.raises(CheckpointError, match="through the first 1 of 2 blocks"):
            export(tmp_path / "run", tmp_path / "out", "--compare-layers", 1)
    else:
        export(tmp_path / "run", tmp_path / "out", "--compare-layers", 1)


# --- around it ----------------------------------------------------------------------------------------------


def test_without_transformers(theirs, tmp_path, monkeypatch, capsys):
    """Exports, which are compared with it, say what to install; imports do with their
    round trip, and say so.
    """
    folder, expected = theirs("llama")
    monkeypatch.setitem(sys.modules, "transformers", None)
    run = take_in(folder, tmp_path / "run")
    assert "logits were not compared: transformers is not installed" in capsys.readouterr().out
    assert relative(logits(imported_model(run), peers.tokens()[0]), expected) < TOLERANCE
    with pytest.raises(ConfigError, match="pip install"):
        export(run, tmp_path / "out")
    assert_nothing_written(tmp_path / "out")


def test_what_is_there_is_not_touched(tmp_path):
    """Neither a folder with something in it, nor one that a conversion may be writing."""
    random_run(tmp_path / "run")
    (tmp_path / "out").mkdir()
    (tmp_path / "out/mine").write_text("")
    with pytest.raises(ConfigError, match="--output: .*/out is there already"):
        export(tmp_path / "run", tmp_path / "out")
    (tmp_path / "other.partial").mkdir()
    with pytest.raises(ConfigError, match=r"--output: .*/other\.partial is there"):
        export(tmp_path / "run", tmp_path / "other")
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["mine"] and list(
        (tmp_path / "other.partial").iterdir()
    ) == []


STOPS = [(KeyboardInterrupt(), KeyboardInterrupt), (OSError(28, "No space left on device"), CheckpointError)]


@pytest.mark.parametrize("error, raised", STOPS)
def test_nothing_half_written(error, raised, theirs, tmp_path, monkeypatch):
    """Interrupted or out of space at the third tensor: nothing is left, and a full disk is one line."""
    random_run(tmp_path / "run")

    def stopping(read):
        calls = iter(range(3))

        def stop(self, *args):
            if next(calls, None) is None:
                raise error
            return read(self, *args)

        return stop

    for kind, convert, source in ((Reader, export, tmp_path / "run"), (Folder, take_in, theirs("gpt2")[0])):
        with (
            monkeypatch.context() as patch,
            pytest.raises(raised, match="No space left" if raised is CheckpointError else None),
        ):
            patch.setattr(kind, "read", stopping(kind.read))
            convert(source, tmp_path / "out")
        assert_nothing_written(tmp_path / "out")


@pytest.mark.parametrize(
    "wrap",
    [
        pytest.param(lambda name: f"_orig_mod.{name}", id="torch.compile"),
        pytest.param(lambda name: f"module.{name}", id="DDP"),
        pytest.param(lambda name: f"base_model.model.{name}", id="PEFT"),
        pytest.param(lambda name: f"module._orig_mod.{name}", id="DDP of a compiled model"),
        pytest.param(lambda name: f"_orig_mod.module.{name}", id="a compiled DDP"),
        pytest.param(
            lambda name: re.sub(r"(layers\.\d+\.)", r"\1_orig_mod._checkpoint_wrapped_module.", name),
            id="compiled blocks with checkpoints",
        ),
        pytest.param(
            lambda name: "_fsdp_wrapped_module." + re.sub(r"(\.\d+\.)", r"\1_fsdp_wrapped_module.", name),
            id="FSDP",
        ),
    ],
)
@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_names_of_wrapped_models(
    name: str, wrap: Callable[[str], str], theirs: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A state dict that was saved from a wrapped model is that of the model inside, and compared as such."""
    folder = shutil.copytree(theirs(name)[0], tmp_path / "theirs")
    weights = stored(folder)
    for file in [*folder.glob("*.safetensors"), *folder.glob("*.index.json")]:
        file.unlink()
    save_file({wrap(key): value for key, value in weights.items()}, folder / "model.safetensors")
    run = take_in(folder, tmp_path / "run")
    assert "differ from" in capsys.readouterr().out, "logits must be compared"
    plain = take_in(theirs(name)[0], tmp_path / "plain")
    rows = peers.tokens()[0]
    assert torch.equal(logits(imported_model(run), rows), logits(imported_model(plain), rows))


@pytest.mark.parametrize("kind", sorted({kind for kind, _ in PEERS.values()}))
def test_a_missing_architecture_follows_from_the_model_type(kind: str) -> None:
    """As AutoModelForCausalLM chooses the class, which never looks at `architectures`."""
    mapping = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    settings: dict[str, Any] = {"model_type": kind}
    for missing in (settings, settings | {"architectures": None}, settings | {"architectures": []}):
        assert family_for_hf(missing, "x").architecture == mapping[kind]


def test_a_model_without_architectures_comes_in(theirs: Any, tmp_path: Path) -> None:
    folder = shutil.copytree(theirs("llama")[0], tmp_path / "theirs")
    settings = json.loads((folder / "config.json").read_text())
    del settings["architectures"]
    (folder / "config.json").write_text(json.dumps(settings))
    take_in(folder, tmp_path / "run")


def test_longrope_by_its_first_name_comes_in(theirs: Any, tmp_path: Path, capsys: Any) -> None:
    """The first Phi-3 files call it su, which transformers 5 does not read: a traceback."""
    folder = shutil.copytree(theirs("phi3, longrope")[0], tmp_path / "theirs")
    settings = json.loads((folder / "config.json").read_text())
    rope = settings.pop("rope_parameters")
    settings["rope_theta"] = rope["rope_theta"]
    settings["partial_rotary_factor"] = rope.get(
        "partial_rotary_factor", settings.get("partial_rotary_factor")
    )
    lists = {key: rope[key] for key in ("short_factor", "long_factor")}
    settings["rope_scaling"] = {"type": "su"} | lists
    settings["original_max_position_embeddings"] = rope["original_max_position_embeddings"]
    (folder / "config.json").write_text(json.dumps(settings))
    take_in(folder, tmp_path / "run")
    assert "differ from" in capsys.readouterr().out, "logits must be compared"
