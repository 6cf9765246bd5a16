"""The parts of the proof that need no process: layouts by name, shrinking, comparing, finding the first difference."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from megacore.config import load
from megacore.errors import ConfigError
from megacore.model.gpt import whole_model
from megacore.tensor_parallel.shard import Shard
from megacore.verify.compare import Records, against_reference, missing
from megacore.verify.layouts import DEFAULT, Layout, impossible, parse
from megacore.verify.locate import apart
from megacore.verify.record import Record
from megacore.verify.shrink import load_whole, shrink, write_case

CONFIGS = sorted(Path(__file__).resolve().parents[2].glob("configs/*.json"))


def test_layout_names() -> None:
    assert parse("dp2tp4pp3sp") == Layout("dp2tp4pp3sp", 4, 3, 2, True)
    assert parse("one").world == 1
    layouts = [parse(name) for name in DEFAULT]
    assert max(layout.world for layout in layouts) == 8
    assert len({(layout.tensor, layout.pipeline, layout.data, layout.sequence) for layout in layouts}) == len(layouts)


@pytest.mark.parametrize("name", ["", "tp", "tp0", "2tp", "tp2tp2", "sp", "dp2sp", "tp2,pp2", "tp64pp2", "ep2"])
def test_what_is_no_layout_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="--layouts"):
        parse(name)


@pytest.mark.parametrize("path", CONFIGS, ids=[path.stem for path in CONFIGS])
def test_every_config_shrinks_and_keeps_its_structure(path: Path, tmp_path: Path) -> None:
    """If a kind, a tie or a remainder were lost, verify would prove another model than the user's."""
    layouts = [parse(name) for name in DEFAULT]
    user = load_whole(str(path), [])
    case = write_case(tmp_path, shrink(user, layouts, 3, "fp64"))
    for layout in layouts:
        assert impossible(layout, user) is None
        small = load(str(case), layout.overrides(), layout.world).config
    kinds = ("block", "norm", "activation", "position", "bias", "tie_embeddings", "qkv_bias", "qk_norm", "dropout")
    assert [getattr(small.model, kind) for kind in kinds] == [getattr(user.model, kind) for kind in kinds]
    assert small.model.num_heads // small.kv_heads == min(user.model.num_heads // user.kv_heads, 4)
    assert small.model.vocab_size % 4 == user.model.vocab_size % 4
    assert small.train.recompute == user.train.recompute and small.parallel.schedule == user.parallel.schedule
    parameters = sum(p.numel() for p in whole_model(load(str(case)).config).parameters())
    assert parameters < 1_500_000


def test_shrinking_keeps_what_does_not_divide() -> None:
    layouts = [Layout("tp2", 2), Layout("pp4", pipeline=4)]
    user = load_whole("configs/gpt_1b.json", ["model.vocab_size=50257", "model.num_layers=23", "model.num_kv_heads=2"])
    small = shrink(user, layouts, 3, "fp64")["model"]
    assert small["vocab_size"] % 4 == 1 and small["num_layers"] == 5 and small["num_kv_heads"] == 2
    assert impossible(Layout("tp4", 4), user) == "2 key/value heads over 4 tensor ranks" and impossible(layouts[1], user) is None


@pytest.mark.parametrize(
    ("names", "overrides"),
    [
        ("tp2,tp3,dp3,dp2", []),
        ("tp6,dp8", ["model.vocab_size=50257"]),
        ("tp4sp", ["train.seq_len=9", "train.micro_batch_size=4"]),
        ("tp3sp,tp2sp", ["train.micro_batch_size=3", "train.global_batch_size=12"]),
        ("pp2", ["optim.schedule=wsd"]),
    ],
)
def test_the_small_config_suits_every_layout_that_the_user_s_allows(names: str, overrides: list[str], tmp_path: Path) -> None:
    """Else a proof would be refused for numbers that nobody wrote."""
    layouts = [parse(name) for name in names.split(",")]
    user = load_whole("configs/gpt_1b.json", ["model.num_heads=12", "model.hidden_size=1536", "model.ffn_size=6144", *overrides])
    case = write_case(tmp_path, shrink(user, layouts, 3, "fp64"))
    for layout in layouts:
        assert impossible(layout, user) is None
        small = load(str(case), layout.overrides(), layout.world).config
        assert small.model.vocab_size % layout.tensor == user.model.vocab_size % layout.tensor
        assert small.num_microbatches >= 2 and small.model.num_layers >= 4
        assert small.kv_heads > layout.tensor  # a rank's number must not do for that of its first head
    odd = load_whole("configs/gpt_1b.json", ["train.seq_len=9", "train.micro_batch_size=1"])
    assert impossible(parse("tp4sp"), odd) == "9 tokens of a microbatch over 4 tensor ranks"


def records(folder: Path, pieces: list[tuple[torch.Tensor, Shard]], loss: float = 2.0) -> Records:
    folder.mkdir()
    for rank, piece in enumerate(pieces):
        record = Record(folder, rank)
        record.tensors("gradient 1", {"weight": piece})
        record.figures(1, loss, 1.0)
        record.close()
    return Records(folder, len(pieces))


def test_a_replica_that_differs_is_found_on_its_rank(tmp_path: Path) -> None:
    """Comparing one copy only would miss gradients of a norm that differ by rank."""
    whole = torch.arange(8, dtype=torch.float64).view(4, 2) + 1
    reference = records(tmp_path / "reference", [(whole, Shard((4, 2)))])
    copies = [(whole, Shard((4, 2), count=2)), (whole * (1 + 1e-7), Shard((4, 2), index=1, count=2))]
    found = {(d.name, d.rank): d.relative for d in against_reference(records(tmp_path / "layout", copies), reference)}
    assert found["weight", 0] == 0 and math.isclose(found["weight", 1], 1e-7, rel_tol=1e-6)
    assert found["loss", 0] == found["loss", 1] == 0


def test_slices_are_compared_where_they_belong(tmp_path: Path) -> None:
    """Uneven pieces: 5 rows over 2 ranks. Swapped pieces must not pass."""
    whole = torch.randn(5, 2, dtype=torch.float64)
    reference = records(tmp_path / "reference", [(whole, Shard((5, 2)))])
    shards = [Shard((5, 2), 0, index, 2) for index in range(2)]
    layout = records(tmp_path / "layout", [(whole[:3], shards[0]), (whole[3:], shards[1])])
    assert max(d.relative for d in against_reference(layout, reference)) == 0 and missing(layout, reference) == []
    assert missing(records(tmp_path / "half", [(whole[:3], shards[0])]), reference) == ["gradient of weight, step 1"]


def test_not_a_number_is_never_equal(tmp_path: Path) -> None:
    whole = torch.full((2, 2), torch.nan, dtype=torch.float64)
    reference = records(tmp_path / "reference", [(whole, Shard((2, 2)))], loss=math.nan)
    assert all(d.relative == math.inf for d in against_reference(reference, reference) if d.name != "grad_norm")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_s_part_of_an_activation_is_recognised(rank: int) -> None:
    """Whole, this rank's tokens, its features, its gate and up features, or its rows of an uneven vocabulary; else it differs."""
    whole = np.random.default_rng(0).normal(size=(6, 8))
    tokens, features = whole[rank * 3 : rank * 3 + 3], whole[:, rank * 4 : rank * 4 + 4]
    gated = np.concatenate([whole[:, rank * 2 : rank * 2 + 2], whole[:, 4 + rank * 2 : 6 + rank * 2]], axis=1)
    for part in (whole, tokens, features, gated):
        assert apart(part, whole, rank, 2) == 0
        assert apart(part * 1.01, whole, rank, 2) == pytest.approx(0.01, rel=0.5)
    other = whole[:, (1 - rank) * 4 : (1 - rank) * 4 + 4]
    relative = apart(other, whole, rank, 2)
    assert relative is not None and relative > 0.5
    uneven = np.random.default_rng(1).normal(size=(6, 5))
    assert apart(uneven[:, 3 * rank : 3 * rank + 3], uneven, rank, 2) == 0
