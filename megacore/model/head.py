"""The last layer of a GPT: the final norm, the LM head and the loss of the next token."""

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from megacore.config import Config
from megacore.context_parallel.scored import soft_cap
from megacore.distributed.shard import Shard, new_parameter, split
from megacore.distributed.topology import Topology
from megacore.model.context import Context
from megacore.model.embedding import vocabulary
from megacore.model.flow import CROSS_ENTROPY, Flow
from megacore.model.layers import Layer
from megacore.model.norm import Norm
from megacore.tensor_parallel.cross_entropy import (
    vocab_parallel_cross_entropy,
    vocab_parallel_linear_cross_entropy,
)
from megacore.tensor_parallel.linear import column_linear, row_stride


class Head(Layer):
    """Hidden states to the loss; to logits where text is generated.

    Its weight is the embedding's if they are tied.
    """

    writes: ClassVar[Mapping[str, Flow]] = {}
    losses = (CROSS_ENTROPY,)
    bare = True

    def __init__(self, config: Config, mesh: Topology, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.model, self.group, self.scale = config.model, mesh.tp, config.logit_scale
        self.sequence = config.parallel.sequence and mesh.tp.size > 1
        self.norm = Norm(config.model, mesh.tp, self.sequence, dtype, device)
        self.head = vocabulary(config, mesh, dtype, device)  # this rank's rows
        bias = (
            new_parameter(Shard((config.model.vocab_size,), (split(mesh.tp, 0),)), dtype, device)
            if config.model.head_bias
            else None
        )
        self.head.bias = bias

    @classmethod
    def shares(cls, config: Config) -> Mapping[str, str]:
        """See `Layer`."""
        return {"head.weight": "embedding.weight"} if config.model.tie_embeddings else {}

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """The sum of the losses of all targets, see `loss`."""
        assert context.batch.targets is not None
        return self.loss(x, context.batch.targets, context.gradients.get(CROSS_ENTROPY.name))

    def loss(self, x: Tensor, targets: Tensor, gradient: Tensor | None = None) -> Tensor:
        """The sum of the losses of all targets ``[batch, seq]`` that are not `IGNORED`, in
        nats; a scalar, in fp32 at least.

        `gradient`: what backward will start with, if it is known: forward then writes the gradient of the
        logits.
        """
        return self.sums(x, targets, gradient)[0]

    def sums(
        self, x: Tensor, targets: Tensor, gradient: Tensor | None = None, z_loss: float | None = None
    ) -> tuple[Tensor, ...]:
        """See `loss`; with a `z_loss` also the sum of the squares of the
        log-sum-exp, see `kernels.cross_entropy`.
        """
        model, flat, first_row = self.model, targets.flatten(), self.head.first_row
        if model.chunked_loss:
            where = self.group, self.sequence, first_row, model.kernels
            found = vocab_parallel_linear_cross_entropy(
                self.scaled_norm(x), self.head.weight, flat, *where, z_loss
            )
            return (found,) if z_loss is None else found
        found = vocab_parallel_cross_entropy(
            self.logits(x), flat, self.group, first_row, model.kernels, gradient, z_loss
        )
        return (found.sum(),) if z_loss is None else tuple(part.sum() for part in found)

    def logits(self, x: Tensor) -> Tensor:
        """Hidden states → logits over this rank's vocabulary rows, ``[batch · seq, rows]``.

        The vocabulary may be of any size: what is padded is the distance between the rows, in memory alone.
        """
        weight, bias = self.head.weight, self.head.bias
        stride = 0 if bias is not None else row_stride(x, len(weight))
        logits = column_linear(self.scaled_norm(x), weight, bias, self.group, self.sequence, stride)
        return logits if self.model.logit_cap is None else soft_cap(logits, self.model.logit_cap)

    def scaled_norm(self, x: Tensor) -> Tensor:
        """The last hidden states, normed and scaled for the head."""
        x = self.norm(x)
        return x if self.scale == 1.0 else x * self.scale  # equal to scaling the logits, which are many more
