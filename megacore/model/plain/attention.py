"""Attention of plain modules through megacore's: context ranks, documents and generation follow from it.

A module of transformers calls `attend` by name, as its attention implementation. In other modules PyTorch's
`scaled_dot_product_attention` is replaced where it would not see all that it should.
"""

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from megacore.config import Config
from megacore.context_parallel.attention import Sequences
from megacore.context_parallel.scored import Scoring
from megacore.distributed.communicator import SOLO
from megacore.model.attention import CausalAttention
from megacore.model.context import Context
from megacore.model.plain.exact import Exact

NAME = "megacore"  # of the attention implementation in transformers
# Arguments of an attention function of transformers that change nothing here.
HARMLESS = {"position_ids", "use_cache", "cache_position", "output_attentions", "output_hidden_states"}


class ModuleAttention(CausalAttention):
    """The attention that one call in a module's block makes, with its scale, window and cap."""

    def __init__(self, config: Config, queries: int, scale: float, window: int | None, cap: float | None):
        super().__init__(config, queries)
        self.scale = scale
        self.windowed = window is not None
        self.scoring = None if window is None and cap is None else Scoring(window, cap)

    def in_context(self, q: Tensor, k: Tensor, v: Tensor, context: Context) -> Tensor:
        """See `CausalAttention`. A window or a cap, which a stage knows of a config, is this module's own."""
        if self.scoring is not None and context.sequences is None:
            context = replace(context, sequences=Sequences(q.shape[2], SOLO, "gather"))
        return super().in_context(q, k, v, context)


@dataclass
class Running:
    """A part of a plain module that is being run, and what its attention needs to know.

    Attributes:
        attentions: those of the block, by the order in which they are called.
        in_region: whether what runs sees all tokens of the tensor ranks.
        called: how often the block has called attention.
    """

    context: Context
    config: Config
    name: str
    attentions: list[ModuleAttention] = field(default_factory=list)
    in_region: bool = False
    called: int = 0


_OF_THREAD = threading.local()


def running() -> Running:
    """Return what this thread runs.

    Raises `RuntimeError` outside of a layer's forward, such as where backward runs a part again.
    """
    now: Running | None = getattr(_OF_THREAD, "running", None)
    if now is None:
        raise RuntimeError(
            "a part of a plain module runs outside of its layer's forward, as in torch.utils.checkpoint: "
            "train.recompute=full recomputes layers"
        )
    return now


@contextmanager
def run_part(part: Running, dtype: torch.dtype, replaces_sdpa: bool = False) -> Iterator[None]:
    """A context in which a part of a plain module runs."""
    before = getattr(_OF_THREAD, "running", None)
    _OF_THREAD.running = part
    modes = ([Exact()] if dtype == torch.float64 else []) + ([Replacing()] if replaces_sdpa else [])
    try:
        with ExitStack() as stack:
            for mode in modes:
                stack.enter_context(mode)
            yield
    finally:
        _OF_THREAD.running = before


class Replacing(TorchFunctionMode):
    """A context in which PyTorch's causal attention is `attend`."""

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        """Call a function of PyTorch, or `attend` in its place."""
        if function is F.scaled_dot_product_attention:
            return replaced(*arguments, **(options or {}))
        return function(*arguments, **(options or {}))


def replaced(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute what `scaled_dot_product_attention` does, q ``[batch, heads, seq, head]``."""
    return attention(q, k, v, attn_mask, dropout_p, is_causal, scale)


def attend(
    module: nn.Module,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Compute attention for a module of transformers, q ``[batch, heads, seq, head]`` → ``[batch, seq, heads,
    head]`` and no weights.

    Raises `ValueError` for what would be ignored.
    """
    for name, value in others.items():
        if value is not None and value is not False and name not in HARMLESS:
            raise ValueError(f"{running().name}: attention takes {name}, which is not known here")
    check_window(module, sliding_window)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    y = attention(q, k, v, attention_mask, dropout, causal, scaling, sliding_window, softcap)
    return y.transpose(1, 2), None


def check_window(module: nn.Module, window: int | None) -> None:
    """Raise `ValueError` if a class of transformers limits attention by its mask alone; none is made here."""
    config: Any = getattr(module, "config", None)
    kinds, index = getattr(config, "layer_types", None), getattr(module, "layer_idx", None)
    if kinds is not None and index is not None:
        is_limited = kinds[index] == "chunked_attention" or (
            kinds[index] == "sliding_attention" and window is None
        )
    else:
        is_limited = window is None and getattr(config, "sliding_window", None) is not None
    if is_limited:
        raise ValueError(
            f"{running().name} attends to a window or chunk that only its mask knows: it would see more"
        )


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    dropout: float,
    causal: bool,
    scale: float | None,
    window: int | None = None,
    cap: float | None = None,
) -> Tensor:
    """Compute causal attention of this rank's tokens to all that they should see."""
    part, heads, kv_heads = running(), q.shape[1], k.shape[1]
    if mask is not None or not causal:
        kind = "without causality" if mask is None else "with its own mask"
        raise ValueError(f"{part.name} attends {kind}, which not every layout can compute")
    if dropout:
        raise ValueError(
            f"{part.name} drops out {dropout:g} of its attention; only 0 is the same in all layouts"
        )
    if v.shape[1] != kv_heads or heads % kv_heads:
        raise ValueError(
            f"{part.name} attends with {heads} heads of queries, {kv_heads} of keys and {v.shape[1]} of "
            "values: does the table have a column for each of them?"
        )
    if part.context.sequence and not part.in_region:
        raise ValueError(f"{part.name} attends to this rank's tokens alone: its attention is in no region")

    if part.called == len(part.attentions):
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        part.attentions.append(ModuleAttention(part.config, heads // kv_heads, scale, window, cap))
    layer = part.attentions[part.called]
    part.called += 1
    return layer.in_context(q, k, v, part.context)
