"""Generates tokens over the ranks of a mesh: hidden states go through the pipeline, and the
chosen token goes to all ranks.
"""

from collections.abc import Collection, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from megacore.config.implied import settled_context_method
from megacore.distributed.collectives import all_gather, broadcast
from megacore.distributed.communicator import Group
from megacore.distributed.mesh import Mesh
from megacore.model.batch import Microbatch
from megacore.model.stage import Stage
from megacore.pipeline.partition import placement_of
from megacore.pipeline.schedule import Plan
from megacore.tools.text.cache import DividedCache, KeyValueCache
from megacore.tools.text.sampling import NOT_FINITE, NonFiniteLogits, Sampler


class Decoder:
    """One rank's part in generating a text.

    Every method is collective over the mesh, which has one data rank.

    The model sees at most `window` tokens, which is `model.max_positions` if it is not given. When a text
    grows longer, the model reads the last half of them anew and continues. The cache cannot forget only its
    oldest token, because the position of every other token would change.
    """

    def __init__(self, stages: Sequence[Stage], mesh: Mesh, window: int | None = None) -> None:
        assert mesh.sample_group.size == 1 and not any(stage.sequence or stage.training for stage in stages)
        self.stages, self.mesh, self.config = stages, mesh, stages[0].config
        plan = Plan((), placement_of(self.config))
        self.where, self.held = plan.where, plan.placement[mesh.pp.rank]
        self.window = self.config.max_positions if window is None else window
        method = settled_context_method(self.config)
        self.caches = [
            KeyValueCache(1, self.window)
            if mesh.cp.size == 1
            else DividedCache(1, self.window, mesh.cp, method)
            for _ in stages
        ]

    def generate(
        self,
        prompt: Sequence[int],
        count: int,
        sampler: Sampler,
        ends: Collection[int] = (),
        begin: Sequence[int] = (),
    ) -> Iterator[int]:
        """Yield up to `count` tokens after `prompt`, the same on every rank, and stop after one of `ends`.

        Where the model reads only the last tokens of a text, it reads `begin` before them. Raises
        `NonFiniteLogits` on every rank.
        """
        assert prompt
        window, tokens = self.window, list(prompt)
        unread = last_tokens(tokens, window, begin)
        self._forget()
        for _ in range(count):
            if self.caches[0].length + len(unread) > window:
                self._forget()
                unread = last_tokens(tokens, max(1, window // 2), begin)
            token = self._agree(self.read(unread), sampler)
            if token == NOT_FINITE:
                raise NonFiniteLogits
            yield token
            if token in ends:
                return
            tokens.append(token)
            unread = [token]

    def _forget(self) -> None:
        for cache in self.caches:
            cache.clear()

    @torch.no_grad()
    def read(self, tokens: Sequence[int]) -> Tensor | None:
        """Runs the model on the next tokens of the text.

        Returns the logits ``[vocab]`` of the last; None before the last stage.
        """
        pp, logits = self.mesh.pp, None
        text = torch.tensor([tokens], device=self.mesh.device)
        flow: dict[str, Tensor] = {}
        for cache in self.caches:
            own = cache.begin(text)
        batch = Microbatch(own)  # every stage has the tokens
        for chunk in sorted(range(len(self.held)), key=self.held.__getitem__):  # in the model's order
            number, stage = self.held[chunk], self.stages[chunk]
            before, after = (self.where.get(other, (pp.rank, 0))[0] for other in (number - 1, number + 1))
            if before != pp.rank:
                flow = stage.empty(stage.takes, 1, own.shape[1])
                assert pp.communicator is not None
                for x in flow.values():
                    pp.communicator.receive(x, pp.ranks[before]).wait()
            flow, _ = stage(flow, batch, self.caches[chunk])
            if after != pp.rank:
                assert pp.communicator is not None
                for x in flow.values():
                    pp.communicator.send(x.contiguous(), pp.ranks[after]).wait()
            if stage.last:
                latest = self.caches[chunk].latest(flow["hidden"])
                logits = gather_vocabulary(
                    stage.logits(latest)[0], self.mesh.tp, self.config.model.vocab_size
                )
        return logits

    def _agree(self, logits: Tensor | None, sampler: Sampler) -> int:
        """Lets the last stage's first tensor rank choose the token, and sends it to all ranks."""
        chooser = self.where[len(self.where) - 1][0] * (self.mesh.world.size // self.mesh.pp.size)
        chosen = torch.zeros(1, dtype=torch.int64, device=self.mesh.device)
        if self.mesh.world.rank == chooser:
            assert logits is not None
            chosen.fill_(sampler.choose(logits))
        return int(broadcast(chosen, self.mesh.world, chooser))


def last_tokens(tokens: list[int], count: int, begin: Sequence[int]) -> list[int]:
    """Return the last `count` tokens of a text; the first are `begin` if another token fits too."""
    if len(tokens) <= count or len(begin) >= count:
        return tokens[-count:]
    return [*begin, *tokens[len(begin) - count :]]


def gather_vocabulary(logits: Tensor, group: Group, vocab_size: int) -> Tensor:
    """Gathers the logits of each rank's rows ``[rows]`` to ``[vocab]``.

    The last rank may have fewer rows than the others.
    """
    rows = -(-vocab_size // group.size)
    return all_gather(F.pad(logits, (0, rows - len(logits))), group)[:vocab_size]


def share_tokens(tokens: Sequence[int], mesh: Mesh) -> list[int]:
    """Returns rank 0's `tokens` on every rank."""
    count = torch.tensor([len(tokens)], device=mesh.device)
    buffer = torch.zeros(int(broadcast(count, mesh.world)), dtype=torch.int64, device=mesh.device)
    if mesh.world.rank == 0:
        buffer.copy_(torch.tensor(tokens))
    return broadcast(buffer, mesh.world).tolist()
