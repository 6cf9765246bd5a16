"""Many parts of attention in one call, by a kernel that takes sequences of many lengths one behind the other.

A sample of thousands of documents would otherwise be thousands of calls on a GPU. Parts of one call share no query and no key, and are
causal all or none: so a sample on one rank is one call, and where context ranks divide it, only the few documents that reach over the
edge of a piece are calls besides. PyTorch's FlashAttention takes such sequences as ``[tokens, heads, head]`` and their ends, and returns
l as ``[heads, tokens]``.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from megacore.context_parallel.pieces import Part

aten = torch.ops.aten
At = slice | Tensor  # consecutive tokens, or int32 indices of tokens ``[n]``
SHARED = 8  # the kernel's heads are multiples of so many features


@dataclass(frozen=True)
class Pack:
    """Parts of a sequence of the batch that one call computes. All tensors are on the device."""

    row: int
    causal: bool
    queries: At
    keys: At
    query_ends: Tensor  # 0, and where each part's queries end among those of the call: int32 ``[parts + 1]``
    key_ends: Tensor
    most_queries: int  # of a part
    most_keys: int


def packed(found: Sequence[Part], q: Tensor) -> list[Part | Pack]:
    """The same parts, in as few calls as the kernel for tensors like `q` allows. Its metadata is copied to the device without waiting."""
    if not takes_lengths(q):
        return list(found)
    groups = grouped(found)
    many = [group for group in groups if is_worth_a_pack(group)]
    arrays = [array for group in many for array in metadata(group)]
    if not arrays:
        return list(found)
    moved = iter(on_device(np.concatenate(arrays), q.device).split([len(array) for array in arrays]))
    calls: list[Part | Pack] = []
    for group in groups:
        calls += [pack(group, [next(moved) for _ in range(4)])] if is_worth_a_pack(group) else group
    return calls


def grouped(found: Iterable[Part]) -> list[list[Part]]:
    """Parts that can be one call: each joins the first group whose queries and keys all come before its own."""
    groups: list[list[Part]] = []
    for part in found:
        for group in groups if part.row is not None else ():
            last = group[-1]
            follows = last.queries.stop <= part.queries.start and last.keys.stop <= part.keys.start
            if follows and (last.row, last.causal) == (part.row, part.causal):
                group.append(part)
                break
        else:
            groups.append([part])
    return groups


def is_worth_a_pack(group: list[Part]) -> bool:
    """Whether a group is one call: not where each part has one query, which the kernel treats as the latest one of generated texts."""
    return len(group) > 1 and any(part.queries.stop - part.queries.start > 1 for part in group)


def metadata(group: list[Part]) -> list[np.ndarray]:
    """Of queries and then of keys: int32 indices, empty if they follow one another, and ends."""
    found = []
    for slices in ([part.queries for part in group], [part.keys for part in group]):
        lengths = [own.stop - own.start for own in slices]
        together = slices[-1].stop - slices[0].start == sum(lengths)
        found.append(np.concatenate([np.arange(own.start, own.stop) for own in slices[: 0 if together else None]] or [np.arange(0)]))
        found.append(np.cumsum([0, *lengths]))
    return [array.astype(np.int32) for array in found]


def pack(group: list[Part], moved: list[Tensor]) -> Pack:
    """A group and its metadata on the device."""
    first, last = group[0], group[-1]
    assert first.row is not None
    queries, query_ends, keys, key_ends = moved
    at_queries = queries if len(queries) else slice(first.queries.start, last.queries.stop)
    at_keys = keys if len(keys) else slice(first.keys.start, last.keys.stop)
    most = [max(own.stop - own.start for own in slices) for slices in ([p.queries for p in group], [p.keys for p in group])]
    return Pack(first.row, first.causal, at_queries, at_keys, query_ends, key_ends, *most)


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
    """Whether this PyTorch has the kernel as it is called here: the operators promise nobody to stay as they are, so they are tried."""
    if torch.version.hip is not None or not torch.backends.cuda.is_flash_attention_available():
        return False
    q, ends = torch.empty(6, 2, SHARED, dtype=torch.bfloat16, device="meta"), torch.empty(3, dtype=torch.int32, device="meta")
    tried = Pack(0, True, slice(0, 6), slice(0, 6), ends, ends, 4, 4)
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
    return aten._flash_attention_backward(grad, q, k, v, out, lse, *lengths, 0.0, pack.causal, none, none, scale=scale)


def tokens(x: Tensor, pack: Pack, at: At) -> Tensor:
    """Those of a call, of ``[batch, heads, tokens, …]``: ``[n, heads, …]``. A view if they follow one another, else a copy."""
    own = x.select(0, pack.row).transpose(0, 1)
    return own.narrow(0, at.start, at.stop - at.start) if isinstance(at, slice) else own.index_select(0, at)


def add_attention(out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, pack: Pack, scale: float, *, alone: bool) -> None:
    """Merges the attention of a call into `out` and `lse`; if its queries are in no other part, it is all that there is."""
    o, found = kernel(tokens(q, pack, pack.queries), tokens(k, pack, pack.keys), tokens(v, pack, pack.keys), pack, scale)
    at, part_lse = pack.queries, found.T
    so_far, merged = tokens(lse, pack, at), tokens(out, pack, at)
    if alone:
        merged.copy_(o)
        so_far.copy_(part_lse)
    else:
        both = torch.logaddexp(so_far, part_lse)
        merged.mul_((so_far - both).exp_().unsqueeze(-1)).addcmul_(o.to(out.dtype), (part_lse - both).exp_().unsqueeze(-1))
        so_far.copy_(both)
    if not isinstance(at, slice):
        for whole, own in ((out, merged), (lse, so_far)):
            whole.select(0, pack.row).transpose(0, 1).index_put_((at,), own)


def add_pack_gradients(
    grads: tuple[Tensor, Tensor, Tensor], grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, pack: Pack, scale: float
) -> None:
    """Adds the gradients of a call to those of q, k and v, given the gradient of the merged `out`."""
    grad, q, out, lse = (tokens(x, pack, pack.queries) for x in (grad, q, out, lse))
    k, v = (tokens(x, pack, pack.keys) for x in (k, v))
    found = kernel_backward(grad, q, k, v, out, lse.T, pack, scale)
    for total, own, at in zip(grads, found, (pack.queries, pack.keys, pack.keys), strict=True):
        if isinstance(at, slice):
            tokens(total, pack, at).add_(own)
        else:  # each token is there once: there is no order of sums to depend on
            total.select(0, pack.row).transpose(0, 1).index_add_(0, at, own.to(total.dtype))
