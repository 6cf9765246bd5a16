"""A hybrid of attention and a recurrence: every n-th block attends, the others are gated
DeltaNets (Yang et al. 2025, ICLR).

Each head of such a block keeps a matrix S ``[head, head]`` in place of all keys and values. A token makes of
it ``S ← a (S − b k kᵀS) + b k vᵀ`` and reads ``Sᵀq``: a and b, between 0 and 1, say how much it forgets and
writes. Before that, queries, keys and values of a few tokens are mixed by a short convolution. A document
begins with S = 0.

It is computed a chunk at a time, by products. What a chunk does to S is affine, and so is what a run of
chunks does: context ranks exchange that for each run of tokens that they hold, whose size does not depend on
the sequence's length. So none waits for another.
"""

from typing import Any

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from megacore.config import Config
from megacore.config.model import ModelConfig
from megacore.context_parallel.attention import Sequences
from megacore.context_parallel.whole import runs_in_order
from megacore.distributed.communicator import SOLO
from megacore.distributed.shard import LogicalMatrix, Shard, new_parameter, split
from megacore.distributed.topology import Topology
from megacore.model.context import Context
from megacore.model.gpt import gpt
from megacore.model.layers import Layers, LayerSpec
from megacore.model.norm import HeadNorm
from megacore.section import Count
from megacore.tensor_parallel.linear import ColumnLinear, RowLinear


class Settings(ModelConfig):
    attention_every: Count = Field(
        4, description="every n-th block is an attention block; the others are recurrent"
    )
    taps: Count = Field(
        4,
        description="tokens that the causal convolution of queries, keys and values mixes, including the "
        "current one",
    )
    chunk: Count = Field(64, description="tokens of the recurrence that one matrix product computes")


def after(state: Tensor, step: Tensor) -> Tensor:
    """``M S + B`` of the affine map `step`, ``[…, head, head + head]``: M and B.

    `state`: an S, or another such map, then done before.
    """
    head = step.shape[-2]
    return step[..., :head] @ state + F.pad(step[..., head:], (state.shape[-1] - head, 0))


class Chunks:
    """The gated delta rule over chunks of tokens, all of them at once: tensors are ``[batch,
    heads, runs, chunks, tokens, …]``.

    Within a chunk whose state before it is S, token t writes ``k uᵀ`` with ``u = b (v − kᵀ(what is in the
    state then))``. These u are the solution of a triangular system, and affine in S. `forget` and `write`:
    log a and b. `first`: 1 at a document's first token.
    """

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, forget: Tensor, write: Tensor, first: Tensor) -> None:
        total, document = forget.cumsum(-2), first.cumsum(-2)
        seen = (document == document.mT).tril()
        # of what token i has written, when token t reads
        decay = (total - total.mT).where(seen, -torch.inf).exp()
        of_state = total.where(document == 0, -torch.inf).exp()  # of what was there before the chunk
        written = torch.cat((write * of_state * k, write * v), -1)
        written = torch.linalg.solve_triangular(
            write * decay * (k @ k.mT), written, upper=False, unitriangular=True
        )
        self.keys, self.values = written.chunk(2, -1)  # u = values − keys S
        self.q, self.of_state, self.scores = q, of_state, decay * (q @ k.mT)
        left = (k * decay[..., -1:, :].mT).mT  # of each key, behind the chunk
        eye = torch.eye(k.shape[-1], dtype=k.dtype, device=k.device)
        self.steps = torch.cat((of_state[..., -1:, :] * eye - left @ self.keys, left @ self.values), -1)

    def since_run(self) -> tuple[Tensor, Tensor]:
        """The affine map from the state before a run to that before each of its chunks, ``[…,
        runs, chunks, …]``, and behind it.
        """
        step = torch.zeros_like(self.steps[:, :, :, 0])
        step.diagonal(dim1=-2, dim2=-1).fill_(1.0)
        found = []
        for following in self.steps.unbind(3):
            found.append(step)
            step = after(step, following)
        return torch.stack(found, 3), step

    def read(self, state: Tensor) -> Tensor:
        """What tokens read, given the states before chunks."""
        return self.of_state * (self.q @ state) + self.scores @ (self.values - self.keys @ state)


class GatedDeltaNet(nn.Module):
    """It stands in attention's place: each tensor rank has some of the heads."""

    def __init__(self, config: Config, mesh: Topology, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        model, group = config.model, mesh.tp
        where: dict[str, Any] = {
            "group": group,
            "sequence": config.parallel.sequence,
            "dtype": dtype,
            "device": device,
        }
        self.head, self.size, self.taps = config.head_size, model.chunk, model.taps  # type: ignore[attr-defined]
        sizes = {"q": self.head, "k": self.head, "v": self.head, "gate": self.head, "write": 1, "forget": 1}
        ends = dict(zip(sizes, torch.tensor([*sizes.values()]).cumsum(0).tolist(), strict=True))
        maps = tuple(
            LogicalMatrix(n, (slice(None), slice(ends[n] - size, ends[n])), (0,), (1,), (2,))
            for n, size in sizes.items()
        )
        rows, std = (model.num_heads, sum(sizes.values())), model.init_std
        self.into = ColumnLinear(model.hidden_size, rows, bias=False, init_std=std, matrices=maps, **where)
        by_head, mixed = (split(group, 0),), (model.num_heads, 3 * self.head, self.taps)
        self.mix = new_parameter(Shard(mixed, by_head, decay=True, init_std=self.taps**-0.5), dtype, device)
        # heads forget at other rates
        self.rate = new_parameter(Shard((model.num_heads,), by_head, init_std=1.0), dtype, device)
        # … and little at first
        self.rest = new_parameter(Shard((model.num_heads,), by_head, fill=-4.0), dtype, device)
        self.norm = HeadNorm(config, group, dtype, device)
        width = model.num_heads * self.head
        self.output = RowLinear(
            width, model.hidden_size, bias=False, init_std=std / (2 * model.num_layers) ** 0.5, **where
        )

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """``[tokens, hidden]`` → the same."""
        batch, tokens, sequences = context.batch_size, context.seq_len, context.sequences
        sequences = Sequences(tokens, SOLO, "gather") if sequences is None else sequences
        runs = (len(sequences.own), -1)  # of equal length
        rows = self.into(x).view(batch, tokens, -1, 4 * self.head + 2).transpose(1, 2).unflatten(2, runs)
        rows, gate, write, forget = rows.split((3 * self.head, self.head, 1, 1), -1)
        places = (
            None if context.positions is None else context.positions[:, None].unflatten(2, runs)[..., None]
        )
        kept = None if context.cache is None else context.cache.state(self)
        wide = torch.promote_types(x.dtype, torch.float32)
        rows, tail = self.mixed(rows, places, sequences, None if kept is None else kept[0])
        q, k, v = rows.to(wide).chunk(3, -1)
        rate, rest = (parameter.to(wide)[:, None, None, None] for parameter in (self.rate, self.rest))
        forget, write = -rate.exp() * F.softplus(forget.to(wide) + rest), write.to(wide).sigmoid()
        first = torch.zeros_like(write) if places is None else (places == 0).to(wide).expand_as(write)
        parts = F.normalize(q, dim=-1) * self.head**-0.5, F.normalize(k, dim=-1), v, forget, write, first
        y, end = self.recur(parts, sequences, None if kept is None else kept[1])
        if context.cache is not None:
            context.cache.keep(self, tokens, tail.clone(), end)
        y = self.norm(y.to(x.dtype)) * F.silu(gate)
        return self.output(y.flatten(2, 3).transpose(1, 2).flatten(2).flatten(0, 1))

    def recur(
        self, parts: tuple[Tensor, ...], sequences: Sequences, kept: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """What tokens read, ``[batch, heads, runs, tokens, head]``, and the state behind all.

        `parts`: those of `Chunks`, not in chunks.
        """
        length = parts[0].shape[3]
        size = min(self.size, length)
        chunks = Chunks(*(F.pad(part, (0, 0, 0, -length % size)).unflatten(3, (-1, size)) for part in parts))
        since, whole = chunks.since_run()
        begin, end = self.states(whole, sequences, kept)
        return chunks.read(after(begin[:, :, :, None], since)).flatten(3, 4)[:, :, :, :length], end

    def plain_recur(
        self, parts: tuple[Tensor, ...], sequences: Sequences, kept: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The same as the recurrence is written, token by token: the proof compares with it."""
        assert len(sequences.own) == 1 and kept is None
        state, read = parts[0].new_zeros(*parts[0].shape[:2], self.head, self.head), []
        for q, k, v, forget, write, first in zip(
            *(part.squeeze(2).unsqueeze(3).unbind(2) for part in parts), strict=True
        ):
            state = state * forget.exp() * (1 - first)
            state = state + k.mT @ (write * (v - k @ state))
            read.append(q @ state)
        return torch.stack(read, 3).flatten(2, 3)[:, :, None], state

    def mixed(
        self, x: Tensor, places: Tensor | None, sequences: Sequences, kept: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """A sum over each feature's last tokens, of its own document; and the last of all tokens, to keep.

        `x`: ``[batch, heads, runs, tokens, features]``. Of each run the ranks exchange the tokens that the
        next one needs.
        """
        back, length = self.taps - 1, x.shape[3]
        tails = x[:, :, :, max(0, length - back) :]
        before = x.new_zeros(*x.shape[:2], back, x.shape[4]) if kept is None else kept
        every = torch.cat((before, *runs_in_order(tails.movedim(2, 0), sequences)), 2)
        at = [run.start // length * tails.shape[3] for run in sequences.own]
        x = torch.cat((torch.stack([every[:, :, i : i + back] for i in at], 2), x), 3)
        y = torch.zeros_like(x[:, :, :, back:])
        for i, tap in enumerate(self.mix.unbind(2)):  # the first is the farthest
            shifted = x[:, :, :, i : i + length] * tap[:, None, None]
            y = y + (shifted if places is None else shifted.where(places >= back - i, 0.0))
        return F.silu(y), every[:, :, every.shape[2] - back :]

    def states(self, whole: Tensor, sequences: Sequences, kept: Tensor | None) -> tuple[Tensor, Tensor]:
        """The state before each of this rank's runs ``[batch, heads, runs, head,
        head]``, and that behind all.

        `whole`: what each of its runs does to a state. All ranks' are exchanged, and each composes them.
        """
        state = whole.new_zeros(*whole.shape[:2], self.head, self.head) if kept is None else kept
        before = []
        for step in runs_in_order(whole.movedim(2, 0), sequences):
            before.append(state)
            state = after(state, step)
        length = sequences.seq_len // len(before)
        return torch.stack([before[run.start // length] for run in sequences.own], 2), state


class Recurrent:
    """A block, of whichever kind the config has, with a recurrence in attention's place."""

    def __init__(
        self, index: int, config: Config, mesh: Topology, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(index, config, mesh, dtype, device)  # type: ignore[call-arg]
        self.attention = GatedDeltaNet(config, mesh, dtype, device)


def layers(config: Config) -> Layers:
    """A GPT's, with recurrences in most blocks."""
    first, *blocks, last = gpt(config)
    every: int = config.model.attention_every  # type: ignore[attr-defined]
    kinds = [
        spec.kind if i % every == every - 1 else type("Block", (Recurrent, spec.kind), {})
        for i, spec in enumerate(blocks)
    ]
    return [
        first,
        *(LayerSpec(spec.name, kind, spec.arguments) for spec, kind in zip(blocks, kinds, strict=True)),
        last,
    ]
