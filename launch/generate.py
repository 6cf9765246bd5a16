"""Writes text with a trained or imported model, from a checkpoint of any layout."""

import argparse
import io
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that a checkout runs without being installed

from megacore.config import Config
from megacore.config.load import resolve
from megacore.distributed.rank_info import RankInfo
from megacore.errors import ConfigError, DataError
from megacore.files import read_text
from megacore.tools.cli import INTERRUPTED, Parser, StdoutLost, count, exit_rank_with

EXAMPLE = "python launch/generate.py --checkpoint runs/quickstart --prompt 'def main('"
MORE = """A model too large for one device is spread over several, like a run: overrides name the layout, a launcher starts the ranks.
  torchrun --nproc-per-node 4 launch/generate.py --checkpoint runs/gpt_7b --device cuda parallel.tensor=2 parallel.pipeline=2
Context ranks divide a long prompt, and what is kept of it: parallel.context=2.
The same seed writes the same text in every layout. It computes in fp32, unless train.precision=bf16 says otherwise.
If a text grows longer than the model's positions (model.max_positions), the model reads its last half again and goes on."""

MOST_PROMPT = 64 << 20  # bytes


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = Parser(EXAMPLE, f"{__doc__}\n\n{MORE}", ranks=True)
    parser.add_argument("--checkpoint", required=True, help="a run's folder, its checkpoints folder, or one checkpoint")
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument("--prompt", default="\n", help="the text to go on from (default: a newline)")
    prompt.add_argument("--prompt-file", metavar="FILE", help="a file with that text; - is standard input")
    parser.add_argument("--tokens", type=count, default=200, help="how many tokens to write (default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 always takes the likeliest token (default: %(default)s)")
    parser.add_argument("--top-k", type=int, default=50, help="choose among this many likeliest tokens (default: %(default)s)")
    parser.add_argument(
        "--top-p", type=float, default=1.0, help="of these, only the likeliest that together have this probability (default: 1)"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the random choice (default: %(default)s)")
    parser.add_argument("--tokenizer", help="bytes, a sentencepiece .model or a tokenizer.json (default: the run's data.tokenizer)")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="cpu or cuda (default: %(default)s)")
    parser.add_argument("--source", metavar="FILE", help="executes this file, if the model is one of your own (model.source)")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="of the run's config, such as parallel.tensor=2")
    args = parser.parse_intermixed_args(argv)
    for name, bad, right in (
        ("--temperature", args.temperature != 0 and not 1e-3 <= args.temperature <= 1e3, "0, or from 0.001 to 1000"),
        ("--top-k", args.top_k < 1, "at least 1"),
        ("--top-p", not 0 < args.top_p <= 1, "above 0, at most 1"),
        ("--seed", not 0 <= args.seed < 2**63, "0 or more, below 2^63"),
        ("--prompt", args.prompt.encode(errors="ignore").decode() != args.prompt, "UTF-8 text"),
    ):
        if bad:
            raise ConfigError(name, f"{getattr(args, name[2:].replace('-', '_'))!r} is not usable", right)
    return args


def read_prompt(args: argparse.Namespace) -> str:
    """The prompt. Raises `DataError` if its file cannot be read."""
    if args.prompt_file is None:
        return args.prompt
    try:
        if args.prompt_file != "-":
            return read_text(args.prompt_file, MOST_PROMPT)
        data = sys.stdin.buffer.read(MOST_PROMPT + 1)
        if len(data) > MOST_PROMPT:
            raise DataError("-", f"has more than {MOST_PROMPT:,} bytes", "a text that one person has written")
        return data.decode("utf-8")
    except OSError as error:
        raise DataError(args.prompt_file, f"cannot be read: {error.strerror}", "a text file, or - for standard input") from None
    except UnicodeDecodeError:
        raise DataError(args.prompt_file, "is not UTF-8 text", "a text file in UTF-8") from None


def pick_tokenizer(given: str | None, recorded: str | None, vocab_size: int) -> Any:
    """The given tokenizer, or else the run's. Refuses one with which the model cannot have been trained."""
    from megacore.tools.text.tokenizer import check_kind, load_tokenizer

    name = recorded if given is None else given
    if name is None:
        raise ConfigError("--tokenizer", "the run names no tokenizer", "bytes, a sentencepiece .model or a tokenizer.json")
    check_kind(given, recorded)
    right = "the tokenizer that the model was trained with"
    tokenizer = load_tokenizer(name)
    if tokenizer.vocab_size > vocab_size:
        raise ConfigError("--tokenizer", f"{name} has {tokenizer.vocab_size} tokens, and the model {vocab_size}", right)
    return tokenizer


def text_config(sections: dict[str, Any], overrides: list[str], device: str, world_size: int) -> Config:
    """The checkpoint's config in the layout of the overrides. Raises `ConfigError` if that layout cannot generate text."""
    model = sections["model"]
    positions = model.get("max_positions") or sections["train"].get("seq_len")
    raw = {
        "model": model,
        # Batches mean nothing here; these fit any number of ranks, so that a wrong one is refused below, for what it is.
        "train": {"seq_len": positions, "precision": "fp32", "device": device, "micro_batch_size": 1, "global_batch_size": world_size},
        "data": {"tokenizer": sections["data"].get("tokenizer")},
    }
    config = resolve(raw, overrides, "text", world_size).config
    if config.parallel.data != 1:
        parallel = config.parallel
        context = f" × context {parallel.context}" if parallel.context > 1 else ""
        wrong = f"tensor {parallel.tensor} × pipeline {parallel.pipeline}{context}, and {world_size} ranks started"
        raise ConfigError("parallel", wrong, f"one text has one data rank: tensor × pipeline × context = {world_size}")
    if config.parallel.sequence:
        raise ConfigError("parallel.sequence", "a single token cannot be split over ranks", "false")
    return config


def for_length(config: Config, length: int) -> Config:
    """The config with no more positions than a text of this length needs: tables and caches are made for each."""
    even = 2 * config.parallel.context  # pieces of one length
    positions = -(-length // even) * even
    if config.model.position != "rope" or positions >= config.max_positions:
        return config
    model, train = config.model, config.train
    sizes = {"model": model.model_copy(update={"max_positions": positions}), "train": train.model_copy(update={"seq_len": positions})}
    return config.model_copy(update=sizes)


def run(argv: list[str], place: RankInfo) -> int:
    """Generates, as one of the ranks; rank 0 prints the text. Returns the exit status, or raises `UserError`."""
    args = parse(argv)

    from megacore import checkpoint
    from megacore.checkpoint.weights import check_weights
    from megacore.distributed.init import joined, own_mistakes
    from megacore.distributed.mesh import pick_device
    from megacore.engine.choose import build_stages
    from megacore.model.decoding import Decoder, share_tokens
    from megacore.model.sampling import Sampler
    from megacore.tools.checkpoint_weights import load_weights, sections_to_run
    from megacore.tools.choices.settle import settled_alone
    from megacore.tools.crowd import share_cores
    from megacore.tools.diagnosis.guardians import Guardians
    from megacore.tools.text.stream import TextStream

    with own_mistakes():
        reader = checkpoint.Reader(checkpoint.locate(Path(args.checkpoint)))
        config = settled_alone(text_config(sections_to_run(reader, args.source), args.overrides, args.device, place.world_size))
        check_weights(reader, config)
        tokenizer = pick_tokenizer(args.tokenizer, config.data.tokenizer, config.model.vocab_size)
        prompt = read_prompt(args) if place.rank == 0 else ""
        tokens = [int(token) for token in tokenizer.encode(prompt)]
        if place.rank == 0 and not tokens:
            raise ConfigError("--prompt", "has no tokens", "at least one character")
        device = pick_device(config, place)

    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal need not know every character that a model writes
    lost: StdoutLost | None = None  # the reader, such as head, has enough

    def say(text: str) -> None:
        nonlocal lost
        if place.rank == 0:
            try:
                print(text, end="", flush=True)
            except StdoutLost as error:
                lost = error

    if len(tokens) > config.max_positions:
        print(f"a prompt of {len(tokens)} tokens: the model sees the last {config.max_positions}", file=sys.stderr)
    status = 0
    with joined(config, place, device, Guardians(config, place, device)) as mesh:
        share_cores(config, place.world_size, device)
        tokens = share_tokens(tokens, mesh)
        config = settled_alone(for_length(config, len(tokens) + args.tokens))
        stages = [stage.eval() for stage in build_stages(config, mesh)]
        load_weights(reader, stages)
        sampler = Sampler(args.temperature, args.top_k, args.top_p, args.seed, tokenizer.vocab_size)
        text = TextStream(tokenizer)
        say(prompt)
        try:
            for token in Decoder(stages, mesh).generate(tokens, args.tokens, sampler, tokenizer.end_of_document):
                say(text.push(token))
                if lost is not None and place.world_size == 1:  # other ranks count on this one to the end
                    break
        except KeyboardInterrupt:
            status = INTERRUPTED
        say(text.end() + "\n")
    if lost is not None:
        raise lost
    return status


if __name__ == "__main__":
    exit_rank_with(run)
