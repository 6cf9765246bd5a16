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
    warnings = bos_warnings(prefixes, config.data.tokenizer)
    warnings += mixed_bos_warnings([*prefixes, *prefixes_of(config.data.valid)], config.data.tokenizer)
    if not known:
        return warnings
    prefix, largest = max(known.items(), key=lambda item: item[1].vocab_size)
    unused = rows - largest.vocab_size
    if unused > max(2 * PADDING, rows // 10):
        fitting = padded_vocab_size(largest.vocab_size)
        warnings.append(
            f"WARNING: {unused:,} of the {rows:,} rows of model.vocab_size are never used: {prefix} was "
            "prepared with"
            f" {largest.tokenizer}, of {largest.vocab_size:,} tokens (model.vocab_size={fitting}, or "
            "another corpus)"
        )
    own = config.data.tokenizer
    for other, found in known.items():
        if found.vocab_size != largest.vocab_size:
            warnings.append(
                f"WARNING: {other} has a vocabulary of {found.vocab_size:,} tokens, and {prefix} one of "
                f"{largest.vocab_size:,}"
            )
        elif own is not None and (own == "bytes") != (found.tokenizer == "bytes"):
            warnings.append(
                f"WARNING: data.tokenizer is {own}, and {other} was prepared with {found.tokenizer}"
            )
    return warnings


def padded_vocab_size(vocab_size: int) -> int:
    """Return the rows of an embedding for `vocab_size` tokens: the next multiple of `PADDING`."""
    return -(-vocab_size // PADDING) * PADDING


def prefixes_of(spec: Spec | None) -> list[str]:
    """Return the prefixes of the corpora that `data.train` or `data.valid` names."""
    return [spec] if isinstance(spec, str) else [prefix for _, prefix in spec or []]


def bos_warnings(prefixes: list[str], name: str | None) -> list[str]:
    """Return a line for each corpus that lacks the BOS token of its tokenizer without a decision to.

    A corpus whose sidecar tells whether documents begin with it was prepared so on purpose. The others, which
    other programs wrote, are judged by their first token; only they need the tokenizer.
    """
    undecided = without_record(prefixes)
    tokenizer = judging_tokenizer(prefixes, name)
    if tokenizer is None or not tokenizer.begin_of_document:
        return []
    begin = describe(tokenizer, tokenizer.begin_of_document)
    return [
        f"WARNING: documents of {prefix} do not begin with {begin}, which {name} puts before a text (prepare "
        "the corpus again; --bos never keeps it so)"
        for prefix in undecided
        if begins_with_bos(prefix, tokenizer) is False
    ]


def without_record(prefixes: list[str]) -> list[str]:
    """Return the corpora whose sidecars do not tell whether documents begin with a BOS token."""
    undecided = []
    for prefix in prefixes:
        sidecar = None
        with contextlib.suppress(DataError):  # which is reported where the corpus is read
            sidecar = Sidecar.load(prefix)
        if sidecar is None or sidecar.bos is None:
            undecided.append(prefix)
    return undecided


def judging_tokenizer(prefixes: list[str], name: str | None) -> Tokenizer | None:
    """Return the tokenizer called `name` if one of the corpora can only be judged by its first token.

    None also if it cannot be read: training needs neither the tokenizer nor the package that reads it, so no
    such error ends a run.
    """
    if name in (None, "bytes") or not without_record(prefixes):
        return None
    with contextlib.suppress(DataError):
        return load_tokenizer(str(name))
    return None


def begins_with_bos(prefix: str, tokenizer: Tokenizer | None) -> bool | None:
    """Return whether the documents of a corpus begin with the tokenizer's BOS token.

    The sidecar tells. Corpora of other programs have no such record and are judged by their first
    token. None if the corpus cannot be read, if another tokenizer prepared it, or if there is no
    BOS token to look for. Without a `tokenizer` only the sidecar is read.
    """
    begin = () if tokenizer is None else bos_tokens(tokenizer)
    with contextlib.suppress(DataError):
        sidecar = Sidecar.load(prefix)
        if sidecar is not None and sidecar.bos is not None:
            is_other = tokenizer is not None and sidecar.vocab_size != tokenizer.vocab_size
            return None if is_other else sidecar.bos
        if begin:
            tokens = IndexedTokens(prefix)
            first = tokens.read(0, min(len(begin), tokens.num_tokens))
            return tuple(first.tolist()) == begin
    return None


def corpora_begin_with_bos(prefixes: list[str], name: str | None) -> bool | None:
    """Return whether the documents of all corpora begin with a BOS token; None: unknown or mixed."""
    tokenizer = judging_tokenizer(prefixes, name)
    return common([begins_with_bos(prefix, tokenizer) for prefix in prefixes])


def mixed_bos_warnings(
    prefixes: list[str], name: str | None, run: str = "", has_bos: object = None
) -> list[str]:
    """Return a line if documents of some corpora begin with a BOS token and those of others do not.

    The corpora are also compared with a `run`, if it is named; `has_bos` tells whether the documents that it
    was trained on begin with the token.
    """
    tokenizer = judging_tokenizer(prefixes, name)
    answers: dict[str, object] = {prefix: begins_with_bos(prefix, tokenizer) for prefix in prefixes}
    if run:
        answers[f"the training data of {run}"] = has_bos
    begun = [corpus for corpus, answer in answers.items() if answer is True]
    plain = [corpus for corpus, answer in answers.items() if answer is False]
    if not begun or not plain:
        return []
    return [
        f"WARNING: documents of {', '.join(begun)} begin with a BOS token, and those of {', '.join(plain)} "
        "do not (prepare them with the same --bos)"
    ]


def common(answers: list[bool | None]) -> bool | None:
    """Return the answer that all agree on who have one, or None."""
    known = set(answers) - {None}
    return known.pop() if len(known) == 1 else None


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


def prompt_begin(
    tokenizer: Tokenizer, choice: str, train: Spec | None, recorded: object = None
) -> tuple[tuple[int, ...], str | None]:
    """Return the tokens that begin a prompt: with ``auto`` as the documents that the model was trained on.

    `recorded` is what the checkpoint has for `DOCUMENTS_BOS`; otherwise the corpora `train` tell, if they are
    still there. If not, the tokenizer decides, as for an imported model. Also returns a line for the user if
    there were training data and this is only assumed.
    """
    if choice != "auto" or not bos_tokens(tokenizer):
        return chosen_begin(tokenizer, choice), None
    prefixes = prefixes_of(train)
    is_begun = recorded if isinstance(recorded, bool) else None
    if is_begun is None:
        is_begun = common([begins_with_bos(prefix, tokenizer) for prefix in prefixes])
    if is_begun is not None:
        return bos_tokens(tokenizer) if is_begun else (), None
    begin = tokenizer.begin_of_document
    if not prefixes:
        return begin, None
    does = "begins" if begin else "does not begin"
    line = (
        f"WARNING: neither the checkpoint nor {', '.join(prefixes)} tells whether the documents of the run "
        f"begin with {describe(tokenizer, bos_tokens(tokenizer))}: the prompt {does} with it, as a text of "
        f"{tokenizer.name} (--bos always or --bos never decides otherwise)"
    )
    return begin, line


def encode_prompt(tokenizer: Tokenizer, prompt: str, begin: tuple[int, ...]) -> list[int]:
    """Return a prompt's tokens. Words that spell a special token are that token, as in transformers."""
    tokens = tuple(tokenizer.encode(prompt, special_tokens=True).tolist())
    return list(tokens if tokens[: len(begin)] == begin else begin + tokens)
