"""A GPT block of the same layers whose norms or branches stand otherwise:
`model.norm_place` and `model.branches`.
"""

from functools import partial

import torch
from torch import Tensor, nn

from megacore.config import Config
from megacore.distributed.topology import Topology
from megacore.model.block import Block
from megacore.model.context import Context
from megacore.model.norm import Norm


class ArrangedBlock(Block):
    """``x + post(attention(pre(x)))``, then ``x + post(feed_forward(pre(x)))``, of which the
    config leaves out pre or post.

    With parallel branches both read the same x, by a norm each, or by the same one.
    """

    def __init__(
        self, index: int, config: Config, mesh: Topology, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(index, config, mesh, dtype, device)
        place, self.branches = config.model.norm_place, config.model.branches
        norm = partial(Norm, config.model, mesh.tp, config.parallel.sequence, dtype, device)
        if place == "post":
            self.norm1 = self.norm2 = nn.Identity()  # type: ignore[assignment]
        if self.branches == "shared_norm":
            del self.norm2
        self.post_norm1, self.post_norm2 = (nn.Identity() if place == "pre" else norm() for _ in range(2))

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """See `Block`."""
        normed = self.norm1(x)
        branch = self.post_norm1(self.attention(normed, context))
        after = context.add(x, branch, self.scale, self.index, "attention")
        if self.branches != "shared_norm":
            normed = self.norm2(after if self.branches == "serial" else x)
        return context.add(
            after, self.post_norm2(self.feed_forward(normed)), self.scale, self.index, "feed_forward"
        )
