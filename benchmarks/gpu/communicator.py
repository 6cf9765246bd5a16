"""One communicator of NCCL, without anybody else in it: every operation, in every
dtype, and what it was told.
"""

import json
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.gpu.running import Rows
from megacore.distributed.communicator import Communicator
from megacore.distributed.mesh import prioritised
from megacore.tools.diagnosis.watchdog import prepare_flight_recorder


def communicator(rows: Rows) -> None:
    """A group of one rank, through the class that all of megacore's communication goes through:
    every operation, in every dtype.
    """
    backend, device = ("gloo", "cpu") if rows.dry else ("nccl", "cuda")
    prepare_flight_recorder()
    if not rows.dry:
        torch.cuda.set_device(0)
    store, timeout = dist.TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False), timedelta(seconds=30)
    dist.init_process_group(
        backend, store=store, rank=0, world_size=1, timeout=timeout, pg_options=prioritised(backend)
    )
    # As the mesh makes its groups.
    made = {"backend": backend, "pg_options": prioritised(backend), "timeout": timeout}
    group = dist.new_group([0], use_local_synchronization=True, group_desc="alone", **made)
    assert isinstance(group, dist.ProcessGroup)
    wire, shape = Communicator(group, 1), (1, 4096)
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.int64):
        x = torch.arange(shape[1], device=device).remainder(61).to(dtype).view(shape)
        for name, operation in operations(wire, dtype, device).items():
            rows.attempt(lambda o=operation, x=x: timed(o, x), operation=name, dtype=str(dtype))  # type: ignore[misc]
    if backend == "gloo":
        rows.add(
            operation="shift to itself, flight recorder, priority", skipped_because="gloo has none of them"
        )
    else:
        rows.attempt(lambda: timed(lambda x: shifted(wire, x), x), operation="shift to itself")
        rows.attempt(lambda: priority(group), operation="priority")
        rows.attempt(lambda: recorded(rows), operation="flight recorder")
    dist.destroy_process_group()


def operations(wire: Communicator, dtype: torch.dtype, device: str) -> dict[str, Callable[[Tensor], Tensor]]:
    """Each gives its input back: nobody else is in the group."""

    def reduced(x: Tensor, op: Any) -> Tensor:
        out = x.clone()
        wire.all_reduce(out, op)
        return out

    def started(x: Tensor) -> Tensor:
        out = x.clone()
        wire.start_all_reduce(out).wait()
        return out

    def into(start: Callable[..., Any], out: Tensor) -> Callable[[Tensor], Tensor]:
        def run(x: Tensor) -> Tensor:
            start(x, out).wait()
            return out

        return run

    def in_place(x: Tensor) -> Tensor:
        out = x.clone()
        wire.start_all_gather(out, out).wait()
        return out

    def sent(x: Tensor) -> Tensor:
        out = x.clone()
        wire.broadcast(out, 0)
        wire.barrier([0] if device == "cuda" else None)
        return out

    empty = torch.empty(1, 4096, dtype=dtype, device=device)
    found = {
        "all_reduce, sum": lambda x: reduced(x, dist.ReduceOp.SUM),
        "all_reduce, max": lambda x: reduced(x, dist.ReduceOp.MAX),
        "start_all_reduce": started,
        "start_all_gather": into(wire.start_all_gather, empty.clone()),
        "start_all_gather, in place": in_place,
        "start_reduce_scatter": into(wire.start_reduce_scatter, empty.clone()),
        "start_all_to_all": into(wire.start_all_to_all, empty.clone()),
        "broadcast, barrier": sent,
    }
    if dtype == torch.bfloat16:
        found["start_reduce_scatter, summed in fp32"] = into(wire.start_reduce_scatter, empty[0].float())
    return found


def shifted(wire: Communicator, x: Tensor) -> Tensor:
    """A ring of one: what is sent comes back."""
    out = torch.full_like(x, -1)
    wire.start_shift(x, out, 0, 0).wait()
    return out


def timed(operation: Callable[[Tensor], Tensor], x: Tensor) -> dict[str, Any]:
    """Whether the result is the input, and the microseconds of the host for the second call."""
    found = operation(x)
    right = torch.equal(found.view(x.shape).double(), x.double())
    began = time.perf_counter()
    operation(x)
    return {"host_us": 1e6 * (time.perf_counter() - began)} | (
        {} if right else {"failed": "it does not give its input back"}
    )


def priority(group: dist.ProcessGroup) -> dict[str, Any]:
    """Whether the group's stream comes before those that compute."""
    high = group._get_backend(torch.device("cuda")).options.is_high_priority_stream  # type: ignore[attr-defined]
    return {"high": high} | ({} if high else {"failed": "its options are lost"})


def recorded(rows: Rows) -> dict[str, Any]:
    """What the flight recorder kept of all this."""
    from torch._C import _distributed_c10d

    torch.cuda.synchronize()
    dump = _distributed_c10d._dump_nccl_trace_json(includeCollectives=True, onlyActive=False)  # type: ignore[attr-defined]
    entries = json.loads(dump).get("entries", [])
    names = Counter(entry.get("profiling_name", "?") for entry in entries)
    found = {
        "entries": len(entries),
        "names": ", ".join(f"{name} {count}" for name, count in names.most_common()),
    }
    return found | ({} if len(entries) > 20 else {"failed": "it kept hardly anything"})
