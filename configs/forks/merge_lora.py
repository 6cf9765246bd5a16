"""Puts the adapters of a run of `lora.py` into their matrices: a checkpoint of weights
alone, of a GPT without adapters.
"""

import os
import sys

# so that a checkout runs without being installed
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.realpath(__file__)))))

import megacore.tools.interrupt  # noqa: F401  (first: Ctrl-C during the other imports prints no traceback)

# isort: split
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megacore import checkpoint
from megacore.checkpoint.weights import WEIGHTS, recorded_sections, weights_of
from megacore.config.model import ModelConfig
from megacore.distributed.shard import Shard
from megacore.errors import CheckpointError
from megacore.tools.cli import Parser, add_checkpoint, exit_with
from megacore.tools.interchange.folder import CONFIG, aside, write_json
from megacore.tools.interchange.import_model import FILE_BYTES
from megacore.tools.interchange.stream import save_stream

EXAMPLE = "python configs/forks/merge_lora.py --checkpoint runs/lora --output runs/merged"
ADAPTER = ".adapter."


def merge(path: Path, output: Path) -> str:
    """Writes the run `output` from the checkpoint at `path`; returns what was done. Raises `UserError`."""
    reader = checkpoint.Reader(checkpoint.locate(path))
    sections = recorded_sections(reader)
    model: dict[str, Any] = sections["model"]
    weights = {name: tensor for name, tensor in reader.manifest.tensors.items() if name.startswith(WEIGHTS)}
    plain = {name: tensor for name, tensor in weights.items() if ADAPTER not in name}
    if len(plain) == len(weights) or not {"alpha", "rank"} <= model.keys():
        raise CheckpointError(str(reader.path), "its model has no adapters", "a run of configs/forks/lora.py")

    # 16 bits would lose small changes
    dtype = torch.float64 if sections["train"]["precision"] == "fp64" else torch.float32

    def read(name: str) -> Tensor:
        return reader.read(weights_of(reader, name.removeprefix(WEIGHTS)), Shard(weights[name].shape)).to(
            dtype
        )

    def merged() -> Iterator[Tensor]:
        for name in plain:
            up, down = (f"{name.removesuffix('.weight')}{ADAPTER}{part}.weight" for part in ("up", "down"))
            yield read(name) + (
                model["alpha"] / model["rank"] * read(up) @ read(down) if up in weights else 0
            )

    gpt = {key: value for key, value in model.items() if key in ModelConfig.model_fields} | {
        "source": None,
        "source_digest": None,
    }
    settings = sections | {"model": gpt}
    layout = {name: (dtype, tensor.shape) for name, tensor in plain.items()}
    state = {
        "samples": 0,
        "seed": sections["train"]["seed"],
        "model": gpt,
        "config": settings,
        "weights_of": {"path": str(reader.path)},
    }
    with aside(output) as partial:
        save_stream(partial / "checkpoints", 0, layout, merged(), state, FILE_BYTES)
        write_json(partial / CONFIG, {"model": gpt, "data": {"tokenizer": sections["data"].get("tokenizer")}})
    return (
        f"wrote {output}: {len(plain)} tensors, with the adapters of "
        f"{(len(weights) - len(plain)) // 2} of them in them"
    )


def main(argv: list[str]) -> None:
    """Merges. Raises `UserError`."""
    parser = Parser(
        "Merge the adapters of a LoRA run into their matrices, as a checkpoint without adapters.",
        example=EXAMPLE,
        page="docs/forks.md",
    )
    add_checkpoint(parser)
    parser.add_argument(
        "--output", type=Path, required=True, metavar="FOLDER", help="folder to write, which must not exist"
    )
    args = parser.parse_args(argv)
    print(merge(Path(args.checkpoint), args.output))


if __name__ == "__main__":
    exit_with(main)
