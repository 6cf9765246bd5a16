"""A schedule's picture can be read: the middle of a long one is left out, and nothing else."""

import re
from pathlib import Path

import matplotlib
import pytest

from megacore.pipeline.generators import build
from megacore.pipeline.schedule import COMPUTE, Op
from megacore.tools.planner.plot import BOXES_A_STAGE, BREAK, MOST_BOXES, Cut, draw, find_cut
from megacore.tools.schedules.simulate import Timeline, simulate

COSTS = {"equal": (1.0, 1.0), "a heavy last stage": (1.0, 1.37), "a heavy first stage": (1.21, 1.0)}


def timeline(name: str, stages: int, microbatches: int, costs: str = "equal") -> Timeline:
    first, last = COSTS[costs]
    forward = [first, *[1.0] * (stages - 2), last][:stages]
    return simulate(
        build(name, stages, microbatches, shared=[(0, stages - 1)]), forward, [2 * cost for cost in forward]
    )


def found_cut(drawn: Timeline) -> Cut:
    """The cut of a schedule whose shortest box takes a second."""
    return find_cut(max(row[-1].end for row in drawn.spans), 1.0, len(drawn.spans))


@pytest.mark.parametrize("costs", COSTS)
@pytest.mark.parametrize("stages", [1, 4, 12, 64])
def test_filling_and_draining_are_drawn(stages: int, costs: str) -> None:
    """Every stage works on both sides of a cut, so that its beginning and its end can be
    seen; what is short is not cut.
    """
    assert not found_cut(timeline("1f1b", stages, 4, costs)).gap
    drawn = timeline("1f1b", stages, 512, costs)
    cut = found_cut(drawn)
    assert cut.gap == BREAK
    for row in drawn.spans:
        work = [span for span in row if span.action.op in COMPUTE]
        first = {op: next(span for span in work if span.action.op is op) for op in (Op.FORWARD, Op.BACKWARD)}
        assert all(span.end <= cut.start for span in first.values()), (
            "the first microbatch's forward and backward"
        )
        assert work[-1].start >= cut.end, "the last backward"
    end = max(row[-1].end for row in drawn.spans)
    assert cut.place(end) == pytest.approx(max(MOST_BOXES, BOXES_A_STAGE * stages))


def test_times_beside_a_cut() -> None:
    """The picture goes on behind a cut where it stopped before it; what is left out has
    no place of its own.
    """
    cut = Cut(10.0, 50.0, 3.0)
    assert [cut.place(time) for time in (0, 9, 10, 11, 49, 50, 51)] == [0, 9, 10, 13, 13, 13, 14]
    assert Cut(10.0, 10.0, 0.0).place(10.0) == 10.0


def numbers(picture: Path) -> list[tuple[str, float]]:
    """The texts of a drawing, with their sizes in points."""
    return [
        (text, float(size))
        for size, text in re.findall(
            r'<text style="font(?:-size)?: ([\d.]+)px[^>]*>([^<]+)</text>',
            picture.read_text(encoding="utf-8"),
        )
    ]


@pytest.mark.parametrize(
    ("stages", "microbatches"), [(1, 4), (4, 12), (12, 12), (1, 128), (4, 128), (12, 128)]
)
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
    assert [int(text.split()[0]) > 80 for text in said] == [True] * (microbatches > 100), (
        "how many are left out"
    )
    width = float(re.findall(r'width="([\d.]+)pt"', (tmp_path / "s.svg").read_text(encoding="utf-8"))[0]) / 72
    assert width <= 20, "inches"
    stage = "1 stage " if stages == 1 else f"{stages} stages "
    assert any(stage in text for text, _ in found)


def test_a_cut_that_hides_no_microbatch_has_no_label(tmp_path: Path) -> None:
    """The gap of a schedule whose microbatches all have a whole box was labelled "0 more"."""
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        draw(timeline("1f1b", 4, 24), "1f1b", tmp_path / "s.svg")
    texts = [text for text, _ in numbers(tmp_path / "s.svg")]
    assert "\u22ef" in texts, "the schedule is cut"
    assert not [text for text in texts if text.endswith("more")]
