"""Generate the blocks and numbers in pages that people write.

A block is between two lines `<!-- generated: NAME -->` and `<!-- end -->`. A number is within a sentence:
`<!-- number: NAME -->177<!-- end -->`. Both may occur in any page, and a name in several pages.
"""

import json
import re
from collections.abc import Callable
from typing import TypeVar

from megacore.config import Config
from megacore.config.optim import RULES
from megacore.errors import ConfigError
from megacore.files import ROOT
from megacore.tools.interchange.families import FAMILIES
from megacore.tools.settings import other_words
from megacore.tools.settings.load import flatten
from megacore.tools.verify.layouts import DEFAULT, EXPERTS
from tests import experts
from tests.drills.faults import KINDS
from tests.faults.checks import FAULTS
from tests.pages import families
from tests.strict.cases import CASES

T = TypeVar("T")

BLOCK = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
MARK = "<!-- end -->"  # ends a generated block or number
NUMBER = re.compile(r"(<!-- number: (\w+) -->)[^<\n]*(<!-- end -->)")
SPEEDS = ROOT / "benchmarks/results/peers_settings_2026-11-22.json"
PLANNER = ROOT / "benchmarks/results/planner.json"
LAYOUTS = {"one": "one process", "dp2": "data 2", "tp2": "tensor 2", "pp2": "pipeline 2"}
SETTINGS = {"as users get it": "as users get it", "equal process settings": "equal settings"}


def peers_speed() -> str:
    """Return the table of megacore's speed over the best other library's, from the file of the picture."""
    record = json.loads(SPEEDS.read_text(encoding="utf-8"))
    columns = [(precision, setting) for precision in record["ratios"] for setting in SETTINGS]
    titles = [f"{precision}, {SETTINGS[setting]}" for precision, setting in columns]
    lines = [f"| layout | {' | '.join(titles)} |", "|---" * (len(titles) + 1) + "|"]
    for index, layout in enumerate(record["layouts"]):
        ratios = [f"{record['ratios'][precision][setting][index]:.2f}" for precision, setting in columns]
        lines.append(f"| {LAYOUTS[layout]} | {' | '.join(ratios)} |")
    return "\n".join(lines) + "\n"


def equal_ratios() -> list[float]:
    """Return megacore's speed over the best other library's in each layout, with equal process settings."""
    record = json.loads(SPEEDS.read_text(encoding="utf-8"))
    by_precision = record["ratios"].values()
    return [ratio for settings in by_precision for ratio in settings["equal process settings"]]


def tuned_runs() -> dict[str, float]:
    """Return how far predicted step times are from the published runs that the planner was not fitted on."""
    record = json.loads(PLANNER.read_text(encoding="utf-8"))
    return record["frameworks"]["all tuned tables"]["held out"]


BLOCKS: dict[str, Callable[[], str]] = {
    "family_settings": families.family_settings,
    "other_words": lambda: other_words.table() + "\n",
    "peers_speed": peers_speed,
    "supported_models": families.supported_models,
}
NUMBERS: dict[str, Callable[[], int | str]] = {
    "config_keys": lambda: len(flatten(Config().model_dump(by_alias=True))),
    "default_layouts": lambda: len(DEFAULT),
    "expert_layouts": lambda: len(EXPERTS),
    "drill_faults": lambda: len(KINDS),
    "families": lambda: len(FAMILIES),
    "faults": lambda: len(FAULTS),
    "fastest_ratio": lambda: f"{max(equal_ratios()):.2f}",
    "moe_proofs": lambda: len(json.loads(experts.FOUND.read_text(encoding="utf-8"))),
    "optimizers": lambda: len(RULES),
    "planner_error": lambda: f"{100 * tuned_runs()['median']:.1f}%",
    "planner_runs": lambda: int(tuned_runs()["rows"]),
    "slowest_ratio": lambda: f"{min(equal_ratios()):.2f}",
    "strict_layouts": lambda: len(CASES),
}


# What pages say in plain words, and the number that it must be.
PHRASES = {
    re.compile(r"\b(?:in|runs|the|and) ((\d+) layouts)\b"): "default_layouts",
    re.compile(r"\b((\d+) (?:planted|known) (?:faults|mistakes|bugs))\b"): "faults",
    re.compile(r"\b((\d+) families of transformers)\b"): "families",
}


def wrong_numbers(text: str, page: str) -> list[str]:
    """Return a line for each number in a page's sentences that is not the one of the code."""
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    lines = []
    for phrase, name in PHRASES.items():
        number = NUMBERS[name]()
        for match in phrase.finditer(prose):
            if int(match[2]) != number:
                lines.append(f"{page}: {match[1]}, and there are {number} {name}")
    return lines


def filled(text: str, page: str) -> str:
    """Return a page's text with its blocks and numbers as they should be.

    Raises `ConfigError` if a name is not known.
    """
    text = BLOCK.sub(lambda match: match[1] + value_of(BLOCKS, match[2], page)() + match[3], text)
    return NUMBER.sub(lambda match: match[1] + shown(value_of(NUMBERS, match[2], page)()) + match[3], text)


def shown(value: int | str) -> str:
    """Return a number as pages write it: 1,234 for an int."""
    return f"{value:,}" if isinstance(value, int) else value


def value_of(known: dict[str, T], name: str, page: str) -> T:
    """Return the entry of a name. Raises `ConfigError` if there is none."""
    if name not in known:
        raise ConfigError(page, f"has a generated block {name}, which is not known", ", ".join(known))
    return known[name]
