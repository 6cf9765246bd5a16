"""Routing is proved first: a layout's routers must choose what those of the reference do. Then the layout goes on with the reference's
choices, so that a tie, which rounding may decide otherwise, hides no error behind it.

The reference writes its choices to a file of their own. A layout's record has, for each step and router, by how much the scores of what
it chose differ from those of what the reference did: 0 where they are the same, next to nothing for a near tie, else a fault.
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
        mixtures = {name: m for stage in stages for name, m in stage.named_modules() if isinstance(m, MixtureOfExperts)}
        self.made: dict[str, Tensor] = load_file(reference / FILE) if mixtures and reference is not None else {}
        self.apart: dict[str, Tensor] = {}  # of this step
        decide: Callable[..., Tensor] = self._record if reference is None else self._replay
        self.names = list(mixtures)
        for name, mixture in mixtures.items():
            mixture.decide = partial(decide, name)

    def write(self, out: Path) -> None:
        """Writes the reference's choices."""
        if self.names:
            save_file(self.made, out / FILE)

    def differences(self) -> dict[str, tuple[Tensor, Shard]]:
        """Those of the step, by router, for a record; then begins the next."""
        found = {name: (self.apart.get(name, torch.zeros((), dtype=torch.float64)), Shard(())) for name in self.names}
        self.apart = {}
        return found

    def _record(self, name: str, context: Context, first: int, ranked: Tensor, chosen: Tensor) -> Tensor:
        self.made[f"{name}|{context.key}"] = chosen.clone()
        return chosen

    def _replay(self, name: str, context: Context, first: int, ranked: Tensor, chosen: Tensor) -> Tensor:
        """The reference's choice for this rank's tokens, which are those from `first` on of its context rank's."""
        whole, places = self.made[f"{name}|{context.key}"], torch.empty(len(chosen), dtype=torch.int64)
        for here, at in context.runs(first, len(chosen)):
            places[here] = torch.arange(at, at + here.stop - here.start)
        right = whole[places]
        own, other = (ranked.gather(1, experts).sort(dim=1)[0] for experts in (chosen, right))
        differ = (chosen.sort(dim=1)[0] != right.sort(dim=1)[0]).any(1)
        if differ.any():
            larger = torch.maximum(own.abs(), other.abs()).clamp(min=torch.finfo(own.dtype).tiny)
            apart = ((own - other).abs() / larger)[differ].amax().double().clamp(min=TIED)
            self.apart[name] = torch.maximum(self.apart.get(name, apart), apart)
        return right
