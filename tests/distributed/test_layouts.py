"""Every layout trains as one process does: losses and norms of six steps within 1e-5
(tests/faults: that mistakes would show).
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import training

# fp32 rounds each sum to 6e-8; a layout only changes the order of sums, and the steps let differences grow
# about tenfold.
TOLERANCE = 1e-5
STEPS = 6

LAYOUTS = {
    "tp2": ["parallel.tensor=2"],
    "tp4": ["parallel.tensor=4"],
    "pp2": ["parallel.pipeline=2"],
    "pp4": ["parallel.pipeline=4"],
    "dp2": ["parallel.data=2"],
    "dp4": ["parallel.data=4"],
    "tp2pp2": ["parallel.tensor=2", "parallel.pipeline=2"],
    "tp2dp2": ["parallel.tensor=2", "parallel.data=2"],
    "pp2dp2": ["parallel.pipeline=2", "parallel.data=2"],
    "tp2pp2dp2": ["parallel.tensor=2", "parallel.pipeline=2", "parallel.data=2"],
}
WITH_SEQUENCE = {
    f"{name}sp": [*layout, "parallel.sequence=true"]
    for name, layout in LAYOUTS.items()
    if name.startswith("tp")
}

MODELS = {
    "gpt2": [],  # learned positions, layernorm, gelu, biases, tied embeddings
    "llama": [
        "model.position=rope",
        "model.norm=rmsnorm",
        "model.activation=swiglu",
        "model.bias=false",
        "model.tie_embeddings=false",
    ],
}

QK_NORM = [
    *MODELS["llama"],
    "model.qk_norm=true",
    "model.head_size=12",
    "model.num_kv_heads=2",
    "model.qkv_bias=true",
    "model.attention_scale=0.2",
    "model.embedding_scale=3",
    "model.residual_scale=0.4",
    "model.logit_scale=0.5",
    'model.rope_scaling={"type":"linear","factor":2}',
]


def world(layout: list[str]) -> int:
    """Ranks of a layout: the product of its sizes."""
    product = 1
    for override in layout:
        value = override.split("=")[1]
        product *= int(value) if value.isdigit() else 1
    return product


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    schedule = training.BASE["optim"] | {"warmup_steps": 1}
    training.write_config(
        folder, training.write_corpus(folder), train=training.BASE["train"] | {"steps": STEPS}, optim=schedule
    )
    return folder


@pytest.fixture(scope="module")
def train(pool: Any, corpus: Path) -> Iterator[Callable[..., list[tuple[float, float]]]]:
    """`train(overrides, world)`: (loss, gradient norm) of every step.

    A run of one process is kept and reused.
    """
    runs: dict[tuple[str, ...], list[tuple[float, float]]] = {}

    def run(overrides: list[str], world: int = 1) -> list[tuple[float, float]]:
        key = tuple(overrides)
        if world > 1 or key not in runs:
            log_dir = str(corpus / f"run{len(list(corpus.iterdir()))}")
            assert (
                pool.run(world, training.run_rank, str(corpus / "config.json"), overrides, log_dir)
                == [0] * world
            )
            result = [(m["loss"], m["grad_norm"]) for m in training.metrics(log_dir)]
            assert len(result) == STEPS
            if world > 1:
                return result
            runs[key] = result
        return runs[key]

    yield run


def difference(a: list[tuple[float, float]], b: list[tuple[float, float]]) -> float:
    """The largest relative difference of any loss or norm."""
    return max(abs(x - y) / abs(y) for p, q in zip(a, b, strict=True) for x, y in zip(p, q, strict=True))


# Two tensor ranks or data ranks alone are in tests/distributed/test_faults.py, all with two stages in
# test_schedules.py, to 1e-9.
WIDE = ("tp4", "tp4sp", "dp4", "tp2dp2", "tp2dp2sp", "tp2pp2dp2", "tp2pp2dp2sp")
EVERYTHING = pytest.param("tp2pp2dp2sp", "llama", marks=pytest.mark.quick)


@pytest.mark.parametrize(
    ("layout", "model"),
    # The second model where there is most of an axis, and where all combine.
    [*((layout, "gpt2") for layout in WIDE), ("tp4sp", "llama"), ("pp4", "llama"), EVERYTHING],
)
def test_layout_equals_one_process(train: Callable[..., Any], layout: str, model: str) -> None:
    overrides = (LAYOUTS | WITH_SEQUENCE)[layout]
    alone = train(MODELS[model])
    assert alone[-1][0] < 0.98 * alone[0][0], "the model learns nothing, so equal losses would prove nothing"
    assert difference(train(MODELS[model] + overrides, world(overrides)), alone) < TOLERANCE


@pytest.mark.parametrize(
    ("name", "model", "layout"),
    [
        ("fewer microbatches than stages", ["train.global_batch_size=4"], "pp4"),
        ("gpipe", ["parallel.schedule=gpipe"], "tp2pp2"),
        ("grouped queries", ["model.num_kv_heads=2", "model.position=rope"], "tp2pp2"),
        ("untied, learned positions", ["model.tie_embeddings=false"], "tp2pp2dp2sp"),
        ("tied, rotary, swiglu with biases", ["model.position=rope", "model.activation=swiglu"], "tp2pp2sp"),
        ("dropout: masks do not depend on the layout", ["model.dropout=0.2"], "tp2pp2dp2sp"),
        ("full recomputation, with dropout", ["model.dropout=0.2", "train.recompute=full"], "tp2pp2sp"),
        ("query-key norm of wide heads, biases before it, scales", QK_NORM, "tp2pp2"),
        (
            "the same, recomputed from split tokens",
            [*QK_NORM, "train.recompute=selective", "model.attention=eager"],
            "tp2pp2sp",
        ),
        ("selective recomputation", ["train.recompute=selective", "model.attention=eager"], "tp2pp2"),
        ("small buckets: many reductions in flight", ["engine.bucket_mib=0.001"], "tp2dp2sp"),
        ("sharded optimizer", ["engine.shard_optimizer=true", "engine.bucket_mib=0.02"], "tp2pp2dp2sp"),
    ],
)
def test_feature_equals_one_process(
    train: Callable[..., Any], name: str, model: list[str], layout: str
) -> None:
    overrides = (LAYOUTS | WITH_SEQUENCE)[layout]
    without = [
        o for o in model if not o.startswith(("parallel", "engine", "train.recompute", "model.attention="))
    ]
    assert difference(train(model + overrides, world(overrides)), train(without)) < TOLERANCE
