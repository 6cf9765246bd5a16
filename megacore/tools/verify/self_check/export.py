"""Checks that transformers computes from an exported model what megacore computes."""

from pathlib import Path

import torch

from megacore.checkpoint.weights import WEIGHTS
from megacore.config import Config
from megacore.distributed.buffers import BUFFERS, buffers_of
from megacore.errors import CheckpointError, ConfigError
from megacore.tools.interchange.check_conversion import transformers_if_installed
from megacore.tools.interchange.export_hf import export_hf
from megacore.tools.interchange.families import family_for_config
from megacore.tools.interchange.stream import save_stream
from megacore.tools.verify.self_check.case import Case
from megacore.tools.verify.self_check.finding import Finding

NAME = "export"
ONE_FILE = 1 << 40  # bytes: more than the small model has


def why_not_exported(config: Config) -> str | None:
    """Return why transformers has no format for this model; None if it has one."""
    if config.model.is_custom:
        return f"transformers has no format for a model of {config.model.custom_key}"
    try:
        family_for_config(config)
    except ConfigError as error:
        return error.wrong
    return None


def check_export(case: Case) -> list[Finding]:
    """Compare the model's logits with those that transformers computes from its export, in fp64.

    The export compares them itself, within `check_conversion.TOLERANCE`.
    """
    if reason := why_not_exported(case.config):
        return [Finding(NAME, "not checked", reason)]
    if transformers_if_installed() is None:
        return [Finding(NAME, "not checked", "transformers is not installed")]
    try:
        export_hf(
            write_checkpoint(case, case.folder / "checkpoints"),
            case.folder / "exported",
            dtype=torch.float64,
            shard_bytes=ONE_FILE,
            tokenizer=None,
            compare_layers=None,
            say=lambda line: None,
        )
    except CheckpointError as error:
        return [Finding(NAME, "wrong", error.wrong)]
    return [Finding(NAME, "right", f"export as {family_for_config(case.config).architecture}")]


def write_checkpoint(case: Case, directory: Path) -> Path:
    """Write the case's weights as a checkpoint after the last change of a schedule; return its folder."""
    config, model = case.config, case.build()
    tensors = {f"{WEIGHTS}{name}": parameter.data for name, parameter in model.named_parameters()}
    tensors |= {f"{BUFFERS}{name}": buffer.value for name, buffer in buffers_of([model]).items()}
    layout = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    state = {
        "model": config.model.model_dump(mode="json"),
        "config": config.model_dump(mode="json", by_alias=True),
    }
    last_change = max((step for step, _ in config.model.window_schedule), default=0)
    return save_stream(directory, last_change + 1, layout, iter(tensors.values()), state, ONE_FILE)
