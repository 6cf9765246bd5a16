"""Manifests that lie, by hand and at random: each is refused in one line, and the
checkpoint before takes its place.
"""

import base64
import copy
import hashlib
import json
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megacore.checkpoint import Reader
from megacore.checkpoint.manifest import MANIFEST, sealed
from megacore.errors import CheckpointError
from tests.checkpoints import FILES, find_latest, refusal, save_both
from tests.manifests import edit_manifest, edit_text


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
    "true for a size": set_tensor(shape=[True, 6]),
    "sizes that are not whole": set_tensor(shape=[8.0, 6.5]),
    "an unknown dtype": set_tensor(dtype="object"),
    "no slices": set_tensor(slices=[]),
    "slices twice": lambda m: m["tensors"]["model/v"]["slices"].extend(m["tensors"]["model/v"]["slices"]),
    "a slice outside": set_slice(offset=[6, 0]),
    "a slice that wraps": set_slice(offset=[2**48, 0]),
    "another slice's place": set_slice(offset=[4, 0]),
    "a slice's digest": set_slice(digest="0" * 16),
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
    "tensors that are left out": lambda m: m["tensors"].clear(),
    "a tensor under two names": lambda m: m["tensors"].update({"model/z": m["tensors"]["model/v"]}),
    "a tensor that is left out": lambda m: m["tensors"].pop("model/v"),
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
    "digests that add up": set_column(
        "digest", lambda n: np.put(n, [0, 1], [n[0] + np.uint64(1), n[1] - np.uint64(1)])
    ),
    "a slice of the other tensor": lambda m: (
        m["tensors"]["model/v"].update(slices=3),
        m["tensors"]["model/w"].update(slices=1),
    ),
    "fewer slices than none": lambda m: (
        m["tensors"]["model/v"].update(slices=-1),
        m["tensors"]["model/w"].update(slices=5),
    ),
    "more slices than memory": set_tensor(slices=2**48),
    "half a slice": set_tensor(slices=2.5),
    "a dim that the slices do not have": set_tensor(shape=[8, 6, 1]),
    "a thousand dims": set_tensor(shape=[1] * 1000),
    "nested lists": set_tensor(shape=[[8], 6]),
    "a shape of text": set_tensor(shape="86"),
    "no tensors": lambda m: m.pop("tensors"),
    "a list for a manifest": lambda m: (m.clear(), m.update(format_version=5)),
    "the name of a slice": lambda m: m["tensors"].update({"model/v#2": m["tensors"].pop("model/v")}),
}


@pytest.mark.parametrize("lie", HOSTILE)
def test_a_hostile_manifest_is_refused(lie: str, tmp_path: Path) -> None:
    older, newest = save_both(tmp_path)
    edit_manifest(newest, HOSTILE[lie])
    refusal(newest)
    assert find_latest(tmp_path) == older


@pytest.mark.parametrize("lie", COLUMNS)
def test_hostile_columns_are_refused(lie: str, tmp_path: Path) -> None:
    older, newest = save_both(tmp_path)
    before = json.loads((newest / MANIFEST).read_text())
    edit_text(newest, COLUMNS[lie])
    assert {**json.loads((newest / MANIFEST).read_text()), "manifest_sha256": ""} != {
        **before,
        "manifest_sha256": "",
    }, "a lie was told"
    refusal(newest)
    assert find_latest(tmp_path) == older


TEXTS = {
    "not a number": (b'{"format_version": 5, "step": NaN}', "holds NaN"),
    "a key twice": (b'{"format_version": 5, "step": 1, "step": 2}', "a key twice"),
    "deep nesting": (b'{"format_version": 5, "state": ' + b"[" * 10**5 + b"]" * 10**5 + b"}", "damaged"),
    "a number of 10000 digits": (b'{"format_version": 5, "step": ' + b"1" * 10**4 + b"}", "damaged"),
    "no text": (b"\xff\xfe" * 50, "damaged"),
    "the format before": (
        b'{"format_version": 1, "step": 20}',
        "has format version 1, and this megacore reads version 5",
    ),
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


def nodes(
    value: Any, path: tuple[str | int, ...] = ()
) -> Iterator[tuple[Any, str | int, tuple[str | int, ...]]]:
    """Every (container, key, path to it) in a JSON value."""
    for key in value if isinstance(value, dict) else range(len(value)):
        yield value, key, (*path, key)
        if isinstance(value[key], dict | list):
            yield from nodes(value[key], (*path, key))


def test_random_lies_never_raise_anything_else(tmp_path: Path) -> None:
    """Any value anywhere in a manifest becomes something else: refused in one line, or passed
    where it is the run's own state.
    """
    _, path = save_both(tmp_path)
    good = json.loads((path / MANIFEST).read_text())
    del good["manifest_sha256"]
    rng, values = (
        random.Random(1),
        [None, True, -1, 2**63, 2**70, 1e308, "", "../x", "\ud800", "ä" * 99, [], {}, [[[]]], {"": 0}],
    )
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
