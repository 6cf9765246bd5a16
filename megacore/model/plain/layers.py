"""A plain module as a list of layers: what is before its blocks, each block, and what is after them."""

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from megacore.config import Config
from megacore.distributed.collectives import scatter_tokens
from megacore.distributed.shard import shard_of
from megacore.distributed.topology import Topology
from megacore.model.context import Context
from megacore.model.flow import CROSS_ENTROPY, Flow
from megacore.model.layers import Layer, Layers, LayerSpec
from megacore.model.plain.attention import ModuleAttention, Running, run_part
from megacore.model.plain.build import plain_model
from megacore.model.plain.exact import Exact
from megacore.model.plain.first_pass import FirstPass
from megacore.model.plain.outline import Outline, calls_of, order_of, positions_in
from megacore.model.plain.pieces import Pieces, rows
from megacore.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy


def plain_layers(config: Config) -> Layers:
    """Return the layers of a config's plain module; their parameters are called as the module's own are.

    Raises `ValueError` if the module or its table does not suit.
    """
    plain = plain_model(config)
    needs_positions = config.parallel.context > 1 or config.data.document_mask
    if needs_positions and not plain.takes_positions:
        raise ValueError(
            f"{type(plain.module).__name__}.forward takes no position_ids: of context ranks' tokens, or of "
            "documents, it would not know the positions"
        )
    order_of(plain)
    blocks = [LayerSpec(f"blocks.{index}", PlainBlock, (index,)) for index in range(len(plain.blocks))]
    return [LayerSpec("embedding", PlainEmbedding), *blocks, LayerSpec("head", PlainHead)]


class PlainEmbedding(Layer):
    """What a module computes before its first block. With tensor ranks each has some rows of the table."""

    reads = ()
    bare = True

    def __init__(self, config: Config, mesh: Topology, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        plain = plain_model(config)
        order, pieces = order_of(plain), Pieces(plain, config, mesh, dtype, device)
        real = {plain.embedding: pieces.embedding()}
        real |= {place: pieces.outer(place, partial=False) for place in order.before}
        add_by_place(self, real)
        self.config = config
        self.outline = Outline(plain, real, order.returns_tuple)
        self.first_pass = FirstPass(config, "before its blocks", real)

    def forward(self, context: Context) -> Tensor:
        """→ ``[batch · seq, hidden]`` (with sequence parallelism this rank's tokens)."""
        tokens = context.batch.tokens
        dtype = next(self.parameters()).dtype
        part = Running(context, self.config, "the embedding")
        with self.first_pass.watch(tokens.device), run_part(part, dtype):
            x = self.outline.embed(tokens, positions_in(context)).flatten(0, 1)
        return scatter_tokens(x, context.group) if context.sequence else x


class PlainBlock(Layer):
    """A block of a module."""

    bare = True

    def __init__(
        self, index: int, config: Config, mesh: Topology, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.plain, self.index, self.config = plain_model(config), index, config
        self.place = self.plain.blocks[index]
        block = Pieces(self.plain, config, mesh, dtype, device).block(self.place)
        add_by_place(self, {self.place: block})
        self.first_pass = FirstPass(config, self.place, {self.place: block})
        self.attentions: list[ModuleAttention] = []  # made when they first run: only then is it known of what

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """``[tokens, hidden]`` → the same.

        Raises `ConfigError` if its code does what a layout cannot compute.
        """
        with self.first_pass.watch(x.device):
            return self._compute(x, context)

    def _compute(self, x: Tensor, context: Context) -> Tensor:
        part = Running(context, self.config, self.place, self.attentions)
        sees_more = context.sequences is not None or context.cache is not None
        replaces_sdpa = not self.plain.attends_by_name and (
            sees_more or context.sequence or context.watch is not None
        )
        with run_part(part, x.dtype, replaces_sdpa=replaces_sdpa):
            call = calls_of(self.plain, context, x.dtype)[self.index].with_hidden(rows(x, context))
            y = self.get_submodule(self.place)(*call.arguments, **call.options)

        if isinstance(y, tuple) != order_of(self.plain).returns_tuple:
            raise ValueError(
                f"{self.place} returns {'a tuple' if isinstance(y, tuple) else type(y).__name__}, and the "
                f"code after it takes {'hidden states' if isinstance(y, tuple) else 'the first of a tuple'}"
            )
        if sees_more and not part.called:
            raise ValueError(
                f"{self.place} attends by its own code, which sees neither documents nor the tokens of "
                "other context ranks or of a cache; torch.nn.functional.scaled_dot_product_attention would"
            )
        return (y[0] if isinstance(y, tuple) else y).flatten(0, 1)


class PlainHead(Layer):
    """What a module computes after its last block: logits, of which each tensor rank has some, and their
    loss.
    """

    writes: ClassVar[Mapping[str, Flow]] = {}
    losses = (CROSS_ENTROPY,)
    bare = True

    def __init__(self, config: Config, mesh: Topology, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        plain = plain_model(config)
        order, pieces = order_of(plain), Pieces(plain, config, mesh, dtype, device)
        rows_of_head = pieces.head()
        real: dict[str, nn.Module] = {place: pieces.outer(place, partial=True) for place in order.after}
        real[plain.head] = rows_of_head
        add_by_place(self, real)
        self.group, self.kernels = mesh.tp, config.model.kernels
        self.first_row = shard_of(rows_of_head.weight).offset[0]
        self.outline = Outline(plain, real, order.returns_tuple)
        self.first_pass = FirstPass(config, "after its blocks", real)

    @classmethod
    def shares(cls, config: Config) -> Mapping[str, str]:
        """See `Layer`."""
        plain = plain_model(config)
        return {f"{plain.head}.weight": f"{plain.embedding}.weight"} if plain.tied else {}

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """The sum of the losses of all targets, see `loss`."""
        assert context.batch.targets is not None
        return self.loss(x, context.batch.targets, context.gradients.get(CROSS_ENTROPY.name))

    def loss(self, x: Tensor, targets: Tensor, gradient: Tensor | None = None) -> Tensor:
        """See `megacore.model.head.Head.loss`."""
        logits, flat = self.logits(x), targets.flatten()
        losses: Tensor = vocab_parallel_cross_entropy(
            logits, flat, self.group, self.first_row, self.kernels, gradient
        )
        return losses.sum()

    def logits(self, x: Tensor) -> Tensor:
        """Hidden states → logits over this rank's rows of the head, ``[batch · seq, rows]``."""
        exact = Exact() if x.dtype == torch.float64 else nullcontext()
        with self.first_pass.watch(x.device), exact:
            logits = self.outline.logits(x[None])
        # The loss writes its gradient over the logits, which the operation that made them may have kept.
        keeps_result = hasattr(logits.grad_fn, "_saved_result")
        return (logits.clone() if keeps_result else logits)[0]


def add_by_place(layer: nn.Module, modules: Mapping[str, Any]) -> None:
    """Add modules to a layer, each at its place in the module that it comes from."""
    for place, module in modules.items():
        *parents, name = place.split(".")
        parent = layer
        for parent_name in parents:
            if parent_name not in parent._modules:
                parent.add_module(parent_name, nn.Module())
            parent = parent.get_submodule(parent_name)
        parent.add_module(name, module)
