"""Choosing between Triton and eager, which every fused operation does alike."""

import warnings

import pytest
import torch

from megacore.kernels import dispatch
from megacore.model.batch import Microbatch
from tests.build import model_of, run_of
from tests.compiling import graphs_counted


def test_missing_triton_on_a_gpu_is_said_once():
    """A silently unfused operation would be a slow run nobody can explain; a line
    per call would bury the log.
    """
    dispatch.notice_missing_triton.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for operation in ("rms_norm", "causal_softmax", "rms_norm"):
            dispatch.notice_missing_triton(operation)
    dispatch.notice_missing_triton.cache_clear()
    assert [str(warning.message) for warning in caught] == [
        f"Triton is not installed: {operation} runs unfused on this GPU (pip install triton)"
        for operation in ("rms_norm", "causal_softmax")
    ]


def test_asking_for_missing_triton_is_an_error(monkeypatch):
    monkeypatch.setattr(dispatch, "triton", None)
    assert not dispatch.use_triton("rms_norm", "auto", x=torch.zeros(2))
    with pytest.raises(ValueError, match="rms_norm: Triton is not installed"):
        dispatch.use_triton("rms_norm", "triton", x=torch.zeros(2))


@pytest.mark.parametrize(
    "model",
    [[], ["model.norm=rmsnorm", "model.activation=swiglu", "model.position=rope", "model.attention=fused"]],
    ids=str,
)
def test_auto_leaves_fusing_to_the_compiler(monkeypatch, model):
    """As on a GPU, where a launch would end a compiled block's graph; Triton has no launches for a
    CPU, so that any would fail too.
    """
    monkeypatch.setattr(dispatch, "FUSED_ON", ("cpu",))
    sections = {
        "model": {"num_layers": 3, "hidden_size": 32, "num_heads": 4, "vocab_size": 65},
        "train": {
            "seq_len": 16,
            "micro_batch_size": 2,
            "global_batch_size": 2,
            "precision": "fp32",
            "compile": True,
        },
    }
    x = torch.randn(32, 32, requires_grad=True)
    with graphs_counted() as found:
        stage = model_of(run_of(sections, *model))
        context = stage.context(Microbatch(torch.zeros(2, 16, dtype=torch.int64)))
        y = x
        for block in stage.blocks.values():
            y = block(y, context)
        y.sum().backward()
    assert (found["graphs"], found["breaks"]) == (1, [])
    assert x.grad is not None and x.grad.isfinite().all()
