"""What launch/plan.py answers of the config's own layout: whether it fits, what would, what it costs,
and whether the links are right.
"""

import json
import re
from pathlib import Path

import pytest

from launch import plan as script
from megacore.errors import ConfigError
from megacore.tools.planner.devices import (
    cluster_names,
    device_names,
    links_warning,
    read_cluster,
    read_device,
)
from megacore.tools.planner.memory import fullest_rank
from megacore.tools.planner.own_layout import changed
from megacore.tools.planner.run_cost import cost
from megacore.tools.settings.load import load
from tests.build import run_of

CONFIG = "configs/gpt_7b.json"
ALONE = [
    "parallel.tensor=1",
    "parallel.pipeline=1",
    "parallel.data=1",
    "parallel.schedule=1f1b",
    "train.micro_batch_size=1",
]
LARGE = ["train.global_batch_size=1024", "train.micro_batch_size=16"]


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[str, str]:
    assert script.run(["--config", CONFIG, "--world", "8", *arguments]) == 0
    done = capsys.readouterr()
    return done.out, done.err


@pytest.mark.parametrize("overrides, ranks", [([], "2 ranks"), (["parallel.pipeline=1"], "1 rank")])
@pytest.mark.parametrize("options", [[], ["--compare-schedules"]])
def test_a_plan_without_a_world_starts_with_the_number_of_ranks(
    options: list[str], overrides: list[str], ranks: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if overrides:
        overrides = [*overrides, "parallel.schedule=1f1b"]
    assert script.run(["--config", CONFIG, *options, "train.global_batch_size=16", *overrides]) == 0
    first = f"plan for {ranks}, the fewest that this config fits; --world N plans for N ranks"
    assert capsys.readouterr().out.splitlines()[0] == first


def test_a_plan_for_a_given_world_starts_with_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys)[0].startswith("parameters ")


def test_a_layout_that_fits_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    """Users had to compare two numbers of a table; --memory-gib is the measure if it is named."""
    needs = fullest_rank(run_of(CONFIG, world=8))[2]
    fits = (
        f"fits          yes: pipeline rank 1 needs most, {needs:.2f} GiB of 79.1 (h100); "
        f"{79.1 - needs:.2f} GiB are left\n"
    )
    assert fits in said(capsys, "--gpu", "h100")[0]
    for device in ([], ["--gpu", "h100"]):
        out = said(capsys, *device, "--memory-gib", "40")[0]
        where = f"pipeline rank 1 needs most, {needs:.2f} GiB of 40 (--memory-gib)"
        assert f"NO: {where}; {needs - 40:.2f} GiB are missing; most memory goes to " in out
    assert "fits " not in said(capsys)[0], "of no device"


@pytest.mark.parametrize(
    "fork, more",
    [
        ("speedrun", ["parallel.pipeline=2", "parallel.schedule=zb_v"]),
        ("multi_token", ["parallel.pipeline=2"]),
        ("multi_token", ["model.ahead_kind=heads", "model.ahead=2"]),
    ],
)
def test_the_forks_are_planned(capsys: pytest.CaptureFixture[str], fork: str, more: list[str]) -> None:
    """A norm without a weight had no stand-in for a GPU's; a loss, whose backward can run once, counted
    as a layer that needs content.
    """
    assert script.run(["--config", f"configs/forks/{fork}.json", *more]) == 0
    out = capsys.readouterr().out
    assert "activ." in out and "GFLOP" in out and "unknown" not in out


def test_a_change_that_is_named_does_fit(capsys: pytest.CaptureFixture[str]) -> None:
    """Advice that does not help, or that pretrain refuses, costs a queue's wait."""
    out = said(capsys, "--gpu", "h100", *LARGE)[0]
    (advice,) = re.findall(r"each of these changes makes it fit \(GiB\): (.*)\n", out)
    found = dict(re.fullmatch(r"(.*) \(([\d.]+)\)", one).groups() for one in advice.split("; "))  # type: ignore[union-attr,misc]
    assert "train.micro_batch_size=1" in found and len(found) > 1
    for words, gib in found.items():
        needs = fullest_rank(run_of(CONFIG, *LARGE, *words.split(), world=8))[2]
        assert needs <= 80 and f"{needs:.2f}" == gib, words


def test_a_change_that_the_ds_config_excludes_is_not_named(tmp_path: Path) -> None:
    """Advice that pretrain refuses: the ds_config says another size of microbatches."""
    ds_config = tmp_path / "ds_config.json"
    ds_config.write_text(
        json.dumps({"train_micro_batch_size_per_gpu": 16, "zero_optimization": {"stage": 1}})
    )
    settings = [*LARGE, "engine.shard_optimizer=false", "engine.kind=deepspeed", f"engine.config={ds_config}"]
    named = [words for words, _ in changed(run_of(CONFIG, *settings, world=8))]
    assert "train.recompute=full" in named
    for words in named:
        load(CONFIG, [*settings, *words.split()], 8)


def test_what_no_change_mends_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    """A list that ends in nothing would leave users without a next step."""
    out = said(capsys, "--memory-gib", "10")[0]
    assert re.search(
        r"no single change does: the least is [\d.]+ GiB, by .*; --search tries all layouts", out
    )


@pytest.mark.parametrize(
    ("options", "tokens", "price"), [([], None, None), (["--tokens", "1e11", "--price", "2.5"], 1e11, 2.5)]
)
def test_the_run_of_this_layout_is_priced(
    options: list[str], tokens: float | None, price: float | None, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only the layouts that a search liked had a price."""
    out = said(capsys, "--gpu", "h100", "--cluster", "dgx_h100", *options)[0]
    config, step = run_of(CONFIG, world=8), float(re.findall(r"predicted +([\d.]+) s", out)[0])
    tokens = tokens or config.train.steps * config.train.global_batch_size * config.train.seq_len
    found = cost(config, step, tokens, 8, 8, price, 700)
    days, hours = re.findall(
        rf"are {found.steps:,} steps: ([\d.]+) days.* which are ([\d,]+) device hours", out
    )[0]
    assert float(days) == pytest.approx(found.days, rel=2e-3) and float(
        hours.replace(",", "")
    ) == pytest.approx(found.device_hours, rel=2e-3)
    assert [float(m.replace(",", "")) for m in re.findall(r"money +([\d,]+),", out)] == pytest.approx(
        [found.money] if price else [], rel=2e-3
    )


def test_links_of_another_device_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    """An A100 over an H100's NVLink is a machine that nobody can buy."""
    out, err = said(capsys, "--gpu", "a100", "--cluster", "dgx_h100")
    assert (
        err.startswith("warning: dgx_h100 has the links of h100, ")
        and "not of a100 (take --cluster a100_400g or " in err
    )
    assert err.count("\n") == 1 and "predicted" in out
    assert said(capsys, "--gpu", "a100", "--cluster", "dgx_a100")[1] == ""


def test_a_search_lays_out_a_device_on_its_own_links(capsys: pytest.CaptureFixture[str]) -> None:
    """Every device was laid out on an H100's links, twice as fast as an A100's,
    unless `--cluster` said otherwise.
    """
    for device, cluster in (("a100", "dgx_a100"), ("mi300x", "mi300x"), ("h200", "dgx_h100")):
        assert (
            script.run(["--config", "configs/gpt_1b.json", "--world", "2", "--search", "--gpu", device]) == 0
        )
        out, err = capsys.readouterr()
        assert f"2 × {device} over {cluster}\n" in out and err == ""
    with pytest.raises(ConfigError, match="--cluster: the links of rtx 4090 are not known"):
        script.run(["--config", "configs/gpt_1b.json", "--world", "2", "--search", "--gpu", "rtx 4090"])
    assert (
        script.run(["--config", "configs/gpt_124m.json", "--world", "1", "--search", "--gpu", "rtx 4090"])
        == 0
    ), "it has none"
    for name in device_names():
        device_spec = read_device(name)
        assert device_spec.cluster is None or name in read_cluster(device_spec.cluster).devices


def test_every_cluster_says_whose_links_it_has(tmp_path: Path) -> None:
    """A name that no device has would warn of every device; a file of one's own need not say."""
    for name in cluster_names():
        devices = read_cluster(name).devices
        assert devices and set(devices) <= set(device_names())
        assert not any(links_warning(read_device(device), read_cluster(name)) for device in devices)
    own = tmp_path / "own.json"
    own.write_text(
        '{"name": "own", "levels": [{"link": "wire", "ranks": null, "bytes_per_second": 1e9, '
        '"latency_seconds": 0}]}'
    )
    assert links_warning(read_device("a100"), read_cluster(str(own))) == ""


def test_what_fits_nowhere_says_how_much_lacks_and_what_would_fit() -> None:
    """More devices, or more memory: that left it to the user to find out how many, and how much."""
    with pytest.raises(ConfigError) as caught:
        script.run(["--config", CONFIG, "--world", "1", "--search"])
    line = str(caught.value)
    pattern = r"the smallest, (.*), needs ([\d.]+) GiB, ([\d.]+) more, most of it for (.*?) \(devices"
    [(layout, needs, missing, part)] = re.findall(pattern, line)
    assert "microbatch 1, native" in layout and part.startswith("optimizer (75.")
    assert float(needs) - 79.1 == pytest.approx(float(missing), abs=0.11)
    least = run_of(CONFIG, *ALONE, "train.recompute=full")
    assert float(needs) <= fullest_rank(least)[2] + 0.1, "a layout that needs less was left out"
    assert f"(devices of {needs} GiB, such as h200 139.7, " in line and "mi300x 191.6" in line
    assert re.search(r"; or --world 2: tensor 1 × pipeline 1 × data 2, .*, [\d.]+ GiB\)", line), (
        "what does fit"
    )


def test_no_number_of_devices_is_promised_where_none_helps() -> None:
    """Less than what a device keeps for CUDA: no search is made, and none is named."""
    with pytest.raises(ConfigError) as caught:
        script.run(["--config", "configs/gpt_124m.json", "--world", "1", "--search", "--memory-gib", "0.5"])
    assert "--world" not in str(caught.value) and "such as t4 14.5" in str(caught.value)
