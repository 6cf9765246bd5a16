"""`model.source`: a model in a file of the user's own, the one of docs/blocks.md,
through everything that a run does.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from launch.evaluate import run as evaluate
from launch.generate import run as generate
from megacore.checkpoint import Reader, locate
from megacore.config.source import COPY
from megacore.distributed.init import check_source
from megacore.distributed.rank_info import RankInfo
from megacore.errors import CheckpointError, ConfigError, UserError
from megacore.tools.inputs import Inputs
from megacore.tools.interchange.export_hf import config_of
from megacore.tools.launchers import place_from_environment
from tests import forks, training
from tests.build import mesh_of, run_of
from tests.distributed.test_generate import text_of

PRECISE = {"precision": "fp64", "steps": 6}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, pool: Any) -> Path:
    """A config beside the file that it names, and the run of six steps on one
    process, saved after the third too.
    """
    folder = tmp_path_factory.mktemp("fork")
    forks.written(folder)
    corpus = training.write_corpus(folder)
    data = {"train": corpus, "valid": corpus, "tokenizer": "bytes"}
    model = {"source": "my_model.py", "window": 5, "vocab_size": 256, "num_layers": 4}
    path = training.write_config(
        folder, corpus, model=model, data=data, train=PRECISE, checkpoint={"every": 3, "keep": 9}
    )
    assert pool.run(1, training.run_rank, path, [], str(folder / "one")) == [0]
    return folder


def test_a_run_goes_on_in_other_layouts(pool: Any, folder: Path, tmp_path: Path) -> None:
    """A parameter that is saved as another part of its tensor, or a layout that computes another
    window, would change every loss.
    """
    whole = training.figures(folder / "one")
    config = str(folder / "config.json")
    for steps, ranks, overrides in (
        (3, 2, ["parallel.tensor=2", "parallel.sequence=true"]),
        (6, 2, ["parallel.pipeline=2"]),
    ):
        given = [*overrides, f"train.steps={steps}", "optim.decay_steps=6"]
        assert pool.run(ranks, training.run_rank, config, given, str(tmp_path / "moved")) == [0] * ranks
    assert training.difference(training.figures(tmp_path / "moved"), whole) < 1e-12


def test_a_setting_changes_what_is_computed(pool: Any, folder: Path, tmp_path: Path) -> None:
    """If the file's settings did not reach its layers, every window would train alike."""
    pool.run(
        1, training.run_rank, str(folder / "config.json"), ["model.window=1", "train.steps=2"], str(tmp_path)
    )
    assert training.difference(training.figures(tmp_path), training.figures(folder / "one")[:2]) > 1e-6


def test_the_run_keeps_the_file_and_its_digest(folder: Path) -> None:
    """From the run's folder alone, its config must open, with the same model."""
    assert (folder / "one" / COPY).read_text() == forks.documented()
    kept, named = (
        run_of(folder / "one/config.json").model,
        run_of(folder / "config.json").model,
    )
    assert kept.source_digest == named.source_digest and len(str(kept.source_digest)) == 64
    assert kept.source == str(folder / "one" / COPY) and kept.window == 5  # type: ignore[attr-defined]


def test_an_edited_file_does_not_go_on(folder: Path, tmp_path: Path) -> None:
    """Silently, the loss curve would be of two models.

    With the run's copy it goes on, and another run may take its weights.
    """
    edited = forks.written(tmp_path, ("behind >= 0", "behind >= 1 - 1"))
    config, run = str(folder / "config.json"), f"log.dir={folder / 'one'}"

    def inputs(*overrides: str) -> Inputs:
        return Inputs(run_of(config, *overrides), 0)

    with pytest.raises(
        CheckpointError,
        match=f"was written with model.source of digest .*.model.source={folder}/one/source.py, or anot",
    ):
        inputs(run, f"model.source={edited}")
    assert (
        inputs(run, f"model.source={folder}/one/source.py").checkpoint
        == folder / "one/checkpoints/step_00000006"
    )
    weights = f"checkpoint.weights={folder / 'one'}"
    assert inputs(f"log.dir={tmp_path / 'new'}", weights, f"model.source={edited}").weights is not None
    wider = forks.written(tmp_path, ("(size,)", "(2, size), dim=1"), name="wider.py")
    with pytest.raises(
        CheckpointError, match=r"tensor model/blocks.0.feed_forward.up.weight has shape \(128, 32\)"
    ):
        inputs(f"log.dir={tmp_path / 'other'}", weights, f"model.source={wider}")
    plain = training.write_config(
        tmp_path, str(folder / "corpus"), model={"vocab_size": 256, "num_layers": 4}, train=PRECISE
    )
    with pytest.raises(CheckpointError, match="and the config has no model.source"):
        Inputs(run_of(plain, run), 0)


def test_a_checkpoint_executes_nothing(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever gets a checkpoint from others would run their code by opening it; and another file's
    code would be taken for its own.
    """
    checkpoint = ["--checkpoint", str(folder / "one")]
    other = forks.written(tmp_path, ("behind >= 0", "behind >= 1 - 1"))
    monkeypatch.setattr("megacore.config.source.execute", lambda *_: pytest.fail("it is executed"))
    for script in (generate, evaluate):
        with pytest.raises(
            CheckpointError,
            match=f"executed only if you name it .--source {folder}/one/source.py, once you have read it",
        ):
            script(checkpoint, RankInfo())
    monkeypatch.undo()
    monkeypatch.setattr("megacore.config.source.executed", lambda *_: pytest.fail("it is executed"))
    for script in (generate, evaluate):
        with pytest.raises(
            ConfigError, match=f"model.source_digest: {other} has the digest .* keeps as source.py"
        ):
            script([*checkpoint, "--source", str(other)], RankInfo())


def test_no_other_project_has_the_model(folder: Path) -> None:
    """An export would be some family's model, with other tensors."""
    with pytest.raises(CheckpointError, match="a source of the user's own, which no other project has"):
        config_of(Reader(locate(folder / "one")))


def test_the_model_writes_and_is_evaluated_in_every_layout(pool: Any, folder: Path, tmp_path: Path) -> None:
    """A cache that keeps other keys than the window needs would write another text."""
    source = [
        "--checkpoint",
        str(folder / "one"),
        "--source",
        str(folder / "my_model.py"),
        "train.precision=fp64",
    ]
    write = [*source, "--prompt", "déjà vu", "--tokens", "24", "--temperature", "0"]
    (alone,) = pool.run(1, text_of, write)
    for layout in (["parallel.tensor=2"], ["parallel.pipeline=2"]):
        assert pool.run(2, text_of, [*write, *layout])[0] == alone
    losses = []
    for ranks, layout in ((1, []), (2, ["parallel.context=2"])):
        out = tmp_path / f"{ranks}.json"
        assert (
            pool.run(ranks, evaluated, [*source, "--batches", "2", "--json", str(out), *layout])
            == [0] * ranks
        )
        losses.append(json.loads(out.read_text())["nats_per_token"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)


def evaluated(arguments: list[str]) -> int:
    return evaluate(arguments, place_from_environment())


def together(config_path: str, sources: list[str]) -> str:
    """What this rank is told if every rank has a file of its own."""
    place = place_from_environment()
    config = run_of(config_path, f"model.source={sources[place.rank]}", world=place.world_size)
    mesh = mesh_of(config)
    try:
        check_source(config, mesh)
    except UserError as error:
        return str(error)
    finally:
        mesh.close()
    return ""


def test_ranks_with_another_file_are_named(pool: Any, folder: Path, tmp_path: Path) -> None:
    """Machines without a shared disk: one has an older file. Both would train, each another model."""
    same, other = (
        str(folder / "my_model.py"),
        str(forks.written(tmp_path, ("behind >= 0", "behind >= 1 - 1"))),
    )
    config = str(folder / "config.json")
    assert pool.run(2, together, config, [same, same]) == ["", ""]
    first, second = pool.run(2, together, config, [same, other])
    assert (
        first == second
        and first.startswith("config error: model.source: rank 1 on ")
        and "(the same file on all machines)" in first
    )
