"""Prints a proof: a table of parameters × layouts, and a verdict in words."""

import sys
from collections.abc import Iterator

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from megacore.tools.verify.compare import ROUTING, Difference
from megacore.tools.verify.run import Proof, Result, WrongModel
from megacore.tools.verify.self_check.finding import Report
from megacore.tools.verify.self_check.report import lines
from megacore.tools.verify.self_check.report import verdict as self_check_verdict
from megacore.tools.verify.tolerances import BF16_FACTOR, BOUND, CONDITION_FACTOR, LARGEST_BOUND, Bounds

FIGURES = ("loss", "grad_norm", "valid_loss")
WIDTH = 140  # if there is no terminal
# What is wrong if no activation is, by what differs first.
CAUSES = {
    "drawn": "initialisation depends on the layout: first {name}",
    "start": "first weights are drawn alike in every layout; what the engine then holds of them is not: "
    "first {name}",
    "gathered": "every rank draws and holds its first weights alike; what computes with them is not: "
    "first {name}",
    "routing": "routers choose other experts than on one process: first {name}",
    "loss": "every activation agrees; the sum of the losses over microbatches or ranks does not",
    "gradient": "every microbatch's gradients agree; their sum over microbatches and ranks does not: "
    "first {name}",
    "grad_norm": "every gradient agrees; the gradient norm does not",
    "adam_m": "every gradient and the norm agree; the first moments (clipping, decay rates) do not: first "
    "{name}",
    "adam_v": "every gradient, the norm and the first moments agree; the second moments do not: first {name}",
    "momentum": "every gradient and the norm agree; the momentum (clipping, momentum) does not: first {name}",
    "parameter": "every gradient and moment agrees; the update (rate, weight decay, bias correction) does "
    "not: first {name}",
    "average": "every update agrees; the average of the weights does not: first {name}",
    "buffer": "every update agrees; a buffer (what is counted, or over which ranks) does not: first {name}",
    "own copy": "what computes is not the master weights, rounded: first {name}",
    "own gradient": "the gradients are not the sum of what backward gave, microbatch by microbatch: first "
    "{name}",
    "own norm": "the gradient norm is not that of the gradients",
    "own momentum": "the momentum does not follow from the gradients (clipping, momentum): first {name}",
    "own adam_m": "the first moments do not follow from the gradients (clipping, decay rates): first {name}",
    "own adam_v": "the second moments do not follow from the gradients (clipping, decay rates): first {name}",
    "own parameter": "the update does not follow from the moments (rate, weight decay, bias correction): "
    "first {name}",
    "direction": "the update points elsewhere than in fp64: first {name}",
    "valid_loss": "training agrees; the validation loss does not",
}
# Every other state of an optimizer, such as Lion's.
STATE = "every gradient and the norm agree; the optimizer state {kind} does not: first {name}"
OWN_STATE = "the optimizer state {kind} does not follow from the gradients: first {name}"
MOST_NAMES = 5  # tensors that differ and are named


def cell(result: Result, name: str, figure: bool) -> str:
    """The largest relative difference of a parameter (its gradients, its value, its
    moments) or figure in a layout.
    """
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
    """Tables of every parameter and figure in every possible layout.

    Each has as many layouts as fit in `width`.
    """
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
    if result.wrong_model is not None:
        yield f"{name}: {describe_wrong_model(result.wrong_model)}"
        if result.wrong_model.is_only_cause:
            return
    first = result.beyond[0]
    if result.is_magnified:
        yield (
            f"{name}: not proved: every difference may be rounding, which this model magnifies to above "
            f"{LARGEST_BOUND:.0e}"
        )
    elif result.race is not None:
        apart, whose = result.race.difference, f" of {result.race.checkout}" if result.race.checkout else ""
        flights = ", ".join(result.race.in_flight[:MOST_NAMES]) or "nothing that is noted"
        yield f"{name}: a race: two runs{whose} differ; in flight: {flights}"
        yield f"  first, {apart.describe()}: {apart.relative:.1e} between the two, most on rank {apart.rank}"
    elif result.parting is not None:
        event, ranks = result.parting.event, result.parting.ranks
        who = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
        yield (
            f"{name} parts first in {event.describe()}, step {first.step}: "
            f"{result.parting.relative:.1e} off on {who}"
        )
        if result.parting.agreed is not None:
            yield f"  before it, {result.parting.agreed.describe()} still agrees"
    else:
        yield f"{name}: {cause_of(first)}"
    for difference in result.beyond[:MOST_NAMES]:
        yield f"  {difference.describe()} {difference.size}, most on rank {difference.rank}"
    if len(result.beyond) > MOST_NAMES:
        yield f"  and {len(result.beyond) - MOST_NAMES} more after these"


def describe_wrong_model(wrong: WrongModel) -> str:
    """What is wrong if a model differs from its untouched module."""
    layout = "every layer computes as on one process; " if wrong.is_only_cause else "on one process "
    first = wrong.describe(wrong.first)
    return f"{layout}the model differs from the untouched module: first {first}"


def explain_wrong_model(proof: Proof) -> Iterator[str]:
    """Lists the differences of a model from its untouched module, once for all layouts."""
    wrong = next((result.wrong_model for result in proof.results if result.wrong_model), None)
    if wrong is None:
        return
    yield f"the model on one process and the untouched module {wrong.untouched.module}:"
    for difference in wrong.differences[:MOST_NAMES]:
        yield f"  {wrong.describe(difference)} {difference.size}"
    if len(wrong.differences) > MOST_NAMES:
        yield f"  and {len(wrong.differences) - MOST_NAMES} more after these"


def cause_of(first: Difference) -> str:
    """What is wrong if `first` is the first difference of a run, in words."""
    if first.mismatch:
        return f"{first.describe()} {first.mismatch}"
    kind = first.name if first.kind == "figure" else first.kind
    if (first.kind, first.step) == ("parameter", 0):
        kind = "start"
    cause = CAUSES.get(kind, OWN_STATE if kind.startswith("own ") else STATE)
    return cause.format(name=first.name, kind=kind.removeprefix("own "))


def verdict(proof: Proof) -> str:
    """The last line of a report."""
    ran = [result for result in proof.results if result.impossible is None]
    wrong = [result.layout.name for result in ran if not result.equal]
    what = f"{len(proof.names)} parameters, their gradients and moments, losses and norms"
    equal = f"{len(ran) - len(wrong)} of {len(ran)} layouts equal"
    if wrong and not all(result.equal or result.is_magnified for result in ran):
        cause = (
            f"; {proof.callbacks}, which may only read, ran in the layouts alone" if proof.callbacks else ""
        )
        failed = [result for result in ran if not result.equal]
        if proof.untouched and all(r.wrong_model is not None and r.wrong_model.is_only_cause for r in failed):
            cause = (
                ": they compute what the model does on one process, and it differs from the untouched module "
                f"({proof.untouched.module})"
            )
        return f"NOT EQUAL: {', '.join(wrong)} ({equal}){cause}"
    most, layout = max(
        ((d, r.layout.name) for r in ran for d in r.differences.values()), key=lambda found: found[0].relative
    )
    largest = (
        f"largest relative difference {most.relative:.1e} ({most.describe()}, {layout})"
        f"{bound_of(proof.bounds, most)}"
        if most.relative
        else "bitwise"
    )
    if wrong:
        return f"NOT PROVED: {', '.join(wrong)} ({equal}): {largest}"
    other = "one process in fp64" if proof.options.against is None else str(proof.options.against)
    if proof.untouched is not None:
        other = f"the untouched module in fp64 ({proof.untouched.module})"
    within = (
        ""
        if proof.options.precision == "fp64"
        else f", but for at most {BF16_FACTOR:g} times the error of one process in bf16, which is within "
        "its own bounds"
    )
    layouts = "1 layout" if len(ran) == 1 else f"{len(ran)} layouts"
    sentence = f"{other}{within}: {what}, in {layouts}; {largest}"
    if proof.undirected:
        which = " and ".join(f"{count} parameters of {rule}" for rule, count in proof.undirected.items())
        sentence += (
            f"; updates of {which} were computed again from the run's own numbers, but their directions "
            "not compared with fp64's,"
            " as AdamW's are"
        )
    if proof.untouched is not None and proof.untouched.not_compared:
        sentence += f"; not compared with the untouched module: {', '.join(proof.untouched.not_compared)}"
    if proof.callbacks:
        sentence += f"; {proof.callbacks} ran in each layout and changed nothing"
    if lacking := next((result.not_replayed for result in ran if result.not_replayed), ""):
        return f"NO DIFFERENCE FOUND from {sentence}; NOT PROVED, because not computed again: the {lacking}"
    return f"EQUAL to {sentence}"


def bound_of(bounds: Bounds | None, difference: Difference) -> str:
    """The bound of a difference in fp64, and the condition that it comes from, if that was measured."""
    if bounds is None or not bounds.exact:
        return ""
    bound, change = bounds.of(difference), bounds.change(difference)
    if bound == BOUND:
        return f", bound {bound:.0e}"
    return (
        f", bound {bound:.1e}: one unit in the last place of the first weights changes this model by "
        f"{change:.1e}, and {CONDITION_FACTOR:.0f} times that passes, at most {LARGEST_BOUND:.0e}"
    )


def near_ties(result: Result) -> Iterator[str]:
    """Where routers chose other experts whose scores are as good: the layout went on with the reference's."""
    for d in result.differences.values():
        if d.kind == ROUTING and d.relative and d not in result.beyond:
            yield (
                f"{result.layout.name}: a near tie of {d.name} in step {d.step}, scores "
                f"{d.relative:.0e} apart, as one process decided it"
            )


def show(proof: Proof, self_check: Report | None = None) -> None:
    """Prints the whole report; what the self-checks found comes first."""
    console = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else WIDTH)
    for line in () if self_check is None else lines(self_check):
        console.print(line, markup=False)
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
    for line in explain_wrong_model(proof):
        console.print(line, markup=False)
    console.print(verdict(proof), markup=False)
    if self_check is not None and self_check.wrong:
        console.print(self_check_verdict(self_check), markup=False)
