"""launch/compare.py: what it says of runs whose records are known."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megacore.errors import UserError
from megacore.tools.metrics_file import Validation
from megacore.tools.monitoring.heat_map import KINDS, draw, read_statistics
from megacore.tools.monitoring.run_charts import MOST_LABELS, draw_run
from megacore.tools.monitoring.run_records import read_run
from tests.commands import run_script

LOSSES = [4.0, 3.5, 3.0, 2.5]


def write_run(folder: Path, losses: list[float | None], every: int = 1, **settings: Any) -> str:
    """A run's records, as the trainer writes them: a logged step takes 0.5 s, and a
    validation follows the second.
    """
    folder.mkdir()
    (folder / "config.json").write_text(
        json.dumps({"optim": {"lr": 0.1} | settings, "log": {"dir": str(folder), "every": every}})
    )
    lines = []
    for number, loss in enumerate(losses, 1):
        step = number * every
        figures = {
            "loss": loss,
            "grad_norm": 1.0,
            "lr": 0.1,
            "tokens": step * 100,
            "tokens_per_second": 200.0,
            "step_seconds": 0.5,
        }
        figures |= {
            "mfu": None,
            "mfu_causal": None,
            "save_seconds": 0.0,
            "memory_bytes": 10**9 + number,
            "skipped": 0,
        }
        lines += [{"step": step} | figures] + ([{"step": step, "valid_loss": 3.25}] if number == 2 else [])
    (folder / "metrics.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in lines) + '{"step": 99, "lo'
    )
    return str(folder)


def compare(tmp_path: Path, *arguments: str) -> tuple[dict[str, Any], str]:
    """What the script writes and prints."""
    done = run_script("launch/compare.py", *arguments, "--json", str(tmp_path / "found.json"))
    assert done.returncode == 0, done.stderr
    return json.loads((tmp_path / "found.json").read_text()), done.stdout


def test_says_where_runs_part(tmp_path: Path) -> None:
    """A difference in the last bit, one that counts, one where a loss is null, and runs that log
    other steps, would be mixed up.
    """
    bit = LOSSES[2] * (1 + 2**-52)
    first = write_run(tmp_path / "first", LOSSES)
    others = {
        "equal": write_run(tmp_path / "equal", LOSSES),
        "bit": write_run(tmp_path / "bit", [*LOSSES[:2], bit, 2.5], lr=0.2),
        "far": write_run(tmp_path / "far", [4.0, 3.5 * (1 + 2**-52), 3.0, None]),
        "sparse": write_run(tmp_path / "sparse", [3.5, 2.6], every=2),
        "apart": write_run(tmp_path / "apart", [1.0], every=7),
    }
    found, said = compare(tmp_path, first, *others.values(), "--plot", str(tmp_path / "figure.png"))
    parting = {name: found["parting"][folder] for name, folder in others.items()}
    keys = ("shared_steps", "first_differing_step", "first_step_beyond_tolerance")
    assert {name: tuple(row[key] for key in keys) for name, row in parting.items()} == {
        "equal": (4, None, None),
        "bit": (4, 3, None),
        "far": (4, 2, 4),
        "sparse": (2, 4, 4),
        "apart": (0, None, None),
    }
    assert parting["bit"]["largest_relative_difference"] == pytest.approx(2**-52, rel=0.1)
    differing = {"log.every": [1, 1, 1, 1, 2, 7], "optim.lr": [0.1, 0.1, 0.2, 0.1, 0.1, 0.1]}
    assert found["config"] == differing, "where a run writes to is no difference"
    assert found["runs"][others["sparse"]] | {"memory_bytes": 0} == {
        "step": 4,
        "tokens": 400,
        "seconds": 2.0,
        "loss": 2.6,
        "best_valid_loss": 3.25,
        "tokens_per_second": 200.0,
        "mfu": None,
        "memory_bytes": 0,
        "skipped": 0,
    }
    assert (
        f"{first} and {others['equal']}: equal in every bit of the loss, in all 4 steps that both logged"
        in said
    )
    assert f"{first} and {others['apart']} logged no step in common" in said
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


def test_a_record_of_before_there_was_a_key_has_its_default(tmp_path: Path) -> None:
    """Every run of before would differ from every later one, in settings that nobody has changed."""
    before, later = (
        write_run(tmp_path / "before", LOSSES),
        write_run(tmp_path / "later", LOSSES, groups=[], momentum=0.5),
    )
    found, _ = compare(tmp_path, before, later)
    assert found["config"] == {"optim.momentum": [0.9, 0.5]}


def test_time_is_that_of_the_runs_own_steps(tmp_path: Path) -> None:
    """A run that went on from another one's checkpoint would be charged for the steps that the other did."""
    runs = [write_run(tmp_path / "a", LOSSES), write_run(tmp_path / "b", LOSSES)]
    path = tmp_path / "b" / "metrics.jsonl"
    path.write_text(
        "".join(
            line
            for line in path.read_text().splitlines(keepends=True)
            if '"step": 3' in line or '"step": 4' in line
        )
    )
    found, _ = compare(tmp_path, *runs)
    assert [found["runs"][run]["seconds"] for run in runs] == [2.0, 1.0]


def test_tolerance_is_the_users(tmp_path: Path) -> None:
    """With a fixed tolerance nobody could ask from where on two precisions differ by a hundredth."""
    runs = [write_run(tmp_path / "a", LOSSES), write_run(tmp_path / "b", [4.001, 3.6, 3.0, 2.5])]
    found, _ = compare(tmp_path, *runs, "--tolerance", "0.01")
    assert found["parting"][runs[1]]["first_step_beyond_tolerance"] == 2


WRONG = {
    "no run": (["{a}", "{a}/none"], "none/config.json: cannot be read: No such file"),
    "nothing logged": (["{a}", "{empty}"], "holds no logged step yet"),
    "no records": (["{a}", "{broken}"], "metrics.jsonl: line 1 is no record of a step"),
    "no figures": (["{a}", "{bare}"], "metrics.jsonl: line 6 is no record of a step"),
    "no config": (["{a}", "{list}"], "config.json: is no config: Input should be an object"),
    "tolerance": (["{a}", "{b}", "--tolerance", "2"], "--tolerance: 2.0 is no relative difference"),
    "picture": (
        ["{a}", "{b}", "--plot", "x.txt"],
        "--plot: cannot write x.txt: its ending names no image format",
    ),
}


@pytest.mark.parametrize(("arguments", "message"), WRONG.values(), ids=WRONG)
def test_bad_input_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    """A user's mistake would be a traceback."""
    import launch.compare

    folders = {name: write_run(tmp_path / name, LOSSES) for name in ("a", "b", "broken", "bare", "list")}
    folders["empty"] = write_run(tmp_path / "empty", [])
    (tmp_path / "broken" / "metrics.jsonl").write_text("[1]\n")
    bare = tmp_path / "bare" / "metrics.jsonl"
    bare.write_text(bare.read_text().rpartition("\n")[0] + '\n{"step": 5}\n')
    (tmp_path / "list" / "config.json").write_text("[]")
    with pytest.raises(UserError) as error:
        launch.compare.run([argument.format(**folders) for argument in arguments])
    assert message in str(error.value) and capsys.readouterr().out == ""


def test_records_of_a_wrong_type_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each was a traceback behind half of the table, or a figure that is none."""
    import launch.compare

    a, b = (write_run(tmp_path / name, LOSSES) for name in "ab")
    metrics, config = (Path(b) / name for name in ("metrics.jsonl", "config.json"))
    whole, settings = metrics.read_text().splitlines()[:-1], config.read_text()
    first = json.loads(whole[0])
    lines: list[Any] = [None, 3, "x", [], {}, [["step", 1]]]
    for key in (
        "step",
        "loss",
        "grad_norm",
        "tokens",
        "tokens_per_second",
        "step_seconds",
        "mfu",
        "memory_bytes",
        "skipped",
    ):
        values = ["1", [1], {}, True, 10**400, 1e300, -1e300] + (
            [] if key in ("loss", "grad_norm", "mfu") else [None]
        )
        lines += [first | {key: value} for value in values] + [
            {name: value for name, value in first.items() if name != key}
        ]
    lines += [
        first | {"step": 0},
        first | {"step": 1.5},
        {"step": 2, "valid_loss": "x"},
        {"step": [2], "valid_loss": 1.0},
        {"valid_loss": 1.0},
    ]
    for line in lines:
        metrics.write_text("\n".join([json.dumps(line), *whole[1:]]) + "\n")
        with pytest.raises(UserError, match="metrics.jsonl: line 1 is no record of a step: "):
            launch.compare.run([a, b])
    metrics.write_text("\n".join(whole) + "\n")
    every: list[Any] = ["x", 0, -1, 1.5, None, [1], {}, 10**400, True]
    for text in [
        *(json.dumps({"log": {"every": value}}) for value in every),
        '{"log": 3}',
        "[" * 10**5,
        "1" * 10**4,
        '"\\ud800"',
        "null",
        "",
    ]:
        config.write_text(text)
        with pytest.raises(UserError, match="config.json: is no config: "):
            launch.compare.run([a, b])
    assert capsys.readouterr().out == ""
    config.write_text(settings)
    assert launch.compare.run([a, b]) == 0, "the records were whole to begin with"


def test_one_run_is_summarized_and_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loss curve would need a second run, and a folder given twice would be compared with itself."""
    folder = write_run(tmp_path / "run", LOSSES, momentum=0.5)
    found, said = compare(tmp_path, folder, f"{folder}/", "--plot", str(tmp_path / "loss.png"))
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert (found["parting"], found["config"]) == ({}, {})
    assert found["runs"][folder]["best_valid_loss"] == 3.25
    assert "best validation loss" in said and "0.93" in said, "10**9 bytes are 0.93 GiB"
    assert "equal" not in said

    figures: list[Any] = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, path: figures.append(figure))
    draw_run(read_run(folder), "")
    losses = figures[0].axes[0]
    assert [list(line.get_ydata()) for line in losses.get_lines()] == [LOSSES, [3.25]]
    assert {text.get_text() for text in losses.get_legend().get_texts()} == {"training", "validation"}


def test_a_long_run_has_few_labels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A label at each of 100 validations would make all of them unreadable; the last one has its label."""
    run = read_run(write_run(tmp_path / "run", LOSSES))
    losses = {step: 100 - step / 2 for step in range(1, 101)}
    run = replace(run, validations=[Validation(step=step, valid_loss=loss) for step, loss in losses.items()])
    figures: list[Any] = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, path: figures.append(figure))
    draw_run(run, "")
    labels = [text.get_text() for text in figures[0].axes[0].texts]
    assert len(labels) <= MOST_LABELS + 1 and labels[:2] == ["2.50", "50.00"]


def test_draws_layers_over_steps(tmp_path: Path) -> None:
    """Figures of a parameter among those of layers would hide them; one run alone has a picture; a
    run without statistics is named.
    """
    folder = write_run(tmp_path / "run", LOSSES)
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()[:-1]]
    for line in [line for line in lines if "loss" in line and line["step"] % 2]:
        for kind in KINDS:
            line |= {
                f"{kind}/{name}": float(line["step"])
                for name in ("embedding", "blocks.0", "blocks.0.attention.output.weight", "head")
            }
        for name in ("head", "blocks.0.attention.output.weight"):
            del line[f"activation_rms/{name}"]
    (tmp_path / "run/metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    layers = dict.fromkeys(("embedding", "blocks.0", "head"), 1.0)
    assert read_statistics(folder)["gradient_rms"] == {1: layers, 3: dict.fromkeys(layers, 3.0)}
    done = run_script("launch/compare.py", folder, "--heat-map", str(tmp_path / "heat.png"))
    assert done.returncode == 0 and (tmp_path / "heat.png").read_bytes().startswith(b"\x89PNG"), done.stderr
    lines = [{"step": n, "expert_load/blocks.1": [0.5 * n, 2.0]} for n in (1, 2)]
    (tmp_path / "run/metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = read_statistics(folder)
    loads = {n: {"blocks.1.0": 0.5 * n, "blocks.1.1": 2.0} for n in (1, 2)}
    assert found["expert_load"] == loads, "a run may have loads of experts alone"
    many = {1: {f"blocks.{i}": 1.0 for i in range(15_000)}}  # more rows than a picture has room for
    draw(
        {folder: found, "large": found | {"expert_load": many}, "dense": found | {"expert_load": {}}},
        str(tmp_path / "loads.png"),
    )
    done = run_script(
        "launch/compare.py", write_run(tmp_path / "none", LOSSES), "--heat-map", str(tmp_path / "none.png")
    )
    assert done.returncode == 2 and f"{tmp_path}/none/metrics.jsonl: holds no statistics" in done.stderr
