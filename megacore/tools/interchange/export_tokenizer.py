"""Writes the tokenizer of an exported model, so that transformers' AutoTokenizer gives
the ids of the model's training.
"""

import codecs
import random
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from megacore.checkpoint.weights import SPECIAL_TOKENS
from megacore.errors import CheckpointError, ConfigError
from megacore.files import read_plain, read_text
from megacore.tools.interchange.folder import CONFIG, WHOLE, read_json, refuse_foreign, write_json
from megacore.tools.text.tokenizer import Tokenizer, load_tokenizer

SENTENCEPIECE = "tokenizer.model"
GENERATION = "generation_config.json"
FAST = ("tokenizer.json", "tokenizer_config.json")
PROBES = 2000  # texts that both tokenizers must encode alike


@dataclass(frozen=True)
class Written:
    """A line for the user about the tokenizer, and the special tokens' ids for the model's config."""

    finding: str
    token_ids: dict[str, int] = field(default_factory=dict)


def copy_tokenizer(source: Path, target: Path) -> bool:
    """Copy the tokenizer's files and generation_config.json from one model folder to another.

    Returns whether there were any files of a tokenizer.

    Raises:
        UserError: one of them is not what its name says, or `source` has links to files elsewhere. Nothing is
            copied then.
    """
    if not source.is_dir():
        return False
    refuse_foreign(source)
    found = [source / name for name in FILES if (source / name).is_file()]
    for file in found:
        try:
            FILES[file.name](file)
        except (OSError, UnicodeError) as error:
            raise CheckpointError(str(file), f"is no text: {error}", WHOLE) from error
    for file in found:
        # transformers takes a byte order mark for a part of the text
        content = read_plain(file).removeprefix(codecs.BOM_UTF8)
        (target / file.name).write_bytes(content)
    return any(file.name != GENERATION for file in found)


def check_fast(file: Path) -> None:
    """Refuses what is no tokenizer.json; as far as can be told where the package
    tokenizers is not installed.
    """
    if not isinstance(read_json(file).get("model"), dict):
        raise CheckpointError(
            str(file), "holds no model of a tokenizer", "a tokenizer.json as transformers writes it"
        )
    if find_spec("tokenizers") is not None:
        load_tokenizer(str(file))


def check_ids(file: Path) -> None:
    """Refuses what does not give tokens their ids."""
    if not all(type(number) is int for number in read_json(file).values()):
        raise CheckpointError(
            str(file), "holds something else than the ids of tokens", "an object of tokens and whole numbers"
        )


def check_merges(file: Path) -> None:
    """Refuses what is no list of pairs, one a line (its heading is `#version:` and a number)."""
    pairs = [line.split(" ") for line in read_text(file).split("\n") if line.strip()]
    if not all(len(pair) == 2 and all(pair) for pair in pairs):
        raise CheckpointError(
            str(file), "is no list of merges", "two pieces a line, with a space between them"
        )


def check_template(file: Path) -> None:
    """Refuses what does not write out `messages`."""
    if not re.search(r"\{[{%][^}]*\bmessages\b", read_text(file)):
        raise CheckpointError(str(file), "is no template of a chat", "one that goes through `messages`")


# of a tokenizer, each with what refuses a file that is something else
FILES: dict[str, Callable[[Path], object]] = {
    SENTENCEPIECE: lambda file: load_tokenizer(str(file)),
    "tokenizer_config.json": read_json,  # before tokenizer.json, which is read together with it
    "tokenizer.json": check_fast,
    "special_tokens_map.json": read_json,
    "added_tokens.json": check_ids,
    "vocab.json": check_ids,
    "merges.txt": check_merges,
    "chat_template.jinja": check_template,
    GENERATION: read_json,
}


@dataclass(frozen=True)
class SpecialTokens:
    """What the files of an imported model say of special tokens. A checkpoint keeps it in its state."""

    # The keys bos_token_id, eos_token_id, pad_token_id and the like of config.json, as far as it has them.
    # An id is a number, null or a list of numbers.
    config: dict[str, Any]
    generation_config: dict[str, Any] | None  # the content of that file
    tokenizer: str | None  # `data.tokenizer` of the import

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> "SpecialTokens | None":
        """Return those of a checkpoint's state; None if it is not of an imported model."""
        recorded = state.get(SPECIAL_TOKENS)
        if not isinstance(recorded, dict) or recorded.keys() != {entry.name for entry in fields(cls)}:
            return None
        if not isinstance(recorded["config"], dict):
            return None
        return cls(**recorded)

    def belong_to(self, tokenizer: str | None, eos_token_id: int | None) -> bool:
        """Return whether a model with this tokenizer has these special tokens.

        Another tokenizer may be that of the import in another place, or one to which tokens were added. So
        it has to name one of the end tokens; if it names none, nothing contradicts.
        """
        ends: list[Any] = []
        for source in (self.config, self.generation_config or {}):
            ids = source.get("eos_token_id")
            ends += ids if isinstance(ids, list) else [ids]
        return tokenizer == self.tokenizer or eos_token_id is None or eos_token_id in ends


def write_special_tokens(
    folder: Path, kept: SpecialTokens | None, tokenizer: str | None, written: Written
) -> str:
    """Write the ids of special tokens into config.json and generation_config.json of a model folder.

    They are those of the imported model if its tokenizer was kept, and else those of the tokenizer that was
    `written` to the folder. A generation_config.json that came with the tokenizer stays as it is.
    Returns a line for the user.
    """
    settings = read_json(folder / CONFIG)
    eos_token_id = written.token_ids.get("eos_token_id")
    generation: dict[str, Any] | None
    if kept is not None and kept.belong_to(tokenizer, eos_token_id):
        for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
            settings.pop(key, None)
        settings |= kept.config
        generation, finding = kept.generation_config, "special tokens: those of the imported model"
    else:
        settings |= written.token_ids
        generation = written.token_ids or None
        finding = f"special tokens: {'those of the tokenizer' if generation else 'none is known'}"
        if kept is not None:
            finding += f", whose end token {eos_token_id} the imported model did not have"
    write_json(folder / CONFIG, settings)
    if generation is not None and not (folder / GENERATION).exists():
        write_json(folder / GENERATION, generation)
    return finding


def write_tokenizer(name: str | None, folder: Path, vocab_size: int, transformers: ModuleType) -> Written:
    """Write tokenizer files to a model folder that has its config.json already.

    Args:
        name: `bytes`; a sentencepiece ``.model``; a folder with the tokenizer files of a model, or the
            tokenizer.json or tokenizer.model
            among them: then all of them are copied; None: not known.

    Raises:
        UserError: there is no such tokenizer, it is damaged, or it has more tokens than the model's
            `vocab_size`.
    """
    if name is None:
        return Written("tokenizer: the run names none, so none was written (--tokenizer names one)")
    if name == "bytes":
        return Written("tokenizer: bytes are their own ids, so there is no file to write")
    path = Path(name)
    if path.name == FAST[0] or (path.name == SENTENCEPIECE and (path.parent / FAST[1]).is_file()):
        path = path.parent
    if path.is_dir():
        if not copy_tokenizer(path, folder):
            raise ConfigError(
                "--tokenizer",
                f"{path} holds no tokenizer files",
                "a model's folder, a sentencepiece .model or bytes",
            )
        finding = f"tokenizer: files copied from {path}"
    else:
        ours = load_tokenizer(name)
        shutil.copy(path, folder / SENTENCEPIECE)
        if not _write_fast(path, ours, folder, transformers):
            for file in FAST:
                (folder / file).unlink(missing_ok=True)
            what = f"tokenizer: {path} copied as {SENTENCEPIECE} alone, for sentencepiece itself"
            return Written(f"{what}: transformers would give other ids for some texts")
        finding = (
            f"tokenizer: {path}, and as {FAST[0]} for AutoTokenizer, which gives the same ids for "
            f"{PROBES} random texts"
        )
    try:
        theirs = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # its classes raise whatever their files lead to
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(
            "--tokenizer", f"transformers cannot open it: {reason}", "all files of the tokenizer, or another"
        ) from error
    if len(theirs) > vocab_size:
        raise ConfigError(
            "--tokenizer",
            f"{name} has {len(theirs)} tokens, and the model {vocab_size}",
            "the tokenizer of this model",
        )
    ids = {f"{kind}_token_id": getattr(theirs, f"{kind}_token_id") for kind in ("bos", "eos")}
    return Written(finding, {key: value for key, value in ids.items() if value is not None})


def _write_fast(path: Path, ours: Tokenizer, folder: Path, transformers: ModuleType) -> bool:
    """Write a sentencepiece model for AutoTokenizer as well; whether it gives the same ids."""
    from sentencepiece import sentencepiece_model_pb2

    model = sentencepiece_model_pb2.ModelProto()
    model.ParseFromString(path.read_bytes())
    trained, normal = model.trainer_spec, model.normalizer_spec
    if (
        trained.model_type != trained.BPE
        or normal.precompiled_charsmap
        or normal.add_dummy_prefix
        or normal.remove_extra_whitespaces
    ):
        return False  # not what `train_sentencepiece` makes
    write_json(folder / FAST[0], fast_tokenizer(model))
    kinds = {trained.unk_piece: "unk", trained.bos_piece: "bos", trained.eos_piece: "eos"}
    special = {f"{kinds[piece.piece]}_token": piece.piece for piece in model.pieces if piece.piece in kinds}
    # Special tokens are never read out of a text: "</s>" in a text is three letters and more.
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "split_special_tokens": True,
        "clean_up_tokenization_spaces": False,
    }
    write_json(folder / FAST[1], settings | special)
    theirs = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return all(
        theirs.encode(text, add_special_tokens=False) == ours.encode(text).tolist() for text in probes(model)
    )


def fast_tokenizer(model: Any) -> dict[str, Any]:
    """A sentencepiece BPE model (its ModelProto), of text taken as it is, in the format of tokenizer.json.

    sentencepiece joins the neighbours whose union is the best piece; here each union is a rule, in the
    pieces' order, for every way to cut the piece in two.
    """
    kind = model.SentencePiece
    ids = {piece.piece: i for i, piece in enumerate(model.pieces)}
    normal = [piece for piece in model.pieces if piece.type == kind.NORMAL]
    usable = {piece.piece for piece in normal}
    merges = []
    for piece in sorted(normal, key=lambda piece: -piece.score):
        halves = [(piece.piece[:i], piece.piece[i:]) for i in range(1, len(piece.piece))]
        halves = [(left, right) for left, right in halves if left in usable and right in usable]
        merges += sorted(halves, key=lambda pair: (ids[pair[0]], ids[pair[1]]))
    added = [
        {"id": i, "content": piece.piece, "special": piece.type != kind.USER_DEFINED, "normalized": False}
        | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
        for i, piece in enumerate(model.pieces)
        if piece.type in (kind.USER_DEFINED, kind.CONTROL, kind.UNKNOWN)
    ]
    space, escaped = {"String": " "}, {"String": "\u2581"}
    unescape = {"type": "Replace", "pattern": escaped, "content": " "}
    return {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": {"type": "Replace", "pattern": space, "content": "\u2581"},
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": [unescape, {"type": "ByteFallback"}, {"type": "Fuse"}]},
        "model": {
            "type": "BPE",
            "unk_token": model.trainer_spec.unk_piece,
            "fuse_unk": True,
            "byte_fallback": model.trainer_spec.byte_fallback,
            "vocab": ids,
            "merges": merges,
        },
    }


def probes(model: Any) -> list[str]:
    """Texts of random pieces in random order, special ones spelt out among them, and
    characters that may have no piece.
    """
    pieces = [piece.piece.replace("\u2581", " ") for piece in model.pieces] + [
        "é",
        "文",
        "😀",
        "\t",
        "\0",
        "  ",
        "\r\n",
        "\ufeff",
    ]
    chosen = random.Random(0)
    return ["".join(chosen.choices(pieces, k=chosen.randrange(1, 20))) for _ in range(PROBES)]
