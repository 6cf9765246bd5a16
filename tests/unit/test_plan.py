"""Parameters, FLOPs and memory against the model itself and against published
figures; every config on its hardware.
"""

import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.throughput import hardware_flops_per_token
from megacore.config import Config
from megacore.context_parallel import ring_blocks as blocks
from megacore.data.packing import document_positions
from megacore.distributed import cpu
from megacore.distributed.shard import shard_of
from megacore.model.batch import Microbatch
from megacore.model.stage import Stage
from megacore.pipeline.partition import layer_ranges, stage_layers
from megacore.tools.choices.activations import stage_activations
from megacore.tools.choices.devices import peak_flops
from megacore.tools.choices.flops import (
    block_flops,
    flops_per_token,
    head_flops,
    layer_cost,
)
from megacore.tools.choices.measured import cost_of
from megacore.tools.planner import activations
from megacore.tools.planner.activations import rank_activations
from megacore.tools.planner.memory import RankMemory, besides, communicators_of, rank_memory
from megacore.tools.planner.parameters import parameters, rank_parameters, stage_parameters
from megacore.tools.planner.traffic import rank_traffic
from megacore.tools.settings.load import load
from megacore.train.metrics import AttendedPairs
from tests import forks
from tests.build import model_of, run_of, topology_of
from tests.commands import run_script

ROOT = Path(__file__).resolve().parents[2]

VARIANTS: list[dict[str, Any]] = [
    {},
    {"bias": False, "tie_embeddings": False},
    {"norm": "rmsnorm"},
    {"position": "rope", "num_kv_heads": 2},
    {"activation": "swiglu", "ffn_size": 192},
    {
        "norm": "rmsnorm",
        "activation": "swiglu",
        "position": "rope",
        "num_kv_heads": 2,
        "bias": False,
        "tie_embeddings": False,
    },
    {"bias": False, "qkv_bias": True, "max_positions": 50},
    {"qk_norm": True, "head_size": 24, "position": "rope"},
]


def make(model: dict[str, Any] | None = None, parallel: dict[str, Any] | None = None, **train: Any) -> Config:
    """A small resolved config."""
    sizes = {
        "num_layers": 3,
        "hidden_size": 64,
        "num_heads": 4,
        "num_kv_heads": 4,
        "ffn_size": 256,
        "vocab_size": 101,
    }
    steps = {"seq_len": 32, "micro_batch_size": 2, "global_batch_size": 8, "precision": "fp32"}
    sections = {
        "model": sizes | (model or {}),
        "parallel": {"data": 1} | (parallel or {}),
        "train": steps | train,
    }
    return run_of(sections, world=(parallel or {}).get("tensor", 1) * (parallel or {}).get("pipeline", 1))


@pytest.mark.parametrize("variant", VARIANTS)
def test_parameters_are_the_models(variant: dict[str, Any]) -> None:
    """A weight or bias that the model has would be missing from the count, or the other way round."""
    config = make(variant)
    assert parameters(config) == sum(p.numel() for p in model_of(config).parameters())


@pytest.mark.parametrize("variant", VARIANTS)
def test_parameters_of_a_rank_are_the_stages(variant: dict[str, Any]) -> None:
    """Memory would be predicted for another split than the one that is built: 2
    tensor ranks × 2 stages, 101 words.
    """
    config = make(variant, {"tensor": 2, "pipeline": 2})
    built = [
        sum(p.numel() for p in Stage(config, layers, topology_of(config, 0), "cpu").parameters())
        for layers in layer_ranges(config)
    ]
    assert rank_parameters(config) == built


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("variant", VARIANTS)
def test_blocks_that_are_built_once_stand_for_all(variant: dict[str, Any], sequence: bool) -> None:
    """A name, an order, a cut or a partial gradient that another layer of the stage has:
    memory or traffic of another model.
    """
    config = make(variant, {"tensor": 2, "pipeline": 2, "sequence": sequence})
    for stage, layers in enumerate(layer_ranges(config)):
        built = Stage(config, layers, topology_of(config, 0), "meta").named_parameters()
        stated = [
            (name, p.numel(), tuple({"tp"}.intersection(shard_of(p).partial_over)), shard_of(p).along)
            for name, p in built
        ]
        assert [
            (p.name, p.elements, p.partial, shard_of(p.tensor).along)
            for p in stage_parameters(config, stage).all
        ] == stated


def test_blocks_of_a_source_are_counted_one_by_one(tmp_path: Path) -> None:
    """Blocks of the user's own may differ from layer to layer; counted as the first, a model of
    1.31 M had once 3.41 M parameters.
    """
    more = (
        "self.index, self.more = index, RowLinear(3, 5, bias=False, init_std=std, **where) if index == "
        "1 else None"
    )
    path = forks.written(tmp_path, ("self.index = index", more))
    config = make({"source": str(path)})
    whole = {name: p.numel() for name, p in model_of(config, "meta").named_parameters()}
    assert whole["blocks.1.more.weight"] == 15 and "blocks.0.more.weight" not in whole
    assert {p.name: p.elements for p in stage_parameters(config, 0).all} == whole and parameters(
        config
    ) == sum(whole.values())


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("gpt_124m", 124_439_808 + (50304 - 50257) * 768),  # GPT-2 small, its vocabulary padded
        ("gpt_350m", 354_823_168 + (50304 - 50257) * 1024),  # GPT-2 medium, likewise
        ("gpt_7b", 6_738_415_616),  # LLaMA 7B
        ("llama_8b", 8_030_261_248),  # Llama 3 8B
    ],
)
def test_parameters_of_published_models(name: str, published: int) -> None:
    """The configs would not be the models that they are named after."""
    assert parameters(resolved(name)) == published


def counted_flops(config: Config) -> float:
    """Operations a token, forward and backward, that PyTorch's own counter sees."""
    model, tokens = model_of(config), torch.zeros(2, 32, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        model.loss(model.hidden(tokens), tokens).backward()
    return counter.get_total_flops() / tokens.numel()


@pytest.mark.parametrize("variant", [*VARIANTS, {"activation": "gelu_erf"}])
def test_flops_are_what_the_model_multiplies(variant: dict[str, Any]) -> None:
    """PyTorch's own counter of products, forward and backward, would disagree with the formula behind MFU."""
    config = make({"attention": "eager"} | variant)
    assert (
        counted_flops(config)
        == flops_per_token(config, causal=False)
        == hardware_flops_per_token(config, causal=False)
    )
    assert flops_per_token(config, causal=True) < flops_per_token(config, causal=False)


def test_flops_of_documents_are_what_attention_multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention over all pairs of a sample would make a run over short documents
    look many times as busy as it is.
    """
    config = make()
    masked = config.model_copy(update={"data": config.data.model_copy(update={"document_mask": True})})
    documents = ((0, 5, 32), (0, 1, 16, 20, 32))
    positions = torch.from_numpy(np.stack([document_positions(bounds) for bounds in documents]))
    # products that the counter sees: in backward the scores once more
    monkeypatch.setattr(blocks, "has_kernel", lambda q: False)
    model, tokens = model_of(masked), torch.zeros(2, 32, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        model.loss(model.hidden(tokens, 0, documents, positions), tokens).backward()
    pairs = sum((stop - start) ** 2 for bounds in documents for start, stop in pairwise(bounds))
    scores_again = 2 * config.model.num_layers * config.model.hidden_size * pairs
    counted = (counter.get_total_flops() - scores_again) / tokens.numel()
    meter = AttendedPairs()
    meter.add([Microbatch(tokens, tokens, documents=documents)])
    part = meter.read()
    assert part == pairs / (2 * 32**2) and meter.read() == 1.0
    assert counted == pytest.approx(flops_per_token(masked, False, part), rel=1e-12)
    assert counted < 0.99 * flops_per_token(masked, causal=False)


@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_recomputed_flops_are_what_the_model_multiplies_again(
    variant: dict[str, Any], recompute: str
) -> None:
    """HFU would count a product that is not repeated, or miss one that is; MFU must not count any."""
    config = make({"attention": "eager"} | variant, recompute=recompute)
    assert (
        counted_flops(config)
        == hardware_flops_per_token(config, causal=False)
        > flops_per_token(config, causal=False)
    )


def test_sdpa_recomputes_no_attention() -> None:
    """`selective` keeps no scores to drop with SDPA: its HFU is its MFU."""
    sdpa = {"attention": "sdpa"}
    config = make(sdpa, recompute="selective")
    assert counted_flops(config) == counted_flops(make(sdpa))
    assert hardware_flops_per_token(config, causal=True) == flops_per_token(config, causal=True)


@pytest.mark.parametrize(("layers", "hidden", "heads"), [(24, 2304, 24), (48, 8192, 64), (96, 12288, 96)])
def test_flops_with_recomputation_are_the_published_formula(layers: int, hidden: int, heads: int) -> None:
    """Narayanan et al. 2021: a batch of B costs 96·B·s·l·h²·(1 + s/6h + V/16lh) with
    every layer's forward done twice.
    """
    s, v = 2048, 51200
    sizes = {
        "num_layers": layers,
        "hidden_size": hidden,
        "num_heads": heads,
        "num_kv_heads": heads,
        "ffn_size": 4 * hidden,
    }
    config = make({**sizes, "vocab_size": v, "attention": "eager"}, seq_len=s, recompute="full")
    published = 96 * s * layers * hidden**2 * (1 + s / (6 * hidden) + v / (16 * layers * hidden))
    spared = 2 * hidden * 4 * hidden  # a block's last product, whose result is not needed again
    assert s * (layers * (layer_cost(config).total + spared) + 3 * head_flops(config)) == pytest.approx(
        published, rel=1e-12
    )
    assert flops_per_token(config, causal=False) == layers * 3 * block_flops(
        config, causal=False
    ) + 3 * head_flops(config)


def block_activations(config: Config) -> int:
    """Bytes that a rank keeps of one block and microbatch."""
    return cost_of(config, 1).kept


def saved_bytes(config: Config) -> int:
    """Bytes that autograd keeps for the backward of one microbatch, parameters aside."""
    model = model_of(config)
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, torch.Tensor] = {}  # by storage; the tensor too, lest its memory be used again

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    tokens = torch.zeros(2, 32, dtype=torch.long)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model.loss(model.hidden(tokens), tokens)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@pytest.mark.parametrize(
    ("model", "train"),
    [
        ({}, {}),
        ({}, {"precision": "bf16"}),
        ({"dropout": 0.1}, {}),
        ({"activation": "swiglu"}, {}),
        ({"activation": "swiglu"}, {"recompute": "selective"}),
        ({"position": "rope", "num_kv_heads": 2}, {}),
        ({"qk_norm": True, "head_size": 24}, {}),
        ({"qk_norm": True, "position": "rope", "residual_scale": 0.5}, {"precision": "bf16"}),
        ({"attention": "sdpa"}, {}),
        ({"attention": "eager", "num_kv_heads": 2}, {"precision": "bf16"}),
        ({"attention": "sdpa", "position": "rope", "num_kv_heads": 2}, {}),
        ({"position": "rope", "num_kv_heads": 1}, {"recompute": "selective"}),
        ({"attention": "eager"}, {"recompute": "selective"}),
        ({}, {"recompute": "full"}),
    ],
)
def test_activations_are_what_autograd_keeps(
    monkeypatch: pytest.MonkeyPatch, model: dict[str, Any], train: dict[str, Any]
) -> None:
    """On `meta` a block would keep other tensors than on a CPU."""
    # As on a device with bf16: where it is emulated, attention keeps fp32 copies.
    monkeypatch.setattr(cpu, "WIDENED", set())
    train |= {"device": "cpu"}  # where it is measured, and so what attention's auto is to be predicted for
    three, one = make(model, **train), make(model | {"num_layers": 1}, **train)
    kept = (saved_bytes(three) - saved_bytes(one)) / 2
    assert block_activations(three) == pytest.approx(kept, rel=0.01), (
        "in 16 bits a CPU rounds the norms' statistics too"
    )


LAW_MODELS: list[dict[str, Any]] = [
    {"vocab_size": 128, "attention": "sdpa"},
    {
        "vocab_size": 128,
        "activation": "swiglu",
        "norm": "rmsnorm",
        "position": "rope",
        "num_kv_heads": 2,
        "dropout": 0.1,
        "attention": "sdpa",
    },
    {"vocab_size": 128, "attention": "sdpa", "qk_norm": True, "position": "rope"},
]


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("model", LAW_MODELS)
def test_each_term_of_tokens_halves_with_twice_the_context_ranks(
    model: dict[str, Any], recompute: str
) -> None:
    """A term that forgets an axis is right wherever this axis has one rank.

    So every term is asked on its own, in each direction: with twice the context ranks, half; with twice the
    sequences of a microbatch, double; with sequence parallelism and twice the tensor ranks, half.
    """

    def terms(sequences: int = 1, **parallel: Any) -> dict[str, Any]:
        axes = {
            "context": 1,
            "context_method": "ring",
            "pipeline": 2,
            "tensor": 1,
            "sequence": True,
        } | parallel
        batch = {"micro_batch_size": sequences, "global_batch_size": 4 * sequences}
        sections = {
            "model": {"num_layers": 4, "hidden_size": 64, "num_heads": 4, "ffn_size": 256} | model,
            "parallel": axes | {"data": 1},
        }
        train = {"seq_len": 256, "precision": "bf16", "device": "cpu", "recompute": recompute} | batch
        world = axes["tensor"] * axes["pipeline"] * axes["context"]
        config = run_of({**sections, "train": train}, world=world)
        stages = stage_activations(config, stage_layers(config))
        found: dict[str, Any] = {
            "a block": block_activations(config),
            "stages": [stage.kept for stage in stages],
            "logits": [stage.logits for stage in stages],
            "split backwards": [stage.waiting for stage in stages],
            "messages": activations.transfer_buffers(config),
        }
        for stage, transfers in enumerate(rank_traffic(config)):
            found[f"traffic of stage {stage}"] = [t.elements for t in transfers if t.group in ("pp", "tp")]
        return found

    def scaled(value: Any, factor: int) -> Any:
        return value * factor if isinstance(value, int | float) else [scaled(part, factor) for part in value]

    def listed(value: Any) -> Any:
        return value if isinstance(value, int | float) else [listed(part) for part in value]

    one, two, four = (terms(context=c) for c in (1, 2, 4))
    double = terms(sequences=2)
    for name in one:
        assert scaled(two[name], 2) == listed(one[name]) and scaled(four[name], 4) == listed(one[name]), name
        assert listed(double[name]) == scaled(one[name], 2), name
    tensor = terms(tensor=2)
    for name in ("a block", "messages"):
        assert scaled(tensor[name], 2) == listed(one[name]), name


def test_activations_are_the_published_formula() -> None:
    """Korthikanti et al. 2022: 34·s·b·h/t a layer with sequence parallelism, and 10·s·b·h +
    24·s·b·h/t without (22B model).
    """
    s, b, h, t = 2048, 4, 6144, 8
    sizes = {
        "num_layers": 48,
        "hidden_size": h,
        "num_heads": 64,
        "num_kv_heads": 64,
        "ffn_size": 4 * h,
        "dropout": 0.1,
        "kernels": "eager",
    }
    logarithms = 4 * 64 * s * b // t + 24  # kept by SDPA, in place of the scores
    for sequence, published in ((True, 34 * s * b * h // t), (False, 10 * s * b * h + 24 * s * b * h // t)):
        config = make(
            sizes, {"tensor": t, "sequence": sequence}, seq_len=s, micro_batch_size=b, precision="bf16"
        )
        statistics = 4 * 4 * s * b // (t if sequence else 1)  # of two norms
        assert block_activations(config) - logarithms - statistics == published


def test_first_stages_hold_more_activations() -> None:
    """Under 1F1B stage i of equal ones holds min(stages - i, microbatches)
    microbatches; under GPipe all hold all.
    """
    config = make({"num_layers": 4}, {"pipeline": 4})
    block = block_activations(config)
    assert [round(peak.kept / block) for peak in rank_activations(config)[:3]] == [4, 3, 2]
    assert [peak.live for peak in rank_activations(config)] == [(4,), (3,), (2,), (1,)]
    gpipe = make({"num_layers": 4}, {"pipeline": 4, "schedule": "gpipe"}, global_batch_size=16)
    assert [round(peak.kept / block) for peak in rank_activations(gpipe)[:3]] == [8, 8, 8]


def test_activations_of_uneven_stages_are_of_their_own_layers() -> None:
    """The mean of all stages would promise the fullest room that it does not have."""
    config = make(
        {"num_layers": 9, "vocab_size": 2048}, {"pipeline": 3, "schedule": "gpipe"}, global_batch_size=16
    )
    layers = [len(own) for own in stage_layers(config)]
    assert layers[0] == layers[1] > layers[2] + 1
    found = rank_activations(config)
    assert [peak.kept for peak in found[:2]] == [8 * layers[0] * block_activations(config)] * 2
    assert found[2].kept == 8 * layers[2] * block_activations(config)
    ends = 64 * (4 * 2 * 64 + 8 + 4 * 2048)
    assert found[2].logits == 8 * ends, (
        "inputs of final norm and head, statistics, and logits, over which their gradient is written"
    )


@pytest.mark.parametrize(("precision", "size"), [("bf16", 18), ("fp16", 18), ("fp32", 16), ("fp64", 32)])
def test_bytes_a_parameter(precision: str, size: int) -> None:
    """Parameter, gradient, master weight and moments of the native engine."""
    memory = rank_memory(config := make(precision=precision))[0]
    assert memory.total - memory.activations - memory.rows == size * parameters(config)


def test_bytes_a_parameter_under_fsdp() -> None:
    """All of it is divided among the data ranks that share a copy; in host memory the
    device has what is gathered alone.
    """

    def memory(engine: dict[str, Any], **train: Any) -> RankMemory:
        sections = {
            "model": {"num_layers": 4},
            "engine": {"kind": "fsdp"} | engine,
            "train": {"precision": "bf16"} | train,
        }
        (stage,) = rank_memory(config := run_of(sections, world=8))
        assert stage.peak == rank_activations(config)[0] and stage.gathered < 18 * parameters(config)
        return stage

    n = parameters(run_of({"model": {"num_layers": 4}}, world=8))
    assert memory({}).held == pytest.approx(16 * n / 8)
    assert memory({"shard_size": 2}, precision="fp64").held == 32 * n / 2
    offloaded = memory({"cpu_offload": True})
    assert (offloaded.held, offloaded.gathered) == (0, memory({}).gathered)
    assert memory({"reshard": False}, global_batch_size=16).gathered == (2 + 4) * n
    assert memory({"reshard": False}).gathered < memory({"reshard": False}, global_batch_size=16).gathered, (
        "one microbatch: none waits"
    )


def test_peaks_are_exact_or_unknown() -> None:
    """A guessed peak would print a wrong MFU as if it were measured."""
    assert peak_flops("NVIDIA A100-SXM4-80GB", "bf16") == 312e12
    assert peak_flops("NVIDIA H100 80GB HBM3", "bf16") == peak_flops("h100", "bf16") == 989.5e12
    assert peak_flops("NVIDIA H100 PCIe", "bf16") == 756.5e12
    assert peak_flops("NVIDIA H200", "fp64") == 67e12
    assert peak_flops("NVIDIA L4", "bf16") == 121e12
    assert peak_flops("NVIDIA L40S", "bf16") == 362.05e12
    assert peak_flops("NVIDIA GeForce RTX 4090", "bf16") == 165.2e12
    for unknown in (
        "cpu",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA A100-SXM4-80GB MIG 1g.10gb",
        "NVIDIA RTX 4000",
    ):
        assert peak_flops(unknown, "bf16") is None
    assert peak_flops("Tesla V100-SXM2-32GB", "bf16") is None


# What each config is made for: ranks, and GiB of memory of one device.
HARDWARE = {
    "gpt_tiny": (1, 2),
    "moe_tiny": (1, 2),
    "latent_tiny": (1, 2),
    "shakespeare_char": (1, 2),
    "finetune_gpt2": (1, 8),
    "finetune_chat": (1, 16),
    "gpt_124m": (1, 24),
    "gpt_350m": (1, 24),
    "gpt_1b": (1, 80),
    "gpt_7b": (8, 80),
    "llama_8b": (8, 80),
    "gpt_175b": (96, 80),
    "gpt_1t": (512, 80),
    "deepseek_v3": (2048, 80),
}


def resolved(name: str, world: int | None = None) -> Config:
    return run_of(ROOT / "configs" / f"{name}.json", world=world or HARDWARE[name][0])


def test_every_config_has_its_hardware() -> None:
    """A config would be shipped without being checked."""
    assert {path.stem for path in (ROOT / "configs").glob("*.json")} == HARDWARE.keys()


@pytest.mark.parametrize("name", HARDWARE)
def test_configs_fit_their_hardware(name: str) -> None:
    """Out of memory on the machines that the config is meant for; a tenth is left
    for CUDA, NCCL and the allocator.
    """
    gib = HARDWARE[name][1]
    assert max(memory.total for memory in rank_memory(resolved(name))) < 0.9 * gib * 2**30


# which keeps to a batch of 12, for comparison
@pytest.mark.parametrize("name", sorted(HARDWARE.keys() - {"shakespeare_char"}))
def test_configs_scale_out(name: str) -> None:
    """Their batches would not divide over twice, four and eight times the ranks."""
    for times in (2, 4, 8):
        world = HARDWARE[name][0] * times
        assert resolved(name, world).parallel.data == world // (
            HARDWARE[name][0] // int(resolved(name).parallel.data)
        )


@pytest.mark.parametrize(
    "layout", [{}, {"parallel.tensor": 2, "parallel.pipeline": 2}, {"parallel.pipeline": 4}]
)
def test_gpt_tiny_runs_in_every_small_layout(layout: dict[str, int]) -> None:
    """The first thing that a newcomer types, with 1 or 4 processes, would be refused."""
    path = str(ROOT / "configs" / "gpt_tiny.json")
    load(path, [f"{key}={value}" for key, value in layout.items()], 4)
    load(path, [], 1)


def plan(*arguments: str, cwd: Path) -> "subprocess.CompletedProcess[str]":
    return run_script("launch/plan.py", *arguments, folder=cwd)


def test_plan_command(tmp_path: Path) -> None:
    """`launch/plan.py` would not print its prediction, or not draw it; in a
    process that has imported nothing.
    """
    config = str(ROOT / "configs" / "gpt_7b.json")
    arguments = [
        "--config",
        config,
        "--world",
        "8",
        "--gpu",
        "h100",
        "--plot",
        "s.png",
        "train.global_batch_size=64",
    ]
    command = [sys.executable, str(ROOT / "launch" / "plan.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    for text in (
        "6,738,415,616",
        "64 = micro_batch_size 4 × microbatches 4 × data 4",
        "bubble",
        "at least",
        "16–31",
    ):
        assert text in done.stdout
    assert (tmp_path / "s.png").read_bytes().startswith(b"\x89PNG")
    setting = run_of(config, "train.global_batch_size=64", world=8)
    fullest = max(rank_memory(setting), key=lambda memory: memory.total)
    assert (
        f"A GPU needs {(fullest.total + besides(fullest, communicators_of(setting)).total) / 2**30:.2f} GiB"
        in done.stdout
    )


def test_plan_command_says_which_method_of_context_ranks_is_faster_on_other_links(tmp_path: Path) -> None:
    """`auto` chooses for the default links: on others users would not learn what they
    could gain, and with what key.
    """
    sizes = [
        "train.seq_len=131072",
        "train.global_batch_size=16",
        "train.micro_batch_size=1",
        "parallel.context=32",
        "parallel.tensor=2",
    ]
    common = [
        "--config",
        str(ROOT / "configs" / "gpt_7b.json"),
        "--world",
        "64",
        "--gpu",
        "h100",
        *sizes,
        "parallel.pipeline=1",
    ]
    on_default, on_wide, told = (
        plan(*common, "--cluster", cluster, *extra, "parallel.schedule=1f1b", cwd=tmp_path)
        for cluster, extra in (("dgx_h100", []), ("nvl72", []), ("nvl72", ["parallel.context_method=ring"]))
    )
    assert [done.returncode for done in (on_default, on_wide, told)] == [0, 0, 0]
    line = on_wide.stdout.splitlines()[-1]
    assert line.startswith("Context ranks attend by gather (auto); here ring would save ") and line.endswith(
        "parallel.context_method=ring"
    )
    assert not any("Context ranks" in done.stdout for done in (on_default, told))
    steps = [float(done.stdout.split("predicted ")[1].split()[0]) for done in (on_wide, told)]
    saved = float(line.split("would save ")[1].split()[0])
    assert steps[0] - steps[1] == pytest.approx(saved, abs=0.011), (
        "what is promised is what the other method is predicted to take"
    )


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["model.layers=3"], "config error: model.layers: unknown key"),
        (["--gpu", "abacus"], "config error: --gpu: abacus is not known"),
        (
            ["--gpu", "l4", "train.precision=fp64"],
            "config error: --gpu: the fp64 peak of l4 is not known",
        ),
        (["--gpu", "h100", "--cluster", "abacus"], "config error: --cluster: abacus is not known"),
        (["--calibrate", "none"], "config error: --gpu: a step is predicted for a device"),
        (
            ["--gpu", "h100", "--calibrate", "none"],
            "config error: --cluster: a run is explained by its device and its links",
        ),
        (
            ["--gpu", "h100", "--cluster", "p5", "--calibrate", "none"],
            "config error: --calibrate: cannot read none",
        ),
        (["--plot", "s.gantt"], "config error: --plot: cannot write s.gantt"),
    ],
)
def test_plan_command_refuses_in_one_line(arguments: list[str], line: str, tmp_path: Path) -> None:
    """A traceback, another status than 2, or half a file in place of one clear line."""
    done = plan("--config", str(ROOT / "configs" / "gpt_tiny.json"), *arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith(line) and done.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())
