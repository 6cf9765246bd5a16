"""The context of a forward pass: shapes, positions, and the key of its random numbers."""

from dataclasses import dataclass

from torch import Tensor

from megacore.distributed.mesh import Group
from megacore.kernels.dispatch import Implementation
from megacore.kernels.dropout import bias_dropout_residual
from megacore.model.cache import KeyValueCache
from megacore.rng import key_of


@dataclass(frozen=True)
class Context:
    """The context of one microbatch's forward pass. Activations are ``[batch · seq, hidden]``, one sequence after the other."""

    batch_size: int
    seq_len: int
    rope: tuple[Tensor, Tensor] | None  # cos, sin
    group: Group  # the tensor ranks
    sequence: bool  # whether activations between parallel regions hold only this rank's tokens
    dropout: float  # 0 in validation
    key: int  # names this microbatch: (seed, step, position in the global batch)
    start: int = 0  # the position of the first token
    cache: KeyValueCache | None = None  # in generation: keys and values of earlier tokens
    kernels: Implementation = "auto"

    def drop(self, x: Tensor, *site: object) -> Tensor:
        """Drops out ``[tokens, hidden]`` with the mask of (microbatch, site), which is the same in every layout and recomputation."""
        return x if self.dropout == 0.0 else self._dropped(x, None, 1.0, site)

    def add(self, residual: Tensor, x: Tensor, scale: float, *site: object) -> Tensor:
        """``residual + scale · drop(x)``, in one pass."""
        return residual.add(x, alpha=scale) if self.dropout == 0.0 else self._dropped(x, residual, scale, site)

    def _dropped(self, x: Tensor, residual: Tensor | None, scale: float, site: tuple[object, ...]) -> Tensor:
        # An element's mask depends on its position in the whole microbatch, so a rank that holds some tokens begins at an offset.
        first = self.group.rank * x.numel() if self.sequence else 0
        key = key_of(self.key, *site)
        return bias_dropout_residual(x, None, residual, self.dropout, key, first=first, scale=scale, implementation=self.kernels)
