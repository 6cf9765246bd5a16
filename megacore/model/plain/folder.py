"""`model.hf`: a folder in the format of transformers, or a name on the Hugging Face hub.

Its config.json is read, and what can be wrong in it is rejected, before transformers is imported, which
imports torch.
"""

import os
import re
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megacore.config.model import ModelConfig
from megacore.config.schema import Config
from megacore.errors import ConfigError
from megacore.files import read_json, read_text

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

KEY = "model.hf"
FILE = "config.json"
MOST_BYTES = 16 << 20
RIGHT = f"a folder with a {FILE} of transformers, or a name on the hub such as Qwen/Qwen3-0.6B"
INSTALL = "pip install -e '.[hf]'"
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
NESTED = ("text_config", "vision_config", "audio_config")
# Keys of a config.json that do not decide what is computed.
NEUTRAL = {"transformers_version", "architectures", "dtype", "torch_dtype", "_name_or_path", "use_cache"}
UNUSED_DROPOUT = ("classifier", "summary")  # of heads that a language model does not have

# What transformers calls each size of section `model`. A class has the first of these names that it knows,
# or none.
SIZES = {
    "num_layers": ("num_hidden_layers",),
    "hidden_size": ("hidden_size",),
    "num_heads": ("num_attention_heads",),
    "num_kv_heads": ("num_key_value_heads",),
    "head_size": ("head_dim",),
    "ffn_size": ("intermediate_size", "n_inner", "ffn_dim"),
    "vocab_size": ("vocab_size",),
    "max_positions": ("max_position_embeddings",),
    "norm_eps": ("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps", "norm_epsilon", "norm_eps"),
    "tie_embeddings": ("tie_word_embeddings",),
}


def transformers_version() -> str:
    """Return the installed version of transformers, without importing it. Raises `ConfigError`."""
    try:
        return metadata.version("transformers")
    except metadata.PackageNotFoundError:
        raise ConfigError(KEY, "transformers is not installed", INSTALL) from None


def holds_weights(path: str | Path) -> bool:
    """Whether a path is a folder of transformers with weights, and not a checkpoint of megacore."""
    # `os.path.isfile` is false for a name that no file can have, where `Path.is_file` raises.
    return os.path.isfile(Path(path) / FILE) and any(Path(path).glob("*.safetensors"))


def download_config(name: str, revision: str | None) -> Path:
    """Return the path of a hub model's config.json, which huggingface_hub downloads if it must.

    Every rank may call it: the cache has a lock, so that the processes of a host share one download. A file
    of a stated commit that is in the cache is not asked for again.
    """
    transformers_version()  # which brings huggingface_hub
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import LocalEntryNotFoundError
    from huggingface_hub.utils import logging

    logging.set_verbosity_error()  # a line for each retry, on each rank
    where = "there is no such folder, and the model of this name on the hub"
    try:
        return Path(hf_hub_download(name, FILE, revision=revision))
    except LocalEntryNotFoundError:
        right = f"`hf download {name} {FILE}` where there is a network, or a folder with a {FILE}"
        raise ConfigError(
            KEY, f"{name}: {where} is not in the cache, and the hub cannot be reached", right
        ) from None
    except Exception as error:  # of the client, of the server, or of the cache's disk
        lines = str(error).strip().splitlines()
        raise ConfigError(
            KEY, f"{name}: {where} cannot be read: {lines[0] if lines else error!r}", RIGHT
        ) from error


def read_folder(name: str, revision: str | None = None) -> tuple[dict[str, Any], str | None]:
    """Return the content of the config.json that `model.hf` names, and for a name on the hub its commit.

    A folder that exists wins over a name on the hub. Raises `ConfigError`.
    """
    if Path(name).is_dir():
        if revision is not None:
            raise ConfigError("model.hf_revision", f"{name} is a folder, which has no revisions", "null")
        return read_config(Path(name) / FILE), None
    if not HUB_NAME.fullmatch(name):
        raise ConfigError(KEY, f"there is no folder {name}", RIGHT)
    path = download_config(name, revision)
    return read_config(path), path.parent.name  # snapshots/COMMIT/config.json


def read_config(path: str | Path) -> dict[str, Any]:
    """Return the content of a config.json. Raises `ConfigError` for what cannot be trained."""
    content = read_content(path)
    check_content(content)
    return content


def read_content(path: str | Path) -> dict[str, Any]:
    """Return the object in a config.json, whatever it says. Raises `ConfigError`."""
    try:
        content = read_json(read_text(path, MOST_BYTES))
    except OSError as error:
        raise ConfigError(KEY, f"cannot read {path}: {error.strerror}", RIGHT) from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(KEY, f"{path} is not JSON: {error}", RIGHT) from None
    if not isinstance(content, dict):
        raise ConfigError(KEY, f"{path} does not hold a JSON object", RIGHT)
    return content


def differing_keys(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Return the keys in which two config.json are not of the same model. Dropout does not count."""
    return sorted(
        key
        for key in {**one, **other}
        if key not in NEUTRAL and "drop" not in key and one.get(key) != other.get(key)
    )


def check_weights(config: Config) -> None:
    """Raise `ConfigError` if `checkpoint.weights` is a folder of transformers, and the model is another."""
    weights, model = config.checkpoint.weights, config.model
    if weights is None or not holds_weights(weights):
        return
    if model.hf_config is None:
        right = "a model.hf, or what launch/checkpoint.py import writes of them"
        raise ConfigError("checkpoint.weights", f"{weights} holds weights of a class of transformers", right)
    content = read_content(Path(weights) / FILE)
    content |= {key: 0.0 for key in (*content, *model.hf_config) if "drop" in key}
    # Compared as objects, because one file may state what the other leaves to the class.
    held, own = build_config(content, {}), build_config(model.hf_config, {})
    if keys := differing_keys(held.to_dict(), own.to_dict()):
        wrong = f"{weights} holds weights of another model than model.hf: {', '.join(keys)} differ in {FILE}"
        raise ConfigError("checkpoint.weights", wrong, f"model.hf={weights}")
    for key, size in sizes_in(own).items():
        if (value := getattr(model, key)) != size:
            raise ConfigError(
                f"model.{key}", f"{value} is not {size}, as in the weights of {weights}", f"{size}"
            )


def check_content(content: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for a config.json whose model is not one that transformers' own code computes, or
    that trains with something that megacore does not do.
    """

    def reject(wrong: str, right: str) -> None:
        raise ConfigError(KEY, f"{FILE}: {wrong}", right)

    if not isinstance(content.get("model_type"), str):
        reject("it states no model_type", 'the name of a class of transformers, such as "llama"')
    if content.get("auto_map"):
        reject("auto_map names code, which is not executed", "a model.source with PARTS and build")
    if content.get("quantization_config"):
        reject("quantization_config: quantized weights are not trained", "the config of the full model")
    if content.get("is_encoder_decoder"):
        reject("is_encoder_decoder: there is no encoder", "a model with a decoder alone")
    for name in NESTED:
        if content.get(name) is not None:
            reject(f"{name}: only models of text are trained", "a folder with the text model's config alone")
    if content.get("output_router_logits"):
        reject("output_router_logits: the router's loss is not computed", "false there")
    if rates := dropout_in(content):
        reject(f"{', '.join(rates)}: modules are trained without dropout", f"0.0 for each in {FILE}")


def dropout_in(values: Mapping[str, Any]) -> list[str]:
    """Return each dropout above 0 among a model's settings, as text."""
    return [
        f"{name} is {value}"
        for name, value in values.items()
        if ("drop" in name and not name.startswith(UNUSED_DROPOUT))
        and (isinstance(value, int | float) and value > 0)
    ]


def transformers_config(config: Config) -> "PreTrainedConfig":
    """Return the config object of transformers with the sizes of a resolved config.

    Raises `ConfigError` for a size that its class cannot have.
    """
    assert config.model.hf_config is not None, "config was not resolved"
    return build_config(config.model.hf_config, {name: getattr(config.model, name) for name in SIZES})


def sizes_of(content: Mapping[str, Any], stated: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the sizes of section `model` that a config.json gives, where its class's defaults count too.

    `stated`: sizes that the user has set, on which others may depend.
    """
    stated = {name: value for name, value in (stated or {}).items() if name in SIZES and value is not None}
    return sizes_in(build_config(content, stated))


def class_of(content: Mapping[str, Any]) -> "type[PreTrainedConfig]":
    """Return a config.json's class. Raises `ConfigError` if it is not one of a language model."""
    version = transformers_version()
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    kind: str = content.get("model_type", "")
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind)
    if kind not in CONFIG_MAPPING or model_class is None:
        wrong = f"{FILE}: transformers {version} has no language model of model_type {kind}"
        raise ConfigError(KEY, wrong, "a model that AutoModelForCausalLM knows")
    if model_class not in (architectures := content.get("architectures") or [model_class]):
        wrong = f"{FILE}: architectures names {', '.join(map(str, architectures))}"
        raise ConfigError(KEY, wrong, f"{model_class}, the language model of {kind}")
    config_class: type[PreTrainedConfig] = CONFIG_MAPPING[kind]
    return config_class


def build_config(content: Mapping[str, Any], sizes: Mapping[str, Any]) -> "PreTrainedConfig":
    """Return the config object of a config.json with other sizes in it. Raises `ConfigError`."""
    config_class = class_of(content)
    try:
        built = config_class.from_dict(resized(config_class, content, sizes))
        has, rates = sizes_in(built), dropout_in(built.to_dict())
    except Exception as error:
        wrong = f"transformers: {' '.join(str(error).split())}"
        raise ConfigError(KEY, wrong, f"a {FILE} that it takes") from error

    if rates:  # by the class's default: the file states none
        wrong = f"{FILE}: {', '.join(rates)} by default, and modules are trained without dropout"
        raise ConfigError(KEY, wrong, f"0.0 for each in {FILE}")
    for key, size in sizes.items():
        value = has.get(key, ModelConfig.model_fields[key].default)  # a class without such a setting
        if value not in (size, None):
            wrong = f"{size} is not what {config_class.__name__} makes of all settings, which is {value}"
            raise ConfigError(f"model.{key}", wrong, f"{value}, or other sizes that fit")
    return built


def resized(
    config_class: "type[PreTrainedConfig]", content: Mapping[str, Any], sizes: Mapping[str, Any]
) -> dict[str, Any]:
    """Return a config.json's content with other sizes, and with what must fit them."""
    # These ids are no part of the computation, and may be beyond a smaller vocabulary.
    values = {**content, "bos_token_id": 0, "eos_token_id": 0}
    original = config_class.from_dict(values)
    own_name = original.attribute_map.get
    values = {own_name(name, name): value for name, value in values.items()}
    for key, size in sizes.items():
        if (name := name_in(original, key)) is not None:
            values[own_name(name, name)] = size

    before, layers = original.num_hidden_layers, sizes.get("num_layers")
    for name, value in values.items():  # lists with an entry a layer, such as layer_types
        is_per_layer = isinstance(value, list) and len(value) == before and re.search("layer|_types", name)
        if layers is not None and is_per_layer:
            values[name] = [value[number % before] for number in range(layers)]
    if (original.pad_token_id or 0) >= sizes.get("vocab_size", original.vocab_size):
        values["pad_token_id"] = None
    return values


def name_in(config: "PreTrainedConfig", size: str) -> str | None:
    """Return what a class of transformers calls a size; None if it has no such setting."""
    for name in SIZES[size]:
        attribute = getattr(type(config), name, None)
        is_computed = isinstance(attribute, property) and attribute.fset is None  # as Falcon's head_dim
        if hasattr(config, name) and not is_computed:
            return name
    return None


def sizes_in(config: "PreTrainedConfig") -> dict[str, Any]:
    """Return the sizes of a config object of transformers, as section `model` has them."""
    names = {size: name_in(config, size) for size in SIZES}
    sizes: dict[str, Any] = {
        size: None if name is None else getattr(config, name) for size, name in names.items()
    }
    for size, value in {
        "num_kv_heads": sizes["num_heads"],
        "head_size": sizes["hidden_size"] // sizes["num_heads"],
        "ffn_size": 4 * sizes["hidden_size"],
    }.items():
        if sizes[size] is None:
            sizes[size] = value
    return {size: value for size, value in sizes.items() if value is not None}
