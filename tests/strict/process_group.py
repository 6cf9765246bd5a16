"""PyTorch's side: a process group whose operations go to the communicators of a strict device."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from tests.strict.device import Communicator, Device, Handle, Operation
from tests.strict.exchange import Gloo

REDUCTIONS: list[tuple[Any, Callable[[Tensor, Tensor], Tensor]]] = [
    (dist.ReduceOp.SUM, torch.add),
    (dist.ReduceOp.AVG, torch.add),
    (dist.ReduceOp.MAX, torch.maximum),
    (dist.ReduceOp.MIN, torch.minimum),
    (dist.ReduceOp.PRODUCT, torch.mul),
]
GROUP, PAIR = 0, 1  # tags
BETWEEN = (
    "torch/",
    "strict/process_group.py",
    "distributed/communicator.py",
    "distributed/collectives.py",
    "distributed/events.py",
)  # from a call to here


class StrictGroup(dist.ProcessGroup):
    """The operations of a group, in the terms in which `torch.distributed` calls a group's methods."""

    def __init__(self, device: Device, options: Any, _: Any) -> None:
        """As a backend's creator: `options` are PyTorch's own."""
        super().__init__(options.group_rank, options.group_size)
        self.device, self.own, self.members = device, options.group_rank, options.group_size
        try:
            self.gloo = Gloo(options.store, self.own, self.members, device.rules.patience)
        except dist.DistError as error:
            ranks = options.global_ranks_in_group
            raise RuntimeError(
                f"strict: not all of ranks {ranks} make their group number "
                f"{len(distributed_c10d._world.pg_names)} by one name"
            ) from error
        self.label = ("", "")  # name and description
        self.communicators: dict[str, Communicator] = {}
        self.numbers: dict[str, int] = {}  # of operations so far: of the group, and of each two ranks

    def communicator(self, key: str, tag: int) -> Communicator:
        """Made at the first operation, as NCCL's are."""
        if key not in self.communicators:
            name = {"default_pg": "the world", "undefined": "a group"}.get(self.label[1], self.label[1])
            name += "" if key == "group" else f", messages between its ranks {key}"
            self.communicators[key] = Communicator(self.device, name, self.gloo, tag)
        return self.communicators[key]

    def enqueue(
        self,
        operation: str,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        outgoing: Callable[[list[Tensor]], dict[int, Tensor]],
        incoming: dict[int, Tensor],
        combine: Callable[[dict[int, Tensor]], list[Tensor]],
        peer: int | None = None,
        **header: Any,
    ) -> Handle:
        """An operation of the whole group, or with one `peer`."""
        for x in (*inputs, *outputs):
            assert x.device.type == "cpu" and x.is_contiguous(), "NCCL takes contiguous tensors"
        pair = f"{min(self.own, peer)}:{max(self.own, peer)}" if peer is not None else "group"
        communicator = self.communicator(
            pair if self.device.rules.pairs else "group", PAIR if peer is not None else GROUP
        )
        self.numbers[pair] = self.numbers.get(pair, 0) + 1
        first, site = (*inputs, *outputs, torch.empty(0))[0], site_of_call()
        known = {
            "operation": operation,
            "number": self.numbers[pair],
            "count": first.numel(),
            "dtype": str(first.dtype)[6:],
        }
        known |= header if peer is not None else header | {"line": site}
        if "sends" in header:
            del known["count"]
        peers = (
            [peer]
            if peer is not None
            else [p for p in range(self.members) if operation != "messages" or p in self._partners(header)]
        )
        made = Operation(
            known, peers, list(inputs), list(outputs), outgoing, incoming, combine, site, peer is None
        )
        return communicator.enqueue(made)

    def _partners(self, header: dict[str, Any]) -> list[int]:
        return [p for p in range(self.members) if header["sends"][p] or header["receives"][p]]

    def allreduce(self, tensors: list[Tensor], opts: Any) -> Handle:
        """Reduces in place."""
        (x,) = tensors
        return self.enqueue(
            "all_reduce",
            [x],
            [x],
            lambda i: dict.fromkeys(self.all, i[0]),
            dict.fromkeys(self.all, x),
            lambda parts: [self._reduce(parts, opts.reduceOp)],
            reduction=index_of(opts.reduceOp),
        )

    def broadcast(self, tensors: list[Tensor], opts: Any) -> Handle:
        """From the root to all."""
        (x,), root = tensors, opts.rootRank
        return self.enqueue(
            "broadcast",
            [x],
            [x],
            lambda i: dict.fromkeys(self.all, i[0]) if self.own == root else {},
            {root: x},
            lambda parts: [parts[root]],
            root=root,
        )

    def all_gather_single(self, out: Tensor, x: Tensor, opts: Any = None) -> Handle:
        """Every rank's tensor, in a row."""
        return self.enqueue(
            "all_gather",
            [x],
            [out],
            lambda i: dict.fromkeys(self.all, i[0]),
            dict.fromkeys(self.all, x),
            lambda parts: [torch.cat([parts[rank].view(-1) for rank in self.all])],
        )

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Handle:
        """Every rank's tensor, each in one of its own."""
        (x,), (outs,) = inputs, outputs
        return self.enqueue(
            "all_gather",
            [x],
            outs,
            lambda i: dict.fromkeys(self.all, i[0]),
            dict.fromkeys(self.all, x),
            lambda parts: [parts[rank] for rank in self.all],
        )

    def reduce_scatter_single(self, out: Tensor, x: Tensor, opts: Any) -> Handle:
        """This rank's part of the sum."""
        return self.enqueue(
            "reduce_scatter",
            [x],
            [out],
            lambda i: dict(enumerate(i[0].view(-1).chunk(self.members))),
            dict.fromkeys(self.all, out.view(-1)),
            lambda parts: [self._reduce(parts, opts.reduceOp)],
            reduction=index_of(opts.reduceOp),
        )

    def all_to_all_single(
        self, out: Tensor, x: Tensor, out_splits: list[int], in_splits: list[int], opts: Any = None
    ) -> Handle:
        """A part for each rank, and one from each."""
        sends, receives = (
            [n * (t[0].numel() if len(t) else 0) for n in splits]
            or [t.numel() // self.members] * self.members
            for splits, t in ((in_splits, x), (out_splits, out))
        )
        return self.enqueue(
            "all_to_all",
            [x],
            [out],
            lambda i: dict(enumerate(i[0].view(-1).split(sends))),
            {rank: out.new_empty(n) for rank, n in enumerate(receives)},
            lambda parts: [torch.cat([parts[rank] for rank in self.all])],
            sends=sends,
            receives=receives,
        )

    # as torch 2.11 calls them
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single

    def barrier(self, opts: Any = None) -> Handle:
        """Waits for all; NCCL's blocks the host."""
        handle = self.enqueue("barrier", [], [], lambda _: {}, {}, lambda _: [])
        handle.wait()
        return handle

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Handle:
        """To one rank; NCCL has no tags."""
        return self.enqueue("send", tensors, [], lambda i: {peer: i[0]}, {}, lambda _: [], peer)

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Handle:
        """From one rank."""
        return self.enqueue(
            "receive", [], tensors, lambda _: {}, {peer: tensors[0]}, lambda parts: [parts[peer]], peer
        )

    def batch(self, operations: Sequence[dist.P2POp]) -> Handle:
        """Messages to and from several ranks as one operation of the group's communicator; at most
        one each way between two ranks.
        """
        sent = {op.group_peer: op.tensor for op in operations if op.op is dist.isend}
        received = {op.group_peer: op.tensor for op in operations if op.op is not dist.isend}
        sends, receives = (
            [t[rank].numel() if rank in t else 0 for rank in self.all] for t in (sent, received)
        )
        return self.enqueue(
            "messages",
            list(sent.values()),
            list(received.values()),
            lambda i: dict(zip(sent, i, strict=True)),
            received,
            lambda parts: [parts[rank] for rank in received],
            sends=sends,
            receives=receives,
        )

    @property
    def all(self) -> range:
        """The group's ranks."""
        return range(self.members)

    def _reduce(self, parts: dict[int, Tensor], kind: Any) -> Tensor:
        """In the order of the ranks, rounded after each as on the wire."""
        total = parts[0]
        for rank in self.all[1:]:
            total = REDUCTIONS[index_of(kind)][1](total, parts[rank])
        return total / self.members if kind == dist.ReduceOp.AVG else total

    # What PyTorch asks of a group that is written in Python.
    def getBackendName(self) -> str:
        """See `strict.NAME`."""
        return "strict"

    def _set_group_name(self, name: str) -> None:
        self.label = name, self.label[1]

    def _set_group_desc(self, description: str) -> None:
        self.label = self.label[0], description

    @property
    def group_name(self) -> str:  # type: ignore[override]
        """The one that PyTorch gave."""
        return self.label[0]

    @property
    def group_desc(self) -> str:  # type: ignore[override]
        """The mesh's."""
        return self.label[1]

    getGroupName, setGroupName = lambda self: self.label[0], _set_group_name
    getGroupDesc, setGroupDesc = lambda self: self.label[1], _set_group_desc


def batched(operations: list[dist.P2POp]) -> list[Any]:
    """`dist.batch_isend_irecv`, which would split the batch of a group that is written in Python."""
    group = operations[0].group or dist.group.WORLD
    assert isinstance(group, StrictGroup)
    return [group.batch(operations)]


def index_of(kind: Any) -> int:
    """Which of `REDUCTIONS`: PyTorch's object can be compared and not named."""
    return next(i for i, (known, _) in enumerate(REDUCTIONS) if kind == known)


def site_of_call() -> str:
    """The line of code that began an operation."""
    frame = sys._getframe(2)
    while frame.f_back is not None and any(part in frame.f_code.co_filename for part in BETWEEN):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}"
