"""What a comparison says: of both models before it, and of their losses behind
it; as text, try.json and try.png.
"""

import math
import sys
from statistics import median

from megacore.errors import ConfigError
from megacore.files import write_json
from megacore.tools.output_files import replaced
from megacore.tools.versus.comparison import LAST, Comparison
from megacore.tools.versus.contenders import differences
from megacore.tools.versus.picture import draw
from megacore.tools.versus.verdict import compare, interval


def announce(comparison: Comparison, match: str) -> None:
    """Prints what is compared: size and work of both, and their settings that differ."""
    from rich.console import Console
    from rich.table import Table

    console = Console(
        highlight=False, markup=False, soft_wrap=True, width=None if sys.stdout.isatty() else 140
    )
    idea, other = comparison.contenders
    table = Table("", "parameters", "operations a token", "tokens", "operations", box=None)
    for contender in comparison.contenders:
        flops = contender.flops
        work = (
            ("not known", "not known")
            if flops is None
            else (f"{flops:,.0f}", f"{flops * contender.tokens:.3g}")
        )
        table.add_row(contender.name, f"{contender.parameters:,}", work[0], f"{contender.tokens:,}", work[1])
    console.print(table)
    settings = Table("differs", idea.name, other.name, box=None)
    for row in differences(idea, other):
        settings.add_row(*row)
    console.print(settings)
    if match == "none":
        console.print("Their work was not matched: --match none.")


def report(comparison: Comparison) -> None:
    """Prints the table and the verdict of the pairs that are finished, and writes try.json and try.png."""
    from rich.console import Console
    from rich.table import Table

    console = Console(
        highlight=False, markup=False, soft_wrap=True, width=None if sys.stdout.isatty() else 140
    )
    metric = (
        "validation loss after the last step"
        if comparison.metric == "valid_loss"
        else f"mean of the last {LAST} logged losses"
    )
    pairs = [pair for pair in comparison.pairs() if all(row.finished for row in pair)]
    if not pairs:
        console.print("no pair of runs has finished")
        return
    curves = [(comparison.curve(own), comparison.curve(theirs)) for own, theirs in pairs]
    table = Table("", "rate", "tokens", "loss", "± 95%", "lowest", "highest", "seconds a step", box=None)
    for which, contender in enumerate(comparison.contenders):
        finals = [pair[which].final for pair in curves]
        mean, half = interval(finals)
        numbers = [f"{value:.4f}" for value in (mean, half, min(finals), max(finals))]
        rate = f"×{pairs[0][which].trial.swept['rate']:g}"
        seconds = median(pair[which].seconds for pair in curves)
        table.add_row(contender.name, rate, f"{contender.tokens:,}", *numbers, f"{seconds:.3g}")
    console.print(table)
    idea, other = comparison.contenders
    verdict = compare(idea.name, other.name, curves, LAST)
    lines = [f"loss: {metric}, {len(pairs)} seeds", *verdict.lines(), *edges(comparison)]
    for line in lines:
        console.print(line)
    path = comparison.folder.path
    written = {
        "idea": idea.name,
        "other": other.name,
        "metric": comparison.metric,
        "pairs": [finite(gap) for gap in verdict.differences],
    }
    found = {
        "mean": finite(verdict.mean),
        "half": finite(verdict.half),
        "sure": verdict.sure,
        "reached": verdict.reached,
        "lines": lines,
    }
    write_json("--output", path / "try.json", written | found)
    try:
        with replaced(str(path / "try.png")) as aside:
            draw(verdict, curves, LAST, metric, aside)
    except OSError as error:
        raise ConfigError(
            "--output", f"cannot write {path / 'try.png'}: {error.strerror}", "a folder with room"
        ) from None
    console.print(f"\nin {path}: try.json, try.png")


def finite(value: float) -> float | None:
    """A number that JSON has."""
    return value if math.isfinite(value) else None


def edges(comparison: Comparison) -> list[str]:
    """A line for each contender whose best rate is the smallest or the largest
    that was tried, or the only one.
    """
    if len(comparison.rates) == 1:
        return ["One learning rate was tried for both, and it may suit one of them better: --rates 0.5,1,2."]
    found = []
    for contender in comparison.contenders:
        best = comparison.best_rate(contender)
        if best in (comparison.rates[0], comparison.rates[-1]):
            which = "smallest" if best == comparison.rates[0] else "largest"
            found.append(
                f"The best rate of {contender.name}, ×{best:g}, is the {which} that was tried: a better "
                "one may lie beyond it."
            )
    return found
