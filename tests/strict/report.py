"""Run all layouts and mistakes, record what was found, and make tests/strict/README.md of it."""

import json
from collections.abc import Sequence
from pathlib import Path

from tests.strict import Rules
from tests.strict.cases import CASES
from tests.strict.plants import PLANTS, Plant
from tests.strict.runs import Case, Runs

FOUND = Path(__file__).resolve().parent / "found.json"
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


def write_found(layouts: dict[str, list[str]], mistakes: dict[str, tuple[list[str], str]]) -> None:
    """Write the verdicts, which `document` reads."""
    planted = {
        mistake: {
            "equal_over_gloo": sum(not verdict for verdict in over_gloo),
            "runs_over_gloo": len(over_gloo),
            "strict": strict,
        }
        for mistake, (over_gloo, strict) in mistakes.items()
    }
    text = json.dumps({"layouts": layouts, "mistakes": planted}, indent=1, ensure_ascii=False)
    FOUND.write_text(f"{text}\n", encoding="utf-8")


def document() -> str:
    """Return the text of tests/strict/README.md, from the verdicts that were found last."""
    found = json.loads(FOUND.read_text(encoding="utf-8"))
    layouts = []
    for case in CASES:
        verdicts = [verdict or "equal" for verdict in found["layouts"][case.name]]
        layouts.append(f"| {case.name} | {against(case)} | {' | '.join(verdicts)} |")
    mistakes = []
    for plant in PLANTS:
        row = found["mistakes"][plant.mistake]
        equal = f"{row['equal_over_gloo']} of {row['runs_over_gloo']}"
        mistakes.append(f"| {plant.mistake} | {plant.case.name} | {equal} | {row['strict']} |")
    times = max(row["runs_over_gloo"] for row in found["mistakes"].values())
    return HEAD + "\n".join(layouts) + MISTAKES.format(times=times) + "\n".join(mistakes) + "\n"


def against(case: Case) -> str:
    """Return what a case is compared with, in words."""
    return "one process" if case.against == "one" else "itself over gloo"


HEAD = """# A process group as strict as NCCL

The tests run megacore's ranks on CPUs over gloo, but gloo is forgiving: it starts operations early, lets messages
overtake each other, and rarely needs a wait.
A program with a race, a missing wait or a wrong order of operations can pass every test over gloo, and hang or
compute garbage over NCCL.

So `tests/strict` has its own process group, which permits only what NCCL permits and uses the worst timing:

- Operations of one communicator run in the order in which they were enqueued.
  Collectives of a group share a communicator, and each pair of ranks that sends and receives has its own, as in
  PyTorch.
  A receive at the head of the queue blocks everything after it.
- A result is NaN, or a large number, until it is waited for.
- An input is read as late as possible, so an input that changes too early gives wrong numbers.
- Each operation is delayed at random, by a seed.
- Ranks that meet in an operation compare its kind, number, dtype, size and root, and the line of code that started
  it.
  If they disagree, both sides are reported.
  If a rank waits in vain, it reports what is at the head of each of its communicators.
- The communicators of a rank can share 8 hardware queues, or one, as CUDA streams do.

It is stricter than NCCL in two ways.
A result may be used only after its own wait, and an operation may use the result of an earlier one only if that
was waited for.
It does not test NCCL itself, the streams and memory of a GPU, or the speed of either.

```bash
python -m tests.strict --only pp4 cp2
python -m tests.strict --write
python -m tests.pages
```

The first command runs some layouts.
`--write` runs all layouts and mistakes, which takes about twenty minutes, and `tests.pages` then updates this page.

## Layouts

Every layout trains three steps with the real trainer, validates after each step, and saves a checkpoint while
training continues.
Losses, gradient norms, validation losses and every tensor of both checkpoints must be within 1e-9 of one process in
fp64, and generated text must be identical.
Layouts that reduce gradients in bf16, which fp64 runs reject, are compared with the same layout over gloo in fp32.
The model has 8 blocks or 2, and buckets have 10 KiB, so that many operations are in flight.
Shared memory is off because it bypasses the process group.
DeepSpeed, which accumulates in fp32, and `train.compile` are not tested here.
The unit tests run six of these layouts each time.

| layout | compared with | seed 1 | seed 2, 8 queues | seed 3, 1 queue |
|---|---|---|---|---|
"""  # noqa: E501
MISTAKES = """

## Mistakes

Each mistake was planted in the running code.
It ran {times} times over gloo, and the table shows how many of these runs were equal to one process.
A mistake that is equal in some runs only is a race, which gloo wins or loses by chance.

| mistake | layout | equal over gloo | report of the strict process group |
|---|---|---|---|
"""
