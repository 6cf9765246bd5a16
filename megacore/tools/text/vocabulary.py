"""Says where a run's vocabulary and tokenizer are not those of its corpora. (Token ids beyond the
vocabulary are refused elsewhere.)
"""

from megacore.config import Config
from megacore.tools.corpora import Sidecar

PADDING = 64  # rows of the embedding are often rounded up to such multiples, which GPUs multiply faster


def vocabulary_warnings(config: Config) -> list[str]:
    """A line for each thing in which the training corpora, by what `launch/prepare.py` wrote
    of them, do not fit the config.
    """
    train, rows = config.data.train or [], config.model.vocab_size
    prefixes = [train] if isinstance(train, str) else [prefix for _, prefix in train]
    known = {prefix: found for prefix in prefixes if (found := Sidecar.load(prefix)) is not None}
    if not known:
        return []
    said = []
    prefix, largest = max(known.items(), key=lambda item: item[1].vocab_size)
    unused = rows - largest.vocab_size
    if unused > max(2 * PADDING, rows // 10):
        fitting = -(-largest.vocab_size // PADDING) * PADDING
        said.append(
            f"WARNING: {unused:,} of the {rows:,} rows of model.vocab_size are never used: {prefix} was "
            "prepared with"
            f" {largest.tokenizer}, of {largest.vocab_size:,} tokens (model.vocab_size={fitting}, or "
            "another corpus)"
        )
    own = config.data.tokenizer
    for other, found in known.items():
        if found.vocab_size != largest.vocab_size:
            said.append(
                f"WARNING: {other} has a vocabulary of {found.vocab_size:,} tokens, and {prefix} one of "
                f"{largest.vocab_size:,}"
            )
        elif own is not None and (own == "bytes") != (found.tokenizer == "bytes"):
            said.append(f"WARNING: data.tokenizer is {own}, and {other} was prepared with {found.tokenizer}")
    return said
