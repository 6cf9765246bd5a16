"""What training must do on any device, as functions of that device: tests/unit runs them on
the CPU, and tests/gpu on a GPU.
"""

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch.distributed as dist
from torch import Tensor

from benchmarks.training import Training, join
from megacore.config import Config
from megacore.distributed.communicator import Communicator, Group
from megacore.distributed.mesh import Mesh
from megacore.distributed.rank_info import RankInfo
from megacore.engine.fsdp import FSDPEngine
from tests import training
from tests.build import run_of
from tests.commands import run_script
from tests.compiling import graphs_counted
from tests.kernel_checks import relative_error
from tests.pool import ROOT

TINY = str(ROOT / "configs/gpt_tiny.json")
SMALL = [
    "train.global_batch_size=2",
    "train.micro_batch_size=1",
    "train.seq_len=32",
    "model.vocab_size=515",
    "model.dropout=0",
]
GPT2 = ["model.norm=layernorm", "model.activation=gelu", "model.position=learned", "model.bias=true"]
# Largest difference of a gradient from fp64, relative to the largest element: what 4 layers make of an
# element's rounding.
FAR = {"fp32": 2e-5, "bf16": 5e-2, "fp64": 1e-11}
ENGINES: dict[str, list[str]] = {
    "native": [],
    "deepspeed": ["engine.kind=deepspeed", f"engine.config={ROOT}/configs/deepspeed/zero2.json"],
}
STEPS = 4


def tiny(device: str, *overrides: str) -> Config:
    """configs/gpt_tiny.json on one device, with little data."""
    return run_of(TINY, *SMALL, f"train.device={device}", *overrides)


def lacking(engine: str) -> str:
    """Why an engine cannot be had here; empty if it can."""
    return (
        "DeepSpeed is not installed"
        if engine == "deepspeed" and importlib.util.find_spec("deepspeed") is None
        else ""
    )


def one_step(config: Config) -> tuple[float, float, dict[str, Tensor]]:
    """The loss, the gradient norm and all gradients of the first step; the same
    weights and tokens on every device.
    """
    mesh = join(config, RankInfo())
    job = Training(config, mesh)
    gradients: dict[str, Tensor] = {}
    job.before_update = lambda: gradients.update(
        {name: piece.double().cpu().clone() for name, (piece, _) in job.engine.gradients().items()}
    )
    job.step()
    assert job.figures is not None
    found = float(job.figures.loss), float(job.figures.grad_norm), gradients
    mesh.close()
    return found


def check_step(device: str, precision: str, *overrides: str) -> None:
    """A step's loss, norm and every gradient against fp64 on the CPU, without compilation."""
    plain = [o for o in overrides if not o.startswith(("train.compile", "model.kernels", "train.recompute"))]
    loss, norm, gradients = one_step(tiny(device, f"train.precision={precision}", *overrides))
    right_loss, right_norm, right = one_step(tiny("cpu", "train.precision=fp64", *plain))
    far = FAR[precision]
    assert abs(loss / right_loss - 1) < far and abs(norm / right_norm - 1) < far, (
        loss,
        right_loss,
        norm,
        right_norm,
    )
    assert gradients.keys() == right.keys() and right
    for name, gradient in right.items():
        assert relative_error(gradients[name], gradient) < far, name


def check_one_graph(device: str, backend: str, *overrides: str) -> None:
    """Compiled blocks give a step that is right, from one graph."""
    with graphs_counted(backend) as found:
        check_step(device, "bf16", "train.compile=true", *overrides)
    assert (found["graphs"], found["breaks"]) == (1, [])


def command(device: str, script: str, *arguments: str) -> str:
    """What a script prints; with a GPU in a new process, since those of `run_script` start
    from one that has chosen the CPU.
    """
    if device == "cpu":
        done = run_script(script, *arguments, timeout=600)
    else:
        line = [sys.executable, str(ROOT / script), *arguments]
        done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def write_config(folder: Path) -> str:
    """A small model, of bytes, and a corpus; returns the config's path."""
    prefix = training.write_corpus(folder)
    optim = {"warmup_steps": 1, "decay_steps": STEPS}
    return training.write_config(
        folder,
        prefix,
        model=training.BASE["model"] | {"num_layers": 2, "vocab_size": 300},
        train=training.BASE["train"] | {"steps": STEPS},
        optim=training.BASE["optim"] | optim,
        data={"train": prefix, "tokenizer": "bytes"},
    )


def pretrain(device: str, config: str, log_dir: Path, *overrides: str) -> training.Figures:
    """What `launch/pretrain.py` has logged on a device: loss and gradient norm of the steps so far."""
    command(
        device,
        "launch/pretrain.py",
        "--config",
        config,
        f"log.dir={log_dir}",
        f"train.device={device}",
        *overrides,
    )
    return training.figures(log_dir)


def check_engine(device: str, config: str, folder: Path, engine: str) -> None:
    """An engine's run on one device is the native engine's, as far as bf16 tells."""
    got, right = (
        pretrain(device, config, folder / name, "train.precision=bf16", *ENGINES[name])
        for name in (engine, "native")
    )
    assert len(got) == STEPS
    assert training.difference(got, right) < 2e-3


@contextmanager
def one_rank_group(backend: str) -> Iterator[dist.ProcessGroup]:
    """A process group of this process alone, which makes real communicators and runs real collectives."""
    store = dist.TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False)
    dist.init_process_group(backend, store=store, rank=0, world_size=1)
    assert dist.group.WORLD is not None
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def steps_of(config: Config, mesh: Mesh) -> tuple[type, training.Figures, dict[str, Tensor]]:
    """The engine's class; loss and gradient norm of some steps; the weights after them."""
    job = Training(config, mesh)
    found = []
    for _ in range(STEPS):
        job.step()
        assert job.figures is not None
        found.append((float(job.figures.loss), float(job.figures.grad_norm)))
    weights = {
        name: piece.double().cpu()
        for name, (piece, _) in job.engine.tensors().items()
        if name.startswith("model/")
    }
    return type(job.engine), found, weights


def check_fsdp(device: str, precision: str = "bf16") -> None:
    """FSDP2 itself, over a group of one rank, against the native engine.

    A run of one rank has nothing to divide, and takes the native engine whatever `engine.kind` says: so the
    group and the engine are put into its place here.
    """
    configs = [
        tiny(device, f"train.precision={precision}", f"engine.kind={kind}") for kind in ("fsdp", "native")
    ]
    mesh = join(configs[0], RankInfo())
    with (
        one_rank_group("nccl" if device == "cuda" else "gloo") as alone,
        mock.patch(
            "megacore.train.step.build_engine",
            lambda config, stages, mesh, engines: FSDPEngine(config, stages, mesh),
        ),
    ):
        mesh.groups[("shard",)] = Group("shard", (0,), 0, Communicator(alone, 1))
        divided, got, weights = steps_of(configs[0], mesh)
    native, right, right_weights = steps_of(configs[1], join(configs[1], RankInfo()))
    assert divided is FSDPEngine and native is not FSDPEngine
    assert training.difference(got, right) < (2e-3 if precision == "bf16" else 1e-5), (got, right)
    assert weights.keys() == right_weights.keys() and weights
    for name, weight in weights.items():
        assert relative_error(weight, right_weights[name]) < FAR[precision], name


def check_resume(device: str, config: str, folder: Path, *overrides: str) -> None:
    """A run that ends half way and goes on leaves the same bits as one that does not."""
    common = ["train.deterministic=true", *overrides]
    whole = pretrain(device, config, folder / "whole", *common)
    pretrain(device, config, folder / "halves", *common, f"train.steps={STEPS // 2}")
    halves = pretrain(device, config, folder / "halves", *common)
    assert len(whole) == STEPS and halves == whole
    whole_files, halves_files = saved(folder / "whole"), saved(folder / "halves")
    assert whole_files and whole_files == halves_files


def saved(log_dir: Path) -> dict[str, bytes]:
    """The tensor files of a run's last checkpoint."""
    files = (log_dir / f"checkpoints/step_{STEPS:08}").glob("*.safetensors")
    return {file.name: file.read_bytes() for file in files}


def check_generate(device: str, config: str, folder: Path) -> None:
    """A trained model's likeliest text is the one that it writes on the CPU."""
    pretrain(device, config, folder / "run")
    wanted = [
        "launch/generate.py",
        "--checkpoint",
        str(folder / "run"),
        "--temperature",
        "0",
        "--tokens",
        "12",
        "--prompt",
        "text",
    ]
    text = command(device, *wanted, "--device", device)
    assert len(text) > len("text") and text == command("cpu", *wanted, "--device", "cpu")
