"""What the self-checks report, and how it travels from the worker as JSON."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

FILE = "self_check.json"


@dataclass(frozen=True)
class Finding:
    """The result of one check, or of one part of a model in it.

    `summary` is a few words without the check's name, such as "26 of 26 parameters, worst 4e-10".
    """

    check: str
    status: Literal["right", "wrong", "not checked"]
    summary: str
    details: tuple[str, ...] = ()


@dataclass(frozen=True)
class Report:
    """The findings of all self-checks, and the seconds that they took."""

    findings: tuple[Finding, ...]
    seconds: float

    @property
    def wrong(self) -> tuple[str, ...]:
        """The checks that found a mistake, each once, in order."""
        return tuple(dict.fromkeys(finding.check for finding in self.findings if finding.status == "wrong"))

    def write(self, folder: Path) -> None:
        """Write the report as JSON into `folder`."""
        (folder / FILE).write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> "Report":
        """Return the report that `write` left in `folder`."""
        values = json.loads((folder / FILE).read_text(encoding="utf-8"))
        findings = [
            Finding(**finding | {"details": tuple(finding["details"])}) for finding in values["findings"]
        ]
        return cls(tuple(findings), values["seconds"])
