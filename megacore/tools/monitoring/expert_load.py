"""How evenly the router spread the tokens of the logged step over experts and their ranks, for every block with experts.

A load is a part of the mean: 1 is balanced, and the number of experts over those of a token is all tokens to one. The router's buffer has
it, so that nothing more is counted or sent in a step. With a capacity, routers also count the rows that they drop.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from megacore.config import Config
from megacore.config.schema import resolved
from megacore.distributed.collectives import all_reduce
from megacore.distributed.mesh import Mesh
from megacore.expert_parallel.router import Router
from megacore.train.logs import Monitor

MOST = 1024  # experts of all blocks, of which each has a figure of its own


class ExpertLoad(Monitor):
    """Figures of a logged step: `expert_load_max/…`, `expert_load_min/…`, `expert_rank_load/…` (the fullest rank's), `expert_rank/…` (which
    that is along `parallel.expert`), `expert_entropy/…` (1: balanced), and for each expert `expert_load/…`; with a capacity
    `expert_drops/…`, a part of all rows since the logged step before."""

    def start(self, config: Config, mesh: Mesh) -> None:
        self.config, self.mesh = config, mesh
        self.blocks = [f"blocks.{i}" for i in range(config.model.num_layers) if config.model.has_experts(i)]

    def figures(self, figures: Mapping[str, Any], stages: Sequence[nn.Module]) -> Mapping[str, float]:
        """See `Monitor`. A stage's ranks know the same, and stages tell each other."""
        experts = resolved(self.config.model.num_experts)
        every = torch.zeros(len(self.blocks), experts, dtype=torch.float64, device=self.mesh.device)
        rows = every.new_zeros(len(self.blocks), 2)  # dropped, and all
        for name, module in (pair for stage in stages for pair in stage.named_modules()):
            if isinstance(module, Router):
                at = self.blocks.index(".".join(name.split(".")[:2]))
                every[at] = module.load.value
                rows[at, 0], rows[at, 1] = module.take_drops()
        all_reduce(every, self.mesh.pp)
        found: dict[str, float] = {}
        by_rank, fullest = every.unflatten(1, (self.config.parallel.expert, -1)).mean(2).max(1)
        shares = every / experts
        entropy = torch.special.entr(shares).sum(1) / torch.log(shares.new_tensor(max(experts, 2)))
        kinds = {"expert_load_max": every.amax(1), "expert_load_min": every.amin(1), "expert_rank_load": by_rank, "expert_entropy": entropy}
        if self.config.parallel.expert > 1:
            kinds["expert_rank"] = fullest
        if self.config.model.capacity_factor is not None:
            dropped, routed = all_reduce(rows, self.mesh.world).unbind(1)  # each rank counts rows of its own
            kinds["expert_drops"] = dropped / routed.clamp(min=1)
        for kind, values in kinds.items():
            found |= {f"{kind}/{block}": value for block, value in zip(self.blocks, values.tolist(), strict=True)}
        if every.numel() <= MOST:
            for block, loads in zip(self.blocks, every.tolist(), strict=True):
                found |= {f"expert_load/{block}.{number}": load for number, load in enumerate(loads)}
        return found
