"""Generated pages are current, and what they are made of is complete."""

import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import Field, create_model

from megacore.config import Config
from megacore.config.model import ModelConfig
from megacore.config.schema import TrainConfig
from megacore.errors import ConfigError
from megacore.section import Count
from tests.pages import cli, config
from tests.pages.registry import stale_pages

ROOT = Path(__file__).resolve().parents[2]


def test_generated_pages_are_current() -> None:
    """In a process of its own, because other tests may have registered optimizers, which have keys."""
    command = [sys.executable, "-m", "tests.pages", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_stale_page_is_reported(tmp_path: Path) -> None:
    (tmp_path / "current.md").write_text("text\n")
    (tmp_path / "stale.md").write_text("old text\n")
    texts = {"current.md": "text\n", "stale.md": "new text\n", "missing.md": "text\n"}
    assert stale_pages(texts, tmp_path) == [
        "stale.md is stale: run `python -m tests.pages`",
        "missing.md is missing: run `python -m tests.pages`",
    ]


def test_a_key_without_description_is_an_error() -> None:
    class Train(TrainConfig):
        new: Count = 1

    planted = create_model("Config", __base__=Config, train=(Train, Field(default_factory=Train)))
    with pytest.raises(ConfigError, match=r"train\.new: has no description"):
        config.page(planted)


def test_a_key_of_the_model_without_heading_is_an_error() -> None:
    class Model(ModelConfig):
        new: Count = Field(1, description="a new key")

    planted = create_model("Config", __base__=Config, model=(Model, Field(default_factory=Model)))
    with pytest.raises(ConfigError, match=r"model\.new: has no heading"):
        config.page(planted)


@pytest.mark.parametrize(
    ("part", "text"),
    [
        ({"type": "integer", "exclusiveMinimum": 0, "maximum": 2**53}, "integer ≥ 1"),
        ({"type": "integer", "minimum": 0}, "integer ≥ 0"),
        ({"type": "number", "minimum": 1e-6, "maximum": 1e6}, "number > 0"),
        ({"type": "number", "minimum": 0.0, "exclusiveMaximum": 1.0}, "number ≥ 0 and < 1"),
        ({"enum": ["fp32", "bf16"], "type": "string"}, "`fp32` | `bf16`"),
        ({"anyOf": [{"type": "boolean"}, {"type": "null"}]}, "true, false or null"),
        ({"type": "array", "items": {"type": "integer", "minimum": 0}}, "list of integers ≥ 0"),
    ],
)
def test_types_read_as_words(part: dict[str, object], text: str) -> None:
    assert config.type_text(part, {}, "section.key") == text


def test_help_texts_do_not_depend_on_the_version_of_python() -> None:
    """Python 3.12 repeats the metavar of an option with two names, and 3.13 does not."""
    old, new = "  --deepspeed FILE, --deepspeed_config FILE\n", "  --deepspeed, --deepspeed_config FILE\n"
    assert cli.REPEATED_METAVAR.sub(cli.without_repeats, old) == new
    assert cli.REPEATED_METAVAR.sub(cli.without_repeats, new) == new
