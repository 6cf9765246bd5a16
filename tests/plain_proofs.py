"""Proves modules that train by their own code in every layout, as launch/verify.py does: five classes of
transformers, and a GPT in plain PyTorch.

    python -m tests.plain_proofs --output benchmarks/results/plain_modules.md
"""

import hashlib
import itertools
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.plain_modules import versions_text
from megacore.files import ROOT
from megacore.tools.cli import Parser, exit_with
from megacore.tools.verify.layouts import DEFAULT, parse
from megacore.tools.verify.proof_report import explain
from megacore.tools.verify.run import Options, Result, prove
from megacore.tools.verify.tolerances import BOUND
from tests.commands import provers
from tests.plain_modules import KINDS, PRELOAD, write_folder
from tests.pool import CONTEXT

EXAMPLE = "python -m tests.plain_proofs --output benchmarks/results/plain_modules.md"
CLASSES = {"Llama": "llama", "Qwen2": "qwen2", "Qwen3, tied": "qwen3", "GPT-2": "gpt2", "Mixtral": "mixtral"}
PLAIN = "plain_gpt.py"
TRAIN = {"seq_len": 32, "micro_batch_size": 2, "global_batch_size": 8, "steps": 3}
DOCUMENTS = ("data.document_mask=true", "train.recompute=full")


@dataclass(frozen=True)
class Setting:
    """Layouts that are proved with the same overrides."""

    name: str
    layouts: Sequence[str]
    overrides: Sequence[str] = ()
    precision: str = "fp64"


SETTINGS = (
    Setting("verify's default layouts", DEFAULT),
    Setting("keys gathered", ("cp2",), ("parallel.context_method=gather",)),
    Setting("ring", ("cp2",), ("parallel.context_method=ring",)),
    Setting("ulysses", ("cp2",), ("parallel.context_method=ulysses",)),
    Setting("zero-bubble schedule", ("pp2@zb_v",)),
    Setting("FSDP2", ("dp2", "tp2dp2sp"), ("engine.kind=fsdp",)),
    Setting("sharded optimizer", ("dp2", "tp2dp2sp"), ("engine.shard_optimizer=true",)),
    Setting("documents, full recompute", ("one", "cp2", "tp2pp2sp"), DOCUMENTS),
    Setting("bf16", ("one", "tp2sp", "pp2", "cp2"), precision="bf16"),
)

PROOF_HEAD = """{heading}
Proofs that Hugging Face modules and a plain PyTorch model compute the same in each layout as on one process.
{versions}

Small models of four blocks train for three steps on real gloo ranks, in fp64.
They are compared with the untouched module on one process: its own forward, eager attention and masks, and
none of megacore's layers.
A cell is the largest relative difference of all losses, norms, gradients, parameters and moments, on all
ranks.
At most {bound:g} is EQUAL.
In bf16 a difference must be one that bf16's rounding explains.
There each token of Mixtral goes to all experts: with two of four, rounding changes which experts a router
chooses, and a proof does not compare the choices of a class's own routers.

{equal} are EQUAL. All cells: [plain_modules.json](plain_modules.json).

"""


def prove_all(output: Path) -> int:
    """Prove every model in every setting; write the table after each, and return the exit status.

    Results that are in the JSON file next to `output` are kept if they are of the same code.
    """
    kept_path = output.with_suffix(".json")
    code = digest()
    kept: dict[str, Any] = json.loads(kept_path.read_text("utf-8")) if kept_path.exists() else {}
    cells: dict[str, dict[str, dict[str, str]]] = kept["cells"] if kept.get("code") == code else {}
    CONTEXT.set_forkserver_preload(PRELOAD)
    with tempfile.TemporaryDirectory() as folder, provers() as workers:
        models = {precision: write_models(Path(folder), precision) for precision in ("fp64", "bf16")}
        for model, setting in itertools.product(models["fp64"], SETTINGS):
            config, overrides = models[setting.precision][model]
            done = cells.setdefault(model, {})
            if setting.name in done:
                continue
            layouts = [parse(name) for name in setting.layouts]
            options = Options(config, [*overrides, *setting.overrides], layouts, setting.precision)
            proof = prove(options, workers=workers)
            done[setting.name] = {result.layout.name: describe(result) for result in proof.results}
            print(f"{model}, {setting.name}: {done[setting.name]}", flush=True)

            content = machine.describe() | {"code": code, "cells": cells}
            kept_path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
            output.write_text(table(content), encoding="utf-8")
    return int(any(is_wrong(text) for text in texts(cells)))


def write_models(folder: Path, precision: str) -> dict[str, tuple[str, list[str]]]:
    """Write the configs of small models; return for each model its config's path and overrides."""
    config = folder / f"{precision}.json"
    config.write_text(json.dumps({"train": TRAIN}), encoding="utf-8")
    models = {}
    for name, kind in CLASSES.items():
        # groups of two heads, which four tensor ranks divide
        sizes = {} if kind == "gpt2" else {"num_attention_heads": 8, "num_key_value_heads": 4}
        if kind == "mixtral" and precision == "bf16":
            sizes["num_experts_per_tok"] = KINDS[kind]["num_local_experts"]
        models[name] = (str(config), [f"model.hf={write_folder(folder / precision, kind, **sizes)}"])
    return models | {PLAIN: (str(ROOT / "configs/forks/plain_gpt.json"), [])}


def describe(result: Result) -> str:
    """Return the largest relative difference of a layout, or what is wrong with it."""
    if result.impossible is not None:
        return f"impossible: {result.impossible}"
    if not result.equal:
        return f"NOT EQUAL: {next(explain(result))}"
    largest = max(difference.relative for difference in result.differences.values())
    return f"{largest:.0e}".replace("e-0", "e-")


def is_wrong(text: str) -> bool:
    """Whether a cell of the table is a layout that is not equal."""
    return text.startswith("NOT EQUAL")


def texts(cells: dict[str, dict[str, dict[str, str]]]) -> list[str]:
    """Return all cells of the table."""
    return [text for settings in cells.values() for layouts in settings.values() for text in layouts.values()]


def digest() -> str:
    """Return a digest of the code that a proof runs."""
    hashed = hashlib.sha256()
    for path in [
        *sorted((ROOT / "megacore").rglob("*.py")),
        ROOT / "configs/forks/plain_gpt.py",
        Path(__file__),
    ]:
        hashed.update(path.read_bytes())
    return hashed.hexdigest()


def table(content: dict[str, Any]) -> str:
    """Return the table of all models in all layouts, as Markdown."""
    cells = content["cells"]
    equal = sum(not is_wrong(text) and not text.startswith("impossible") for text in texts(cells))
    head = PROOF_HEAD.format(
        heading="\n".join(machine.heading("Plain modules in many layouts", EXAMPLE, content)),
        versions=versions_text(content),
        bound=BOUND,
        equal=f"{equal} of {len(texts(cells))}",
    )
    lines = [f"| layout | {' | '.join(cells)} |", f"|---|{'---|' * len(cells)}"]
    notes = dict[str, None]()
    for setting in SETTINGS:
        lines.append(f"| **{setting.name}** |{' |' * len(cells)}")
        for layout in setting.layouts:
            row = [cells[model].get(setting.name, {}).get(layout, "") for model in cells]
            notes |= dict.fromkeys(f"- {layout}: {text}" for text in row if ":" in text)
            lines.append(f"| {layout} | {' | '.join(text.partition(':')[0] for text in row)} |")
    return head + "\n".join([*lines, *([""] if notes else []), *notes]) + "\n"


def main(argv: list[str]) -> int:
    """Prove all models."""
    parser = Parser(
        "Prove modules that train by their own code in every layout.",
        example=EXAMPLE,
        page="docs/models.md",
    )
    parser.add_argument("--output", type=Path, metavar="FILE.md", required=True, help="page to write")
    return prove_all(parser.parse_args(argv).output)


if __name__ == "__main__":
    exit_with(main)
