"""What published models do otherwise than GPT-2 is the same in every layout: each setting in some
product of layouts, to 1e-9 in fp64.
"""

from collections.abc import Iterator

import pytest

from megacore.files import ROOT
from megacore.tools.verify.layouts import parse
from megacore.tools.verify.run import Options, prove
from megacore.tools.verify.workers import ProofWorkers
from tests.commands import provers

TINY = str(ROOT / "configs/gpt_tiny.json")  # rotary positions, swiglu, RMS norms
NEOX = [
    "model.branches=parallel",
    "model.rotary_share=0.5",
    "model.norm=layernorm",
    "model.activation=gelu_erf",
    "model.bias=true",
]
BIASED = "model.head_bias=true"
SINKS, HEADWISE, ELEMENTWISE = (
    "model.attention_sinks=true",
    "model.attention_gate=headwise",
    "model.attention_gate=elementwise",
)

WINDOWED = [
    "model.window=5",
    "model.global_every=2",
    "model.attention_cap=0.5",
    "model.num_kv_heads=2",
    "model.nope_every=4",
]
WINDOWED += ["model.window_schedule=[[1,2],[2,3]]", SINKS, HEADWISE, "model.window_rope_theta=30"]
# four microbatches: two for each data rank, one for each stage of a pipeline
FEW = "train.global_batch_size=16"


@pytest.fixture(scope="module")
def workers() -> Iterator[ProofWorkers]:
    with provers() as workers:
        yield workers


@pytest.mark.parametrize(
    ("layouts", "overrides"),
    [
        ("one,tp2sp,pp2,cp2", [*NEOX, SINKS]),
        (
            "tp2pp2dp2",
            [
                "model.branches=shared_norm",
                "model.activation=relu2",
                "model.zero_init=true",
                "model.embedding_norm=true",
                BIASED,
            ],
        ),
        (
            "tp2sp,dp2",
            [
                "model.norm_place=both",
                "model.norm_offset=true",
                "model.activation=geglu",
                "model.nope_every=2",
                "model.dropout=0.1",
            ],
        ),
        (
            "tp2pp2dp2,tp2pp2sp@zb_v",
            [
                ELEMENTWISE,
                "model.norm_place=post",
                "model.activation=geglu_erf",
                "model.embedding_norm=true",
                "train.recompute=selective",
            ],
        ),
        ("one,tp2sp,cp2,cp4", [*WINDOWED, "parallel.context_method=gather"]),
        ("cp2,cp2pp2", [*WINDOWED, "parallel.context_method=ring", "data.document_mask=true"]),
        ("cp2,pp2,dp2", [*WINDOWED, "parallel.context_method=ulysses", "train.recompute=selective"]),
        (
            "tp2sp,tp2pp2",
            ["model.z_loss=0.05", "model.chunked_loss=true", "model.qk_norm=true", "model.qk_norm_heads=all"],
        ),
        (
            "tp2pp2dp2,cp4",
            ["model.z_loss=0.05", *WINDOWED, "parallel.context_method=ring", "model.logit_cap=0.5"],
        ),
    ],
)
def test_equals_one_process(workers: ProofWorkers, layouts: str, overrides: list[str]) -> None:
    """A norm's partial gradient that nobody sums, or a block that has another one's
    positions, would train on, worse.
    """
    proof = prove(
        Options(TINY, [FEW, *overrides], [parse(name) for name in layouts.split(",")]), workers=workers
    )
    assert proof.holds, [(r.layout.name, r.failure, r.impossible, r.beyond[:1]) for r in proof.results]
    assert max(d.relative for result in proof.results for d in result.differences.values()) < 1e-9
