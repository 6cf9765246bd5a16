"""What a rank sends in a step, by group and operation, and where it waits for it.

What this project sends, it hears of as a listener. For libraries that bring their own collectives (FSDP2),
torch.distributed's functions are replaced while a `Wire` is entered.
"""

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from megacore.distributed.communicator import Group
from megacore.distributed.events import Listener, Operation
from megacore.distributed.mesh import Mesh
from megacore.pipeline.schedule import Action, Op
from megacore.tools.planner.traffic import Transfer

Part = Callable[[str], AbstractContextManager[None]]  # names what a rank is at until the block is left

# A library's name of a collective; torch's, of which 2.13 renamed two (the first that exists is what the
# other calls); and the argument that is as large as the whole.
COLLECTIVES = (
    ("all_reduce", ("all_reduce",), 0),
    ("all_gather", ("all_gather_single", "all_gather_into_tensor"), 0),
    ("reduce_scatter", ("reduce_scatter_single", "reduce_scatter_tensor"), 1),
)
COUNTED = {
    "all_reduce": 0,
    "all_gather": 1,
    "reduce_scatter": 0,
    "all_to_all": 0,
    "exchange": 0,
    "shift": 0,
    "send": 0,
}  # by its largest tensor
EXPERTS = "experts"  # the groups that rows travel over to experts and back
OF_GROUPS = {
    "shard": "dp",
    "replicate": "dp",
    "dp×cp": "dp",
    "edp": "dp",
    "ep": EXPERTS,
    "etp": EXPERTS,
    "ep×etp": EXPERTS,
}
SUMS = {"loss": "loss", "optimizer step": "norm"}  # what is summed in a phase


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


class Wire(Listener, AbstractContextManager["Wire"]):
    """Counts what is sent while it is entered, and names every call and every wait by `part`."""

    on_error = "raise"

    def __init__(self, mesh: Mesh, part: Part) -> None:
        self.part: Part = lambda name: part(name.split()[0])  # both levels of dp are one part of a step
        self.mesh = mesh
        self.sums = ""  # what is summed now, if not what the group is named after
        # by group, operation, size and bytes an element
        self.elements: Counter[tuple[str, str, int, int]] = Counter()
        self.calls: Counter[tuple[str, str, int, int]] = Counter()
        # that are open: within them torch's functions are called by this project
        self.parts: list[AbstractContextManager[None]] = []
        self.patches = ExitStack()

    def transfers(self) -> list[Transfer]:
        """What was sent, in the planner's terms, sorted."""
        keys = sorted(self.elements)
        return [
            Transfer(*key[:3], self.elements[key], key[3], self.calls[key], stays=key[1] == "exchange")
            for key in keys
        ]

    def __enter__(self) -> "Wire":
        self.mesh.listeners.add(self)
        for operation, names, whole in COLLECTIVES:
            name = next(name for name in names if hasattr(dist, name))
            original = getattr(dist, name)
            # wherever it goes by a name that is looked up when it is called
            for module in (dist, distributed_c10d):
                for alias in [alias for alias, value in vars(module).items() if value is original]:
                    self.patches.enter_context(
                        patch.object(module, alias, self._of_a_library(original, operation, whole))
                    )
        return self

    def __exit__(self, *_: object) -> None:
        self.patches.close()
        self.mesh.listeners.remove(self)

    def on_phase(self, phase: str) -> None:
        self.sums = SUMS.get(phase, "")

    def on_action_begin(self, action: Action) -> None:
        self.sums = "tied" if action.op is Op.REDUCE_TIED else ""

    def on_collective(self, operation: Operation) -> str:
        name = self._name(operation.group, operation.name)
        if operation.name in COUNTED:
            what = "send" if operation.name == "shift" else operation.name
            self._count(name, what, operation.group.size, operation.tensors[COUNTED[operation.name]])
        self.on_wait_begin(name)
        return name

    def on_started(self, token: str) -> None:
        self.on_wait_end(token)

    def on_wait_begin(self, token: str) -> None:
        self.parts.append(self.part(token))
        self.parts[-1].__enter__()

    def on_wait_end(self, token: str) -> None:
        self.parts.pop().__exit__(None, None, None)

    def _of_a_library(self, function: Callable[..., Any], operation: str, whole: int) -> Callable[..., Any]:
        def counted(*args: Any, **options: Any) -> Any:
            if self.parts:
                return function(*args, **options)
            tensors = [value for value in (*args, *options.values()) if isinstance(value, Tensor)]
            process_group = options.get("group") or next(
                (a for a in args if isinstance(a, dist.ProcessGroup)), dist.group.WORLD
            )
            groups = (*self.mesh.groups.values(), self.mesh.world)
            group = next(own for own in groups if own.size > 1 and own.process_group is process_group)
            name = self._name(group, operation)
            self._count(name, operation, group.size, tensors[whole])
            with self.part(name):
                work = function(*args, **options)
            return work if work is None else Waited(work, name, self.part)

        return counted

    def _name(self, group: Group, operation: str) -> str:
        if self.sums and operation == "all_reduce":
            return self.sums
        return OF_GROUPS.get(group.name, group.name)

    def _count(self, name: str, operation: str, size: int, tensor: Tensor) -> None:
        key = (name, operation, size, tensor.element_size())
        self.elements[key] += tensor.numel()
        self.calls[key] += 1
