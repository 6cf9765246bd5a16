"""`launch/plan.py --simulate-ranks`: runs the ranks that the user names, holds them against the formulas and
against each other, and says so.
"""

import sys
import time
from collections.abc import Iterable, Sequence

from megacore.config import Config
from megacore.distributed.axes import AXES, ranks_along
from megacore.distributed.topology import sizes_of
from megacore.errors import ConfigError
from megacore.tools.dry_run.compare_traffic import mismatches, named
from megacore.tools.dry_run.dry_step import PARTS, DryRank, dry_run
from megacore.tools.dry_run.expected_traffic import differences
from megacore.tools.planner.memory import RankMemory, rank_memory
from megacore.tools.planner.routing import Routing, loads_of
from megacore.tools.planner.traffic import rank_traffic

MOST_RANKS = 256  # that a user may name: each takes seconds
MOST_MICROBATCHES = 4096  # of a step that is run one by one
FEW = 2  # microbatches of the step in which other ranks are compared with those that are named

SHOWN = 6  # moments whose tensors live at the peak


def parse_ranks(text: str, world: int) -> list[int]:
    """The ranks of a list such as ``0,8-15``. Raises `ConfigError` for what is none of `world`."""
    right = f"ranks from 0 to {world - 1}, such as 0 or 0-{min(world, 4) - 1}"
    ranks: dict[int, None] = {}
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not (first.isdecimal() and (last.isdecimal() or not dash)) or len(first + last) > 20:
            raise ConfigError("--simulate-ranks", f"{part[:50]!r} names no rank", right)
        start, stop = int(first), int(last if dash else first)
        if start > stop or stop >= world:
            raise ConfigError(
                "--simulate-ranks",
                f"{part} is beyond the {world} ranks" if stop >= world else f"{part} is no range",
                right,
            )
        if stop - start + len(ranks) >= MOST_RANKS:
            raise ConfigError(
                "--simulate-ranks",
                f"{part} makes more than {MOST_RANKS} ranks",
                "fewer: ranks of a stage do alike",
            )
        ranks |= dict.fromkeys(range(start, stop + 1))
    return list(ranks)


def members(config: Config, rank: int) -> set[int]:
    """All ranks of the groups of `rank`: of every stage one, and those that it
    computes or sums gradients with.
    """
    sizes = sizes_of(config)
    products = [[axis.name] for axis in AXES] + [[axis.name for axis in AXES if axis.tokens]]
    return {other for axes in products for other in ranks_along(axes, rank, sizes)}


def shortened(config: Config) -> Config:
    """The config with a step of few microbatches."""
    few = min(FEW, config.num_microbatches)
    train = config.train.model_copy(
        update={"global_batch_size": few * config.train.micro_batch_size * config.data_size}
    )
    return config.model_copy(update={"train": train})


def report(config: Config, text: str, host_size: int, routing: Routing | None = None) -> list[str]:
    """Runs the named ranks through a whole step, and all ranks of their groups through a
    short one; prints what is found.

    Returns what is wrong, a line each: a difference from the formulas, or between ranks.
    """
    world = config.world_size
    ranks = parse_ranks(text, world)
    if config.num_microbatches > MOST_MICROBATCHES:
        wrong = f"{config.num_microbatches:,} microbatches a step are run one by one"
        raise ConfigError(
            "train.global_batch_size",
            wrong,
            f"at most {MOST_MICROBATCHES:,} for --simulate-ranks; fewer do alike",
        )
    began = time.perf_counter()
    whole = [run_one(config, rank, host_size, f"rank {rank}", routing) for rank in ranks]
    faults = [line for dry in whole for line in against_formulas(config, dry, host_size, routing)]
    show(config, whole, routing)
    others, few = sorted(set().union(*(members(config, rank) for rank in ranks))), shortened(config)
    short = {}
    for number, rank in enumerate(others, 1):
        short[rank] = run_one(
            few, rank, host_size, f"rank {rank}, {number} of {len(others)} that share a group", routing
        ).calls
    faults += mismatches({dry.rank: dry.calls for dry in whole}) or mismatches(short)
    progress("")
    verdict = "NOT as they should be" if faults else "matched"
    group = f"{len(others)} ranks, all that share a group with {named(ranks)}"
    calls = f"{sum(map(len, short.values())):,} calls in a step of {few.num_microbatches} microbatches"
    print(f"\n{group}, post {calls}: {verdict}. {time.perf_counter() - began:.0f} s.")
    return faults


def run_one(config: Config, rank: int, host_size: int, what: str, routing: Routing | None = None) -> DryRank:
    """`dry_run`, with a line for the waiting."""
    progress(f"dry run of {what} …")
    return dry_run(config, rank, host_size, routing)


def progress(text: str) -> None:
    """A line that the next one replaces, if somebody looks."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def planned(config: Config, dry: DryRank, routing: Routing | None = None) -> RankMemory:
    """What the plan has for a rank's memory."""
    return rank_memory(
        config, dry.tensor_rank, dry.shard_rank, dry.data_rank, loads_of(config, routing, dry.expert_rank)
    )[dry.stage]


def against_formulas(
    config: Config, dry: DryRank, host_size: int = 8, routing: Routing | None = None
) -> list[str]:
    """What a rank sends or holds that the plan does not have, a line each."""
    loads, memory = loads_of(config, routing, dry.expert_rank), planned(config, dry, routing)
    found = differences(
        dry, rank_traffic(config, host_size, dry.tensor_rank, dry.shard_rank, dry.data_rank, loads)[dry.stage]
    )
    for part in ("parameters", "gradients", "optimizer"):
        if dry.held[part] != (formula := getattr(memory, part)):
            found.append(f"holds {dry.held[part]:,} bytes of {part}, and by formula {formula:,}")
    return [f"rank {dry.rank} ({dry.place}) {line}" for line in found]


def show(config: Config, whole: Sequence[DryRank], routing: Routing | None = None) -> None:
    """Prints what the ranks hold and send, and what lives at their peaks."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    progress("")
    console = Console(
        highlight=False, markup=False, soft_wrap=True, width=None if sys.stdout.isatty() else 140
    )
    unit, size = ("GiB", 2**30) if max(dry.peak for dry in whole) >= 2**30 else ("MiB", 2**20)
    table = Table(
        caption=f"Memory in {unit}. activ.: kept for backwards. formula: what the plan predicts for the "
        "peak.",
        caption_justify="left",
        box=SIMPLE_HEAD,
        collapse_padding=True,
        pad_edge=False,
    )
    for name in (
        "rank",
        "place",
        "parameters",
        *("weights", "grads", "optim.", "other"),
        "activ.",
        "peak",
        "formula",
        "calls",
        "seconds",
    ):
        table.add_column(name, justify="left" if name == "place" else "right", no_wrap=True)
    for dry in whole:
        amounts = [
            f"{amount / size:.3f}"
            for amount in (*(dry.held[part] for part in PARTS), dry.activations, dry.peak)
        ]
        amounts.append(f"{planned(config, dry, routing).total / size:.3f}")
        table.add_row(
            str(dry.rank),
            dry.place,
            f"{dry.parameters:,}",
            *amounts,
            f"{len(dry.calls):,}",
            f"{dry.seconds:.1f}",
        )
    console.print(table)
    for dry in whole:
        living = ", ".join(f"{amount / size:.3f} {unit} of {moment}" for moment, amount in dry.alive[:SHOWN])
        more = len(dry.alive) - SHOWN
        console.print(
            f"rank {dry.rank} peaks in {dry.peak_moment}; alive: "
            f"{living}{f', and of {more} other moments' if more > 0 else ''}"
        )
    console.print(sent_table(whole))


def sent_table(whole: Iterable[DryRank]) -> object:
    """A table of what each rank sends, by group and operation."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    for name in ("rank", "group", "ranks", "operation", "calls", "elements", "dtype"):
        table.add_column(
            name, justify="right" if name in ("rank", "calls", "elements") else "left", no_wrap=True
        )
    for dry in whole:
        for (name, ranks, operation, dtype), (calls, elements) in dry.sent().items():
            table.add_row(str(dry.rank), name, named(ranks), operation, f"{calls:,}", f"{elements:,}", dtype)
    return table
