"""Muon: what its operator does to singular values, the published one beside it, which
parameters it has, and what is refused.
"""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megacore.config import Config
from megacore.config.optim_groups import ParameterGroups
from megacore.distributed.shard import shard_of
from megacore.errors import ConfigError
from megacore.optimizers.muon import Muon, MuonSettings, orthogonalised
from megacore.optimizers.rule import ParameterShard
from megacore.tools.choices.check_engine import check_engine
from megacore.tools.settings.group_table import group_table
from tests.build import model_of, run_of
from tests.training import write_config

CPU = torch.device("cpu")
LEAST, MOST = 0.66, 1.22  # where five steps take the singular values from 1/100 of the norm on


@pytest.fixture
def configure(tmp_path: Path) -> Callable[..., Config]:
    """`configure(overrides)`: the tests' small config with Muon, resolved."""
    path = write_config(tmp_path, "unused", model={"num_layers": 2})
    return lambda *overrides: run_of(
        path, "optim.kind=muon", *overrides, world=2 if "engine.kind=deepspeed" in overrides else 1
    )


def matrices(rows: int, columns: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Three maps whose singular values lie between 1 and 1/20, times 1e-3."""
    torch.manual_seed(rows)
    u, _, v = torch.linalg.svd(torch.randn(3, rows, columns, dtype=torch.float64), full_matrices=False)
    return (
        1e-3 * u @ torch.diag_embed(torch.logspace(0, -1.3, min(rows, columns), dtype=torch.float64)) @ v
    ).to(dtype)


@pytest.mark.parametrize("shape", [(12, 12), (8, 40), (40, 8)])
def test_singular_values_come_near_one_and_vectors_stay(shape: tuple[int, int]) -> None:
    """Each map by itself, by SVD: a norm over all maps, or the longer side's product, would
    leave singular values far below.
    """
    x = matrices(*shape)
    u, _, v = torch.linalg.svd(x, full_matrices=False)
    core = u.mT @ orthogonalised(x, 5, torch.float64) @ v.mT
    values = core.diagonal(dim1=1, dim2=2)
    assert LEAST < float(values.min()) and float(values.max()) < MOST
    assert float((core - torch.diag_embed(values)).abs().max()) < 1e-11
    assert (
        float((orthogonalised(1000 * x, 5, torch.float64) - orthogonalised(x, 5, torch.float64)).abs().max())
        < 1e-11
    )


@pytest.mark.parametrize("shape", [(12, 12), (8, 40), (40, 8), (96, 64)])
def test_in_bf16_the_operator_stays_within_a_bound(shape: tuple[int, int]) -> None:
    """Singular values in almost the same interval, and the whole within 4 % of fp64's: rounding
    is 2^-8 in each of 15 products.
    """
    x = matrices(*shape)
    exact, rounded = orthogonalised(x, 5, torch.float64), orthogonalised(x.float(), 5, torch.bfloat16)
    assert rounded.dtype == torch.bfloat16
    values = torch.linalg.svdvals(rounded.double())
    assert LEAST - 0.04 < float(values.min()) and float(values.max()) < MOST + 0.04
    assert float((rounded.double() - exact).norm() / exact.norm()) < 0.04


@pytest.mark.parametrize("scale", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("shape", [(24, 8), (8, 24)])
def test_it_is_pytorchs_on_one_matrix(shape: tuple[int, int], nesterov: bool, scale: str) -> None:
    """Within the rounding to bf16, in which PyTorch computes always: momentum, scale by
    shape and decay must be the same.
    """
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(shape))
    theirs = torch.optim.Muon([weight], lr=0.1, weight_decay=0.3, nesterov=nesterov, adjust_lr_fn=scale)
    rule = Muon(MuonSettings.model_validate({"muon_nesterov": nesterov, "muon_scale": scale}))
    state, updates = {"muon_m": torch.zeros(shape)}, torch.zeros(())
    for _ in range(3):
        weight.grad = torch.randn(shape)
        before = ours = weight.detach().clone()
        prepared, state = rule.prepare(ParameterShard(weight.grad, state, updates, before.clone))
        direction, own = rule.direction(ParameterShard(prepared[None], {}, updates, before.clone))
        assert own == {}
        ours = (1 - 0.1 * 0.3) * ours - 0.1 * direction[0]
        theirs.step()
        assert float((ours - weight.detach()).norm() / (ours - before).norm()) < 0.04


def group_of(config: Config) -> dict[str, str]:
    """The rule of every parameter, by name."""
    groups = ParameterGroups(config.optim)
    return {name: groups.of(name).rule.name for name, _ in model_of(config, "meta").named_parameters()}


@pytest.mark.parametrize(
    "overrides", [[], ["model.tie_embeddings=false", "model.position=rope"], ["model.activation=swiglu"]]
)
def test_hidden_matrices_have_muon_and_all_else_adamw(
    configure: Callable[..., Config], overrides: list[str]
) -> None:
    """By the placements: the embedding, the head and learned positions are
    matrices too, and must not have it.
    """
    config = configure(*overrides)
    hidden = {
        f"blocks.{i}.{part}.weight"
        for i in (0, 1)
        for part in ("attention.qkv", "attention.output", "feed_forward.up", "feed_forward.down")
    }
    assert {name for name, rule in group_of(config).items() if rule == "muon"} == hidden
    assert len(config.optim.groups) == 1 and "blocks.*.norm1.weight" in config.optim.groups[0].match
    assert "  others: muon lr=" in group_table(config)
    check_engine(config, CPU)


def test_groups_of_the_user_come_first(configure: Callable[..., Config], tmp_path: Path) -> None:
    """They may give any matrix to Muon, the embedding too, and any parameter another rate; what
    they leave open is by default.
    """
    own = [
        {"match": ["embedding.weight"], "kind": "muon", "lr": 0.5},
        {"match": ["*norm*", "blocks.1.*"], "kind": "sgd"},
    ]
    config = configure(f"optim.groups={json.dumps(own)}", "optim.muon_adamw_lr=0.25")
    rules, groups = group_of(config), ParameterGroups(config.optim)
    assert (rules["embedding.weight"], rules["blocks.1.attention.qkv.weight"]) == ("muon", "sgd")
    assert (rules["blocks.0.attention.qkv.weight"], rules["position"], groups.of("position").lr) == (
        "muon",
        "adamw",
        0.25,
    )
    check_engine(config, CPU)
    (tmp_path / "config.json").write_text(json.dumps(config.model_dump(mode="json", by_alias=True)))
    assert run_of(tmp_path / "config.json").optim == config.optim, "a recorded config is complete"


SOURCE = """
import torch
from torch import nn
from megacore.distributed.shard import Shard, new_parameter, replicated
from megacore.model.block import Block as GPTBlock
from megacore.model.layers import Layer

class Block({base}):
    def __init__(self, index, config, mesh, dtype, device):
        super().__init__(*({arguments}))
        size = config.model.hidden_size
        self.mix = new_parameter(Shard({shape}, (replicated(mesh.tp),), decay={decay}, init_std=0.02), dtype, device)

    def forward(self, x, context):
        return x
"""  # noqa: E501


def source(folder: Path, **parts: str) -> str:
    given = {
        "base": "GPTBlock",
        "arguments": "index, config, mesh, dtype, device",
        "shape": "(size, size)",
        "decay": "True",
    } | parts
    (folder / "mine.py").write_text(SOURCE.format(**given))
    return f"model.source={folder / 'mine.py'}"


def test_a_users_own_matrix_is_hidden_too(configure: Callable[..., Config], tmp_path: Path) -> None:
    """A weight of two dims that decays is a matrix, whatever its name; one of three that
    states no matrices is left to AdamW.
    """
    assert group_of(configure(source(tmp_path)))["blocks.1.mix"] == "muon"
    assert group_of(configure(source(tmp_path, shape="(2, size, size)")))["blocks.1.mix"] == "adamw"
    assert group_of(configure(source(tmp_path, decay="False")))["blocks.1.mix"] == "adamw"


def test_heads_are_rows_of_one_matrix_or_matrices(configure: Callable[..., Config]) -> None:
    """With grouped queries, which lie strided in their weight: each kind tiles its part once."""
    from megacore.engine.whole_matrices import matrices_of

    shard = shard_of(model_of(configure("model.num_kv_heads=2"), "meta").blocks["0"].attention.qkv.weight)
    sizes = {
        by: [m.sizes(shard.global_shape) for m in matrices_of(Muon(MuonSettings(muon_heads=by)), shard)]
        for by in ("joined", "apart")
    }
    assert sizes == {
        "joined": [(1, 32, 32), (1, 16, 32), (1, 16, 32)],
        "apart": [(4, 8, 32), (2, 8, 32), (2, 8, 32)],
    }
    weight = torch.randn(shard.global_shape)
    for joined, apart in zip(
        *([m.view(weight) for m in matrices_of(Muon(MuonSettings(muon_heads=by)), shard)] for by in sizes),
        strict=True,
    ):
        assert torch.equal(joined[0], apart.flatten(0, 1))


VECTORS = '[{"match": ["*norm*"], "kind": "muon"}]'
REFUSED = {
    "scale": (
        ["optim.muon_scale=spectral"],
        'optim.muon_scale: "spectral" is not valid',
        "original or match_rms_adamw",
    ),
    "precision": (
        ["optim.muon_precision=fp16"],
        'optim.muon_precision: "fp16" is not valid',
        "auto or bf16 or fp32 or fp64",
    ),
    "heads": (["optim.muon_heads=both"], 'optim.muon_heads: "both" is not valid', "joined or apart"),
    "no steps": (["optim.muon_steps=0"], "optim.muon_steps: 0 is not valid", "a whole number"),
    "steps": (["optim.muon_steps=65"], "optim.muon_steps: 65 is not valid", "at most 64"),
    "momentum": (["optim.muon_momentum=1.0"], "optim.muon_momentum: 1.0 is not valid", "below 1"),
    "rate": (["optim.muon_adamw_lr=-1"], "optim.muon_adamw_lr: -1 is not valid", "at least 0"),
    "rate of nothing": (
        ["optim.muon_adamw_lr=0.1", "optim.lr=0"],
        "lr 0.1 follows the schedule of optim.lr, which is 0",
        "above 0",
    ),
    "nesterov": (["optim.muon_nesterov=1"], "optim.muon_nesterov: 1 is not valid", "true or false"),
    "unknown": (["optim.muon_beta=0.9"], "optim.muon_beta: unknown key", "did you mean"),
    "deepspeed": (
        ["engine.kind=deepspeed", "train.precision=fp32"],
        "optim.kind: the deepspeed engine steps with AdamW, not muon",
        "adamw, or",
    ),
    "norms": (
        [f"optim.groups={VECTORS}"],
        "optim.groups: muon cannot update blocks.0.norm1.weight: it is no matrix",
        "another kind",
    ),
    "nothing left": (
        ['optim.groups=[{"match": ["blocks.*"], "kind": "adamw"}]'],
        "optim.kind: muon updates hidden matrices, and optim.groups",
        "adamw",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_meant_is_refused_in_a_line(configure: Callable[..., Config], case: str) -> None:
    overrides, wrong, right = REFUSED[case]
    with pytest.raises(ConfigError) as refusal:
        check_engine(configure(*overrides), CPU)
    line = str(refusal.value)
    assert line.startswith("config error: optim.") and wrong in line and right in line and "\n" not in line


def test_a_model_without_matrices_is_refused(configure: Callable[..., Config], tmp_path: Path) -> None:
    """And one whose layer states matrices that are a part of its weight: the rest would never be updated."""
    bare = {"base": "Layer", "arguments": "", "decay": "False"}
    with pytest.raises(
        ConfigError, match=r"optim\.kind: muon updates hidden matrices, and the model has none"
    ):
        configure(source(tmp_path, **bare))
    parts = (
        'matrices=(__import__("megacore.distributed.shard").distributed.shard.LogicalMatrix("a", '
        "(slice(0, 3),)),), decay=True"
    )
    with pytest.raises(
        ConfigError,
        match=r"muon cannot update blocks\.0\.mix: the matrices that its layer states are not all of it",
    ):
        check_engine(configure(source(tmp_path, decay=f"True, {parts.removesuffix(', decay=True')}")), CPU)
