"""What a sweep takes, before it starts: the planner's seconds, device-hours and
money, of each trial and of all.
"""

import heapq
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter

from megacore.config.optim_groups import ParameterGroups
from megacore.errors import ConfigError
from megacore.tools.choices.devices import KNOWN, MACHINE, known_as
from megacore.tools.choices.partition import partitioned
from megacore.tools.planner.devices import (
    Cluster,
    DeviceSpec,
    Level,
    listed_device,
    read_cluster,
    read_device,
)
from megacore.tools.planner.profile import profile
from megacore.tools.planner.step_time import predict
from megacore.tools.planner.workload import setting_of
from megacore.tools.sweep.results import Row
from megacore.tools.sweep.trials import Trial

HOUR = 3600.0
# seconds of a hop within a machine and between machines, as the planner's clusters have them
LATENCIES = 5e-6, 2e-5
MEASURED_SECONDS = 0.3
SHOWN = 40  # trials in the table


@dataclass(frozen=True)
class Machine:
    """What trials run on, and where its constants are from."""

    device: DeviceSpec
    cluster: Cluster
    source: str


def machine_of(
    device: str | None, cluster: str | None, trials: Sequence[Trial], threads: int, gpu: str | None
) -> Machine | None:
    """The device that is named, or this machine's `gpu`, or its processor, which is measured in a second.

    None for a GPU of which the planner knows nothing. Raises `ConfigError`.
    """
    if device is None and gpu is None:
        if cluster is not None:
            raise ConfigError("--cluster", "links alone predict nothing", "also --gpu")
        return measured(threads)
    if device is None:
        if (listed := listed_device(str(gpu))) is None:
            return None
        return Machine(
            listed,
            read_cluster(cluster) if cluster else links_of(listed),
            f"{listed.name}, as its maker states it",
        )
    named = read_device(device)
    if cluster is None and known_as(named.name) is None and any(trial.ranks > 1 for trial in trials):
        raise ConfigError(
            "--cluster",
            f"the links of {named.name} are not known, and a trial has several ranks",
            "also --cluster",
        )
    return Machine(
        named, read_cluster(cluster) if cluster else links_of(named), f"{named.name}, as its maker states it"
    )


def links_of(device: DeviceSpec) -> Cluster:
    """The links that a device usually has; of an unknown one none, for one rank."""
    name = known_as(device.name)
    if name is None:
        return Cluster("none", (Level("none", None, 1.0, 0.0),))
    facts, (inside, outside) = KNOWN[name], LATENCIES
    levels = (
        Level("inside a machine", MACHINE, facts.link, inside),
        Level("between machines", None, facts.port, outside),
    )
    return Cluster(name, levels)


def measured(threads: int) -> Machine:
    """This machine's processor, by a product and a copy of so many threads; the links
    between its ranks are half a copy.
    """
    import torch

    torch.set_num_threads(threads)

    def best(size: int, operation: str) -> float:
        source, least, until = torch.ones(size, size), math.inf, perf_counter() + MEASURED_SECONDS
        target = torch.empty_like(source)
        while perf_counter() < until or least == math.inf:
            began = perf_counter()
            torch.mm(source, source, out=target) if operation == "product" else target.copy_(source)
            least = min(least, perf_counter() - began)
        return least

    flops, rate = 2 * 1024**3 / best(1024, "product"), 2 * 4 * 4096**2 / best(4096, "copy")
    peaks = {"fp32": flops, "bf16": flops, "fp16": flops, "fp64": flops / 2}
    device = DeviceSpec("this processor", peaks, memory_bytes_per_second=rate, overlaps=False)
    links = Cluster("this machine", (Level("memory", None, rate / 2, 2e-5),))
    return Machine(
        device,
        links,
        f"this processor, {threads} thread{'s' * (threads > 1)} a rank, measured by a product and a copy",
    )


def seconds_of(trials: Sequence[Trial], machine: Machine) -> dict[Trial, float | None]:
    """The planner's seconds of each trial's steps; None of what it cannot predict.

    Steps with smaller batches take as much less.
    """
    found: dict[str, float | None] = {}
    out: dict[Trial, float | None] = {}
    for trial in trials:
        config = trial.config.model_dump(mode="json", by_alias=True)
        config["train"] |= {"seed": 0, "steps": 0}
        # of others a step takes as long
        whole = any(group.rule.whole for group in ParameterGroups(trial.config.optim).every)
        alike = json.dumps(
            [
                config[section]
                for section in ("model", "parallel", "train", "engine", *(["optim"] if whole else []))
            ]
        )
        if alike not in found:
            found[alike] = step_seconds(trial, machine)
        step, train = found[alike], trial.config.train
        out[trial] = (
            None if step is None else step * train.samples_through(train.steps) / train.global_batch_size
        )
    return out


def step_seconds(trial: Trial, machine: Machine) -> float | None:
    """The planner's seconds of a step; None of what it cannot predict."""
    if (
        trial.config.engine.kind == "deepspeed"
        or trial.config.train.precision not in machine.device.peak_flops
    ):
        return None
    try:
        return predict(setting_of(partitioned(trial.config)), machine.device, machine.cluster, profile()).step
    except ConfigError:  # layers of the user's own that cannot be measured without content
        return None


def calibration(seconds: dict[Trial, float | None], rows: Sequence[Row]) -> tuple[float, int]:
    """By how much finished trials took longer than predicted, in the median, and how many there are."""
    ratios = [
        row.seconds / own for row in rows if row.finished and row.seconds and (own := seconds[row.trial])
    ]
    return (median(ratios), len(ratios)) if ratios else (1.0, 0)


def clock_seconds(seconds: Sequence[float], at_once: int) -> float:
    """From the first start to the last end of so many at a time, each begun where one has ended."""
    ends = [0.0] * min(at_once, max(1, len(seconds)))
    for own in seconds:
        heapq.heapreplace(ends, ends[0] + own)
    return max(ends)


def show(rows: Sequence[Row], machine: Machine | None, at_once: int, price: float | None) -> None:
    """Prints what the trials that are not finished will take.

    `price`: of a device and hour, where the trial's config has none.
    """
    from rich.console import Console
    from rich.table import Table

    console = Console(
        highlight=False, markup=False, soft_wrap=True, width=None if sys.stdout.isatty() else 140
    )
    left = [row.trial for row in rows if not row.finished]
    done = len(rows) - len(left)
    console.print(
        f"{len(rows)} trials{f', of which {done} are finished' if done else ''}; {at_once} at a time"
    )
    if not left:
        return
    predicted: dict[Trial, float | None] = (
        {} if machine is None else seconds_of([row.trial for row in rows], machine)
    )
    factor, known = calibration(predicted, rows) if predicted else (1.0, 0)
    table = Table(
        "trial",
        "ranks",
        "steps",
        "tokens",
        "seconds",
        "device-hours",
        *(["money"] if price_of(left, price) else []),
        box=None,
    )
    hours, money, times = 0.0, 0.0, []
    for number, trial in enumerate(left):
        train, own = trial.config.train, predicted.get(trial)
        tokens = train.samples_through(train.steps) * train.seq_len
        cells = [trial.name or "the config", str(trial.ranks), f"{train.steps:,}", f"{tokens:,}"]
        if own is None:
            cells += ["not known"]
        else:
            rate = trial.config.log.price_per_device_hour if price is None else price
            own *= factor
            own_hours = own * trial.ranks / HOUR
            times.append(own)
            hours, money = hours + own_hours, money + own_hours * (rate or 0.0)
            cells += [f"{own:,.3g}", f"{own_hours:,.3g}", *([f"{own_hours * rate:,.4g}"] if rate else [])]
        if number < SHOWN:
            table.add_row(*cells)
    console.print(table)
    if len(left) > SHOWN:
        console.print(f"… and {len(left) - SHOWN} more")
    if machine is None or not times:
        console.print("in all: not known; --gpu names a device that the planner knows")
        return
    unknown = (
        f", without {len(left) - len(times)} that the planner cannot predict"
        if len(times) < len(left)
        else ""
    )
    paid = f", {money:,.4g} in money" if price_of(left, price) else ""
    console.print(
        f"in all: {clock_seconds(times, at_once):,.3g} s on the clock, {hours:,.3g} "
        f"device-hours{paid}{unknown}"
    )
    source = f"; corrected by {known} finished trials, ×{factor:.2f}" if known else ""
    console.print(
        f"predicted by the planner for {machine.source}{source}; start-up, validations and saves are not "
        "in it"
    )


def price_of(trials: Sequence[Trial], price: float | None) -> bool:
    """Whether anything has a price."""
    return bool(price) or any(trial.config.log.price_per_device_hour for trial in trials)
