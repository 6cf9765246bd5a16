"""A document, a prompt and a conversation begin as the tokenizer's own library begins them, or as asked."""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from launch import evaluate as evaluate_script
from launch import generate as generate_script
from launch import prepare as prepare_script
from megacore.data.indexed import IndexedTokens
from megacore.data.samples import EvalSamples
from megacore.distributed.rank_info import RankInfo
from megacore.errors import DataError, UserError
from megacore.tools import library
from megacore.tools.corpora import Sidecar
from megacore.tools.prepare import prepare as prepare_module
from megacore.tools.prepare import sources, streams
from megacore.tools.prepare.prepare import prepare
from megacore.tools.text.decoding import Decoder
from megacore.tools.text.tokenizer import load_tokenizer
from megacore.tools.text.vocabulary import encode_prompt, prompt_begin, vocabulary_warnings
from tests import training
from tests.build import run_of
from tests.commands import run_script

tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")

BOS, END = 0, 1
CONFIG = {"bos_token": "<s>", "eos_token": "</s>"}


def byte_tokenizer(folder: Path, config: dict[str, Any] | None = None, begins: bool = True) -> str:
    """A tokenizer.json with a token for each byte; ``<s>`` begins a text, and ``</s>`` ends a document."""
    folder.mkdir(exist_ok=True)
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    ids = {piece: i for i, piece in enumerate(["<s>", "</s>", *alphabet])}
    fast = tokenizers.Tokenizer(tokenizers.models.BPE(ids, []))
    fast.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = tokenizers.decoders.ByteLevel()
    fast.add_special_tokens(["<s>", "</s>"])
    if begins:
        fast.post_processor = tokenizers.processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", BOS)]
        )
    fast.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(CONFIG if config is None else config))
    return str(folder / "tokenizer.json")


@pytest.fixture
def tokenizer(tmp_path: Path) -> str:
    return byte_tokenizer(tmp_path / "model")


def documents_of(prefix: str) -> list[list[int]]:
    corpus = IndexedTokens(prefix)
    starts, lengths = corpus.documents(0, corpus.num_documents)
    return [corpus.read(start, length).tolist() for start, length in zip(starts, lengths, strict=True)]


def borders_of(prefix: str) -> list[tuple[int, int, int, int]]:
    """The first and the last token of each document, and how many BOS and end tokens it has."""
    return [(ids[0], ids[-1], ids.count(BOS), ids.count(END)) for ids in documents_of(prefix)]


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if texts were large: many blocks and many tasks."""
    monkeypatch.setattr(sources, "BLOCK_BYTES", 256)
    monkeypatch.setattr(sources, "CUT_WINDOW", 128)
    monkeypatch.setattr(streams, "PART_BYTES", 256)
    monkeypatch.setattr(prepare_module, "TASK_BYTES", 1000)


WORDS = "many words of a long text, and more of them\n" * 60


def written_inputs(folder: Path) -> dict[str, Path]:
    """The same text as a file, compressed, and as documents."""
    paths = {"text": folder / "a.txt", "packed": folder / "a.txt.gz", "lines": folder / "a.jsonl"}
    paths["text"].write_text(WORDS)
    paths["packed"].write_bytes(gzip.compress(WORDS.encode()))
    paths["lines"].write_text("".join(json.dumps({"text": f"{n} {WORDS[:300]}"}) + "\n" for n in range(9)))
    return paths


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(
    ("form", "fraction"), [("text", 0.0), ("text", 0.3), ("packed", 0.0), ("lines", 0.3)]
)
def test_each_document_begins_once(form: str, fraction: float, tokenizer: str, tmp_path: Path) -> None:
    """However it is cut into parts; the validation part of a single text is a document of its own."""
    path = written_inputs(tmp_path)[form]
    prefix = str(tmp_path / "out")
    prepared = prepare([str(path)], prefix, tokenizer, valid_fraction=fraction)
    assert prepared.begin == "token 0 <s>"
    whole = 0
    for name, sidecar in prepared.splits.items():
        borders = borders_of(name)
        assert borders == [
            (BOS, 1 if form == "lines" or name != prefix or not fraction else END, 1, 1)
        ] * len(borders)
        assert sidecar.bos is True and sidecar.spelled_bytes == sidecar.text_bytes
        whole += len(borders)
    assert whole == (9 if form == "lines" else 1 + bool(fraction))


@pytest.mark.parametrize(
    ("config", "begins", "bos", "expected"),
    [
        (CONFIG, True, "auto", True),
        (CONFIG, True, "never", False),
        (CONFIG, False, "auto", False),
        (CONFIG, False, "always", True),
        (CONFIG | {"add_bos_token": True}, False, "auto", True),
        (CONFIG | {"add_bos_token": False}, True, "auto", False),
        (CONFIG | {"add_bos_token": False}, True, "always", True),
        (CONFIG | {"bos_token": {"content": "<s>"}, "add_bos_token": True}, False, "auto", True),
        ({}, True, "auto", True),
    ],
)
def test_what_begins_documents(
    config: dict[str, Any], begins: bool, bos: str, expected: bool, tmp_path: Path, capsys: Any
) -> None:
    """The post-processor says it, or `add_bos_token`, or the option; and it is printed and recorded."""
    name = byte_tokenizer(tmp_path / "model", config, begins)
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n{"text": "b"}\n')
    words = ["--input", str(tmp_path / "a.jsonl"), "--output", str(tmp_path / "out"), "--tokenizer", name]
    prepare_script.run([*words, "--workers", "1", "--bos", bos])
    firsts = [document[0] for document in documents_of(str(tmp_path / "out"))]
    assert firsts == [BOS, BOS] if expected else BOS not in firsts
    sidecar = Sidecar.load(str(tmp_path / "out"))
    assert sidecar is not None and sidecar.bos is expected
    out = capsys.readouterr().out
    assert ("every document begins with token 0" in out) == expected
    left_out = "no document begins with token 0 <s>, which the tokenizer puts before a text: --bos never\n"
    assert (left_out in out) == (bos == "never")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--bos", "sometimes"], "config error: --bos: invalid choice: 'sometimes'"),
        (
            ["--bos", "always", "--tokenizer", "bytes"],
            "config error: --bos: no file of the tokenizer names a BOS token (auto or never)",
        ),
        (["--bos", "never", "--chat"], "config error: --bos: the chat template writes the special tokens"),
        (["--bos", "never", "--nanogpt"], "config error: --bos: tokens are taken as they are"),
        (["--special-tokens", "--chat"], "config error: --special-tokens: the chat template writes"),
        (["--special-tokens", "--nanogpt"], "config error: --special-tokens: tokens are taken"),
        (
            ["--special-tokens", "--tokenizer", "bytes"],
            "config error: --special-tokens: bytes has no special",
        ),
    ],
)
def test_options_without_a_meaning(options: list[str], message: str, tokenizer: str, tmp_path: Path) -> None:
    """Ignored, they would leave another corpus than was asked for."""
    (tmp_path / "a.txt").write_text("text")
    words = [
        "--input",
        str(tmp_path / "a.txt"),
        "--output",
        str(tmp_path / "out/x"),
        "--tokenizer",
        tokenizer,
    ]
    with pytest.raises(UserError) as raised:
        prepare_script.run([*words, "--workers", "1", *options])
    assert str(raised.value).startswith(message) and "\n" not in str(raised.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("between", ["</s>", "</s>\n", "\n</s>", "</s><s>", "</s></s>"])
@pytest.mark.parametrize("form", ["a.txt", "a.txt.gz"])
def test_special_tokens_of_the_text_divide_documents(
    form: str, between: str, tokenizer: str, tmp_path: Path
) -> None:
    """Wherever the text is cut: every document begins and ends once, and nothing of the text is lost."""
    texts = [f"story {n}, told in words" + " again" * (n % 50) for n in range(60)]
    text = between.join(texts)
    data = text.encode()
    (tmp_path / form).write_bytes(gzip.compress(data) if form.endswith(".gz") else data)
    prefix = str(tmp_path / "out")
    prepared = prepare([str(tmp_path / form)], prefix, tokenizer, special_tokens=True)
    documents = documents_of(prefix)
    assert all((ids[0], ids[-1], ids.count(BOS), ids.count(END)) == (BOS, END, 1, 1) for ids in documents)
    reader = load_tokenizer(tokenizer)
    plain = text.replace("<s>", "").split("</s>")
    assert [reader.decode(ids) for ids in documents] == plain
    sidecar = prepared.splits[prefix]
    assert sidecar.text_bytes == sidecar.spelled_bytes == sum(map(len, plain))


def spelled_tokenizer(folder: Path, end: str) -> str:
    """A tokenizer.json with a token for each byte, and `end` to end a document."""
    folder.mkdir()
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    ids = {piece: i for i, piece in enumerate(["<s>", end, *alphabet])}
    fast = tokenizers.Tokenizer(tokenizers.models.BPE(ids, []))
    fast.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = tokenizers.decoders.ByteLevel()
    fast.add_special_tokens(["<s>", end])
    fast.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": end}))
    return str(folder / "tokenizer.json")


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(
    ("end", "story"),
    [
        ("<|end_of_text|>", "一行の文章"),
        ("<|end_of_text|>", ""),
        ("<|end of text|>", "told in words"),
        ("end of text", "11, "),
        ("｜文｜", "一行の文章"),
        ("abcab", "ab"),  # spellings that seem to overlap
    ],
)
@pytest.mark.parametrize(("form", "fraction"), [("a.txt", 0.0), ("a.txt", 0.3), ("a.txt.gz", 0.0)])
def test_no_cut_divides_a_special_token(
    form: str, fraction: float, end: str, story: str, tmp_path: Path
) -> None:
    """Also in one line of text without spaces, and where the validation part begins."""
    name = spelled_tokenizer(tmp_path / "model", end)
    for shift in range(0, 40, 3):
        text = "." * shift + end.join(story + "." * (number % 3) for number in range(300)) + end
        data = text.encode()
        (tmp_path / form).write_bytes(gzip.compress(data) if form.endswith(".gz") else data)
        prepared = prepare(
            [str(tmp_path / form)],
            str(tmp_path / "out"),
            name,
            special_tokens=True,
            valid_fraction=fraction,
            bos="never",
        )
        tokens = [token for prefix in prepared.splits for ids in documents_of(prefix) for token in ids]
        expected = load_tokenizer(name).encode(text, special_tokens=True).tolist()
        if fraction and tokens.count(END) == expected.count(END) + 1:
            continue  # the training part ends within a document
        assert tokens == expected


def test_the_user_is_told_of_special_tokens_that_stay_text(
    tokenizer: str, tmp_path: Path, capsys: Any
) -> None:
    """A corpus whose documents are divided by them would be one document, without a word."""
    (tmp_path / "a.txt").write_text("one</s>two</s>three")
    words = ["--input", str(tmp_path / "a.txt"), "--output", str(tmp_path / "out"), "--tokenizer", tokenizer]
    prepare_script.run([*words, "--workers", "1"])
    assert "the text spells this token 2 times, encoded as text (--special-tokens" in capsys.readouterr().out
    assert borders_of(str(tmp_path / "out")) == [(BOS, END, 1, 1)]
    prepare_script.run([*words, "--workers", "1", "--special-tokens"])
    assert "spells" not in capsys.readouterr().out
    assert borders_of(str(tmp_path / "out")) == [(BOS, END, 1, 1)] * 3


TALK = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


@pytest.mark.parametrize("template", ["{{ bos_token }}", ""])
def test_a_conversation_begins_as_its_template_says(
    template: str, tokenizer: str, tmp_path: Path, capsys: Any
) -> None:
    """Most templates write the BOS token; with another one, answers would be learned after two of them."""
    turns = (
        "{% for m in messages %}{{ m.role }}:{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    )
    (tmp_path / "t.jinja").write_text(template + turns)
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": TALK}) + "\n")
    words = [
        "--input",
        str(tmp_path / "a.jsonl"),
        "--output",
        str(tmp_path / "out"),
        "--tokenizer",
        tokenizer,
    ]
    prepare_script.run([*words, "--workers", "1", "--chat", "--template", str(tmp_path / "t.jinja")])
    [document] = documents_of(str(tmp_path / "out"))
    assert document.count(BOS) == bool(template) and (document[0] == BOS) == bool(template)
    sidecar = Sidecar.load(str(tmp_path / "out"))
    assert sidecar is not None and sidecar.bos is bool(template)
    out = capsys.readouterr().out
    assert ("no document begins with token 0 <s>" in out) == (not template)


def test_a_document_mask_hides_the_bos_token_as_a_target(tokenizer: str, tmp_path: Path) -> None:
    """The index tells where documents begin, so no end token is looked for."""
    (tmp_path / "a.jsonl").write_text('{"text": "ab"}\n{"text": "cd"}\n')
    prefix = str(tmp_path / "out")
    prepare([str(tmp_path / "a.jsonl")], prefix, tokenizer)
    samples = EvalSamples(prefix, 7, 258, "best_fit")
    tokens, targets = samples.samples(np.array([0]))
    assert tokens[0].tolist().count(BOS) == 2 and BOS not in targets[0].tolist()
    assert samples.documents(np.array([0])) == [(0, 4, 8)]


# --- corpora of before --------------------------------------------------------------------------------------


def without_record(prefix: str) -> None:
    """The sidecar as it was before it told of BOS tokens."""
    sidecar = json.loads(Path(f"{prefix}.json").read_text())
    del sidecar["bos"], sidecar["spelled_bytes"]
    Path(f"{prefix}.json").write_text(json.dumps(sidecar))


@pytest.mark.parametrize(
    ("bos", "recorded", "warned"), [("never", False, True), ("never", True, False), ("auto", False, False)]
)
def test_a_corpus_without_bos_tokens_is_reported(
    bos: str, recorded: bool, warned: bool, tokenizer: str, tmp_path: Path
) -> None:
    """Unless the user asked for it: then the sidecar has a record of that."""
    (tmp_path / "a.txt").write_text("text " * 20)
    prefix = str(tmp_path / "out")
    prepare([str(tmp_path / "a.txt")], prefix, tokenizer, bos=bos)
    if not recorded:
        without_record(prefix)
    raw = {"model": {"vocab_size": 258}, "data": {"train": prefix, "tokenizer": tokenizer}}
    lines = vocabulary_warnings(run_of(raw))
    expected = f"WARNING: documents of {prefix} do not begin with token 0 <s>, which {tokenizer} puts before"
    assert [line.startswith(expected) for line in lines] == [True] * warned


@pytest.fixture
def two_corpora(tokenizer: str, tmp_path: Path) -> tuple[str, str]:
    """A corpus with BOS tokens, and one without."""
    (tmp_path / "a.txt").write_text("text " * 20)
    with_bos, without = str(tmp_path / "with"), str(tmp_path / "without")
    prepare([str(tmp_path / "a.txt")], with_bos, tokenizer)
    prepare([str(tmp_path / "a.txt")], without, tokenizer, bos="never")
    return with_bos, without


@pytest.mark.parametrize("has_records", [True, False])
def test_corpora_that_begin_differently_are_reported(
    has_records: bool, two_corpora: tuple[str, str], tokenizer: str
) -> None:
    """In one line that names both, whether they are blended or one is for validation."""
    with_bos, without = two_corpora
    if not has_records:
        without_record(with_bos)
        without_record(without)
    expected = f"WARNING: documents of {with_bos} begin with a BOS token, and those of {without} do not"
    for data in (
        {"train": [[1, without], [2, with_bos]]},
        {"train": without, "valid": with_bos},
        {"train": with_bos, "valid": with_bos},
    ):
        raw = {"model": {"vocab_size": 258}, "data": data | {"tokenizer": tokenizer}}
        lines = vocabulary_warnings(run_of(raw))
        is_mixed = without in str(data)
        assert [line.startswith(expected) for line in lines if "begin with a BOS" in line] == [
            True
        ] * is_mixed


def test_evaluating_reports_a_corpus_that_begins_unlike_the_run_s(
    two_corpora: tuple[str, str], tokenizer: str, tmp_path: Path, capsys: Any
) -> None:
    with_bos, without = two_corpora
    raw = {
        "model": {"num_layers": 1, "hidden_size": 16, "num_heads": 2, "vocab_size": 258},
        "train": {"seq_len": 8, "device": "cpu"},
        "data": {"tokenizer": tokenizer, "train": without},
    }
    training.write_weights(tmp_path / "run", run_of(raw))
    for data in (with_bos, without):
        words = ["--checkpoint", str(tmp_path / "run"), "--data", data, "train.device=cpu"]
        assert evaluate_script.run(words, RankInfo()) == 0
        line = (
            f"WARNING: documents of {with_bos} begin with a BOS token, and those of the training data of "
            f"{tmp_path / 'run'} do not"
        )
        assert (line in capsys.readouterr().err) == (data == with_bos)
    # what is wrong with the training data does not matter here
    Path(f"{without}.json").write_text("{")
    words = ["--checkpoint", str(tmp_path / "run"), "--data", with_bos, "train.device=cpu"]
    assert evaluate_script.run(words, RankInfo()) == 0


# --- prompts ------------------------------------------------------------------------------------------------


def test_a_prompt_begins_as_the_run_s_documents(tokenizer: str, tmp_path: Path) -> None:
    """With the tokenizer's own beginning where no record tells; and never with two."""
    (tmp_path / "a.txt").write_text("text " * 20)
    prefix = str(tmp_path / "out")
    reader = load_tokenizer(tokenizer)
    assert prompt_begin(reader, "auto", None) == ((BOS,), None)
    prepare([str(tmp_path / "a.txt")], prefix, tokenizer, bos="never")
    assert prompt_begin(reader, "auto", prefix) == prompt_begin(reader, "auto", [(1.0, prefix)]) == ((), None)
    assert prompt_begin(reader, "always", prefix) == ((BOS,), None)
    prepare([str(tmp_path / "a.txt")], prefix, tokenizer)
    assert prompt_begin(reader, "auto", prefix) == ((BOS,), None)
    assert prompt_begin(reader, "never", prefix) == ((), None)
    plain = load_tokenizer(byte_tokenizer(tmp_path / "plain", begins=False))
    prepare([str(tmp_path / "a.txt")], prefix, plain.name, bos="always")
    assert prompt_begin(plain, "auto", prefix) == ((BOS,), None)
    assert prompt_begin(plain, "auto", None) == ((), None)

    ids = reader.encode("ab").tolist()
    assert encode_prompt(reader, "ab", (BOS,)) == encode_prompt(reader, "<s>ab", (BOS,)) == [BOS, *ids]
    assert encode_prompt(reader, "", (BOS,)) == [BOS] and encode_prompt(reader, "ab", ()) == ids


@pytest.mark.parametrize(("bos", "begin"), [("never", ()), ("auto", (BOS,))])
@pytest.mark.parametrize("has_sidecar", [True, False])
def test_a_prompt_begins_as_documents_of_an_earlier_version(
    bos: str, begin: tuple[int, ...], has_sidecar: bool, tokenizer: str, tmp_path: Path
) -> None:
    """No record tells of BOS tokens there, but the documents themselves do."""
    (tmp_path / "a.txt").write_text("text " * 20)
    prefix = str(tmp_path / "out")
    prepare([str(tmp_path / "a.txt")], prefix, tokenizer, bos=bos)
    if has_sidecar:
        without_record(prefix)
    else:
        Path(f"{prefix}.json").unlink()
    assert prompt_begin(load_tokenizer(tokenizer), "auto", prefix) == (begin, None)


def test_a_prompt_begins_as_the_checkpoint_records(tokenizer: str, tmp_path: Path) -> None:
    """The corpus may be elsewhere by then; without a record the user is told what is assumed."""
    (tmp_path / "a.txt").write_text("text " * 20)
    reader = load_tokenizer(tokenizer)
    assert prompt_begin(reader, "auto", "nowhere", False) == ((), None)
    assert prompt_begin(reader, "auto", "nowhere", True) == ((BOS,), None)
    assert prompt_begin(reader, "never", "nowhere", True) == ((), None)
    plain = load_tokenizer(byte_tokenizer(tmp_path / "plain", begins=False))
    assert prompt_begin(plain, "auto", "nowhere", True) == ((BOS,), None)
    for prefix, choice in (("without", "never"), ("with", "always")):
        prepare([str(tmp_path / "a.txt")], str(tmp_path / prefix), tokenizer, bos=choice)
    blend = [(1.0, str(tmp_path / "without")), (1.0, str(tmp_path / "with"))]
    for train in ("nowhere", blend):
        begin, line = prompt_begin(reader, "auto", train)
        assert begin == (BOS,) and line is not None and "the prompt begins with it" in line
        begin, line = prompt_begin(plain, "auto", train)
        assert begin == () and line is not None and "the prompt does not begin with it" in line
    assert prompt_begin(load_tokenizer("bytes"), "auto", "nowhere") == ((), None)


@pytest.mark.parametrize(("choice", "begin"), [("never", []), ("always", [BOS])])
def test_a_run_keeps_how_its_documents_begin(
    choice: str, begin: list[int], tokenizer: str, asked: list[Any], tmp_path: Path, capsys: Any
) -> None:
    """In every checkpoint, also of a run that was resumed; so the corpus may be moved."""
    (tmp_path / "a.txt").write_text("text " * 200)
    prefix = str(tmp_path / "data/out")
    prepare([str(tmp_path / "a.txt")], prefix, tokenizer, bos=choice)
    train = {"seq_len": 8, "device": "cpu", "global_batch_size": 1, "micro_batch_size": 1}
    raw = {
        "model": {"num_layers": 1, "hidden_size": 16, "num_heads": 2, "vocab_size": 258},
        "train": train,
        "data": {"train": prefix, "tokenizer": tokenizer},
        "log": {"dir": str(tmp_path / "run")},
    }
    (tmp_path / "config.json").write_text(json.dumps(raw))
    for steps in (1, 2):
        config = str(tmp_path / "config.json")
        done = run_script("launch/pretrain.py", "--config", config, f"train.steps={steps}")
        assert done.returncode == 0, done.stdout + done.stderr
    (tmp_path / "data").rename(tmp_path / "moved")
    words = ["--checkpoint", str(tmp_path / "run"), "--prompt", "hello", "--device", "cpu"]
    assert generate_script.run(words, RankInfo()) == 0
    assert asked[0][0] == [*begin, *load_tokenizer(tokenizer).encode("hello").tolist()]
    assert "WARNING" not in capsys.readouterr().err


@pytest.fixture
def run_folder(tokenizer: str, tmp_path: Path) -> Path:
    """A checkpoint of random weights with that tokenizer."""
    raw = {
        "model": {"num_layers": 1, "hidden_size": 16, "num_heads": 2, "vocab_size": 258},
        "train": {"seq_len": 32},
        "data": {"tokenizer": tokenizer},
    }
    return Path(training.write_weights(tmp_path / "run", run_of(raw)))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], frozenset[int]]]:
    """The prompts that the model is given, and the tokens that end its text of two letters."""
    calls = []

    def generate(
        self: Decoder, prompt: list[int], count: int, sampler: Any, ends: Any, begin: Any
    ) -> Iterator[int]:
        assert list(begin) == prompt[:1] * (prompt[0] == BOS)
        calls.append((prompt, frozenset(ends)))
        yield from (70, 71, END)

    monkeypatch.setattr(Decoder, "generate", generate)
    return calls


@pytest.mark.parametrize(
    ("options", "begin"), [([], [BOS]), (["--bos", "never"], []), (["--bos", "always"], [BOS])]
)
def test_generate_puts_the_bos_token(
    options: list[str], begin: list[int], run_folder: Path, asked: list[Any], tokenizer: str, capsys: Any
) -> None:
    ids = load_tokenizer(tokenizer).encode("hello").tolist()
    assert (
        generate_script.run(["--checkpoint", str(run_folder), "--prompt", "hello", *options], RankInfo()) == 0
    )
    assert asked == [([*begin, *ids], frozenset({END}))]
    assert capsys.readouterr().out == f"hello{load_tokenizer(tokenizer).decode([70, 71])}\n"


def test_generate_tells_what_it_assumes(
    tokenizer: str, asked: list[Any], tmp_path: Path, capsys: Any
) -> None:
    """Of a checkpoint that does not record how documents begin, and whose corpus is gone."""
    raw = {
        "model": {"num_layers": 1, "hidden_size": 16, "num_heads": 2, "vocab_size": 258},
        "train": {"seq_len": 32},
        "data": {"tokenizer": tokenizer, "train": str(tmp_path / "gone")},
    }
    training.write_weights(tmp_path / "run", run_of(raw))
    words = ["--checkpoint", str(tmp_path / "run"), "--prompt", "a"]
    line = f"WARNING: neither the checkpoint nor {tmp_path / 'gone'} tells whether the documents of the run"
    for options, is_told in (([], True), (["--bos", "never"], False)):
        assert generate_script.run([*words, *options], RankInfo()) == 0
        lines = capsys.readouterr().err.splitlines()
        assert [written.startswith(line) for written in lines if "WARNING" in written] == [True] * is_told
    assert [prompt[0] == BOS for prompt, _ in asked] == [True, False]


@pytest.mark.parametrize(
    ("listed", "ends"), [(7, {END, 7}), ([5, 9], {END, 5, 9}), (None, {END}), ([], {END})]
)
def test_any_end_token_of_the_generation_config_ends_a_text(
    listed: Any, ends: set[int], run_folder: Path, asked: list[Any], tokenizer: str
) -> None:
    """A model for conversations ends a turn and a text by different tokens."""
    Path(tokenizer).with_name("generation_config.json").write_text(json.dumps({"eos_token_id": listed}))
    assert generate_script.run(["--checkpoint", str(run_folder)], RankInfo()) == 0
    assert [call[1] for call in asked] == [ends]


@pytest.mark.parametrize("listed", ["</s>", [1, "2"], -1, True, {"a": 1}])
def test_a_generation_config_that_lists_no_ids(listed: Any, tokenizer: str) -> None:
    Path(tokenizer).with_name("generation_config.json").write_text(json.dumps({"eos_token_id": listed}))
    with pytest.raises(
        DataError, match=r"generation_config\.json: eos_token_id: .* is not usable \(a token id"
    ):
        load_tokenizer(tokenizer)


def test_the_library_generates_as_the_script_does(tokenizer: str, asked: list[Any]) -> None:
    """A model that is being trained is asked as it will be asked later."""

    class Stage:
        """As much of a model as generating needs here."""

        def eval(self) -> None: ...

        def train(self) -> None: ...

    raw = {"model": {"vocab_size": 258}, "data": {"tokenizer": tokenizer}}
    engine = SimpleNamespace(settle=lambda: None)
    step: Any = SimpleNamespace(engine=engine, stages=[Stage()], mesh=None, config=run_of(raw))
    reader = load_tokenizer(tokenizer)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Decoder, "__init__", lambda self, stages, mesh: None)
        assert library.generate(step, "hello") == "hello" + reader.decode([70, 71])
    assert asked == [([BOS, *reader.encode("hello").tolist()], frozenset({END}))]
