"""Mutants are what `tests/mutants.py` says: one small mistake each, drawn from a seed."""

import ast
import shutil
from pathlib import Path

import pytest

from tests.mutants import PACKAGES, ROOT, draw, files_of_tests, plant


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the packages in which functions are drawn."""
    folder = tmp_path_factory.mktemp("core")
    for package in PACKAGES:
        shutil.copytree(ROOT / "megacore" / package, folder / "megacore" / package)
    return folder


def test_a_seed_draws_the_same_mutants() -> None:
    """Results before and after a change could not be compared."""
    assert draw(ROOT, seed=3, count=40) == draw(ROOT, seed=3, count=40)
    assert draw(ROOT, seed=3, count=40) != draw(ROOT, seed=4, count=40)


def test_a_mutant_is_one_mistake_in_its_function(core: Path) -> None:
    """A mutant that is not planted, or that Python cannot read, would count as noticed or as survived."""
    for mutant in draw(ROOT, seed=0, count=150):
        path = core / mutant.file
        right = path.read_text(encoding="utf-8")
        assert plant(core, mutant), mutant
        wrong = path.read_text(encoding="utf-8")
        path.write_text(right, encoding="utf-8")
        assert ast.dump(ast.parse(wrong)) != ast.dump(ast.parse(right)), mutant
        lines, mutated = right.splitlines(), wrong.splitlines()
        first = next(at for at, pair in enumerate(zip(lines, mutated, strict=False)) if pair[0] != pair[1])
        function = mutant.function.rpartition(".")[2]
        assert any(f"def {function}(" in line for line in lines[: first + 1]), mutant


def test_code_that_is_gone_is_reported(core: Path) -> None:
    """A mutant of an earlier version whose code was rewritten would count as a survivor."""
    mutant = draw(ROOT, seed=0, count=1)[0]
    mutant.before = "code that no version has"
    assert not plant(core, mutant)
    mutant.file = "megacore/model/no_such_file.py"
    assert not plant(core, mutant)


def test_a_mutant_meets_the_tests_that_mention_it() -> None:
    """A mutant that meets only unrelated tests would survive."""
    mutant = draw(ROOT, seed=0, count=1)[0]
    mutant.file, mutant.function = "megacore/optimizers/soap.py", "SOAP._bases"
    assert any(
        "soap" in (ROOT / file).read_text(encoding="utf-8").lower() for file in files_of_tests(ROOT, mutant)
    )
