"""The coordinate check: muP's sizes do not depend on the width in real layouts, the standard
parametrization's do, and mistakes show.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from launch import coordinates as script
from megacore.errors import ConfigError
from megacore.files import ROOT
from megacore.tools.verify.coordinate_report import plot, show, verdict
from megacore.tools.verify.coordinates import LOGITS, MUP, STANDARD, Check, measure
from megacore.tools.verify.layouts import parse
from megacore.tools.verify.workers import ProofWorkers
from tests.commands import provers

TINY = str(ROOT / "configs/gpt_tiny.json")
# of the config's 256 features
SMALL = ["model.num_layers=2", "model.head_size=16", "model.num_heads=16", "optim.lr=0.01"]
WIDTHS, STEPS = [32, 64, 128], 3


@pytest.fixture(scope="module")
def workers() -> Iterator[ProofWorkers]:
    with provers() as workers:
        yield workers


@pytest.fixture(scope="module")
def check(workers: ProofWorkers) -> Check:
    return measure(TINY, SMALL, WIDTHS, [parse("one"), parse("tp2")], STEPS, workers=workers)


def test_only_the_standard_parametrization_grows(
    check: Check, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The planted mistake is the standard parametrization itself: its updates move a layer's
    outputs in proportion to the width.
    """
    assert check.faults() == [] and verdict(check).startswith("muP holds: ")
    for layout in check.layouts:
        for kind, layer in check.curves:
            expected = 1.0 if layer.startswith("blocks.") else 0.0
            if kind == "moved_rms":
                assert check.slope(layout, MUP, (kind, layer)) == pytest.approx(0.0, abs=0.05)
                assert check.slope(layout, STANDARD, (kind, layer)) == pytest.approx(expected, abs=0.05)
        assert check.slope(layout, STANDARD, ("activation_rms", "blocks.1")) > 1.0
    show(check, STEPS)
    shown = capsys.readouterr().out
    assert all(text in shown for text in (LOGITS, "tp2 muP", "alike in one, tp2"))
    plot(check, str(tmp_path / "coordinates.png"), STEPS)
    assert (tmp_path / "coordinates.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ConfigError, match="--plot: cannot write"):
        plot(check, str(tmp_path / "nowhere" / "x.png"), STEPS)


@pytest.mark.parametrize(
    ("folder", "path", "overrides"),
    [
        ("configs", "gpt_tiny.json", SMALL),
        ("docs", "../configs/gpt_tiny.json", SMALL),
        ("configs/forks", "multi_token.json", ["model.head_size=16", "model.num_heads=16"]),
        ("configs/forks", "../gpt_tiny.json", [*SMALL, "model.source=multi_token.py"]),
    ],
)
def test_paths_count_from_where_they_are_typed(
    workers: ProofWorkers, monkeypatch: pytest.MonkeyPatch, folder: str, path: str, overrides: list[str]
) -> None:
    """Ranks run in the checkout, where `run.json` is another file or none."""
    monkeypatch.chdir(ROOT / folder)
    found = measure(path, overrides, WIDTHS[:2], [parse("one")], 1, workers=workers)
    assert len(found.sizes) == 4


def test_a_fan_in_of_the_shard_is_caught(workers: ProofWorkers) -> None:
    """No slope shows it: the rates are wrong by the same factor at each width. The other layout does."""
    layouts, plant = [parse("one"), parse("tp2")], "tests.faults.tensor:fan_in_of_the_shard"
    planted = measure(TINY, SMALL, WIDTHS[:2], layouts, 1, plant=plant, workers=workers)
    (fault,) = [fault for fault in planted.faults() if fault.startswith("tp2: ")]
    assert fault.startswith("tp2: in step 1 at width 32, mup, ")
    assert verdict(planted).startswith("NOT width-independent: tp2: ")


def test_a_rate_that_ignores_the_width_is_caught(check: Check) -> None:
    """As if a rule of updates of its own were said to be like Adam's: muP's column is
    then the standard one.
    """
    wrong = Check(check.layouts, check.widths, check.limit, True, {})
    for case, sizes in check.sizes.items():
        if case.parametrization == STANDARD:
            wrong.sizes[case] = wrong.sizes[type(case)(case.layout, MUP, case.width)] = sizes
    slopes = [
        fault.rpartition(" ")[2]
        for fault in wrong.faults()
        if fault.startswith("tp2: updates × fan-in of blocks.")
    ]
    assert len(slopes) == 2 and all(0.95 < float(slope) < 1.05 for slope in slopes)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--widths", "64"], "--widths: a slope needs two widths or more"),
        (["--widths", "64,64"], "--widths: a slope needs two widths or more"),
        (["--widths", "64,wide"], "--widths: 'wide' is no width"),
        (["--widths", "0,64"], "--widths: '0' is no width"),
        (["--widths", "64,100"], "--widths: 100 would have 3.125 heads of head_size 32"),
        (["--layouts", ","], "--layouts: names none"),
        (["--layouts", "two"], "--layouts: 'two' is no layout"),
        (
            ["--layouts", "tp4", "--widths", "64,128"],
            "model.num_heads: 2 is not a multiple of parallel.tensor 4",
        ),
        (["--steps", "0"], "--steps: 0 is no number of steps"),
        (["--limit", "nan"], "--limit: nan is no slope"),
        (["--plot", "/no/such/folder/x.png"], "--plot: cannot write /no/such/folder/x.png: No such file"),
        (["--plot", "/proc/x.png"], "--plot: cannot write /proc/x.png: "),
        (["--plot", "sizes.txt"], "--plot: cannot write sizes.txt: its ending names no image format"),
        (["--plant", "tests.nowhere:nothing"], "--plant: tests.nowhere:nothing cannot be found"),
        (
            ["engine.kind=deepspeed", f"engine.config={ROOT}/configs/deepspeed/zero1.json"],
            "log.statistics: DeepSpeed updates and clears gradients",
        ),
        (["--config", "nowhere.json"], "--config: cannot read nowhere.json"),
    ],
)
def test_what_cannot_be_meant_is_refused(arguments: list[str], says: str) -> None:
    """In one line, before any rank starts but for a mistake of its own."""
    config = [] if "--config" in arguments else ["--config", TINY]
    with pytest.raises(ConfigError) as refusal:
        script.main([*config, *arguments])
    assert str(refusal.value).startswith(f"config error: {says}")
