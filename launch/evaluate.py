"""Measure a model on a corpus: loss in nats a token, perplexity and bits a byte, in any layout."""

import os
import sys

# so that a checkout runs without being installed; an installed script has no such folder
if os.path.isdir(os.path.dirname(os.path.realpath(__file__)) + "/../megacore"):
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.realpath(__file__))))

import megacore.tools.interrupt  # noqa: F401  (first: Ctrl-C during the other imports prints no traceback)

# isort: split
import argparse
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megacore.config import Config
from megacore.distributed.rank_info import RankInfo
from megacore.errors import CheckpointError, ConfigError, DataError
from megacore.tools.cli import (
    Parser,
    add_checkpoint,
    add_device,
    add_json,
    add_overrides,
    add_source,
    add_tokenizer,
    add_weights,
    exit_rank_with,
)
from megacore.tools.output_files import check_json, report_unless_json, write_results
from megacore.tools.settings.load import resolve

if TYPE_CHECKING:
    from megacore.checkpoint import Reader
    from megacore.data.samples import EvalSamples
    from megacore.train.evaluation import Evaluation

EXAMPLES = (
    "python launch/evaluate.py --checkpoint runs/quickstart --data data/stdlib_valid",
    "torchrun --nproc-per-node 4 launch/evaluate.py --checkpoint runs/quickstart parallel.tensor=2 "
    "parallel.pipeline=2",
)
NOTES = (
    "nats a token = sum over targets of -ln p / targets; perplexity = exp(nats a token); bits a byte = sum "
    "of -log2 p / UTF-8 bytes that the targets spell. Every token of the corpus but its first is a target, "
    "predicted from the tokens before it in its window of train.seq_len."
)


def parser() -> Parser:
    """Return the parser of the command line."""
    parser = Parser(
        "Measure a trained or imported model on a corpus: nats a token, perplexity and bits a byte.",
        example=EXAMPLES,
        notes=NOTES,
        status="0 done, 2 wrong arguments, data or checkpoint",
        page="docs/training.md",
        ranks=True,
    )
    add_checkpoint(parser)
    parser.add_argument(
        "--data",
        metavar="PREFIX",
        help="prefix of the corpus's .bin and .idx files (default: the run's data.valid)",
    )
    parser.add_argument(
        "--batches",
        type=int,
        default=0,
        metavar="N",
        help="number of batches to read, spread evenly over the corpus; 0: all. The run's "
        "train.eval_batches gives its validation loss",
    )
    add_tokenizer(parser)
    parser.add_argument(
        "--bos-each-window",
        action="store_true",
        help="replace the first input token of each window by the BOS token, as models such as Gemma need",
    )
    add_device(parser)
    add_json(parser, "the metrics")
    add_weights(parser)
    add_source(parser)
    add_overrides(parser, "values that replace the run's, such as parallel.tensor=2 or train.precision=fp32")
    return parser


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    args = parser().parse_intermixed_args(argv)
    if args.batches < 0:
        raise ConfigError("--batches", f"{args.batches} is not usable", "0 or more")
    check_json(args.json)
    return args


def evaluation_config(sections: dict[str, Any], args: argparse.Namespace, world_size: int) -> Config:
    """The checkpoint's model and batches, in the layout that the overrides name."""
    from megacore.tools.text.tokenizer import check_kind

    batches = ("seq_len", "micro_batch_size", "global_batch_size", "precision")
    data = {
        key: value
        for key, value in sections["data"].items()
        if key in ("valid", "tokenizer", "document_mask", "packing")
    }
    if args.data is not None:
        data["valid"] = args.data
    if args.tokenizer is not None:
        check_kind(args.tokenizer, data.get("tokenizer"))
        data["tokenizer"] = args.tokenizer
    train = {key: sections["train"].get(key) for key in batches} | {"device": args.device}
    raw = {"model": sections["model"], "data": data, "train": train | {"eval_batches": args.batches}}
    config = resolve(raw, args.overrides, "evaluation", world_size).config
    if config.data.valid is None:
        raise ConfigError(
            "--data",
            "no corpus is given, and the run has no data.valid",
            "the prefix that launch/prepare.py wrote",
        )
    return config


@dataclass(frozen=True)
class TextSizes:
    """How tokens are counted as bytes of text."""

    token_bytes: list[int]  # the bytes that each token of the model spells, [vocab]
    # Bytes of the corpora's text for each byte that their tokens spell: a tokenizer may drop spaces of the
    # text, or add some.
    text_ratio: float


def text_sizes(config: Config, samples: "EvalSamples") -> TextSizes | None:
    """Return how to count bytes of text; None if the run names no tokenizer. Raises `UserError`."""
    from megacore.tools.corpora import Sidecar
    from megacore.tools.text.tokenizer import load_tokenizer

    name, vocab_size = config.data.tokenizer, config.model.vocab_size
    if name is None:
        return None
    tokenizer = load_tokenizer(name)
    right = "the tokenizer that the model was trained with"
    if tokenizer.vocab_size > vocab_size:
        raise ConfigError(
            "--tokenizer", f"{name} has {tokenizer.vocab_size} tokens, and the model {vocab_size}", right
        )
    sidecars = [Sidecar.load(corpus.prefix) for corpus in samples.corpora]
    for corpus, known in zip(samples.corpora, sidecars, strict=True):
        if known is not None and known.vocab_size != tokenizer.vocab_size:
            wrong = (
                f"was prepared with {known.tokenizer} of {known.vocab_size} tokens, and {name} has "
                f"{tokenizer.vocab_size}"
            )
            raise DataError(corpus.prefix, wrong, f"a corpus prepared with {name}")
    token_bytes = [len(tokenizer.token_bytes(token)) for token in range(tokenizer.vocab_size)]
    counted = [known for known in sidecars if known is not None and known.spelled_bytes]
    text_ratio = 1.0
    if len(counted) == len(sidecars):
        text_ratio = sum(known.text_bytes for known in counted) / sum(
            known.spelled_bytes or 0 for known in counted
        )
    return TextSizes(token_bytes + [0] * (vocab_size - tokenizer.vocab_size), text_ratio)


def window_bos(config: Config) -> int:
    """Return the BOS token of the run's tokenizer. Raises `ConfigError` without one."""
    from megacore.tools.text.tokenizer import load_tokenizer
    from megacore.tools.text.vocabulary import chosen_begin

    name = config.data.tokenizer
    begin = chosen_begin(load_tokenizer(name), "always", "--bos-each-window") if name is not None else ()
    if not begin or begin[0] >= config.model.vocab_size:
        wrong = "needs a tokenizer with a BOS token that the model knows"
        raise ConfigError("--bos-each-window", wrong, "--tokenizer with the one of its training")
    return begin[0]


def batches_read(config: Config, samples: "EvalSamples") -> tuple[int, int]:
    """Return how many batches are read, and how many the corpora have."""
    total = -(-len(samples) // config.train.global_batch_size)
    asked = config.train.eval_batches
    return (min(asked, total) if asked else total), total


def describe_batches(count: int, total: int, own_batches: int | None) -> str:
    """Return the number of batches in words, and what the run's own validation reads if that is less."""
    if count < total:
        return f"{count:,} of {total:,}"
    if own_batches and own_batches < total:
        return f"{count:,}, all of them (the run's validation reads {own_batches:,}: --batches {own_batches})"
    return f"{count:,}, all of them"


def report(
    evaluation: "Evaluation",
    reader: "Reader",
    samples: "EvalSamples",
    batches: tuple[int, int],
    own_batches: int | None,
    args: argparse.Namespace,
) -> None:
    """Print the metrics as a table, and write them as JSON if asked.

    `batches` is `batches_read`, and `own_batches` what the run's validation reads of the same corpora.
    """
    from rich.console import Console
    from rich.table import Table

    try:
        perplexity = math.exp(evaluation.loss)
    except OverflowError:
        perplexity = math.inf
    bits = evaluation.nats / math.log(2)
    figures: dict[str, str | int | float | list[str] | None] = {
        "checkpoint": str(reader.path),
        "step": reader.step,
        "data": [tokens.prefix for tokens in samples.corpora],
        "batches": batches[0],
        "targets": evaluation.targets,
        "bytes": evaluation.text_bytes or None,
        "nats_per_token": evaluation.loss,
        "perplexity": perplexity,
        # can be compared between tokenizers
        "bits_per_byte": bits / evaluation.text_bytes if evaluation.text_bytes else None,
    }
    table = Table(show_header=False)
    for name, value in figures.items():
        if isinstance(value, list):
            text = ", ".join(value)
        elif isinstance(value, float):
            text = f"{value:.6g}" if evaluation.targets else "unknown: no token that was read is learned"
        else:
            text = f"{value:,}" if isinstance(value, int) else value or "unknown: no tokenizer is named"
        if name == "batches":
            text = describe_batches(*batches, own_batches)
        table.add_row(name.replace("_per_", " a ").replace("_", " "), text)
    with report_unless_json(args.json):
        Console(highlight=False, markup=False, soft_wrap=True).print(table)
    finite = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in figures.items()
    }
    write_results(args.json, finite)


def run(argv: list[str], place: RankInfo) -> int:
    """Evaluates, as one of the ranks; rank 0 prints. Returns the exit status, or raises `UserError`."""
    args = parse(argv)

    import torch

    from megacore import checkpoint
    from megacore.checkpoint.weights import DOCUMENTS_BOS, check_weights
    from megacore.data.samples import EvalSamples
    from megacore.distributed.init import joined, own_mistakes
    from megacore.engine.choose import build_stages
    from megacore.pipeline.runtime import Runtime
    from megacore.tools.checkpoint_weights import choose_weights, load_weights, sections_to_run
    from megacore.tools.choices.settle import settled_alone
    from megacore.tools.corpora import check_corpora
    from megacore.tools.crowd import share_cores
    from megacore.tools.diagnosis.guardians import Guardians
    from megacore.tools.inputs import check_measurable
    from megacore.tools.machine.device import take_device
    from megacore.tools.text.vocabulary import (
        bos_warnings,
        corpora_begin_with_bos,
        mixed_bos_warnings,
        prefixes_of,
    )
    from megacore.train.evaluation import evaluate

    with own_mistakes():
        reader = checkpoint.Reader(checkpoint.locate(Path(args.checkpoint)))
        choose_weights(reader, args.weights)
        sections = sections_to_run(reader, args.source)
        config = settled_alone(evaluation_config(sections, args, place.world_size))
        check_weights(reader, config)
        check_measurable(config)
        assert config.data.valid is not None
        samples = EvalSamples(
            config.data.valid,
            config.train.seq_len,
            config.model.vocab_size,
            config.data.packing,
            bos=window_bos(config) if args.bos_each_window else None,
        )
        check_corpora(samples.corpora, config.model.vocab_size, scan=place.local_rank == 0)
        sizes = text_sizes(config, samples)
        if place.rank == 0:
            prefixes = [tokens.prefix for tokens in samples.corpora]
            tokenizer = config.data.tokenizer
            has_bos = reader.state.get(DOCUMENTS_BOS)
            if has_bos is None:  # not recorded, for example by an import
                has_bos = corpora_begin_with_bos(prefixes_of(sections["data"].get("train")), tokenizer)
            lines = bos_warnings(prefixes, tokenizer)
            lines += mixed_bos_warnings(prefixes, tokenizer, args.checkpoint, has_bos)
            for line in lines:
                print(line, file=sys.stderr)
        device = take_device(config, place)
    with joined(config, place, device, Guardians(config, place, device)) as mesh:
        share_cores(config, place.world_size, device)
        stages = build_stages(config, mesh)
        load_weights(reader, stages)
        token_bytes = None if sizes is None else torch.tensor(sizes.token_bytes, device=device)
        result = evaluate(config, Runtime(stages, None, mesh.pp, mesh.listeners), mesh, samples, token_bytes)
    if result.targets and not math.isfinite(result.loss):
        wrong = f"its loss is {result.loss}: the run has diverged"
        raise CheckpointError(str(reader.path), wrong, "an earlier checkpoint")
    if place.rank == 0:
        if sizes is not None:
            result = replace(result, text_bytes=round(result.text_bytes * sizes.text_ratio))
        own_batches = sections["train"].get("eval_batches") if args.data is None else None
        report(result, reader, samples, batches_read(config, samples), own_batches, args)
    return 0


if __name__ == "__main__":
    exit_rank_with(run)
