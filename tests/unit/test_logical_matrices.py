"""The logical matrices that a weight's placement states, against the products that the layers compute."""

from pathlib import Path

import pytest
import torch

from megacore.distributed.shard import LogicalMatrix, shard_of
from tests import training
from tests.build import model_of, run_of


def matrices_of(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    return {matrix.name: matrix.view(weight) for matrix in shard_of(weight).logical_matrices}


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_queries_keys_and_values_are_matrices(tmp_path: Path, kv_heads: int) -> None:
    """Taken for one matrix, or cut elsewhere, a rule over whole matrices would mix heads that have
    nothing to do with each other.
    """
    overrides = [
        f"model.num_kv_heads={kv_heads}",
        "train.precision=fp64",
        "model.position=learned",
        "model.qkv_bias=false",
    ]
    config = run_of(training.write_config(tmp_path, "unused"), *overrides)
    attention = model_of(config).blocks["0"].attention
    found = matrices_of(attention.qkv.weight)
    heads, size = config.model.num_heads, config.head_size
    shapes = {name: tuple(matrix.shape) for name, matrix in found.items()}
    assert shapes == {"q": (heads, size, 32), "k": (kv_heads, size, 32), "v": (kv_heads, size, 32)}
    x = torch.randn(6, 32, dtype=torch.float64)
    made = attention.heads(attention.qkv(x).view(1, 6, kv_heads, -1, size), None)
    for name, right in zip("qkv", made, strict=True):  # [1, heads, 6, size]
        assert float((torch.einsum("ti,hoi->hto", x, found[name]) - right[0]).detach().abs().max()) < 1e-12, (
            name
        )


def test_gate_and_up_are_matrices(tmp_path: Path) -> None:
    config = run_of(training.write_config(tmp_path, "unused"), "model.activation=swiglu")
    weight = model_of(config).blocks["0"].feed_forward.up.weight
    found = matrices_of(weight)
    assert list(found) == ["gate", "up"]
    assert torch.equal(found["gate"][0], weight[0]) and torch.equal(found["up"][0], weight[1])


def test_every_weight_says_what_its_matrices_are(tmp_path: Path) -> None:
    """A weight of more dims that states none would have no matrix at all; stated ones
    must tile the weight.
    """
    for activation in ("gelu", "swiglu"):
        config = run_of(training.write_config(tmp_path, "unused"), f"model.activation={activation}")
        for name, weight in model_of(config).named_parameters():
            matrices = shard_of(weight).logical_matrices
            assert bool(matrices) == shard_of(weight).decay, name
            times = torch.zeros(weight.shape)
            for matrix in matrices:
                assert sorted(matrix.batch + matrix.rows + matrix.columns) == list(range(weight.dim())), name
                times[matrix.index] += 1
            assert not matrices or (times == 1).all(), name


def test_a_plain_weight_is_a_matrix_itself() -> None:
    assert torch.equal(LogicalMatrix("").view(torch.arange(6.0).view(2, 3)), torch.arange(6.0).view(1, 2, 3))
