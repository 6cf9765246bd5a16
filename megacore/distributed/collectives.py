"""Collectives over a `Group`, plain and with gradients. Over a group of one rank each is the identity.

Tensors are ``[tokens, …]``. The token dim comes first, so a rank's tokens are contiguous, and gathering or
scattering them is one collective without a copy.

A compiled block calls a collective as one operation of its graph, `megacore::…`: torch.compile cannot follow
one, and would end a graph there. Such an operation gets its group's key and runs the same code.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megacore.distributed.communicator import Group, Work, group_called


class Done:
    """The handle of a collective over one rank."""

    def wait(self) -> None:
        """Returns at once."""


def all_reduce(x: Tensor, group: Group, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
    """Reduces `x` in place over the group."""
    if group.communicator is None:
        return x
    if op == dist.ReduceOp.SUM and group.communicator.carries(x):
        group.communicator.start_all_reduce(x).wait()
    else:
        group.communicator.all_reduce(x, op)
    return x


def all_reduced(x: Tensor, group: Group) -> Tensor:
    """The sum of `x` over the group, in memory of its own."""
    if torch.compiler.is_compiling() and group.communicator is not None:
        return _reduced(x, group.key)
    return all_reduce(x.clone(memory_format=torch.contiguous_format), group)


def all_reduce_start(x: Tensor, group: Group) -> Work:
    """Begins to sum `x` in place over the group; `x` must not be touched before `wait()`."""
    return Done() if group.communicator is None else group.communicator.start_all_reduce(x)


def all_gather_start(x: Tensor, group: Group) -> tuple[Tensor, Work]:
    """Begins to gather `[n, …]` of every rank into `[size · n, …]`."""
    if group.communicator is None:
        return x, Done()
    out = x.new_empty(group.size * x.shape[0], *x.shape[1:])
    return out, group.communicator.start_all_gather(x.contiguous(), out)


def all_gather(x: Tensor, group: Group) -> Tensor:
    """Gathers `[n, …]` of every rank into `[size · n, …]`."""
    if torch.compiler.is_compiling() and group.communicator is not None:
        return _gathered(x, group.key, group.size)
    out, work = all_gather_start(x, group)
    work.wait()
    return out


def reduce_scatter_start(x: Tensor, group: Group) -> tuple[Tensor, Work]:
    """Begins to sum `[size · n, …]` over the group. Each rank keeps its `[n, …]` of the sum."""
    if group.communicator is None:
        return x, Done()
    out = x.new_empty(x.shape[0] // group.size, *x.shape[1:])
    return out, group.communicator.start_reduce_scatter(x.contiguous(), out)


def reduce_scatter(x: Tensor, group: Group) -> Tensor:
    """Sums `[size · n, …]` over the group. Each rank keeps its `[n, …]` of the sum."""
    if torch.compiler.is_compiling() and group.communicator is not None:
        return _scattered(x, group.key, group.size)
    out, work = reduce_scatter_start(x, group)
    work.wait()
    return out


def reduce_scatter_inside(x: Tensor, group: Group) -> Work:
    """Begins to sum `[size · n]` over the group.

    This rank's `[n]` of it then holds the sum; the rest is undefined.
    """
    return (
        Done()
        if group.communicator is None
        else group.communicator.start_reduce_scatter(x, own_part(x, group))
    )


def reduce_scatter_into(x: Tensor, out: Tensor, group: Group) -> Work:
    """Begins to sum `[size · n]` over the group, of more than one rank; `out`, perhaps of a wider
    dtype, gets this rank's `[n]` of it.
    """
    assert group.communicator is not None
    return group.communicator.start_reduce_scatter(x, out)


def all_gather_inside(x: Tensor, group: Group) -> Work:
    """Begins to fill `[size · n]` with every rank's own `[n]` of it."""
    return (
        Done() if group.communicator is None else group.communicator.start_all_gather(own_part(x, group), x)
    )


def own_part(x: Tensor, group: Group) -> Tensor:
    """This rank's `[n, …]` of a replicated `[size · n, …]` (a view).

    Raises `ValueError` if it cannot be divided.
    """
    if len(x) % group.size:
        raise ValueError(f"{len(x)} rows cannot be divided over {group.size} ranks ({group.name})")
    return x if group.size == 1 else x.chunk(group.size)[group.rank]


@torch.library.custom_op("megacore::all_reduce", mutates_args=())
def _reduced(x: Tensor, group: str) -> Tensor:
    return all_reduce(x.clone(memory_format=torch.contiguous_format), group_called(group))


@torch.library.custom_op("megacore::all_gather", mutates_args=())
def _gathered(x: Tensor, group: str, size: int) -> Tensor:
    return all_gather(x, group_called(group))


@torch.library.custom_op("megacore::reduce_scatter", mutates_args=())
def _scattered(x: Tensor, group: str, size: int) -> Tensor:
    return reduce_scatter(x, group_called(group))


# What each of them returns, for the compiler.
_reduced.register_fake(lambda x, group: x.new_empty(x.shape))
_gathered.register_fake(lambda x, group, size: x.new_empty(size * x.shape[0], *x.shape[1:]))
_scattered.register_fake(lambda x, group, size: x.new_empty(x.shape[0] // size, *x.shape[1:]))


class _Reduce(torch.autograd.Function):
    """Forward: sum of x, in x's memory (in a compiled block in memory of its own). Backward: gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        if torch.compiler.is_compiling():
            return _reduced(x, group.key)
        ctx.mark_dirty(x)
        return all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _ReduceScatter(torch.autograd.Function):
    """Forward: reduce-scatter of tokens. Backward: all-gather of gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return reduce_scatter(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_gather(grad, ctx.group), None


class _Enter(torch.autograd.Function):
    """Forward: all tokens, gathered if they are split.

    Backward: sum of the ranks' gradients, scattered if they are.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, sequence: bool) -> Tensor:
        ctx.group, ctx.sequence = group, sequence
        return all_gather(x, group) if sequence else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return (
            reduce_scatter(grad, ctx.group) if ctx.sequence else all_reduce(grad.clone(), ctx.group),
            None,
            None,
        )


def enter_tensor_parallel(x: Tensor, group: Group, sequence: bool) -> Tensor:
    """All tokens ``[tokens, …]``, for work with each rank's own weights.

    With `sequence`, `x` holds this rank's tokens and is gathered.
    """
    return x if group.size == 1 else _Enter.apply(x, group, sequence)


def leave_tensor_parallel(x: Tensor, group: Group, sequence: bool) -> Tensor:
    """Sums the ranks' partial results ``[tokens, …]``.

    With `sequence` each rank keeps only its tokens of the sum.

    It ends the region in which each rank works on all tokens with its part of the weights.
    `enter_tensor_parallel` begins that region; in `tensor_parallel.linear.column_linear` its backward
    overlaps a product.
    `x` is overwritten: it must be a fresh result that nothing else reads.
    """
    if group.size == 1:
        return x
    return (_ReduceScatter if sequence else _Reduce).apply(x, group)


class _ScatterTokens(torch.autograd.Function):
    """Forward: this rank's tokens. Backward: gradients of all ranks' tokens."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return own_part(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_gather(grad.contiguous(), ctx.group), None


class _GatherTokens(torch.autograd.Function):
    """Forward: all ranks' tokens. Backward: the gradient of this rank's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return all_gather(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return own_part(grad, ctx.group), None


def scatter_tokens(x: Tensor, group: Group) -> Tensor:
    """Divides ``[tokens, …]`` that all ranks of a group hold among them, for work that each does on its own
    tokens. If they do not divide, zeros follow them.
    """
    missing = -len(x) % group.size  # a pad of none would copy
    return _ScatterTokens.apply(F.pad(x, (0, 0, 0, missing)) if missing else x, group)


def gather_tokens(x: Tensor, group: Group) -> Tensor:
    """Ends what `scatter_tokens` has begun: every rank has all tokens, with what may follow them."""
    return _GatherTokens.apply(x, group)


def broadcast(x: Tensor, group: Group, source: int = 0) -> Tensor:
    """Copies `x` of the group's rank `source` into `x` of every rank."""
    if group.communicator is not None:
        group.communicator.broadcast(x, group.ranks[source])
    return x


def broadcast_start(x: Tensor, group: Group, source: int) -> Work:
    """Begins to copy `x` of the group's rank `source` into `x` of every rank."""
    return (
        Done() if group.communicator is None else group.communicator.start_broadcast(x, group.ranks[source])
    )


def joined(parts: Sequence[Tensor], empty: Tensor) -> Tensor:
    """The elements of several tensors as one flat tensor: `empty` if there is none, and a view of
    one alone where that is possible.
    """
    several = [part.flatten() for part in parts if part.numel()]
    return several[0] if len(several) == 1 else torch.cat(several) if several else empty


def exchange_start(
    parts: Sequence[Sequence[Tensor]], sizes: Sequence[int], group: Group, empty: Tensor
) -> tuple[list[Tensor], Work]:
    """Begins to send the elements of `parts[i]` to rank i, and to receive `sizes[i]` elements from it.

    The own part does not travel.

    Returns a flat tensor from each rank. `empty`: a tensor without elements, of their dtype and device.
    """
    own = joined(parts[group.rank], empty)
    if group.communicator is None:
        return [own], Done()
    others = [[] if i == group.rank else to for i, to in enumerate(parts)]
    received = [0 if i == group.rank else size for i, size in enumerate(sizes)]
    x, out = joined([part for to in others for part in to], empty), empty.new_empty(sum(received))
    work = group.communicator.start_exchange(
        x, out, [sum(part.numel() for part in to) for to in others], received
    )
    found = list(out.split(received))
    found[group.rank] = own
    return found, work


def broadcast_text(text: str, group: Group, device: torch.device, limit: int = 4096, source: int = 0) -> str:
    """Returns the `text` of the group's rank `source` on every rank, without pickle.

    At most `limit` bytes of UTF-8.
    """
    if group.communicator is None:
        return text
    encoded = text.encode()
    assert len(encoded) <= limit
    buffer = torch.zeros(limit, dtype=torch.uint8, device=device)
    if group.rank == source:
        buffer[: len(encoded)] = (
            torch.frombuffer(bytearray(encoded), dtype=torch.uint8) if encoded else buffer[:0]
        )
    return bytes(broadcast(buffer, group, source).tolist()).rstrip(b"\0").decode()
