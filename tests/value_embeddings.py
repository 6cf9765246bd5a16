"""A user's own file (`model.source`) whose layers share parameters: blocks 0, 1 and 3 add vectors
of their tokens from one table.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from megacore.config import Config
from megacore.distributed.shard import Shard, new_parameter, replicated
from megacore.distributed.topology import Topology
from megacore.model.block import Block
from megacore.model.context import Context
from megacore.model.embedding import vocabulary
from megacore.model.gpt import gpt
from megacore.model.layers import Layers, LayerSpec


class Valued(Block):
    """A block that adds a vector for each token, scaled and shifted."""

    def __init__(
        self, index: int, config: Config, mesh: Topology, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(index, config, mesh, dtype, device)
        along = (replicated(mesh.tp, partial=config.parallel.sequence),)
        vector = Shard((config.model.hidden_size,), along, init_std=0.5)
        made: dict[str, Callable[[], nn.Module | nn.Parameter]] = {
            "gain": lambda: new_parameter(vector, dtype, device),
            "values": lambda: vocabulary(config, mesh, dtype, device),
            "shift": lambda: new_parameter(vector, dtype, device),
        }
        for name in sorted(made, reverse=bool(index % 2)):  # which ranks register in another order
            setattr(self, name, made[name]())

    @classmethod
    def shares(cls, index: int, config: Config) -> Mapping[str, str]:
        """See `Layer`."""
        return {name: f"blocks.0.{name}" for name in ("values.weight", "gain", "shift")} if index else {}

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """``[tokens, hidden]`` → the same."""
        return (
            super().forward(x, context) + self.gain * self.values(context.batch.tokens.flatten()) + self.shift
        )


def layers(config: Config) -> Layers:
    """A GPT's, with blocks of both kinds."""
    return [
        LayerSpec(spec.name, Valued, spec.arguments) if spec.arguments in ((0,), (1,), (3,)) else spec
        for spec in gpt(config)
    ]
