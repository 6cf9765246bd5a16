"""Attention sinks: in parts and where text is written, against the formula; and gpt-oss's
attention as transformers has it.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from megacore.context_parallel import attention, scored
from megacore.context_parallel.attention import Sequences
from megacore.context_parallel.scored import Scoring
from megacore.context_parallel.sharding import Documents
from megacore.distributed.communicator import SOLO
from megacore.tools.interchange.mapped import grouped_qkv, qkv_shape
from tests.attention_checks import HEADS, KV_HEADS, SCALE, inputs
from tests.peers import widened
from tests.unit.test_model_settings import built, contexts
from tests.unit.test_scored_attention import DOCUMENTS, SEQ, seen_pairwise, written

TOLERANCE = 1e-10  # fp64


def by_formula(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, documents: Documents | None, window: int | None
) -> Tensor:
    """The sink is one more key of each query, whose value is zero."""
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
    scores = (q @ k.transpose(-2, -1) * SCALE).masked_fill(~seen_pairwise(documents, window), float("-inf"))
    total = scores.exp().sum(-1, keepdim=True) + sinks.exp()[:, None, None]
    return scores.exp() / total @ v


@pytest.mark.parametrize("documents", [None, DOCUMENTS])
@pytest.mark.parametrize("window", [None, 5])
def test_parts_equal_the_formula(
    window: int | None, documents: Documents | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sink that each part takes in, or that backward forgets, is another model."""
    monkeypatch.setattr(scored, "STEP", 4)
    *whole, grad = inputs(2, SEQ, 8)
    whole.append(torch.linspace(-1.0, 2.0, HEADS, dtype=torch.float64))
    ours, right = ([x.clone().requires_grad_() for x in whole] for _ in range(2))
    scoring = None if window is None else Scoring(window)
    out = attention.attend(*ours[:3], Sequences(SEQ, SOLO, "gather", documents), SCALE, scoring, ours[3])
    expected = by_formula(*right, documents, window)
    out.backward(grad)
    expected.backward(grad)
    for a, b in [(out, expected), *((a.grad, b.grad) for a, b in zip(ours, right, strict=True))]:
        assert float((a - b).detach().abs().max()) < 1e-12  # type: ignore[operator]


@pytest.mark.parametrize("own", [{}, {"window": 4, "global_every": 2, "num_kv_heads": 1}], ids=str)
def test_text_is_written_as_it_is_read(own: dict[str, Any]) -> None:
    """By the formula and in parts: decoding without a sink gives other text."""
    tokens = torch.randint(61, (1, 12), generator=torch.Generator().manual_seed(3))
    found = []
    for kind in ("eager", "sdpa"):
        stage = built(attention=kind, attention_sinks=True, **own).eval()
        with torch.no_grad():
            found += [stage.logits(stage.hidden(tokens)), written(stage, tokens, 5)[0]]
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-11, atol=1e-11)
    for block in stage.inner:
        block.attention.sinks = None  # type: ignore[union-attr, unused-ignore]
    assert float((written(stage, tokens, 5)[0] - found[0]).abs().max()) > 1e-4, (
        "planted: a decoder without sinks"
    )


GPT_OSS = {
    "num_hidden_layers": 2,
    "hidden_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "sliding_window": 4,
    "max_position_embeddings": 64,
    "num_local_experts": 2,
    "intermediate_size": 16,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 150.0,
        "factor": 4.0,
        "beta_fast": 4.0,
        "beta_slow": 0.5,
        "truncate": False,
        "original_max_position_embeddings": 8,
    },
}


@pytest.mark.parametrize("kind", ["eager", "sdpa"])
@pytest.mark.parametrize("block", [0, 1])
def test_gpt_oss_attention(block: int, kind: str) -> None:
    """Sinks, biases, a window in every other block and YaRN: the output, and the gradients of
    all, are those of transformers.
    """
    modeling = pytest.importorskip(
        "transformers.models.gpt_oss.modeling_gpt_oss", reason="transformers is not installed"
    )
    x = torch.randn(1, 12, 24, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    grad = torch.randn(12, 24, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    with widened():
        config = modeling.GptOssConfig(**GPT_OSS, attn_implementation="eager")
        theirs = modeling.GptOssAttention(config, layer_idx=block)
        for number, parameter in enumerate(theirs.parameters()):
            parameter.data = 0.4 * torch.randn(
                parameter.shape, generator=torch.Generator().manual_seed(number)
            )
        behind = torch.arange(12)[:, None] - torch.arange(12)
        seen = (behind >= 0) & (behind < (theirs.sliding_window or 12))
        mask = torch.zeros(12, 12).masked_fill(~seen, float("-inf"))[None, None]
        their_x = x.clone().requires_grad_()
        expected, _ = theirs(their_x, modeling.GptOssRotaryEmbedding(config)(x, torch.arange(12)[None]), mask)
        expected[0].backward(grad)

    rope = GPT_OSS["rope_parameters"]
    assert isinstance(rope, dict)
    scaling = {"type": "yarn"} | {key: value for key, value in rope.items() if not key.startswith("rope_")}
    stage = built(
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_size=8,
        bias=True,
        position="rope",
        rope_theta=150.0,
        rope_scaling=scaling,
        window=4,
        global_every=2,
        attention_sinks=True,
        attention=kind,
    )
    ours: Any = stage.inner[block].attention
    shape = qkv_shape(stage.config)
    with torch.no_grad():
        for what, more in (("weight", (24,)), ("bias", ())):
            qkv = grouped_qkv(what, (*shape, *more), [f"{letter}_proj.{what}" for letter in "qkv"])
            getattr(ours.qkv, what).copy_(qkv.join(dict(theirs.named_parameters())))
            getattr(ours.output, what).copy_(getattr(theirs.o_proj, what))
        ours.sinks.copy_(theirs.sinks)
    our_x = x[0].clone().requires_grad_()
    found = ours(our_x, contexts(stage)[0])
    found.backward(grad)
    near(found, expected[0])
    near(our_x.grad, their_x.grad[0])
    near(ours.sinks.grad, theirs.sinks.grad)
    for what, more in (("weight", (24,)), ("bias", ())):
        qkv = grouped_qkv(what, (*shape, *more), [f"{letter}_proj.{what}" for letter in "qkv"])
        near(
            getattr(ours.qkv, what).grad,
            qkv.join({name: p.grad for name, p in theirs.named_parameters() if p.grad is not None}),
        )
        near(getattr(ours.output, what).grad, getattr(theirs.o_proj, what).grad)


def near(ours: Any, theirs: Any) -> None:
    assert float((ours - theirs).detach().abs().max()) < TOLERANCE * float(theirs.detach().abs().max())
