"""The router: a linear layer whose scores say which experts a token goes to, and how much of each it takes.

A rank routes its own tokens: those of its data, context and tensor rank. So the weight's gradient is partial
over all of them, and counts are sums over them.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megacore.config import Config
from megacore.config.model import ModelConfig
from megacore.config.schema import resolved
from megacore.distributed.buffers import new_buffer
from megacore.distributed.collectives import all_reduce
from megacore.distributed.shard import Shard, new_parameter, replicated
from megacore.distributed.topology import Topology
from megacore.model.flow import Loss

BALANCE, Z_LOSS = "balance_loss", "router_z_loss"
TINY = 1e-20
# of the best scores in a group of experts, those whose sum is the group's where scores are sigmoids
NARROWEST = 2


def losses_of(model: ModelConfig) -> tuple[Loss, ...]:
    """The losses that a model's routers have, in the order in which `Router.losses` gives them."""
    balance = [Loss(BALANCE, coefficient=model.balance_coefficient)] if model.router_balance != "none" else []
    return (*balance, *([Loss(Z_LOSS, coefficient=model.router_z_loss)] if model.router_z_loss else []))


class Scored(NamedTuple):
    """What a router makes of tokens, ``[tokens, experts]`` in fp32 at least."""

    logits: Tensor
    scores: Tensor


class Router(nn.Module):
    """Scores tokens and chooses their experts."""

    def __init__(self, config: Config, mesh: Topology, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.model, self.experts = config.model, resolved(config.model.num_experts)
        self.sequence_ranks = mesh.group("cp", "tp")  # those that have tokens of the same sequences
        along = (replicated(mesh.tp, partial=True),)
        shard = Shard(
            (self.experts, config.model.hidden_size), along, decay=True, init_std=config.model.init_std
        )
        self.weight = new_parameter(shard, dtype, device)
        self.logit_bias = (
            new_parameter(Shard((self.experts,), along), dtype, device) if config.model.bias else None
        )
        # Of each expert: its tokens in the step before, as a part of the mean; and what is added to its
        # scores where experts are chosen.
        self.load = new_buffer(
            Shard((self.experts,), along, fill=1.0), lambda _, counts: relative(counts), torch.float64, device
        )
        rule = towards_mean(config.model.router_bias_rate)
        self.bias = (
            new_buffer(Shard((self.experts,), along), rule, torch.float64, device)
            if config.model.router_bias
            else None
        )
        # rows of this rank, see `take_drops`
        self.dropped, self.routed = torch.zeros((), dtype=torch.int64), 0

    def score(self, x: Tensor) -> Scored:
        """Tokens ``[tokens, hidden]`` → what all experts are to each."""
        wide = torch.promote_types(x.dtype, torch.float32)
        logits = F.linear(
            x.to(wide), self.weight.to(wide), None if self.logit_bias is None else self.logit_bias.to(wide)
        )
        return Scored(
            logits, logits.softmax(1) if self.model.router_scores == "softmax" else logits.sigmoid()
        )

    def ranked(self, scores: Tensor) -> Tensor:
        """By what experts are chosen: scores with the bias, which weighs nothing."""
        return scores.detach() if self.bias is None else scores.detach() + self.bias.value

    def choose(self, ranked: Tensor) -> Tensor:
        """The experts of each token, ``[tokens, experts_per_token]``, the best first.

        Of equal ones the first is: so choices are alike in every layout.
        """
        model = self.model
        if model.expert_groups > 1:
            grouped = ranked.unflatten(1, (model.expert_groups, -1))
            best = (
                grouped.amax(2)
                if model.router_scores == "softmax"
                else grouped.topk(min(NARROWEST, grouped.shape[2]), 2)[0].sum(2)
            )
            left = torch.ones_like(best, dtype=torch.bool).scatter(
                1, first_of(best, model.groups_per_token), False
            )
            ranked = grouped.masked_fill(left[..., None], -torch.inf).flatten(1)
        return first_of(ranked, model.experts_per_token)

    def note(self, key: int, counts: Tensor) -> None:
        """Notes how many of this rank's tokens chose each expert in the microbatch `key`."""
        for buffer in (self.load, self.bias):
            if buffer is not None:
                buffer.note(key, counts.to(buffer.value.dtype))

    def note_drops(self, fits: Tensor) -> None:
        """Counts the rows that do not fit into experts' capacity, and all."""
        self.dropped, self.routed = (~fits).sum() + self.dropped, self.routed + fits.numel()

    def take_drops(self) -> tuple[Tensor, int]:
        """This rank's dropped rows, and all its rows, since the last time."""
        found = self.dropped, self.routed
        self.dropped, self.routed = torch.zeros_like(self.dropped), 0
        return found

    def weights(self, scores: Tensor, chosen: Tensor) -> Tensor:
        """How much of each of its experts a token takes, ``[tokens, experts_per_token]``."""
        weights = scores.gather(1, chosen)
        if self.model.router_normalised:
            total = weights.sum(1, keepdim=True)
            # all sigmoids may be 0
            weights = weights / (total + TINY if self.model.router_scores == "sigmoid" else total)
        return weights * self.model.router_scale

    def losses(
        self, scored: Scored, chosen: Tensor, first: int, seq_len: int, sequences: int
    ) -> list[Tensor]:
        """This rank's sums of `losses_of` over its tokens: those from `first` on of `sequences`, of
        which there are `seq_len` each.
        """
        found = []
        if self.model.router_balance != "none":
            shares = (
                scored.scores if self.model.router_scores == "softmax" else F.normalize(scored.scores, 1, 1)
            )
            if self.model.router_balance == "global":
                load = self.load.value[None].to(shares.dtype)
            else:
                own = torch.arange(first, first + len(chosen), device=chosen.device) // seq_len
                # a row a token: not in fp64
                load = self._load_of_sequences(own, chosen, sequences).to(shares.dtype)[own]
            found.append((shares * load).sum())
        if self.model.router_z_loss:
            found.append(scored.logits.logsumexp(1).square().sum())
        return found

    def _load_of_sequences(self, own: Tensor, chosen: Tensor, sequences: int) -> Tensor:
        """For each sequence, each expert's load as a part of the mean, by the tokens of
        all ranks that have some of it.
        """
        counts = torch.zeros(sequences * self.experts, dtype=torch.float64, device=chosen.device)
        places = (own[:, None] * self.experts + chosen).flatten()
        counts.index_add_(0, places, torch.ones_like(places, dtype=torch.float64))
        return relative(all_reduce(counts, self.sequence_ranks).view(sequences, self.experts))


def first_of(scores: Tensor, count: int) -> Tensor:
    """The places of the largest numbers of each row, the largest first, and of equal ones the first."""
    return scores.sort(dim=1, descending=True, stable=True)[1][:, :count]


def relative(counts: Tensor) -> Tensor:
    """Of each expert, its tokens as a part of the mean."""
    return counts * (counts.shape[-1] / counts.sum(-1, keepdim=True).clamp(min=1.0))


def towards_mean(rate: float) -> Callable[[Tensor, Tensor], Tensor]:
    """The rule of a bias that grows where an expert had fewer tokens than the mean, and falls where
    it had more (Wang et al. 2024).
    """
    return lambda bias, counts: bias + rate * (counts.mean() - counts).sign()
