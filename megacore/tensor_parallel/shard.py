"""The shard record: which slice of which logical tensor a parameter on this rank is.

Initialisation, checkpoints, gradient norms and verification are all driven by it, so that none of
them knows how a layer was split.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Shard:
    """Where a local parameter stands in its logical tensor.

    A logical tensor of ``global_shape`` is cut along ``dim`` into ``count`` consecutive pieces of
    ``ceil(size / count)`` (the last may be shorter: nothing is ever padded); this rank holds piece
    ``index``. ``dim=None`` means every tensor-parallel rank holds the whole.
    """

    global_shape: tuple[int, ...]
    dim: int | None = None
    index: int = 0
    count: int = 1
    decay: bool = False  # weight decay applies (matrices, not biases and norms)
    partial: bool = False  # replicated, but each tensor rank sees only its own tokens or heads: gradients must be summed over tp
    owner: bool = True  # False for the second copy of a tied tensor: not counted in norms, not saved
    init_std: float | None = None  # normal with this deviation; None: filled with `fill`
    fill: float = 0.0

    @property
    def start(self) -> int:
        """First index along `dim` that this rank holds."""
        assert self.dim is not None
        return min(self.index * -(-self.global_shape[self.dim] // self.count), self.global_shape[self.dim])

    @property
    def offset(self) -> tuple[int, ...]:
        """Position of the local tensor's first element in the logical tensor."""
        return tuple(self.start if d == self.dim else 0 for d in range(len(self.global_shape)))

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of the piece that this rank holds."""
        if self.dim is None:
            return self.global_shape
        size = self.global_shape[self.dim]
        stop = min((self.index + 1) * -(-size // self.count), size)
        return tuple(stop - self.start if d == self.dim else n for d, n in enumerate(self.global_shape))

    @property
    def counted(self) -> bool:
        """Whether this rank's copy is the one that counts (in norms) and is saved (in checkpoints)."""
        return self.owner and (self.dim is not None or self.index == 0)


def new_parameter(shard: Shard, dtype: torch.dtype, device: torch.device | str) -> nn.Parameter:
    """An uninitialised local parameter for `shard`; `model.initialise` fills it (see there why not here)."""
    parameter = nn.Parameter(torch.empty(shard.local_shape, dtype=dtype, device=device))
    parameter.shard = shard  # type: ignore[attr-defined]
    return parameter


def shard_of(parameter: Tensor) -> Shard:
    """The `Shard` record of a parameter. Every parameter of a megacore model has one."""
    shard = getattr(parameter, "shard", None)
    assert shard is not None, "parameter without a shard record: create it with tensor_parallel.new_parameter"
    return shard
