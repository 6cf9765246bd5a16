"""configs/forks/lora.py: adapters are low-rank parts of their matrices, what is frozen costs no gradient and
no state, and merging keeps the model.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from configs.forks.merge_lora import merge
from megacore.checkpoint import Reader, locate
from megacore.checkpoint.weights import check_weights, recorded_sections
from megacore.distributed.shard import Shard
from megacore.engine.alignment import ALIGNMENT
from megacore.errors import CheckpointError, ConfigError
from megacore.model.batch import Microbatch
from megacore.model.stage import Stage
from megacore.tools.checkpoint_weights import load_weights
from megacore.tools.choices.check_engine import check_engine
from megacore.tools.dry_run.dry_report import against_formulas
from megacore.tools.dry_run.dry_step import dry_run
from megacore.tools.settings.load import load
from megacore.tools.verify.compare import Records, missing, pieces_against, scales_of
from megacore.tools.verify.layouts import parse
from megacore.tools.verify.record import run_layout
from megacore.tools.verify.reference import PLAIN, run_reference
from megacore.tools.verify.replay import EXACT, Replay
from megacore.tools.verify.shrink import load_whole, shrink, write_case
from tests import training
from tests.build import model_of, run_of
from tests.forks import ROOT, perturbed

FORK = ROOT / "configs/forks/lora.py"
SIZES: dict[str, Any] = {"num_layers": 2, "num_kv_heads": 2, "position": "rope", "activation": "swiglu"}
LORA: dict[str, Any] = {
    "source": str(FORK),
    "adapt": ["*.attention.*", "blocks.1.feed_forward.*"],
    "rank": 3,
    "alpha": 5.0,
}
TOLERANCE = 1e-10  # fp64, relative to the largest element


def config_of(folder: Path, prefix: str = "unused", **sections: dict[str, Any]) -> str:
    model = SIZES | sections.pop("model", LORA)
    return training.write_config(folder, prefix, model=model, **{"train": {"precision": "fp64"}} | sections)


def gpt_of(stage: Stage, folder: Path) -> Stage:
    """The GPT whose matrices are ``W + alpha / rank · up · down``."""
    gpt, held = model_of(run_of(config_of(folder, model={}))), dict(stage.named_parameters())
    with torch.no_grad():
        for name, parameter in gpt.named_parameters():
            parameter.copy_(held[name])
            up, down = (
                held.get(f"{name.removesuffix('weight')}adapter.{which}.weight") for which in ("up", "down")
            )
            if up is not None and down is not None:
                parameter += LORA["alpha"] / LORA["rank"] * torch.einsum("...r,ri->...i", up, down)
    return gpt


def loss_of(stage: Stage) -> torch.Tensor:
    """The mean loss of some tokens, by PyTorch."""
    tokens, targets = torch.randint(
        training.VOCAB_SIZE, (2, 3, 16), generator=torch.Generator().manual_seed(0)
    )
    return F.cross_entropy(stage.logits(stage({}, Microbatch(tokens))[0]["hidden"]), targets.flatten())


def test_gradients_are_those_of_the_whole_matrices(tmp_path: Path) -> None:
    """By the chain rule from those of a plain GPT: a factor twice or not at all, a bias or an
    activation left out before an adapter.
    """
    stage = perturbed(run_of(config_of(tmp_path)), 0.2)
    gpt = gpt_of(stage, tmp_path)
    ours, theirs = loss_of(stage), loss_of(gpt)
    ours.backward()
    theirs.backward()
    assert abs(ours.item() - theirs.item()) < TOLERANCE
    held, whole, scale = (
        dict(stage.named_parameters()),
        dict(gpt.named_parameters()),
        LORA["alpha"] / LORA["rank"],
    )
    adapters = {name.removesuffix("up.weight") for name in held if name.endswith(".adapter.up.weight")}
    assert len(adapters) == 2 + 4
    for adapter in adapters:
        up, down, right = (
            held[f"{adapter}up.weight"],
            held[f"{adapter}down.weight"],
            whole[adapter.replace("adapter.", "weight")].grad,
        )
        assert right is not None
        expected = scale * right @ down.T, scale * up.flatten(0, -2).T @ right.flatten(0, -2)
        for parameter, gradient in zip((up, down), expected, strict=True):
            assert parameter.grad is not None
            assert (
                float((parameter.grad - gradient).detach().abs().max() / gradient.detach().abs().max())
                < TOLERANCE
            ), adapter
    assert all((".adapter." in name) == (parameter.grad is not None) for name, parameter in held.items())


@pytest.mark.parametrize("overrides", [[], ["engine.kind=fsdp", "parallel.tensor=2"]])
def test_what_is_frozen_has_no_gradient_and_no_state(tmp_path: Path, overrides: list[str]) -> None:
    """By the plan, and by the bytes that a rank holds."""
    config = run_of(config_of(tmp_path, train={"precision": "bf16", "device": "cuda"}), *overrides, world=4)
    dry = dry_run(config, 0)
    assert not against_formulas(config, dry)
    every = list(model_of(config, "meta").parameters())
    room = sum(-(-p.numel() // ALIGNMENT) * ALIGNMENT for p in every if p.requires_grad)
    assert 0 < dry.held["gradients"] <= 4 * room
    assert 0 < dry.held["optimizer"] <= 12 * room  # masters and both moments
    assert 4 * room < sum(p.numel() for p in every)


def test_a_run_from_the_weights_of_a_gpt(tmp_path: Path) -> None:
    """It begins as that model, leaves its weights as they are, goes on from its own checkpoint; merged,
    it is a GPT of the same logits.
    """
    prefix, log_dir = training.write_corpus(tmp_path), tmp_path / "lora"
    origin = training.write_weights(tmp_path / "base", run_of(config_of(tmp_path, prefix, model={})))
    blend = {"train": [[0.6, prefix], [0.4, prefix]]}
    path = config_of(
        tmp_path,
        prefix,
        train={"precision": "fp64", "steps": 2},
        data=blend,
        checkpoint={"weights": str(origin)},
    )
    for steps in (2, 3):
        assert training.run_rank(path, [f"train.steps={steps}"], str(log_dir)) == 0
    base, tuned = Reader(origin), Reader(locate(log_dir))
    stage, gpt = (
        model_of(run_of(path)),
        model_of(run_of(config_of(tmp_path, prefix, model={}))),
    )
    assert torch.equal(loss_of(stage), loss_of(gpt)), "adapters begin with an effect"
    load_weights(base, [gpt])
    assert len(training.figures(log_dir)) == 3
    for name in base.names:
        shape = Shard(base.manifest.tensors[name].shape)
        assert torch.equal(base.read(name, shape), tuned.read(name, shape)), name
    adapters = {
        name.removeprefix("model/")
        for name in tuned.names
        if ".adapter." in name and name.startswith("model/")
    }
    assert {name.removeprefix("adam_m/") for name in tuned.names if name.startswith("adam_m/")} == adapters
    load_weights(tuned, [stage])
    assert merge(log_dir, tmp_path / "merged").endswith("with the adapters of 6 of them in them")
    merged = Reader(locate(tmp_path / "merged"))
    config = run_of({key: recorded_sections(merged)[key] for key in ("model", "train")})
    assert config.model.source is None
    one = model_of(config)
    load_weights(merged, [one])
    with torch.no_grad():
        found, right, before = (
            model.logits(model.hidden(torch.arange(16)[None])) for model in (one, stage, gpt)
        )
    assert float((found - right).abs().max()) < 1e-12 < float((before - right).abs().max())


def test_the_proof_knows_what_is_frozen(tmp_path: Path) -> None:
    """In 16 bits, where it also repeats sums and updates: plain code trains what the
    trainer does, and nothing else.
    """
    user = load_whole(str(ROOT / "configs/forks/lora.json"), ["model.num_layers=2"])
    case = str(write_case(tmp_path, shrink(user, [parse("one")], 2, "bf16")))
    ours, theirs = tmp_path / "trainer", tmp_path / "plain"
    for folder in (ours, theirs):
        folder.mkdir()
    run_reference(run_of(case, *PLAIN), theirs, "bf16", None)
    run_layout(case, parse("one").overrides(), ours, None, theirs)
    found, plain = Records(ours, 1), Records(theirs, 1)
    assert not missing(found, plain)
    trained = [key.removeprefix("gradient 1|") for key in plain.whole if key.startswith("gradient 1|")]
    assert len(trained) == 2 * 8 and all(".adapter." in name for name in trained)
    assert (
        max(difference.relative for difference in Replay(found, run_of(case), trained).differences()) < EXACT
    )
    assert (
        max(
            d.relative
            for d in pieces_against(found.ranks, found.places, plain.whole, scales_of(plain.whole))
            if "adapter" not in d.name
        )
        == 0
    )


def test_wrong_use_is_refused_in_one_line(tmp_path: Path) -> None:
    prefix = training.write_corpus(tmp_path)
    config = run_of(config_of(tmp_path, prefix, model=LORA | {"adapt": ["*.attention.*", "*.mlp.*"]}))
    with pytest.raises(
        ConfigError, match=r"model.adapt: \*.mlp.\* matches no matrix \(a pattern of names such as blocks.0"
    ):
        model_of(config)
    with pytest.raises(ConfigError, match="model.attention_gate's products have no adapters"):
        load(config_of(tmp_path, prefix, model=LORA | {"attention_gate": "headwise"}), [])
    path = config_of(tmp_path, prefix, model=LORA | {"adapt": ["blocks.1.*"]})
    with pytest.raises(ConfigError, match="of the layers of pipeline rank 0 no parameter is trained"):
        check_engine(run_of(path, "parallel.pipeline=2", world=2), torch.device("cpu"))
    base = run_of(config_of(tmp_path, prefix, model={}))
    origin = training.write_weights(tmp_path / "base", base, but="blocks.0.norm1.weight")
    with pytest.raises(CheckpointError, match="has no tensor model/blocks.0.norm1.weight"):
        check_weights(Reader(origin), run_of(config_of(tmp_path, prefix)))
    with pytest.raises(CheckpointError, match="its model has no adapters"):
        merge(origin, tmp_path / "merged")
