"""What benchmarks compute from what they measure, without measuring."""

import json
from collections import Counter
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import documents, predicted
from benchmarks.breakdown import Stopwatch, beside_each_other
from benchmarks.collectives import fit
from benchmarks.peers import plain_gpt
from benchmarks.peers.__main__ import begin, parse
from benchmarks.peers.contenders import BEFORE, NO_SUCH_LAYOUT, OURS, PEERS, PRODUCTS, contenders
from benchmarks.peers.environments import REQUIREMENTS
from benchmarks.peers.plain_gpt import GPT, PlainGPTLoop
from benchmarks.peers.process import EQUAL, OWN
from benchmarks.peers.products import Product, weight_shapes
from benchmarks.peers.report import ratios_by_layout, summary, table
from benchmarks.peers.transformers_loop import gpt2
from benchmarks.rounds import ROOT, Contender, Race, Record
from benchmarks.rounds import race as start_race
from benchmarks.throughput import hardware_flops_per_token
from benchmarks.training import Training, random_batch
from megacore.config import Config
from megacore.context_parallel import attention
from megacore.context_parallel import sharding as pieces
from megacore.distributed.axes import ranks_along
from megacore.distributed.mesh import Mesh
from megacore.distributed.rank_info import RankInfo
from megacore.distributed.topology import Topology, sizes_of
from megacore.errors import ConfigError
from megacore.model.stage import Stage, whole_model
from megacore.pipeline.schedule import COMPUTE, Action, Op
from megacore.tools.choices import compiling
from megacore.tools.choices.flops import attention_flops, block_flops, flops_per_token, head_flops
from megacore.tools.choices.utilisation import Utilisation
from megacore.tools.interchange.mapped import Mapped, gpt2_tensors
from megacore.tools.interchange.nanogpt import nanogpt_tensors
from megacore.tools.planner.devices import Cluster, DeviceSpec, Level
from megacore.tools.planner.operations import Machine
from megacore.tools.planner.plot import draw
from megacore.tools.planner.profile import Profile
from megacore.tools.planner.traffic import rank_traffic, seconds_by_group
from megacore.tools.settings.load import load, resolve
from tests.training import write_config


@pytest.mark.parametrize("each", [8, 16, 64, None])
def test_attention_is_asked_for_what_documents_need(each: int | None) -> None:
    """Counted at the kernels, in a whole step: pairs within documents and no others, or the prediction of time is for nothing."""
    contender = documents.Contender(each, 64)
    contender.seconds.append((1.0, 1.0))
    row = contender.row()
    assert row["attention_flops_counted"] == row["attention_flops_predicted"] > 0
    if each == 16:  # the count sees it where attention crosses documents
        with mock.patch.object(attention, "parts", lambda queries, keys, _: pieces.parts(queries, keys)):
            assert contender.row()["attention_flops_counted"] > 3 * row["attention_flops_predicted"]
    contender.mesh.close()


def test_line_is_the_one_that_made_the_times() -> None:
    """Latency and bandwidth over five decades of sizes; and times that fall with size must not fit a negative term."""
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
        DeviceSpec("none", {}), Cluster("two", (Level("in", 2, 100.0, 3.0), Level("out", None, 10.0, 5.0))), Profile(call=0.5)
    )
    config = resolve(sections, [], "small", 4).config
    (transfers,) = rank_traffic(config)
    seconds, size = seconds_by_group(transfers, config, machine), 32 * 64 * 4
    assert seconds["tp"] - 2 * 3.5 == pytest.approx(14 * (0.5 + 2 * 3.0 + size / 100.0), rel=0.05)  # one gather of the loss's figures
    (gradients,) = (transfer for transfer in transfers if transfer.group == "dp")
    assert seconds["dp"] == pytest.approx(gradients.calls * (0.5 + 2 * 5.0) + gradients.elements * 4 / 10.0)
    piped = resolve(sections | {"parallel": {"pipeline": 2}}, [], "small", 4).config
    first, _ = rank_traffic(piped)
    assert seconds_by_group(first, piped, machine)["pp"] == pytest.approx(1 * (5.0 + size / 10.0)), "the next stage is on another machine"


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
    """Ranks of a group that the planner takes for neighbours would have a machine's links where they are on several. Here each call takes
    as many seconds as its ranks are apart, and the mesh says how far that is."""
    plain = ["parallel.pipeline=1", "model.num_layers=4", "train.micro_batch_size=1"]
    config = load("configs/gpt_tiny.json", [*plain, *layout.split()], 16).config
    sizes, summing = sizes_of(config), ranks_along(("dp", "cp"), 0, sizes_of(config))
    pipeline, context = (ranks_along((axis,), 0, sizes) for axis in ("pp", "cp"))
    ring, within = config.parallel.context_method == "ring", 8 // 2  # data ranks of a host of 8 ranks
    groups = {"tp": (0, 1), "pp": pipeline, "tied": (pipeline[0], pipeline[-1]), "dp": summing, "loss": (0, 1), "norm": (0, 1)}
    groups |= {"cp": (context[0], context[-1]) if ring else context}  # a ring's last rank sends to the first
    groups |= {
        "dp within a host": summing,
        "dp between hosts": summing[::within],
        "shard": summing,
        "replicate": summing[:: config.shard_size],
    }
    links = SimpleNamespace(exchange=lambda *args: args[-1])
    machine: Any = SimpleNamespace(links=links, transfer=lambda moved, distance: distance, collective=lambda *args: args[-1])
    machine.operation = partial(Machine.operation, machine)
    for transfers in rank_traffic(config, 8):
        calls = Counter[str]()
        for transfer in transfers:
            calls[transfer.group] += transfer.calls
        apart = {group: seconds / calls[group] for group, seconds in seconds_by_group(transfers, config, machine).items()}
        assert apart == {group: groups[group][1] - groups[group][0] for group in apart}


def test_the_first_layout_calibrates_and_is_no_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its prediction equals its step by making: shown as an error of 0 %, it would count as a hit. The others' errors are of the calibrated
    prediction, which goes by what each layout changes."""
    seconds = {"one": 3.0, "dp2": 2.0}
    monkeypatch.setattr(predicted, "start", lambda args, name: {"step_seconds": {"median": seconds[name], "spread": 0.1}})
    machine = DeviceSpec("here", {"fp32": 1e10}, memory_bytes_per_second=1e10), Cluster("here", (Level("fast", None, 1e9, 1e-6),))
    monkeypatch.setattr(predicted, "measured_device", lambda args, world: machine[0])
    monkeypatch.setattr(predicted, "measured_links", lambda args, layout, config: machine[1])
    one, two = predicted.compare(predicted.parse(["--config", "configs/gpt_tiny.json", "--layouts", "one,dp2"]))
    assert one.calibrated == pytest.approx(3.0) and one.estimated != pytest.approx(3.0)
    assert 1.5 < two.calibrated < 1.7 and two.error == pytest.approx(two.calibrated / 2.0 - 1), "half the work, and what ranks exchange"
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


def test_utilisation_needs_a_peak() -> None:
    """A utilisation of an unknown device would be invented; of a measured peak it is the formula's share."""
    config = resolve({"model": {"num_layers": 1, "hidden_size": 64, "num_heads": 4}, "train": {"recompute": "full"}}, [], "small", 1).config
    unknown = Utilisation(config, torch.device("cpu"), 1)
    assert unknown.full(100.0) is unknown.causal(100.0) is None
    measured = Utilisation(config, torch.device("cpu"), 1, peak=1e12)
    full, causal = measured.full(100.0), measured.causal(100.0)
    hardware = measured.of(hardware_flops_per_token(config, causal=False) * 100.0)
    assert full is not None and causal is not None and hardware is not None
    assert causal < full < hardware


def test_utilisation_is_of_all_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens a second are the whole run's, so the peak is that of all its devices: of one, eight GPUs would be at 300 %."""
    monkeypatch.setattr("platform.processor", lambda: "NVIDIA H100 80GB HBM3")
    config = resolve({"model": {"num_layers": 1, "hidden_size": 64, "num_heads": 4}, "train": {"precision": "bf16"}}, [], "small", 1).config
    found = Utilisation(config, torch.device("cpu"), 8).full(1e6)
    assert found == pytest.approx(flops_per_token(config, causal=False) * 1e6 / (8 * 989.5e12))


def record(name: str, *seconds: float, loss: float = 9.0) -> Record:
    return Record(Contender(name, name, tokens=1000), [[s] for s in seconds], 10**9, [0.5] * len(seconds), [loss] * len(seconds))


def report_of(output: Path, *arguments: str) -> dict[str, Any]:
    return begin(parse(["--output", str(output), *arguments]), output, lambda line: None)


def race(*records: Record, **failures: str) -> Race:
    return Race({record.contender.name: record for record in records}, failures)


def test_table_has_both_ratios_and_every_reason(tmp_path: Path) -> None:
    """A ratio of two slow rounds must not tell, nor one without the other; who is missing has a dash and the reason in its line."""
    own = race(record("megacore", 1.0, 10.0, 1.0), record("deepspeed", 2.0, 20.0, 2.2), torchtitan="no | luck")
    equal = race(record("megacore", 1.0, 1.0, 1.0), record("deepspeed", 0.9, 0.9, 1.1), record("transformers", 3.0, 3.0, 3.0))
    absent = {"megatron-core": "no environment: no network", "transformers-compiled": NO_SUCH_LAYOUT}
    entries = {OWN: summary(own, absent), EQUAL: summary(equal, absent)}
    assert entries[OWN]["contenders"]["deepspeed"]["megacore_is_times_as_fast"]["median"] == pytest.approx(2.0)
    report = report_of(tmp_path / "peers.json") | {"settings": {OWN: "", EQUAL: ""}, "results": {"dp2, fp32": entries}}
    lines = table(report).splitlines()
    assert "| dp2, fp32 | 2.00, deepspeed | 0.90, deepspeed |" in lines
    rows = {cells[1].strip("* "): [cell.strip() for cell in cells[2:]] for line in lines if (cells := line.split("|")[1:-1])[1:]}
    assert rows["deepspeed"][:4] == ["455 (50–500)", "2.00×", "1,111 (909–1,111)", "0.90×"]
    assert rows["deepspeed"][-1] == PEERS["deepspeed"].differs
    assert rows["megacore"][:4] == ["1,000 (100–1,000)", "", "1,000 (1,000–1,000)", ""]
    assert rows["torchtitan"][:4] == ["–"] * 4 and rows["torchtitan"][-1] == "own settings: no / luck"
    assert rows["transformers"][:4] == ["–", "–", "333 (333–333)", "3.00×"]
    assert rows["transformers-compiled"][:4] == ["–"] * 4 and rows["transformers-compiled"][-1] == NO_SUCH_LAYOUT
    assert rows["megatron-core"][-1].count("no environment: no network") == 2
    assert ratios_by_layout(report)["dp2, fp32"]["deepspeed"] == pytest.approx(
        {"as its users get it": 2.0, "with equal process settings": 0.9}
    )


def test_what_it_was_before_is_no_peer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A gain over the code before must stand in the table, and must not pass for the ratio to the best peer."""
    (running, _) = contenders(parse(["--before", str(ROOT), "--peers", "transformers"]), "tp2", "fp32", EQUAL, None)
    assert [(c.name, c.checkout) for c in running] == [(OURS, ROOT), (PRODUCTS, ROOT), (BEFORE, ROOT)]
    entries = {EQUAL: summary(race(record(OURS, 1.0), record(BEFORE, 1.5), record("deepspeed", 2.0)), {})}
    report = report_of(tmp_path / "peers.json", "--before", str(ROOT)) | {"results": {"one, fp32": entries}}
    text = table(report)
    assert "| one, fp32 | – | 2.00, deepspeed |" in text and "| one, fp32 | megacore before | – | – | 667 (667–667) | 1.50× |" in text
    for wrong in (["--before", str(tmp_path)], ["--output", str(tmp_path / "none" / "x.json")]):
        with pytest.raises(ConfigError, match=wrong[0]):
            parse(wrong)


def test_each_ratio_stands_beside_its_bound(tmp_path: Path) -> None:
    """Bare products that passed for a contender would always win; a bound over other rounds than the ratio's would be another one."""
    found = race(record(OURS, 2.0, 20.0, 2.0), record("deepspeed", 3.0, 30.0, 3.0), record(PRODUCTS, 1.0, 10.0, 2.0))
    found.records[PRODUCTS].losses.clear()
    entries = {EQUAL: summary(found, {})}
    assert entries[EQUAL]["contenders"].keys() == {OURS, "deepspeed"}
    assert entries[EQUAL][PRODUCTS]["seconds"] == [[1.0], [10.0], [2.0]]
    report = report_of(tmp_path / "peers.json") | {"results": {"one, fp32": entries}}
    text = table(report)
    assert "| one, fp32 | – | 1.50 (at most 3.00), deepspeed |" in text and "| 1.50× (at most 3.00) |" in text
    assert "| products |" not in text and ratios_by_layout(report)["one, fp32"].keys() == {"deepspeed"}


@pytest.mark.parametrize(
    ("tensor", "layers", "share"), [(1, range(4), (1.0, 1)), (2, range(4), (0.5, 0.5)), (1, range(2), (0.5, 0)), (1, range(2, 4), (0.5, 1))]
)
def test_bare_products_are_those_that_the_formulas_count(tensor: int, layers: range, share: tuple[float, float]) -> None:
    """A product that is left out, or that every rank of a layout computes whole, makes another bound. `share`: of blocks, of the head."""
    config = small_gpt("model.num_heads=4", "model.vocab_size=62")
    stage = Stage(config, layers, Topology(config, sizes={"tp": tensor}), "meta")
    blocks = 2 * (block_flops(config, causal=False) - attention_flops(config, causal=False))
    right = share[0] * blocks + share[1] * head_flops(config)
    assert 2 * sum(rows * columns for rows, columns in weight_shapes([stage])) == right


def test_bare_products_are_a_layers_three() -> None:
    """Forward, and both gradients as autograd has them."""
    product = Product(6, (5, 4), torch.float64, torch.device("cpu"))
    product.compute()
    x, weight = product.x.clone().requires_grad_(), product.weight.clone().requires_grad_()
    y = F.linear(x, weight)
    y.backward(product.dy)
    for found, right in ((product.y, y), (product.dx, x.grad), (product.dw, weight.grad)):
        torch.testing.assert_close(found, right)


def test_who_computes_another_job_is_out() -> None:
    """A contender with a bug that leaves work out would be the fastest. torchtitan's model is another, which its line says."""
    found = summary(
        race(
            record("megacore", 1.0, 1.0),
            record("deepspeed", 0.5, 0.5, loss=9.015),
            record("plain-gpt-compiled", 0.5, 0.5, loss=8.93),
            record("transformers", 0.5, 0.5, loss=float("nan")),
            record("torchtitan", 0.5, 0.5, loss=9.5),
        ),
        {},
    )
    assert found["contenders"].keys() == {"megacore", "deepspeed", "torchtitan"}
    assert "its loss is 8.930 where megacore's is 9.000" in found["absent"]["plain-gpt-compiled"]
    assert "nan" in found["absent"]["transformers"]


class FakeProcesses:
    """Ranks that take as many seconds for a turn as their contender has tokens."""

    def __init__(self, contender: Contender, *_: Any) -> None:
        self.contender, self.process = contender, {"threads": 1}

    def wait_until_ready(self) -> None: ...

    def close(self) -> None: ...

    def turn(self, record: Record) -> None:
        record.turns.append([float(self.contender.tokens)])


def test_the_fastest_of_each_group_of_rivals_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """One group for a contender as it is, one for it with equal settings: a ratio of either would be missing, or of a slower way."""
    monkeypatch.setattr("benchmarks.rounds.Processes", FakeProcesses)
    contenders = [Contender(name, "", tokens) for name, tokens in {"ours": 9, "a": 3, "b": 2, "c": 1, "d": 4}.items()]
    found = start_race(contenders, "", 1, lambda line: None, [["a", "b"], ["d", "c", "absent"]])
    assert found.records.keys() == {"ours", "b", "c"} and not found.failures
    assert found.records["b"].process == {"threads": 1}


def test_an_interrupted_comparison_goes_on(tmp_path: Path) -> None:
    """What is measured would be lost, or mixed with that of another setting or of a finished run."""
    output = tmp_path / "peers.json"
    done = report_of(output) | {"results": {"one, fp32": {OWN: {}}}}
    output.write_text(json.dumps(done))
    assert report_of(output)["results"] == {"one, fp32": {OWN: {}}}
    assert report_of(output, "model.num_layers=2")["results"] == {}
    output.write_text(json.dumps(done | {"complete": True}))
    assert report_of(output)["results"] == {}
    output.write_text(json.dumps({key: value for key, value in done.items() if key != "settings"}))  # each contender ran once
    assert report_of(output)["results"] == {}


def test_peers_are_known_and_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer without an environment, or of another version each time; an environment that cannot be made is a reason, not a crash."""
    assert {peer.environment for peer in PEERS.values()} == REQUIREMENTS.keys()
    assert all("==" in requirement for requirements in REQUIREMENTS.values() for requirement in requirements)
    with pytest.raises(ConfigError, match="torchtan is unknown"):
        parse(["--peers", "torchtan"])

    def refuse(peer: str) -> str:
        raise RuntimeError(f"no {peer} here")

    monkeypatch.setattr("benchmarks.peers.contenders.python_of", refuse)
    running, absent = contenders(parse([]), "tp2", "fp32", OWN, None)
    assert [contender.name for contender in running] == [OURS, PRODUCTS]
    assert absent["torchtitan"] == "no environment: no torchtitan here" and absent["deepspeed"] == NO_SUCH_LAYOUT
    assert absent["plain-gpt-compiled"] == NO_SUCH_LAYOUT


def test_each_contender_gets_the_settings_of_its_race(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer whose process is megacore's in both races, or in none, would make one ratio stand twice."""
    monkeypatch.setattr("benchmarks.peers.contenders.python_of", lambda environment: environment)
    states = {OWN: {"threads": 1}, EQUAL: {"threads": 2}}
    for settings in states:
        (ours, products, *peers), _ = contenders(parse([]), "dp2", "fp32", settings, states)
        assert ours.process == products.process == states[EQUAL], "megacore has its own settings in every race"
        assert {peer.name for peer in peers} == {name for name, peer in PEERS.items() if "dp2" in peer.layouts}
        assert all((peer.settings, peer.process) == (settings, states[settings]) for peer in peers)
        assert len({(c.tokens, c.overrides, c.ranks, c.threads) for c in (ours, products, *peers)}) == 1


def test_all_train_at_one_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """The peers' loops have no warm-up: a config with one would let megacore alone take smaller steps, and their losses part."""
    monkeypatch.setattr("benchmarks.peers.contenders.python_of", lambda environment: environment)
    warming = str(ROOT / "configs" / "gpt_124m.json")
    assert load(warming, []).config.optim.warmup_steps
    running, _ = contenders(parse(["--config", warming]), "one", "fp32", OWN, None)
    assert len(running) > 3
    for contender in running:
        optim = load(warming, list(contender.overrides)).config.optim
        assert (optim.schedule, optim.warmup_steps) == ("constant", 0)
    with pytest.raises(ConfigError, match="optim.warmup_steps: 5 is not what the peers have"):
        contenders(parse(["optim.warmup_steps=5"]), "one", "fp32", OWN, None)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_training_is_compiled_as_its_run_would_be(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, compiled: bool) -> None:
    """`train.compile=auto` would be timed without compiled blocks where a run has them, and the table would not say so."""
    monkeypatch.setattr(compiling, "measure", lambda config, mesh: (compiled, "measured"))
    config = small_gpt("train.compile=auto", f"train.steps={compiling.LEAST_STEPS}")
    training = Training(config, Mesh(config, RankInfo(), torch.device("cpu")))
    assert training.config.train.compile is compiled and training.compile_choice == "measured"
    blocks = training.train_step.stages[0].blocks.values()
    assert all((block._compiled_call_impl is not None) == compiled for block in blocks)
    one = race(record(OURS, 2.0), record("deepspeed", 3.0))
    one.records[OURS].process["train.compile"] = compiled
    text = table(report_of(tmp_path / "peers.json") | {"results": {"one, fp32": {OWN: summary(one, {})}}})
    assert f"| its blocks are {'compiled' if compiled else 'not compiled'} |" in text


def small_gpt(*overrides: str) -> Config:
    """A config of GPT-2's blocks; every size off the others, several microbatches."""
    sections = {
        "model": {"num_layers": 2, "hidden_size": 24, "num_heads": 3, "vocab_size": 61, "ffn_size": 40},
        "train": {"seq_len": 16, "micro_batch_size": 2, "global_batch_size": 6, "precision": "fp32", "device": "cpu"},
        "optim": {"lr": 1e-2, "schedule": "constant", "weight_decay": 0.5},
    }
    return resolve(sections, list(overrides), "small", 1).config


FP32 = 1e-5  # relative: sums of some hundred terms in another order


def farthest_from_megacore(model: nn.Module, config: Config, mapping: list[Mapped]) -> float:
    """The largest relative difference of the loss and of each gradient from those of megacore's model, with `model`'s own weights."""
    (microbatch, *_) = random_batch(config, torch.device("cpu"))
    ours = whole_model(config)
    theirs = dict(model.named_parameters())
    with torch.no_grad():
        for tensor in mapping:
            dict(ours.named_parameters())[tensor.name].copy_(tensor.join(theirs))  # type: ignore[arg-type]
    loss = ours.loss(ours.hidden(microbatch.tokens, microbatch.key), microbatch.targets) / microbatch.targets.numel()
    loss.backward()
    other = model(microbatch.tokens, microbatch.targets)
    other.backward()
    found = float((other - loss).detach().abs() / loss.detach())
    gradients = {name: parameter.grad for name, parameter in theirs.items()}
    for tensor in mapping:
        ours_gradient = dict(ours.named_parameters())[tensor.name].grad
        assert ours_gradient is not None
        difference = (tensor.join(gradients) - ours_gradient).abs().max() / ours_gradient.abs().max()  # type: ignore[arg-type]
        found = max(found, float(difference))
    return found


def perturbed_gpt(config: Config) -> GPT:
    """With biases and norms off zero and one, so that none can be left out unseen."""
    model, generator = GPT(config), torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model


def test_the_plain_gpt_is_megacores_model() -> None:
    """With equal weights the loss and every gradient are equal; a contender with another model would prove nothing."""
    config = small_gpt()
    assert farthest_from_megacore(perturbed_gpt(config), config, nanogpt_tensors(config)) < FP32


def exact_gelu(block: plain_gpt.FeedForward, x: Tensor) -> Tensor:
    return block.c_proj(F.gelu(block.c_fc(x)))


def no_mask(block: plain_gpt.Attention, x: Tensor) -> Tensor:
    q, k, v = (part.unflatten(2, (block.heads, -1)).transpose(1, 2) for part in block.c_attn(x).chunk(3, 2))
    return block.c_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def no_second_residual(block: plain_gpt.Block, x: Tensor) -> Tensor:
    return block.mlp(block.ln_2(x + block.attn(block.ln_1(x))))


@pytest.mark.parametrize(
    ("part", "fault"),
    [(plain_gpt.FeedForward, exact_gelu), (plain_gpt.Attention, no_mask), (plain_gpt.Block, no_second_residual)],
    ids=lambda value: value.__name__,
)
def test_another_model_shows(monkeypatch: pytest.MonkeyPatch, part: type, fault: Any) -> None:
    monkeypatch.setattr(part, "forward", fault)
    config = small_gpt()
    assert farthest_from_megacore(perturbed_gpt(config), config, nanogpt_tensors(config)) > 10 * FP32


def losses(loop: Any, steps: int = 4) -> list[float]:
    found = []
    for _ in range(steps):
        loop.step()
        found.append(loop.loss())
    return found


def test_the_plain_gpt_trains_as_megacore_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same steps from the same initial weights: accumulation, clipping, AdamW and what decays. One that does less would be faster."""
    monkeypatch.setattr(torch, "compile", lambda model: model)  # which would take a minute, and is not what is looked at
    config = small_gpt()
    ours = losses(Training(config, Mesh(config, RankInfo(), torch.device("cpu"))))
    assert ours[-1] < ours[0] - 0.1
    assert losses(PlainGPTLoop(config)) == pytest.approx(ours, rel=1e-5)
    for difference in ("optim.weight_decay=0", "optim.grad_clip=0.01", "train.seed=5"):
        assert losses(PlainGPTLoop(small_gpt(difference))) != pytest.approx(ours, rel=1e-4), difference


def test_the_model_of_transformers_starts_with_megacores_weights() -> None:
    """Losses of contenders could only be compared roughly."""
    pytest.importorskip("transformers", reason="transformers is not installed: pip install -e '.[test]'")
    config = small_gpt()
    peer, mapping = gpt2(config), gpt2_tensors(config)

    class WithLoss(nn.Module):
        def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
            return F.cross_entropy(peer(tokens).logits.flatten(0, 1), targets.flatten())

        def named_parameters(self, *_: Any, **__: Any) -> Any:
            return peer.named_parameters()

    theirs = dict(peer.named_parameters())
    ours = dict(whole_model(config).named_parameters())
    assert all(torch.equal(tensor.join(theirs), ours[tensor.name]) for tensor in mapping)  # type: ignore[arg-type]
    assert farthest_from_megacore(WithLoss(), config, mapping) < FP32


def test_a_measured_step_stands_beside_its_simulation(tmp_path: Path) -> None:
    """A drawing that mixes up actions, clocks or ranks would send people after differences that are not there."""
    config = load(write_config(tmp_path, "unused"), ["parallel.schedule=zb_h1"]).config
    training = Training(config, Mesh(config, RankInfo(), torch.device("cpu")))
    timeline = beside_each_other(training)
    simulated, measured = timeline.spans
    done = [action for action in training.train_step.plan.actions[0] if action.op in COMPUTE]
    assert [span.action for span in measured] == [span.action for span in simulated] == done
    assert measured[0].start == 0.0 and all(a.end <= b.start for a, b in pairwise(measured))
    for op in {action.op for action in done}:
        totals = [sum(span.end - span.start for span in row if span.action.op is op) for row in timeline.spans]
        assert totals[0] == pytest.approx(totals[1], rel=1e-6) and totals[0] > 0
    draw(timeline, "both", tmp_path / "both.png", rows=["0 simulated", "0 measured"])
    assert (tmp_path / "both.png").stat().st_size > 1000
    training.engine.close()
