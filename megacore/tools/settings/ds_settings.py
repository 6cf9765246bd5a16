"""The ds_config that DeepSpeed gets, once `ds_config` has checked it and the run has taken over
what it says of the run itself.
"""

import json
from typing import Any

from megacore.config.schema import Config
from megacore.errors import ConfigError
from megacore.files import read_json, read_text
from megacore.tools.settings.ds_keys import REFUSED

KEY = "engine.config"
EXAMPLE = "configs/deepspeed/zero2.json"
OWN = ("scheduler", "activation_checkpointing", "optimizer")  # what the run does itself


def ds_settings(config: Config) -> dict[str, Any]:
    """The ds_config of a resolved config, without what the run does itself.

    Every "auto", and every key that the run's config decides, is filled in. For sizes that are "auto" it
    takes the values of the Hugging Face trainer.
    """
    complete = without_refused(read(config.engine.config))
    settings = {name: value for name, value in complete.items() if name not in OWN}
    for path, (_, value) in decided(config).items():
        section, name = place_of(settings, path)
        section[name] = value
    hidden_size = config.model.hidden_size
    zero = settings.setdefault("zero_optimization", {})
    zero.setdefault("stage", 0)
    sizes = {
        "reduce_bucket_size": hidden_size**2,
        "stage3_prefetch_bucket_size": int(0.9 * hidden_size**2),
        "stage3_param_persistence_threshold": 10 * hidden_size,
    }
    zero |= {name: value for name, value in sizes.items() if zero.get(name) == "auto"}
    for offload in ("offload_optimizer", "offload_param"):
        section = zero.get(offload) or {}
        if section.get("device") == "nvme" and section.get("nvme_path", "auto") == "auto":
            section["nvme_path"] = f"{config.log.dir}/swap"
    # Without these DeepSpeed would accumulate and reduce in the parameters' precision, keep bf16 gradients
    # beside their fp32 sums, and build its own AdamW.
    defaults = {
        "communication_data_type": "fp32",
        "data_types.grad_accum_dtype": "fp32",
        "zero_force_ds_cpu_optimizer": False,
    }
    if config.train.precision == "bf16":
        defaults["bf16.immediate_grad_update"] = True
    for path, default in defaults.items():
        section, name = place_of(settings, path)
        if section.get(name, "auto") == "auto":
            section[name] = default
    return settings


def without_refused(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a ds_config without the keys that are not passed on, which ask for nothing if they have passed.

    DeepSpeed raises for some of them even so, such as {"enabled": false} in a section without that key.
    """
    return {
        name: without_refused(value, f"{prefix}{name}.") if isinstance(value, dict) else value
        for name, value in settings.items()
        if f"{prefix}{name}" not in REFUSED
    }


def decided(config: Config) -> dict[str, tuple[str, Any]]:
    """What the run's config decides, by dotted path of the ds_config: the run's key, and the value."""
    train = config.train
    return {
        "train_batch_size": ("train.global_batch_size", train.global_batch_size),
        "train_micro_batch_size_per_gpu": ("train.micro_batch_size", train.micro_batch_size),
        "gradient_accumulation_steps": ("the microbatches a step", config.num_microbatches),
        "gradient_clipping": ("optim.grad_clip", config.optim.grad_clip),
        "bf16.enabled": ("train.precision", train.precision == "bf16"),
        "fp16.enabled": ("train.precision", train.precision == "fp16"),
    }


def read(source: str | dict[str, Any] | None) -> dict[str, Any]:
    """Reads the ds_config, or copies it."""
    if source is None:
        raise ConfigError(
            KEY, "the deepspeed engine needs a ds_config", f"an object or a file's path, such as {EXAMPLE}"
        )
    if isinstance(source, dict):
        return json.loads(json.dumps(source))
    try:
        settings = read_json(read_text(source))
    except OSError as error:
        raise ConfigError(
            KEY, f"cannot read {source}: {error.strerror}", f"an object, or a JSON file such as {EXAMPLE}"
        ) from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(KEY, f"{source} is no JSON: {error}", "a ds_config without comments") from None
    if not isinstance(settings, dict):
        raise ConfigError(KEY, f"{source} holds no object", f"a ds_config, such as {EXAMPLE}")
    return settings


def place_of(settings: dict[str, Any], path: str) -> tuple[dict[str, Any], str]:
    """The object with a dotted path's last name, and that name. Missing objects are made."""
    *sections, name = path.split(".")
    for section in sections:
        settings = settings.setdefault(section, {})
    return settings, name
