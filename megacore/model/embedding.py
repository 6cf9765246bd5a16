"""The first layer of a GPT: token vectors, and learned positions if it has them."""

import torch
import torch.nn.functional as F
from torch import Tensor

from megacore.config import Config
from megacore.distributed.collectives import own_part
from megacore.distributed.shard import Shard, new_parameter, replicated
from megacore.distributed.topology import Topology
from megacore.model.context import Context
from megacore.model.layers import Layer
from megacore.model.norm import Norm
from megacore.tensor_parallel.embedding import VocabParallelEmbedding


def vocabulary(
    config: Config, mesh: Topology, dtype: torch.dtype, device: torch.device
) -> VocabParallelEmbedding:
    """A vector for each token: of the embedding, or of the LM head, which are one if they are tied."""
    model = config.model
    return VocabParallelEmbedding(
        model.vocab_size,
        model.hidden_size,
        init_std=model.init_std,
        group=mesh.tp,
        sequence=config.parallel.sequence and mesh.tp.size > 1,
        dtype=dtype,
        device=device,
        kernels=model.kernels,
    )


class Embedding(Layer):
    """Tokens to hidden states, scaled, with learned positions added; normed if the model wants it."""

    reads = ()
    bare = True

    def __init__(self, config: Config, mesh: Topology, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        model, group = config.model, mesh.tp
        self.scale = model.embedding_scale
        shape, along = (
            (config.max_positions, model.hidden_size),
            (replicated(group, partial=config.parallel.sequence),),
        )
        table = Shard(shape, along, decay=True, init_std=model.init_std, table=True)
        self.position = new_parameter(table, dtype, device) if model.position == "learned" else None
        self.embedding = vocabulary(config, mesh, dtype, device)
        self.embedding_norm = (
            Norm(model, group, config.parallel.sequence, dtype, device) if model.embedding_norm else None
        )

    def forward(self, context: Context) -> Tensor:
        """→ ``[batch · seq, hidden]`` (with sequence parallelism this rank's tokens)."""
        x = self.embedding(context.batch.tokens.flatten())
        if self.scale != 1.0:
            x = x * self.scale
        if self.position is not None:
            if context.positions is None:
                positions = self.position[context.start : context.start + context.seq_len].repeat(
                    context.batch_size, 1
                )
            else:
                positions = F.embedding(context.positions.flatten(), self.position)
            x = x + (own_part(positions, context.group) if context.sequence else positions)
        if self.embedding_norm is not None:
            x = self.embedding_norm(x)
        return context.drop(x, "embedding")
