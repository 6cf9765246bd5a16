"""`train.compile`: all blocks are one graph, in every layout, and the run is the one that is not compiled."""

from pathlib import Path
from typing import Any

import pytest

from megacore.distributed import collectives as comm
from tests import training
from tests.compiling import compiled_rank

LLAMA = [
    "model.norm=rmsnorm",
    "model.activation=swiglu",
    "model.position=rope",
    "model.num_kv_heads=2",
    "model.qk_norm=true",
    "model.bias=false",
]
TENSOR, SEQUENCE = ["parallel.tensor=2"], ["parallel.tensor=2", "parallel.sequence=true"]
SELECTIVE = ["train.recompute=selective", "model.attention=eager"]
CASES: dict[str, tuple[int, list[str]]] = {
    "one process, bf16, query-key norm": (1, [*LLAMA, "train.precision=bf16"]),
    "one process, selective": (1, [*LLAMA, *SELECTIVE]),
    "tensor": (2, TENSOR),
    "tensor, bf16, full": (2, [*TENSOR, *LLAMA, "train.precision=bf16", "train.recompute=full"]),
    "sequence, selective": (2, [*SEQUENCE, *SELECTIVE]),
    "pipeline": (2, ["parallel.pipeline=2"]),
}
TOLERANCE = {"fp32": 2e-6, "bf16": 5e-3}  # a compiled block rounds fewer intermediate results to bf16


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("compile")
    prefix = training.write_corpus(folder, tokens=1200)
    train = {"steps": 3, "eval_every": 2, "eval_batches": 1}
    return training.write_config(
        folder, prefix, train=training.BASE["train"] | train, data={"train": prefix, "valid": prefix}
    )


@pytest.mark.parametrize("case", CASES)
def test_blocks_are_one_graph_in_training_and_one_in_validation(
    pool: Any, config: str, tmp_path: Path, case: str
) -> None:
    """A graph a block would compile for minutes where a model is deep; one that ends at a
    collective fuses nothing around it.
    """
    world, overrides = CASES[case]
    assert pool.run(world, compiled_rank, config, overrides, str(tmp_path / "compiled")) == [(2, [])] * world
    assert pool.run(world, training.run_rank, config, overrides, str(tmp_path / "plain")) == [0] * world
    precision = "bf16" if "train.precision=bf16" in overrides else "fp32"
    assert (
        training.difference(training.figures(tmp_path / "compiled"), training.figures(tmp_path / "plain"))
        < TOLERANCE[precision]
    )


def test_windows_that_grow_compile_nothing_again(pool: Any, config: str, tmp_path: Path) -> None:
    """A window in a graph would compile every block anew wherever it grows."""
    plain = ["model.num_layers=2", "data.valid=null", "model.window=4"]
    grown = [
        *plain,
        "model.window_schedule=[[1,2],[2,3]]",
        "model.attention_sinks=true",
        "model.attention_gate=headwise",
    ]
    (found,) = pool.run(1, compiled_rank, config, grown, str(tmp_path / "grown"))
    assert found == pool.run(1, compiled_rank, config, plain, str(tmp_path / "plain"))[0]
    assert training.figures(tmp_path / "grown") != training.figures(tmp_path / "plain")


MIXTURE = [
    *LLAMA,
    "model.num_experts=4",
    "model.expert_ffn_size=16",
    "model.shared_experts=1",
    "model.first_dense=1",
    "model.router_balance=sequence",
    "model.router_bias_rate=0.01",
    "model.router_z_loss=0.01",
]


@pytest.mark.parametrize(
    "case",
    [
        "parallel.expert=2 train.recompute=full",
        "parallel.tensor=2 parallel.sequence=true model.capacity_factor=1",
    ],
)
def test_experts_stand_between_graphs(pool: Any, config: str, tmp_path: Path, case: str) -> None:
    """A block with experts is graphs around its mixture, alike for all such blocks,
    however many tokens an expert has.
    """
    overrides = [*MIXTURE, "data.valid=null", *case.split()]
    found = pool.run(2, compiled_rank, config, overrides, str(tmp_path / "compiled"))
    assert all(graphs == 3 and len(reasons) == 1 and "disable" in reasons[0] for graphs, reasons in found)
    assert pool.run(2, training.run_rank, config, overrides, str(tmp_path / "plain")) == [0, 0]
    assert (
        training.difference(training.figures(tmp_path / "compiled"), training.figures(tmp_path / "plain"))
        < TOLERANCE["fp32"]
    )


def summed_twice(config: str, overrides: list[str], log_dir: str) -> tuple[int, list[str]]:
    """A rank's compiled run in which the collective of a compiled block's way out is done twice."""
    all_reduce = comm.all_reduce
    comm.all_reduce = lambda x, group, *op: all_reduce(all_reduce(x, group, *op), group, *op)
    try:
        return compiled_rank(config, overrides, log_dir)
    finally:
        comm.all_reduce = all_reduce


def test_a_wrong_sum_in_a_compiled_block_is_noticed(pool: Any, config: str, tmp_path: Path) -> None:
    """The planted fault: what the comparison above is there for."""
    pool.run(2, summed_twice, config, [*TENSOR, "train.steps=1"], str(tmp_path / "compiled"))
    pool.run(2, training.run_rank, config, [*TENSOR, "train.steps=1"], str(tmp_path / "plain"))
    assert (
        training.difference(training.figures(tmp_path / "compiled"), training.figures(tmp_path / "plain"))
        > 1e-3
    )


def test_context_ranks_attend_between_graphs(pool: Any, config: str, tmp_path: Path) -> None:
    """A block is four graphs around attention in parts, alike for all blocks, microbatches and documents.

    Compiled for one microbatch's parts, it would be compiled again for each, or attend within the last one's
    documents.
    """
    prefix = training.write_corpus(tmp_path, tokens=160)  # documents of 20 tokens, in samples of 16
    short = ["model.num_layers=2", "train.steps=2", f"data.train={prefix}", "data.valid=null"]
    documents = ["data.document_mask=true", *short]
    assert pool.run(1, training.run_rank, config, documents, str(tmp_path / "one")) == [0]
    for method in ("gather", "ring", "ulysses"):
        context = ["parallel.context=2", f"parallel.context_method={method}", *documents]
        found = pool.run(2, compiled_rank, config, context, str(tmp_path / method))
        assert [graphs for graphs, _ in found] == [4, 4] and all(
            len(reasons) == 1 and "disable" in reasons[0] for _, reasons in found
        )
        assert (
            training.difference(training.figures(tmp_path / method), training.figures(tmp_path / "one"))
            < TOLERANCE["fp32"]
        )
    assert pool.run(1, training.run_rank, config, short, str(tmp_path / "without")) == [0]
    assert (
        training.difference(training.figures(tmp_path / "without"), training.figures(tmp_path / "one")) > 1e-3
    )
