"""First weights: a rank draws what it holds of each logical tensor, in threads, and gets the
numbers that one process would.
"""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from math import prod

import torch
from torch import Tensor

from megacore.distributed.rendezvous import use_device
from megacore.distributed.shard import Shard, TensorSlice, boxes_of_range, logical_name, overlap, relative
from megacore.rng import normal_runs

BLOCKS = 64  # of a logical tensor, with a stream each, so that a rank draws little more than its own part


@torch.no_grad()
def initialise(
    held: Mapping[str, tuple[Tensor, TensorSlice | Shard]],
    shards: Mapping[str, Shard],
    seed: int,
    dtype: torch.dtype,
    threads: int = 1,
    note: Callable[[], None] = lambda: None,
) -> None:
    """Fills pieces of parameters (by `shard.piece_key`) as the parameters' `shards` say: the same
    logical tensors in every layout.

    `dtype` computes, so masters of more bits start as its rounded weights. `note` is called now and then:
    drawing may take minutes.
    """
    jobs: list[Callable[[], None]] = []
    for key, (tensor, box) in held.items():
        name = logical_name(key)
        shard = shards[name]
        if shard.first is not None:
            piece = box.box if isinstance(box, Shard) else box
            tensor.copy_(shard.first.draw(seed)[piece.slices].to(dtype))
            note()
            continue
        if shard.init_std is None:
            tensor.fill_(shard.fill)
            continue
        dim = (*shard.cuts, 0)[0]
        step = -(-shard.global_shape[dim] // BLOCKS)
        start, stop = box.offset[dim], box.offset[dim] + box.local_shape[dim]
        for first in range(start - start % step, stop if tensor.numel() else start, step):
            jobs.append(
                partial(draw_block, tensor, box, (seed, name, first), shard.init_std, dim, first, step, dtype)
            )
    for shard in shards.values():
        if shard.first is not None:
            shard.first.release()
    if threads == 1 or not jobs:
        for job in jobs:
            job()
            note()
        return
    device = next(iter(held.values()))[0].device
    with ThreadPoolExecutor(
        threads, thread_name_prefix="weights", initializer=use_device, initargs=(device,)
    ) as executor:
        for done in as_completed([executor.submit(job) for job in jobs]):
            done.result()
            note()


@torch.no_grad()
def draw_block(
    out: Tensor,
    box: TensorSlice | Shard,
    key: tuple[object, ...],
    std: float,
    dim: int,
    first: int,
    step: int,
    dtype: torch.dtype,
) -> None:
    """Draws what a block and a piece `out`, which is `box` of its logical tensor, share.

    The block is `first` to ``first + step`` along `dim`. Its numbers depend on the logical shape alone, so
    any cut gives the same. It is drawn from its beginning, and no further than needed.
    """
    shape = box.global_shape
    extent = [(first, min(step, shape[dim] - first)) if d == dim else (0, n) for d, n in enumerate(shape)]
    block = TensorSlice(shape, tuple(start for start, _ in extent), tuple(n for _, n in extent))
    shared = overlap(block.offset, block.local_shape, box.offset, box.local_shape)
    if shared is None:
        return
    last = 0  # number of the last that is needed
    for s, start, n in zip(shared, block.offset, block.local_shape, strict=True):
        last = last * n + s.stop - 1 - start
    for begin, values in normal_runs(key, prod(block.local_shape), std, last + 1):
        for at, part in boxes_of_range(block, begin, begin + values.numel()):
            if (shared := overlap(part.offset, part.local_shape, box.offset, box.local_shape)) is not None:
                numbers = values[at - begin :][: prod(part.local_shape)].view(part.local_shape)
                out[relative(shared, box.offset)].copy_(numbers[relative(shared, part.offset)].to(dtype))
