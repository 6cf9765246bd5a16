"""What a run has cost: device-hours and, with `log.price_per_device_hour`, money; at its end
beside what the planner said before.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from time import monotonic
from typing import Any

import torch
from pydantic import Field, ValidationError
from torch import nn

from megacore.config import Config
from megacore.config.schema import resolved
from megacore.distributed.mesh import Mesh
from megacore.errors import ConfigError
from megacore.files import open_plain
from megacore.records import Amount, Record
from megacore.tools.choices.devices import KNOWN, MACHINE, known_as
from megacore.tools.metrics_file import recorded
from megacore.tools.planner.devices import Cluster, Level, listed_device
from megacore.tools.planner.profile import profile
from megacore.tools.planner.step_time import predict
from megacore.tools.planner.workload import setting_of
from megacore.train.callbacks import Callback

HOURS, MONEY = "cost/device_hours", "cost/money"
HOUR = 3600.0
# seconds of a hop within a machine and between machines, as the planner's clusters have them
LATENCIES = 5e-6, 2e-5


class Spent(Record):
    """What a line of metrics.jsonl says of it."""

    hours: Amount = Field(0.0, alias=HOURS)


class Cost(Callback):
    """On rank 0, counts the time of all ranks since this process began to train, and what the run's
    folder records of those before it.

    It is the time on the clock: validations, saves and waiting are paid for too. What a process spent behind
    its last logged step is lost with it.
    """

    def __init__(self) -> None:
        self.began = monotonic()
        self.before = 0.0  # device-hours of this run's processes before this one

    def on_start(self, config: Config, mesh: Mesh) -> None:
        """Read what was spent before."""
        self.config, self.mesh = config, mesh
        self.world, self.device = mesh.world.size, mesh.device
        if config.checkpoint.resume != "never":
            self.before = spent_in(Path(resolved(config.log.dir)))

    def metrics(self, metrics: Mapping[str, Any], stages: Sequence[nn.Module]) -> Mapping[str, float]:
        """Device-hours so far, and money where there is a price."""
        hours, price = self.hours, self.config.log.price_per_device_hour
        return {HOURS: hours} | ({} if price is None else {MONEY: hours * price})

    def on_end(self) -> None:
        """Print the sum on GPUs, or if there is a price."""
        price = self.config.log.price_per_device_hour
        if self.device.type == "cpu" and price is None:
            return
        planned = (
            planned_hours(self.config, torch.cuda.get_device_name(self.device))
            if self.device.type == "cuda"
            else None
        )
        expected = ""
        if planned is not None:
            expected = (
                f"; the planner expects {priced(planned, price)} for all steps, without saves and validations"
            )
        devices = f"{self.world} device{'s' * (self.world > 1)}"
        self.mesh.print(f"cost: {priced(self.hours, price)} on {devices}{expected}")

    @property
    def hours(self) -> float:
        """Device-hours so far."""
        return self.before + (monotonic() - self.began) * self.world / HOUR


def priced(hours: float, price: float | None) -> str:
    """Device-hours, and their price."""
    return f"{hours:,.4g} device-hours" + (
        "" if price is None else f" ({hours * price:,.2f} at {price:g} each)"
    )


def spent_in(folder: Path) -> float:
    """The device-hours that a run's folder records, 0 where it records none."""
    path, most = folder / "metrics.jsonl", 0.0
    if not path.exists():
        return most
    with open_plain(path) as file:
        for _, line in recorded(file):
            try:
                most = max(most, Spent.model_validate_json(line).hours)
            except ValidationError:  # somebody else's value
                continue
    return most


def planned_hours(config: Config, device_name: str) -> float | None:
    """The device-hours of all the run's steps by the planner, on the links that its device usually has;
    None for what it does not know.
    """
    name, device = known_as(device_name), listed_device(device_name)
    if name is None or device is None or config.engine.kind == "deepspeed":
        return None
    try:
        setting = setting_of(config)
    except ConfigError:  # layers of the user's own that cannot be measured without content
        return None
    inside, outside = LATENCIES
    facts = KNOWN[name]
    links = (
        Level("inside a machine", MACHINE, facts.link, inside),
        Level("between machines", None, facts.port, outside),
    )
    step = predict(setting, device, Cluster(name, links), profile()).step
    return config.train.steps * step * config.world_size / HOUR
