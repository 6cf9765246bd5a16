"""The planning and performance pages state limits and errors that the program and its results have."""

import json
import re
from pathlib import Path
from typing import Any

from megacore.config.implied import LONGEST_EAGER
from megacore.config.schema import Config
from megacore.tools.choices.compiling import GAIN, LEAST_STEPS, WORTH_MEASURING
from megacore.tools.machine.gpu import environment

ROOT = Path(__file__).resolve().parents[2]


def text_of(page: str) -> str:
    """Return a page's text on one line, so that a phrase is found across line breaks."""
    return " ".join((ROOT / page).read_text(encoding="utf-8").split())


def test_the_performance_page_has_every_environment_variable() -> None:
    page = text_of("docs/performance.md")
    pipeline: dict[str, Any] = {"parallel": {"pipeline": 2, "data": 1}}
    variables = {f"{name}={value}" for name, value in environment(Config.model_validate(pipeline)).items()}
    assert set(re.findall(r"`([A-Z_0-9]+=\S+)`", page)) == variables


def test_the_performance_page_has_the_limits_of_auto() -> None:
    page = text_of("docs/performance.md")
    assert f"up to {LONGEST_EAGER['fp32']:,} tokens in fp32 and {LONGEST_EAGER['bf16']:,} in bf16" in page
    assert f"at least {LEAST_STEPS} steps" in page
    assert round((1 - GAIN) * 100) == 2 and "if that saves 2 % or more" in page
    assert WORTH_MEASURING == 30 * 60 and "half an hour" in page


def test_the_planning_page_has_the_errors_of_the_scoreboard() -> None:
    page = text_of("docs/planning.md")
    scores: dict[str, Any] = json.loads(
        (ROOT / "benchmarks/results/planner.json").read_text(encoding="utf-8")
    )
    held_out = scores["frameworks"]["all tuned tables"]["held out"]
    assert f"a median error of {held_out['median']:.1%}".replace("%", " %") in page
    assert f"at most {held_out['regret']['worst']:.2f} times" in page
