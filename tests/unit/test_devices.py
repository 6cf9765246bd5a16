"""Which GPU a rank's threads compute on, and how its groups use it: told here by what
PyTorch is asked for, without a GPU.
"""

import gc
import os
import threading
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megacore.checkpoint.saver import Staging
from megacore.config import Config
from megacore.distributed import communicator as wire_module
from megacore.distributed import mesh as mesh_module
from megacore.distributed.collectives import all_reduce
from megacore.distributed.communicator import SOLO, Communicator
from megacore.distributed.events import Listeners
from megacore.distributed.mesh import Mesh
from megacore.distributed.rank_info import RankInfo
from megacore.distributed.rendezvous import claim
from megacore.errors import ConfigError
from megacore.tools.garbage import EVERY, Garbage
from megacore.tools.machine import device as device_module
from megacore.tools.machine.device import pick_device
from megacore.train import loader as loader_module
from megacore.train.loader import Loader
from tests import training
from tests.build import run_of


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> dict[str, torch.device]:
    """The device that each thread has been given, by the thread's name."""
    found: dict[str, torch.device] = {}
    monkeypatch.setattr(
        torch.cuda, "set_device", lambda device: found.update({threading.current_thread().name: device})
    )
    return found


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch, threads: dict[str, torch.device]) -> Any:
    """Sets how many GPUs this process sees, and which the first of them is."""

    def see(count: int, uuid: str = "GPU-1") -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=uuid))

    return see


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return run_of(training.write_config(tmp_path, "nothing"), "train.device=auto")


@pytest.mark.parametrize("local_rank, visible, index", [(0, 8, 0), (5, 8, 5), (0, 1, 0), (5, 1, 0)])
def test_a_rank_takes_its_gpu(
    gpus: Any, threads: dict[str, torch.device], config: Config, local_rank: int, visible: int, index: int
) -> None:
    """Slurm with --gpus-per-task=1 shows each rank its own GPU alone: it is the
    first, whatever the local rank.
    """
    gpus(visible)
    device = pick_device(config, RankInfo(local_rank, 8, local_rank, 8))
    assert device == torch.device("cuda", index) and threads["MainThread"] == device


@pytest.mark.parametrize(
    "overrides, world, named, found",
    [
        ([], 1, {}, ("32", "expandable_segments:True", None)),
        (["parallel.pipeline=2"], 2, {}, ("32", "expandable_segments:True", "4")),
        (["parallel.pipeline=2", "parallel.context=2"], 4, {}, ("32", "expandable_segments:True", None)),
        (
            ["parallel.pipeline=2"],
            2,
            {
                "CUDA_DEVICE_MAX_CONNECTIONS": "1",
                "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64",
                "NCCL_MAX_P2P_NCHANNELS": "16",
            },
            ("1", None, "16"),
        ),
        (["train.device=cpu"], 1, {}, (None, None, None)),
    ],
)
def test_libraries_are_told_before_they_start(
    gpus: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    overrides: list[str],
    world: int,
    named: dict[str, str],
    found: tuple[Any],
) -> None:
    """CUDA reads its variables when it is asked for its devices, and once: set later they would do nothing.

    What the user says stays.
    """
    names = ("CUDA_DEVICE_MAX_CONNECTIONS", "PYTORCH_ALLOC_CONF", "NCCL_MAX_P2P_NCHANNELS")
    for name in (*names, "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.setenv(name, "")  # for its value to be put back
        monkeypatch.delenv(name)
    for name, value in named.items():
        monkeypatch.setenv(name, value)
    asked: list[tuple[Any, ...]] = []
    gpus(1)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(
        torch.cuda, "is_available", lambda: asked.append(tuple(map(os.environ.get, names))) or True
    )
    config = run_of(training.write_config(tmp_path, "nothing"), "train.device=auto", *overrides, world=world)
    pick_device(config, RankInfo(0, world, 0, world))
    assert tuple(map(os.environ.get, names)) == found
    assert all(told == found for told in asked)


def test_a_rank_without_a_gpu_is_refused(gpus: Any, config: Config) -> None:
    gpus(4)
    with pytest.raises(ConfigError, match="local rank 5 has no GPU of its own: this machine has 4"):
        pick_device(config, RankInfo(5, 8, 5, 8))


def test_two_ranks_on_one_gpu_are_refused(gpus: Any) -> None:
    """Where each sees one alone, it may be the same: NCCL would fail with a code that nobody
    understands, or the two share its memory.
    """
    store, device = dist.HashStore(), torch.device("cuda", 0)
    for rank in range(2):
        gpus(1, f"GPU-{rank}")
        claim(device, RankInfo(rank, 3, rank, 3), store)
    gpus(1, "GPU-1")
    with pytest.raises(
        ConfigError, match="rank 2 has no GPU of its own: rank 1 computes on the one that it sees"
    ):
        claim(device, RankInfo(2, 3, 2, 3), store)
    gpus(3)
    claim(device, RankInfo(2, 3, 2, 3), store)  # the machine's GPUs are counted by the local ranks


def test_the_thread_that_reads_ahead_uses_the_ranks_gpu(
    monkeypatch: pytest.MonkeyPatch, threads: dict[str, torch.device], config: Config
) -> None:
    """A thread begins with the first GPU that it sees: pinning a batch there would take
    500 MiB of another rank's memory.
    """
    device = torch.device("cuda", 3)
    monkeypatch.setattr(loader_module, "microbatch_on", lambda *batch: batch)
    whole = config.train.seq_len + 1
    stream = SimpleNamespace(
        samples=lambda indices: np.zeros((len(indices), whole), dtype=np.int64), learned=lambda indices: None
    )
    loader = Loader(config, SimpleNamespace(sample_group=SOLO, device=device, listeners=Listeners()), stream)  # type: ignore[arg-type]
    loader.read(1)
    loader.read(2)
    loader.close()
    assert threads == {"loader_0": device}


def test_the_thread_that_waits_for_copies_uses_the_ranks_gpu(threads: dict[str, torch.device]) -> None:
    staging = Staging(torch.device("cpu"))
    staging.device, staging.copied = torch.device("cuda", 3), SimpleNamespace(synchronize=lambda: None)  # type: ignore[assignment]
    saver = threading.Thread(target=staging.wait, name="checkpoint")
    saver.start()
    saver.join()
    assert threads == {"checkpoint": torch.device("cuda", 3)}


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[int, ...], dict[str, Any]]:
    """The communicators that a mesh makes, by their ranks, with the options that
    it asks for; the world's is ().
    """
    found: dict[tuple[int, ...], dict[str, Any]] = {}

    def new_group(ranks: tuple[int, ...], **options: Any) -> Any:
        found[ranks] = options
        return SimpleNamespace()

    nccl = SimpleNamespace(
        Options=lambda is_high_priority_stream: SimpleNamespace(high=is_high_priority_stream)
    )
    monkeypatch.setattr(dist, "ProcessGroupNCCL", nccl, raising=False)
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **options: found.update({(): options}))
    monkeypatch.setattr(dist, "new_group", new_group)
    monkeypatch.setattr(dist, "get_backend", lambda group: "nccl")
    monkeypatch.setattr(Mesh, "_connect", lambda self: None)
    monkeypatch.setattr(Mesh, "_connect_stages", lambda self, config: None)  # which sends over them
    monkeypatch.setattr(mesh_module, "join", lambda *rest, **options: None)
    return found


def eight_rank_mesh(tmp_path: Path, device: str, *overrides: str) -> Mesh:
    config = run_of(training.write_config(tmp_path, "nothing"), *overrides, world=8)
    return Mesh(config, RankInfo(0, 8, 0, 8), torch.device(device), store=dist.HashStore())


def test_what_nccl_sends_goes_before_what_is_computed(
    tmp_path: Path, made: dict[tuple[int, ...], dict[str, Any]]
) -> None:
    """Else a sum that is to be hidden behind a large product begins when the
    product ends, or not, as it happens.
    """
    eight_rank_mesh(tmp_path, "cuda:0", "parallel.tensor=2", "parallel.pipeline=2")
    assert made.keys() == {(), (0, 1), (0, 2), (0, 4)}
    assert all(options["pg_options"].high for options in made.values())
    assert all(options["timeout"] == timedelta(seconds=600) for options in made.values())
    made.clear()
    eight_rank_mesh(tmp_path, "cpu", "parallel.tensor=2", "parallel.pipeline=2")
    assert all(options["pg_options"] is None for options in made.values()), "gloo has no streams"


@pytest.mark.parametrize(
    ("sent", "summed"), [("float32", "float32"), ("bfloat16", "bfloat16"), ("bfloat16", "float32")]
)
def test_nccl_sums_no_parts_in_fewer_bits_than_their_sum_has(
    sent: str, summed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own operation adds up in the dtype that travels: of 256 + 1 in bf16 the 1 would be lost.
    gloo has no such operation to try.
    """
    monkeypatch.setattr(dist, "get_backend", lambda group: "nccl")
    group: Any = SimpleNamespace()
    asked = []

    def exchange(parts: torch.Tensor, x: torch.Tensor, **rest: Any) -> Any:
        parts.copy_(x)
        return SimpleNamespace(wait=lambda: None)

    monkeypatch.setattr(
        wire_module, "reduce_scatter_single", lambda out, x, **rest: asked.append((x.dtype, out.dtype))
    )
    monkeypatch.setattr(dist, "all_to_all_single", exchange)
    x, out = (
        torch.tensor([256.0, 1.0], dtype=getattr(torch, sent)),
        torch.zeros(1, dtype=getattr(torch, summed)),
    )
    work = Communicator(group, 2).start_reduce_scatter(x, out)
    if sent == summed:
        assert asked == [(x.dtype, out.dtype)]
    else:
        work.wait()
        assert not asked and out.item() == 257.0


def test_no_communicator_is_made_for_those_who_only_need_to_know_each_other(
    tmp_path: Path, made: dict[tuple[int, ...], dict[str, Any]]
) -> None:
    """Under fsdp with copies, gradients are summed over parts and then over copies,
    never over all data ranks at once.
    """
    mesh = eight_rank_mesh(tmp_path, "cpu", "parallel.tensor=2", "engine.kind=fsdp", "engine.shard_size=2")
    assert made.keys() == {(), (0, 1), (0, 2), (0, 4)}, "the world, tp, shard and replicate"
    group = mesh.gradient_group
    assert (group.ranks, group.rank) == ((0, 2, 4, 6), 0) and mesh.group("dp") is group
    with pytest.raises(AssertionError, match="over dp, which `Mesh._used` does not list"):
        all_reduce(torch.zeros(1), group)
    with pytest.raises(AssertionError, match="over dp"):
        print(group.process_group)


def test_garbage_is_collected_behind_the_same_steps_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The collector would start on each rank at another moment, and all others wait."""
    collected, was_on, garbage = list[int](), gc.isenabled(), Garbage()
    frozen: list[int] = []
    monkeypatch.setattr(gc, "collect", lambda: collected.append(garbage.steps))
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(garbage.steps))
    monkeypatch.setattr(gc, "unfreeze", frozen.clear)
    try:
        for step in range(2 * EVERY + 10):
            garbage.on_step_begin(step + 1, False)
            assert not gc.isenabled() and frozen
        assert frozen == [0, 1], "what a collection behind a hundred steps finds may go"
    finally:
        garbage.on_end()
    assert collected == [0, 1, EVERY, 2 * EVERY]
    assert gc.isenabled() == was_on and not frozen


@pytest.mark.parametrize("installed, major, taken", [(True, 9, True), (True, 10, False), (False, 9, False)])
def test_flash_attention_3_is_taken_where_it_is_installed_on_a_hopper(
    installed: bool, major: int, taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Elsewhere its kernels stop the first step; not taken, a Hopper runs attention at half its speed."""
    activated: list[str] = []
    monkeypatch.setattr(
        device_module,
        "find_spec",
        lambda name: object() if installed and name == "flash_attn_interface" else None,
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, 0))
    monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", activated.append)
    assert device_module.take_flash_attention_3(torch.device("cuda")) is taken
    assert activated == ["FA3"] * taken
