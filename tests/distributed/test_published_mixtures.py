"""Published mixtures of experts come in, train on over experts' and tensor ranks, go out, and
come in again with the same bits.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from megacore.checkpoint import Reader, locate
from megacore.checkpoint.weights import WEIGHTS
from megacore.distributed.buffers import BUFFERS
from tests import peers
from tests.build import run_of
from tests.conversion import export, stored, take_in
from tests.training import difference, figures, run_rank, write_corpus
from tests.unit.test_generate import worst_logits

pytest.importorskip("transformers", reason="transformers is not installed: pip install -e '.[test]'")

LAYOUTS = {"ep2": "parallel.expert=2", "tp2": "parallel.tensor=2"}


@pytest.mark.parametrize("name", ["deepseek_v3", "gpt_oss"])
def test_in_trained_out_and_in_again(pool: Any, tmp_path: Path, name: str) -> None:
    """A bias or a latent that an import leaves out would be another model; one
    that an export does, lost work.
    """
    peers.build(name).save_pretrained(tmp_path / "theirs")
    corpus = write_corpus(tmp_path, vocab_size=peers.VOCAB_SIZE)
    batches = [
        f"data.train={corpus}",
        "train.seq_len=8",
        "train.global_batch_size=8",
        "train.micro_batch_size=2",
    ]
    run = take_in(tmp_path / "theirs", tmp_path / "run", "train.precision=fp64")
    wide = run_of(run / "config.json", "model.init_std=0.2", "model.vocab_size=256")
    assert worst_logits(wide, (5, 1, 1, 3, 1, 1)) < 1e-12, "texts are written as whole passes would"
    steps = [
        *batches,
        "train.steps=2",
        "optim.warmup_steps=0",
        "optim.lr=0.01",
        "optim.min_lr=0.01",
        "log.every=1",
    ]
    pool.run(1, run_rank, str(run / "config.json"), steps, str(tmp_path / "one"))
    for layout, overrides in LAYOUTS.items():
        pool.run(2, run_rank, str(run / "config.json"), [*steps, overrides], str(tmp_path / layout))
        assert difference(figures(tmp_path / layout), figures(tmp_path / "one")) < 1e-12
    out = export(tmp_path / "ep2", tmp_path / "out")
    before, after = stored(tmp_path / "theirs"), stored(out)
    assert before.keys() == after.keys() and not any(torch.equal(before[key], after[key]) for key in before)
    if name == "deepseek_v3":  # whose last tokens are trained on with biases that stay
        pool.run(
            1,
            run_rank,
            str(run / "config.json"),
            [*steps, "model.router_bias_rate=0"],
            str(tmp_path / "still"),
        )
        still = stored(export(tmp_path / "still", tmp_path / "out_still"))
        assert {key for key in before if torch.equal(before[key], still[key])} == {
            key for key in before if key.endswith(peers.BIAS)
        }
    again = export(take_in(out, tmp_path / "again"), tmp_path / "back")
    assert all(torch.equal(value, after[key]) for key, value in stored(again).items())
    trained, imported = (Reader(locate(tmp_path / folder)).manifest.tensors for folder in ("ep2", "again"))
    kept = {key for key in trained if key.startswith((WEIGHTS, BUFFERS))}
    assert kept == set(imported)
