"""Partial rotary positions: peers turn the first features of a head, feature j
with j + r/2 of the r that turn.

Ours pair feature j with j + head/2 always, so the features of queries and keys stand in another order. Scores
do not depend on it.
"""

from dataclasses import replace

import torch
from torch import Tensor

from megacore.config import Config
from megacore.tools.interchange.mapped import Mapped


def theirs_in_ours(head_size: int, turned: int) -> Tensor:
    """Which feature of theirs each of ours is ``[head]``: half of those that turn,
    half of the others, and so again.
    """
    turning, still = torch.arange(head_size).split([turned, head_size - turned])
    return torch.cat(
        [half for halves in zip(turning.chunk(2), still.tensor_split(2), strict=True) for half in halves]
    )


def reordered(tensor: Mapped, config: Config) -> Mapped:
    """The mapping of a qkv weight or bias ``[kv heads, group + 2, head, …]`` whose
    peer turns a part of the features.
    """
    order = theirs_in_ours(config.head_size, int(config.head_size * config.model.rotary_share))

    def moved(x: Tensor, order: Tensor) -> Tensor:
        return torch.cat((x[:, :-1].index_select(2, order), x[:, -1:]), 1)  # values do not turn

    return replace(
        tensor,
        join=lambda theirs: moved(tensor.join(theirs), order),
        split=lambda ours: tensor.split(moved(ours, order.argsort())),
    )
