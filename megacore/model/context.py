"""The context of a forward pass: shapes, positions, and the key of its random numbers."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from megacore.context_parallel.attention import Sequences
from megacore.context_parallel.sharding import Run
from megacore.distributed.communicator import Group
from megacore.kernels.dispatch import Implementation
from megacore.kernels.dropout import bias_dropout_residual
from megacore.model.batch import Microbatch
from megacore.rng import key_of


class TextCache(Protocol):
    """What a stage's layers keep of earlier tokens while a text is written; `tools.text.cache` has it."""

    length: int  # positions held; the next token's position
    sequences: Sequences | None  # of the tokens that are being read, if context ranks divide them
    positions: Tensor | None  # and of this rank's

    def attend(self, layer: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of the latest queries to all keys so far, of which `k` and `v` are
        the new ones of an `Attention`.
        """

    def extend(self, layer: nn.Module, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Adds a layer's new keys and values, ``[batch, heads, new, head]``; returns all."""

    def state(self, layer: nn.Module) -> tuple[Tensor, ...] | None:
        """What a layer has kept of all tokens so far, as a recurrence does; None at a text's beginning."""

    def keep(self, layer: nn.Module, new: int, *state: Tensor) -> None:
        """Keeps this in place of it, `new` tokens later."""

    def advance(self, new: int) -> None:
        """Counts `new` positions, which every layer has added."""


class Watch(Protocol):
    """Whoever measures what layers compute (`Stage.watch`), in the steps in which it does.

    It must change nothing.
    """

    def on_layer_output(self, layer: nn.Module, flow: Mapping[str, Tensor]) -> None:
        """A layer has run; what it wrote is in `flow`.

        It is not told when a backward runs the layer again.
        """

    def on_attention(self, attention: nn.Module, q: Tensor, k: Tensor, context: "Context") -> None:
        """Attention begins, of these queries and keys ``[batch, heads, tokens, head]``.

        It is told when a backward does so again.
        """


# Not frozen: PyTorch 2.11 guards compiled code on all that a frozen dataclass holds, so each microbatch's
# documents would compile the blocks again.
@dataclass
class Context:
    """The context of one microbatch's forward pass.

    Activations are ``[batch · seq, hidden]``, one sequence after the other.
    """

    batch_size: int
    seq_len: int  # tokens of each sequence that are here
    # cos, sin: of every token of a sequence, or within documents of every token
    rope: tuple[Tensor, Tensor] | None
    group: Group  # the tensor ranks
    sequence: bool  # whether activations between parallel regions hold only this rank's tokens
    dropout: float  # 0 in validation
    key: int  # names this microbatch: (seed, step, position in the global batch)
    start: int = 0  # the position of the first token
    cache: TextCache | None = None  # in generation: what layers keep of earlier tokens
    kernels: Implementation = "auto"
    sequences: Sequences | None = None  # if they are divided among context ranks, or into documents
    positions: Tensor | None = None  # of the tokens, int64 ``[batch, seq]``; None: from `start` on
    # as `rope`, of blocks with a window, if it is another
    window_rope: tuple[Tensor, Tensor] | None = field(kw_only=True, default=None)
    batch: Microbatch = field(kw_only=True)  # all fields of the microbatch, on every stage
    # by loss: what backward will start with, if it is known
    gradients: Mapping[str, Tensor] = field(kw_only=True, default_factory=dict)
    # outside of compiled blocks, which would be compiled again for it
    watch: "Watch | None" = field(kw_only=True, default=None)

    def drop(self, x: Tensor, *site: object) -> Tensor:
        """Drops out ``[tokens, hidden]`` with the mask of (microbatch, site), which is the same in
        every layout and recomputation.
        """
        return x if self.dropout == 0.0 else self._dropped(x, None, 1.0, site)

    def add(self, residual: Tensor, x: Tensor, scale: float, *site: object) -> Tensor:
        """``residual + scale · drop(x)``, in one pass."""
        return (
            residual.add(x, alpha=scale) if self.dropout == 0.0 else self._dropped(x, residual, scale, site)
        )

    def _dropped(self, x: Tensor, residual: Tensor | None, scale: float, site: tuple[object, ...]) -> Tensor:
        # An element's mask depends on its position in the whole microbatch, so a rank that holds some tokens
        # begins at an offset.
        offset = self.group.rank * len(x) if self.sequence else 0
        key, out = key_of(self.key, *site), []
        for here, first in self.runs(offset, len(x)):
            branch, rest = x[here], None if residual is None else residual[here]
            at = first * x.shape[1]
            out.append(
                bias_dropout_residual(
                    branch, None, rest, self.dropout, key, first=at, scale=scale, implementation=self.kernels
                )
            )
        return out[0] if len(out) == 1 else torch.cat(out)

    def places(self, offset: int, tokens: int, device: torch.device) -> Tensor:
        """Where this rank's tokens from `offset` on stand in the whole microbatch."""
        runs = self.runs(offset, tokens)
        return torch.cat([torch.arange(at, at + here.stop - here.start, device=device) for here, at in runs])

    def runs(self, offset: int, tokens: int) -> Iterator[tuple[slice, int]]:
        """Where this rank's tokens from `offset` on follow one another in the whole microbatch: a
        slice, and its first one there.
        """
        if self.sequences is None or self.sequences.group.size == 1:
            yield slice(0, tokens), offset
            return
        for row in range(self.batch_size):
            for run in self.sequences.own:
                at = row * self.seq_len + run.at
                if own := Run(at, at + run.stop - run.start, 0).within(offset, offset + tokens):
                    first = row * self.sequences.seq_len + run.start + own.at
                    yield slice(own.start - offset, own.stop - offset), first
