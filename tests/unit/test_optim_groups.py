"""Groups of parameters with a rule and settings of their own: what they are, what is
refused, and what each parameter gets.
"""

import json
import math
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megacore.config import Config
from megacore.config.optim_groups import ParameterGroups
from megacore.distributed.shard import shard_of
from megacore.engine.learning_rate import learning_rate
from megacore.engine.native import NativeEngine
from megacore.errors import ConfigError
from megacore.optimizers.rule import RULES, ReferenceStep, Rule, register, unregister
from megacore.tools.choices.check_engine import check_engine
from megacore.tools.settings.group_table import group_table, parameter_shards
from megacore.tools.verify.matrix_rules import reference_direction, reference_state, zeros
from tests.build import model_of, run_of
from tests.commands import run_script
from tests.one_rank import CPU, accumulate, engine_of
from tests.training import write_config

ROOT = Path(__file__).resolve().parents[2]
GROUPS: list[dict[str, Any]] = [
    {"match": ["*.attention.qkv.weight", "blocks.1.*.weight"], "kind": "sgd", "lr": 0.01, "momentum": 0.5},
    {"match": ["embedding.*", "*norm*"], "weight_decay": 0.7, "beta2": 0.5, "lr": 1e-4},
]


@pytest.fixture
def configure(tmp_path: Path) -> Callable[..., Config]:
    """`configure(groups, overrides)`: the tests' small config, resolved."""
    train = {"precision": "fp64"}
    path = write_config(
        tmp_path,
        "unused",
        model={"num_layers": 2},
        train=train,
        optim={"weight_decay": 0.3, "warmup_steps": 4},
    )
    return lambda groups, *overrides: run_of(path, f"optim.groups={json.dumps(groups)}", *overrides)


def expected(config: Config, name: str) -> tuple[Rule[Any], float, float]:
    """By hand: the rule, the factor on the rate, and the weight decay of a matrix."""
    if name.endswith("attention.qkv.weight") or (name.startswith("blocks.1.") and name.endswith(".weight")):
        return RULES["sgd"](RULES["sgd"].settings_type(momentum=0.5)), 0.01 / config.optim.lr, 0.3
    if name.startswith("embedding.") or "norm" in name:
        return RULES["adamw"](RULES["adamw"].settings_type(beta2=0.5)), 1e-4 / config.optim.lr, 0.7
    return RULES["adamw"](RULES["adamw"].settings_type()), 1.0, 0.3


def worst_update(
    config: Config, rule_of: Callable[[Config, str], tuple[Rule[Any], float, float]], steps: int = 3
) -> float:
    """The largest relative difference of a parameter or its state from each rule's own
    plain formula, over some steps.
    """
    stage, engine = engine_of(config)
    dims = {name: parameter.dim() for name, parameter in stage.named_parameters()}
    shards = {name: shard_of(parameter) for name, parameter in stage.named_parameters()}
    state: dict[str, dict[str, np.ndarray]] = {}
    worst = 0.0
    for step in range(1, steps + 1):
        accumulate(config, stage, engine, step)
        gradients = {name: gradient.clone() for name, (gradient, _) in engine.gradients().items()}
        norm = float(torch.cat([g.flatten() for g in gradients.values()]).norm())
        clip = min(1.0, config.optim.grad_clip / (norm + 1e-6))
        before = {name: tensor.clone().numpy() for name, (tensor, _) in engine.tensors().items()}
        rate = learning_rate(config.optim, step, config.train.steps)
        engine.step(rate)
        after = {name: tensor.numpy() for name, (tensor, _) in engine.tensors().items()}
        kinds = set()
        for name, gradient in gradients.items():
            rule, factor, decay = rule_of(config, name)
            g, shard = (gradient * clip).numpy(), shards[name]
            held = state.get(name) or zeros(rule, g.shape, shard)
            lr, own_decay = rate * factor, decay if dims[name] > 1 and not name.endswith("bias") else 0.0
            taken = ReferenceStep(step, held, g, before[f"model/{name}"], lr, own_decay)
            state[name] = held = reference_state(rule, taken, shard)
            right = {f"{kind}/{name}": tensor for kind, tensor in held.items()}
            kinds |= right.keys()
            right[f"model/{name}"] = (1 - lr * own_decay) * before[
                f"model/{name}"
            ] - lr * reference_direction(rule, taken, held, shard)
            for key, tensor in right.items():
                moved = np.linalg.norm(tensor - before[key]) if key in before else 1.0
                worst = max(worst, float(np.linalg.norm(after[key] - tensor) / (moved or 1.0)))
        assert after.keys() - kinds == {f"model/{name}" for name in gradients}, (
            "state of another rule is kept"
        )
    return worst


def test_every_parameter_gets_the_rule_and_the_settings_of_its_group(
    configure: Callable[..., Config],
) -> None:
    """Against each rule's formula in plain numpy, with settings that are chosen here by hand."""
    assert worst_update(configure(GROUPS), expected) < 1e-9


def test_settings_on_the_wrong_parameters_are_noticed(
    configure: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planted fault: the last entry that matches decides."""

    def last(self: ParameterGroups, name: str, record: Any = None) -> Any:
        return next(group for group in (*reversed(self.every[:-1]), self.every[-1]) if group.has(name))

    monkeypatch.setattr(ParameterGroups, "of", last)
    with pytest.raises(KeyError):
        worst_update(configure(GROUPS), expected)
    adamw = [entry | {"kind": "adamw"} for entry in GROUPS]
    del adamw[0]["momentum"]

    def all_adamw(config: Config, name: str) -> tuple[Rule[Any], float, float]:
        rule, factor, decay = expected(config, name)
        return (RULES["adamw"](RULES["adamw"].settings_type()) if rule.name == "sgd" else rule), factor, decay

    assert worst_update(configure(adamw), all_adamw) > 1e-3
    monkeypatch.undo()
    assert worst_update(configure(adamw), all_adamw) < 1e-9


@pytest.fixture
def orthogonal() -> Iterator[type[Rule[Any]]]:
    """A rule of whole matrices is registered."""
    from tests.whole_rule import Orthogonal

    yield register(Orthogonal)
    unregister(Orthogonal)


MATRICES = {"match": ["blocks.*.weight"], "kind": "orthogonal", "lr": 0.02}


def test_a_rule_of_whole_matrices(configure: Callable[..., Config], orthogonal: type[Rule[Any]]) -> None:
    """It gets matrices with its own state of two shapes, beside AdamW for the rest, and its
    settings are keys of the config.
    """
    vectors = {"match": ["*norm*"]}
    config = configure([vectors, MATRICES | {"orthogonal_momentum": 0.5}])

    def by_hand(config: Config, name: str) -> tuple[Rule[Any], float, float]:
        if "norm" in name or not (name.startswith("blocks.") and name.endswith(".weight")):
            return RULES["adamw"](RULES["adamw"].settings_type()), 1.0, 0.3
        return orthogonal(orthogonal.settings_type(orthogonal_momentum=0.5)), 0.02 / config.optim.lr, 0.3

    assert worst_update(config, by_hand) < 1e-9
    assert config.optim.orthogonal_momentum == 0.9  # type: ignore[attr-defined]
    with pytest.raises(
        ConfigError, match=r"orthogonal cannot update blocks\.0\.norm1\.weight: it is no matrix"
    ):
        check_engine(configure([MATRICES]), CPU)


@pytest.mark.parametrize("kind", ["sgd", "orthogonal"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_skipped_step_is_skipped_by_all_groups(
    configure: Callable[..., Config], orthogonal: type[Rule[Any]], precision: str, kind: str
) -> None:
    """An infinite gradient in one group leaves every group's weights, state and count."""
    config = configure([{"match": ["*norm*"]}, MATRICES | {"kind": kind}], f"train.precision={precision}")
    stage, engine = engine_of(config)
    accumulate(config, stage, engine, 1)
    engine.step(1e-3)
    before = {name: tensor.clone() for name, (tensor, _) in engine.tensors().items()}
    accumulate(config, stage, engine, 2)
    next(buffer for buffer in engine.buffers if buffer.group.number == 0).gradients[3] = math.inf
    assert engine.step(1e-3).skipped == 1
    assert all(torch.equal(tensor, before[name]) for name, (tensor, _) in engine.tensors().items())
    assert {float(part.updates) for _, part in engine.optimizer.parts} == {1.0} and len(
        engine.optimizer.parts
    ) == 3
    accumulate(config, stage, engine, 2)
    engine.step(1e-3)
    assert not any(
        torch.equal(tensor, before[name])
        for name, (tensor, _) in engine.tensors().items()
        if name.startswith("model/")
    )
    if precision != "fp32":  # what computes is the masters, rounded
        masters = {
            name.removeprefix("model/"): t
            for name, (t, _) in engine.tensors().items()
            if name.startswith("model/")
        }
        assert all(torch.equal(p, masters[name].to(p.dtype)) for name, p in stage.named_parameters())


def test_without_groups_buffers_are_as_before(configure: Callable[..., Config]) -> None:
    """One entry that changes nothing may divide the buffers, but no entry may not."""
    config = configure([])
    engine = NativeEngine(config, [model_of(config)], engine_of(config)[1].mesh)
    assert len(engine.buffers) == 2 and len(engine.optimizer.parts) == 1, (
        "matrices, and what has no weight decay"
    )


REFUSED = [
    (
        [{"match": ["blocks.9.*"]}],
        [],
        "blocks.9.* matches no parameter of the model (a pattern of names such as position and",
    ),
    ([{"match": ["*"]}, {"match": ["Embedding.*"]}], [], "Embedding.* matches no parameter"),
    ([{"match": []}], [], "match: tuple should have at least 1 item"),
    ([{"match": ["*"], "beta1": 1.0}], [], "1.0 is not valid: beta1"),
    ([{"match": ["*"], "kind": "no_such_rule"}], [], "kind: input should be 'adamw'"),
    ([{"match": ["*"], "rate": 1.0}], [], "unknown key rate"),
    (
        [{"match": ["*"], "momentum": 0.5}],
        [],
        "adamw has no setting momentum (beta1, beta2, eps or another kind)",
    ),
    ([{"match": ["*"], "lr": 0.5}], ["optim.lr=0"], "lr 0.5 follows the schedule of optim.lr, which is 0"),
    (
        [{"match": ["*"], "kind": "sgd"}],
        ["engine.kind=deepspeed", "train.precision=fp32"],
        "the deepspeed engine steps with AdamW",
    ),
]


@pytest.mark.parametrize(("groups", "overrides", "says"), REFUSED)
def test_groups_that_cannot_be_meant_are_refused(
    configure: Callable[..., Config], groups: list[dict[str, Any]], overrides: list[str], says: str
) -> None:
    """Else a run would train for days with settings that nothing has."""
    with pytest.raises(ConfigError) as refusal:
        check_engine(configure(groups, *overrides), CPU)
    assert str(refusal.value).startswith("config error: optim.groups: ") and says in str(refusal.value)


def test_the_table_names_every_parameter_once(configure: Callable[..., Config]) -> None:
    """What a reader checks before a run."""
    config = configure(GROUPS)
    lines = group_table(config).splitlines()
    assert lines[1] == "  optim.groups[0]: sgd lr=0.01 weight_decay=0.3 momentum=0.5"
    assert "    blocks.{0-1}.attention.qkv.weight" in lines and "    blocks.1.feed_forward.up.weight" in lines
    assert "    blocks.{0-1}.feed_forward.up.bias" in lines and "    embedding.weight" in lines
    others = [name for name in parameter_shards(config) if expected(config, name)[1] == 1.0]
    shown = lines[next(i for i, line in enumerate(lines) if line.startswith("  others: ")) + 1 :]
    assert len(others) == sum(2 if "{0-1}" in line else 1 for line in shown)


def test_pretrain_prints_and_refuses_before_ranks_meet(tmp_path: Path) -> None:
    """Also with an optimizer in the file that `model.source` names, whose keys are then the config's."""
    source = tmp_path / "mine.py"
    source.write_text(
        (ROOT / "tests/whole_rule.py").read_text() + "\nfrom megacore.model.block import Block  # noqa\n"
    )
    path = write_config(tmp_path, "unused", model={"num_layers": 2, "source": str(source)})

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return run_script("launch/pretrain.py", "--config", path, *arguments)

    shown = run(
        "--print-config",
        'optim.groups=[{"match": ["*norm*"]}, {"match": ["*.weight"], "kind": "orthogonal"}]',
    )
    assert shown.returncode == 0, shown.stderr
    assert "optim.groups[1]: orthogonal lr=0.003 weight_decay=0.1 orthogonal_momentum=0.9" in shown.stdout
    refused = run("optim.kind=orthogonal")
    assert refused.returncode == 2 and refused.stderr.startswith(
        "config error: optim.kind: orthogonal cannot update "
    )
    assert len(refused.stderr.splitlines()) == 1
