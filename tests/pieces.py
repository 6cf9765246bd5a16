"""Shard records and a plan as the tests write them."""

from megacore.distributed.shard import AxisPlacement, Shard
from megacore.pipeline.schedule import Action, Op, Plan, looped


def piece(shape: tuple[int, ...], dim: int | None = 0, index: int = 0, count: int = 1) -> Shard:
    """Piece `index` of a tensor cut along `dim` over `count` tensor ranks, or with
    `dim` None one of as many copies.
    """
    return Shard(shape, (AxisPlacement("tp", index, count, dim=dim),))


def dim_of(shard: Shard) -> int | None:
    """Along which a tensor is cut."""
    return next((along.dim for along in shard.along if along.dim is not None), None)


# A step of three microbatches on one rank, with backwards in two halves: late, behind those of other
# microbatches, and out of order.
OPS = {"F": Op.FORWARD, "B": Op.BACKWARD_INPUT, "W": Op.BACKWARD_WEIGHT}
NAMES = ("F0", "F1", "B0", "F2", "B1", "W1", "B2", "W0", "W2")
ORDER = [Action(OPS[name[0]], int(name[1]), 0, last=name == "W2") for name in NAMES]
SPLIT = Plan(((*ORDER, Action(Op.REDUCE_GRADIENTS)),), looped(1))
