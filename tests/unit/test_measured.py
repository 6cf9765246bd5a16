"""What planning takes from the layers themselves, on `meta`: without Triton, of a model of the user's
own, and of every layer alike.
"""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from megacore.tools.choices.measured import by_itself, cost_of
from megacore.tools.choices.torch_patches import on_meta
from megacore.tools.dry_run.dry_report import against_formulas
from megacore.tools.dry_run.dry_step import dry_run
from megacore.tools.planner.activations import rank_activations
from tests import forks
from tests.build import run_of

TINY = str(forks.ROOT / "configs/gpt_tiny.json")
GPU = ["train.device=cuda", "train.precision=bf16"]
WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None
from megacore.tools.settings.load import load
from megacore.tools.choices.measured import cost_of
config = load(sys.argv[1], sys.argv[2:], 1).config
print([cost_of(config, layer).kept for layer in (0, 1, config.model.num_layers + 1)])
"""


def test_without_triton_a_gpu_is_planned_the_same() -> None:
    """A laptop's PyTorch has no Triton: its plans would be of a GPU that runs
    everything unfused, and keeps more.
    """
    sizes = [
        *GPU,
        "model.activation=swiglu",
        "model.norm=rmsnorm",
        "model.position=rope",
        "model.dropout=0.1",
    ]
    config = run_of(TINY, *sizes)
    here = [cost_of(config, layer).kept for layer in (0, 1, config.model.num_layers + 1)]
    there = subprocess.run(
        [sys.executable, "-c", WITHOUT_TRITON, TINY, *sizes],
        cwd=forks.ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert there.stdout.strip() == str(here)
    eager = config.model_copy(update={"model": config.model.model_copy(update={"kernels": "eager"})})
    assert cost_of(eager, 1).kept > here[1], "what could fail"


@pytest.mark.parametrize(
    "layout",
    [["parallel.tensor=2", "parallel.sequence=true"], ["parallel.pipeline=2", "train.recompute=full"]],
)
def test_a_model_of_ones_own_is_planned_as_it_runs(layout: list[str], tmp_path: Path) -> None:
    """Formulas would be of the GPT's block: this one has no gate, and keeps its scores."""
    forks.written(tmp_path)
    sizes = ["train.seq_len=64", "train.global_batch_size=8", *GPU, *layout]
    config = run_of(TINY, f"model.source={tmp_path}/my_model.py", *sizes, world=2)
    ranks = [dry_run(config, rank) for rank in (0, 1)]
    assert [line for dry in ranks for line in against_formulas(config, dry)] == []
    for dry in ranks:
        peak, counted = rank_activations(config)[dry.stage], dry.peak - sum(dry.held.values())
        assert peak.total - peak.transfers <= counted <= 1.01 * peak.total, (
            "but for how many messages are under way"
        )
    plain = run_of(TINY, *sizes, world=2)
    assert cost_of(config, 1).kept != cost_of(plain, 1).kept or "train.recompute=full" in layout, (
        "what could fail"
    )


def test_equal_layers_are_measured_once() -> None:
    """Data ranks, stages and schedules change nothing of a layer: a search would measure thousands."""
    one, other = (
        run_of(TINY, *GPU, *layout, world=4)
        for layout in ([], ["parallel.pipeline=2", "parallel.schedule=gpipe"])
    )
    assert by_itself(one) == by_itself(other) and cost_of(one, 1) is cost_of(other, 2)
    assert by_itself(one) != by_itself(run_of(TINY, *GPU, "parallel.tensor=2", world=4))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_values_may_be_of_another_size_than_keys(device: str) -> None:
    """PyTorch's attention takes them, by kernels that do; the result has their size."""
    q, v = (torch.empty(2, 4, 8, size, dtype=torch.bfloat16, device="meta") for size in (48, 32))
    with on_meta(device):
        assert F.scaled_dot_product_attention(q, q, v, is_causal=True).shape == v.shape
