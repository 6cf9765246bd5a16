"""A step's traffic, counted where it is sent, is what the formulas say, element for
element; and its time adds up.
"""

import math
import os
from collections import Counter
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from benchmarks.breakdown import measured_step, shares
from benchmarks.training import RandomStream, Training
from megacore.config import Config
from megacore.distributed import collectives as comm
from megacore.tensor_parallel import linear
from megacore.tools.choices.meta_watch import OPERATIONS
from megacore.tools.launchers import place_from_environment
from megacore.tools.machine.device import pick_device
from megacore.tools.planner.parameters import rank_parameters
from megacore.tools.planner.traffic import Transfer, rank_traffic, sent_by_group
from tests.build import mesh_of, run_of

AXES = ("tensor", "pipeline", "data", "context")
TOKENS, HIDDEN, LAYERS, MICROBATCHES = 2 * 32, 256, 4, 2
HOST_SIZE = 2  # ranks on a host

SIZES: dict[str, Any] = {  # every parameter is a multiple of 128 elements, so that nothing is padded
    "model": {"num_layers": LAYERS, "hidden_size": HIDDEN, "num_heads": 4, "vocab_size": 1024},
    "train": {"seq_len": 32, "micro_batch_size": 2, "precision": "fp32", "device": "cpu"},
    "parallel": {"timeout_seconds": 600},
}

LAYOUTS: dict[str, dict[str, dict[str, Any]]] = {
    "one": {},
    "tp": {"parallel": {"tensor": 2}},
    "tp, full recomputation": {"parallel": {"tensor": 2}, "train": {"recompute": "full"}},
    "sp": {"parallel": {"tensor": 2, "sequence": True}},
    "sp, full recomputation, chunked loss": {
        "parallel": {"tensor": 2, "sequence": True},
        "train": {"recompute": "full"},
        "model": {
            "chunked_loss": True,
            "qk_norm": True,
            "position": "rope",
            "norm": "rmsnorm",
            "activation": "swiglu",
        },
    },
    "pp": {"parallel": {"pipeline": 2}},
    "dp": {"parallel": {"data": 2}},
    "dp, whole documents": {"parallel": {"data": 2}, "data": {"packing": "best_fit"}},
    "dp, sharded optimizer": {
        "parallel": {"data": 2},
        "engine": {"shard_optimizer": True},
        "train": {"precision": "bf16"},
    },
    "pp × dp, sharded optimizer": {
        "parallel": {"pipeline": 2, "data": 2},
        "engine": {"shard_optimizer": True},
    },
    "dp, 16 bits on the wire": {"parallel": {"data": 2}, "engine": {"reduce_dtype": "bf16"}},
    "dp in two levels": {"parallel": {"data": 4}, "engine": {"reduce_levels": 2}},
    "dp in two levels, 16 bits, sharded optimizer": {
        "parallel": {"data": 4},
        "engine": {"reduce_levels": 2, "reduce_dtype": "bf16", "shard_optimizer": True},
    },
    "dp, 8 bits": {"parallel": {"data": 2}, "engine": {"compression": {"kind": "int8", "block": 64}}},
    "dp, low rank": {"parallel": {"data": 2}, "engine": {"compression": {"kind": "low_rank"}}},
    "dp in two levels, low rank, sharded optimizer": {
        "parallel": {"data": 4},
        "engine": {
            "reduce_levels": 2,
            "compression": {"kind": "low_rank", "rank": 3},
            "shard_optimizer": True,
        },
    },
    "dp in two levels, 8 bits, sharded optimizer": {
        "parallel": {"data": 4},
        "engine": {"reduce_levels": 2, "compression": {"kind": "int8", "block": 64}, "shard_optimizer": True},
    },
    "dp in two levels, 16 bits": {
        "parallel": {"data": 4},
        "engine": {"reduce_levels": 2, "reduce_dtype": "bf16"},
    },
    "cp, gather": {"parallel": {"context": 2, "context_method": "gather"}, "train": {"recompute": "full"}},
    "cp × dp, ring, sharded optimizer": {
        "parallel": {"context": 2, "data": 2, "context_method": "ring"},
        "engine": {"shard_optimizer": True},
        "model": {"num_kv_heads": 2, "position": "rope"},
    },
    "cp × tp, ulysses": {
        "parallel": {"context": 2, "tensor": 2, "context_method": "ulysses"},
        "data": {"document_mask": True},
    },
    "tp × pp, sequence": {"parallel": {"tensor": 2, "pipeline": 2, "sequence": True}},
}


def configured(layout: dict[str, dict[str, Any]]) -> Config:
    sections = {name: SIZES.get(name, {}) | layout.get(name, {}) for name in SIZES.keys() | layout.keys()}
    parallel = sections["parallel"]
    data = parallel.setdefault("data", 1)
    sections["train"]["global_batch_size"] = 2 * MICROBATCHES * data
    return run_of(sections, world=math.prod(parallel.get(a, 1) for a in AXES))


def step_on_a_rank(
    layout: dict[str, dict[str, Any]], twice: bool = False
) -> tuple[int, list[Transfer], dict[str, float]]:
    """The rank's stage, what it sent in a step, and the shares of the step's time; `twice`:
    row-parallel sums are done twice.
    """
    place, config = place_from_environment(), configured(layout)
    os.environ["MEGACORE_HOST"] = f"host {place.rank // HOST_SIZE}"
    mesh = mesh_of(config, place, pick_device(config, place))
    training = Training(config, mesh, RandomStream(config))
    training.step()

    def doubled(x: Any, group: Any, sequence: bool) -> Any:
        comm.all_reduce(x.detach().clone(), group)
        return comm.leave_tensor_parallel(x, group, sequence)

    with patch.object(linear, "leave_tensor_parallel", doubled if twice else linear.leave_tensor_parallel):
        step = measured_step(training)
    result = mesh.pp.rank, step.transfers, shares([step], mesh)
    mesh.close()
    return result


def elements(transfers: list[Transfer]) -> Counter[tuple[str, str, int, int]]:
    """By group, operation, its size and bytes an element."""
    counted: Counter[tuple[str, str, int, int]] = Counter()
    for t in transfers:
        counted[t.group, t.operation, t.size, t.element_bytes] += t.elements
    return counted


@pytest.mark.parametrize("name", LAYOUTS)
def test_traffic_is_what_the_formulas_say(pool: Any, name: str) -> None:
    """A collective more, less or larger than the plan counts, on any rank of any layout; and a moment
    charged to no part, or to two.
    """
    config = configured(LAYOUTS[name])
    ranks = pool.run(config.world_size, step_on_a_rank, LAYOUTS[name])
    for stage, transfers, shares_of_time in ranks:
        planned = rank_traffic(config, HOST_SIZE)[stage]
        assert elements(transfers) == elements(planned)
        assert [t.calls for t in transfers if t.group == "pp"] == [
            t.calls for t in planned if t.group == "pp"
        ]
        assert sum(shares_of_time.values()) == pytest.approx(100, abs=1)


class Posted(TorchDispatchMode):
    """Counts what goes to communicators, on its way: calls and elements, by
    operation and bytes of an element.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sent: dict[tuple[str, int], tuple[int, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d" and func.overloadpacket.__name__ != "barrier":
            largest = max((x for x in tree_iter(args) if isinstance(x, torch.Tensor)), key=torch.Tensor.numel)
            key = OPERATIONS[func.overloadpacket.__name__], largest.dtype.itemsize
            calls, elements = self.sent.get(key, (0, 0))
            self.sent[key] = calls + 1, elements + largest.numel()
        return func(*args, **(kwargs or {}))


def posted_on_a_rank(layout: dict[str, dict[str, Any]]) -> tuple[int, dict[tuple[str, int], tuple[int, int]]]:
    """The rank's place in the pipeline, and what it posts in a step."""
    place, config = place_from_environment(), configured(layout)
    mesh = mesh_of(config, place, pick_device(config, place))
    training = Training(config, mesh, RandomStream(config))
    training.step()
    with Posted() as posted:
        training.step()
    mesh.close()
    return mesh.pp.rank, {key: sent for key, sent in posted.sent.items() if key[0] not in ("send", "recv")}


@pytest.mark.parametrize(
    ("parallel", "engine"),
    [
        ({"data": 4}, {"reshard": True}),
        ({"data": 4}, {"reshard": False}),
        ({"data": 4}, {"shard_size": 2}),
        ({"data": 2, "pipeline": 2, "schedule": "interleaved", "chunks": 2}, {"reshard": True}),
        ({"data": 2, "pipeline": 2, "schedule": "interleaved", "chunks": 2}, {"reshard": False}),
        ({"data": 2, "pipeline": 2, "schedule": "zb_v"}, {"reshard": False}),
    ],
    ids=str,
)
def test_fsdp_sends_what_the_formulas_say(
    pool: Any, parallel: dict[str, Any], engine: dict[str, Any]
) -> None:
    """PyTorch's own calls, on real ranks; a dry run, which is compared with the formulas too, has stand-ins
    around them. A rank with two chunks switches each of them: with those of one for both, values are right,
    and the other is gathered or summed too often.
    """
    layout = {
        "parallel": parallel,
        "engine": {"kind": "fsdp"} | engine,
        "train": SIZES["train"] | {"precision": "bf16"},
    }
    layout["model"] = SIZES["model"] | {"tie_embeddings": False}
    stages = []
    for transfers in rank_traffic(configured(layout)):
        planned: dict[tuple[str, int], tuple[int, int]] = {}
        for t in transfers:
            calls, elements = planned.get((t.operation, t.element_bytes), (0, 0))
            planned[t.operation, t.element_bytes] = calls + t.calls, elements + t.elements
        stages.append({key: sent for key, sent in planned.items() if key[0] != "send"})
    for stage, sent in pool.run(4, posted_on_a_rank, layout):
        assert sent == stages[stage]


def test_a_sum_done_twice_is_seen(pool: Any) -> None:
    """The check itself: with every row-parallel sum done twice, the count must not match."""
    for stage, transfers, _ in pool.run(2, step_on_a_rank, LAYOUTS["tp"], True):
        extra = elements(transfers) - elements(rank_traffic(configured(LAYOUTS["tp"]))[stage])
        assert extra == {("tp", "all_reduce", 2, 4): 2 * LAYERS * MICROBATCHES * TOKENS * HIDDEN}


def sent(layout: str, layers: int = LAYERS) -> list[dict[str, float]]:
    """Bytes by group that a rank of each stage sends."""
    return [
        sent_by_group(transfers)
        for transfers in rank_traffic(
            configured(LAYOUTS[layout] | {"model": SIZES["model"] | {"num_layers": layers}}), HOST_SIZE
        )
    ]


def test_formulas_are_the_published_ones() -> None:
    """Bytes of fp32 against 8·b·s·h·(t-1)/t a layer and microbatch, b·s·h a boundary
    and direction, and 2·Ψ·(d-1)/d.
    """
    activations, half = 4 * MICROBATCHES * TOKENS * HIDDEN, 1 / 2  # (t-1)/t and (d-1)/d of two ranks
    for layout, published in (("tp", 8), ("tp, full recomputation", 10), ("sp", 10)):  # see the module on 10
        (one,), (two,) = sent(layout, 1), sent(layout, 2)
        # a block's norms and row-parallel biases, once a step
        partial = 4 * 2 * half * 6 * HIDDEN if layout == "sp" else 0
        assert two["tp"] - one["tp"] == published * activations * half + partial, layout
    assert [stage["pp"] for stage in sent("pp")] == [activations, activations]
    (psi,) = rank_parameters(configured(LAYOUTS["dp"]))
    assert sent("dp")[0]["dp"] == 4 * 2 * psi * half
    assert sent("dp, 16 bits on the wire")[0]["dp"] == 2 * 2 * psi * half
    between = 4 * 2 * psi / 2 * half  # each of a host's two ranks sends its half
    two = sent("dp in two levels")[0]
    assert (two["dp within a host"], two["dp between hosts"]) == (4 * 2 * psi * half, between)
    # gradients in fp32, parameters in bf16
    assert sent("dp, sharded optimizer")[0]["dp"] == (4 + 2) * psi * half
