"""The two configs that `launch/try.py` compares: the same data, layout and optimizer,
and as many operations a token.
"""

import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from megacore.config import Config
from megacore.config.experts import ExpertSettings
from megacore.config.latent import LatentSettings
from megacore.config.model import ModelConfig
from megacore.config.schema import resolved
from megacore.errors import ConfigError, UserError
from megacore.tools.choices.flops import model_flops
from megacore.tools.planner.parameters import parameters
from megacore.tools.settings.load import apply, beside, flatten, read, resolve
from megacore.tools.sweep.trials import Trial, named, smallest

Sections = dict[str, dict[str, Any]]
FFN = 8  # of which, times the tensor ranks, a feed-forward size is a multiple
CLOSE = 0.02  # two models do as much work a token if their operations differ by no larger part
ALIKE = (  # what both must have, or their losses say nothing about the idea
    *("data.train", "data.valid", "data.tokenizer", "data.document_mask", "data.packing", "model.vocab_size"),
    *("train.seq_len", "train.global_batch_size", "train.batch_ramp", "train.precision", "train.seed"),
)


@dataclass(frozen=True)
class Contender:
    """A model with its settings."""

    name: str
    sections: Sections

    @cached_property
    def ranks(self) -> int:
        """Of a run."""
        return smallest(self.sections)

    @cached_property
    def config(self) -> Config:
        """Its resolved config. Raises `UserError`, naming it."""
        try:
            return resolve(copy.deepcopy(self.sections), [], self.name, self.ranks).config
        except UserError as error:
            raise type(error)(f"{self.name}: {error.where}", error.wrong, error.right) from None

    @cached_property
    def parameters(self) -> int:
        """Of the whole model."""
        return parameters(self.config)

    @cached_property
    def flops(self) -> float | None:
        """Operations of training on a token, attention over all pairs; None if its layers
        cannot be counted without content.
        """
        return model_flops(self.config, causal=False)

    @property
    def tokens(self) -> int:
        """That a run reads."""
        train = self.config.train
        return train.samples_through(train.steps) * train.seq_len

    def changed(self, section: str, **values: Any) -> "Contender":
        """The same with other settings."""
        sections = copy.deepcopy(self.sections)
        sections.setdefault(section, {}).update(values)
        return replace(self, sections=sections)

    def stretched(self, ratio: float) -> "Contender":
        """The same with so many times the steps, of all that counts them: warmup, decay,
        batches and windows that grow.
        """
        model, train, optim = self.config.model, self.config.train, self.config.optim

        def counted(steps: int) -> int:
            return max(1, round(steps * ratio))

        phases = {"warmup_steps": round(optim.warmup_steps * ratio)}
        if self.sections.get("optim", {}).get("decay_steps") is not None:
            phases["decay_steps"] = counted(resolved(optim.decay_steps))
        found = self.changed("train", steps=counted(train.steps)).changed("optim", **phases)
        if train.batch_ramp:
            found = found.changed(
                "train", batch_ramp=[[counted(last), size] for last, size in train.batch_ramp]
            )
        if model.window_schedule:
            found = found.changed(
                "model", window_schedule=[[counted(last), window] for last, window in model.window_schedule]
            )
        return found


def read_contender(path: str, overrides: Sequence[str]) -> Contender:
    """A config, or the one beside a fork's file. Raises `UserError`."""
    config = Path(path).with_suffix(".json") if path.endswith(".py") else Path(path)
    if config != Path(path) and not config.exists():
        raise ConfigError(
            "arguments",
            f"{path} has no config {config.name} beside it",
            "a config: its model.source names the file",
        )
    sections = read(str(config))
    apply(list(overrides), sections)
    if path.endswith(".py"):
        sections.setdefault("model", {})["source"] = beside(Path(path).name, path)
    for section, key in (("log", "dir"), ("checkpoint", "resume")):
        sections.get(section, {}).pop(key, None)
    return Contender(Path(path).stem, sections)


def opponent(idea: Contender, against: str, overrides: Sequence[str]) -> Contender:
    """Whom the idea is compared with: `gpt`, which is the plain model with the idea's config, without source,
    experts and latents; or another fork or config. Raises `UserError`.
    """
    if against != "gpt":
        other = read_contender(against, overrides)
        return other if other.name != idea.name else replace(other, name=f"{other.name} (against)")
    sections = copy.deepcopy(idea.sections)
    model = sections["model"]
    if model.get("hf") is not None:
        wrong = "the plain model would not have the sizes of model.hf"
        raise ConfigError("--baseline", wrong, "another config")
    others = (
        ExpertSettings.model_fields.keys() | LatentSettings.model_fields.keys() | {"source", "source_digest"}
    )
    plain = ModelConfig.model_fields.keys() - others
    sections["model"] = model = {key: value for key, value in model.items() if key in plain}
    for key in ("expert", "expert_tensor", "expert_halves"):
        sections.get("parallel", {}).pop(key, None)
    if model == idea.sections["model"]:
        raise ConfigError(
            "--baseline",
            f"{idea.name} is the plain model: it has no model.source, experts or latents",
            "another config",
        )
    return Contender("gpt", sections)


def check_alike(idea: Contender, other: Contender, how: str) -> None:
    """Raises `ConfigError` for the first setting without which a comparison means nothing.

    `how` their work will be matched.
    """
    first, second = (flatten(c.config.model_dump(mode="json", by_alias=True)) for c in (idea, other))
    for key in (*ALIKE, *(() if how == "steps" else ("train.steps",))):
        if first[key] != second[key]:
            raise ConfigError(
                "--baseline",
                f"{idea.name} has {key} {first[key]}, and {other.name} {second[key]}",
                "the same in both",
            )


def matched(idea: Contender, other: Contender, how: str) -> Contender:
    """The other one with as many operations as the idea: by its feed-forward size (`ffn`), so that both read
    the same tokens, or by its steps (`steps`). Raises `ConfigError` if that cannot be.
    """
    if how == "none":
        return other
    wanted, has = idea.flops, other.flops
    if wanted is None or has is None:
        name = (idea if wanted is None else other).name
        raise ConfigError(
            "--match", f"the operations of {name} cannot be counted", "--match none: as many steps of each"
        )
    if how == "steps":
        return other.stretched(wanted / has)
    multiple = FFN * other.config.parallel.tensor
    size = other.config.model.ffn_size or multiple
    larger = other.changed("model", ffn_size=size + multiple).flops
    assert larger is not None
    per_feature = (larger - has) / multiple
    best = multiple * round((size + (wanted - has) / per_feature) / multiple) if per_feature > 0 else 0
    found = other.changed("model", ffn_size=best)
    if best < multiple or abs((found.flops or math.inf) / wanted - 1) > CLOSE:
        wrong = f"no feed-forward size gives {other.name} the {wanted:,.0f} operations a token of {idea.name}"
        raise ConfigError("--match", wrong, "--match steps: the cheaper one reads more tokens")
    return found


def differences(idea: Contender, other: Contender) -> list[tuple[str, str, str]]:
    """Settings in which both differ, with the value of each, as far as their files and
    what was matched say.
    """
    first, second = flatten(idea.sections), flatten(other.sections)
    missing = object()
    keys = [
        key for key in dict.fromkeys([*first, *second]) if first.get(key, missing) != second.get(key, missing)
    ]
    return [(key, str(first.get(key, "–")), str(second.get(key, "–"))) for key in keys]


def scaled(sections: Sections, rate: float) -> Sections:
    """The sections with all learning rates times `rate`."""
    found = copy.deepcopy(sections)
    optim = found.setdefault("optim", {})
    for settings in (optim, *optim.get("groups", [])):
        for key, value in settings.items():
            if (key == "lr" or key.endswith("_lr")) and isinstance(value, int | float):
                settings[key] = value * rate
    return found


def trials_of(
    contenders: Sequence[Contender], rates: Sequence[float], seeds: Sequence[int]
) -> Iterator[tuple[Contender, Trial]]:
    """Every run that may be asked for. Raises `UserError`, naming the first whose config cannot run."""
    for contender in contenders:
        contender.config  # noqa: B018  (raises)
        if "lr" not in contender.sections.get("optim", {}):
            contender = contender.changed("optim", lr=contender.config.optim.lr)
        for rate in rates:
            sections = scaled(contender.sections, rate)
            for seed in seeds:
                own = copy.deepcopy(sections)
                own.setdefault("train", {})["seed"] = seed
                point = f"{contender.name.replace(' ', '_')},rate={rate:g}"
                trial = Trial(
                    f"{point},seed={seed}",
                    point,
                    {"contender": contender.name, "rate": rate},
                    seed,
                    own,
                    contender.ranks,
                )
                try:
                    trial.config  # noqa: B018  (raises)
                except UserError as error:
                    raise named(trial, error) from None
                yield contender, trial
