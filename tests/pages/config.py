"""Generate docs/config.md, the reference of every config key, from the schema."""

import json
import re
import textwrap
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from megacore.config import Config
from megacore.config.experts import ExpertSettings
from megacore.config.latent import LatentSettings
from megacore.config.optim import OptimSchedule
from megacore.config.source import execute
from megacore.errors import ConfigError
from megacore.optimizers.rule import RULES

ROOT = Path(__file__).resolve().parents[2]
# A bound above this is far outside any real run and only noise for a reader.
LARGEST_SHOWN = 1000
WIDTH = 110  # of prose
PAGE = re.compile(r"docs/(\w+)\.md")

# The headings of the section `model`, and the keys below each. The page must have every key once.
MODEL_GROUPS = {
    "Sizes": "num_layers hidden_size num_heads num_kv_heads head_size ffn_size vocab_size",
    "Blocks and norms": "block norm norm_eps norm_offset norm_place branches embedding_norm activation bias "
    "residual_scale dropout",
    "Positions": "position max_positions rope_theta window_rope_theta rope_scaling rotary_share nope_every",
    "Attention": "attention attention_scale qkv_bias output_bias qk_norm qk_norm_heads window "
    "window_schedule global_every attention_cap attention_sinks attention_gate",
    "Embedding, logits and loss": "tie_embeddings embedding_scale head_bias logit_scale logit_cap "
    "chunked_loss z_loss",
    "Kernels": "kernels",
    "Initialization and mup": "init_std zero_init parametrization base_width base_head_size base_layers",
    "Multi-head latent attention": " ".join(LatentSettings.model_fields),
    "Experts": " ".join(ExpertSettings.model_fields),
    "Custom models": "source source_digest hf hf_revision hf_config hf_version",
}
EXAMPLES = "configs/forks"

HEAD = """# Config reference

All {count} keys of a config, by section. A config is a JSON file with one object per section, and
`section.key=value` on the command line overrides it:

```json
{{"model": {{"num_layers": 24}}, "train": {{"steps": 1000}}}}
```

```bash run
python launch/pretrain.py --config configs/gpt_tiny.json --print-config --describe model.num_layers=4
```

`--print-config` prints every value of a run and where it came from.
`--describe` adds the texts of this page.

Keys that you leave out have the default.
A default of `null` means that the value is derived or the feature is off, as the text says.
Bounds that are far outside any real run are not listed here.
An unknown key is an error that suggests the nearest known one.
"""


def page(config: type[Config] = Config) -> str:
    """Return the text of docs/config.md. Raises `ConfigError` if a key has no description."""
    schema = config.model_json_schema()
    count = sum(len(section_keys(schema, name)) for name in schema["properties"])
    parts = [HEAD.format(count=count)]
    for name, section in schema["properties"].items():
        definition = resolve(section, schema)
        parts.append(f"## `{name}`\n\n{first_paragraph(definition)}\n")
        keys = section_keys(schema, name)
        for heading, members in groups_of(name, keys).items():
            if heading:
                parts.append(f"### {heading}\n")
            parts.append(table(name, {key: keys[key] for key in members}, definition, schema, heading))
        for key, part in keys.items():
            parts += nested(f"{name}.{key}", part, schema)
    parts += examples(schema)
    return "\n".join(parts)


def section_keys(schema: Mapping[str, Any], section: str) -> dict[str, Any]:
    """Return the keys of a section with their JSON schemas."""
    properties: dict[str, Any] = resolve(schema["properties"][section], schema)["properties"]
    return properties


def groups_of(section: str, keys: Iterable[str]) -> dict[str, list[str]]:
    """Return the keys of a section by the heading they have on the page; the first heading may be empty.

    Raises `ConfigError` if a key has no heading.
    """
    if section == "model":
        groups = {heading: names.split() for heading, names in MODEL_GROUPS.items()}
    elif section == "optim":
        groups = {"": list(OptimSchedule.model_fields)}
        for rule in sorted(RULES.values(), key=lambda rule: (rule.name != "adamw", rule.name)):
            shared = [key for names in groups.values() for key in names]
            settings = [key for key in rule.settings_type.model_fields if key not in shared]
            groups |= {f"Settings of `{rule.name}`": settings} if settings else {}
    else:
        groups = {"": list(keys)}
    missing = sorted(set(keys) - {key for names in groups.values() for key in names})
    if missing:
        wrong = "has no heading in docs/config.md"
        raise ConfigError(
            f"{section}.{missing[0]}", wrong, "an entry in MODEL_GROUPS of tests/pages/config.py"
        )
    return groups


def table(
    place: str,
    keys: Mapping[str, Any],
    definition: Mapping[str, Any],
    schema: Mapping[str, Any],
    heading: str = "",
) -> str:
    """Return a Markdown table of keys. Raises `ConfigError` if one has no description."""
    optimizer = heading.partition("`")[2].rstrip("`")
    lines = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for key, part in keys.items():
        if not (meaning := part.get("description", "")):
            raise ConfigError(f"{place}.{key}", "has no description", "Field(..., description=...)")
        meaning = meaning.removeprefix(f"{optimizer}: ") if optimizer else meaning
        default = "required" if key in definition.get("required", ()) else f"`{default_text(part)}`"
        row = f"`{key}`", type_text(part, schema, f"{place}.{key}"), default, sentence(meaning)
        lines.append(f"| {' | '.join(escaped(cell) for cell in row)} |")
    return "\n".join(lines) + "\n"


def default_text(part: Mapping[str, Any]) -> str:
    """Return a key's default as JSON."""
    return json.dumps(part.get("default", part.get("const")), ensure_ascii=False)


def sentence(text: str) -> str:
    """Return a description with links to pages and, unless it begins with a value, a capital letter."""
    first = text.split(maxsplit=1)[0]
    begins_with_value = first.endswith(":") or not first[0].isalpha() or any(c in first for c in "._`")
    text = PAGE.sub(r"[\1](\1.md)", text)
    return text if begins_with_value else text[0].upper() + text[1:]


def escaped(cell: str) -> str:
    """Return a text for a cell of a Markdown table."""
    return cell.replace("|", "\\|")


def resolve(part: Mapping[str, Any], schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the definition that a part of a JSON schema refers to, or the part."""
    if "$ref" not in part:
        return dict(part)
    definition: dict[str, Any] = schema["$defs"][part["$ref"].removeprefix("#/$defs/")]
    return definition


def objects_in(part: Mapping[str, Any]) -> list[str]:
    """Return the references to objects in a key's JSON schema, through unions and lists."""
    if "$ref" in part:
        return [part["$ref"]]
    options = [*part.get("anyOf", ()), *part.get("oneOf", ()), *([part["items"]] if "items" in part else [])]
    return [reference for option in options for reference in objects_in(option)]


def type_text(part: Mapping[str, Any], schema: Mapping[str, Any], key: str) -> str:
    """Return the type of a value in words or as the list of its values."""
    if options := part.get("anyOf") or part.get("oneOf"):
        texts = [type_text(option, schema, key) for option in options]
        text = " or ".join(dict.fromkeys(texts))  # several kinds of objects are one word
        return text.replace("true or false or", "true, false or")
    if "$ref" in part:
        anchor = key.replace(".", "")
        return f"[object](#{anchor})"
    if "enum" in part or "const" in part:
        return " | ".join(f"`{value}`" for value in part.get("enum") or [part["const"]])
    if "pattern" in part:
        return f"`{part['title']}`"
    if part.get("type") == "array":
        if "prefixItems" in part:
            return f"[{', '.join(item_text(item, schema, key) for item in part['prefixItems'])}]"
        return f"list of {plural(item_text(part['items'], schema, key))}"
    names = {"boolean": "true or false", "string": "string", "null": "null", "object": "object"}
    if part.get("type") in names:
        return names[part["type"]]
    return f"{part['type']}{bounds(part)}"


def item_text(part: Mapping[str, Any], schema: Mapping[str, Any], key: str) -> str:
    """Return the type of an element of a list: its title if the schema gives it one."""
    title = str(part.get("title", ""))
    return title if title.islower() else type_text(part, schema, key)


def plural(text: str) -> str:
    """Return the plural of a type."""
    word, space, rest = text.partition(" ")
    if word in ("integer", "number", "string"):
        return f"{word}s{space}{rest}"
    return text.replace("[object]", "[objects]")


def bounds(part: Mapping[str, Any]) -> str:
    """Return the bounds of a number, such as ` ≥ 1`, without those that no real value comes near."""
    least, above = part.get("minimum"), part.get("exclusiveMinimum")
    most, below = part.get("maximum"), part.get("exclusiveMaximum")
    texts = []
    if above is not None:
        texts.append(f"≥ {above + 1}" if part["type"] == "integer" else f"> {above:g}")
    elif least is not None:
        texts.append("> 0" if 0 < least < 1 else f"≥ {least:g}")
    if below is not None:
        texts.append(f"< {below:g}")
    elif most is not None and most <= LARGEST_SHOWN:
        texts.append(f"≤ {most:g}")
    return " " + " and ".join(texts) if texts else ""


def nested(key: str, part: Mapping[str, Any], schema: Mapping[str, Any]) -> list[str]:
    """Return the heading and the tables of the objects that a key takes; empty if it takes none."""
    references = objects_in(part)
    parts = [f"### `{key}`\n"] if references else []
    for reference in references:
        definition = resolve({"$ref": reference}, schema)
        keys = {
            name: field
            for name, field in definition["properties"].items()
            if "description" in field or name not in optimizer_settings()
        }
        parts.append(f"{paragraphs(definition)}\n")
        parts.append(table(key, keys, definition, schema))
    return parts


def optimizer_settings() -> set[str]:
    """Return the names of all optimizers' settings, which an entry of `optim.groups` takes too."""
    return {key for rule in RULES.values() for key in rule.settings_type.model_fields}


def first_paragraph(definition: Mapping[str, Any]) -> str:
    """Return the first paragraph of a section's docstring, on one line."""
    return " ".join(str(definition.get("description", "")).partition("\n\n")[0].split())


def paragraphs(definition: Mapping[str, Any]) -> str:
    """Return a section's docstring with each paragraph on one line."""
    texts = str(definition.get("description", "")).split("\n\n")
    return "\n\n".join(textwrap.fill(" ".join(text.split()), WIDTH) for text in texts)


def examples(schema: Mapping[str, Any]) -> list[str]:
    """Return the tables of the settings that the example models add to the section `model`."""
    builtin = section_keys(schema, "model")
    parts = [
        "## Settings of the example models\n",
        "A custom model (`model.source`) can add keys to the section `model` and change defaults.\n"
        f"These are the keys of the models in `{EXAMPLES}/`.\n"
        "[Your own model](blocks.md) declares its keys in the same way, in a class `Settings`.\n",
    ]
    for path in sorted((ROOT / EXAMPLES).glob("*.py")):
        try:
            source = execute(str(path), None)
        except ConfigError:  # a script that is no model, such as one that exports weights
            continue
        own_schema = source.schema.model_json_schema()
        keys = {
            key: part
            for key, part in section_keys(own_schema, "model").items()
            if key not in builtin or default_text(part) != default_text(builtin[key])
        }
        if keys:
            definition = resolve(own_schema["properties"]["model"], own_schema)
            parts.append(f"### {path.name}\n")
            parts.append(table("model", keys, definition, own_schema))
    return parts
