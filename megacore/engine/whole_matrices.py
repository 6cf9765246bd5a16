"""The logical matrices that a rule with `Rule.whole` is given, within a parameter and
within what the rule keeps of it.
"""

from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

from torch import Tensor

from megacore.distributed.shard import LogicalMatrix, Shard
from megacore.optimizers.rule import Rule, Shape


def matrices_of(rule: Rule[Any], shard: Shard) -> list[LogicalMatrix]:
    """The matrices of a parameter, as the rule is given them."""
    return (
        [matrix if rule.by_head else matrix.joined for matrix in shard.logical_matrices] if rule.whole else []
    )


def own_shapes(rule: Rule[Any], shard: Shard) -> dict[str, list[Shape]]:
    """The shapes of a rule's own state for each of `matrices_of`, by kind."""
    every = [rule.own_state(matrix.sizes(shard.global_shape)) for matrix in matrices_of(rule, shard)]
    return {kind: [own[kind] for own in every] for kind in every[0]} if every else {}


def own_state_shapes(rule: Rule[Any], shard: Shard) -> dict[str, Shape]:
    """The shapes of a parameter's own state, by kind. That of several matrices lies end to end in one dim."""
    return {
        kind: shapes[0] if len(shapes) == 1 else (sum(map(prod, shapes)),)
        for kind, shapes in own_shapes(rule, shard).items()
    }


def own_views(rule: Rule[Any], shard: Shard, own: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """For each of `matrices_of`, its own state within that of the parameter."""
    split = {
        kind: [
            part.view(shape)
            for part, shape in zip(own[kind].flatten().split([prod(s) for s in shapes]), shapes, strict=True)
        ]
        for kind, shapes in own_shapes(rule, shard).items()
    }
    for number in range(len(matrices_of(rule, shard))):
        yield {kind: views[number] for kind, views in split.items()}
