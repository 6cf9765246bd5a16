"""Tags under which TensorBoard and Weights & Biases show figures: their names behind a theme, by
which both arrange their charts.
"""

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

THEMES = {
    "eval": ("valid_loss",),
    "speed": ("tokens_per_second", "step_seconds", "mfu", "mfu_causal", "save_seconds"),
    "memory": ("memory_bytes", "memory_reserved_bytes"),
}
THEME = {name: theme for theme, names in THEMES.items() for name in names}


def tag(name: str) -> str:
    """The figure's tag. One whose name has a theme already keeps it, and others without are of training."""
    return name if "/" in name else f"{THEME.get(name, 'train')}/{name}"


def unmatched(names: Iterable[str], patterns: Sequence[str]) -> list[str]:
    """Patterns that name none of these figures."""
    return [pattern for pattern in patterns if not any(fnmatchcase(tag(name), pattern) for name in names)]


def tagged(figures: Mapping[str, Any], patterns: Sequence[str]) -> dict[str, float]:
    """The numbers among a step's figures, but for the step, by their tags; of these, what a
    pattern of `log.figures` names.
    """
    numbers = {
        tag(name): value
        for name, value in figures.items()
        if isinstance(value, int | float) and name != "step"
    }
    return {
        name: value
        for name, value in numbers.items()
        if any(fnmatchcase(name, pattern) for pattern in patterns)
    }
