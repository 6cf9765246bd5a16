"""launch/verify.py as a researcher meets it: a fork with a block of its own, a mistake in it, two versions of the code."""

import contextlib
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from megacore.errors import ConfigError
from megacore.files import ROOT
from megacore.tools.verify.layouts import parse
from megacore.tools.verify.proof_report import explain, verdict
from megacore.tools.verify.run import Options, Proof, prove
from megacore.tools.verify.workers import ProofWorkers
from tests.commands import provers

TINY = str(ROOT / "configs/gpt_tiny.json")


@pytest.fixture(scope="module")
def workers() -> Iterator[ProofWorkers]:
    with provers() as workers:
        yield workers


@pytest.fixture(scope="module")
def fork(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project with the block of docs/blocks.md added as that document says."""
    fork = tmp_path_factory.mktemp("fork")
    for name in ("megacore", "kernels", "configs", "launch"):
        shutil.copytree(ROOT / name, fork / name, ignore=shutil.ignore_patterns("__pycache__"))
    document = (ROOT / "docs/blocks.md").read_text(encoding="utf-8")
    code = re.search(r"```python\n# (megacore/model/\S+)\n(.*?)```", document, re.DOTALL)
    assert code is not None and len(code[2].splitlines()) < 30
    (fork / code[1]).write_text(code[2])
    for path, before, after in re.findall(r"^\| `(\S+\.py)` \| `(.+?)` \| `(.+?)` \|$", document, re.MULTILINE):
        text = (fork / path).read_text()
        assert text.count(before) == 1, (path, before)
        (fork / path).write_text(text.replace(before, after))
    return fork


def run(fork: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(fork / "launch/verify.py"), "--config", "configs/gpt_tiny.json", "model.block=parallel", *arguments]
    return subprocess.run(command, cwd=fork, capture_output=True, text=True, timeout=300)


def edit(path: Path, before: str, after: str) -> None:
    text = path.read_text()
    assert text.count(before) == 1
    path.write_text(text.replace(before, after))


def test_the_documented_block_is_proved_and_a_mistake_in_it_is_found_by_name(fork: Path) -> None:
    done = run(fork, "--layouts", "tp2sp,tp2pp2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "EQUAL to one process in fp64" in done.stdout and "blocks.1.feed_forward.up.weight" in done.stdout

    (block,) = (fork / "megacore/model").glob("parallel*.py")
    right = block.read_text()
    edit(block, "config.parallel.sequence", "False")  # each rank's norm then keeps the gradient of its own tokens
    done = run(fork, "--layouts", "tp2,tp2sp")
    assert done.returncode == 1 and "NOT EQUAL: tp2sp (1 of 2 layouts equal)" in done.stdout, done.stdout + done.stderr
    assert "tp2sp parts first in module blocks.3.norm, gradient of its weight, microbatch 0, backward, step 1" in done.stdout

    block.write_text(right)
    edit(block, "self.feed_forward(h)", "(1 + context.group.rank) * self.feed_forward(h)")
    done = run(fork, "--layouts", "tp2")
    block.write_text(right)
    assert done.returncode == 1
    assert "parts first in module blocks.0, its output, microbatch 0, forward, step 1" in done.stdout, done.stdout
    assert "before it, module blocks.0.feed_forward, its output, microbatch 0, forward still agrees" in done.stdout


def test_two_versions_of_the_code_are_compared(fork: Path, workers: ProofWorkers) -> None:
    options = Options(TINY, [], [parse("tp2")], against=fork)
    proof = prove(options, workers=workers)
    assert proof.holds and verdict(proof).endswith("bitwise")
    attention = fork / "megacore/model/attention.py"
    edit(attention, "self.attend(q, k, v)\n        return", "self.attend(q, k * 1.001, v)\n        return")
    proof = prove(options, workers=workers)
    assert not proof.holds and "module blocks.0.attention.output, its input" in next(iter(explain(proof.results[0])))


def bf16(workers: ProofWorkers, plant: str | None) -> Proof:
    return prove(Options(TINY, ["model.bias=true"], [parse("tp2sp")], precision="bf16", plant=plant), workers=workers)


def test_bf16_is_held_to_what_bf16_explains(workers: ProofWorkers) -> None:
    """Its differences are above 1e-3, so that a fixed bound would pass the mistakes too."""
    proof = bf16(workers, None)
    assert proof.holds and max(d.relative for d in proof.results[0].differences.values()) > 1e-3
    assert not bf16(workers, "tests.faults.tensor:partial_gradients_unsummed").holds
    assert not bf16(workers, "tests.faults.tensor:bias_added_on_every_rank").holds


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
    with mock.patch.object(Block, "forward", lambda self, x, context: forward(self, x, context) * float("nan")):
        yield


@contextlib.contextmanager
def with_parameters_of_other_kinds() -> Iterator[None]:
    """A block with a scalar that it applies to its own tokens, and with a vector that nothing depends on."""
    from megacore.distributed.shard import Shard, new_parameter, replicated
    from megacore.model.block import Block

    init, forward = Block.__init__, Block.forward

    def more(self, index, config, group, dtype, device):  # type: ignore[no-untyped-def]
        init(self, index, config, group, dtype, device)
        along = (replicated(group, partial=config.parallel.sequence),)
        self.gate = new_parameter(Shard((), along, fill=1.0), dtype, device)
        self.unused = new_parameter(Shard((5,), (replicated(group),)), dtype, device)

    gated = mock.patch.object(Block, "forward", lambda self, x, context: forward(self, x, context) * self.gate)
    with mock.patch.object(Block, "__init__", more), gated:
        yield


def test_what_is_not_a_number_is_not_explained(workers: ProofWorkers) -> None:
    assert not bf16(workers, f"{__name__}:nothing_is_a_number").holds


def test_scalars_and_unused_parameters_are_proved(workers: ProofWorkers) -> None:
    proof = prove(Options(TINY, [], [parse("tp2sp")], plant=f"{__name__}:with_parameters_of_other_kinds"), workers=workers)
    assert proof.holds and "blocks.1.gate" in proof.names and "blocks.1.unused" in proof.names


def test_a_plant_that_is_not_there_is_the_user_s_mistake(workers: ProofWorkers) -> None:
    with pytest.raises(ConfigError, match="--plant: tests.faults.tensor:typo cannot be found"):
        prove(Options(TINY, [], [parse("one")], plant="tests.faults.tensor:typo"), workers=workers)


def test_a_rank_that_fails_is_named_with_its_reason(workers: ProofWorkers) -> None:
    """The others wait for it in vain: what they say must not hide the cause."""
    proof = prove(Options(TINY, [], [parse("tp2"), parse("one")], plant=f"{__name__}:second_rank_raises"), workers=workers)
    assert not proof.holds and proof.results[1].equal
    (line,) = explain(proof.results[0])
    assert line.startswith("tp2 failed: rank 1: RuntimeError: shape '[3, -1, 5]' is invalid")
