"""Which optimizer each parameter has, with which settings: `optim`, and `optim.groups` by patterns of names."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from megacore.config.schema import Config, OptimConfig, OptimGroup
from megacore.errors import ConfigError
from megacore.optimizers.rule import RULES, Rule, Shape

KEY = "optim.groups"


@dataclass(frozen=True, eq=False)
class ParameterGroup:
    """Parameters with one rule and one set of settings."""

    number: int  # of its entry in `optim.groups`, from 1; 0: the parameters that no entry matches
    match: tuple[str, ...]
    rule: Rule[Any]
    lr: float
    factor: float  # on the rate of `optim` in every step
    weight_decay: float  # of its matrices

    def has(self, name: str) -> bool:
        """Whether a pattern of its matches a parameter's name."""
        return any(fnmatchcase(name, pattern) for pattern in self.match)

    def state(self, shape: Shape) -> dict[str, Shape]:
        """The state that the rule keeps for a parameter of this shape, by kind."""
        return dict.fromkeys(self.rule.kinds, shape) | self.rule.own_state(shape)


class ParameterGroups:
    """All groups of a config, in the order of `optim.groups`, and behind them the one of all other parameters."""

    def __init__(self, optim: OptimConfig) -> None:
        self.every = (*(_group(optim, i, entry) for i, entry in enumerate(optim.groups, 1)), _group(optim, 0, OptimGroup(match=("*",))))

    def of(self, name: str) -> ParameterGroup:
        """The group of the parameter with a logical name: the first that matches."""
        return next(group for group in self.every if group.has(name))

    def check(self, shapes: Mapping[str, Shape]) -> None:
        """Raises `ConfigError` if a pattern matches none of the model's parameters, or a rule cannot update one that it has."""
        for group in self.every[:-1]:
            for pattern in group.match:
                if not any(fnmatchcase(name, pattern) for name in shapes):
                    right = f"a pattern of names such as {next(iter(shapes))} and {list(shapes)[len(shapes) // 2]}"
                    raise ConfigError(KEY, f"{pattern} matches no parameter of the model", right)
        for name, shape in shapes.items():
            group = self.of(name)
            if reason := group.rule.refuses(shape):
                right = f"an entry of {KEY} with another kind that matches it"
                raise ConfigError(KEY if group.number else "optim.kind", f"{group.rule.name} cannot update {name}: {reason}", right)

    def table(self, names: Iterable[str]) -> str:
        """The text of which parameters have which rule and settings, for `--print-config`."""
        members: dict[ParameterGroup, list[str]] = {group: [] for group in self.every}
        for name in names:
            members[self.of(name)].append(name)
        lines = [f"{KEY}, as they apply (weight decay: to matrices alone):"]
        for group, own in members.items():
            settings = "".join(f" {key}={value:g}" if isinstance(value, float) else f" {key}={value}" for key, value in group.rule.settings)
            title = f"{KEY}[{group.number - 1}]" if group.number else "others"
            lines.append(f"  {title}: {group.rule.name} lr={group.lr:g} weight_decay={group.weight_decay:g}{settings}")
            lines += [f"    {text}" for text in _folded(own)] or ["    no parameter"]
        return "\n".join(lines)


def _group(optim: OptimConfig, number: int, entry: OptimGroup) -> ParameterGroup:
    def value(key: str) -> Any:
        own = getattr(entry, key)
        return getattr(optim, key) if own is None else own

    rule = RULES[value("kind")]
    settings = rule.settings_type.model_construct(**{key: value(key) for key in rule.settings_type.model_fields})
    lr = value("lr")
    factor = 1.0 if lr == optim.lr else lr / optim.lr
    return ParameterGroup(number, entry.match, rule(settings), lr, factor, value("weight_decay"))


def _folded(names: Iterable[str]) -> list[str]:
    """Names, those of equal parts of several blocks as one line: `blocks.{0,1,2}.norm.weight`."""
    found: dict[str, list[str]] = {}
    for name in names:
        number = re.search(r"(?<=\.)\d+(?=\.)", name)
        form = name if number is None else f"{name[: number.start()]}#{name[number.end() :]}"
        found.setdefault(form, []).append(number.group() if number else "")
    return [form if form not in found or numbers == [""] else form.replace("#", _runs(numbers), 1) for form, numbers in found.items()]


def _runs(numbers: list[str]) -> str:
    """Numbers, ascending, as `3`, or as `{0-5,7}`."""
    runs: list[list[int]] = []
    for number in sorted(map(int, numbers)):
        if runs and runs[-1][-1] == number - 1:
            runs[-1] = [runs[-1][0], number]
        else:
            runs.append([number])
    texts = ["-".join(map(str, run)) for run in runs]
    return texts[0] if len(numbers) == 1 else f"{{{','.join(texts)}}}"


def check_groups(config: Config) -> None:
    """Refuses groups that no model could have; `ParameterGroups.check` goes by the names of a model."""
    optim = config.optim
    for entry in optim.groups:
        if entry.lr is not None and entry.lr != optim.lr and optim.lr == 0:
            raise ConfigError(KEY, f"lr {entry.lr:g} follows the schedule of optim.lr, which is 0", "an optim.lr above 0")
    groups = ParameterGroups(optim)
    for group in groups.every if config.engine.kind == "deepspeed" else ():
        if group.rule.name != "adamw":
            key = KEY if group.number else "optim.kind"
            raise ConfigError(key, f"the deepspeed engine steps with AdamW, not {group.rule.name}", "adamw, or another engine.kind")
    for group in groups.every[:-1]:
        entry = optim.groups[group.number - 1]
        known = {"match", "kind", "lr", "weight_decay"} | group.rule.settings_type.model_fields.keys()
        if foreign := sorted(entry.model_fields_set - known):
            right = f"{', '.join(group.rule.settings_type.model_fields)} or another kind"
            raise ConfigError(KEY, f"{group.rule.name} has no setting {foreign[0]}", right)
