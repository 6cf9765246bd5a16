"""Inspect the checkpoints of a run, and convert models from and to other projects' formats, without a GPU."""

import os
import sys

# so that a checkout runs without being installed; an installed script has no such folder
if os.path.isdir(os.path.dirname(os.path.realpath(__file__)) + "/../megacore"):
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.realpath(__file__))))

import megacore.tools.interrupt  # noqa: F401  (first: Ctrl-C during the other imports prints no traceback)

# isort: split
import argparse
import json
from collections.abc import Callable
from pathlib import Path

from megacore.checkpoint import Reader, checkpoints_in, locate
from megacore.checkpoint.disk import size_text
from megacore.errors import CheckpointError, ConfigError, shown
from megacore.model.layers import DTYPES
from megacore.tools.cli import Parser, add_weights, exit_with
from megacore.tools.interchange.export_hf import export_hf
from megacore.tools.interchange.import_model import PEERS, import_model
from megacore.tools.interchange.upcycle import upcycle
from megacore.tools.settings.load import flatten
from megacore.tools.verify.checkpoint_diff import compare

EXAMPLES = {
    "info": "python launch/checkpoint.py info runs/gpt_tiny",
    "verify": "python launch/checkpoint.py verify runs/gpt_tiny",
    "diff": "python launch/checkpoint.py diff runs/gpt_tiny runs/gpt_tiny_tp2",
    "export": "python launch/checkpoint.py export runs/gpt_tiny --format hf --output models/gpt_tiny",
    "import": "python launch/checkpoint.py import models/gpt_tiny --format hf --output runs/imported",
    "upcycle": "python launch/checkpoint.py upcycle runs/dense --output runs/upcycled model.num_experts=8",
}
FEW = 10  # tensors that `diff` lists unless --tensors asks for all
LISTED = " (--tensors lists them)"
OURS = "folder of a run, its checkpoints folder, or one step_ folder"
PAGES = {"export": "docs/models.md", "import": "docs/models.md"}
STATUS = "0 done, 2 wrong arguments or a damaged checkpoint"


def info(args: argparse.Namespace) -> None:
    """Print a summary of the checkpoint and, if asked, its logical tensors."""
    reader = Reader(locate(args.path))
    tensors = reader.manifest.tensors
    total = sum(tensor.nbytes for tensor in tensors.values())
    print(f"{reader.path}\nstep {reader.step}, written by megacore {shown(reader.manifest.megacore_version)}")
    print(
        f"{len(tensors)} tensors, {size_text(total)}, in {len(reader.manifest.files)} files"
        + ("" if args.tensors else LISTED)
    )
    config = reader.state.get("config")
    for key, value in reader.state.items():
        if not isinstance(value, dict):
            print(f"{shown(key)}: {json.dumps(value)}")
        elif not (isinstance(config, dict) and value == config.get(key)):  # else the config below says it
            print(f"{shown(key)}:")
            settings = (
                flatten(value) if all(isinstance(section, dict) for section in value.values()) else value
            )
            print_table([(f"  {name}", json.dumps(setting)) for name, setting in settings.items()])
    if args.tensors:
        rows: list[tuple[str, ...]] = [("tensor", "dtype", "shape", "size", "content digest")]
        for name in reader.names:
            tensor = tensors[name]
            shape = " × ".join(map(str, tensor.shape)) or "scalar"
            rows.append((name, tensor.dtype, shape, size_text(tensor.nbytes), tensor.digest))
        print_table(rows)


def verify(args: argparse.Namespace) -> None:
    """Print a line for each checkpoint, then raise the error of the newest damaged one, if any."""
    candidates = checkpoints_in(args.path)
    if not candidates:
        locate(args.path)  # raises, saying what was looked for
    rows: list[tuple[str, ...]] = [("checkpoint", "tensors", "files", "size", "whole")]
    errors = []
    for candidate in candidates:
        try:
            reader = Reader(candidate)
            reader.verify()
        except CheckpointError as error:
            errors.append(error)
            rows.append((candidate.name, "", "", "", f"no: {error.wrong}"))
        else:
            manifest = reader.manifest
            rows.append(
                (
                    candidate.name,
                    str(len(reader.names)),
                    str(len(manifest.files)),
                    size_text(manifest.nbytes),
                    "yes",
                )
            )
    print_table(rows)
    if errors:
        raise errors[0]


def diff(args: argparse.Namespace) -> int:
    """Print how many tensors of two checkpoints differ, and the first few of them, or all if asked.

    Return 1 if any differ.
    """
    before, after = (Reader(locate(path), trusted=args.trust) for path in (args.path, args.other))
    differ = list(compare(before, after))
    total = len({*before.names, *after.names})
    for reader in (before, after):
        print(f"{reader.path}, step {reader.step}")
    equal = (
        "are equal by their digests (--trust: not compared with what is in the files)"
        if args.trust
        else "are equal in every bit"
    )
    print(f"{total - len(differ)} of {total} tensors {equal}")
    rows: list[tuple[str, ...]] = [
        ("tensor", "what differs", "elements", "largest difference", "relative to the norm")
    ]
    for found in differ if args.tensors else differ[:FEW]:
        figures = (
            (f"{found.elements:,}", f"{found.largest:.3g}", f"{found.relative:.3g}")
            if found.elements
            else ("", "", "")
        )
        rows.append((found.name, found.what, *figures))
    if differ:
        print_table(rows)
    if left := len(differ) - len(rows) + 1:
        print(f"and {left} more{LISTED}")
    return int(bool(differ))


def print_table(rows: list[tuple[str, ...]]) -> None:
    """Print rows in columns that are as wide as their cells.

    Names stay whole in narrow terminals, for searching and copying.
    """
    rows = [tuple(map(shown, row)) for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())


def export(args: argparse.Namespace) -> None:
    """Write a Hugging Face model folder from a checkpoint."""
    if not 0 < args.shard_gib < 1e6:
        raise ConfigError("--shard-gib", f"{args.shard_gib} is not usable", "a size above 0")
    dtype, shard_bytes = DTYPES[args.dtype], int(args.shard_gib * 2**30)
    export_hf(
        args.path, args.output, dtype, shard_bytes, args.tokenizer, args.compare_layers, print, args.weights
    )


def import_(args: argparse.Namespace) -> None:
    """Write a run's folder from another project's model."""
    import_model(PEERS[args.format](args.path), args.output, args.overrides, args.compare_layers, print)


def upcycle_(args: argparse.Namespace) -> None:
    """Write a run's folder with a mixture of experts from a dense run."""
    if not 0 <= args.noise < 1e3:
        raise ConfigError("--noise", f"{args.noise} is not usable", "0, or a small number such as 0.01")
    upcycle(args.path, args.output, args.overrides, args.noise, args.weights, args.compare_layers, print)


COMMANDS: dict[str, Callable[[argparse.Namespace], int | None]] = {
    "info": info,
    "verify": verify,
    "diff": diff,
    "export": export,
    "import": import_,
    "upcycle": upcycle_,
}


def parser() -> Parser:
    """Return the parser of the command line."""
    parser = Parser(
        "Inspect and compare checkpoints, and convert models from and to other formats.",
        example=(EXAMPLES["info"], EXAMPLES["export"]),
        notes="Each command has its own help, such as launch/checkpoint.py export -h. No GPU is needed.",
        status="0 done, 1 diff found a difference, 2 wrong arguments or a damaged checkpoint",
        page="docs/operations.md",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", prog=parser.prog)

    def command(name: str, purpose: str, path: str = OURS, status: str = STATUS, notes: str = "") -> Parser:
        added: Parser = commands.add_parser(
            name,
            purpose=purpose,
            example=EXAMPLES[name],
            notes=notes,
            status=status,
            page=PAGES.get(name, "docs/operations.md"),
        )
        added.add_argument("path", type=Path, metavar="PATH", help=path)
        return added

    info = command("info", "Show step, size and state of the newest complete checkpoint.")
    info.add_argument(
        "--tensors", action="store_true", help="also show every tensor: dtype, shape, size and content digest"
    )
    command("verify", "Read every checkpoint of a run and compare it with its digests.")

    diff = command(
        "diff",
        "Show which tensors of two checkpoints differ, and by how much.",
        status="0 equal, 1 different, 2 wrong arguments or a damaged checkpoint",
    )
    diff.add_argument("other", type=Path, metavar="OTHER", help="the run or checkpoint to compare with")
    diff.add_argument(
        "--trust",
        action="store_true",
        help="read only tensors whose digests in the manifests differ: quick, but does not notice damage",
    )
    diff.add_argument(
        "--tensors", action="store_true", help=f"list all tensors that differ (default: the first {FEW})"
    )

    exporting = command(
        "export", "Write a model folder that transformers opens, and compare the logits of both models."
    )
    exporting.add_argument(
        "--format", required=True, choices=("hf",), help="hf: config.json and safetensors files"
    )
    exporting.add_argument(
        "--output", required=True, type=Path, metavar="FOLDER", help="folder to write, new or empty"
    )
    exporting.add_argument(
        "--dtype", choices=("fp32", "bf16", "fp16"), default="fp32", help="precision of the weights"
    )
    exporting.add_argument(
        "--tokenizer",
        metavar="FILE",
        help="bytes, a sentencepiece .model, or a folder of tokenizer files (default: the run's "
        "data.tokenizer)",
    )
    add_weights(exporting)
    exporting.add_argument(
        "--shard-gib", type=float, default=5.0, metavar="N", help="largest size of a file, in GiB"
    )

    importing = command(
        "import",
        "Write the folder of a run from a model, to generate, evaluate and fine-tune from.",
        "folder of a model with safetensors files, or ckpt.pt of nanoGPT",
        notes="Arguments section.key=value replace values of its config.",
    )
    importing.add_argument("--format", required=True, choices=tuple(PEERS), help="format of the model")

    upcycling = command(
        "upcycle",
        "Make an MoE model from a dense run, whose feed-forward layers each expert copies.",
        notes="Arguments section.key=value set values of its config, such as model.num_experts=8.",
    )
    for writing in (importing, upcycling):
        writing.add_argument(
            "--output", required=True, type=Path, metavar="FOLDER", help="run folder to write, new or empty"
        )
    upcycling.add_argument(
        "--noise",
        type=float,
        default=0.0,
        metavar="X",
        help="standard deviation of noise that is added to the weights of each expert, as a fraction of "
        "theirs; drawn with train.seed",
    )
    add_weights(upcycling)

    for comparing in (exporting, importing, upcycling):
        part = "compare logits only through the first N blocks, if the model does not fit in memory"
        comparing.add_argument("--compare-layers", type=int, metavar="N", help=part)
    return parser


def parse(argv: list[str]) -> argparse.Namespace:
    """Return the parsed command line. Raises `ConfigError`."""
    command_line = parser()
    args, rest = command_line.parse_known_args(argv)
    if rest and (args.command not in ("import", "upcycle") or any(text.startswith("-") for text in rest)):
        command_line.error(f"unrecognized arguments: {' '.join(rest)}")
    args.overrides = rest  # as an argument, argparse would take them directly after PATH only
    return args


def run(argv: list[str]) -> int | None:
    """Runs the command. Returns its exit status (None: 0), or raises `UserError`."""
    args = parse(argv)
    return COMMANDS[args.command](args)


if __name__ == "__main__":
    exit_with(run)
