"""Tokenizers and chat templates of strangers: whatever they take or break, it is one
line, and this process goes on.
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from launch import generate, prepare
from megacore.data.indexed import IndexedTokens
from megacore.errors import UserError
from megacore.tools.prepare.chat import chat_of, encode
from megacore.tools.prepare.conversations import WrongConversation
from megacore.tools.text import sandbox
from megacore.tools.text.tokenizer import BytesTokenizer, load_tokenizer

ANSWER = {"role": "assistant", "content": "b"}
TALK = {"messages": [{"role": "user", "content": "a"}, ANSWER]}
WORDS = {"type": "WordLevel", "vocab": {"a": 0, "b": 1, "c": 2, "?": 3}, "unk_token": "?"}
SPACES = {"type": "Whitespace"}
END = {
    "id": 4,
    "content": "</s>",
    "special": True,
    "single_word": False,
    "lstrip": False,
    "rstrip": False,
    "normalized": False,
}
CUT = {"max_length": 5, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}
PADDED = {
    "strategy": {"Fixed": 64},
    "direction": "Right",
    "pad_to_multiple_of": None,
    "pad_id": 3,
    "pad_type_id": 0,
    "pad_token": "?",
}

pytest.importorskip("tokenizers", reason="tokenizers is not installed")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sandbox that may take less, so that these tests end soon."""
    monkeypatch.setattr(sandbox, "SECONDS", 1)
    monkeypatch.setattr(sandbox, "SECONDS_A_BYTE", 0.0)
    monkeypatch.setattr(sandbox, "MEMORY", 700 << 20)
    monkeypatch.setattr(sandbox, "ANSWER", 1 << 20)


def tokenizer_file(folder: Path, **content: Any) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    whole = {"version": "1.0", "added_tokens": [], "pre_tokenizer": SPACES, "model": WORDS} | content
    (folder / "tokenizer.json").write_text(json.dumps(whole))
    return str(folder / "tokenizer.json")


@pytest.mark.parametrize(
    "lengths", [{"truncation": CUT}, {"padding": PADDED}, {"truncation": CUT, "padding": PADDED}]
)
def test_a_text_is_neither_cut_nor_padded(lengths: dict[str, Any], tmp_path: Path) -> None:
    """Ordinary files say so for other uses; of a text of 1,000 words 5 were left, and nothing said a word."""
    name = tokenizer_file(tmp_path, **lengths)
    (tmp_path / "text.txt").write_text("a b c " * 333 + "c")
    prepare.run(
        [
            "--input",
            str(tmp_path / "text.txt"),
            "--output",
            str(tmp_path / "out"),
            "--tokenizer",
            name,
            "--workers",
            "1",
        ]
    )
    corpus = IndexedTokens(str(tmp_path / "out"))
    assert corpus.read(0, corpus.num_tokens).tolist() == [0, 1, 2] * 333 + [2]
    assert generate.pick_tokenizer(None, name, 100).encode("b c").tolist() == [1, 2]
    (tmp_path / "t").write_text(
        "{% for m in messages %}{% generation %}{{ m.content }} {% endgeneration %}{% endfor %}"
    )
    long = json.dumps({"messages": [{"role": "assistant", "content": "a b " * 50}]})
    [(tokens, _, _, _)] = encode(chat_of(name, str(tmp_path / "t")), load_tokenizer(name), [long])
    assert tokens.tolist() == [0, 1] * 50


def test_no_merge_is_left_out_by_chance(tmp_path: Path) -> None:
    """`dropout` in the file would prepare another corpus each time."""
    model = {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]], "dropout": 0.9}
    assert (
        load_tokenizer(tokenizer_file(tmp_path, model=model, pre_tokenizer=None)).encode("ab" * 50).tolist()
        == [2] * 50
    )


@pytest.mark.parametrize(
    ("file", "content", "end"),
    [
        ("tokenizer_config.json", {"eos_token": "b"}, 1),
        ("special_tokens_map.json", {"eos_token": {"content": "c"}}, 2),
        ("unrelated.json", {}, 4),  # the one special token that is known for ends
    ],
)
def test_documents_end_without_a_tokenizer_config(
    file: str, content: Any, end: int, tmp_path: Path, capsys: Any
) -> None:
    """Without that file no document had an end, and nothing said so."""
    name = tokenizer_file(tmp_path, added_tokens=[END])
    (tmp_path / file).write_text(json.dumps(content))
    assert load_tokenizer(name).end_of_document == end


def test_ids_may_have_gaps(tmp_path: Path) -> None:
    """The number of tokens is not the largest id: counts by id had no place for it."""
    name = tokenizer_file(tmp_path, model=WORDS | {"vocab": {"a": 0, "?": 300}})
    (tmp_path / "text.txt").write_text("a b")
    prepare.run(
        [
            "--input",
            str(tmp_path / "text.txt"),
            "--output",
            str(tmp_path / "out"),
            "--tokenizer",
            name,
            "--workers",
            "1",
        ]
    )
    assert IndexedTokens(str(tmp_path / "out")).read(0, 2).tolist() == [0, 300]


TOKENIZERS: list[tuple[str, dict[str, Any], str]] = [
    ("a panic on every text", {"pre_tokenizer": {"type": "FixedLength", "length": 0}}, "it fails: "),
    ("a panic at the file", {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "////fw=="}}, ""),
    ("a map of a TB", {"model": WORDS | {"vocab": {"a": 0, "?": 2**32 - 1}}}, "has ids up to 4,294,967,295"),
    (
        "no word for the unknown",
        {"model": WORDS | {"unk_token": "none"}},
        "it fails: WordLevel error: Missing [UNK]",
    ),
    (
        "text that grows without end",
        {
            "normalizer": {
                "type": "Sequence",
                "normalizers": [{"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 1000}] * 4,
            }
        },
        "it takes ",
    ),
]


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("content", "line"), [row[1:] for row in TOKENIZERS], ids=[row[0] for row in TOKENIZERS]
)
def test_a_tokenizer_that_breaks_is_one_line(
    content: dict[str, Any], line: str, tmp_path: Path, capfd: Any
) -> None:
    """A panic in Rust is no `Exception`; what takes all memory in native code ends its process; and
    what never ends cannot be stopped.
    """
    name = tokenizer_file(tmp_path / "model", **content)
    (tmp_path / "text.txt").write_text("a z")
    words = ["--input", str(tmp_path / "text.txt"), "--output", str(tmp_path / "out"), "--tokenizer", name]
    for workers in ("1", "2"):
        with pytest.raises(UserError) as caught:
            prepare.run([*words, "--workers", workers])
        said = str(caught.value)
        assert said.startswith(f"data error: {name}: ") and line in said and "\n" not in said
    assert capfd.readouterr() == ("", "") and sorted(os.listdir(tmp_path)) == ["model", "text.txt"]


TEMPLATES: list[tuple[str, str]] = [
    ("{{ 'x' * 10**10 }}", "memory"),
    ("{{ [0] * 10**10 }}", "memory"),
    ("{{ 10 ** (10 ** 9) }}", "time"),
    ("{{ '%999999999d' % 1 }}", "memory"),
    ("{{ '{:999999999}'.format(1) }}", "memory"),
    ("{{ 'a'.center(999999999) }}", "memory"),
    ("{{ 'a'.ljust(999999999) }}", "memory"),
    ("{{ 'a'|center(999999999) }}", "memory"),
    ("{{ 'a\nb'|indent(999999999) }}", "memory"),
    ("{{ messages|tojson(indent=999999999) }}", "memory"),
    ("{{ strftime_now('%999999999d') }}", ""),
    (
        "{% set n = namespace(s='aaaaaaaa') %}{% for i in range(99) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
        "memory",
    ),
    ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "time"),
    ("{% generation %}{{ messages[1].content * 2_000_000 }}{% endgeneration %}", "bytes of"),
    ("{{ " + "(" * 50_000, ""),
    ("{% if 1 %}" * 5_000, ""),
]
TAKES = {
    "memory": "memory",
    "time": "it takes more than 1 s of processor time",
    "bytes of": "bytes of",
    "": "",
}


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(("template", "what"), TEMPLATES, ids=[row[0][:40] for row in TEMPLATES])
def test_a_template_that_takes_too_much_is_one_line(template: str, what: str, tmp_path: Path) -> None:
    """Gigabytes, or minutes, by whatever expression: no list of them is ever complete."""
    (tmp_path / "template").write_text(template)
    with pytest.raises((WrongConversation, UserError)) as caught:
        list(encode(chat_of("bytes", str(tmp_path / "template")), BytesTokenizer(), [json.dumps(TALK)]))
    assert TAKES[what] in str(caught.value.args[0]) and "\n" not in str(caught.value.args[0])


@pytest.mark.usefixtures("small")
def test_a_conversation_of_40_000_messages_ends(tmp_path: Path) -> None:
    """A plain template writes the text before every answer once more: what is quadratic
    is stopped, and its line named.
    """
    (tmp_path / "talk.jsonl").write_text(json.dumps({"messages": TALK["messages"] * 20_000}) + "\n")
    (tmp_path / "t").write_text("{% for m in messages %}{{ m.content }};{% endfor %}")
    words = [
        "--input",
        str(tmp_path / "talk.jsonl"),
        "--output",
        str(tmp_path / "out"),
        "--tokenizer",
        "bytes",
        "--chat",
    ]
    with pytest.raises(
        UserError,
        match=r"talk\.jsonl: line 1 makes \S*/t, or the tokenizer, fail: it takes more than 1 s of processor",
    ):
        prepare.run([*words, "--template", str(tmp_path / "t"), "--workers", "1"])


def ends(number: int) -> tuple[None, bytes]:
    os.kill(os.getpid(), number)
    return None, b""


def echoes(body: bytes) -> tuple[None, bytes]:
    return None, body


def test_the_next_question_finds_a_new_process() -> None:
    """One that has ended, or that a fork shares with its parent, answers nobody."""
    with pytest.raises(sandbox.Failure, match="ends the process that runs it \\(SIGSEGV\\)"):
        sandbox.call(ends, 11)
    assert sandbox.call(echoes, body=b"\0x")[1] == b"\0x"
    child = os.fork()
    if child == 0:
        os._exit(sandbox.call(echoes, body=b"child")[1] != b"child")
    assert sandbox.call(echoes, body=b"parent")[1] == b"parent" and os.waitpid(child, 0)[1] == 0


def test_a_sandbox_ends_with_its_owner_in_the_middle_of_an_answer() -> None:
    """After Ctrl-C or a kill, a process that still worked on a long text would be left on the machine."""
    process = sandbox.Sandbox()
    try:
        process.connection.send_bytes(json.dumps(["time:sleep", [60], "/", [60, 1 << 30, 100]]).encode())
        process.connection.send_bytes(b"")
        process.connection.close()
        assert process.process.wait(30) == 1
    finally:
        process.close()
