"""No step waits for its device: a host that does cannot run ahead, and the device
idles until it has caught up.

On meta tensors, which hold nothing: reading one fails. What a GPU also waits for, and they do not refuse, is
refused here.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megacore.distributed.communicator import SOLO
from megacore.distributed.events import Listeners, Waits
from megacore.distributed.mesh import Mesh
from megacore.distributed.rank_info import RankInfo
from megacore.engine.spike_detector import SpikeGuard, median_of_known
from megacore.model.batch import Microbatch
from megacore.tools.choices.run import trainer_of
from megacore.tools.deepspeed.engine import DeepSpeedEngine
from megacore.tools.inputs import Inputs
from megacore.tools.local_ranks import free_port
from megacore.tools.monitoring.prometheus import Exporter
from megacore.train.checkpointing import Origin
from megacore.train.step import StepResult
from megacore.train.trainer import Trainer
from tests import training
from tests.build import mesh_of, run_of, step_of
from tests.unit.test_prometheus import scrape

META = torch.device("meta")
# Whose results' sizes, or whose ways, depend on values: on a GPU the host asks for these and waits.
SYNCHRONISING = {
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "median",
    "nanmedian",
    "equal",
    "is_nonzero",
    "unique_dim",
    "_unique2",
    "unique_consecutive",
    "bincount",
    "histc",
    "repeat_interleave",
    "_linalg_check_errors",
}


class Refusing(TorchDispatchMode):
    """Refuses what a GPU's host waits for."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        found = func(*args, **kwargs)
        tensors = [leaf for leaf in tree_leaves((args, kwargs, found)) if isinstance(leaf, Tensor)]
        if any(tensor.device == META for tensor in tensors):
            assert name not in SYNCHRONISING, f"{func} waits for the device"
            if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
                assert not any(index is not None and index.dtype == torch.bool for index in args[1]), (
                    "an index of booleans is counted"
                )
            if name in ("_to_copy", "copy_") and len({tensor.device for tensor in tensors}) > 1:
                blocking = not kwargs.get("non_blocking") and not (
                    name == "copy_" and len(args) > 2 and args[2]
                )
                assert not blocking, f"{func} from or to the host waits for the copy"
        return found


@contextmanager
def refusing() -> Iterator[None]:
    """Also refuses numbers that are copied to the device: on meta tensors PyTorch leaves that out."""

    def checked(make: Any) -> Any:
        def made(*args: Any, **options: Any) -> Any:
            there = args and isinstance(args[0], Tensor) and args[0].device == META
            assert there or torch.device(options.get("device") or "cpu") != META, (
                f"torch.{make.__name__} copies from the host, which waits"
            )
            return make(*args, **options)

        return made

    with (
        mock.patch("torch.tensor", checked(torch.tensor)),
        mock.patch("torch.as_tensor", checked(torch.as_tensor)),
        Refusing(),
    ):
        yield


CONFIGS = {
    "plain": [],
    "fp16": ["train.precision=fp16"],
    "bf16, spikes": ["train.precision=bf16", "optim.spike_threshold=6"],
    "dropout, recompute": ["model.dropout=0.1", "train.recompute=selective"],
    "recompute all": ["train.recompute=full", "model.chunked_loss=true"],
    "llama": [
        "model.position=rope",
        "model.norm=rmsnorm",
        "model.activation=swiglu",
        "model.num_kv_heads=2",
        "model.qk_norm=true",
    ],
    "experts that drop tokens": ["model.bias=false", "model.num_experts=4", "model.capacity_factor=0.5"],
    "untied, sgd": ["model.tie_embeddings=false", "optim.kind=sgd", "optim.grad_clip=0"],
}


@pytest.mark.parametrize("case", CONFIGS)
def test_no_step_waits_for_its_device(case: str, tmp_path: Path) -> None:
    """Forward, backward, reduction, norm, guard and update of two steps."""
    config = run_of(training.write_config(tmp_path, "nothing"), "model.kernels=eager", *CONFIGS[case])
    step = step_of(config, mesh_of(config, device=META), draw=False)
    tokens = torch.zeros(2, 16, dtype=torch.int64, device=META)
    with refusing():
        for number in (1, 2):
            figures = step(
                number, [Microbatch(tokens, tokens, key) for key in range(4)], lambda: {"stop": True}
            )
    assert figures.loss.device == figures.grad_norm.device == figures.skipped_so_far.device == META


def test_no_report_and_no_scrape_waits_for_a_device(tmp_path: Path) -> None:
    """A loop of the trainer that logs every step.

    What waits for the device is left out by name: the figures of steps long done, and what ranks tell each
    other of a logged one. A loss that is handed on as a tensor would be read whenever somebody scrapes.
    """
    port = free_port()
    overrides = [
        f"log.dir={tmp_path}/run",
        f"log.prometheus_port={port}",
        "train.steps=2",
        "checkpoint.last=false",
    ]
    path = training.write_config(
        tmp_path, training.write_corpus(tmp_path), log={"every": 1, "tensorboard": True}
    )
    config = run_of(path, *overrides)
    exporter = Exporter(port, RankInfo(), META)
    with (
        mock.patch.object(Trainer, "restore", lambda self: Origin()),
        mock.patch.object(Mesh, "hosts", lambda self: [(0, 0)]),
    ):
        mesh = Mesh(config, RankInfo(), META, listeners=Listeners([exporter]))
        trainer = trainer_of(config, mesh, Inputs(config, 0))
    # Ranks agree on these at the first report, once, and wait for that.
    trainer.reporter.part_names = list(exporter.step_parts(0.0, Waits(), 1))
    tokens = torch.zeros(2, 16, dtype=torch.int64, device=META)
    read = mock.patch.object(
        trainer, "next_batch", lambda: [Microbatch(tokens, tokens, key) for key in range(4)]
    )
    gathered = mock.patch.object(trainer.reporter, "gather", lambda numbers: [[number] for number in numbers])
    arrived = mock.patch.object(trainer.pending, "take", lambda **_: [logged_result(trainer.step)])
    asked = mock.patch.object(trainer, "check_stop")  # before the first step, where it may wait
    scraped: list[dict[str, float]] = []
    ended = mock.patch.object(trainer, "finish", lambda: scraped.append(scrape(port)))
    with read, gathered, arrived, asked, ended, refusing():
        trainer.run()
    (found,) = scraped
    assert (
        found["megacore_step"] == 2
        and found["megacore_loss"] == 2.0
        and [line["loss"] for line in training.metrics(tmp_path / "run")] == [2.0, 2.0]
    )


def logged_result(step: int) -> StepResult[float]:
    """The results of a step that the device has done."""
    flags = {"stop": 0.0, "save_failed": 0.0}
    return StepResult(step, lr=0.1, loss=2.0, grad_norm=1.0, skipped_so_far=0.0, flags=flags, losses={})


def test_deepspeed_is_handed_its_gradient_without_waiting() -> None:
    """It is asked for at every microbatch."""
    engine = object.__new__(DeepSpeedEngine)
    engine.mesh, engine.scales_loss = cast(Mesh, SimpleNamespace(device=META, gradient_group=SOLO)), False
    with refusing():
        assert engine.loss_gradient(0.5).dtype == torch.float64


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: x.sum().item(),
        lambda x: x.nanmedian(),
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: x.copy_(torch.ones(4)),
        lambda x: torch.tensor(1.0, device=x.device),
        lambda x: torch.ones(4).to(x.device),
        lambda x: bool(x.any()),
    ],
)
def test_what_waits_is_refused(wait: Any) -> None:
    """A test that sees none of it would pass on anything."""
    x = torch.empty(4, device=META)
    # The dispatch mode asserts; what asks for values of a meta tensor is refused by PyTorch, in one of two
    # ways.
    with pytest.raises((AssertionError, RuntimeError, NotImplementedError)), refusing():
        wait(x)


def test_the_guards_median_is_numpys() -> None:
    """Of odd and even counts, with infinities, with gaps, with nothing known."""
    rng = np.random.default_rng(0)
    for known in range(12):
        values = np.full(12, np.nan)
        values[rng.permutation(12)[:known]] = rng.standard_normal(known)
        if known > 4:
            values[np.nanargmax(values)] = np.inf
        found = float(median_of_known(torch.tensor(values)))
        right = np.sort(values[~np.isnan(values)])[(known - 1) // 2] if known else np.nan
        assert found == right or (np.isnan(found) and np.isnan(right)), known
    guard = SpikeGuard(6.0, torch.device("cpu"))
    assert not guard.is_spike(torch.tensor(1.0, dtype=torch.float64)), "nothing is known"
