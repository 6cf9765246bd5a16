"""Which ds_configs of DeepSpeedExamples start as they are, and why the others do not.

Each file is given to a small model on one CPU rank, as `launch/pretrain.py --deepspeed FILE`. What a run can
take over is trained for two steps. The files stay where they are: the page has their names and results only.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

from benchmarks import machine
from megacore.errors import ConfigError
from megacore.tools.cli import Parser, exit_with
from megacore.tools.output_files import check_output, replaced
from megacore.tools.settings.load import load

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = "python -m benchmarks.ds_configs ../DeepSpeedExamples"
PAGE = "benchmarks/results/ds_configs.md"
# A JSON object with one of these is a ds_config.
SIGNS = {
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "zero_optimization",
    "optimizer",
    "fp16",
    "bf16",
}
MODEL = {"num_layers": 2, "hidden_size": 32, "num_heads": 2, "vocab_size": 257, "max_positions": 64}
STEPS = 2
SECONDS = 600.0  # of a run
STARTS, NEEDS_GPU, REJECTED, TEMPLATE = "starts", "needs a GPU", "rejected", "not JSON"
FP32 = "train.precision=fp32"
UNSTATED = "0 trains bf16"  # by the run's default, which stage 0 of DeepSpeed does not train well


class Result(NamedTuple):
    """What became of one file."""

    name: str
    result: str
    reason: str


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = Parser(
        "Report which ds_configs of DeepSpeedExamples start unchanged, and why others do not.",
        example=EXAMPLE,
        page="benchmarks/README.md",
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="checkout of DeepSpeedExamples")
    parser.add_argument("--commit", metavar="HASH", help="commit of the checkout (default: that of git)")
    parser.add_argument("--output", default=PAGE, metavar="FILE.md", help="page to write")
    return parser.parse_args(argv)


def run(argv: list[str]) -> int:
    """Write the page."""
    args = parse(argv)
    check_output("--output", args.output)
    if not args.folder.is_dir():
        raise ConfigError("FOLDER", f"{args.folder} is not a folder", "a checkout of DeepSpeedExamples")
    files = ds_configs(args.folder)
    if not files:
        raise ConfigError("FOLDER", f"{args.folder} has no ds_config", "a checkout of DeepSpeedExamples")
    with tempfile.TemporaryDirectory() as scratch:
        config = write_run(Path(scratch))
        results = [try_file(path, str(path.relative_to(args.folder)), config) for path in files]
    with replaced(args.output) as path:
        Path(path).write_text(page(results, args.commit or commit_of(args.folder)), encoding="utf-8")
    return 0


def ds_configs(folder: Path) -> list[Path]:
    """Return the JSON files that are ds_configs, and templates of such files."""
    paths = []
    for path in sorted(folder.rglob("*.json")):
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except ValueError:
            if "ds_config" in path.name:
                paths.append(path)
            continue
        if isinstance(content, dict) and SIGNS & set(content):
            paths.append(path)
    return paths


def write_run(folder: Path) -> str:
    """Write a corpus and a config that states as little as possible; returns the config's path."""
    prepare = [sys.executable, "launch/prepare.py", "--input", "README.md", "--tokenizer", "bytes"]
    subprocess.run([*prepare, "--output", str(folder / "corpus")], cwd=ROOT, check=True, capture_output=True)
    sections = {
        "model": MODEL,
        "train": {"seq_len": 16, "steps": STEPS},
        "data": {"train": str(folder / "corpus")},
        "checkpoint": {"last": False},
        "log": {"dir": str(folder / "run")},
    }
    path = folder / "config.json"
    path.write_text(json.dumps(sections), encoding="utf-8")
    return str(path)


def try_file(path: Path, name: str, config: str) -> Result:
    """Start a run with one file; a file that states no precision gets a second try in fp32."""
    result, reason = start(path, config, [])
    if result == REJECTED and UNSTATED in reason:
        other, why = start(path, config, [FP32])
        then = "it starts" if other == STARTS else why
        result = f"{STARTS} in fp32" if other == STARTS else result
        return Result(name, result, f"{reason}; with {FP32}: {then}")
    return Result(name, result, reason)


def start(path: Path, config: str, overrides: list[str]) -> tuple[str, str]:
    """Return what becomes of a run with this file, and why."""
    engine = ["engine.kind=deepspeed", f"engine.config={json.dumps(str(path))}"]
    try:
        loaded = load(config, [*engine, *overrides], 1).config
    except ConfigError as error:
        kind = TEMPLATE if "is no JSON" in error.wrong else REJECTED
        place = error.where.removeprefix("engine.config").removeprefix(": ")
        wrong = "it has placeholders" if kind == TEMPLATE else error.wrong
        return kind, f"`{place}`: {wrong} ({error.right})" if place else wrong
    command = [sys.executable, "launch/pretrain.py", "--config", config, "--deepspeed", str(path)]
    options = ["train.device=auto", "checkpoint.resume=never", *overrides]
    done = subprocess.run(
        [*command, *options], cwd=ROOT, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    if done.returncode == 0:
        return STARTS, f"{loaded.train.precision}, {STEPS} steps"
    last = (done.stderr.strip().splitlines() or ["no reason"])[-1]
    if done.returncode == 2 and "on CPUs" in last:
        return NEEDS_GPU, last.removeprefix("config error: ")
    return f"fails with {done.returncode}", last


def commit_of(folder: Path) -> str:
    """Return the commit that is checked out in a folder, as far as git knows."""
    done = subprocess.run(["git", "-C", str(folder), "rev-parse", "HEAD"], capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


def page(results: list[Result], commit: str) -> str:
    """Return the page with a row for each file, and their numbers."""
    counts = Counter(result.result for result in results)
    lines = [
        *machine.heading("The ds_configs of DeepSpeedExamples", EXAMPLE, machine.describe()),
        "Which ds_config files of DeepSpeedExamples train a small model unchanged, and why others do not.",
        f"DeepSpeed {version('deepspeed')}, one CPU rank; the examples are those of commit `{commit}`",
        "(https://github.com/deepspeedai/DeepSpeedExamples).",
        "",
        "The run's config states a small model and nothing else, so the ds_config decides what it states.",
        "A file that starts has trained for two steps.",
        "",
        "| result | files |",
        "|---|---:|",
        *(f"| {result} | {count} |" for result, count in counts.most_common()),
        "",
        "| file | result | reason |",
        "|---|---|---|",
        *(f"| {name} | {result} | {reason.replace('|', '/')} |" for name, result, reason in results),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    exit_with(run)
