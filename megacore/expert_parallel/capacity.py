"""Capacity: how many rows an expert takes of a microbatch.

The others are dropped, those of least weight first.

The microbatch is that of a data rank. Its context and tensor ranks each have some of its tokens, and tell
each other the weights of all: so the same rows are dropped in every layout.
"""

import math

import torch
from torch import Tensor

from megacore.distributed.collectives import all_gather
from megacore.distributed.communicator import Group

NARROWER = {torch.float64: torch.float32, torch.float32: torch.float16}


def within_capacity(
    weights: Tensor, chosen: Tensor, experts: int, factor: float, places: Tensor, group: Group
) -> Tensor:
    """Which of its experts each of this rank's tokens goes to, ``[tokens,
    experts_per_token]``; collective over the group.

    An expert takes `factor` times the mean of rows, rounded up: those whose weight is largest, and of equal
    ones the first. `places`: of this rank's tokens in the microbatch, of which the group's ranks have all.

    Weights are compared in a narrower dtype. The same first token of several documents has the same weights
    up to rounding, and rounding differs between layouts.
    """
    copies = chosen.shape[1]
    own = torch.cat([t.double() for t in (places[:, None], weights.to(NARROWER[weights.dtype]), chosen)], 1)
    every = all_gather(own, group)
    every = torch.empty_like(every).index_copy(0, every[:, 0].long(), every)  # in the microbatch's order
    weight, expert = every[:, 1 : 1 + copies].flatten(), every[:, 1 + copies :].flatten()
    order = weight.argsort(descending=True, stable=True)
    order = order[expert[order].argsort(stable=True)]
    of = expert[order]
    # rows of the same expert with more weight
    before = torch.arange(len(of), device=of.device) - torch.searchsorted(of, of)
    fits = torch.empty_like(of, dtype=torch.bool).index_copy(
        0, order, before < math.ceil(factor * len(of) / experts)
    )
    return fits.view(-1, copies)[places]
