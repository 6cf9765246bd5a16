"""Rules of latent attention: what it has not, and what has no meaning without it."""

from megacore.config.latent import LatentSettings
from megacore.config.schema import Config
from megacore.errors import ConfigError

ABSENT = {
    "position": "rope",
    "rotary_share": 1.0,
    "nope_every": None,
    "bias": False,
    "qkv_bias": False,
    "output_bias": False,
    "qk_norm": False,
    "norm_offset": False,
    "window": None,
    "attention_cap": None,
    "attention_sinks": False,
    "attention_gate": None,
    "parametrization": "standard",
}


def check_latent(config: Config) -> None:
    """Raises `ConfigError` for the first rule of latent attention that a resolved config breaks."""
    model = config.model
    if model.kv_rank is None:
        for key, field in LatentSettings.model_fields.items():
            if getattr(model, key) != field.default:
                raise ConfigError(
                    f"model.{key}",
                    "keys and values have no latent",
                    f"{field.default or 'null'}, or model.kv_rank=512",
                )
        return
    if config.kv_heads != model.num_heads:
        wrong = f"with model.kv_rank each of {model.num_heads} heads has a key of its own"
        raise ConfigError("model.num_kv_heads", wrong, f"{model.num_heads} or null")
    for key, right in ABSENT.items():
        if (value := getattr(model, key)) != right:
            words = {None: "null", False: "false"}.get(right, str(right))  # type: ignore[call-overload]
            raise ConfigError(
                f"model.{key}",
                f"latent attention does not go with {str(value).lower()}",
                f"{words}, or model.kv_rank=null",
            )
