"""Loads only the weights of a checkpoint: to generate text, to evaluate, or to compare."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megacore.checkpoint import Reader
from megacore.checkpoint.weights import AVERAGES, recorded_sections, weights_of
from megacore.distributed.buffers import BUFFERS, buffers_of
from megacore.distributed.shard import materialise, shard_of
from megacore.errors import CheckpointError
from megacore.model.stage import Stage


def sections_to_run(reader: Reader, source: str | None = None) -> dict[str, Any]:
    """`recorded_sections`, for a config to compute with.

    What a checkpoint names is never executed: a model of the user's own source needs that file's path,
    `source`, whose digest is then compared with the recorded one.

    Raises:
        CheckpointError: such a model has no `source`, or another model has one.
    """
    sections = recorded_sections(reader)
    model = sections["model"]
    if model.get("source") is None:
        if source is not None:
            raise CheckpointError(str(reader.path), "its model has no source", "no --source")
        return sections
    if source is None:
        right = f"--source {reader.source_copy or 'FILE'}, once you have read it"
        raise CheckpointError(
            str(reader.path),
            "its model is a source of the user's, which is executed only if you name it",
            right,
        )
    return sections | {"model": model | {"source": str(Path(source).absolute())}}


def choose_weights(reader: Reader, choice: str | None) -> None:
    """Decides which weights of a checkpoint are meant. Raises `CheckpointError` if it has no such ones."""
    if choice == "average" and not any(name.startswith(AVERAGES) for name in reader.manifest.tensors):
        wrong = "holds no average of the weights, which runs with optim.ema or optim.kind=schedule_free keep"
        raise CheckpointError(str(reader.path), wrong, "--weights trained")
    reader.trained = choice == "trained"


def load_weights(reader: Reader, stages: Iterable[Stage]) -> None:
    """Fills the parameters of a rank's stages with their slices of the checkpoint's weights.

    Parameters on `meta` first get memory on the device that computes.

    Raises:
        CheckpointError: a weight is missing, has another shape, or cannot be read.
    """
    for stage in stages:
        stage.at_step(reader.step)
        materialise(stage.parameters(), stage.device)
        for name, parameter in stage.named_parameters():
            reader.read_into(weights_of(reader, name), shard_of(parameter), parameter.data)
        for name, buffer in buffers_of([stage]).items():
            reader.read_into(f"{BUFFERS}{name}", buffer.shard, buffer.value)
