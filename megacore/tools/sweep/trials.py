"""The trials of a sweep: every point of what is swept, with each seed, as the sections of a config."""

import copy
import hashlib
import itertools
import json
import math
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from megacore.config import Config
from megacore.errors import ConfigError, UserError
from megacore.tools.settings.load import read, resolve, set_value, validate
from megacore.tools.sweep.spec import Choice, Distribution, LogUniform, Spec, Values

DIGITS = 4  # of a number that is drawn
LONGEST_NAME = 100
UNSAFE = re.compile(r"[^A-Za-z0-9.,=+_-]")  # in a folder's name


@dataclass(frozen=True, eq=False)
class Trial:
    """One run of a sweep."""

    name: str
    point: str  # its name without the seed
    # what was chosen for it, by key; of keys that are set together by their name, the object
    swept: dict[str, Any]
    seed: int | None
    sections: dict[str, dict[str, Any]]  # of its config, without log.dir
    ranks: int = 1

    @cached_property
    def config(self) -> Config:
        """Its resolved config. Raises `UserError`."""
        return resolve(copy.deepcopy(self.sections), [], "sweep", self.ranks).config


def trials_of(spec: Spec) -> list[Trial]:
    """All trials, each of which has a config that can run.

    Raises `UserError`, naming the first that has not.
    """
    base = read(spec.config)
    for key, value in spec.overrides.items():
        set_value(base, key, value)
    found: dict[str, Trial] = {}
    short = short_names(list(spec.grid) if spec.random is None else list(spec.random.keys))
    seeds: list[int | None] = [*spec.seeds] or [None]
    for swept in points_of(spec):
        for seed in seeds:
            sections = copy.deepcopy(base)
            for key, value in settings_of(swept).items():
                set_value(sections, key, copy.deepcopy(value))
            if seed is not None:
                set_value(sections, "train.seed", seed)
            point = name_of({short[key]: value for key, value in swept.items()})
            name = point if seed is None else f"{point},seed={seed}".lstrip(",")
            if name not in found:  # drawn twice
                found[name] = checked(Trial(name, point, swept, seed, sections), spec)
    return list(found.values())


def settings_of(swept: Values) -> Values:
    """What was chosen, by key of a config."""
    return {
        key: value
        for name, own in swept.items()
        for key, value in ({name: own} if "." in name else own).items()
    }


def points_of(spec: Spec) -> Iterator[Values]:
    """What is chosen for each point.

    A draw depends on the search's seed, its own number and its key alone: others may be added.
    """
    if spec.random is None:
        for values in itertools.product(*spec.grid.values()):
            yield dict(zip(spec.grid, values, strict=True))
        return
    for number in range(spec.random.trials):
        draws = {key: random.Random(f"{spec.random.seed}/{number}/{key}") for key in spec.random.keys}
        yield {key: drawn(own, draws[key]) for key, own in spec.random.distributions.items()}


def drawn(own: Distribution, source: random.Random) -> Any:
    """A value of a distribution."""
    if isinstance(own, Choice):
        return source.choice(own.choice)
    if isinstance(own, LogUniform):
        low, high = map(math.log, own.log_uniform)
        return float(f"{math.exp(source.uniform(low, high)):.{DIGITS}g}")
    return float(f"{source.uniform(*own.uniform):.{DIGITS}g}")


def checked(trial: Trial, spec: Spec) -> Trial:
    """The trial with its linked keys and its ranks.

    Raises `UserError`, naming it, if its config could not run.
    """
    sections = trial.sections
    for key, link in spec.linked.items():
        section, _, name = link.of.partition(".")
        value = sections.get(section, {}).get(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(
                f"linked.{key}",
                f"{link.of} is no number in the config",
                "of: a key that the sweep or its config sets",
            )
        product = value * link.times
        set_value(
            sections, key, int(product) if isinstance(value, int) and product == int(product) else product
        )
    try:
        own = Trial(
            trial.name, trial.point, trial.swept, trial.seed, sections, spec.ranks or smallest(sections)
        )
        for key in ("dir", "resume"):
            section = "log" if key == "dir" else "checkpoint"
            own.sections.get(section, {}).pop(key, None)  # of the config, which may be another run's record
        own.config  # noqa: B018  (raises)
    except UserError as error:
        raise named(trial, error) from None
    return own


def smallest(sections: dict[str, dict[str, Any]]) -> int:
    """As many ranks as the axes have, with one data rank if their number is open."""
    sections = copy.deepcopy(sections)
    wanted = sections.get("parallel", {}).get("data", "auto")
    set_value(sections, "parallel.data", 1)
    ranks = validate(sections).parallel.ranks_besides_data
    return ranks * (wanted if isinstance(wanted, int) and wanted > 0 else 1)


def named(trial: Trial, error: UserError) -> UserError:
    """The error, with the trial before its key."""
    return type(error)(
        f"trial {trial.name}: {error.where}" if trial.name else error.where, error.wrong, error.right
    )


def short_names(keys: list[str]) -> dict[str, str]:
    """Each key without its section, where no other has the same."""
    last = [key.rpartition(".")[2] for key in keys]
    return {key: own if last.count(own) == 1 else key for key, own in zip(keys, last, strict=True)}


def name_of(values: Values) -> str:
    """A folder's name that says what was chosen; with a digest where it cannot say all."""
    words = [f"{name}={said(value)}" for name, value in values.items()]
    plain = ",".join(words)
    safe = UNSAFE.sub("-", plain)
    if safe == plain and len(safe) <= LONGEST_NAME:
        return safe
    digest = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:8]
    return f"{safe[:LONGEST_NAME]}-{digest}"


def said(value: Any) -> str:
    """A value in a few characters."""
    if isinstance(value, dict):
        return "+".join(said(inner) for inner in value.values())
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
