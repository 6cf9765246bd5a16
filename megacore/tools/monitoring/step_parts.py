"""What the seconds of a rank's step are spent on."""

from collections.abc import Mapping

from megacore.config import Config
from megacore.distributed.axes import called
from megacore.distributed.mesh import Mesh
from megacore.tools.choices.partition import step_times


class WaitedFor:
    """The groups over which a run communicates, as people ask for them: the axes, the ranks that
    sum gradients, and some others.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.data_group, self.data = "×".join(mesh.token_axes), called(mesh.token_axes, mesh.axes)
        self.groups = [axis.name for axis in mesh.axes if axis.name not in mesh.token_axes] + [
            self.data,
            "tied",
            "world",
        ]

    def group_of(self, name: str) -> str:
        """The one of `groups` to which a group of the mesh belongs."""
        kind = name.split()[0]  # of "dp within a host", or "tied embedding.weight"
        if name == self.data_group or kind in (self.data, "shard", "replicate"):
            return self.data
        return kind if kind in self.groups else "world"


class StepParts(WaitedFor):
    """What a step's seconds on a rank are spent on, besides computing, by `names`.

    `bubble` is what the schedule leaves this rank idle, by the simulation of `launch/plan.py` at the speed at
    which it computes. It is taken out of the waits for the pipeline, and then for others. What remains of a
    wait over a group is communication that nothing hides, and time in which others are late.
    """

    def __init__(self, config: Config, mesh: Mesh) -> None:
        super().__init__(mesh)
        # where the bubble is waited out
        self.late = [*(axis.name for axis in mesh.axes if axis.layers), "tied", "world", self.data]
        self.names = ["bubble", "data", *self.groups]
        self.idle = 0.0  # seconds for each second of this rank's computing
        if mesh.pp.size > 1:
            makespan, busy = step_times(config)
            self.idle = (makespan - busy[mesh.pp.rank]) / busy[mesh.pp.rank]

    def of(
        self, computed: float, waits: Mapping[str, float], steps: int, device_waits: Mapping[str, float]
    ) -> dict[str, float]:
        """Seconds a step by `names`.

        `computed`: of this rank's own a step. `waits`: of its host in `steps` steps, by the name of a group,
        and for data. `device_waits`: of its GPU in one step.
        """
        seconds = dict.fromkeys(self.names, 0.0)
        for name, waited in waits.items():
            seconds[name if name == "data" else self.group_of(name)] += waited / steps
        for name, waited in device_waits.items():
            seconds[self.group_of(name)] += waited
        left = self.idle * computed
        for name in self.late:
            taken = min(left, seconds[name])
            seconds[name] -= taken
            seconds["bubble"] += taken
            left -= taken
        return seconds
