"""Many parts of attention in one call, by a kernel that takes sequences of many lengths one behind the other.

A sample of thousands of documents would otherwise be thousands of calls on a GPU. Parts of one call share no
query and no key, and are
causal all or none: so a microbatch on one rank is one call, and where context ranks divide it, only the few
documents that reach over the edge of a piece are calls besides. PyTorch's FlashAttention takes such sequences
as ``[tokens, heads, head]`` and their ends, and returns l as ``[heads, tokens]``. The tokens of a
microbatch's sequences lie one sequence behind the other.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from megacore.context_parallel.sharding import AttentionPart

aten = torch.ops.aten
At = slice | Tensor  # consecutive tokens, or int32 indices of tokens ``[n]``
SHARED = 8  # the kernel's heads are multiples of so many features


@dataclass(frozen=True)
class Pack:
    """Parts that one call computes, of one sequence of the batch or of several.

    All tensors are on the device.
    """

    causal: bool
    queries: At
    keys: At
    query_ends: Tensor  # 0, and where each part's queries end among those of the call: int32 ``[parts + 1]``
    key_ends: Tensor
    most_queries: int  # of a part
    most_keys: int


def packed(found: Sequence[AttentionPart], q: Tensor, keys: int) -> list[AttentionPart | Pack]:
    """The same parts, in as few calls as the kernel for tensors like `q` allows.

    Its metadata is copied to the device without waiting.

    q is ``[batch, heads, queries, head]``; each sequence of the batch has so many `keys`.
    """
    if not takes_lengths(q):
        return list(found)
    groups = grouped(found)
    many = [group for group in groups if is_worth_a_pack(group)]
    placed = [places(group, q.shape[-2], keys) for group in many]
    arrays = [array for both in placed for slices in both for array in metadata(slices)]
    if not arrays:
        return list(found)
    moved, at = (
        iter(on_device(np.concatenate(arrays), q.device).split([len(array) for array in arrays])),
        iter(placed),
    )
    calls: list[AttentionPart | Pack] = []
    for group in groups:
        calls += (
            [pack(group[0].causal, *next(at), [next(moved) for _ in range(4)])]
            if is_worth_a_pack(group)
            else group
        )
    return calls


def grouped(found: Iterable[AttentionPart]) -> list[list[AttentionPart]]:
    """Parts that can be one call: each joins the first group whose queries and keys all
    come before its own.
    """
    groups: list[list[AttentionPart]] = []
    for part in found:
        for group in groups if part.row is not None else ():
            last = group[-1]
            assert last.row is not None and part.row is not None and last.row <= part.row, (
                "parts come sequence by sequence"
            )
            follows = last.queries.stop <= part.queries.start and last.keys.stop <= part.keys.start
            if last.causal == part.causal and (follows or last.row < part.row):
                group.append(part)
                break
        else:
            groups.append([part])
    return groups


def is_worth_a_pack(group: list[AttentionPart]) -> bool:
    """Whether a group is one call: not where each part has one query, which the kernel treats as the
    latest one of generated texts.
    """
    return len(group) > 1 and any(part.queries.stop - part.queries.start > 1 for part in group)


def places(group: list[AttentionPart], queries: int, keys: int) -> tuple[list[slice], list[slice]]:
    """Where the queries and the keys of some parts lie among those of the whole batch, whose
    sequences have so many of each.
    """

    def moved(own: slice, by: int) -> slice:
        return slice(own.start + by, own.stop + by)

    rows = [0 if part.row is None else part.row for part in group]
    return (
        [moved(part.queries, row * queries) for part, row in zip(group, rows, strict=True)],
        [moved(part.keys, row * keys) for part, row in zip(group, rows, strict=True)],
    )


def metadata(slices: list[slice]) -> list[np.ndarray]:
    """Of the queries or the keys of a call: int32 indices, empty if they follow one another, and ends."""
    lengths = [own.stop - own.start for own in slices]
    together = slices[-1].stop - slices[0].start == sum(lengths)
    indices = np.concatenate(
        [np.arange(own.start, own.stop) for own in slices[: 0 if together else None]] or [np.arange(0)]
    )
    return [array.astype(np.int32) for array in (indices, np.cumsum([0, *lengths]))]


def pack(causal: bool, queries: list[slice], keys: list[slice], moved: list[Tensor]) -> Pack:
    """The call of parts with such queries and keys, given their `metadata` on the device."""
    at = [
        own if len(own) else slice(found[0].start, found[-1].stop)
        for own, found in ((moved[0], queries), (moved[2], keys))
    ]
    most = [max(own.stop - own.start for own in found) for found in (queries, keys)]
    return Pack(causal, at[0], at[1], moved[1], moved[3], *most)


def on_device(array: np.ndarray, device: torch.device) -> Tensor:
    """A copy on the device, for which the host does not wait."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def takes_lengths(q: Tensor) -> bool:
    """Whether there is a kernel for many lengths for tensors like `q` ``[…, head]``."""
    return q.device.type == "cuda" and suits_flash(q) and has_lengths()


def suits_flash(q: Tensor) -> bool:
    """Whether FlashAttention on a GPU takes tensors like `q`, without padding."""
    return q.dtype in (torch.float16, torch.bfloat16) and q.shape[-1] <= 256 and q.shape[-1] % SHARED == 0


@cache
def has_lengths() -> bool:
    """Whether this PyTorch has the kernel as it is called here: the operators promise nobody to stay
    as they are, so they are tried.
    """
    if torch.version.hip is not None or not torch.backends.cuda.is_flash_attention_available():
        return False
    q, ends = (
        torch.empty(6, 2, SHARED, dtype=torch.bfloat16, device="meta"),
        torch.empty(3, dtype=torch.int32, device="meta"),
    )
    tried = Pack(True, slice(0, 6), slice(0, 6), ends, ends, 4, 4)
    try:
        out, lse = kernel(q, q, q, tried, 1.0)
        kernel_backward(q, q, q, q, out, lse, tried, 1.0)
    except (AttributeError, TypeError, RuntimeError):
        return False
    return (out.shape, lse.shape) == (q.shape, (2, 6))


def kernel(q: Tensor, k: Tensor, v: Tensor, pack: Pack, scale: float) -> tuple[Tensor, Tensor]:
    """o and l of all parts of a call."""
    lengths = pack.query_ends, pack.key_ends, pack.most_queries, pack.most_keys
    out, lse, *_ = aten._flash_attention_forward(q, k, v, *lengths, 0.0, pack.causal, False, scale=scale)
    return out, lse


def kernel_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, pack: Pack, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v of all parts of a call. The kernel reads l as one block of memory."""
    lengths = pack.query_ends, pack.key_ends, pack.most_queries, pack.most_keys
    none = q.new_empty(2, dtype=torch.uint64)  # of dropout, which attention has none of
    lse = lse.contiguous()
    return aten._flash_attention_backward(
        grad, q, k, v, out, lse, *lengths, 0.0, pack.causal, none, none, scale=scale
    )


def tokens(x: Tensor, at: At) -> Tensor:
    """Some of the batch's tokens, of ``[batch, heads, tokens, …]``: ``[n, heads, …]``, to be read.

    A view if they follow one another and lie token by token in memory, else a copy.
    """
    own = x.transpose(1, 2).flatten(0, 1)
    return own[at] if isinstance(at, slice) else own.index_select(0, at)


def every_token(x: Tensor) -> Tensor:
    """All of the batch's tokens, ``[batch, heads, tokens, …]`` → ``[batch · tokens, heads, …]``, to
    be written: a view, or an error.
    """
    return x.transpose(1, 2).view(-1, x.shape[1], *x.shape[3:])


def add_attention(
    out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, pack: Pack, scale: float, *, alone: bool
) -> None:
    """Merges the attention of a call into `out` and `lse`; if its queries are in no other
    part, it is all that there is.
    """
    o, found = kernel(tokens(q, pack.queries), tokens(k, pack.keys), tokens(v, pack.keys), pack, scale)
    at, part_lse = pack.queries, found.T
    merged, so_far = every_token(out), every_token(lse)
    if alone:
        merged[at], so_far[at] = o, part_lse
        return
    before, own = so_far[at], merged[at]
    both = torch.logaddexp(before, part_lse)
    own.mul_((before - both).exp_().unsqueeze(-1)).addcmul_(
        o.to(out.dtype), (part_lse - both).exp_().unsqueeze(-1)
    )
    if isinstance(at, Tensor):  # else `own` is a view
        merged[at] = own
    so_far[at] = both


def add_pack_gradients(
    grads: tuple[Tensor, Tensor, Tensor],
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    pack: Pack,
    scale: float,
) -> None:
    """Adds the gradients of a call to those of q, k and v, given the gradient of the merged `out`."""
    grad, q, out, lse = (tokens(x, pack.queries) for x in (grad, q, out, lse))
    k, v = (tokens(x, pack.keys) for x in (k, v))
    found = kernel_backward(grad, q, k, v, out, lse.T, pack, scale)
    for total, own, at in zip(
        map(every_token, grads), found, (pack.queries, pack.keys, pack.keys), strict=True
    ):
        if isinstance(at, slice):
            total[at].add_(own)
        else:  # each token is there once: there is no order of sums to depend on
            total.index_add_(0, at, own.to(total.dtype))
