"""Generate text with a trained or imported model, from a checkpoint of any layout."""

import os
import sys

# so that a checkout runs without being installed; an installed script has no such folder
if os.path.isdir(os.path.dirname(os.path.realpath(__file__)) + "/../megacore"):
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.realpath(__file__))))

import megacore.tools.interrupt  # noqa: F401  (first: Ctrl-C during the other imports prints no traceback)

# isort: split
import argparse
import io
import json
from itertools import product
from pathlib import Path
from typing import Any

from megacore.config import Config
from megacore.distributed.rank_info import RankInfo
from megacore.errors import CheckpointError, ConfigError, DataError
from megacore.files import OUTPUT, read_json, read_text, write_whole
from megacore.tools.cli import (
    Parser,
    StdoutLost,
    add_checkpoint,
    add_device,
    add_overrides,
    add_source,
    add_tokenizer,
    add_weights,
    count,
    exit_rank_with,
)
from megacore.tools.interrupt import interrupted_status
from megacore.tools.output_files import check_json
from megacore.tools.settings.load import resolve

EXAMPLES = (
    "python launch/generate.py --checkpoint runs/quickstart --prompt 'def main('",
    "torchrun --nproc-per-node 4 launch/generate.py --checkpoint runs/gpt_7b parallel.tensor=2 "
    "parallel.pipeline=2",
)
NOTES = (
    "The same seed generates the same text in every layout. Computes in fp32 unless train.precision=bf16 is "
    "set. When a text grows longer than model.max_positions, the last half of it is read again as the "
    "context."
)

MOST_PROMPT = 64 << 20  # bytes


def parser() -> Parser:
    """Return the parser of the command line."""
    parser = Parser(
        "Generate text with a trained or imported model.",
        example=EXAMPLES,
        notes=NOTES,
        status="0 done, 2 wrong arguments or checkpoint",
        page="docs/training.md",
        ranks=True,
    )
    add_checkpoint(parser)
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument(
        "--prompt",
        action="append",
        metavar="TEXT",
        help="text to continue; may be repeated, for one text each (default: a newline)",
    )
    prompt.add_argument(
        "--prompt-file", metavar="FILE", help="file whose whole text is the prompt; - is standard input"
    )
    more = 'file with one prompt a line; in a .jsonl, a JSON string or {"prompt": ...}; - is standard input'
    prompt.add_argument("--prompts", metavar="FILE", help=more)
    parser.add_argument(
        "--samples",
        type=count,
        default=1,
        metavar="N",
        help="texts to generate for each prompt, with seeds that count up from --seed",
    )
    parser.add_argument(
        "--json",
        metavar="FILE",
        help="write each text, with its prompt and seed, as a line of JSON; - prints the lines instead of "
        "the texts",
    )
    parser.add_argument("--tokens", type=count, default=200, metavar="N", help="tokens to generate at most")
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.8,
        metavar="X",
        help="divides the logits before sampling; 0 always takes the most likely token",
    )
    parser.add_argument(
        "--top-k", type=int, default=50, metavar="N", help="sample among the N most likely tokens"
    )
    parser.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        metavar="P",
        help="of these, keep the most likely tokens whose probabilities add up to P",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the sampling")
    add_tokenizer(parser)
    parser.add_argument(
        "--bos",
        choices=("auto", "always", "never"),
        default="auto",
        help="whether the prompt starts with the tokenizer's BOS token; auto: as in the training documents, "
        "or else as the tokenizer's own library does",
    )
    add_device(parser)
    add_weights(parser)
    add_source(parser)
    add_overrides(parser, "values that replace the run's, such as parallel.tensor=2")
    return parser


def parse(argv: list[str]) -> argparse.Namespace:
    """Return the parsed command line. Raises `ConfigError`."""
    args = parser().parse_intermixed_args(argv)
    check_json(args.json)
    for name, bad, right in (
        (
            "--temperature",
            args.temperature != 0 and not 1e-3 <= args.temperature <= 1e3,
            "0, or from 0.001 to 1000",
        ),
        ("--top-k", args.top_k < 1, "at least 1"),
        ("--top-p", not 0 < args.top_p <= 1, "above 0, at most 1"),
        ("--seed", not 0 <= args.seed <= 2**63 - args.samples, "0 or more, below 2^63"),
    ):
        if bad:
            raise ConfigError(name, f"{getattr(args, name[2:].replace('-', '_'))!r} is not usable", right)
    return args


def prompts_of(args: argparse.Namespace) -> list[str]:
    """The prompts. Raises `UserError` if one is no text, or their file cannot be read."""
    if args.prompts is not None:
        found = prompts_in(args.prompts, prompt_text(args.prompts))
    elif args.prompt_file is not None:
        found = [prompt_text(args.prompt_file)]
    else:
        found = args.prompt or ["\n"]
    for prompt in found:
        if prompt.encode(errors="ignore").decode() != prompt:
            raise ConfigError("--prompt", f"{prompt!r} is not usable", "UTF-8 text")
    return found


def prompts_in(path: str, text: str) -> list[str]:
    """The prompt of each line that is not blank. Raises `DataError`."""
    lines = [
        (number, line)
        for number, line in enumerate(text.replace("\r\n", "\n").split("\n"), 1)
        if line.strip()
    ]
    if not lines:
        raise DataError(path, "has no prompt", "a prompt in each line")
    if not path.endswith((".jsonl", ".ndjson")):
        return [line for _, line in lines]
    found = []
    for number, line in lines:
        try:
            given = read_json(line)
        except (ValueError, RecursionError):
            given = None
        prompt = given.get("prompt") if isinstance(given, dict) else given
        if not isinstance(prompt, str):
            raise DataError(
                path,
                f"line {number} has no prompt",
                'a JSON string, or an object such as {"prompt": "Once upon"}',
            )
        found.append(prompt)
    return found


def prompt_text(path: str) -> str:
    """The text of a file, or of standard input. Raises `DataError`."""
    try:
        if path != "-":
            return read_text(path, MOST_PROMPT)
        data = sys.stdin.buffer.read(MOST_PROMPT + 1)
        if len(data) > MOST_PROMPT:
            raise DataError("-", f"has more than {MOST_PROMPT:,} bytes", "a text that one person has written")
        return data.decode("utf-8")
    except OSError as error:
        raise DataError(
            path, f"cannot be read: {error.strerror}", "a text file, or - for standard input"
        ) from None
    except UnicodeDecodeError:
        raise DataError(path, "is not UTF-8 text", "a text file in UTF-8") from None


def pick_tokenizer(given: str | None, recorded: str | None, vocab_size: int) -> Any:
    """The given tokenizer, or else the run's. Refuses one with which the model cannot have been trained."""
    from megacore.tools.text.tokenizer import check_kind, load_tokenizer

    name = recorded if given is None else given
    if name is None:
        raise ConfigError(
            "--tokenizer", "the run names no tokenizer", "bytes, a sentencepiece .model or a tokenizer.json"
        )
    check_kind(given, recorded)
    right = "the tokenizer that the model was trained with"
    tokenizer = load_tokenizer(name)
    if tokenizer.vocab_size > vocab_size:
        raise ConfigError(
            "--tokenizer", f"{name} has {tokenizer.vocab_size} tokens, and the model {vocab_size}", right
        )
    return tokenizer


def text_config(sections: dict[str, Any], overrides: list[str], device: str, world_size: int) -> Config:
    """The checkpoint's config in the layout of the overrides.

    Raises `ConfigError` if that layout cannot generate text.
    """
    model = sections["model"]
    positions = model.get("max_positions") or sections["train"].get("seq_len")
    raw = {
        "model": model,
        # Batches mean nothing here; these fit any number of ranks, so that a wrong one is refused below, for
        # what it is.
        "train": {
            "seq_len": positions,
            "precision": "fp32",
            "device": device,
            "micro_batch_size": 1,
            "global_batch_size": world_size,
        },
        "data": {"tokenizer": sections["data"].get("tokenizer")},
    }
    config = resolve(raw, overrides, "text", world_size).config
    if config.parallel.data != 1:
        parallel = config.parallel
        context = f" × context {parallel.context}" if parallel.context > 1 else ""
        wrong = (
            f"tensor {parallel.tensor} × pipeline {parallel.pipeline}{context}, and {world_size} "
            "ranks started"
        )
        raise ConfigError(
            "parallel", wrong, f"one text has one data rank: tensor × pipeline × context = {world_size}"
        )
    if config.parallel.sequence:
        raise ConfigError("parallel.sequence", "a single token cannot be split over ranks", "false")
    if config.model.kv_rank is not None and config.parallel.context > 1:
        raise ConfigError(
            "parallel.context", "with latent attention a text is written on one context rank", "1"
        )
    return config


def for_length(config: Config, length: int) -> Config:
    """The config with no more positions than a text of this length needs: tables and caches are made for
    each of `train.seq_len`.

    A class of `model.hf` keeps its own number, from which it may compute frequencies.
    """
    even = 2 * config.parallel.context  # pieces of one length
    positions = -(-length // even) * even
    model = config.model
    if (model.position != "rope" and model.hf is None) or positions >= config.max_positions:
        return config
    sections: dict[str, Any] = {"train": config.train.model_copy(update={"seq_len": positions})}
    if model.hf is None:
        sections["model"] = model.model_copy(update={"max_positions": positions})
    return config.model_copy(update=sections)


class Output:
    """Texts on rank 0's standard output, each with its prompt: as it grows, or whole in a line of JSON.

    With a file in `json_file`, lines of JSON are also written there once all texts are complete; `-` prints
    the lines instead of the texts.
    """

    def __init__(self, place: RankInfo, texts: int, json_file: str | None) -> None:
        self.place, self.texts = place, texts
        self.as_json = json_file == "-"
        self.json_file = None if self.as_json or place.rank != 0 else json_file
        self.lines: list[str] = []
        self.begun = 0
        self.lost: StdoutLost | None = None  # its reader, such as head, has enough
        if isinstance(sys.stdout, io.TextIOWrapper):
            # a terminal need not know every character that a model writes
            sys.stdout.reconfigure(errors="replace")

    def begin(self, prompt: str, seed: int) -> None:
        """Begins a text, whose prompt is printed with its first token: a layer may
        refuse the layout before.
        """
        self.begun += 1
        self.prompt, self.seed, self.text = prompt, seed, ""
        self.due = (f"--- text {self.begun} of {self.texts}\n" if self.texts > 1 else "") + prompt

    def add(self, text: str) -> None:
        """Goes on with it."""
        self.text += text
        if not self.as_json:
            self._print(self.due + text)
            self.due = ""

    def end(self) -> None:
        """Ends it."""
        line = json.dumps({"prompt": self.prompt, "seed": self.seed, "text": self.text}) + "\n"
        self.lines.append(line)
        self._print(line if self.as_json else "\n")

    def write(self) -> None:
        """Write the file of `--json`. Raises `ConfigError`."""
        if self.json_file is None:
            return
        try:
            write_whole(self.json_file, "".join(self.lines))
        except OSError as error:
            wrong = f"cannot write {self.json_file}: {error.strerror}"
            raise ConfigError("--json", wrong, OUTPUT) from None

    def _print(self, text: str) -> None:
        if self.place.rank == 0:
            try:
                print(text, end="", flush=True)
            except StdoutLost as error:
                self.lost = error

    @property
    def over(self) -> bool:
        """Whether nobody needs more. Other ranks count on this one to the end."""
        return self.lost is not None and self.place.world_size == 1


def run(argv: list[str], place: RankInfo) -> int:
    """Generates, as one of the ranks; rank 0 prints the texts.

    Returns the exit status, or raises `UserError`.
    """
    args = parse(argv)

    import torch

    from megacore import checkpoint
    from megacore.checkpoint.weights import DOCUMENTS_BOS, check_weights
    from megacore.distributed.init import joined, own_mistakes
    from megacore.engine.choose import build_stages
    from megacore.tools.checkpoint_weights import choose_weights, load_weights, sections_to_run
    from megacore.tools.choices.settle import settled_alone
    from megacore.tools.crowd import share_cores
    from megacore.tools.diagnosis.guardians import Guardians
    from megacore.tools.machine.device import take_device
    from megacore.tools.text.decoding import Decoder, share_tokens
    from megacore.tools.text.sampling import NonFiniteLogits, Sampler
    from megacore.tools.text.stream import TextStream
    from megacore.tools.text.vocabulary import encode_prompt, prompt_begin

    with own_mistakes():
        reader = checkpoint.Reader(checkpoint.locate(Path(args.checkpoint)))
        choose_weights(reader, args.weights)
        kind = ("cuda" if torch.cuda.is_available() else "cpu") if args.device == "auto" else args.device
        sections = sections_to_run(reader, args.source)
        config = settled_alone(text_config(sections, args.overrides, kind, place.world_size))
        check_weights(reader, config)
        tokenizer = pick_tokenizer(args.tokenizer, config.data.tokenizer, config.model.vocab_size)
        prompts = prompts_of(args) if place.rank == 0 else []
        recorded_bos = reader.state.get(DOCUMENTS_BOS)
        train = sections["data"].get("train")
        begin, assumed = prompt_begin(tokenizer, args.bos, train, recorded_bos)
        if assumed is not None and place.rank == 0:
            print(assumed, file=sys.stderr)
        encoded = [encode_prompt(tokenizer, prompt, begin) for prompt in prompts]
        if not all(encoded):
            raise ConfigError("--prompt", "has no tokens", "at least one character")
        device = take_device(config, place)

    for tokens in encoded:
        if len(tokens) > config.max_positions:
            print(
                f"a prompt of {len(tokens)} tokens: the model sees the last {config.max_positions}",
                file=sys.stderr,
            )
    status = 0
    with joined(config, place, device, Guardians(config, place, device)) as mesh:
        share_cores(config, place.world_size, device)
        [number] = share_tokens([len(prompts)], mesh)
        encoded = [share_tokens(tokens, mesh) for tokens in encoded or [[]] * number]
        prompts = prompts or [""] * number
        config = settled_alone(for_length(config, max(map(len, encoded)) + args.tokens))
        stages = [stage.eval() for stage in build_stages(config, mesh)]
        load_weights(reader, stages)
        decoder, output = (
            Decoder(stages, mesh, config.train.seq_len),
            Output(place, number * args.samples, args.json),
        )
        for (prompt, tokens), seed in product(
            zip(prompts, encoded, strict=True), range(args.seed, args.seed + args.samples)
        ):
            sampler = Sampler(args.temperature, args.top_k, args.top_p, seed, tokenizer.vocab_size)
            stream = TextStream(tokenizer, tokens)
            output.begin(prompt, seed)
            try:
                ends = tokenizer.generation_ends
                for token in decoder.generate(tokens, args.tokens, sampler, ends, begin):
                    output.add(stream.push(token))
                    if output.over:
                        break
            except KeyboardInterrupt as error:
                status = interrupted_status(error)
            except NonFiniteLogits:
                wrong = "its logits are not finite: the run has diverged"
                raise CheckpointError(str(reader.path), wrong, "an earlier checkpoint") from None
            output.add(stream.end())
            output.end()
            if status or output.over:
                break
    output.write()
    if output.lost is not None:
        raise output.lost
    return status


if __name__ == "__main__":
    exit_rank_with(run)
