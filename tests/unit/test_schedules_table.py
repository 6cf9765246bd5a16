"""The table of docs/schedules.md, computed."""

import re
from fractions import Fraction
from pathlib import Path
from typing import Any, get_args

import pytest

from megacore.config.parallel import CHUNKS, V_SHAPED, ParallelConfig
from megacore.pipeline.generators import GENERATORS, build, generated, placement
from megacore.pipeline.schedule import SENDS, Placement, Plan, v_shaped
from megacore.tools.choices import partition
from megacore.tools.choices.held import peak_live
from megacore.tools.choices.partition import _search, alternatives, partitioned, step_times
from megacore.tools.schedules.simulate import simulate
from megacore.tools.settings.load import load

TABLE = Path(__file__).resolve().parents[2] / "docs/schedules.md"


def rows() -> dict[str, list[str]]:
    """The cells behind each schedule's name in the page's first table."""
    lines = [
        line.strip("| \n").split(" | ")
        for line in TABLE.read_text(encoding="utf-8").splitlines()
        if line.startswith("| `")
    ]
    return {cells[0].strip("`"): cells[1:] for cells in reversed(lines)}  # of equal names the first remains


def value(cell: str, **names: int) -> Fraction:
    """A cell's formula, with products written out."""
    formula = re.sub(r"(?<=[\d)])(?=[a-zA-Z(])", " * ", cell.replace("⌊", "int(").replace("⌋", ")"))
    numbers = {name: Fraction(number) for name, number in names.items()}
    return Fraction(eval(formula, {"int": int}, numbers))  # noqa: S307 a formula of our own page


def test_every_schedule_has_a_row() -> None:
    """A schedule would be offered that nobody can compare."""
    assert rows().keys() == GENERATORS.keys(), (
        "the first table of docs/schedules.md has other rows than GENERATORS"
    )


def test_the_config_names_every_schedule() -> None:
    """A schedule could not be chosen, or would be checked and timed with other chunks, or with
    chunks on other ranks, than it has.
    """
    names = get_args(get_args(ParallelConfig.model_fields["schedule"].annotation)[0])
    assert {*names} == {*GENERATORS, "auto"}, "Parallel.schedule names others than GENERATORS"
    placed = {name: generated(name, 4, 1).placement for name in GENERATORS}
    assert {name: len(own[0]) for name, own in placed.items()} == CHUNKS, "CHUNKS has others"
    assert {name for name, own in placed.items() if own == v_shaped(4)} == {*V_SHAPED}, "V_SHAPED has others"
    assert placed == {name: placement(name, 4) for name in GENERATORS}


@pytest.mark.parametrize("name", GENERATORS)
@pytest.mark.parametrize("p", [2, 4, 5, 6, 8])
def test_the_table_says_what_is_so(name: str, p: int) -> None:
    """People would choose a schedule for a bubble, or for memory, that it does not have."""
    chunks, bubble, activations, messages = rows()[name]
    v = 3 if chunks == "v" else int(chunks)
    m = 3 * p
    plan = build(name, p, m, v)
    forward, inputs, weights = (6, 6, 6) if plan.splits else (6, 9, 3)
    stages = plan.stages
    timeline = simulate(
        plan, [forward / v] * stages, [(inputs + weights) / v] * stages, 0.0, [weights / v] * stages
    )
    names = {"p": p, "m": m, "v": v, "F": forward, "B": inputs, "W": weights}
    idle = timeline.makespan - m * (forward + inputs + weights)
    expected = float(value(bubble, **names))
    if name == "v_min" and p % 3 == 0:  # as the page says
        expected += forward
    if name == "v_half" and p % 2:  # whose memory is rounded up, and so its bubble down
        assert 0.8 * expected < idle <= expected + 1e-9
    else:
        assert idle == pytest.approx(expected, abs=1e-9)
    assert max(Fraction(live, v) for live in peak_live(plan)) == value(activations, **names)
    sent = [sum(action.op in SENDS for action in actions) for actions in plan.actions]
    boundaries = p * v - 1 - (v - 1 if name in V_SHAPED else 0)  # in the turn of a V no message is sent
    assert sum(sent) == 2 * m * boundaries and v == int(value(messages, **names))


def test_schedules_are_compared_for_a_config() -> None:
    """`launch/plan.py --compare-schedules` would leave one out, offer what the layers do not
    suffice for, or time another config.
    """
    overrides = [
        "parallel.pipeline=4",
        "model.num_layers=8",
        "train.global_batch_size=32",
        "model.vocab_size=256",
    ]
    config = load(str(TABLE.parents[1] / "configs/gpt_tiny.json"), overrides, 4).config
    found = {(other.parallel.schedule, other.chunks): step_times(other)[0] for other in alternatives(config)}
    assert {name for name, _ in found} == {"auto", *GENERATORS} and ("interleaved", 4) not in found
    assert found["1f1b", 1] == step_times(config)[0] == found["gpipe", 1] > found["zb_h1", 1]
    assert found["auto", 1] < found["1f1b", 1], "which may hold as much"


DEEPSPEED = ["engine.kind=deepspeed", f"engine.config={TABLE.parents[1]}/configs/deepspeed/zero1.json"]


@pytest.mark.parametrize(
    ("engine", "refused"),
    [
        (DEEPSPEED, {"interleaved", *V_SHAPED}),
        (["engine.kind=fsdp"], set(V_SHAPED)),
        (["engine.kind=fsdp", "model.tie_embeddings=false"], set()),
    ],
)
def test_schedules_suit_the_engine(
    engine: list[str], refused: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user would be told of a schedule that pretrain.py refuses; or `auto` would choose chunks that
    the engine cannot hold, and fail.
    """
    overrides = ["parallel.pipeline=2", "model.num_layers=12", "train.global_batch_size=16", *engine]
    config = load(str(TABLE.parents[1] / "configs/gpt_tiny.json"), overrides, 4).config
    found = alternatives(config)
    assert {other.parallel.schedule for other in found} == {"auto", *GENERATORS} - refused
    (auto,) = (other for other in found if other.parallel.schedule == "auto")
    tried: list[Placement] = []

    def search(placements: tuple[Placement, ...], *args: Any, **options: Any) -> Plan:
        tried.extend(placements)
        return _search(placements, *args, **options)

    monkeypatch.setattr(partition, "_search", search)
    monkeypatch.setattr(partition, "_FASTER", {})
    assert partitioned(auto).chunks == (1 if engine is DEEPSPEED else 2), "two are faster here"
    assert (v_shaped(2) in tried) == (not refused)
    monkeypatch.setattr(
        partition,
        "simulate",
        lambda *_, **__: pytest.fail("each stage's layers, costs and memory would simulate anew"),
    )
    assert partitioned(auto).chunks == partitioned(auto.model_copy()).chunks
