"""launch/verify.py as a researcher meets it: a model of one's own, a mistake in it, two
versions of the code.
"""

import contextlib
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from megacore.errors import ConfigError
from megacore.files import ROOT
from megacore.tools.verify.layouts import parse
from megacore.tools.verify.proof_report import explain, verdict
from megacore.tools.verify.run import Options, Proof, prove
from megacore.tools.verify.shrink import load_whole, shrink
from megacore.tools.verify.workers import ProofWorkers
from tests import forks
from tests.commands import provers, run_script

TINY = str(ROOT / "configs/gpt_tiny.json")
# four microbatches: two for each data rank, one for each stage of a pipeline
FEW = "train.global_batch_size=16"


@pytest.fixture(scope="module")
def workers() -> Iterator[ProofWorkers]:
    with provers() as workers:
        yield workers


def edit(path: Path, before: str, after: str) -> None:
    text = path.read_text()
    assert text.count(before) == 1
    path.write_text(text.replace(before, after))


def of_source(path: Path, workers: ProofWorkers, layouts: str, *overrides: str) -> Proof:
    return prove(
        Options(TINY, [f"model.source={path}", FEW, *overrides], list(map(parse, layouts.split(",")))),
        workers=workers,
    )


@pytest.mark.quick
def test_the_documented_model_is_proved(tmp_path: Path, workers: ProofWorkers) -> None:
    """A window that shrinking loses would leave plain attention, which is equal too:
    the case's config must have it.
    """
    path = forks.written(tmp_path)
    assert (
        shrink(load_whole(TINY, [f"model.source={path}", "model.window=3"]), [parse("tp2")], 3, "fp64")[
            "model"
        ]["window"]
        == 3
    )
    for layouts, overrides in (
        ("tp2sp,pp2,cp2", ("model.window=3",)),
        ("cp2tp2", ("data.document_mask=true", "model.window=3", "model.dropout=0.1")),
        ("dp2", ("engine.kind=fsdp",)),
        ("dp2", ("engine.shard_optimizer=true", "train.recompute=full")),
    ):
        proof = of_source(path, workers, layouts, *overrides)
        assert proof.holds and "blocks.1.feed_forward.up.weight" in proof.names, layouts
        assert max(d.relative for result in proof.results for d in result.differences.values()) < 1e-12


NO_SUM = ("self.down(F.relu(self.up(x)).square())", "F.linear(F.relu(self.up(x)).square(), self.down.weight)")
OWN_TOKENS = ("Norm(config.model, mesh.tp, sequence,", "Norm(config.model, mesh.tp, False,")
NO_PLACEMENT = [
    (
        "self.index = index",
        "self.index, self.scale = index, new_parameter(Shard((config.model.hidden_size,), fill=1.0), "
        "dtype, device)",
    ),
    ("x = context.add(x, self.att", "x = context.add(self.scale * x, self.att"),
    ("class Settings", "from megacore.distributed.shard import Shard, new_parameter\n\n\nclass Settings"),
]
MISTAKES = {
    "no sum over tensor ranks": (
        [NO_SUM],
        "tp2",
        "tp2 parts first in module blocks.0.feed_forward, its output, microbatch 0, forward",
    ),
    "a norm of some tokens": (
        [OWN_TOKENS],
        "tp2sp",
        "tp2sp parts first in module blocks.3.norm2, gradient of its weight, microbatch 0",
    ),
    "no placement": (
        NO_PLACEMENT,
        "tp2sp",
        "tp2sp parts first in module blocks.3, gradient of its scale, microbatch 0, backward",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_a_source_is_found_by_name(mistake: str, tmp_path: Path, workers: ProofWorkers) -> None:
    edits, layout, line = MISTAKES[mistake]
    proof = of_source(forks.written(tmp_path, *edits), workers, layout)
    assert not proof.holds and next(iter(explain(proof.results[0]))).startswith(line), list(
        explain(proof.results[0])
    )


# A block with a gate within it, whose buffer is made and used as a case says.
GATED = """
import torch
from torch import nn
from megacore.model.block import Block as Usual


class Gate(nn.Module):
    def __init__(self):
        super().__init__()
        MAKE

    def forward(self, x):
        UPDATE
        return x * (1.0 + 0.01 * self.seen.to(x))


class Block(Usual):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.gate = Gate()

    def forward(self, x, context):
        return self.gate(super().forward(x, context))
"""
CONSTANT = 'self.register_buffer("seen", torch.tensor(VALUE), persistent=False)'
LATE = 'hasattr(self, "seen") or self.register_buffer("seen", torch.tensor(1), persistent=PERSISTENT)'
BUFFERS = {
    "constant": (CONSTANT.replace("VALUE", "1.0"), "pass", ""),
    "number": (
        CONSTANT.replace("VALUE", "1.0"),
        "self.seen = self.seen + 1.0",
        "changes while the model runs",
    ),
    "in place": (CONSTANT.replace("VALUE", "1"), "self.seen.add_(1)", "changes while the model runs"),
    "flag": (
        CONSTANT.replace("VALUE", "False"),
        "self.seen = ~self.seen | True",
        "changes while the model runs",
    ),
    "in validation": (
        CONSTANT.replace("VALUE", "1"),
        "self.seen = self.seen + (not self.training)",
        "changes while the model runs",
    ),
    "made late, constant": ("pass", LATE.replace("PERSISTENT", "False"), ""),
    "made late, persistent": ("pass", LATE.replace("PERSISTENT", "True"), "which no checkpoint saves"),
}


@pytest.mark.parametrize("case", BUFFERS)
def test_a_buffer_that_is_lost_is_no_constant(case: str, tmp_path: Path, workers: ProofWorkers) -> None:
    """No checkpoint has what a module keeps there: a resumed run would begin with other numbers."""
    make, update, wrong = BUFFERS[case]
    path = tmp_path / "gated.py"
    path.write_text(GATED.replace("MAKE", make).replace("UPDATE", update))
    if wrong:
        with pytest.raises(
            ConfigError, match=rf"model.source: .*the torch buffer blocks.0.gate.seen.*{wrong}"
        ):
            of_source(path, workers, "one")
    else:
        assert of_source(path, workers, "pp2").holds


CALLBACKS = """
import torch
from megacore.model.block import Block
from megacore.train.callbacks import Callback


class Watcher(Callback):
    def on_built(self, step):
        self.parameters = [p for stage in step.stages for p in stage.parameters()]
        BUILT

    @torch.no_grad()
    def metrics(self, metrics, stages):
        FIGURES

    @torch.no_grad()
    def on_log(self, report):
        REPORT


CALLBACKS = [Watcher]
"""
READS = {
    "BUILT": "pass",
    "FIGURES": "return {'mean': float(self.parameters[0].mean())}",
    "REPORT": "assert report.metrics['loss'] > 0",
}
CHANGES = {
    "weights": {"FIGURES": "self.parameters[-1].mul_(0.5); return {}"},
    "weights, at a report": {"REPORT": "self.parameters[-1].mul_(0.5)"},
    "gradients": {"BUILT": "self.parameters[-1].register_hook(lambda gradient: 2 * gradient)"},
}


def watched(folder: Path, changes: dict[str, str]) -> Path:
    text = CALLBACKS
    for word, line in (READS | changes).items():
        text = text.replace(word + "\n", line + "\n")
    (folder / "watched.py").write_text(text)
    return folder / "watched.py"


def test_callbacks_that_read_are_named_and_change_nothing(tmp_path: Path, workers: ProofWorkers) -> None:
    """They run as in training; a proof that left them out could not be one of the run."""
    path = watched(tmp_path, {})
    proof = of_source(path, workers, "pp2")
    assert proof.holds
    assert verdict(proof).endswith(f"; CALLBACKS of {path} (Watcher) ran in each layout and changed nothing")


def readme_model(folder: Path) -> Path:
    """Write the README's model into a file."""
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    [text] = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len([line for line in text.splitlines() if line]) <= 12
    path = folder / "my_model.py"
    path.write_text(text, encoding="utf-8")
    return path


def test_the_readmes_model_is_proved(tmp_path: Path, workers: ProofWorkers) -> None:
    """The first thing that a researcher copies would be wrong; verify must find a mistake in it."""
    path = readme_model(tmp_path)
    proof = of_source(path, workers, "tp2sp,pp2")
    assert proof.holds, verdict(proof)

    edit(path, '"sequence": config.parallel.sequence', '"sequence": False')
    proof = of_source(path, workers, "tp2,tp2sp")
    assert not proof.holds and "NOT EQUAL: tp2sp (1 of 2 layouts equal)" in verdict(proof)


@pytest.mark.parametrize("case", CHANGES)
def test_a_callback_that_changes_the_model_is_a_difference(
    case: str, tmp_path: Path, workers: ProofWorkers
) -> None:
    """What it changes in a run nothing else would tell."""
    path = watched(tmp_path, CHANGES[case])
    proof = of_source(path, workers, "one")
    assert not proof.holds
    assert f"NOT EQUAL: one (0 of 1 layouts equal); CALLBACKS of {path} (Watcher)" in verdict(proof)


def test_the_script_says_what_it_found(tmp_path: Path) -> None:
    wrong = forks.written(tmp_path, OWN_TOKENS)
    done = run_script("launch/verify.py", "--config", TINY, f"model.source={wrong}", "--layouts", "tp2,tp2sp")
    assert done.returncode == 1 and "NOT EQUAL: tp2sp (1 of 2 layouts equal)" in done.stdout, (
        done.stdout + done.stderr
    )


def test_two_versions_of_the_code_are_compared(tmp_path: Path, workers: ProofWorkers) -> None:
    fork = tmp_path / "fork"
    for name in ("megacore", "kernels", "configs", "launch"):
        shutil.copytree(ROOT / name, fork / name, ignore=shutil.ignore_patterns("__pycache__"))
    options = Options(TINY, [FEW], [parse("tp2")], against=fork)
    proof = prove(options, workers=workers)
    assert proof.holds and verdict(proof).endswith("bitwise")
    attention = fork / "megacore/model/attention.py"
    edit(
        attention,
        "        return self.attend(q, k, v)\n\n",
        "        return self.attend(q, k * 1.001, v)\n\n",
    )
    proof = prove(replace(options, layouts=[parse("one")]), workers=workers)
    assert not proof.holds and "module blocks.0.attention.output, its input" in next(
        iter(explain(proof.results[0]))
    )


def bf16(workers: ProofWorkers, plant: str | None) -> Proof:
    return prove(
        Options(TINY, ["model.bias=true", FEW], [parse("tp2sp")], precision="bf16", plant=plant),
        workers=workers,
    )


def test_bf16_is_held_to_what_bf16_explains(workers: ProofWorkers) -> None:
    """Its differences are above 1e-3, so that a fixed bound would pass the mistakes too."""
    proof = bf16(workers, None)
    assert proof.holds and max(d.relative for d in proof.results[0].differences.values()) > 1e-3
    assert not bf16(workers, "tests.faults.tensor:partial_gradients_unsummed").holds
    assert not bf16(workers, "tests.faults.tensor:bias_added_on_every_rank").holds


def test_a_plain_version_of_an_operation_is_compared(tmp_path: Path, workers: ProofWorkers) -> None:
    """The reference shares a fork's code: a mistake in chunks of a recurrence would be on both
    sides, but for the method beside it.
    """
    hybrid, wrong = ROOT / "configs/forks/hybrid.json", tmp_path / "hybrid.py"
    wrong.write_text(
        hybrid.with_suffix(".py")
        .read_text()
        .replace("* decay[..., -1:, :].mT).mT", "* decay[..., -1:, :].mT).mT * 1.001")
    )
    options = Options(str(hybrid), ["model.chunk=4", "model.num_layers=2"], [parse("one")])
    assert prove(options, workers=workers).holds
    assert not prove(
        replace(options, overrides=[*options.overrides, f"model.source={wrong}"]), workers=workers
    ).holds


@contextlib.contextmanager
def muon_moves_too_far() -> Iterator[None]:
    """Muon's update is a fifth too large."""
    from megacore.optimizers import muon

    right = muon.orthogonalised
    with mock.patch.object(muon, "orthogonalised", lambda x, steps, dtype: 1.2 * right(x, steps, dtype)):
        yield


def test_bf16_of_rules_for_matrices(workers: ProofWorkers) -> None:
    """Muon's own products in bf16 are no mistake, and hide none that is larger; of SOAP it is said
    what nobody can compute again.
    """
    muon = Options(TINY, ["optim.kind=muon", "model.num_layers=2"], [parse("one")], precision="bf16")
    assert (proof := prove(muon, workers=workers)).holds and verdict(proof).startswith("EQUAL")
    wrong = prove(replace(muon, plant="tests.distributed.test_verify:muon_moves_too_far"), workers=workers)
    assert not wrong.holds and any(found.kind == "own parameter" for found in wrong.results[0].beyond)
    soap = prove(replace(muon, overrides=["optim.kind=soap", "model.num_layers=2"]), workers=workers)
    assert (
        "NOT PROVED, because not computed again: the updates and bases of" in verdict(soap)
        and not soap.undirected
    )


@contextlib.contextmanager
def second_rank_raises() -> Iterator[None]:
    """A shape that is wrong on one rank only."""
    from megacore.model.block import Block

    forward = Block.forward

    def wrong(self: Block, x, context):  # type: ignore[no-untyped-def]
        return forward(self, x.view(3, -1, 5) if context.group.rank == 1 else x, context)

    with mock.patch.object(Block, "forward", wrong):
        yield


@contextlib.contextmanager
def nothing_is_a_number() -> Iterator[None]:
    """On one process too, whose error is what bf16 is held against."""
    from megacore.model.block import Block

    forward = Block.forward
    with mock.patch.object(
        Block, "forward", lambda self, x, context: forward(self, x, context) * float("nan")
    ):
        yield


@contextlib.contextmanager
def with_parameters_of_other_kinds() -> Iterator[None]:
    """A block with a scalar that it applies to its own tokens, and with a vector that nothing depends on."""
    from megacore.distributed.shard import Shard, new_parameter, replicated
    from megacore.model.block import Block

    init, forward = Block.__init__, Block.forward

    def more(self, index, config, mesh, dtype, device):  # type: ignore[no-untyped-def]
        init(self, index, config, mesh, dtype, device)
        along = (replicated(mesh.tp, partial=config.parallel.sequence),)
        self.gate = new_parameter(Shard((), along, fill=1.0), dtype, device)
        self.unused = new_parameter(Shard((5,), (replicated(mesh.tp),)), dtype, device)

    gated = mock.patch.object(
        Block, "forward", lambda self, x, context: forward(self, x, context) * self.gate
    )
    with mock.patch.object(Block, "__init__", more), gated:
        yield


def test_what_is_not_a_number_is_not_explained(workers: ProofWorkers) -> None:
    assert not bf16(workers, f"{__name__}:nothing_is_a_number").holds


def test_scalars_and_unused_parameters_are_proved(workers: ProofWorkers) -> None:
    proof = prove(
        Options(TINY, [], [parse("tp2sp")], plant=f"{__name__}:with_parameters_of_other_kinds"),
        workers=workers,
    )
    assert proof.holds and "blocks.1.gate" in proof.names and "blocks.1.unused" in proof.names


def test_a_plant_that_is_not_there_is_the_user_s_mistake(workers: ProofWorkers) -> None:
    with pytest.raises(ConfigError, match="--plant: tests.faults.tensor:typo cannot be found"):
        prove(Options(TINY, [], [parse("one")], plant="tests.faults.tensor:typo"), workers=workers)


def test_a_rank_that_fails_is_named_with_its_reason(workers: ProofWorkers) -> None:
    """The others wait for it in vain: what they say must not hide the cause."""
    proof = prove(
        Options(TINY, [], [parse("tp2"), parse("one")], plant=f"{__name__}:second_rank_raises"),
        workers=workers,
    )
    assert not proof.holds and proof.results[1].equal
    (line,) = explain(proof.results[0])
    assert line.startswith("tp2 failed: rank 1: RuntimeError: shape '[3, -1, 5]' is invalid")
