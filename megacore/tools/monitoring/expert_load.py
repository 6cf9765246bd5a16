"""How evenly the router spread the tokens of the logged step over experts and their
ranks, for every block with experts.

A load is a part of the mean: 1 is balanced, and the number of experts over those of a token is all tokens to
one. The router's buffer has it, so that nothing more is counted or sent in a step. With a capacity, routers
also count the rows that they drop.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megacore.config import Config
from megacore.config.schema import resolved
from megacore.distributed.collectives import all_gather, all_reduce
from megacore.distributed.mesh import Mesh
from megacore.expert_parallel.router import Router
from megacore.train.callbacks import Callback
from megacore.train.step import TrainStep

BLOCKS = "blocks."
DIGITS = 4  # of an expert's load: a large model has thousands of them in a line


class Rows(NamedTuple):
    """What the router sent to a rank: by block that it holds, as a part of the mean of ranks; and over
    these blocks the median rank's.
    """

    own: dict[int, float]
    usual: float


class ExpertLoad(Callback):
    """Figures of a logged step: `expert_load_max/…`, `expert_load_min/…`, `expert_rank_load/…` (the
    fullest rank's), `expert_rank/…` (which that is along `parallel.expert`), `expert_entropy/…` (1:
    balanced), and `expert_load/…`, a list of all experts; with a capacity `expert_drops/…`, a part of all
    rows since the logged step before.
    """

    on_error = "raise"  # ranks of all stages communicate at each logged step

    def on_start(self, config: Config, mesh: Mesh) -> None:
        self.config, self.mesh = config, mesh
        self.blocks = [f"{BLOCKS}{i}" for i in range(config.model.num_layers) if config.model.has_experts(i)]
        # the step that was measured last, and its rows by block, along `parallel.expert`
        self.step, self.rows = -1, torch.empty(0)

    def on_built(self, train_step: TrainStep) -> None:
        """Asks all ranks which experts they hold. Collective."""
        own = torch.zeros(1 + len(self.blocks), dtype=torch.int64, device=self.mesh.device)
        own[0] = self.mesh.group("ep").rank
        own[[1 + at for at, _ in self._routers(train_step.stages)]] = 1
        self.held = all_gather(own[None], self.mesh.world).tolist()

    def metrics(
        self, metrics: Mapping[str, Any], stages: Sequence[nn.Module]
    ) -> Mapping[str, float | list[float]]:
        """See `Callback`. A stage's ranks know the same, and stages tell each other."""
        experts, capacity = resolved(self.config.model.num_experts), self.config.model.capacity_factor
        every = torch.zeros(len(self.blocks), experts, dtype=torch.float64, device=self.mesh.device)
        rows = every.new_zeros(len(self.blocks), 2)  # dropped, and all
        for at, router in self._routers(stages):
            every[at] = router.load.value
            rows[at, 0], rows[at, 1] = router.take_drops()
        all_reduce(every, self.mesh.pp)
        found: dict[str, float | list[float]] = {}
        by_rank, fullest = self._of_ranks(every).max(1)
        kept = self._of_ranks(every.clamp(max=capacity or math.inf))
        self.step, self.rows = metrics["step"], (kept / kept.mean(1, keepdim=True)).cpu()
        shares = every / experts
        entropy = torch.special.entr(shares).sum(1) / torch.log(shares.new_tensor(max(experts, 2)))
        kinds = {
            "expert_load_max": every.amax(1),
            "expert_load_min": every.amin(1),
            "expert_rank_load": by_rank,
            "expert_entropy": entropy,
        }
        if self.config.parallel.expert > 1:
            kinds["expert_rank"] = fullest
        if capacity is not None:
            dropped, routed = all_reduce(rows, self.mesh.world).unbind(1)  # each rank counts rows of its own
            kinds["expert_drops"] = dropped / routed.clamp(min=1)
        for kind, values in kinds.items():
            found |= {
                f"{kind}/{block}": value for block, value in zip(self.blocks, values.tolist(), strict=True)
            }
        loads = zip(self.blocks, every.tolist(), strict=True)
        return found | {f"expert_load/{block}": [round(load, DIGITS) for load in own] for block, own in loads}

    def rows_of(self, rank: int, step: int) -> Rows | None:
        """What the router sent to a rank in the logged `step`, by the mean of the ranks that
        hold the same experts; with a capacity no more than it lets through. None where nobody
        knows, or the rank has no experts.
        """
        at, *holds = self.held[rank]
        own = [block for block, held in enumerate(holds) if held]
        if step != self.step or not own:
            return None
        blocks = [int(self.blocks[block].removeprefix(BLOCKS)) for block in own]
        usual = median(self.rows[own].mean(0).tolist())
        return Rows(dict(zip(blocks, self.rows[own, at].tolist(), strict=True)), usual)

    def _of_ranks(self, loads: Tensor) -> Tensor:
        return loads.unflatten(1, (self.config.parallel.expert, -1)).mean(2)

    def _routers(self, stages: Sequence[nn.Module]) -> Iterator[tuple[int, Router]]:
        """Those of this rank, and which of the blocks with experts each is in.

        A model of one's own may have others elsewhere.
        """
        for name, module in (pair for stage in stages for pair in stage.named_modules()):
            if isinstance(module, Router) and (block := ".".join(name.split(".")[:2])) in self.blocks:
                yield self.blocks.index(block), module
