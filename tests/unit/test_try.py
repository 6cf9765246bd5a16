"""launch/try.py: two models over seeds, with equal work, and whether their difference is more than noise."""

import importlib
import json
import math
from pathlib import Path

import pytest

from megacore.errors import UserError
from megacore.tools.sweep import local, price
from megacore.tools.versus.contenders import check_alike, matched, opponent, read_contender
from megacore.tools.versus.verdict import Curve, compare, interval, t_quantile
from tests.conftest import Refused
from tests.forks import written

script = importlib.import_module("launch.try")
MODEL = {"source": "my_model.py", "num_layers": 2, "hidden_size": 32, "num_heads": 2, "vocab_size": 256}
TRAIN = {"steps": 4, "seq_len": 16, "global_batch_size": 4, "precision": "fp32", "device": "cpu"}
CONFIG = {"model": MODEL, "train": TRAIN, "optim": {"lr": 0.01}, "log": {"every": 1}}
# In place of launch/pretrain.py: losses fall from 1 above their last value, which says what trained. The fork
# is best with twice the config's rate and the GPT with half of it; a seed shifts both alike. The fork has
# another loss too, which says nothing of the text.
STAND_IN = """
import json, math, sys
from pathlib import Path
config = json.loads(Path(sys.argv[2]).read_text())
fork, rate, seed = "source" in config["model"], config["optim"]["lr"] / 0.01, config["train"]["seed"]
last = 2 + seed + (0.01 * seed - 0.1 if fork else 0) + abs(math.log2(rate) - (1 if fork else -1))
with (Path(config["log"]["dir"]) / "metrics.jsonl").open("a") as out:
    for step in range(1, config["train"]["steps"] + 1):
        line = {"step": step, "loss": last + 1 - step / config["train"]["steps"], "grad_norm": 1.0, "tokens": 64 * step}
        line |= {"cross_entropy": line["loss"], "loss": line["loss"] + 9} if fork else {}
        line |= {"tokens_per_second": 1.0, "step_seconds": 0.5, "mfu": None, "memory_bytes": 1, "skipped": 0}
        out.write(json.dumps(line).replace("Infinity", "null") + "\\n")
"""  # noqa: E501


@pytest.fixture
def fork(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The documented model with a config beside it, runs that take no time, and a
    machine that is not measured.
    """
    (tmp_path / "stand_in.py").write_text(STAND_IN)
    monkeypatch.setattr(local, "SCRIPT", tmp_path / "stand_in.py")
    monkeypatch.setattr(local, "LOOK_SECONDS", 0.02)
    monkeypatch.setattr(script, "check_data", lambda trials: None)
    monkeypatch.setattr(price, "machine_of", lambda *given: None)
    (tmp_path / "my_model.json").write_text(json.dumps(CONFIG))
    return str(written(tmp_path))


def test_quantiles_of_small_samples() -> None:
    """A normal distribution's 1.96 in place of Student's number would call the noise of three seeds a result.

    Numbers as published.
    """
    known = {1: 12.706, 2: 4.303, 4: 2.776, 9: 2.262, 30: 2.042, 1000: 1.962}
    assert {n: round(t_quantile(0.95, n), 3) for n in known} == known
    assert interval([1.0, 2.0, 3.0]) == pytest.approx((2.0, 4.303 / math.sqrt(3)), rel=1e-3)


def curves(finals: list[float]) -> list[Curve]:
    """Runs of four steps whose losses fall by 0.25 a step."""
    return [
        Curve([64, 128, 192, 256], [final + 1 - n / 4 for n in (1, 2, 3, 4)], final, 1.0) for final in finals
    ]


def test_pairs_have_less_noise_than_runs() -> None:
    """Seeds whose losses differ by more than the idea gains: only pairs tell that each gains.

    And a gain that changes its sign is noise.
    """
    other = [2.0, 3.0, 2.5]
    sure = compare("idea", "gpt", list(zip(curves([1.9, 2.91, 2.4]), curves(other), strict=True)), 1)
    assert sure.mean == pytest.approx(-0.0967, abs=1e-4) and sure.sure and interval([1.9, 2.91, 2.4])[1] > 1
    assert "So idea is better, by more than noise." in sure.lines()
    noise = compare("idea", "gpt", list(zip(curves([1.9, 3.2, 2.4]), curves(other), strict=True)), 1)
    assert not noise.sure and noise.lines()[1] == "That is no more than noise."
    diverged = compare("idea", "gpt", list(zip(curves([1.9, math.inf, 2.4]), curves(other), strict=True)), 1)
    assert not diverged.sure and "diverged" in diverged.lines()[0]
    assert (
        "One seed says nothing about noise"
        in compare("idea", "gpt", list(zip(curves([1.0]), curves([2.0]), strict=True)), 1).lines()[0]
    )


def test_tokens_until_the_idea_is_there() -> None:
    """Its smoothed loss against the other's last one, as a part of the other's tokens;
    none if it never is.
    """
    found = compare(
        "idea", "gpt", list(zip(curves([1.4, 1.5, 2.1]), curves([2.0, 2.0, 2.0]), strict=True)), 1
    )
    assert found.reached == [0.5, 0.5, None]


def test_both_do_the_same_work(fork: str) -> None:
    """A fork that does more work a token would win by work alone: the GPT's feed-forward layers
    grow, or it reads more tokens.
    """
    idea = read_contender(fork, ["model.ffn_size=256"])
    small = opponent(idea, "gpt", []).changed("model", ffn_size=64)
    assert small.config.model.source is None
    wide = matched(idea, small, "ffn")
    assert wide.flops == pytest.approx(idea.flops, rel=0.02) and (small.flops or 0.0) < 0.9 * (
        idea.flops or 0.0
    )
    assert wide.tokens == idea.tokens and wide.config.model.ffn_size > 64
    large = matched(idea.changed("train", steps=1000), small.changed("train", steps=1000), "steps")
    assert (large.flops or 0.0) * large.tokens == pytest.approx(
        (idea.flops or 0.0) * 1000 * idea.tokens / 4, rel=0.001
    )
    late = small.changed("train", steps=1000).changed("optim", decay_steps=600, schedule="wsd")
    late = matched(idea.changed("train", steps=1000), late, "steps")
    assert late.config.optim.decay_steps == pytest.approx(0.6 * late.config.train.steps, abs=1), (
        "the same part of the run"
    )
    grown = {
        "model": {"window": 8, "window_schedule": [[100, 2], [400, 4]]},
        "train": {"steps": 1000, "batch_ramp": [[100, 2]]},
    }
    for section, values in grown.items():
        idea, small = idea.changed(section, **values), small.changed(section, **values)
    late = matched(idea, small, "steps").config
    parts = [last / late.train.steps for last, _ in (*late.model.window_schedule, *late.train.batch_ramp)]
    assert parts == pytest.approx([0.1, 0.4, 0.1], abs=0.001), (
        "windows and batches grow over the same parts of the run"
    )
    for section, key, value in (("data", "packing", "best_fit"), ("train", "batch_ramp", [[2, 2]])):
        with pytest.raises(UserError, match=f"my_model has {section}.{key} "):  # other samples in each step
            check_alike(idea, small.changed(section, **{key: value}), "none")
    with pytest.raises(
        UserError, match="no feed-forward size gives gpt the .* operations a token of my_model"
    ):
        matched(idea, small.changed("model", num_layers=40), "ffn")


def test_experts_beside_a_dense_model(tmp_path: Path) -> None:
    """A mixture has more parameters than it uses for a token: the dense model gets as
    much work, not as many parameters.
    """
    sizes = {key: value for key, value in MODEL.items() if key != "source"} | {
        "num_experts": 8,
        "expert_ffn_size": 64,
        "bias": False,
    }
    (tmp_path / "mixture.json").write_text(
        json.dumps(CONFIG | {"model": sizes, "parallel": {"expert": 1, "expert_halves": True}})
    )
    idea = read_contender(str(tmp_path / "mixture.json"), [])
    dense = matched(idea, opponent(idea, "gpt", []), "ffn")
    assert dense.config.model.num_experts is None and dense.parameters < idea.parameters
    assert dense.flops == pytest.approx(idea.flops, rel=0.02)


def test_each_has_its_own_best_rate(fork: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """All rates on one seed, the best one on all: another's rate would decide what is better.

    Finished runs are kept.
    """
    arguments = [fork, "--output", str(tmp_path / "out"), "--rates", "0.5,1,2"]
    assert script.run([*arguments, "--seeds", "2", "--dry-run"]) == 0 and not (tmp_path / "out").exists()
    said = capfd.readouterr().out
    assert "model.source" in said and "operations a token" in said
    assert script.run([*arguments, "--seeds", "2"]) == 0
    said = capfd.readouterr().out
    assert (
        "6/6" in said
        and "2/2 gpt,rate=0.5,seed=1" in said
        and "The best rate of my_model, ×2, is the largest that was tried" in said
    )
    assert script.run([*arguments, "--seeds", "4"]) == 0
    said = capfd.readouterr().out
    assert "4/4 gpt,rate=0.5,seed=3" in said and "So my_model is better, by more than noise." in said
    found = json.loads((tmp_path / "out/try.json").read_text())
    assert (
        found["pairs"] == pytest.approx([-0.1, -0.09, -0.08, -0.07])
        and found["sure"]
        and found["metric"] == "loss"
    )
    assert (tmp_path / "out/try.png").stat().st_size > 10_000
    assert script.run([*arguments, "--seeds", "4", "--report"]) == 0
    assert "1/" not in capfd.readouterr().out.replace(str(tmp_path), ""), "nothing is run again"
    assert len(list((tmp_path / "out/trials").glob("*/metrics.jsonl"))) == 12


def test_a_run_that_diverges(fork: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Its loss is no number: the report says so, and draws what there is."""
    (tmp_path / "stand_in.py").write_text(
        STAND_IN.replace("last = 2", "last = math.inf if fork and seed == 1 else 2")
    )
    assert script.run([fork, "--output", str(tmp_path / "out"), "--rates", "1", "--seeds", "3"]) == 0
    said = capfd.readouterr().out
    assert (
        "diverged, so their losses cannot be compared" in said
        and "One learning rate was tried for both" in said
    )
    assert json.loads((tmp_path / "out/try.json").read_text())["mean"] is None


@pytest.mark.parametrize(
    "arguments, line",
    [
        (
            ("@missing.py",),
            "config error: arguments: @missing.py has no config missing.json beside it (a config: its "
            "model.source names",
        ),
        (
            ("@my_model.py", "--rates", "0,1"),
            "config error: --rates: '0,1' is no list of factors (numbers above 0, such as 0.5,1,2)",
        ),
        (("@my_model.py", "--rates", "1,nan"), "config error: --rates: '1,nan' is no list of factors"),
        (
            ("@my_model.py", "--seeds", "1000"),
            "config error: --seeds: 1000 are more than anybody needs (at most 100)",
        ),
        (
            ("@my_model.py", "--report"),
            "config error: --report: runs/try_my_model holds no comparison yet (first the runs)",
        ),
        (
            ("@my_model.py", "--baseline", "@other.json"),
            "--baseline: my_model has train.seq_len 16, and other 32 (the same in both)",
        ),
        (
            ("@other.json",),
            "config error: --baseline: other is the plain model: it has no model.source, experts or "
            "latents (another config)",
        ),
        (
            ("@my_model.py", "model.ffn_sise=1"),
            "config error: my_model: model.ffn_sise: unknown key (did you mean model.ffn_size?)",
        ),
        (
            ("@my_model.py", "--report", "--dry-run"),
            "config error: --report: stands beside --dry-run (one of the two)",
        ),
        (
            ("@my_model.py", "data.train=@gone"),
            "data error: trial my_model,rate=0.5,seed=0: @gone.bin: missing",
        ),
        (("@my_model.py",), "config error: trial my_model,rate=0.5,seed=0: data.train: no corpus is given"),
        (
            ("@my_model.py", "--output", "@file", "data.train=@data"),
            "config error: --output: cannot write in @file: File exists",
        ),
    ],
)
def test_mistakes_are_one_line(refused: Refused, tree: Path, arguments: tuple[str, ...], line: str) -> None:
    """Each before anything is started or written."""
    if not (tree / "my_model.py").exists():
        written(tree)
        (tree / "my_model.json").write_text(json.dumps(CONFIG))
        plain = {key: value for key, value in MODEL.items() if key != "source"}
        (tree / "other.json").write_text(
            json.dumps(CONFIG | {"model": plain, "train": TRAIN | {"seq_len": 32}})
        )
    refused("try", arguments, line)
