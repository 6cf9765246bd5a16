"""A process group that is as unkind as NCCL may be, over gloo, for tests on CPUs.

    with strict(Rules(seed=1)):      # every mesh that is made within communicates through it
        …

What gloo forgives and NCCL does not:

- Operations of one communicator run strictly in the order in which they were enqueued. A group's collectives,
  and its batches of messages, have one communicator; two ranks that send and receive one by one have one for
  both directions (`Rules.pairs`: or they share the group's). A receive at the head holds up all behind it.
- A result is poison (NaN, or a sentinel) until `wait`, and is written only then.
- An input is read as late as may be. One that is changed before `wait` gives wrong numbers.
- Ranks are delayed at random, by a seed.
- What meets in an operation must agree: its kind, number, dtype, size, root and the line of code that began
  it. Else both sides are named. So is what every rank is at, when one waits in vain.
- `Rules.queues`: a rank's communicators share so many hardware queues. An operation starts when those before
  it in its queue have started. Collectives of a rank take the device in turn, as NCCL asks of programs with
  several communicators.

It is stricter than NCCL in two things: a result may be used after the wait for it, and not after the wait for
a later operation of the same communicator; and an operation may not take the result of the one before unless
that was waited for.

Not covered: `recv_anysource`, `reduce`, `gather`, `scatter`, coalescing, and what a compiler calls.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch.distributed import distributed_c10d

from megacore.distributed.mesh import Mesh
from tests.strict.device import Device, Rules
from tests.strict.process_group import StrictGroup, batched

NAME = "strict"


@contextmanager
def strict(rules: Rules | None = None) -> Iterator[Device]:
    """Within, meshes of this process communicate through strict process groups."""
    device = Device(rules or Rules())
    dist.Backend.register_backend(NAME, partial(StrictGroup, device), extended_api=True, devices=["cpu"])
    made = Mesh.__init__

    def make(mesh: Mesh, *args: Any, **options: Any) -> None:
        made(mesh, *args, **(options | {"backend": NAME}))

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(Mesh, "__init__", make))
        for module in (dist, distributed_c10d):
            stack.enter_context(mock.patch.object(module, "batch_isend_irecv", batched))
        try:
            yield device
        finally:
            device.close()
