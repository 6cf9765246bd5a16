"""Every engine and stage by the features that a run may use: docs/engine_features.md.

A combination is rejected with its reason, or equals the native engine.

python -m tests.engines            trains gpt_tiny on every engine in five layouts, beside the native engine
    on one process
python -m tests.engines zero3      the same, of some
"""

import json
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from megacore.errors import ConfigError
from megacore.tools.cli import Parser, exit_with
from megacore.tools.settings.load import load
from tests import training
from tests.pool import Pool
from tests.training import Figures, difference, figures

ROOT = Path(__file__).resolve().parents[1]


def zero(name: str) -> list[str]:
    """The deepspeed engine with a ds_config of this project."""
    return ["engine.kind=deepspeed", f"engine.config={ROOT}/configs/deepspeed/{name}.json"]


ENGINES: dict[str, list[str]] = {
    "native": [],
    "native, `shard_optimizer`": ["engine.shard_optimizer=true"],
    "fsdp": ["engine.kind=fsdp"],
    "fsdp, `shard_size=2`": ["engine.kind=fsdp", "engine.shard_size=2"],
    "fsdp, `cpu_offload`": ["engine.kind=fsdp", "engine.cpu_offload=true"],
    "deepspeed, stage 0": ["engine.kind=deepspeed", 'engine.config={"zero_optimization":{"stage":0}}'],
    "deepspeed, `zero1`": zero("zero1"),
    "deepspeed, `zero2`": zero("zero2"),
    "deepspeed, `zero2_offload`": zero("zero2_offload"),
    "deepspeed, `zero3`": zero("zero3"),
    "deepspeed, `zero3_offload`": zero("zero3_offload"),
    "deepspeed, `zero3_nvme`": zero("zero3_nvme"),
}

FEATURES: dict[str, list[str]] = {
    "tp": ["parallel.tensor=2"],
    "sp": ["parallel.tensor=2", "parallel.sequence=true"],
    "pp": ["parallel.pipeline=2"],
    "tied": ["model.tie_embeddings=true"],
    "recompute": ["train.recompute=selective"],
    "activation offload": ["train.offload_activations=true"],
    "bf16": ["train.precision=bf16"],
    "fp16": ["train.precision=fp16"],
    "fp64": ["train.precision=fp64"],
    "checkpoint": ["checkpoint.every=3"],
    "other layout on load": [],
}
PRECISIONS = {"bf16": 2e-3, "fp16": 2e-3, "fp64": 1e-12}  # largest difference from native
FLOATING = 1e-5  # fp32: sums in another order, which some steps let grow
WORLD = 4

# Legs of a run: everything at once, then another layout. Where pipelines are refused, without.
WHOLE = (
    ["tp", "sp", "pp", "tied", "recompute", "activation offload", "checkpoint"],
    ["tp", "sp", "tied", "recompute", "activation offload", "checkpoint"],
)


def refusal(config_path: str, engine: str, features: list[str]) -> str:
    """Why an engine does not take these features, without the key; empty if it does."""
    asked = [override for feature in features for override in FEATURES[feature]]
    ranks = 4 * 2 ** len({key for key in asked if key.endswith("=2")})
    try:
        load(config_path, [*ENGINES[engine], *asked, "parallel.data=4"], ranks)
    except ConfigError as error:
        return str(error).split(": ", 2)[2]
    return ""


def whole_leg(config_path: str, engine: str) -> list[str]:
    """The most that an engine takes at once."""
    return next(features for features in WHOLE if not refusal(config_path, engine, features))


def covered(config_path: str, engine: str) -> set[str]:
    """The features that the tests train an engine with."""
    return {
        *whole_leg(config_path, engine),
        "other layout on load",
        *(p for p in PRECISIONS if not refusal(config_path, engine, [p])),
    }


def missing(engine: str) -> str:
    """What this machine lacks for an engine, or has not compiled yet, which takes
    minutes; empty if nothing.
    """
    if "deepspeed" not in engine:
        return ""
    if find_spec("deepspeed") is None:
        return "DeepSpeed is not installed"
    from torch.utils.cpp_extension import _get_build_directory

    compiled = Path(_get_build_directory("async_io", False)) / "async_io.so"
    return f"async_io is not compiled yet: {compiled}" if "nvme" in engine and not compiled.exists() else ""


def table(config_path: str) -> str:
    """The cells, in Markdown: a tick, or the number of the reason below it."""
    reasons: dict[str, int] = {}
    lines = [f"| engine | {' | '.join(FEATURES)} |", "|---" * (len(FEATURES) + 1) + "|"]
    for engine in ENGINES:
        cells = []
        for feature in FEATURES:
            why = refusal(config_path, engine, [feature])
            cells.append(f"no ({reasons.setdefault(why, len(reasons) + 1)})" if why else "✓")
        lines.append(f"| {engine} | {' | '.join(cells)} |")
    notes = [
        "",
        *(f"{number}. {why}" for why, number in reasons.items()),
        "",
        "tp, sp and pp are tensor, sequence and pipeline parallelism; tied stands for tied embeddings.",
        '"Other layout on load" means any other number of ranks and any other engine, because a checkpoint '
        "holds the logical tensors.",
    ]
    return "\n".join([*lines, *notes, ""])


def page() -> str:
    """Return the text of docs/engine_features.md."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config_path = training.write_config(folder, training.write_corpus(folder))
        return HEAD + table(config_path)


HEAD = """# Which engine supports which feature

[Engines](engines.md) explains the engines; this page has every combination of an engine and a feature.
A ✓ is a combination that the tests train, each one together with all other features of its row: they save a
checkpoint midway, resume in another layout, and compare every loss and gradient norm with the native engine on one
process.
They must agree within 1e-5 in fp32, 1e-12 in fp64 and 2e-3 in 16 bits.
A "no" is rejected with an error when the config is read; the number leads to the reason below.

```bash
python -m tests.engines zero1
```

This trains gpt_tiny for 20 clipped steps on the engines whose name contains the word, in five layouts, and prints
each difference from the native engine on one process.

"""  # noqa: E501


LAYOUTS = {
    "dp2": (2, []),
    "dp4": (4, []),
    "tp2dp2": (4, ["parallel.tensor=2"]),
    "pp2dp2": (4, ["parallel.pipeline=2"]),
    "tp2pp2dp2": (8, ["parallel.tensor=2", "parallel.pipeline=2"]),
}


def prove(config_path: str, folder: Path, run: Callable[..., Figures], engines: dict[str, list[str]]) -> int:
    """Trains engines in every layout that they take; prints a table of differences from one
    process; returns the exit status.
    """
    right = run(1, config_path, [], folder / "native")
    clipped = sum(norm > json.loads(Path(config_path).read_text())["optim"]["grad_clip"] for _, norm in right)
    print(
        f"native on one process: {len(right)} steps, {clipped} of them clipped, loss {right[0][0]:.4f} to "
        f"{right[-1][0]:.4f}"
    )
    print(f"| engine | {' | '.join(LAYOUTS)} |\n{'|---' * (len(LAYOUTS) + 1)}|", flush=True)
    worst = 0.0
    for engine, overrides in engines.items():
        cells = []
        for layout, (ranks, mesh) in LAYOUTS.items():
            try:
                load(config_path, [*overrides, *mesh], ranks)
            except ConfigError:
                cells.append("refused")
                continue
            found = difference(
                run(ranks, config_path, [*overrides, *mesh], folder / f"{engine} {layout}"), right
            )
            worst = max(worst, found)
            cells.append(f"{found:.1e}")
        print(f"| {engine} | {' | '.join(cells)} |", flush=True)
    print(f"largest difference of a loss or gradient norm: {worst:.1e}, allowed {FLOATING:.0e}")
    return int(worst > FLOATING or clipped < len(right))


def main(argv: list[str]) -> int:
    """The command line; returns the exit status."""
    parser = Parser("python -m tests.engines", __doc__)
    parser.add_argument(
        "words", nargs="*", metavar="WORD", help="only engines whose name has one of these words in it"
    )
    args = parser.parse_args(argv)
    engines = {
        name: overrides
        for name, overrides in ENGINES.items()
        if not args.words or any(word in name for word in args.words)
    }
    pool = Pool()

    def run(ranks: int, config_path: str, overrides: list[str], folder: Path) -> Figures:
        if "engine.kind=deepspeed" in overrides:
            # ZeRO 3 numbers modules through all engines of a process, and compares the numbers between ranks
            pool.close()
        pool.run(ranks, training.run_rank, config_path, overrides, str(folder), timeout=600)
        return figures(folder)

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prefix = training.write_corpus(folder, tokens=50_000)
        config: dict[str, Any] = json.loads((ROOT / "configs/gpt_tiny.json").read_text())
        config["train"] |= {
            "steps": 20,
            "micro_batch_size": 1,
            "global_batch_size": 8,
            "device": "cpu",
            "eval_every": 0,
        }
        config |= {
            "data": {"train": prefix},
            "checkpoint": {"every": 0},
            "log": {"every": 1, "tensorboard": False},
        }
        config["optim"] |= {"grad_clip": 0.1}
        path = folder / "gpt_tiny.json"
        path.write_text(json.dumps(config))
        try:
            return prove(str(path), folder, run, engines)
        finally:
            pool.close()


if __name__ == "__main__":
    exit_with(main)
