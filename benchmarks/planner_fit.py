"""Fits each framework's constants to the part of a table of measured steps that is
named here, and to nothing else.

A constant starts from what its meaning suggests, and a weak prior holds it there where the rows say nothing
about it. The loss is Cauchy's, so that a few rows that another cause slowed do not pull the rest.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.planner_rows import Row
from megacore.tools.planner.profile import Profile
from megacore.tools.planner.step_time import predict

SCALE = 0.05  # relative errors far above it count little more than those near it
PRIOR = 1.0  # spread of a constant's logarithm around its start
WEIGHT = 0.02  # of the prior, against one row
FRACTIONS = (
    "memory_rate",
    "attention_rate",
    "attention_on",
    "compiled_passes",
    "tensor_hidden",
    "data_hidden",
    "sharded_hidden",
    "gather_hidden",
    "pipeline_hidden",
    "product_rate",
    "link_rate",
)


@dataclass(frozen=True)
class Case:
    """What is fitted for one framework."""

    held_out: Callable[[Row], bool]  # rows that nothing is fitted to
    split: str  # the same in words
    # constants, fitted from there or, where not in `free`, kept
    start: dict[str, Any] = field(default_factory=dict)
    free: tuple[str, ...] = ()


def of(*models: str) -> Callable[[Row], bool]:
    """Holds out the rows of these models."""
    return lambda row: row.model in models


# of layouts; the other tables show one or a few tuned layouts of a model
SWEEPS = ("nanotron", "megatron-2023")
LINKS = {"link_rate": {"nvlink": 0.7, "infiniband": 0.7, "efa": 0.7, "roce": 0.7, "ethernet": 0.7}}
COMMON = {
    "attention_rate": 0.5,
    "passes": 1.5,
    "jitter": 0.005,
    "step_host": 0.02,
    "layer_host": 5e-4,
    "call_host": 3e-5,
    **LINKS,
}
CASES: dict[str, Case] = {
    "nanotron": Case(
        of("nanotron-3.57B", "nanotron-80B"),
        "models: fitted on 1.34B and 8.86B, held out 3.57B and 80B",
        {
            **COMMON,
            "stages": "nanotron",
            "product_rate": {"any": 0.7},
            "accumulate_bytes": 12.0,
            "passes": 3.0,
            "link_latency": {"nvlink": 5e-6, "efa": 3e-4},
            "layer_host": 4e-3,
            "hop_host": 2e-4,
            "transfer_host": 5e-4,
            "data_hidden": 0.7,
            "sharded_hidden": 0.3,
            "pipeline_hidden": 0.5,
            "jitter": 0.03,
            "step_host": 0.05,
        },
        (
            "product_rate/any",
            "attention_rate",
            "passes",
            "logit_passes",
            "link_rate/nvlink",
            "link_rate/efa",
            "link_latency/nvlink",
            "link_latency/efa",
            "layer_host",
            "call_host",
            "hop_host",
            "transfer_host",
            "step_host",
            "jitter",
            "data_hidden",
            "sharded_hidden",
            "call",
        ),
    ),
    "megatron-2023": Case(
        lambda row: row.setting.layers in (16, 20) or row.setting.world == 64,
        "models: fitted on 12 and 24 layers, held out 16, 20 and 30 layers (the last on 64 devices)",
        {
            **COMMON,
            "stages": "even",
            "product_rate": {"any": 0.75},
            "accumulate_bytes": 12.0,
            "layer_host": 2e-3,
            "call": 5e-5,
            "data_hidden": 0.1,
            "pipeline_hidden": 0.1,
        },
        (
            "product_rate/any",
            "attention_rate",
            "passes",
            "logit_passes",
            "link_rate/nvlink",
            "link_latency/nvlink",
            "layer_host",
            "call_host",
            "transfer_host",
            "step_host",
            "microbatch_host",
            "call",
            "optimizer_bytes",
            "tensor_hidden",
        ),
    ),
    "nemo": Case(
        of(
            "llama3-70b",
            "nemotron4-340b",
            "gpt3-5b",
            "gpt3-20b",
            "llama2-13b",
            "llama2-70b",
            "nemotron3-8b",
            "nemotron3-22b",
        ),
        "models: held out llama3-70b, nemotron4-340b, gpt3-5b, gpt3-20b, llama2-13b, llama2-70b, "
        "nemotron3-8b, nemotron3-22b",
        {
            **COMMON,
            "stages": "even",
            "product_rate": {"bf16": 0.75, "fp8": 0.65, "nvfp4": 0.5},
            "tensor_hidden": 0.5,
            "data_hidden": 0.5,
            "gather_hidden": 0.5,
            "pipeline_hidden": 0.5,
        },
        (
            "product_rate/bf16",
            "product_rate/fp8",
            "product_rate/nvfp4",
            "product_rate/gb200",
            "product_rate/gb300",
            "product_rate/b200",
            "attention_rate",
            "passes",
            "logit_passes",
            "link_rate/nvlink",
            "link_rate/infiniband",
            "call",
            "jitter",
            "data_hidden",
            "gather_hidden",
            "pipeline_hidden",
            "tensor_hidden",
        ),
    ),
    "llm-foundry": Case(
        of("mpt-125m", "mpt-350m", "mpt-7b", "mpt-70b"),
        "models: fitted on mpt-760m, mpt-3b and mpt-30b, held out mpt-125m, mpt-350m, mpt-7b and mpt-70b",
        {
            **COMMON,
            "stages": "even",
            "product_rate": {"bf16": 0.7, "fp8": 0.5},
            "gather_hidden": 0.8,
            "data_hidden": 0.8,
        },
        (
            "product_rate/bf16",
            "product_rate/h100",
            "product_rate/fp8",
            "attention_rate",
            "attention_on/h100",
            "passes",
            "logit_passes",
            "link_rate/nvlink",
            "link_rate/roce",
            "link_rate/infiniband",
            "layer_host",
            "step_host",
            "microbatch_host",
            "data_hidden",
            "gather_hidden",
            "jitter",
        ),
    ),
    "torchtitan": Case(
        lambda row: row.setting.world in (64, 128),
        "sizes: fitted on 8 and 32 devices, held out 64 and 128",
        {
            **COMMON,
            "stages": "even",
            "product_rate": {"bf16": 0.7, "fp8": 0.5},
            "gather_hidden": 0.8,
            "data_hidden": 0.8,
            "ring_balanced": False,
        },
        (
            "product_rate/bf16",
            "product_rate/fp8",
            "product_rate/b200",
            "attention_rate",
            "attention_on/b200",
            "passes",
            "compiled_passes",
        ),
    ),
    "fms-fsdp": Case(
        of("llama2-13b", "llama2-70b"),
        "models: fitted on llama2-7b and llama2-34b, held out llama2-13b and llama2-70b",
        {**COMMON, "stages": "even", "product_rate": {"bf16": 0.7}, "gather_hidden": 0.8, "data_hidden": 0.8},
        ("product_rate/bf16", "product_rate/h100", "passes", "link_rate/ethernet"),
    ),
    "megatron-2022": Case(
        of("gpt3-175b", "megatron-1t"),
        "models: fitted on megatron-22b and mtnlg-530b, held out gpt3-175b and megatron-1t",
        {
            **COMMON,
            "stages": "even",
            "product_rate": {"any": 0.8},
            "scatters": True,
            "score_passes": 6.5,
            "data_hidden": 0.0,
        },
        ("product_rate/any", "passes", "link_rate/nvlink"),
    ),
    "jax": Case(
        lambda row: row.setting.world >= 512,
        "sizes: fitted on fewer than 512 devices, held out 512 and more",
        {
            **COMMON,
            "stages": "even",
            "product_rate": {"bf16": 0.7, "fp8": 0.5},
            "gather_hidden": 0.8,
            "data_hidden": 0.8,
        },
        (
            "product_rate/bf16",
            "product_rate/fp8",
            "passes",
            "link_rate/infiniband",
            "data_hidden",
            "gather_hidden",
            "jitter",
        ),
    ),
}


def steps(rows: Sequence[Row], profile: Profile) -> np.ndarray:
    """Predicted seconds."""
    return np.array([predict(row.setting, row.device, row.cluster, profile).step for row in rows])


def fit(rows: Sequence[Row], case: Case, name: str, *, rounds: int = 25) -> Profile:
    """The profile whose free constants fit the rows (Levenberg and Marquardt, with the loss as weights)."""
    profile = Profile(name).with_constants(case.start)
    free = [constant for constant in case.free if _matters(constant, rows)]
    bounded = [constant.partition("/")[0] in FRACTIONS for constant in free]
    start = np.array([_inside(_get(profile, constant), b) for constant, b in zip(free, bounded, strict=True)])
    measured = np.log([row.seconds for row in rows if row.seconds is not None])
    prior = math.sqrt(WEIGHT) / PRIOR

    def at(x: np.ndarray) -> Profile:
        values = [
            float(1 / (1 + math.exp(-v)) if b else math.exp(v)) for v, b in zip(x, bounded, strict=True)
        ]
        return _set(profile, free, values)

    def residuals(x: np.ndarray) -> np.ndarray:
        return np.log(steps(rows, at(x))) - measured

    def cost(r: np.ndarray, x: np.ndarray) -> float:
        return float(
            0.5 * SCALE**2 * np.log1p((r / SCALE) ** 2).sum()
            + 0.5 * SCALE**2 * ((prior * (x - start)) ** 2).sum()
        )

    x, damping = start, 1e-2
    r = residuals(x)
    now = cost(r, x)
    for _ in range(rounds):
        columns = [(residuals(x + 1e-3 * unit) - r) / 1e-3 for unit in np.eye(len(x))]
        jacobian, weights = np.stack(columns, 1), 1 / (1 + (r / SCALE) ** 2)
        hessian = jacobian.T @ (weights[:, None] * jacobian) + (SCALE * prior) ** 2 * np.eye(len(x))
        gradient = jacobian.T @ (weights * r) + (SCALE * prior) ** 2 * (x - start)
        for _ in range(8):
            new = x - np.clip(np.linalg.solve(hessian + damping * np.diag(np.diag(hessian)), gradient), -1, 1)
            r_new = residuals(new)
            if (then := cost(r_new, new)) < now:
                break
            damping *= 4
        else:
            break
        gained, x, r, now, damping = 1 - then / now, new, r_new, then, damping / 4
        if gained < 1e-4:
            break
    return at(x)


def _matters(constant: str, rows: Sequence[Row]) -> bool:
    """Whether any of the rows could tell this constant: its link, device or precision is there."""
    table, _, key = constant.partition("/")
    if table in ("link_rate", "link_latency"):
        return any(key == level.link for row in rows for level in row.cluster.levels)
    if table == "attention_on":
        return any(key == row.device.name for row in rows)
    if table == "product_rate" and key != "any":
        return any(key in (row.setting.precision, row.device.name) for row in rows)
    return True


def _get(profile: Profile, constant: str) -> float:
    table, _, key = constant.partition("/")
    if not key:
        return getattr(profile, table)
    values = getattr(profile, table)
    return values.get(key, 0.9 if table == "product_rate" else 0.7)  # a device's factor starts near 1


def _set(profile: Profile, names: Sequence[str], values: Sequence[float]) -> Profile:
    constants: dict[str, Any] = {}
    for name, value in zip(names, values, strict=True):
        table, _, key = name.partition("/")
        if key:
            constants.setdefault(table, {})[key] = value
        else:
            constants[table] = value
    return profile.with_constants(constants)


def _inside(value: float, bounded: bool) -> float:
    """The logarithm, or that of the odds: then neither sign nor bound can be passed."""
    value = max(value, 1e-9)
    return math.log(value / (1 - value)) if bounded else math.log(value)
