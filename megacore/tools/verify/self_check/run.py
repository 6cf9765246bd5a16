"""Runs all self-checks of a config, in order."""

import re
import time
from collections.abc import Callable
from pathlib import Path

from megacore.config import Config
from megacore.tools.verify.self_check.case import Case
from megacore.tools.verify.self_check.finding import Finding, Report
from megacore.tools.verify.self_check.generation import check_cache
from megacore.tools.verify.self_check.gradient import check_gradient
from megacore.tools.verify.self_check.passes import (
    DIFFERS,
    check_additivity,
    check_look_ahead,
    check_repeat,
    check_training_is_evaluation,
)
from megacore.tools.verify.self_check.state import check_evaluation_and_resume, check_state_by_step

Check = Callable[[Case], list[Finding]]
CHECKS: tuple[Check, ...] = (
    check_repeat,  # the others compare passes with each other
    check_gradient,
    check_look_ahead,
    check_additivity,
    check_training_is_evaluation,
    check_cache,
    check_state_by_step,
    check_evaluation_and_resume,
)
NO_FP64 = re.compile(r"fp64|float64|\bdouble\b", re.IGNORECASE)


def self_check(config: Config, folder: Path, checks: tuple[Check, ...] = CHECKS) -> Report:
    """Run `checks` on a small config and return what they found.

    The config has the overrides `case.EXACT`. Checkpoints are saved in `folder`, which the caller removes.
    Raises nothing that a check raises: that is a finding.
    """
    started = time.monotonic()
    case = Case(config, folder)
    findings = list[Finding]()
    for check in checks:
        if any(finding.summary.startswith(DIFFERS) for finding in findings):
            findings.append(Finding(name_of(check), "not checked", "two passes of the model differ"))
        else:
            findings += run_check(check, case)
    return Report(tuple(findings), time.monotonic() - started)


def name_of(check: Check) -> str:
    """Return what a check is called in the report."""
    return check.__name__.removeprefix("check_").replace("_", " ")


def run_check(check: Check, case: Case) -> list[Finding]:
    """Run one check. An exception is a mistake that it found, unless a kernel cannot compute in fp64."""
    name = name_of(check)
    try:
        return check(case)
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        if NO_FP64.search(reason):
            return [Finding(name, "not checked", f"cannot compute in fp64: {reason}")]
        return [Finding(name, "wrong", reason)]
