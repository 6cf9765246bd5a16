"""Times a Llama that trains by its class's own code (model.hf), and by megacore's layers, in turns."""

import json
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import machine
from benchmarks.rounds import Contender, race
from megacore.tools.cli import Parser, count, exit_with
from megacore.tools.output_files import check_output

EXAMPLE = "python -m benchmarks.plain_modules --output benchmarks/results/plain_modules_speed.md"
SEQ_LEN = 256
LLAMA = {
    "num_hidden_layers": 4,
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 688,
    "vocab_size": 8192,
}
# The same sizes and formulas in megacore's layers.
OWN_LAYERS = (
    "model.num_layers=4",
    "model.hidden_size=256",
    "model.num_heads=4",
    "model.ffn_size=688",
    "model.vocab_size=8192",
    "model.norm=rmsnorm",
    "model.norm_eps=1e-6",
    "model.activation=swiglu",
    "model.position=rope",
    "model.bias=false",
    "model.tie_embeddings=false",
)
WAYS = ("its own code", "megacore's layers")
SPEED_MODEL = {"kernels": "eager"}
SPEED_TRAIN = {
    "seq_len": SEQ_LEN,
    "micro_batch_size": 4,
    "global_batch_size": 16,
    "precision": "fp32",
    "device": "cpu",
    "compile": False,
}
STEP_TOKENS = 16 * SEQ_LEN
SPEED_HEAD = """{heading}
Training speed of a Hugging Face Llama by its own code, compared with the same model in megacore's layers.
{versions}

4 layers, hidden 256, 4 heads, feed-forward 688, vocabulary 8192, sequence 256, 4 microbatches of 4 sequences.
fp32, one thread a rank, eager kernels, not compiled.
{rounds} interleaved rounds of one step each, medians; a ratio is taken within a round.
Above 1, the class is faster.
Other work kept {busy:.1f} cores busy.

Engine, attention, loss, optimizer and tokens are the same.
The blocks differ: the class multiplies queries, keys and values one by one, and the two inputs of the
feed-forward too, where megacore's layers have one product; and its norms, rotary embedding and activation are
those of transformers.
The first weights differ, and memory has the code of transformers too.
All numbers: [plain_modules_speed.json](plain_modules_speed.json).

| layout | tokens/s by its own code | by megacore's layers | ratio | lowest, highest | peak MB a rank, both |
|---|---:|---:|---:|---|---|
"""
SPEED_LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "one": (1, ()),
    "tp2": (2, ("parallel.tensor=2",)),
    "pp2": (2, ("parallel.pipeline=2",)),
}


def compare_speed(output: Path, rounds: int) -> int:
    """Time steps by the class and by megacore's layers in turns, in each layout; write a table and return the
    exit status.
    """
    from transformers import AutoConfig

    with tempfile.TemporaryDirectory() as folder:
        AutoConfig.for_model("llama", **LLAMA, max_position_embeddings=SEQ_LEN).save_pretrained(folder)
        base = Path(folder) / "run.json"
        base.write_text(json.dumps({"train": SPEED_TRAIN, "model": SPEED_MODEL}), encoding="utf-8")
        models = ((f"model.hf={folder}",), OWN_LAYERS)
        contenders = [
            Contender(f"{layout}, {way}", "megacore", STEP_TOKENS, (*model, *overrides), ranks=ranks)
            for layout, (ranks, overrides) in SPEED_LAYOUTS.items()
            for way, model in zip(WAYS, models, strict=True)
        ]
        result = race(contenders, str(base), rounds, lambda text: print(text, flush=True))

    content = machine.describe() | {
        "records": {name: record.summary() for name, record in result.records.items()},
        "failures": result.failures,
        "loads": result.loads,
    }
    output.with_suffix(".json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    output.write_text(speed_table(content), encoding="utf-8")
    return int(bool(result.failures))


def speed_table(content: dict[str, Any]) -> str:
    """Return the speeds by both ways, and their ratio, as Markdown."""
    records = content["records"]
    lines = list[str]()
    for layout in SPEED_LAYOUTS:
        both = [records[name] for way in WAYS if (name := f"{layout}, {way}") in records]
        if len(both) < len(WAYS):
            continue
        speeds = [f"{record['tokens_per_second']['median']:,.0f}" for record in both]
        megabytes = [f"{record['memory_bytes'] / 1e6:.0f}" for record in both]
        by_class, by_layers = ([step for step, *_ in record["seconds"]] for record in both)
        ratios = [layers / own for own, layers in zip(by_class, by_layers, strict=True)]
        lines.append(
            f"| {layout} | {speeds[0]} | {speeds[1]} | {median(ratios):.2f} "
            f"| {min(ratios):.2f}, {max(ratios):.2f} | {', '.join(megabytes)} |"
        )

    busy = median(cores for record in records.values() for cores in record["cores_busy_with_others"])
    head = SPEED_HEAD.format(
        heading="\n".join(
            machine.heading("A Llama by its own code and by megacore's layers", EXAMPLE, content)
        ),
        versions=versions_text(content),
        rounds=len(content["loads"]),
        busy=busy,
    )
    return head + "\n".join(lines) + "\n"


def versions_text(content: dict[str, Any]) -> str:
    """Return the versions of the libraries that a result was measured with."""
    versions = content["versions"]
    return f"torch {versions['torch']}, transformers {versions['transformers']}."


def main(argv: list[str]) -> int:
    """Run the measurement."""
    parser = Parser(EXAMPLE, __doc__)
    parser.add_argument("--output", type=Path, metavar="FILE.md", required=True)
    parser.add_argument("--rounds", type=count, default=7, metavar="N", help="after a warm-up (7)")
    args = parser.parse_args(argv)
    check_output("--output", str(args.output))
    return compare_speed(args.output, args.rounds)


if __name__ == "__main__":
    exit_with(main)
