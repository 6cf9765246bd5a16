"""Sees every operation of a rank on `meta` tensors: the memory that it would take, and what it sends."""

import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from megacore.distributed.events import Listener, Operation
from megacore.pipeline.schedule import Action
from megacore.tools.schedules.validate import describe

# What PyTorch calls an operation of a communicator, and what we do.
OPERATIONS = {
    "allreduce_": "all_reduce",
    "_allgather_base_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "send": "send",
    "recv_": "recv",
    "broadcast_": "broadcast",
    "barrier": "barrier",
    # as `Communicator.start_reduce_scatter` does it for parts in fewer bits
    "alltoall_base_": "reduce_scatter",
}
DIVIDING = "dividing parameters"  # the phase, as `FSDPEngine` names it
BUILDING = "building"  # the moment before the first step
WITHOUT_RESULT = ("send", "recv_", "barrier", "alltoall_base_")  # which return a handle alone


@dataclass(frozen=True)
class Call:
    """What a rank posts to the communicator of `ranks`; `elements` are those of the
    larger tensor, of input and result.

    `peer` is the other rank of a transfer.
    """

    operation: str
    ranks: tuple[int, ...]
    elements: int
    dtype: torch.dtype
    moment: str
    peer: int = -1

    def __str__(self) -> str:
        way = f" {'to' if self.operation == 'send' else 'from'} rank {self.peer}" if self.peer >= 0 else ""
        return f"{self.operation}{way} of {self.elements:,} × {str(self.dtype).removeprefix('torch.')}"


@dataclass(slots=True)
class AllocatedBlock:
    """A storage that was made."""

    size: int  # bytes
    moment: str  # that made it
    shape: tuple[int, ...]  # and dtype of the tensor that it was made for
    dtype: torch.dtype


@dataclass
class Journal:
    """Every storage of a rank in the order in which they were made and freed.

    An event is a block's number, or ``~number`` when freed.
    """

    blocks: list[AllocatedBlock] = field(default_factory=list)
    events: list[int] = field(default_factory=list)

    def live_behind(self, events: int) -> Iterator[AllocatedBlock]:
        """The blocks that live behind so many events."""
        freed = {~event for event in self.events[:events] if event < 0}
        yield from (self.blocks[event] for event in self.events[:events] if event >= 0 and event not in freed)

    def waiting(self) -> int:
        """The most bytes that a step keeps for backwards: of what it made, what lives when one begins."""
        live = most = 0
        before = BUILDING
        for event in self.events:
            block = self.blocks[max(event, ~event)]
            if event >= 0 and block.moment != before:
                before = block.moment
                most = max(most, live) if before.startswith("backward") else most
            if block.moment != BUILDING:
                live += block.size if event >= 0 else -block.size
        return most


_KINDS: dict[Any, str] = {}  # of operations
_RESULTS: dict[Any, Any] = {}  # of operations on arguments of some shapes: the same for every rank


class MetaWatch(TorchDispatchMode, Listener):
    """While entered, keeps a journal of the storages that are made, by the moment that
    makes them, and notes what is sent.

    An operation on equal shapes is computed once; then its results are made as they were, without PyTorch's
    computing their shapes.
    """

    on_error = "raise"

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here; what keeps PyTorch's compiler away would load it, which takes seconds."""
        return False

    def __init__(self) -> None:
        super().__init__()
        self.journal = Journal()
        self.live = self.peak = self.peak_at = 0  # bytes, bytes, and the journal's events until then
        self.moment = self.peak_moment = self.around = BUILDING
        self.calls: list[Call] = []
        self.exchange = ""  # the operation, where parts are exchanged for their own sake, not to be summed
        self.sleeps = False  # then nothing is seen
        self.numbers: dict[int, int] = {}  # in the journal, by the storage's address
        self._works: dict[str, Any] = {}
        self._ranks: dict[int, tuple[int, ...]] = {}

    def on_phase(self, phase: str) -> None:
        """While FSDP2 divides, it asks for shapes of whole tensors, which never exist: only
        what is held in the end counts.
        """
        self.sleeps = phase == DIVIDING

    def on_action_begin(self, action: Action) -> None:
        """Every action of the plan is the moment of what it makes and sends."""
        self.around, self.moment = self.moment, describe(action)

    def on_action_end(self, action: Action) -> None:
        self.moment = self.around

    def on_collective(self, operation: Operation) -> None:
        """An exchange also sums parts in fewer bits, and is noted as what it is."""
        self.exchange = operation.name if operation.name in ("all_to_all", "exchange") else ""

    def on_started(self, token: None) -> None:
        self.exchange = ""

    @contextmanager
    def during(self, moment: str) -> Iterator[None]:
        """What is made and sent within belongs to `moment`."""
        before, self.moment = self.moment, moment
        yield
        self.moment = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.sleeps:
            return func(*args, **kwargs)
        if func.namespace == "c10d":
            return self._communicate(func, args, kwargs)
        kind = _kind_of(func)
        if kind == "other":
            result = func(*args, **kwargs)
        else:
            result = self._remembered(func, args, kwargs, kind)
        for tensor in (result,) if isinstance(result, Tensor) else tree_iter(result):
            if isinstance(tensor, Tensor) and tensor.is_meta:
                self.note(tensor)
        return result

    def makes(self, func: Any) -> bool:
        """Whether an operation fills tensors, and does not only look at those that are there."""
        return _kind_of(func) != "other" or func._schema.is_mutable

    def _remembered(self, func: Any, args: Any, kwargs: Any, kind: str) -> Any:
        key = (func, *map(_key, args), *((name, _key(value)) for name, value in kwargs.items()))
        if key not in _RESULTS:
            result = func(*args, **kwargs)
            parts = result if isinstance(result, tuple | list) else (result,)
            if all(isinstance(part, Tensor) and part.is_meta for part in parts) and (
                kind != "inplace" or result is args[0]
            ):
                _RESULTS[key] = type(result), [(part.shape, part.stride(), part.dtype) for part in parts]
            return result
        if kind != "new":
            return kwargs["out"] if kind == "out" else args[0]
        made_as, specs = _RESULTS[key]
        made = [
            torch.empty_strided(shape, stride, dtype=dtype, device="meta") for shape, stride, dtype in specs
        ]
        return made[0] if made_as is Tensor else made_as(made)

    def _communicate(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Notes the call. Nobody answers; the first handle of an operation stands for all."""
        called = func.overloadpacket.__name__
        name = self.exchange or OPERATIONS[called]
        boxed = next(value for value in (*args, *kwargs.values()) if isinstance(value, torch.ScriptObject))
        group = dist.ProcessGroup.unbox(boxed)
        ranks = self._ranks.get(id(group)) or self._ranks.setdefault(
            id(group), tuple(dist.get_process_group_ranks(group))
        )
        largest = max((tensor for tensor in tree_iter(args) if isinstance(tensor, Tensor)), key=Tensor.numel)
        peer = ranks[args[2]] if name in ("send", "recv") else -1
        self.calls.append(Call(name, ranks, largest.numel(), largest.dtype, self.moment, peer))
        if called not in self._works:
            result = func(*args, **kwargs)
            self._works[called] = result if called in WITHOUT_RESULT else result[-1]
        return self._works[called] if called in WITHOUT_RESULT else (args[0], self._works[called])

    def note(self, tensor: Tensor) -> None:
        """Counts a tensor's storage, if it is not counted."""
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address in self.numbers:
            return
        number, size = len(self.journal.blocks), storage.nbytes()
        self.journal.blocks.append(AllocatedBlock(size, self.moment, tuple(tensor.shape), tensor.dtype))
        self.journal.events.append(number)
        self.numbers[address] = number
        self.live += size
        if self.live > self.peak:
            self.peak, self.peak_at, self.peak_moment = self.live, len(self.journal.events), self.moment
        weakref.finalize(storage, self._forget, address, number, size)

    def release(self, tensor: Tensor) -> None:
        """Counts a tensor's storage as freed, though the object lives on."""
        address = tensor.untyped_storage()._cdata
        if (number := self.numbers.get(address)) is not None:
            self._forget(address, number, self.journal.blocks[number].size)

    def _forget(self, address: int, number: int, size: int) -> None:
        if self.numbers.get(address) != number:
            return  # it was released before
        del self.numbers[address]
        self.journal.events.append(~number)
        self.live -= size


def alive(watch: MetaWatch) -> list[tuple[str, int]]:
    """The bytes that live at the peak, by the moment in which they were made."""
    found: Counter[str] = Counter()
    for block in watch.journal.live_behind(watch.peak_at):
        found[block.moment] += block.size
    return found.most_common()


def _kind_of(func: Any) -> str:
    """`_kind`, asked once."""
    return _KINDS.get(func) or _KINDS.setdefault(func, _kind(func))


def _kind(func: Any) -> str:
    """Whether an operation makes new tensors of shapes that its arguments' shapes decide (`new`), fills the
    one that it is given as `out`, changes its first argument in place (`inplace`), or does something else.
    """
    schema = func._schema
    if schema.is_mutable:
        changed = [
            argument.name
            for argument in schema.arguments
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        return (
            "out"
            if changed == ["out"]
            else "inplace"
            if changed == ["self"] and len(schema.returns) == 1
            else "other"
        )
    new = bool(schema.returns) and all(
        value.alias_info is None and str(value.type) == "Tensor" for value in schema.returns
    )
    return "new" if new else "other"


def _key(value: Any) -> Any:
    """What an operation's result depends on: of a tensor its shape, strides and
    dtype; of a number its type too.
    """
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype, value.is_meta
    if isinstance(value, Sequence) and not isinstance(value, str):
        return tuple(map(_key, value))
    return type(value), value
