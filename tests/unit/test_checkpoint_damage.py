"""Whatever happens to a checkpoint's files is noticed before anything in them is used, and the one before it takes their place."""

import base64
import copy
import hashlib
import json
import random
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from launch.checkpoint import run
from megacore.checkpoint import Reader, locate
from megacore.checkpoint.manifest import MANIFEST, sealed
from megacore.errors import CheckpointError
from megacore.tools.verify.checkpoint_diff import compare
from tests.checkpoints import find_latest, save
from tests.manifests import aged, edit_manifest, edit_text
from tests.pieces import piece
from tests.thread_ranks import ThreadRanks, run_threads

FILES = ("rank_00000.safetensors", "rank_00001.safetensors", MANIFEST)
STATE = {"engine": {"updates": 3.0}, "model": {"hidden_size": 6}, "samples": 80}


def save_both(directory: Path) -> tuple[Path, Path]:
    """Steps 10 and 20, each from two ranks. v and w are alike but in their values."""

    def on(step: int) -> Callable[[ThreadRanks], Path]:
        def work(ranks: ThreadRanks) -> Path:
            generator = torch.Generator().manual_seed(step)
            pieces = {}
            for name in ("model/v", "model/w"):
                whole, shard = torch.randn(8, 6, generator=generator), piece((8, 6), 0, ranks.rank, 2)
                pieces[name] = (whole[shard.offset[0] :][:4], shard)
            return save(directory, step, pieces, STATE, ranks=ranks, keep=2)

        return work

    return run_threads(2, on(10))[0], run_threads(2, on(20))[0]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return save_both(tmp_path_factory.mktemp("run"))


def flip(data: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(data))
    return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]


def zero(data: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(data) - 32)
    return data[:at] + bytes(32) + data[at + 32 :]


def truncate(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.randrange(len(data))]


def lengthen(data: bytes, rng: random.Random) -> bytes:
    return data + rng.randbytes(rng.randrange(1, 9))


def exchange(data: bytes, rng: random.Random) -> bytes:
    """Two stretches of the file change places."""
    size = rng.choice((4, 8, 24, 96))
    a, b = sorted(rng.sample(range(0, len(data) - size, 4), 2))
    if b - a < size:
        b, a = len(data) - size, 0
    return data[:a] + data[b : b + size] + data[a + size : b] + data[a : a + size] + data[b + size :]


DAMAGES = {flip: 250, zero: 40, truncate: 40, lengthen: 10, exchange: 80}


def refusal(path: Path) -> CheckpointError:
    """What a checkpoint is refused with: one line, and never another exception."""
    with pytest.raises(CheckpointError) as caught:
        Reader(path).verify()
    assert "\n" not in str(caught.value) and str(caught.value).startswith(f"checkpoint error: {path}: ")
    return caught.value


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_every_damage_is_noticed(whole: tuple[Path, Path], tmp_path: Path, damage: Any, file: str) -> None:
    path = Path(shutil.copytree(whole[1], tmp_path / whole[1].name))
    good = (path / file).read_bytes()
    rng = random.Random(f"{damage.__name__} {file}")
    noticed = 0
    for _ in range(DAMAGES[damage]):
        bad = damage(good, rng)
        if bad != good:
            (path / file).write_bytes(bad)
            error = refusal(path)
            assert file in error.wrong or file == MANIFEST, f"{error} does not name the file"
            noticed += 1
    assert noticed > 0.9 * DAMAGES[damage]
    (path / file).write_bytes(good)
    Reader(path).verify()


def swap_files(path: Path, older: Path) -> None:
    first, second = (path / name for name in FILES[:2])
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)


def swap_with_older(file: str) -> Callable[[Path, Path], None]:
    return lambda path, older: (path / file).write_bytes((older / file).read_bytes()) and None


def swap_tensors(path: Path, older: Path) -> None:
    """Two tensors of one shape, in one file: 4 × 6 fp32 each, at its end."""
    file = path / FILES[0]
    content = file.read_bytes()
    file.write_bytes(content[:-192] + content[-96:] + content[-192:-96])


def as_link(path: Path, older: Path) -> None:
    (path / FILES[0]).rename(path.parent / "elsewhere")
    (path / FILES[0]).symlink_to(path.parent / "elsewhere")


def as_older(path: Path, older: Path) -> None:
    """The folder of an older step under the name of a newer one."""
    shutil.rmtree(path)
    shutil.copytree(older, path)


CHANGES: dict[str, tuple[Callable[[Path, Path], None], str]] = {
    "two ranks' files swapped": (swap_files, "tensor model/v has changed in rank_00000"),
    "a file of an older step": (swap_with_older(FILES[1]), "tensor model/v has changed in rank_00001"),
    "the manifest of an older step": (swap_with_older(MANIFEST), "manifest.json is of step 10"),
    "two tensors swapped in a file": (swap_tensors, "tensor model/v has changed in rank_00000"),
    "a file deleted": (lambda path, _: (path / FILES[1]).unlink(), "rank_00001.safetensors is missing"),
    "the manifest deleted": (lambda path, _: (path / MANIFEST).unlink(), "has no manifest.json"),
    "a link in place of a file": (as_link, "rank_00000.safetensors is missing, or no plain file"),
    "an older step renamed": (as_older, "manifest.json is of step 10"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_the_damaged_one_is_named_and_the_older_one_used(change: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    older, newest = save_both(tmp_path)
    damage, words = CHANGES[change]
    damage(newest, older)
    assert words in str(refusal(newest))
    assert find_latest(tmp_path) == older
    assert "A CHECKPOINT IS DAMAGED AND WAS SKIPPED" in caplog.text and words in caplog.text and older.name in caplog.text


def test_reading_compares_with_digests_without_being_asked_to(tmp_path: Path) -> None:
    """A flipped bit deep in a tensor passes the cheap checks that find a checkpoint; it must not pass into a model."""
    _, newest = save_both(tmp_path)
    file = newest / FILES[1]
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    reader = Reader(locate(tmp_path))
    reader.read("model/w", piece((8, 6), 0, 0, 2))  # of the other file
    with pytest.raises(CheckpointError, match="tensor model/w has changed in rank_00001"):
        reader.read("model/w", piece((8, 6), 0, 1, 2))


def set_slice(**values: Any) -> Callable[[dict[str, Any]], object]:
    return lambda m: m["tensors"]["model/v"]["slices"][0].update(values)


def set_tensor(**values: Any) -> Callable[[dict[str, Any]], object]:
    return lambda m: m["tensors"]["model/v"].update(values)


def move_file(name: str) -> Callable[[dict[str, Any]], object]:
    def edit(manifest: dict[str, Any]) -> None:
        manifest["files"][name] = manifest["files"].pop(FILES[0])
        for tensor in manifest["tensors"].values():
            tensor["slices"][0]["file"] = name

    return edit


HOSTILE: dict[str, Callable[[dict[str, Any]], object]] = {
    "a path outside": move_file("../../../etc/passwd.safetensors"),
    "an absolute path": move_file("/etc/passwd.safetensors"),
    "a name with a zero byte": move_file("a\0b.safetensors"),
    "a name of a megabyte": move_file("a" * 2**20 + ".safetensors"),
    "another ending": move_file("weights.pkl"),
    "a shape beyond memory": set_tensor(shape=[2**40, 2**40]),
    "a shape beyond 64 bits": set_tensor(shape=[2**70, 6]),
    "a negative shape": set_tensor(shape=[-8, 6]),
    "a product that overflows to the right number": set_tensor(shape=[2**47, 2**17 + 1, 48]),
    "no dim": set_tensor(shape=[]),
    "a thousand dims": set_tensor(shape=[1] * 1000),
    "nested lists": set_tensor(shape=[[8], 6]),
    "a shape of text": set_tensor(shape="86"),
    "true for a size": set_tensor(shape=[True, 6]),
    "sizes that are not whole": set_tensor(shape=[8.0, 6.5]),
    "an unknown dtype": set_tensor(dtype="object"),
    "no slices": set_tensor(slices=[]),
    "slices twice": lambda m: m["tensors"]["model/v"]["slices"].extend(m["tensors"]["model/v"]["slices"]),
    "a slice outside": set_slice(offset=[6, 0]),
    "a slice that wraps": set_slice(offset=[2**48, 0]),
    "another slice's place": set_slice(offset=[4, 0]),
    "another tensor's key": set_slice(key="model/w"),
    "a key that is not there": set_slice(key="model/u"),
    "a slice's digest": set_slice(digest="0" * 16),
    "a digest of no digits": set_slice(digest="zz"),
    "a tensor's digest": set_tensor(digest="0" * 16),
    "a key too many": set_tensor(code="__import__('os')"),
    "a negative size": lambda m: m["files"][FILES[0]].update(bytes=-1),
    "a file's digest": lambda m: m["files"][FILES[0]].update(digest="0" * 32),
    "a file's digest missing": lambda m: m["files"][FILES[0]].pop("digest"),
    "another hash": lambda m: m["files"][FILES[0]].update(hash="sha256"),
    "a hash of no name": lambda m: m["files"][FILES[0]].update(hash="none"),
    "two digests": lambda m: m["files"][FILES[0]].update(sha256="0" * 64),
    "a step that is none": lambda m: m.update(step=-1),
    "a step of text": lambda m: m.update(step="20"),
    "state that is no section": lambda m: m.update(state=[1]),
    "no tensors": lambda m: m.pop("tensors"),
    "tensors that are left out": lambda m: m["tensors"].clear(),
    "a tensor under two names": lambda m: m["tensors"].update({"model/z": m["tensors"]["model/v"]}),
    "a tensor that is left out": lambda m: m["tensors"].pop("model/v"),
    "a list for a manifest": lambda m: (m.clear(), m.update(format_version=5)),
}


# What an object for a slice can say, and columns cannot.
OBJECTS = {
    "a thousand dims",
    "nested lists",
    "a shape of text",
    "another tensor's key",
    "a key that is not there",
    "a digest of no digits",
    "no tensors",
    "a list for a manifest",
}


def set_column(name: str, change: Callable[[np.ndarray], object]) -> Callable[[dict[str, Any]], object]:
    """Changes the numbers of one column, in 64 bits."""

    def edit(manifest: dict[str, Any]) -> None:
        text = manifest["slices"][name]
        numbers = np.frombuffer(base64.b64decode(text[3:]), f"<u{text[1]}").astype("<u8")
        changed = change(numbers)
        manifest["slices"][name] = "u8:" + base64.b64encode(numbers if changed is None else changed).decode()

    return edit


def set_text(name: str, change: Callable[[str], Any]) -> Callable[[dict[str, Any]], object]:
    return lambda m: m["slices"].update({name: change(m["slices"][name])})


# Two tensors [8, 6] in two slices each, of files 0 and 1.
COLUMNS: dict[str, Callable[[dict[str, Any]], object]] = {
    "a column missing": lambda m: m["slices"].pop("number"),
    "a column too many": lambda m: m["slices"].update(key="u1:AAAA"),
    "no columns": lambda m: m["slices"].clear(),
    "a list for a column": set_text("file", lambda text: [0, 1, 0, 1]),
    "numbers without a width": set_text("file", lambda text: text[3:]),
    "numbers of three bytes": set_text("file", lambda text: "u3:" + text[3:]),
    "numbers wider than they were": set_text("file", lambda text: "u2:" + text[3:]),
    "no base64": set_text("offset", lambda text: text[:-4] + "*" + text[-4:]),
    "half a number": set_text("digest", lambda text: text[:-4]),
    "a row too few": set_column("file", lambda n: n[:-1]),
    "a row too many": set_column("shape", lambda n: np.append(n, n[-1:])),
    "a file that is not there": set_column("file", lambda n: np.put(n, 0, 2)),
    "a file beyond 63 bits": set_column("file", lambda n: np.put(n, 0, 2**64 - 1)),
    "another file": set_column("file", lambda n: np.put(n, 0, 1)),
    "piece 0": set_column("number", lambda n: np.put(n, 0, 0)),
    "another piece": set_column("number", lambda n: np.put(n, 0, 2)),
    "an offset that wraps": set_column("offset", lambda n: np.put(n, 0, 2**64 - 4)),
    "a shape that wraps": set_column("shape", lambda n: np.put(n, 0, 2**63)),
    "slices exchanged": set_column("digest", lambda n: np.put(n, [0, 1], n[[1, 0]])),
    "a digest": set_column("digest", lambda n: np.put(n, 0, n[0] ^ np.uint64(1))),
    "digests that add up": set_column("digest", lambda n: np.put(n, [0, 1], [n[0] + np.uint64(1), n[1] - np.uint64(1)])),
    "a slice of the other tensor": lambda m: (m["tensors"]["model/v"].update(slices=3), m["tensors"]["model/w"].update(slices=1)),
    "fewer slices than none": lambda m: (m["tensors"]["model/v"].update(slices=-1), m["tensors"]["model/w"].update(slices=5)),
    "more slices than memory": set_tensor(slices=2**48),
    "half a slice": set_tensor(slices=2.5),
    "a dim that the slices do not have": set_tensor(shape=[8, 6, 1]),
    "the name of a slice": lambda m: m["tensors"].update({"model/v#2": m["tensors"].pop("model/v")}),
}
LIES = [(4, lie, edit) for lie, edit in HOSTILE.items()] + [(5, lie, edit) for lie, edit in HOSTILE.items() if lie not in OBJECTS]


@pytest.mark.parametrize(("version", "edit"), [pytest.param(v, edit, id=f"{lie}-{v}") for v, lie, edit in LIES])
def test_a_hostile_manifest_is_refused(version: int, edit: Any, tmp_path: Path) -> None:
    older, newest = save_both(tmp_path)
    if version < 5:
        aged(newest, version)
    edit_manifest(newest, edit)
    refusal(newest)
    assert find_latest(tmp_path) == older


@pytest.mark.parametrize("lie", COLUMNS)
def test_hostile_columns_are_refused(lie: str, tmp_path: Path) -> None:
    older, newest = save_both(tmp_path)
    before = json.loads((newest / MANIFEST).read_text())
    edit_text(newest, COLUMNS[lie])
    assert {**json.loads((newest / MANIFEST).read_text()), "manifest_sha256": ""} != {**before, "manifest_sha256": ""}, "a lie was told"
    refusal(newest)
    assert find_latest(tmp_path) == older


@pytest.mark.parametrize("version", [2, 3, 4])
def test_what_an_earlier_format_wrote_is_read_and_proved(version: int, tmp_path: Path) -> None:
    """A run that was begun before the format changed goes on."""
    older, newest = save_both(tmp_path)
    copy = Path(shutil.copytree(newest, tmp_path / "copy" / newest.name))
    aged(newest, version)
    assert find_latest(tmp_path) == newest
    assert not list(compare(Reader(newest), Reader(copy))), "equal tensors, whose digests are of two formats"
    file = newest / FILES[0]
    content = file.read_bytes()
    assert content.count(b'"pt"') == 1
    file.write_bytes(content.replace(b'"pt"', b'"np"'))  # in no tensor: only the file's own digest can tell
    assert "rank_00000.safetensors has changed since it was written" in str(refusal(newest))
    assert find_latest(tmp_path) == older
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert "tensor model/w has changed in rank_00000" in str(refusal(newest))


def exchange_names(manifest: dict[str, Any]) -> None:
    tensors = manifest["tensors"]
    tensors["model/v"], tensors["model/w"] = tensors["model/w"], tensors["model/v"]


@pytest.mark.parametrize("change", ["slices", "bytes", "names"])
def test_a_diff_believes_no_digest_that_it_has_not_compared(change: str, tmp_path: Path) -> None:
    """Two tensors that have changed places, two bytes that have changed, and two that have changed names with all that the
    manifest says of them: each is found by `diff`, without a `verify` before it."""
    _, first = save_both(tmp_path / "first")
    _, second = save_both(tmp_path / "second")
    assert run(["diff", str(first), str(second)]) == 0
    if change == "slices":
        swap_tensors(second, first)
    elif change == "bytes":
        content = bytearray((second / FILES[1]).read_bytes())
        content[-90], content[-9] = content[-90] ^ 1, content[-9] ^ 128
        (second / FILES[1]).write_bytes(content)
    else:
        edit_manifest(second, exchange_names)
        for file in FILES[:2]:  # in whose headers the slices have these names too
            content = (second / file).read_bytes().replace(b'"model/v"', b'"model/u"').replace(b'"model/w"', b'"model/v"')
            (second / file).write_bytes(content.replace(b'"model/u"', b'"model/w"'))
        assert "tensor model/" in str(refusal(second)), "verify finds it too"
    for paths in ((first, second), (second, first)):
        with pytest.raises(CheckpointError, match=r"tensor model/[vw] has changed in rank_0000[01]") as caught:
            run(["diff", *map(str, paths)])
        assert caught.value.where == str(second)
    # What is found by reading alone is not found by digests alone, which the last line says.
    assert run(["diff", "--trust", str(first), str(second)]) == int(change == "names")


TEXTS = {
    "not a number": (b'{"format_version": 5, "step": NaN}', "holds NaN"),
    "a key twice": (b'{"format_version": 5, "step": 1, "step": 2}', "a key twice"),
    "deep nesting": (b'{"format_version": 5, "state": ' + b"[" * 10**5 + b"]" * 10**5 + b"}", "damaged"),
    "a number of 10000 digits": (b'{"format_version": 5, "step": ' + b"1" * 10**4 + b"}", "damaged"),
    "no text": (b"\xff\xfe" * 50, "damaged"),
    "the format before": (b'{"format_version": 1, "step": 20}', "has format version 1.*reads format versions 2 to 5"),
    "nothing": (b"", "damaged"),
}


@pytest.mark.parametrize("kind", TEXTS)
@pytest.mark.parametrize("signed", [False, True])
def test_a_text_that_is_no_manifest_is_refused(kind: str, signed: bool, tmp_path: Path) -> None:
    older, newest = save_both(tmp_path)
    text, words = TEXTS[kind]
    if signed:  # the same, behind a digest that is right
        body = text or b"{"
        text = b'{"manifest_sha256": "' + hashlib.sha256(body).hexdigest().encode() + b'", ' + body[1:]
    (newest / MANIFEST).write_bytes(text)
    error = refusal(newest)
    assert signed or re.search(words, str(error))
    assert find_latest(tmp_path) == older


def nodes(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[Any, str | int, tuple[str | int, ...]]]:
    """Every (container, key, path to it) in a JSON value."""
    for key in value if isinstance(value, dict) else range(len(value)):
        yield value, key, (*path, key)
        if isinstance(value[key], dict | list):
            yield from nodes(value[key], (*path, key))


@pytest.mark.parametrize("version", [4, 5])
def test_random_lies_never_raise_anything_else(version: int, whole: tuple[Path, Path], tmp_path: Path) -> None:
    """Any value anywhere in a manifest becomes something else: refused in one line, or passed where it is the run's own state."""
    path = Path(shutil.copytree(whole[1], tmp_path / whole[1].name))
    if version < 5:
        aged(path, version)
    good = json.loads((path / MANIFEST).read_text())
    del good["manifest_sha256"]
    rng, values = random.Random(1), [None, True, -1, 2**63, 2**70, 1e308, "", "../x", "\ud800", "ä" * 99, [], {}, [[[]]], {"": 0}]
    refused = 0
    for _ in range(400):
        manifest = copy.deepcopy(good)
        container, key, where = rng.choice(list(nodes(manifest)))
        container[key] = rng.choice(values)
        (path / MANIFEST).write_bytes(sealed(manifest))
        try:
            Reader(path).verify()
        except CheckpointError as error:
            assert "\n" not in str(error)
            refused += 1
        else:
            assert where[0] in ("state", "megacore_version"), f"{where}: {container[key]!r} was not noticed"
    assert refused > 200
