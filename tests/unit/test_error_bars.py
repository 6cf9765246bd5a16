"""Error bars come from the scoreboard's rows, hold on rows that they were not computed from, and are said wherever a step is predicted."""

import json
import re
from pathlib import Path

import pytest

from benchmarks import planner_sizes
from launch import plan as script
from megacore.tools.planner.error_bars import FILE, SIZES, Bar, bar, interval, of_size, recorded, size_of
from megacore.tools.planner.profile import Profile, profile, unexplained

ROOT = Path(__file__).resolve().parents[2]
MODELS_BELOW = "on more than 64 devices"  # where models that are left out lie outside the bar too often


def test_an_interval_leaves_a_tenth_on_each_side() -> None:
    """Both tails on one side, or a wider share than is said."""
    assert interval([n / 100 for n in range(101)]) == pytest.approx((0.1, 0.9))


def test_a_run_is_judged_by_runs_of_its_size() -> None:
    """Small runs are predicted better, and most rows are small: together they would hide how large ones err."""
    assert [size_of(n) for n in (1, 8, 9, 64, 65, 16384)] == [size for size in SIZES for _ in "two"[:2]]
    ratios = {"a": {"m": {"8": [1.0, 1.1], "64": [1.2]}, "n": {"4": [0.9], "65": [2.0, 3.0]}}}
    assert [sorted(of_size(size, ratios)) for size in SIZES] == [[0.9, 1.0, 1.1], [1.2], [2.0, 3.0]]
    runs = {size: of_size(size, recorded()) for size in SIZES}
    assert sum(map(len, runs.values())) == 1168 and all(len(own) > 100 for own in runs.values())
    for devices, size in zip((8, 64, 1024), SIZES, strict=True):
        assert (bar(devices).low, bar(devices).high) == interval(runs[size]) and bar(devices).runs == len(runs[size])


def test_bars_hold_on_rows_that_were_left_out() -> None:
    """An 80 % bar that holds its own rows says nothing. Models that are left out are told apart: where they break it, the page says so."""
    for size, own in planner_sizes.bars(recorded()).items():
        assert 0.75 <= own["rows left out"] <= 0.85, size
        assert (0.75 <= own["models left out"] <= 0.85) is (size != MODELS_BELOW), size
    report = json.loads((ROOT / "benchmarks/results/planner.json").read_text())
    assert report["bars"] == json.loads(json.dumps(planner_sizes.bars(recorded()))), "the scoreboard's figures are of this file"


def test_coverage_counts_what_lies_in_the_bar_of_the_rest() -> None:
    """Rows that help to make the bar that they are judged by always lie in it."""
    same, other = [1.0] * 20, [2.0] * 20
    assert planner_sizes.coverage(iter([(other, same)])) == 0.0 and planner_sizes.coverage(iter([(same, same + other)])) == 1.0
    assert planner_sizes.coverage(iter([(same, [])])) is None
    alone = {"a": {"m": {"8": same}, "n": {"8": other}}}
    assert planner_sizes.coverage(planner_sizes.model_folds("on one machine", alone)) == 0.0
    folds = list(planner_sizes.row_folds([float(n) for n in range(25)]))
    assert sorted(ratio for left_out, _ in folds for ratio in left_out) == list(range(25))
    assert all(len(left_out) + len(rest) == 25 and not set(left_out) & set(rest) for left_out, rest in folds)


def test_the_file_is_what_the_scoreboard_writes() -> None:
    """A change by hand would move every bar."""
    whole = json.loads(FILE.read_text())
    assert planner_sizes.as_text(recorded(), whole["command"]) == FILE.read_text()


def test_ties_lie_within_each_others_bars() -> None:
    """A tie that depends on who is asked, or that ignores how far a step may be slower."""
    found = Bar(0.9, 1.2, 10, "")
    assert found.ties(1.0, 1.1) and found.ties(1.1, 1.0)
    assert not found.ties(1.0, 1.15) and not found.ties(1.15, 1.0), "1.15 · 0.9 is above 1.0"
    assert not Bar(0.5, 1.1, 10, "").ties(1.0, 1.2)


@pytest.mark.parametrize("options", [["--device", "h100", "--cluster", "dgx_h100"], ["--search"]])
def test_every_prediction_carries_its_error(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """A number alone is believed to its last digit; a search's list looks like a ranking."""
    assert script.run(["--config", "configs/gpt_1b.json", "--world", "2", *options]) == 0
    out, own = capsys.readouterr().out, bar(2)
    step = float(re.findall(r"predicted +([\d.]+) s|\n 1 +([\d.]+) ", out)[0][options == ["--search"]])
    low, high = map(float, re.findall(r"([\d.]+) to ([\d.]+) s: 80% of 794 measured runs on one machine", out)[0])
    assert (low, high) == pytest.approx((own.low * step, own.high * step), rel=2e-3)
    if options == ["--search"]:
        seconds = [float(value) for value in re.findall(r"\n [1-5] +([\d.]+) ", out)]
        assert out.count("tie: ") == sum(own.ties(seconds[0], value) for value in seconds[1:]) > 0
    else:
        assert "no term is a measurement" in out


def test_masked_pairs_are_told_apart(capsys: pytest.CaptureFixture[str]) -> None:
    """At a million tokens almost all of the MFU was attention, half of it masked: 82 % of the peak, of which 41 were no work."""
    long = ["train.seq_len=1048576", "train.global_batch_size=8", "train.micro_batch_size=1", "parallel.context=8", "parallel.pipeline=1"]
    common = ["--config", "configs/gpt_1b.json", "--world", "8", "--device", "h100", "--cluster", "dgx_h100", "parallel.schedule=1f1b"]
    assert script.run([*common, *long]) == 0
    full, causal = re.findall(r"MFU +([\d.]+)% over all pairs of tokens \(mfu\), and ([\d.]+)%", capsys.readouterr().out)[0]
    assert float(causal) / float(full) == pytest.approx(0.5, abs=0.03) and float(causal) < 60


def test_constants_that_no_physics_explains_are_named() -> None:
    """Products at 98 % of the peak and a hundredth of a pass would be read as a framework's merits."""
    assert unexplained(profile("megacore")) == []
    named = unexplained(profile("megatron-2023"))
    assert "product_rate[any] 0.978" in named and "passes 0.00941" in named
    links = Profile("none").with_constants({"link_rate": {"measured": 1.0, "nvlink": 0.99}})
    assert unexplained(links) == ["link_rate[nvlink] 0.99"], "a link that was measured gives what was measured"
