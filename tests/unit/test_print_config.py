"""`pretrain.py --print-config`: the order of values, their meanings, and for how many ranks."""

import json
from pathlib import Path

import pytest

from launch import pretrain
from megacore.config import Config
from megacore.distributed.rank_info import RankInfo
from megacore.errors import ConfigError
from megacore.tools.settings.load import flatten

ROOT = Path(__file__).resolve().parents[2]
TINY = str(ROOT / "configs/gpt_tiny.json")
LARGE = str(ROOT / "configs/gpt_7b.json")  # of several ranks


def printed(capsys: pytest.CaptureFixture[str], *words: str, place: RankInfo | None = None) -> list[str]:
    """Return the lines that `--print-config` prints."""
    assert pretrain.run([*words, "--print-config"], place or RankInfo()) == 0
    return capsys.readouterr().out.splitlines()


def values(lines: list[str]) -> dict[str, list[str]]:
    """Return the value and the origin of each key."""
    rows = [line.split() for line in lines if line[:1].isalpha() and "." in line.split()[0]]
    return {row[0]: row[1:] for row in rows}


def test_values_of_the_user_come_first_then_derived_then_defaults(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    ds_config = json.dumps({"zero_optimization": {"stage": 1}, "gradient_clipping": 0.5})
    config = tmp_path / "run.json"
    config.write_text(json.dumps({"model": {"num_layers": 4}}))
    words = ("train.steps=7", "engine.kind=deepspeed", f"engine.config={ds_config}", "train.precision=fp32")
    lines = printed(capsys, "--config", str(config), *words)

    origins = [row[-1] for row in values(lines).values()]
    groups = {"override": 0, "file": 0, "ds_config": 0, "derived": 1, "default": 2}
    order = [groups[origin] for origin in origins]
    assert order == sorted(order)
    assert set(origins) == groups.keys()
    headings = [line for line in lines if line.startswith("#")]
    assert headings == [
        "# Set by the config file, overrides or the ds_config",
        "# Derived from other values",
        "# Defaults",
    ]


def test_describe_prints_a_text_for_every_key(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(capsys, "--config", TINY, "--describe")
    known = flatten(Config().model_dump(by_alias=True))
    assert values(lines).keys() == known.keys()
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        if line.split()[:1] and line.split()[0] in known:
            assert following.startswith("    "), line
    assert max(map(len, lines)) <= 100
    assert "    number of transformer blocks" in lines


def test_settings_of_a_custom_model_are_described(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(capsys, "--config", str(ROOT / "configs/forks/lora.json"), "--describe")
    row = next(index for index, line in enumerate(lines) if line.startswith("model.alpha "))
    assert "scale of the adapters" in lines[row + 1]


def test_a_config_of_several_ranks_prints_for_the_fewest(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(capsys, "--config", LARGE)
    assert lines[0].startswith("# For 2 ranks, the fewest that this config fits")
    assert values(lines)["parallel.data"] == ["1", "derived"]


def test_world_sets_the_number_of_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(capsys, "--config", LARGE, "--world", "8")
    assert values(lines)["parallel.data"] == ["4", "derived"]
    with pytest.raises(ConfigError, match="but there are 7"):
        printed(capsys, "--config", LARGE, "--world", "7")


def test_the_launchers_world_counts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    place = RankInfo(rank=0, world_size=4)
    assert values(printed(capsys, "--config", LARGE, place=place))["parallel.data"] == ["2", "derived"]
    with pytest.raises(ConfigError, match="--world: 8 contradicts the launcher, which started 4"):
        printed(capsys, "--config", LARGE, "--world", "8", place=place)

    # a launcher that starts one rank
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="--world: 8 contradicts the launcher, which started 1"):
        printed(capsys, "--config", TINY, "--world", "8")


@pytest.mark.parametrize("option", ["--describe", "--world"])
def test_options_of_print_config_need_it(option: str) -> None:
    words = ["--config", TINY, option, *(["8"] if option == "--world" else [])]
    with pytest.raises(ConfigError, match=f"^config error: {option}: is an option of --print-config"):
        pretrain.run(words, RankInfo())
