"""Reads layouts by name: tp2pp2dp2sp is tensor 2 × pipeline 2 × data 2 with sequence parallelism."""

import re
from dataclasses import dataclass

from megacore.config import Config
from megacore.config.rules import check_model
from megacore.errors import ConfigError

MAX_WORLD = 64  # processes that one machine is asked for

# Every axis alone, in twos and fours, and together up to eight ranks.
DEFAULT = (
    "one", "tp2", "tp2sp", "tp4", "tp4sp", "pp2", "pp4", "dp2", "dp4",
    "tp2pp2", "tp2pp2sp", "tp2dp2sp", "pp2dp2", "tp4pp2sp", "pp4dp2", "tp2pp2dp2", "tp2pp2dp2sp",
)  # fmt: skip


@dataclass(frozen=True)
class Layout:
    """The number of ranks along each axis. `one` is the real trainer on one process."""

    name: str
    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    sequence: bool = False

    @property
    def world(self) -> int:
        """The number of ranks."""
        return self.tensor * self.pipeline * self.data

    def overrides(self) -> list[str]:
        """The layout as overrides `section.key=value`."""
        sizes = [f"parallel.{axis}={getattr(self, axis)}" for axis in ("tensor", "pipeline", "data")]
        return [*sizes, f"parallel.sequence={'true' if self.sequence else 'false'}"]


AXES = {"tp": "tensor", "pp": "pipeline", "dp": "data"}


def parse(name: str) -> Layout:
    """Reads a name such as `tp2pp2dp2sp`, with its parts in any order. Raises `ConfigError` if it names no layout."""
    parts = re.findall(r"(tp|pp|dp)([1-9]\d{0,2})|(sp)", name)
    sizes = {AXES[axis]: int(size) for axis, size, _ in parts if axis}
    sequence = any(sp for *_, sp in parts)
    whole = "".join(axis + size + sp for axis, size, sp in parts) == name
    if name != "one" and (not whole or not parts or len(sizes) + sequence != len(parts)):
        raise ConfigError("--layouts", f"{name!r} is no layout", "such as tp2, pp4, tp2pp2dp2 or tp4sp (sp: sequence parallelism)")
    layout = Layout(name, sequence=sequence, **sizes)
    if sequence and layout.tensor == 1:
        raise ConfigError("--layouts", f"{name}: sequence parallelism splits tokens over tensor ranks, and there is one", f"tp2{name}")
    if layout.world > MAX_WORLD:
        raise ConfigError("--layouts", f"{name} has {layout.world} ranks", f"at most {MAX_WORLD}")
    return layout


def impossible(layout: Layout, config: Config) -> str | None:
    """Why the config does not allow the layout, in a few words; None if it does."""
    sizes = {axis: getattr(layout, axis) for axis in ("tensor", "pipeline", "sequence")}
    try:
        check_model(config.model_copy(update={"parallel": config.parallel.model_copy(update=sizes)}))
    except ConfigError as error:
        return f"{error.where} {error.wrong}"
    return None
