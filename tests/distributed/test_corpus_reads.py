"""Of a machine's ranks one reads the corpus before training begins."""

from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from launch import pretrain
from megacore.data.indexed import IndexedTokens
from megacore.tools.launchers import place_from_environment
from megacore.tools.stop_request import StopRequest
from megacore.train.trainer import Trainer
from tests import training
from tests.build import run_of

TOKENS = 4000


def start(config_path: str, log_dir: str) -> int:
    """The tokens that a rank reads until the trainer is asked to run."""
    place, read, lengths = place_from_environment(), IndexedTokens.read, [0]

    def counted(self: IndexedTokens, start: int, length: int) -> np.ndarray:
        lengths.append(length)
        return read(self, start, length)

    config = run_of(
        config_path,
        f"log.dir={log_dir}",
        f"data.valid={run_of(config_path).data.train}",
        world=place.world_size,
    )
    with (
        mock.patch.object(IndexedTokens, "read", counted),
        mock.patch.object(Trainer, "run", lambda *_: 0),
        StopRequest(None) as stop,
    ):
        assert pretrain.train(config, place, stop) == 0
    return sum(lengths)


def test_one_rank_of_a_machine_scans_the_corpora(pool: Any, tmp_path: Path) -> None:
    """A file system would serve the same 256 MiB of every corpus to all ranks of a job, while they wait."""
    path = training.write_config(tmp_path, training.write_corpus(tmp_path, tokens=TOKENS))
    assert pool.run(2, start, path, str(tmp_path / "run")) == [2 * TOKENS, 0]  # training's and validation's
