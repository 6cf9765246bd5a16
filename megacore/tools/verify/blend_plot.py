"""Draws what a blend of corpora gives over a run: the share of each, and how
often its samples have come round.
"""

from dataclasses import dataclass

import numpy as np

from megacore.config.schema import TrainConfig
from megacore.data.samples import SampleStream, visits

POINTS = 200  # steps at which samples are counted


@dataclass(frozen=True)
class Part:
    """What a corpus has given to the run: at `steps` its samples so far, of `size` in an
    epoch; `share` is of all at the end.
    """

    prefix: str
    size: int
    steps: list[int]
    samples: list[int]
    share: float

    @property
    def epochs(self) -> float:
        """How often its samples have come round at the end."""
        return self.samples[-1] / self.size


def given(stream: SampleStream, train: TrainConfig) -> list[Part]:
    """The part of each corpus, counted by the formula that the run itself asks (`data.samples.visits`)."""
    steps = np.unique(np.linspace(0, train.steps, min(POINTS, train.steps) + 1).round().astype(int)).tolist()
    parts = []
    for corpus, (tokens, size) in enumerate(zip(stream.corpora, stream.counts, strict=True)):
        samples = [visits(stream.shares, corpus, train.samples_through(step)) for step in steps]
        parts.append(
            Part(tokens.prefix, size, steps, samples, samples[-1] / train.samples_through(train.steps))
        )
    return parts


def draw_blend(parts: list[Part], train: TrainConfig, path: str) -> None:
    """Writes the picture to `path`, of the format that its ending names.

    Raises `OSError` if it cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    shares, epochs = figure.subplots(1, 2)
    steps = parts[0].steps
    counts = np.diff([part.samples for part in parts])  # [corpora, spans of steps]
    shares.stackplot(
        steps,
        *(100 * np.append(row, row[-1]) / np.append(counts.sum(0), counts[:, -1].sum()) for row in counts),
        step="post",
    )
    shares.set(
        xlabel="step",
        ylabel="% of the samples",
        title="what the steps read",
        xlim=(0, train.steps),
        ylim=(0, 100),
    )
    for part in parts:
        seen = np.array(part.samples) / part.size
        epochs.plot(steps, seen, label=f"{part.prefix}: {part.share:.1%}, {part.epochs:.3g} epochs")
    epochs.axhline(1, color="black", linewidth=1, linestyle="--")
    epochs.set(
        xlabel="step",
        ylabel="epochs",
        title="how often a corpus has come round",
        xlim=(0, train.steps),
        ylim=(0, None),
    )
    figure.legend(*epochs.get_legend_handles_labels(), loc="outside lower center", fontsize=8, ncols=2)
    figure.savefig(path, dpi=100)
