"""The search counts every layout, offers only what runs and fits, and says why others lost."""

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from launch import plan as script
from megacore.config import Config
from megacore.errors import ConfigError
from megacore.pipeline.generators import GENERATORS
from megacore.pipeline.partition import plan_of
from megacore.tools.choices.held import peak_held
from megacore.tools.planner.activations import fullest
from megacore.tools.planner.devices import read_cluster, read_device
from megacore.tools.planner.memory import besides, communicators_of, rank_memory
from megacore.tools.planner.profile import profile
from megacore.tools.planner.run_cost import best_interval, cost, cost_lines, loss
from megacore.tools.planner.search import Found, layouts, lost, offloaded, replace_config, search
from megacore.tools.planner.search_plot import label_of
from megacore.tools.planner.search_report import launcher
from megacore.tools.planner.step_time import Prediction
from tests import training
from tests.build import run_of

ALONE = ["parallel.tensor=1", "parallel.pipeline=1", "parallel.data=1", "train.micro_batch_size=1"]


def searched(name: str, world: int, gib: float, *overrides: str) -> Found:
    config = run_of(f"configs/{name}.json", *overrides, *ALONE)
    return search(config, world, read_device("h100"), read_cluster("dgx_h100"), profile(), gib)


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 3), (3, 4), (3, 20), (4, 32)])
@pytest.mark.parametrize("schedule", GENERATORS)
def test_fullest_states_are_those_of_the_whole_plan(
    schedule: str, ranks: int, microbatches: int, tmp_path: Path
) -> None:
    """A state that is left out, or never reached: memory of a search's candidates
    would be another than the plan's.
    """
    sizes = [
        "model.num_layers=8",
        f"parallel.pipeline={ranks}",
        f"parallel.schedule={schedule}",
        "train.micro_batch_size=1",
    ]
    config = run_of(
        training.write_config(tmp_path, "nothing"),
        *sizes,
        f"train.global_batch_size={microbatches}",
        world=ranks,
    )
    plan = plan_of(config)
    for waiting in (0.5, 3.0):
        kept = [1.0 + 0.3 * stage for stage in range(plan.stages)]
        found = []
        for stages, states in zip(plan.placement, fullest(config), strict=True):
            sizes = [*(kept[stage] for stage in stages), *(waiting * kept[stage] for stage in stages)]
            found.append(
                max(sum(n * size for n, size in zip(s.live + s.waiting, sizes, strict=True)) for s in states)
            )
        assert found == pytest.approx(peak_held(plan, kept, [waiting * size for size in kept]), rel=1e-12)


def test_layouts_run_and_fit() -> None:
    """A command that pretrain refuses, a layout that does not fit, or a slower one before a faster."""
    found = searched("gpt_7b", 64, 80.0)
    for candidate in found.fit[:: max(1, len(found.fit) // 40)]:
        config = run_of("configs/gpt_7b.json", *candidate.overrides(), world=64)
        assert rank_memory(config) == rank_memory(candidate.config)
        assert max(memory.total for memory in rank_memory(config)) / 2**30 < candidate.needs_gib <= 80
    seconds = [round(candidate.seconds / found.fit[0].seconds, 4) for candidate in found.fit]
    assert seconds == sorted(seconds) and all(candidate.needs_gib > 80 for candidate in found.too_large)


def test_a_row_by_hand() -> None:
    """Gigabytes for gibibytes, one device's peak for all, or causal attention in the MFU: a 7B model's
    row is computed here once more.
    """
    hidden, ffn, vocab, layers, tokens = 4096, 11008, 32000, 32, 2048
    matrices = layers * (4 * hidden**2 + 3 * hidden * ffn)
    parameters = matrices + 2 * vocab * hidden + (2 * layers + 1) * hidden
    found = searched("gpt_7b", 8, 90.0)
    for row in found.fit:
        train, parallel, engine = row.config.train, row.config.parallel, row.config.engine
        if (parallel.data, train.micro_batch_size, train.recompute, engine.shard_optimizer) == (
            8,
            4,
            "none",
            True,
        ):
            break
    else:
        pytest.fail("no such row")
    held = (2 + 4 + 12 / 8) * parameters  # weights, gradients, and an eighth of masters and moments
    # of blocks, and the logits
    kept = 4 * tokens * (layers * (16 * hidden + 8 + 4 * 32 + 6 * ffn) + 2 * vocab)
    # a row's number in the norm, and what is lost between blocks
    needs = held + parameters / 64 * 8 + 1.05 * kept
    assert row.needs_gib == pytest.approx(needs / 2**30 + 0.9 + 0.15, rel=0.005), (
        "closer than the norm's rows, 0.9 %"
    )
    assert row.holds_gib == pytest.approx(held / 2**30, rel=0.01)
    a_token = 6 * (matrices + vocab * hidden) + 12 * layers * hidden * tokens
    assert row.tokens_per_second == pytest.approx(1024 * tokens / row.seconds)
    assert row.mfu == pytest.approx(row.tokens_per_second * a_token / (8 * 989.5e12), rel=1e-6)
    stages = run_of("configs/gpt_7b.json", "parallel.tensor=2", "train.micro_batch_size=2", world=8)
    communicators = besides(rank_memory(stages)[0], communicators_of(stages)).communicators / 2**30
    assert communicators == pytest.approx(0.15 * 5), (
        "tensor, data, the world, and one each way of the pipeline"
    )


def test_layouts_keep_the_engines_rules() -> None:
    """FSDP cannot divide an embedding that one rank holds twice: the search would
    offer what pretrain refuses.
    """
    config = run_of("configs/gpt_tiny.json", "model.num_layers=8", *ALONE)
    found = {(c.engine.kind, c.parallel.schedule) for c in layouts(config, 4, read_cluster("dgx_h100"))}
    assert ("native", "zb_v") in found and ("fsdp", "zb_h1") in found and ("fsdp", "zb_v") not in found


def test_every_layout_is_counted_once() -> None:
    """By tensor, pipeline and data: what divides, and nothing twice."""
    config = run_of("configs/gpt_tiny.json", *ALONE, "parallel.sequence=false")
    found: list[Config] = list(layouts(config, 8, read_cluster("dgx_h100")))
    axes = {(c.parallel.tensor, c.parallel.pipeline, c.data_size) for c in found}
    assert axes == {(t, p, 8 // t // p) for t in (1, 2, 4) for p in (1, 2, 4) if t * p <= 8}
    assert len({(c.parallel, c.train, c.engine.kind, c.engine.shard_optimizer) for c in found}) == len(found)


@pytest.mark.parametrize(
    ("kv_heads", "ffn", "decides"),
    [
        (16, 256, "tensor ranks are on one node"),
        (2, 256, "they divide key/value heads"),
        (16, 130, "they divide the feed-forward part"),
    ],
)
def test_layouts_are_those_within_all_limits(kv_heads: int, ffn: int, decides: str) -> None:
    """Of 16 devices on nodes of 4: a limit that the search forgets offers what is slow or cannot be
    divided; one too many hides layouts.
    """
    world, layers, batch, tokens = 16, 4, 8, 32768
    sizes = {
        "num_layers": layers,
        "hidden_size": 128,
        "num_heads": 16,
        "num_kv_heads": kv_heads,
        "ffn_size": ffn,
    }
    overrides = [
        *(f"model.{key}={size}" for key, size in sizes.items()),
        f"train.global_batch_size={batch}",
        f"train.seq_len={tokens}",
    ]
    config = run_of("configs/gpt_tiny.json", *overrides, *ALONE)
    nodes = read_cluster("dgx_h100")
    nodes = replace(nodes, levels=(replace(nodes.levels[0], ranks=4), *nodes.levels[1:]))
    limits: dict[str, Callable[[int, int, int, int], bool]] = {
        "tensor ranks are on one node": lambda t, p, c, d: t <= 4,
        "they divide key/value heads": lambda t, p, c, d: kv_heads % t == 0,
        "they divide the feed-forward part": lambda t, p, c, d: ffn % t == 0,
        "each stage has a layer": lambda t, p, c, d: p <= layers,
        "a context rank has 8192 tokens": lambda t, p, c, d: tokens // c >= 8192,
        "data ranks divide the batch": lambda t, p, c, d: batch % d == 0,
    }
    sizes_of_axes = [1, 2, 4, 8, 16]
    every = [axes for axes in itertools.product(sizes_of_axes, repeat=4) if math.prod(axes) == world]
    broken = {axes: [name for name, holds in limits.items() if not holds(*axes)] for axes in every}
    alone = {names[0] for names in broken.values() if len(names) == 1}
    assert alone == {
        decides,
        "each stage has a layer",
        "a context rank has 8192 tokens",
        "data ranks divide the batch",
    }, "what could fail"
    found = list(layouts(config, world, nodes))
    axes = {(c.parallel.tensor, c.parallel.pipeline, c.parallel.context, c.data_size) for c in found}
    assert axes == {axes for axes, names in broken.items() if not names}
    for c in found:
        parallel, data = c.parallel, c.data_size
        assert parallel.pipeline * c.chunks <= layers and batch % (c.train.micro_batch_size * data) == 0
        assert parallel.sequence == (
            parallel.tensor > 1 and tokens // parallel.context % parallel.tensor == 0
        )
        assert data * parallel.context > 1 or (c.engine.kind, c.engine.shard_optimizer) == ("native", False)


def test_long_sequences_are_divided() -> None:
    """By every method, or by the one that is named, and such that each rank has thousands of tokens;
    else memory alone would decide.
    """
    long = ["train.seq_len=32768", "train.global_batch_size=8", *ALONE]

    def ways(*overrides: str) -> set[tuple[int, str]]:
        config = run_of("configs/gpt_tiny.json", *long, *overrides)
        found = list(layouts(config, 8, read_cluster("dgx_h100")))
        assert all(c.world_size == 8 for c in found)
        return {(c.parallel.context, c.parallel.context_method) for c in found}

    assert ways() == {(1, "auto"), *((c, method) for c in (2, 4) for method in ("gather", "ring", "ulysses"))}
    assert ways("parallel.context_method=ring") == {(1, "ring"), (2, "ring"), (4, "ring")}
    assert ways("train.seq_len=8192") == {(1, "auto")}
    assert (2, "ulysses") not in ways("model.num_heads=1", "model.head_size=32"), (
        "one head cannot be dealt to two ranks"
    )


def test_a_long_sequence_that_fits_nowhere_else_is_divided() -> None:
    """Its command must be one that pretrain takes, with the memory that was predicted."""
    found = searched("llama_8b", 8, 80.0, "train.seq_len=131072", "train.global_batch_size=8")
    best = found.fit[0]
    assert best.config.parallel.context > 1 and any(c.config.parallel.context == 1 for c in found.too_large)
    again = run_of(
        "configs/llama_8b.json",
        "train.seq_len=131072",
        "train.global_batch_size=8",
        *best.overrides(),
        world=8,
    )
    assert (
        rank_memory(again) == rank_memory(best.config)
        and f"context {again.parallel.context} (" in best.describe()
    )


def test_a_large_model_is_told_what_it_lacks() -> None:
    """No layout of 8 devices holds it; activations in host memory do not help its state."""
    found = searched("gpt_175b", 8, 80.0, "train.global_batch_size=1536")
    assert not found.fit and found.hopeless


def test_the_runner_up_lost_by_a_term() -> None:
    """The term that differs most is named, with its seconds."""
    found = searched("gpt_7b", 64, 80.0)
    slower = next(c for c in found.fit if c.seconds > 1.1 * found.fit[0].seconds)
    line = lost(found.fit[0], slower)
    assert line.startswith(f"{slower.seconds - found.fit[0].seconds:.3g} s slower: ") and "s more of" in line


def test_checkpoints_are_saved_at_the_best_interval() -> None:
    """Daly's formula against a search over intervals for what is lost, of 512 and of 16,384 devices."""
    for delta, between in ((30.0, 356_000.0), (60.0, 11_000.0)):
        best = min(loss(interval, delta, between) for interval in range(100, 40_000, 10))
        assert loss(best_interval(delta, between), delta, between) == pytest.approx(best, rel=0.01)
    config = run_of("configs/gpt_7b.json", world=16)
    found = cost(config, 2.0, 1e9, 16, 8, 2.5, 700)
    assert found.steps == 477 and found.money == pytest.approx(2.5 * found.device_hours)
    assert found.days == pytest.approx(477 * 2.0 / 86400) and found.energy_mwh == pytest.approx(
        found.device_hours * 700e-6
    )


@pytest.mark.parametrize(
    ("step", "lasts"),
    [(1e-2, "1.22 seconds"), (1.0, "2.033 minutes"), (100.0, "3.389 hours"), (1e4, "14.12 days")],
)
def test_a_runs_time_is_said_in_units_that_fit_it(step: float, lasts: str) -> None:
    """A tiny run lasted 8e-05 days."""
    line = cost_lines(run_of("configs/gpt_tiny.json"), step, 122 * 32 * 128, 8, None, None)[0]
    assert f"are 122 steps: {lasts} (" in line and "e-" not in line


def test_a_run_of_64_devices_costs_what_arithmetic_says() -> None:
    """Failures of one device, a checkpoint of weights alone, or one host that writes for all: each would
    move the interval or the bill.
    """
    config = run_of("configs/gpt_7b.json", world=64)
    found, step, failure = cost(config, 2.5, 1e11, 64, 8, None, 700), 2.5, 16384 * 54 * 24 / 419 * 3600 / 64
    assert found.checkpoint_seconds == pytest.approx(12 * 6_738_415_616 / 8e9), (
        "fp32 masters and two moments, from eight hosts"
    )
    young = (2 * found.checkpoint_seconds * failure) ** 0.5
    assert found.checkpoint_steps * step == pytest.approx(young, rel=0.002), (
        "Daly's further terms are small here"
    )
    interval = found.checkpoint_steps * step
    lost = found.checkpoint_seconds / interval + ((interval + found.checkpoint_seconds) / 2 + 600) / failure
    assert found.lost == pytest.approx(lost) and found.device_hours == pytest.approx(
        found.days * 24 * 64 * (1 + lost)
    )
    assert found.failures == pytest.approx(found.device_hours * 3600 / 64 / failure) and found.money is None


def test_offloaded_activations_go_there_and_back() -> None:
    """Counted one way, offload would look twice as fast as the bus."""
    config = run_of("configs/gpt_1b.json", "train.offload_activations=true")
    idle = Prediction(dict.fromkeys(("products", "attention", "passes"), 0.0))
    kept = rank_memory(replace_config(config, "train", offload_activations=False))[0].activations
    assert offloaded(config, idle).terms["offload"] == pytest.approx(
        2 * config.num_microbatches * kept / 2.5e10
    )


def test_the_script_prints_commands(capsys: pytest.CaptureFixture[str]) -> None:
    """Without the user's own overrides they would train another model than was searched for."""
    arguments = [
        "--config",
        "configs/gpt_1b.json",
        "--world",
        "8",
        "--search",
        "--tokens",
        "1e12",
        "--price",
        "2",
    ]
    assert script.run([*arguments, "model.num_layers=12", "data.train=my text"]) == 0
    printed, own = capsys.readouterr().out, "model.num_layers=12 'data.train=my text'"
    start = "1. torchrun --nproc-per-node 8 launch/pretrain.py --config configs/gpt_1b.json"
    assert f"{start} {own} parallel.tensor=" in printed and "checkpoint.every=" in printed


def test_a_bar_is_named_by_its_layout() -> None:
    """Numbers alone would send a reader back to the table."""
    words = [
        "parallel.pipeline=2",
        "parallel.tensor=4",
        "parallel.sequence=true",
        "parallel.schedule=zb_h1",
        "engine.shard_optimizer=true",
    ]
    config = run_of(
        "configs/gpt_7b.json", *words, "train.micro_batch_size=2", "train.recompute=selective", world=32
    )
    found: Any = SimpleNamespace(config=config)
    assert label_of(found) == "tp4 pp2 dp4 sp @zb_h1, microbatch 2, sharded, recompute selective"


def test_commands_start_all_ranks() -> None:
    """One process would be refused, because the layout is for more; and a machine
    has no more than its own ranks.
    """
    assert [launcher(*ranks) for ranks in ((1, 8), (8, 8), (16, 8))] == [
        "python",
        "torchrun --nproc-per-node 8",
        "srun --ntasks 16 --ntasks-per-node 8 python",
    ]


def test_the_configs_own_layout_does_not_matter(capsys: pytest.CaptureFixture[str]) -> None:
    """It is set aside, so it need not be one that runs; but a value that is none stays an error."""
    base = [
        "--config",
        "configs/gpt_7b.json",
        "--world",
        "3",
        "--search",
        "train.global_batch_size=21",
        "model.num_layers=2",
    ]
    assert script.run([*base, "parallel.tensor=7", "parallel.pipeline=5"]) == 0
    assert "data 3, microbatch 1" in capsys.readouterr().out
    with pytest.raises(ConfigError, match='parallel.tensor: "x" is not valid'):
        script.run([*base, "parallel.tensor=x"])


def test_a_picture_that_cannot_be_written_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk is found out when the search is done: its results stand, and a line
    says what is missing.
    """

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("megacore.tools.planner.search_plot.draw_search", full)
    with pytest.raises(ConfigError, match="--plot: cannot write picture.png: No space left on device"):
        script.run(["--config", "configs/gpt_tiny.json", "--world", "1", "--search", "--plot", "picture.png"])


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--memory-gib", "nan"], "--memory-gib: nan is not usable"),
        (["--tokens", "-1"], "--tokens: -1.0 is not usable"),
        (["--memory-gib", "0.01"], "layouts fits in 0.01 GiB"),
        (["--gpu", "h1000"], "--gpu: h1000"),
        (["--cluster", "nowhere.json"], "--cluster: nowhere.json"),
        (["--world", "0"], "--world: 0"),
        (["--world", str(10**12)], "are more than any run has"),
        (["--world", "101"], "divides in no layout of 101"),
    ],
)
def test_what_cannot_be_searched_is_one_line(options: list[str], line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        script.run(["--config", "configs/gpt_1b.json", "--world", "8", "--search", *options])
    assert line in str(caught.value) and "\n" not in str(caught.value)
