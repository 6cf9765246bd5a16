"""Shard records as the tests write them."""

from megacore.distributed.shard import Along, Shard


def piece(shape: tuple[int, ...], dim: int | None = 0, index: int = 0, count: int = 1) -> Shard:
    """Piece `index` of a tensor cut along `dim` over `count` tensor ranks, or with `dim` None one of as many copies."""
    return Shard(shape, (Along("tp", index, count, dim=dim),))


def dim_of(shard: Shard) -> int | None:
    """Along which a tensor is cut."""
    return next((along.dim for along in shard.along if along.dim is not None), None)
