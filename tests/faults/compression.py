"""Mistakes in sums of gradients that travel compressed, and in what such sums leave for the next step."""

from typing import Any
from unittest import mock

import torch
from torch import Tensor

from megacore.distributed.collectives import Done
from megacore.engine import low_rank
from megacore.engine.compression import Blocks, GradientCompression
from megacore.engine.low_rank import LowRankBucket
from megacore.train import checkpointing
from tests.compressed_sums import INT8, LOW_RANK
from tests.faults import fault

patch = mock.patch.object
LOST = "what sums lack is not in the residuals"
SUMS = (
    "every microbatch's gradients agree; their sum over microbatches and ranks does not: first "
    "embedding.weight"
)
FULL_RANK = 'engine.compression={"kind": "low_rank", "rank": null}'


@fault("what compression has lost is forgotten", "dp2", LOST, INT8, check="sums")
def residual_forgotten() -> Any:
    return patch(GradientCompression, "keep", lambda self, skip: None)


@fault(
    "the compression error of a skipped step is kept, with its infinity",
    "dp2",
    "a skipped step has left its gradient",
    INT8,
    check="sums",
)
def residual_of_a_skipped_step() -> Any:
    keep = GradientCompression.keep
    return patch(GradientCompression, "keep", lambda self, skip: keep(self, torch.zeros_like(skip)))


@fault("the compression error is added to the next bucket", "dp2", LOST, INT8, check="sums")
def residual_of_another_bucket() -> Any:
    return patch(GradientCompression, "keep", _swapped)


@fault(
    "the compression error is added to the next bucket, with low rank", "dp2", LOST, LOW_RANK, check="sums"
)
def residual_of_another_bucket_of_low_rank() -> Any:
    return patch(GradientCompression, "keep", _swapped)


def _swapped(self: GradientCompression, skip: Tensor, keep: Any = GradientCompression.keep) -> None:
    keep(self, skip)
    first, second = (bucket.residuals[0].kept for bucket in list(self.buckets.values())[:2])
    count = min(first.numel(), second.numel())
    first[:count], second[:count] = second[:count].clone(), first[:count].clone()


@fault(
    "the compression error is not restored when a run resumes",
    "dp2",
    "another grad_norm in step 3",
    INT8,
    check="resume",
)
def residual_not_restored() -> Any:
    return patch(checkpointing, "read_residuals", lambda *_: [])


@fault(
    "the compression error is restored, but the low-rank basis starts anew",
    "dp2",
    "another grad_norm in step 3",
    LOW_RANK,
    check="resume",
)
def basis_not_restored() -> Any:
    return patch(checkpointing, "BASIS", "none/")


@fault("the compression error keeps the loss scale, with low rank", "dp2", LOST, LOW_RANK, check="sums")
def residual_with_the_loss_scale() -> Any:
    finish = LowRankBucket.finish

    def scaled(self: LowRankBucket) -> None:
        finish(self)
        self.residual.coming.mul_(self.loss_scale)

    return patch(LowRankBucket, "finish", scaled)


@fault(
    "a block of 8 bits is decoded with the scale of the one before",
    "dp2",
    "a sum errs by more than its rounding",
    INT8,
    check="sums",
)
def scale_of_another_block() -> Any:
    def decode(self: Blocks, out: Tensor, rows: slice) -> None:
        torch.mul(self.codes[rows], self.scales[rows].roll(1, 1), out=out.view(self.codes[rows].shape))

    return patch(Blocks, "decode", decode)


@fault("what is not finite is rounded to zero", "dp2", "what is not finite is not seen", INT8, check="sums")
def infinity_rounded_away() -> Any:
    encode = Blocks.encode
    return patch(
        Blocks, "encode", lambda self, x, *rest: encode(self, torch.nan_to_num_(x, 0.0, 0.0, 0.0), *rest)
    )


@fault("factors of low rank are not made orthonormal", "dp2", SUMS, FULL_RANK)
def factors_not_orthonormal() -> Any:
    return patch(torch.linalg, "qr", lambda x: (x, None))


@fault("the first of the two low-rank factors is not reduced", "dp2", SUMS, FULL_RANK)
def first_factor_unsummed() -> Any:
    behind = low_rank.behind

    def left_out(prepare: Any, x: Tensor, levels: Any) -> Any:
        def alone() -> Done:
            prepare()
            return Done()

        return [alone] if prepare.__name__ == "_project" else behind(prepare, x, levels)

    return patch(low_rank, "behind", left_out)
