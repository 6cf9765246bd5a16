"""Ray's machines, as the supervisor sees them: how many workers they have room for, while a run goes on."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from megacore.tools.relaunch.fleet import Machines
from megacore.tools.relaunch.hosts import Planned
from megacore.tools.relaunch.scaling import Rules

NAME = "the Ray cluster"
FREED_SECONDS = 10.0  # within which Ray knows that the workers of the last start have ended


def room_in(
    nodes: Sequence[Mapping[str, Any]], free: Mapping[str, float], each: Mapping[str, float], used: int
) -> tuple[int, int]:
    """How many workers that take `each` have room: on nodes that nobody else uses, and
    beside what others have taken.

    Args:
        nodes: what `ray.nodes()` says.
        free: what is free in the cluster, while `used` workers of our own run.
    """

    def fit(there: Mapping[str, float]) -> int:
        return min(int(there.get(name, 0.0) // amount) for name, amount in each.items())

    whole = sum(fit(node["Resources"]) for node in nodes if node["Alive"])
    return whole, min(whole, used + fit(free))


class RayCluster(Machines):
    """One host with a slot for each worker: Ray chooses the nodes itself."""

    size_option = "--world"

    def __init__(self, config: str, overrides: list[str], rules: Rules, each: Mapping[str, float]) -> None:
        """`each`: what a worker takes, such as `{"CPU": 1}`."""
        super().__init__(config, overrides, rules)
        self.each = each
        self.runs = False

    def where(self, hosts: dict[str, int], named: dict[str, int]) -> str:
        """Ray knows the rest."""
        return NAME

    def named(self) -> dict[str, int]:
        """The cluster, with its slots."""
        import ray

        deadline = time.monotonic() + FREED_SECONDS
        while True:
            used = sum(self.used.values()) if self.runs else 0
            whole, room = room_in(ray.nodes(), ray.available_resources(), self.each, used)
            if self.runs or room == whole or time.monotonic() > deadline:
                return {NAME: room} if room else {}
            time.sleep(0.5)

    def start(self, command: list[str], hosts: dict[str, int], planned: Planned) -> list[str]:
        """The script's own command for so many workers, in this layout."""
        self.runs = True
        return [*command, "--world", str(planned.ranks), *self.overrides, *planned.overrides]

    def ended(self, **how: Any) -> None:
        """The start's workers have ended too."""
        self.runs = False
        super().ended(**how)
