"""The weights of a checkpoint: which a model needs, and the config that they were written with."""

from typing import Any

from megacore.checkpoint.read import Reader
from megacore.config import Config
from megacore.distributed.buffers import BUFFERS, buffers_of
from megacore.distributed.shard import shard_of
from megacore.errors import CheckpointError
from megacore.model.stage import whole_model
from megacore.optimizers.rule import AVERAGE

WEIGHTS = "model/"  # the prefix of weights' names in a checkpoint; optimizer moments have others
# The key in a checkpoint's state for what an imported model's files say of special tokens. Training passes it
# on to each of its checkpoints, so that an export can write it back.
SPECIAL_TOKENS = "special_tokens"
# The key in a checkpoint's state for whether the documents of the training data begin with a BOS token.
# Prompts can thus begin in the same way, wherever the corpus is by then. None: unknown, or corpora differ.
DOCUMENTS_BOS = "documents_begin_with_bos"
AVERAGES = f"{AVERAGE}/"  # of those that evaluate in their place, where a run keeps averages


def recorded_sections(reader: Reader) -> dict[str, Any]:
    """The sections of the config that the checkpoint was written with, as in a config's file.

    Raises:
        CheckpointError: it was written without one.
    """
    sections = reader.state.get("config")
    if not isinstance(sections, dict) or not all(
        isinstance(sections.get(name), dict) for name in ("model", "train", "data")
    ):
        raise CheckpointError(
            str(reader.path),
            "does not hold the run's config",
            "a checkpoint of launch/pretrain.py or of an import",
        )
    return sections


def weights_of(reader: Reader, name: str) -> str:
    """The tensor with the weights of a parameter, for who takes weights alone: their
    average, where the run kept one.
    """
    average = f"{AVERAGES}{name}"
    return average if average in reader.manifest.tensors and not reader.trained else f"{WEIGHTS}{name}"


def frozen_of(config: Config) -> set[str]:
    """The weights that a config's model does not train. megacore's own models train all."""
    parameters = whole_model(config, "meta").named_parameters() if config.model.is_custom else ()
    return {name for name, parameter in parameters if not parameter.requires_grad}


def is_new(reader: Reader, name: str) -> bool:
    """Whether a tensor is a weight that the checkpoint lacks.

    `check_weights` allows that where a model trains something new beside what is frozen: it begins as it is
    drawn.
    """
    return name.startswith(WEIGHTS) and name not in reader.manifest.tensors


def check_weights(reader: Reader, config: Config) -> None:
    """Refuses a checkpoint whose weights are not those of the config's model, whatever layout reads them.

    Raises:
        CheckpointError: naming the first tensor that is missing, of another shape, or too many; or all keys
            of the model
            section that differ.
    """
    reader.check_model(config.model.model_dump(mode="json"), stretch=True)
    if config.model.num_layers > len(reader.names):  # before so many layers are built
        wrong = f"has {len(reader.names)} tensors, too few for model.num_layers={config.model.num_layers}"
        raise CheckpointError(str(reader.path), wrong, "use an earlier checkpoint")
    model = whole_model(config, "meta")
    expected = {
        f"{WEIGHTS}{name}": shard_of(parameter).global_shape for name, parameter in model.named_parameters()
    }
    frozen = frozen_of(config)
    may_lack = {f"{WEIGHTS}{name}" for name, _ in model.named_parameters() if frozen and name not in frozen}
    expected |= {
        f"{BUFFERS}{name}": buffer.shard.global_shape for name, buffer in buffers_of([model]).items()
    }
    for name, shape in expected.items():
        if not (name in may_lack and is_new(reader, name)):
            reader.check(name, shape)
    for name in reader.names:
        if name.startswith((WEIGHTS, BUFFERS)) and name not in expected:
            right = "set the model section of the config to that of the checkpoint"
            raise CheckpointError(
                str(reader.path),
                f"holds the tensor {name}, which the model of this config does not have",
                right,
            )
