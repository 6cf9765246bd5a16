"""The compute-optimal config for a budget, of the family of the runs' largest model, and its plan on a cluster."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from megacore.config import Config
from megacore.errors import ConfigError
from megacore.tools.planner.devices import Cluster, DeviceSpec
from megacore.tools.planner.profile import profile
from megacore.tools.planner.search import Candidate, search
from megacore.tools.scaling.finished import counted, flops_per_token
from megacore.tools.scaling.parametric import Law
from megacore.tools.settings.load import resolve

HOUR = 3600.0
WIDEST = 1 << 16  # hidden size of a candidate
ROUNDS = 6  # in which model and speed agree, where the budget is device-hours
RATE = 0.4  # of the peak, from which the first round goes


@dataclass(frozen=True)
class Optimal:
    """A model and the tokens that it is trained on."""

    config: Config
    sections: dict[str, dict[str, Any]]
    parameters: int
    tokens: float
    flops: float
    loss: float


class Family:
    """Models that differ from one in their size: `aspect` features a layer, heads of `head_size` features."""

    def __init__(self, sections: dict[str, dict[str, Any]], overrides: list[str], head_size: int | None, aspect: float | None) -> None:
        """`sections`: of the config of the largest run. Raises `ConfigError` for overrides that it cannot have."""
        base = resolve({name: dict(section) for name, section in sections.items()}, list(overrides), "optimal", 1).config
        self.sections, self.overrides, self.base = sections, overrides, base
        self.head_size = head_size or base.head_size
        self.aspect = aspect or base.model.hidden_size / base.model.num_layers
        self.sized = lru_cache(maxsize=None)(self._sized)

    def candidates(self) -> Iterator[int]:
        """Numbers of heads."""
        heads = 1
        while heads * self.head_size <= WIDEST:
            yield heads
            heads = max(heads + 1, round(heads * 1.05))

    def _sized(self, heads: int) -> tuple[dict[str, dict[str, Any]], Config, int, float]:
        """Sections, config, parameters and FLOPs a token of the model with so many heads."""
        sections = {name: dict(section) for name, section in self.sections.items()}
        hidden = heads * self.head_size
        model = sections["model"]
        for key in ("num_kv_heads", "ffn_size", "head_size"):
            model.pop(key, None)
        layers = max(1, round(hidden / self.aspect))
        model |= {"hidden_size": hidden, "num_layers": layers, "num_heads": heads}
        config = resolve(sections, list(self.overrides), "optimal", 1).config
        return sections, config, counted(config), flops_per_token(config)

    def best(self, law: Law, flops: float) -> Optimal:
        """The model of the least predicted loss that can be trained for so many FLOPs, and its steps."""

        def loss(heads: int) -> float:
            _, _, parameters, rate = self.sized(heads)
            return law.loss(parameters, flops / rate)

        found, least = 1, math.inf
        for heads in self.candidates():  # the loss falls and then rises
            if (own := loss(heads)) > least * 1.05:
                break
            if own < least:
                found, least = heads, own
        sections, config, parameters, rate = self.sized(found)
        train = config.train
        steps = max(1, round(flops / rate / (train.global_batch_size * train.seq_len)))
        sections = {name: dict(section) for name, section in sections.items()}
        sections["train"] = sections.get("train", {}) | {"steps": steps}
        config = resolve({name: dict(section) for name, section in sections.items()}, [], "optimal", 1).config
        tokens = float(steps * train.global_batch_size * train.seq_len)
        return Optimal(config, sections, parameters, tokens, rate * tokens, law.loss(parameters, tokens))


def family_sections(config: Config) -> dict[str, dict[str, Any]]:
    """The sections of a run's record that another size may keep: without what was derived from its own, its layout and its folder."""
    found = config.model_dump(mode="json", by_alias=True)
    kept = {name: found[name] for name in ("model", "train", "optim", "data", "checkpoint")}
    for section, key in (("optim", "decay_steps"), ("model", "max_positions"), ("train", "steps")):
        kept[section].pop(key, None)
    warmup = config.optim.warmup_steps
    if warmup:
        kept["optim"]["warmup_steps"] = 0
    return kept


def laid_out(optimal: Optimal, world: int, device: DeviceSpec, cluster: Cluster, memory_gib: float) -> Candidate:
    """Its fastest layout on so many devices. Raises `ConfigError` if none fits."""
    train = optimal.config.train
    if train.precision not in device.peak_flops:
        raise ConfigError("--device", f"the {train.precision} peak of {device.name} is not known", "train.precision=bf16, or another device")
    config = resolve({name: dict(section) for name, section in optimal.sections.items()}, ["train.micro_batch_size=1"], "optimal", 1).config
    found = search(config, world, device, cluster, profile(), memory_gib)
    if found.fit:
        return found.fit[0]
    if not found.counted:
        wrong = f"{train.global_batch_size} divides in no layout of {world} devices"
        raise ConfigError("train.global_batch_size", wrong, f"a multiple of {world}, behind the runs")
    least = found.least.needs_gib if found.least is not None else math.nan
    raise ConfigError("--world", f"the model fits on {world} devices of {memory_gib:g} GiB in no layout: it needs {least:,.1f}", "more devices")


def for_hours(
    family: Family, law: Law, hours: float, world: int, device: DeviceSpec, lay_out: Callable[[Optimal], Candidate]
) -> tuple[Optimal, Candidate]:
    """The best model for device-hours, whose FLOPs depend on how fast that model runs: both are found in turns."""
    peak = device.peak_flops[family.base.train.precision]
    flops = hours * HOUR * peak * RATE
    for _ in range(ROUNDS):
        optimal = family.best(law, flops)
        found = lay_out(optimal)
        before, flops = flops, hours * HOUR * peak * found.mfu
        if abs(flops / before - 1) < 0.005:
            break
    return optimal, found
