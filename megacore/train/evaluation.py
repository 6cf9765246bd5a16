"""The loss of a model on a corpus: what a validation logs, and what launch/evaluate.py prints."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megacore.config import Config
from megacore.data.samples import EvalSamples
from megacore.distributed.comm import all_reduce
from megacore.distributed.mesh import Mesh
from megacore.pipeline.runtime import Runtime
from megacore.plan.partition import placement_of
from megacore.plan.schedule import forward_only
from megacore.tensor_parallel.cross_entropy import IGNORED
from megacore.train.loader import validation_batches


@dataclass(frozen=True)
class Evaluation:
    """Sums over all targets that were read: every token but a corpus's first is one."""

    nats: float
    targets: int
    text_bytes: int  # of UTF-8 that the targets spell

    @property
    def loss(self) -> float:
        """Nats a token: the mean negative log likelihood."""
        return self.nats / self.targets

    @property
    def perplexity(self) -> float:
        """e to the nats a token; infinite where that is beyond a float."""
        return float(torch.tensor(self.loss, dtype=torch.float64).exp())

    @property
    def bits_per_byte(self) -> float | None:
        """Bits a byte of text: unlike the others comparable between tokenizers. None where no bytes were counted."""
        return self.nats / math.log(2) / self.text_bytes if self.text_bytes else None


@torch.no_grad()
def evaluate(
    config: Config,
    runtime: Runtime,
    mesh: Mesh,
    samples: EvalSamples,
    token_bytes: Tensor | None = None,
    between: Callable[[], None] = lambda: None,
) -> Evaluation:
    """Runs the model forward over `samples`, or `train.eval_batches` of them; collective over the mesh, the same result on every rank.

    `token_bytes` ``[vocab]``, int64 on the device, are the bytes of text that each token stands for; without, none are counted.
    `between` is called behind every batch; what it raises ends the evaluation.
    """
    plan = forward_only(placement_of(config), config.num_microbatches)
    sums = torch.zeros(3, dtype=torch.float64, device=mesh.device)  # losses, targets, bytes
    for stage in runtime.stages:
        stage.eval()
    for batch in validation_batches(config, mesh, samples):
        sums[0] += runtime.run(plan, batch)
        for microbatch in batch:
            counted = microbatch.targets != IGNORED
            sums[1] += counted.sum()
            if token_bytes is not None:
                sums[2] += (token_bytes[microbatch.targets.masked_fill(~counted, 0)] * counted).sum()
        between()
    for stage in runtime.stages:
        stage.train()
    # Ranks with other samples add up; of the others, the first tensor rank with the last stage speaks for all.
    if not any(stage.last for stage in runtime.stages) or not mesh.speaks:
        sums.zero_()
    nats, targets, text_bytes = all_reduce(sums, mesh.world).tolist()
    return Evaluation(nats, int(targets), int(text_bytes))
