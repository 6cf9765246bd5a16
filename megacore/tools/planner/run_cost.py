"""What a whole run costs: days, money, energy, and the failures and checkpoints of a run at its scale."""

import math
from dataclasses import dataclass
from math import prod

from megacore.config.optim_groups import ParameterGroups
from megacore.config.precision import GRADIENT_BYTES
from megacore.config.schema import Config
from megacore.engine.whole_matrices import own_state_shapes
from megacore.tools.planner.error_bars import bar
from megacore.tools.settings.group_table import parameter_shards

DAY = 86400.0
UNITS = {"days": DAY, "hours": 3600.0, "minutes": 60.0, "seconds": 1.0}
# Grattafiori et al. 2024 (Llama 3, table 5): 419 unexpected interruptions in 54 days of 16,384 H100.
DEVICE_HOURS_A_FAILURE = 16384 * 54 * 24 / 419
RESTART_SECONDS = 600.0  # from a failure to the first step behind the checkpoint
WRITE_BYTES_PER_SECOND = 1e9  # of a checkpoint, by each host


@dataclass(frozen=True)
class RunCost:
    """A run over some tokens."""

    steps: int
    days: float  # without failures
    device_hours: float  # with what failures and checkpoints cost
    money: float | None
    energy_mwh: float | None  # at the devices' power limit
    failures: float  # expected
    checkpoint_seconds: float  # that a checkpoint takes, if training waits for it
    checkpoint_steps: int  # between two, for the least loss
    lost: float  # of the time, to checkpoints, repeated steps and restarts


def cost(
    config: Config,
    step_seconds: float,
    tokens: float,
    world: int,
    host_ranks: int,
    price: float | None,
    power_watts: float | None,
    less: float = 0.0,
) -> RunCost:
    """The cost of a run.

    `price` is that of a device and hour. `less`: seconds that steps with smaller batches take less.

    The interval between checkpoints is Daly's (2006), whose first term is Young's (1974), sqrt(2·δ·M), for
    checkpoints of δ seconds and M seconds between failures.
    """
    samples = math.ceil(tokens / config.train.seq_len)
    steps = config.train.batches_in(samples - 1) + 1
    seconds = steps * step_seconds - less
    between = DEVICE_HOURS_A_FAILURE * 3600 / world
    delta = checkpoint_bytes(config) / (WRITE_BYTES_PER_SECOND * max(1, world // host_ranks))
    interval = best_interval(delta, between)
    every = max(1, round(interval / step_seconds))
    lost = loss(every * step_seconds, delta, between)
    hours = seconds * (1 + lost) * world / 3600
    return RunCost(
        steps,
        seconds / DAY,
        hours,
        None if price is None else hours * price,
        None if power_watts is None else hours * power_watts / 1e6,
        seconds * (1 + lost) / between,
        delta,
        every,
        lost,
    )


def cost_lines(
    config: Config,
    step_seconds: float,
    tokens: float,
    host_ranks: int,
    price: float | None,
    power_watts: float | None,
    less: float = 0.0,
) -> list[str]:
    """What a run over some tokens costs, in words. `less`: see `cost`."""
    world = config.world_size
    found = cost(config, step_seconds, tokens, world, host_ranks, price, power_watts, less)
    error = bar(world, config.parallel.pipeline, host_ranks)
    unit = unit_of(found.days * DAY)
    plain, whole = found.days * DAY / UNITS[unit], found.device_hours * 3600 / world / UNITS[unit]
    time = f"{plain:.4g} {unit} ({error.around(plain)}), or {whole:.4g} with failures and checkpoints"
    hours = f"{found.device_hours:,.0f}" if found.device_hours >= 10 else f"{found.device_hours:.2g}"
    lines = [f"{tokens:.3g} tokens are {found.steps:,} steps: {time}, which are {hours} device hours"]
    if found.money is not None:
        lines.append(f"money     {found.money:,.0f}, at {price:g} a device and hour")
    if found.energy_mwh is not None:
        lines.append(f"energy    at most {found.energy_mwh:,.3g} MWh, at the devices' power limit")
    rate = f"at one in {DEVICE_HOURS_A_FAILURE:,.0f} device hours (Llama 3's on 16,384 H100)"
    lines.append(f"failures  {found.failures:,.3g} expected, {rate}")
    if found.checkpoint_steps < found.steps:
        takes = f"a checkpoint takes {found.checkpoint_seconds:.0f} s, each host writing 1 GB/s"
        lines.append(
            f"saving    checkpoint.every={found.checkpoint_steps} loses least "
            f"({found.lost:.2%} of the time), if {takes}"
        )
    else:  # the best interval is longer than the run
        lines.append("saving    the run is too short for advice on checkpoint.every")
    return lines


def unit_of(seconds: float) -> str:
    """The largest unit of which a time has one."""
    return next((unit for unit, each in UNITS.items() if seconds >= each), "seconds")


def best_interval(delta: float, between: float) -> float:
    """Seconds of work between checkpoints that lose least (Daly 2006, equation 37)."""
    if delta >= 2 * between:
        return between
    ratio = delta / (2 * between)
    return math.sqrt(2 * delta * between) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - delta


def loss(interval: float, delta: float, between: float) -> float:
    """The time lost for each second of work: to checkpoints, and at each failure
    half an interval and a restart.
    """
    return delta / interval + ((interval + delta) / 2 + RESTART_SECONDS) / between


def checkpoint_bytes(config: Config) -> int:
    """Bytes of a checkpoint: masters and the optimizer's state, once."""
    groups, numbers = ParameterGroups(config.optim), 0
    for name, shard in parameter_shards(config).items():
        group = groups.of(name, shard)
        own = sum(prod(shape) for shape in own_state_shapes(group.rule, shard).values())
        numbers += prod(shard.global_shape) * (1 + len(group.elementwise)) + own
    return numbers * GRADIENT_BYTES[config.train.precision]
