"""Modules by their own code are equal to the untouched module; the whole table is
benchmarks/results/plain_modules.md.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from megacore.tools.verify.layouts import parse
from megacore.tools.verify.proof_report import verdict
from megacore.tools.verify.run import Options, prove
from megacore.tools.verify.workers import ProofWorkers
from tests.commands import provers
from tests.plain_modules import EXAMPLE, write_folder

pytest.importorskip("transformers", reason="transformers is not installed: pip install -e '.[test]'")

DOCUMENTS = ("data.document_mask=true", "train.recompute=full", "parallel.context_method=ulysses")
CASES: dict[str, tuple[str, ...]] = {
    "tp2sp,pp2": (),
    "cp2": DOCUMENTS,
    "dp2": ("engine.kind=fsdp",),
}


@pytest.fixture(scope="module")
def workers() -> Iterator[ProofWorkers]:
    with provers() as workers:
        yield workers


@pytest.mark.parametrize("layouts", CASES)
@pytest.mark.parametrize("kind", ["llama", "mixtral", "plain_gpt"])
def test_every_layout_is_equal_to_the_untouched_module(
    kind: str, layouts: str, tmp_path: Path, workers: ProofWorkers
) -> None:
    """Whatever a table leaves out (a reduction, a division of heads, a position) is another model there."""
    if kind == "plain_gpt":
        path, model = EXAMPLE.with_suffix(".json"), []
    else:
        path, model = tmp_path / "config.json", [f"model.hf={write_folder(tmp_path, kind)}"]
        path.write_text('{"train": {"seq_len": 32, "micro_batch_size": 2, "global_batch_size": 8}}')
    overrides = [*model, *CASES[layouts]]
    proof = prove(
        Options(str(path), overrides, [parse(name) for name in layouts.split(",")]), workers=workers
    )
    assert proof.holds, verdict(proof)
    assert verdict(proof).startswith("EQUAL to the untouched module in fp64")


def test_bf16_costs_what_its_rounding_explains(workers: ProofWorkers) -> None:
    """First weights that a module draws are rounded like all others, before layouts and reference start."""
    options = Options(str(EXAMPLE.with_suffix(".json")), [], [parse("tp2sp")], "bf16")
    proof = prove(options, workers=workers)
    assert proof.holds, verdict(proof)
