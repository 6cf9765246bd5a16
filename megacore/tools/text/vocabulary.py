"""Compares a run's vocabulary and tokenizer with those of its corpora, and says how its prompts begin.

(Token ids beyond the vocabulary are rejected elsewhere.)
"""

import contextlib

from megacore.config import Config
from megacore.data.indexed import IndexedTokens
from megacore.data.samples import Spec
from megacore.errors import ConfigError, DataError
from megacore.tools.corpora import Sidecar
from megacore.tools.text.tokenizer import Tokenizer, load_tokenizer

BOS = ("auto", "always", "never")  # values of --bos
PADDING = 64  # rows of the embedding are often rounded up to such multiples, which GPUs multiply faster


def vocabulary_warnings(config: Config) -> list[str]:
    """A line for each thing in which the training corpora, by what `launch/prepare.py` wrote
    of them, do not fit the config.
    """
    rows = config.model.vocab_size
    prefixes = prefixes_of(config.data.train)
    known = {prefix: found for prefix in prefixes if (found := Sidecar.load(prefix)) is not None}
    said = bos_warnings(prefixes, config.data.tokenizer)
    if not known:
        return said
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


def prefixes_of(spec: Spec | None) -> list[str]:
    """Return the prefixes of the corpora that `data.train` or `data.valid` names."""
    return [spec] if isinstance(spec, str) else [prefix for _, prefix in spec or []]


def bos_warnings(prefixes: list[str], name: str | None) -> list[str]:
    """Return a line for each corpus that lacks the BOS token of its tokenizer without a decision to.

    A corpus whose sidecar tells whether documents begin with it was prepared so on purpose. The others, which
    older versions or other programs wrote, are judged by their first token; only they need the tokenizer.
    """
    undecided = []
    for prefix in prefixes:
        known = Sidecar.load(prefix)
        if known is None or known.bos is None:
            undecided.append(prefix)
    if not undecided or name in (None, "bytes"):
        return []

    lines = []
    # Training needs neither the tokenizer nor the package that reads it, so no such error ends a run here.
    with contextlib.suppress(DataError):
        tokenizer = load_tokenizer(str(name))
        begin = tokenizer.begin_of_document
        for prefix in undecided if begin else ():
            if begin_with_bos(prefix, tokenizer) is False:
                lines.append(
                    f"WARNING: documents of {prefix} do not begin with {describe(tokenizer, begin)}, which "
                    f"{name} puts before a text (prepare the corpus again; --bos never keeps it so)"
                )
    return lines


def begin_with_bos(prefix: str, tokenizer: Tokenizer) -> bool | None:
    """Return whether the documents of a corpus begin with the tokenizer's BOS token.

    The sidecar tells. Corpora of earlier versions and of other programs have no such record and are judged by
    their first token. None if the corpus cannot be read, if another tokenizer prepared it, or if there is no
    BOS token to look for.
    """
    begin = bos_tokens(tokenizer)
    with contextlib.suppress(DataError):
        sidecar = Sidecar.load(prefix)
        if sidecar is not None and sidecar.bos is not None:
            return sidecar.bos if sidecar.vocab_size == tokenizer.vocab_size else None
        if begin:
            tokens = IndexedTokens(prefix)
            first = tokens.read(0, min(len(begin), tokens.num_tokens))
            return tuple(first.tolist()) == begin
    return None


def describe(tokenizer: Tokenizer, begin: tuple[int, ...]) -> str:
    """Return the tokens that begin a text in words, such as `token 1 <s>`."""
    if len(begin) > 1:
        return f"tokens {', '.join(map(str, begin))}"
    text = tokenizer.chat_tokens["bos_token"] if begin[0] == tokenizer.bos else ""
    return f"token {begin[0]} {text}".strip()


def bos_tokens(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the tokens that begin a text that has a BOS token; none if the tokenizer has no such token."""
    if tokenizer.begin_of_document or tokenizer.bos is None:
        return tokenizer.begin_of_document
    return (tokenizer.bos,)


def chosen_begin(tokenizer: Tokenizer, choice: str, option: str = "--bos") -> tuple[int, ...]:
    """Return the tokens that begin a text for a value of ``--bos``. Raises `ConfigError` without a token."""
    if choice == "never":
        return ()
    if choice == "auto":
        return tokenizer.begin_of_document
    begin = bos_tokens(tokenizer)
    if not begin:
        wrong = "no file of the tokenizer names a BOS token"
        raise ConfigError(option, wrong, "auto or never" if option == "--bos" else "without it")
    return begin


def prompt_begin(tokenizer: Tokenizer, choice: str, train: Spec | None) -> tuple[int, ...]:
    """Return the tokens that begin a prompt: with ``auto`` as the documents that the model was trained on.

    Where the training data do not tell, the tokenizer decides, as for an imported model.
    """
    if choice == "auto":
        for prefix in prefixes_of(train):
            is_begun = begin_with_bos(prefix, tokenizer)
            if is_begun is not None:
                return bos_tokens(tokenizer) if is_begun else ()
    return chosen_begin(tokenizer, choice)


def encode_prompt(tokenizer: Tokenizer, prompt: str, begin: tuple[int, ...]) -> list[int]:
    """Return a prompt's tokens. Words that spell a special token are that token, as in transformers."""
    tokens = tuple(tokenizer.encode(prompt, special_tokens=True).tolist())
    return list(tokens if tokens[: len(begin)] == begin else begin + tokens)
