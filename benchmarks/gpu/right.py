"""Whether it computes what it should on a GPU: tests, a communicator of NCCL, steps that wait for nothing, and streams that are late."""

import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from importlib.util import find_spec
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import machine
from benchmarks.gpu.running import Rows
from benchmarks.rounds import ROOT
from benchmarks.training import RandomStream, Training, join
from megacore.checkpoint.staging import Staging
from megacore.config import Config, load
from megacore.distributed.communicator import Communicator
from megacore.distributed.determinism import compute_deterministically
from megacore.distributed.gpu import environment
from megacore.distributed.mesh import prioritised
from megacore.distributed.rank_info import RankInfo
from megacore.model.offload import ActivationOffload
from megacore.tools.diagnosis.watchdog import prepare_flight_recorder
from megacore.train.async_metrics import AsyncMetrics

TINY = str(ROOT / "configs/gpt_tiny.json")
SMALL = ("train.global_batch_size=4", "train.micro_batch_size=1", "train.seq_len=64", "model.vocab_size=515")
PROCESSES = 6  # of tests: they compile more than they compute
QUEUES, MILLISECOND = 24, 2_000_000  # streams that are to run side by side; about so many cycles of a GPU's clock


def config_of(rows: Rows, *overrides: str) -> Config:
    """configs/gpt_tiny.json with little data on the device."""
    own = ("train.device=cpu", "model.num_layers=2") if rows.dry else ("train.device=cuda", "train.precision=bf16")
    return load(TINY, [*SMALL, *own, *overrides], 1).config


# --- tests -------------------------------------------------------------------------------------------------------------


class Outcomes:
    """A plugin of pytest: a row for each test that fails, and one for each file."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows
        self.files: dict[str, Counter[str]] = {}
        self.why: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Called for the set-up, the call and the end of every test."""
        file = self.files.setdefault(report.nodeid.split("::")[0], Counter())
        file["seconds"] += report.duration
        if report.failed:
            file["failing"] += 1
            text = report.longreprtext.strip()
            self.rows.add(test=report.nodeid, failed=text.splitlines()[-1] if text else report.when, report=text[-1500:])
        elif report.skipped:
            file["skipped"] += 1
            self.why[report.nodeid.split("::")[0]] = str(report.longrepr[-1] if isinstance(report.longrepr, tuple) else report.longrepr)
        elif report.when == "call":
            file["passed"] += 1

    def pytest_collectreport(self, report: Any) -> None:
        """Called for every file."""
        if report.failed:
            self.rows.add(test=report.nodeid, failed=report.longreprtext.strip().splitlines()[-1], report=report.longreprtext[-1500:])

    def pytest_sessionfinish(self) -> None:
        """Called at the end."""
        for name, found in self.files.items():
            counts = {key: int(found[key]) for key in ("passed", "failing", "skipped")}
            self.rows.add(test=name, **counts, seconds=float(found["seconds"]), skipped_because=self.why.get(name))


def tests(rows: Rows, *files: str) -> None:
    """Some files of tests/gpu, several at a time where pytest-xdist is installed. Those that need a GPU skip themselves in a dry run."""
    several = ["-n", str(PROCESSES)] if find_spec("xdist") and not rows.dry else ["-p", "no:xdist"]
    arguments = ["-q", "-p", "no:cacheprovider", *several, *(str(ROOT / "tests/gpu" / file) for file in files)]
    status = pytest.main(arguments, plugins=[Outcomes(rows)])
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        rows.add(test="pytest", failed=f"{status!r}")


# --- the environment ---------------------------------------------------------------------------------------------------


def queues(rows: Rows) -> dict[str, Any]:
    """Kernels that hold a little for a while, each on a stream of its own: with too few queues some stand behind others."""
    cycles, streams = 50 * MILLISECOND, [torch.cuda.Stream() for _ in range(QUEUES)]

    def seconds(used: int) -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        for stream in streams[:used]:
            with torch.cuda.stream(stream):
                torch.cuda._sleep(cycles)
        torch.cuda.synchronize()
        return time.perf_counter() - began

    machine.measured_peak(torch.bfloat16, torch.device("cuda"), 0.5)  # the clock goes up
    one, all_of_them = seconds(1), seconds(QUEUES)
    found = {"one_ms": 1e3 * one, "together_ms": 1e3 * all_of_them, "streams": QUEUES}
    return found | ({"failed": f"{QUEUES} streams take turns"} if all_of_them > 1.8 * one else {})


def expandable() -> dict[str, Any]:
    """Whether the allocator's segments can grow."""
    kept = torch.empty(2**26, dtype=torch.uint8, device="cuda")
    segments = [segment for segment in torch.cuda.memory_snapshot() if segment["total_size"] >= kept.nbytes]
    grows = [bool(segment.get("is_expandable")) for segment in segments]
    return {"segments": len(grows), "expandable": sum(grows)} | ({} if grows and all(grows) else {"failed": "segments do not grow"})


def environment_check(rows: Rows) -> None:
    """What the variables say, and whether CUDA and the allocator took them."""
    for name, value in environment(config_of(rows)).items():
        rows.add(name=name, wanted=value, found=os.environ.get(name))
    if rows.dry:
        return
    rows.attempt(lambda: queues(rows), name="queues")
    rows.attempt(expandable, name="segments")
    properties = torch.cuda.get_device_properties(0)
    rows.add(name="nccl", found=".".join(map(str, torch.cuda.nccl.version())))
    rows.add(name="device", found=f"{properties.name}, {properties.multi_processor_count} multiprocessors, CUDA {torch.version.cuda}")


# --- one communicator --------------------------------------------------------------------------------------------------


def communicator(rows: Rows) -> None:
    """A group of one rank, through the class that all of megacore's communication goes through: every operation, in every dtype."""
    backend, device = ("gloo", "cpu") if rows.dry else ("nccl", "cuda")
    prepare_flight_recorder()
    if not rows.dry:
        torch.cuda.set_device(0)
    store, timeout = dist.TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False), timedelta(seconds=30)
    dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout, pg_options=prioritised(backend))
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
        rows.add(operation="shift to itself, flight recorder, priority", skipped_because="gloo has none of them")
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
    return {"host_us": 1e6 * (time.perf_counter() - began)} | ({} if right else {"failed": "it does not give its input back"})


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
    found = {"entries": len(entries), "names": ", ".join(f"{name} {count}" for name, count in names.most_common())}
    return found | ({} if len(entries) > 20 else {"failed": "it kept hardly anything"})


# --- no step waits -----------------------------------------------------------------------------------------------------

KINDS: dict[str, list[str]] = {
    "plain": [],
    "gpt2": ["model.norm=layernorm", "model.activation=gelu", "model.position=learned", "model.bias=true", "model.dropout=0.1"],
    "llama": ["model.position=rope", "model.norm=rmsnorm", "model.activation=swiglu", "model.num_kv_heads=2", "model.bias=false"],
    "query-key norm": ["model.position=rope", "model.qk_norm=true"],
    "fp32": ["train.precision=fp32"],
    "fp16": ["train.precision=fp16"],
    "spikes": ["optim.spike_threshold=6"],
    "sgd, untied": ["model.tie_embeddings=false", "optim.kind=sgd", "optim.grad_clip=0"],
    "recompute selective": ["train.recompute=selective", "model.dropout=0.1"],
    "recompute full": ["train.recompute=full", "model.chunked_loss=true"],
    "offloaded activations": ["train.offload_activations=true"],
    "sharded optimizer": ["engine.shard_optimizer=true"],
    "documents": ["data.document_mask=true"],
    "compiled": ["train.compile=true", "model.dropout=0"],
    "eager kernels": ["model.kernels=eager"],
    "eager attention": ["model.attention=eager"],
    "fused attention": ["model.attention=fused"],
}


@contextmanager
def refusing_to_wait(dry: bool) -> Iterator[None]:
    """An operation for which the host would wait raises."""
    if dry:
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def synchronisation(rows: Rows) -> None:
    """A step of every kind, after two in which kernels are compiled: it must give the device all its work without waiting for it."""
    for name, overrides in KINDS.items():
        if rows.dry and name == "fused attention":
            continue  # its kernel, interpreted, is no step's
        rows.attempt(lambda o=overrides: unwaiting(config_of(rows, *o), rows.dry), kind=name)  # type: ignore[misc]


def unwaiting(config: Config, dry: bool) -> dict[str, Any]:
    """Two steps, and one that may not wait."""
    job = Training(config, join(config, RankInfo()), RandomStream(config))
    for _ in range(1 if dry else 2):
        job.step()
    job.meet()
    began = time.perf_counter()
    with refusing_to_wait(dry):
        job.work()
    host = time.perf_counter() - began
    job.wait()
    loss = job.loss()
    assert job.loader is not None
    job.loader.close()
    return {"host_ms": 1e3 * host, "device_ms": 1e3 * (time.perf_counter() - began), "loss": loss}


# --- streams that are late ---------------------------------------------------------------------------------------------


def late(stream: Any, cycles: int = MILLISECOND) -> None:
    """Makes a stream late; nothing on a CPU."""
    if isinstance(stream, torch.cuda.Stream):
        with torch.cuda.stream(stream):
            torch.cuda._sleep(cycles)


@contextmanager
def late_offload() -> Iterator[None]:
    """Every copy out and back begins late."""
    store, load_back = ActivationOffload._store, ActivationOffload._load

    def late_store(self: Any, *args: Any) -> Any:
        late(self.out)
        return store(self, *args)

    def late_load(self: Any, away: Any) -> None:
        if away.back is None:
            late(self.back)
        load_back(self, away)

    with mock.patch.object(ActivationOffload, "_store", late_store), mock.patch.object(ActivationOffload, "_load", late_load):
        yield


@contextmanager
def late_compute(job: Training) -> Iterator[None]:
    """The stream that computes is late at every microbatch."""
    methods = job.train_step.runtime.methods

    def delayed(method: Callable[[Any], None]) -> Callable[[Any], None]:
        def run(action: Any) -> None:
            late(torch.cuda.current_stream() if job.mesh.device.type == "cuda" else None, 5 * MILLISECOND)
            method(action)

        return run

    with mock.patch.dict(methods, {op: delayed(method) for op, method in methods.items()}):
        yield


def trained(config: Config, offload_late: bool, compute_late: bool) -> list[Tensor]:
    """Loss and norm of three steps, read through the mailbox, and the weights after them: all on the host."""
    job = Training(config, join(config, RankInfo()), RandomStream(config))
    async_metrics, found = AsyncMetrics(job.mesh.device), []
    with ExitStack() as stack:
        if offload_late:
            stack.enter_context(late_offload())
        if compute_late:
            stack.enter_context(late_compute(job))
        for number in range(1, 4):
            job.work()
            assert job.figures is not None
            figures = job.figures
            votes = [figures.loss, figures.loss]  # a run's own are counts of ranks
            posted = [figures.loss, *votes, figures.grad_norm.double(), figures.skipped.double(), figures.drifted]
            async_metrics.post(number, torch.stack(posted))
            found += async_metrics.take()
        found += async_metrics.take(all_of_them=True)
    assert job.loader is not None
    job.loader.close()
    read = torch.tensor([[figures.loss, figures.grad_norm] for figures in found], dtype=torch.float64)
    return [read, *(piece.detach().cpu().clone() for piece, _ in job.engine.tensors().values())]


def same(got: list[Tensor], right: list[Tensor]) -> dict[str, Any]:
    """Whether all bits are equal."""
    different = sum(not torch.equal(a, b) for a, b in zip(got, right, strict=True))
    return {"tensors": len(right)} | ({"failed": f"{different} of {len(right)} tensors differ"} if different else {})


def staged(rows: Rows) -> dict[str, Any]:
    """What a save has copied, with its stream late and the update right behind it."""
    device = torch.device("cpu" if rows.dry else "cuda")
    source = torch.randn(2**12 if rows.dry else 2**26, device=device)
    right, staging = source.cpu().clone(), Staging(device)
    copy = staging._copy

    def late_copy() -> None:
        late(staging.stream, 100 * MILLISECOND)
        copy()

    with mock.patch.object(staging, "_copy", late_copy):
        (copied,) = staging.copy([source])
        if device.type == "cpu":
            staging.wait()  # there the host copies
            source.mul_(2)
        else:
            staging.hold_update()
            source.mul_(2)
            staging.wait()
    return same([copied, source.cpu()], [right, 2 * right])


def streams(rows: Rows) -> None:
    """Copies and computing made late in turn. Results may not depend on who is first, to the last bit."""
    compute_deterministically()
    rows.attempt(lambda: staged(rows), what="staging a checkpoint")
    kept, offloads = (config_of(rows, "model.dropout=0.1", f"train.offload_activations={key}") for key in ("false", "true"))
    right = trained(kept, False, False)
    runs = {
        "the same run again": (kept, False, False),
        "metrics and loader, computing late": (kept, False, True),
        "offloaded activations, on time": (offloads, False, False),
        "offloaded activations, copies late": (offloads, True, False),
        "offloaded activations, computing late": (offloads, False, True),
    }
    for name, run in runs.items():
        rows.attempt(lambda r=run: same(trained(*r), right), what=name)  # type: ignore[misc]
