"""The page of DeepSpeedExamples' ds_configs: a row for each file, with what became of it and why."""

import json
from pathlib import Path

import pytest

from benchmarks import ds_configs
from megacore.errors import ConfigError

FILES = {
    "a/zero2.json": {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2}},
    "a/silent.json": {"train_batch_size": 2},
    "a/removed.json": {"train_batch_size": 2, "compression_training": {}},
    "a/one_bit.json": {"optimizer": {"type": "OneBitAdam", "params": {"freeze_step": 2}}},
    "b/vocabulary.json": {"hello": 1},
    "b/list.json": [1, 2],
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder like a checkout: ds_configs, a template and other JSON."""
    found = tmp_path / "examples"
    for name, content in FILES.items():
        (found / name).parent.mkdir(parents=True, exist_ok=True)
        (found / name).write_text(json.dumps(content))
    (found / "a/ds_config_TEMPLATE.json").write_text('{"train_batch_size": SIZE}')
    (found / "b/broken.json").write_text("{")
    return found


def test_each_file_has_its_row(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is passed over would make the page look better than it is."""
    started = []

    class Done:
        returncode = 0
        stdout = stderr = ""

    def run(command: list[str], **options: object) -> Done:
        started.append(command)
        return Done()

    monkeypatch.setattr(ds_configs.subprocess, "run", run)
    page = tmp_path / "page.md"
    assert ds_configs.run([str(folder), "--commit", "abc", "--output", str(page)]) == 0
    lines = page.read_text().splitlines()
    rows = dict(line.split(" | ", 1) for line in lines[lines.index("| file | result | reason |") + 2 :])
    assert {name.strip("| ").removeprefix("a/"): row.split(" | ")[0] for name, row in rows.items()} == {
        "zero2.json": "starts",
        "silent.json": "starts in fp32",
        "removed.json": "rejected",
        "one_bit.json": "rejected",
        "ds_config_TEMPLATE.json": "not JSON",
    }
    assert "removed its 1-bit optimizers" in rows["| a/one_bit.json"]
    assert "commit `abc`" in page.read_text()
    assert sum("launch/pretrain.py" in command for command in started) == 2


@pytest.mark.parametrize("name", ["missing", "b"])
def test_a_folder_without_ds_configs(folder: Path, tmp_path: Path, name: str) -> None:
    """A wrong path would write an empty page over a good one."""
    with pytest.raises(ConfigError, match="^config error: FOLDER: .*DeepSpeedExamples"):
        ds_configs.run([str(folder / name), "--output", str(tmp_path / "page.md")])
    assert not (tmp_path / "page.md").exists()


def test_the_committed_page_is_of_this_deepspeed() -> None:
    """Reasons such as "has removed this key" are true of one version."""
    text = (ds_configs.ROOT / ds_configs.PAGE).read_text()
    assert "DeepSpeed 0.19" in text and text.count("| rejected |") > 50
    assert "removed its 1-bit optimizers" in text and "no such key (did you mean" not in text
