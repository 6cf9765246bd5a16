"""muP: first weights, rates and scales by logical widths, against the published rules written
out by name; and its refusals.
"""

from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch

from megacore.config import Config
from megacore.config.optim_groups import ParameterGroups
from megacore.distributed.shard import Shard, shard_of
from megacore.errors import ConfigError
from megacore.model import parametrization
from megacore.model.stage import Stage
from megacore.optimizers.rule import register, unregister
from megacore.pipeline.partition import layer_ranges
from megacore.tools.planner.buckets import buffers_of
from megacore.tools.settings.group_table import group_table
from tests.build import model_of, run_of, topology_of
from tests.training import write_config
from tests.unit.test_engine import accumulate, engine_of

# four times as wide
WIDE = ["model.parametrization=mup", "model.base_width=32", "model.hidden_size=128", "model.num_heads=16"]
LLAMA = (
    "model.position=rope model.norm=rmsnorm model.activation=swiglu model.ffn_size=96 "
    "model.bias=false model.tie_embeddings=false"
)
VARIANTS = {
    "gpt": "",
    "llama, grouped queries": f"{LLAMA} model.num_kv_heads=4 model.qk_norm=true",
    "one key and value head": f"{LLAMA} model.num_kv_heads=1",
    "wider heads": "model.num_heads=4 model.base_head_size=8",
}


@pytest.fixture
def configure(tmp_path: Path) -> Callable[..., Config]:
    """`configure(overrides)`: the tests' small config, resolved, for any number of ranks."""
    path = write_config(
        tmp_path, "unused", model={"num_layers": 2}, train={"precision": "fp64"}, optim={"weight_decay": 0.25}
    )
    return lambda *overrides, world=1: run_of(path, *overrides, world=world)


def is_hidden(name: str) -> bool:
    """By name: a matrix of a block."""
    return name.startswith("blocks.") and name.endswith("weight") and "norm" not in name


def parameters(config: Config) -> dict[str, torch.nn.Parameter]:
    return dict(model_of(config).named_parameters())


@pytest.mark.parametrize("variant", VARIANTS)
def test_first_weights_and_rates_are_those_of_table_8(variant: str, configure: Callable[..., Config]) -> None:
    """Yang et al. 2022: hidden matrices have a variance and, with Adam, a rate in proportion
    to 1 / fan-in; a table, which may be the head's weight too, and vectors have neither. The
    rate times the weight decay stays.
    """
    config = configure(*WIDE, *VARIANTS[variant].split())
    standard = configure(*WIDE[2:], *VARIANTS[variant].replace("model.base_head_size=8", "").split())
    plain, groups = parameters(standard), ParameterGroups(config.optim)
    for name, parameter in parameters(config).items():
        group, hidden = groups.of(name, shard_of(parameter)), is_hidden(name)
        assert group.factor == (0.25 if hidden else 1.0), name
        assert group.lr * group.weight_decay == pytest.approx(config.optim.lr * 0.25)
        torch.testing.assert_close(
            parameter.data, plain[name].data * (0.5 if hidden else 1.0), rtol=1e-12, atol=0
        )
    assert config.logit_scale == 0.25
    assert config.model.attention_scale == (8**0.5 / 32 if variant == "wider heads" else 8**-0.5)


@pytest.mark.parametrize("variant", VARIANTS)
def test_with_sgd_the_other_parameters_have_the_larger_rate(
    variant: str, configure: Callable[..., Config]
) -> None:
    """Table 8's column for SGD: tables and vectors in proportion to the width, hidden
    matrices as they are.
    """
    config = configure(*WIDE, *VARIANTS[variant].split(), "optim.kind=sgd")
    for name, parameter in parameters(config).items():
        shared = "query_norm" in name or "key_norm" in name  # by all heads, of one size
        right = 1.0 if is_hidden(name) or shared else 4.0
        assert ParameterGroups(config.optim).of(name, shard_of(parameter)).factor == right, name


@pytest.mark.parametrize(("scale", "right"), [("original", 1.0), ("match_rms_adamw", 0.5)])
def test_with_muon_a_hidden_update_has_the_same_largest_singular_value(
    scale: str, right: float, configure: Callable[..., Config]
) -> None:
    """Yang, Simon and Bernstein 2023.

    The scale that is as large as AdamW's updates grows with the root of the longer side, here twofold. AdamW
    has the rest, which muP leaves as it is.
    """
    config = configure(*WIDE, "optim.kind=muon", f"optim.muon_scale={scale}", "model.bias=false")
    groups = ParameterGroups(config.optim)
    for name, parameter in parameters(config).items():
        group = groups.of(name, shard_of(parameter))
        assert (group.rule.name, group.factor) == (("muon", right) if is_hidden(name) else ("adamw", 1.0)), (
            name
        )
    with pytest.raises(ConfigError, match=r"optim\.groups: mup knows no rate of muon for embedding\.weight"):
        group_table(configure(*WIDE, 'optim.groups=[{"match": ["embedding.weight"], "kind": "muon"}]'))


def test_depth(configure: Callable[..., Config]) -> None:
    """CompleteP (Dey et al. 2025): what blocks add is divided by the depth over that of the
    base, and not once more at first.
    """
    config = configure(*WIDE, "model.num_layers=8", "model.base_layers=2")
    own, base = parameters(config), parameters(configure(*WIDE))
    assert config.residual_scale == 0.25 and configure(*WIDE, "model.num_layers=8").residual_scale == 1.0
    for name in (
        "blocks.1.attention.output.weight",
        "blocks.1.feed_forward.down.weight",
        "blocks.1.attention.qkv.weight",
    ):
        assert torch.equal(own[name], base[name])
    assert shard_of(own["blocks.7.feed_forward.down.weight"]).init_std == 0.02 / 4**0.5 / 2


def trained(config: Config) -> dict[str, torch.Tensor]:
    """All weights and state after three steps on random gradients of the model."""
    stage, engine = engine_of(config)
    for step in range(1, 4):
        accumulate(config, stage, engine, step)
        engine.step(1e-2)
    return {name: tensor for name, (tensor, _) in engine.tensors().items()}


@pytest.mark.parametrize("variant", ["gpt", "llama, grouped queries"])
@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_at_the_base_width_it_is_the_standard_parametrization(
    variant: str, kind: str, configure: Callable[..., Config]
) -> None:
    """Bit by bit, so a rate that was found without muP is one at its base.

    At another base the same run is another.
    """
    settings = [*WIDE[2:], *VARIANTS[variant].split(), f"optim.kind={kind}"]
    mup = [*settings, "model.parametrization=mup", "model.base_layers=2"]
    plain, same, other = (
        trained(configure(*more))
        for more in (settings, [*mup, "model.base_width=128"], [*mup, "model.base_width=64"])
    )
    assert plain.keys() == same.keys() and all(torch.equal(plain[name], same[name]) for name in plain)
    assert any(not torch.equal(plain[name], other[name]) for name in plain)


def of_ranks(config: Config) -> list[Shard]:
    """The records of every parameter on two tensor ranks."""
    stages = [
        Stage(config, layers, topology_of(config, rank), "meta")
        for rank in range(2)
        for layers in layer_ranges(config)
    ]
    return [shard_of(parameter) for stage in stages for _, parameter in sorted(stage.named_parameters())]


def test_a_rank_asks_logical_matrices(configure: Callable[..., Config]) -> None:
    """Never a shard's fan-in, which is half of it for what is split by columns, nor that of queries,
    keys and values glued together.
    """
    tp2 = configure(*WIDE, "parallel.tensor=2", world=2)
    one = {
        shard.global_shape: (shard.width, shard.init_std)
        for shard in map(shard_of, parameters(configure(*WIDE)).values())
    }
    assert all(one[shard.global_shape] == (shard.width, shard.init_std) for shard in of_ranks(tp2))

    def of_the_shard(shard: Shard) -> list[int]:
        return [matrix.sizes(shard.local_shape)[2] for matrix in shard.logical_matrices]

    with mock.patch.object(parametrization, "fan_ins", of_the_shard):
        assert any(one[shard.global_shape] != (shard.width, shard.init_std) for shard in of_ranks(tp2))


SOURCE = """
from megacore.config.schema import ModelConfig
from megacore.distributed.shard import LogicalMatrix, Shard, new_parameter
from megacore.model.block import Block as Gpt


class Settings(ModelConfig):
    latent: int = 8
    stated: bool = True


class Block(Gpt):
    def __init__(self, index, config, mesh, dtype, device):
        super().__init__(index, config, mesh, dtype, device)
        model = config.model
        maps = (LogicalMatrix("expert", (), (0,), (1,), (2,)),) if model.stated else ()
        experts = Shard((3, model.hidden_size, model.ffn_size), decay=True, init_std=0.02, matrices=maps)
        self.experts = new_parameter(experts, dtype, device)
        self.narrow = new_parameter(Shard((model.hidden_size, model.latent), decay=True, init_std=0.02), dtype, device)
"""  # noqa: E501


def test_a_model_of_ones_own(configure: Callable[..., Config], tmp_path: Path) -> None:
    """What grows is found by building its layers at the base width: a fan-in that a
    setting of its own fixes does not.
    """
    (tmp_path / "mine.py").write_text(SOURCE)
    config = configure(*WIDE, f"model.source={tmp_path / 'mine.py'}")
    found = {name: shard_of(parameter) for name, parameter in model_of(config, "meta").named_parameters()}
    assert (found["blocks.1.experts"].width, found["blocks.1.experts"].init_std) == (4.0, 0.01)
    assert (found["blocks.1.narrow"].width, found["blocks.1.narrow"].init_std) == (1.0, 0.02)
    with pytest.raises(
        ConfigError, match=r"model\.parametrization: blocks\.0\.experts does not say which matrices it has"
    ):
        model_of(configure(*WIDE, f"model.source={tmp_path / 'mine.py'}", "model.stated=false"), "meta")


def test_the_table_shows_the_rates(configure: Callable[..., Config]) -> None:
    """What --print-config prints: one group of parameters by each factor."""
    table = group_table(configure(*WIDE, "optim.lr=0.004", 'optim.groups=[{"match": ["*up*"], "lr": 0.008}]'))
    assert "  others: adamw lr=0.004 weight_decay=0.25 " in table
    assert "  others, rate by width × 0.25: adamw lr=0.001 weight_decay=1 " in table
    assert "  optim.groups[0], rate by width × 0.25: adamw lr=0.002 weight_decay=1 " in table
    assert "blocks.{0-1}.attention.qkv.weight" in table.split("rate by width")[1]
    frozen = group_table(configure(*WIDE, 'optim.groups=[{"match": ["*up*"], "lr": 0}]'))
    assert "  optim.groups[0]: adamw lr=0 " in frozen, "a rate of 0 has no factor by width"


REFUSED = [
    (["model.base_width=32"], "model.base_width: only model.parametrization=mup reads it (null, or mup)"),
    (["model.base_head_size=8"], "model.base_head_size: only model.parametrization=mup reads it"),
    (["model.base_layers=2"], "model.base_layers: only model.parametrization=mup reads it"),
    (
        ["model.parametrization=mup"],
        "model.base_width: mup has no width at which its rates are those of the config",
    ),
    (["model.parametrization=sp"], "model.parametrization: "),
    ([*WIDE, "model.base_width=0"], "model.base_width: "),
    ([*WIDE, "model.base_width=-32"], "model.base_width: "),
    ([*WIDE, "model.base_width=wide"], "model.base_width: "),
    ([*WIDE, "model.base_width=36"], "model.base_width: 36 would have 4.5 heads of head_size 8"),
    ([*WIDE, "model.base_width=4"], "model.base_width: 4 would have 0.5 heads of head_size 8"),
    ([*WIDE, "model.base_head_size=24"], "model.base_width: 32 would have 1.333 heads of base_head_size 24"),
    ([*WIDE, "model.base_head_size=0"], "model.base_head_size: "),
    ([*WIDE, "model.base_layers=0"], "model.base_layers: "),
    ([*WIDE, "model.base_layers=1.5"], "model.base_layers: "),
    (
        [*WIDE, "optim.kind=orthogonal"],
        "optim.kind: orthogonal with these settings does not declare how large its updates are, so muP",
    ),
    (
        [*WIDE, "optim.kind=muon", "optim.muon_heads=apart"],
        "optim.kind: muon with these settings does not declare how large its updates are",
    ),
    (
        [*WIDE, 'optim.groups=[{"match": ["*up*"], "kind": "orthogonal"}]'],
        "optim.groups: orthogonal with these settings does not declare how large",
    ),
]


@pytest.mark.parametrize(("overrides", "says"), REFUSED)
def test_what_means_nothing_is_refused(
    overrides: list[str], says: str, configure: Callable[..., Config]
) -> None:
    """In one line, before anything starts."""
    from tests.whole_rule import Orthogonal

    register(Orthogonal)
    try:
        with pytest.raises(ConfigError) as refusal:
            configure(*overrides)
    finally:
        unregister(Orthogonal)
    assert str(refusal.value).startswith(f"config error: {says}") and "\n" not in str(refusal.value)


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_the_planner_knows_the_buffers(kind: str, configure: Callable[..., Config]) -> None:
    """Parameters of another rate have a buffer of their own, whose buckets are sent by themselves."""
    config = configure(*WIDE, f"optim.kind={kind}", "engine.bucket_mib=0.05")
    engine = engine_of(config)[1]
    found = [[bucket.stop - bucket.start for bucket in buffer.buckets] for buffer in engine.buffers]
    assert found == [buffer.buckets for buffer in buffers_of(config, 0)]
    standard = engine_of(configure(*WIDE[2:], f"optim.kind={kind}", "engine.bucket_mib=0.05"))[1]
    assert len(engine.buffers) == len(standard.buffers) + 1
