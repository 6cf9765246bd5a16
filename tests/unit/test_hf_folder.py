"""`model.hf`: a folder of transformers gives the architecture and its sizes."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megacore.errors import CheckpointError, ConfigError
from megacore.model.plain import folder as hf_folder
from megacore.model.plain.folder import SIZES, read_config, transformers_config
from megacore.tools.inputs import Inputs
from megacore.tools.settings.load import Resolved, load
from megacore.tools.startup_lines import changes
from megacore.tools.verify.layouts import Layout
from megacore.tools.verify.shrink import load_whole, shrink, write_case
from tests.commands import ROOT

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 96,
    "vocab_size": 257,
    "max_position_embeddings": 128,
}
NO_DROPOUT = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
GPT2 = {"model_type": "gpt2", "n_embd": 64, "n_layer": 4, "n_head": 4, "vocab_size": 257, **NO_DROPOUT}
# What each class leaves to its own defaults, and how it calls the sizes.
FOLDERS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "qwen2": LLAMA | {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]},
    "qwen3": LLAMA | {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 16},
    "gpt2": GPT2,
    "mixtral": LLAMA | {"model_type": "mixtral", "architectures": None, "num_local_experts": 4},
    "granite": LLAMA | {"model_type": "granite", "architectures": None, "tie_word_embeddings": True},
}
OWN: dict[str, dict[str, Any]] = {
    "llama": {"norm_eps": 1e-6, "tie_embeddings": False, "head_size": 8},
    "qwen2": {"norm_eps": 1e-6, "tie_embeddings": False, "head_size": 8},
    "qwen3": {"norm_eps": 1e-6, "tie_embeddings": False, "head_size": 16},
    "gpt2": {"norm_eps": 1e-5, "tie_embeddings": True, "num_heads": 4, "num_kv_heads": 4, "head_size": 16}
    | {"ffn_size": 256, "max_positions": 1024},
    "mixtral": {"norm_eps": 1e-5, "tie_embeddings": False, "head_size": 8},
    "granite": {"norm_eps": 1e-6, "tie_embeddings": True, "head_size": 8},
}


def write_folder(path: Path, content: object) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def loaded(path: Path, content: object, *overrides: str, **model: Any) -> Resolved:
    """The config of a run next to a folder `hf` with this config.json."""
    write_folder(path / "hf", content)
    sections = {"model": {"hf": "hf", **model}, "train": {"seq_len": 64, "precision": "fp32"}}
    (path / "run.json").write_text(json.dumps(sections | {"log": {"dir": str(path / "run")}}))
    return load(str(path / "run.json"), list(overrides))


@pytest.mark.parametrize("name", FOLDERS)
def test_sizes_are_those_of_the_class(name: str, tmp_path: Path) -> None:
    """With the names and the defaults of transformers; otherwise another model would be trained."""
    resolved = loaded(tmp_path, FOLDERS[name])
    expected = {"num_layers": 4, "hidden_size": 64, "num_heads": 8, "num_kv_heads": 4, "ffn_size": 96}
    expected |= {"vocab_size": 257, "max_positions": 128, **OWN[name]}
    assert {size: getattr(resolved.config.model, size) for size in SIZES} == expected
    assert {resolved.origins[f"model.{size}"] for size in SIZES} == {"model.hf"}
    assert resolved.config.model.hf_config == FOLDERS[name]
    assert resolved.config.model.hf == str(tmp_path / "hf")


def test_stated_sizes_win_and_others_follow(tmp_path: Path) -> None:
    """Also in lists with an entry a layer, which a class compares with the number of layers."""
    content = FOLDERS["qwen3"] | {"layer_types": ["full_attention", "sliding_attention"] * 2}
    content |= {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}
    resolved = loaded(tmp_path, content, "model.num_layers=6", "model.vocab_size=100", hidden_size=32)
    hf = transformers_config(resolved.config)
    assert (hf.num_hidden_layers, hf.vocab_size, hf.hidden_size, hf.head_dim) == (6, 100, 32, 16)
    assert hf.layer_types == ["full_attention", "sliding_attention"] * 3
    origins = [resolved.origins[f"model.{key}"] for key in ("num_layers", "hidden_size", "num_heads")]
    assert origins == ["override", "file", "model.hf"]

    gpt2 = transformers_config(
        loaded(tmp_path, GPT2, "model.hidden_size=32", "model.max_positions=64").config
    )
    assert (gpt2.n_embd, gpt2.n_positions, gpt2.n_inner) == (32, 64, 128)


@pytest.mark.parametrize(
    "key, override",
    [("num_kv_heads", "model.num_kv_heads=2"), ("head_size", "model.head_size=8")],
)
def test_a_size_that_a_class_cannot_have(key: str, override: str, tmp_path: Path) -> None:
    """GPT-2 has no grouped heads: to ignore them would train another model than the config says."""
    with pytest.raises(ConfigError, match=f"config error: model.{key}: . is not what GPT2Config makes"):
        loaded(tmp_path, GPT2, override)


BAD_FILES = {
    "is not JSON": "{",
    "does not hold a JSON object": [],
    "states no model_type": {"hidden_size": 64},
    "auto_map names code": LLAMA | {"auto_map": {"AutoConfig": "code.Config"}},
    "quantized weights are not trained": LLAMA | {"quantization_config": {"bits": 4}},
    "there is no encoder": LLAMA | {"is_encoder_decoder": True},
    "only models of text": LLAMA | {"vision_config": {"hidden_size": 4}},
    "router's loss is not computed": FOLDERS["mixtral"] | {"output_router_logits": True},
    "attention_dropout is 0.1: modules are trained": LLAMA | {"attention_dropout": 0.1},
    "resid_pdrop is 0.2: modules are trained": GPT2 | {"resid_pdrop": 0.2, "summary_first_dropout": 0.1},
}


@pytest.mark.parametrize("wrong", BAD_FILES)
def test_a_wrong_file_is_rejected(wrong: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=wrong) as error:
        read_config(write_folder(tmp_path, BAD_FILES[wrong]) / "config.json")
    assert error.value.where == "model.hf"


BAD_CLASSES = {
    "has no language model of model_type lama": LLAMA | {"model_type": "lama"},
    "architectures names LlamaForTokenClassification": LLAMA
    | {"architectures": ["LlamaForTokenClassification"]},
    "attn_pdrop is 0.1 by default": {key: value for key, value in GPT2.items() if key != "attn_pdrop"},
    "is not a multiple of the number of attention heads": LLAMA | {"num_attention_heads": 5},
}


@pytest.mark.parametrize("wrong", BAD_CLASSES)
def test_what_only_transformers_knows_is_rejected(wrong: str, tmp_path: Path) -> None:
    """A dropout that no line of the file states would be left out of training in silence."""
    with pytest.raises(ConfigError, match=wrong) as error:
        loaded(tmp_path, BAD_CLASSES[wrong])
    assert error.value.where == "model.hf"


def test_a_wrong_file_is_rejected_before_torch(tmp_path: Path) -> None:
    """Importing torch and transformers takes many seconds on each of a job's ranks."""
    write_folder(tmp_path / "hf", LLAMA | {"resid_pdrop": 0.1})
    code = (
        "import sys; from megacore.errors import ConfigError; from megacore.tools.settings.load import load\n"
        "try: load('configs/gpt_tiny.json', ['model.hf=' + sys.argv[1]])\n"
        "except ConfigError as error: print(error.where, {'torch', 'transformers'} & {*sys.modules})"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "hf")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "model.hf set()\n"


@pytest.mark.parametrize(
    "setting",
    [
        "norm=rmsnorm",
        "activation=swiglu",
        "position=rope",
        "qkv_bias=false",
        "num_experts=4",
        "dropout=0.1",
        "z_loss=0.001",
        "chunked_loss=true",
        "window=8",
        "init_std=0.1",
        "parametrization=mup",
        "attention_scale=0.5",
    ],
)
def test_settings_of_other_layers_are_rejected(setting: str, tmp_path: Path) -> None:
    """The module would not heed them."""
    with pytest.raises(ConfigError, match="the module's own code decides") as error:
        loaded(tmp_path, LLAMA, f"model.{setting}")
    assert error.value.where == f"model.{setting.partition('=')[0]}"


BAD_TABLES = {
    "has no PARTS, which is all that model.hf takes of a file": "def layers(config): ...",
    "has a function build, so the model is not that of model.hf": "PARTS = {}\ndef build(config): ...",
}


@pytest.mark.parametrize("wrong", BAD_TABLES)
def test_a_file_next_to_a_folder_is_a_table(wrong: str, tmp_path: Path) -> None:
    """Of two places that give a model one would be ignored."""
    source = tmp_path / "table.py"
    source.write_text("PARTS = {'mlp.up': 'column'}")
    assert loaded(tmp_path, LLAMA, f"model.source={source}").config.model.is_custom
    source.write_text(BAD_TABLES[wrong])
    with pytest.raises(ConfigError, match=wrong):
        loaded(tmp_path, LLAMA, f"model.source={source}")


def test_settings_that_a_module_takes(tmp_path: Path) -> None:
    resolved = loaded(tmp_path, LLAMA, "model.attention=eager", "model.kernels=eager", "model.norm_eps=1e-4")
    assert transformers_config(resolved.config).rms_norm_eps == 1e-4


def test_a_run_needs_its_record_alone(tmp_path: Path) -> None:
    """A resumed run has the model that it began with, although its folder is gone, or has been edited."""
    first = loaded(tmp_path, LLAMA, "model.num_layers=2").config
    record = write_folder(tmp_path / "run", first.model_dump_json(by_alias=True)) / "config.json"
    assert changes(first, json.loads(record.read_text())) == []
    moved = first.model_copy(update={"model": first.model.model_copy(update={"hf": "elsewhere"})})
    assert 'model.hf="elsewhere" (was ' in changes(moved, json.loads(record.read_text()))[0]
    (tmp_path / "hf/config.json").unlink()
    (tmp_path / "hf").rmdir()
    assert load(str(record)).config.model == first.model
    assert load(str(tmp_path / "run.json"), ["model.num_layers=2"]).config.model.hf_config == LLAMA
    with pytest.raises(ConfigError, match="there is no folder hf"):
        load(str(tmp_path / "run.json"), ["checkpoint.resume=never"])

    write_folder(tmp_path / "hf", LLAMA | {"rms_norm_eps": 1e-4})
    assert load(str(record)).config.model == first.model
    with pytest.raises(ConfigError, match="model.hf_config: is not the content of"):
        load(str(record), ["log.dir=elsewhere"])


class FakeReader:
    """What `check_model` knows of a checkpoint."""

    def __init__(self, model: dict[str, Any]) -> None:
        from megacore.checkpoint.read import Reader

        self.path, self.state = Path("step_1"), {"model": model}
        self.check_model = Reader.check_model.__get__(self)


def test_a_checkpoint_is_of_one_architecture(tmp_path: Path) -> None:
    """Whatever the folder is called, and whatever version of transformers wrote it."""
    model = loaded(tmp_path, LLAMA).config.model.model_dump(mode="json")
    reader = FakeReader(model)
    moved = {"hf": "elsewhere", "hf_version": "5.0", "hf_config": LLAMA | {"transformers_version": "4"}}
    reader.check_model(model | moved)
    longer = model | {"hf_config": LLAMA | {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}}
    reader.check_model(longer, stretch=True)
    with pytest.raises(CheckpointError, match=r"rope_scaling=null \(now"):
        reader.check_model(longer)
    with pytest.raises(CheckpointError, match="hidden_act=null .now .*relu"):
        reader.check_model(model | {"hf_config": LLAMA | {"hidden_act": "relu"}}, stretch=True)
    with pytest.raises(CheckpointError, match="was written with a model.hf_config, and the config has no"):
        reader.check_model(model | {"hf_config": None})


def test_weights_of_a_folder(tmp_path: Path) -> None:
    """They are read where weights are drawn; another model's would be loaded in part, or not at all."""
    content = LLAMA | {
        "attention_dropout": 0.1,
        "rms_norm_eps": 1e-6,
        "head_dim": 8,
    }  # and the class's defaults
    weights = write_folder(tmp_path / "weights", content)
    (weights / "model.safetensors").write_bytes(b"")
    stated = f"checkpoint.weights={weights}"
    config = loaded(tmp_path, LLAMA, stated).config
    assert Inputs._weights(object.__new__(Inputs), config) is None
    with pytest.raises(ConfigError, match="model.num_layers: 2 is not 4, as in the weights"):
        loaded(tmp_path, LLAMA, stated, "model.num_layers=2")
    with pytest.raises(ConfigError, match="weights of another model than model.hf: hidden_act differ"):
        loaded(tmp_path, LLAMA | {"hidden_act": "relu"}, stated)
    with pytest.raises(ConfigError, match="checkpoint.weights: .* holds weights of a class of transformers"):
        load("configs/gpt_tiny.json", [stated])


def test_weights_that_are_not_read_are_named(tmp_path: Path) -> None:
    """Whoever names a folder with weights may think that training starts from them."""
    inputs = object.__new__(Inputs)
    inputs.checkpoint, inputs.config = None, loaded(tmp_path, LLAMA).config
    assert inputs.unread_weights is None
    (tmp_path / "hf/model.safetensors").write_bytes(b"")
    assert str(inputs.unread_weights).endswith(f"checkpoint.weights={tmp_path}/hf reads them")


def test_the_hub_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(
        ConfigError, match="some/model: there is no such folder, .* cannot be reached .`hf download"
    ):
        load("configs/gpt_tiny.json", ["model.hf=some/model"])


def test_a_hub_model_is_recorded_with_its_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a run resumed later has the same model, although the hub has another by then."""
    asked = []

    def download(name: str, file: str, revision: str | None) -> str:
        asked.append((name, file, revision))
        return str(write_folder(tmp_path / "snapshots/0123abcd", LLAMA) / file)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    (tmp_path / "run.json").write_text(json.dumps({"model": {"hf": "some/model"}, "train": {"seq_len": 64}}))
    resolved = load(str(tmp_path / "run.json"), ["model.hf_revision=main"])
    assert asked == [("some/model", "config.json", "main")]
    assert resolved.config.model.hf_revision == "0123abcd" and resolved.config.model.num_heads == 8


def test_a_missing_transformers_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise hf_folder.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(hf_folder.metadata, "version", version)
    with pytest.raises(ConfigError, match=r"transformers is not installed \(pip install -e '.\[hf\]'\)"):
        loaded(tmp_path, LLAMA)


@pytest.mark.parametrize("name", FOLDERS)
def test_the_small_model_of_a_proof(name: str, tmp_path: Path) -> None:
    """Its class takes the small sizes, and it has the kinds of layers that the user's has."""
    content = FOLDERS[name]
    if name == "qwen2":
        content = content | {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 3}
    loaded(tmp_path, content)
    user = load_whole(str(tmp_path / "run.json"), [])
    config = load(str(write_case(tmp_path, shrink(user, [Layout("one")], 3, "fp64")))).config
    hf = transformers_config(config)
    assert config.model.hidden_size < 64 and hf.vocab_size == config.model.vocab_size < 257
    assert config.model.tie_embeddings == user.model.tie_embeddings
    if name == "qwen2":
        assert hf.sliding_window < config.train.seq_len and len(set(hf.layer_types)) == 2
