"""Writes text with a trained model, from a checkpoint of any layout, in one process."""

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that a checkout runs without being installed

from megacore.cli import Parser, exit_status
from megacore.errors import CheckpointError, ConfigError

EXAMPLE = "python launch/generate.py --checkpoint runs/quickstart --prompt 'def main('"


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = Parser(EXAMPLE, __doc__)
    parser.add_argument("--checkpoint", required=True, help="a run's folder, its checkpoints folder, or one checkpoint")
    parser.add_argument("--prompt", default="\n", help="the text to go on from")
    parser.add_argument("--tokens", type=int, default=200, help="how many tokens to write (default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 always takes the likeliest token (default: %(default)s)")
    parser.add_argument("--top-k", type=int, default=50, help="choose among this many likeliest tokens (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the choice (default: %(default)s)")
    parser.add_argument("--tokenizer", help="bytes or a sentencepiece .model (default: the run's data.tokenizer)")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="cpu or cuda (default: %(default)s)")
    args = parser.parse_args(argv)
    for name, bad, right in (
        ("--tokens", args.tokens < 1, "at least 1"),
        ("--temperature", args.temperature != 0 and not 1e-3 <= args.temperature <= 1e3, "0, or from 0.001 to 1000"),
        ("--top-k", args.top_k < 1, "at least 1"),
        ("--seed", not 0 <= args.seed < 2**63, "0 or more, below 2^63"),
        ("--prompt", args.prompt.encode(errors="ignore").decode() != args.prompt, "UTF-8 text"),
    ):
        if bad:
            raise ConfigError(name, f"{getattr(args, name[2:].replace('-', '_'))!r} is not usable", right)
    return args


def generate(args: argparse.Namespace) -> str:
    """`--prompt`, continued."""
    import torch

    from megacore import checkpoint
    from megacore.config import Config
    from megacore.data.tokenizer import load_tokenizer
    from megacore.model.gpt import whole_model
    from megacore.tensor_parallel.shard import shard_of

    if args.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device", "cuda was asked for and PyTorch sees no GPU", "cpu")
    path = checkpoint.locate(Path(args.checkpoint))
    reader = checkpoint.Reader(path)
    if "config" not in reader.state:
        raise CheckpointError(str(path), "does not hold the run's config", "a checkpoint written by launch/pretrain.py")
    config = Config.model_validate_json(json.dumps(reader.state["config"]))
    # The same model on one device, in fp32: some CPUs are very slow in anything less.
    train = config.train.model_copy(update={"precision": "fp32", "compile": False, "recompute": "none"})
    config = config.model_copy(update={"train": train})
    name = args.tokenizer or config.data.tokenizer
    if name is None:
        raise ConfigError("--tokenizer", "the run names no tokenizer", "bytes or a sentencepiece .model")
    tokenizer = load_tokenizer(name)

    model = whole_model(config, args.device).eval()
    for parameter_name, parameter in model.named_parameters():
        reader.read_into(f"model/{parameter_name}", shard_of(parameter), parameter.data)
    generator = torch.Generator().manual_seed(args.seed)
    tokens = [int(token) for token in tokenizer.encode(args.prompt)]
    if not tokens:
        raise ConfigError("--prompt", "has no tokens", "at least one character")
    with torch.no_grad():
        for _ in range(args.tokens):
            context = torch.tensor([tokens[-config.train.seq_len :]], device=args.device)
            logits = model.logits(model(context))[-1].cpu()[: tokenizer.vocab_size]
            tokens.append(choose(logits, args.temperature, args.top_k, generator))
            if tokens[-1] == tokenizer.end_of_document:
                break
    return tokenizer.decode(tokens)


def choose(logits, temperature: float, top_k: int, generator) -> int:
    """One token from logits ``[vocab]``."""
    if temperature == 0.0:
        return int(logits.argmax())
    values, indices = logits.topk(min(top_k, len(logits)))
    return int(indices[(values / temperature).softmax(-1).multinomial(1, generator=generator)])


def run(argv: list[str]) -> None:
    """Prints the text; raises `UserError`."""
    print(generate(parse(argv)))


if __name__ == "__main__":
    sys.exit(exit_status(run))
