"""What the ranks of a pipeline hold under a schedule: of each forward something, until its backward."""

from collections.abc import Sequence

from megacore.pipeline.schedule import COMPUTE, Action, Op, Plan


def peak_live(plan: Plan) -> list[int]:
    """For every rank, the most forwards (microbatch and chunk) that await their
    gradients of weights at one time.
    """
    return [int(peak) for peak in peak_held(plan, [1] * plan.stages)]


def peak_held(plan: Plan, sizes: Sequence[float], waiting: Sequence[float] | None = None) -> list[float]:
    """For every rank, the most that its live forwards hold at one time.

    One of stage i holds ``sizes[i]`` from its forward on, and ``waiting[i]`` between BACKWARD_INPUT and
    BACKWARD_WEIGHT; without `waiting` as much as before.
    """
    return [max((held for _, held in row), default=0.0) for row in held_over(plan, sizes, waiting)]


def held_over(
    plan: Plan, sizes: Sequence[float], waiting: Sequence[float] | None = None
) -> list[list[tuple[Action, float]]]:
    """For every rank, each compute action with what its live forwards hold just behind it.

    For the sizes see `peak_held`.

    (The most is held behind a forward: while an action runs, nothing is let go of that it has not used.)
    """
    waiting = sizes if waiting is None else waiting
    rows = []
    for stages, actions in zip(plan.placement, plan.actions, strict=True):
        split = {(a.microbatch, a.chunk) for a in actions if a.op is Op.BACKWARD_INPUT}
        held, row = 0.0, []
        for action in actions:
            if action.op in COMPUTE:
                stage = stages[action.chunk]
                if action.op is Op.FORWARD:
                    held += sizes[stage]
                elif action.op is Op.BACKWARD_INPUT:
                    held += waiting[stage] - sizes[stage]
                else:
                    held -= waiting[stage] if (action.microbatch, action.chunk) in split else sizes[stage]
                row.append((action, held))
        rows.append(row)
    return rows
