"""Runs a fault, or the code as it is, through the check that must catch it."""

import contextlib
import io
import re
import tempfile
from collections import Counter
from pathlib import Path

from megacore.config.schema import MASK, TrainConfig
from megacore.data.samples import SampleStream
from megacore.files import ROOT
from megacore.pipeline.generators import build
from megacore.tools.schedules.validate import validate
from megacore.tools.verify.coverage import Epoch, Leg
from megacore.tools.verify.layouts import parse
from megacore.tools.verify.proof_report import explain
from megacore.tools.verify.run import Options, prove
from megacore.tools.verify.worker import planted
from tests import compressed_sums, training
from tests import plain as plain_training
from tests.build import run_of
from tests.commands import provers
from tests.faults import (
    FAULTS,
    Fault,
    compression,
    context,
    data,
    dispatch,
    experts,
    links,
    matrices,
    pipeline,
    plain,
    plans,
    precision,
    public,
    races,
    routers,
    split,
    structure,
    tensor,
    trainer,
)
from tests.pool import Pool
from tests.rollback import went_back
from tests.unit.test_experts import MODEL, other_than_plain

# The modules enter their faults as they are imported; here they are in one order, whichever module imports
# another.
FAULTS.sort(key=lambda fault: fault.plant.__module__)
__all__ = [
    "FAULTS",
    "Checks",
    "compression",
    "context",
    "data",
    "dispatch",
    "document",
    "experts",
    "links",
    "matrices",
    "pipeline",
    "plain",
    "plans",
    "precision",
    "public",
    "races",
    "routers",
    "split",
    "structure",
    "tensor",
    "trainer",
]

CONFIG, OVERRIDES = str(ROOT / "configs/gpt_tiny.json"), ("model.bias=true",)


class Checks:
    """Runs faults, or the code as it is, through the checks; processes are kept from one to the next."""

    def __init__(self) -> None:
        self.workers, self.pool = provers(), Pool()
        self.folder = tempfile.TemporaryDirectory()
        # a proof makes a corpus of its own; this one says that it is to have a mask
        Path(self.folder.name, f"corpus{MASK}").touch()

    def close(self) -> None:
        """Ends the processes."""
        self.workers.close()
        self.pool.close()
        self.folder.cleanup()

    def run(self, fault: Fault, *, as_it_is: bool = False) -> str:
        """What the fault's check says, figures left out; empty where it finds nothing wrong."""
        plant = None if as_it_is else fault.path
        if fault.check == "samples":
            with planted(plant):
                return epoch_read()
        if fault.check == "formula":
            path = training.write_config(
                Path(self.folder.name), "unused", model=MODEL, train={"precision": "fp64"}
            )
            with planted(plant):
                return other_than_plain(run_of(path, *fault.overrides))
        if fault.check == "plan":
            with planted(plant):
                return validated(fault)
        if fault.check == "resume":
            with tempfile.TemporaryDirectory() as folder:
                return self.resumed(fault, folder, plant)
        if fault.check == "sums":
            with tempfile.TemporaryDirectory() as folder:
                return self.summed(fault, compressed_sums.write_config(Path(folder)), plant)
        if fault.check == "rollback":
            with tempfile.TemporaryDirectory() as folder:
                return self.pool.run(1, went_back, folder, plant)[0]
        if fault.check == "trained":
            with tempfile.TemporaryDirectory() as folder:
                return self.pool.run(1, trained, folder, plant)[0]
        overrides = [override.replace("MASKED", f"{self.folder.name}/corpus") for override in fault.overrides]
        layout = parse(fault.layout)
        data, stages = layout.size("data"), layout.size("pipeline")
        # microbatches: two a data rank, one for each of its stages
        few = f"train.global_batch_size={4 * max(4, 2 * data, stages * data)}"
        options = Options(CONFIG, [*OVERRIDES, few, *overrides], [layout], fault.precision, plant=plant)
        proof = prove(options, workers=self.workers)
        if proof.holds:
            return ""
        first = next(iter(explain(proof.results[0])))
        for beginning in (f"{fault.layout} parts first in ", f"{fault.layout}: "):
            first = first.removeprefix(beginning)
        return re.sub(r", step \d+: .* off on .*", "", first)

    def resumed(self, fault: Fault, folder: str, plant: str | None) -> str:
        """A run of four steps, and one that goes on from its checkpoint of step 2: how
        they differ, in words.
        """
        path, (whole, second) = Path(folder), (f"{folder}/{name}" for name in ("whole", "second"))
        config = training.write_config(
            path, training.write_corpus(path), train={"steps": 4}, checkpoint={"every": 2, "keep": 3}
        )
        world, overrides = parse(fault.layout).world, list(fault.overrides)
        self.pool.run(world, run_quietly, config, overrides, whole, None)
        self.pool.run(
            world,
            run_quietly,
            config,
            [*overrides, f"checkpoint.resume={whole}/checkpoints/step_00000002"],
            second,
            plant,
        )
        expected, found = (training.metrics(run) for run in (whole, second))
        if [figures["step"] for figures in found] != [3, 4]:
            return f"steps {', '.join(str(figures['step']) for figures in found)} in place of 3, 4"
        for before, after in zip(expected[2:], found, strict=True):
            for name in ("loss", "grad_norm"):
                if before[name] != after[name]:
                    return f"another {name} in step {after['step']}"
        return ""

    def summed(self, fault: Fault, config: str, plant: str | None) -> str:
        """What is wrong with sums that travel compressed between the ranks of the fault's
        layout, each of which is a host.
        """
        world = parse(fault.layout).world
        found = self.pool.run(world, compressed_sums.sums_on_a_rank, config, list(fault.overrides), plant)
        try:
            compressed_sums.check_sums(found, world if compressed_sums.INT8 in fault.overrides else None)
        except AssertionError as error:
            return str(error).partition("\n")[0]
        return ""


def validated(fault: Fault) -> str:
    """What validation says of the plan of a fault's layout and schedule, for 8 microbatches."""
    try:
        validate(
            build(
                fault.overrides[0].removeprefix("parallel.schedule="), int(fault.layout.removeprefix("pp")), 8
            ),
            8,
        )
    except ValueError as error:
        return str(error)
    return ""


def epoch_read() -> str:
    """What is wrong with the samples that a run reads in an epoch, with four data ranks
    first and then with two; in words.
    """
    with tempfile.TemporaryDirectory() as folder:
        prefix = training.write_corpus(Path(folder))
        train = TrainConfig(seq_len=16, micro_batch_size=1, global_batch_size=8)
        found = Epoch(
            SampleStream(prefix, 16, 0, training.VOCAB_SIZE), 0, 0, [Leg(4, 1, 10), Leg(2, 11)], train
        ).check()
    kinds = {"left out": found.missing, "read again": found.repeated}
    return " and ".join(f"samples are {kind}" for kind, count in kinds.items() if count)


def run_quietly(config: str, overrides: list[str], log_dir: str, plant: str | None) -> None:
    """A rank's part of a run."""
    with contextlib.redirect_stdout(io.StringIO()), planted(plant):
        training.run_rank(config, overrides, log_dir)


def trained(folder: str, plant: str | None) -> str:
    """What launch/pretrain.py saves and logs, in two legs and with a step that is skipped: how it
    differs from plain code, in words.
    """
    with contextlib.redirect_stdout(io.StringIO()), planted(plant):
        return plain_training.in_two_legs(folder)


def document() -> str:
    """Return the text of tests/faults/README.md: the catalogue with what each check reports first."""
    counts = Counter(fault.check for fault in FAULTS)
    checks = [f"| {name} | {counts[name]} | {meaning} |" for name, meaning in CHECKS.items()]
    layouts = [f.layout if f.precision == "fp64" else f"{f.layout}, {f.precision}" for f in FAULTS]
    rows = [
        f"| {f.mistake} | {layout} | {f.check} | {f.found} |"
        for f, layout in zip(FAULTS, layouts, strict=True)
    ]
    return HEAD.format(total=len(FAULTS), checks="\n".join(checks)) + "\n".join(rows) + "\n"


CHECKS = {
    "verify": "the proof of `launch/verify.py`",
    "resume": "an interrupted run, compared bit by bit with an uninterrupted one",
    "rollback": "a run that rolls back around bad batches, compared bit by bit with one that starts there",
    "trained": "what `launch/pretrain.py` saves and logs, compared with plain code",
    "formula": "the plain formula of an MoE layer",
    "samples": "the proof of `launch/samples.py --prove`",
    "plan": "the validation of pipeline plans",
    "sums": "sums of random gradients, whose error must be explained by rounding",
}

HEAD = """# Planted faults

A proof is worth what it catches.
These are {total} mistakes that people make in parallel training.
Each one is planted alone in the running code, and a check must catch it.
The same checks must be silent on the code as it is.

```bash
python -m tests.faults column_gradient_unsummed
python launch/verify.py --config configs/gpt_tiny.json --layouts tp2 --plant tests.faults.tensor:column_gradient_unsummed
python -m tests.faults --silent 10
python -m tests.faults --write
```

The first command plants one fault and prints what catches it; without a name it plants all of them, which takes
a few minutes.
The second shows the full report of one fault.
`--silent 10` runs every check ten times without a fault.
`--write` plants all faults and writes this page if each one is caught as the catalogue says.
The unit tests plant a fifth of them each time and keep this page equal to the catalogue.

| check | faults | what it is |
|---|---:|---|
{checks}

A layout with `bf16` is proved with `--precision bf16`, all others in fp64.
[What the proof covers](../../docs/proof.md) tells what the proof exercises and what only tests do.
A mistake with a reference to a repository and a number happened there in public.

| mistake | layout | caught by | first line of the report |
|---|---|---|---|
"""  # noqa: E501
