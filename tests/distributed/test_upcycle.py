"""`launch/checkpoint.py upcycle`: a mixture that computes what the dense model
did, and trains on in any layout.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from launch.checkpoint import run
from megacore.checkpoint import Reader, locate
from megacore.checkpoint.weights import WEIGHTS
from megacore.config import Config
from megacore.distributed.shard import Shard
from megacore.errors import CheckpointError, ConfigError
from megacore.tools.interchange.check_conversion import own_logits
from tests.build import run_of
from tests.conversion import assert_nothing_written, random_run, relative
from tests.training import difference, figures, run_rank, write_config, write_corpus, write_weights

RMS = {"norm": "rmsnorm", "activation": "swiglu", "position": "rope", "bias": False}
VARIANTS: dict[str, tuple[dict[str, Any], str]] = {
    "swiglu": (RMS, "model.num_experts=4"),
    "gelu, the first block dense, sigmoid": (
        {},
        "model.num_experts=6 model.experts_per_token=3 model.first_dense=1 model.router_scores=sigmoid "
        "model.router_bias_rate=0.1",
    ),
}
ROWS = torch.randint(61, (2, 16), generator=torch.Generator().manual_seed(3))


def upcycle(source: Path, output: Path, settings: str, *options: str) -> Path:
    run(["upcycle", str(source), "--output", str(output), *options, *settings.split()])
    return output


def in_fp64(folder: Path) -> torch.Tensor:
    """The logits of `ROWS` by a run's newest checkpoint."""
    config: Config = run_of(folder / "config.json", "train.precision=fp64")
    return own_logits(config, Reader(locate(folder)), None, ROWS)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    reader = Reader(locate(folder))
    return {
        name: reader.read(name, Shard(t.shape))
        for name, t in reader.manifest.tensors.items()
        if name.startswith(WEIGHTS)
    }


@pytest.mark.parametrize("name", VARIANTS)
def test_it_computes_what_the_dense_model_does(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An expert that is no copy of its layer, or of another's; gate and up
    exchanged; norms or attention left out.
    """
    model, settings = VARIANTS[name]
    random_run(tmp_path / "dense", **model)
    upcycle(tmp_path / "dense", tmp_path / "mixture", settings)
    said = capsys.readouterr().out
    assert "copies of each" in said and "through all 2 blocks, in fp64, differ by" in said
    expected = in_fp64(tmp_path / "dense")
    assert relative(in_fp64(tmp_path / "mixture"), expected) < 1e-10
    upcycle(tmp_path / "dense", tmp_path / "loose", f"{settings} model.router_normalised=false")
    assert "do not add up to 1" in capsys.readouterr().out
    assert relative(in_fp64(tmp_path / "loose"), expected) > 1e-3, "the comparison would see a weight"


def test_noise_is_seeded_and_of_its_size(tmp_path: Path) -> None:
    """Noise that is alike in all experts would leave them copies; one of the process
    would make another model each time.
    """
    random_run(tmp_path / "dense", **RMS)
    made = [
        upcycle(tmp_path / "dense", tmp_path / n, "model.num_experts=4", "--noise", "0.1") for n in ("a", "b")
    ]
    exact = upcycle(tmp_path / "dense", tmp_path / "c", "model.num_experts=4")
    noisy, again, plain = (weights(folder) for folder in (*made, exact))
    assert noisy.keys() == plain.keys()
    for key, values in noisy.items():
        assert torch.equal(values, again[key]), key
        if ".experts." not in key:
            assert torch.equal(values, plain[key]), key
            continue
        added = values - plain[key]
        assert len({float(part.sum()) for part in added}) == 4, "each expert has its own"
        assert abs(float(added.std() / plain[key].std()) - 0.1) < 0.01, key


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ("model.router_balance=global", "model.router_balance"),
        ("train.steps=9", "model.num_experts"),
        ("model.num_experts=4 model.expert_ffn_size=8", "model.expert_ffn_size"),
        ("model.num_experts=4 model.shared_experts=1", "model.shared_experts"),
        ("model.num_experts=4 model.num_layers=3", "model.num_layers"),
        ("model.num_experts=4 model.experts_per_token=5", "model.experts_per_token"),
        ("model.num_experts=4 --noise -1", "--noise"),
    ],
)
def test_refusals(settings: str, key: str, tmp_path: Path) -> None:
    random_run(tmp_path / "dense", **RMS)
    with pytest.raises(ConfigError) as error:
        upcycle(tmp_path / "dense", tmp_path / "out", settings)
    assert error.value.where == key
    assert_nothing_written(tmp_path / "out")


def test_models_that_have_no_copies(tmp_path: Path) -> None:
    """A mixture is no layer to copy."""
    random_run(tmp_path / "mixture", **RMS, num_experts=4)
    with pytest.raises(CheckpointError, match="has experts already"):
        upcycle(tmp_path / "mixture", tmp_path / "out", "model.num_experts=4")
    assert_nothing_written(tmp_path / "out")


def test_it_trains_on_in_any_layout(pool: Any, tmp_path: Path) -> None:
    """From the dense model's first loss, alike where ranks divide experts."""
    plain = write_config(
        tmp_path,
        write_corpus(tmp_path),
        model=RMS | {"num_layers": 2},
        train={"steps": 3, "precision": "fp64"},
    )
    dense = write_weights(tmp_path / "dense", run_of(plain))
    made = upcycle(dense, tmp_path / "mixture", "model.num_experts=4")
    found = {}
    for name, layout, source in (
        ("dense", [], dense),
        ("one", ["model.num_experts=4"], made),
        ("tp2dp2", ["model.num_experts=4", "parallel.tensor=2", "parallel.expert=2"], made),
    ):
        log_dir = str(tmp_path / f"{name}_on")
        pool.run(
            4 if name == "tp2dp2" else 1, run_rank, plain, [f"checkpoint.weights={source}", *layout], log_dir
        )
        found[name] = figures(log_dir)
    assert abs(found["one"][0][0] / found["dense"][0][0] - 1) < 1e-10
    assert difference(found["one"], found["tp2dp2"]) < 1e-9
