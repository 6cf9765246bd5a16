"""Computes the loss of a model on a corpus, for validation and for launch/evaluate.py."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megacore.config import Config
from megacore.config.schema import IGNORED
from megacore.data.samples import EvalSamples
from megacore.distributed.collectives import all_reduce
from megacore.distributed.mesh import Mesh
from megacore.model.flow import CROSS_ENTROPY
from megacore.pipeline.partition import placement_of
from megacore.pipeline.runtime import Runtime
from megacore.pipeline.schedule import forward_only
from megacore.train.loader import validation_batches


@dataclass(frozen=True)
class Evaluation:
    """Sums over all targets: every token of a corpus but the first, if it is learned."""

    nats: float
    targets: int
    text_bytes: int  # of UTF-8 that the targets spell

    @property
    def loss(self) -> float:
        """The mean negative log likelihood in nats a token; NaN if nothing that was read is learned."""
        return self.nats / self.targets if self.targets else math.nan


@torch.no_grad()
def evaluate(
    config: Config,
    runtime: Runtime,
    mesh: Mesh,
    samples: EvalSamples,
    token_bytes: Tensor | None = None,
    between: Callable[[], None] = lambda: None,
) -> Evaluation:
    """Run the model forward over `samples`, or over `train.eval_batches` batches of them.

    Collective; all ranks return the same. `token_bytes` ``[vocab]``, int64 on the device, is the number of
    bytes of text that each token stands for; without it no bytes are counted. `between` is called after every
    batch, and an exception in it ends the evaluation.
    """
    plan = forward_only(placement_of(config), config.num_microbatches)
    sums = torch.zeros(3, dtype=torch.float64, device=mesh.device)  # losses, targets, bytes
    for stage in runtime.stages:
        stage.eval()
    for batch in validation_batches(config, mesh, samples):
        sums[0] += runtime.run(plan, batch).get(CROSS_ENTROPY.name, 0.0)
        for microbatch in batch:
            is_learned = microbatch["targets"] != IGNORED
            sums[1] += is_learned.sum()
            if token_bytes is not None:
                targets = microbatch["targets"].masked_fill(~is_learned, 0)
                sums[2] += (token_bytes[targets] * is_learned).sum()
        between()
    for stage in runtime.stages:
        stage.train()

    # Ranks with different samples add up. Of ranks with the same samples one counts: the `is_loss_rank` of
    # the last stage.
    has_loss = any(stage.last for stage in runtime.stages)
    if not has_loss or not mesh.is_loss_rank:
        sums.zero_()
    nats, targets, text_bytes = all_reduce(sums, mesh.world).tolist()
    return Evaluation(nats, int(targets), int(text_bytes))
