"""Makes a checked config from a file and overrides. It knows where each of its values came from."""

import json
import os
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from math import gcd
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from megacore.config.optim_groups import KEY as GROUPS
from megacore.config.schema import Config
from megacore.config.source import DIGEST, KEY, SETTINGS, Source, execute, source_of
from megacore.errors import ConfigError
from megacore.files import read_json, read_text
from megacore.model.plain.folder import KEY as HF
from megacore.model.plain.folder import (
    SIZES,
    check_content,
    differing_keys,
    read_folder,
    sizes_of,
    transformers_version,
)
from megacore.optimizers.rule import RULES
from megacore.records import LARGEST
from megacore.section import MOST_RANKS
from megacore.tools.settings.derive import derive
from megacore.tools.settings.ds_config import check_ds_config, stated
from megacore.tools.settings.other_words import meant_key, suggested_override
from megacore.tools.settings.validation import check, check_groups, check_paths, check_unused

LONGEST = 200  # characters of a value in a message
# What a JSON schema says, in words that a user knows.
TYPES = {
    "integer": "a whole number",
    "number": "a number",
    "string": "a string",
    "boolean": "true or false",
    "null": "null",
}
TYPES |= {"object": "an object"}
BOUNDS = {
    "exclusiveMinimum": "above",
    "minimum": "at least",
    "exclusiveMaximum": "below",
    "maximum": "at most",
}


@dataclass(frozen=True)
class Resolved:
    """A checked config, and the origin of each dotted key: default, file, override, ds_config, model.hf or
    derived.
    """

    config: Config
    origins: dict[str, str]


def load(path: str, overrides: list[str] | None = None, world_size: int = 1) -> Resolved:
    """Reads a config file, applies `section.key=value` overrides, derives open values, and checks all of it.

    Raises `ConfigError` for the first thing that is wrong. `world_size` is the number of ranks that started.
    """
    raw = read(path)
    recorded = raw.get("model", {}).get("hf_config")
    loaded = resolve(raw, overrides or [], Path(path).stem, world_size)
    if recorded is not None:
        check_recorded(loaded.config)
    return loaded


def resolve(raw: dict[str, Any], overrides: list[str], name: str, world_size: int) -> Resolved:
    """Does the work of `load` for given sections, such as those of a checkpoint.

    Overrides are written into `raw`.

    `name` is the run's name, after which its folder is named.
    """
    written = flatten(raw)
    overridden = apply(overrides, raw)
    config = validate(raw)
    origins = dict.fromkeys(flatten(type(config)().model_dump(by_alias=True)), "default")
    origins.update(dict.fromkeys((key for key in written if key in origins), "file"))
    origins.update(dict.fromkeys(overridden, "override"))
    if config.engine.kind == "deepspeed" and config.engine.config is not None:
        taken = {key: found for key, found in stated(config).items() if origins[key] == "default"}
        for key, (_, value) in taken.items():
            set_value(raw, key, value)
            origins[key] = "ds_config"
        try:
            config = validate(raw)
        except ConfigError as error:
            place = taken.get(error.where, (None, None))[0]
            raise (
                error if place is None else ConfigError(f"engine.config: {place}", error.wrong, error.right)
            ) from None
    if config.model.hf is not None:
        config = with_architecture(config, name, raw, origins)
    check_paths(config)
    if world_size > MOST_RANKS:
        raise ConfigError(
            "parallel",
            f"{str(world_size)[:LONGEST]} ranks are more than any run has",
            f"at most {MOST_RANKS:,}",
        )
    derived = derive(config, name, world_size)
    if (source := source_of(config)) is not None and config.model.source_digest is None:
        derived[DIGEST] = source.digest
    for key, value in derived.items():
        set_value(raw, key, value)
        origins[key] = "derived"
    config = validate(raw)
    check(config, world_size)
    check_ds_config(config)
    if RULES[config.optim.kind].hidden_only:
        config = with_others(config, raw, origins)
    check_unused(config)
    return Resolved(config, origins)


def with_architecture(config: Config, name: str, raw: dict[str, Any], origins: dict[str, str]) -> Config:
    """Return the config with the architecture of `model.hf`, and its sizes where no others are stated."""
    model = config.model
    content, commit = model.hf_config, model.hf_revision
    if content is None:
        content, commit = recorded_architecture(config, name) or read_folder(str(model.hf), commit)
    check_content(content)
    stated = {size: getattr(model, size) for size in SIZES if origins[f"model.{size}"] != "default"}
    # A recorded config states all sizes, and transformers is not imported for it.
    sizes = sizes_of(content, stated) if len(stated) < len(SIZES) else {}

    derived = {"hf_config": content, "hf_revision": commit, "hf_version": transformers_version()}
    for key, value in derived.items():
        if getattr(model, key) != value:
            set_value(raw, f"model.{key}", value)
            origins[f"model.{key}"] = "derived"
    open_sizes = {f"model.{size}": value for size, value in sizes.items() if size not in stated}
    for key, value in open_sizes.items():
        set_value(raw, key, value)
        origins[key] = HF
    try:
        return validate(raw)
    except ConfigError as error:
        if error.where not in open_sizes:
            raise
        raise ConfigError(HF, f"{error.where}: {error.wrong}", error.right) from None


def recorded_architecture(config: Config, name: str) -> tuple[dict[str, Any], str | None] | None:
    """Return what the run to be resumed has recorded of `model.hf`, if that is not a folder any more.

    So a run resumes without the folder, and one of a hub's model with the commit that it began with.
    """
    model, resume = config.model, config.checkpoint.resume
    if Path(str(model.hf)).is_dir() or resume == "never":
        return None
    run = Path(config.log.dir or f"runs/{name}") if resume == "auto" else Path(resume)
    for folder in (run, *list(run.parents)[:2]):  # a checkpoint is two folders below its run's
        with suppress(OSError, ValueError, LookupError, TypeError):
            recorded = json.loads(read_text(folder / "config.json"))["model"]
            if Path(recorded["hf"]).name == Path(str(model.hf)).name and isinstance(
                recorded["hf_config"], dict
            ):
                return recorded["hf_config"], recorded["hf_revision"]
    return None


def check_recorded(config: Config) -> None:
    """Raise `ConfigError` if the folder of `model.hf` has changed since a run recorded it, and another run is
    to begin with that record.
    """
    model = config.model
    if model.hf is None or not Path(model.hf).is_dir():
        return
    is_resumed = config.checkpoint.resume != "never" and (Path(str(config.log.dir)) / "config.json").is_file()
    if is_resumed or model.hf_config is None:
        return
    if keys := differing_keys(read_folder(model.hf)[0], model.hf_config):
        wrong = f"is not the content of {model.hf}/config.json: {', '.join(keys)} differ"
        right = "null, which takes that file's, or a folder with the recorded content"
        raise ConfigError("model.hf_config", wrong, right)


def with_others(config: Config, raw: dict[str, Any], origins: dict[str, str]) -> Config:
    """The config with AdamW for what `optim.kind` cannot or should not update, as
    one more entry of `optim.groups`.
    """
    entry = import_module("megacore.tools.settings.default_groups").others_entry(config)  # which loads torch
    if entry is None:
        return config
    set_value(raw, GROUPS, [*raw.get("optim", {}).get("groups", []), entry])
    origins[GROUPS] = "derived"
    config = validate(raw)
    check_groups(config)
    return config


def smallest_world(path: str, overrides: list[str]) -> int:
    """The number of ranks that the config asks for, with one data rank if it leaves their number
    open, or the fewest that experts need.
    """
    raw = read(path)
    apply(overrides, raw)
    parallel = validate(raw).parallel
    experts = parallel.expert * (parallel.expert_tensor or parallel.tensor)
    fewest = experts // gcd(experts, parallel.context * parallel.tensor)
    return parallel.ranks_besides_data * (fewest if parallel.data == "auto" else parallel.data)


def read(path: str) -> dict[str, Any]:
    """Reads the config file's JSON object."""
    try:
        raw = read_json(read_text(path))
    except OSError as error:
        raise ConfigError(
            "--config", f"cannot read {path}: {error.strerror}", "a JSON file, such as configs/gpt_tiny.json"
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError("--config", f"{path} is not UTF-8 text", "a JSON file") from error
    except json.JSONDecodeError as error:
        raise ConfigError("--config", f"{path}, line {error.lineno}: {error.msg}", "a JSON object") from error
    except (ValueError, RecursionError) as error:  # a key twice, thousands of digits, brackets nested as deep
        raise ConfigError("--config", f"{path} cannot be read: {error}", "a JSON object") from error
    if not isinstance(raw, dict) or not all(isinstance(section, dict) for section in raw.values()):
        raise ConfigError(
            "--config", f"{path} does not hold sections", 'an object of objects: {"model": {…}, "train": {…}}'
        )
    if "source" in (model := raw.get("model", {})):
        model["source"] = beside(model["source"], path)
    if "hf" in model:
        model["hf"] = folder_beside(model["hf"], path)
    return raw


def beside(source: object, config_path: str) -> object:
    """What a config's file says of its source, counted from the file's own folder."""
    return (
        str((Path(config_path).parent / source).absolute())
        if isinstance(source, str) and source and "\0" not in source
        else source
    )


def folder_beside(hf: object, config_path: str) -> object:
    """Return the path of `model.hf` if it is a folder, counted from the config file's own folder.

    Else it is a name on the hub.
    """
    path = beside(hf, config_path)
    return path if isinstance(path, str) and path != hf and Path(path).is_dir() else hf


def apply(overrides: list[str], raw: dict[str, Any]) -> list[str]:
    """Writes overrides into sections, and returns their keys.

    A source and a folder of `model.hf` count from the current folder, like every path that is typed.
    """
    keys = []
    for override in overrides:
        key, value = parse_override(override)
        if key == KEY:
            value = beside(value, os.curdir)
        elif key == HF:
            value = folder_beside(value, os.curdir)
        set_value(raw, key, value)
        keys.append(key)
    return keys


def parse_override(text: str) -> tuple[str, Any]:
    """Splits `section.key=value` into key and JSON value. A value that is not JSON is a string."""
    key, equals, value = text.partition("=")
    if not equals or key.count(".") != 1 or key.startswith("-"):
        meaning = suggested_override(key, value) if equals else None
        right = f"did you mean {meaning}?" if meaning else "section.key=value, such as train.steps=20"
        raise ConfigError(text, "is no override", right)
    try:
        return key, read_json(value)
    except json.JSONDecodeError:
        return key, value
    except (ValueError, RecursionError) as error:  # a key twice, thousands of digits, brackets nested as deep
        raise ConfigError(key, f"cannot be read: {error}", "a JSON value") from error


def set_value(raw: dict[str, Any], key: str, value: Any) -> None:
    section, name = key.split(".")
    raw.setdefault(section, {})[name] = value


def flatten(sections: dict[str, Any]) -> dict[str, Any]:
    """Turns {"model": {"num_layers": 2}} into {"model.num_layers": 2}."""
    return {f"{name}.{key}": value for name, section in sections.items() for key, value in section.items()}


def source_in(raw: dict[str, Any]) -> Source | None:
    """The source that a config's sections name; None if they name none. Executes it.

    Raises:
        ConfigError: the file is wrong, or is not the one of `model.source_digest`.
    """
    model = raw.get("model")
    model = model if isinstance(model, dict) else {}
    path = model.get("source")
    return execute(path, model.get("source_digest")) if isinstance(path, str) and path else None


def validate(raw: dict[str, Any]) -> Config:
    """Checks `raw` against the schema. Raises its first complaint as a `ConfigError`."""
    source = source_in(raw)
    schema = Config if source is None else source.schema
    try:
        with nullcontext() if source is None else source.blamed(", validating"):
            # Through JSON, so that JSON's types count: a list may be a tuple, but "20" is not a number.
            return schema.model_validate_json(json.dumps(raw))
    except ValidationError as error:
        errors = error.errors()
        same_key = [e for e in errors if e["loc"][:2] == errors[0]["loc"][:2]]
        # If a key may have several types, the deepest error says most: it names the wrong entry of a list.
        first = next(
            (e for e in errors if e["type"] == "extra_forbidden"), max(same_key, key=lambda e: len(e["loc"]))
        )
    # Python accepts it as JSON and pydantic does not, for example half of a surrogate pair
    if not first["loc"]:
        raise ConfigError(
            "--config",
            first["msg"].lower().partition(" at line")[0],
            "valid JSON, in the file and the overrides",
        ) from None
    key = ".".join(str(part) for part in first["loc"][:2])
    typed = first["loc"][0] != "log"  # where a key may have several types, the type comes first
    inner = [str(part) for part in first["loc"][2 + typed :] if isinstance(part, str)]  # of an object
    if first["type"] == "extra_forbidden":
        if len(first["loc"]) == 1 and isinstance(first["input"], dict):  # an unknown section: its first key
            key = ".".join((key, *list(first["input"])[:1]))
        right = describe(key, schema, value_in(raw, key)) if inner else nearest(key, schema)
        raise ConfigError(key, " ".join(["unknown key", *inner]), right) from None
    if first["type"] in ("value_error", "assertion_error"):  # of a validator in a source
        raise ConfigError(
            key,
            str(first["ctx"]["error"]) or "is not valid",
            f"what {SETTINGS} of {raw['model']['source']} takes",
        ) from None
    why = ": ".join([*inner, first["msg"].lower()])
    entry = len(first["loc"]) == 5 and first["loc"][0] == "data"  # of the one kind of list in the schema
    part = ("weight ", "prefix ")[int(first["loc"][4])] if entry else ""
    value = json.dumps(first["input"])
    value = value if len(value) <= LONGEST else f"{value[:LONGEST]}…"
    right = describe(key, schema, value_in(raw, key))
    raise ConfigError(key, f"{part}{value} is not valid: {why}", right) from None


def value_in(raw: dict[str, Any], key: str) -> Any:
    """The value that a raw config has for a key."""
    section, _, name = key.partition(".")
    return raw.get(section, {}).get(name)


def nearest(key: str, schema: type[Config]) -> str:
    """Return what an unknown key may mean, as a question."""
    return meant_key(key, flatten(schema().model_dump(by_alias=True)))


def describe(key: str, config: type[Config], given: Any = None) -> str:
    """Return the values that a key accepts, as text; of a `given` object, those of its type."""
    section, _, name = key.partition(".")
    schema = schema_of(config, config.__pydantic_validator__)
    keys = referred(schema["properties"][section], schema)["properties"]
    if name not in keys:
        return "an object"
    return accepted(_of_type(keys[name], given), schema)


def _of_type(part: dict[str, Any], given: Any) -> dict[str, Any]:
    """A part of the JSON schema without the types that a given object does not have."""
    kind = given.get("type") if isinstance(given, dict) else None
    options = []
    for option in part.get("anyOf", []):
        reference = option.get("discriminator", {}).get("mapping", {}).get(kind)
        options.append(option if reference is None else {"$ref": reference})
    return part | {"anyOf": options} if options else part


@lru_cache(maxsize=4)
def schema_of(config: type[Config], validator: object) -> dict[str, Any]:
    """As JSON, which pydantic takes 20 ms to write.

    Where an optimizer has brought its keys since, the validator is another.
    """
    return config.model_json_schema()


def accepted(part: dict[str, Any], schema: dict[str, Any]) -> str:
    """A part of the JSON schema in words that a user knows."""
    if "discriminator" in part:  # objects of several types: which one is meant is not known
        return f"{{type: {' or '.join(part['discriminator']['mapping'])}, …}}"
    if options := part.get("anyOf") or part.get("oneOf"):
        return " or ".join(accepted(option, schema) for option in options)
    if "$ref" in part:
        if "properties" not in (part := referred(part, schema)):
            return accepted(part, schema)
        fields = part["properties"].items()
        return (
            "{"
            + ", ".join(f"{name}: {field['const']}" if "const" in field else name for name, field in fields)
            + "}"
        )
    if "pattern" in part and "title" in part:
        return str(part["title"])
    if "prefixItems" in part:
        return f"[{', '.join(item.get('title') or accepted(item, schema) for item in part['prefixItems'])}]"
    if "items" in part:
        return f"a list of {accepted(part['items'], schema)}"
    if "const" in part or "enum" in part:
        return " or ".join(map(str, part.get("enum") or [part["const"]]))
    known = {bound: part[bound] for bound in BOUNDS if part.get(bound, LARGEST) != LARGEST}
    bounds = [
        f"{BOUNDS[bound]} {value:{',' if isinstance(value, int) else 'g'}}" for bound, value in known.items()
    ]
    return f"{TYPES.get(part.get('type', ''), 'another value')} {' and '.join(bounds)}".strip()


def referred(part: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    """The definition that a part of the JSON schema refers to."""
    return schema["$defs"][part["$ref"].removeprefix("#/$defs/")]
