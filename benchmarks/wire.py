"""What a rank sends in a step, by group and operation, and where it waits for it: through torch.distributed or shared memory.

The code that sends is not changed: those functions are replaced while a `Wire` is entered.
"""

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from megacore.distributed import communicator
from megacore.distributed.communicator import Communicator, Group
from megacore.distributed.mesh import Mesh
from megacore.distributed.shared_memory import SharedMemory
from megacore.tools.planner.traffic import Transfer

Part = Callable[[str], AbstractContextManager[None]]  # names what a rank is at until the block is left

# Our name of a collective; torch's, of which 2.13 renamed two (the first that exists is what the other calls); and the argument that
# is as large as the whole. On CPUs `comm` scatters a sum by an exchange of parts, which sends as much.
COLLECTIVES = (
    ("all_reduce", ("all_reduce",), 0),
    ("all_gather", ("all_gather_single", "all_gather_into_tensor"), 0),
    ("reduce_scatter", ("reduce_scatter_single", "reduce_scatter_tensor"), 1),
    ("reduce_scatter", ("all_to_all_single",), 1),
)


class Waited:
    """A handle whose `wait` is named after its group."""

    def __init__(self, work: Any, group: str, part: Part) -> None:
        self.work, self.group, self.part = work, group, part

    def wait(self, *args: Any) -> Any:
        """The handle's own."""
        with self.part(self.group):
            return self.work.wait(*args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.work, name)


class Wire(AbstractContextManager["Wire"]):
    """Counts what is sent while it is entered, and names every call and every wait by `part`."""

    def __init__(self, mesh: Mesh, part: Part) -> None:
        self.part: Part = lambda name: part(name.split()[0])  # both levels of dp are one part of a step
        groups = (*mesh.groups.values(), *mesh.shared.values(), mesh.world)
        self.groups = [group for group in groups if group.size > 1]
        self.exchanges = False  # whether parts are exchanged for their own sake, not to be summed
        self.sums = ""  # what is summed now, if not what the group is named after
        self.elements: Counter[tuple[str, str, int, int]] = Counter()  # by group, operation, size and bytes an element
        self.calls: Counter[tuple[str, str, int, int]] = Counter()
        self.patches = ExitStack()

    def transfers(self) -> list[Transfer]:
        """What was sent, in the planner's terms, sorted."""
        keys = sorted(self.elements)
        return [Transfer(key[0], key[1], key[2], self.elements[key], key[3], self.calls[key]) for key in keys]

    def __enter__(self) -> "Wire":
        for operation, names, whole in COLLECTIVES:
            name = next(name for name in names if hasattr(dist, name))
            self._replace(name, self._collective(getattr(dist, name), operation, whole))
        self.patches.enter_context(patch.object(Communicator, "start_all_to_all", self._exchanging(Communicator.start_all_to_all)))
        self._replace("isend", self._message(dist.isend, sends=True))
        self._replace("irecv", self._message(dist.irecv, sends=False))
        for operation, _, whole in COLLECTIVES[:3]:
            counted = self._through_memory(getattr(SharedMemory, operation), operation, whole)
            self.patches.enter_context(patch.object(SharedMemory, operation, counted))
        return self

    def __exit__(self, *_: object) -> None:
        self.patches.close()

    def summing(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, whose sums are counted as `name`: torch has one group for the same ranks, whatever they are at."""

        def summed(*args: Any) -> Any:
            self.sums = name
            try:
                return function(*args)
            finally:
                self.sums = ""

        return summed

    def _exchanging(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def exchanged(*args: Any) -> Any:
            self.exchanges = True
            try:
                return function(*args)
            finally:
                self.exchanges = False

        return exchanged

    def _replace(self, name: str, function: Callable[..., Any]) -> None:
        """Wherever torch's function goes by a name that is looked up when it is called."""
        original = getattr(dist, name)
        for module in (dist, distributed_c10d, communicator):
            for alias in [alias for alias, value in vars(module).items() if value is original]:
                self.patches.enter_context(patch.object(module, alias, function))

    def _collective(self, function: Callable[..., Any], operation: str, whole: int) -> Callable[..., Any]:
        def counted(*args: Any, **options: Any) -> Any:
            tensors = [value for value in (*args, *options.values()) if isinstance(value, Tensor)]
            group = options.get("group") or next((a for a in args if isinstance(a, dist.ProcessGroup)), dist.group.WORLD)
            name = self._count(self._group(group), "all_to_all" if self.exchanges else operation, tensors[whole])
            with self.part(name):
                work = function(*args, **options)
            return work if work is None else Waited(work, name, self.part)

        return counted

    def _through_memory(self, function: Callable[..., Any], operation: str, whole: int) -> Callable[..., Any]:
        def counted(memory: SharedMemory, *tensors: Tensor) -> Any:
            group = next(group for group in self.groups if group.communicator is not None and group.communicator.shared is memory)
            whole_tensor = tensors[::-1][whole] if len(tensors) > 1 else tensors[0]  # torch's functions take the result first
            name = self._count(group, operation, whole_tensor)
            with self.part(name):
                return Waited(function(memory, *tensors), name, self.part)

        return counted

    def _group(self, process_group: Any) -> Group:
        talking = ((group, group.communicator) for group in self.groups if group.communicator is not None)
        return next(group for group, own in talking if process_group in (own.process_group, own.downward))

    def _message(self, function: Callable[..., Any], *, sends: bool) -> Callable[..., Any]:
        def counted(x: Tensor, *peer: int, group: Any, **options: Any) -> Any:
            name = self._count(self._group(group), "send", x, sends=sends)
            with self.part(name):
                return Waited(function(x, *peer, group=group, **options), name, self.part)

        return counted

    def _count(self, group: Group, operation: str, tensor: Tensor, sends: bool = True) -> str:
        """Counts a transfer; the name of its group."""
        name = "dp" if group.name in ("shard", "replicate", "dp×cp") else group.name
        name = self.sums if self.sums and operation == "all_reduce" else name
        key = (name, operation, group.size, tensor.element_size())
        if sends:
            self.elements[key] += tensor.numel()
            self.calls[key] += 1
        return name
