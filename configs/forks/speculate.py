"""Writes text with a model of `multi_token.py`: it guesses one token more in each pass, and the next
pass says whether it was right.

The text is the one that the likeliest tokens make, with and without guesses (Leviathan et al. 2023, for a
temperature of 0). What was guessed right saves a pass.
"""

import os
import sys

# so that a checkout runs without being installed
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.realpath(__file__)))))

import megacore.tools.interrupt  # noqa: F401  (first: Ctrl-C during the other imports prints no traceback)

# isort: split
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from megacore.errors import CheckpointError, ConfigError
from megacore.model.batch import Microbatch
from megacore.model.stage import Stage
from megacore.tools.cli import Parser, add_checkpoint, count, exit_with
from megacore.tools.text.cache import KeyValueCache

SOURCE = str(Path(__file__).with_name("multi_token.py"))
EXAMPLE = "python configs/forks/speculate.py --checkpoint runs/multi_token --prompt 'def main('"


@dataclass
class Written:
    """A text, and what it took."""

    tokens: list[int] = field(default_factory=list)
    passes: int = 0
    guessed: int = 0
    right: int = 0


@torch.no_grad()
def write(stage: Stage, prompt: Sequence[int], least: int) -> Written:
    """At least `least` tokens behind a prompt, by a whole model on one device;
    both must fit into its positions.
    """
    positions = stage.config.max_positions
    cache, of_guesses = KeyValueCache(1, positions), KeyValueCache(1, positions)
    ahead: Any = next(layer for layer in stage.inner if hasattr(layer, "guess"))
    found, unread, guess = Written(), list(prompt), False
    while len(found.tokens) < least and cache.length + len(unread) < positions:
        flow, _ = stage({}, Microbatch(torch.tensor([unread], device=stage.device)), cache)
        found.passes += 1
        likeliest = stage.logits(flow["hidden"]).argmax(1).tolist()
        if guess:
            found.guessed += 1
            if likeliest[-2] == unread[-1]:
                found.right += 1
                found.tokens.append(unread[-1])
            else:  # the model has read a token that is not in the text
                unread.pop()
                cache.length -= 1
        following = likeliest[len(unread) - 1]
        found.tokens.append(following)
        read, told = (
            torch.tensor([tokens], device=stage.device) for tokens in (unread, [*unread[1:], following])
        )
        x = ahead.guess(flow["hidden"][: len(unread)], told, stage.context(Microbatch(read), of_guesses))
        of_guesses.advance(len(unread))
        unread, guess = [following, int(ahead.logits(x[-1:]).argmax())], True
    return found


def main(argv: list[str]) -> None:
    """Prints the text, and how many guesses were right. Raises `UserError`."""
    from megacore import checkpoint
    from megacore.checkpoint.weights import recorded_sections
    from megacore.launch.generate import pick_tokenizer, text_config
    from megacore.model.stage import whole_model
    from megacore.tools.checkpoint_weights import load_weights, sections_to_run
    from megacore.tools.choices.settle import settled_alone

    parser = Parser(
        "Generate text with a model that guesses one token more in each pass.",
        example=EXAMPLE,
        page="docs/forks.md",
    )
    add_checkpoint(parser)
    parser.add_argument(
        "--prompt", default="\n", metavar="TEXT", help="text to continue (default: a newline)"
    )
    parser.add_argument("--tokens", type=count, default=100, metavar="N", help="tokens to generate")
    args = parser.parse_args(argv)
    reader = checkpoint.Reader(checkpoint.locate(Path(args.checkpoint)))
    if recorded_sections(reader)["model"].get("source") is None:
        raise CheckpointError(
            str(reader.path), "its model has no layer that guesses", "a run of configs/forks/multi_token.json"
        )
    config = settled_alone(text_config(sections_to_run(reader, SOURCE), [], "cpu", 1))
    tokenizer = pick_tokenizer(None, config.data.tokenizer, config.model.vocab_size)
    prompt = [int(token) for token in tokenizer.encode(args.prompt)]
    if not 0 < len(prompt) < config.max_positions:
        wrong = f"has {len(prompt)} tokens, and the model {config.max_positions} positions"
        raise ConfigError("--prompt", wrong, f"1 to {config.max_positions - 1} tokens")
    stage = whole_model(config).eval()
    load_weights(reader, [stage])
    found = write(stage, prompt, args.tokens)
    print(args.prompt + tokenizer.decode(found.tokens))
    print(
        f"{len(found.tokens)} tokens in {found.passes} passes; {found.right} of {found.guessed} guesses "
        "were right",
        file=sys.stderr,
    )


if __name__ == "__main__":
    exit_with(main)
