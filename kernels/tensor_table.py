"""Where many tensors lie, as a table on their device: what lets one launch go over all of them.

A program finds in `blocks` which tensor it works on and where in it, then in `addresses` and `sizes` that
tensor. Built once,
for tensors that stay where they are: an optimizer's.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from megacore.kernels.dispatch import check_shape

try:
    import triton
    import triton.language as tl
except ImportError:  # a CPU build of torch brings no Triton
    from megacore.kernels.absent import tl, triton


class TensorTable:
    """`addresses` ``[tensors, columns]`` and `sizes` ``[tensors]``, int64; `blocks` ``[programs,
    2]``, int32: tensor, block of it.

    columns: lists of one length; the sizes are those of the first list's tensors, of which a program does
    `block` elements.
    """

    def __init__(self, columns: Sequence[Sequence[Tensor]], block: int) -> None:
        first = columns[0]
        sizes = torch.tensor([tensor.numel() for tensor in first], dtype=torch.int64)
        counts = -(-sizes // block)
        tensor = torch.arange(len(first)).repeat_interleave(counts)
        position = torch.arange(len(tensor)) - (counts.cumsum(0) - counts)[tensor]
        addresses = [[tensor.data_ptr() for tensor in row] for row in zip(*columns, strict=True)]
        device = first[0].device
        self.tensors = columns  # kept, for addresses alone keep nothing alive
        self.addresses = torch.tensor(addresses, dtype=torch.int64).to(device)
        self.sizes = sizes.to(device)
        self.blocks = torch.stack((tensor, position), 1).int().to(device)
        # on what 16-byte loads need
        self.aligned = all(address % 16 == 0 for row in addresses for address in row)

    @property
    def programs(self) -> int:
        """How many programs go over all blocks."""
        return len(self.blocks)


def check_columns(operation: str, columns: dict[str, Sequence[Tensor] | None]) -> None:
    """Raises ValueError unless all lists, named as the caller's arguments, match the first: in length, tensor
    by tensor in shape and device, each of one dtype and of contiguous tensors; None ones are passed over.
    """
    first, *_ = columns.values()
    assert first is not None
    if not first:
        raise ValueError(f"{operation}: {next(iter(columns))} is empty (right: at least one tensor)")
    for name, column in columns.items():
        if column is None:
            continue
        if len(column) != len(first):
            raise ValueError(
                f"{operation}: {name} has {len(column)} tensors (right: {len(first)}, as "
                f"{next(iter(columns))})"
            )
        for i, (tensor, model) in enumerate(zip(column, first, strict=True)):
            check_shape(
                operation, f"{name}[{i}]", tensor, f"{list(model.shape)}", tensor.shape == model.shape
            )
            if (
                tensor.dtype != column[0].dtype
                or tensor.device != first[0].device
                or not tensor.is_contiguous()
            ):
                given = f"{tensor.dtype} on {tensor.device}, stride {tensor.stride()}"
                raise ValueError(
                    f"{operation}: {name}[{i}] is {given} (right: {column[0].dtype} on {first[0].device}, "
                    "contiguous)"
                )


@triton.jit
def pointer_at(address, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """The pointer to elements of DTYPE whose address is in memory; ALIGNED promises
    Triton a multiple of 16 bytes.
    """
    pointer = tl.load(address).to(tl.pointer_type(DTYPE))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer
