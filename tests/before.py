"""Record what a checkout computes, to show that a refactoring changes nothing.

    python -m tests.before runs/before ../megacore_before
    python -m tests.before runs/after
    diff -r runs/before runs/after

A picture has four parts: short real trainings (`runs`), the collectives of simulated ranks (`traffic`),
resolved configs (`configs`) and help texts (`help`). All of it comes from commands that a user could type in
the checkout, so one version of this script records older and newer checkouts. Paths and times are replaced by
fixed words.
"""

import argparse
import hashlib
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if __package__ in (None, ""):  # started as a file: import this checkout's megacore, and no module of tests/
    sys.path[0] = str(ROOT)

from megacore.errors import ConfigError  # noqa: E402
from megacore.tools.cli import Parser, exit_with, unwind_on_sigterm  # noqa: E402

PARTS = ("runs", "traffic", "configs", "help")
SECONDS = 1800  # a command that runs longer than this hangs

# Trainings: number of ranks, config, and layout.
RUNS = {
    "one": (1, "gpt_tiny", ""),
    "tp2pp2dp2": (8, "gpt_tiny", "parallel.tensor=2 parallel.pipeline=2"),
    "cp2": (2, "gpt_tiny", "parallel.context=2"),
    "ep2": (2, "moe_tiny", "parallel.expert=2"),
    "fsdp": (2, "gpt_tiny", "engine.kind=fsdp"),
    "sharded": (2, "gpt_tiny", "engine.shard_optimizer=true"),
    "zb_v": (2, "gpt_tiny", "parallel.pipeline=2 parallel.schedule=zb_v"),
}
SHORT = (
    "model.vocab_size=256 model.hidden_size=32 train.seq_len=32 train.micro_batch_size=1 train.device=cpu "
    "train.global_batch_size=8 train.steps=4 train.eval_every=4 train.eval_batches=1 optim.warmup_steps=1 "
    "checkpoint.every=4 log.every=1 log.tensorboard=false data.tokenizer=bytes"
)

# Simulated ranks: one of the first and one of the last pipeline stage, with few microbatches.
TRAFFIC = {
    "gpt_7b": "--world 8 --simulate-ranks 0,7 parallel.tensor=2 train.global_batch_size=64",
    "moe_tiny": "--world 8 --simulate-ranks 0,7 parallel.tensor=2 parallel.expert=4",
    "deepseek_v3": "--world 256 --simulate-ranks 0,192 parallel.pipeline=4 model.num_layers=13 "
    "train.global_batch_size=128",
}

TIMED_LAYOUTS = "one,dp2,tp2,pp2"
# benchmarks.peers always measures a peer too; this one needs no installation, and has no tp2 and pp2.
COMPARISON = (
    "--rounds 5 --peers plain-gpt-compiled --settings own --precisions fp32 model.hidden_size=128 "
    "model.vocab_size=1024 train.seq_len=128 train.global_batch_size=8"
)

# Metrics that differ between two runs of the same code. Their names are kept and their values replaced.
VARYING_METRIC = re.compile(r"seconds|memory|mfu|per_second|device_hours")
LAUNCHER_VARIABLE = re.compile(r"(LOCAL_|GROUP_|TORCHELASTIC_|MEGACORE_|MASTER_).*|RANK|WORLD_SIZE")


class CommandFailed(Exception):
    """A command of the checkout failed; the message has its exit status and the last line on stderr."""


class Picture:
    """A checkout, and the folder of text files that record what it computes."""

    def __init__(self, folder: Path, checkout: Path, work: Path) -> None:
        self.folder = folder
        self.checkout = checkout
        self.work = work  # for what the commands write
        self.failures: list[str] = []

    def run(self, *arguments: str, ranks: int = 1) -> str:
        """Run a Python script or module in the checkout and return its stdout, without paths.

        More than one rank is started by torchrun. Raises `CommandFailed`.
        """
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        command = [sys.executable, *(launcher if ranks > 1 else []), *arguments]
        environment = {key: text for key, text in os.environ.items() if not LAUNCHER_VARIABLE.fullmatch(key)}
        environment |= {"PYTHONPATH": str(self.checkout), "OMP_NUM_THREADS": "1", "COLUMNS": "100"}
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        with subprocess.Popen(command, cwd=self.checkout, env=environment, **pipes) as process:
            try:
                stdout, stderr = process.communicate(timeout=SECONDS)
            except subprocess.TimeoutExpired:
                raise CommandFailed(f"no end after {SECONDS} s") from None
            finally:
                process.terminate()  # if it still runs; torchrun then ends its ranks too
        if process.returncode:
            reason = without_times(self.without_paths(last_error(stderr)))
            raise CommandFailed(f"exit status {process.returncode}\n{reason}")
        return self.without_paths(stdout)

    def without_paths(self, text: str) -> str:
        """Return the text with fixed words for the folders that differ between pictures."""
        for folder, word in ((self.work, "WORK"), (self.checkout, "CHECKOUT"), (sys.prefix, "PYTHON")):
            text = text.replace(str(folder), word)
        return text

    def write(self, path: Path, function: Callable[..., str], *arguments: Any) -> None:
        """Call the function and write its text to a file, or how a command failed."""
        start = time.monotonic()
        try:
            text = function(self, *arguments)
        except (CommandFailed, FileNotFoundError) as failure:  # not found: what a command should have written
            text = self.without_paths(str(failure))
            self.failures.append(str(path))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.rstrip("\n") + "\n", encoding="utf-8")
        result = "FAILED" if str(path) in self.failures else "written"
        print(f"{path} {result} ({time.monotonic() - start:.0f} s)", flush=True)


def last_error(stderr: str) -> str:
    """Return the last line that reports an error (torchrun prints more after it), or else the last line."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line for line in lines if re.search(r"rror: \S", line)]
    return (errors or lines or ["nothing on stderr"])[-1]


def without_times(text: str) -> str:
    """Return the text without dates, clock times, numbers of seconds, and columns `seconds` of tables."""
    text = re.sub(r"\d{4}-\d\d-\d\d", "DATE", text)
    text = re.sub(r"\d\d:\d\d:\d\d([.,]\d+)?", "TIME", text)
    text = re.sub(r"\b\d[\d,.]* s\b", "TIME s", text)
    lines = []
    width = None  # of a table's rows without its last column; None outside of such a table
    for line in text.splitlines():
        if line.rstrip().endswith(" seconds"):
            width = len(line.rstrip()) - len("seconds")
        elif not line.strip():
            width = None
        lines.append(line[:width].rstrip())
    return "\n".join(lines)


def stable_metrics(lines: str) -> str:
    """Return the lines of a metrics.jsonl, with a fixed word for each time and amount of memory."""
    rows = [json.loads(line) for line in lines.splitlines()]
    for row in rows:
        row.pop("stragglers", None)  # slow ranks, logged only if there are any
        row.update({key: "VARIES" for key in row if VARYING_METRIC.search(key)})
    return "\n".join(map(json.dumps, rows))


def tensor_digests(file: Path) -> Iterator[str]:
    """Yield a line for each tensor of a safetensors file: type, shape and the SHA-256 of its bytes."""
    content = file.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    for name, entry in sorted(json.loads(content[8:start]).items()):
        if name != "__metadata__":
            first, last = entry["data_offsets"]
            digest = hashlib.sha256(content[start + first : start + last]).hexdigest()
            yield f"{file.name} {name} {entry['dtype']} {entry['shape']} {digest}"


def prepare_corpus(picture: Picture) -> str:
    """Tokenize a small text, the same for every checkout, and return the digests of the files."""
    draw = random.Random(0)
    words = [f"w{number}" for number in range(200)]
    text = picture.work / "corpus.txt"
    text.write_text("\n".join(" ".join(draw.choices(words, k=60)) for _ in range(200)), encoding="utf-8")
    command = f"launch/prepare.py --input {text} --output {picture.work}/corpus --tokenizer bytes"
    picture.run(*command.split(), "--valid-fraction", "0.1")
    files = sorted([*picture.work.glob("corpus*.bin"), *picture.work.glob("corpus*.idx")])
    return "\n".join(f"{file.name} {hashlib.sha256(file.read_bytes()).hexdigest()}" for file in files)


def train(picture: Picture, name: str) -> str:
    """Train for a few steps; return the run's metrics, and the state and tensors of its checkpoint."""
    ranks, config, layout = RUNS[name]
    run = picture.work / name
    corpus = picture.work / "corpus"
    folders = [f"log.dir={run}", f"data.train={corpus}", f"data.valid={corpus}_valid"]
    settings = [*layout.split(), *SHORT.split(), *folders]
    picture.run("launch/pretrain.py", "--config", f"configs/{config}.json", *settings, ranks=ranks)

    metrics = stable_metrics((run / "metrics.jsonl").read_text(encoding="utf-8"))
    information = picture.run("launch/checkpoint.py", "info", str(run))
    files = sorted((run / "checkpoints").rglob("*.safetensors"))
    return "\n".join([metrics, information, *(line for file in files for line in tensor_digests(file))])


def simulate(picture: Picture, name: str) -> str:
    """Return the collectives and the memory of simulated ranks."""
    config = ["--config", f"configs/{name}.json"]
    return without_times(picture.run("launch/plan.py", *config, *TRAFFIC[name].split()))


def resolve(picture: Picture, name: str) -> str:
    """Return every value of a config, or of gpt_tiny with a DeepSpeed config."""
    file = f"configs/{name}.json"
    config = ["configs/gpt_tiny.json", "--deepspeed", file] if name.startswith("deepspeed/") else [file]
    text = picture.run("launch/pretrain.py", "--print-config", "--config", *config)
    return re.sub(" {2,}", "  ", text)  # columns are as wide as their values, and a value may be a path


def show_help(picture: Picture, command: list[str]) -> str:
    """Return the help of a script, followed by the help of each of its commands."""
    texts = [picture.run(*command, "-h")]
    if command[0] != "-m" and "\ncommands:\n" in texts[0]:
        listed = texts[0].partition("\ncommands:\n")[2].partition("\n\n")[0]
        names = re.findall(r"^  (\w+) ", listed, re.MULTILINE)
        texts += [picture.run(*command, name, "-h") for name in names]
    return "\n".join(texts)


def with_help(checkout: Path) -> Iterator[list[str]]:
    """Yield `megacore`, the scripts of launch/, and the benchmarks that read their command line."""
    yield ["-m", "megacore"]
    for path in sorted((checkout / "launch").rglob("*.py")):
        yield [str(path.relative_to(checkout))]
    for path in sorted((checkout / "benchmarks").rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        if "Parser(" in source and '__name__ == "__main__"' in source:
            names = path.relative_to(checkout).with_suffix("").parts
            yield ["-m", ".".join(name for name in names if name != "__main__")]


def record(picture: Picture, part: str) -> None:
    """Write one folder of the picture."""
    folder = picture.folder / part
    if part == "runs":
        picture.write(folder / "corpus.txt", prepare_corpus)
        for name in RUNS:
            picture.write(folder / f"{name}.txt", train, name)
    elif part == "traffic":
        for name in TRAFFIC:
            picture.write(folder / f"{name}.txt", simulate, name)
    elif part == "configs":
        configs = picture.checkout / "configs"
        for kind in ("*.json", "forks/*.json", "deepspeed/*.json"):
            for path in sorted(configs.glob(kind)):
                name = str(path.relative_to(configs).with_suffix(""))
                picture.write(folder / f"{name.replace('/', '_')}.txt", resolve, name)
    else:
        for command in with_help(picture.checkout):
            name = command[-1].removesuffix(".py").replace("/", "_")
            picture.write(folder / f"{name}.txt", show_help, command)


def step_times(picture: Picture, other: Path | None) -> str:
    """Return measured step times, or their ratios to those of another checkout, which takes turns with it."""
    layouts = ["--layouts", TIMED_LAYOUTS]
    if other is None:
        return picture.run("-m", "benchmarks.throughput", "--config", "configs/gpt_tiny.json", *layouts)
    output = picture.work / "times.json"
    files = ["--before", str(other), "--output", str(output)]
    picture.run("-m", "benchmarks.peers", *layouts, *files, *COMPARISON.split())
    lines = [f"step time of {picture.checkout} / {other}: ratio of the medians; ratio in each round"]
    for layout, results in json.loads(output.read_text(encoding="utf-8"))["results"].items():
        contenders = results["own"]["contenders"]
        seconds = [turn[0] for turn in contenders["megacore"]["seconds"]]
        other_seconds = [turn[0] for turn in contenders["megacore before"]["seconds"]]
        ratio = statistics.median(seconds) / statistics.median(other_seconds)
        rounds = [f"{a / b:.3f}" for a, b in zip(seconds, other_seconds, strict=True)]
        lines.append(f"{layout}: {ratio:.3f}; {' '.join(rounds)}")
    return "\n".join(lines)


def parse(argv: list[str]) -> argparse.Namespace:
    """Read the command line. Raises `ConfigError`."""
    parser = Parser(
        "Record what a checkout computes, in text files to compare with another checkout's by diff -r.",
        example="python -m tests.before runs/before ../megacore_before",
        status="0 done, 1 a command of the checkout failed, 2 wrong arguments",
        page="CONTRIBUTING.md",
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="new folder, outside git or ignored by it")
    what = "folder of the code to record (default: this checkout)"
    parser.add_argument("checkout", type=Path, nargs="?", default=ROOT, metavar="CHECKOUT", help=what)
    what = "parts to record, of runs, traffic, configs and help (default: all)"
    parser.add_argument("--only", default=",".join(PARTS), metavar="NAME,NAME", help=what)
    what = "also measure the time of a step, and write it to OUT_times.txt, next to what is compared"
    parser.add_argument("--times", action="store_true", help=what)
    what = "with --times: compare the times with this checkout's, in 5 interleaved rounds"
    parser.add_argument("--before", type=Path, metavar="CHECKOUT", help=what)
    args = parser.parse_args(argv)
    args.only = args.only.split(",")
    if unknown := set(args.only) - set(PARTS):
        raise ConfigError("--only", f"{', '.join(sorted(unknown))} is unknown", ", ".join(PARTS))
    if args.before is not None and not args.times:
        raise ConfigError("--before", "needs --times", "--times --before CHECKOUT")
    for option, checkout in (("CHECKOUT", args.checkout), ("--before", args.before or ROOT)):
        if not (checkout / "launch" / "pretrain.py").is_file():
            raise ConfigError(option, f"{checkout} has no launch/pretrain.py", "a checkout of megacore")
    check_folder(args.out)
    return args


def check_folder(folder: Path) -> None:
    """Raise `ConfigError` unless the folder is new or empty, and outside git or ignored by it."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError("OUT", f"{folder} is not empty", "a new or an empty folder")
    parent = next(path for path in folder.resolve().parents if path.is_dir())
    command = ["git", "check-ignore", "--quiet", str(folder.resolve())]
    status = subprocess.run(command, cwd=parent, capture_output=True, check=False).returncode
    if status == 1:  # 0: ignored, 128: not in a repository
        raise ConfigError("OUT", f"{folder} is in a git repository", "a folder elsewhere, or in runs/")


def main(argv: list[str]) -> int:
    """Take the picture; return 1 if a command failed."""
    args = parse(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="megacore_before_") as work:
        picture = Picture(args.out, args.checkout.resolve(), Path(work))
        for part in args.only:
            record(picture, part)
        if args.times:
            path = args.out.with_name(f"{args.out.name}_times.txt")
            picture.write(path, step_times, args.before and args.before.resolve())
    print(f"{args.out}: {len(picture.failures)} failed")
    return 1 if picture.failures else 0


if __name__ == "__main__":
    unwind_on_sigterm()  # so that the command that runs ends too
    exit_with(main)
