"""What a sweep's file says, checked for itself; what its trials become is in `trials`."""

import json
import math
import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from megacore.errors import ConfigError
from megacore.files import read_json, read_text
from megacore.records import LARGEST, complaint

EXAMPLE = '{"config": "configs/gpt_tiny.json", "grid": {"optim.lr": [0.002, 0.004]}, "seeds": [0, 1]}'
MOST_TRIALS = 10_000
COLUMNS = ("trial", "seed", "status", "step", "loss", "valid_loss", "seconds")  # of the table of results
KEY = re.compile(r"[a-z_]+\.[A-Za-z_]\w*")  # of a config
OWN = {  # keys that a sweep sets, or relies on
    "log.dir": ("each trial has a folder of its own", "folder, which holds all of them"),
    "checkpoint.resume": (
        "a trial that was stopped goes on from its own folder",
        "checkpoint.weights, for another run's weights",
    ),
}

Whole = Annotated[int, Field(ge=0, le=LARGEST)]
Count = Annotated[int, Field(ge=1, le=LARGEST)]
Finite = Annotated[float, Field(ge=-1e300, le=1e300)]
Positive = Annotated[float, Field(gt=0, le=1e300)]
Values = dict[str, Any]  # by key of a config


class Part(BaseModel):
    """A part of the file. Numbers are not coerced, and unknown keys refused."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")


class Choice(Part):
    """One of some values, each as likely."""

    choice: Annotated[list[Any], Field(min_length=1)]


class Uniform(Part):
    """A number from the first to the last."""

    uniform: Annotated[list[Finite], Field(min_length=2, max_length=2)]


class LogUniform(Part):
    """A number whose logarithm is uniform."""

    log_uniform: Annotated[list[Positive], Field(min_length=2, max_length=2)]


Distribution = Choice | Uniform | LogUniform


class Random(Part):
    """A random search."""

    trials: Annotated[int, Field(ge=1, le=MOST_TRIALS)]
    seed: Whole = 0
    keys: Annotated[dict[str, dict[str, Any]], Field(min_length=1)]

    @property
    def distributions(self) -> dict[str, Distribution]:
        """By key or name."""
        return {key: distribution(key, value) for key, value in self.keys.items()}


class Linked(Part):
    """A key that follows another one."""

    of: str
    times: Finite


class Spec(Part):
    """A sweep. Its `config` counts from the current folder, as data's prefixes do."""

    config: Annotated[str, Field(min_length=1)]
    overrides: Values = {}
    grid: dict[str, Annotated[list[Any], Field(min_length=1)]] = {}
    random: Random | None = None
    linked: dict[str, Linked] = {}
    seeds: list[Whole] = []
    ranks: Count | None = None  # of each trial; null: as many as its axes have, one where data is auto
    metric: Literal["loss", "valid_loss"] | None = None  # null: valid_loss where there is validation data
    last: Count = 5  # logged steps whose mean is the loss
    folder: Annotated[str, Field(min_length=1)] | None = None  # null: runs/<the file's name>


def read_spec(path: str) -> Spec:
    """A sweep's file. Raises `ConfigError`, naming the part."""
    try:
        raw = read_json(read_text(path))
    except OSError as error:
        raise ConfigError(
            "arguments", f"cannot read {path}: {error.strerror}", f"a JSON file such as {EXAMPLE}"
        ) from None
    except UnicodeDecodeError:
        raise ConfigError(
            "arguments", f"{path} is not UTF-8 text", f"a JSON file such as {EXAMPLE}"
        ) from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            "arguments", f"{path} is no JSON: {error}", f"a JSON file such as {EXAMPLE}"
        ) from None
    if not isinstance(raw, dict):
        raise ConfigError("arguments", f"{path} holds no object", EXAMPLE)
    try:
        spec = Spec.model_validate(raw)
    except ValidationError as error:
        raise refusal(error, Spec, "") from None
    check_spec(spec)
    return spec


def refusal(error: ValidationError, part: type[Part], before: str) -> ConfigError:
    """The first thing that is wrong with a part of the file."""
    first = error.errors()[0]
    where = ".".join([*filter(None, [before]), *map(str, first["loc"])])
    if first["type"] == "extra_forbidden":
        parts: dict[str, type[Part]] = {"random": Random, "linked": Linked}
        inner = parts.get(str(first["loc"][0]), part) if len(first["loc"]) > 1 else part
        return ConfigError(where, "unknown key", ", ".join(inner.model_fields))
    return ConfigError(where, complaint(error).partition(": ")[2] or complaint(error), f"such as {EXAMPLE}")


def distribution(key: str, value: dict[str, Any]) -> Distribution:
    """A distribution of the file. Raises `ConfigError`."""
    where, right = (
        f"random.keys.{key}",
        '{"log_uniform": [1e-4, 1e-2]}, {"uniform": [0, 0.2]} or {"choice": [1, 2, 4]}',
    )
    kinds: dict[str, type[Choice] | type[Uniform] | type[LogUniform]] = {
        "choice": Choice,
        "uniform": Uniform,
        "log_uniform": LogUniform,
    }
    if len(value) != 1 or (name := next(iter(value))) not in kinds:
        raise ConfigError(where, f"{', '.join(value) or 'nothing'} is no distribution", right)
    try:
        found = kinds[name].model_validate(value)
    except ValidationError as error:
        raise ConfigError(where, complaint(error), right) from None
    if not isinstance(found, Choice):
        low, high = value[name]
        if not low < high:
            raise ConfigError(where, f"{low:g} is not below {high:g}", right)
    return found


def check_spec(spec: Spec) -> None:
    """Raises `ConfigError` for what no config could have."""
    if spec.grid and spec.random is not None:
        raise ConfigError("random", "stands beside grid", "one of the two")
    if not spec.grid and spec.random is None and not spec.seeds:
        raise ConfigError("grid", "nothing is swept", "grid, random, or several seeds")
    if len(set(spec.seeds)) < len(spec.seeds):
        raise ConfigError("seeds", f"{first_twice(spec.seeds)} stands twice", "each seed once")
    if spec.random is None:
        swept = {f"grid.{name}": (name, values) for name, values in spec.grid.items()}
        if (count := math.prod(map(len, spec.grid.values())) * max(1, len(spec.seeds))) > MOST_TRIALS:
            raise ConfigError("grid", f"makes {count:,} trials", f"at most {MOST_TRIALS:,}")
    else:
        known = spec.random.distributions
        swept = {
            f"random.keys.{name}": (name, own.choice if isinstance(own, Choice) else [0.0])
            for name, own in known.items()
        }
        if (count := spec.random.trials * max(1, len(spec.seeds))) > MOST_TRIALS:
            raise ConfigError("random.trials", f"makes {count:,} trials", f"at most {MOST_TRIALS:,}")
    setters: dict[str, str] = {}  # of a key: the part of the file
    places = [(f"overrides.{key}", key) for key in spec.overrides]
    for where, (name, values) in swept.items():
        places += [(where, key) for key in keys_of(where, name, values)]
    places += [(f"linked.{key}", key) for key in spec.linked]
    for where, key in places:
        check_key(where, key)
        if key == "train.seed" and spec.seeds:
            raise ConfigError(where, "seeds sets it too", "one of the two")
        if key in setters:
            raise ConfigError(where, f"{key} is set by {setters[key]} too", "one of the two")
        setters[key] = where


def keys_of(where: str, name: str, values: list[Any]) -> list[str]:
    """The keys of a config that an entry of what is swept sets: itself, or as a name
    without a dot those of its objects.
    """
    if first_twice(values) is not None:
        raise ConfigError(where, f"{first_twice(values)} stands twice", "each value once")
    if "." in name:
        return [name]
    if name in COLUMNS:
        raise ConfigError(where, f"the table of results has a column {name}", "another name")
    right = (
        f'a key such as optim.lr, or a name for several: "{name}": [{{"model.hidden_size": 64, '
        f'"model.num_heads": 2}}]'
    )
    for value in values:
        if not isinstance(value, dict) or not value:
            raise ConfigError(where, f"is no section.key, and {value!r:.80} no object of them", right)
        if value.keys() != values[0].keys():
            raise ConfigError(
                where,
                f"its objects set {', '.join(values[0])} and {', '.join(value)}",
                "the same keys in each",
            )
    return list(values[0])


def check_key(where: str, key: str) -> None:
    """Raises `ConfigError` for what is no key, or is one that a sweep needs."""
    if not KEY.fullmatch(key):
        raise ConfigError(where, f"{key!r} is no key of a config", "section.key, such as optim.lr")
    if key in OWN:
        raise ConfigError(where, f"{key}: {OWN[key][0]}", OWN[key][1])


def first_twice(values: list[Any]) -> Any:
    """The first value that stands twice in a list, as the text that it has in names; None
    without one. "1" is as 1 there.
    """
    texts = [value if isinstance(value, str) else json.dumps(value) for value in values]
    return next((text for number, text in enumerate(texts) if text in texts[:number]), None)
