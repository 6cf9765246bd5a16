"""The training or the validation tokens of a preparation, while they are written, and
what is said of them afterwards.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from megacore.errors import ConfigError, DataError
from megacore.tools.corpora import Sidecar
from megacore.tools.prepare.indexed_writer import IndexedWriter

# what a note counts: its key is one of these kinds, a space, and the name of a key or of a text
UNUSED, IGNORED, UNWRITTEN, SPELLED_END = "unused", "ignored", "unwritten", "spelled-end"


def notes_of(notes: Counter[str], kind: str) -> dict[str, int]:
    """Return the notes of one kind: names, and how often each was met."""
    return {
        note.removeprefix(f"{kind} "): count
        for note, count in sorted(notes.items())
        if note.startswith(f"{kind} ")
    }


class Tokenized(NamedTuple):
    """The tokens of a document, or of a part of it."""

    tokens: np.ndarray  # [tokens]
    learned: np.ndarray | None  # bool, [tokens]; None: all
    text_bytes: int
    notes: dict[str, int]  # what was not used, and how often (`notes_of`)


@dataclass
class Encoded:
    """A task's part of one split: its sequences, which of them end a document, and
    the bytes of text they came from.
    """

    sequences: list[np.ndarray] = field(default_factory=list)
    learned: list[np.ndarray | None] = field(default_factory=list)  # which tokens of each, bool; None: all
    ends: list[bool] = field(default_factory=list)
    text_bytes: int = 0
    notes: Counter[str] = field(default_factory=Counter)  # what of conversations was not used


class Split:
    """One of the two outputs, while it is written."""

    def __init__(self, writer: IndexedWriter, vocab_size: int) -> None:
        self.writer = writer
        self.counts = np.zeros(vocab_size, dtype=np.int64)  # how often each token id is learned
        self.text_bytes = self.max_token = 0
        self.notes: Counter[str] = Counter()

    def add(self, encoded: Encoded) -> None:
        """Appends a task's sequences."""
        self.text_bytes += encoded.text_bytes
        self.notes.update(encoded.notes)
        for tokens, learned, ends in zip(encoded.sequences, encoded.learned, encoded.ends, strict=True):
            self.writer.write(tokens, learned)
            if ends:
                self.writer.end_document()
        if encoded.sequences:
            masks = [each for each in encoded.learned if each is not None]
            self._count(np.concatenate(encoded.sequences), np.concatenate(masks) if masks else None)

    def _count(self, tokens: np.ndarray, learned: np.ndarray | None) -> None:
        self.counts += np.bincount(tokens if learned is None else tokens[learned], minlength=len(self.counts))
        self.max_token = max(self.max_token, int(tokens.max(initial=0)))

    def commit(self) -> dict[str, Any]:
        """Put what was added on the disk, and return what `resume` needs to continue from here."""
        return self.writer.commit() | {"text_bytes": self.text_bytes, "notes": self.notes}

    def resume(self, state: dict[str, Any]) -> None:
        """Continue from a `commit`; the tokens are counted again. Raises `OSError` if it cannot be."""
        self.writer.resume(state)
        self.text_bytes, self.notes = state["text_bytes"], Counter(state["notes"])
        for tokens, learned in self.writer.read():
            self._count(tokens, learned)


def refuse_empty(splits: list[Split]) -> None:
    """Raises an error that says what to change if a split got no text."""
    for split in splits:
        if split.writer.num_tokens == 0:
            which = "validation" if split is not splits[0] else "training"
            if len(splits) == 1:
                raise DataError(split.writer.prefix, "no document has any text", "at least one character")
            right = "a fraction nearer to one half, or more documents"
            raise ConfigError("--valid-fraction", f"no document falls to the {which} split", right)


def sidecar(split: Split, train: Split, tokenizer: str) -> Sidecar:
    """The sidecar of a split that was written."""
    return Sidecar(
        tokens=split.writer.num_tokens,
        documents=split.writer.num_documents,
        max_token=split.max_token,
        tokenizer=tokenizer,
        vocab_size=len(split.counts),
        unigram_entropy=cross_entropy(split.counts, train.counts + (split is not train)),
        text_bytes=split.text_bytes,
        learned=int(split.counts.sum()) if split.writer.masked else None,
    )


def cross_entropy(counts: np.ndarray, model: np.ndarray) -> float:
    """The loss, in nats a token, on tokens with `counts` ``[vocab]`` of a model that predicts
    frequencies `model` ``[vocab]``.
    """
    seen = counts > 0
    return float(-(counts[seen] * np.log(model[seen] / model.sum())).sum() / counts.sum())
