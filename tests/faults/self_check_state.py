"""Mistakes in what a model keeps from step to step and in text generation, which layouts and the reference
share: only verify's self-checks see them.
"""

from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from megacore.context_parallel.scored import Scoring
from megacore.distributed.buffers import BUFFERS, ShardedBuffer
from megacore.engine.native import NativeEngine
from megacore.model.attention import CausalAttention
from megacore.model.context import Context
from megacore.model.stage import Stage
from megacore.tools.text.cache import KeyValueCache
from tests.faults.self_check import on_feed_forward

patch = mock.patch.object


def cache_one_token_short() -> Any:
    """Once the cache holds keys, attention does not see the first of them."""
    extend = KeyValueCache.extend

    def short(self: KeyValueCache, layer: nn.Module, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        first = min(self.length, 1)
        return tuple(x[:, :, first:] for x in extend(self, layer, k, v))

    return patch(KeyValueCache, "extend", short)


def rotary_position_of_the_token_before() -> Any:
    """A token that is generated is rotated by the position of the token before it."""
    context_of = Stage.context

    def shifted(self: Stage, batch: Any, cache: Any = None, gradients: Any = None) -> Context:
        context = context_of(self, batch, cache, gradients)
        if cache is not None and cache.length:
            rows = slice(context.start - 1, context.start - 1 + context.seq_len)
            context.rope = self.rope[0][0][rows], self.rope[0][1][rows]
        return context

    return patch(Stage, "context", shifted)


def mixed_without_a_cache() -> Any:
    """A layer adds the token before, which it does not keep when text is generated."""
    return on_feed_forward(lambda _, x: x + 0.1 * torch.cat((torch.zeros_like(x[:1]), x[:-1])))


def no_layer_has_a_cache() -> Any:
    """No layer uses the cache, so each pass sees only the tokens that it reads."""
    context_of = Stage.context

    def without(self: Stage, *arguments: Any) -> Context:
        context = context_of(self, *arguments)
        context.cache = None
        return context

    return patch(Stage, "context", without)


def cap_dropped_at_steps() -> Any:
    """A layer with a window schedule makes its scoring anew at each step, without the cap of the scores."""

    def at_step(self: CausalAttention, step: int) -> None:
        if self.windowed and self.model.window_schedule:
            self.scoring = Scoring(self.model.window_of(self.index, step))

    return patch(CausalAttention, "at_step", at_step)


def cap_dropped_with_a_schedule() -> Any:
    """The same, and a new layer too has no cap if there is a schedule."""
    make = CausalAttention.__init__

    def without_cap(self: CausalAttention, *arguments: Any, **options: Any) -> None:
        make(self, *arguments, **options)
        if self.model.window_schedule and self.windowed:
            self.scoring = Scoring(self.model.window_of(self.index))

    def at_step(self: CausalAttention, step: int) -> None:
        if self.windowed and self.model.window_schedule:
            self.scoring = Scoring(self.model.window_of(self.index, step))

    return mock.patch.multiple(CausalAttention, __init__=without_cap, at_step=at_step)


def window_that_only_grows() -> Any:
    """A layer keeps the largest window that it has had, so a run that goes back to a step differs."""
    at_step = CausalAttention.at_step

    def growing(self: CausalAttention, step: int) -> None:
        self.latest = max(step, getattr(self, "latest", 0))  # type: ignore[attr-defined]
        at_step(self, self.latest)

    return patch(CausalAttention, "at_step", growing)


def evaluation_is_counted() -> Any:
    """Routers note the choices of an evaluation for the next update of their buffers."""

    def note(self: ShardedBuffer, key: int, counts: Tensor) -> None:
        self.noted[key] = counts.detach()

    return patch(ShardedBuffer, "note", note)


def state_leaks_from_evaluation() -> Any:
    """A recurrence begins a training batch with the state that the last evaluation has left."""

    def recur(layer: nn.Module, x: Tensor) -> Tensor:
        if not layer.training:
            layer.state = x[-1].detach()  # type: ignore[assignment]
            return x
        state = getattr(layer, "state", None)
        return x if state is None else torch.cat((x[:1] + 0.1 * state, x[1:]))

    return on_feed_forward(recur)


def passes_are_counted() -> Any:
    """A layer counts its passes, those of an evaluation too."""

    def count(layer: nn.Module, x: Tensor) -> None:
        layer.passes = getattr(layer, "passes", 0) + 1  # type: ignore[assignment]

    return on_feed_forward(count)


def evaluation_draws_random_numbers() -> Any:
    """An evaluation draws from PyTorch's generator, whose numbers training would have drawn."""

    def draw(layer: nn.Module, x: Tensor) -> None:
        if not layer.training:
            torch.rand(1)

    return on_feed_forward(draw)


def counter_lost() -> Any:
    """A layer warms up by a Python counter of its training passes, which no checkpoint has."""

    def warm_up(layer: nn.Module, x: Tensor) -> Tensor:
        layer.passes = getattr(layer, "passes", 0) + int(layer.training)  # type: ignore[assignment]
        return x * (1 - 0.5 ** (layer.passes + 1))

    return on_feed_forward(warm_up)


def mean_lost() -> Any:
    """A layer centres its output by a running mean in a plain attribute, which no checkpoint has."""

    def centre(layer: nn.Module, x: Tensor) -> Tensor:
        mean = getattr(layer, "mean", torch.zeros_like(x[0]))
        if layer.training:
            layer.mean = 0.9 * mean + 0.1 * x.detach().mean(0)  # type: ignore[assignment]
        return x - mean

    return on_feed_forward(centre)


def buffers_not_saved() -> Any:
    """The engine leaves the buffers of layers out of a checkpoint."""
    tensors = NativeEngine.tensors

    def without_buffers(self: NativeEngine) -> dict[str, Any]:
        return {key: piece for key, piece in tensors(self).items() if not key.startswith(BUFFERS)}

    return patch(NativeEngine, "tensors", without_buffers)
