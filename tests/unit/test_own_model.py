"""What is known of a model of the user's own without a device: its parameters, its products and their
share of the peak, its dry run.
"""

import math
import re
from pathlib import Path

import pytest
import torch

from launch import plan
from megacore.config import Config
from megacore.distributed.collectives import own_part
from megacore.distributed.communicator import Group
from megacore.distributed.shard import shard_of
from megacore.errors import CheckpointError, ConfigError
from megacore.optimizers.rule import RULES, unregister
from megacore.tools.choices.compiling import can_compile
from megacore.tools.choices.flops import counted_layers, flops_per_token, layer_cost, model_flops
from megacore.tools.choices.measured import cost_of
from megacore.tools.choices.partition import stage_costs
from megacore.tools.choices.utilisation import Utilisation
from megacore.tools.library import predict
from megacore.tools.planner.activations import rank_activations
from megacore.tools.planner.memory import rank_memory
from megacore.tools.settings.load import load
from tests import forks, training
from tests.build import model_of, run_of

TINY = str(forks.ROOT / "configs/gpt_tiny.json")


def with_source(text: str, folder: Path, *overrides: str, world: int = 1) -> Config:
    (folder / "model.py").write_text(text)
    return run_of(TINY, f"model.source={folder}/model.py", *overrides, world=world)


@pytest.mark.parametrize(
    "overrides", [[], ["model.activation=gelu", "model.num_kv_heads=2", "model.tie_embeddings=false"]]
)
def test_counted_products_are_those_of_the_formulas(tmp_path: Path, overrides: list[str]) -> None:
    """megacore's own block, taken for one of the user's: a product that is missed, or
    counted twice, is another number.
    """
    plain = run_of(TINY, "model.attention=eager", *overrides)
    own = with_source(
        "from megacore.model.block import Block\n", tmp_path, "model.attention=eager", *overrides
    )
    counted = counted_layers(own)
    assert (
        counted is not None
        and counted[0] is None
        and counted[-1] is None
        and set(counted[1:-1]) == {layer_cost(plain)}
    )
    assert model_flops(own, causal=False) == flops_per_token(plain, causal=False)
    full = own.model_copy(update={"train": own.train.model_copy(update={"recompute": "full"})})
    assert layer_cost(full).backward == layer_cost(plain).backward + layer_cost(plain).forward
    assert stage_costs(own) == stage_costs(plain)


def test_the_utilisation_is_that_of_the_own_layers(tmp_path: Path) -> None:
    """Of the GPT's, it would be 15 % too high here; what nobody knows is null."""
    own = with_source(forks.documented(), tmp_path)
    model, h, f, s = own.model, own.model.hidden_size, own.model.ffn_size, own.train.seq_len
    assert f is not None
    of_token = 3 * (model.num_layers * (2 * 4 * h * h + 2 * 2 * h * f + 4 * s * h) + 2 * h * model.vocab_size)
    peak = Utilisation(own, torch.device("cpu"), 1, peak=1e12)
    assert peak.full(1e6) == pytest.approx(1e6 * of_token / 1e12, rel=1e-12) and of_token < flops_per_token(
        own, False
    )
    assert peak.causal(1e6) is None and peak.full(1e6, pairs=0.5) is None


def test_layers_that_need_content_are_not_guessed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A kernel of the user's that torch cannot run without content: the plan says so, and MFU is null."""
    text = forks.documented().replace(
        "return self.down(", "assert x.sum().item() < 1e9\n        return self.down("
    )
    own = with_source(text, tmp_path)
    assert counted_layers(own) is None and model_flops(own, causal=False) is None
    assert plan.run(["--config", TINY, f"model.source={tmp_path}/model.py", "parallel.pipeline=2"]) == 0
    said = capsys.readouterr().out
    assert "memory and what is sent are unknown" in said and "GFLOP" not in said
    line = text[: text.index("assert x.sum")].count("\n") + 1
    # else nobody knows what to mend
    why = rf"{tmp_path}/model.py, line {line}, counting its products: RuntimeError: "
    assert why in said
    with pytest.raises(
        ConfigError, match=f"--plot: the layers of model.source do not run on tensors without content: {why}"
    ):
        plan.run(
            [
                "--config",
                TINY,
                f"model.source={tmp_path}/model.py",
                "parallel.pipeline=2",
                "--plot",
                str(tmp_path / "a.png"),
            ]
        )


def test_what_tensor_ranks_cannot_divide_is_named() -> None:
    """The last of four ranks would find nothing of two heads, and say only that an index is out of range."""
    with pytest.raises(ValueError, match=r"2 rows cannot be divided over 4 ranks \(tensor\)"):
        own_part(torch.ones(2, 3), Group("tensor", (0, 1, 2, 3), 0))


def test_a_field_may_be_a_tensor(tmp_path: Path) -> None:
    """Training takes it; without content it was taken for a layer that does not run."""
    field = "    fields = {'double': lambda samples: torch.from_numpy(samples.tokens * 2)}\n\n"
    text = forks.documented().replace("class Block(nn.Module):\n", f"class Block(nn.Module):\n{field}")
    assert counted_layers(with_source(text, tmp_path)) is not None


def test_a_plan_counts_the_own_parameters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The GPT's formulas would count 1,377,408."""
    own = with_source(forks.documented(), tmp_path)
    whole = sum(math.prod(shard_of(p).global_shape) for p in model_of(own, "meta").parameters())
    source = f"model.source={tmp_path}/model.py"
    assert (
        plan.run(
            [
                "--config",
                TINY,
                source,
                "parallel.pipeline=2",
                "parallel.tensor=2",
                "model.tie_embeddings=false",
            ]
        )
        == 0
    )
    said = capsys.readouterr().out
    untied = own.model.vocab_size * own.model.hidden_size
    assert (
        f"parameters    {whole + untied:,}, of the layers of" in said and "three times the products" in said
    )
    assert "Each pipeline rank at its peak" in said and "Sent by each rank" in said
    held = [int(count.replace(",", "")) for count in re.findall(r"(?m)^ *\d+ +\d+(?:–\d+)? +([\d,]+)", said)]
    norms = (2 * own.model.num_layers + 1) * own.model.hidden_size  # which tensor ranks hold alike
    assert 2 * sum(held) - norms == whole + untied


@pytest.mark.parametrize(
    ("name", "world", "layout"),
    [
        ("gpt_7b", 8, []),
        ("gpt_1b", 4, ["parallel.pipeline=2", "parallel.schedule=zb_h1", "train.recompute=full"]),
        ("llama_8b", 8, ["parallel.tensor=2", "parallel.sequence=true", "engine.kind=native"]),
    ],
)
def test_megacores_block_as_one_of_the_users_is_planned_alike(
    name: str, world: int, layout: list[str], tmp_path: Path
) -> None:
    """Two descriptions of a block drift apart: what the time model knows of megacore's
    own must be what the layers do.
    """
    (tmp_path / "house.py").write_text("from megacore.model.block import Block\n")
    path = str(forks.ROOT / f"configs/{name}.json")
    plain, own = (
        run_of(path, *layout, *source, world=world) for source in ([], [f"model.source={tmp_path}/house.py"])
    )
    assert rank_memory(own) == rank_memory(plain)
    expected, found = (predict(config).terms for config in (plain, own))
    # A recomputed forward ends with what backward needs. The time model's formula repeats all of it, as other
    # trainers do: that is a seventh of the passes, and a twenty-fifth of the step.
    again = "train.recompute=full" in layout
    for term in ("products", "attention"):
        assert found[term] == pytest.approx(expected[term], rel=0.03 if again else 1e-3)
    assert found["passes"] == pytest.approx(expected["passes"], rel=0.15 if again else 0.04)
    assert found["tensor"] == pytest.approx(expected["tensor"], rel=0.02)
    assert sum(found.values()) == pytest.approx(sum(expected.values()), rel=0.04 if again else 0.03)


def test_layouts_of_the_own_layers_are_searched(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a layout that its layers cannot be divided into, nobody would hear before the run; here the second
    block takes no two tensor ranks. Equal layers are measured once, others are not taken for them.
    """
    odd = (
        "        if index == 1 and mesh.tp.size > 1:\n            raise ValueError('not divided')\n     "
        "   self.index = index"
    )
    own = with_source(
        forks.documented().replace("        self.index = index", odd), tmp_path, "train.device=cuda"
    )
    arguments = [
        "train.device=cuda",
        "train.global_batch_size=64",
        "train.precision=bf16",
        "--search",
        "--world",
        "4",
    ]
    assert plan.run(["--config", TINY, f"model.source={tmp_path}/model.py", *arguments]) == 0
    said = capsys.readouterr().out
    assert "launch/pretrain.py" in said and "parallel.tensor=1" in said and "parallel.tensor=2" not in said
    assert cost_of(own, 1) is cost_of(own, 2)
    begin = "        x = context.add(x, self.attention("
    scaled = forks.documented().replace(begin, f"        x = x * 1.0 if self.index == 1 else x\n{begin}")
    own = with_source(scaled, tmp_path, "train.device=cuda")
    assert cost_of(own, 1) is cost_of(own, 3) and cost_of(own, 2) is not cost_of(own, 1)


def test_a_schedule_is_searched_for_the_own_layers(tmp_path: Path) -> None:
    """`auto` was refused. It weighs what these layers keep: on no rank more than under 1F1B."""
    sizes = ["parallel.pipeline=2", "model.num_layers=8", "train.global_batch_size=16", "train.device=cuda"]
    kept = [
        max(
            peak.kept + peak.logits
            for peak in rank_activations(with_source(forks.documented(), tmp_path, *sizes, schedule, world=2))
        )
        for schedule in ("parallel.schedule=auto", "parallel.schedule=1f1b")
    ]
    assert kept[0] <= kept[1]


def test_a_dry_run_needs_no_formulas(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It holds ranks against each other, and shows what they hold and send."""
    forks.written(tmp_path)
    small = ["train.seq_len=16", "train.global_batch_size=8", "parallel.tensor=2", "parallel.sequence=true"]
    assert (
        plan.run(["--config", TINY, f"model.source={tmp_path}/my_model.py", "--simulate-ranks", "0", *small])
        == 0
    )
    out, err = capsys.readouterr()
    assert "matched" in out and "by formula" not in err and "reduce_scatter" in out


def test_own_layers_are_compiled_only_if_told(tmp_path: Path) -> None:
    """`auto` tries on every long run: code that does not compile would end it."""
    assert can_compile(run_of(TINY, "train.steps=1000000"), torch.device("cpu"))
    assert not can_compile(
        with_source(forks.documented(), tmp_path, "train.steps=1000000"), torch.device("cpu")
    )


HEAVY = """

from megacore.optimizers.sgd import SGD, SGDSettings
from megacore.optimizers.rule import register


class HeavySettings(SGDSettings):
    mass: float = 2.0


@register
class Heavy(SGD):
    name = "heavy"
    settings_type = HeavySettings
"""


def test_an_optimizer_may_stand_in_the_file(tmp_path: Path) -> None:
    """Its name and its settings are the config's, beside those of the model, and only where the file
    is named; an edit replaces it.
    """
    try:
        for mass in (2.0, 3.0):
            own = with_source(
                forks.documented() + HEAVY.replace("2.0", str(mass)),
                tmp_path,
                "optim.kind=heavy",
                "model.window=3",
            )
            assert own.optim.kind == "heavy" and own.optim.mass == mass and own.model.window == 3  # type: ignore[attr-defined]
    finally:
        unregister(RULES["heavy"])
    with pytest.raises(ConfigError, match='optim.kind: "heavy" is not valid'):
        load(TINY, ["optim.kind=heavy"])


LATE = """
import torch
from megacore.model.block import Block as Usual


class Block(Usual):
    def forward(self, x, context):
        hasattr(self, "seen") or self.register_buffer("seen", torch.zeros(()))
        return super().forward(x, context)
"""


def test_state_that_a_layer_is_given_late_is_refused_where_it_would_be_lost(tmp_path: Path) -> None:
    """The checkpoint would be whole by all its digests, and another model."""
    (tmp_path / "late.py").write_text(LATE)
    path = training.write_config(
        tmp_path, training.write_corpus(tmp_path), model={"source": "late.py"}, train={"steps": 2}
    )
    wrong = "nothing was saved: the model has got the torch buffer blocks.0.seen, which no checkpoint saves"
    with pytest.raises(CheckpointError, match=wrong):
        training.run_rank(path, [], str(tmp_path / "run"))
    assert not list((tmp_path / "run").glob("checkpoints/step_*"))
