"""Whole training runs inside a test's workers: the real trainer on a small random corpus."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from launch.pretrain import callbacks_of
from megacore.config import Config
from megacore.distributed.buffers import BUFFERS, buffers_of
from megacore.distributed.shard import shard_of
from megacore.tools.choices.partition import partitioned
from megacore.tools.choices.run import trainer_of
from megacore.tools.diagnosis.flight_recorder import FlightRecorder
from megacore.tools.inputs import Inputs
from megacore.tools.launchers import place_from_environment
from megacore.tools.machine.device import pick_device
from megacore.tools.mirror import Mirror
from megacore.tools.prepare.indexed_writer import IndexedWriter
from megacore.tools.settings.load import load
from megacore.tools.startup_lines import startup_lines
from megacore.tools.stop_request import StopRequest
from tests.build import mesh_of, model_of
from tests.checkpoints import save

VOCAB_SIZE = 65  # does not divide by 2 or 4

BASE: dict[str, dict[str, Any]] = {
    "model": {"num_layers": 5, "hidden_size": 32, "num_heads": 4, "vocab_size": VOCAB_SIZE},
    "train": {
        "steps": 20,
        "seq_len": 16,
        "micro_batch_size": 2,
        "global_batch_size": 8,
        "precision": "fp32",
        "device": "cpu",
    },
    "optim": {"lr": 3e-3, "warmup_steps": 5, "grad_clip": 0.5},
    "parallel": {"timeout_seconds": 600},
    "log": {"every": 1, "tensorboard": False},
}


def write_corpus(
    folder: Path, name: str = "corpus", tokens: int = 4000, seed: int = 0, vocab_size: int = VOCAB_SIZE
) -> str:
    """A learnable corpus (a noisy walk through the vocabulary); returns its prefix."""
    rng = np.random.default_rng(seed)
    values = np.cumsum(rng.integers(0, 3, tokens)) % vocab_size
    prefix = str(folder / name)
    with IndexedWriter(prefix, np.uint16) as writer:
        for document in np.array_split(values, 8):
            writer.write(document.astype(np.uint16))
            writer.end_document()
    return prefix


def write_config(folder: Path, prefix: str, **sections: dict[str, Any]) -> str:
    """`BASE` with some sections' keys replaced, as a file; returns its path."""
    config = {name: dict(section) for name, section in BASE.items()}
    config["data"] = {"train": prefix}
    for name, section in sections.items():
        config[name] = config.get(name, {}) | section
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return str(path)


def run_rank(config_path: str, overrides: list[str], log_dir: str) -> int:
    """One rank's whole run, as launch/pretrain.py does it; returns its exit status."""
    place = place_from_environment()
    config = partitioned(load(config_path, [*overrides, f"log.dir={log_dir}"], place.world_size).config)
    inputs = Inputs(config, place.rank)
    mesh = mesh_of(config, device=pick_device(config, place))
    mesh.listeners.add(FlightRecorder(stages=config.parallel.pipeline))
    with StopRequest() as stop:
        stop.begin()
        mesh.listeners.add(*callbacks_of(config, place, mesh.device, stop, Mirror(config, place)))
        trainer = trainer_of(config, mesh, inputs)
        for line in startup_lines(trainer, inputs):
            mesh.print(line)
        status = trainer.run(lambda: stop.requested)
    mesh.close()
    return status


def lines(log_dir: str | Path) -> list[dict[str, Any]]:
    """All that a run has logged."""
    return list(map(json.loads, (Path(log_dir) / "metrics.jsonl").read_text().splitlines()))


def metrics(log_dir: str | Path) -> list[dict[str, Any]]:
    """The logged training steps of a run."""
    return [figures for figures in lines(log_dir) if "loss" in figures]


def write_weights(folder: Path, config: Config, but: str | None = None, value: float | None = None) -> Path:
    """A checkpoint that holds a model's first weights (`but` one) and no run, as an import leaves
    it; returns the step's folder. With `value`, all weights have this value.
    """
    model = model_of(config)
    if value is not None:
        for parameter in model.parameters():
            parameter.data.fill_(value)
    weights = {
        f"model/{name}": (parameter.data, shard_of(parameter))
        for name, parameter in model.named_parameters()
        if name != but
    }
    weights |= {
        f"{BUFFERS}{name}": (buffer.value, buffer.shard) for name, buffer in buffers_of([model]).items()
    }
    state = {"model": config.model.model_dump(), "config": config.model_dump(by_alias=True)}
    return save(folder, 0, weights, state, keep=1)


Figures = list[tuple[float, float]]  # (loss, gradient norm) of steps


def figures(log_dir: str | Path) -> Figures:
    """Of every step."""
    return [(line["loss"], line["grad_norm"]) for line in metrics(log_dir)]


def difference(a: Figures, b: Figures) -> float:
    """The largest relative difference of any loss or norm; of as many steps."""
    return max(abs(x - y) / abs(y) for p, q in zip(a, b, strict=True) for x, y in zip(p, q, strict=True))
