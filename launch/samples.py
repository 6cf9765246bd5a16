"""Show the samples of a training step: their documents, their offsets, and the data ranks that read them.

Or prove that an epoch is read exactly once, or draw the share of each corpus over the run.
"""

import os
import sys

# so that a checkout runs without being installed; an installed script has no such folder
if os.path.isdir(os.path.dirname(os.path.realpath(__file__)) + "/../megacore"):
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.realpath(__file__))))

import megacore.tools.interrupt  # noqa: F401  (first: Ctrl-C during the other imports prints no traceback)

# isort: split
import argparse
import math
import re
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from megacore.config import Config
from megacore.errors import ConfigError
from megacore.tools.cli import Parser, add_config, add_json, add_overrides, exit_with
from megacore.tools.output_files import check_json, report_unless_json, write_results
from megacore.tools.settings.load import load, smallest_world

if TYPE_CHECKING:
    from megacore.data.indexed import IndexedTokens
    from megacore.data.samples import SampleStream
    from megacore.tools.verify.coverage import EpochCoverage, Leg

EXAMPLES = (
    "python launch/samples.py --config configs/gpt_tiny.json --step 10 --text parallel.data=2",
    "python launch/samples.py --config configs/gpt_tiny.json --prove --layouts dp4:100,dp2:250,dp8",
)
NOTES = (
    "Documents, offsets in tokens, samples, epochs and data ranks count from 0, steps from 1. A sample is "
    "train.seq_len + 1 tokens; first and last are its outermost tokens, as document:offset. All tensor and "
    "pipeline ranks of a data rank read the same samples."
)
SHOWN = 72  # characters of a sample's text
MOST_NAMED = 10**6  # samples: a line each


def parser() -> Parser:
    """Return the parser of the command line."""
    parser = Parser(
        "Show which samples a training step reads, or prove that every sample of an epoch is read once.",
        example=EXAMPLES,
        notes=NOTES,
        status="0 done or proved, 1 not proved, 2 bad config, data or arguments",
        page="docs/data.md",
    )
    add_config(parser)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--step", metavar="N", help="step whose samples are shown, or 10:12 for steps 10, 11 and 12"
    )
    what.add_argument(
        "--prove",
        action="store_true",
        help="prove that every sample of an epoch, of each corpus, is read exactly once",
    )
    what.add_argument(
        "--plot", metavar="FILE.png", help="draw the share of each corpus over the run, and its epochs"
    )
    parser.add_argument("--text", action="store_true", help="with --step: show how each sample begins")
    parser.add_argument(
        "--epoch", type=int, metavar="N", help="with --prove: epoch to check, from 0 (default: 0)"
    )
    layouts = (
        "with --prove: numbers of data ranks that the run uses in turn, each with its last step "
        "(default: the config's parallel.data)"
    )
    parser.add_argument("--layouts", metavar="dp4:100,dp8", help=layouts)
    add_json(parser, "what was found")
    add_overrides(parser)
    return parser


def parse(argv: list[str]) -> argparse.Namespace:
    """Return the parsed command line. Raises `ConfigError`."""
    args = parser().parse_intermixed_args(argv)
    for option, other in (("text", "step"), ("epoch", "prove"), ("layouts", "prove")):
        if getattr(args, option) not in (None, False) and not getattr(args, other):
            raise ConfigError(f"--{option}", f"belongs to --{other}", f"--{other}, or leave it out")
    if args.epoch is not None and args.epoch < 0:
        raise ConfigError("--epoch", f"{args.epoch} is no epoch", "0 or more")
    check_json(args.json)
    if args.plot is not None:
        from megacore.tools.planner.plot import check_plot

        check_plot("--plot", args.plot)
    return args


def steps_of(text: str, config: Config) -> range:
    """The steps that `--step` asks for."""
    numbers = re.fullmatch(r"(\d{1,18})(?::(\d{1,18}))?", text, re.ASCII)
    if numbers is None:
        raise ConfigError("--step", f"{text} is no step", "a number such as 10, or two such as 10:12")
    first, last = int(numbers[1]), int(numbers[2] or numbers[1])
    if not 1 <= first <= last <= config.train.steps:
        wrong = f"{text} goes beyond the run's steps" if first <= last else f"{text} ends before it begins"
        raise ConfigError("--step", wrong, f"1 to train.steps {config.train.steps}")
    if (count := config.train.samples_through(last) - config.train.samples_through(first - 1)) > MOST_NAMED:
        raise ConfigError("--step", f"{text} has {count:,} samples", f"steps with {MOST_NAMED:,} at most")
    return range(first, last + 1)


def legs_of(text: str, config: Config) -> "list[Leg]":
    """The layouts that `--layouts` names, one after another."""
    from megacore.tools.verify.coverage import Leg

    legs: list[Leg] = []
    names = text.split(",")
    micro, batch = (
        config.train.micro_batch_size,
        math.gcd(config.train.global_batch_size, *(size for _, size in config.train.batch_ramp)),
    )
    for i, name in enumerate(names):
        numbers = re.fullmatch(r"dp([1-9]\d{0,8})(?::([1-9]\d{0,17}))?", name, re.ASCII)
        if numbers is None:
            raise ConfigError("--layouts", f"{name!r} is no layout", "such as dp4:100,dp2:250,dp8")
        size, last = int(numbers[1]), None if numbers[2] is None else int(numbers[2])
        first = 1 if i == 0 else (legs[-1].last or 0) + 1
        if batch % (micro * size):
            wrong = (
                f"{name}: {batch} = micro_batch_size {micro} × microbatches × data {size} has no "
                "whole solution"
            )
            raise ConfigError("--layouts", wrong, f"data ranks that divide {batch // micro}")
        if (last is None) != (i == len(names) - 1):
            raise ConfigError(
                "--layouts",
                f"{name} {'has no' if last is None else 'has a'} last step",
                "one for each layout but the last",
            )
        if last is not None and last < first:
            raise ConfigError(
                "--layouts", f"{name} ends before it begins, with step {first}", f"dp{size}:{first} or later"
            )
        legs.append(Leg(size, first, last))
    return legs


def named(stream: "SampleStream", steps: range, config: Config, text: bool) -> list[dict[str, Any]]:
    """Every sample of some steps, in the order of the global batch."""
    import numpy as np

    from megacore.data.shuffle import dealt

    assert isinstance(config.parallel.data, int)
    show = beginning(config) if text else None
    rows = []
    for step in steps:
        # [data ranks, microbatches, micro_batch_size]
        indices = dealt(range(step, step + 1), config.parallel.data, config.train)[0]
        order = indices.argsort(axis=None)
        corpora, epochs, samples = stream.locate(indices.reshape(-1)[order])
        for position, (flat, corpus, epoch, sample) in enumerate(
            zip(order, corpora, epochs, samples, strict=True)
        ):
            tokens, spans = stream.corpora[corpus], stream.cuts[corpus].spans(int(sample))
            rank, microbatch, _ = np.unravel_index(flat, indices.shape)
            row: dict[str, Any] = {
                "step": step,
                "position": position,
                "corpus": tokens.prefix,
                "epoch": int(epoch),
                "sample": int(sample),
            }
            for end, token in (("first", spans[0][0]), ("last", sum(spans[-1]) - 1)):
                row[end] = dict(zip(("document", "offset"), tokens.document_and_offset(token), strict=True))
            if config.data.packing == "best_fit":
                row |= {
                    "documents": len(spans),
                    "padding": stream.seq_len + 1 - sum(length for _, length in spans),
                }
            row |= {"data_rank": int(rank), "microbatch": int(microbatch)}
            rows.append(row | ({"text": show(tokens, *spans[0])} if show else {}))
    return rows


def beginning(config: Config) -> "Callable[[IndexedTokens, int, int], str]":
    """A function that shows how `length` tokens of a corpus from `start` begin.

    Raises `UserError` without a tokenizer that fits.
    """
    from megacore.tools.text.tokenizer import load_tokenizer

    name = config.data.tokenizer
    if name is None:
        raise ConfigError(
            "data.tokenizer",
            "--text needs one, and the config names none",
            "bytes, or a sentencepiece .model",
        )
    tokenizer = load_tokenizer(name)

    def show(tokens: "IndexedTokens", start: int, length: int) -> str:
        # a token is a character at least, but for special ones
        ids = tokens.read(start, min(length, SHOWN)).tolist()
        if max(ids) >= tokenizer.vocab_size:
            wrong = f"{name} has {tokenizer.vocab_size} tokens, and {tokens.prefix} holds id {max(ids)}"
            raise ConfigError("data.tokenizer", wrong, "the one that the corpus was prepared with")
        return tokenizer.decode(ids)[:SHOWN]

    return show


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as aligned text."""
    heads = list(rows[0])
    place = "{document}:{offset}".format_map
    shown: dict[str, Callable[[Any], str]] = {"first": place, "last": place, "text": repr}
    cells = [[head.replace("_", " ") for head in heads]] + [
        [shown.get(head, str)(row[head]) for head in heads] for row in rows
    ]
    widths = [max(len(line[i]) for line in cells) for i in range(len(heads))]
    left = {heads.index("corpus"), heads.index("text") if "text" in heads else -1}
    aligned = (
        [f"{c:{'<' if i in left else '>'}{w}}" for i, (c, w) in enumerate(zip(line, widths, strict=True))]
        for line in cells
    )
    return "\n".join("  ".join(line).rstrip() for line in aligned)


def prove(stream: "SampleStream", legs: "list[Leg]", epoch: int, config: Config) -> "list[EpochCoverage]":
    """Checks an epoch of every corpus, and prints the findings."""
    from rich.console import Console
    from rich.progress import Progress

    from megacore.tools.verify.coverage import Epoch

    sizes = [f"global_batch_size {size} to step {last}" for last, size in config.train.batch_ramp]
    sizes.append(f"global_batch_size {config.train.global_batch_size}")
    ways = [f"data {leg.data_size}" + (f" to step {leg.last}" if leg.last else "") for leg in legs]
    print(f"epoch {epoch}, with {', then '.join(ways)}; {'; then '.join(sizes)}")
    findings: list[EpochCoverage] = []
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("reading", total=len(stream.corpora))
        for corpus in range(len(stream.corpora)):
            checked = Epoch(stream, corpus, epoch, legs, config.train)
            finding = checked.check(lambda done: progress.update(task, completed=len(findings) + done))
            findings.append(finding)
            where = f"steps {finding.first_step:,} to {finding.last_step:,}"
            print(
                f"{finding.prefix}: {finding.samples:,} samples, in {where}: {finding.missing:,} missing, "
                f"{finding.repeated:,} repeated"
            )
            for example in finding.examples:
                print(f"  {example}")
    if max(finding.last_step for finding in findings) > config.train.steps:
        print(
            f"(the run ends sooner, after train.steps {config.train.steps:,}; later steps are read as if it "
            "continued)"
        )
    return findings


def drawn(stream: "SampleStream", config: Config, path: str) -> list[dict[str, Any]]:
    """Draws the blend, and prints and returns what each corpus gives to the run."""
    from megacore.tools.verify.blend_plot import draw_blend, given

    total = given(stream, config.train)
    for part in total:
        print(
            f"{part.prefix}: {part.samples[-1]:,} samples, {part.share:.2%} of the run, {part.epochs:.4g} "
            f"epochs of {part.size:,} samples"
        )
    try:
        draw_blend(total, config.train, path)
    except OSError as error:
        raise ConfigError("--plot", f"cannot write {path}: {error.strerror}", "a writable path") from None
    return [asdict(part) for part in total]


def run(argv: list[str]) -> int:
    """Runs the script. Returns its exit status, or raises `UserError`."""
    args = parse(argv)
    config = load(args.config, args.overrides, smallest_world(args.config, args.overrides)).config
    from megacore.tools.corpora import checked_stream
    from megacore.tools.verify.coverage import Leg

    steps = None if args.step is None else steps_of(args.step, config)
    stream = checked_stream(config)
    with report_unless_json(args.json):
        for line in stream.packed():
            print(line)
        if steps is not None:
            results, proved = named(stream, steps, config, args.text), True
            print(table(results))
        elif args.plot is not None:
            results, proved = drawn(stream, config, args.plot), True
        else:
            assert isinstance(config.parallel.data, int)
            legs = [Leg(config.parallel.data)] if args.layouts is None else legs_of(args.layouts, config)
            findings = prove(stream, legs, args.epoch or 0, config)
            results, proved = [asdict(finding) for finding in findings], all(f.holds for f in findings)
            print("proved: every sample is read exactly once" if proved else "NOT proved")
    write_results(args.json, results)
    return 0 if proved else 1


if __name__ == "__main__":
    exit_with(run)
