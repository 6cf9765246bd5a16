"""Memory of nanotron's public runs, from a setting: what can be counted, and six constants for what cannot.

nanotron logs the memory that its first rank's allocator has reserved. That rank holds the first stage of a
pipeline, so the logits are in it only if there is no pipeline. Counted are

- weights and their gradients' sums, master weights and moments, and the buckets in which data ranks sum
  without ZeRO;
- what attention and the feed-forward keep for their backward, of every microbatch that is alive.

A collective of the tensor ranks keeps its tensors until it is done. Where the device is slower than the host
that starts its work, the host has started the next blocks by then: their gathered inputs wait in memory. An
allocator that runs short waits for them, so they do not decide whether a run fits.

What megacore itself holds is counted exactly, by `megacore/tools/planner/memory.py`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.planner_fit import CASES
from benchmarks.planner_rows import Row
from megacore.tools.planner.error_bars import SIZES, kind_of
from megacore.tools.planner.layer_time import block_work
from megacore.tools.planner.operations import Machine
from megacore.tools.planner.profile import fitted, profile
from megacore.tools.planner.stages import cut
from megacore.tools.planner.workload import Setting

# What each constant multiplies, on one rank of the pipeline.
FEATURES = (
    "bytes_a_gradient",  # of a microbatch, before it is added to the sum
    "bytes_a_gradient_under_zero",
    "bytes_a_logit",
    "bytes_a_waiting_feature",  # of a token and block, gathered from the tensor ranks while the host is ahead
    "bytes_a_whole_feature",  # of a microbatch, gathered from the tensor ranks
    "gigabytes",  # of the framework itself
)
START = np.array([1.0, 1.0, 10.0, 4.0, 4.0, 0.3])
LIMIT = 0.95  # of the device's memory: what a run may fill
WAITING = FEATURES.index("bytes_a_waiting_feature")


def kept_features(s: Setting) -> float:
    """Bytes that a block keeps of one token for its backward, on a rank: all tensor ranks divide all of them.

    Inputs and outputs of both norms (2 bytes each of a hidden feature). Queries, keys and values in one
    tensor, keys and values again behind the rotation, attention's output and its copy in the order of tokens.
    The gate and what it is multiplied with, the activation and the product; without a gate two tensors.
    """
    return (8 * s.hidden + 6 * s.attention_size + 8 * s.kv_size + (8 if s.gated else 4) * s.ffn) / s.tensor


def host_is_ahead(row: Row) -> bool:
    """Whether the device needs longer for a block's forward than the host needs to start it."""
    forward = dict(block_work(row.setting, Machine(row.device, row.cluster, profile(row.framework))).forward)
    return forward.pop("host") < sum(forward.values())


def held(row: Row, rule: str) -> tuple[np.ndarray, np.ndarray]:
    """By rank of the pipeline the bytes that are counted, and [ranks, features] the
    amounts that the constants multiply.
    """
    s, counted, amounts = row.setting, [], []
    ahead = s.tensor > 1 and host_is_ahead(row)
    for rank, stage in enumerate(cut(s, rule)):
        ends = stage.embedding + stage.head - (stage.embedding and stage.head and s.tied)
        parameters = s.block_parameters * stage.blocks + s.vocabulary_parameters * ends
        blocks = min(s.pipeline - rank, s.microbatches) * stage.blocks * s.tokens
        state = 6 + 12 / (s.data if s.zero else 1) + 2 * (s.data > 1 and not s.zero)
        counted.append(state * parameters + blocks * kept_features(s))
        logits = stage.head * s.tokens * s.vocab / s.tensor
        whole = s.tokens * s.hidden
        amounts.append(
            [
                parameters * (not s.zero),
                parameters * bool(s.zero),
                logits,
                ahead * blocks * s.hidden,
                whole,
                1e9,
            ]
        )
    return np.array(counted), np.array(amounts)


def reserved_gib(row: Row, rule: str, constants: Mapping[str, float]) -> float:
    """GiB that the first rank's allocator reserves: what nanotron logs."""
    counted, amounts = held(row, rule)
    return float(counted[0] + amounts[0] @ np.array([constants[name] for name in FEATURES])) / 2**30


def needed_gib(row: Row, rule: str, constants: Mapping[str, float]) -> float:
    """GiB that the fullest rank cannot do without."""
    counted, amounts = held(row, rule)
    factors = np.array([constants[name] for name in FEATURES])
    factors[WAITING] = 0.0
    return float((counted + amounts @ factors).max()) / 2**30


def refused(s: Setting) -> bool:
    """Whether nanotron's 1F1B ends at its own check: it takes at least one microbatch
    fewer than the pipeline has ranks.
    """
    return s.microbatches < s.pipeline - 1


def fit(rows: Sequence[Row], rule: str) -> dict[str, float]:
    """Constants, none below zero, that fit the rows' memory (relative errors, Cauchy's loss)."""
    parts = [held(row, rule) for row in rows]
    measured = np.array([row.memory_gib or 0.0 for row in rows]) * 2**30
    matrix = np.array([amounts[0] for _, amounts in parts]) / measured[:, None]
    target = 1 - np.array([counted[0] for counted, _ in parts]) / measured
    constants = START
    for _ in range(100):
        weights = np.sqrt(1 / (1 + ((matrix @ constants - target) / 0.05) ** 2))
        constants = _not_negative(matrix * weights[:, None], target * weights)
    return {name: float(f"{value:.4g}") for name, value in zip(FEATURES, constants, strict=True)}


def _not_negative(matrix: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Least squares, without the columns that would get a negative factor."""
    columns = list(range(matrix.shape[1]))
    while True:
        found = np.linalg.lstsq(matrix[:, columns], target, rcond=None)[0]
        if (found >= 0).all():
            break
        columns = [column for column, value in zip(columns, found, strict=True) if value >= 0]
    full = np.zeros(matrix.shape[1])
    full[columns] = found
    return full


def score(rows: Sequence[Row]) -> dict[str, Any]:
    """Error of memory, and what is said of runs that failed and of runs that ran."""
    constants = fitted().get("memory", {}).get("nanotron")
    if constants is None:
        return {}
    report: dict[str, Any] = {}
    case = CASES["nanotron"]
    every = [row for row in rows if row.framework == "nanotron"]
    for part, wanted in (("fitted", (False,)), ("held out", (True,)), ("all", (False, True))):
        own = [row for row in every if case.held_out(row) in wanted]
        sizes = np.array([reserved_gib(row, "nanotron", constants) for row in own])
        needed = np.array([needed_gib(row, "nanotron", constants) for row in own])
        ends = np.array([refused(row.setting) for row in own], dtype=bool)
        limit = np.array([LIMIT * (row.device.memory_gib or 0.0) for row in own])
        ran = np.array([row.fits for row in own], dtype=bool)
        known = np.array([row.memory_gib is not None for row in own], dtype=bool)
        measured = np.array([row.memory_gib or 1.0 for row in own])
        relative = np.abs(sizes / measured - 1)[known & ran]
        if len(relative):
            over = needed > limit
            report[part] = {
                "rows": len(relative),
                "median": float(np.median(relative)),
                "p90": float(np.quantile(relative, 0.9)),
                "refused": int((~ran & ends).sum()),
                "refused that ran": int((ran & ends).sum()),
                "failed": int((~ran & ~ends).sum()),
                "recall": share(over, ~ran & ~ends),
                # Some runs crashed for other reasons: by counting they fill less than half of the device.
                "recall where half is full": share(over, ~ran & ~ends & (needed > limit / 2)),
                "false alarms": share(over, ran),
            }
    return report


def by_size(rows: Sequence[Row]) -> dict[str, Any]:
    """`score` of all rows of a size."""
    found = {
        size: score([row for row in rows if kind_of(row.setting.world, False)[0] == size]).get("all")
        for size in SIZES
    }
    return {size: own for size, own in found.items() if own}


def share(yes: np.ndarray, of: np.ndarray) -> float:
    """The part of some rows for which something holds; 0 of none."""
    return float(yes[of].mean()) if of.any() else 0.0
