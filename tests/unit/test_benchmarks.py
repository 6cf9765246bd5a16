"""What benchmarks compute from what they measure, without measuring."""

from collections import Counter
from functools import partial
from itertools import count, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from benchmarks import documents, mup, optimizers, predicted, throughput
from benchmarks.breakdown import Stopwatch, beside_each_other
from benchmarks.collectives import fit
from benchmarks.kernel_inputs import zipf, zipf_tokens
from benchmarks.layer_parts import LAYERS, PARTS, ByPart, LayerParts
from benchmarks.throughput import hardware_flops_per_token
from benchmarks.training import Training, random_batch
from megacore.context_parallel import attention
from megacore.context_parallel import sharding as pieces
from megacore.distributed.axes import ranks_along
from megacore.distributed.rank_info import RankInfo
from megacore.distributed.topology import sizes_of
from megacore.errors import DataError
from megacore.pipeline.schedule import COMPUTE, Action, Op
from megacore.tools.choices.flops import flops_per_token
from megacore.tools.choices.utilisation import Utilisation
from megacore.tools.planner.devices import Cluster, DeviceSpec, Level
from megacore.tools.planner.operations import Machine
from megacore.tools.planner.plot import draw
from megacore.tools.planner.profile import Profile
from megacore.tools.planner.traffic import rank_traffic, seconds_by_group
from tests import training
from tests.build import mesh_of, run_of
from tests.training import write_config


def test_random_tokens_are_uniform_or_as_in_text(tmp_path: Path) -> None:
    """The second token is half as frequent as the first, and so on; within six standard deviations."""
    count, vocabulary = 100_000, 50
    ids = zipf_tokens(vocabulary, (count,), torch.Generator().manual_seed(0))
    expected = count * zipf(vocabulary)
    assert expected[0] == pytest.approx(10 * float(expected[9])) and float(expected.sum()) == pytest.approx(
        count
    )
    counts = torch.bincount(ids, minlength=vocabulary)
    assert len(counts) == vocabulary and ((counts - expected).abs() < 6 * expected.sqrt()).all()

    config = run_of(write_config(tmp_path, "unused"), "train.seq_len=512")
    (uniform, *_), (text, *_) = (
        random_batch(config, torch.device("cpu"), zipf=zipf) for zipf in (False, True)
    )
    assert uniform.tokens.shape == text.tokens.shape
    assert (text.tokens == 0).float().mean() > 5 * (uniform.tokens == 0).float().mean()


@pytest.mark.parametrize("each", [8, 16, 64, None])
def test_attention_is_asked_for_what_documents_need(each: int | None) -> None:
    """Counted at the kernels, in a whole step: pairs within documents and no others, or the
    prediction of time is for nothing.
    """
    contender = documents.Contender(each, 64)
    contender.seconds.append((1.0, 1.0))
    row = contender.row()
    assert row["attention_flops_counted"] == row["attention_flops_predicted"] > 0
    if each == 16:  # the count sees it where attention crosses documents
        with mock.patch.object(attention, "parts", lambda queries, keys, _: pieces.parts(queries, keys)):
            assert contender.row()["attention_flops_counted"] > 3 * row["attention_flops_predicted"]
    contender.mesh.close()


def test_line_is_the_one_that_made_the_times() -> None:
    """Latency and bandwidth over five decades of sizes; and times that fall with
    size must not fit a negative term.
    """
    points = [(4.0**power, 2e-5 + 4.0**power / 5e9) for power in range(5, 15)]
    line = fit(points)
    assert line.alpha == pytest.approx(2e-5, rel=1e-6) and 1 / line.beta == pytest.approx(5e9, rel=1e-6)
    assert fit([(1e3, 2.0), (1e6, 1.0)]).beta == 0.0
    assert fit([(1e6, 0.5), (2e6, 2.0)]).alpha == 0.0


def test_planner_times_what_is_sent_by_the_clusters_links() -> None:
    """2 sums forward and 2 backward a layer, and the embedding's and the head's, each two hops and its bytes.

    Data ranks are as far apart as there are tensor ranks: here a machine has one of them.
    """
    sections = {
        "model": {"num_layers": 3, "hidden_size": 64, "num_heads": 4, "vocab_size": 128},
        "train": {"seq_len": 32, "micro_batch_size": 1, "global_batch_size": 2, "precision": "fp32"},
        "parallel": {"tensor": 2},
    }
    machine = Machine(
        DeviceSpec("none", {}),
        Cluster("two", (Level("in", 2, 100.0, 3.0), Level("out", None, 10.0, 5.0))),
        Profile(call=0.5),
    )
    config = run_of(sections, world=4)
    (transfers,) = rank_traffic(config)
    seconds, size = seconds_by_group(transfers, config, machine), 32 * 64 * 4
    # one gather of the loss's figures
    assert seconds["tp"] - 2 * 3.5 == pytest.approx(14 * (0.5 + 2 * 3.0 + size / 100.0), rel=0.05)
    (gradients,) = (transfer for transfer in transfers if transfer.group == "dp")
    assert seconds["dp"] == pytest.approx(gradients.calls * (0.5 + 2 * 5.0) + gradients.elements * 4 / 10.0)
    piped = run_of(sections | {"parallel": {"pipeline": 2}}, world=4)
    first, _ = rank_traffic(piped)
    assert seconds_by_group(first, piped, machine)["pp"] == pytest.approx(1 * (5.0 + size / 10.0)), (
        "the next stage is on another machine"
    )


@pytest.mark.parametrize(
    "layout",
    [
        "parallel.tensor=2 parallel.pipeline=4 parallel.data=2",
        "parallel.tensor=2 parallel.context=4 parallel.data=2 parallel.context_method=ring",
        "parallel.tensor=2 parallel.context=4 parallel.data=2 parallel.context_method=gather",
        "parallel.tensor=2 parallel.data=8 engine.reduce_levels=2",
        "parallel.tensor=2 parallel.data=8 engine.kind=fsdp engine.shard_size=4",
    ],
)
def test_groups_are_timed_over_the_distance_of_their_ranks(layout: str) -> None:
    """Ranks of a group that the planner takes for neighbours would have a machine's links where they are on
    several. Here each call takes as many seconds as its ranks are apart, and the mesh says how far that is.
    """
    plain = ["parallel.pipeline=1", "model.num_layers=4", "train.micro_batch_size=1"]
    config = run_of("configs/gpt_tiny.json", *plain, *layout.split(), world=16)
    sizes, summing = sizes_of(config), ranks_along(("dp", "cp"), 0, sizes_of(config))
    pipeline, context = (ranks_along((axis,), 0, sizes) for axis in ("pp", "cp"))
    ring, within = config.parallel.context_method == "ring", 8 // 2  # data ranks of a host of 8 ranks
    groups = {
        "tp": (0, 1),
        "pp": pipeline,
        "tied": (pipeline[0], pipeline[-1]),
        "dp": summing,
        "loss": (0, 1),
        "norm": (0, 1),
    }
    groups |= {"cp": (context[0], context[-1]) if ring else context}  # a ring's last rank sends to the first
    groups |= {
        "dp within a host": summing,
        "dp between hosts": summing[::within],
        "shard": summing,
        "replicate": summing[:: config.shard_size],
    }
    links = SimpleNamespace(exchange=lambda *args: args[-1])
    machine: Any = SimpleNamespace(
        links=links, transfer=lambda moved, distance: distance, collective=lambda *args: args[-1]
    )
    machine.operation = partial(Machine.operation, machine)
    for transfers in rank_traffic(config, 8):
        calls = Counter[str]()
        for transfer in transfers:
            calls[transfer.group] += transfer.calls
        apart = {
            group: seconds / calls[group]
            for group, seconds in seconds_by_group(transfers, config, machine).items()
        }
        assert apart == {group: groups[group][1] - groups[group][0] for group in apart}


def test_the_first_layout_calibrates_and_is_no_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its prediction equals its step by making: shown as an error of 0 %, it would count as a hit.

    The others' errors are of the calibrated prediction, which goes by what each layout changes.
    """
    seconds = {"one": 3.0, "dp2": 2.0}
    monkeypatch.setattr(
        predicted, "start", lambda args, name: {"step_seconds": {"median": seconds[name], "spread": 0.1}}
    )
    machine = (
        DeviceSpec("here", {"fp32": 1e10}, memory_bytes_per_second=1e10),
        Cluster("here", (Level("fast", None, 1e9, 1e-6),)),
    )
    monkeypatch.setattr(predicted, "measured_device", lambda args, world: machine[0])
    monkeypatch.setattr(predicted, "measured_links", lambda args, layout, config: machine[1])
    one, two = predicted.compare(
        predicted.parse(["--config", "configs/gpt_tiny.json", "--layouts", "one,dp2"])
    )
    assert one.calibrated == pytest.approx(3.0) and one.estimated != pytest.approx(3.0)
    assert 1.5 < two.calibrated < 1.7 and two.error == pytest.approx(two.calibrated / 2.0 - 1), (
        "half the work, and what ranks exchange"
    )
    first, second = predicted.table([one, two]).splitlines()[2:]
    assert "calibrates" in first and f"{two.error:+.0%}" in second


def test_every_moment_is_charged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wait within a pass would count as both, or the passes' time outside any part as none."""
    clock = iter(range(0, 1000, 10))
    monkeypatch.setattr("benchmarks.breakdown.perf_counter", lambda: float(next(clock)))
    watch = Stopwatch(torch.device("cpu"))
    watch.mark()  # 0
    with watch.part("forward", Action(Op.FORWARD, 3, 1)), watch.part("tp"):  # 10; 20, and left at 30, 40
        pass
    watch.mark()  # 50
    assert dict(watch.totals()) == {"other": 20.0, "forward": 20.0, "tp": 10.0}
    assert watch.mean_of(Op.FORWARD, 1) == 30.0 and watch.mean_of(Op.FORWARD, 0) == 0.0
    assert watch.between(0, 5) == 50.0 == sum(watch.totals().values())


def test_every_part_of_a_mixture_is_measured_forward_and_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part whose calls have another name than the benchmark knows would go into the
    rest, and so would its backward.
    """
    small = {
        "num_layers": 2,
        "hidden_size": 8,
        "num_heads": 2,
        "vocab_size": 16,
        "norm": "rmsnorm",
        "activation": "swiglu",
        "bias": False,
    }
    experts = {
        "num_experts": 4,
        "experts_per_token": 2,
        "expert_ffn_size": 8,
        "shared_experts": 1,
        "first_dense": 1,
    }
    train = {
        "seq_len": 8,
        "micro_batch_size": 1,
        "global_batch_size": 1,
        "precision": "fp32",
        "device": "cpu",
    }
    config = run_of({"model": small | experts | {"router_z_loss": 0.1}, "train": train})
    monkeypatch.setattr("benchmarks.breakdown.perf_counter", partial(next, count()))  # type: ignore[call-overload]
    by_part = ByPart(config, RankInfo())
    found = dict(zip(PARTS, by_part.turn()[1:], strict=True))
    assert all(
        (seconds > 0) == (part not in ("exchange", "communication")) for part, seconds in found.items()
    )
    with monkeypatch.context() as patch:  # of a backward that is not charged
        patch.setattr(LayerParts, "_charge_backward", lambda *_: None)
        less = dict(zip(PARTS, by_part.turn()[1:], strict=True))
    assert all(less[part] < found[part] for part in LAYERS if found[part])
    by_part.training.mesh.close()


def test_utilisation_needs_a_peak() -> None:
    """A utilisation of an unknown device would be invented; of a measured peak it is the formula's share."""
    config = run_of(
        {"model": {"num_layers": 1, "hidden_size": 64, "num_heads": 4}, "train": {"recompute": "full"}}
    )
    unknown = Utilisation(config, torch.device("cpu"), 1)
    assert unknown.full(100.0) is unknown.causal(100.0) is None
    measured = Utilisation(config, torch.device("cpu"), 1, peak=1e12)
    full, causal = measured.full(100.0), measured.causal(100.0)
    hardware = measured.of(hardware_flops_per_token(config, causal=False) * 100.0)
    assert full is not None and causal is not None and hardware is not None
    assert causal < full < hardware


def test_utilisation_is_of_all_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens a second are the whole run's, so the peak is that of all its devices: of
    one, eight GPUs would be at 300 %.
    """
    monkeypatch.setattr("platform.processor", lambda: "NVIDIA H100 80GB HBM3")
    config = run_of(
        {"model": {"num_layers": 1, "hidden_size": 64, "num_heads": 4}, "train": {"precision": "bf16"}}
    )
    found = Utilisation(config, torch.device("cpu"), 8).full(1e6)
    assert found == pytest.approx(flops_per_token(config, causal=False) * 1e6 / (8 * 989.5e12))


def test_steps_to_a_loss() -> None:
    """Linearly between two validations, at the first that is low enough, and never where none is."""
    curve = [(10, 5.0), (20, 4.0), (30, 4.5), (40, 3.0)]
    assert optimizers.steps_to(4.25, curve) == 17.5 and optimizers.steps_to(3.5, curve) == pytest.approx(
        10 * 2 / 3 + 30
    )
    assert optimizers.steps_to(4.0, curve) == 20.0 and optimizers.steps_to(2.9, curve) is None


def test_a_measured_step_stands_beside_its_simulation(tmp_path: Path) -> None:
    """A drawing that mixes up actions, clocks or ranks would send people after
    differences that are not there.
    """
    config = run_of(write_config(tmp_path, "unused"), "parallel.schedule=zb_h1")
    training = Training(config, mesh_of(config))
    timeline = beside_each_other(training)
    simulated, measured = timeline.spans
    done = [
        action
        for action in training.train_step.plans[config.num_microbatches].actions[0]
        if action.op in COMPUTE
    ]
    assert [span.action for span in measured] == [span.action for span in simulated] == done
    assert measured[0].start == 0.0 and all(a.end <= b.start for a, b in pairwise(measured))
    for op in {action.op for action in done}:
        totals = [
            sum(span.end - span.start for span in row if span.action.op is op) for row in timeline.spans
        ]
        assert totals[0] == pytest.approx(totals[1], rel=1e-6) and totals[0] > 0
    draw(timeline, "both", tmp_path / "both.png", rows=["0 simulated", "0 measured"])
    assert (tmp_path / "both.png").stat().st_size > 1000
    training.engine.close()


def test_how_far_a_best_rate_moves() -> None:
    """A run that diverged must not count as the best, nor one that is not finished; and a
    rate that moves with muP is said.
    """

    def point(
        rules: str, width: int, rate: float, *losses: float, median: float | None = None
    ) -> dict[str, Any]:
        base = {"model.parametrization": rules, "model.base_width": 64 if rules == "mup" else None}
        swept = {"size": {"model.hidden_size": width}, "rules": base, "optim.lr": rate}
        return {
            "swept": swept,
            "losses": list(losses),
            "median": median if median is not None else next(iter(losses), None),
        }

    points = [
        point(rules, width, rate, abs(rate - best))
        for rules, best in (("mup", 4.0), ("standard", 1.0))
        for width in (64, 128)
        for rate in (1.0, 2.0, 4.0)
    ]
    points += [
        point("standard", 128, 8.0),
        point("standard", 256, 4.0, 2.0),
        {**point("standard", 256, 2.0, 1.0), "median": None},
    ]
    losses, base = mup.losses_of({"points": points})
    assert (base, mup.moved(losses, "mup"), mup.moved(losses, "standard")) == (64, 1.0, 4.0)
    assert "stays within a factor of 2 with muP alone" in mup.document(losses, base)
    assert "does NOT stay" in mup.document({"mup": losses["standard"], "standard": losses["standard"]}, base)


def test_a_measurement_with_data_looks_at_it_first(tmp_path: Path) -> None:
    """A token that the model does not have ended it with a traceback from the
    embedding, after all ranks had met.
    """
    config = training.write_config(tmp_path, training.write_corpus(tmp_path))
    with pytest.raises(DataError, match="beyond the vocabulary|vocab"):
        throughput.main(["--config", config, "--real-data", "model.vocab_size=16"], RankInfo())
