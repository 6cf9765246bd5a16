"""Proves mixtures of experts in layouts of 4 and 8 ranks: each two values of what can be chosen occur together in one of them.

python -m tests.experts              proves all of them, a third over a strict wire too: twenty minutes on two cores
python -m tests.experts --list       says which they are
python -m tests.experts --only 3 7   some, by their numbers
python -m tests.experts --write      writes docs/experts_proof.md, if all are equal to one process
"""

import contextlib
import io
import random
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import tests.experts
from launch.checkpoint import run as checkpoint_command
from megacore.config.experts import ExpertSettings
from megacore.config.parallel import CHUNKS
from megacore.errors import ConfigError
from megacore.expert_parallel.router import Router
from megacore.files import ROOT
from megacore.tools.cli import Parser, exit_with
from megacore.tools.settings.load import load
from megacore.tools.verify.compare import ROUTING
from megacore.tools.verify.layouts import Layout, impossible, parse
from megacore.tools.verify.proof_report import explain
from megacore.tools.verify.run import Options, Result, prove
from megacore.tools.verify.shrink import load_whole
from megacore.tools.verify.workers import ProofWorkers
from tests.pairwise import Pair, Row, cover
from tests.strict import Rules
from tests.strict.runs import Case, Runs
from tests.training import write_weights

CONFIG, DOCUMENT = str(ROOT / "configs/moe_tiny.json"), ROOT / "docs" / "experts_proof.md"
DEEP = "model.num_layers=8"  # for four ranks of a pipeline with two chunks each
STRICT_PART = 3  # of the layouts one in so many is run over a strict wire, of those whose routers are as they are
MIXTURE = (
    "model.num_layers=8", "model.norm=rmsnorm", "model.activation=swiglu", "model.position=rope", "model.bias=false", "model.ffn_size=32",
    "model.num_experts=8", "model.expert_ffn_size=32", "model.first_dense=1", "model.router_z_loss=0.01",
)  # fmt: skip
SIZES = {"tp": (1, 2, 4), "pp": (1, 2, 4), "dp": (1, 2, 4), "cp": (1, 2), "ep": (1, 2, 4), "etp": (1, 2, 4)}
WORLDS = (4, 8)
SEED, DRAWN = 1, 32  # of the cover; settings that are drawn for each layout
ENGINES = {
    "native": (),
    "sharded": ("engine.shard_optimizer=true",),
    "two levels": ("engine.reduce_levels=2",),
    "fsdp": ("engine.kind=fsdp",),
}
DEEPSEEK = (
    "model.router_scores=sigmoid", "model.router_scale=2.5", "model.expert_groups=4", "model.groups_per_token=2",
    "model.router_bias_rate=0.01", "model.router_balance=global",
)  # fmt: skip
ROUTERS = {"softmax": (), "sigmoid": DEEPSEEK, "ties": (), "one expert": ("model.experts_per_token=1",)}
BATCHES = {
    "even": (),
    "few tokens": ("train.seq_len=4", "train.micro_batch_size=1"),
    "uneven": ("train.seq_len=4", "train.micro_batch_size=3", "train.global_batch_size=24", "model.num_layers=9"),
    "documents": ("data.document_mask=true", "data.packing=best_fit"),
}
CAPACITIES = {"all": (), "0.75": ("model.capacity_factor=0.75",)}
RECOMPUTE = ("none", "selective", "full")
FACTORS = (*SIZES, "sp", "schedule", "engine", "recompute", "router", "batch", "capacity", "ranks")


@dataclass(frozen=True)
class Proof:
    """A row of the cover."""

    row: Row

    @cached_property
    def of(self) -> dict[str, str]:
        """Values by factor."""
        return dict(zip(FACTORS, self.row, strict=True))

    @property
    def layout(self) -> Layout:
        """Its ranks and schedule."""
        return layout_of(self.row[: FACTORS.index("schedule") + 1])

    @property
    def settings(self) -> list[str]:
        """What goes with it, as overrides."""
        of = self.of
        chosen = ENGINES[of["engine"]], ROUTERS[of["router"]], BATCHES[of["batch"]], CAPACITIES[of["capacity"]]
        return [DEEP, f"train.recompute={of['recompute']}", *(override for overrides in chosen for override in overrides)]

    @property
    def plant(self) -> str | None:
        """What makes scores alike, in the layout and in the one process."""
        return {"ties": "tests.experts:coarse", "one expert": "tests.experts:alike"}.get(self.of["router"])

    def allowed(self) -> bool:
        """Whether a run accepts it, as its config says and as the proof makes it small."""
        try:
            load(CONFIG, [*self.settings, "train.device=cpu", *self.layout.overrides()], self.layout.world)
            return impossible(self.layout, load_whole(CONFIG, self.settings)) is None
        except ConfigError:
            return False


def layout_of(row: Row) -> Layout:
    """The layout of the first values of a row."""
    *sizes, sp, schedule = row
    named = "".join(f"{axis}{size}" for axis, size in zip(SIZES, sizes, strict=True) if size != "1" or axis == "etp")
    return parse(f"{named}{'sp' * (sp == 'yes')}{'' if schedule == 'none' else f'@{schedule}'}")


def every_row() -> Iterator[Row]:
    """All layouts whose numbers of ranks fit together, each with some settings drawn from all."""
    rng, settings = random.Random(SEED), list(product(ENGINES, RECOMPUTE, ROUTERS, BATCHES, CAPACITIES))
    for sizes in product(*SIZES.values()):
        of = dict(zip(SIZES, sizes, strict=True))
        stage = of["tp"] * of["dp"] * of["cp"]
        if (ranks := stage * of["pp"]) not in WORLDS or stage % (of["ep"] * of["etp"]):
            continue
        sequence = ("no", "yes") if of["tp"] > 1 else ("no",)
        schedules = tuple(CHUNKS) if of["pp"] > 1 else ("none",)
        for own in product(sequence, schedules):
            for rest in rng.sample(settings, DRAWN):
                yield (*map(str, sizes), *own, *rest, str(ranks))


@cache
def proofs() -> tuple[list[Proof], set[Pair]]:
    """The rows of the cover, and the pairs that no run accepts."""
    rows, never = cover(every_row(), lambda row: Proof(row).allowed(), SEED)
    return [Proof(row) for row in rows], never


def coarse() -> Any:
    """Scores in sixteenths: often several are equal."""
    return mock.patch.object(Router, "ranked", lambda self, scores: (scores.detach() * 16).round())


def alike() -> Any:
    """Scores that are all equal: every token goes to the first expert, ranks with others have no rows, and nobody chooses these."""
    return mock.patch.object(Router, "ranked", lambda self, scores: torch.zeros_like(scores))


@dataclass(frozen=True)
class Found:
    """What became of a row."""

    verify: str  # the largest difference, or what is wrong
    near_ties: int
    strict: str  # over a strict wire: from drawn weights, from those of a dense model; "" where it was not run
    right: bool


def examine(proof: Proof, workers: ProofWorkers, runs: "StrictRuns | None") -> Found:
    """Proves a row, with `runs` over a strict wire too."""
    (result,) = prove(Options(CONFIG, proof.settings, [proof.layout], plant=proof.plant), workers=workers).results
    wrong = wrong_with(result)
    ties = sum(d.kind == ROUTING and d.relative > 0 for d in result.differences.values())
    most = max((d.relative for d in result.differences.values()), default=0.0)
    over = [] if runs is None else [runs.verdict(proof, upcycled) for upcycled in (False, True)]
    return Found(wrong or f"{most:.0e}".replace("e-0", "e-"), ties, " / ".join(said or "equal" for said in over), not (wrong or any(over)))


def wrong_with(result: Result) -> str:
    """What is wrong with a layout, in a line; empty if nothing is."""
    return result.impossible or next(iter(explain(result)), "")


class StrictRuns:
    """Real runs of a small mixture over a strict wire, compared with one process over gloo."""

    def __init__(self, folder: Path) -> None:
        self.runs, self.folder = Runs(folder), folder

    def verdict(self, proof: Proof, upcycled: bool) -> str:
        """What is wrong, in a line; empty if nothing is. `upcycled`: it trains on from a dense model's weights, to which noise is added."""
        model = (*MIXTURE, *ROUTERS[proof.of["router"]])
        begin = (f"checkpoint.weights={self.upcycled(proof.of['router'])}",) if upcycled else ("model.shared_experts=1",)
        chosen = ENGINES[proof.of["engine"]], CAPACITIES[proof.of["capacity"]], (f"train.recompute={proof.of['recompute']}",)
        case = Case(proof.layout.name, (*model, *begin, *(override for overrides in chosen for override in overrides)))
        return self.runs.verdict(case, Rules(seed=proofs()[0].index(proof)))

    def upcycled(self, router: str) -> Path:
        """A checkpoint whose experts are a dense model's layers and noise, with such a router; made once."""
        made, settings = self.folder / router, (*MIXTURE, *ROUTERS[router])
        if not made.exists():
            dense = [override for override in settings if override.partition(".")[2].partition("=")[0] not in ExpertSettings.model_fields]
            source = write_weights(self.folder / f"{router}_dense", load(self.runs.config, dense).config)
            with contextlib.redirect_stdout(io.StringIO()):
                checkpoint_command(["upcycle", str(source), "--output", str(made), "--noise", "0.1", *settings])
        return made


def document(found: dict[int, Found]) -> str:
    """docs/experts_proof.md, from what was found."""
    chosen, never = proofs()
    rows = []
    for number, proof in enumerate(chosen):
        of, said = proof.of, found[number]
        rest = (of[name] for name in ("engine", "recompute", "router", "batch", "capacity"))
        rows.append(f"| {proof.layout.name} | {' | '.join(rest)} | {said.verify} | {said.strict or '–'} |")
    lacking = [f"- {FACTORS[i]} {a} with {FACTORS[j]} {b}" for i, a, j, b in sorted(never)]
    beside = "\n\nNo run accepts these pairs, so no row has them:\n\n" + "\n".join(lacking) if lacking else ""
    return HEAD.format(count=len(chosen), strict=sum(bool(one.strict) for one in found.values())) + "\n".join(rows) + beside + "\n"


HEAD = """# Experts in every layout

`launch/verify.py` proves a mixture of experts in {count} layouts of 4 and 8 ranks.
They are a pairwise cover: each two of the values in this table occur together in a row, if a run accepts the two.

```bash
python -m tests.experts              # proves all of them again: twenty minutes on two busy cores
python -m tests.experts --only 3 7   # some, by their places in the table, from 0
```

A layout's name has the ranks of each axis: `etp` ranks divide an expert, `ep` ranks hold different ones, `sp` is sequence parallelism.

- **engine**: native, its state divided (`engine.shard_optimizer`), its sums in two levels of hosts (`engine.reduce_levels=2`), or FSDP2.
- **router**: a softmax and a loss of balance by sequence; or sigmoids, groups, a bias and a loss by the batch before (DeepSeek-V3).
  With "ties" scores are rounded to sixteenths, so that several are equal.
  With "one expert" all are equal: every token goes to the first, nobody chooses the others, and ranks that hold these have no rows.
- **batch**: "few tokens" has 4 or 8 in a microbatch, so ranks and experts are without a token.
  "uneven" has 3 sequences in a microbatch, which tensor ranks cut, and 9 blocks.
  "documents" has whole documents packed into samples, and attention within them.
  Tokens of a microbatch that tensor ranks cannot divide are refused, in one line.
- **capacity**: rows that an expert takes, as a part of the mean; "all" drops none.

**largest difference** is that of all gradients, parameters, moments, buffers, losses and norms on all ranks from one process in plain fp64.
Routing comes first: choices must be those of the one process.

**strict wire**: {strict} of the rows also train over [a wire as strict as NCCL](strict_wire.md), and are compared with one process.
They have an even batch there.
They begin from drawn weights, and from a dense model's that were [upcycled](experts.md#from-a-dense-model) with noise.
Losses, norms and every tensor of their checkpoints must be within 1e-9.

| layout | engine | recompute | router | batch | capacity | largest difference | strict wire: drawn / upcycled |
|---|---|---|---|---|---|---|---|
"""


def main(argv: list[str]) -> int:
    """Prints a line for each proof; returns the exit status."""
    parser = Parser("python -m tests.experts", tests.experts.__doc__)
    parser.add_argument("--list", action="store_true", help="only say which there are")
    parser.add_argument("--only", nargs="+", type=int, metavar="NUMBER", help="some, by their numbers from 0")
    parser.add_argument("--write", action="store_true", help=f"write {DOCUMENT.name}, if all are equal")
    args = parser.parse_args(argv)
    chosen, _ = proofs()
    if args.write and args.only:
        raise ConfigError("--write", "writes what was found of all", "--write alone")
    if args.only and not set(args.only) <= set(range(len(chosen))):
        raise ConfigError("--only", f"there are {len(chosen)}", f"numbers from 0 to {len(chosen) - 1}")
    numbers = args.only or range(len(chosen))
    if args.list:
        print(*(f"{number}: {chosen[number].layout.name} {' '.join(chosen[number].settings)}" for number in numbers), sep="\n")
        return 0
    natural = [number for number, proof in enumerate(chosen) if proof.plant is None]
    count = -(-len(chosen) // STRICT_PART)
    over_strict = {natural[i * len(natural) // count] for i in range(count)}
    found = dict[int, Found]()
    with tempfile.TemporaryDirectory() as folder, ProofWorkers(ROOT) as workers:
        runs = StrictRuns(Path(folder))
        try:
            for number in numbers:
                found[number] = examine(chosen[number], workers, runs if number in over_strict else None)
                said = found[number]
                beside = f", {said.near_ties} near ties" * bool(said.near_ties) + f"; over a strict wire {said.strict}" * bool(said.strict)
                print(f"{number} {chosen[number].layout.name}: {said.verify}{beside}", flush=True)
        finally:
            runs.runs.close()
    right = sum(one.right for one in found.values())
    print(f"{right} of {len(found)} are equal to one process")
    if args.write and right == len(found):
        DOCUMENT.write_text(document(found), encoding="utf-8")
    return int(right < len(found))


if __name__ == "__main__":
    exit_with(main)
