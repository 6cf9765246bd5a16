"""Texts in compressed files, tables and saved data sets arrive as from plain JSON lines; a
damaged one is named in a line.
"""

import gzip
import io
import json
import os
import shutil
import sys
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from launch import prepare as script
from megacore.data.indexed import MASK, IndexedTokens
from megacore.errors import UserError
from megacore.tools.prepare import prepare as prepare_module
from megacore.tools.prepare import sources, streams
from megacore.tools.prepare.prepare import prepare

EXTRA = "pyarrow is not installed: pip install -e '.[datasets]'"
TEXTS = ["é" * n + f" {n}\nand more" for n in (1, 700, 3, 0, 1400, 120, 7)] + ["", "two\r\nlines", "日" * 900]
TALKS = [
    [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": "é" * n + "!"}]
    for n in range(1, 30)
]


@pytest.fixture(autouse=True)
def as_if_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if texts were large: many blocks, parts and tasks, of which every second
    puts what is done on the disk.
    """
    for module, name, value in (
        (sources, "BLOCK_BYTES", 256),
        (sources, "CUT_WINDOW", 128),
        (streams, "PART_BYTES", 300),
        (streams, "PART_ROWS", 2),
        (prepare_module, "TASK_BYTES", 1000),
        (prepare_module, "COMMIT_BYTES", 1500),
    ):
        monkeypatch.setattr(module, name, value)


def as_lines(texts: list[Any], key: str = "text") -> bytes:
    return b"".join(json.dumps({"id": i, key: text}).encode() + b"\n" for i, text in enumerate(texts))


def arrow(texts: list[Any], key: str = "text", kind: str = "string") -> Any:
    """A table with a column of texts, and another one."""
    pa = pytest.importorskip("pyarrow", reason=EXTRA)
    column = pa.array(texts, getattr(pa, kind)() if kind != "dictionary" else None)
    return pa.table(
        {"id": list(range(len(texts))), key: column.dictionary_encode() if kind == "dictionary" else column}
    )


def parquet(path: Path, texts: list[Any], **more: Any) -> None:
    table = arrow(texts, **more)
    import pyarrow.parquet

    pyarrow.parquet.write_table(table, path, row_group_size=3, compression="zstd")


def feather(path: Path, texts: list[Any], **more: Any) -> None:
    table = arrow(texts, **more)
    import pyarrow.feather

    pyarrow.feather.write_feather(table, str(path), chunksize=3)


def stream(path: Path, texts: list[Any], **more: Any) -> None:
    table = arrow(texts, **more)
    import pyarrow.ipc

    with pyarrow.ipc.new_stream(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=5)


def saved(folder: Path, texts: list[Any], **more: Any) -> None:
    """As `save_to_disk` of the package datasets writes it, with a file that another
    command has left there.
    """
    folder.mkdir()
    middle = len(texts) // 2
    for i, part in enumerate((texts[:middle], texts[middle:])):
        stream(folder / f"data-{i:05}-of-00002.arrow", part, **more)
    shutil.copy(folder / "data-00000-of-00002.arrow", folder / "cache-1a2b.arrow")
    (folder / "dataset_info.json").write_text("{}")
    (folder / "state.json").write_text(
        json.dumps({"_data_files": [{"filename": f"data-{i:05}-of-00002.arrow"} for i in range(2)]})
    )


def saved_splits(folder: Path, texts: list[Any], **more: Any) -> None:
    folder.mkdir()
    (folder / "dataset_dict.json").write_text('{"splits": ["train"]}')
    saved(folder / "train", texts, **more)


def zstd(data: bytes) -> bytes:
    """In two frames, as parallel compressors write them."""
    pa = pytest.importorskip("pyarrow", reason=EXTRA)
    return b"".join(pa.compress(part, "zstd", asbytes=True) for part in (data[:99], data[99:]))


FORMS: dict[str, Callable[[Path, list[Any]], object]] = {
    "a.jsonl.gz": lambda path, texts: path.write_bytes(gzip.compress(as_lines(texts))),
    "a.jsonl.zst": lambda path, texts: path.write_bytes(zstd(as_lines(texts))),
    "a.parquet": parquet,
    "large.parquet": lambda path, texts: parquet(path, texts, kind="large_string"),
    "dictionary.parquet": lambda path, texts: parquet(path, texts, kind="dictionary"),
    "a.feather": feather,
    "a.arrow": stream,
    "saved": saved,
    "splits": saved_splits,
}


def files(prefix: Path) -> dict[str, bytes]:
    """What was written, by the name behind the prefix; without the sidecars, which name no source."""
    return {
        path.name.removeprefix(prefix.name): path.read_bytes()
        for path in prefix.parent.glob(f"{prefix.name}*")
    }


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_what_json_lines_give(form: str, tmp_path: Path) -> None:
    """The same documents, in the same order and with the same ends, on the same side;
    also from a folder among others.
    """
    (tmp_path / "plain.jsonl").write_bytes(as_lines(TEXTS))
    (tmp_path / "in").mkdir()
    FORMS[form](tmp_path / "in" / form, TEXTS)
    done: list[int] = []
    for name, inputs in (("out/plain", "plain.jsonl"), ("out/other", f"in/{form}"), ("out/folder", "in")):
        on_start = lambda total: done.append(-total)  # noqa: E731
        prepare(
            [str(tmp_path / inputs)],
            str(tmp_path / name),
            "bytes",
            valid_fraction=0.3,
            on_start=on_start,
            on_bytes=done.append,
        )
    plain = files(tmp_path / "out/plain")
    assert plain == files(tmp_path / "out/other") == files(tmp_path / "out/folder") and len(plain) == 6
    assert sum(done) == 0, "the progress ends elsewhere than at its total"


@pytest.mark.parametrize("pack", [gzip.compress, zstd], ids=["gz", "zst"])
@pytest.mark.parametrize(
    "text",
    ["one line\nand\n" * 99 + "end", "日é" * 2000, "", "\n" * 999],
    ids=["lines", "one", "empty", "blank"],
)
def test_a_compressed_text_is_one_document(pack: Any, text: str, tmp_path: Path) -> None:
    """Cut between characters, put together again, and ended once; beside another one, so
    that both may be for validation.
    """
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text(f"{text}{name}", newline="")
        (tmp_path / f"{name}.md.x").write_bytes(pack(f"{text}{name}".encode()))
    for name, ending in (("plain", "txt"), ("packed", "md.x")):
        prepare(
            [str(tmp_path / f"{each}.{ending}") for each in ("a", "b")],
            str(tmp_path / "out" / name),
            "bytes",
            valid_fraction=0.5,
        )
    plain, packed = files(tmp_path / "out/plain"), files(tmp_path / "out/packed")
    assert plain[".bin"] == packed[".bin"] and plain["_valid.bin"] == packed["_valid.bin"] and plain[".bin"]
    assert plain[".json"].split(b"unigram")[0] == packed[".json"].split(b"unigram")[0]


@pytest.mark.parametrize("form", ["talks.jsonl.gz", "talks.parquet", "talks"])
def test_conversations(form: str, tmp_path: Path) -> None:
    """A table gives every message every key, and none to a key that a message had not."""
    records = [
        [*talk[:1], talk[1] | {"tool_calls": None}] if form != "talks.jsonl.gz" else talk for talk in TALKS
    ]
    if form == "talks.jsonl.gz":
        (tmp_path / form).write_bytes(gzip.compress(as_lines(TALKS, "messages")))
    else:
        pa = pytest.importorskip("pyarrow", reason=EXTRA)
        kind = pa.struct([("role", pa.string()), ("content", pa.string()), ("tool_calls", pa.string())])
        table = pa.table({"messages": pa.array(records, pa.list_(kind)), "id": list(range(len(records)))})
        if form == "talks":
            (tmp_path / form).mkdir()
            (tmp_path / form / "dataset_info.json").write_text("{}")
            (tmp_path / form / "state.json").write_text('{"_data_files": [{"filename": "0.arrow"}]}')
            with pa.ipc.new_stream(str(tmp_path / form / "0.arrow"), table.schema) as writer:
                writer.write_table(table)
        else:
            import pyarrow.parquet

            pyarrow.parquet.write_table(table, tmp_path / form)
    (tmp_path / "plain.jsonl").write_bytes(as_lines(TALKS, "messages"))
    template = (
        "{% for m in messages %}{{ m.role }}{{ m.tool_calls is defined }}: {{ m.content }}\n{% endfor %}"
    )
    template += "{% if add_generation_prompt %}assistantFalse: {% endif %}"
    (tmp_path / "t.jinja").write_text(template)
    for name, source in (("plain", "plain.jsonl"), ("other", form)):
        prepare(
            [str(tmp_path / source)],
            str(tmp_path / "out" / name),
            "bytes",
            chat=True,
            template=str(tmp_path / "t.jinja"),
        )
    assert files(tmp_path / "out/plain") == files(tmp_path / "out/other") and MASK in files(
        tmp_path / "out/plain"
    )


def test_a_tokenizer_is_trained_on_tables_too(tmp_path: Path) -> None:
    parquet(tmp_path / "a.parquet", ["learn these words"] * 300)
    prepare([str(tmp_path / "a.parquet")], str(tmp_path / "out/x"), "sentencepiece:280")
    assert (tmp_path / "out/x.model").stat().st_size > 1000


def cut(path: Path, by: int = 7) -> None:
    path.write_bytes(path.read_bytes()[:-by])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 255
    path.write_bytes(bytes(data))


NOISE = [np.random.default_rng(i).bytes(400).hex() for i in range(30)]  # compressed, it still has many parts
DAMAGED: list[tuple[str, Callable[[Path], object], str]] = [
    (
        "a.jsonl.gz",
        lambda p: (FORMS["a.jsonl.gz"](p, NOISE), cut(p)),
        "cannot be read to its end: Compressed file ended",
    ),
    ("a.jsonl.gz", lambda p: (FORMS["a.jsonl.gz"](p, NOISE), flip(p)), "cannot be read to its end"),
    ("a.jsonl.gz", lambda p: p.write_bytes(b""), "does not begin as a file of gzip does"),
    ("a.jsonl.gz", lambda p: p.write_bytes(gzip.compress(b"")), "no document has any text"),
    (
        "a.jsonl.gz",
        lambda p: p.write_bytes(gzip.compress(b'{"text": "a"}\n{"text": \n')),
        "line 2 is not JSON",
    ),
    (
        "a.jsonl.gz",
        lambda p: p.write_bytes(gzip.compress(as_lines(["a"], "body"))),
        "line 1 has no text under the key text (--text-key",
    ),
    ("a.jsonl.gz", lambda p: p.write_bytes(gzip.compress(b"\xff\n")), "is not UTF-8"),
    ("a.tar.gz", lambda p: p.write_bytes(gzip.compress(bytes(257) + b"ustar")), "is a tar archive"),
    (
        "a.json.gz",
        lambda p: p.write_bytes(gzip.compress(as_lines(["a", "b"]))),
        "a name that ends with .jsonl.gz",
    ),
    (
        "a.txt.gz",
        lambda p: p.write_bytes(gzip.compress(b"x" * (1 << 21), 9)),
        "unpacks to more than 500 times its size",
    ),
    (
        "a.jsonl.gz",
        lambda p: p.write_bytes(gzip.compress(NOISE[0].encode() * 20)),
        "line 1 has more than 10,000 bytes",
    ),
    (
        "a.txt.zst",
        lambda p: (p.write_bytes(zstd("".join(NOISE).encode())), cut(p)),
        "cannot be read to its end: Truncated",
    ),
    (
        "a.txt.zst",
        lambda p: p.write_bytes(b"\x28\xb5\x2f\xfd\0\xa8" + bytes(40)),
        "cannot be read to its end",
    ),
    (
        "a.parquet",
        lambda p: (parquet(p, NOISE), cut(p)),
        "cannot be read to its end: Parquet magic bytes not found",
    ),
    ("a.parquet", lambda p: p.write_bytes(b"PAR1" + bytes(92) + b"PAR1"), "cannot be read to its end"),
    ("a.parquet", lambda p: p.write_bytes(b""), "does not begin as a file of Parquet does"),
    ("a.parquet", lambda p: parquet(p, []), "no document has any text"),
    (
        "a.parquet",
        lambda p: parquet(p, ["a"], key="body"),
        "has no column text (--text-key with the column of its text; there is body)",
    ),
    (
        "a.parquet",
        lambda p: parquet(p, [1, 2], kind="int64"),
        "has a column text of int64, which is no text (--text-key with",
    ),
    ("a.parquet", lambda p: parquet(p, ["a", "b", "c", None]), "row 4 has no text in the column text"),
    ("a.feather", lambda p: (feather(p, NOISE), cut(p, 20)), "cannot be read to its end"),
    ("a.arrow", lambda p: (stream(p, NOISE), cut(p, 300)), "cannot be read to its end"),
    (
        "s",
        lambda p: (saved(p, NOISE), (p / "state.json").write_text('{"a": 1}')),
        "s/state.json: names no files under _data_files",
    ),
    (
        "s",
        lambda p: (saved(p, NOISE), (p / "state.json").write_text('{"_data_files": ["../x"]}')),
        "names no files under _data_files",
    ),
    (
        "s",
        lambda p: (saved(p, NOISE), (p / "data-00001-of-00002.arrow").unlink()),
        "data-00001-of-00002.arrow: cannot be read: No such",
    ),
    (
        "s",
        lambda p: (
            saved_splits(p, NOISE),
            (p / "dataset_dict.json").write_text('{"splits": ["train", "test"]}'),
        ),
        "s/train)",
    ),
]


@pytest.mark.parametrize(("name", "make", "complaint"), DAMAGED)
@pytest.mark.parametrize("tokenizer", ["bytes", "sentencepiece:300"])
def test_damaged(
    name: str, make: Any, complaint: str, tokenizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line that says where and what, and nothing is left: a cut file would be a shorter
    corpus, and nobody would know.
    """
    monkeypatch.setattr(streams, "SUSPECT_BYTES", 1 << 16)
    monkeypatch.setattr(streams, "MOST_LINE", 10_000)
    if not name.endswith(".gz"):
        pytest.importorskip("pyarrow", reason=EXTRA)
    make(tmp_path / name)
    with pytest.raises(UserError) as caught:
        prepare([str(tmp_path / name)], str(tmp_path / "out/x"), tokenizer)
    said = str(caught.value)
    assert (
        (complaint in said or "learned from" in said) and "\n" not in said and not (tmp_path / "out").exists()
    ), said


@pytest.mark.parametrize("name", ["a.jsonl.zst", "a.parquet", "a.feather", "a.arrow", "saved", "hf:stories"])
def test_without_the_extra_its_name_is_told(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of a file among others in a folder: left out, it would be missed by nobody."""
    if not name.startswith("hf:"):
        FORMS[name](tmp_path / name, TEXTS)
    (tmp_path / "more.txt").write_text("text")
    for module in [each for each in sys.modules if each.partition(".")[0] in ("pyarrow", "datasets")]:
        monkeypatch.delitem(sys.modules, module)
    for module in ("pyarrow", "datasets"):
        monkeypatch.setitem(sys.modules, module, None)
    for given in (name,) if name.startswith("hf:") else (str(tmp_path / name), str(tmp_path)):
        with pytest.raises(
            UserError,
            match=r"needs the package \w+, which is not installed \(pip install 'megacore\[datasets\]'",
        ):
            script.run(
                [
                    "--input",
                    given,
                    "--output",
                    str(tmp_path / "out/x"),
                    "--tokenizer",
                    "bytes",
                    "--workers",
                    "1",
                ]
            )
    assert not (tmp_path / "out").exists()


def test_a_single_compressed_text_is_not_divided(tmp_path: Path) -> None:
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"text\n" * 99))
    with pytest.raises(UserError, match="--valid-fraction: the last part of a single compressed text"):
        prepare([str(tmp_path / "a.txt.gz")], str(tmp_path / "out/x"), "bytes", valid_fraction=0.1)


def test_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A data set in a folder is streamed as one of the hub would be; a name that leads
    nowhere is one line.
    """
    pytest.importorskip("datasets", reason="datasets is not installed: pip install -e '.[datasets]'")
    for name, value in (("HF_HUB_OFFLINE", "1"), ("HF_HOME", str(tmp_path / "home"))):
        monkeypatch.setenv(name, value)
    (tmp_path / "set").mkdir()
    (tmp_path / "set/test.jsonl").write_bytes(as_lines(TEXTS, "body"))
    (tmp_path / "plain.jsonl").write_bytes(as_lines(TEXTS, "body"))
    for name, given in (("plain", str(tmp_path / "plain.jsonl")), ("hub", f"hf:{tmp_path}/set::test")):
        prepare([given], str(tmp_path / "out" / name), "bytes", text_key="body", valid_fraction=0.3)
    assert files(tmp_path / "out/plain") == files(tmp_path / "out/hub")
    for given, key, complaint in (
        (
            f"hf:{tmp_path}/set::test",
            "text",
            "has no column text (--text-key with the column of its text; there are id, body)",
        ),
        (f"hf:{tmp_path}/set::test", "id", "row 1 has no text in the column id"),
        (f"hf:{tmp_path}/set::other", "body", "cannot be streamed: Bad split: other"),
        (f"hf:{tmp_path}/nowhere", "body", "cannot be streamed: "),
        ("hf:", "body", "config error: --input: hf: names no data set"),
    ):
        with pytest.raises(UserError) as caught:
            prepare([given], str(tmp_path / "out/x"), "bytes", text_key=key)
        assert complaint in str(caught.value) and "\n" not in str(caught.value), str(caught.value)
    assert not list((tmp_path / "out").glob("x*")) and os.listdir(tmp_path / "out")


def test_conversations_of_the_hub_keep_their_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns besides the messages were not read, so an answer with a weight of 0 was learned."""
    pytest.importorskip("datasets", reason="datasets is not installed: pip install -e '.[datasets]'")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    (tmp_path / "set").mkdir()
    lines = [{"messages": talk, "unmask": number == 1} for number, talk in enumerate(TALKS[:3])]
    (tmp_path / "set/test.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "t.jinja").write_text("{% for m in messages %}{{ m.content }};{% endfor %}")
    inputs, template = [f"hf:{tmp_path}/set::test"], str(tmp_path / "t.jinja")
    prepare(inputs, str(tmp_path / "x"), "bytes", chat=True, template=template)
    corpus = IndexedTokens(str(tmp_path / "x"))
    tokens, learned = corpus.read(0, corpus.num_tokens), corpus.learned(0, corpus.num_tokens)
    assert bytes(tokens[learned]).decode() == "é!;2?;éé!;ééé!;"
    with pytest.raises(UserError, match=r"set::test: row 1 has no list of messages; its keys are id, body"):
        (tmp_path / "set/test.jsonl").write_bytes(as_lines(["a"], "body"))
        prepare(inputs, str(tmp_path / "y"), "bytes", chat=True, template=template)


def prepared(folder: Path, name: str, content: bytes, **more: Any) -> list[bytes]:
    """The documents that a file becomes, in bytes."""
    (folder / name).write_bytes(content)
    prefix = str(folder / "out/x")
    prepare([str(folder / name)], prefix, "bytes", **more)
    corpus = IndexedTokens(prefix)
    starts, lengths = corpus.documents(0, corpus.num_documents)
    return [bytes(corpus.read(int(s), int(n))) for s, n in zip(starts, lengths, strict=True)]


BOM = b"\xef\xbb\xbf"


@pytest.mark.parametrize(
    ("name", "pack"),
    [
        ("a.txt", bytes),
        ("a.jsonl", bytes),
        ("a.json", bytes),
        ("a.txt.gz", gzip.compress),
        ("a.jsonl.gz", gzip.compress),
    ],
)
def test_a_byte_order_mark_is_no_text(name: str, pack: Any, tmp_path: Path) -> None:
    """Windows editors write one; it was learned, or made the first line no JSON."""
    text = b"hello" if ".txt" in name else b'{"text": "hello"}'
    assert prepared(tmp_path, name, pack(BOM + text)) == [b"hello"]


@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gz"])
@pytest.mark.parametrize("lengths", [[700], [700, 3, 900], [1, 255, 256, 257, 0, 511, 512, 5000, 2]], ids=str)
def test_long_lines_are_read_once(pack: Any, lengths: list[int], tmp_path: Path) -> None:
    """Lines that are longer than blocks, end at their edges or go over many: each is one document."""
    texts = ["x" * length for length in lengths]
    name = "a.jsonl" if pack is bytes else "a.jsonl.gz"
    documents = prepared(tmp_path, name, pack(as_lines(texts)))
    assert documents == [text.encode() for text in texts if text]


def test_the_time_of_a_long_line_is_linear(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every block once read to the end of its line: 80 MiB in one line took 74 s. Counted in bytes read."""
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_bytes(as_lines(["x" * (100_000 if name == "a.jsonl" else 400_000)]))
    read = []

    class Counting(io.FileIO):
        def readinto(self, buffer: Any) -> Any:
            count = super().readinto(buffer)
            read[-1] += count
            return count

    def counted(path: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
        return io.BufferedReader(Counting(path), 256) if mode == "rb" else open(path, mode, *args, **options)

    monkeypatch.setattr(sources, "open", counted, raising=False)
    for name in ("a.jsonl", "b.jsonl"):
        read.append(0)
        prepare([str(tmp_path / name)], str(tmp_path / "out/x"), "bytes")
    assert 0 < read[0] and read[1] < 5 * read[0] and read[1] < 6 * 400_000


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_an_endless_line_is_refused_early(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 600 MiB that 600 KiB unpack to, each further chunk was joined to all before it."""
    monkeypatch.setattr(streams, "MOST_LINE", 5000)
    monkeypatch.setattr(sources, "MOST_LINE", 5000)
    content = b'{"text": "' + b"x" * 100_000 + b'"}\n' + as_lines(["a"])
    with pytest.raises(UserError, match="line 1 has more than 5,000 bytes"):
        prepared(tmp_path, name, gzip.compress(content) if name.endswith("gz") else content)


def test_a_frame_that_is_skipped_begins_a_zstandard_file(tmp_path: Path) -> None:
    """pzstd writes one first, and the file was no Zstandard file then."""
    frame = b"\x50\x2a\x4d\x18" + (4).to_bytes(4, "little") + b"size"
    assert prepared(tmp_path, "a.jsonl.zst", frame + zstd(as_lines(["a", "b"]))) == [b"a", b"b"]


@pytest.mark.parametrize(
    ("content", "documents"),
    [
        (b'{"text": "a"}', [b"a"]),
        (b'{\n  "text": "a"\n}\n', [b"a"]),
        (b'[{"text": "a"}, {"text": "", "id": 1}, {"text": "b"}]', [b"a", b"b"]),
        (b'{"words": "a"}', [b'{"words": "a"}']),  # a file of settings, say, in a corpus of code
        (b"{not json", [b"{not json"]),
    ],
)
def test_json_files(content: bytes, documents: list[bytes], tmp_path: Path) -> None:
    assert prepared(tmp_path, "a.json", content) == documents


def test_conversations_in_one_json_file(tmp_path: Path) -> None:
    """As ShareGPT's and Alpaca's sets are published."""
    (tmp_path / "t.jinja").write_text("{% for m in messages %}{{ m.content }};{% endfor %}")
    talks = [{"messages": talk} for talk in TALKS[:3]]
    template = str(tmp_path / "t.jinja")
    documents = prepared(
        tmp_path, "a.json", json.dumps(talks, indent=1).encode(), chat=True, template=template
    )
    assert documents == [f"{n}?;{'é' * n}!;".encode() for n in (1, 2, 3)]
    document = prepared(tmp_path, "a.json", json.dumps(talks[1]).encode(), chat=True, template=template)
    assert document == ["2?;éé!;".encode()]


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("a.jsonl", b'{"text": "a"}\n{"text": "b", "text": "c"}\n', "line 2 has the key text twice"),
        ("a.json", b'[{"text": "a"}, {"words": "b"}]', "row 2 has no text in the column text"),
        (
            "a.jsonl.gz",
            gzip.compress(b'{"a": {"b": 1, "b": 2}, "text": ""}', mtime=0),
            "line 1 has the key b twice",
        ),
    ],
)
def test_json_that_would_lose_something(name: str, content: bytes, complaint: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=complaint):
        prepared(tmp_path, name, content)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b'[{"messages": ]', "is not JSON: Expecting value"),
        (b"[]", "is not a list of objects"),
        (b'[{"messages": []}, null]', "is not a list of objects"),
        (b'[{"messages": [], "messages": []}]', "the key messages twice in one object"),
        (b"[" + b" " * 9000 + b"]", "has 9,002 bytes, more than 9,000, in one JSON value"),
    ],
)
def test_conversations_in_json_that_cannot_be_read(
    content: bytes, complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them had one reason: a JSON list, not text."""
    monkeypatch.setattr(streams, "MOST_LINE", 9000)
    (tmp_path / "t.jinja").write_text("{{ messages }}")
    with pytest.raises(UserError) as caught:
        prepared(tmp_path, "a.json", content, chat=True, template=str(tmp_path / "t.jinja"))
    assert complaint in str(caught.value) and "\n" not in str(caught.value)


def test_a_folder_of_the_hub_is_read_without_its_readme(tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_text("{% for m in messages %}{{ m.content }};{% endfor %}")
    (tmp_path / "set/data").mkdir(parents=True)
    (tmp_path / "set/README.md").write_text("# A set")
    (tmp_path / "set/dataset_infos.json").write_text('{"default": {}}')
    (tmp_path / "set/data/train.JSONL").write_bytes(as_lines(TALKS[:2], "messages"))
    done = prepare(
        [str(tmp_path / "set")], str(tmp_path / "x"), "bytes", chat=True, template=str(tmp_path / "t.jinja")
    )
    assert [Path(entry.path).name for entry in done.left_out] == ["README.md", "dataset_infos.json"]
    assert done.splits[str(tmp_path / "x")].documents == 2


def test_columns_of_bytes_and_decimals(tmp_path: Path) -> None:
    """Some writers of Parquet store text as bytes: it was learned as b'…'."""
    pa = pytest.importorskip("pyarrow", reason=EXTRA)
    import pyarrow.parquet

    (tmp_path / "t.jinja").write_text("{% for m in messages %}{{ m.content }};{% endfor %}")
    template = str(tmp_path / "t.jinja")
    columns = {"prompt": pa.array([b"two?"]), "completion": pa.array(["café".encode()])}
    weight = pa.array([Decimal(1)])
    pyarrow.parquet.write_table(pa.table(columns | {"weight": weight}), tmp_path / "a.parquet")
    prepare([str(tmp_path / "a.parquet")], str(tmp_path / "x"), "bytes", chat=True, template=template)
    assert Path(f"{tmp_path}/x.bin").read_bytes() == "two?;café;".encode()
    twice = pa.Table.from_arrays([*columns.values(), weight], names=["prompt", "completion", "prompt"])
    pyarrow.parquet.write_table(twice, tmp_path / "b.parquet")
    with pytest.raises(UserError, match=r"b\.parquet: has 2 columns prompt"):
        prepare([str(tmp_path / "b.parquet")], str(tmp_path / "x"), "bytes", chat=True, template=template)


def test_half_a_surrogate_pair_in_a_json_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"row 1 holds half a surrogate pair"):
        prepared(tmp_path, "a.json", b'[{"text": "\\ud800"}]')
