"""Reads nanoGPT's ``ckpt.pt``, a dictionary of tensors and plain values, without running code in it."""

import re
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megacore.config import Config
from megacore.errors import CheckpointError
from megacore.files import open_plain
from megacore.tools.interchange.folder import without_wrappers
from megacore.tools.interchange.mapped import Mapped, fused_qkv, gpt2_like, renamed

# the causal mask, where PyTorch had no fused attention
IGNORED = (re.compile(r"transformer\.h\.\d+\.attn\.bias"),)
SIZES = {  # ours, and what they are called there
    "num_layers": "n_layer",
    "num_heads": "n_head",
    "hidden_size": "n_embd",
    "max_positions": "block_size",
    "vocab_size": "vocab_size",
}
HEAD, EMBEDDING = "lm_head.weight", "transformer.wte.weight"


def read_nanogpt(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The `model` section of a ``ckpt.pt``, and its tensors, on the pages of the file.

    Raises:
        CheckpointError: no such file, damaged, with code in it, or of a model that is none of nanoGPT's.
    """
    checkpoint = load_plain(path)
    tensors: dict[str, Tensor] = {
        without_wrappers(name): t for name, t in entry_of(checkpoint, "model", path).items()
    }
    arguments = entry_of(checkpoint, "model_args", path)
    if not all(isinstance(tensor, Tensor) and tensor.is_floating_point() for tensor in tensors.values()):
        raise CheckpointError(
            str(path),
            "model holds something else than floating-point tensors",
            "a ckpt.pt of nanoGPT's train.py",
        )
    head, embedding = tensors.get(HEAD), tensors.get(EMBEDDING)
    # one tensor, stored under both names
    tied = head is None or embedding is None or torch.equal(head, embedding)
    return model_of(arguments, path) | {"tie_embeddings": tied}, tensors


def entry_of(checkpoint: Any, key: str, path: Path) -> dict[str, Any]:
    """An entry that is a dictionary with names for keys."""
    entry = checkpoint.get(key) if isinstance(checkpoint, dict) else None
    if not isinstance(entry, dict) or not all(isinstance(name, str) for name in entry):
        raise CheckpointError(str(path), f"holds no {key}", "a ckpt.pt of nanoGPT's train.py")
    return entry


def model_of(arguments: dict[str, Any], path: Path) -> dict[str, Any]:
    """The `model` section of nanoGPT's `model_args`."""
    # the first versions always had biases
    bias, dropout = arguments.get("bias", True), arguments.get("dropout", 0.0)
    known = {*SIZES.values(), "bias", "dropout"}
    if strangers := sorted(arguments.keys() - known):
        wrong = f"model_args has {strangers[0]}={arguments[strangers[0]]!r}, which nanoGPT does not know"
        raise CheckpointError(str(path), wrong, f"only {' '.join(sorted(known))}")
    for key in SIZES.values():
        if type(arguments.get(key)) is not int or arguments[key] < 1:
            raise CheckpointError(
                str(path), f"model_args has {key}={arguments.get(key)!r}", "a whole number above 0"
            )
    if type(bias) is not bool or not isinstance(dropout, float | int):
        raise CheckpointError(
            str(path), f"model_args has bias={bias!r} and dropout={dropout!r}", "true or false, and a number"
        )
    # gelu_erf: tanh's form in versions before mid-2023, whose files do not tell (model.activation=gelu)
    sizes = {ours: arguments[theirs] for ours, theirs in SIZES.items()}
    return sizes | {"activation": "gelu_erf", "bias": bias, "dropout": dropout}


def load_plain(path: Path) -> Any:
    """Loads a file of ``torch.save`` that has only tensors, containers and plain values.

    Tensors are mapped from the file.

    A pickle can name any function to be called on loading; torch's unpickler of `weights_only` calls none but
    those that build tensors.
    """
    try:
        open_plain(path).close()
        return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except OSError as error:
        raise CheckpointError(
            str(path), f"cannot be read: {error.strerror or error}", "nanoGPT's ckpt.pt"
        ) from error
    except Exception as error:  # a damaged or malicious file may make the unpickler raise anything
        wrong = (
            "is damaged, or holds more than tensors and plain values: that could run code, and is not loaded"
        )
        raise CheckpointError(str(path), wrong, "a ckpt.pt of nanoGPT's train.py") from error


def nanogpt_tensors(config: Config) -> list[Mapped]:
    """nanoGPT's names: GPT-2's, with weights ``[out, in]``, of which all queries come first,
    then all keys, then all values.
    """
    return gpt2_like(config, renamed, partial(fused_qkv, theirs="(three heads head) ..."))
