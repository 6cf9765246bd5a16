"""How evenly the router spread the tokens of the logged step over experts and their ranks, for every block with experts.

A load is a part of the mean: 1 is balanced, and the number of experts over those of a token is all tokens to one. The router's buffer has
it, so that nothing more is counted or sent in a step.
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
    """Figures of a logged step: `expert_load_max/…`, `expert_load_min/…`, `expert_rank_load/…` (the fullest rank's), `expert_entropy/…` (1:
    balanced), and for each expert `expert_load/…`."""

    def start(self, config: Config, mesh: Mesh) -> None:
        self.config, self.mesh = config, mesh
        self.blocks = [f"blocks.{i}" for i in range(config.model.num_layers) if config.model.has_experts(i)]

    def figures(self, figures: Mapping[str, Any], stages: Sequence[nn.Module]) -> Mapping[str, float]:
        """See `Monitor`. A stage's ranks know the same, and stages tell each other."""
        experts = resolved(self.config.model.num_experts)
        every = torch.zeros(len(self.blocks), experts, dtype=torch.float64, device=self.mesh.device)
        for name, module in (pair for stage in stages for pair in stage.named_modules()):
            if isinstance(module, Router):
                every[self.blocks.index(".".join(name.split(".")[:2]))] = module.load.value
        all_reduce(every, self.mesh.pp)
        found: dict[str, float] = {}
        by_rank = every.unflatten(1, (self.config.parallel.expert, -1)).mean(2).amax(1)
        shares = every / experts
        entropy = torch.special.entr(shares).sum(1) / torch.log(shares.new_tensor(max(experts, 2)))
        kinds = {"expert_load_max": every.amax(1), "expert_load_min": every.amin(1), "expert_rank_load": by_rank, "expert_entropy": entropy}
        for kind, values in kinds.items():
            found |= {f"{kind}/{block}": value for block, value in zip(self.blocks, values.tolist(), strict=True)}
        if every.numel() <= MOST:
            for block, loads in zip(self.blocks, every.tolist(), strict=True):
                found |= {f"expert_load/{block}.{number}": load for number, load in enumerate(loads)}
        return found
