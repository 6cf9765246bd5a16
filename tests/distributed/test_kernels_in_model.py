"""Whole training runs on Triton's kernels, in its interpreter: the losses of eager, within fp32 rounding, in tp2·pp2 too."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import training
from tests.kernel_checks import needs_triton
from tests.pool import Pool

STEPS = 2  # the interpreter takes a thousand times as long as a compiled kernel
SMALL = ["model.num_layers=2", "model.hidden_size=16", "train.seq_len=8", "train.micro_batch_size=1", "train.global_batch_size=2"]
SMALL += [f"train.steps={STEPS}", "optim.warmup_steps=1"]
# Between them, every kernel that a model can use.
MODELS = {
    "layer norm, gelu, learned, dropout": ["model.dropout=0.1"],
    "RMS norm, swiglu, rope, grouped, fused softmax": [
        *("model.norm=rmsnorm", "model.activation=swiglu", "model.position=rope", "model.num_kv_heads=2", "model.attention=fused"),
        *("model.bias=false", "model.tie_embeddings=false"),
    ],
    "query-key norm, gelu_erf, chunked loss": [
        *("model.qk_norm=true", "model.position=rope", "model.activation=gelu_erf", "model.chunked_loss=true"),
    ],
}
LAYOUTS = {1: [], 4: ["parallel.tensor=2", "parallel.pipeline=2", "parallel.sequence=true"]}


@pytest.fixture(scope="module")
def interpreting() -> Iterator[Pool]:
    """Workers in which Triton interprets: it looks at the variable once, when it is imported."""
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    pool = Pool(bare=True)
    try:
        yield pool
    finally:
        pool.close()
        os.environ.pop("TRITON_INTERPRET") if before is None else os.environ.update(TRITON_INTERPRET=before)


def figures(pool: Pool, folder: Path, world: int, overrides: list[str]) -> list[tuple[float, float]]:
    log_dir = str(folder / f"run{len(list(folder.iterdir()))}")
    assert pool.run(world, training.run_rank, str(folder / "config.json"), [*SMALL, *overrides], log_dir) == [0] * world
    return [(m["loss"], m["grad_norm"]) for m in training.metrics(log_dir)]


@needs_triton
@pytest.mark.parametrize("world", LAYOUTS)
@pytest.mark.parametrize("model", MODELS)
def test_triton_trains_as_eager_does(interpreting: Pool, tmp_path: Path, model: str, world: int) -> None:
    training.write_config(tmp_path, training.write_corpus(tmp_path, tokens=600))
    layout = [*MODELS[model], *LAYOUTS[world]]
    fused = figures(interpreting, tmp_path, world, [*layout, "model.kernels=triton"])
    eager = figures(interpreting, tmp_path, 1, [*MODELS[model], "model.kernels=eager"])
    assert len(fused) == STEPS and fused != eager, "the same bits: Triton was not used"
    for step, (got, right) in enumerate(zip(fused, eager, strict=True), 1):
        assert got == pytest.approx(right, rel=1e-5), f"step {step}"


def test_triton_without_a_gpu_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would fail in the middle of the first step, with a message of Triton's."""
    from megacore.config import load
    from megacore.distributed.mesh import pick_device
    from megacore.distributed.place import Place
    from megacore.errors import ConfigError

    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    config: Any = load(training.write_config(tmp_path, "unused"), ["model.kernels=triton"]).config
    with pytest.raises(ConfigError, match=r"model.kernels: triton needs a GPU, .* \(auto, or TRITON_INTERPRET=1\)"):
        pick_device(config, Place())
    with pytest.raises(ConfigError, match=r"model.kernels: .* \(auto or eager\)"):
        load(str(tmp_path / "config.json"), ["model.kernels=triton", "train.precision=fp64"])
