"""Mistakes in the plan of a pipeline, which validation must name before a rank starts."""

from collections.abc import Callable
from typing import Any
from unittest import mock

from megacore.pipeline import generators
from megacore.pipeline.schedule import Action, Op, Plan, looped, unsplit
from tests.faults import fault


def spoilt(name: str, rank: int, change: Callable[[list[Action]], object]) -> Any:
    """The named schedule with one rank's actions changed."""
    generator = generators.GENERATORS[name]

    def wrong(ranks: int, microbatches: int, *chunks: int) -> Plan:
        plan = generator(ranks, microbatches, *chunks)
        rows = [list(own) for own in plan.actions]
        change(rows[rank])
        return Plan(tuple(map(tuple, rows)), plan.placement)

    return mock.patch.dict(generators.GENERATORS, {name: wrong})


def at(actions: list[Action], op: Op, microbatch: int, chunk: int = 0) -> int:
    """The place of an action."""
    return actions.index(Action(op, microbatch, chunk))


ZB_H1, ZB_V = "parallel.schedule=zb_h1", "parallel.schedule=zb_v"


@fault(
    "a plan loses a weight's gradient",
    "pp4",
    "pp rank 1, backward_weight of microbatch 2: is missing",
    ZB_H1,
    check="plan",
)
def plan_loses_weights() -> Any:
    return spoilt("zb_h1", 1, lambda a: a.pop(at(a, Op.BACKWARD_WEIGHT, 2)))


@fault(
    "a plan computes a weight's gradient twice",
    "pp4",
    "pp rank 1, backward_weight of microbatch 2: done 2 times",
    ZB_H1,
    check="plan",
)
def plan_doubles_weights() -> Any:
    return spoilt("zb_h1", 1, lambda a: a.append(Action(Op.BACKWARD_WEIGHT, 2, 0)))


@fault(
    "a plan computes a weight's gradient before its input's gradient",
    "pp4",
    "pp rank 1, backward_weight of microbatch 2: comes before its backward_input",
    ZB_H1,
    check="plan",
)
def plan_takes_weights_first() -> Any:
    return spoilt("zb_h1", 1, lambda a: a.insert(0, a.pop(at(a, Op.BACKWARD_WEIGHT, 2))))


@fault(
    "a plan does a later chunk before the one whose result it takes",
    "pp4",
    "pp rank 3, forward of microbatch 0, chunk 1: comes before chunk 0's forward",
    ZB_V,
    check="plan",
)
def plan_swaps_chunks() -> Any:
    return spoilt("zb_v", 3, lambda a: a.insert(0, a.pop(at(a, Op.FORWARD, 0, 1))))


@fault(
    "a plan hangs unless messages are buffered: the first stage does all forwards first, the second goes "
    "back at once "
    "(pytorch issue 172668; Megatron-LM issues 1852, 5100, 5240)",
    "pp2",
    "deadlock: pp rank 0 waits in send_activation of microbatch 6; pp rank 1 waits in send_gradient of "
    "microbatch 2",
    "parallel.schedule=gpipe",
    check="plan",
)
def plan_needs_buffers() -> Any:
    def mixed(ranks: int, microbatches: int, *chunks: int) -> Plan:
        first = generators.gpipe(ranks, microbatches).actions[0]
        return Plan(
            (first, unsplit(generators.one_forward_one_backward(ranks, microbatches)).actions[1]), looped(2)
        )

    return mock.patch.dict(generators.GENERATORS, {"gpipe": mixed})
