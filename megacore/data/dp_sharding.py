"""The rule by which data ranks divide the samples of a step, for the training run and for proofs about it."""

import numpy as np

from megacore.config.schema import TrainConfig


def dealt(steps: range, data_size: int, train: TrainConfig) -> np.ndarray:
    """The global sample indices that are read in `steps`: int64 ``[steps, data ranks, microbatches, micro_batch_size]``.

    A step takes the next `global_batch_size` samples, cut into microbatches; microbatch j of data rank d is the step's
    ``j · data_size + d``. So which samples share a microbatch does not depend on the layout. Steps count from 1.
    """
    size = train.global_batch_size
    samples = np.arange((steps.start - 1) * size, (steps.stop - 1) * size)
    return samples.reshape(len(steps), -1, data_size, train.micro_batch_size).swapaxes(1, 2)
