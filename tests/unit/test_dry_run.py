"""Dry ranks do what real ones do: the same buckets, bytes, collectives; and a
rank that does otherwise is named.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from kernels.linear_cross_entropy import default_chunk
from launch import plan as script
from megacore.config import Config
from megacore.context_parallel import attention
from megacore.distributed import collectives as comm
from megacore.engine.choose import build_stages
from megacore.engine.native import NativeEngine
from megacore.errors import ConfigError
from megacore.model.batch import Microbatch
from megacore.pipeline.partition import placement_of, stage_layers
from megacore.tensor_parallel import linear
from megacore.tools.choices.activations import stage_activations
from megacore.tools.choices.layer_cost import BlockLoad
from megacore.tools.choices.measured import cost_of
from megacore.tools.choices.meta_watch import Call, MetaWatch
from megacore.tools.choices.resolve_auto import loss_chunk
from megacore.tools.choices.torch_patches import Light
from megacore.tools.dry_run.compare_traffic import mismatches
from megacore.tools.dry_run.dry_report import against_formulas, members, parse_ranks, planned
from megacore.tools.dry_run.dry_step import DryRank, dry_run
from megacore.tools.dry_run.expected_traffic import differences
from megacore.tools.dry_run.fake import as_on_its_device, playing
from megacore.tools.planner.activations import rank_activations
from megacore.tools.planner.buckets import buffers_of
from megacore.tools.planner.memory import rank_memory
from megacore.tools.planner.parameters import parameters
from megacore.tools.planner.routing import Routing, loads_of
from megacore.tools.planner.traffic import rank_traffic
from tests import training
from tests.build import run_of, step_of
from tests.memory import Allocated

LLAMA = [
    "model.position=rope",
    "model.norm=rmsnorm",
    "model.activation=swiglu",
    "model.num_kv_heads=2",
    "model.qk_norm=true",
]
ROTARY = ["model.position=rope", "model.norm=rmsnorm", "model.activation=swiglu"]
ON_A_GPU = ["train.precision=bf16", "train.device=cuda"]
GROUPS = (
    'optim.groups=[{"match": ["blocks.1.*.weight", "*norm*"], "kind": "sgd"}, {"match": '
    '["blocks.*.bias"], "lr": 0.1}]'
)
PUBLISHED = [
    "model.attention_sinks=true",
    "model.attention_gate=headwise",
    "model.z_loss=0.1",
    "model.window=4",
    "model.head_bias=true",
]
ALL_HEADS = ["model.qk_norm=true", "model.qk_norm_heads=all", "model.window_schedule=[[9,2]]"]
LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "one": (1, []),
    "tensor 2, pipeline 2, data 2": (8, ["parallel.tensor=2", "parallel.pipeline=2"]),
    "tokens split, small buckets": (
        4,
        ["parallel.tensor=2", "parallel.sequence=true", "engine.bucket_mib=0.02"],
    ),
    "sharded optimizer": (
        8,
        ["parallel.tensor=2", "parallel.pipeline=2", "engine.shard_optimizer=true", "engine.bucket_mib=0.02"],
    ),
    "two levels": (8, ["parallel.tensor=2", "engine.reduce_levels=2", "engine.bucket_mib=0.02"]),
    "two levels, 16 bits": (
        8,
        [
            "parallel.tensor=2",
            "engine.reduce_levels=2",
            "engine.reduce_dtype=bf16",
            "engine.shard_optimizer=true",
        ],
    ),
    "context 4 by ring": (
        8,
        ["parallel.context=4", "parallel.context_method=ring", "parallel.tensor=2", "parallel.sequence=true"],
    ),
    "as published": (
        4,
        [*PUBLISHED, *ALL_HEADS, "parallel.tensor=2", "parallel.sequence=true", "parallel.pipeline=2"],
    ),
    "context 2 by gather, recomputed": (
        4,
        ["parallel.context=2", "parallel.context_method=gather", "train.recompute=full"],
    ),
    "context 2 by exchange": (
        4,
        [*LLAMA, "parallel.context=2", "parallel.context_method=ulysses", "engine.shard_optimizer=true"],
    ),
    "context 2, the loss in chunks": (
        4,
        [
            "parallel.context=2",
            "parallel.tensor=2",
            "model.chunked_loss=true",
            "train.seq_len=1280",
            "train.device=cuda",
        ],
    ),
    "groups": (4, [GROUPS, "engine.shard_optimizer=true", "engine.bucket_mib=0.02", "parallel.pipeline=2"]),
    "interleaved": (4, ["parallel.pipeline=2", "parallel.schedule=interleaved"]),
    "llama, untied": (
        4,
        [
            *LLAMA,
            "parallel.tensor=2",
            "parallel.pipeline=2",
            "model.tie_embeddings=false",
            "train.precision=bf16",
        ],
    ),
    "recomputed": (
        4,
        ["parallel.pipeline=4", "train.recompute=full", "model.chunked_loss=true", "parallel.schedule=gpipe"],
    ),
}

FSDP: dict[str, tuple[int, list[str]]] = {
    "fsdp, groups": (2, [GROUPS]),
    "fsdp": (4, ["model.norm=layernorm", "model.bias=true"]),
    "fsdp, 3 shards and 2 copies, whose rows do not divide": (
        6,
        ["engine.shard_size=3", "train.global_batch_size=24"],
    ),
    "fsdp, kept whole": (4, ["engine.reshard=false", "train.recompute=full"]),
    "fsdp, tensor 2, pipeline 2, tied": (
        8,
        ["parallel.tensor=2", "parallel.sequence=true", "parallel.pipeline=2"],
    ),
    "fsdp, gathered anew in a pipeline": (
        4,
        ["parallel.pipeline=2", "engine.reshard=true", "train.recompute=full"],
    ),
    "fsdp, interleaved": (
        4,
        [*LLAMA, "model.tie_embeddings=false", "parallel.pipeline=2", "parallel.schedule=interleaved"],
    ),
    "fsdp, context 2": (
        4,
        [
            *LLAMA,
            *PUBLISHED,
            "data.document_mask=true",
            "parallel.context=2",
            "train.precision=bf16",
            "model.qkv_bias=true",
        ],
    ),
}
MIXTURE = [
    "model.num_experts=4",
    "model.expert_ffn_size=24",
    "model.first_dense=1",
    "model.shared_experts=1",
    "model.bias=false",
    "model.router_balance=sequence",
    "model.router_bias_rate=0.01",
]
LATENTS = [
    "model.bias=false",
    "model.position=rope",
    "model.norm=rmsnorm",
    "model.q_rank=24",
    "model.kv_rank=12",
    "model.plain_size=12",
]
EXPERTS: dict[str, tuple[int, list[str]]] = {
    "experts 2, latents, sequence 2, pipeline 2, split backwards": (
        8,
        [
            *LATENTS,
            "model.value_size=10",
            "parallel.expert=2",
            "parallel.tensor=2",
            "parallel.sequence=true",
            "parallel.pipeline=2",
            "parallel.schedule=zb_v",
            "train.precision=bf16",
        ],
    ),
    "experts 2, latents, context 2": (
        4,
        [*LATENTS, "parallel.expert=2", "parallel.context=2", "parallel.context_method=ring"],
    ),
    "experts 4, tensor 2 of their own, tokens split, sharded": (
        8,
        [
            "parallel.expert=4",
            "parallel.tensor=2",
            "parallel.expert_tensor=1",
            "parallel.sequence=true",
            "engine.shard_optimizer=true",
        ],
    ),
    "experts 2 with biases, tensor 2, pipeline 2, split backwards": (
        8,
        [
            "parallel.expert=2",
            "parallel.tensor=2",
            "parallel.pipeline=2",
            "parallel.schedule=zb_v",
            "train.precision=bf16",
            "model.bias=true",
        ],
    ),
    "experts 2, context 2, recomputed": (
        4,
        ["parallel.expert=2", "parallel.context=2", "train.recompute=full"],
    ),
    "experts 2, two levels": (
        16,
        [
            "parallel.expert=2",
            "engine.reduce_levels=2",
            "engine.shard_optimizer=true",
            "train.global_batch_size=32",
        ],
    ),
    "experts 2 by fsdp, 2 shards": (
        8,
        ["parallel.expert=2", "engine.kind=fsdp", "engine.shard_size=2", "optim.kind=muon"],
    ),
    "experts 4 by fsdp, of which each rank has one with its biases": (
        8,
        ["parallel.expert=4", "parallel.tensor=2", "engine.kind=fsdp", "model.bias=true"],
    ),
}
LAYOUTS_OF_ALL = LAYOUTS | {
    name: (world, [*MIXTURE, *overrides]) for name, (world, overrides) in EXPERTS.items()
}
HALVES, BOUNDED = "experts 4 in halves, recomputed", "experts 2 in halves, tensor 2, with a capacity"
IN_HALVES: dict[str, tuple[int, list[str]]] = {
    HALVES: (4, [*MIXTURE, "parallel.expert=4", "parallel.expert_halves=true", "train.recompute=full"]),
    BOUNDED: (
        4,
        [
            *MIXTURE,
            "parallel.expert=2",
            "parallel.tensor=2",
            "parallel.expert_halves=true",
            "model.capacity_factor=1.25",
        ],
    ),
}
LAYOUTS_OF_ALL |= IN_HALVES | {
    name: (world, ["engine.kind=fsdp", *overrides]) for name, (world, overrides) in FSDP.items()
}


def configured(folder: Path, name: str) -> tuple[int, Config]:
    world, overrides = LAYOUTS_OF_ALL[name]
    overrides = ["train.global_batch_size=16", *overrides]
    return world, run_of(training.write_config(folder, "nothing"), *overrides, world=world)


@pytest.mark.parametrize("name", LAYOUTS)
def test_buckets_are_laid_out_as_planned(name: str, tmp_path: Path) -> None:
    """A gap, an order or a boundary that the plan has otherwise: bytes and calls
    would be predicted for other buckets.
    """
    world, config = configured(tmp_path, name)
    for rank in range(world):
        with playing(as_on_its_device(config), rank, MetaWatch()) as mesh:
            engine = NativeEngine(as_on_its_device(config), build_stages(config, mesh), mesh)
            built = [[bucket.stop - bucket.start for bucket in buffer.buckets] for buffer in engine.buffers]
            assert built == [buffer.buckets for buffer in buffers_of(config, mesh.pp.rank, mesh.tp.rank)]
            engine.close()


@pytest.mark.parametrize("name", LAYOUTS_OF_ALL)
def test_dry_ranks_do_what_the_formulas_say(name: str, tmp_path: Path) -> None:
    """Every collective and byte of every rank, and all of them matched; a dry run that left any
    out would be a proof of nothing.
    """
    world, config = configured(tmp_path, name)
    ranks = {rank: dry_run(config, rank) for rank in range(min(world, 9))}
    assert [line for dry in ranks.values() for line in against_formulas(config, dry)] == []
    assert mismatches({rank: dry.calls for rank, dry in ranks.items()}) == []
    assert all(dry.calls for dry in ranks.values()) or world == 1


# two steps, the first being less even
ROUTING = Routing(((BlockLoad((2.5, 0.1, 0.6, 0.8)),), (BlockLoad((1.5, 0.9, 0.8, 0.8)),)))


@pytest.mark.parametrize("name", [*IN_HALVES, "experts 2 with biases, tensor 2, pipeline 2, split backwards"])
def test_ranks_with_more_rows_take_what_the_plan_says(name: str, tmp_path: Path) -> None:
    """By a run's loads: every exchange, what waits for backward, and the peak.

    As if each rank had as many rows, plans would not fit.
    """
    world, config = configured(tmp_path, name)
    ranks = [dry_run(config, rank, routing=ROUTING) for rank in range(0, world, config.parallel.tensor)]
    assert [line for dry in ranks for line in against_formulas(config, dry, routing=ROUTING)] == []
    assert mismatches({dry.rank: dry.calls for dry in ranks}) == []
    kept = []
    layers = stage_layers(config)
    last = [dry for dry in ranks if dry.stage == config.parallel.pipeline - 1]  # with experts
    for dry in last:
        stages = stage_activations(config, layers, loads_of(config, ROUTING, dry.expert_rank))
        kept.append([stages[stage].kept for stage in placement_of(config)[dry.stage]])
        assert [kept_by(dry, chunk) for chunk in range(len(kept[-1]))] == kept[-1]
        assert dry.peak == pytest.approx(planned(config, dry, ROUTING).total, rel=0.005)
    balanced = stage_activations(config, layers)
    assert [balanced[stage].kept for stage in placement_of(config)[-1]] not in kept, "what could fail"
    assert len({dry.peak for dry in last}) > 1
    assert any("does exchange" in line for line in against_formulas(config, last[0])), (
        "a plan of a balanced load"
    )
    fullest = rank_memory(config, loads=loads_of(config, ROUTING))[-1].peak.kept
    assert fullest == max(planned(config, dry, ROUTING).peak.kept for dry in last)


@pytest.mark.parametrize("rank", [0, 1920])
def test_ranks_of_deepseek_v3_do_what_the_plan_says(rank: int) -> None:
    """Two of 2,048: embedding, head and dense blocks; and blocks with experts, between stages.

    With 16 microbatches in place of 480.
    """
    config = run_of("configs/deepseek_v3.json", "train.global_batch_size=512", world=2048)
    dry = dry_run(config, rank)
    assert against_formulas(config, dry) == []
    assert dry.peak == pytest.approx(rank_memory(config)[rank // 128].total, rel=1e-3)
    assert {group for group, *_ in dry.sent()} >= {"ep", "edp", "cp", "pp", "dp"}


@pytest.mark.parametrize(
    "overrides", [[], ["train.recompute=selective"], ["model.chunked_loss=true", *LLAMA]]
)
def test_the_peak_is_that_of_a_real_step(overrides: list[str], tmp_path: Path) -> None:
    """Counted on real tensors of the same model, in fp32 on a CPU: what has no content must take as much."""
    config = run_of(training.write_config(tmp_path, "nothing"), "model.vocab_size=1000", *overrides)
    torch.device("cpu")
    with Allocated() as real:
        step = step_of(config, draw=False)
        tokens = torch.zeros(2, 16, dtype=torch.int64)
        step(1, [Microbatch(tokens, tokens, key) for key in range(4)])
    assert dry_run(config, 0).peak == pytest.approx(real.peak, rel=0.01)


def kept(folder: Path, *overrides: str) -> int:
    """Bytes that a rank keeps for backwards, of a long sequence."""
    sizes = ["train.seq_len=256", "model.hidden_size=64", *ON_A_GPU, "train.global_batch_size=2", *overrides]
    world = next((int(text.partition("=")[2]) for text in sizes if text.startswith("parallel.context=")), 1)
    return dry_run(run_of(training.write_config(folder, "nothing"), *sizes, world=world), 0).activations


@pytest.mark.parametrize("method", ["gather", "ring", "ulysses"])
@pytest.mark.parametrize("overrides", [[], ROTARY, [*ROTARY, "train.recompute=full"]], ids=str)
def test_context_ranks_divide_activations(method: str, overrides: list[str], tmp_path: Path) -> None:
    """Of four ranks each keeps a quarter.

    A copy more, or keys of other ranks, would cost what context ranks are for.
    """
    four = kept(tmp_path, *overrides, "parallel.context=4", f"parallel.context_method={method}")
    assert 4 * four == pytest.approx(kept(tmp_path, *overrides), rel=1e-3)


def test_gathered_keys_that_are_kept_are_seen(tmp_path: Path) -> None:
    """The check itself: with the keys and values of all ranks kept until
    backward, a rank has more than a quarter.
    """
    kept_keys, right = [], attention.gathered

    def keeping(*args: Any) -> Any:
        kept_keys.append(right(*args))
        return kept_keys[-1]

    with patch.object(attention, "gathered", keeping):
        four = kept(tmp_path, "parallel.context=4", "parallel.context_method=gather")
    assert 4 * four > 1.05 * kept(tmp_path)


@pytest.mark.parametrize("kv_heads", [2, 4])
def test_ulysses_keeps_shared_keys_as_often_as_predicted(kv_heads: int, tmp_path: Path) -> None:
    """Four ranks that share two key/value heads keep each twice."""
    world, configs = 4, []
    for method in ("ring", "ulysses"):
        sizes = [
            *ROTARY,
            f"model.num_kv_heads={kv_heads}",
            "parallel.context=4",
            f"parallel.context_method={method}",
            *ON_A_GPU,
        ]
        configs.append(run_of(training.write_config(tmp_path, "nothing"), *sizes, world=world))
    counted = [dry_run(config, 0).activations for config in configs]
    layers = configs[0].model.num_layers
    assert counted[1] - counted[0] == layers * (cost_of(configs[1], 1).kept - cost_of(configs[0], 1).kept)


@pytest.mark.parametrize("tokens", [16, 1000, 4096, 5000, 100_000])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_chunked_loss_is_divided_as_planned(tokens: int, device: str, tmp_path: Path) -> None:
    """Its collectives would be counted for other chunks."""
    sizes = [f"train.seq_len={tokens}", "train.micro_batch_size=1", f"train.device={device}"]
    config = run_of(training.write_config(tmp_path, "nothing"), *sizes)
    assert loss_chunk(config) == default_chunk(tokens, device)


KEPT: dict[str, tuple[int, list[str]]] = {
    "tensor": (8, ["parallel.tensor=2"]),
    "tokens split, selective": (
        8,
        ["parallel.tensor=2", "parallel.sequence=true", "train.recompute=selective"],
    ),
    "full": (4, ["train.recompute=full"]),
    "fp32, grouped heads": (4, [*LLAMA[:4], "train.precision=fp32"]),
    "eager, dropout": (
        8,
        ["model.kernels=eager", "model.dropout=0.1", "parallel.tensor=2", "parallel.sequence=true"],
    ),
    "llama, interleaved": (8, [*LLAMA, "parallel.tensor=2", "parallel.schedule=interleaved"]),
    "llama, selective": (4, [*LLAMA[:4], "train.recompute=selective"]),
    "chunked loss": (8, ["model.chunked_loss=true", "parallel.tensor=2", "parallel.sequence=true"]),
    "split backward": (4, [*LLAMA, "parallel.schedule=zb_h1"]),
    "experts": (8, [*MIXTURE, "parallel.expert=2"]),
}


def kept_by(dry: DryRank, chunk: int) -> int:
    """Bytes that the first microbatch's forward made, and that live when its backward begins."""
    name = "microbatch 0" + (f", chunk {chunk}" if chunk else "")
    live = dict[int, int]()
    for event in dry.journal.events:
        if event < 0:
            live.pop(~event, None)
        elif (block := dry.journal.blocks[event]).moment in (
            f"forward of {name}",
            f"recv_activation of {name}",
        ):
            live[event] = block.size
        elif block.moment in (f"backward of {name}", f"backward_input of {name}"):
            break
    return sum(live.values())


@pytest.mark.parametrize("name", KEPT)
def test_what_waits_for_backward_is_counted_to_the_byte(name: str, tmp_path: Path) -> None:
    """A tensor that a block or an end keeps and planning has not, or has and nobody keeps: a run
    would not fit as it was planned.
    """
    world, overrides = KEPT[name]
    sizes = [
        "model.num_layers=8",
        "model.hidden_size=128",
        "model.num_heads=4",
        "model.vocab_size=1024",
        "parallel.pipeline=4",
        "train.device=auto",
        "train.precision=bf16",
        "train.seq_len=64",
        "train.global_batch_size=32",
    ]
    config = run_of(training.write_config(tmp_path, "nothing"), *sizes, *overrides, world=world)
    stages = stage_activations(config, stage_layers(config))
    peaks = rank_activations(config)
    for rank in (0, 1, 3):
        dry = dry_run(config, rank * world // 4)
        for chunk, stage in enumerate(placement_of(config)[rank]):
            assert kept_by(dry, chunk) == stages[stage].kept, stage
        assert peaks[rank].total == pytest.approx(dry.peak - sum(dry.held.values()), rel=0.03)


@pytest.mark.parametrize(
    ("fork", "world", "layout"),
    [
        ("multi_token", 2, ["parallel.context=2"]),
        ("hybrid", 4, ["parallel.context=2", "parallel.tensor=2", "data.document_mask=true"]),
        ("vision", 4, ["parallel.pipeline=2", "parallel.tensor=2", "parallel.sequence=true"]),
    ],
)
def test_forks_send_what_the_formulas_say(fork: str, world: int, layout: list[str]) -> None:
    """A loss whose targets are counted in every step; what a recurrence exchanges; fields
    of the batch that are no tokens.
    """
    alone = ["data.train=null", "data.valid=null", "data.tokenizer=null", "train.global_batch_size=32"]
    config = run_of(f"configs/forks/{fork}.json", *alone, *layout, world=world)
    dry = dry_run(config, world - 1)
    assert differences(dry, rank_traffic(config, tensor_rank=dry.tensor_rank)[dry.stage]) == []


def doubled(x: Any, group: Any, sequence: bool) -> Any:
    """A row-parallel sum, done twice."""
    comm.all_reduce(x.detach().clone(), group)
    return comm.leave_tensor_parallel(x, group, sequence)


def test_a_rank_with_a_collective_more_is_named(tmp_path: Path) -> None:
    """In the real code of one tensor rank: against the formulas, and against the other
    rank, which would wait for ever.
    """
    _, config = configured(tmp_path, "tensor 2, pipeline 2, data 2")
    right = dry_run(config, 0)
    with patch.object(linear, "leave_tensor_parallel", doubled):
        wrong = dry_run(config, 1)
    assert differences(right, rank_traffic(config)[0]) == []
    assert "does all_reduce over ranks 0, 1" in differences(wrong, rank_traffic(config, tensor_rank=1)[0])[0]
    (line,) = mismatches({0: right.calls, 1: wrong.calls})
    assert line.startswith("ranks 0, 1: ") and "rank 0" in line and "rank 1" in line


def test_fsdp_that_sums_too_often_is_named(tmp_path: Path) -> None:
    """The check itself: FSDP2's own default sums gradients after every microbatch."""
    _, config = configured(tmp_path, "fsdp, kept whole")
    with patch.object(FSDPModule, "set_requires_gradient_sync", lambda *_: None):
        (line,) = against_formulas(config, dry_run(config, 0))
    assert "does reduce_scatter over ranks 0, 1, 2, 3" in line


@pytest.mark.parametrize("reshard", [True, False])
def test_gathered_parameters_live_as_long_as_fsdp_keeps_them(reshard: bool, tmp_path: Path) -> None:
    """FSDP2 empties storages instead of dropping tensors: if that went unseen, a step
    would seem to hold the model whole.
    """
    sizes = ["model.num_layers=24", "model.hidden_size=64", "train.global_batch_size=16", *ON_A_GPU]
    config = run_of(
        training.write_config(tmp_path, "nothing"),
        *sizes,
        "engine.kind=fsdp",
        f"engine.reshard={str(reshard).lower()}",
        world=4,
    )
    (formula,) = rank_memory(config)
    assert dry_run(config, 0).peak == pytest.approx(formula.total, rel=0.1)
    whole = 2 * parameters(config)  # bytes in bf16
    assert formula.gathered < whole if reshard else formula.gathered > whole


def less(calls: list[Call]) -> list[Call]:
    return calls[:-1]


def resized(calls: list[Call]) -> list[Call]:
    return [*calls[:3], replace(calls[3], elements=calls[3].elements + 1), *calls[4:]]


def reordered(calls: list[Call]) -> list[Call]:
    at = next(
        i
        for i, (a, b) in enumerate(pairwise(calls))
        if (a.operation, a.elements) != (b.operation, b.elements)
    )
    return [*calls[:at], calls[at + 1], calls[at], *calls[at + 2 :]]


@pytest.mark.parametrize(
    ("fault", "line"),
    [(less, "posts"), (resized, "its collective number"), (reordered, "its collective number")],
    ids=lambda f: str(f)[:20],
)
def test_what_would_hang_is_named(
    fault: Callable[[list[Call]], list[Call]], line: str, tmp_path: Path
) -> None:
    """A collective less, of another size or in another order on one of two tensor ranks."""
    _, config = configured(tmp_path, "tokens split, small buckets")
    first, second = dry_run(config, 0), dry_run(config, 1)
    over = [call for call in second.calls if call.ranks == first.groups["tp"]]
    (found,) = mismatches(
        {0: first.calls, 1: fault(over) + [call for call in second.calls if call not in over]}
    )
    assert (
        line in found
        and "ranks 0, 1" in found
        and ("forward" in found or "backward" in found or "reduce" in found)
    )


def call(operation: str, *ranks: int, elements: int = 4, peer: int = -1) -> Call:
    return Call(operation, ranks, elements, torch.float32, "forward of microbatch 0", peer)


@pytest.mark.parametrize(
    ("streams", "line"),
    [
        ({0: [call("send", 0, 1, peer=1)], 1: []}, "rank 0 sends one transfer more than rank 1 knows of"),
        ({0: [], 1: [call("recv", 0, 1, peer=0)]}, "rank 1 awaits one transfer more than rank 0 knows of"),
        (
            {0: [call("send", 0, 1, peer=1)], 1: [call("recv", 0, 1, peer=0, elements=5)]},
            "transfer number 1 from rank 0 to rank 1",
        ),
        (
            {0: [call("all_reduce", 0, 1)], 1: [call("all_gather", 0, 1)]},
            "its collective number 1 is all_reduce of 4",
        ),
        (
            {
                0: [call("all_reduce", 0, 1), call("all_reduce", 0, 2)],
                1: [call("all_reduce", 1, 2), call("all_reduce", 0, 1)],
                2: [call("all_reduce", 0, 2), call("all_reduce", 1, 2)],
            },
            "deadlock: rank 0 waits in all_reduce",
        ),
    ],
)
def test_transfers_and_circles_are_compared(streams: dict[int, list[Call]], line: str) -> None:
    """Each communicator alone is in order in the last case, and yet nobody comes further."""
    found = mismatches(streams)
    assert found and line in found[0], found


def test_names_that_inspect_asks_for_load_no_compiler() -> None:
    """In the middle of an import they made half of PyTorch load the other half: no layout of fsdp
    had a dry run from the script.
    """
    assert not hasattr(Light("torch._dynamo"), "__file__")


def test_a_mesh_of_thousands_takes_one_process(tmp_path: Path) -> None:
    """Its last rank, with the groups that it has there."""
    config = run_of("configs/gpt_1t.json", "train.global_batch_size=24", world=3072)
    dry = dry_run(config, 3071)
    assert (
        dry.place == "pp 31, dp 11, tp 7"
        and dry.groups["tp"] == tuple(range(3064, 3072))
        and against_formulas(config, dry) == []
    )
    assert len(members(config, 3071)) == 32 + 12 + 8 - 2


def test_the_script_prints_and_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Status 1 and a line for a difference; else what each rank holds and sends."""
    path = training.write_config(tmp_path, "nothing")
    arguments = ["--config", path, "--world", "4", "--simulate-ranks", "0,3", "parallel.tensor=2"]
    assert script.run(arguments) == 0
    assert "4 ranks, all that share a group with ranks 0, 3" in capsys.readouterr().out
    with patch.object(linear, "leave_tensor_parallel", doubled):
        assert script.run(arguments) == 1
    assert "rank 3 (pp 0, dp 1, tp 1) does all_reduce over ranks 2, 3" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "4", "-1", "1-", "2-1", "x", "0,", "99999999999999999999999", "0-3"])
def test_ranks_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--simulate-ranks"):
        parse_ranks(text, 3)


def test_a_list_of_ranks() -> None:
    assert parse_ranks("0, 8-10,8", 16) == [0, 8, 9, 10]
