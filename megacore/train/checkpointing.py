"""A run's checkpoints: saves them, reports them, handles saves that fail, and
chooses the one that a run resumes.

To resume, rank 0 finds the checkpoint, and all ranks check that it is whole before they use it.
"""

import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from megacore.checkpoint import Ranks, Reader, Saved, Saver
from megacore.checkpoint.disk import size_text
from megacore.config import Config
from megacore.config.schema import resolved
from megacore.distributed.collectives import broadcast_text
from megacore.distributed.mesh import Mesh
from megacore.engine.protocol import Engine
from megacore.errors import CheckpointError
from megacore.train.inputs import Inputs


class Saving:
    """Saves an engine's tensors in the run's folder. All methods but `read_seconds` are collective."""

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        engine: Engine,
        say: Callable[[str], None],
        clean: Callable[[Path], None] = lambda newest: None,
    ) -> None:
        """`say` prints a line. `clean`: see `Saver`."""
        self.config, self.engine, self.say = config, engine, say
        folder = Path(resolved(config.log.dir)) / "checkpoints"
        self.saver = Saver(
            folder, Ranks(mesh), clean=clean, background=config.checkpoint.async_, device=mesh.device
        )
        self.step = 0  # of the last save that began
        self.latest: Path | None = None  # the newest that was saved, and its step
        self.latest_step = 0
        self.said: Path | None = None
        # each is called once for each checkpoint, on every rank
        self.on_saved = list[Callable[[Path], None]]()
        self.took = 0.0  # seconds from a save's beginning until it was on disk
        self.seconds = 0.0  # that training has waited since the last reading

    def save(self, step: int, progress: dict[str, Any]) -> None:
        """Save the step just done, with what the trainer says of the run.

        Returns when it is on disk, or with `checkpoint.async` when it has begun.
        """
        self.finish()
        started = time.perf_counter()
        config = self.config
        state = progress | {
            "seed": config.train.seed,
            "engine": self.engine.state(),
            "model": config.model.model_dump(mode="json"),
            "config": config.model_dump(mode="json", by_alias=True),
        }
        self.step = step
        self.saver.start(step, self.engine.tensors(), state)
        self.seconds += time.perf_counter() - started
        if not config.checkpoint.async_:
            self.finish()

    def finish(self, *, last: bool = False) -> None:
        """Waits for the save that is under way, if there is one.

        Raises:
            CheckpointError: on all ranks, if it failed; with `checkpoint.on_failure=continue` only for the
                `last` save.
        """
        started = time.perf_counter()
        try:
            saved = self.saver.finish()
        except CheckpointError as error:
            if last or self.config.checkpoint.on_failure == "stop":
                raise
            self.say(f"WARNING: {error}; training continues without it")
        else:
            if saved is not None:
                self.latest, self.latest_step = saved.path, self.step
                self._say(saved)
        self.seconds += time.perf_counter() - started

    def look(self, failed: bool) -> None:
        """Reports a save that is done.

        Called between steps, when ranks have agreed whether it has `failed` on any of them.
        """
        if failed:
            self.finish()
        elif saved := self.saver.committed:
            self._say(saved)

    def _say(self, saved: Saved) -> None:
        if saved.path != self.said:
            self.said, self.took = saved.path, saved.seconds
            self.say(f"saved {saved.path} ({size_text(saved.nbytes)} in {saved.seconds:.3g} s)")
            for hear in self.on_saved:
                hear(saved.path)

    def read_seconds(self) -> float:
        """Seconds that training has waited for saves since the last reading."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds


def choose(inputs: Inputs, mesh: Mesh) -> tuple[Reader, bool] | None:
    """The newest whole checkpoint that `inputs` name, and whether only its weights are meant;
    None if they name none. Collective.

    Raises:
        CheckpointError: on every rank, if the checkpoint that was named is damaged, or all that could be
            resumed are.
    """
    ranks = Ranks(mesh)
    while True:
        # Only rank 0 has looked: others might see the shared file system in another state, and thousands
        # would keep it busy.
        whole, weights = (
            broadcast_text(str(path or ""), mesh.world, mesh.device)
            for path in (inputs.checkpoint, inputs.weights)
        )
        if not whole and not weights:
            return None
        try:
            opened, inputs.opened = inputs.opened, None
            return proved(
                Path(whole or weights), ranks, opened, partial(mesh.observers.phase, "checking a checkpoint")
            ), not whole
        except CheckpointError as damage:
            if not whole:
                raise
            if refusal := together(ranks, partial(inputs.fall_back, damage)):
                raise refusal from None


def proved(path: Path, ranks: Ranks, opened: Reader | None, note: Callable[[], None]) -> Reader:
    """Opens the checkpoint in folder `path`; together, the ranks have read all its files and compared them
    with their digests. Collective. Rank 0 has `opened` it already, and gives the manifest to the others.
    `note` is called now and then, because this may take longer than a hang.

    Raises:
        CheckpointError: on every rank, with the first one's reason.
    """

    text = ranks.share(opened.manifest.text if opened else b"")
    readers = [opened] if opened else []

    def verify_share() -> None:
        if not readers:
            readers.append(Reader(path, text=text))
        readers[0].verify(ranks.rank, ranks.world, note)

    if damage := together(ranks, verify_share):
        raise damage
    readers[0].trust()
    return readers[0]


def together(ranks: Ranks, check: Callable[[], None]) -> CheckpointError | None:
    """Runs a check on every rank. Returns the first rank's `CheckpointError` on all of them, or None."""
    text = ""
    try:
        check()
    except CheckpointError as error:
        # fits in `TEXT_BYTES`
        text = json.dumps(
            [part[:1000] for part in (error.where, error.wrong, error.right)], ensure_ascii=False
        )
    if not (first := ranks.first(text)):
        return None
    return CheckpointError(*json.loads(first))
