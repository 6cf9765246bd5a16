"""launch/scaling.py: laws that are known are found again, mistakes of published fits are caught, and
budgets are spent as the law says.
"""

import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from launch import scaling
from megacore.errors import UserError
from megacore.tools.planner.devices import read_cluster, read_device
from megacore.tools.planner.parameters import parameters
from megacore.tools.scaling import budget, finished, isoflop, parametric
from megacore.tools.scaling.finished import Run, read_runs
from megacore.tools.scaling.minimise import Array, Numbers, minimise
from megacore.tools.scaling.parametric import Law
from tests.build import run_of

HOFFMANN = Law(1.69, math.log(406.4), math.log(410.7), 0.34, 0.28)
OTHER = Law(2.2, math.log(900.0), math.log(3000.0), 0.45, 0.37)
SIZES = [(32, 2), (48, 2), (64, 3), (96, 3), (128, 4)]
VOCABULARY, SEQUENCE, BATCH = 1024, 64, 16


def synthetic(law: Law, noise: float = 0.0) -> list[Run]:
    """Runs of six sizes with five numbers of tokens, whose losses are the law's, but for noise."""
    source = np.random.default_rng(0)
    config: Any = None
    grid = [(n, d) for n in np.geomspace(4e7, 1e10, 6) for d in np.geomspace(1e9, 3e11, 5)]
    return [
        Run(f"{n}/{d}", config, n, d, 6 * n * d, law.loss(n, d) * math.exp(noise * source.normal()))
        for n, d in grid
    ]


def off(found: Law, law: Law) -> float:
    """The larger relative error of the exponents."""
    return max(abs(found.alpha / law.alpha - 1), abs(found.beta / law.beta - 1))


@pytest.mark.parametrize("law", [HOFFMANN, OTHER], ids=["hoffmann", "other"])
def test_a_known_law_is_recovered(law: Law) -> None:
    """From exact losses every constant; with noise the exponents lie in the intervals."""
    found = parametric.fit(synthetic(law), samples=1).law
    assert off(found, law) < 0.01 and found.E == pytest.approx(law.E, rel=1e-3)
    assert (found.log_A, found.log_B) == pytest.approx((law.log_A, law.log_B), rel=1e-3)
    noisy = parametric.fit(synthetic(law, noise=2e-3), samples=100)
    for name in ("alpha", "beta", "exponent"):
        low, high = noisy.interval(name, 0.95)
        assert low < getattr(law, name) < high and high - low < 0.2


def stops_early(
    objective: Any, starts: Array, tolerance: float, most: int, *, scale: float, gradient: float
) -> tuple[Array, Array]:
    """A minimiser that is given `scale` times the loss, and a usual tolerance."""

    def scaled(points: Array, numbers: Numbers) -> tuple[Array, Array]:
        values, gradients = objective(points, numbers)
        return scale * values, scale * gradients

    return minimise(scaled, starts, gradient, most)


def test_a_mean_or_a_loose_tolerance_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """What Besiroglu et al. found in the first estimates: the same tolerance does for a
    sum what it does not for a mean.
    """
    runs, tolerance = synthetic(HOFFMANN), 3e-4
    errors = {}
    for name, scale, gradient in (
        ("sum", 1.0, tolerance),
        ("mean", 1 / len(runs), tolerance),
        ("loose", 1.0, 30 * tolerance),
    ):
        monkeypatch.setattr(parametric, "minimise", partial(stops_early, scale=scale, gradient=gradient))
        errors[name] = off(parametric.fit(runs, samples=0).law, HOFFMANN)
    assert errors["sum"] < 0.01 < min(errors["mean"], errors["loose"]), errors


def write_run(
    folder: Path, hidden: int, layers: int, steps: int, loss: float | None, **sections: dict[str, Any]
) -> None:
    """A finished run's records."""
    model = {
        "hidden_size": hidden,
        "num_layers": layers,
        "num_heads": hidden // 16,
        "vocab_size": VOCABULARY,
        "norm": "rmsnorm",
    }
    model |= {"activation": "swiglu", "position": "rope", "bias": False, "tie_embeddings": False}
    train = {
        "steps": steps,
        "seq_len": SEQUENCE,
        "global_batch_size": BATCH,
        "micro_batch_size": BATCH,
        "precision": "bf16",
    }
    config = {
        "model": model,
        "train": train,
        "data": {"train": "data/text", "valid": "data/text_valid"},
        "optim": {"warmup_steps": 10},
    }
    for name, section in sections.items():
        config[name] = config.get(name, {}) | section
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    line = {
        "step": steps,
        "loss": 9.0,
        "grad_norm": 1.0,
        "tokens": steps * BATCH * SEQUENCE,
        "tokens_per_second": 1.0,
        "step_seconds": 1.0,
    }
    line |= {"mfu": None, "memory_bytes": 1, "skipped": 0}
    (folder / "metrics.jsonl").write_text(
        json.dumps(line) + "\n" + json.dumps({"step": steps, "valid_loss": loss}) + "\n"
    )


def own_count(hidden: int, layers: int) -> int:
    """N by hand: attention 4 h², a gated layer 3 h f, two norms a block; a norm and the head behind them."""
    ffn = 64 * math.ceil(math.ceil(8 * hidden / 3) / 64)
    return layers * (4 * hidden * hidden + 3 * hidden * ffn + 2 * hidden) + hidden + VOCABULARY * hidden


SMALL = Law(1.5, math.log(300.0), math.log(200.0), 0.42, 0.33)
NOISE = 1e-4  # standard deviation of the logarithm of a run's loss


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep's folder with runs of five sizes and four numbers of tokens, and next to it one with a
    run that is larger and longer.

    The losses of the sweep are noisy, because intervals of exact losses are as narrow as rounding errors:
    whether a loss is inside them would depend on the machine.
    """
    folder = tmp_path_factory.mktemp("law")
    noise = np.random.default_rng(0)
    names = []
    for hidden, layers in SIZES:
        for steps in (500, 1000, 2000, 4000):
            names.append(f"{hidden}x{layers}x{steps}")
            loss = SMALL.loss(own_count(hidden, layers), steps * BATCH * SEQUENCE)
            noisy_loss = loss * math.exp(NOISE * noise.normal())
            write_run(folder / "trials" / names[-1], hidden, layers, steps, noisy_loss)
    (folder / "sweep.json").write_text(json.dumps({"trials": names}))
    write_run(
        folder / "beyond/trials/larger", 192, 5, 8000, SMALL.loss(own_count(192, 5), 8000 * BATCH * SEQUENCE)
    )
    (folder / "beyond/sweep.json").write_text(json.dumps({"trials": ["larger"]}))
    return folder


def test_embeddings_are_not_counted(sweep: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The exponents of runs' folders are found again; with the tables in N they are not."""
    assert off(parametric.fit(read_runs([str(sweep)], None, 5), samples=0).law, SMALL) < 0.01
    monkeypatch.setattr(finished, "counted", parameters)
    assert off(parametric.fit(read_runs([str(sweep)], None, 5), samples=0).law, SMALL) > 0.01


def test_parameters_of_tied_and_learned_tables(sweep: Path) -> None:
    """A tied table counts once, as the head; a table of positions never."""
    (run,) = read_runs([str(sweep / "beyond")], None, 5)
    assert run.parameters == own_count(192, 5)
    for changes in ({"tie_embeddings": True}, {"position": "learned"}):
        other = run.config.model_copy(update={"model": run.config.model.model_copy(update=changes)})
        assert finished.counted(other) == own_count(192, 5), changes


def test_parabolas_through_equal_compute() -> None:
    """Minima and their power laws are those of the law, and compute spreads between N and D."""
    config: Any = None
    runs = []
    for flops in (1e18, 1e19, 1e20, 1e21):
        best = HOFFMANN.best_parameters(flops, 6.0)
        for n in best * np.geomspace(0.4, 2.5, 11):
            d = flops / 6 / n
            runs.append(Run("run", config, n, d, flops, HOFFMANN.loss(n, d)))
    found = isoflop.fit(runs, samples=20)
    assert found.parameters.exponent == pytest.approx(HOFFMANN.exponent, rel=0.01)
    assert found.parameters.exponent + found.tokens.exponent == pytest.approx(1.0)
    for group in found.groups:
        assert group.parameters == pytest.approx(HOFFMANN.best_parameters(group.flops, 6.0), rel=0.03)
        assert 6 * group.parameters * group.tokens == pytest.approx(group.flops)
    with pytest.raises(
        UserError, match="0 groups of equal compute .* 4 more have no minimum between their sizes"
    ):
        isoflop.fit(
            [run for run in runs if run.parameters < 0.9 * HOFFMANN.best_parameters(run.flops, 6.0)] * 2,
            samples=1,
        )


def test_minimiser_and_gradient() -> None:
    """It finds a curved valley's end from many starts at once; the law's gradient
    is that of finite differences.
    """

    def valley(x: Array, numbers: Numbers) -> tuple[Array, Array]:
        a, b = 1 - x[:, 0], x[:, 1] - x[:, 0] ** 2
        return a**2 + 100 * b**2, np.stack([-2 * a - 400 * x[:, 0] * b, 200 * b], axis=1)

    ends, values = minimise(valley, np.array([[-1.2, 1.0], [3.0, -2.0], [0.0, 5.0], [1.0, 1.0]]), 1e-9, 500)
    assert np.allclose(ends, 1.0, atol=1e-6) and (values < 1e-12).all()

    source = np.random.default_rng(0)
    n, d, loss = (source.normal(size=9) for _ in range(3))
    problem, weights = parametric.Problem(n, d, loss * 1e-3), source.integers(1, 4, (1, 9)).astype(float)
    at = np.array([[-0.7, -1.1, -1.3, 0.3, 0.4]])
    steps = 1e-6 * np.eye(5)
    slopes = [
        (problem.evaluate(at + s, weights)[0] - problem.evaluate(at - s, weights)[0])[0] / 2e-6 for s in steps
    ]
    assert np.allclose(problem.evaluate(at, weights)[1][0], slopes, rtol=1e-5, atol=1e-10)


def test_a_budget_is_spent_best(sweep: Path) -> None:
    """No other model of the family has a smaller loss for the same compute; the config is one that runs."""
    largest = read_runs([str(sweep / "beyond")], None, 5)[0]
    family = budget.Family(largest.config, ["train.global_batch_size=64"], None, None)
    found = family.best(SMALL, 1e16)
    assert (
        found.flops == pytest.approx(1e16, rel=0.01)
        and found.tokens == found.config.train.steps * 64 * SEQUENCE
    )
    every = [family.sized(heads) for heads in range(1, 41)]
    assert found.loss == pytest.approx(min(SMALL.loss(n, 1e16 / rate) for _, n, rate in every), rel=1e-5)
    model = found.config.model
    assert found.parameters == own_count(model.hidden_size, model.num_layers), (
        "a feed-forward size that was derived is derived anew"
    )
    assert (
        model.hidden_size / model.num_layers == pytest.approx(192 / 5, rel=0.2)
        and found.config.head_size == 16
    )
    assert found.config.optim.warmup_steps == pytest.approx(found.config.train.steps * 10 / 8000, abs=1)
    changed = {"train": largest.config.train.model_copy(update={"batch_ramp": ((100, 8),)})}
    changed |= {"optim": largest.config.optim.model_copy(update={"kind": "ademamix", "slow_warmup": 8000})}
    for own, samples in (([], 64), (["train.batch_ramp=[[1000000, 32]]"], 32)):
        other = budget.Family(
            largest.config.model_copy(update=changed), ["train.global_batch_size=64", *own], None, None
        ).best(SMALL, 1e16)
        assert (
            other.flops == pytest.approx(1e16, rel=0.01)
            and other.tokens == other.config.train.steps * samples * SEQUENCE
        )
        assert other.config.optim.model_dump()["slow_warmup"] == other.config.train.steps, (
            "what follows from the steps does so anew"
        )
    device, cluster = read_device("h100"), read_cluster("dgx_h100")
    optimal, plan = budget.for_hours(
        family, SMALL, 0.01, device, lambda own: budget.laid_out(own, 1, device, cluster, 80.0)
    )
    assert optimal.flops == pytest.approx(0.01 * 3600 * device.peak_flops["bf16"] * plan.mfu, rel=0.03)


def test_the_script(sweep: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Table, prediction of a run that was not in the fit, picture, and the best
    model's config with its layout.
    """
    files = {name: str(tmp_path / name) for name in ("law.json", "law.png", "best.json")}
    arguments = [
        str(sweep),
        "--held-out",
        str(sweep / "beyond"),
        "--resamples",
        "50",
        "--json",
        files["law.json"],
        "--plot",
        files["law.png"],
    ]
    spend = [
        "--budget",
        "1e17",
        "--gpu",
        "h100",
        "--world",
        "2",
        "--price",
        "2",
        "--output",
        files["best.json"],
    ]
    assert scaling.run([*arguments, *spend, "train.global_batch_size=64"]) == 0
    said = capsys.readouterr().out
    assert (
        "no parabolas: 0 groups of equal compute" in said
        and "inside the interval" in said
        and "device hours" in said
    )
    found = json.loads(Path(files["law.json"]).read_text())
    assert found["law"]["alpha"]["value"] == pytest.approx(0.42, rel=0.01) and len(found["runs"]) == 20
    assert found["held_out"][0]["predicted"] == pytest.approx(found["held_out"][0]["loss"], rel=1e-3)
    assert Path(files["law.png"]).stat().st_size > 20_000
    config = run_of(files["best.json"], world=2)
    assert config.world_size == 2 and config.train.global_batch_size == 64
    assert found["optimal"]["tokens"] == config.train.steps * 64 * SEQUENCE
    assert scaling.run([str(sweep), "--least-ratio", "6", "--resamples", "5"]) == 0
    assert "left out, of fewer than 6 tokens a parameter: " in capsys.readouterr().out


def same_tokens(folder: Path) -> None:
    for number in range(9):
        write_run(folder / str(number), 32 + 16 * number, 2, 100, 3.0 + number / 100)


def in_step(folder: Path) -> None:
    for number in range(9):
        hidden = 32 + 16 * number
        write_run(folder / str(number), hidden, 2, own_count(hidden, 2) // 100, 4.0 - number / 100)


def rising(folder: Path) -> None:
    for hidden, layers in SIZES:
        for steps in (100, 200, 400):
            write_run(folder / f"{hidden}x{steps}", hidden, layers, steps, 3.0 + hidden / 100 - steps / 1000)


def one(folder: Path, **changes: Any) -> None:
    write_run(folder / "0", 32, 2, 100, changes.pop("loss", 3.0), **changes)


def unfinished(folder: Path) -> None:
    one(folder)
    (folder / "0/metrics.jsonl").write_text(
        (folder / "0/metrics.jsonl").read_text().replace('"step": 100', '"step": 90')
    )


def two(folder: Path, **changes: Any) -> None:
    one(folder)
    write_run(folder / "1", 48, 2, 100, 3.0, **changes)


def garbled(folder: Path) -> None:
    one(folder)
    (folder / "0/metrics.jsonl").write_text("{}\n")


BAD: list[tuple[Callable[[Path], None], tuple[str, ...], str]] = [
    (one, (), "config error: arguments: 1 runs do not determine five constants (at least 8)"),
    (
        same_tokens,
        (),
        "config error: arguments: the runs have 1 different numbers of tokens: their part of the loss "
        "cannot be told",
    ),
    (in_step, (), "config error: arguments: sizes and tokens grow together: nobody can tell what each does"),
    (rising, (), "config error: arguments: the loss does not fall with N in these runs"),
    (unfinished, (), "log error: 0/metrics.jsonl: stands at step 90 of 100 (finished runs)"),
    (garbled, (), "log error: 0: holds no run's records: line 1 is no record of a step"),
    (
        partial(one, loss=None),
        (),
        "log error: 0/metrics.jsonl: the final loss is nan (without runs that diverged)",
    ),
    (
        partial(two, data={"valid": "data/other"}),
        (),
        "config error: data.valid: 1 has 'data/other' and 0 'data/text_valid'",
    ),
    (partial(two, train={"seq_len": 32}), (), "config error: train.seq_len: 1 has 32 and 0 64"),
    (
        partial(one, model={"source": "evil.py"}),
        (),
        "config error: 0: model.source: nobody says what a model of the user's own computes",
    ),
    (
        one,
        ("none",),
        "log error: none/config.json: cannot be read: No such file or directory (finished runs' folders",
    ),
    (
        one,
        ("a.b=1",),
        "config error: a.b=1: a setting of the best model, and there is no budget (also --budget or "
        "--device-hours)",
    ),
    (one, ("--budget", "-1"), "config error: --budget: -1.0 is not usable (a number above 0)"),
    (
        one,
        ("--budget", "1e9", "--device-hours", "2"),
        "config error: --device-hours: stands beside --budget (one of the two)",
    ),
    (
        one,
        ("--device-hours", "2"),
        "config error: --device-hours: what they compute depends on the device (also --gpu and --world)",
    ),
    (
        one,
        ("--budget", "1e9", "--gpu", "h100"),
        "config error: --world: a plan needs both (--gpu and --world)",
    ),
    (
        one,
        ("--output", "x.json"),
        "config error: --output: there is no budget to spend (also --budget or --device-hours)",
    ),
    (
        one,
        ("--least-ratio", "-1"),
        "config error: --least-ratio: -1.0 is no number of tokens (0 or more, such as 2)",
    ),
    (
        one,
        ("--least-ratio", "nan"),
        "config error: --least-ratio: nan is no number of tokens (0 or more, such as 2)",
    ),
    (
        one,
        ("--level", "95"),
        "config error: --level: 95.0 is no part of the fits (between 0 and 1, such as 0.95)",
    ),
    (one, ("--loss", "final"), "config error: --loss: invalid choice: 'final'"),
    (one, ("--plot", "x.txt"), "config error: --plot: cannot write x.txt: its ending names no image format"),
    (one, ("--resamples", "0"), "config error: --resamples: '0' is not a whole number from 1"),
]


@pytest.mark.parametrize(
    "make, arguments, line", BAD, ids=[line.partition(": ")[2][:50] for _, _, line in BAD]
)
def test_mistakes_are_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    make: Callable[[Path], None],
    arguments: tuple[str, ...],
    line: str,
) -> None:
    """Too few runs, designs from which no law follows, runs that are none, and
    options that do not go together.
    """
    monkeypatch.chdir(tmp_path)
    make(tmp_path)
    runs = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(UserError) as caught:
        scaling.run([*runs, *arguments])
    assert line in str(caught.value) and "\n" not in str(caught.value)
    assert capsys.readouterr() == ("", "") and sorted(path.name for path in tmp_path.iterdir()) == runs
