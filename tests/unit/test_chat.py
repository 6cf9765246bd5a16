"""Conversations become tokens of which the answers' alone are learned, as transformers marks them;
what is none is refused in a line.
"""

import json
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from launch import prepare as script
from megacore.config.schema import IGNORED, MASK
from megacore.data.indexed import IndexedTokens
from megacore.data.samples import EvalSamples, SampleStream
from megacore.errors import UserError
from megacore.tools.corpora import Sidecar, check_corpora
from megacore.tools.prepare.chat import chat_of, encode
from megacore.tools.prepare.conversations import WrongConversation
from megacore.tools.prepare.indexed_writer import IndexedWriter
from megacore.tools.text.tokenizer import BytesTokenizer, load_tokenizer
from megacore.train.loader import Loader
from tests.build import mesh_of, run_of, step_of
from tests.training import VOCAB_SIZE, write_config

CHATML = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% "
    "endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = """{{ bos_token }}{% for m in messages %}
    {%- if m.role == 'assistant' %}
<|im_start|>assistant
{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}

    {%- else %}
<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
    {%- endif %}
{% endfor %}"""


def said(*turns: str) -> list[dict[str, str]]:
    return [{"role": "assistant" if i % 2 else "user", "content": turn} for i, turn in enumerate(turns)]


TALK = said("Two and two?", "Four, é 日.", "And 3?", "Five ")


@pytest.fixture
def fast(tmp_path: Path) -> Any:
    """A byte-level tokenizer with special tokens, as transformers writes it; returns transformers' own."""
    transformers = pytest.importorskip(
        "transformers", reason="transformers is not installed: pip install -e '.[test]'"
    )
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    ids = {piece: i for i, piece in enumerate(["<s>", "<|im_start|>", "<|im_end|>", *alphabet, "Ġa", "an"])}
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(ids, [("Ġ", "a"), ("a", "n")]))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    specials = {"bos_token": "<s>", "eos_token": "<|im_end|>", "additional_special_tokens": ["<|im_start|>"]}
    own = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, **specials)
    own.chat_template = MARKED
    own.save_pretrained(tmp_path / "model")
    return own


def test_a_marking_template_gives_what_transformers_gives(fast: Any, tmp_path: Path) -> None:
    """Ids and mask, from the model's own template: other ids would be tuned than
    the model is asked with later.
    """
    name = str(tmp_path / "model/tokenizer.json")
    [(tokens, learned, size, _)] = encode(
        chat_of(name, None), load_tokenizer(name), [json.dumps({"messages": TALK})]
    )
    theirs = fast.apply_chat_template(TALK, return_dict=True, return_assistant_tokens_mask=True)
    assert (
        tokens.tolist() == theirs["input_ids"] and learned.astype(int).tolist() == theirs["assistant_masks"]
    )
    assert size == len(fast.apply_chat_template(TALK, tokenize=False).encode())
    assert fast.decode(tokens[learned]) == "Four, é 日.<|im_end|>Five <|im_end|>"


def test_a_plain_template_is_cut_where_answers_begin_and_end(fast: Any, tmp_path: Path) -> None:
    (tmp_path / "chatml").write_text(CHATML)
    name = str(tmp_path / "model/tokenizer.json")
    [(tokens, learned, _, _)] = encode(
        chat_of(name, str(tmp_path / "chatml")), load_tokenizer(name), [json.dumps({"messages": TALK})]
    )
    assert (
        tokens.tolist() == fast.apply_chat_template(TALK, chat_template=CHATML, return_dict=True)["input_ids"]
    )
    assert fast.decode(tokens[learned]) == "Four, é 日.<|im_end|>\nFive <|im_end|>\n"


TURNS = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}{% if add_generation_prompt "
    "%}a:{% endif %}"
)
ANSWER = {"role": "assistant", "content": "b"}
REFUSED: list[tuple[Any, str, str]] = [
    ([1], TURNS, "is not an object"),
    ({"messages": []}, TURNS, "has no list of messages"),
    ([{"content": "a"}], TURNS, "has no role in message 1"),
    ([{"role": "bot", "content": "a"}, ANSWER], TURNS, "has the unknown role 'bot' in message 1"),
    ([{"role": "user", "content": ["a"]}, ANSWER], TURNS, "has a part of the type 'str' in message 1"),
    ([{"role": "user", "content": {"a": 1}}, ANSWER], TURNS, "has no text as the content of message 1"),
    (said("a", " \n"), TURNS, "has an empty answer, message 2"),
    (said("a"), TURNS, "has no answer: no message is of the role assistant"),
    (said("a", "\ufdd0"), TURNS, "holds U+FDD0, U+FDD1 or U+FDD2"),
    (said("a", "\ud800"), TURNS, "holds half a surrogate pair"),
    (said("a", "b"), "{{ raise_exception('roles\nmust alternate') }}", "template fail: roles must alternate"),
    (said("a", "b"), "{{ messages[9].content.x.y }}", "template fail: "),
    (
        said("a", "b"),
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "template fail: access to attribute '__class__' of 'str'",
    ),
    (
        said("a", "b", "c", "d"),
        "{{ messages|length }}" + TURNS,
        "is written otherwise up to message 2 than as a whole",
    ),
    (
        said("a", "b"),
        "{{ messages[0].content }}",
        "which is to be learned and which the template does not write",
    ),
    (said("a", "b"), "{% generation %}{% endgeneration %}", "which the template does not write"),
    (
        said("a", "b"),
        "{% generation %}{% generation %}x{% endgeneration %}{% endgeneration %}",
        "has answers within answers",
    ),
    (
        said("a", "b"),
        "{% set x %}{% generation %}x{% endgeneration %}{% endset %}{{ x[:1] }}",
        "has an answer without an end",
    ),
]


@pytest.mark.parametrize(("record", "template", "wrong"), REFUSED)
def test_what_cannot_be_learned_from_is_refused(
    record: Any, template: str, wrong: str, tmp_path: Path
) -> None:
    """Left out or learned as it is, it would be noticed by the answers of the tuned model only."""
    (tmp_path / "template").write_text(template)
    record = {"messages": record} if isinstance(record, list) and record != [1] else record
    with pytest.raises(WrongConversation) as caught:
        list(encode(chat_of("bytes", str(tmp_path / "template")), BytesTokenizer(), [json.dumps(record)]))
    assert wrong in caught.value.args[0] and "\n" not in "".join(caught.value.args)


def prepared(folder: Path, *records: Any, more: tuple[str, ...] = ()) -> str:
    """The prefix of a corpus of conversations, in bytes, written by the script."""
    (folder / "talk.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (folder / "turns.jinja").write_text(TURNS)
    words = [
        "--input",
        str(folder / "talk.jsonl"),
        "--output",
        str(folder / "out"),
        "--tokenizer",
        "bytes",
        "--workers",
        "1",
    ]
    script.run([*words, "--chat", "--template", str(folder / "turns.jinja"), *more])
    return str(folder / "out")


def test_the_next_command_keeps_conversations_apart(tmp_path: Path, capsys: Any) -> None:
    """Typed as it is printed, it must not let an answer see the conversation before it, or cut one."""
    prefix = prepared(tmp_path, {"messages": said("ab", "cd")})
    words = shlex.split(capsys.readouterr().out.splitlines()[-1])
    config = run_of(words[words.index("--config") + 1], *words[words.index("--config") + 2 :])
    assert config.data.document_mask and config.data.packing == "best_fit" and config.data.train == prefix


def test_the_script_writes_tokens_and_their_mask(tmp_path: Path) -> None:
    """Each conversation a document, a byte a token; and a later corpus of that name
    without a mask has none.
    """
    prefix = prepared(tmp_path, {"messages": said("ab", "cd")}, {"messages": said("e", "f", "g", "h")})
    corpus = IndexedTokens(prefix)
    text, mask = bytes(corpus.read(0, corpus.num_tokens)), corpus.learned(0, corpus.num_tokens)
    assert text == b"u:ab;a:cd;u:e;a:f;u:g;a:h;" and corpus.num_documents == 2 and corpus.masked
    assert bytes(np.frombuffer(text, np.uint8)[mask]) == b"cd;f;h;"
    sidecar = Sidecar.load(prefix)
    assert sidecar is not None and (sidecar.learned, sidecar.max_token) == (7, ord("u"))
    assert sidecar.unigram_entropy == pytest.approx(4 / 7 * np.log(7) + 3 / 7 * np.log(7 / 3))
    (tmp_path / "plain.txt").write_text("plain")
    script.run(
        ["--input", str(tmp_path / "plain.txt"), "--output", prefix, "--tokenizer", "bytes", "--workers", "1"]
    )
    assert not IndexedTokens(prefix).masked and not Path(prefix + MASK).exists()


def test_the_line_is_named_and_nothing_written(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"talk\.jsonl: line 2 has an empty answer, message 2"):
        prepared(tmp_path, {"messages": said("a", "b")}, {"messages": said("a", "")})
    assert not list(tmp_path.glob("out*"))


def masked_corpus(folder: Path, name: str, tokens: np.ndarray, learned: np.ndarray) -> str:
    with IndexedWriter(str(folder / name), np.uint16, masked=True) as writer:
        writer.write(tokens, learned)
    return str(folder / name)


def test_a_mask_that_does_not_belong_is_refused(tmp_path: Path) -> None:
    prefix = masked_corpus(tmp_path, "a", np.arange(8), np.ones(8, np.bool_))
    Path(prefix + MASK).write_bytes(b"\1" * 7)
    with pytest.raises(UserError, match=r"a\.mask\.bin: has 7 bytes, and the corpus 8 tokens"):
        SampleStream(prefix, 4, 0, 10)
    Path(prefix + MASK).write_bytes(b"\2" * 8)
    with pytest.raises(UserError, match=r"a\.mask\.bin: holds the byte 2"):
        EvalSamples(prefix, 4, 10).samples(np.arange(1))
    Path(prefix + MASK).write_bytes(b"\0" * 8)
    for spec in (prefix, [(1, prefix)]):
        with pytest.raises(UserError, match=r"a\.mask\.bin: leaves out every token, so nothing is learned"):
            check_corpora(EvalSamples(spec, 4, 10).corpora, 10)
    prefix = prepared(tmp_path, {"messages": said("a", "b")})
    Path(prefix + MASK).unlink()
    with pytest.raises(
        UserError, match=r"out\.mask\.bin: is missing, and .*out\.json says that only 2 tokens are learned"
    ):
        check_corpora(SampleStream(prefix, 4, 0, 256).corpora, 256)


def test_a_blend_learns_all_of_a_corpus_without_a_mask(tmp_path: Path) -> None:
    learned = np.arange(41) % 3 == 0
    masked = masked_corpus(tmp_path, "a", np.arange(41), learned)
    with IndexedWriter(str(tmp_path / "b"), np.uint16) as writer:
        writer.write(np.arange(41) + 50)
    stream = SampleStream([(1, masked), (1, str(tmp_path / "b"))], 8, 0, 100)
    tokens, found = stream.samples(np.arange(10)), stream.learned(np.arange(10))
    assert found is not None and np.array_equal(found, np.where(tokens < 50, learned[tokens % 50], True))
    _, targets = EvalSamples([(1, masked), (1, str(tmp_path / "b"))], 8, 100).samples(np.arange(10))
    assert sorted(targets[targets != IGNORED].tolist()) == [*np.flatnonzero(learned)[1:], *range(51, 91)]


def trained(folder: Path, prefix: str) -> dict[str, torch.Tensor]:
    """All state behind two steps on a corpus."""
    config = run_of(write_config(folder, prefix, train={"global_batch_size": 4, "steps": 2}))
    mesh = mesh_of(config)
    step, stream = step_of(config, mesh), SampleStream(prefix, 16, 0, VOCAB_SIZE)
    loader = Loader(config, mesh, stream)
    for number in (1, 2):
        step(number, loader.read(number))
    loader.close()
    step.engine.settle()
    held = {name: tensor.detach().clone() for name, (tensor, _) in step.engine.tensors().items()}
    step.engine.close()
    mesh.close()
    return held


def test_masked_tokens_contribute_nothing(tmp_path: Path) -> None:
    """Bit for bit: of every sample the last tokens, behind its last learned one, are others.

    A learned one does change the weights.
    """
    rng, learned = np.random.default_rng(0), np.arange(16 * 20 + 1) % 16 < 9  # a sample's targets 1…8 of 1…16
    tokens = rng.integers(VOCAB_SIZE, size=len(learned))
    # the last target of a sample is the next one's first token, which has to stay
    learned[0] = learned[16::16] = False
    others = np.where(np.arange(len(learned)) % 16 > 8, rng.integers(VOCAB_SIZE, size=len(learned)), tokens)
    assert (others != tokens).sum() > 100
    right, found = (
        trained(tmp_path, masked_corpus(tmp_path, name, t, learned))
        for name, t in (("a", tokens), ("b", others))
    )
    assert right and all(torch.equal(right[name], found[name]) for name in right)
    others[8::16] = (others[8::16] + 1) % VOCAB_SIZE
    wrong = trained(tmp_path, masked_corpus(tmp_path, "c", others, learned))
    assert not all(torch.equal(right[name], wrong[name]) for name in right)
