"""Which optimizer each parameter has, with which settings: `optim`, and `optim.groups`
by patterns of names.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from math import prod
from typing import Any, Protocol

from megacore.config.optim import OptimConfig, OptimGroup
from megacore.errors import ConfigError
from megacore.optimizers.rule import AVERAGE, RULES, Rule, Shape

KEY = "optim.groups"


class Placement(Protocol):
    """What is asked of a `distributed.shard.Shard`, which this module may be read without."""

    @property
    def global_shape(self) -> Shape: ...

    @property
    def logical_matrices(self) -> Sequence[Any]: ...


@dataclass(frozen=True, eq=False)
class ParameterGroup:
    """Parameters with one rule and one set of settings."""

    number: int  # of its entry in `optim.groups`, from 1; 0: the parameters that no entry matches
    match: tuple[str, ...]
    rule: Rule[Any]
    lr: float
    factor: float  # on the rate of `optim` in every step
    weight_decay: float  # of its matrices
    ema: float | None = None  # `optim.ema`

    def has(self, name: str) -> bool:
        """Whether a pattern of its matches a parameter's name."""
        return any(fnmatchcase(name, pattern) for pattern in self.match)

    @property
    def kinds(self) -> tuple[str, ...]:
        """All kinds of state that the rule keeps."""
        return (
            *self.rule.kinds,
            *self.rule.numbers,
            *(self.rule.own_state((1, 1, 1)) if self.rule.whole else ()),
        )

    @property
    def elementwise(self) -> tuple[str, ...]:
        """The kinds of state with a number for each element: the rule's, and the average of `optim.ema`."""
        return self.rule.kinds if self.ema is None else (*self.rule.kinds, AVERAGE)

    def refuses(self, shard: "Placement") -> str | None:
        """Why its rule cannot update a parameter with this placement, in a few words; None if it can."""
        shape, matrices = shard.global_shape, shard.logical_matrices
        if self.rule.whole and sum(prod(matrix.sizes(shape)) for matrix in matrices) != prod(shape):
            return "the matrices that its layer states are not all of it" if matrices else "it is no matrix"
        return self.rule.refuses(shape)


class ParameterGroups:
    """All groups of a config, in the order of `optim.groups`, and behind them the
    one of all other parameters.
    """

    def __init__(self, optim: OptimConfig) -> None:
        self.every = (
            *(_group(optim, i, entry) for i, entry in enumerate(optim.groups, 1)),
            _group(optim, 0, OptimGroup(match=("*",))),
        )
        self._by_width: dict[tuple[ParameterGroup, float], ParameterGroup] = {}

    def of(self, name: str, record: Any = None) -> ParameterGroup:
        """The group of the parameter with a logical name: the first that matches.

        With its record, a `distributed.shard.Shard`, its rate is that for its width; rate times weight decay
        is the same at every width.
        """
        group = next((group for group in self.every[:-1] if group.has(name)), self.every[-1])
        by = (
            1.0
            if record is None or record.width == 1.0
            else group.rule.width_factor(record.is_hidden, record.width)
        )
        if by is None:
            raise ConfigError(
                KEY,
                f"mup knows no rate of {group.rule.name} for {name}",
                "another kind, or model.parametrization=standard",
            )
        if by == 1.0:
            return group
        scaled = replace(
            group, lr=group.lr * by, factor=group.factor * by, weight_decay=group.weight_decay / by
        )
        return self._by_width.setdefault((group, by), scaled)

    def check(self, shards: Mapping[str, "Placement"]) -> None:
        """Raises `ConfigError` if a pattern matches none of the model's parameters, or a rule
        cannot update one that it has.
        """
        for group in self.every[:-1]:
            for pattern in group.match:
                if not any(fnmatchcase(name, pattern) for name in shards):
                    right = (
                        f"a pattern of names such as {next(iter(shards))} and "
                        f"{list(shards)[len(shards) // 2]}"
                    )
                    raise ConfigError(KEY, f"{pattern} matches no parameter of the model", right)
        for name, shard in shards.items():
            group = self.of(name)
            if reason := group.refuses(shard):
                right = f"an entry of {KEY} with another kind that matches it"
                raise ConfigError(
                    KEY if group.number else "optim.kind",
                    f"{group.rule.name} cannot update {name}: {reason}",
                    right,
                )


def _group(optim: OptimConfig, number: int, entry: OptimGroup) -> ParameterGroup:
    def value(key: str) -> Any:
        own = getattr(entry, key)
        return getattr(optim, key) if own is None else own

    rule = RULES[value("kind")]
    settings = rule.settings_type.model_construct(
        **{key: value(key) for key in rule.settings_type.model_fields}
    )
    lr = value("lr")
    factor = 1.0 if lr == optim.lr else lr / optim.lr
    return ParameterGroup(number, entry.match, rule(settings), lr, factor, value("weight_decay"), optim.ema)
