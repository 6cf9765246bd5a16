"""What a run reads, as whoever starts it has opened and checked it (`megacore.tools.inputs`)."""

from pathlib import Path
from typing import Protocol

from megacore.checkpoint import Reader
from megacore.data.samples import EvalSamples
from megacore.errors import CheckpointError
from megacore.train.loader import SampleSource


class Inputs(Protocol):
    """The corpora, and on rank 0 the checkpoint to resume (`checkpoint`) or the checkpoint whose
    weights to start from (`weights`).
    """

    validation: EvalSamples | None
    checkpoint: Path | None
    weights: Path | None
    opened: Reader | None  # the one that is named

    @property
    def stream(self) -> SampleSource:
        """The training samples."""

    def look_again(self, resumed: Path | None, step: int) -> None:
        """On rank 0 during the run, sets `checkpoint` to the newest that the run has saved, or
        else to the one that it `resumed`.
        """

    def fall_back(self, damage: CheckpointError) -> None:
        """On rank 0, goes on to the checkpoint before `checkpoint`, which was found to be
        damaged when it was read, or raises.
        """

    def unigram_entropy(self) -> float | None:
        """The loss on the validation set, in nats a token, of a model that knows only
        token frequencies; None if unknown.
        """
