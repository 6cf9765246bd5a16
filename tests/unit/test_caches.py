"""Compiled code is kept where no other user can put any."""

import os
import tempfile
from pathlib import Path

import pytest
from torch._inductor.runtime.cache_dir_utils import cache_dir

from megacore.caches import INDUCTOR, TRITON, cache_folder, keep_triton_local, new_folder
from tests.build import model_of, run_of


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    new_folder.cache_clear()
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def test_it_is_kept_in_the_home(home: Path) -> None:
    folder = cache_folder("x")
    assert folder == cache_folder("x") == home / ".cache" / "megacore" / "x"
    assert folder.stat().st_mode & 0o777 == 0o700


def open_to_all(folder: Path, mode: int) -> None:
    folder.mkdir(parents=True)
    folder.chmod(mode)


@pytest.mark.parametrize(
    "danger",
    ["open", "open above", "another's", "another's in a folder like /tmp", "no folder", "a link into one"],
)
def test_not_where_others_can_replace_it(home: Path, monkeypatch: pytest.MonkeyPatch, danger: str) -> None:
    """Each of these lets another user put code into the cache; then the folder is
    new, private and unforeseeable.
    """
    shared = home / "shared"
    monkeypatch.setenv("XDG_CACHE_HOME", str(shared))
    if danger == "open":
        open_to_all(shared / "megacore" / "x", 0o777)
    elif danger == "open above":
        open_to_all(shared, 0o777)
    elif danger == "another's":
        (shared / "megacore" / "x").mkdir(mode=0o700, parents=True)
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    elif danger == "another's in a folder like /tmp":
        open_to_all(shared, 0o1777)
        (shared / "megacore").mkdir()
        if os.getuid():
            pytest.skip("only root can give a folder to another user")
        os.chown(shared / "megacore", 12345, 12345)
    elif danger == "no folder":
        shared.write_text("")
    else:
        open_to_all(home / "elsewhere" / "x", 0o777)
        shared.mkdir()
        (shared / "megacore").symlink_to(home / "elsewhere")
    folder = cache_folder("x")
    assert (
        folder == cache_folder("x")
        and shared not in folder.parents
        and home / "elsewhere" not in folder.parents
    )
    assert (
        folder.name != "megacore_x_" and folder.stat().st_mode & 0o777 == 0o700 and not list(folder.iterdir())
    )
    folder.rmdir()


def test_a_folder_like_tmp_will_do(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In it nobody else can replace what this user has made."""
    open_to_all(home / "scratch", 0o1777)
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / "scratch"))
    assert cache_folder("x") == home / "scratch" / "megacore" / "x"


def test_torch_compile_keeps_its_code_on_this_machine(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own default is a folder of /tmp that has the user's name; whoever makes it first decides what runs.

    The home may be every machine's, and thousands of ranks that compile the same would write to it at once.
    """
    scratch = home / "scratch"
    open_to_all(scratch, 0o1777)
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    sizes = {"num_layers": 1, "hidden_size": 8, "num_heads": 1, "vocab_size": 16}
    config = run_of({"model": sizes, "train": {"compile": True}})
    monkeypatch.setenv(INDUCTOR, "")  # for its value to be put back
    monkeypatch.delenv(INDUCTOR)
    model_of(config)
    folder = Path(cache_dir())
    assert folder == scratch / f"megacore_inductor_{os.geteuid()}" and folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o777)  # somebody else's, or open to all
    monkeypatch.delenv(INDUCTOR)
    model_of(config)
    assert Path(cache_dir()) == home / ".cache" / "megacore" / "inductor"
    monkeypatch.setenv(INDUCTOR, str(home / "mine"))  # what the user says stays
    model_of(config)
    assert Path(cache_dir()) == home / "mine"


def test_triton_keeps_its_kernels_on_this_machine(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own default is in the home, which thousands of ranks may share."""
    scratch = home / "scratch"
    open_to_all(scratch, 0o1777)
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    monkeypatch.setenv(TRITON, "")  # for its value to be put back
    monkeypatch.delenv(TRITON)
    keep_triton_local()
    folder = Path(os.environ[TRITON])
    assert folder == scratch / f"megacore_triton_{os.geteuid()}" and folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o777)  # somebody else's, or open to all
    monkeypatch.delenv(TRITON)
    keep_triton_local()
    assert os.environ[TRITON] == str(home / ".cache" / "megacore" / "triton")
    monkeypatch.setenv(TRITON, "/mine")
    keep_triton_local()
    assert os.environ[TRITON] == "/mine"
