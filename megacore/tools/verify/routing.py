"""Routing is proved first: a layout's routers must choose what those of the reference do.

Then the layout goes on with the reference's choices, so that a tie, which rounding may decide otherwise,
hides no error behind it.

So with the rows that do not fit into an expert's capacity: which are dropped follows from weights, and of two
whose weights are nearly equal rounding may drop the other.

The reference writes its choices to a file of their own. A layout's record has, for each step and router, by
how much the scores of what it chose differ from those of what the reference did: 0 where they are the same,
next to nothing for a near tie, else a fault.
"""

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megacore.distributed.shard import Shard
from megacore.model.context import Context
from megacore.model.expert_block import MixtureOfExperts
from megacore.model.stage import Stage

FILE = "choices.safetensors"
TIED = 1e-18  # what an exact tie that is decided otherwise counts as, so that it is seen


class Choices:
    """What the routers of a rank's stages choose, or in a layout: how that differs from the reference."""

    def __init__(self, stages: Iterable[Stage], reference: Path | None = None) -> None:
        """`reference`: the folder of its record, for a layout."""
        mixtures = {
            name: m
            for stage in stages
            for name, m in stage.named_modules()
            if isinstance(m, MixtureOfExperts)
        }
        self.made: dict[str, Tensor] = (
            load_file(reference / FILE) if mixtures and reference is not None else {}
        )
        self.apart: dict[str, Tensor] = {}  # of this step
        decide: Callable[..., Tensor] = self._record if reference is None else self._replay
        self.names = list(mixtures)
        for name, mixture in mixtures.items():
            mixture.decide = partial(decide, name)
            mixture.decide_drops = partial(
                self._record_drops if reference is None else self._replay_drops, name
            )

    def write(self, out: Path) -> None:
        """Writes the reference's choices."""
        if self.names:
            save_file(self.made, out / FILE)

    def differences(self) -> dict[str, tuple[Tensor, Shard]]:
        """Those of the step, by router, for a record; then begins the next."""
        found = {
            name: (self.apart.get(name, torch.zeros((), dtype=torch.float64)), Shard(()))
            for name in self.names
        }
        self.apart = {}
        return found

    def _record(self, name: str, context: Context, first: int, ranked: Tensor, chosen: Tensor) -> Tensor:
        self.made[f"{name}|{context.key}"] = chosen.clone()
        return chosen

    def _replay(self, name: str, context: Context, first: int, ranked: Tensor, chosen: Tensor) -> Tensor:
        """The reference's choice for this rank's tokens, which are those from
        `first` on of its context rank's.
        """
        right = self.made[f"{name}|{context.key}"][context.places(first, len(chosen), chosen.device)]
        own, other = (ranked.gather(1, experts).sort(dim=1)[0] for experts in (chosen, right))
        differ = (chosen.sort(dim=1)[0] != right.sort(dim=1)[0]).any(1)
        self._note(name, own[differ], other[differ])
        return right

    def _record_drops(
        self, name: str, context: Context, first: int, weights: Tensor, chosen: Tensor, fits: Tensor
    ) -> Tensor:
        self.made[f"{name}|{context.key}|weights"] = weights.masked_fill(~fits, -torch.inf)
        return fits

    def _replay_drops(
        self, name: str, context: Context, first: int, weights: Tensor, chosen: Tensor, fits: Tensor
    ) -> Tensor:
        """What the reference dropped of this rank's rows.

        One that differs is a near tie if it weighs what the last row does that fits.
        """
        whole, experts = (self.made[f"{name}|{context.key}{of}"] for of in ("|weights", ""))
        right = whole[context.places(first, len(chosen), chosen.device)] > -torch.inf
        kept = whole.masked_fill(whole == -torch.inf, torch.inf).flatten()
        least = torch.full((int(experts.amax()) + 1,), torch.inf, dtype=whole.dtype).scatter_reduce(
            0, experts.flatten(), kept, "amin"
        )
        self._note(name, weights[fits != right], least[chosen][fits != right])
        return right

    def _note(self, name: str, own: Tensor, other: Tensor) -> None:
        """Notes by how much scores are apart of which the reference decided otherwise, as a part of them."""
        if own.numel():
            larger = torch.maximum(own.abs(), other.abs()).clamp(min=torch.finfo(own.dtype).tiny)
            apart = ((own - other).abs() / larger).amax().double().clamp(min=TIED)
            self.apart[name] = torch.maximum(self.apart.get(name, apart), apart)
