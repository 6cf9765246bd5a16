"""Bytes of activations that a stage keeps, and needs while it works: what its layers do, each
measured by itself (`measured.py`).
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import groupby
from operator import itemgetter

from megacore.config.schema import Config
from megacore.pipeline.schedule import Op
from megacore.tools.choices.layer_cost import BALANCED, LayerCost, Loads


@dataclass(frozen=True)
class StageActivations:
    """What a stage's layers cost a microbatch together. Bytes."""

    kept: int  # of a forward until its backward
    logits: int  # of it by the last layer: logits, and the loss
    waiting: int  # between the two parts of a split backward
    at_work: dict[Op, int]  # that an action needs while it runs, besides what is kept or waits


def layer_costs(config: Config, own: range, loads: Loads = BALANCED) -> list[tuple[LayerCost, int]]:
    """What each layer of a stage costs, given its inner ones: runs of equal layers, in order."""
    cost_of: Callable[..., LayerCost] = import_module("megacore.tools.choices.measured").cost_of
    last = config.model.num_layers
    kinds = own if config.model.is_custom else [config.model.alike(layer) for layer in own]
    alike = [(kind, len([*same])) for kind, same in groupby(zip(kinds, map(loads.get, own), strict=True))]
    runs = [
        *([((-1, None), 1)] if own.start == 0 else []),
        *alike,
        *([((last, None), 1)] if own.stop == last else []),
    ]
    costs = ((cost_of(config, layer + 1, load), count) for (layer, load), count in runs)
    return [(cost, sum(count for _, count in same)) for cost, same in groupby(costs, key=itemgetter(0))]


def stage_activations(
    config: Config, stages: Sequence[range], loads: Loads = BALANCED
) -> list[StageActivations]:
    """The activations of each stage, given its inner layers."""
    found, alike = [], dict[Hashable, StageActivations]()
    for own in stages:
        behind = own.stop == config.model.num_layers
        blocks = own if config.model.is_custom else tuple(map(config.model.alike, own))
        kind = (own.start == 0, blocks, behind, *map(loads.get, own))
        if kind in alike:
            found.append(alike[kind])
            continue
        runs = layer_costs(config, own, loads)
        # of inner layers; beside the one at work, what another keeps is on its way
        if config.train.offload_activations:
            ends = {0} if own.start == 0 else set()
            ends |= {len(runs) - 1} if behind else set()
            runs = [run if i in ends else (offloaded(run[0]), run[1]) for i, run in enumerate(runs)]
        found.append(alike.setdefault(kind, composed(runs, runs[-1][0].kept if behind else 0)))
    return found


def offloaded(cost: LayerCost) -> LayerCost:
    """The same of a layer whose activations are in host memory, and come back for backward."""
    return replace(cost, kept=0, most={op: most + cost.kept for op, most in cost.most.items()})


def composed(runs: Sequence[tuple[LayerCost, int]], logits: int) -> StageActivations:
    """The cost of layers that run one after the other, given as runs of equal ones; `logits`:
    what the last of a model keeps.
    """
    kept, waiting = (sum(count * getattr(cost, what) for cost, count in runs) for what in ("kept", "waiting"))
    at_work, before, waiting_before = dict.fromkeys(runs[0][0].most, 0), 0, 0
    for cost, count in runs:
        for i in {0, count - 1}:  # of equal layers the first or the last needs most
            begun, behind = before + i * cost.kept, waiting - waiting_before - (i + 1) * cost.waiting
            begins = {
                Op.BACKWARD_INPUT: begun + behind - kept,
                Op.BACKWARD_WEIGHT: waiting_before + i * cost.waiting - waiting,
            }
            for op, most in cost.most.items():
                at_work[op] = max(at_work[op], begins.get(op, begun - kept) + most)
        before, waiting_before = before + count * cost.kept, waiting_before + count * cost.waiting
    return StageActivations(kept, logits, waiting, at_work)
