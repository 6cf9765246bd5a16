"""Averages of weights, by `optim.ema` or by a rule: what they are, where they stand, and who uses them."""

import json
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from megacore.checkpoint import Reader
from megacore.distributed.shard import Shard
from megacore.engine.held_tensors import HeldTensors
from tests import training
from tests.distributed.test_evaluate import figures_of
from tests.pool import Pool


def not_restored(config: str, overrides: list[str], log_dir: str) -> int:
    """A run, with a mistake: what is read of averages goes to copies of them."""
    held = HeldTensors.tensors

    def copied(self: HeldTensors) -> Any:
        return {
            key: (tensor.clone() if key.startswith("average/") else tensor, box)
            for key, (tensor, box) in held(self).items()
        }

    with mock.patch.object(HeldTensors, "tensors", copied):
        return training.run_rank(config, overrides, log_dir)


def trained(pool: Pool, folder: Path, name: str, ranks: int, *overrides: str) -> Path:
    assert set(
        pool.run(ranks, training.run_rank, str(folder / "config.json"), list(overrides), str(folder / name))
    ) <= {0}
    return folder / name


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("averages")
    prefix = training.write_corpus(folder)
    training.write_corpus(folder, "valid", tokens=300, seed=1)
    train = {"steps": 8, "eval_every": 2, "eval_batches": 0}
    more = {"data": {"valid": str(folder / "valid")}, "checkpoint": {"every": 4, "keep": 9}}
    config = json.loads(
        Path(training.write_config(folder, prefix, train=train, optim={"decay_steps": 8}, **more)).read_text()
    )
    config["data"]["train"] = prefix
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def tensors(run: Path, step: int, kind: str) -> dict[str, np.ndarray]:
    reader = Reader(run / f"checkpoints/step_{step:08d}")
    names = [name for name in reader.names if name.startswith(f"{kind}/")]
    return {name: reader.read(name, Shard(reader.manifest.tensors[name].shape)).numpy() for name in names}


def same(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> bool:
    return a.keys() == b.keys() and bool(a) and all(np.array_equal(a[name], b[name]) for name in a)


SHARDED = ("parallel.data=2", "engine.shard_optimizer=true")
RESUMED = {"ema": ("optim.ema=0.9",), "schedule_free": ("optim.kind=schedule_free",)}


@pytest.fixture(scope="module", params=RESUMED)
def whole(request: pytest.FixtureRequest, pool: Pool, folder: Path) -> tuple[str, Path]:
    """A run that keeps averages, on two data ranks that divide them."""
    return request.param, trained(
        pool, folder, f"whole_{request.param}", 2, *RESUMED[request.param], *SHARDED
    )


def test_a_run_that_goes_on_in_another_layout_has_the_same_average(
    whole: tuple[str, Path], pool: Pool, folder: Path
) -> None:
    """Bit by bit where nothing else differs; an average that begins anew, or stays as its old
    rank had it, would be another.
    """
    kind, run = whole
    trained(pool, folder, f"resumed_{kind}", 2, *RESUMED[kind], "train.steps=4", "parallel.data=2")
    resumed = trained(
        pool, folder, f"resumed_{kind}", 2, *RESUMED[kind], "parallel.data=2", "engine.kind=fsdp"
    )
    assert same(tensors(run, 4, "average"), tensors(resumed, 4, "average"))
    apart = tensors(resumed, 8, "average")
    for name, average in tensors(run, 8, "average").items():
        np.testing.assert_allclose(apart[name], average, rtol=1e-4, atol=1e-6)
    if kind == "ema":  # the planted fault: the average begins anew
        lost = [*RESUMED[kind], "parallel.data=2", f"checkpoint.resume={resumed}/checkpoints/step_00000004"]
        assert pool.run(2, not_restored, str(folder / "config.json"), lost, str(folder / "lost")) == [0, 0]
        found = tensors(folder / "lost", 8, "average")
        assert not all(np.allclose(found[name], apart[name], rtol=1e-4, atol=1e-6) for name in apart)
    trained(pool, folder, f"again_{kind}", 2, *RESUMED[kind], "train.steps=4", *SHARDED)
    again = trained(pool, folder, f"again_{kind}", 2, *RESUMED[kind], *SHARDED)
    assert same(tensors(run, 8, "average"), tensors(again, 8, "average")) and same(
        tensors(run, 8, "model"), tensors(again, 8, "model")
    )


def test_validation_and_evaluation_are_of_the_average(
    whole: tuple[str, Path], pool: Pool, folder: Path, tmp_path: Path
) -> None:
    """And what was trained is as if nobody had evaluated; `--weights trained` measures that."""
    kind, run = whole
    unseen = trained(pool, folder, f"unseen_{kind}", 2, *RESUMED[kind], *SHARDED, "train.eval_every=0")
    assert same(tensors(run, 8, "model"), tensors(unseen, 8, "model"))
    logged = {line["step"]: line["valid_loss"] for line in training.lines(run) if "valid_loss" in line}

    def measured(*choice: str) -> float:
        return float(
            pool.run(1, figures_of, ["--checkpoint", str(run), *choice], f"{tmp_path}/figures.json")[0][
                "nats_per_token"
            ]
        )

    assert measured() == measured("--weights", "average") == pytest.approx(logged[8], rel=1e-6)
    assert measured("--weights", "trained") != pytest.approx(logged[8], rel=1e-4)


def test_ema_changes_nothing_that_is_trained(pool: Pool, folder: Path) -> None:
    """It is the mean of the weights behind each step, the later ones with more weight; and
    may begin in the middle of a run.
    """
    plain = trained(pool, folder, "plain", 1, "checkpoint.every=1")
    ema = trained(pool, folder, "ema", 1, "checkpoint.every=1", "optim.ema=0.6")
    assert same(tensors(plain, 8, "model"), tensors(ema, 8, "model")) and not tensors(plain, 8, "average")
    parts = [0.6 ** (8 - step) for step in range(1, 9)]
    steps = [tensors(ema, step, "model") for step in range(1, 9)]
    for name, average in tensors(ema, 8, "average").items():
        right = sum(
            part * step[name.replace("average/", "model/")] for part, step in zip(parts, steps, strict=True)
        ) / sum(parts)
        np.testing.assert_allclose(average, right, rtol=1e-5, atol=1e-7)
    begun = trained(pool, folder, "plain", 1, "train.steps=9", "optim.decay_steps=9", "optim.ema=0.6")
    part = (1 - 0.6) / (1 - 0.6**9)
    before, after = tensors(begun, 8, "model"), tensors(begun, 9, "model")
    for name, average in tensors(begun, 9, "average").items():
        model = name.replace("average/", "model/")
        np.testing.assert_allclose(
            average, before[model] + part * (after[model] - before[model]), rtol=1e-5, atol=1e-7
        )


def test_soap_goes_on_in_other_layouts(pool: Pool, folder: Path) -> None:
    """Its bases belong to whole matrices, whoever owns them: one that begins anew would
    change the loss of the next step.
    """
    soap = ("optim.kind=soap", "train.precision=fp64", "train.eval_every=0")
    whole = trained(pool, folder, "whole_soap", 1, *soap)
    trained(pool, folder, "moved_soap", 2, *soap, "train.steps=4", *SHARDED)
    moved = trained(pool, folder, "moved_soap", 2, *soap, "parallel.tensor=2")
    assert training.difference(training.figures(moved), training.figures(whole)) < 1e-9
