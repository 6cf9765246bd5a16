"""What is known of a corpus beside its tokens, and what is checked of it before a run reads it."""

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from pydantic import TypeAdapter, ValidationError

from megacore.config import Config
from megacore.config.schema import MASK
from megacore.data.indexed import PREPARE_AGAIN, SCAN_BLOCK, SCAN_BYTES, IndexedTokens
from megacore.data.samples import SampleStream, training_stream
from megacore.errors import DataError
from megacore.files import open_plain, read_json, read_text, write_whole

DIGEST = "digest"  # a key of the file besides those of `Sidecar`
DIGEST_BLOCK = 1 << 15
DIGEST_BLOCKS = 8


@dataclass(frozen=True)
class Sidecar:
    """What ``PREFIX.json``, which `launch/prepare.py` writes and which is
    optional, says about a prepared corpus.

    `unigram_entropy`, in nats a token, is the loss of a model that knows only how often each token occurs.
    Training must beat it first. For a training split it is the entropy of the split's own frequencies. For a
    validation split it is the cross entropy of that split under the *training* split's frequencies with
    add-one smoothing, so that it can be compared with a validation loss.
    """

    tokens: int
    documents: int
    max_token: int
    tokenizer: str  # `bytes`, or the path of a sentencepiece model
    vocab_size: int
    unigram_entropy: float
    text_bytes: int  # of the UTF-8 text before tokenization
    # tokens that are, where ``PREFIX.mask.bin`` says which; the entropy is of them
    learned: int | None = None
    # whether every document begins with the tokenizer's BOS token; None: it was not recorded
    bos: bool | None = None
    # the bytes that the tokens spell, which are not those of the text where a tokenizer drops or adds spaces
    spelled_bytes: int | None = None

    def save(self, prefix: str) -> None:
        """Write ``PREFIX.json`` next to the files of the corpus, which have to be there."""
        content = asdict(self) | {DIGEST: corpus_digest(prefix)}
        write_whole(f"{prefix}.json", json.dumps(content, indent=2) + "\n")

    @classmethod
    def load(cls, prefix: str) -> "Sidecar | None":
        """Read the sidecar of a corpus.

        None if there is none, or if its digest is not that of the corpus. The files' times do not matter,
        because a copy of a folder has new ones.
        """
        path = Path(f"{prefix}.json")
        if not path.exists() or not os.path.exists(f"{prefix}.bin"):
            return None
        try:
            text = read_text(path)
            sidecar = TypeAdapter(cls).validate_json(text)
            digest = read_json(text).get(DIGEST)
        except OSError as error:
            raise DataError(
                str(path), f"cannot be read: {error.strerror}", "delete it, or prepare the corpus again"
            ) from None
        except ValidationError as error:
            first = error.errors()[0]
            wrong = f"{'.'.join(map(str, first['loc'])) or 'whole file'}: {first['msg']}"
            raise DataError(str(path), wrong, "delete it, or prepare the corpus again") from None
        except ValueError as error:
            raise DataError(str(path), f"{error}", "delete it, or prepare the corpus again") from None
        return sidecar if digest == corpus_digest(prefix) else None


def corpus_digest(prefix: str) -> str:
    """Return the SHA-256 of the sizes of a corpus's two files and of blocks that are evenly spread in them.

    A corpus that was prepared again differs nearly everywhere. So few blocks are enough, which matters on a
    shared file system, because every rank reads them before it starts.
    """
    digest = hashlib.sha256()
    for path in (f"{prefix}.bin", f"{prefix}.idx"):
        try:
            with open_plain(path) as file:
                size = os.fstat(file.fileno()).st_size
                digest.update(size.to_bytes(8, "little"))
                last_start = max(0, size - DIGEST_BLOCK)
                for block in range(DIGEST_BLOCKS):
                    file.seek(last_start * block // (DIGEST_BLOCKS - 1))
                    digest.update(file.read(DIGEST_BLOCK))
        except OSError as error:
            raise DataError(path, f"cannot be read: {error.strerror}", PREPARE_AGAIN) from None
    return digest.hexdigest()


def checked_stream(config: Config, scan: bool = True) -> SampleStream:
    """The stream that `config` trains on, whose corpora are checked; `scan` as in `check_corpora`."""
    stream = training_stream(config)
    check_corpora(stream.corpora, config.model.vocab_size, scan)
    return stream


def check_corpora(corpora: Sequence[IndexedTokens], vocab_size: int, scan: bool = True) -> None:
    """Refuses corpora of which nothing is learned, or whose mask is gone.

    With `scan` it also reads their indices, for disorder, and them, for tokens beyond the vocabulary.
    """
    for tokens in corpora:
        tokens.check_learned()
        if (
            not tokens.masked
            and (known := Sidecar.load(tokens.prefix)) is not None
            and known.learned is not None
        ):
            wrong = f"is missing, and {tokens.prefix}.json says that only {known.learned} tokens are learned"
            raise DataError(
                tokens.prefix + MASK, wrong, "the file that launch/prepare.py --chat wrote beside them"
            )
    for tokens in corpora if scan else ():
        tokens.check_index()
        check_vocabulary(tokens, vocab_size)


def check_vocabulary(tokens: IndexedTokens, vocab_size: int) -> None:
    """Refuses a corpus with token ids that a model of `vocab_size` does not have.

    The sidecar knows the largest id. Without one, a dtype that holds no larger id is enough. Otherwise the
    tokens are read: all up to 256 MiB, and of a larger corpus as many in evenly spread blocks.

    Raises:
        DataError: with the largest id found.
    """
    sidecar = Sidecar.load(tokens.prefix)
    if sidecar is not None:
        largest = sidecar.max_token
    elif np.iinfo(tokens.dtype.name).max < vocab_size:
        return
    else:
        blocks = -(-tokens.num_tokens * tokens.dtype.itemsize // SCAN_BLOCK)
        length = SCAN_BLOCK // tokens.dtype.itemsize
        chosen = np.linspace(0, blocks - 1, num=min(blocks, SCAN_BYTES // SCAN_BLOCK), dtype=np.int64)
        starts = [int(block) * length for block in chosen]
        largest = max(
            int(tokens.read(start, min(length, tokens.num_tokens - start)).max()) for start in starts
        )
    if largest >= vocab_size:
        right = f"model.vocab_size at least {largest + 1}, or the corpus prepared with a smaller vocabulary"
        raise DataError(
            f"{tokens.prefix}.bin", f"holds token id {largest}, beyond a vocabulary of {vocab_size}", right
        )
