"""Tokenizers of every kind do in megacore what they do in their own library.

Each kind is made here, small: its ids, its text, its BOS and end tokens, the bytes it counts, and a long
document that is encoded in parts are compared with `tokenizers`, `sentencepiece` or `tiktoken`.
"""

import io
import json
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer

from megacore.data.indexed import IndexedTokens
from megacore.tools.corpora import Sidecar
from megacore.tools.prepare import prepare as prepare_module
from megacore.tools.prepare import sources
from megacore.tools.prepare.prepare import prepare
from megacore.tools.text.encodings import converted
from megacore.tools.text.json_tokenizer import JsonTokenizer
from megacore.tools.text.sandboxed import opened
from megacore.tools.text.stream import TextStream
from megacore.tools.text.tokenizer import Tokenizer

tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
from tokenizers import (  # noqa: E402
    AddedToken,
    Regex,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

LINES = [
    "The cat sat on the mat, and the dog sat by the door.",
    "Nine of ten people read the same words again; the tenth does not.",
    "Über allen Gipfeln ist Ruh, in allen Wipfeln spürest du kaum einen Hauch.",
    "日本語の文章 and some 漢字 in it: 3.14, 2,718 and 42!",
    "def main(words):\n    return [word for word in words if word]",
]
TEXT = "\n".join(LINES)
SHORT = "the cat and the dog read words"  # without what a decoder may clean up


@dataclass
class Kind:
    """A tokenizer's file, and what its own library makes of a text."""

    path: Path
    encode: Callable[[str], list[int]]  # without tokens around the text
    around: Callable[[str], list[int]]  # with the tokens that the library puts around a text
    decode: Callable[[list[int]], str]
    text: str = TEXT
    lossless: bool = True  # decoding gives the text back, and its tokens spell exactly its bytes
    end: str = "</s>"  # the text of the token that ends a document
    ends_words: bool = False  # a word ends wherever a text ends, so a cut within a word shows as a space


def fast_kind(folder: Path, fast: Any, config: dict[str, Any] | None = None, **more: Any) -> Kind:
    """A tokenizer.json."""
    fast.save(str(folder / "tokenizer.json"))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return Kind(
        folder / "tokenizer.json",
        lambda text: fast.encode(text, add_special_tokens=False).ids,
        lambda text: fast.encode(text).ids,
        lambda ids: fast.decode(ids, skip_special_tokens=True),
        **more,
    )


def byte_level(special: list[str], pattern: str | None = None) -> Any:
    fast = tokenizers.Tokenizer(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pattern is not None:
        split = pre_tokenizers.Split(Regex(pattern), "isolated")
        fast.pre_tokenizer = pre_tokenizers.Sequence(
            [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
    fast.decoder = decoders.ByteLevel()
    fast.post_processor = processors.ByteLevel(trim_offsets=True)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=special, initial_alphabet=alphabet)
    fast.train_from_iterator(LINES, trainer)
    return fast


def template(single: str, *tokens: tuple[str, int]) -> Any:
    return processors.TemplateProcessing(single=single, special_tokens=list(tokens))


def gpt2(folder: Path) -> Kind:
    config = {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>", "add_bos_token": False}
    return fast_kind(folder, byte_level(["<|endoftext|>"]), config, end="<|endoftext|>")


def llama3(folder: Path) -> Kind:
    pattern = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    fast = byte_level(["<|begin_of_text|>", "<|end_of_text|>"], pattern + r"\s*[\r\n]+|\s+(?!\S)|\s+")
    begin = template("<|begin_of_text|> $A", ("<|begin_of_text|>", 0))
    fast.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=True), begin])
    config = {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"}
    return fast_kind(folder, fast, config, end="<|end_of_text|>")


def qwen(folder: Path) -> Kind:
    fast = byte_level(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    fast.normalizer = normalizers.NFC()
    config = {"bos_token": None, "eos_token": "<|im_end|>", "add_bos_token": False}
    return fast_kind(folder, fast, config, end="<|im_end|>")


def roberta(folder: Path) -> Kind:
    fast = byte_level(["<s>", "</s>"])
    fast.post_processor = processors.RobertaProcessing(("</s>", 1), ("<s>", 0))
    return fast_kind(folder, fast)


def only_in_the_config(folder: Path) -> Kind:
    """transformers' older classes put the token that `add_bos_token` asks for; the file itself does not."""
    fast = byte_level(["<s>", "</s>"])
    kind = fast_kind(
        folder, fast, {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "add_bos_token": True}
    )
    kind.around = lambda text: [0, *kind.encode(text)]
    return kind


def added_tokens(folder: Path) -> Kind:
    """`tokenizers` takes the letters of such tokens for bytes when it decodes: the text itself is right."""
    fast = byte_level(["<|endoftext|>"])
    fast.add_tokens([AddedToken("straße"), AddedToken("é"), AddedToken("日本"), AddedToken("<ÄÖ>")])
    kind = fast_kind(folder, fast, {"eos_token": "<|endoftext|>"}, end="<|endoftext|>")
    kind.text = f"{TEXT}\nDie straße, é und 日本<ÄÖ>é, straßenbahn"
    kind.decode = lambda ids: b"".join(map(kind_bytes(fast), ids)).decode()
    return kind


def kind_bytes(fast: Any) -> Callable[[int], bytes]:
    """The bytes of a token: an added one's text, or what the library decodes it to, byte by byte."""
    alphabet = {
        token: fast.get_added_tokens_decoder()[token].content for token in fast.get_added_tokens_decoder()
    }
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    printable = [b for b in range(256) if chr(b) in letters]
    shifted = {chr(256 + i): b for i, b in enumerate(b for b in range(256) if chr(b) not in letters)}
    values = {chr(b): b for b in printable} | shifted
    return lambda token: (
        alphabet[token].encode() if token in alphabet else bytes(values[c] for c in fast.id_to_token(token))
    )


def lowercased(folder: Path) -> Kind:
    fast = byte_level(["<|endoftext|>"])
    fast.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    return fast_kind(folder, fast, {"eos_token": "<|endoftext|>"}, end="<|endoftext|>", lossless=False)


def word_bpe(special: list[str]) -> Any:
    """A BPE of Llama 2's kind: ▁ for spaces, and bytes for characters that it lacks."""
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    fast = tokenizers.Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    fast.normalizer = normalizers.Replace(" ", "▁")
    fast.pre_tokenizer = pre_tokenizers.Metaspace("▁", "never", split=True)
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=[*special, *byte_tokens], show_progress=False
    )
    fast.train_from_iterator([line for line in LINES if line.isascii()], trainer)
    content = json.loads(fast.to_str())
    # the trainer wants byte tokens as special ones, which they are not
    content["added_tokens"] = [t for t in content["added_tokens"] if t["content"] in special]
    fast = tokenizers.Tokenizer.from_str(json.dumps(content))
    fast.pre_tokenizer = None
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    fast.decoder = decoders.Sequence(steps)
    fast.post_processor = template("<s> $A", ("<s>", 1))
    return fast


def llama2(folder: Path) -> Kind:
    fast = word_bpe(["<unk>", "<s>", "</s>"])
    fast.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    config = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True}
    return fast_kind(folder, fast, config, lossless=False)


def mistral(folder: Path) -> Kind:
    fast = word_bpe(["<unk>", "<s>", "</s>"])
    fast.normalizer = None
    fast.pre_tokenizer = pre_tokenizers.Metaspace("▁", "first", split=False)
    return fast_kind(folder, fast, {"bos_token": "<s>", "eos_token": "</s>"}, lossless=False)


def t5(folder: Path) -> Kind:
    fast = tokenizers.Tokenizer(models.Unigram())
    fast.pre_tokenizer = pre_tokenizers.Metaspace()
    fast.decoder = decoders.Metaspace()
    special = ["<pad>", "</s>", "<unk>"]
    trainer = trainers.UnigramTrainer(
        vocab_size=250, special_tokens=special, unk_token="<unk>", show_progress=False
    )
    fast.train_from_iterator(LINES, trainer)
    fast.post_processor = template("$A </s>", ("</s>", 1))
    return fast_kind(folder, fast, {"eos_token": "</s>"}, lossless=False)


def bert(folder: Path) -> Kind:
    fast = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    fast.normalizer = normalizers.BertNormalizer()
    fast.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    fast.decoder = decoders.WordPiece()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    fast.train_from_iterator(LINES, trainers.WordPieceTrainer(vocab_size=300, special_tokens=special))
    fast.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    return fast_kind(folder, fast, {"cls_token": "[CLS]"}, lossless=False, end="[SEP]", ends_words=True)


def suffix_bpe(**more: Any) -> Any:
    fast = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    fast.normalizer = normalizers.Lowercase()
    fast.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = ["<unk>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=special, end_of_word_suffix="</w>", show_progress=False, **more
    )
    return fast, trainer


def gpt1(folder: Path) -> Kind:
    fast, trainer = suffix_bpe()
    fast.decoder = decoders.BPEDecoder("</w>")
    fast.train_from_iterator(LINES, trainer)
    return fast_kind(folder, fast, {"eos_token": "</s>"}, lossless=False, ends_words=True)


def clip(folder: Path) -> Kind:
    """Its file decodes bytes and leaves </w> in the text; transformers replaces it by a space."""
    fast, trainer = suffix_bpe(initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    words = pre_tokenizers.Split(Regex(r"[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"), "removed", invert=True)
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast.pre_tokenizer = pre_tokenizers.Sequence([words, letters])
    fast.decoder = decoders.ByteLevel()
    fast.train_from_iterator(LINES, trainer)
    fast.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 1), False, False)
    config = {"bos_token": "<s>", "eos_token": "</s>"}
    kind = fast_kind(folder, fast, config, lossless=False, ends_words=True)
    kind.decode = lambda ids: fast.decode(ids).replace("</w>", " ").strip()
    return kind


def sentencepiece_kind(
    folder: Path, config: dict[str, Any] | None, puts_bos: bool, lossless: bool = False, **given: Any
) -> Kind:
    model = io.BytesIO()
    options: dict[str, Any] = {"vocab_size": 420, "model_type": "bpe", "byte_fallback": True} | given
    SentencePieceTrainer.train(sentence_iterator=iter(LINES), model_writer=model, minloglevel=3, **options)
    (folder / "tokenizer.model").write_bytes(model.getvalue())
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    library = SentencePieceProcessor(model_proto=model.getvalue())
    return Kind(
        folder / "tokenizer.model",
        library.encode,
        lambda text: library.encode(text, add_bos=puts_bos),
        library.decode,
        lossless=lossless,
    )


def plain_sentencepiece(folder: Path) -> Kind:
    return sentencepiece_kind(folder, None, puts_bos=False)


def llama_model(folder: Path) -> Kind:
    """A space before the text, next to every space of the text itself."""
    config = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True}
    options: dict[str, Any] = {"remove_extra_whitespaces": False, "normalization_rule_name": "identity"}
    return sentencepiece_kind(folder, config, puts_bos=True, **options)


def unigram_model(folder: Path) -> Kind:
    config = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": False}
    return sentencepiece_kind(folder, config, puts_bos=False, model_type="unigram", vocab_size=330)


def gemma_model(folder: Path) -> Kind:
    """No space before the text, and every space kept; the class puts a BOS token without being asked."""
    options: dict[str, Any] = {
        "add_dummy_prefix": False,
        "remove_extra_whitespaces": False,
        "normalization_rule_name": "identity",
    }
    return sentencepiece_kind(
        folder, {"tokenizer_class": "GemmaTokenizer"}, puts_bos=True, lossless=True, **options
    )


def model_next_to_a_json(folder: Path) -> Kind:
    """Newer folders tell it by the post-processor of the tokenizer.json next to the model alone."""
    kind = sentencepiece_kind(folder, {"tokenizer_class": "TokenizersBackend"}, puts_bos=True)
    post_processor = json.loads(template("<s> $A", ("<s>", 1)).__getstate__())
    (folder / "tokenizer.json").write_text(json.dumps({"post_processor": post_processor}))
    return kind


def tiktoken_ranks(folder: Path) -> Kind:
    tiktoken = pytest.importorskip("tiktoken", reason="tiktoken is not installed")
    ranks = {bytes([byte]): byte for byte in range(256)}
    for piece in (b"th", b"he", b"the", b" t", b" the", b"at", b" w", b"or", b" wor", b"ds", b" words"):
        ranks[piece] = len(ranks)
    pattern = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    special = {"<|endoftext|>": len(ranks)}
    library = tiktoken.Encoding("small", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)
    (folder / "tokenizer.json").write_bytes(converted(library))
    return Kind(
        folder / "tokenizer.json",
        library.encode_ordinary,
        library.encode_ordinary,
        library.decode,
        end="<|endoftext|>",
    )


KINDS: list[Callable[[Path], Kind]] = [
    gpt2,
    llama3,
    qwen,
    roberta,
    only_in_the_config,
    added_tokens,
    lowercased,
    llama2,
    mistral,
    t5,
    bert,
    gpt1,
    clip,
    plain_sentencepiece,
    llama_model,
    unigram_model,
    gemma_model,
    model_next_to_a_json,
    tiktoken_ranks,
]


def streamed(tokenizer: Tokenizer, prompt: list[int], ids: list[int]) -> str:
    """The text of tokens that come one by one after a prompt."""
    stream = TextStream(tokenizer, prompt)
    return "".join([stream.push(token) for token in ids]) + stream.end()


def differences(kind: Kind, tokenizer: Tokenizer) -> list[str]:
    """What the tokenizer does otherwise than its own library."""
    ids = kind.encode(kind.text)
    text = kind.decode(ids)
    before = [*tokenizer.begin_of_document, *tokenizer.encode(kind.text).tolist()]
    spelled = sum(len(tokenizer.token_bytes(token)) for token in ids)
    prompt = kind.encode(SHORT)
    generated = kind.encode(f"{SHORT} again the same")[len(prompt) :]
    checks = {
        "encode": tokenizer.encode(kind.text).tolist() == ids,
        "begin": kind.around(kind.text)[: len(before)] == before,
        "end": kind.around(kind.text)[len(before) :] in ([], [tokenizer.end_of_document]),
        "decode": tokenizer.decode(ids) == text,
        "lossless": not kind.lossless or text == kind.text,
        # a decoder may add or drop a space where the text begins or ends
        "bytes": abs(spelled - len(text.encode())) <= (0 if kind.lossless else 1),
        "stream": kind.decode(prompt) + streamed(tokenizer, prompt, generated)
        == kind.decode(prompt + generated),
        "whole stream": streamed(tokenizer, [], ids) == text,
    }
    return [name for name, holds in checks.items() if not holds]


@pytest.fixture(params=KINDS, ids=[kind.__name__ for kind in KINDS])
def kind(request: pytest.FixtureRequest, tmp_path: Path) -> Kind:
    return request.param(tmp_path)


def test_it_does_what_its_library_does(kind: Kind) -> None:
    """A BOS token left out, a text decoded in another way, or bytes counted otherwise, makes other losses."""
    assert differences(kind, opened(str(kind.path), 0)) == []


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if texts were large: many blocks and many tasks."""
    monkeypatch.setattr(sources, "BLOCK_BYTES", 256)
    monkeypatch.setattr(sources, "CUT_WINDOW", 128)
    monkeypatch.setattr(prepare_module, "TASK_BYTES", 1000)


def prepared(kind: Kind, text: str, **options: Any) -> tuple[list[list[int]], Sidecar]:
    """The documents of a corpus made of one file, and its sidecar."""
    folder = kind.path.parent / "corpus"
    folder.mkdir(exist_ok=True)
    (folder / "text.txt").write_text(text, encoding="utf-8")
    prepare([str(folder / "text.txt")], str(folder / "out"), str(kind.path), **options)
    corpus = IndexedTokens(str(folder / "out"))
    starts, lengths = corpus.documents(0, corpus.num_documents)
    sidecar = Sidecar.load(str(folder / "out"))
    assert sidecar is not None
    documents = [corpus.read(start, length).tolist() for start, length in zip(starts, lengths, strict=True)]
    return documents, sidecar


@pytest.mark.usefixtures("small_blocks")
def test_a_long_document_has_the_tokens_of_the_whole(kind: Kind) -> None:
    """Encoded in parts, it has no BOS token and no space where it was cut, and ends once."""
    text = f"{kind.text}\n" * 8
    documents, sidecar = prepared(kind, text)
    end = opened(str(kind.path), 0).end_of_document
    expected = kind.around(text)
    if end is not None and expected[-1] != end:
        expected = [*expected, end]
    assert documents == [expected]
    assert sidecar.bos is (expected[0] != kind.encode(text)[0])
    spelled = sum(len(opened(str(kind.path), 0).token_bytes(token)) for token in expected)
    assert sidecar.spelled_bytes == spelled and sidecar.text_bytes == len(text.encode())
    assert not kind.lossless or spelled == len(text.encode())


CUT_ELSEWHERE = {
    "after newlines": "words,\n" * 150,
    "within words": "thedogandthecat" * 70,
    "between characters": "日本語の文章" * 120,
    "before added tokens": "straße日本é" * 80,
}


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("text", CUT_ELSEWHERE.values(), ids=CUT_ELSEWHERE)
def test_a_text_without_words_between_spaces_stays_whole(kind: Kind, text: str) -> None:
    """Where a token may span every place at which it can be cut, no character is lost, doubled or added."""
    if kind.ends_words and not text.isascii():
        text = CUT_ELSEWHERE["within words"]  # small vocabularies of such a kind spell few other words
    [document], _ = prepared(kind, text)
    tokenizer = opened(str(kind.path), 0)
    found = tokenizer.decode(document)
    expected = tokenizer.decode(kind.encode(text))
    if kind.ends_words:
        found = found.replace(" ", "")
        expected = expected.replace(" ", "")
    assert found == expected


@pytest.mark.parametrize("special_tokens", [False, True])
def test_a_special_token_in_a_text(kind: Kind, special_tokens: bool) -> None:
    """It is text, or, where it is asked for, the token, which then ends a document."""
    tokenizer = opened(str(kind.path), 0)
    end = tokenizer.end_of_document
    assert end is not None
    parts = [SHORT, "words again", "the mat"]
    documents, sidecar = prepared(kind, kind.end.join(parts), special_tokens=special_tokens)
    begin = list(tokenizer.begin_of_document)
    assert [document.count(end) for document in documents] == [1] * len(documents)
    if not special_tokens:
        assert len(documents) == 1 and (not kind.lossless or kind.end in tokenizer.decode(documents[0]))
        return
    expected = [kind.encode(part) for part in parts]
    if end in (whole := kind.encode(kind.end.join(parts))):  # a library that finds the token itself
        borders = [i for i, token in enumerate(whole) if token == end]
        expected = [whole[i + 1 : j] for i, j in pairwise([-1, *borders, len(whole)])]
    assert documents == [[*begin, *ids, end] for ids in expected]
    assert sidecar.bos is bool(begin)


def test_an_added_letter_that_is_also_a_byte(tmp_path: Path) -> None:
    """`tokenizers` gives the added token é the id of the byte that is written é, with which 鰀 begins."""
    kind = added_tokens(tmp_path)
    text = "é 鰀é鰀鰀éé, 龍é"
    tokenizer = opened(str(kind.path), 0)
    assert tokenizer.decode(kind.encode(text)) == text


def test_added_spaces_are_spaces(tmp_path: Path) -> None:
    """Gemma's file lists runs of ▁, which are pieces of its vocabulary, as added tokens."""
    kind = llama2(tmp_path)
    content = json.loads(kind.path.read_text())
    added = content["added_tokens"][0] | {
        "id": len(content["model"]["vocab"]),
        "content": "▁▁",
        "special": False,
    }
    content["model"]["vocab"]["▁▁"] = added["id"]
    content["model"]["merges"].append(["▁", "▁"])
    content["added_tokens"].append(added)
    kind.path.write_text(json.dumps(content))
    library = tokenizers.Tokenizer.from_file(str(kind.path))
    ids = library.encode("the    cat", add_special_tokens=False).ids
    tokenizer = JsonTokenizer(str(kind.path))
    assert added["id"] in ids and tokenizer.decode(ids) == library.decode(ids) == "the    cat"
    assert tokenizer.token_bytes(added["id"]) == b"  "


@pytest.mark.parametrize("made", [gpt2, t5])
def test_a_file_without_a_decoder(made: Callable[[Path], Kind], tmp_path: Path) -> None:
    """The pre-tokenizer tells how text was prepared: pieces with Ġ or ▁ in them would be no text."""
    kind = made(tmp_path)
    assert differences(kind, rewritten(kind, decoder=None)) == []


# --- planted faults -----------------------------------------------------------------------------------------


def rewritten(kind: Kind, **changes: Any) -> Tokenizer:
    """The tokenizer of the file with other entries."""
    content = json.loads(kind.path.read_text()) | changes
    kind.path.write_text(json.dumps(content))
    return JsonTokenizer(str(kind.path))


@pytest.mark.parametrize(
    ("made", "changes", "found"),
    [
        (llama3, {"post_processor": None}, "begin"),
        (roberta, {"post_processor": None}, "begin"),
        (bert, {"decoder": None}, "decode"),
        (bert, {"decoder": {"type": "BPEDecoder", "suffix": "</w>"}}, "bytes"),
        (gpt1, {"decoder": None}, "stream"),
        (llama2, {"decoder": {"type": "Fuse"}}, "decode"),
        (lowercased, {"normalizer": None}, "encode"),
    ],
)
def test_a_planted_fault_is_found(
    made: Callable[[Path], Kind], changes: dict[str, Any], found: str, tmp_path: Path
) -> None:
    """A tokenizer without its decoder, its BOS token or its normalizer."""
    kind = made(tmp_path)
    assert found in differences(kind, rewritten(kind, **changes))


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("made", [llama2, llama_model])
def test_a_planted_space_at_every_cut_is_found(
    made: Callable[[Path], Kind], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts that are encoded without the text before them begin with a space of their own."""
    monkeypatch.setattr(
        prepare_module,
        "encode_piece",
        lambda tokenizer, piece, special: tokenizer.encode(piece.text, special),
    )
    with pytest.raises(AssertionError):
        test_a_long_document_has_the_tokens_of_the_whole(made(tmp_path))
