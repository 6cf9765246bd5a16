"""Finished runs as points of a law: parameters N, tokens D, compute C and the final loss."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from pydantic import ValidationError

from megacore.config import Config
from megacore.errors import ConfigError, LogError, UserError
from megacore.files import read_text
from megacore.records import Record, complaint
from megacore.tools.choices.flops import model_flops
from megacore.tools.metrics_file import read_metrics
from megacore.tools.planner.parameters import parameters
from megacore.tools.settings.load import load, smallest_world

SWEEP = "sweep.json"  # a sweep's folder has it; its runs are in trials/
# in runs of one law
ALIKE = (
    "data.train",
    "data.valid",
    "data.tokenizer",
    "data.document_mask",
    "train.seq_len",
    "model.vocab_size",
)
RIGHT = "finished runs' folders, log.dir, or a sweep's folder"


class Names(Record):
    """What a sweep's record says of its trials."""

    trials: list[str]


@dataclass(frozen=True)
class Run:
    """A finished run.

    `parameters` are without the table of embeddings and of positions; the LM head counts, also where it is
    tied.
    """

    name: str
    config: Config
    parameters: float
    tokens: float
    flops: float
    loss: float


def counted(config: Config) -> int:
    """N of a config: all parameters but the input's tables. A tied table counts once, as the LM head."""
    model = config.model
    tables = 0 if model.tie_embeddings else model.vocab_size
    tables += config.max_positions if model.position == "learned" else 0
    return parameters(config) - tables * model.hidden_size


def flops_per_token(config: Config) -> float:
    """Model FLOPs of a token, forward and backward, with attention over all pairs and the LM head:
    the numerator of a run's `mfu`.
    """
    found = model_flops(config, causal=False)
    assert found is not None, "of a model of the user's own, which is refused"
    return found


def folders(paths: Sequence[str]) -> list[Path]:
    """The runs' folders; of a sweep's folder those of its trials. Raises `ConfigError`."""
    found = []
    for path in map(Path, paths):
        record = path / SWEEP
        if not record.exists():
            found.append(path)
            continue
        try:
            found += [path / "trials" / name for name in Names.model_validate_json(read_text(record)).trials]
        except (OSError, ValueError) as error:
            why = complaint(error) if isinstance(error, ValidationError) else str(error)
            raise ConfigError("arguments", f"{record} is no record of a sweep: {why}", RIGHT) from None
    return list(dict.fromkeys(found))


def read_runs(paths: Sequence[str], loss: str | None, last: int) -> list[Run]:
    """The runs, all with the same kind of loss: `valid` (the last validation's; by default, if all have one)
    or `train` (the mean of so many last logged steps). Raises `UserError` for a run that has not finished, or
    that cannot stand beside the others.
    """
    every = [read_one(folder, last) for folder in folders(paths)]
    kind = loss or ("valid" if all(valid is not None for _, valid, _ in every) else "train")
    runs = []
    for run, valid, train in every:
        value = valid if kind == "valid" else train
        if value is None:
            raise LogError(
                f"{run.name}/metrics.jsonl",
                "has no validation after the last step",
                "--loss train, or a run with data.valid",
            )
        if not math.isfinite(value) or value <= 0:
            raise LogError(
                f"{run.name}/metrics.jsonl", f"the final loss is {value:g}", "without runs that diverged"
            )
        runs.append(Run(run.name, run.config, run.parameters, run.tokens, run.flops, value))
    check_alike(runs)
    return runs


def read_one(folder: Path, last: int) -> tuple[Run, float | None, float]:
    """A finished run without its loss, that of its last validation, and the mean of its last logged ones."""
    metrics = folder / "metrics.jsonl"
    path = str(folder / "config.json")
    try:
        # a file is executed only if it is named
        model = json.loads(read_text(path)).get("model", {})
        if (key := next((key for key in ("source", "hf") if model.get(key) is not None), None)) is not None:
            raise ConfigError(
                f"model.{key}",
                "nobody says what a model of the user's own computes",
                "runs of megacore's model",
            )
        config = load(path, [], smallest_world(path, [])).config
        training, validations = read_metrics(read_text(metrics))
    except UserError as error:
        raise type(error)(f"{folder}: {error.where}", error.wrong, error.right) from None
    except OSError as error:
        raise LogError(error.filename or str(folder), f"cannot be read: {error.strerror}", RIGHT) from None
    except (ValueError, AttributeError, RecursionError) as error:
        raise LogError(str(folder), f"holds no run's records: {error}", RIGHT) from None
    if not training or training[-1].step < config.train.steps:
        step = training[-1].step if training else 0
        raise LogError(str(metrics), f"stands at step {step} of {config.train.steps}", "finished runs")
    tokens = float(training[-1].tokens)
    losses = [math.nan if line.loss is None else line.loss for line in training[-last:]]
    ends = validations[-1] if validations and validations[-1].step == config.train.steps else None
    valid = None if ends is None else math.nan if ends.valid_loss is None else ends.valid_loss
    return (
        Run(str(folder), config, counted(config), tokens, flops_per_token(config) * tokens, math.nan),
        valid,
        fmean(losses),
    )


def check_alike(runs: Sequence[Run]) -> None:
    """Raises `ConfigError` if the losses of two runs cannot be compared."""
    for run in runs:
        for key in ALIKE:
            section, _, name = key.partition(".")
            own, first = (getattr(getattr(each.config, section), name) for each in (run, runs[0]))
            if own != first:
                raise ConfigError(
                    key,
                    f"{run.name} has {own!r:.80} and {runs[0].name} {first!r:.80}: their losses say "
                    "different things",
                    "runs on the same text",
                )


def undecayed(runs: Sequence[Run]) -> list[str]:
    """Names of runs that ended before their rate had decayed, which a law of final losses should not have."""
    return [
        run.name
        for run in runs
        if run.config.optim.schedule in ("cosine", "linear")
        and (run.config.optim.decay_steps or 0) > run.config.train.steps
    ]
