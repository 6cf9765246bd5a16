"""Profiles the steps and ranks that `log.profile` names: a trace for ui.perfetto.dev, a GPU's
memory, and where each step went.
"""

from pathlib import Path

from megacore.config import Config
from megacore.config.schema import resolved
from megacore.distributed.axes import place_text, told
from megacore.distributed.mesh import Mesh
from megacore.tools.monitoring.step_parts import WaitedFor
from megacore.tools.monitoring.step_shares import StepShares, draw, table
from megacore.tools.monitoring.trace import Trace
from megacore.tools.output_files import replaced
from megacore.train.callbacks import Callback

FOLDER = "profile"  # in the run's


class Profile(Callback):
    """Waits for the first of the steps.

    From there on all ranks measure where their time goes, and the chosen ones are traced.
    """

    on_error = "raise"  # all ranks measure together

    def on_start(self, config: Config, mesh: Mesh) -> None:
        self.mesh = mesh
        self.settings = resolved(config.log.profile)
        self.folder = Path(resolved(config.log.dir)) / FOLDER
        self.shares: StepShares | None = None  # while steps are profiled
        self.trace: Trace | None = None  # of a rank that is traced
        self.done = False

    def on_step_begin(self, step: int, logged: bool) -> None:
        """Begins with a step of the window.

        Ends with one that is none, or that does not follow: a run may go back.
        """
        listeners = self.mesh.listeners
        if self.done:
            return
        if step > self.settings.steps[1] or (self.shares is not None and step != self.shares.step + 1):
            self.done = True
            if self.shares is not None:
                with listeners.pause("writing a profile"):
                    try:
                        self._write()
                    finally:
                        self.mesh.barrier()  # so that nobody waits for it within a step
        elif self.shares is None and step >= self.settings.steps[0]:
            self._begin(step)

    def _begin(self, step: int) -> None:
        listeners, mesh, groups = self.mesh.listeners, self.mesh, WaitedFor(self.mesh)
        parts = ["compute", *map(over, groups.groups), "waiting", "optimizer", "data", "other"]
        self.first, self.shares = (
            step,
            StepShares(mesh.device, parts, lambda name: over(groups.group_of(name))),
        )
        with listeners.pause("beginning a profile"):
            if mesh.place.rank in self.settings.ranks:
                self.trace = Trace(mesh, self.settings.memory)
            mesh.barrier()
        for listener in (self.trace, self.shares):
            if listener is not None:
                listener.on_step_begin(step, False)  # which it has missed
                listeners.add(listener)

    def _write(self) -> None:
        """Writes what there is. If that fails, it says so, and training goes on."""
        shares, trace, self.shares, self.trace = self.shares, self.trace, None, None
        assert shares is not None
        shares.end_step()
        self.mesh.listeners.remove(shares)
        if trace is None:
            return
        self.mesh.listeners.remove(trace)
        trace.stop()
        rank, sizes, axes = self.mesh.place.rank, self.mesh.sizes, self.mesh.axes
        steps = f"{self.first}-{shares.step}" if shares.step > self.first else f"{self.first}"
        where = "".join(
            f"_{axis.name}{self.mesh.coordinates[axis.name]}" for axis in axes if told(axis, sizes)
        )
        stem = f"{self.folder}/steps_{steps}_rank_{rank:05d}{where}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            lines = [f"profile of steps {steps}: {', '.join(trace.write(stem))}"]
            if shares.steps:
                title = f"where rank {rank}'s time went ({place_text(rank, sizes, axes)})"
                lines.append(text := table(shares.steps, title))
                with replaced(f"{stem}.txt") as aside:
                    Path(aside).write_text(text + "\n", encoding="utf-8")
                with replaced(f"{stem}.png") as aside:
                    draw(shares.steps, title, aside)
        except OSError as error:
            lines = [
                f"WARNING: the profile cannot be written ({error.strerror or error}); training continues "
                "without it"
            ]
        if rank == min(self.settings.ranks):
            print("\n".join(lines), flush=True)

    def on_end(self) -> None:
        """Writes what there is, if the run ends while steps are profiled."""
        if self.shares is not None:
            self._write()


def over(group: str) -> str:
    """The part of what goes over a group."""
    return f"communication, {group}"
