"""Exports a checkpoint of any layout to a Hugging Face model folder."""

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from megacore.checkpoint import Layout, Reader, locate
from megacore.checkpoint.weights import check_weights, recorded_sections, weights_of
from megacore.config import Config
from megacore.distributed.shard import Shard
from megacore.errors import CheckpointError, ConfigError
from megacore.tools.checkpoint_weights import choose_weights
from megacore.tools.interchange.check_conversion import (
    check_layers,
    compare_logits,
    require_same,
    transformers_if_installed,
)
from megacore.tools.interchange.export_tokenizer import SpecialTokens, write_special_tokens, write_tokenizer
from megacore.tools.interchange.families import family_for_config
from megacore.tools.interchange.folder import CONFIG, Folder, aside, write_json, write_weights
from megacore.tools.interchange.mapped import Mapped
from megacore.tools.settings.load import resolve


def export_hf(
    path: Path,
    output: Path,
    dtype: torch.dtype,
    shard_bytes: int,
    tokenizer: str | None,
    compare_layers: int | None,
    say: Callable[[str], None],
    weights: str | None = None,
) -> None:
    """Write the checkpoint at `path` (see `checkpoint.locate`) to the new folder
    `output`, which transformers opens.

    Only one logical tensor is in memory at a time, until the comparison, which holds one whole model (cut to
    `compare_layers`).

    Args:
        dtype: what the weights are rounded to.
        shard_bytes: size of a file.
        tokenizer: see `write_tokenizer`; None: the run's.
        say: takes a line for the user.
        weights: see `choose_weights`.

    Raises:
        UserError: whatever is wrong; `output` is then as it was.
    """
    transformers = transformers_if_installed()
    if transformers is None:
        wrong = "an export is compared with transformers, which is not installed"
        raise ConfigError(
            "--format", wrong, "pip install transformers, or megacore's extra: pip install -e '.[hf]'"
        )
    reader = Reader(locate(path))
    choose_weights(reader, weights)
    config = config_of(reader)
    check_layers(compare_layers, config)
    check_weights(reader, config)
    family = family_for_config(config)
    mapped = family.mapped(config)
    with aside(output) as partial:
        settings = family.write(config) | {"torch_dtype": str(dtype).removeprefix("torch.")}
        write_json(partial / CONFIG, settings)
        name = config.data.tokenizer if tokenizer is None else tokenizer
        text = write_tokenizer(name, partial, config.model.vocab_size, transformers)
        special_tokens = write_special_tokens(partial, SpecialTokens.from_state(reader.state), name, text)
        layout: Layout = {
            peer: (tensor.theirs(dtype), shape) for tensor in mapped for peer, shape in tensor.peers.items()
        }
        files = write_weights(partial, layout, _split(reader, mapped, dtype), shard_bytes)
        say(
            f"{reader.path}: {len(layout)} tensors of {family.architecture} in "
            f"{str(dtype).removeprefix('torch.')}, {files} file(s)"
        )
        say(text.finding)
        say(special_tokens)
        written = Folder(partial)
        for tensor in mapped:
            read_back = tensor.join({peer: written.read(peer) for peer in tensor.peers})
            require_same(partial, tensor.name, _read(reader, tensor).to(tensor.theirs(dtype)), read_back)
        say(f"read back: all {len(layout)} tensors are those of the checkpoint, in every bit")
        say(compare_logits(transformers, config, reader, dtype, partial, compare_layers))
    say(f"wrote {output}")


def config_of(reader: Reader) -> Config:
    """The config of the checkpoint's model on one device.

    Raises `CheckpointError` if none is recorded, or its layers are not megacore's own.
    """
    sections = recorded_sections(reader)
    if sections["model"].get("source") is not None:
        raise CheckpointError(
            str(reader.path),
            "its model is of a source of the user's own, which no other project has",
            "another model",
        )
    if sections["model"].get("hf") is not None:
        wrong = "its model is a class of transformers (model.hf), which is not exported yet"
        raise CheckpointError(str(reader.path), wrong, "a run of what launch/checkpoint.py import wrote")
    if (schedule := sections["model"].get("window_schedule")) and reader.step <= schedule[-1][0]:
        right = f"a checkpoint behind step {schedule[-1][0]}"
        raise CheckpointError(
            str(reader.path),
            f"its windows are those of step {reader.step}, and later ones are exported",
            right,
        )
    return resolve(
        {key: sections[key] for key in ("model", "train", "data") if key in sections}, [], "export", 1
    ).config


def _read(reader: Reader, tensor: Mapped) -> Tensor:
    return reader.read(tensor.key if tensor.buffer else weights_of(reader, tensor.name), Shard(tensor.shape))


def _split(reader: Reader, mapped: list[Mapped], dtype: torch.dtype) -> Iterator[Tensor]:
    """Yields the peer's tensors one after the other, and keeps none."""
    for tensor in mapped:
        theirs = tensor.split(_read(reader, tensor).to(tensor.theirs(dtype)))
        for peer in tensor.peers:
            yield theirs.pop(peer)
