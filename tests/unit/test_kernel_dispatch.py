"""Choosing between Triton and eager, which every fused operation does alike."""

import warnings

import pytest
import torch

from megacore.kernels import dispatch


def test_missing_triton_on_a_gpu_is_said_once():
    """A silently unfused operation would be a slow run nobody can explain; a line per call would bury the log."""
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
