"""Generate tests/proved_layouts.md: the layouts and models in which megacore is proved."""

import json
from collections.abc import Iterable, Sequence

from megacore.files import ROOT
from megacore.tools.interchange.families import FAMILIES
from megacore.tools.verify.layouts import BESIDES, DEFAULT, EXPERTS, MAX_WORLD, SCHEDULES

FOUND = ROOT / "tests/experts_found.json"

HEAD = """# Proved layouts

`launch/verify.py` trains a small version of a config with real ranks and compares every gradient, parameter,
optimizer state, loss and norm with one process in fp64 ([how](../docs/proof.md)).
This page lists the layouts that it runs, and the layouts and models that the tests prove.

```bash
python launch/verify.py --config configs/gpt_tiny.json --layouts tp2,pp2
```

The name of a layout has the number of ranks of each axis: `tp2pp2dp2` is tensor 2, pipeline 2 and data 2, and `sp` is
sequence parallelism.
With experts, `ep` ranks hold different experts and `etp` ranks divide each expert.
A pipeline schedule follows after `@`, and `one` is the trainer on one process.

## Default layouts

Without `--layouts`, a proof runs these {defaults} layouts:

{default_names}

A model with experts also runs these {experts}:

{expert_names}

`--changed main` adds the layouts that the changed files can break:

| changed files in | additional layouts |
|---|---|
{besides}

`--layouts` takes any other layout of up to {most} ranks.

## Published models

The tests import a small model of each of these {families} families of transformers, compare its logits with those of
transformers, and export it again:

{family_names}

## Layouts of MoE models

`python -m tests.experts` proves an MoE model in {count} layouts of 4 and 8 ranks.
They are a pairwise cover: any two values of this table occur together in a row, unless the config check rejects the
pair.
Each one also has a shared expert, a dense first block and a router z-loss.

```bash
python -m tests.experts --only 3 7
python -m tests.experts --write
python -m tests.pages
```

The first command proves two rows by their number in the table, counted from 0.
`--write` proves all rows, which takes a quarter of an hour or more, and `tests.pages` then updates this page.

| column | values |
|---|---|
| engine | native; native with `engine.shard_optimizer` (sharded); native with `engine.reduce_levels=2` (two levels); FSDP2 |
| router | softmax scores and a balance loss per sequence; sigmoid scores with groups, a bias and a balance loss by the previous batch (DeepSeek-V3); ties: scores rounded to sixteenths, so that several are equal; one expert: all scores equal, so every token goes to the first experts and some ranks get no rows |
| batch | even; few tokens: 4 or 8 per microbatch, so that some ranks and experts get none; uneven: 3 sequences per microbatch and 9 blocks; documents: packed documents with attention inside each |
| capacity | rows that an expert accepts, as a fraction of the mean load; all: no limit |
| exchange | tokens go to the experts at once (whole), or in two halves (`parallel.expert_halves`) |
| layers | plain; biases in experts, routers and all other layers; latent attention with latent queries |
| largest difference | the largest relative difference of any gradient, parameter, moment, buffer, loss or norm on any rank |
| strict | {strict} of the rows also train over [a process group as strict as NCCL](strict/README.md), with random weights and with weights of a dense model that was [upcycled](../docs/experts.md#from-a-dense-model) |

The chosen experts are compared first and must be those of one process.
Other tests prove what no row has:

| what | test |
|---|---|
| layouts that train other settings: Muon on each expert, dropped rows, latent attention with ring and Ulysses | `tests/equal.py` |
| checkpoints that move between `ep`, `etp` and `pp`; generation over `ep` and tensor ranks | `tests/distributed/test_experts.py` |
| published MoE models: import, training, export | `tests/distributed/test_published_mixtures.py` |
| planted mistakes with experts | [planted faults](faults/README.md) |

| layout | engine | recompute | router | batch | capacity | exchange | layers | largest difference | strict: random / upcycled |
|---|---|---|---|---|---|---|---|---|---|
"""  # noqa: E501


def page() -> str:
    """Return the text of tests/proved_layouts.md."""
    records = json.loads(FOUND.read_text(encoding="utf-8"))
    rows = [
        f"| {' | '.join([*record['row'], record['difference'], record['strict'] or '–'])} |"
        for record in records
    ]
    head = HEAD.format(
        defaults=len(DEFAULT),
        default_names=names(DEFAULT),
        experts=len(EXPERTS),
        expert_names=names(EXPERTS),
        besides="\n".join(f"| `{place}` | {additional(layouts)} |" for place, layouts in BESIDES.items()),
        most=MAX_WORLD,
        families=len(FAMILIES),
        family_names=names(sorted(FAMILIES)),
        count=len(records),
        strict=sum(bool(record["strict"]) for record in records),
    )
    return head + "\n".join(rows) + "\n"


def additional(layouts: Sequence[str]) -> str:
    """Return the layouts of a row of `BESIDES`, with those of all schedules as one phrase."""
    if not set(SCHEDULES) <= set(layouts):
        return names(layouts)
    rest = [name for name in layouts if name not in SCHEDULES]
    shapes = list(dict.fromkeys(name.partition("@")[0] for name in SCHEDULES))
    return f"{names(shapes)} with every schedule; {names(rest)}"


def names(values: Iterable[str]) -> str:
    """Return names as code, with commas."""
    return ", ".join(f"`{name}`" for name in values)
