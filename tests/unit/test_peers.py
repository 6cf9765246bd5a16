"""Races against other trainers: fair settings, a table with every reason, and who is left out."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from benchmarks.peers.__main__ import begin, parse
from benchmarks.peers.contenders import BEFORE, NO_SUCH_LAYOUT, OURS, PEERS, PRODUCTS, contenders
from benchmarks.peers.environments import REQUIREMENTS
from benchmarks.peers.process import EQUAL, OWN
from benchmarks.peers.products import Product, weight_shapes
from benchmarks.peers.report import ratios_by_layout, summary, table
from benchmarks.rounds import ROOT, Contender, Race, Record
from benchmarks.rounds import race as start_race
from benchmarks.training import Training
from megacore.distributed.topology import Topology
from megacore.errors import ConfigError
from megacore.model.stage import Stage
from megacore.tools.choices import compiling
from megacore.tools.choices.flops import attention_flops, block_flops, head_flops
from tests.build import mesh_of, run_of
from tests.unit.test_plain_gpt import small_gpt


def record(name: str, *seconds: float, loss: float = 9.0) -> Record:
    return Record(
        Contender(name, name, tokens=1000),
        [[s] for s in seconds],
        10**9,
        [0.5] * len(seconds),
        [loss] * len(seconds),
    )


def report_of(output: Path, *arguments: str) -> dict[str, Any]:
    return begin(parse(["--output", str(output), *arguments]), output, lambda line: None)


def race(*records: Record, **failures: str) -> Race:
    return Race({record.contender.name: record for record in records}, failures)


def test_table_has_both_ratios_and_every_reason(tmp_path: Path) -> None:
    """A ratio of two slow rounds must not tell, nor one without the other; who is missing has a
    dash and the reason in its line.
    """
    own = race(
        record("megacore", 1.0, 10.0, 1.0), record("deepspeed", 2.0, 20.0, 2.2), torchtitan="no | luck"
    )
    equal = race(
        record("megacore", 1.0, 1.0, 1.0),
        record("deepspeed", 0.9, 0.9, 1.1),
        record("transformers", 3.0, 3.0, 3.0),
    )
    absent = {"megatron-core": "no environment: no network", "transformers-compiled": NO_SUCH_LAYOUT}
    entries = {OWN: summary(own, absent), EQUAL: summary(equal, absent)}
    assert entries[OWN]["contenders"]["deepspeed"]["megacore_is_times_as_fast"]["median"] == pytest.approx(
        2.0
    )
    report = report_of(tmp_path / "peers.json") | {
        "settings": {OWN: "", EQUAL: ""},
        "results": {"dp2, fp32": entries},
    }
    lines = table(report).splitlines()
    assert "| dp2, fp32 | 2.00, deepspeed | 0.90, deepspeed |" in lines
    rows = {
        cells[1].strip("* "): [cell.strip() for cell in cells[2:]]
        for line in lines
        if (cells := line.split("|")[1:-1])[1:]
    }
    assert rows["deepspeed"][:4] == ["455 (50–500)", "2.00×", "1,111 (909–1,111)", "0.90×"]
    assert rows["deepspeed"][-1] == PEERS["deepspeed"].differs
    assert rows["megacore"][:4] == ["1,000 (100–1,000)", "", "1,000 (1,000–1,000)", ""]
    assert rows["torchtitan"][:4] == ["–"] * 4 and rows["torchtitan"][-1] == "own settings: no / luck"
    assert rows["transformers"][:4] == ["–", "–", "333 (333–333)", "3.00×"]
    assert (
        rows["transformers-compiled"][:4] == ["–"] * 4 and rows["transformers-compiled"][-1] == NO_SUCH_LAYOUT
    )
    assert rows["megatron-core"][-1].count("no environment: no network") == 2
    assert ratios_by_layout(report)["dp2, fp32"]["deepspeed"] == pytest.approx(
        {"as its users get it": 2.0, "with equal process settings": 0.9}
    )


def test_what_it_was_before_is_no_peer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A gain over the code before must stand in the table, and must not pass for the
    ratio to the best peer.
    """
    (running, _) = contenders(
        parse(["--before", str(ROOT), "--peers", "transformers"]), "tp2", "fp32", EQUAL, None
    )
    assert [(c.name, c.checkout) for c in running] == [(OURS, ROOT), (PRODUCTS, ROOT), (BEFORE, ROOT)]
    entries = {EQUAL: summary(race(record(OURS, 1.0), record(BEFORE, 1.5), record("deepspeed", 2.0)), {})}
    report = report_of(tmp_path / "peers.json", "--before", str(ROOT)) | {"results": {"one, fp32": entries}}
    text = table(report)
    assert (
        "| one, fp32 | – | 2.00, deepspeed |" in text
        and "| one, fp32 | megacore before | – | – | 667 (667–667) | 1.50× |" in text
    )
    for wrong in (["--before", str(tmp_path)], ["--output", str(tmp_path / "none" / "x.json")]):
        with pytest.raises(ConfigError, match=wrong[0]):
            parse(wrong)


def test_each_ratio_stands_beside_its_bound(tmp_path: Path) -> None:
    """Bare products that passed for a contender would always win; a bound over other rounds than
    the ratio's would be another one.
    """
    found = race(
        record(OURS, 2.0, 20.0, 2.0), record("deepspeed", 3.0, 30.0, 3.0), record(PRODUCTS, 1.0, 10.0, 2.0)
    )
    found.records[PRODUCTS].losses.clear()
    entries = {EQUAL: summary(found, {})}
    assert entries[EQUAL]["contenders"].keys() == {OURS, "deepspeed"}
    assert entries[EQUAL][PRODUCTS]["seconds"] == [[1.0], [10.0], [2.0]]
    report = report_of(tmp_path / "peers.json") | {"results": {"one, fp32": entries}}
    text = table(report)
    assert "| one, fp32 | – | 1.50 (at most 3.00), deepspeed |" in text and "| 1.50× (at most 3.00) |" in text
    assert "| products |" not in text and ratios_by_layout(report)["one, fp32"].keys() == {"deepspeed"}


@pytest.mark.parametrize(
    ("tensor", "layers", "share"),
    [(1, range(4), (1.0, 1)), (2, range(4), (0.5, 0.5)), (1, range(2), (0.5, 0)), (1, range(2, 4), (0.5, 1))],
)
def test_bare_products_are_those_that_the_formulas_count(
    tensor: int, layers: range, share: tuple[float, float]
) -> None:
    """A product that is left out, or that every rank of a layout computes whole, makes another bound.

    `share`: of blocks, of the head.
    """
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
    """A contender with a bug that leaves work out would be the fastest. torchtitan's
    model is another, which its line says.
    """
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
    """One group for a contender as it is, one for it with equal settings: a ratio of either would
    be missing, or of a slower way.
    """
    monkeypatch.setattr("benchmarks.rounds.Processes", FakeProcesses)
    contenders = [
        Contender(name, "", tokens) for name, tokens in {"ours": 9, "a": 3, "b": 2, "c": 1, "d": 4}.items()
    ]
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
    # each contender ran once
    output.write_text(json.dumps({key: value for key, value in done.items() if key != "settings"}))
    assert report_of(output)["results"] == {}


def test_peers_are_known_and_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer without an environment, or of another version each time; an environment that cannot be
    made is a reason, not a crash.
    """
    assert {peer.environment for peer in PEERS.values()} == REQUIREMENTS.keys()
    assert all("==" in requirement for requirements in REQUIREMENTS.values() for requirement in requirements)
    with pytest.raises(ConfigError, match="torchtan is unknown"):
        parse(["--peers", "torchtan"])

    def refuse(peer: str) -> str:
        raise RuntimeError(f"no {peer} here")

    monkeypatch.setattr("benchmarks.peers.contenders.python_of", refuse)
    running, absent = contenders(parse([]), "tp2", "fp32", OWN, None)
    assert [contender.name for contender in running] == [OURS, PRODUCTS]
    assert (
        absent["torchtitan"] == "no environment: no torchtitan here" and absent["deepspeed"] == NO_SUCH_LAYOUT
    )
    assert absent["plain-gpt-compiled"] == NO_SUCH_LAYOUT


def test_each_contender_gets_the_settings_of_its_race(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer whose process is megacore's in both races, or in none, would make one ratio stand twice."""
    monkeypatch.setattr("benchmarks.peers.contenders.python_of", lambda environment: environment)
    states = {OWN: {"threads": 1}, EQUAL: {"threads": 2}}
    for settings in states:
        (ours, products, *peers), _ = contenders(parse([]), "dp2", "fp32", settings, states)
        assert ours.process == products.process == states[EQUAL], (
            "megacore has its own settings in every race"
        )
        assert {peer.name for peer in peers} == {
            name for name, peer in PEERS.items() if "dp2" in peer.layouts
        }
        assert all((peer.settings, peer.process) == (settings, states[settings]) for peer in peers)
        assert len({(c.tokens, c.overrides, c.ranks, c.threads) for c in (ours, products, *peers)}) == 1


def test_a_mixture_meets_those_who_have_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who has no experts would train another model; and who balances or drops computes another loss."""
    monkeypatch.setattr("benchmarks.peers.contenders.python_of", lambda environment: environment)
    config = ["--config", str(ROOT / "benchmarks" / "mixture.json")]
    running, absent = contenders(parse(config), "dp2ep2", "fp32", OWN, None)
    assert [c.name for c in running] == [OURS, "megatron-core"] and absent["transformers"] == NO_SUCH_LAYOUT
    _, absent = contenders(parse(config), "one", "fp32", OWN, None)
    assert absent["transformers"] == "has no mixture of experts here"
    with pytest.raises(ConfigError, match="model.router_balance: sequence is not what the peers have"):
        contenders(parse([*config, "model.router_balance=sequence"]), "one", "fp32", OWN, None)


def test_all_train_at_one_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """The peers' loops have no warm-up: a config with one would let megacore alone take
    smaller steps, and their losses part.
    """
    monkeypatch.setattr("benchmarks.peers.contenders.python_of", lambda environment: environment)
    warming = str(ROOT / "configs" / "gpt_124m.json")
    assert run_of(warming).optim.warmup_steps
    running, _ = contenders(parse(["--config", warming]), "one", "fp32", OWN, None)
    assert len(running) > 3
    for contender in running:
        optim = run_of(warming, *contender.overrides).optim
        assert (optim.schedule, optim.warmup_steps) == ("constant", 0)
    with pytest.raises(ConfigError, match="optim.warmup_steps: 5 is not what the peers have"):
        contenders(parse(["optim.warmup_steps=5"]), "one", "fp32", OWN, None)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_training_is_compiled_as_its_run_would_be(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, compiled: bool
) -> None:
    """`train.compile=auto` would be timed without compiled blocks where a run has them,
    and the table would not say so.
    """
    monkeypatch.setattr(compiling, "measure", lambda config, mesh: (compiled, "measured"))
    config = small_gpt("train.compile=auto", f"train.steps={compiling.LEAST_STEPS}")
    training = Training(config, mesh_of(config))
    assert training.config.train.compile is compiled and training.compile_choice == "measured"
    blocks = training.train_step.stages[0].blocks.values()
    assert all((block._compiled_call_impl is not None) == compiled for block in blocks)
    one = race(record(OURS, 2.0), record("deepspeed", 3.0))
    one.records[OURS].process["train.compile"] = compiled
    text = table(report_of(tmp_path / "peers.json") | {"results": {"one, fp32": {OWN: summary(one, {})}}})
    assert f"| its blocks are {'compiled' if compiled else 'not compiled'} |" in text
