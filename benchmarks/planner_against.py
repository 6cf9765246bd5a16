"""Predictions of two checkouts, side by side: every config, and random layouts of small and large models.

    python -m benchmarks.planner_against --before ../before

Says what differs in parameters, memory, traffic and step time.
"""

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

from megacore.tools.cli import Parser, exit_with

ROOT = Path(__file__).resolve().parents[1]
LAYOUTS = 260  # of which some are refused

# Runs in either checkout, whose rooms may have other names: reads layouts from stdin, and writes a line of
# predictions for each.
DRIVER = """
import json, sys
from dataclasses import asdict
import os
if os.path.isdir("megacore/tools/planner"):  # whichever is installed has rooms of its own
    from megacore.tools.planner import memory, parameters, step_time, traffic, workload, devices, profile
else:
    from megacore.plan import memory, parameters, step_time, traffic, devices, profile
    from megacore.plan import setting as workload
if os.path.isdir("megacore/tools/settings"):
    from megacore.tools.settings.load import resolve
else:
    from megacore.config.load import resolve
from megacore.errors import UserError
known = devices.read_device("h100"), devices.read_cluster("dgx_h100"), profile.profile()

def held(rank):
    own = asdict(rank)
    peak = own.pop("peak")
    return own | {"kept": peak["kept"] + peak["logits"], "working": peak["working"], "sends": peak["transfers"]}

def sent(rank):
    found = {}
    for one in rank:
        key = f"{one.group} {one.operation} {one.size} {one.element_bytes}"
        calls, elements = found.get(key, (0, 0))
        found[key] = calls + one.calls, elements + one.elements
    return sorted(found.items())

for line in sys.stdin:
    sections, world = json.loads(line)
    try:
        config = resolve(sections, [], "side", world).config
        found = {"parameters": parameters.parameters(config), "of ranks": parameters.rank_parameters(config)}
        found["memory"] = [held(rank) for rank in memory.rank_memory(config)]
        if config.engine.kind != "deepspeed":
            found["traffic"] = [sent(rank) for rank in traffic.rank_traffic(config)]
            found["of the last tensor rank"] = [sent(rank) for rank in traffic.rank_traffic(config, tensor_rank=config.parallel.tensor - 1)]
        predicted = step_time.predict(workload.setting_of(config), *known)
        found["step"] = [predicted.step, *sorted(predicted.terms.items())]
    except UserError as error:
        found = {"refused": str(error)}
    print(json.dumps(found), flush=True)
"""  # noqa: E501


def layouts() -> list[tuple[dict[str, Any], int]]:
    """Every config as it is, and random ones: sections, and the number of ranks."""
    found: list[tuple[dict[str, Any], int]] = []
    for path in sorted((ROOT / "configs").glob("*.json")):
        raw = json.loads(path.read_text())
        sizes = raw.get("parallel", {})
        world = sizes.get("tensor", 1) * sizes.get("pipeline", 1) * sizes.get("context", 1)
        found.append((raw, world * (sizes["data"] if isinstance(sizes.get("data"), int) else 1)))
    draw = random.Random(0)
    for _ in range(LAYOUTS):
        heads, kv_heads = draw.choice([(4, 4), (8, 2), (16, 8), (32, 8)])
        norm, activation = draw.choice([("layernorm", "gelu"), ("rmsnorm", "swiglu")])
        model: dict[str, Any] = {
            "num_layers": draw.choice([4, 7, 12, 32]),
            "hidden_size": heads * draw.choice([16, 64, 128]),
            "num_heads": heads,
        }
        model |= {
            "num_kv_heads": kv_heads,
            "norm": norm,
            "activation": activation,
            "vocab_size": draw.choice([101, 1000, 50257]),
        }
        model |= {
            "position": draw.choice(["learned", "rope"]),
            "tie_embeddings": draw.random() < 0.5,
            "bias": draw.random() < 0.5,
        }
        model |= {
            "qk_norm": draw.random() < 0.3,
            "chunked_loss": draw.random() < 0.3,
            "dropout": draw.choice([0.0, 0.0, 0.1]),
        }
        tensor, pipeline, data, context = (
            draw.choice(sizes) for sizes in ([1, 2, 4], [1, 2, 4], [1, 2, 4, 8], [1, 1, 2])
        )
        schedule = draw.choice(["1f1b", "gpipe", "interleaved", "zb_h1", "zb_v"])
        parallel: dict[str, Any] = {
            "tensor": tensor,
            "pipeline": pipeline,
            "data": data,
            "context": context,
            "schedule": schedule,
        }
        parallel |= {
            "sequence": tensor > 1 and draw.random() < 0.5,
            "context_method": draw.choice(["gather", "ring", "ulysses"]),
        }
        precision = draw.choice(["fp32", "bf16", "bf16", "fp16", "fp64"])
        train: dict[str, Any] = {
            "seq_len": draw.choice([64, 256, 2048]),
            "micro_batch_size": draw.choice([1, 2]),
            "precision": precision,
        }
        train |= {
            "global_batch_size": 2 * data * pipeline * draw.choice([1, 2, 8]),
            "device": draw.choice(["cpu", "cuda"]),
        }
        train |= {"recompute": draw.choice(["none", "selective", "full"])}
        engine: dict[str, Any] = {
            "kind": draw.choice(["native", "native", "fsdp"]),
            "bucket_mib": draw.choice([1, 8, 40]),
        }
        engine |= {
            "shard_optimizer": engine["kind"] == "native" and draw.random() < 0.5,
            "reduce_levels": draw.choice([1, 1, 2]),
        }
        engine |= (
            {"reduce_dtype": draw.choice(["fp32", "fp32", "bf16"])}
            if engine["kind"] == "native"
            else {"reduce_levels": 1}
        )
        sections = {"model": model, "parallel": parallel, "train": train, "engine": engine}
        found.append((sections, tensor * pipeline * data * context))
    return found


def predictions(checkout: Path, asked: list[tuple[dict[str, Any], int]]) -> list[dict[str, Any]]:
    """What a checkout predicts."""
    lines = "".join(json.dumps(one) + "\n" for one in asked)
    environment = os.environ | {"PYTHONPATH": str(checkout)}
    done = subprocess.run(
        [sys.executable, "-c", DRIVER],
        input=lines,
        text=True,
        stdout=subprocess.PIPE,
        cwd=checkout,
        env=environment,
    )
    if done.returncode:
        raise SystemExit(f"{checkout}: status {done.returncode}")
    return [json.loads(line) for line in done.stdout.splitlines()]


def main(argv: list[str]) -> int:
    parser = Parser(
        "Compare the predictions of two checkouts for every config and for random layouts.",
        example="python -m benchmarks.planner_against --before ../before",
        status="0 equal, 1 different, 2 wrong arguments",
        page="docs/planning.md",
    )
    parser.add_argument("--before", type=Path, required=True, metavar="CHECKOUT", help="the other checkout")
    args = parser.parse_args(argv)
    asked = layouts()
    pairs = list(zip(predictions(args.before, asked), predictions(ROOT, asked), strict=True))
    refused = sum("refused" in before and "refused" in after for before, after in pairs)
    differ = 0
    for (sections, _), (before, after) in zip(asked, pairs, strict=True):
        if "refused" in before and "refused" in after:
            continue
        if keys := [key for key in before.keys() | after.keys() if before.get(key) != after.get(key)]:
            differ += 1
            print(json.dumps(sections))
            for key in sorted(keys):
                print(f"  {key}:\n    before {before.get(key)}\n    after  {after.get(key)}")
    print(
        f"{len(asked)} configs and layouts: {len(asked) - refused - differ} equal, {differ} differ, "
        f"{refused} refused by both"
    )
    return 1 if differ else 0


if __name__ == "__main__":
    exit_with(main)
