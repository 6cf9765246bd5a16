"""What a run should choose on this GPU: attention, products, shards, channels of a receive; and the
planner's prediction beside it.
"""

import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import attention as torch_attention
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

from benchmarks import machine
from benchmarks.gpu import speed
from benchmarks.gpu.running import Rows, describe_error
from benchmarks.kernel_bandwidth import race
from benchmarks.kernel_operations import CONFIGS
from benchmarks.predicted import ALONE
from benchmarks.training import Training, join
from megacore.config import Config
from megacore.config.schema import resolved
from megacore.distributed.rank_info import RankInfo
from megacore.distributed.topology import Topology
from megacore.model.batch import Microbatch
from megacore.model.layers import DTYPES
from megacore.model.stage import Stage
from megacore.tensor_parallel.gradient import MainGradient
from megacore.tools.planner.devices import read_device
from megacore.tools.planner.profile import profile as constants
from megacore.tools.planner.step_time import predict
from megacore.tools.planner.workload import setting_of
from megacore.tools.settings.load import load

ROUNDS = 9
SHARDS = (1, 2, 4, 8)
MODELS = ("gpt_124m", "gpt_350m", "gpt_1b", "gpt_7b", "llama_8b", "gpt_175b")
TINY = (
    "model.num_layers=4",
    "model.hidden_size=64",
    "model.num_heads=8",
    "model.num_kv_heads=8",
    "model.ffn_size=128",
    "model.vocab_size=64",
    "train.seq_len=16",
    "train.micro_batch_size=1",
    "train.precision=fp32",
)
ALONE_HERE = (
    "parallel.pipeline=1",
    "parallel.schedule=1f1b",
    "parallel.sequence=false",
    "engine.kind=native",
    "engine.shard_optimizer=false",
)


def models(rows: Rows) -> list[tuple[str, Config]]:
    """The configs of the models, as one tensor rank of each would see them."""
    names = MODELS[:1] if rows.dry else MODELS
    tiny = TINY if rows.dry else ()
    return [
        (
            n,
            load(
                str(CONFIGS / f"{n}.json"), [*ALONE_HERE, "parallel.tensor=1", "model.dropout=0", *tiny], 1
            ).config,
        )
        for n in names
    ]


def device_of(rows: Rows) -> torch.device:
    """What is measured."""
    return torch.device("cpu") if rows.dry else torch.device("cuda", 0)


def seconds_of(call: Callable[[], Any], rows: Rows) -> float:
    """Median seconds of a call, the cache flushed before each."""
    return race({"call": lambda: call}, 1 if rows.dry else ROUNDS, device_of(rows))["call"]


# --- attention ----------------------------------------------------------------------------------------------


@contextmanager
def implementation(name: str) -> Iterator[None]:
    """PyTorch's FlashAttention is another one's for as long as the block runs;
    raises where it is not installed.
    """
    torch_attention.activate_flash_attention_impl(name)  # type: ignore[arg-type]
    try:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            yield
    finally:
        torch_attention.restore_flash_attention_impl()


def ways() -> dict[str, Callable[[], Any]]:
    """How PyTorch can attend: contexts by name. The first is its own choice, which megacore takes."""
    chosen: dict[str, Callable[[], Any]] = {"PyTorch's choice": nullcontext}
    for name, backend in (
        ("cuDNN", "CUDNN_ATTENTION"),
        ("FA2", "FLASH_ATTENTION"),
        ("memory-efficient", "EFFICIENT_ATTENTION"),
    ):
        chosen[name] = lambda b=backend: sdpa_kernel(getattr(SDPBackend, b))  # type: ignore[misc]
    return chosen | {name: lambda n=name: implementation(n) for name in ("FA3", "FA4")}  # type: ignore[misc]


def attention(rows: Rows) -> None:
    """Causal attention at each config's shapes: which kernel ran, and how fast, forward and backward."""
    for name, config in models(rows):
        shape = (
            config.train.micro_batch_size,
            config.model.num_heads,
            config.kv_heads,
            config.train.seq_len,
            config.head_size,
        )
        whole = [
            torch.randn(
                shape[0], heads, *shape[3:], device=device_of(rows), dtype=DTYPES[config.train.precision]
            )
            for heads in (shape[1], shape[2], shape[2])
        ]
        for way, context in ways().items():
            rows.attempt(
                lambda w=whole, c=context: attended(rows, w, c),  # type: ignore[misc]
                model=name,
                shape=str(shape),
                way=way,
            )


def attended(rows: Rows, whole: list[Tensor], context: Callable[[], Any]) -> dict[str, Any]:
    """Milliseconds, and operations a second with the masked half left out; or why there is no such way."""
    q, k, v = (x.clone().requires_grad_() for x in whole)
    grad, grouped = torch.randn_like(q), q.shape[1] != k.shape[1]

    def forward() -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)

    def both() -> None:
        forward().backward(grad)
        q.grad = k.grad = v.grad = None

    try:
        with context():
            both()
            kernels = names_of(both, rows)
            times = [seconds_of(work, rows) for work in (forward, both)]
    except (RuntimeError, ImportError, ValueError, AttributeError) as error:
        return {"skipped_because": f"not here: {error}".splitlines()[0]}
    batch, heads, seq, head = q.shape
    operations = 2 * batch * heads * seq * seq * head  # two products of half the pairs, two operations each
    return {
        "forward_ms": 1e3 * times[0],
        "both_ms": 1e3 * times[1],
        "forward_TFLOP_s": operations / times[0] / 1e12,
        "both_TFLOP_s": 3.5 * operations / times[1] / 1e12,
        "ran": kernels,
    }


def names_of(work: Callable[[], Any], rows: Rows) -> str:
    """The kernels that take longest in a call."""
    with profile(
        activities=[ProfilerActivity.CPU, *([] if rows.dry else [ProfilerActivity.CUDA])]
    ) as profiler:
        work()
        if not rows.dry:
            torch.cuda.synchronize()
    found = speed.seconds_by_kernel(profiler, rows.dry)
    return "; ".join(name[:60] for name, _ in sorted(found.items(), key=lambda each: -each[1][0])[:2])


# --- products and shards ------------------------------------------------------------------------------------


def products(rows: Rows) -> None:
    """Each layer's product forward, for the gradient of its input, and for that of its weight added
    to an fp32 sum; by tensor ranks.
    """
    for name, config in models(rows):
        tokens, hidden, ffn = config.rank_tokens, config.model.hidden_size, resolved(config.model.ffn_size)
        up = ffn * (2 if config.model.activation == "swiglu" else 1)
        qkv = (config.model.num_heads + 2 * config.kv_heads) * config.head_size
        layers = {
            "qkv": (hidden, qkv, 1),
            "out": (hidden, hidden, 0),
            "up": (hidden, up, 1),
            "down": (ffn, hidden, 0),
        }
        layers["head"] = (hidden, config.model.vocab_size, 1)
        for ranks in SHARDS:
            for layer, (inputs, outputs, dim) in layers.items():
                if rows.left() < 5:
                    rows.add(model=name, skipped_because="no time was left")
                    return
                sizes = [inputs, outputs]
                sizes[dim] //= ranks
                rows.attempt(
                    lambda s=sizes, c=config, t=tokens: product(
                        rows, t, s[0], s[1], DTYPES[c.train.precision]
                    ),  # type: ignore[misc]
                    model=name,
                    tp=ranks,
                    layer=layer,
                    sizes=f"{tokens} × {sizes[0]} → {sizes[1]}",
                )


def product(rows: Rows, tokens: int, inputs: int, outputs: int, dtype: torch.dtype) -> dict[str, Any]:
    """TFLOP/s of the three."""
    device = device_of(rows)
    x, weight, dy = (
        torch.randn(*s, device=device, dtype=dtype)
        for s in ((tokens, inputs), (outputs, inputs), (tokens, outputs))
    )
    total = MainGradient(torch.zeros(outputs, inputs, device=device))
    total.empty = False
    calls: dict[str, Callable[[], Any]] = {
        "forward": lambda: F.linear(x, weight),
        "input": lambda: dy @ weight,
        "weight": lambda: total.add_product(dy, x),
    }
    return {
        f"{name}_TFLOP_s": 2 * tokens * inputs * outputs / seconds_of(call, rows) / 1e12
        for name, call in calls.items()
    }


def block_of(config: Config, ranks: int, rows: Rows) -> Callable[[], None]:
    """Forward and backward of a block in the middle of the model, of one of so many
    tensor ranks; nothing is exchanged.
    """
    device = device_of(rows)
    own = load_like(config, ranks)
    stage = Stage(own, range(2, 3), Topology(own, sizes={"tp": ranks}), "meta")
    stage.to_empty(device=device)
    stage.compute_on(device)
    for parameter in stage.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    x = torch.randn(
        own.rank_tokens,
        own.model.hidden_size,
        device=device,
        dtype=DTYPES[own.train.precision],
        requires_grad=True,
    )
    grad = torch.randn_like(x)
    batch = Microbatch(
        torch.zeros(own.train.micro_batch_size, own.train.seq_len, dtype=torch.int64, device=device)
    )

    def work() -> None:
        stage({"hidden": x}, batch)[0]["hidden"].backward(grad)
        x.grad = None
        for parameter in stage.parameters():
            parameter.grad = None

    return work


def load_like(config: Config, ranks: int) -> Config:
    """The config with so many tensor ranks."""
    return config.model_copy(update={"parallel": config.parallel.model_copy(update={"tensor": ranks})})


def shards(rows: Rows) -> None:
    """A block's forward and backward on one of several tensor ranks, beside its even part of one rank's."""
    for name, config in models(rows):
        whole = None
        for ranks in SHARDS:
            if config.kv_heads % ranks or rows.left() < 5:
                rows.add(
                    model=name,
                    tp=ranks,
                    skipped_because="heads do not divide" if config.kv_heads % ranks else "no time was left",
                )
                continue
            try:
                seconds = seconds_of(block_of(config, ranks, rows), rows)
            except Exception as error:
                rows.add(model=name, tp=ranks, failed=describe_error(error))
                continue
            whole = whole or seconds
            rows.add(model=name, tp=ranks, block_ms=1e3 * seconds, of_an_even_part=whole / ranks / seconds)


# --- held multiprocessors -----------------------------------------------------------------------------------

# What a receive that is posted ahead does until its message comes: a block of threads a channel turns around,
# and keeps memory.
HOLD = """
extern "C" __global__ void hold(int microseconds, int* out) {
    extern __shared__ char kept[];
    unsigned long long now, until;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    until = now + 1000ULL * microseconds;
    while (now < until) asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    kept[threadIdx.x] = (char)now;
    if (now == 0) out[0] = kept[0];
}
"""
HELD = (0, 2, 4, 8, 16, 32)
THREADS, KEPT = 640, 96 * 1024  # about what NCCL's kernels have; in bytes


def held(rows: Rows) -> None:
    """A block's time while another stream holds as many multiprocessors as a pending receive
    has channels: what each costs.

    One GPU has nobody to receive from, so a kernel with as many threads and as much memory as NCCL's stands
    in.
    """
    found = dict(models(rows))
    for name in [name for name in found if rows.dry or name in ("gpt_350m", "gpt_1b", "gpt_7b")]:
        work, alone = block_of(found[name], 1, rows), 0.0
        for count in HELD[:1] if rows.dry else HELD:
            try:
                seconds = seconds_of(work, rows) if rows.dry else beside_held(work, count)
            except Exception as error:
                rows.add(model=name, held=count, failed=describe_error(error))
                break
            alone = alone or seconds
            rows.add(model=name, held=count, block_ms=1e3 * seconds, slower=seconds / alone - 1)


def beside_held(work: Callable[[], None], count: int) -> float:
    """Median seconds of `work` while so many multiprocessors are held."""
    hold = torch.cuda._compile_kernel(HOLD, "hold")
    hold.set_shared_memory_config(KEPT)
    stream, out, found = torch.cuda.Stream(priority=-1), torch.zeros(1, dtype=torch.int32, device="cuda"), []
    for number in range(ROUNDS + 2):
        torch.cuda.synchronize()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        if count:
            hold((count, 1, 1), (THREADS, 1, 1), [100_000, out], KEPT, stream)  # longer than any block takes
        torch.cuda._sleep(4_000_000)  # until the kernel above is there
        start.record()
        work()
        end.record()
        end.synchronize()
        torch.cuda.synchronize()
        if number >= 2:
            found.append(start.elapsed_time(end) / 1e3)
    return median(found)


# --- predicted ----------------------------------------------------------------------------------------------


def predicted(rows: Rows) -> None:
    """The planner's step with this GPU's measured product and copy, term by term, beside the step itself."""
    device = device_of(rows)
    precision = "fp32" if rows.dry else "bf16"
    peak = machine.measured_peak(DTYPES[precision], device, 0.1 if rows.dry else 1.0)
    content = machine.device_content(precision, peak, device)
    rows.add(model="this device", TFLOP_s=peak / 1e12, GB_s=content["memory_bytes_per_second"] / 1e9)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "device.json"
        path.write_text(json.dumps(content))
        known = read_device(str(path))
    for name in ("gpt_124m",) if rows.dry else ("gpt_124m", "gpt_350m", "gpt_1b"):
        for compiled in ("false", "true"):
            config = speed.config_of(rows, name, compiled, 1 if rows.dry else speed.MICRO_BATCHES[name][0])

            def beside(config: Config = config) -> dict[str, Any]:
                own = predict(setting_of(config), known, ALONE, constants())
                speed.clear(rows.dry)
                job = Training(config, join(config, RankInfo()))
                for _ in range(1 if rows.dry else 3):
                    job.step()
                measured = median(job.step() for _ in range(1 if rows.dry else 6))
                terms = {f"{term}_ms": 1e3 * seconds for term, seconds in own.terms.items() if seconds}
                return {
                    "measured_ms": 1e3 * measured,
                    "predicted_ms": 1e3 * own.step,
                    "off_by": own.step / measured - 1,
                    **terms,
                }

            rows.attempt(beside, model=name, compiled=compiled, micro_batch=config.train.micro_batch_size)
