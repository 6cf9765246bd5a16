"""Compares the parameters that all tensor ranks hold alike, so that ranks which have
drifted apart do not train on.

Every tensor rank computes the update of a norm or a row-parallel bias by itself. One bit that differs, in a
kernel that was chosen by timing or in memory, stays and grows, and no loss shows it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from megacore.checkpoint import Ranks
from megacore.checkpoint.digest import BITS
from megacore.distributed.collectives import all_gather, all_reduce
from megacore.distributed.shard import shard_of
from megacore.train.callbacks import Callback
from megacore.train.step import TrainStep

# Steps from one comparison to the next. What has drifted stays apart, so nothing is missed in between; and a
# comparison is some hundred small kernels in a deep model, which every step should not pay.
EVERY = 50
MODULUS = 2**32 - 5  # a prime; sums of a million ranks' numbers below it are exact in fp64
LAG = 3  # steps behind a comparison, when a GPU has long done it
# numbers whose bits are widened at a time: a table of learned positions may be large, and the device full
PIECE = 2**24


class Drifted(RuntimeError):
    """Parameters that tensor ranks hold alike have drifted apart."""


class Drift(Callback):
    """Sums the bits of this rank's parameters that tensor ranks hold alike, and compares the sums over all
    ranks. Nobody waits for that: what a GPU found is read some steps later, or before anything is saved.
    """

    on_error = "raise"

    def on_built(self, train_step: TrainStep) -> None:
        """Find this rank's parameters that all tensor ranks hold alike."""
        mesh = self.mesh = train_step.mesh
        named = (named for stage in train_step.stages for named in stage.named_parameters())
        self.alike = {
            name: parameter for name, parameter in named if mesh.tp.name not in shard_of(parameter).split_over
        }
        self.none = torch.zeros((), dtype=torch.float64, device=mesh.device)
        self.step = 0
        self.told = False  # of a difference that is no fault for certain
        # step and outcome of a comparison, on its way to the host
        self.found: tuple[int, Tensor, torch.cuda.Event | None] | None = None
        # checksums by parameter in the last comparison: an update behind it spreads a difference
        self.last: Tensor | None = None

    @property
    def is_fault(self) -> bool:
        """Whether a difference is a fault for certain.

        Each tensor rank's gradients are summed over data ranks of its own, and if these are three or more,
        NCCL may add them up in another order for each.
        """
        return self.mesh.backend != "nccl" or self.mesh.gradient_group.size <= 2

    def on_step_begin(self, step: int, logged: bool) -> None:
        """Ends a comparison. Raises `Drifted` on all ranks."""
        self.step = step
        if self.found is not None and step <= self.found[0]:  # the run went back, to other weights
            self.found = None
        if self.found is not None and step >= self.found[0] + LAG:
            self.judge()

    def on_phase(self, phase: str) -> None:
        """Begins a comparison, behind the backward: the parameters of the last update, some of which
        may come late, are there then.
        """
        if phase == "optimizer step" and self.step % EVERY == 0:
            self.compare()

    def on_pause_begin(self, phase: str) -> None:
        """Ends a comparison: nothing that has drifted is saved."""
        self.judge()

    def compare(self) -> None:
        """Begins to compare all ranks' parameters; on a CPU it ends at once."""
        outcome = self.seen(all_reduce(torch.stack(self.sums()), self.mesh.world).unbind())
        if self.mesh.device.type == "cuda":
            host, arrived = torch.empty_like(outcome, device="cpu", pin_memory=True), torch.cuda.Event()
            host.copy_(outcome, non_blocking=True)
            arrived.record()
            self.found = self.step, host, arrived
        else:
            self.found = self.step, outcome, None
            self.judge()

    def judge(self) -> None:
        """Raises `Drifted` on all ranks if the last comparison has found a difference; where that
        may be no fault, it says so once.
        """
        if self.found is None:
            return
        (step, outcome, arrived), self.found = self.found, None
        if arrived is not None:
            arrived.synchronize()
        if outcome.item() and not self.told:
            found = (
                f"parameters that tensor ranks hold alike have drifted apart, seen in step {step}: "
                f"{self.named()}"
            )
            if self.is_fault:
                raise Drifted(found)
            self.told = True
            self.mesh.print(
                f"WARNING: {found}; NCCL may have added up gradients in another order for each, so "
                "training continues"
            )

    def sums(self) -> list[Tensor]:
        """A number for each tensor rank, fp64, to be added up over all ranks: 0 for all but this one's."""
        self.last = torch.stack(self.by_parameter()) if self.alike else self.none.long()[None]
        own = self.last.sum() % MODULUS
        return [
            own + self.none if rank == self.mesh.tp.rank else self.none for rank in range(self.mesh.tp.size)
        ]

    def seen(self, sums: Sequence[Tensor]) -> Tensor:
        """How many tensor ranks have another sum than the first, from the `sums`
        over all ranks; on the device.
        """
        return sum(((own != sums[0]).double() for own in sums), self.none)

    def by_parameter(self) -> list[Tensor]:
        """A checksum of each parameter, int64: the sum of its numbers' squared bits, which small
        changes do not leave as it is.
        """
        held = (
            getattr(parameter, "to_local", lambda own=parameter: own)().detach()
            for parameter in self.alike.values()
        )
        bits = (own.flatten().view(BITS[own.itemsize]).split(PIECE) for own in held)
        return [
            torch.stack([piece.long().square().sum() for piece in own]).sum().to(self.mesh.device)
            for own in bits
        ]

    def named(self) -> str:
        """What differed first in the last comparison, and where, in words; the same on every rank.

        Waits for the device and all ranks.
        """
        group, text = self.mesh.tp, ""
        assert self.last is not None
        of_all = all_gather(self.last[None], group).cpu()
        differ = (of_all != of_all.mode(0).values).nonzero().tolist()
        if differ:
            (tensor, first), parameters = (
                min(differ, key=lambda found: found[1]),
                {found[1] for found in differ},
            )
            other = next(
                rank
                for rank, sums in zip(group.ranks, of_all, strict=True)
                if sums[first] != of_all[tensor, first]
            )
            text = f"{list(self.alike)[first]} on rank {group.ranks[tensor]} is not that of rank {other}"
            text += f", nor are {len(parameters) - 1} more parameters" * (len(parameters) > 1)
        return Ranks(self.mesh).first(text)
