"""The mean is over the learned targets of the global batch, whatever ranks hold how many of them, or none."""

import contextlib
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from megacore.config.schema import IGNORED
from megacore.data.indexed import MASK
from megacore.data.samples import EvalSamples, SampleStream, training_stream
from megacore.data.shuffle import dealt
from megacore.pipeline.runtime import Runtime
from megacore.tools.launchers import place_from_environment
from megacore.train.evaluation import evaluate
from megacore.train.loader import Loader
from megacore.train.step import TrainStep
from tests import training
from tests.build import mesh_of, run_of, step_of

TOLERANCE = 1e-9  # fp64 rounds sums of some thousand terms to 1e-13, and three updates by Adam enlarge that
SEQ = 16


def mean_by_rank(self: TrainStep, batch: Any, field: str) -> Any:
    """The planted fault: each rank's mean over its own targets, averaged over ranks."""
    count = torch.stack([(microbatch[field] != IGNORED).sum() for microbatch in batch]).sum().double()
    return 1.0 / (count.clamp(min=1.0) * self.mesh.sample_group.size)


def train(
    config_path: str, overrides: list[str], fault: bool = False
) -> tuple[list[tuple[float, float]], list[int], float, float]:
    """Losses and norms of three steps; the targets that this rank learns in each; the plain loss before
    the first; the loss behind all.
    """
    place = place_from_environment()
    config = run_of(config_path, *overrides, world=place.world_size)
    mesh = mesh_of(config)
    step, stream = step_of(config, mesh), training_stream(config)
    loader, figures, learned = Loader(config, mesh, stream), [], []
    plain = plain_loss(step, loader) if place.world_size == 1 else 0.0
    with mock.patch.object(TrainStep, "one_over_count", mean_by_rank) if fault else contextlib.nullcontext():
        for number in (1, 2, 3):
            batch = loader.read(number)
            learned.append(sum(int((microbatch.targets != IGNORED).sum()) for microbatch in batch))
            done = step(number, batch)
            figures.append((done.loss.item(), done.grad_norm.item()))
    loader.close()
    step.engine.settle()
    assert config.data.train is not None
    samples = EvalSamples(config.data.train, SEQ, training.VOCAB_SIZE)
    loss = evaluate(config, Runtime(step.stages, None, mesh.pp), mesh, samples).loss
    step.engine.close()
    mesh.close()
    return figures, learned, plain, loss


@torch.no_grad()
def plain_loss(step: TrainStep, loader: Loader) -> float:
    """The mean over the first batch's learned targets, by PyTorch's own cross entropy."""
    (model,), losses = step.stages, []
    for batch in loader.read(1):
        logits, targets = model.logits(model.hidden(batch.tokens, batch.key)), batch.targets.flatten()
        losses.append(
            F.cross_entropy(logits.reshape(len(targets), -1), targets, reduction="none")[targets != IGNORED]
        )
    return float(torch.cat(losses).mean())


@pytest.fixture
def config_path(tmp_path: Path) -> str:
    """A corpus of which data rank 1 of 2 learns nothing in the first step, and others by chance."""
    prefix = training.write_corpus(tmp_path)
    path = training.write_config(
        tmp_path, prefix, train={"precision": "fp64", "micro_batch_size": 2}, model={"num_layers": 2}
    )
    config = run_of(path)
    mask = np.random.default_rng(0).integers(0, 2, 4000).astype(np.uint8)
    first = dealt(range(1, 2), 2, config.train)[0, 1].ravel()
    for sample in SampleStream(prefix, SEQ, config.train.seed, training.VOCAB_SIZE).locate(first)[2]:
        mask[sample * SEQ + 1 : (sample + 1) * SEQ + 1] = 0
    Path(prefix + MASK).write_bytes(mask.tobytes())
    return path


def test_every_layout_takes_the_global_mean(pool: Any, config_path: str) -> None:
    """A rank without a learned target would divide by none, or weigh as much as one that has all."""
    ((right, _, plain, loss),) = pool.run(1, train, config_path, [])
    assert right[0][0] == pytest.approx(plain, rel=TOLERANCE), "the mean by its formula"
    for overrides in (
        ["parallel.data=2"],
        ["parallel.tensor=2"],
        ["parallel.pipeline=2"],
        ["parallel.context=2"],
    ):
        ranks = pool.run(2, train, config_path, overrides)
        for figures, _, _, found in ranks:
            assert training.difference(figures, right) < TOLERANCE and abs(found - loss) < TOLERANCE * loss, (
                overrides
            )
        if overrides == ["parallel.data=2"]:
            assert ranks[0][1][0] > 0 and ranks[1][1][0] == 0, "what this is about"
    faulty = pool.run(2, train, config_path, ["parallel.data=2"], True)
    assert training.difference(faulty[0][0], right) > 1e-2, "a mean by rank is noticed"


def test_a_validation_without_a_learned_target_says_so(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its loss would be 0 / 0, logged as a number that is none.

    Here the one batch that it reads has no answer.
    """
    prefix = training.write_corpus(tmp_path)
    mask = np.zeros(4000, np.uint8)
    mask[-1] = 1
    Path(prefix + MASK).write_bytes(mask.tobytes())
    data = {"train": training.write_corpus(tmp_path, "learned"), "valid": prefix}
    config = training.write_config(tmp_path, prefix, train={"steps": 1, "eval_batches": 1}, data=data)
    assert training.run_rank(config, [], str(tmp_path / "run")) == 0
    assert (
        "step 1: no validation loss: of what train.eval_batches reads, no token is learned"
        in capfd.readouterr().out
    )
    assert all("valid_loss" not in line for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines())
