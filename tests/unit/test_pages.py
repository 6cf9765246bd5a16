"""Generated pages are current, and what they are made of is complete."""

from pathlib import Path

import pytest
from pydantic import Field, create_model

from megacore.config import Config
from megacore.config.model import ModelConfig
from megacore.config.schema import TrainConfig
from megacore.errors import ConfigError
from megacore.section import Count
from megacore.tools.verify.layouts import DEFAULT
from tests.commands import run_script
from tests.faults.checks import FAULTS
from tests.pages import blocks, cli, config, results
from tests.pages.registry import stale_pages

ROOT = Path(__file__).resolve().parents[2]


def test_generated_pages_are_current() -> None:
    """In another process, because other tests may have registered optimizers, which have keys."""
    done = run_script("tests/pages/__main__.py", "--check")
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_stale_page_is_reported(tmp_path: Path) -> None:
    (tmp_path / "current.md").write_text("text\n")
    (tmp_path / "stale.md").write_text("old text\n")
    texts = {"current.md": "text\n", "stale.md": "new text\n", "missing.md": "text\n"}
    assert stale_pages(texts, tmp_path) == [
        "stale.md is stale: run `python -m tests.pages`",
        "missing.md is missing: run `python -m tests.pages`",
    ]


def test_a_stale_block_is_reported(tmp_path: Path) -> None:
    page = "# Page\n\n<!-- generated: other_words -->\nold\n<!-- end -->\n"
    (tmp_path / "page.md").write_text(page)
    texts = {"page.md": blocks.filled(page, "page.md")}
    assert stale_pages(texts, tmp_path) == ["page.md is stale: run `python -m tests.pages`"]
    assert "`model.num_layers`" in texts["page.md"] and "\nold\n" not in texts["page.md"]
    assert blocks.filled(texts["page.md"], "page.md") == texts["page.md"]


def test_a_number_within_a_sentence_is_generated() -> None:
    text = "There are <!-- number: faults -->12<!-- end --> planted faults."
    expected = f"There are <!-- number: faults -->{len(FAULTS)}<!-- end --> planted faults."
    assert blocks.filled(text, "page.md") == expected


def test_numbers_that_pages_share_are_those_of_the_code() -> None:
    right = f"It runs {len(DEFAULT)} layouts and {len(FAULTS)} planted faults.\n"
    assert blocks.wrong_numbers(right, "page.md") == []
    wrong = (
        "It trains the model in 3 layouts, and there are 12 planted mistakes.\n```text\nin 5 layouts\n```\n"
    )
    assert blocks.wrong_numbers(wrong, "page.md") == [
        f"page.md: 3 layouts, and there are {len(DEFAULT)} default_layouts",
        f"page.md: 12 planted mistakes, and there are {len(FAULTS)} faults",
    ]


def test_an_unknown_block_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"page\.md: has a generated block nothing, which is not known"):
        blocks.filled("<!-- generated: nothing -->\n<!-- end -->\n", "page.md")


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("# Title\n\n`command` · machine · 2026-11-27\n\nIt shows this.\n", ""),
        ("Title\n\n`command` · machine · 2026-11-27\n\nIt shows this.\n", "does not begin with a title"),
        ("# Title\n\ncommand, machine\n\nIt shows this.\n", "its third line is not"),
        ("# Title\n\n`command` · machine · not kept\n\n| a table |\n", "its fifth line does not tell"),
    ],
)
def test_the_heading_of_a_results_page_is_checked(tmp_path: Path, text: str, wrong: str) -> None:
    (tmp_path / "page.md").write_text(text)
    lines = results.problems(tmp_path)
    assert len(lines) == bool(wrong) and wrong in "".join(lines)


def test_a_result_that_no_page_cites_is_reported() -> None:
    uncited = results.RESULTS / f"nothing_{2026 - 1}.json"
    assert results.pages_of(uncited) == []
    assert "benchmarks/results/peers_2026-11-22.md" in results.pages_of(
        results.RESULTS / "peers_2026-11-22.json"
    )


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
