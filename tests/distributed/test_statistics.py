"""log.statistics: sizes of weights, gradients, updates, activations and logits are what
plain code finds, in every layout.
"""

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from megacore.config import Config
from megacore.distributed.shard import TensorSlice
from megacore.model.attention import Attention
from megacore.tools.inputs import Inputs
from megacore.tools.launchers import place_from_environment
from megacore.tools.monitoring import statistics
from megacore.tools.monitoring.statistics import Statistics
from megacore.train.loader import Loader
from tests import forks, parameter_owners, training
from tests.build import mesh_of, model_of, run_of, step_of
from tests.pool import Pool

KINDS = ("weight_rms", "gradient_rms", "update_rms", "activation_rms", "largest_logit")
MODEL = {
    "num_layers": 4,
    "hidden_size": 16,
    "num_heads": 4,
    "num_kv_heads": 2,
    "vocab_size": 65,
    "activation": "swiglu",
    "position": "rope",
    "norm": "rmsnorm",
    "init_std": 0.5,
    "ffn_size": 24,
}
DOCUMENTS = "data.document_mask=true"
LAYOUTS = {
    "one": (1, "train.recompute=full"),
    "tp2": (2, "parallel.tensor=2 model.attention=sdpa"),
    "tp2sp": (2, "parallel.tensor=2 parallel.sequence=true train.recompute=selective"),
    "cp2": (2, f"parallel.context=2 parallel.context_method=ring {DOCUMENTS}"),
    "cp2 ulysses": (2, "parallel.context=2 parallel.context_method=ulysses"),
    "pp2": (2, "parallel.pipeline=2 parallel.schedule=zb_h1"),
    "pp2 interleaved": (2, "parallel.pipeline=2 parallel.schedule=interleaved parallel.chunks=2"),
    "pp2 zb_v": (2, "parallel.pipeline=2 parallel.schedule=zb_v train.recompute=full"),
    "dp2 sharded": (2, "parallel.data=2 engine.shard_optimizer=true"),
    "fsdp2": (2, "parallel.data=2 engine.kind=fsdp"),
    "fsdp4 in pairs": (4, "parallel.data=4 engine.kind=fsdp engine.shard_size=2 train.micro_batch_size=1"),
    "tp2pp2sp": (4, "parallel.tensor=2 parallel.pipeline=2 parallel.sequence=true parallel.schedule=zb_h1"),
    "cp2tp2": (
        4,
        "parallel.context=2 parallel.tensor=2 parallel.sequence=true parallel.context_method=gather",
    ),
    "dp4 in two levels": (
        4,
        "parallel.data=4 engine.reduce_levels=2 engine.shard_optimizer=true train.micro_batch_size=1",
    ),
    "pp2dp2 sharded": (4, f"parallel.pipeline=2 parallel.data=2 engine.shard_optimizer=true {DOCUMENTS}"),
}


def rms(*tensors: Tensor) -> float:
    """The root mean square of all elements."""
    return torch.cat([tensor.detach().flatten() for tensor in tensors]).square().mean().sqrt().item()


def expected(config: Config) -> dict[str, float]:
    """What plain code finds on one process, in the first step."""
    model, mesh = model_of(config), mesh_of(config)
    step, batch = step_of(config, mesh), Loader(config, mesh, Inputs(config, 0).stream).read(1)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    outputs: dict[str, list[Tensor]] = {}
    logits: dict[str, float] = {}

    def seen(name: str) -> Callable[..., None]:
        return lambda module, given, out: outputs.setdefault(name, []).append(out.detach())

    def masked(self: Attention, q: Tensor, k: Tensor, v: Tensor, sequences: Any = None) -> Tensor:
        tokens, name = q.shape[2], next(name for name, module in model.named_modules() if module is self)
        visible = torch.ones(len(q), 1, tokens, tokens, dtype=torch.bool).tril()
        for row, bounds in enumerate(sequences.documents if sequences is not None else ()):
            number = torch.bucketize(torch.arange(tokens), torch.tensor(bounds), right=True)
            visible[row, 0] &= number[:, None] == number
        k, v = (x.repeat_interleave(self.queries, 1) for x in (k, v))
        scores = (q @ k.transpose(2, 3) * self.scale).masked_fill(~visible, float("-inf"))
        logits[name] = max(logits.get(name, float("-inf")), scores.max().item())
        return scores.softmax(-1) @ v

    for name, layer in zip(
        ("embedding", *(f"blocks.{n}" for n in range(config.model.num_layers))), model.layers, strict=False
    ):
        layer.register_forward_hook(seen(name))
    with mock.patch.object(Attention, "attend", masked), mock.patch.object(Attention, "attend_parts", masked):
        total = sum((model({}, microbatch)[1]["cross_entropy"] for microbatch in batch), torch.zeros(()))
    (step.one_over_count(batch, "targets") * total).backward()
    step(1, batch)
    after = {
        name: parameter.detach() for stage in step.stages for name, parameter in stage.named_parameters()
    }
    gradients = {
        name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None
    }
    updates = {name: after[name] - before[name] for name in before}
    found = {f"activation_rms/{name}": rms(*seen) for name, seen in outputs.items()} | {
        f"largest_logit/{n}": x for n, x in logits.items()
    }
    for kind, tensors in (("weight_rms", before), ("gradient_rms", gradients), ("update_rms", updates)):
        of_layers: dict[str, list[Tensor]] = {}
        for name, tensor in tensors.items():
            layer = (
                ".".join(name.split(".")[:2])
                if name.startswith("blocks")
                else "head"
                if name.startswith("norm")
                else "embedding"
            )
            of_layers.setdefault(layer, []).append(tensor)
            if name.endswith("qkv.weight"):
                queries = tensor.shape[1] - 2
                found |= {
                    f"{kind}/{name}.{n}": rms(x)
                    for n, x in zip("qkv", tensor.split((queries, 1, 1), 1), strict=True)
                }
            elif name.endswith("up.weight"):
                found |= {f"{kind}/{name}.{n}": rms(x) for n, x in zip(("gate", "up"), tensor, strict=True)}
            else:
                found[f"{kind}/{name}"] = rms(tensor)
        found |= {f"{kind}/{layer}": rms(*own) for layer, own in of_layers.items()}
    return found


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The path of a config whose step's samples hold several documents."""
    folder = tmp_path_factory.mktemp("statistics")
    train = {"steps": 1, "precision": "fp64", "compile": False, "global_batch_size": 8}
    log = {"statistics": {"every": 1}, "every": 1, "tensorboard": False}
    return training.write_config(
        folder, training.write_corpus(folder, tokens=203), model=MODEL, train=train, log=log
    )


@pytest.fixture(scope="module")
def plain(config: str) -> Callable[[bool], Mapping[str, float]]:
    """What is expected, without and with documents."""
    found = {documents: expected(run_of(config, *[DOCUMENTS] * documents)) for documents in (False, True)}
    return found.__getitem__


def measured(pool: Pool, config: str, folder: Path, layout: str, fault: str = "") -> dict[str, float]:
    """What a run in this layout has logged of its step."""
    world, overrides = LAYOUTS[layout]
    assert pool.run(world, rank_with, config, overrides.split(), str(folder / "run"), fault) == [0] * world
    (line,) = training.metrics(folder / "run")
    return {name: figure for name, figure in line.items() if name.partition("/")[0] in KINDS}


def apart(found: Mapping[str, float], wanted: Mapping[str, float]) -> list[str]:
    """The figures that differ by more than rounding in fp64."""
    assert found.keys() == wanted.keys()
    return [name for name in wanted if abs(found[name] - wanted[name]) > 1e-12 * abs(wanted[name])]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_measures_the_same(
    layout: str, pool: Pool, config: str, plain: Any, tmp_path: Path
) -> None:
    """Whoever compares two runs would take a layout for a cause."""
    wanted = plain(DOCUMENTS in LAYOUTS[layout][1])
    assert len(wanted) > 100
    assert apart(measured(pool, config, tmp_path, layout), wanted) == []


def test_gradients_are_measured_without_the_loss_scale(pool: Pool, config: str, tmp_path: Path) -> None:
    """In fp16 they would look some hundred times as large as in bf16, and change with the scale.

    Of weights that are small enough for no gradient to overflow. 16 bits round each product by 2^-11, and
    some tens of them follow one another.
    """
    small, found = "model.init_std=0.1", {}
    for precision in ("fp32", "fp16"):
        folder = str(tmp_path / precision)
        assert pool.run(1, rank_with, config, [small, f"train.precision={precision}"], folder, "") == [0]
        (line,) = training.metrics(folder)
        assert line["skipped"] == 0
        found[precision] = {name: rms for name, rms in line.items() if name.startswith("gradient_rms")}
    assert len(found["fp32"]) > 50 and found["fp16"] == pytest.approx(found["fp32"], rel=32 * 2.0**-11)


def test_every_measured_step_is_measured_by_itself(pool: Pool, config: str, tmp_path: Path) -> None:
    """What a step before it, or a validation between, has added would make every figure grow with the run.
    Steps that are not measured have no figures, rather than older ones.
    """
    found = {}
    for every in (1, 2):
        folder = str(tmp_path / str(every))
        overrides = ["train.steps=4", "train.precision=fp32", f'log.statistics={{"every": {every}}}']
        assert pool.run(1, rank_with, config, overrides, folder, "") == [0]
        found[every] = {
            line["step"]: {name: rms for name, rms in line.items() if name.partition("/")[0] in KINDS}
            for line in training.metrics(folder)
        }
    each, second = found[1], found[2]
    assert len({step["activation_rms/blocks.3"] for step in each.values()}) == 4
    assert second == {1: {}, 2: each[2], 3: {}, 4: each[4]}


def rank_with(config: str, overrides: list[str], folder: str, fault: str) -> int:
    """A run whose statistics have a mistake, or none."""

    def of_ranks(self: Statistics, layer: nn.Module, flow: Mapping[str, Tensor]) -> None:
        number, *_ = self.named.flows[self.names[layer], "hidden"] if layer.writes else (None,)
        if number is not None:
            self.activations[:, number] += torch.tensor([rms(flow["hidden"]), 1.0])

    faults = {
        "not reduced": mock.patch.object(statistics, "all_reduce", lambda x, *_: x),
        "copies counted": mock.patch.object(TensorSlice, "counted", True),
        "padding counted": mock.patch.object(
            statistics, "prod", lambda sizes: -(-torch.Size(sizes).numel() // 64) * 64
        ),
        "weighted by rank": mock.patch.object(Statistics, "on_layer_output", of_ranks),
        "keys of one rank": mock.patch.object(
            statistics, "whole", lambda k, sequences: k.repeat(1, 1, sequences.group.size, 1)
        ),
        "future seen": mock.patch.object(Tensor, "masked_fill_", lambda x, *_: x),
    }
    host = f"host{place_from_environment().rank // 2}"  # two ranks on each, for the layout in two levels
    with mock.patch.dict(os.environ, {"MEGACORE_HOST": host}), ExitStack() as stack:
        if fault:
            stack.enter_context(faults[fault])
        if fault == "not reduced":  # a rank that counts no token then divides by 0, which would end the run
            stack.enter_context(mock.patch.object(Statistics, "on_error", "drop"))
        return training.run_rank(config, overrides, folder)


@pytest.mark.parametrize(
    ("fault", "layout", "shown"),
    [
        ("not reduced", "tp2", "weight_rms/blocks.0.attention.qkv.weight.q"),
        ("not reduced", "dp2 sharded", "gradient_rms/embedding.weight"),
        ("copies counted", "tp2", "weight_rms/blocks.0.norm1.weight"),
        ("copies counted", "pp2", "update_rms/embedding.weight"),
        ("padding counted", "one", "gradient_rms/blocks.0.norm1.weight"),
        ("weighted by rank", "tp2sp", "activation_rms/blocks.3"),
        ("keys of one rank", "cp2 ulysses", "largest_logit/blocks.1.attention"),
        ("future seen", "one", "largest_logit/blocks.1.attention"),
    ],
)
def test_planted_faults_are_seen(
    fault: str, layout: str, shown: str, pool: Pool, config: str, plain: Any, tmp_path: Path
) -> None:
    assert shown in apart(measured(pool, config, tmp_path, layout, fault), plain(False))


def test_a_model_of_ones_own_has_them_by_its_layers(pool: Pool, config: str, tmp_path: Path) -> None:
    """Alike in each layout; with a name of megacore's own blocks, a reader would not find the layer."""
    options, found = [f"model.source={forks.written(tmp_path)}"], []
    for layout in ("one", "tp2pp2sp"):
        world, overrides = LAYOUTS[layout]
        folder = str(tmp_path / layout)
        assert (
            pool.run(world, training.run_rank, config, [*options, *overrides.split()], folder) == [0] * world
        )
        found.append(
            {name: x for name, x in training.metrics(folder)[0].items() if name.partition("/")[0] in KINDS}
        )
    assert apart(*found) == []
    layers = [f"blocks.{number}" for number in range(4)]
    assert {f"{kind}/{name}" for kind in KINDS[:4] for name in layers} <= found[0].keys()


def test_a_shared_parameter_counts_with_the_layer_that_makes_it(tmp_path: Path) -> None:
    """A block that reads the head's norm would show its sizes, and the head would have lost them."""
    model = {"num_layers": 4, "source": parameter_owners.__file__, "head_bias": True}
    config = run_of(training.write_config(tmp_path, "unused", model=model))
    layers = {matrix.name: matrix.layer for matrix in statistics.Named(config).every}
    assert layers["norm.weight"] == layers["head.bias"] == "head"
    assert layers["embedding.weight"] == "embedding" and layers["blocks.1.norm1.weight"] == "blocks.1"
