"""Narayanan et al. (2021), table 1: models of 1.7 to 76 billion parameters on 32 to 1,024 A100, predicted.

Nothing is fitted to these rows. The constants are those of Megatron-LM of 2022; microbatches and chunks are
those of Megatron-LM's own script for this table (examples/sc21/run_table_1.sh). Everything is recomputed, and
gradients are summed in 16 bits, as that version does in fp16. The baseline is one rate for all rows: their
median.
"""

import csv
from pathlib import Path
from typing import Any

import numpy as np

from megacore.errors import ConfigError
from megacore.files import read_text
from megacore.tools.planner.devices import read_cluster, read_device
from megacore.tools.planner.profile import profile
from megacore.tools.planner.step_time import predict
from megacore.tools.planner.workload import Setting

SEQUENCE, VOCABULARY = 2048, 51200
# microbatch, chunks of a rank
RECIPES = {"1.7": (16, 1), "3.6": (16, 1), "7.5": (16, 1), "18.4": (8, 1), "39.1": (4, 1), "76.1": (2, 3)}


def setting(row: dict[str, str]) -> Setting:
    """What a row of the table ran."""
    tensor, pipeline, heads, hidden = (int(row[name]) for name in ("tensor", "pipeline", "heads", "hidden"))
    micro_batch, chunks = RECIPES[row["params_billion"]]
    return Setting(
        layers=int(row["layers"]),
        hidden=hidden,
        ffn=4 * hidden,
        heads=heads,
        kv_heads=heads,
        head_size=hidden // heads,
        vocab=VOCABULARY,
        seq=SEQUENCE,
        tied=True,
        tensor=tensor,
        pipeline=pipeline,
        data=int(row["gpus"]) // tensor // pipeline,
        chunks=chunks,
        schedule="interleaved" if chunks > 1 else "1f1b",
        micro_batch=micro_batch,
        global_batch=int(row["global_batch"]),
        precision="fp16",
        recompute="full",
        flash=False,
        gradient_bytes=2,
    )


def score(path: Path) -> list[dict[str, Any]]:
    """Measured and predicted seconds of each row, with the relative errors of prediction and baseline.

    Raises `ConfigError`.
    """
    device, cluster, known = read_device("a100"), read_cluster("dgx_a100"), profile("megatron-2022")
    found: list[dict[str, Any]] = []
    try:
        rows = list(csv.DictReader(read_text(path).splitlines()))
        middle = float(np.median([float(row["tflops_per_gpu"]) for row in rows]))
        for row in rows:
            s, rate = setting(row), float(row["tflops_per_gpu"])
            # the table's rate counts a step's operations so
            fill = 1 + s.seq / (6 * s.hidden) + s.vocab / (16 * s.layers * s.hidden)
            measured = 96 * s.global_batch * s.seq * s.layers * s.hidden**2 * fill / (rate * 1e12 * s.world)
            predicted = predict(s, device, cluster, known).step
            found.append(
                {
                    "billions": row["params_billion"],
                    "devices": s.world,
                    "measured": measured,
                    "predicted": predicted,
                }
            )
            found[-1] |= {"error": predicted / measured - 1, "baseline": rate / middle - 1}
    except OSError as error:
        raise ConfigError(
            "--weak-scaling", f"cannot read {path}: {error.strerror}", "a table of weak scaling"
        ) from None
    except (KeyError, ValueError) as error:
        raise ConfigError(
            "--weak-scaling",
            f"{path} is no such table: {error}",
            "the columns of benchmarks/a100_weak_scaling.csv",
        ) from None
    return found


def markdown(found: list[dict[str, Any]]) -> list[str]:
    """The table's lines."""
    lines = ["", "Weak scaling on A100 (Narayanan et al. 2021, table 1), to which nothing is fitted:", ""]
    lines += [
        "| billion parameters | devices | measured | predicted | error | of one rate for all |",
        "|---:|---:|---:|---:|---:|---:|",
    ]
    for one in found:
        seconds = f"{one['measured']:.2f} s | {one['predicted']:.2f} s"
        lines.append(
            f"| {one['billions']} | {one['devices']} | {seconds} | {one['error']:+.1%} | "
            f"{one['baseline']:+.1%} |"
        )
    return lines
