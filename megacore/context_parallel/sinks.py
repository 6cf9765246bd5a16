"""Attention sinks: a learned logit for each head in the softmax's denominator, to
which no value belongs (gpt-oss).

With l = log Σ exp(scores) and o of the keys alone, and a sink s:

    forward     l' = log(exp(l) + exp(s));   o' = exp(l - l') · o
    backward    of the parts as without a sink, from o' and l';   ds = -Σ exp(s - l') · (do' · o')   over the
                head's queries

So a sink is taken in once for each query, after all parts are merged, and parts are computed by any kernel.
"""

import torch
from torch import Tensor

Sinks = Tensor | None  # of the heads ``[heads]``, if they have some


def add_sinks(out: Tensor, lse: Tensor, sinks: Sinks) -> None:
    """Takes the heads' `sinks` ``[heads]`` into a merged output ``[batch, heads, queries,
    head]`` and log-sum-exp, in place.
    """
    if sinks is None:
        return
    both = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
    out.mul_((lse - both).exp_()[..., None])
    lse.copy_(both)


def sink_gradients(grad: Tensor, out: Tensor, lse: Tensor, sinks: Sinks) -> Tensor | None:
    """The gradients of the sinks, given the output's gradient and what `add_sinks`
    made of output and log-sum-exp.
    """
    return (
        None if sinks is None else from_product((grad.to(lse.dtype) * out.to(lse.dtype)).sum(-1), lse, sinks)
    )


def from_product(product: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """The same, given the products of output and gradient ``[batch, heads, queries]``."""
    return -((sinks.to(lse.dtype)[:, None] - lse).exp_() * product).sum((0, 2)).to(sinks.dtype)
