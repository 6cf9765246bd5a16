"""A rule's part of the proof on a whole parameter: on all of it, or with `Rule.whole` on each
logical matrix in it. Plain numpy.

Only for rules with `whole` must the parameter's placement be known.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from megacore.optimizers.rule import ReferenceStep, Rule, Shape, State

if TYPE_CHECKING:  # which imports torch
    from megacore.distributed.shard import LogicalMatrix, Shard


def zeros(rule: Rule[Any], shape: Shape, shard: "Shard | None") -> State:
    """The state of a parameter before the first step."""
    if not rule.whole:
        return {kind: np.zeros(shape) for kind in rule.kinds} | {kind: np.zeros(()) for kind in rule.numbers}
    from megacore.engine.whole_matrices import own_state_shapes

    assert shard is not None
    return {
        kind: np.zeros(own)
        for kind, own in (dict.fromkeys(rule.kinds, shape) | own_state_shapes(rule, shard)).items()
    }


def reference_state(rule: Rule[Any], step: ReferenceStep, shard: "Shard | None") -> State:
    """`Rule.reference_state` of a parameter with this placement."""
    if not rule.whole:
        return rule.reference_state(step)
    after = zeros(rule, step.gradient.shape, shard)
    for matrix, put, before in _by_matrix(rule, step.before, shard):
        for kind, found in rule.reference_state(_within(matrix, step, before)).items():
            put(after, kind, found)
    return after


def reference_direction(
    rule: Rule[Any], step: ReferenceStep, after: State, shard: "Shard | None"
) -> np.ndarray:
    """`Rule.reference_direction`, likewise."""
    if not rule.whole:
        return rule.reference_direction(step, after)
    direction = np.zeros(step.gradient.shape)
    for (matrix, _, before), (_, _, own) in zip(
        _by_matrix(rule, step.before, shard), _by_matrix(rule, after, shard), strict=True
    ):
        write(matrix, rule.reference_direction(_within(matrix, step, before), own), direction)
    return direction


def _within(matrix: "LogicalMatrix", step: ReferenceStep, before: State) -> ReferenceStep:
    """What is known of a step of the parameter, of one matrix alone."""
    return replace(
        step, before=before, gradient=maps(matrix, step.gradient), weights=maps(matrix, step.weights)
    )


def maps(matrix: "LogicalMatrix", weight: np.ndarray) -> np.ndarray:
    """The maps ``[batch, rows, columns]`` in a whole weight."""
    return _part(matrix, weight).reshape(matrix.sizes(weight.shape))


def write(matrix: "LogicalMatrix", found: np.ndarray, weight: np.ndarray) -> None:
    """Puts such maps there."""
    part = _part(matrix, weight)
    part[...] = found.reshape(part.shape)


def _part(matrix: "LogicalMatrix", weight: np.ndarray) -> np.ndarray:
    return weight[matrix.index].transpose(*matrix.batch, *matrix.rows, *matrix.columns)


def _by_matrix(
    rule: Rule[Any], state: State, shard: "Shard | None"
) -> Iterator[tuple["LogicalMatrix", Callable[[State, str, np.ndarray], None], State]]:
    """Each matrix, how to write a kind of its state into a parameter's, and its own part of `state`."""
    from megacore.engine.whole_matrices import matrices_of, own_shapes

    assert shard is not None
    own, at = own_shapes(rule, shard), dict.fromkeys(own_shapes(rule, shard), 0)
    for number, matrix in enumerate(matrices_of(rule, shard)):
        places = {kind: (at[kind], shapes[number]) for kind, shapes in own.items()}
        at = {kind: start + prod(shape) for kind, (start, shape) in places.items()}

        def put(
            into: State, kind: str, value: np.ndarray, matrix: "LogicalMatrix" = matrix, places: Any = places
        ) -> None:
            if kind in places:
                start, shape = places[kind]
                into[kind].reshape(-1)[start : start + prod(shape)] = np.ravel(value)
            else:
                write(matrix, value, into[kind])

        parts = {
            kind: state[kind].reshape(-1)[start : start + prod(shape)].reshape(shape)
            for kind, (start, shape) in places.items()
        }
        yield matrix, put, parts | {kind: maps(matrix, state[kind]) for kind in rule.kinds}
