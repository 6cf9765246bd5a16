"""The output of `pretrain.py --print-config`: every value of a run, and where it came from."""

import json
import textwrap

from megacore.config.schema import Config
from megacore.errors import ConfigError
from megacore.tools.settings.load import Resolved, flatten, smallest_world

WIDTH = 100
WIDEST_VALUE = 30  # columns that shorter values are padded to
# The headings of the table, and the origins of the values below each. Values that a user chose come first.
ORIGINS = {
    "Set by the config file, overrides or the ds_config": ("override", "file", "ds_config"),
    "Derived from other values": ("model.hf", "derived"),
    "Defaults": ("default",),
}


def config_table(loaded: Resolved, *, describe: bool = False) -> str:
    """Return a line for each value with its origin, in groups; with `describe` the key's meaning below it."""
    values = flatten(loaded.config.model_dump(mode="json", by_alias=True))
    if (digest := loaded.config.model.hf_digest) is not None:  # the object has dozens of keys
        values["model.hf_config"] = f"SHA-256 {digest}"
    texts = {key: json.dumps(value) for key, value in values.items()}
    meanings = descriptions(loaded.config) if describe else {}
    key_width = max(map(len, texts))
    value_width = min(WIDEST_VALUE, max(map(len, texts.values())))

    blocks = []
    for heading, origins in ORIGINS.items():
        lines = []
        for key, text in texts.items():
            origin = loaded.origins[key]
            if origin in origins:
                lines.append(f"{key:{key_width}}  {text:{value_width}}  {origin}")
                lines += wrapped(meanings.get(key, ""))
        if lines:
            blocks.append("\n".join([f"# {heading}", *lines]))
    return "\n\n".join(blocks)


def wrapped(meaning: str) -> list[str]:
    """Return the lines of a key's meaning, indented; none if there is no text."""
    indent = "    "
    return textwrap.wrap(meaning, WIDTH, initial_indent=indent, subsequent_indent=indent)


def descriptions(config: Config) -> dict[str, str]:
    """Return the meaning of every dotted key of a config, including the settings of a custom model."""
    texts = {}
    for section in type(config).model_fields:
        for name, field in type(getattr(config, section)).model_fields.items():
            texts[f"{section}.{field.alias or name}"] = field.description or "no description"
    return texts


def printed_world(
    path: str, overrides: list[str], world: int | None, launched: int | None
) -> tuple[int, str]:
    """Return the number of ranks that `--print-config` resolves a config for, and a line about it.

    Under a launcher these are the `launched` ranks. Without one they are `world`, or the fewest ranks that
    the config fits. The line is empty if the number needs no explanation. Raises `ConfigError` if `world`
    contradicts the launcher.
    """
    if launched is not None:
        if world not in (None, launched):
            wrong = f"{world} contradicts the launcher, which started {launched}"
            raise ConfigError("--world", wrong, "no --world, or no launcher")
        return launched, ""
    if world is not None:
        return world, ""
    fewest = smallest_world(path, overrides)
    ranks = "1 rank" if fewest == 1 else f"{fewest:,} ranks"
    line = f"# For {ranks}, the fewest that this config fits; --world N resolves it for N ranks."
    return fewest, line if fewest > 1 else ""
