"""Chooses the next token."""

import torch
from torch import Tensor

NOT_FINITE = -1  # in place of a token


class NonFiniteLogits(RuntimeError):
    """The logits of the next token are NaN or infinite, so none can be chosen."""

    def __init__(self) -> None:
        super().__init__("the logits are not finite: the model has diverged")


class Sampler:
    """Draws tokens from logits: the same ones for the same seed, on every device and in every layout.

    Args:
        temperature: divides the logits; 0 always takes the likeliest token.
        top_k: only this many likeliest tokens can be drawn.
        top_p: of these, only the likeliest that together have this probability (Holtzman et al. 2020, nucleus
            sampling).
        seed: the seed of the draws.
        vocab_size: ids from here on are never drawn. They are rows of a padded vocabulary and stand for no
            text.
    """

    def __init__(self, temperature: float, top_k: int, top_p: float, seed: int, vocab_size: int) -> None:
        self.temperature, self.top_k, self.top_p, self.vocab_size = temperature, top_k, top_p, vocab_size
        self.generator = torch.Generator().manual_seed(seed)

    def choose(self, logits: Tensor) -> int:
        """Return the id of the next token, from its logits ``[vocab]``.

        `NOT_FINITE` if the largest logit is NaN or infinite. A logit of minus infinity is a token that is
        never drawn, as long as another can be.
        """
        logits = logits[: self.vocab_size].float().cpu()  # the CPU draws for every device
        if not logits.max().isfinite():
            return NOT_FINITE
        if self.temperature == 0.0:
            return int(logits.argmax())
        values, ids = logits.topk(min(self.top_k, len(logits)))
        probabilities = (values / self.temperature).softmax(-1)
        likelier = (
            probabilities.cumsum(-1) - probabilities
        )  # the probability of all before each token; 0 for the first, which therefore always stays
        probabilities[likelier >= self.top_p] = 0.0
        return int(ids[probabilities.multinomial(1, generator=self.generator)])
