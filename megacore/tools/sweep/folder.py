"""A sweep's folder: its trials' configs, what became of each, and one process at a time that starts them.

sweep.json              the trials' names, in the order in which they were added, and how each ended
configs/NAME.json       a trial's config, as launch/pretrain.py takes it
trials/NAME/            its log.dir; output.txt is what it said
results.json, .csv, sweep.png, best.json
"""

import json
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from megacore.errors import ConfigError
from megacore.files import check_folder, read_json, read_text, write_json
from megacore.records import Record, complaint
from megacore.tools.settings.load import flatten
from megacore.tools.sweep.trials import Trial

RECORD = "sweep.json"
OTHER = "another folder, or the file as it was: values and seeds may be added"


class Known(Record):
    """What the folder says of its sweep."""

    trials: list[str]
    # exit status, of those that ended by themselves on this machine
    ended: dict[str, int] = Field(default={})


class SweepFolder:
    """The folder of a sweep whose trials are these."""

    def __init__(self, path: Path, trials: list[Trial]) -> None:
        """Raises `ConfigError` if the folder holds another sweep."""
        self.path = path
        known = self.read()
        self.trials = self.joined(known.trials, trials)
        self.ended = {
            name: status for name, status in known.ended.items() if name in {trial.name for trial in trials}
        }

    def read(self) -> Known:
        """What was recorded; nothing in a new folder."""
        path = self.path / RECORD
        if not path.exists():
            return Known(trials=[])
        try:
            return Known.model_validate_json(read_text(path))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                "folder", f"cannot read {path}: {error}", "a folder of a sweep, or a new one"
            ) from None
        except ValidationError as error:
            raise ConfigError(
                "folder",
                f"{path} is no record of a sweep: {complaint(error)}",
                "a folder of a sweep, or a new one",
            ) from None

    def joined(self, names: list[str], trials: list[Trial]) -> list[Trial]:
        """The trials, those that the folder knows first: a number under Slurm stays that of its trial.

        Raises `ConfigError`.
        """
        by_name = {trial.name: trial for trial in trials}
        for name in names:
            if name not in by_name:
                raise ConfigError(
                    "folder", f"{self.path} holds the trial {name}, which the file no longer has", OTHER
                )
            self.compare(by_name[name])
        return [by_name.pop(name) for name in names] + list(by_name.values())

    def compare(self, trial: Trial) -> None:
        """Raises `ConfigError` if the folder has the trial with another config."""
        path = self.config_of(trial)
        try:
            before = read_json(read_text(path))
        except (OSError, ValueError, RecursionError):
            return  # it was never begun, or is written anew
        now = json.loads(json.dumps(self.sections(trial)))
        if before == now:
            return
        old, new = flatten(before), flatten(now)
        key = next(key for key in (*new, *old) if old.get(key) != new.get(key))
        wrong = (
            f"{self.path} holds the trial {trial.name} with {key} {old.get(key)!r:.60}, and now it is "
            f"{new.get(key)!r:.60}"
        )
        raise ConfigError("folder", wrong, OTHER)

    def config_of(self, trial: Trial) -> Path:
        """The file of a trial's config."""
        return self.path / "configs" / f"{trial.name}.json"

    def log_dir(self, trial: Trial) -> Path:
        """The folder of a trial's run."""
        return self.path / "trials" / trial.name

    def sections(self, trial: Trial) -> dict[str, Any]:
        """A trial's config with its folder."""
        return trial.sections | {"log": trial.sections.get("log", {}) | {"dir": str(self.log_dir(trial))}}

    def write(self) -> None:
        """Writes configs and record. Raises `ConfigError`."""
        check_folder("folder", self.path / "configs")
        check_folder("folder", self.path / "trials")
        for trial in self.trials:
            write_json("folder", self.config_of(trial), self.sections(trial))
        self.note()

    def note(self) -> None:
        """Writes the record."""
        write_json(
            "folder",
            self.path / RECORD,
            {"trials": [trial.name for trial in self.trials], "ended": self.ended},
        )
