"""Rotary frequencies stretched for longer texts, against transformers' own and
against what each method promises.
"""

import math
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter

from megacore.config.model import RopeScaling
from megacore.errors import ConfigError
from megacore.model.rotary import frequencies, rope_tables, yarn_ramp
from megacore.tools.interchange.families import family_for_config, family_for_hf
from tests.build import run_of
from tests.peers import LLAMA

HEAD, THETA, POSITIONS = 16, 10000.0, 64
YARN = {"type": "yarn", "factor": 8.0, "original_max_position_embeddings": POSITIONS}
LONGROPE = {
    "type": "longrope",
    "short_factor": [1.0, 1.0, 1.5, 2.0, 2.0, 2.5, 3.0, 3.0],
    "long_factor": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0],
    "original_max_position_embeddings": POSITIONS,
    "max_position_embeddings": 4 * POSITIONS,
    "attention_factor": 1.2,
}
METHODS: list[dict[str, Any]] = [
    {"type": "linear", "factor": 3.0},
    {
        "type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": POSITIONS,
    },
    {"type": "ntk", "factor": 3.0},
    YARN,
    YARN | {"truncate": False, "beta_fast": 16.0, "beta_slow": 0.5},
    YARN | {"attention_factor": 1.5},
    YARN | {"factor": 0.5},  # shorter: the scores stay as they are
]


def scaling(values: dict[str, Any]) -> Any:
    return TypeAdapter(RopeScaling).validate_python(values)


def of_transformers(
    method: dict[str, Any], head: int = HEAD, theta: float = THETA
) -> tuple[torch.Tensor, float]:
    """transformers' frequencies and the factor of its tables, of a text of POSITIONS
    · 3 for its NTK-aware scaling.
    """
    rope_utils = pytest.importorskip(
        "transformers.modeling_rope_utils", reason="transformers is not installed: pip install -e '.[test]'"
    )
    from transformers import LlamaConfig

    own = {"rope_type": method["type"]} | {key: value for key, value in method.items() if key != "type"}
    # its base for a length of n positions is that of a factor · n / positions - (factor - 1)
    if method["type"] == "ntk":
        own = {"rope_type": "dynamic", "factor": (method["factor"] - 1) / 2}
    config = LlamaConfig(
        hidden_size=head,
        num_attention_heads=1,
        max_position_embeddings=POSITIONS,
        rope_parameters={"rope_theta": theta} | own,
    )
    return rope_utils.ROPE_INIT_FUNCTIONS[own["rope_type"]](
        config, torch.device("cpu"), seq_len=3 * POSITIONS
    )


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_tables_equal_transformers(method: dict[str, Any]) -> None:
    """An imported model would see other positions than the ones that it was trained with.

    Theirs are computed in fp32.
    """
    right, factor = of_transformers(method)
    ours = frequencies(HEAD, THETA, scaling(method))
    assert float((ours / right - 1).abs().max()) < 1e-5
    cos, sin = rope_tables(np.arange(9), HEAD, THETA, torch.float64, torch.device("cpu"), scaling(method))
    angles = torch.outer(torch.arange(9.0), right).repeat(1, 2)
    assert (
        float((cos - factor * angles.cos()).abs().max()) < 1e-5
        and float((sin - factor * angles.sin()).abs().max()) < 1e-5
    )
    changed = frequencies(HEAD, THETA, scaling(method | {"factor": 1.1 * method["factor"]}))
    assert float((changed / right - 1).abs().max()) > 1e-2, (
        "another factor must show, or the comparison would prove nothing"
    )


def test_any_settings_equal_transformers() -> None:
    """A ramp that begins before the first pair, or ends behind the last, is where a bound is
    wrong and usual settings are right.
    """
    rng, ends = np.random.default_rng(0), []
    for _ in range(150):
        head, theta = int(2 * rng.integers(2, 65)), float(10 ** rng.uniform(1, 7))
        slow, factor, positions = (
            float(2 ** rng.uniform(-2, 3)),
            float(rng.uniform(1, 40)),
            int(2 ** rng.uniform(2, 20)),
        )
        fast = slow * float(2 ** rng.uniform(1, 6))
        yarn = {
            "type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": positions,
            "beta_fast": fast,
            "beta_slow": slow,
        }
        llama3 = {"type": "llama3", "factor": factor, "original_max_position_embeddings": positions}
        for method in (
            yarn | {"truncate": bool(rng.integers(2))},
            llama3 | {"low_freq_factor": slow, "high_freq_factor": fast},
        ):
            right, _ = of_transformers(method, head, theta)
            ours = frequencies(head, theta, scaling(method))
            assert float((ours / right - 1).abs().max()) < 1e-4, (head, theta, method)
        start, end = yarn_ramp(head, theta, scaling(yarn))
        ends.append((start == 0, head // 2 < end <= head - 1, end == head - 1))
    assert all(sum(kind) >= 5 for kind in zip(*ends, strict=True)), "bounds were met"


def test_what_each_method_promises() -> None:
    """The fastest pair tells neighbours apart and must stay; the slowest must not turn
    further than it did in training.
    """
    plain = frequencies(HEAD, THETA)
    for method in METHODS[1:4]:
        ratio = plain / frequencies(HEAD, THETA, scaling(method))
        assert ratio[0] == 1.0 and math.isclose(float(ratio[-1]), method["factor"], rel_tol=1e-12), method
        assert (ratio.diff() >= 0).all(), method


def config_with(method: dict[str, Any] | None, **model: Any) -> Any:
    sizes = {
        "num_layers": 1,
        "hidden_size": 32,
        "num_heads": 2,
        "vocab_size": 53,
        "position": "rope",
        "rope_scaling": method,
    }
    sections = {"model": sizes | model, "train": {"seq_len": 12, "precision": "fp32", "device": "cpu"}}
    return run_of(sections)


def test_ntk_goes_to_peers_as_a_base() -> None:
    """transformers has no scaling of a fixed length: the exported model must have
    the same frequencies by its base.
    """
    model = {"norm": "rmsnorm", "activation": "swiglu", "bias": False}
    config = config_with({"type": "ntk", "factor": 4.0}, **model)
    written = family_for_config(config).write(config)
    assert written["rope_scaling"] is None
    assert torch.equal(
        frequencies(16, written["rope_theta"]), frequencies(16, 10000.0, config.model.rope_scaling)
    )


def test_settings_of_peers() -> None:
    """DeepSeek's two scales make one factor; "dynamic" has no effect within all positions,
    beyond which no config here goes.
    """

    def read(**rope: Any) -> Any:
        hf = {"architectures": ["LlamaForCausalLM"], "vocab_size": 53} | LLAMA | {"rope_scaling": rope}
        return family_for_hf(hf, "config.json").read(hf)["rope_scaling"]

    assert read(rope_type="dynamic", factor=2.0) is None
    found = read(
        rope_type="yarn",
        factor=40.0,
        original_max_position_embeddings=8,
        mscale=1.0,
        mscale_all_dim=0.5,
        truncate=False,
    )
    assert (
        found["attention_factor"] == (0.1 * math.log(40) + 1) / (0.05 * math.log(40) + 1)
        and found["truncate"] is False
    )
    assert (
        read(rope_type="yarn", factor=40.0)["original_max_position_embeddings"]
        == LLAMA["max_position_embeddings"]
    )


@pytest.mark.parametrize(
    ("method", "model", "where", "right"),
    [
        (YARN | {"beta_fast": 1.0}, {}, "model.rope_scaling", "a larger beta_fast"),
        (YARN, {"rope_theta": 1.0}, "model.rope_theta", "a base above 1"),
        (YARN, {"position": "learned"}, "model.rope_scaling", "null, or model.position=rope"),
        (LONGROPE | {"short_factor": [1.0]}, {}, "model.rope_scaling", "8, one for each pair of features"),
        (LONGROPE, {"rotary_share": 0.5}, "model.rope_scaling", "4, one for each pair of features"),
        (LONGROPE, {"max_positions": POSITIONS + 1}, "model.max_positions", f"at most {POSITIONS}"),
    ],
)
def test_bad_settings(method: dict[str, Any], model: dict[str, Any], where: str, right: str) -> None:
    with pytest.raises(ConfigError) as error:
        config_with(method, **model)
    assert (error.value.where, error.value.right) == (where, right)
