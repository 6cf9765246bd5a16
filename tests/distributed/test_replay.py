"""`launch/replay.py`: past steps of runs of any layout are done again as they were, and
what was planted in them is named.
"""

import contextlib
import io
import json
import os
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from launch import replay
from megacore.data.shuffle import derive_key, permute
from megacore.errors import UserError
from megacore.tools.prepare.indexed_writer import IndexedWriter
from megacore.tools.replay import steps
from tests import training
from tests.rollback import poisoned_rank

TOKENS, SEQ, BATCH, BAD_STEP, STRANGE = 4000, 16, 8, 24, 64
OVERRIDES = [
    "train.steps=24",
    "checkpoint.every=5",
    "checkpoint.keep=9",
    "data.tokenizer=bytes",
    "model.num_layers=2",
]
OVERRIDES += ["optim.lr=0.02", "optim.schedule=constant", "optim.warmup_steps=2"]
LAYOUT = ["parallel.tensor=2", "parallel.data=2", "train.precision=fp64"]


def write_bad_corpus(folder: Path) -> tuple[str, int]:
    """Tokens of 0 to 9, but for one document that step `BAD_STEP` reads, of a token that stands nowhere else.

    Its prefix, and the place of its sample in the step.
    """
    place = 5
    count = (TOKENS - 1) // SEQ
    sample = int(permute(np.array([(BAD_STEP - 1) * BATCH + place]), count, derive_key(0, 0, 0))[0])
    values = (np.cumsum(np.random.default_rng(0).integers(0, 3, TOKENS)) % 10).astype(np.uint16)
    first = sample * SEQ + 2
    values[first : first + SEQ - 2] = STRANGE
    prefix = str(folder / "bad")
    with IndexedWriter(prefix, np.uint16) as writer:
        for document in (values[:first], values[first : first + SEQ - 2], values[first + SEQ - 2 :]):
            writer.write(document)
            writer.end_document()
    return prefix, place


def replayed(*argv: str, layer: str | None = None, microbatches: Sequence[int] = ()) -> tuple[int, str]:
    """The script's status and what it says, or an error's line.

    `layer`: whose output overflows, in these microbatches of each step.
    """
    begin, out = steps.Replay.__init__, io.StringIO()

    def planted(self: steps.Replay, *args: Any) -> None:
        begin(self, *args)
        for name, module in self.trainer.train_step.stages[0].named_modules():
            if name == layer:
                overflow = lambda _, given, x: (  # noqa: E731
                    x * 1e300 * 1e300 if self.gauges.microbatch in microbatches else x
                )
                module.register_forward_hook(overflow, prepend=True)

    with contextlib.redirect_stdout(out), mock.patch.object(steps.Replay, "__init__", planted):
        try:
            return replay.run(list(argv)), out.getvalue()
        except UserError as error:
            return 2, str(error)


@pytest.fixture(scope="module")
def bad_run(pool: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """A run of tensor 2 and data 2 that meets a bad sample."""
    folder = tmp_path_factory.mktemp("replay")
    prefix, place = write_bad_corpus(folder)
    pool.run(
        4,
        training.run_rank,
        training.write_config(folder, prefix),
        [*OVERRIDES, *LAYOUT],
        str(folder / "run"),
    )
    return folder / "run", place


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_a_bad_sample_is_named_with_its_document_and_its_text(
    pool: Any, bad_run: tuple[Path, int], tmp_path: Path
) -> None:
    """And loss and norm are those that four ranks have recorded, and nothing is
    written into the run's folder.
    """
    run, place = bad_run
    before = contents(run)
    [(status, said)] = pool.run(
        1, replayed, str(run), "--step", str(BAD_STEP), "--json", str(tmp_path / "found.json")
    )
    assert status == 0, said
    assert "as recorded within fp64's rounding, in 4 recorded steps" in said
    found = json.loads((tmp_path / "found.json").read_text())
    [(_, printed)] = pool.run(1, replayed, str(run), "--step", str(BAD_STEP), "--json", "-")
    assert json.loads(printed)["samples"] == found["samples"]
    assert found["stands_out"] and found["tensor"] is not None
    [sample] = found["samples"]
    assert (sample["position"], sample["token"]["document"], sample["token"]["id"]) == (place, 1, STRANGE)
    assert "document 1:" in said and "@@@@@@@" in said
    assert contents(run) == before


@pytest.mark.parametrize("microbatches", [[3], range(BATCH)])
def test_the_layer_that_overflows_is_named(
    pool: Any, bad_run: tuple[Path, int], tmp_path: Path, microbatches: Sequence[int]
) -> None:
    """And the sample in which it does, or that it does in all of them.

    What comes behind it is not finite either.
    """
    found = tmp_path / "found.json"
    arguments = (str(bad_run[0]), "--step", "22", "--json", str(found))
    [(status, said)] = pool.run(
        1, partial(replayed, layer="blocks.1.feed_forward", microbatches=microbatches), *arguments
    )
    assert status == 1, said
    assert "NOT AS RECORDED: step 21 now has loss not finite" in said
    assert "first tensor that is not finite: the output of blocks.1.feed_forward\n" in said
    report = json.loads(found.read_text())
    assert report["tensor"]["microbatches"] == list(microbatches)
    assert report["samples"][0]["position"] == min(microbatches)
    assert report["all_samples"] == (len(microbatches) == BATCH)


def test_a_record_that_is_other_is_said_first(pool: Any, bad_run: tuple[Path, int], tmp_path: Path) -> None:
    """By more than rounding explains. If the corpus is newer than the checkpoint, it is to blame."""
    run = Path(shutil.copytree(bad_run[0], tmp_path / "run"))
    figures = training.lines(run)
    figures[21]["loss"] *= 1 + 1e-6
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in figures))
    [(status, said)] = pool.run(1, replayed, str(run), "--step", "23")
    assert status == 1
    assert said.splitlines()[1].startswith("NOT AS RECORDED: step 22 now has loss")
    for file in (run / "checkpoints").glob("*/manifest.json"):
        os.utime(file, (0, 0))
    [(status, said)] = pool.run(1, replayed, str(run), "--step", "23")
    assert status == 2
    assert said.startswith("data error: ") and "was changed or copied after step_00000020 was saved" in said


def test_a_run_that_went_back_is_replayed_with_the_samples_that_it_was_dealt(
    pool: Any, bad_run: tuple[Path, int], tmp_path: Path
) -> None:
    """Batches 12 and 13 are skipped, then it goes back to step 10 and on with batch 14.

    The replay computes right what one rank did not.
    """
    limits = ["train.steps=15", "optim.max_skips=2", "optim.max_rollbacks=1"]
    run, config = tmp_path / "run", str(bad_run[0].parent / "config.json")
    pool.run(1, poisoned_rank, config, [*OVERRIDES, *limits], str(run), [12, 13], float("nan"))
    [(status, said)] = pool.run(1, replayed, str(run), "--step", "13")
    assert status == 0, said
    assert (
        "step 13 with batch 16" in said and "as recorded within fp32's rounding, in 3 recorded steps" in said
    )
    assert "--skipped replays that" in said
    [(status, said)] = pool.run(1, replayed, str(run), "--step", "13", "--skipped")
    assert status == 1 and "step 13 with batch 13" in said
    assert "NOT AS RECORDED: step 12 now has" in said and "gradient norm not finite" in said
    # nothing that came later tells by how much the run is ahead
    shutil.rmtree(run / "checkpoints/step_00000015")
    [(status, said)] = pool.run(1, replayed, str(run), "--step", "12")
    assert status == 0 and "step 12 with batch 15" in said, said


def test_a_capacity_drops_the_rows_that_it_dropped(
    pool: Any, bad_run: tuple[Path, int], tmp_path: Path
) -> None:
    """It is of a microbatch: with other microbatches other rows are dropped, and
    a good device would be blamed.
    """
    config, run = str(bad_run[0].parent / "config.json"), tmp_path / "run"
    experts = [
        "model.num_experts=4",
        "model.experts_per_token=2",
        "model.expert_ffn_size=16",
        "model.capacity_factor=0.6",
    ]
    experts += ["model.position=rope", "model.norm=rmsnorm", "model.activation=swiglu", "model.bias=false"]
    layout = [
        "parallel.data=2",
        "parallel.expert=2",
        "train.micro_batch_size=2",
        "train.precision=fp64",
        "train.steps=7",
    ]
    pool.run(2, training.run_rank, config, [*OVERRIDES, *experts, *layout], str(run))
    [(status, said)] = pool.run(1, replayed, str(run), "--step", "7")
    assert status == 0 and "as recorded within fp64's rounding" in said, said


def test_gradients_that_were_compressed_are_no_fault_of_a_device(
    pool: Any, bad_run: tuple[Path, int], tmp_path: Path
) -> None:
    """In fp32 8 bits change the norm by more than rounding.

    And no tensor of a healthy step is out of line.
    """
    config, run = str(bad_run[0].parent / "config.json"), tmp_path / "run"
    narrow = ["parallel.data=2", 'engine.compression={"kind": "int8"}', "train.steps=12"]
    pool.run(2, training.run_rank, config, [*OVERRIDES, *narrow], str(run))
    [(status, said)] = pool.run(1, replayed, str(run), "--step", "12")
    assert (
        status == 0 and "as recorded within what engine.compression may change, in 2 recorded steps" in said
    ), said
    assert "every tensor of step 12 is finite and in line with those of 1 step before it" in said


def test_mistakes_are_one_line_with_status_2(pool: Any, bad_run: tuple[Path, int], tmp_path: Path) -> None:
    run = Path(shutil.copytree(bad_run[0], tmp_path / "run"))
    (tmp_path / "empty").mkdir()
    cases = [
        (
            str(run),
            "3",
            "config error: --step: there is no checkpoint before step 3",
            "a step from 6 to 24: its first checkpoint is of step 5",
        ),
        (str(run), "25", "config error: --step: the run has done no step 25", "1 to 24"),
        (
            str(run),
            "24",
            "config error: --skipped: skipped.jsonl has no step 24",
            "leave it out",
            "--skipped",
        ),
        (
            str(run),
            "24",
            "config error: train.seed: would make it another step",
            "data.train",
            "train.seed=3",
        ),
        (str(run), "24", "data error: ", "launch/prepare.py", "data.train=nowhere"),
        (str(tmp_path / "empty"), "3", "log error: ", "the folder of a run, its log.dir"),
    ]
    for folder, step, begins, has, *more in cases:
        [(status, said)] = pool.run(1, replayed, folder, "--step", step, *more)
        assert status == 2 and said.startswith(begins) and has in said and "\n" not in said, said


def test_a_damaged_checkpoint_is_passed_over(pool: Any, bad_run: tuple[Path, int], tmp_path: Path) -> None:
    """Damage that only its digests show; and if no other is left, that is said."""
    run = Path(shutil.copytree(bad_run[0], tmp_path / "run"))
    damage(run / "checkpoints/step_00000020")
    [(status, said)] = pool.run(1, replayed, str(run), "--step", "21")
    assert status == 0 and "step_00000015: steps 16 to 21 again" in said, said
    for folder in (run / "checkpoints").iterdir():
        if folder.name in ("step_00000005", "step_00000010", "step_00000015"):
            damage(folder)
    [(status, said)] = pool.run(1, replayed, str(run), "--step", "21")
    assert (
        status == 2 and said.startswith("checkpoint error: ") and "no checkpoint before it is whole" in said
    )


def test_a_second_copy_is_read_where_the_first_is_gone(
    pool: Any, bad_run: tuple[Path, int], tmp_path: Path
) -> None:
    """A replay from an older checkpoint takes longer, or there is none: the
    copies lay there, and nobody looked.
    """
    run, second = Path(shutil.copytree(bad_run[0], tmp_path / "run")), tmp_path / "second"
    second.mkdir()
    (run / "checkpoints/step_00000020").rename(second / "step_00000020")
    said = pool.run(1, replayed, str(run), "--step", "21")[0][1]
    assert "step_00000015: steps 16 to 21 again" in said, said
    config = json.loads((run / "config.json").read_text())
    config["checkpoint"]["mirror"] = str(second)
    (run / "config.json").write_text(json.dumps(config))
    [(status, said)] = pool.run(1, replayed, str(run), "--step", "21")
    assert status == 0 and f"{second}/step_00000020" in said, said


def damage(checkpoint: Path) -> None:
    """Changes the last byte of a file of tensors."""
    file = min(checkpoint.glob("*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
