"""The vocabulary-parallel embedding: each tensor rank holds the rows of some tokens."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megacore.distributed.comm import leave_tensor_parallel
from megacore.distributed.mesh import Group
from megacore.distributed.shard import Shard, new_parameter, replicated, split


class VocabParallelEmbedding(nn.Module):
    """Token vectors ``[vocab, hidden]``, split along the vocabulary into pieces of ``ceil(vocab / ranks)``.

    The last rank's piece may be shorter. Nothing is padded, because no collective moves vocabulary rows.
    If embeddings are tied, the weight is also the LM head; `tied` are the two ranks that hold a copy each, if they are two.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        *,
        init_std: float,
        group: Group,
        sequence: bool,
        dtype: torch.dtype,
        device: torch.device,
        tied: Group | None = None,
    ) -> None:
        super().__init__()
        self.group, self.sequence = group, sequence
        along = (split(group, 0), *((replicated(tied, partial=True),) if tied else ()))
        shard = Shard((vocab_size, hidden_size), along, decay=True, init_std=init_std)
        self.first_row = shard.offset[0]
        self.weight = new_parameter(shard, dtype, device)

    def forward(self, tokens: Tensor) -> Tensor:
        """`tokens` ``[tokens]`` int64 → ``[tokens, hidden]`` (with sequence parallelism this rank's tokens)."""
        if self.group.size == 1:
            return F.embedding(tokens, self.weight)
        local = tokens - self.first_row
        elsewhere = (local < 0) | (local >= self.weight.shape[0])
        part = F.embedding(local.masked_fill(elsewhere, 0), self.weight).masked_fill(elsewhere[:, None], 0.0)
        return leave_tensor_parallel(part, self.group, self.sequence)
