"""Whatever happens to a checkpoint's files is noticed before anything in them is used, and the
one before it takes their place.
"""

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launch.checkpoint import run
from megacore.checkpoint import Reader, locate
from megacore.checkpoint.manifest import MANIFEST
from megacore.errors import CheckpointError
from tests.checkpoints import FILES, find_latest, refusal, save_both
from tests.manifests import edit_manifest
from tests.pieces import piece


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
def test_the_damaged_one_is_named_and_the_older_one_used(
    change: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    older, newest = save_both(tmp_path)
    damage, words = CHANGES[change]
    damage(newest, older)
    assert words in str(refusal(newest))
    assert find_latest(tmp_path) == older
    assert (
        "A CHECKPOINT IS DAMAGED AND WAS SKIPPED" in caplog.text
        and words in caplog.text
        and older.name in caplog.text
    )


def test_reading_compares_with_digests_without_being_asked_to(tmp_path: Path) -> None:
    """A flipped bit deep in a tensor passes the cheap checks that find a checkpoint;
    it must not pass into a model.
    """
    _, newest = save_both(tmp_path)
    file = newest / FILES[1]
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    reader = Reader(locate(tmp_path))
    reader.read("model/w", piece((8, 6), 0, 0, 2))  # of the other file
    with pytest.raises(CheckpointError, match="tensor model/w has changed in rank_00001"):
        reader.read("model/w", piece((8, 6), 0, 1, 2))


def exchange_names(manifest: dict[str, Any]) -> None:
    tensors = manifest["tensors"]
    tensors["model/v"], tensors["model/w"] = tensors["model/w"], tensors["model/v"]


@pytest.mark.parametrize("change", ["slices", "bytes", "names"])
def test_a_diff_believes_no_digest_that_it_has_not_compared(change: str, tmp_path: Path) -> None:
    """Two tensors that have changed places, two bytes that have changed, and two that have changed names with
    all that the manifest says of them: each is found by `diff`, without a `verify` before it.
    """
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
            content = (
                (second / file)
                .read_bytes()
                .replace(b'"model/v"', b'"model/u"')
                .replace(b'"model/w"', b'"model/v"')
            )
            (second / file).write_bytes(content.replace(b'"model/u"', b'"model/w"'))
        assert "tensor model/" in str(refusal(second)), "verify finds it too"
    for paths in ((first, second), (second, first)):
        with pytest.raises(
            CheckpointError, match=r"tensor model/[vw] has changed in rank_0000[01]"
        ) as caught:
            run(["diff", *map(str, paths)])
        assert caught.value.where == str(second)
    # What is found by reading alone is not found by digests alone, which the last line says.
    assert run(["diff", "--trust", str(first), str(second)]) == int(change == "names")
