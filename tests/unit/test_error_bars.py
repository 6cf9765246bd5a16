"""Error bars come from the scoreboard's rows, hold on rows that they were not computed from, and are
said wherever a step is predicted.
"""

import json
import re
from pathlib import Path

import pytest

from benchmarks import planner_sizes
from launch import plan as script
from megacore.tools.planner import error_bars
from megacore.tools.planner.error_bars import (
    ACROSS,
    FILE,
    KINDS,
    SIZES,
    STALL,
    Bar,
    bar,
    interval,
    kind_of,
    of_kind,
    recorded,
)
from megacore.tools.planner.profile import Profile, profile, unexplained

ROOT = Path(__file__).resolve().parents[2]
ONE, SOME, MANY = SIZES
RATIOS = recorded()["measured over predicted"]
TAILS = recorded()["tails"]


def test_an_interval_leaves_a_tail_on_each_side() -> None:
    """Both tails on one side, or a wider share than is said."""
    runs = [n / 100 for n in range(101)]
    assert interval(runs) == pytest.approx((0.1, 0.9)) and interval(runs, 0.05) == pytest.approx((0.05, 0.95))


def test_a_run_is_judged_by_runs_of_its_kind() -> None:
    """Small runs are predicted better, and most rows are small: together they would hide how large ones err.

    Of pipelines across machines a third stall, which a run without one has nothing to do with.
    """
    assert [kind_of(n, False)[0] for n in (1, 8, 9, 64, 65, 16384)] == [
        size for size in SIZES for _ in "two"[:2]
    ]
    assert kind_of(8, True) == (ONE, False) and kind_of(9, True) == (SOME, True), (
        "one machine has no pipeline across machines"
    )
    ratios = {
        "a": {"m": {"8": [1.0, 1.1], "64": [1.2], f"64{ACROSS}": [5.0]}, "n": {"4": [0.9], "65": [2.0, 3.0]}}
    }
    assert [sorted(of_kind(kind, ratios)) for kind in KINDS] == [
        [0.9, 1.0, 1.1],
        [1.2],
        [5.0],
        [2.0, 3.0],
        [],
    ]
    runs = {kind: of_kind(kind, RATIOS) for kind in KINDS}
    assert sum(map(len, runs.values())) == 2765 and all(len(own) > 100 for own in runs.values())
    for devices, pipeline, kind in (
        (8, 4, KINDS[0]),
        (64, 1, KINDS[1]),
        (64, 2, KINDS[2]),
        (1024, 1, KINDS[3]),
        (1024, 8, KINDS[4]),
    ):
        found = bar(devices, pipeline, 8)
        assert (found.low, found.high) == interval(runs[kind], TAILS[kind[0]]) and found.runs == len(
            runs[kind]
        )
    assert bar(72, 8, 72).stalled == bar(72, 1, 8).stalled < bar(72, 8, 8).stalled, (
        "a machine is as large as its links say"
    )


def test_bars_hold_on_rows_and_on_whole_models_that_were_left_out() -> None:
    """An 80 % bar that holds its own rows says nothing, and one that only holds models like
    those that it knows says little.
    """
    cut = planner_sizes.tails(RATIOS)
    assert cut == TAILS, "the file's tails are those of its rows"
    for size, own in planner_sizes.held(RATIOS, cut).items():
        assert all(0.75 <= value <= 0.85 for value in own.values()), (size, own)
    report = json.loads((ROOT / "benchmarks/results/planner.json").read_text())
    assert report["bars"] == json.loads(json.dumps(planner_sizes.bars(RATIOS, cut))), (
        "the scoreboard's figures are of this file"
    )
    for kind, own in report["bars"].items():
        assert own["models left out"] >= 0.745, kind


def test_coverage_counts_what_lies_in_the_bar_of_the_rest() -> None:
    """Rows that help to make the bar that they are judged by always lie in it."""
    same, other = [1.0] * 20, [2.0] * 20
    assert (
        planner_sizes.coverage(iter([(other, same)]), 0.1) == 0.0
        and planner_sizes.coverage(iter([(same, same + other)]), 0.1) == 1.0
    )
    assert planner_sizes.coverage(iter([(same, [])]), 0.1) is None
    alone = {"a": {"m": {"8": same}, "n": {"8": other}}}
    assert planner_sizes.coverage(planner_sizes.model_folds(KINDS[0], alone), 0.1) == 0.0
    folds = list(planner_sizes.row_folds(KINDS[0], {"a": {"m": {"8": [float(n) for n in range(25)]}}}))
    assert sorted(ratio for left_out, _ in folds for ratio in left_out) == list(range(25))
    assert all(len(left_out) + len(rest) == 25 and not set(left_out) & set(rest) for left_out, rest in folds)


def test_a_tail_is_cut_where_new_models_and_known_ones_lie_inside_as_said() -> None:
    """Where every model is like the others the tails are those of the rows; where they differ, a bar
    must be wider than its rows say.
    """
    rows = [1 + n / 1000 for n in range(100)]
    alike = {"a": {name: {"8": rows} for name in "klmnop"}}
    unlike = {"a": {name: {"8": [row + 0.03 * i for row in rows]} for i, name in enumerate("klmnop")}}
    assert planner_sizes.tails(alike)[ONE] == pytest.approx(0.1, abs=0.006)
    assert planner_sizes.tails(unlike)[ONE] < planner_sizes.tails(alike)[ONE]


def test_stalled_runs_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """One number between runs that stalled and those that did not would be true of neither."""
    ratios = {
        "a": {
            "m": {"64": [0.9 + n / 100 for n in range(21)]},
            "n": {f"64{ACROSS}": [1.0] * 30 + [3.0, 4.0, 4.0, 5.0, STALL]},
        }
    }
    monkeypatch.setattr(
        error_bars,
        "recorded",
        lambda: {"measured over predicted": ratios, "tails": dict.fromkeys(SIZES, 0.1)},
    )
    plain, across = (bar.__wrapped__(64, pipeline, 8) for pipeline in (1, 2))
    assert plain.stalled == 0 and "stalled" not in str(plain) and plain.usual == (plain.low, plain.high)
    assert across.stalled == pytest.approx(5 / 35) and across.stall == 4.0 and across.usual == (1.0, 1.0)
    assert "14%, only runs of a, stalled and took 4.0 times the prediction" in str(across)
    assert ACROSS in across.kind


def test_the_file_is_what_the_scoreboard_writes() -> None:
    """A change by hand would move every bar."""
    whole = recorded()
    assert planner_sizes.as_text(RATIOS, TAILS, whole["command"]) == FILE.read_text()


def test_ties_lie_within_each_others_bars() -> None:
    """A tie that depends on who is asked, or that ignores how far a step may be slower; or every
    layout, because some runs stall.
    """

    def of(low: float, high: float) -> Bar:
        return Bar(0.5, 9.0, 10, "", (low, high), 0.3, 4.0)

    assert of(0.9, 1.2).ties(1.0, 1.1) and of(0.9, 1.2).ties(1.1, 1.0)
    assert not of(0.9, 1.2).ties(1.0, 1.15) and not of(0.9, 1.2).ties(1.15, 1.0), "1.15 · 0.9 is above 1.0"
    assert not of(0.5, 1.1).ties(1.0, 1.2)


@pytest.mark.parametrize("options", [["--gpu", "h100", "--cluster", "dgx_h100"], ["--search"]])
def test_every_prediction_carries_its_error(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """A number alone is believed to its last digit; a search's list looks like a ranking."""
    assert script.run(["--config", "configs/gpt_1b.json", "--world", "2", *options]) == 0
    out, own = capsys.readouterr().out, bar(2, 1, 8)
    step = float(re.findall(r"predicted +([\d.]+) s|\n 1 +([\d.]+) ", out)[0][options == ["--search"]])
    low, high = map(
        float, re.findall(r"([\d.]+) to ([\d.]+) s: 80% of 1,559 measured runs \(on one machine\)", out)[0]
    )
    assert (low, high) == pytest.approx((own.low * step, own.high * step), rel=2e-3)
    if options == ["--search"]:
        seconds = [float(value) for value in re.findall(r"\n [1-5] +([\d.]+) ", out)]
        assert out.count("tie: ") == sum(own.ties(seconds[0], value) for value in seconds[1:]) > 0
    else:
        assert "no term is a measurement" in out


def test_masked_pairs_are_told_apart(capsys: pytest.CaptureFixture[str]) -> None:
    """At a million tokens almost all of the MFU was attention, half of it masked: 82 % of the
    peak, of which 41 were no work.
    """
    long = [
        "train.seq_len=1048576",
        "train.global_batch_size=8",
        "train.micro_batch_size=1",
        "parallel.context=8",
        "parallel.pipeline=1",
    ]
    common = [
        "--config",
        "configs/gpt_1b.json",
        "--world",
        "8",
        "--gpu",
        "h100",
        "--cluster",
        "dgx_h100",
        "parallel.schedule=1f1b",
    ]
    assert script.run([*common, *long]) == 0
    full, causal = re.findall(
        r"MFU +([\d.]+)% over all pairs of tokens \(mfu\), and ([\d.]+)%", capsys.readouterr().out
    )[0]
    assert float(causal) / float(full) == pytest.approx(0.5, abs=0.03) and float(causal) < 60


def test_constants_that_no_physics_explains_are_named() -> None:
    """Products at 98 % of the peak and a hundredth of a pass would be read as a framework's merits."""
    assert unexplained(profile("megacore")) == []
    named = unexplained(profile("megatron-2023"))
    assert "product_rate[any] 0.978" in named and "passes 0.00941" in named
    links = Profile("none").with_constants({"link_rate": {"measured": 1.0, "nvlink": 0.99}})
    assert unexplained(links) == ["link_rate[nvlink] 0.99"], (
        "a link that was measured gives what was measured"
    )
