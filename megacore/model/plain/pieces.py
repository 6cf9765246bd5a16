"""This rank's pieces of a plain module's parameters, and what tensor ranks exchange around them."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megacore.config import Config
from megacore.distributed.collectives import enter_tensor_parallel, leave_tensor_parallel, own_part
from megacore.distributed.communicator import SOLO, Group
from megacore.distributed.shard import (
    FirstValue,
    LogicalMatrix,
    Shard,
    new_parameter,
    replicated,
    shard_of,
    split,
)
from megacore.distributed.topology import Topology
from megacore.kernels.dispatch import Implementation
from megacore.model.context import Context
from megacore.model.plain.attention import running
from megacore.model.plain.build import PlainModel
from megacore.model.plain.parts import LINEAR, REGIONS, Role
from megacore.tensor_parallel.embedding import vocab_parallel_look_up
from megacore.tensor_parallel.linear import column_linear, row_stride


def rows(x: Tensor, context: Context) -> Tensor:
    """``[tokens, hidden]`` → what a module takes, ``[batch, seq, hidden]``.

    Under sequence parallelism this rank's tokens are one sequence, since they may be no whole ones.
    """
    return x[None] if context.sequence else x.view(context.batch_size, context.seq_len, -1)


class Pieces:
    """Makes parts of a plain module this rank's own."""

    def __init__(
        self, model: PlainModel, config: Config, mesh: Topology, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.model, self.group, self.dtype, self.device = model, mesh.tp, dtype, device
        self.sequence = config.parallel.sequence and mesh.tp.size > 1
        self.kernels: Implementation = config.model.kernels

    def block(self, place: str) -> nn.Module:
        """Return a block with this rank's pieces of its parameters.

        Raises `ValueError` if the table does not suit it.
        """
        block, parts = self.model.part(place), self.model.parts
        modules = dict(block.named_modules())
        for inner, module in modules.items():
            role = parts.role(inner)
            if role.kind in LINEAR:
                parent, _, name = inner.rpartition(".")
                block.get_submodule(parent).add_module(name, self._linear(place, inner, module, role))
                continue
            if role.kind in REGIONS and self.group.size > 1:
                exchange_around(module, role.kind, self.group)
            for name, number in list(vars(module).items()):
                if parts.role(f"{inner}.{name}").kind == "divide":
                    setattr(module, name, self._share(f"{place}.{inner}.{name}", number))
            for name, parameter in list(module._parameters.items()):
                if parameter is not None:
                    self._take_bare(module, place, f"{inner}.{name}".removeprefix("."), parameter)
        return block

    def outer(self, place: str, *, partial: bool) -> nn.Module:
        """Return a module outside of the blocks, of which every rank has all.

        `partial`: each rank computes only its own tokens.
        """
        module = self.model.part(place)
        for inner, owner in module.named_modules():
            for name, parameter in list(owner._parameters.items()):
                if parameter is not None:
                    path = f"{inner}.{name}".removeprefix(".")
                    along = replicated(self.group, partial=partial and self.sequence)
                    is_table = isinstance(owner, nn.Embedding)
                    owner._parameters[name] = self._new(place, path, parameter, along, is_table=is_table)
        return module

    def embedding(self) -> nn.Module:
        """Return the table of tokens with this rank's rows, which its own class scales, if it does."""
        place = self.model.embedding
        table: Any = self.model.part(place)
        table._parameters["weight"] = self._new(
            place, "weight", table.weight, split(self.group, 0), is_table=True
        )
        kind = type(table)
        is_plain = kind is nn.Embedding
        table.__class__ = TokenRows if is_plain else type(kind.__name__, (kind, TokenRows), {})
        table.group, table.kernels = self.group, self.kernels
        # kept here, because FSDP computes with other parameters, which have no shard
        table.first_row = shard_of(table.weight).offset[0]
        table.surrogate_gradient = table.padding_idx is not None  # whose vector PyTorch does not train
        return table

    def head(self) -> "HeadRows":
        """Return the linear module that makes logits, with this rank's rows."""
        place = self.model.head
        module: Any = self.model.module.get_submodule(place)
        along = split(self.group, 0)
        # One parameter has one first value: tied, it is the embedding's.
        weight_place = self.model.embedding if self.model.tied else place
        weight = self._new(weight_place, "weight", module.weight, along, is_table=True)
        bias = None if module.bias is None else self._new(place, "bias", module.bias, along)
        return HeadRows(weight, bias, self.group, self.sequence)

    def _linear(self, place: str, inner: str, module: Any, role: Role) -> "LinearPiece":
        """Return this rank's piece of a linear module."""
        where, region = f"{place}.{inner}", self.model.parts.enclosing(inner)
        is_conv = type(module) is not nn.Linear  # but Conv1D of transformers, whose weight is [in, out]
        is_row = role.kind == "row"
        if is_row and region == "sum" and module.bias is not None:
            raise ValueError(f"{where} has a bias, which the sum of its region would add once for each rank")
        dim = int(is_row != is_conv)  # a row's inputs, or a column's outputs
        weight = self._piece(
            place, f"{inner}.weight", module.weight, dim, role.sections, is_transposed=is_conv
        )
        bias = None
        if module.bias is not None and is_row:
            along = replicated(self.group, partial=self.sequence)
            bias = self._new(place, f"{inner}.bias", module.bias, along)
        elif module.bias is not None:
            bias = self._piece(place, f"{inner}.bias", module.bias, 0, role.sections)
        leaves = self.group if is_row and region == "region" else SOLO
        piece = LinearPiece(where, weight, bias, is_conv, leaves)
        piece.has_partial_gradient = not is_row and self.group.size > 1
        return piece

    def _take_bare(self, module: nn.Module, place: str, path: str, parameter: nn.Parameter) -> None:
        """Make a parameter that a module of any class uses this rank's own."""
        role, region = self.model.parts.role(path), self.model.parts.enclosing(path)
        name = path.rpartition(".")[2]
        if role.kind == "split":
            if role.dim >= parameter.dim():
                raise ValueError(
                    f"{place}.{path} has {parameter.dim()} dims, and is split along dim {role.dim}"
                )
            module._parameters[name] = self._piece(place, path, parameter, role.dim, role.sections)
            if role.sections > 1:  # the module's code takes it as it was
                module.register_forward_pre_hook(partial(show_joined, name=name, dim=role.dim))
                module.register_forward_hook(partial(hide_joined, name=name))
            return
        # In a region each rank computes a part of what all of them add; elsewhere, its own tokens or all.
        is_partial = self.sequence if region in (None, "whole") else True
        along = replicated(self.group, partial=is_partial)
        module._parameters[name] = self._new(place, path, parameter, along)

    def _piece(
        self,
        place: str,
        path: str,
        parameter: Tensor,
        dim: int,
        sections: int,
        is_transposed: bool = False,
    ) -> nn.Parameter:
        """Return this rank's piece of a parameter along a dim, or if there are several in one, of each."""
        shape = tuple(parameter.shape)
        self._share(f"{place}.{path}", shape[dim], sections)
        if sections > 1:
            shape = (*shape[:dim], sections, shape[dim] // sections, *shape[dim + 1 :])
            dim += 1
        along = split(self.group, dim)
        return self._new(place, path, parameter, along, shape=shape, is_transposed=is_transposed)

    def _share(self, where: str, number: Any, sections: int = 1) -> int:
        """Return this rank's part of a number of features or heads."""
        ranks = sections * self.group.size
        if not isinstance(number, int) or number % ranks:
            parts = (
                f"{sections} parts for each of {self.group.size} ranks" if sections > 1 else f"{ranks} ranks"
            )
            raise ValueError(f"{where}: {number} is not divided by {parts}")
        return number // self.group.size

    def _new(
        self,
        place: str,
        path: str,
        parameter: Tensor,
        along: Any,
        *,
        shape: tuple[int, ...] | None = None,
        is_table: bool = False,
        is_transposed: bool = False,
    ) -> nn.Parameter:
        """Return a parameter of this rank, with its place in the whole one of `shape`."""
        shape = tuple(parameter.shape) if shape is None else shape
        is_matrix = parameter.dim() >= 2

        weights = self.model.first_weights

        def draw(seed: int) -> Tensor:
            return weights.of(place, path, seed).detach().view(shape)

        dims = tuple(range(len(shape)))
        matrices: tuple[LogicalMatrix, ...] = ()
        if is_matrix and not is_table and (len(shape) > 2 or is_transposed):
            inputs, *batch, outputs = dims if is_transposed else (dims[-1], *dims[:-1])
            matrices = (LogicalMatrix("", batch=tuple(batch), rows=(outputs,), columns=(inputs,)),)
        shard = Shard(
            shape,
            (along,),
            decay=is_matrix,
            first=FirstValue(draw, weights.release),
            matrices=matrices,
            table=is_table,
        )
        piece = new_parameter(shard, self.dtype, self.device)
        piece.requires_grad_(parameter.requires_grad)
        return piece


class LinearPiece(nn.Module):
    """This rank's outputs of a linear module, or with its inputs the sum over the ranks in `leaves`."""

    has_partial_gradient = False  # of its input; the entrance of its region sums it

    def __init__(
        self, where: str, weight: nn.Parameter, bias: nn.Parameter | None, is_transposed: bool, leaves: Group
    ) -> None:
        super().__init__()
        self.where, self.weight, self.bias = where, weight, bias
        self.is_transposed, self.leaves = is_transposed, leaves

    def forward(self, x: Tensor) -> Tensor:
        """``[batch, seq, in]`` → ``[batch, seq, out]``, this rank's features of one of them."""
        weight = self.weight.flatten(1).t() if self.is_transposed else self.weight
        if x.shape[-1] != weight.shape[-1]:
            raise ValueError(
                f"{self.where} gets {x.shape[-1]} features, and has {weight.shape[-1]} inputs on this rank: "
                "does the table divide what comes before it?"
            )
        bias = None if self.bias is None else self.bias.flatten()
        is_summed = self.leaves.size > 1
        y = column_linear(x.flatten(0, -2), weight, None if is_summed else bias, SOLO, False)
        if not is_summed:
            return y.view(*x.shape[:-1], -1)
        context = running().context
        y = leave_tensor_parallel(y, self.leaves, context.sequence)
        return rows(y if bias is None else y + bias, context)


class TokenRows(nn.Embedding):
    """The rows of a table of tokens that this rank has."""

    group: Group
    kernels: Implementation
    first_row: int

    def forward(self, tokens: Tensor) -> Tensor:
        """``[batch, seq]`` → the vectors of all tokens, on every rank."""
        vectors = vocab_parallel_look_up(
            self.weight, tokens.flatten(), self.first_row, self.group, False, self.kernels
        ).view(*tokens.shape, -1)
        if self.padding_idx is None:
            return vectors
        return torch.where((tokens == self.padding_idx)[..., None], vectors.detach(), vectors)


class HeadRows(nn.Module):
    """The rows of the head that this rank has."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, group: Group, sequence: bool) -> None:
        super().__init__()
        self.weight, self.bias, self.group, self.sequence = weight, bias, group, sequence

    def forward(self, x: Tensor) -> Tensor:
        """``[1, tokens, hidden]`` (with sequence parallelism this rank's tokens) → the logits of all tokens,
        ``[1, tokens, rows]``.
        """
        stride = row_stride(x, len(self.weight)) if self.bias is None else 0
        return column_linear(x[0], self.weight, self.bias, self.group, self.sequence, stride)[None]


def exchange_around(module: nn.Module, kind: str, group: Group) -> None:
    """Let a region's ranks exchange what enters it, and what leaves it without a row."""
    module.register_forward_pre_hook(partial(enter, kind=kind, group=group), with_kwargs=True)
    module.register_forward_hook(partial(leave, kind=kind, group=group))


def enter(
    module: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any], *, kind: str, group: Group
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Give a region the hidden states of all tokens; backward sums the ranks' gradients."""
    part = running()
    part.in_region, context = True, part.context
    if kind == "whole" and not context.sequence:
        return None
    name = "hidden_states"
    if not arguments and name not in options:
        raise ValueError(
            f"a {kind} of {part.name} gets no hidden states, as its first argument or by that name"
        )
    x: Tensor = arguments[0] if arguments else options[name]
    others = [*arguments[1:], *(value for key, value in options.items() if arguments or key != name)]
    if any(isinstance(other, Tensor) and other.requires_grad for other in others):
        raise ValueError(
            f"a {kind} of {part.name} gets a second tensor with a gradient, and only the gradients of hidden "
            "states, its first argument, are summed over its ranks"
        )
    # A gradient of this rank's tokens is whole, once the ranks that used them have given their parts.
    x = enter_tensor_parallel(x.flatten(0, 1), group, context.sequence)
    x = x.view(context.batch_size, context.seq_len, -1)
    return ((x, *arguments[1:]), options) if arguments else ((), options | {name: x})


def leave(module: nn.Module, arguments: Any, outputs: Any, *, kind: str, group: Group) -> Any:
    """Sum what the ranks computed in a region without a row, or keep this rank's tokens of a whole one."""
    part = running()
    part.in_region, context = False, part.context
    if kind == "region" or (kind == "whole" and not context.sequence):
        return None
    y, *others = outputs if isinstance(outputs, tuple) else (outputs,)
    y = y.flatten(0, 1)
    if kind == "sum":  # into a tensor that nothing else reads
        y = leave_tensor_parallel(y.clone(), group, context.sequence)
    else:
        y = own_part(y, group)
    return (rows(y, context), *others) if isinstance(outputs, tuple) else rows(y, context)


def show_joined(module: nn.Module, arguments: Any, *, name: str, dim: int) -> None:
    """Let a module's code find a parameter that is several in one as it was; an attribute comes first."""
    parameter = module._parameters[name]
    assert parameter is not None
    module.__dict__[name] = parameter.flatten(dim, dim + 1)


def hide_joined(module: nn.Module, arguments: Any, outputs: Any, *, name: str) -> None:
    """Undo `show_joined`."""
    del module.__dict__[name]
