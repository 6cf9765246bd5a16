"""Several decays from one run's checkpoints: each has the rates and the samples of a run that decays
there, and says where it cannot.
"""

from pathlib import Path

import pytest

from megacore.errors import UserError
from megacore.tools.inputs import Inputs
from tests import training
from tests.build import run_of
from tests.pool import Pool

DECAYS = {4: 2, 6: 3}  # steps from a checkpoint on


@pytest.fixture(scope="module")
def constant(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with a run of eight steps at a constant rate, behind a warm-up."""
    folder = tmp_path_factory.mktemp("decays")
    optim = {"schedule": "constant", "warmup_steps": 2}
    path = training.write_config(
        folder,
        training.write_corpus(folder),
        train={"steps": 8},
        optim=optim,
        checkpoint={"every": 1, "keep": 9},
    )
    assert pool.run(1, training.run_rank, path, [], str(folder / "constant")) == [0]
    return folder


def decay(folder: Path, start: int, length: int) -> list[str]:
    """What a user types."""
    resume = f"checkpoint.resume={folder}/constant/checkpoints/step_{start:08d}"
    return [resume, "optim.schedule=wsd", f"optim.decay_steps={length}", f"train.steps={start + length}"]


@pytest.mark.parametrize(("start", "length"), DECAYS.items())
def test_a_decay_is_that_of_a_run_of_its_own(pool: Pool, constant: Path, start: int, length: int) -> None:
    """Rates, samples and losses: a decay that begins a step late, or with the
    first samples again, has others.
    """
    typed, config = decay(constant, start, length), str(constant / "config.json")
    assert pool.run(1, training.run_rank, config, typed[1:], str(constant / f"single_{start}")) == [0]
    assert pool.run(1, training.run_rank, config, typed, str(constant / f"decay_{start}")) == [0]
    right, found = (
        training.metrics(constant / f"single_{start}"),
        training.metrics(constant / f"decay_{start}"),
    )
    assert [line["step"] for line in found] == [*range(start + 1, start + length + 1)]
    for name in ("lr", "loss", "grad_norm", "tokens"):
        assert [line[name] for line in found] == [line[name] for line in right[start:]], name
    rate = training.metrics(constant / "constant")[start]["lr"]
    assert [line["lr"] for line in found] == pytest.approx(
        [rate * (length - i) / length for i in range(1, length + 1)]
    )


def test_what_would_jump_is_refused(pool: Pool, constant: Path) -> None:
    """From a checkpoint that decays already, and before the checkpoint; but a
    decay that was interrupted goes on.
    """

    def refused(*overrides: str) -> str:
        try:
            Inputs(run_of(constant / "config.json", *overrides, f"log.dir={constant}/another"), 0)
        except UserError as error:
            return str(error)
        return ""

    assert not refused(*decay(constant, 4, 2))
    early = refused(*decay(constant, 6, 2), "optim.decay_steps=5")
    assert early == (
        "config error: optim.decay_steps: 5 steps up to train.steps 8 begin before step 6 of the "
        "checkpoint (at most 2, or train.steps=11)"
    )
    typed = [*decay(constant, 4, 4), "checkpoint.every=1"]
    assert pool.run(1, training.run_rank, str(constant / "config.json"), typed, str(constant / "long")) == [0]
    inside = f"checkpoint.resume={constant}/long/checkpoints/step_00000006"
    assert not refused(inside, *typed[1:])
    assert (
        "step_00000006: is in its decay already, at 0.5 of optim.lr (an earlier checkpoint, of a step "
        "with the whole rate)" in refused(inside, *decay(constant, 6, 2)[1:])
    )
    assert not refused(f"checkpoint.resume={constant}/constant/checkpoints/step_00000001", *typed[1:]), (
        "in its warm-up, as this run is"
    )
