"""The tables of docs/research.md have every optimizer, schedule and sweep key, and muP's true factors."""

import re
from itertools import chain
from typing import get_args

import pytest

from megacore.config.optim import OptimSchedule
from megacore.optimizers.rule import RULES
from megacore.tools.sweep.spec import Spec
from tests.pool import ROOT

PAGE = (ROOT / "docs/research.md").read_text(encoding="utf-8")


def table(header: str) -> dict[str, list[str]]:
    """Return the rows of the table whose first column has this header, by their first cell."""
    (text,) = re.findall(rf"(?m)^\| {re.escape(header)} \|.*\n\|-.*\n((?:\|.*\n)+)", PAGE)
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    return {row[0]: row[1:] for row in rows}


def quoted(text: str) -> list[str]:
    """Return the words between backquotes."""
    return re.findall(r"`([^`]+)`", text)


def test_the_table_has_every_optimizer_with_its_settings() -> None:
    rows = {quoted(first)[0]: cells for first, cells in table("`optim.kind`").items()}
    assert rows.keys() == RULES.keys()
    for name, (_, listed) in rows.items():
        fields = RULES[name].settings_type.model_fields
        words = quoted(listed.replace("AdamW's", "`beta1`, `beta2`, `eps`"))
        if words[0].endswith("*"):
            assert all(field.startswith(words[0][:-1]) for field in fields), name
        else:
            assert sorted(words) == sorted(fields), name


def test_the_table_has_every_learning_rate_schedule() -> None:
    listed = chain.from_iterable(quoted(first) for first in table("`optim.schedule`"))
    assert sorted(listed) == sorted(get_args(OptimSchedule.model_fields["schedule"].annotation))


def test_the_table_has_every_key_of_a_sweep() -> None:
    assert [quoted(first)[0] for first in table("key")] == list(Spec.model_fields)


FACTORS = {"× m": 4.0, "unchanged": 1.0, "× 1/√m": 0.5, "× 1/m": 0.25}
ROWS = [("of AdamW", "adamw"), ("Lion", "lion"), ("SOAP", "soap"), ("AdEMAMix", "ademamix")]
ROWS += [("schedule-free", "schedule_free"), ("SGD", "sgd")]
ROWS += [("`muon_scale=match_rms_adamw`", "muon"), ("`muon_scale=original`", "muon")]


@pytest.mark.parametrize(("words", "kind"), ROWS)
def test_the_table_has_the_learning_rate_factors_of_mup(words: str, kind: str) -> None:
    """A reader who sets rates by hand from the table would otherwise train with wrong ones."""
    lines = [line for line in PAGE.splitlines() if line.startswith("| learning rate of ")]
    (line,) = [line for line in lines if words in line]
    hidden, other = [cell.strip() for cell in line.strip("|").split("|")][1:3]
    settings = RULES[kind].settings_type()
    if kind == "muon":
        settings = settings.model_copy(update={"muon_scale": words.strip("`").partition("=")[2]})
    rule = RULES[kind](settings)
    assert rule.width_factor(True, 4.0) == FACTORS[hidden]
    if other != "AdamW's":
        assert rule.width_factor(False, 4.0) == FACTORS[other]
