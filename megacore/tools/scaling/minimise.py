"""BFGS from many starting points at once, in fp64: small smooth problems, all of whose
points are one array.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Numbers = NDArray[np.int64]
# points [n, dims] of these starts -> values [n], gradients [n, dims]
Objective = Callable[[Array, Numbers], tuple[Array, Array]]

DECREASE = 1e-4  # part of what the slope promises, that a step must gain at least (Armijo)
HALVINGS = 60  # of a step
LONGEST = 4.0  # a step


def minimise(objective: Objective, starts: Array, tolerance: float, most: int) -> tuple[Array, Array]:
    """Where BFGS ends from each start, and the values there.

    A start goes on until no component of its gradient is above `tolerance`, or no step gains anything, or
    after `most` iterations.
    """
    points = starts.astype(np.float64)
    active = np.arange(len(points))
    values, gradients = objective(points, active)
    unit = np.eye(points.shape[1])
    inverse = np.repeat(unit[None], len(points), axis=0)  # of the Hessian, approximately
    fresh = np.ones(len(points), dtype=bool)  # whether it is still the unit matrix
    for _ in range(most):
        active = active[np.abs(gradients[active]).max(axis=1) > tolerance]
        if not len(active):
            break
        step = -np.einsum("nij,nj->ni", inverse[active], gradients[active])
        uphill = active[~(np.einsum("ni,ni->n", step, gradients[active]) < 0)]  # by rounding
        inverse[uphill], fresh[uphill] = unit, True
        step = -np.einsum("nij,nj->ni", inverse[active], gradients[active])
        step *= np.minimum(1.0, LONGEST / np.linalg.norm(step, axis=1))[:, None]
        moved = line_search(objective, active, points, values, gradients, inverse, fresh, step)
        again = ~moved & ~fresh[active]  # the approximation may be at fault: once more without
        inverse[active[again]], fresh[active[again]] = unit, True
        active = active[moved | again]
    return points, values


def line_search(
    objective: Objective,
    active: Numbers,
    points: Array,
    values: Array,
    gradients: Array,
    inverse: Array,
    fresh: NDArray[np.bool_],
    step: Array,
) -> NDArray[np.bool_]:
    """Moves each active point along its step, halved until it gains enough, and learns from the
    gradients; returns which have moved.
    """
    slope = np.einsum("ni,ni->n", step, gradients[active])
    moved = np.zeros(len(active), dtype=bool)
    waiting = np.arange(len(active))
    length = 1.0
    for _ in range(HALVINGS):
        rows = active[waiting]
        tried = points[rows] + length * step[waiting]
        found, gradient = objective(tried, rows)
        good = found <= values[rows] + DECREASE * length * slope[waiting]
        good &= (found < values[rows]) & np.isfinite(gradient).all(axis=1)
        own = rows[good]
        learn(inverse, fresh, own, tried[good] - points[own], gradient[good] - gradients[own])
        points[own], values[own], gradients[own] = tried[good], found[good], gradient[good]
        moved[waiting[good]] = True
        waiting = waiting[~good]
        if not len(waiting):
            break
        length /= 2
    return moved


def learn(inverse: Array, fresh: NDArray[np.bool_], rows: Numbers, s: Array, y: Array) -> None:
    """Updates the approximations of these rows by steps `s` that changed gradients by `y` (Nocedal and Wright
    2006, equations 6.17, 6.20); where the curvature was not positive they stay.
    """
    curved = np.einsum("ni,ni->n", s, y) > 1e-14 * np.linalg.norm(s, axis=1) * np.linalg.norm(y, axis=1)
    rows, s, y = rows[curved], s[curved], y[curved]
    sy = np.einsum("ni,ni->n", s, y)
    first = fresh[rows]
    inverse[rows[first]] *= (sy[first] / np.einsum("ni,ni->n", y[first], y[first]))[:, None, None]
    fresh[rows] = False
    left = np.eye(s.shape[1]) - np.einsum("ni,nj->nij", s, y) / sy[:, None, None]
    inverse[rows] = (
        left @ inverse[rows] @ left.transpose(0, 2, 1) + np.einsum("ni,nj->nij", s, s) / sy[:, None, None]
    )
