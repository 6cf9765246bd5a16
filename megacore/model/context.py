"""What a forward pass knows beside its activations: shapes, positions, and the key of its random numbers."""

from dataclasses import dataclass

from torch import Tensor

from megacore.comm import own_part
from megacore.mesh import Group
from megacore.model.cache import KeyValueCache
from megacore.rng import keep_mask, key_of


@dataclass(frozen=True)
class Context:
    """One microbatch's forward pass. Activations are ``[batch · seq, hidden]``, a sequence after the other."""

    batch_size: int
    seq_len: int
    rope: tuple[Tensor, Tensor] | None  # cos, sin
    group: Group  # the tensor ranks
    sequence: bool  # whether activations between parallel regions hold this rank's tokens only
    dropout: float  # 0 in validation
    key: int  # names this microbatch: (seed, step, position in the global batch)
    start: int = 0  # the position of the first token
    cache: KeyValueCache | None = None  # in generation: what attention keeps of the tokens before

    def drop(self, x: Tensor, *site: object) -> Tensor:
        """Dropout of ``[tokens, hidden]`` with the mask of (microbatch, site): the same in every layout and recomputation.

        With sequence parallelism each rank draws the mask of all tokens and keeps its own part.
        """
        if self.dropout == 0.0:
            return x
        shape = (self.batch_size * self.seq_len, x.shape[1])
        mask = keep_mask(shape, 1.0 - self.dropout, key_of(self.key, *site), x.device)
        if self.sequence:
            mask = own_part(mask, self.group)
        return x * mask / (1.0 - self.dropout)
