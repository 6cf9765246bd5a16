"""How unevenly a run's router spread tokens over experts: the loads that it logged say how many rows the busiest rank has."""

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from megacore.errors import ConfigError
from megacore.files import read_text

LOAD = "expert_load/"  # the figures of single experts (`monitoring.expert_load`): tokens as a part of the mean


@dataclass(frozen=True)
class Routing:
    """Loads of the experts of every block, of some steps."""

    steps: tuple[tuple[tuple[float, ...], ...], ...]

    @property
    def experts(self) -> int:
        """Of a block."""
        return len(self.steps[0][0])

    @cached_property
    def _busiest(self) -> dict[int, float]:
        return {}

    def busiest(self, ranks: int) -> float:
        """Rows of the rank that has most, of `ranks` that divide the experts, as a part of the mean: the mean of steps and blocks."""
        if ranks not in self._busiest:
            each = self.experts // ranks
            found = [max(sum(loads[i : i + each]) / each for i in range(0, self.experts, each)) for step in self.steps for loads in step]
            self._busiest[ranks] = sum(found) / len(found)
        return self._busiest[ranks]


def read_routing(path: str, experts: int | None) -> Routing:
    """The loads in the second half of a run's metrics.jsonl. Raises `ConfigError`."""
    right = "the metrics.jsonl of a run with experts"
    if experts is None:
        raise ConfigError("--routing", "the model has no experts", "a config with model.num_experts")
    try:
        lines = read_text(Path(path)).splitlines()
        records = [record for line in lines if LOAD in line and isinstance(record := json.loads(line), dict)]
    except (OSError, ValueError) as error:
        raise ConfigError("--routing", f"cannot read {path}: {error}", right) from None
    steps = []
    for record in records[len(records) // 2 :]:
        blocks: dict[str, dict[int, float]] = {}
        for name, load in record.items():
            block, _, number = name.removeprefix(LOAD).rpartition(".")
            if name.startswith(LOAD) and number.isdecimal() and isinstance(load, int | float) and load >= 0:
                blocks.setdefault(block, {})[int(number)] = float(load)
        steps.append(tuple(tuple(loads[i] for i in sorted(loads)) for loads in blocks.values()))
    counts = {len(loads) for step in steps for loads in step}
    if counts != {experts}:
        has = "no load of single experts" if not counts else f"loads of {', '.join(map(str, sorted(counts)))} experts"
        raise ConfigError("--routing", f"{path} has {has}", f"loads of model.num_experts {experts}")
    return Routing(tuple(steps))
