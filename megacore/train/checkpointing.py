"""A run's checkpoints: saves them while training continues, finds the one to resume, and reads it.

To resume, rank 0 looks for the checkpoint, and all ranks together check its digests before anything is read.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from megacore.checkpoint import Ranks, Reader, Saved, Saver
from megacore.checkpoint.disk import size_text
from megacore.checkpoint.weights import AVERAGES, WEIGHTS, is_new, recorded_sections, weights_of
from megacore.config import Config
from megacore.config.schema import resolved
from megacore.data.samples import EvalSamples
from megacore.distributed.buffers import BUFFERS
from megacore.distributed.collectives import broadcast_text
from megacore.distributed.mesh import Mesh
from megacore.distributed.shard import TensorSlice, logical_name
from megacore.engine.compression import BASIS, RESIDUAL, STATE
from megacore.engine.protocol import Engine
from megacore.errors import CheckpointError
from megacore.train.callbacks import Callback
from megacore.train.loader import SampleSource
from megacore.train.step import TrainStep

Pieces = Mapping[str, tuple[Tensor, TensorSlice]]  # what an engine holds of logical tensors, by key


class Inputs(Protocol):
    """What a run reads, opened and checked by the script that starts it (`megacore.tools.inputs`)."""

    validation: EvalSamples | None
    checkpoint: Path | None  # on rank 0, the checkpoint to resume
    weights: Path | None  # on rank 0, the checkpoint whose weights to start from
    opened: Reader | None  # of `checkpoint` or `weights`, if it was opened already

    @property
    def stream(self) -> SampleSource:
        """The training samples."""

    def look_again(self, resumed: Path | None, step: int) -> None:
        """On rank 0, set `checkpoint` to the newest that this run has saved, or to the one it `resumed`."""

    def fall_back(self, damage: CheckpointError) -> None:
        """On rank 0, set `checkpoint` to the one before it, which turned out to be damaged, or raise."""

    def unigram_entropy(self) -> float | None:
        """Return the validation loss, in nats a token, of a model that knows only token frequencies.

        None if that is unknown.
        """


class Saving:
    """Saves an engine's tensors in the run's folder. `save` and `finish` are collective."""

    def __init__(
        self, config: Config, mesh: Mesh, engine: Engine, prune: Callable[[Path], None] = lambda newest: None
    ) -> None:
        """`prune` is called on rank 0 with each new checkpoint, and may delete older ones (see `Saver`)."""
        self.config = config
        self.mesh = mesh
        self.engine = engine
        folder = Path(resolved(config.log.dir)) / "checkpoints"
        self.saver = Saver(
            folder, Ranks(mesh), clean=prune, background=config.checkpoint.async_, device=mesh.device
        )
        self.step = 0  # of the save that began last
        # The newest checkpoint that all ranks know to be whole, which they do when they finish the save.
        self.latest: Path | None = None
        self.latest_step = 0
        self.reported: Path | None = None
        self.last_save_seconds = 0.0  # from a save's beginning until it was on disk
        self.waited_seconds = 0.0  # that training spent waiting for saves since the last reading

    def save(self, step: int, progress: dict[str, Any]) -> None:
        """Save the step just done, with the trainer's `progress`.

        Returns when the checkpoint is on disk, or with `checkpoint.async` when the save has begun.
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
        self.waited_seconds += time.perf_counter() - started
        if not config.checkpoint.async_:
            self.finish()

    def finish(self, *, last: bool = False) -> None:
        """Wait for the save that is under way, if there is one.

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
            self.mesh.print(f"WARNING: {error}; training continues without it")
        else:
            if saved is not None:
                self.latest = saved.path
                self.latest_step = self.step
                self._report(saved)
        self.waited_seconds += time.perf_counter() - started

    def poll(self, *, failed: bool) -> None:
        """Report a save that is done; called between steps.

        `failed`: the ranks have agreed that it failed on one of them. Then all finish it, and see why.
        """
        if failed:
            self.finish()
        elif saved := self.saver.committed:
            self._report(saved)

    def _report(self, saved: Saved) -> None:
        if saved.path == self.reported:
            return
        self.reported = saved.path
        self.last_save_seconds = saved.seconds
        self.mesh.print(f"saved {saved.path} ({size_text(saved.nbytes)} in {saved.seconds:.3g} s)")
        self.mesh.listeners.notify(Callback.on_checkpoint, saved.path)

    def read_seconds(self) -> float:
        """Return the seconds that training has waited for saves since the last reading."""
        seconds = self.waited_seconds
        self.waited_seconds = 0.0
        return seconds

    def forget(self) -> None:
        """Forget what this run has saved, because it went back to an older checkpoint."""
        self.latest = None
        self.latest_step = 0


def choose_checkpoint(inputs: Inputs, mesh: Mesh) -> tuple[Reader, bool] | None:
    """Return the newest checkpoint of `inputs` that is undamaged, and whether only its weights are meant.

    None if there is no checkpoint to read. Collective.

    Raises:
        CheckpointError: on every rank, if the checkpoint that was named is damaged, or all that could be
            resumed are.
    """
    ranks = Ranks(mesh)
    while True:
        # Only rank 0 has looked: others might see the shared file system in another state, and thousands
        # would keep it busy.
        resumed, weights = (
            broadcast_text(str(path or ""), mesh.world, mesh.device)
            for path in (inputs.checkpoint, inputs.weights)
        )
        if not resumed and not weights:
            return None
        try:
            opened = inputs.opened
            inputs.opened = None
            sign_of_life = partial(mesh.listeners.phase, "checking a checkpoint")
            return open_verified(Path(resumed or weights), ranks, opened, sign_of_life), not resumed
        except CheckpointError as damage:
            if not resumed:
                raise
            if error := first_error(ranks, partial(inputs.fall_back, damage)):
                raise error from None


def open_verified(
    path: Path, ranks: Ranks, opened: Reader | None, sign_of_life: Callable[[], None]
) -> Reader:
    """Open the checkpoint in folder `path` after the ranks have compared all its files with their digests.

    Collective. Rank 0 may have `opened` it already, and shares its manifest. `sign_of_life` is called now and
    then, because reading a large checkpoint may take longer than a hang.

    Raises:
        CheckpointError: on every rank, with the first one's reason.
    """
    manifest = ranks.share(opened.manifest.text if opened else b"")
    readers = [opened] if opened else []

    def verify_share() -> None:
        if not readers:
            readers.append(Reader(path, text=manifest))
        readers[0].verify(ranks.rank, ranks.world, sign_of_life)

    if error := first_error(ranks, verify_share):
        raise error
    readers[0].trust()
    return readers[0]


def first_error(ranks: Ranks, check: Callable[[], None]) -> CheckpointError | None:
    """Run a check on every rank. Return the first rank's `CheckpointError` on all of them, or None."""
    text = ""
    try:
        check()
    except CheckpointError as error:
        parts = [part[:1000] for part in (error.where, error.wrong, error.right)]  # fits in `TEXT_BYTES`
        text = json.dumps(parts, ensure_ascii=False)
    first = ranks.first(text)
    return CheckpointError(*json.loads(first)) if first else None


@dataclass(frozen=True)
class Origin:
    """What a run began with, or went back to."""

    step: int = 0  # the run continues after it
    checkpoint: Path | None = None  # that was resumed
    config: Mapping[str, Any] = field(default_factory=dict)  # the sections that it was written with
    notes: Sequence[str] = ()  # lines about what could not be restored as it was
    weights: Path | None = None  # the checkpoint that gave the first weights


def read_weights(reader: Reader, train_step: TrainStep, mesh: Mesh) -> Origin:
    """Start from a checkpoint's weights: weights that it lacks are drawn, and optimizer state is new."""
    tensors = train_step.engine.tensors()
    new = {key: piece for key, piece in tensors.items() if is_new(reader, logical_name(key))}
    train_step.draw_into(new)
    for key, (tensor, tensor_slice) in tensors.items():
        if key in new or not key.startswith((WEIGHTS, BUFFERS)):
            continue
        mesh.listeners.phase("reading a checkpoint")
        name = logical_name(key)
        if name.startswith(WEIGHTS):  # a checkpoint may hold averages of its weights: these are better
            name = weights_of(reader, name.partition("/")[2])
        reader.read_into(name, tensor_slice, tensor)
    # This also rounds the masters just read into the parameters that compute.
    train_step.engine.load_state(train_step.engine.state(), tensors)
    return Origin(weights=reader.path)


def read_training_state(reader: Reader, train_step: TrainStep, mesh: Mesh) -> Origin:
    """Resume a checkpoint: restore weights, buffers, optimizer state and what compression keeps."""
    tensors = train_step.engine.tensors()
    for key, (tensor, tensor_slice) in tensors.items():
        if key.startswith(STATE):  # of compression, which depends on the layout: see below
            continue
        mesh.listeners.phase("reading a checkpoint")
        name = logical_name(key)
        if name.startswith(AVERAGES):  # the run may begin to average only now, from the weights
            name = weights_of(reader, name.partition("/")[2])
        reader.read_into(name, tensor_slice, tensor)
    train_step.engine.load_state(reader.state["engine"], tensors)
    return Origin(
        step=reader.step,
        checkpoint=reader.path,
        config=recorded_sections(reader),
        notes=[*read_residuals(reader, tensors), *read_bases(reader, tensors)],
    )


def read_residuals(reader: Reader, tensors: Pieces) -> list[str]:
    """Restore what gradient compression has not sent yet, also in another layout.

    A checkpoint has a number of residuals for each parameter. If the run has as many, each comes back.
    Otherwise residual i of the checkpoint is added to residual i mod n of the run's n: what gradients still
    lack is the sum of all, which stays the same.
    """
    saved = {
        name: reader.manifest.tensors[name].shape[0] for name in reader.names if name.startswith(RESIDUAL)
    }
    residuals = {key: piece for key, piece in tensors.items() if key.startswith(RESIDUAL)}
    if saved and not residuals:
        return [
            "WARNING: the checkpoint's residuals are left out, because this run does not compress "
            "gradients: what they hold is lost"
        ]
    changes = set[tuple[int, int]]()
    for key, (tensor, tensor_slice) in residuals.items():
        name = logical_name(key)
        count, *shape = tensor_slice.global_shape
        index, *offset = tensor_slice.offset
        tensor.zero_()
        for saved_index in range(index, saved.get(name, 0), count):
            piece = TensorSlice((saved[name], *shape), (saved_index, *offset), tensor_slice.local_shape)
            if saved_index == index:
                reader.read_into(name, piece, tensor)
            else:
                tensor.add_(reader.read(name, piece).to(tensor))
        if saved.get(name, count) != count:
            changes.add((saved[name], count))
    if not changes:
        return []
    texts = ", ".join(f"{before} of each parameter became {now}" for before, now in sorted(changes))
    return [f"residuals of gradient compression: {texts}, with the same sum"]


def read_bases(reader: Reader, tensors: Pieces) -> list[str]:
    """Restore the bases of low-rank compression where the checkpoint's have the same shape."""
    shapes = {name: tensor.shape for name, tensor in reader.manifest.tensors.items()}
    bases = {key: piece for key, piece in tensors.items() if key.startswith(BASIS)}
    missing = 0
    for key, (tensor, tensor_slice) in bases.items():
        if shapes.get(key) == tensor_slice.global_shape:
            reader.read_into(key, tensor_slice, tensor)
        else:
            missing += 1
    if missing == 0 or not any(name.startswith(BASIS) for name in shapes):
        return []
    return [
        f"low rank: {missing} of {len(bases)} bases are drawn anew, because the checkpoint's are of another "
        "layout or rank"
    ]
