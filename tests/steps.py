"""A few steps in any layout, without a trainer around them, and what they leave
behind compared with one process.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megacore.config import Config
from megacore.distributed.communicator import Group
from megacore.distributed.mesh import Mesh
from megacore.model.batch import Microbatch
from megacore.model.choose import layers_of
from megacore.model.layers import Layers, fields_of
from megacore.tools.launchers import place_from_environment
from megacore.train.loader import microbatch_on
from tests.build import mesh_of, run_of, step_of
from tests.training import VOCAB_SIZE, difference

STEPS = 2  # the second begins with the weights and the state that the first has left


@dataclass(frozen=True)
class Piece:
    """What a rank holds of a logical tensor."""

    tensor: Tensor
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    saved: bool


@dataclass(frozen=True)
class Found:
    """A rank's losses and gradient norms by step, and its pieces of all state behind the last."""

    figures: list[tuple[float, float]]
    pieces: dict[str, Piece]


def batch_of(config: Config, step: int, group: Group) -> list[Microbatch]:
    """A rank's microbatches of a global batch that is the same however many ranks share it."""
    train = config.train
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(VOCAB_SIZE, (2, train.global_batch_size, train.seq_len), generator=generator)
    pairs = list(zip(*(t.split(train.micro_batch_size) for t in tokens), strict=True))[
        group.rank :: group.size
    ]
    return [Microbatch(inputs, targets, key) for key, (inputs, targets) in enumerate(pairs)]


def train(config: Config, mesh: Mesh, layers: Layers | None = None) -> Found:
    """Some steps, without a trainer around them. `layers`: of another model than the config's."""
    step, figures = step_of(run_of(config), mesh, layers=layers), []
    sources = fields_of(layers_of(config) if layers is None else layers)
    for number in range(1, STEPS + 1):
        whole = batch_of(config, number, mesh.sample_group)
        batch = [
            microbatch_on(m.tokens.numpy(), m["targets"].numpy(), mesh, m.key, sources=sources) for m in whole
        ]
        done = step(number, batch)
        figures.append((done.loss.item(), done.grad_norm.item()))
    step.engine.settle()
    pieces = {
        name: Piece(tensor.detach().clone(), box.offset, box.global_shape, box.counted)
        for name, (tensor, box) in step.engine.tensors().items()
    }
    step.engine.close()
    mesh.close()
    return Found(figures, pieces)


def put_together(ranks: Sequence[Found]) -> dict[str, Tensor]:
    """The logical tensors from the pieces that ranks save; every element must be saved once."""
    whole: dict[str, Tensor] = {}
    times: dict[str, Tensor] = {}
    for found in ranks:
        for key, piece in found.pieces.items():
            name = key.partition("#")[0]
            at = tuple(
                slice(start, start + size)
                for start, size in zip(piece.offset, piece.tensor.shape, strict=True)
            )
            if piece.saved:
                whole.setdefault(name, torch.zeros(piece.shape, dtype=torch.float64))[at] = piece.tensor
                times.setdefault(name, torch.zeros(piece.shape))[at] += 1
    assert all((count == 1).all() for count in times.values()), {
        name for name, count in times.items() if not (count == 1).all()
    }
    return whole


def apart(ranks: Sequence[Found], one: Found) -> float:
    """The largest relative difference of any loss, norm or tensor from one process's."""
    expected, found = put_together([one]), put_together(ranks)
    assert expected.keys() == found.keys()
    worst = max(
        float((found[name] - right).norm() / (right.norm() or 1.0)) for name, right in expected.items()
    )
    assert len({tuple(rank.figures) for rank in ranks}) == 1, "ranks that disagree about a figure would part"
    return max(worst, difference(ranks[0].figures, one.figures))


def train_rank(config_path: str, overrides: list[str]) -> Found:
    """Take some steps as one rank of the run that a test has started, be it the only one."""
    config = run_of(config_path, *overrides, world=place_from_environment().world_size)
    return train(config, mesh_of(config))
