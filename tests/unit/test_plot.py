"""A schedule's picture can be read: what repeats is left out where there is much of it, and nothing else."""

import re
from bisect import bisect_right
from pathlib import Path

import matplotlib
import pytest

from megacore.plan.plot import BREAK, EDGE, MOST_BOXES, Scale, draw, find_cuts
from megacore.plan.schedule import build
from megacore.plan.simulate import COMPUTE, Timeline, simulate

COSTS = {"equal": (1.0, 1.0), "a heavy last stage": (1.0, 1.37), "a heavy first stage": (1.21, 1.0)}


def timeline(name: str, stages: int, microbatches: int, costs: str = "equal") -> Timeline:
    first, last = COSTS[costs]
    forward = [first, *[1.0] * (stages - 2), last][:stages]
    return simulate(build(name, stages, microbatches, tied=stages > 1), forward, [2 * cost for cost in forward])


def doing(drawn: Timeline, stage: int, time: float) -> str | None:
    """What a stage computes at a time."""
    row = [span for span in drawn.spans[stage] if span.action.op in COMPUTE]
    at = bisect_right([span.start for span in row], time) - 1
    return row[at].action.op.value if at >= 0 and time < row[at].end else None


@pytest.mark.parametrize("costs", COSTS)
@pytest.mark.parametrize("stages", [1, 4, 12])
@pytest.mark.parametrize("name", ["1f1b", "gpipe"])
def test_only_what_repeats_is_left_out(name: str, stages: int, costs: str) -> None:
    """Every stage does throughout a cut, and for some periods on both sides of it, what it did a period before."""
    assert not find_cuts(timeline(name, stages, 4, costs), MOST_BOXES, BREAK)
    drawn = timeline(name, stages, 128, costs)
    cuts = find_cuts(drawn, MOST_BOXES, BREAK)
    drifting = name == "gpipe" and costs != "equal" and stages > 1  # stages keep to rhythms of their own for a while
    assert len(cuts) == {"1f1b": 1, "gpipe": 2}[name] + drifting
    end = max(row[-1].end for row in drawn.spans)
    ends = 6 * stages + 2 * EDGE * 2 * 3 * 1.37  # filling and draining the pipeline, and what stays beside cuts
    assert Scale(cuts, BREAK)(end) <= max(MOST_BOXES, ends) + 3 * 1.37
    for cut in cuts:
        assert cut.fewest == cut.most > 80 or drifting
        for stage in range(stages):
            starts = [span.start for span in drawn.spans[stage] if span.action.op in COMPUTE and cut.start <= span.start < cut.end]
            assert starts or drifting
            period = starts[2 if name == "1f1b" else 1] - starts[0] if starts else 0.0  # else it is idle
            for i in range(200):
                time = cut.start - EDGE * period + (cut.end - cut.start + (2 * EDGE - 1) * period) * (i + 0.37) / 200
                assert doing(drawn, stage, time) == doing(drawn, stage, time + period), (stage, time)


def test_times_beside_a_cut() -> None:
    """The picture goes on behind a cut where it stopped before it."""
    cuts = find_cuts(timeline("1f1b", 4, 128), MOST_BOXES, BREAK)
    scale, (cut,) = Scale(cuts, BREAK), cuts
    assert scale(cut.start - 1) == cut.start - 1 and scale(cut.end + 1) == cut.start + BREAK + 1
    assert scale.visible(cut.start - 1, cut.start + 1) == (cut.start - 1, cut.start)
    assert scale.visible(cut.end - 1, cut.end + 1) == (cut.start + BREAK, cut.start + BREAK + 1)
    assert scale.visible(cut.start, cut.end) is None


def numbers(picture: Path) -> list[tuple[str, float]]:
    """The texts of a drawing, with their sizes in points."""
    return [
        (text, float(size))
        for size, text in re.findall(r'<text style="font(?:-size)?: ([\d.]+)px[^>]*>([^<]+)</text>', picture.read_text(encoding="utf-8"))
    ]


@pytest.mark.parametrize(("stages", "microbatches"), [(1, 4), (4, 12), (12, 12), (1, 128), (4, 128), (12, 128)])
def test_both_ends_can_be_read(stages: int, microbatches: int, tmp_path: Path) -> None:
    """128 microbatches made 3159 pixels of stripes without a number."""
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        draw(timeline("1f1b", stages, microbatches), "1f1b", tmp_path / "s.svg")
    found = numbers(tmp_path / "s.svg")
    boxes = [(int(text), size) for text, size in found if text.isdigit()]
    shown = {number for number, _ in boxes}
    assert {0, 1, 2, 3, microbatches - 3, microbatches - 2, microbatches - 1} <= shown
    assert min(size for _, size in boxes) >= 5
    said = [text for text, _ in found if text.endswith("more")]
    assert [int(text.split()[0]) > 80 for text in said] == [True] * (microbatches > 100), "how many are left out"
    width = float(re.findall(r'width="([\d.]+)pt"', (tmp_path / "s.svg").read_text(encoding="utf-8"))[0]) / 72
    assert width <= 20, "inches"
    stage = "1 stage " if stages == 1 else f"{stages} stages "
    assert any(stage in text for text, _ in found)
