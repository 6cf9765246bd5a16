"""A GPT block: attention and a feed-forward layer, each after a norm and added to the residual.

It is written once in parallel layers; one device is the layout tp = 1. A new kind of block needs what `Block`
has: a constructor that takes the config and the mesh, ``forward(x, context)`` from ``[tokens, hidden]`` to
the same, and parameters made by the tensor-parallel layers, so that each has its `Shard`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megacore.config import Config
from megacore.config.schema import resolved
from megacore.distributed.communicator import Group
from megacore.distributed.shard import LogicalMatrix
from megacore.distributed.topology import Topology
from megacore.kernels.dispatch import use_triton
from megacore.kernels.gelu import bias_gelu
from megacore.kernels.swiglu import swiglu
from megacore.model.activations import geglu, relu2, swiglu_clamped
from megacore.model.attention import Attention
from megacore.model.context import Context
from megacore.model.latent_attention import LatentAttention
from megacore.model.layers import Layer
from megacore.model.norm import Norm
from megacore.tensor_parallel.linear import ColumnLinear, RowLinear

# By `model.activation`; gelu is the tanh form, as in GPT-2.
ACTIVATIONS: dict[str, Callable[..., Tensor]] = {
    "gelu": partial(bias_gelu, approximate="tanh"),
    "gelu_erf": partial(bias_gelu, approximate="none"),
    "swiglu": swiglu,
    "swiglu_clamped": swiglu_clamped,
    "geglu": partial(geglu, approximate="tanh"),
    "geglu_erf": partial(geglu, approximate="none"),
    "relu2": relu2,
}


class FeedForward(nn.Module):
    """Two linear layers around `model.activation`: column-parallel, then row-parallel.

    With a gate (swiglu) the first weight is ``[2, ffn, hidden]``, split along ffn: a rank holds gate and up
    of the same features.
    """

    def __init__(
        self,
        config: Config,
        group: Group,
        dtype: torch.dtype,
        device: torch.device,
        output_std: float,
        ffn_size: int | None = None,
    ) -> None:
        """`ffn_size`: if it is not that of the config."""
        super().__init__()
        model, ffn_size = config.model, ffn_size or resolved(config.model.ffn_size)
        where: dict[str, Any] = {
            "group": group,
            "sequence": config.parallel.sequence,
            "dtype": dtype,
            "device": device,
        }
        up, dim = ((2, ffn_size), 1) if model.gated else ((ffn_size,), 0)
        # ZeRO-3 frees a bias outside of its layer, and other activations take none.
        self.kernels, takes = model.kernels, model.activation in ("gelu", "gelu_erf")
        self.folds = model.bias and takes and config.engine.kind != "deepspeed"
        gated = (
            LogicalMatrix(n, (slice(at, at + 1),), (0,), (1,), (2,)) for at, n in enumerate(("gate", "up"))
        )
        matrices = tuple(gated) if model.gated else ()
        self.up = ColumnLinear(
            model.hidden_size,
            up,
            dim=dim,
            bias=model.bias,
            init_std=model.init_std,
            matrices=matrices,
            **where,
        )
        activation, again = (
            partial(ACTIVATIONS[model.activation], implementation=model.kernels),
            config.train.recompute == "selective",
        )
        self.down = RowLinear(
            ffn_size,
            model.hidden_size,
            bias=model.bias,
            init_std=output_std,
            activation=activation,
            recompute=again,
            **where,
        )

    def forward(self, x: Tensor) -> Tensor:
        """``[tokens, hidden]`` → the same (with sequence parallelism this rank's tokens).

        A Triton kernel of the activation adds the first bias, and sums its gradient, in its own passes over
        memory.
        """
        bias = self.up.bias
        if self.folds and use_triton("bias_gelu", self.kernels, x=x, bias=bias):
            return self.down(self.up(x, without_bias=True), bias)
        return self.down(self.up(x))


class Block(Layer):
    """``x + scale · attention(norm(x))``, then ``x + scale · feed_forward(norm(x))``;
    `model.residual_scale` is 1 if not set.
    """

    def __init__(
        self, index: int, config: Config, mesh: Topology, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        model, group = config.model, mesh.tp
        self.index, self.scale = index, config.residual_scale
        # Each block adds twice to the residual. The scale keeps the residual's variance from growing with
        # depth (GPT-2).
        output_std = (
            0.0 if model.zero_init else model.init_std / (2 * (model.base_layers or model.num_layers)) ** 0.5
        )
        self.norm1 = Norm(model, group, config.parallel.sequence, dtype, device)
        attention = Attention if model.kv_rank is None else LatentAttention
        self.attention = attention(config, group, dtype, device, output_std, index)
        self.norm2 = Norm(model, group, config.parallel.sequence, dtype, device)
        self.feed_forward = self.make_feed_forward(config, mesh, dtype, device, output_std)

    def make_feed_forward(
        self, config: Config, mesh: Topology, dtype: torch.dtype, device: torch.device, output_std: float
    ) -> nn.Module:
        """The layer behind attention, for blocks that differ in it."""
        return FeedForward(config, mesh.tp, dtype, device, output_std)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """``[tokens, hidden]`` → the same (with sequence parallelism this rank's tokens)."""
        x, h = self.behind_attention(x, self.attention(self.norm1(x), context), context)
        return context.add(x, self.feed_forward(h), self.scale, self.index, "feed_forward")

    def behind_attention(self, x: Tensor, branch: Tensor, context: Context) -> tuple[Tensor, Tensor]:
        """What attention's result is added to, with it, and the norm of that,
        which the feed-forward layer reads.

        Attention is no part of it: where it ends a compiled graph, each function around it would begin one
        more.
        """
        if context.dropout == 0.0 and self.scale == 1.0:  # the next norm then computes the sum
            h, x = self.norm2(branch, x)
            return x, h
        x = context.add(x, branch, self.scale, self.index, "attention")
        return x, self.norm2(x)
