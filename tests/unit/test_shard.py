"""Pieces of logical tensors: a range of elements as boxes."""

import random
from math import prod

import torch

from megacore.distributed.shard import TensorSlice, boxes_of_range, logical_name, piece_key


def test_a_range_of_elements_is_cut_into_boxes_that_hold_just_them() -> None:
    """Checkpoints of a sharded optimizer would hold elements twice, in another's place, or not at all."""
    rng = random.Random(0)
    for _ in range(500):
        shape = tuple(rng.randint(1, 5) for _ in range(rng.randint(0, 4)))
        offset = tuple(rng.randint(0, 3) for _ in shape)
        whole = torch.randn(
            [size + start + rng.randint(0, 2) for size, start in zip(shape, offset, strict=True)]
        )
        local = whole[tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))]
        start = rng.randint(0, prod(shape))
        stop = rng.randint(start, prod(shape))
        found = list(boxes_of_range(TensorSlice(tuple(whole.shape), offset, shape), start, stop))
        boxes = [
            whole[tuple(slice(o, o + s) for o, s in zip(b.offset, b.local_shape, strict=True))]
            for _, b in found
        ]
        assert torch.equal(
            torch.cat([torch.empty(0), *(box.flatten() for box in boxes)]), local.flatten()[start:stop]
        )
        assert [first for first, _ in found] == [
            start + sum(b.numel() for b in boxes[:i]) for i in range(len(boxes))
        ]
        assert len(found) <= max(1, 2 * len(shape) - 1)


def test_whole_pieces_stay_one_box() -> None:
    """Else every replicated checkpoint would be cut for nothing."""
    assert list(boxes_of_range(TensorSlice((4, 6), (2, 0), (2, 6)), 0, 12)) == [
        (0, TensorSlice((4, 6), (2, 0), (2, 6)))
    ]


def test_further_pieces_of_a_tensor_are_numbered() -> None:
    taken: dict[str, None] = {}
    for expected in ("model/w", "model/w#2", "model/w#3"):
        key = piece_key("model/w", taken)
        taken[key] = None
        assert key == expected and logical_name(key) == "model/w"
