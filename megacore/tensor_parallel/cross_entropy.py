"""Cross entropy over logits whose vocabulary is split over the tensor ranks.

Full logits never exist on one rank.
"""

from functools import partial
from typing import Any

from torch import Tensor

from megacore.config.schema import IGNORED
from megacore.distributed.collectives import all_gather, enter_tensor_parallel
from megacore.distributed.communicator import Group
from megacore.kernels.cross_entropy import cross_entropy
from megacore.kernels.dispatch import Implementation
from megacore.kernels.linear_cross_entropy import linear_cross_entropy
from megacore.tensor_parallel.gradient import main_gradient_of


def vocab_parallel_cross_entropy(
    logits: Tensor,
    targets: Tensor,
    group: Group,
    first_row: int,
    implementation: Implementation = "auto",
    gradient: Tensor | None = None,
    z_loss: float | None = None,
) -> Any:
    """The loss of every token, ``[tokens]``, in nats, in fp32 (fp64 for fp64).

    `logits` are ``[tokens, rows of this rank]``; their gradient overwrites them. `targets` ``[tokens]`` int64
    are over the whole vocabulary, or `IGNORED`. `first_row` is this rank's first vocabulary row. `gradient`:
    what backward will be given for each of the losses, if it is known; with a `z_loss` the squares of the
    log-sum-exp come apart: see `cross_entropy`.
    """
    gather = partial(all_gather, group=group) if group.size > 1 else None
    options: dict[str, Any] = {"gather": gather, "ignored": IGNORED, "gradient": gradient, **apart(z_loss)}
    return cross_entropy(logits, targets, first_row=first_row, implementation=implementation, **options)


def apart(z_loss: float | None) -> dict[str, Any]:
    """The options of a loss whose z-loss, if there is one, is told apart."""
    return {} if z_loss is None else {"z_loss": z_loss, "apart": True}


def vocab_parallel_linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    group: Group,
    sequence: bool,
    first_row: int,
    implementation: Implementation = "auto",
    z_loss: float | None = None,
) -> Any:
    """The sum of the losses of the head's logits ``x · weightᵀ``.

    Only the logits of one chunk of tokens exist at a time.

    `x` ``[tokens, hidden]`` (with `sequence`, this rank's tokens), `weight` ``[rows of this rank, hidden]``.
    With a `z_loss` two sums.
    """
    gather = partial(all_gather, group=group) if group.size > 1 else None
    x, main = enter_tensor_parallel(x, group, sequence), main_gradient_of(weight)
    return linear_cross_entropy(
        x,
        weight,
        targets,
        first_row=first_row,
        gather=gather,
        accumulate=None if main is None else main.add,
        ignored=IGNORED,
        implementation=implementation,
        **apart(z_loss),
    )
