"""Prints a proof: a table of parameters × layouts, and a verdict in words."""

import sys
from collections.abc import Iterator

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from megacore.tools.verify.compare import ROUTING
from megacore.tools.verify.run import Proof, Result
from megacore.tools.verify.tolerances import BF16_FACTOR

FIGURES = ("loss", "grad_norm", "valid_loss")
WIDTH = 140  # if there is no terminal
# What is wrong if no activation is, by what differs first.
CAUSES = {
    "drawn": "initialisation depends on the layout: first {name}",
    "start": "first weights are drawn alike in every layout; what the engine then holds of them is not: first {name}",
    "gathered": "every rank draws and holds its first weights alike; what computes with them is not: first {name}",
    "routing": "routers choose other experts than on one process: first {name}",
    "loss": "every activation agrees; the sum of the losses over microbatches or ranks does not",
    "gradient": "every microbatch's gradients agree; their sum over microbatches and ranks does not: first {name}",
    "grad_norm": "every gradient agrees; the gradient norm does not",
    "adam_m": "every gradient and the norm agree; the first moments (clipping, decay rates) do not: first {name}",
    "adam_v": "every gradient, the norm and the first moments agree; the second moments do not: first {name}",
    "parameter": "every gradient and moment agrees; the update (rate, weight decay, bias correction) does not: first {name}",
    "buffer": "every update agrees; a buffer (what is counted, or over which ranks) does not: first {name}",
    "own copy": "what computes is not the master weights, rounded: first {name}",
    "own gradient": "the gradients are not the sum of what backward gave, microbatch by microbatch: first {name}",
    "own norm": "the gradient norm is not that of the gradients",
    "momentum": "every gradient and the norm agree; the momentum (clipping, momentum) does not: first {name}",
    "own adam_m": "the first moments do not follow from the gradients (clipping, decay rates): first {name}",
    "own momentum": "the momentum does not follow from the gradients (clipping, momentum): first {name}",
    "own adam_v": "the second moments do not follow from the gradients (clipping, decay rates): first {name}",
    "own parameter": "the update does not follow from the moments (rate, weight decay, bias correction): first {name}",
    "direction": "the update points elsewhere than in fp64: first {name}",
    "valid_loss": "training agrees; the validation loss does not",
}
ONE_SIDED = "there is a {kind} of {name}, which what it is compared with has not"
MOST_NAMES = 5  # tensors that differ and are named


def cell(result: Result, name: str, figure: bool) -> str:
    """The largest relative difference of a parameter (its gradients, its value, its moments) or figure in a layout."""
    if result.impossible or result.failure:
        return "–"
    values = [
        d.relative for d in result.differences.values() if d.name == name and (d.kind == "figure") == figure
    ]
    if not values:
        return "–"
    text = "0" if max(values) == 0 else f"{max(values):.0e}".replace("e-0", "e-")
    differs = any(d.name == name and (d.kind == "figure") == figure for d in result.beyond)
    return f"[bold red]{text}[/]" if differs else text


def tables(proof: Proof, width: int) -> Iterator[Table]:
    """Tables of every parameter and figure in every possible layout. Each has as many layouts as fit in `width`."""
    results = [result for result in proof.results if result.impossible is None]
    room = width - max(map(len, (*FIGURES, *proof.names))) - 2
    while results:
        fitting = [
            r
            for i, r in enumerate(results)
            if sum(max(len(r.layout.name), 5) + 3 for r in results[: i + 1]) <= room
        ]
        shown, results = results[: max(1, len(fitting))], results[max(1, len(fitting)) :]
        grid = Table(box=SIMPLE_HEAD, pad_edge=False)
        grid.add_column(no_wrap=True)
        for result in shown:
            grid.add_column(result.layout.name, no_wrap=True, justify="right")
        for name in FIGURES:
            grid.add_row(name, *(cell(result, name, True) for result in shown))
        grid.add_section()
        for name in proof.names:
            grid.add_row(name, *(cell(result, name, False) for result in shown))
        yield grid


def explain(result: Result) -> Iterator[str]:
    """Says what is wrong with a layout; the most important comes first."""
    name = result.layout.name
    if result.failure is not None:
        yield f"{name} failed: {result.failure}"
        return
    for lacking in result.missing[:MOST_NAMES]:
        yield f"{name}: no rank has all of the {lacking}"
    if not result.beyond:
        return
    first = result.beyond[0]
    if result.race is not None:
        apart, whose = result.race.difference, f" of {result.race.checkout}" if result.race.checkout else ""
        flights = ", ".join(result.race.in_flight[:MOST_NAMES]) or "nothing that is noted"
        yield f"{name}: a race: two runs{whose} differ; in flight: {flights}"
        yield f"  first, {apart.describe()}: {apart.relative:.1e} between the two, most on rank {apart.rank}"
    elif result.parting is not None:
        event, ranks = result.parting.event, result.parting.ranks
        who = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
        yield f"{name} parts first in {event.describe()}, step {first.step}: {result.parting.relative:.1e} off on {who}"
        if result.parting.agreed is not None:
            yield f"  before it, {result.parting.agreed.describe()} still agrees"
    else:
        cause = (
            first.name
            if first.kind == "figure"
            else "start"
            if (first.kind, first.step) == ("parameter", 0)
            else first.kind
        )
        yield f"{name}: {CAUSES.get(cause, ONE_SIDED).format(name=first.name, kind=first.kind)}"
    for difference in result.beyond[:MOST_NAMES]:
        yield f"  {difference.describe()}: {difference.relative:.1e} off, most on rank {difference.rank}"
    if len(result.beyond) > MOST_NAMES:
        yield f"  and {len(result.beyond) - MOST_NAMES} more after these"


def verdict(proof: Proof) -> str:
    """The last line of a report."""
    ran = [result for result in proof.results if result.impossible is None]
    wrong = [result.layout.name for result in ran if not result.equal]
    what = f"{len(proof.names)} parameters, their gradients and moments, losses and norms"
    if wrong:
        return f"NOT EQUAL: {', '.join(wrong)} ({len(ran) - len(wrong)} of {len(ran)} layouts equal)"
    most, layout = max(
        ((d, r.layout.name) for r in ran for d in r.differences.values()), key=lambda found: found[0].relative
    )
    largest = (
        f"largest relative difference {most.relative:.1e} ({most.describe()}, {layout})"
        if most.relative
        else "bitwise"
    )
    other = "one process in fp64" if proof.options.against is None else str(proof.options.against)
    within = (
        ""
        if proof.options.precision == "fp64"
        else f", but for at most {BF16_FACTOR:g} times the error of one process in bf16, which is within its own bounds"
    )
    said = f"{other}{within}: {what}, in {len(ran)} layouts; {largest}"
    if proof.undirected:
        which = " and ".join(f"{count} parameters of {rule}" for rule, count in proof.undirected.items())
        said += (
            f"; updates of {which} were computed again from the run's own numbers, but their directions not compared with fp64's,"
            " as AdamW's are"
        )
    if lacking := next((result.not_replayed for result in ran if result.not_replayed), ""):
        return f"NO DIFFERENCE FOUND from {said}; NOT PROVED, because not computed again: the {lacking}"
    return f"EQUAL to {said}"


def near_ties(result: Result) -> Iterator[str]:
    """Where routers chose other experts whose scores are as good: the layout went on with the reference's."""
    for d in result.differences.values():
        if d.kind == ROUTING and d.relative and d not in result.beyond:
            yield f"{result.layout.name}: a near tie of {d.name} in step {d.step}, scores {d.relative:.0e} apart, as one process decided it"


def show(proof: Proof) -> None:
    """Prints the whole report."""
    console = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else WIDTH)
    for table in tables(proof, console.width):
        console.print(table)
    for result in proof.results:
        if result.impossible:
            console.print(f"{result.layout.name} left out: {result.impossible}", markup=False)
    reports = [result.failure.report for result in proof.results if result.failure]
    if any(reports):
        console.print(next(filter(None, reports)), markup=False)
    for result in proof.results:
        for line in (*explain(result), *near_ties(result)):
            console.print(line, markup=False)
    console.print(verdict(proof), markup=False)
