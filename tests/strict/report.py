"""Runs all layouts and mistakes, and writes what was found as docs/strict_wire.md."""

import platform
from collections.abc import Sequence
from pathlib import Path

from tests.strict import Rules
from tests.strict.cases import CASES
from tests.strict.plants import PLANTS, Plant
from tests.strict.runs import Case, Runs

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "strict_wire.md"
QUEUES = (None, 8, 1)  # of the first seed, the second and the third
TIMES = 5  # a mistake runs over gloo


def run_case(runs: Runs, case: Case, seeds: Sequence[int]) -> list[str]:
    """What is wrong with a layout, by seed; empty where nothing is."""
    return [
        runs.verdict(case, Rules(seed=seed, queues=QUEUES[i % len(QUEUES)])) for i, seed in enumerate(seeds)
    ]


def run_plant(runs: Runs, plant: Plant) -> tuple[list[str], str]:
    """What is wrong with a run that has a mistake: over gloo, several times, and over a strict wire."""
    return [runs.verdict(plant.case, None, plant.path) for _ in range(TIMES)], runs.verdict(
        plant.case, plant.rules, plant.path
    )


def document(layouts: dict[str, list[str]], mistakes: dict[str, tuple[list[str], str]]) -> str:
    """docs/strict_wire.md, from the verdicts."""
    rows = [
        f"| {case.name} | {against(case)} | {' | '.join(v or 'equal' for v in layouts[case.name])} |"
        for case in CASES
    ]
    found = []
    for plant in PLANTS:
        over_gloo, strict = mistakes[plant.mistake]
        passed = sum(not verdict for verdict in over_gloo)
        found.append(f"| {plant.mistake} | {plant.case.name} | {passed} of {len(over_gloo)} | {strict} |")
    return (
        HEAD
        + "\n".join(rows)
        + MISTAKES.format(times=TIMES)
        + "\n".join(found)
        + f"\n\n{FOOT.format(machine=machine())}"
    )


def against(case: Case) -> str:
    """What a case is compared with, in words."""
    return "one process" if case.against == "one" else "itself over gloo"


def machine() -> str:
    """The processor."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


HEAD = """# A strict wire

megacore's ranks are tested on CPUs, over gloo, and gloo is kind.
It does much at once that NCCL does later, it lets messages pass each other, and it asks little of programs.
A program with a race, a missing wait or a wrong order may pass every test over gloo, and hang or compute nonsense over NCCL.

So tests have a process group of their own, in `tests/strict/`, that permits no more than NCCL does, with the worst timing:

- Operations of one communicator run in the order in which they were enqueued.
  A group's collectives have one communicator, and two ranks that send and receive have another, as PyTorch makes them.
  A receive at the head holds up all behind it.
- A result is NaN, or a large number, until it is waited for.
- An input is read as late as may be, so that one that is changed too early gives wrong numbers.
- Each operation is delayed at random, by a seed.
- Ranks that meet in an operation compare its kind, number, dtype, size and root, and the line of code that began it.
  If they disagree, both sides are named.
  If a rank waits in vain, it says what is at the head of each of its communicators.
- The communicators of a rank may share 8 hardware queues, or one, as streams do.
  An operation then starts only when those before it in its queue have started, and collectives of a rank run one at a time.

Groups are made as with NCCL, by PyTorch's own code and names.
It is stricter in two things.
A result may be used after its own wait, and not after a later one.
An operation may take the result of one before only if that was waited for.
It does not show NCCL itself, streams and memory of a GPU, or the speed of either.

```bash
python -m tests.strict                   # all layouts and mistakes: twenty minutes on two busy cores
python -m tests.strict --only pp4 cp2    # some layouts
python -m tests.strict --write           # renews this page
```

## Layouts

Every layout trains three steps with the real trainer, validates after each, and saves a checkpoint while it trains on.
Losses, gradient norms, validation losses and every tensor of both checkpoints must be within 1e-9 of those of one process in fp64.
Where gradients are summed in bf16, which fp64 refuses, they must be within 1e-9 of the same layout's over gloo, in fp32.
A generated text must be the same.
The model has 8 layers, or 2, and 16 features; buckets have 10 KiB, so that many are under way.
Shared memory is off, because it goes around the wire.
DeepSpeed, which sums in fp32, and `train.compile` are not run over it.
The tests run six of these layouts each time.
In two of them all messages of a group share a communicator, as PyTorch has it where communicators connect early.

| layout | compared with | seed 1 | seed 2, 8 queues | seed 3, 1 queue |
|---|---|---|---|---|
"""  # noqa: E501
MISTAKES = """

## Mistakes

Each was planted in the running code.
Over gloo it ran {times} times, and the table says how often the run was equal to one process.

| mistake | layout | equal over gloo | what the strict wire says |
|---|---|---|---|
"""
FOOT = """Two cores of a machine with {machine}, beside other work.
A mistake that is equal over gloo in some runs only is a race, which gloo wins or loses by chance.
"""
