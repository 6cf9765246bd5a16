"""Loads only the weights of a checkpoint: to generate text, to evaluate, or to start another run."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megacore.checkpoint.read import Reader
from megacore.config import Config
from megacore.distributed.buffers import BUFFERS, buffers_of
from megacore.distributed.shard import materialise, shard_of
from megacore.errors import CheckpointError
from megacore.model.stage import Stage, whole_model

WEIGHTS = "model/"  # the prefix of weights' names in a checkpoint; optimizer moments have others


def recorded_sections(reader: Reader) -> dict[str, Any]:
    """The sections of the config that the checkpoint was written with, as in a config's file.

    Raises:
        CheckpointError: it was written without one.
    """
    sections = reader.state.get("config")
    if not isinstance(sections, dict) or not all(isinstance(sections.get(name), dict) for name in ("model", "train", "data")):
        raise CheckpointError(str(reader.path), "does not hold the run's config", "a checkpoint of launch/pretrain.py or of an import")
    return sections


def sections_to_run(reader: Reader, source: str | None = None) -> dict[str, Any]:
    """`recorded_sections`, for a config to compute with. What a checkpoint names is never executed: a model of the user's own source
    needs that file's path, `source`, whose digest is then compared with the recorded one.

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
        raise CheckpointError(str(reader.path), "its model is a source of the user's, which is executed only if you name it", right)
    return sections | {"model": model | {"source": str(Path(source).absolute())}}


def check_weights(reader: Reader, config: Config) -> None:
    """Refuses a checkpoint whose weights are not those of the config's model, whatever layout reads them.

    Raises:
        CheckpointError: naming the first tensor that is missing, of another shape, or too many; or all keys of the model
            section that differ.
    """
    reader.check_model(config.model.model_dump(mode="json"), stretch=True)
    if config.model.num_layers > len(reader.names):  # before so many layers are built
        wrong = f"has {len(reader.names)} tensors, too few for model.num_layers={config.model.num_layers}"
        raise CheckpointError(str(reader.path), wrong, "use an earlier checkpoint")
    model = whole_model(config, "meta")
    expected = {f"{WEIGHTS}{name}": shard_of(parameter).global_shape for name, parameter in model.named_parameters()}
    expected |= {f"{BUFFERS}{name}": buffer.shard.global_shape for name, buffer in buffers_of([model]).items()}
    for name, shape in expected.items():
        reader.check(name, shape)
    for name in reader.names:
        if name.startswith((WEIGHTS, BUFFERS)) and name not in expected:
            right = "set the model section of the config to that of the checkpoint"
            raise CheckpointError(str(reader.path), f"holds the tensor {name}, which the model of this config does not have", right)


def load_weights(reader: Reader, stages: Iterable[Stage]) -> None:
    """Fills the parameters of a rank's stages with their slices of the checkpoint's weights.

    Parameters on `meta` first get memory on the device that computes.

    Raises:
        CheckpointError: a weight is missing, has another shape, or cannot be read.
    """
    for stage in stages:
        materialise(stage.parameters(), stage.device)
        for name, parameter in stage.named_parameters():
            reader.read_into(f"{WEIGHTS}{name}", shard_of(parameter), parameter.data)
        for name, buffer in buffers_of([stage]).items():
            reader.read_into(f"{BUFFERS}{name}", buffer.shard, buffer.value)
