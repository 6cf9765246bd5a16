"""Digests of contents depend on every element and its place, not on how a tensor is cut; what tiles a
tensor is told from what does not.
"""

import itertools
import random

import numpy as np
import pytest
import torch

from megacore.checkpoint import slices as tiling
from megacore.checkpoint.digest import content_digest, digest_text, identity_word
from megacore.checkpoint.slices import tiled


def test_content_digests_add_up_however_a_tensor_is_cut() -> None:
    generator = torch.Generator().manual_seed(0)
    for shape, dtype in (
        ((5, 7, 9), torch.float32),
        ((6, 5), torch.bfloat16),
        ((300,), torch.float64),
        ((3, 8200), torch.bool),
        ((), torch.int64),
    ):
        tensor = (torch.randn(shape, generator=generator) * 5).to(dtype)
        parts = [(tensor, (0,) * len(shape))]
        for dim, size in enumerate(shape):  # along every dim, unevenly: boxes of all kinds
            parts = [
                (part.narrow(dim, start, stop - start), (*at[:dim], at[dim] + start, *at[dim + 1 :]))
                for part, at in parts
                for start, stop in ((0, size // 3), (size // 3, size - 1), (size - 1, size))
            ]
        digests = [content_digest(part, at, 7) for part, at in parts]
        assert len(digests) == 3 ** len(shape)
        assert digest_text(sum(digests)) == digest_text(content_digest(tensor, (0,) * len(shape), 7))


def test_content_digests_tell_apart_what_a_plain_sum_does_not() -> None:
    """Exchanged rows and columns, signs, the sign of a zero, zeros for all."""
    base = torch.arange(1, 13, dtype=torch.float32).view(3, 4)
    base[1, 1] = 0.0
    others = [
        base[[1, 0, 2]],
        base[:, [0, 2, 1, 3]],
        base.flip(0),
        base.flip(1),
        base.roll(1, 0),
        base.roll(1, 1),
        base.t().reshape(3, 4),
    ]
    others += [
        base.neg(),
        base.index_put((torch.tensor(1), torch.tensor(1)), torch.tensor(-0.0)),
        torch.zeros(3, 4),
        base + 0,
    ]
    digests = {content_digest(tensor, (0, 0), 7) for tensor in [base, *others]}
    assert len(digests) == len(others), "all differ but the last, which is the same"


def test_content_digests_notice_any_two_signs_of_wide_numbers() -> None:
    """The highest bit of 64: in a sum of odd multiples of the elements any two such changes would cancel."""
    words = torch.randn(12, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).view(torch.int64)
    digests = set()
    for changed in itertools.chain(
        [()], itertools.combinations(range(12), 1), itertools.combinations(range(12), 2)
    ):
        digests.add(
            content_digest(
                words
                ^ torch.zeros_like(words).index_fill_(0, torch.tensor(changed, dtype=torch.int64), -(2**63)),
                (0,),
                7,
            )
        )
    assert len(digests) == 1 + 12 + 66


def test_a_content_digest_is_the_documented_sum() -> None:
    """By Python's own integers."""

    def word(table: int, index: int) -> int:
        x = (index * 0x9E3779B97F4A7C15 + table * 0xD1342543DE82EF95 + 0x632BE59BD9B4E019) % 2**64
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
        return x ^ x >> 31

    tensor = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))
    for identity in (0, 2**64 - 5):  # 0: as formats 2 and 3 have it
        total = 0
        for i, j, k in itertools.product(range(2), range(3), range(4)):
            bits = int(tensor[i, j, k].view(torch.int32)) % 2**32
            z = (
                identity
                + word(0, 7 + k)
                + bits * 0x9E3779B97F4A7C15 * (word(1, 5 + i) | 1) * (word(2, 6 + j) | 1)
            ) % 2**64
            total += z * (z >> 32)
        assert content_digest(tensor, (5, 6, 7), identity) == total % 2**64


def test_a_content_digest_says_what_the_tensor_is() -> None:
    """Zeros too: a tensor that took another's name, or is read as of another
    dtype or shape, has another digest.
    """
    words = {
        identity_word(*kind)
        for kind in (
            ("a", "float32", (2, 3)),
            ("b", "float32", (2, 3)),
            ("a", "int32", (2, 3)),
            ("a", "float32", (4, 3)),
        )
    }
    digests = {content_digest(torch.zeros(2, 3), (0, 0), word) for word in words}
    assert len(digests) == 4


Boxes = list[tuple[tuple[int, ...], tuple[int, ...]]]  # pairs of offset and size


def verdicts(cases: list[tuple[tuple[int, ...], Boxes]]) -> list[bool]:
    """`tiled`, of shapes of as many dims each with its boxes, all at once."""
    dims = len(cases[0][0])
    owners = np.repeat(np.arange(len(cases)), [len(boxes) for _, boxes in cases])
    every = [box for _, boxes in cases for box in boxes]
    offsets, sizes = (np.array([box[i] for box in every], np.int64).reshape(len(every), dims) for i in (0, 1))
    return tiled(
        np.array([shape for shape, _ in cases], np.int64).reshape(len(cases), dims), owners, offsets, sizes
    ).tolist()


@pytest.mark.parametrize("seed", range(40))
def test_tiling_is_exact(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random boxes: `tiled` says what counting every element says, for tilings and for what has a hole, an
    overlap, or one of each; for many tensors, however few of them it looks at together.
    """
    rng = random.Random(seed)
    shape = tuple(rng.randint(1, 5) for _ in range(rng.randint(0, 3)))
    boxes = [((0,) * len(shape), shape)]
    for _ in range(rng.randint(0, 5)):  # cut some in two
        offset, size = boxes.pop(rng.randrange(len(boxes)))
        if shape:
            dim = rng.randrange(len(shape))
            first = rng.randint(0, size[dim])
            boxes.append((offset, (*size[:dim], first, *size[dim + 1 :])))
            boxes.append(
                (
                    (*offset[:dim], offset[dim] + first, *offset[dim + 1 :]),
                    (*size[:dim], size[dim] - first, *size[dim + 1 :]),
                )
            )
        else:
            boxes.append((offset, size))
    cases, counted = [(shape, boxes)], [True]
    for _ in range(10):
        spoilt = list(boxes)
        for _ in range(rng.randint(1, 2)):
            offset, size = spoilt.pop(rng.randrange(len(spoilt))) if spoilt else ((0,) * len(shape), shape)
            moved = tuple(rng.randint(0, whole - n) for whole, n in zip(shape, size, strict=True))
            spoilt += rng.choice(([], [(offset, size)] * 2, [(moved, size)]))
        counts = torch.zeros(shape)
        for offset, size in spoilt:
            counts[tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))] += 1
        cases.append((shape, spoilt))
        counted.append(bool((counts == 1).all()))
    assert verdicts(cases) == counted
    monkeypatch.setattr(tiling, "MOST_CORNERS", rng.choice((1, 16, 64, 256)))
    assert verdicts(cases) == counted
