"""Models on their way through `launch/checkpoint.py export` and `import`, and what tests look at there."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from launch.checkpoint import run
from megacore.checkpoint import Reader, locate
from megacore.model.stage import Stage
from megacore.tools.checkpoint_weights import load_weights
from tests.build import model_of, run_of
from tests.checkpoints import save
from tests.pieces import piece
from tests.thread_ranks import ThreadRanks, run_threads


def export(source: Path, output: Path, *options: object) -> Path:
    """`launch/checkpoint.py export`; returns the folder."""
    run(["export", str(source), "--format", "hf", "--output", str(output), *map(str, options)])
    return output


def take_in(source: Path, output: Path, *options: object, kind: str = "hf") -> Path:
    """`launch/checkpoint.py import`; returns the run's folder."""
    run(["import", str(source), "--format", kind, "--output", str(output), *map(str, options)])
    return output


def assert_nothing_written(output: Path) -> None:
    """Neither the folder nor what was to become it."""
    assert not output.exists() and not output.with_name(output.name + ".partial").exists()


def stored(folder: Path) -> dict[str, Tensor]:
    """All tensors of a model folder."""
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def imported_model(run_folder: Path) -> Stage:
    """Our model, by a run's config.json and its newest checkpoint."""
    model = model_of(run_of(run_folder / "config.json")).eval()
    load_weights(Reader(locate(run_folder)), [model])
    return model


@torch.no_grad()
def logits(model: Stage, rows: Tensor) -> Tensor:
    """``[batch, seq, vocab]`` of tokens ``[batch, seq]``."""
    return model.logits(model.hidden(rows)).view(*rows.shape, -1)


def relative(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference, of the largest value."""
    return float((ours - theirs).abs().max() / theirs.abs().max())


SIZES = {"num_layers": 2, "hidden_size": 24, "num_heads": 4, "vocab_size": 61}


def random_run(folder: Path, data: dict[str, Any] | None = None, **model: Any) -> Stage:
    """A run of random weights, biases and norms off zero and one, that two ranks saved in slices.

    Returns the model.
    """
    sections = {"model": SIZES | model, "train": {"seq_len": 16, "precision": "fp32"}, "data": data or {}}
    config = run_of(sections)
    stage = model_of(config).eval()
    generator = torch.Generator().manual_seed(7)
    for parameter in stage.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(config.model_dump_json(by_alias=True))
    state = {"model": config.model.model_dump(), "config": config.model_dump(by_alias=True)}

    def rank_saves(ranks: ThreadRanks) -> None:
        slices = {}
        for name, parameter in stage.named_parameters():
            shard = piece(tuple(parameter.shape), 0, ranks.rank, 2)
            slices[f"model/{name}"] = parameter.data[shard.offset[0] :][: shard.local_shape[0]], shard
        save(folder / "checkpoints", 3, slices, state, ranks=ranks, keep=1)

    run_threads(2, rank_saves)
    return stage
