"""docs/data.md agrees with launch/prepare.py: its second command is the one that the first prints, and its
table of vocabularies suggests none that prepare warns of.
"""

import re
import shlex
from pathlib import Path

import pytest

from launch.prepare import TOKENS_PER_ENTRY, run

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/data.md").read_text(encoding="utf-8")
BYTES = {"MB": 1e6, "GB": 1e9}
BYTES_PER_TOKEN = 4  # of English text with a large vocabulary; more than with a small one
SIZE_ROW = re.compile(r"^\| (\d+)(?: to \d+)? (MB|GB).*?\| `sentencepiece:(\d+)`", re.MULTILINE)


def first_commands() -> list[str]:
    """Return the commands of the page's first fence."""
    fence = re.search(r"```bash[^\n]*\n(.*?)```", PAGE, re.DOTALL)
    assert fence is not None
    return fence[1].splitlines()


def test_the_second_command_is_the_one_that_the_first_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Otherwise a reader trains on another corpus than the prepared one."""
    prepare, train, *_ = first_commands()
    (tmp_path / "my.txt").write_text((ROOT / "docs/config.md").read_text(encoding="utf-8"), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    run([*shlex.split(prepare)[2:], "--workers", "1"])
    assert capsys.readouterr().out.splitlines()[-1].strip() == train


def test_the_suggested_vocabularies_are_small_enough_for_their_texts() -> None:
    rows = SIZE_ROW.findall(PAGE)
    assert len(rows) == 4
    for size, unit, entries in rows:
        tokens = int(size) * BYTES[unit] / BYTES_PER_TOKEN
        assert tokens >= TOKENS_PER_ENTRY * int(entries), (size, unit)
    assert f"at least {TOKENS_PER_ENTRY} tokens" in PAGE
