"""Stage boundaries by cost."""

import random
from itertools import combinations

import pytest

from megacore.config import Config
from megacore.pipeline.partition import placement_of, plan_of, stage_layers
from megacore.tools.choices.activations import stage_activations
from megacore.tools.choices.flops import embedding_cost, head_cost, layer_cost
from megacore.tools.choices.partition import partitioned, split_layers, stage_costs
from megacore.tools.planner.activations import rank_activations
from megacore.tools.settings.load import resolve


def worst(sizes: list[int], layer: float, first: float, last: float) -> float:
    """The most expensive stage."""
    costs = [n * layer for n in sizes]
    costs[0] += first
    costs[-1] += last
    return max(costs)


@pytest.mark.parametrize(("first", "last"), [(0, 0), (0.5, 2.5), (3, 1), (0, 7), (2, 2)])
def test_no_split_is_better(first: float, last: float) -> None:
    """Against every way to cut: one with a cheaper worst stage, or as cheap and
    more even, would have been missed.
    """
    for layers in range(1, 11):
        for stages in range(1, layers + 1):
            split = split_layers(layers, stages, 1.0, first, last)
            assert [i for part in split for i in part] == list(range(layers))
            sizes = [len(part) for part in split]
            assert len(sizes) == stages and min(sizes) >= 1
            every = [
                [b - a for a, b in zip((0, *cuts), (*cuts, layers), strict=True)]
                for cuts in combinations(range(1, layers), stages - 1)
            ]
            keys = [
                (worst(s, 1.0, first, last), sum(n * n for n in s), s[0] + s[-1], s == sizes) for s in every
            ]
            assert next(key for key in keys if key[3])[:3] == min(key[:3] for key in keys)


def by_search(layers: int, stages: int, layer: float, first: float, last: float) -> list[int]:
    """The sizes of the stages, by trying every pair of ends; of equally good ones the first."""

    def sizes(a: int, b: int) -> list[int]:
        rest, middle = layers - a - b, stages - 2
        return [a, *(rest // middle + (i >= middle - rest % middle) for i in range(middle)), b]

    ends = [(a, b) for a in range(1, layers) for b in range(1, layers - a + 1)]
    fitting = [
        sizes(a, b) for a, b in ends if (layers - a - b >= stages - 2 if stages > 2 else a + b == layers)
    ]
    return min(fitting, key=lambda s: (worst(s, layer, first, last), sum(n * n for n in s), s[0] + s[-1]))


def test_the_split_is_that_of_a_search() -> None:
    """Another choice among equals would move layers between the stages of runs
    and checkpoints that are there.
    """
    draw = random.Random(0)
    for layers in range(2, 17):
        for stages in range(2, layers + 1):
            for _ in range(12):
                costs = (
                    draw.choice([1.0, 0.3, draw.random() + 0.1]),
                    draw.choice([0.0, 0.1, 2.5, 7.0, 30.0]),
                    4 * draw.random(),
                )
                assert [len(part) for part in split_layers(layers, stages, *costs)] == by_search(
                    layers, stages, *costs
                )


def test_as_many_layers_as_you_like() -> None:
    """A search over every pair of ends would take days."""
    quarter = 10**12 // 4
    sizes = [len(part) for part in split_layers(10**12 - 7, 4, 1.0, 2.0, 5.0)]
    assert sizes == [quarter - 2, quarter, quarter, quarter - 5]


def test_the_head_is_counted() -> None:
    """A last stage with as many layers as the others would make them all wait for its head."""
    sizes = [len(part) for part in split_layers(14, 4, 1.0, 0.0, 2.0)]
    assert sizes == [4, 4, 4, 2]
    assert worst(sizes, 1.0, 0.0, 2.0) < worst([4, 3, 3, 4], 1.0, 0.0, 2.0)


def test_more_stages_than_layers_is_refused() -> None:
    """A stage without a layer has nothing to send."""
    with pytest.raises(ValueError, match="4 stages cannot each have one of 3 layers"):
        split_layers(3, 4, 1.0, 0.0, 0.0)


def small(**parallel: int) -> Config:
    model = {
        "num_layers": 5,
        "hidden_size": 64,
        "num_heads": 4,
        "num_kv_heads": 4,
        "ffn_size": 256,
        "vocab_size": 1024,
    }
    sections = {"model": model, "parallel": parallel, "train": {"seq_len": 32}}
    return partitioned(resolve(sections, [], "small", parallel.get("pipeline", 1)).config)


@pytest.mark.parametrize("pipeline", [1, 2, 4, 5])
def test_stages_of_a_config_add_up(pipeline: int) -> None:
    """A layer, the embedding or the head would be lost or counted twice."""
    config = small(pipeline=pipeline)
    parts, costs = stage_layers(config), stage_costs(config)
    assert [i for part in parts for i in part] == list(range(5))
    ends = embedding_cost(config).total + head_cost(config).total
    assert sum(c.total for c in costs) == pytest.approx(5 * layer_cost(config).total + ends)
    assert stage_layers(config) == parts


def test_a_small_models_head_takes_layers_away() -> None:
    """With 1024 words and 64 features, the head costs more than a layer: an even split is a mistake."""
    assert head_cost(small()).total > layer_cost(small()).total
    parts = stage_layers(small(pipeline=2))
    assert len(parts[0]) > len(parts[1])


def test_a_configs_stages_are_cut_by_forward_and_backward() -> None:
    """The cheapest worst stage of a whole step: cut by forward alone, by the head's anyway, or without what
    is recomputed, one stage would hold the others up for the rest of it.
    """
    uneven = 0
    for vocabulary in (256, 2048, 8192, 16384):
        for recompute in ("none", "full"):
            model = {"num_layers": 9, "hidden_size": 64, "num_heads": 4, "vocab_size": vocabulary}
            for stages in (2, 3, 4):
                sections = {
                    "model": model,
                    "parallel": {"pipeline": stages},
                    "train": {"seq_len": 32, "recompute": recompute},
                }
                config = partitioned(resolve(sections, [], "small", stages).config)
                sizes = [len(part) for part in stage_layers(config)]
                ends = embedding_cost(config).total, head_cost(config).total
                assert sizes == by_search(9, stages, layer_cost(config).total, *ends), (
                    vocabulary,
                    recompute,
                    stages,
                )
                assert max(cost.total for cost in stage_costs(config)) == pytest.approx(
                    worst(sizes, layer_cost(config).total, *ends)
                )
                uneven += sizes[-1] < max(sizes)
    assert uneven > 12


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("layers", [8, 16])
def test_a_searched_schedule_keeps_no_more_than_1f1b(layers: int, recompute: str) -> None:
    """With logits, and with gradients of theirs that wait: of a wide vocabulary these are most, and a plan
    that was sought without them would not fit. With recomputation one waiting weight's gradient takes more
    than all that 1F1B keeps: then nothing is split.
    """
    ranks = 4
    model = {"num_layers": layers, "hidden_size": 256, "num_heads": 4, "vocab_size": 65536}
    train = {
        "precision": "bf16",
        "seq_len": 256,
        "device": "cuda",
        "global_batch_size": 16,
        "recompute": recompute,
    }

    def configured(**parallel: object) -> Config:
        sections = {"model": model, "train": train, "parallel": {"pipeline": ranks, "data": 1} | parallel}
        return partitioned(resolve(sections, [], "", ranks).config)

    def kept(config: Config) -> int:
        return max(peak.kept + peak.logits for peak in rank_activations(config))

    found = configured(schedule="auto", chunks=2)
    held = stage_activations(found, stage_layers(found))
    one = max(sum(held[stage].kept for stage in stages) for stages in placement_of(found))
    assert kept(found) <= max(kept(configured(schedule="1f1b")), one)


def test_a_config_that_nobody_settled_is_refused() -> None:
    """An even cut, or the cut of another model, would be taken in silence: a slower run,
    or another one than was planned.
    """
    cut = small(pipeline=2)
    other = cut.model_copy(update={"model": cut.model.model_copy(update={"num_layers": 4})})
    for config in (other, other.model_copy()):
        with pytest.raises(RuntimeError, match="partitioned"):
            stage_layers(config)
    assert [len(part) for part in stage_layers(cut.model_copy())] == [len(part) for part in stage_layers(cut)]
    assert sum(len(part) for part in stage_layers(partitioned(other))) == 4
    auto = resolve(
        {"model": {"num_layers": 4}, "parallel": {"pipeline": 2, "schedule": "auto"}}, [], "auto", 2
    ).config
    with pytest.raises(RuntimeError, match="partitioned"):
        plan_of(auto)
    found = partitioned(auto)
    assert placement_of(found) == plan_of(found).placement and len(stage_layers(found)) == 2 * found.chunks
    assert found.parallel == auto.parallel, (
        "what was searched is no setting: a checkpoint says auto, as the user did"
    )
