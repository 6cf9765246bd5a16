"""Memory of a rank in a public run, from a setting and a framework's constants: bytes a parameter and bytes an activation.

What megacore itself holds is counted exactly, by `megacore/plan/memory.py`; of another framework only the totals are known.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from benchmarks.planner_rows import Row
from megacore.plan.setting import Setting
from megacore.plan.step_time import cut

# What each constant multiplies, on one rank of the pipeline.
FEATURES = (
    "bytes_a_parameter",  # weights and gradients
    "bytes_a_divided_parameter",  # master weights and moments, which the data ranks may divide
    "bytes_a_hidden_feature",  # of a token and block, in tensors as wide as the model
    "bytes_an_attention_feature",  # queries, keys, values
    "bytes_a_feed_forward_feature",
    "bytes_a_logit",
    "bytes_a_waiting_feature",  # of a microbatch between stages
    "bytes_a_whole_feature",  # of a microbatch, gathered from the tensor ranks
    "gigabytes",  # of the framework itself
)


def held(s: Setting, rule: str) -> np.ndarray:
    """[ranks of the pipeline, features]: the amounts that the constants multiply."""
    rows, tokens = [], s.tokens
    for rank, stage in enumerate(cut(s, rule)):
        ends = stage.embedding + stage.head - (stage.embedding and stage.head and s.tied)
        parameters = s.block_parameters * stage.blocks + s.vocabulary_parameters * ends
        live = min(s.pipeline - rank, s.microbatches)
        features = live * stage.blocks * tokens / s.tensor
        logits = stage.head * tokens * s.vocab / s.tensor
        attention = features * (s.attention_size + 2 * s.kv_size)
        waiting, whole = live * tokens * s.hidden / s.tensor, tokens * s.hidden
        divided = parameters / (s.data if s.zero else 1)
        rows.append([parameters, divided, features * s.hidden, attention, features * s.ffn, logits, waiting, whole, 1e9])
    return np.array(rows)


def gib(s: Setting, rule: str, constants: Mapping[str, float]) -> float:
    """GiB of the fullest rank."""
    return float((held(s, rule) @ np.array([constants[name] for name in FEATURES])).max()) / 2**30


def fit(rows: Sequence[Row], rule: str) -> dict[str, float]:
    """Constants, none below zero, that fit the rows' memory (relative errors, Cauchy's loss)."""
    amounts = [held(row.setting, rule) for row in rows]
    measured = np.array([row.memory_gib or 0.0 for row in rows]) * 2**30
    constants = np.array([6.0, 12.0, 16.0, 8.0, 12.0, 10.0, 2.0, 2.0, 0.3])
    for _ in range(20):  # the fullest rank depends on the constants: half a step at a time
        fullest = np.array([amount[int((amount @ constants).argmax())] for amount in amounts])
        errors = fullest @ constants / measured - 1
        weights = np.sqrt(1 / (1 + (errors / 0.05) ** 2))
        constants = (constants + _not_negative(fullest / measured[:, None] * weights[:, None], weights)) / 2
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
