"""The compute-optimal config for a budget, of the family of the largest run's
model, and its layout on a cluster.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from megacore.config import Config
from megacore.errors import ConfigError
from megacore.tools.planner.devices import Cluster, DeviceSpec
from megacore.tools.planner.profile import profile
from megacore.tools.planner.search import Candidate, search
from megacore.tools.scaling.finished import counted, flops_per_token
from megacore.tools.scaling.parametric import Law
from megacore.tools.settings.derive import derive
from megacore.tools.settings.load import apply, resolve, validate

Sections = dict[str, dict[str, Any]]

HOUR = 3600.0
WIDEST = 1 << 16  # features of a candidate
MUCH_WORSE = 1.02  # times the least loss, from which larger models need not be asked for
ROUNDS = 6  # in which model and speed agree, where the budget is device-hours
CLOSE = 0.01
FFN = 64  # of which a feed-forward size is a multiple
RATE = 0.4  # of the peak, from which the first round goes
SIZES: tuple[tuple[str, str], ...] = (
    ("model", "hidden_size"),
    ("model", "num_layers"),
    ("model", "num_heads"),
    ("model", "head_size"),
    ("train", "steps"),
    ("train", "batch_ramp"),
)
SIZES += (("train", "micro_batch_size"), ("optim", "warmup_steps"), ("model", "num_kv_heads"))
DERIVED: tuple[tuple[str, str], ...] = (
    ("model", "ffn_size"),
    ("model", "attention_scale"),
    ("model", "max_positions"),
)
DERIVED += (("optim", "decay_steps"), ("optim", "slow_warmup"))


@dataclass(frozen=True)
class Optimal:
    """A model and the tokens that it is trained on.

    `sections` are of its config; what follows from others is left open.
    """

    config: Config
    sections: Sections
    parameters: int
    tokens: float
    flops: float
    loss: float

    def laid_out(self, overrides: list[str]) -> "Optimal":
        """With a layout's settings in its config."""
        sections = copied(self.sections)
        apply(overrides, sections)
        return replace(self, sections=sections)


class Family:
    """Models that differ from the largest run's in size and steps alone: as many
    features a layer, heads as large.
    """

    def __init__(
        self, largest: Config, overrides: list[str], head_size: int | None, aspect: float | None
    ) -> None:
        """`aspect`: features for each layer, if not the largest run's.

        Raises `ConfigError` for overrides that it cannot have.
        """
        self.sections = open_sections(largest)
        apply(overrides, self.sections)
        self.base = resolve(copied(self.sections), [], "optimal", 1).config
        self.head_size = head_size or largest.head_size
        self.aspect = aspect or largest.model.hidden_size / largest.model.num_layers
        self.kv_ratio = largest.model.num_heads // largest.kv_heads
        ffn = self.sections["model"].get("ffn_size")  # open where it is as large as usual
        self.ffn = None if ffn is None else ffn / largest.model.hidden_size
        self.warmup = largest.optim.warmup_steps / largest.train.steps
        self.sized = lru_cache(maxsize=None)(self._sized)

    def candidates(self) -> Iterator[int]:
        """Numbers of heads."""
        heads = self.kv_ratio
        while heads * self.head_size <= WIDEST:
            yield heads
            heads += self.kv_ratio * max(1, round(heads * 0.05 / self.kv_ratio))

    def _sized(self, heads: int) -> tuple[Sections, int, float]:
        """Sections, parameters and FLOPs a token of the model with so many heads."""
        sections, hidden = copied(self.sections), heads * self.head_size
        sections["model"] |= {
            "hidden_size": hidden,
            "num_layers": max(1, round(hidden / self.aspect)),
            "num_heads": heads,
        }
        if self.ffn is not None:
            sections["model"]["ffn_size"] = FFN * max(1, round(self.ffn * hidden / FFN))
        if self.kv_ratio > 1:
            sections["model"]["num_kv_heads"] = heads // self.kv_ratio
        config = resolve(copied(sections), [], "optimal", 1).config
        return sections, counted(config), flops_per_token(config)

    def best(self, law: Law, flops: float) -> Optimal:
        """The model of the least predicted loss that can be trained for so many FLOPs, and its steps.

        Raises `ConfigError` if that is the smallest or the largest that there is.
        """
        losses: dict[int, float] = {}
        for heads in self.candidates():
            _, parameters, rate = self.sized(heads)
            losses[heads] = law.loss(parameters, flops / rate)
            if losses[heads] > MUCH_WORSE * min(losses.values()):  # it falls and then rises
                break
        best = min(losses, key=losses.__getitem__)
        if best == max(losses):
            raise ConfigError(
                "--budget",
                f"{flops:.3g} FLOPs are for a larger model than any here",
                f"up to {WIDEST:,} features",
            )
        sections, parameters, rate = self.sized(best)
        train = self.base.train
        steps = max(1, train.batches_in(round(flops / rate / train.seq_len + train.global_batch_size / 2)))
        sections = copied(sections)
        sections["train"]["steps"] = steps
        sections["optim"]["warmup_steps"] = round(self.warmup * steps)
        tokens = float(train.samples_through(steps) * train.seq_len)
        config = resolve(copied(sections), [], "optimal", 1).config
        return Optimal(config, sections, parameters, tokens, rate * tokens, law.loss(parameters, tokens))


def copied(sections: Sections) -> Sections:
    """A copy, into which settings may be written."""
    return {name: dict(section) for name, section in sections.items()}


def open_sections(config: Config) -> Sections:
    """The sections of a run's config that a model of another size may keep: without layout and
    folder, and without what was derived.
    """
    found = config.model_dump(mode="json", by_alias=True)
    sections = {name: found[name] for name in ("model", "train", "optim", "data", "checkpoint")}
    for section, key in DERIVED:
        without = copied(sections)
        value = without[section].pop(key)
        if derive(validate(copied(without)), "optimal", 1).get(f"{section}.{key}", value) == value:
            sections = without
    for section, key in SIZES:
        del sections[section][key]
    return sections


def laid_out(
    optimal: Optimal, world: int, device: DeviceSpec, cluster: Cluster, memory_gib: float
) -> Candidate:
    """Its fastest layout on so many devices. Raises `ConfigError` if none fits."""
    train = optimal.config.train
    if train.precision not in device.peak_flops:
        raise ConfigError(
            "--gpu",
            f"the {train.precision} peak of {device.name} is not known",
            "train.precision=bf16, or another device",
        )
    config = resolve(copied(optimal.sections), ["train.micro_batch_size=1"], "optimal", 1).config
    found = search(config, world, device, cluster, profile(), memory_gib)
    if found.fit:
        return found.fit[0]
    if not found.counted:
        wrong = f"{train.global_batch_size} divides in no layout of {world} devices"
        raise ConfigError(
            "train.global_batch_size",
            wrong,
            f"a multiple of {world}, such as train.global_batch_size={8 * world}",
        )
    least = "" if found.least is None else f": the least is {found.least.needs_gib:,.1f} GiB"
    raise ConfigError(
        "--world",
        f"the best model fits on {world} devices of {memory_gib:g} GiB in no layout{least}",
        "more devices",
    )


def for_hours(
    family: Family, law: Law, hours: float, device: DeviceSpec, lay_out: Callable[[Optimal], Candidate]
) -> tuple[Optimal, Candidate]:
    """The best model for device-hours, whose FLOPs depend on how fast that model
    runs: both are found in turns.
    """
    precision = family.base.train.precision
    if precision not in device.peak_flops:
        raise ConfigError(
            "--gpu",
            f"the {precision} peak of {device.name} is not known",
            "train.precision=bf16, or another device",
        )
    peak_of_all = hours * HOUR * device.peak_flops[precision]
    rate = RATE
    for _ in range(ROUNDS):
        optimal = family.best(law, peak_of_all * rate)
        found = lay_out(optimal)
        if abs(found.mfu / rate - 1) < CLOSE:
            break
        rate = found.mfu
    return optimal, found
