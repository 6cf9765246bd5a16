"""Saves a run's checkpoints, reports them, and handles saves that fail."""

import time
from collections.abc import Callable
from pathlib import Path

from megacore.checkpoint import Ranks, Saved, Saver
from megacore.checkpoint.disk import size_text
from megacore.config import Config
from megacore.config.schema import resolved
from megacore.distributed.mesh import Mesh
from megacore.engine.protocol import Engine
from megacore.errors import CheckpointError
from megacore.train.logs import Logs


class Saving:
    """Saves an engine's tensors in the run's folder. All methods but `read_seconds` are collective."""

    def __init__(self, config: Config, mesh: Mesh, engine: Engine, logs: Logs) -> None:
        self.config, self.engine, self.logs = config, engine, logs
        options = config.checkpoint
        self.saver = Saver(
            Path(resolved(config.log.dir)) / "checkpoints",
            Ranks(mesh),
            keep=options.keep,
            keep_every=options.keep_every,
            background=options.async_,
            device=mesh.device,
        )
        self.step = 0  # of the last save that began
        self.latest: Path | None = None  # the newest that was saved, and its step
        self.latest_step = 0
        self.said: Path | None = None
        self.on_saved: Callable[[Path], None] = lambda path: None  # called once for each checkpoint, on every rank
        self.took = 0.0  # seconds from a save's beginning until it was on disk
        self.seconds = 0.0  # that training has waited since the last reading

    def save(self, step: int, progress: dict[str, int]) -> None:
        """Saves the step just done, with the run's `progress`. Returns when it is on disk, or with `checkpoint.async` when it has begun."""
        self.finish()
        started = time.perf_counter()
        config = self.config
        state = progress | {
            "seed": config.train.seed,
            "engine": self.engine.state(),
            "model": config.model.model_dump(),
            "config": config.model_dump(by_alias=True),
        }
        self.step = step
        self.saver.start(step, self.engine.tensors(), state)
        self.seconds += time.perf_counter() - started
        if not config.checkpoint.async_:
            self.finish()

    def finish(self, *, last: bool = False) -> None:
        """Waits for the save that is under way, if there is one.

        Raises:
            CheckpointError: on all ranks, if it failed; with `checkpoint.on_failure=continue` only for the `last` save.
        """
        started = time.perf_counter()
        try:
            saved = self.saver.finish()
        except CheckpointError as error:
            if last or self.config.checkpoint.on_failure == "stop":
                raise
            self.logs.say(f"WARNING: {error}; training goes on without it")
        else:
            if saved is not None:
                self.latest, self.latest_step = saved.path, self.step
                self._say(saved)
        self.seconds += time.perf_counter() - started

    def look(self, failed: bool) -> None:
        """Reports a save that is done. Called between steps, when ranks have agreed whether it has `failed` on any of them."""
        if failed:
            self.finish()
        elif saved := self.saver.committed:
            self._say(saved)

    def _say(self, saved: Saved) -> None:
        if saved.path != self.said:
            self.said, self.took = saved.path, saved.seconds
            self.logs.say(f"saved {saved.path} ({size_text(saved.nbytes)} in {saved.seconds:.3g} s)")
            self.on_saved(saved.path)

    def read_seconds(self) -> float:
        """Seconds that training has waited for saves since the last reading."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds
