"""Compares the parameters that all tensor ranks hold alike, so that ranks which have drifted apart do not train on.

Every tensor rank computes the update of a norm or a row-parallel bias by itself. One bit that differs, in a kernel that was chosen by
timing or in memory, stays and grows, and no loss shows it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from megacore.checkpoint import Ranks
from megacore.checkpoint.digest import BITS
from megacore.distributed.collectives import all_gather
from megacore.distributed.mesh import Mesh
from megacore.distributed.shard import shard_of
from megacore.model.stage import Stage

# Steps from one comparison to the next. What has drifted stays apart, so nothing is missed in between; and a comparison is some hundred
# small kernels in a deep model, which every step should not pay.
EVERY = 50
MODULUS = 2**32 - 5  # a prime; sums of a million ranks' numbers below it are exact in fp64
PIECE = 2**24  # numbers whose bits are widened at a time: a table of learned positions may be large, and the device full


class Drifted(RuntimeError):
    """Parameters that tensor ranks hold alike have drifted apart."""


class Drift:
    """Sums the bits of this rank's parameters that tensor ranks hold alike. The sums travel with a step's loss."""

    def __init__(self, stages: Sequence[Stage], mesh: Mesh) -> None:
        self.mesh = mesh
        named = (named for stage in stages for named in stage.named_parameters())
        self.alike = {name: parameter for name, parameter in named if mesh.tp.name not in shard_of(parameter).split_over}
        self.none = torch.zeros((), dtype=torch.float64, device=mesh.device)
        self.told = False  # of a difference that is no fault for certain
        self.last: Tensor | None = None  # checksums by parameter in the last comparison: an update behind it spreads a difference

    @property
    def is_fault(self) -> bool:
        """Whether a difference is a fault for certain. Each tensor rank's gradients are summed over data ranks of its own, and if these are
        three or more, NCCL may add them up in another order for each."""
        return self.mesh.backend != "nccl" or self.mesh.gradient_group.size <= 2

    def sums(self, step: int) -> list[Tensor]:
        """In every `EVERY`-th step a number for each tensor rank, fp64, to be added up over all ranks: 0 for all but this one's."""
        if self.mesh.tp.size == 1 or step % EVERY:
            return []
        self.last = torch.stack(self.by_parameter()) if self.alike else self.none.long()[None]
        own = self.last.sum() % MODULUS
        return [own + self.none if rank == self.mesh.tp.rank else self.none for rank in range(self.mesh.tp.size)]

    def seen(self, sums: Sequence[Tensor]) -> Tensor:
        """How many tensor ranks have another sum than the first, from the `sums` over all ranks; on the device."""
        return sum(((own != sums[0]).double() for own in sums), self.none)

    def by_parameter(self) -> list[Tensor]:
        """A checksum of each parameter, int64: the sum of its numbers' squared bits, which small changes do not leave as it is."""
        held = (getattr(parameter, "to_local", lambda own=parameter: own)().detach() for parameter in self.alike.values())
        bits = (own.flatten().view(BITS[own.itemsize]).split(PIECE) for own in held)
        return [torch.stack([piece.long().square().sum() for piece in own]).sum().to(self.mesh.device) for own in bits]

    def named(self) -> str:
        """What differed first in the last comparison, and where, in words; the same on every rank. Waits for the device and all ranks."""
        group, text = self.mesh.tp, ""
        assert self.last is not None
        of_all = all_gather(self.last[None], group).cpu()
        differ = (of_all != of_all.mode(0).values).nonzero().tolist()
        if differ:
            (tensor, first), parameters = min(differ, key=lambda found: found[1]), {found[1] for found in differ}
            other = next(rank for rank, sums in zip(group.ranks, of_all, strict=True) if sums[first] != of_all[tensor, first])
            text = f"{list(self.alike)[first]} on rank {group.ranks[tensor]} is not that of rank {other}"
            text += f", nor are {len(parameters) - 1} more parameters" * (len(parameters) > 1)
        return Ranks(self.mesh).first(text)
