"""The fused kernels on a GPU: their tests, their bandwidth as a part of a copy's, each within a step,
and compute-sanitizer over each.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from importlib import import_module
from statistics import median
from types import ModuleType
from typing import Any
from unittest import mock

import torch

from benchmarks.gpu import right
from benchmarks.gpu.parts import GPT_OPERATIONS
from benchmarks.gpu.running import Rows, describe_error
from benchmarks.gpu.speed import clear
from benchmarks.kernel_bandwidth import TOLERANCE, error, measure
from benchmarks.kernel_inputs import Size
from benchmarks.kernel_operations import CONFIGS, OPERATIONS, model_sizes
from benchmarks.kernels import sizes
from benchmarks.rounds import ROOT
from benchmarks.training import Training, join
from megacore.config import Config
from megacore.distributed.rank_info import RankInfo
from megacore.tools.settings.load import load

TESTS = (
    *(
        "adamw",
        "cross_entropy",
        "dropout",
        "embedding_grad",
        "gelu",
        "grad_norm",
        "grouped_product",
        "layernorm",
        "linear_cross_entropy",
        "permute",
    ),
    *("rope", "softmax", "split_heads", "swiglu"),
)
ROUNDS = 11
# One of each kind: with a backward, without, and one that memory does not limit.
# `benchmarks.kernels --dry-run` has them all.
DRY = ("rms_norm", "cross_entropy with gradient", "linear_cross_entropy")


def tests(rows: Rows) -> None:
    """The kernels' files of tests/gpu."""
    right.tests(rows, *(f"test_{name}.py" for name in TESTS))


# --- bandwidth ----------------------------------------------------------------------------------------------


def bandwidth(rows: Rows, *models: str) -> None:
    """Every operation against fp64, then timed next to a copy of as many bytes and
    eager PyTorch, until time runs out. With `models`, only the operations of GPT-2, at these models' sizes.

    Inductor takes part in the step, where it can join a kernel with what stands beside it.
    """
    device, dtype = torch.device("cpu" if rows.dry else "cuda"), torch.bfloat16
    if rows.dry:
        todo = [(name, Size(16, 32, head=8)) for name in (GPT_OPERATIONS if models else DRY)]
    elif models:
        todo = [(name, size) for name, size in model_sizes(models) if name in GPT_OPERATIONS]
    else:
        todo = sizes(list(OPERATIONS), dtype)
    for number, (name, size) in enumerate(todo):
        if not rows.dry and rows.left() < 15:
            rows.add(
                operation="and no time was left for",
                size=", ".join(f"{name} {size}" for name, size in todo[number:]),
            )
            return
        rows.attempt(lambda n=name, s=size: wrong(n, s, dtype, device), operation=name, size=str(size))  # type: ignore[misc]
        try:
            for found in measure(name, size, dtype, device, 1 if rows.dry else ROUNDS, False):
                shares = {
                    contender: found.share(contender) for contender in found.seconds if contender != "copy"
                }
                milliseconds = {
                    f"{contender}_ms": 1e3 * seconds for contender, seconds in found.seconds.items()
                }
                speed = (
                    {}
                    if found.moved is None
                    else {"GB_a_second": found.moved / found.seconds["triton"] / 1e9}
                )
                goal = {"goal": found.goal, "direction": found.direction}
                rows.add(
                    operation=name,
                    size=str(size),
                    **goal,
                    **speed,
                    **{k: v for k, v in shares.items() if v},
                    **milliseconds,
                )
        except Exception as problem:
            rows.add(operation=name, size=str(size), failed=describe_error(problem))


def wrong(name: str, size: Size, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """How far the kernel is from fp64 on a few rows."""
    largest = error(name, replace(size, rows=min(size.rows, 64)), dtype, device)
    return {"error": largest} | ({} if largest <= TOLERANCE[dtype] else {"failed": f"off by {largest:.1e}"})


# --- in the step --------------------------------------------------------------------------------------------

# Models with few enough layers, by name: the config, its overrides, and the kernels that are replaced in
# them.
BOTH = ("layernorm", "cross_entropy", "adamw", "grad_norm")
SIXTEEN = ("train.micro_batch_size=16", "train.global_batch_size=32")
FEW = (
    "engine.kind=native",
    "model.num_layers=2",
    "train.seq_len=4096",
    "train.micro_batch_size=2",
    "train.global_batch_size=4",
)
MODELS: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    "gpt_124m": ("gpt_124m", SIXTEEN, ("gelu", *BOTH)),
    "llama_8b, 2 layers": ("llama_8b", FEW, ("swiglu", "rope", "layernorm")),
    "gpt_124m, dropout": ("gpt_124m", (*SIXTEEN, "model.dropout=0.1"), ("dropout",)),
}
TINY = (
    "model.num_layers=2",
    "model.hidden_size=32",
    "model.num_heads=2",
    "model.num_kv_heads=2",
    "model.ffn_size=64",
    "model.vocab_size=64",
    "train.seq_len=16",
    "train.micro_batch_size=1",
    "train.global_batch_size=2",
    "train.precision=fp32",
    "train.device=cpu",
    "train.compile=false",
)
# The functions of each file of kernels/ that models call, which Inductor is given in their place; the
# optimizer's are classes.
FUNCTIONS = {
    "layernorm": ("layer_norm", "rms_norm"),
    "gelu": ("bias_gelu",),
    "swiglu": ("swiglu",),
    "rope": ("rope", "rope_qkv"),
    "dropout": ("bias_dropout_residual",),
    "cross_entropy": ("cross_entropy",),
    "adamw": (),
    "grad_norm": (),
}


class Calls:
    """Counts how often something is called: a replacement that nobody calls measures nothing."""

    def __init__(self) -> None:
        self.count = 0

    def counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, counted."""

        def call(*args: Any, **options: Any) -> Any:
            self.count += 1
            return function(*args, **options)

        return call


@contextmanager
def eager(name: str) -> Iterator[Calls]:
    """One file's operations run as eager PyTorch, the others as they did."""
    modules, calls = [import_module(f"megacore.kernels.{name}")], Calls()
    if name == "gelu":  # the block asks whether the kernel will add its bias
        modules.append(import_module("megacore.model.block"))
    with ExitStack() as stack:
        for module in modules:
            stack.enter_context(
                mock.patch.object(module, "use_triton", calls.counted(lambda *args, **tensors: False))
            )
        yield calls


@contextmanager
def compiled(name: str) -> Iterator[Calls]:
    """One file's operations are their eager code, compiled by Inductor, wherever a
    module has them by name.
    """
    module, calls = import_module(f"megacore.kernels.{name}"), Calls()
    with ExitStack() as stack:
        for own in (module, *([import_module("megacore.model.block")] if name == "gelu" else [])):
            stack.enter_context(mock.patch.object(own, "use_triton", lambda *args, **tensors: False))
        for function in FUNCTIONS[name]:
            ours = getattr(module, function)
            fused = calls.counted(torch.compile(ours, dynamic=False))
            for place, key in places(ours):
                stack.enter_context(mock.patch.dict(place, {key: fused}))
            for place, key in partials(ours):
                stack.enter_context(mock.patch.dict(place, {key: partial(fused, **place[key].keywords)}))
        yield calls


def places(function: Any) -> list[tuple[dict[str, Any], str]]:
    """The namespaces of megacore's modules that have a function under a name."""
    modules = [
        m for name, m in sys.modules.items() if name.startswith("megacore.") and isinstance(m, ModuleType)
    ]
    spaces = [vars(m) for m in modules] + [
        value for m in modules for value in vars(m).values() if type(value) is dict
    ]
    return [
        (space, key)
        for space in spaces
        for key, value in space.items()
        if value is function and isinstance(key, str)
    ]


def partials(function: Any) -> list[tuple[dict[str, Any], str]]:
    """The tables of megacore's modules that have it with some arguments."""
    tables = [
        value
        for name, m in sys.modules.items()
        if name.startswith("megacore.")
        for value in vars(m).values()
        if type(value) is dict
    ]
    return [
        (t, key)
        for t in tables
        for key, value in t.items()
        if isinstance(value, partial) and value.func is function
    ]


def in_the_step(rows: Rows) -> None:
    """A step with every kernel, then with each one in turn replaced by eager code or by
    Inductor's: what it gains where it works.
    """
    for model, (file, overrides, replaced) in MODELS.items():

        def config_with(
            *more: str, path: str = str(CONFIGS / f"{file}.json"), own: tuple[str, ...] = overrides
        ) -> Config:
            return load(path, [*own, *(TINY if rows.dry else ()), *more], 1).config

        config = config_with()
        everything = step_ms(config, rows.dry)
        rows.add(model=model, kernel="all", by="triton", ms=everything, a_step=1.0)

        def beside(ms: float, everything: float = everything) -> dict[str, Any]:
            return {"ms": ms, "a_step": ms / everything}

        def tried(how: Callable[[str], Any], name: str, config: Config = config) -> dict[str, Any]:
            with how(name) as calls:
                found = beside(step_ms(config, rows.dry))
            return found | ({} if calls.count else {"failed": "nothing calls what was put in its place"})

        for by, key in {"eager": "model.kernels=eager", "inductor, blocks": "train.compile=true"}.items():
            if by == "eager" or not config.model.dropout:  # compiled blocks have none
                rows.attempt(
                    lambda k=key, c=config_with: beside(step_ms(c(k), rows.dry)),  # type: ignore[misc]
                    model=model,
                    kernel="all",
                    by=by,
                )
        for name in replaced:
            for by, how in {"eager": eager, "inductor": compiled}.items():
                if by == "inductor" and not FUNCTIONS[name]:
                    continue
                if not rows.dry and rows.left() < 20:
                    rows.add(model=model, kernel=name, by=by, skipped_because="no time was left")
                    continue
                rows.attempt(lambda h=how, n=name: tried(h, n), model=model, kernel=name, by=by)  # type: ignore[misc]


def step_ms(config: Config, dry: bool) -> float:
    """Median milliseconds of a step."""
    clear(dry)
    job = Training(config, join(config, RankInfo()))
    for _ in range(0 if dry else 3):
        job.step()
    return 1e3 * median(job.step() for _ in range(1 if dry else 6))


# --- compute-sanitizer --------------------------------------------------------------------------------------

TOOLS = ("memcheck", "racecheck")
SMALL = {"rows": 48, "head": 64}
LAUNCH = """
import sys, torch
from benchmarks.gpu.kernels import launch
launch(sys.argv[1])
"""


def launch(device: str) -> None:
    """Every operation once, forward and backward, at a small size and at one that no block
    divides; prints which is running.
    """
    from benchmarks.kernel_bandwidth import results

    for name, operation in OPERATIONS.items():
        for width in (256, 1024):
            print(f"operation {name}, rows of {width}", flush=True)
            if device == "cuda":
                results(
                    operation,
                    operation.inputs(Size(width=width, **SMALL), torch.bfloat16, torch.device(device)),
                    "triton",
                    False,
                )
                torch.cuda.synchronize()
    print("operation end", flush=True)


def sanitizer(rows: Rows) -> None:
    """Bad accesses and races, by NVIDIA's tool.

    Each tensor has memory of its own, so that what is beside it is out of bounds.
    """
    found = shutil.which("compute-sanitizer") or next(
        filter(os.path.exists, ["/usr/local/cuda/bin/compute-sanitizer"]), None
    )
    if found is None and not rows.dry:
        rows.add(
            tool="compute-sanitizer",
            skipped_because="it is not installed here (it comes with CUDA's toolkit)",
        )
        return
    environment = os.environ | {
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
        "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}",
    }
    environment.pop("PYTORCH_ALLOC_CONF", None)
    for tool in TOOLS[:1] if rows.dry else TOOLS:
        limit = max(5.0, (rows.left() - 5) / (len(TOOLS) - TOOLS.index(tool)))
        command = (
            []
            if rows.dry
            else [str(found), "--tool", tool, "--print-limit", "20", "--report-api-errors", "no"]
        )
        log = rows.path.with_suffix(f".{tool}")
        with log.open("w") as out:
            try:
                line = [*command, sys.executable, "-c", LAUNCH, "cpu" if rows.dry else "cuda"]
                status = subprocess.run(
                    line, cwd=ROOT, env=environment, stdout=out, stderr=out, timeout=limit, check=False
                ).returncode
            except subprocess.TimeoutExpired:
                status = 124
        for row in said_by(log.read_text(errors="replace"), status):
            rows.add(tool=tool, **row)


def said_by(text: str, status: int) -> list[dict[str, Any]]:
    """A row for each operation that a tool complains about, and one for the whole."""
    complaints: dict[str, list[str]] = {}
    seen, operation = [], "before the first"
    for line in text.splitlines():
        if line.startswith("operation "):
            operation = line.removeprefix("operation ")
            seen.append(operation)
        elif (
            re.match(r"=+ +(Invalid|Error|Warning|Race|Out-of|Misaligned|Program hit|Potential)", line)
            and "SUMMARY" not in line
        ):
            complaints.setdefault(operation, []).append(line.strip("= "))
    rows: list[dict[str, Any]] = [
        {"operation": name, "failed": lines[0], "lines": len(lines)} for name, lines in complaints.items()
    ]
    if "end" in seen:
        return [*rows, {"operation": f"{len(seen) - 1} operations and widths", "complaints": len(complaints)}]
    last = text.strip().splitlines()[-1] if text.strip() else "it said nothing"
    why = "out of time" if status == 124 else f"status {status}: {last}"
    return [*rows, {"operation": seen[-1] if seen else "start", "failed": f"not all operations ran, {why}"}]
