"""The runs of a comparison: all rates on the first seed, the best rate of each contender on every
seed, and what became of them.
"""

import math
from pathlib import Path
from statistics import fmean, median

from megacore.files import read_text
from megacore.tools.metrics_file import Training, read_metrics
from megacore.tools.sweep.folder import SweepFolder
from megacore.tools.sweep.results import Row, metric_of, row_of
from megacore.tools.sweep.trials import Trial
from megacore.tools.versus.contenders import Contender, trials_of
from megacore.tools.versus.verdict import Curve

LAST = 5  # logged steps, of which a training loss is the mean


class Comparison:
    """Two contenders, and what became of their runs."""

    def __init__(
        self, contenders: tuple[Contender, Contender], rates: list[float], seeds: int, folder: Path
    ) -> None:
        self.contenders, self.rates = contenders, rates
        first = contenders[0].config.train.seed
        self.seeds = list(range(first, first + seeds))
        self.trials: dict[tuple[str, float, int], Trial] = {}
        for contender, trial in trials_of(contenders, rates, self.seeds):
            self.trials[contender.name, trial.swept["rate"], trial.seed or 0] = trial
        self.metric = metric_of(list(self.trials.values()), None)
        self.path = folder
        self.open()

    def open(self) -> None:
        """Reads what is in the folder. Raises `ConfigError` if that is another comparison."""
        self.folder = SweepFolder(self.path, list(self.trials.values()))

    def row(self, contender: Contender, rate: float, seed: int) -> Row:
        """What became of a run."""
        return row_of(self.folder, self.trials[contender.name, rate, seed], LAST)

    def loss(self, row: Row) -> float:
        """What a run is judged by; infinite if it has not finished.

        Other losses than that of the next tokens do not count.
        """
        if not row.finished:
            return math.inf
        if self.metric == "loss":
            return fmean(self.losses(row)[-LAST:])
        return math.inf if row.valid_loss is None else row.valid_loss

    def best_rate(self, contender: Contender) -> float:
        """The factor of its least loss on the first seed."""
        return min(self.rates, key=lambda rate: self.loss(self.row(contender, rate, self.seeds[0])))

    def first(self) -> list[Row]:
        """All rates on the first seed."""
        return [
            self.row(contender, rate, self.seeds[0]) for contender in self.contenders for rate in self.rates
        ]

    def pairs(self) -> list[tuple[Row, Row]]:
        """The best rate of each on all seeds."""
        rates = [self.best_rate(contender) for contender in self.contenders]
        idea, other = (
            [self.row(c, rate, seed) for seed in self.seeds]
            for c, rate in zip(self.contenders, rates, strict=True)
        )
        return list(zip(idea, other, strict=True))

    def logged(self, row: Row) -> list[Training]:
        """A run's logged steps."""
        return read_metrics(read_text(self.folder.log_dir(row.trial) / "metrics.jsonl"))[0]

    def losses(self, row: Row) -> list[float]:
        """Its losses of the next tokens there; infinite where one is no number."""
        return [math.inf if line.text_loss is None else line.text_loss for line in self.logged(row)]

    def curve(self, row: Row) -> Curve:
        """A finished run's curve."""
        steps = self.logged(row)
        return Curve(
            [line.tokens for line in steps],
            self.losses(row),
            self.loss(row),
            median(line.step_seconds for line in steps),
        )

    def asked(self) -> list[Row]:
        """All runs that are needed by now, each once."""
        rows = [*self.first(), *(row for pair in self.pairs() for row in pair)]
        return list({row.trial.name: row for row in rows}.values())
