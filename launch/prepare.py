"""Tokenize text for training: write PREFIX.bin and PREFIX.idx, and the tokenizer if it is trained or fetched
here, as PREFIX.model or PREFIX.tokenizer.json.

With --chat it reads conversations, and also writes PREFIX.mask.bin, which marks the tokens of answers: only
they are learned.
"""

import os
import sys

# so that a checkout runs without being installed; an installed script has no such folder
if os.path.isdir(os.path.dirname(os.path.realpath(__file__)) + "/../megacore"):
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.realpath(__file__))))

import megacore.tools.interrupt  # noqa: F401  (first: Ctrl-C during the other imports prints no traceback)

# isort: split
import argparse
import shlex
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from megacore.distributed.processes import available_cores
from megacore.errors import ConfigError, shown
from megacore.tools.cli import Parser, exit_with, next_command, original_ending, unwind_on_sigterm
from megacore.tools.prepare.partial import kept
from megacore.tools.prepare.split import IGNORED, SPELLED_END, UNUSED, UNWRITTEN, notes_of

if TYPE_CHECKING:
    from megacore.tools.corpora import Sidecar
    from megacore.tools.prepare.prepare import Prepared

EXAMPLE = (
    "python launch/prepare.py --input python-stdlib --output data/stdlib --tokenizer sentencepiece:4096 "
    "--valid-fraction 0.05"
)
NOTES = (
    "Inputs are text, JSON lines, .gz and .zst files of both, .json lists, Parquet, Arrow, folders of "
    "datasets.save_to_disk, and folders and globs of all these; hf:NAME[:CONFIG][:SPLIT] streams from the "
    "Hugging Face hub, and python-stdlib is Python's own source code."
)

MOST_WORKERS = 1024
LEARNED_BRACKETS = ("⟦", "⟧")  # mark what is learned where there are no colours
TOKENS_PER_ENTRY = 50  # of training text, for each entry of a vocabulary that is trained on it
SMALLEST_TRAINED = 512  # a smaller vocabulary gains little over bytes, of which there are 256
GPT_124M_TOKENS = 2_500_000_000  # 20 for each parameter (Hoffmann et al. 2022)
MOST_NAMED = 50  # of what was left out: a folder of pictures has thousands


def parser() -> Parser:
    """Return the parser of the command line."""
    parser = Parser(
        "Tokenize text or conversations into the files that training reads.",
        example=EXAMPLE,
        notes=NOTES,
        status="0 done, 2 wrong arguments or data",
        page="docs/data.md",
    )
    parser.add_argument("--input", nargs="+", required=True, metavar="PATH", help="files or folders to read")
    parser.add_argument("--output", metavar="PREFIX", help="write PREFIX.bin, PREFIX.idx and PREFIX.json")
    parser.add_argument(
        "--tokenizer",
        required=True,
        metavar="NAME",
        help="bytes, sentencepiece:VOCAB_SIZE (trained on the input), a sentencepiece FILE.model, a "
        "tokenizer.json, a folder with one of them, or a name that the package tiktoken fetches, such as "
        "gpt2 or cl100k_base",
    )
    parser.add_argument(
        "--valid-fraction",
        type=float,
        default=0.0,
        metavar="X",
        help="also write PREFIX_valid.* with this fraction: the end of a single text file, or that fraction "
        "of several documents",
    )
    parser.add_argument(
        "--text-key",
        metavar="KEY",
        help="key of the text in .jsonl files, or column of tables (default: text)",
    )
    parser.add_argument(
        "--chat",
        action="store_true",
        help="read conversations, one a line of JSON or a row: messages with role and content, ShareGPT's "
        "conversations, Alpaca's instruction and output, or prompt and completion; only answers are learned, "
        "which PREFIX.mask.bin marks",
    )
    parser.add_argument(
        "--ignore-keys",
        default="",
        metavar="KEY,KEY",
        help="with --chat: keys of lines and messages to ignore; any other unknown key is an error, because "
        "it may say what is learned",
    )
    parser.add_argument(
        "--show",
        type=int,
        metavar="N",
        help="with --chat: print the first N conversations, answers in colour, and write nothing",
    )
    parser.add_argument(
        "--nanogpt",
        action="store_true",
        help="read token files that were made with --tokenizer: a nanoGPT folder (train.bin, optionally "
        "val.bin), or files of nanoGPT, llm.c, modded-nanogpt or numpy.save",
    )
    parser.add_argument(
        "--dtype",
        choices=("uint16", "uint32", "int32", "int64", "uint64", "uint8"),
        help="with --nanogpt: type of the tokens in a file without a header (default: uint16)",
    )
    parser.add_argument(
        "--template",
        metavar="FILE",
        help="with --chat: Jinja chat template (default: the one next to the model's tokenizer.json)",
    )
    parser.add_argument(
        "--bos",
        choices=("auto", "always", "never"),
        default="auto",
        help="whether every document starts with the tokenizer's BOS token; auto: as the tokenizer's own "
        "library does. A chat template writes its own",
    )
    parser.add_argument(
        "--special-tokens",
        action="store_true",
        help="encode text that spells a special token, such as <|endoftext|>, as that token, and end the "
        "document at one that ends documents",
    )
    parser.add_argument(
        "--workers", type=int, metavar="N", help="number of processes (default: the usable CPU cores)"
    )
    return parser


def parse(argv: list[str]) -> argparse.Namespace:
    """Return the parsed command line. Raises `ConfigError`."""
    args = parser().parse_args(argv)
    if args.workers is None:
        args.workers = available_cores()
    args.ignore_keys = tuple(key.strip() for key in args.ignore_keys.split(",") if key.strip())
    if args.ignore_keys and not args.chat:
        raise ConfigError("--ignore-keys", "belongs to conversations", "--chat as well")
    if args.show is not None and not args.chat:
        raise ConfigError("--show", "belongs to conversations", "--chat as well")
    if args.show is not None and args.show < 1:
        raise ConfigError("--show", f"{args.show} is not a number of conversations", "1 or more")
    if args.show is None and args.output is None:
        raise ConfigError("--output", "is missing", "a prefix such as data/mine")
    if args.show is not None and args.output is not None:
        raise ConfigError("--show", "writes nothing", "without --output")
    if not 0.0 <= args.valid_fraction < 1.0:
        raise ConfigError(
            "--valid-fraction", f"{args.valid_fraction} is no such fraction", "0 or more, and below 1"
        )
    if args.text_key is not None and args.chat:
        raise ConfigError(
            "--text-key", "conversations are read from their messages", "without it, or without --chat"
        )
    if args.template is not None and not args.chat:
        raise ConfigError("--template", "only conversations have a template", "--chat as well")
    for option, given in (("--bos", args.bos != "auto"), ("--special-tokens", args.special_tokens)):
        if given and args.chat:
            raise ConfigError(option, "the chat template writes the special tokens", "without it")
        if given and args.nanogpt:
            raise ConfigError(option, "tokens are taken as they are", "without it")
    if args.nanogpt and (args.chat or args.text_key is not None or args.valid_fraction):
        raise ConfigError(
            "--nanogpt", "tokens are taken as they are", "without --chat, --text-key and --valid-fraction"
        )
    if args.dtype is not None and not args.nanogpt:
        raise ConfigError("--dtype", "belongs to files of tokens", "--nanogpt as well")
    if not 1 <= args.workers <= MOST_WORKERS:
        raise ConfigError("--workers", f"{args.workers} is not usable", f"1 to {MOST_WORKERS} processes")
    return args


def convert(args: argparse.Namespace) -> "Prepared":
    """Takes tokens as they are. Raises `UserError`."""
    from megacore.tools.prepare.token_files import convert_tokens

    return convert_tokens(args.input, args.output, args.tokenizer, args.dtype)


def show(args: argparse.Namespace) -> None:
    """Prints conversations with what is learned of them in colour. Raises `UserError`."""
    from rich.console import Console
    from rich.text import Text

    from megacore.tools.prepare.prepare import show_conversations

    console = Console(highlight=False, soft_wrap=True)
    opening, closing = ("", "") if console.color_system else LEARNED_BRACKETS
    notes: Counter[str] = Counter()
    conversations = show_conversations(
        args.input, args.tokenizer, args.show, template=args.template, ignored_keys=args.ignore_keys
    )
    for number, (where, conversation) in enumerate(conversations):
        if number == 0:
            example = f"{opening}this{closing}"
            console.print(Text.assemble("learned: ", (example, "bold green"), "; read only: this"))
        console.print(Text(f"\n{where}", "bold"))
        notes.update(conversation.notes)
        for text, learned in conversation.parts:
            visible = "\n".join(shown(line, most=len(line)) for line in text.split("\n"))
            if learned:
                console.print(Text(f"{opening}{visible}{closing}", "bold green"), end="")
            else:
                console.print(Text(visible), end="")
        console.print()
    print_notes(notes, args.ignore_keys)


def print_notes(notes: Counter[str], ignored_keys: tuple[str, ...]) -> None:
    """Prints what of the conversations was not used."""
    for kind, meaning in (
        (UNUSED, "not used, because they do not change what is learned"),
        (IGNORED, "ignored, as --ignore-keys says"),
    ):
        if counts := notes_of(notes, kind):
            print(f"{meaning}: {', '.join(f'{key} ({count:,})' for key, count in counts.items())}")
    absent = [key for key in ignored_keys if key not in notes_of(notes, IGNORED)]
    if absent:
        print(f"warning: --ignore-keys: no line has {', '.join(absent)}", file=sys.stderr)
    for name, count in notes_of(notes, UNWRITTEN).items():
        times = f"{count:,} time{'s' if count > 1 else ''}"
        print(f"warning: the template does not write {name} as it is, {times}", file=sys.stderr)


def prepare_text(args: argparse.Namespace) -> "Prepared":
    """Prepares the text with a progress bar. Raises `UserError`."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    from megacore.tools.prepare.prepare import prepare

    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        training = args.tokenizer.startswith("sentencepiece:")
        task = progress.add_task("training the tokenizer" if training else "reading", total=None)
        return prepare(
            args.input,
            args.output,
            args.tokenizer,
            text_key="text" if args.text_key is None else args.text_key,
            chat=args.chat,
            template=args.template,
            ignored_keys=args.ignore_keys,
            valid_fraction=args.valid_fraction,
            bos=args.bos,
            special_tokens=args.special_tokens,
            workers=args.workers,
            on_start=lambda total: progress.update(task, description="tokenizing", total=total),
            on_bytes=lambda size: progress.advance(task, size),
        )


def run(argv: list[str]) -> None:
    """Prepares the input, and prints what was written. Raises `UserError`."""
    args = parse(argv)
    if args.show is not None:
        show(args)
        return
    prepared = convert(args) if args.nanogpt else prepare_text(args)
    if prepared.resumed:
        print(
            f"resumed an earlier start, which had done {prepared.resumed:,} of {prepared.input_bytes:,} bytes"
        )
    for prefix, split in prepared.splits.items():
        documents = f"{split.documents:,} document{'s' if split.documents > 1 else ''}"
        print(
            f"{prefix}.bin   {split.tokens:,} tokens, {documents}, {split.text_bytes / split.tokens:.3f} "
            "bytes a token"
        )
        if split.learned is not None:
            print(f"    {split.learned:,} tokens are learned")
        meaning = (
            "unigram entropy"
            if prefix == args.output
            else "cross entropy under the training split's unigrams"
        )
        print(f"    {meaning} {split.unigram_entropy:.4f} nats a token")
    if prepared.tokenizer.startswith((f"{args.output}.model", f"{args.output}.tokenizer.json")):
        print(f"{prepared.tokenizer}   the tokenizer, {prepared.splits[args.output].vocab_size:,} tokens")
    print_beginnings(args, prepared)
    if prepared.end is not None and not args.chat:
        print(f"every document ends with {prepared.end}")
        if spelled := sum(notes_of(prepared.notes, SPELLED_END).values()):
            times = f"{spelled:,} time{'s' if spelled > 1 else ''}"
            print(
                f"the text spells this token {times}, encoded as text (--special-tokens makes it the token)"
            )
    elif not args.chat and args.tokenizer != "bytes":
        print(
            f"warning: no token ends a document: neither {prepared.tokenizer} nor a file beside it names one",
            file=sys.stderr,
        )
    print_notes(prepared.notes, args.ignore_keys)
    print_advice(args, prepared)
    largest = sorted(prepared.left_out, key=lambda entry: -entry.size)
    whole = prepared.input_bytes + sum(entry.size for entry in largest)
    for entry in largest[:MOST_NAMED]:
        share = f"{entry.size:,} bytes, {entry.size / whole:.1%} of the input"
        print(f"warning: left out {entry.path!r}, which is {entry.what}: {share}", file=sys.stderr)
    if others := largest[MOST_NAMED:]:
        size = sum(entry.size for entry in others)
        print(
            f"warning: left out {len(others):,} more: {size:,} bytes, {size / whole:.1%} of the input",
            file=sys.stderr,
        )
    print(f"\nnext:\n  {next_command(shlex.join(training_command(args, prepared)))}")


def training_command(args: argparse.Namespace, prepared: "Prepared") -> list[str]:
    """Return the command that trains on the corpus, with every setting that the corpus decides."""
    from megacore.tools.text.vocabulary import padded_vocab_size

    settings = [f"data.train={args.output}"]
    valid = f"{args.output}_valid"
    has_valid = valid in prepared.splits
    if has_valid:
        settings.append(f"data.valid={valid}")
    if args.chat:  # conversations do not see each other, and none is cut
        settings += ["data.document_mask=true", "data.packing=best_fit"]

    # an imported model has its tokenizer in a folder next to its config
    model_folders = Path(prepared.tokenizer).parents[1:2]
    config = next(
        (str(folder / "config.json") for folder in model_folders if (folder / "config.json").is_file()), None
    )
    if config is None:
        train = prepared.splits[args.output]
        config = fitting_config(train)
        if not has_valid:
            settings.append("data.valid=null")  # the config's is another corpus
        settings += [
            f"data.tokenizer={prepared.tokenizer}",
            f"model.vocab_size={padded_vocab_size(train.vocab_size)}",
            f"log.dir=runs/{Path(args.output).name}",
        ]
    return ["python", "launch/pretrain.py", "--config", config, *settings]


def fitting_config(train: "Sidecar") -> str:
    """Return the config whose size fits a training split: GPT-2's needs a GPU and billions of tokens."""
    return "configs/gpt_124m.json" if train.tokens >= GPT_124M_TOKENS else "configs/gpt_tiny.json"


def print_advice(args: argparse.Namespace, prepared: "Prepared") -> None:
    """Print what to expect of the validation loss, and warn of a vocabulary too large for the text."""
    train = prepared.splits[args.output]
    if sum(split.documents for split in prepared.splits.values()) > 2 and args.valid_fraction:
        print(
            "validation has whole documents that training never reads, so its loss may be higher without "
            "overfitting"
        )
    if args.tokenizer.startswith("sentencepiece:") and train.tokens < TOKENS_PER_ENTRY * train.vocab_size:
        entries = train.tokens // TOKENS_PER_ENTRY
        size = 1 << entries.bit_length() - 1 if entries else 0  # a power of two
        better = f"sentencepiece:{size}" if size >= SMALLEST_TRAINED else "bytes"
        print(
            f"warning: the text has only {train.tokens // train.vocab_size:,} tokens for each entry of the "
            f"vocabulary, which is too few to learn rare ones (--tokenizer {better}, or more text)",
            file=sys.stderr,
        )


def print_beginnings(args: argparse.Namespace, prepared: "Prepared") -> None:
    """Print which token begins the documents, or that they lack the one that the tokenizer puts there."""
    if prepared.begin is not None and not args.chat:
        print(f"every document begins with {prepared.begin}")
    elif prepared.usual_begin is not None and not prepared.splits[args.output].bos:
        why = "the chat template does not write it" if args.chat else "--bos never"
        print(
            f"no document begins with {prepared.usual_begin}, which the tokenizer puts before a text: {why}"
        )


def main(argv: list[str]) -> None:
    """Runs the script. SIGTERM stops it as Ctrl-C does, which says that nothing was written."""
    unwind_on_sigterm()
    try:
        run(argv)
    except BaseException as error:
        if isinstance(original_ending(error), KeyboardInterrupt):
            prefix = next((word for option, word in pairwise(argv) if option == "--output"), "")
            print(f"interrupted: nothing was written{kept(prefix) if prefix else ''}", file=sys.stderr)
        raise


if __name__ == "__main__":
    exit_with(main)
