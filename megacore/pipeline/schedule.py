"""Pipeline schedules as data: what every stage does, in which order.

A generator (`GENERATORS`) returns, for every stage, a tuple of compute actions. `lower` adds the
transfers and reductions. The same lowered object is validated and simulated (`simulate.py`), drawn
(`plot.py`) and executed (`runtime.py`): there is no second source of the order.

To add a schedule: write a generator, add it to `GENERATORS`; the tests validate and run every entry.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum


class Op(Enum):
    """What an action does. The runtime has one method an op; the simulator one rule an op."""

    FORWARD = "forward"
    BACKWARD = "backward"
    SEND_ACTIVATION = "send_activation"  # to the stage that holds the next chunk of the model
    RECV_ACTIVATION = "recv_activation"
    SEND_GRADIENT = "send_gradient"  # to the stage that holds the chunk before
    RECV_GRADIENT = "recv_gradient"
    REDUCE_GRADIENTS = "reduce_gradients"  # over the data-parallel ranks
    REDUCE_TIED = "reduce_tied"  # between the stages that share the embedding


TRANSFERS = frozenset({Op.SEND_ACTIVATION, Op.RECV_ACTIVATION, Op.SEND_GRADIENT, Op.RECV_GRADIENT})


@dataclass(frozen=True)
class Action:
    """One thing that a stage does.

    `microbatch` and `chunk` are -1 for reductions. `peer` is the other stage of a transfer. `last` marks
    the final backward of a chunk: its gradients are complete, so their reduction may start behind it.
    """

    op: Op
    microbatch: int = -1
    chunk: int = -1
    peer: int = -1
    last: bool = False


Plan = tuple[tuple[Action, ...], ...]  # for every stage, its actions in order


def gpipe(stages: int, microbatches: int, chunks: int = 1) -> Plan:
    """All forwards, then all backwards in reverse (Huang et al. 2019, GPipe). Holds every microbatch's activations."""
    assert chunks == 1
    forward = [Action(Op.FORWARD, m, 0) for m in range(microbatches)]
    backward = [Action(Op.BACKWARD, m, 0) for m in reversed(range(microbatches))]
    return tuple(tuple(forward + backward) for _ in range(stages))


def one_forward_one_backward(stages: int, microbatches: int, chunks: int = 1) -> Plan:
    """1F1B (Narayanan et al. 2019, PipeDream-Flush): stage i holds at most min(stages - i, microbatches) activations."""
    assert chunks == 1
    plan = []
    for stage in range(stages):
        warmup = min(stages - stage - 1, microbatches)
        actions = [Action(Op.FORWARD, m, 0) for m in range(warmup)]
        for m in range(microbatches - warmup):
            actions += [Action(Op.FORWARD, warmup + m, 0), Action(Op.BACKWARD, m, 0)]
        actions += [Action(Op.BACKWARD, m, 0) for m in range(microbatches - warmup, microbatches)]
        plan.append(tuple(actions))
    return tuple(plan)


GENERATORS: dict[str, Callable[[int, int, int], Plan]] = {"gpipe": gpipe, "1f1b": one_forward_one_backward}


def build(name: str, stages: int, microbatches: int, chunks: int = 1, *, tied: bool = False) -> Plan:
    """The lowered plan of a named schedule: what the runtime executes.

    `tied`: the embedding is shared between the first and the last stage.
    """
    return lower(GENERATORS[name](stages, microbatches, chunks), chunks, tied=tied)


def forward_only(stages: int, microbatches: int) -> Plan:
    """A lowered plan that only runs forward (validation)."""
    return lower(tuple(tuple(Action(Op.FORWARD, m, 0) for m in range(microbatches)) for _ in range(stages)), 1)


def lower(plan: Plan, chunks: int, *, tied: bool = False) -> Plan:
    """Adds to compute actions the receives before them, the sends behind them, and the reductions at the end.

    Virtual stage ``chunk * stages + stage`` computes after the one before it. Between two compute actions all
    transfers are adjacent, and a maximal run of adjacent transfers is one batch: so what a stage sends
    forward and what it awaits from there are posted together, and 1F1B cannot deadlock.
    """
    stages = len(plan)
    last_virtual = stages * chunks - 1
    lowered = []
    for stage, actions in enumerate(plan):
        out: list[Action] = []
        final = {a.chunk: i for i, a in enumerate(actions) if a.op is Op.BACKWARD}
        for i, action in enumerate(actions):
            virtual = action.chunk * stages + stage
            m, before, after = action.microbatch, virtual - 1, virtual + 1
            if action.op is Op.FORWARD:
                if virtual > 0:
                    out.append(Action(Op.RECV_ACTIVATION, m, action.chunk, before % stages))
                out.append(action)
                if virtual < last_virtual:
                    out.append(Action(Op.SEND_ACTIVATION, m, action.chunk, after % stages))
            elif action.op is Op.BACKWARD:
                if virtual < last_virtual:
                    out.append(Action(Op.RECV_GRADIENT, m, action.chunk, after % stages))
                out.append(Action(Op.BACKWARD, m, action.chunk, last=final[action.chunk] == i))
                if virtual > 0:
                    out.append(Action(Op.SEND_GRADIENT, m, action.chunk, before % stages))
        if final:
            out.append(Action(Op.REDUCE_GRADIENTS))
            if tied and stages > 1 and stage in (0, stages - 1):
                out.append(Action(Op.REDUCE_TIED))
        lowered.append(tuple(out))
    return tuple(lowered)
