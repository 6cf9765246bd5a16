"""Which files the inputs of a preparation name, and what of a folder is left out because it is no text."""

import glob
import json
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megacore.errors import DataError
from megacore.files import open_plain
from megacore.tools.prepare.streams import (
    BOM,
    HUB_NAME,
    TABLES,
    bare,
    form_of,
    json_records,
    needed,
    saved_files,
    unpacked,
)

STDLIB = "python-stdlib"
NOT_STDLIB = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
LINES = (".jsonl", ".ndjson")  # one document a line
HEAD_BYTES = 8000  # of a file, by which it is known
RECORD_BYTES = 1 << 20  # of a file that may hold an object a line

UNPACKED = "its text, unpacked first: {} {}"
# where a file has which bytes, what it then is, and what could be read in its place
FORMATS: list[tuple[int, bytes, str, str]] = [
    (0, b"BZh", "compressed by bzip2", UNPACKED.format("bunzip2 -k", "{}")),
    (0, b"\xfd7zXZ\0", "compressed by xz", UNPACKED.format("unxz -k", "{}")),
    (0, b"\x04\x22\x4d\x18", "compressed by lz4", UNPACKED.format("unlz4", "{}")),
    (0, b"PK\3\4", "a zip archive", UNPACKED.format("unzip", "{}")),
    (257, b"ustar", "a tar archive", UNPACKED.format("tar -xf", "{}")),
    (0, b"\xff\xfe", "text in UTF-16", "UTF-8 text, as iconv -f UTF-16 -t UTF-8 {} writes it"),
    (0, b"\xfe\xff", "text in UTF-16", "UTF-8 text, as iconv -f UTF-16 -t UTF-8 {} writes it"),
    (0, b"%PDF-", "a PDF document", "its text, as pdftotext {} writes it"),
    (0, b"\x89HDF", "an HDF5 file", "UTF-8 text"),
    (0, b"\x93NUMPY", "a NumPy array", "UTF-8 text"),
    (0, b"SQLite format 3\0", "an SQLite database", "UTF-8 text"),
    (0, b"MMIDIDX\0\0", "the index of a corpus that is prepared already", "UTF-8 text"),
]


@dataclass(frozen=True)
class LeftOut:
    """What an input holds and is not read: its path, what it is, its bytes, and
    what could be read in its place.
    """

    path: str
    what: str
    size: int
    right: str = "UTF-8 text"


def find_files(inputs: list[str], text_key: str | None = None) -> tuple[list[str], list[LeftOut]]:
    """The files that the inputs name, each once; and what of folders among them is not read.

    Folders are read recursively in the order of their paths, without hidden entries. A data set of the hub is
    not looked for: its name is the path. `text_key` is the key of the text in JSON objects; None:
    conversations.

    Raises:
        DataError: an input is missing, or no text; or it is or holds a data set that is not read.
        OSError: it cannot be looked at.
    """
    paths: dict[str, None] = {}
    left_out: dict[str, LeftOut] = {}
    for name in inputs:
        left = list[LeftOut]()
        found = list(_expand(name, left, text_key))
        if not found and left:
            raise DataError(name, f"holds no text, but {left[0].path}: {left[0].what}", left[0].right)
        if not found:
            raise DataError(
                name, "names no text file", f"a file, a folder with text files, a glob or {STDLIB}"
            )
        paths.update(dict.fromkeys(found))
        left_out.update({entry.path: entry for entry in left})
    return list(paths), [entry for path, entry in left_out.items() if path not in paths]


def _expand(name: str, left: list[LeftOut], text_key: str | None) -> Iterator[str]:
    """The files that one input names; what of it is not read goes to `left`."""
    if name.startswith(HUB_NAME):
        yield name
    elif name == STDLIB:
        root = Path(sysconfig.get_paths()["stdlib"])
        yield from sorted(
            str(p) for p in root.rglob("*.py") if NOT_STDLIB.isdisjoint(p.relative_to(root).parts)
        )
    elif os.path.isdir(name):
        for path in sorted(_walk(name, left)):
            if (found := kind_of(str(path), text_key)) is None:
                yield str(path)
            else:
                left.append(LeftOut(str(path), found[0], path.stat().st_size, found[1]))
    elif os.path.exists(name):
        if (found := kind_of(name, text_key, whole=False)) is not None:
            raise DataError(name, f"is {found[0]}", found[1])
        yield name
    elif glob.has_magic(name):
        for match in sorted(glob.glob(name, recursive=True)):
            if os.path.exists(match):
                yield from _expand(match, left, text_key)
            else:
                left.append(LeftOut(match, "no plain file", 0))
    else:
        raise DataError(name, "missing", f"a file, a folder, a glob or {STDLIB}")


def _walk(folder: str, left: list[LeftOut]) -> Iterator[Path]:
    """The plain files below a folder.

    Of a data set that was saved they are its Arrow files. Raises `DataError`, or `OSError` at a folder that
    cannot be read.
    """

    def unreadable(error: OSError) -> None:
        raise error

    for top, folders, files in os.walk(folder, onerror=unreadable):
        names = {*files, *folders}
        if "dataset_dict.json" in names or {"dataset_info.json", "state.json"} <= names:
            yield from map(Path, saved_files(top))
            folders.clear()
            continue
        for name in sorted(names):
            path = Path(top, name)
            if name.startswith("."):
                left.append(LeftOut(str(path), "hidden", _size_below(path)))
            elif name in folders and path.is_symlink():
                left.append(LeftOut(str(path), "a link to a folder", 0, "the folder itself as an input"))
            elif name in files and path.is_file():
                yield path
            elif name in files:
                left.append(LeftOut(str(path), "no plain file", 0))
        folders[:] = [name for name in folders if not name.startswith(".")]


def _size_below(path: Path) -> int:
    """The bytes of a file, or of all files below a folder."""
    below = (
        (Path(top, name) for top, _, files in os.walk(path) for name in files) if path.is_dir() else [path]
    )
    return sum(file.lstat().st_size for file in below)


def head_form(path: str) -> str:
    """Which of the forms in `streams` a file has; empty: it is a plain one. Raises `OSError`, `DataError`."""
    with open_plain(path) as file:
        return form_of(path, file.read(HEAD_BYTES))


def kind_of(path: str, text_key: str | None, whole: bool = True) -> tuple[str, str] | None:
    """What a file is, or what is compressed in it, that is no text; and what could be read in its place.

    None for text, and for a table. With `whole` any NUL in its first bytes makes it binary, as for git.
    """
    form = head_form(path)
    if form in TABLES:
        needed(path, "pyarrow")
        return None
    if not form and json_records(path, text_key) is not None:
        return None
    name = bare(path, form)
    with unpacked(path, form) as (file, _):
        head = file.read(HEAD_BYTES)
        for at, magic, what, right in FORMATS:
            if head[at : at + len(magic)] == magic:
                return what, right.replace("{}", path)
        if whole and b"\0" in head:
            return "binary", "UTF-8 text"
        text = head.removeprefix(BOM).lstrip()
        if name.lower().endswith(LINES):
            return None
        if text_key is None and whole:
            return "not conversations", f"JSON lines, under a name that ends with {LINES[0]}"
        if not text.startswith((b"{", b"[")):
            return None
        if name.lower().endswith(".json") and text.startswith(b"["):
            unpack = {"gzip": "gunzip -c", "Zstandard": "unzstd -c"}.get(form, "cat")
            right = f"an object a line in a .jsonl file, as {unpack} {path} | jq -c '.[]' writes them"
            return "a JSON list, and not one of objects with a text", right
        lines = [line for line in (head + file.read(RECORD_BYTES)).split(b"\n") if line.strip()][:2]
    if len(lines) == 2 and all(map(_is_object, lines)):
        return (
            "JSON, an object a line, and not text",
            f"the same file under a name that ends with {LINES[0]}{path[len(name) :]}",
        )
    return None


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False
