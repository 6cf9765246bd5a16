"""Everything that a model computes has a deterministic implementation, and what has none is refused."""

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from megacore.config import Config
from megacore.distributed.rank_info import RankInfo
from megacore.errors import ConfigError
from megacore.model.norm import Norm
from megacore.tools.machine.determinism import compute_deterministically
from megacore.tools.machine.device import set_up_device
from tests.build import model_of, run_of

MODELS = {
    "gpt2": ["model.dropout=0.1"],
    "llama": [
        "model.norm=rmsnorm",
        "model.activation=swiglu",
        "model.position=rope",
        "model.bias=false",
        "model.tie_embeddings=false",
    ],
    "grouped queries": ["model.num_kv_heads=2", "model.attention=eager"],
    "recomputed": ["model.num_kv_heads=1", "model.attention=fused", "train.recompute=full"],
    "bf16": ["train.precision=bf16", "train.recompute=selective", "model.attention=eager"],
}


@pytest.fixture
def deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(os, "environ", dict(os.environ))
    fills = torch.utils.deterministic.fill_uninitialized_memory
    compute_deterministically()
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = fills


def small(*overrides: str) -> Config:
    sections = {
        "model": {"num_layers": 2, "hidden_size": 32, "num_heads": 4, "vocab_size": 65},
        "train": {"seq_len": 16, "micro_batch_size": 2, "global_batch_size": 2, "precision": "fp32"},
    }
    return run_of(sections, *overrides)


def gradients(config: Config) -> list[Tensor]:
    """Of one microbatch, in which every token comes several times: its embedding's gradient is a sum."""
    model = model_of(config)
    tokens = torch.arange(34).view(2, 17) % 5
    model.loss(model.hidden(tokens[:, :-1], 1), tokens[:, 1:]).backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("model", MODELS)
def test_models_run_and_repeat(deterministic: None, model: str) -> None:
    """PyTorch raises at an operation without a deterministic implementation; here none is, and the
    second run gives the same bits.
    """
    once, again = (gradients(small(*MODELS[model])) for _ in range(2))
    assert once and all(torch.equal(a, b) for a, b in zip(once, again, strict=True))


@pytest.mark.parametrize("model", MODELS)
def test_nothing_reads_memory_that_was_not_written(deterministic: None, model: str) -> None:
    """Why new memory need not be filled: filled with NaN it gives the same bits."""
    assert not torch.utils.deterministic.fill_uninitialized_memory
    plain = gradients(small(*MODELS[model]))
    torch.utils.deterministic.fill_uninitialized_memory = True
    assert torch.empty(1).isnan()
    assert all(torch.equal(a, b) for a, b in zip(plain, gradients(small(*MODELS[model])), strict=True))


def test_an_operation_without_deterministic_implementation_is_refused(
    deterministic: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planted fault, in the model: a `put_`, of whose writes to one place any may come last.

    Without the setting it runs.
    """
    forward = Norm.forward

    def planted(self: Norm, x: Tensor, residual: Tensor | None = None) -> Any:
        noise = torch.zeros(1).put_(torch.tensor([0, 0]), torch.tensor([0.0, 1e-9]))
        return forward(self, x + noise, residual)

    monkeypatch.setattr(Norm, "forward", planted)
    with pytest.raises(RuntimeError, match="put_.* does not have a deterministic implementation"):
        gradients(small())
    torch.use_deterministic_algorithms(False)
    assert gradients(small())


@pytest.mark.parametrize("name, value", [("CUBLAS_WORKSPACE_CONFIG", ":0:0"), ("NCCL_NVLS_ENABLE", "1")])
def test_an_environment_that_asks_for_the_contrary_is_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ) | {name: value})
    with pytest.raises(ConfigError, match=f"{name}: {value} lets sums come in an order that varies"):
        compute_deterministically()
    assert not torch.are_deterministic_algorithms_enabled()


def test_the_environment_is_set_where_it_is_not(monkeypatch: pytest.MonkeyPatch, deterministic: None) -> None:
    assert (os.environ["CUBLAS_WORKSPACE_CONFIG"], os.environ["NCCL_NVLS_ENABLE"]) == (":4096:8", "0")


@pytest.mark.parametrize(
    "setting", ["allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction"]
)
def test_a_gpu_adds_up_in_fp32(setting: str) -> None:
    """cuBLAS may divide a long sum; its parts would then be rounded to 16 bits before they are added."""
    matmul = torch.backends.cuda.matmul
    before = getattr(matmul, setting)
    setattr(matmul, setting, True)
    try:
        set_up_device(small(), RankInfo(), torch.device("cuda", 0))
        assert getattr(matmul, setting) is False
    finally:
        setattr(matmul, setting, before)
