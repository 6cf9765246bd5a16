"""Token after token over the ranks of a mesh: hidden states go down the pipeline, the chosen token back to all."""

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megacore.comm import all_gather, broadcast
from megacore.generation.sampling import Sampler
from megacore.mesh import Group, Mesh
from megacore.model.cache import KeyValueCache
from megacore.model.gpt import DTYPES, Stage


class Decoder:
    """One rank's part in writing a text. Every method is collective over the mesh, which has one data rank.

    The model sees at most `model.max_positions` tokens. A text that grows beyond them goes on
    from its last half of them, read anew: the cache cannot just forget its oldest token, since every other one's
    position would change.
    """

    def __init__(self, stage: Stage, mesh: Mesh) -> None:
        assert mesh.dp.size == 1 and not stage.sequence and not stage.training
        self.stage, self.mesh = stage, mesh
        self.cache = KeyValueCache(1, stage.config.max_positions)

    def generate(self, prompt: Sequence[int], count: int, sampler: Sampler, end: int | None = None) -> Iterator[int]:
        """Up to `count` tokens behind `prompt`, as they are chosen, the same on every rank; none after `end`."""
        assert prompt
        window = self.cache.capacity
        tokens = list(prompt)
        unread = tokens[-window:]
        self.cache.clear()
        for _ in range(count):
            if self.cache.length + len(unread) > window:
                self.cache.clear()
                unread = tokens[-max(1, window // 2) :]
            token = self._agree(self.read(unread), sampler)
            yield token
            if token == end:
                return
            tokens.append(token)
            unread = [token]

    @torch.no_grad()
    def read(self, tokens: Sequence[int]) -> Tensor | None:
        """Passes the next tokens of the text through the model; the logits ``[vocab]`` behind the last, None before the last stage."""
        stage, pp = self.stage, self.mesh.pp
        if stage.first:
            x = torch.tensor([tokens], device=self.mesh.device)
        else:
            dtype = DTYPES[stage.config.train.precision]
            x = torch.empty(len(tokens), stage.config.model.hidden_size, dtype=dtype, device=self.mesh.device)
            dist.recv(x, pp.ranks[pp.rank - 1], group=pp.process_group)
        x = stage(x, cache=self.cache)
        if not stage.last:
            dist.send(x, pp.ranks[pp.rank + 1], group=pp.process_group)
            return None
        return gather_vocabulary(stage.logits(x[-1:])[0], self.mesh.tp, stage.config.model.vocab_size)

    def _agree(self, logits: Tensor | None, sampler: Sampler) -> int:
        """The last stage's first tensor rank chooses, and tells all."""
        chooser = self.mesh.world.size - self.mesh.tp.size
        chosen = torch.zeros(1, dtype=torch.int64, device=self.mesh.device)
        if self.mesh.world.rank == chooser:
            assert logits is not None
            chosen.fill_(sampler.choose(logits))
        return int(broadcast(chosen, self.mesh.world, chooser))


def gather_vocabulary(logits: Tensor, group: Group, vocab_size: int) -> Tensor:
    """Logits over each rank's rows ``[rows]`` → over all, ``[vocab]``. The last rank may have fewer rows than the others."""
    rows = -(-vocab_size // group.size)
    return all_gather(F.pad(logits, (0, rows - len(logits))), group)[:vocab_size]


def share_tokens(tokens: Sequence[int], mesh: Mesh) -> list[int]:
    """Rank 0's `tokens` on every rank."""
    count = torch.tensor([len(tokens)], device=mesh.device)
    buffer = torch.zeros(int(broadcast(count, mesh.world)), dtype=torch.int64, device=mesh.device)
    if mesh.world.rank == 0:
        buffer.copy_(torch.tensor(tokens))
    return broadcast(buffer, mesh.world).tolist()
