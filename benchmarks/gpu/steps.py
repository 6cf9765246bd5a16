"""Steps that wait for nothing, and streams that are late."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.gpu.right import MILLISECOND, config_of
from benchmarks.gpu.running import Rows
from benchmarks.training import RandomStream, Training, join
from megacore.checkpoint.saver import Staging
from megacore.config import Config
from megacore.distributed.rank_info import RankInfo
from megacore.model.offload import ActivationOffload
from megacore.tools.machine.determinism import compute_deterministically
from megacore.train.metrics import PendingResults

# --- no step waits ------------------------------------------------------------------------------------------

KINDS: dict[str, list[str]] = {
    "plain": [],
    "gpt2": [
        "model.norm=layernorm",
        "model.activation=gelu",
        "model.position=learned",
        "model.bias=true",
        "model.dropout=0.1",
    ],
    "llama": [
        "model.position=rope",
        "model.norm=rmsnorm",
        "model.activation=swiglu",
        "model.num_kv_heads=2",
        "model.bias=false",
    ],
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


def synchronisation(rows: Rows, *only: str) -> None:
    """A step of every kind, or `only` of some, after two in which kernels are compiled: it must give the
    device all its work without waiting for it.
    """
    for name, overrides in KINDS.items():
        if only and name not in only:
            continue
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


# --- streams that are late ----------------------------------------------------------------------------------


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

    with (
        mock.patch.object(ActivationOffload, "_store", late_store),
        mock.patch.object(ActivationOffload, "_load", late_load),
    ):
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
    results, found = PendingResults(job.mesh.device, job.mesh.listeners), []
    with ExitStack() as stack:
        if offload_late:
            stack.enter_context(late_offload())
        if compute_late:
            stack.enter_context(late_compute(job))
        for _ in range(3):
            job.work()
            assert job.figures is not None
            results.post(job.figures)
            found += results.take()
        found += results.take(all_of_them=True)
    assert job.loader is not None
    job.loader.close()
    read = torch.tensor([[result.loss, result.grad_norm] for result in found], dtype=torch.float64)
    return [read, *(piece.detach().cpu().clone() for piece, _ in job.engine.tensors().values())]


def same(got: list[Tensor], right: list[Tensor]) -> dict[str, Any]:
    """Whether all bits are equal."""
    different = sum(not torch.equal(a, b) for a, b in zip(got, right, strict=True))
    return {"tensors": len(right)} | (
        {"failed": f"{different} of {len(right)} tensors differ"} if different else {}
    )


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
    kept, offloads = (
        config_of(rows, "model.dropout=0.1", f"train.offload_activations={key}") for key in ("false", "true")
    )
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
