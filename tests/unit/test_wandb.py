"""log.wandb: wandb gets what metrics.jsonl has, a run that goes on is the same run there, and
nothing it does reaches training.
"""

import importlib.util
import json
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from megacore.errors import ConfigError
from megacore.tools.choices.run import trainer_of
from megacore.tools.inputs import Inputs
from megacore.tools.monitoring import wandb as tracking
from megacore.tools.monitoring.tags import tagged
from megacore.tools.settings.load import load
from megacore.tools.settings.print_config import config_table
from tests import forks
from tests.build import mesh_of, run_of
from tests.commands import run_script
from tests.pool import PATIENCE
from tests.training import write_config, write_corpus

needs_wandb = pytest.mark.skipif(
    importlib.util.find_spec("wandb") is None, reason="wandb is not installed (pip install wandb)"
)


def records(file: bytes) -> Iterator[bytes]:
    """The records of a LevelDB log behind 7 bytes of wandb's: in blocks of 32 KiB, each piece
    with checksum, length and kind.
    """
    at, block, whole = 7, 32768, b""
    while at + 7 <= len(file):
        if block - at % block < 7:  # too little is left of the block for a head
            at += block - at % block
            continue
        length, kind = struct.unpack_from("<HB", file, at + 4)
        whole += file[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or its last piece
            yield whole
            whole = b""


def histories(folder: Path) -> Iterator[tuple[str, dict[int, dict[str, float]]]]:
    """Of every part of a run that wandb has written offline, in order: the run's id, and figures by step."""
    from wandb.proto import wandb_internal_pb2

    for file in sorted(folder.glob("offline-run-*/*.wandb")):
        rows = {}
        for data in records(file.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.WhichOneof("record_type") == "history":
                items = {
                    item.key or ".".join(item.nested_key): json.loads(item.value_json)
                    for item in record.history.item
                }
                rows[items["_step"]] = {
                    name: value for name, value in items.items() if not name.startswith("_")
                }
        yield file.stem.removeprefix("run-"), rows


@needs_wandb
def test_wandb_has_the_figures_of_metrics_jsonl(tmp_path: Path) -> None:
    """Other figures or steps than were recorded, or a new run in wandb for each start of one run."""
    prefix = write_corpus(tmp_path)
    # but speed/
    log = {
        "dir": str(tmp_path / "run"),
        "wandb": "offline",
        "every": 2,
        "tensorboard": False,
        "figures": ["[!s]*"],
    }
    data = {"train": prefix, "valid": prefix}
    config = write_config(
        tmp_path,
        prefix,
        model={"num_layers": 1},
        train={"steps": 8, "eval_every": 4, "eval_batches": 1},
        optim={"warmup_steps": 1},
        data=data,
        log=log,
        checkpoint={"every": 4},
    )
    for steps in (4, 8):
        done = run_script("launch/pretrain.py", "--config", config, f"train.steps={steps}")
        assert done.returncode == 0 and "WARNING" not in done.stdout, done.stdout + done.stderr
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    expected: dict[int, dict[str, Any]] = {}
    for line in lines:
        expected.setdefault(line["step"], {}).update(tagged(line, ["[!s]*"]))
    (first, before), (second, after) = histories(tmp_path / "run/wandb")
    assert first == second, "both parts are of one run"
    assert before | after == expected and sorted(before) == [2, 4] and sorted(after) == [6, 8]


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (
            "import sys; sys.exit('no network')",
            "WARNING: wandb gets no more figures (no network); training continues",
        ),
        ("import time; time.sleep(3600)", "WARNING: wandb has not sent all figures within 0.3 s"),
    ],
)
def test_wandb_never_ends_or_stalls_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, said: str
) -> None:
    """A run that waits for a server, or ends because it does not answer; or a line for every step."""
    monkeypatch.setattr(tracking, "COMMAND", [sys.executable, "-c", code])
    monkeypatch.setattr(tracking, "GRACE", 0.3 if "sleep" in code else PATIENCE)
    config = run_of(
        write_config(tmp_path, write_corpus(tmp_path), log={"dir": str(tmp_path / "run"), "wandb": "online"})
    )
    lines: list[str] = []
    tracker = tracking.Tracker()
    mesh: Any = SimpleNamespace(print=lines.append)
    tracker.on_start(config, mesh)
    tracker.on_records_open(tmp_path / "run", 1)
    process = tracker.process
    for step in range(300):  # more than a pipe holds
        tracker.on_record({"step": step, "loss": 1.0, "padding": "x" * 500})
    tracker.on_end()
    assert len(lines) == 1 and lines[0].startswith(said), lines
    assert process is not None and process.returncode not in (None, 0)


ECHO = "import pathlib, sys; pathlib.Path('{}').write_text(sys.stdin.readline()); sys.stdin.read()"


def config_told(path: str, folder: str) -> Any:
    """What wandb's process is told of a run's config."""
    config, told = run_of(path, f"log.dir={folder}"), Path(folder) / "told"
    with mock.patch.object(tracking, "COMMAND", [sys.executable, "-c", ECHO.format(told)]):
        mesh = mesh_of(config)
        mesh.listeners.add(tracking.Tracker())
        trainer = trainer_of(config, mesh, Inputs(config, 0))
        trainer.run()
    trainer.mesh.close()
    return json.loads(told.read_text())["config"]


def test_the_config_is_that_of_the_run(run_ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    """Runs would be sorted by `auto`, which says nothing; and settings of a source that JSON has
    no type for would end the run.
    """
    settings = "class Settings(ModelConfig):"
    source = forks.written(
        tmp_path, (settings, f"from pathlib import Path\n{settings}\n    at: Path = Path('x')")
    )
    model = {"num_layers": 2, "source": str(source)}
    path = write_config(tmp_path, write_corpus(tmp_path), model=model, train={"steps": 1, "compile": "auto"})
    loaded = load(path)
    assert loaded.config.train.compile == "auto" and '"x"' in config_table(loaded)
    [told] = run_ranks(1, config_told, path, str(tmp_path / "run"))
    recorded = json.loads((tmp_path / "run" / "config.json").read_text())
    assert (
        told == recorded | {"model": recorded["model"] | {"source": str(source)}}
        and told["train"]["compile"] is False
    )


def test_a_missing_package_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run would train for hours, and nothing would be there to look at."""
    monkeypatch.setattr(tracking, "find_spec", lambda name: None)
    path = write_config(tmp_path, write_corpus(tmp_path))
    tracking.check_wandb(run_of(path))
    with pytest.raises(
        ConfigError, match=r"log.wandb: wandb is not installed \(pip install 'megacore\[wandb\]', or off\)"
    ):
        tracking.check_wandb(run_of(path, "log.wandb=offline"))


def test_a_run_that_begins_anew_is_a_new_run(tmp_path: Path) -> None:
    """Figures of two runs would be drawn as one."""
    first = tracking.run_id(tmp_path, 1)
    assert tracking.run_id(tmp_path, 5) == first and tracking.run_id(tmp_path, 1) != first
