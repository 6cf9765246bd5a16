"""What benchmarks compute from what they measure, without measuring."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.breakdown import Stopwatch
from benchmarks.collectives import fit
from benchmarks.peers.__main__ import PEERS, begin, contenders, parse, summary, table
from benchmarks.peers.environments import REQUIREMENTS
from benchmarks.rounds import Contender, Race, Record
from megacore.config.load import resolve
from megacore.errors import ConfigError
from megacore.plan.flops import flops_per_token
from megacore.plan.traffic import Line, rank_traffic, seconds_by_group
from megacore.train.meters import Utilisation


def test_line_is_the_one_that_made_the_times() -> None:
    """Latency and bandwidth over five decades of sizes; and times that fall with size must not fit a negative term."""
    points = [(4.0**power, 2e-5 + 4.0**power / 5e9) for power in range(5, 15)]
    line = fit(points)
    assert line.alpha == pytest.approx(2e-5, rel=1e-6) and 1 / line.beta == pytest.approx(5e9, rel=1e-6)
    assert fit([(1e3, 2.0), (1e6, 1.0)]).beta == 0.0
    assert fit([(1e6, 0.5), (2e6, 2.0)]).alpha == 0.0


def test_planner_times_a_step_by_fitted_lines() -> None:
    """2 sums forward and 2 backward a layer, and the embedding's and the head's, each α and its bytes; without a line no time."""
    sections = {
        "model": {"num_layers": 3, "hidden_size": 64, "num_heads": 4, "vocab_size": 128},
        "train": {"seq_len": 32, "micro_batch_size": 1, "global_batch_size": 2, "precision": "fp32"},
        "parallel": {"tensor": 2},
    }
    (transfers,) = rank_traffic(resolve(sections, [], "small", 2).config)
    calls = 2 * (3 * 4 + 2)
    assert seconds_by_group(transfers, {("tp", "all_reduce"): Line(1.0, 0.0)}) == {"tp": calls}
    assert seconds_by_group(transfers, {("tp", "all_reduce"): Line(0.0, 1.0)}) == {"tp": calls * 32 * 64 * 4}
    assert seconds_by_group(transfers, {("dp", "all_reduce"): Line(1.0, 1.0)}) == {}


def test_every_moment_is_charged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wait within a pass would count as both, or the passes' time outside any part as none."""
    clock = iter(range(0, 1000, 10))
    monkeypatch.setattr("benchmarks.breakdown.perf_counter", lambda: float(next(clock)))
    watch = Stopwatch(torch.device("cpu"))
    watch.mark()  # 0
    with watch.part("forward"), watch.part("tp"):  # 10; 20, and left at 30, 40
        pass
    watch.mark()  # 50
    assert dict(watch.totals()) == {"other": 20.0, "forward": 20.0, "tp": 10.0}
    assert watch.durations("forward") == [30.0]
    assert watch.between(0, 5) == 50.0 == sum(watch.totals().values())


def test_utilisation_needs_a_peak() -> None:
    """A utilisation of an unknown device would be invented; of a measured peak it is the formula's share."""
    config = resolve({"model": {"num_layers": 1, "hidden_size": 64, "num_heads": 4}, "train": {"recompute": "full"}}, [], "small", 1).config
    unknown = Utilisation(config, torch.device("cpu"), 1)
    assert unknown.full(100.0) is unknown.causal(100.0) is unknown.hardware(100.0) is None
    measured = Utilisation(config, torch.device("cpu"), 1, peak=1e12)
    full, causal, hardware = measured.full(100.0), measured.causal(100.0), measured.hardware(100.0)
    assert full is not None and causal is not None and hardware is not None
    assert causal < full < hardware


def test_utilisation_is_of_all_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens a second are the whole run's, so the peak is that of all its devices: of one, eight GPUs would be at 300 %."""
    monkeypatch.setattr("platform.processor", lambda: "NVIDIA H100 80GB HBM3")
    config = resolve({"model": {"num_layers": 1, "hidden_size": 64, "num_heads": 4}, "train": {"precision": "bf16"}}, [], "small", 1).config
    found = Utilisation(config, torch.device("cpu"), 8).full(1e6)
    assert found == pytest.approx(flops_per_token(config, causal=False) * 1e6 / (8 * 989.5e12))


def record(name: str, *seconds: float) -> Record:
    return Record(Contender(name, name, tokens=1000), [[s] for s in seconds], 10**9, [0.5] * len(seconds), [9.0] * len(seconds))


def report_of(output: Path, *arguments: str) -> dict[str, Any]:
    return begin(parse(["--output", str(output), *arguments]), output, lambda line: None)


def test_table_has_every_ratio_and_every_reason(tmp_path: Path) -> None:
    """Ratios are taken within a round: a slow round that met both must not tell; who is missing is listed with its reason."""
    race = Race(
        {"megacore": record("megacore", 1.0, 10.0, 1.0), "deepspeed": record("deepspeed", 2.0, 20.0, 2.2)}, {"torchtitan": "no | luck"}
    )
    entry = summary(race, {"megatron-core": "no environment: no network"})
    assert entry["contenders"]["deepspeed"]["megacore_is_times_as_fast"]["median"] == pytest.approx(2.0)
    report = report_of(tmp_path / "peers.json") | {"results": {"one, fp32": entry}}
    text = table(report)
    for part in ("| one, fp32 | **megacore** | 1,000 |", "2.00×", "no / luck", "no environment: no network"):
        assert part in text


def test_an_interrupted_comparison_goes_on(tmp_path: Path) -> None:
    """What is measured would be lost, or mixed with that of another setting or of a finished run."""
    output = tmp_path / "peers.json"
    done = report_of(output) | {"results": {"one, fp32": {}}}
    output.write_text(json.dumps(done))
    assert report_of(output)["results"] == {"one, fp32": {}}
    assert report_of(output, "model.num_layers=2")["results"] == {}
    output.write_text(json.dumps(done | {"complete": True}))
    assert report_of(output)["results"] == {}


def test_peers_are_known_and_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer without an environment, or of another version each time; an environment that cannot be made is a reason, not a crash."""
    assert {environment for environment, _ in PEERS.values()} == REQUIREMENTS.keys()
    assert all("==" in requirement for requirements in REQUIREMENTS.values() for requirement in requirements)
    with pytest.raises(ConfigError, match="torchtan is unknown"):
        parse(["--peers", "torchtan"])

    def refuse(peer: str) -> str:
        raise RuntimeError(f"no {peer} here")

    monkeypatch.setattr("benchmarks.peers.__main__.python_of", refuse)
    running, absent = contenders(parse([]), "tp2", "fp32")
    assert [contender.name for contender in running] == ["megacore"]
    assert absent["torchtitan"] == "no environment: no torchtitan here" and absent["deepspeed"] == "not compared in this layout"
