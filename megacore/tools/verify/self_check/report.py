"""The lines that report self-checks: what is right, every mistake, and what could not be checked."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

from megacore.tools.verify.self_check.finding import Finding, Report

MOST_DETAILS = 5  # lines that explain one finding


def lines(report: Report) -> Iterator[str]:
    """Yield the lines of the report: what is right in one line, then mistakes, then what was not checked."""
    right = [finding.summary for finding in report.findings if finding.status == "right"]
    yield f"self-check ({report.seconds:.1f} s): {' · '.join(right) or 'nothing was found right'}"
    # One reason, such as a layer that raises, may stop several checks: it is printed once.
    checks = defaultdict[Finding, list[str]](list)
    for finding in report.findings:
        checks[replace(finding, check="")].append(finding.check)
    for status, word in (("wrong", "WRONG"), ("not checked", "NOT CHECKED")):
        for finding, names in checks.items():
            if finding.status != status:
                continue
            yield f"{word} {', '.join(names)}: {finding.summary}"
            yield from (f"  {detail}" for detail in finding.details[:MOST_DETAILS])
            if len(finding.details) > MOST_DETAILS:
                yield f"  and {len(finding.details) - MOST_DETAILS} more"


def verdict(report: Report) -> str:
    """Return the last line of a report with mistakes; empty without any."""
    return f"WRONG: the model's self-check failed: {', '.join(report.wrong)}" if report.wrong else ""
