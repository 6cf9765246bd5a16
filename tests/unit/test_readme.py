"""The README is short, and its numbers and examples are those of the program."""

import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.kernel_compile import TARGETS
from benchmarks.proof_picture import read_proof
from megacore.tools.interchange.families import FAMILIES
from megacore.tools.planner.parameters import parameters
from megacore.tools.verify.layouts import DEFAULT
from tests.build import run_of
from tests.documents.idioms import text_of
from tests.documents.pages import ROOT, Page, read_page

README = read_page(ROOT / "README.md")
PROOF = ROOT / "benchmarks/results/verify_gpt_tiny.txt"


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def million_parameters() -> str:
    config = run_of(ROOT / "configs/gpt_tiny.json")
    return f"{parameters(config) / 1e6:.1f} million parameters"


def quickstart_layout() -> str:
    text = (ROOT / "launch/quickstart.sh").read_text(encoding="utf-8")
    match = re.search(r'0\) ranks=(\d) mesh="parallel.tensor=(\d) parallel.pipeline=(\d)"', text)
    assert match is not None
    assert int(match[1]) == int(match[2]) * int(match[3]) == 4, "the README calls them four ranks"
    return f"tensor {match[2]} × pipeline {match[3]}"


def families(name: str) -> Callable[[], str]:
    """Two versions of a family, as the README writes them."""
    return lambda: f"{name} 2 and 3" if {f"{name}2", f"{name}3"} <= FAMILY_NAMES else f"no {name} 2 and 3"


FAMILY_NAMES = {name.removesuffix("ForCausalLM") for name in FAMILIES}
# What the README says, and what the program makes of the same fact. Numbers in `<!-- number: … -->` are
# generated, and the three runs are held by test_recipes.py.
HELD: dict[str, Callable[[], str]] = {
    "Python 3.11+": lambda: f"Python {project()['requires-python'].removeprefix('>=')}+",
    "Python 3.11 or newer": lambda: f"Python {project()['requires-python'].removeprefix('>=')} or newer",
    "PyTorch 2.11+": lambda: f"PyTorch {project()['dependencies'][0].removeprefix('torch>=')}+",
    "version 0.1.0": lambda: f"version {project()['version']}",
    "in 20 layouts": lambda: f"in {len(DEFAULT)} layouts",
    "1.4 million parameters": million_parameters,
    "tensor 2 × pipeline 2": quickstart_layout,
    "Qwen 2 and 3": families("Qwen"),
    "Gemma 2 and 3": families("Gemma"),
    "four GPU targets": lambda: {4: "four GPU targets"}.get(len(TARGETS), f"{len(TARGETS)} GPU targets"),
    "1, 8 and 512 devices": lambda: "1, 8 and 512 devices",
    "on 512 devices": lambda: "on 512 devices",
}


def unheld_numbers(page: Page) -> list[str]:
    """Numbers in a page's sentences and tables that nothing compares with the program.

    A number within a name, such as FSDP2 or ZB-H1, is not one.
    """
    text = "\n".join(re.sub(r"<!-- number: .*?<!-- end -->", "N", line) for _, line in page.prose)
    text = text_of(text)
    for phrase in HELD:
        text = text.replace(phrase, "")
    return re.findall(r"(?<![\w-])\d[\d.,]*(?!\w)", text)


def test_it_has_at_most_nine_hundred_words() -> None:
    """A stranger gives it two minutes. Comments are not counted, because readers do not see them."""
    seen = re.sub(r"<!--.*?-->", "", README.text)
    assert len(seen.split()) <= 900


@pytest.mark.parametrize("phrase", HELD)
def test_what_it_says_is_what_the_program_does(phrase: str) -> None:
    assert phrase in re.sub(r"\s+", " ", README.text)
    assert HELD[phrase]() == phrase


def test_no_number_is_without_a_test() -> None:
    """A number that no test compares is wrong after the next change."""
    assert unheld_numbers(README) == []


def test_a_number_without_a_test_is_found() -> None:
    planted = (
        "It trains FSDP2 models on 96 devices in 20 layouts, <!-- number: faults -->5<!-- end --> times."
    )
    assert unheld_numbers(Page("README.md", planted)) == ["96"]


def test_it_shows_what_verify_printed() -> None:
    """The picture and the quoted line would be of a run that never happened."""
    printed = PROOF.read_text(encoding="utf-8").splitlines()
    assert printed[-1] in README.text.replace("\n", " ")
    layouts, _, largest = read_proof(PROOF)
    assert layouts == [str(layout) for layout in DEFAULT]
    assert f"largest relative difference {largest} " in printed[-1]


def test_a_tensor_without_a_row_in_the_picture_is_an_error(tmp_path: Path) -> None:
    """The picture would leave out the tensor that differs most."""
    text = PROOF.read_text(encoding="utf-8").replace("attention.qkv", "attention.other")
    (tmp_path / "output.txt").write_text(text)
    with pytest.raises(ValueError, match=r"the picture has no row for blocks\.0\.attention\.other"):
        read_proof(tmp_path / "output.txt")


def test_badges_show_what_they_are_called() -> None:
    """A badge's picture comes from its address, and its name is what tests compare."""
    badges = re.findall(r"\[!\[([^\]]*)\]\(([^)]*)\)\]", README.text)
    assert len(badges) == 4
    for name, address in badges:
        label, value, _ = address.rsplit("/", 1)[1].replace("%2B", "+").split("-")
        assert f"{label} {value}".lower() == name.lower()
