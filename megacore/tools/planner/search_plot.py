"""Draws what a search found: the best layouts' memory, the best one's pipeline, and the time and
memory of all that were compared.
"""

from typing import Any

from megacore.distributed.axes import AXES
from megacore.pipeline.partition import plan_of
from megacore.pipeline.schedule import COMPUTE
from megacore.tools.charts import SMALL, label_panel, new_figure
from megacore.tools.choices.partition import partitioned, simulated
from megacore.tools.planner.plot import FACE, NAMES
from megacore.tools.planner.search import Candidate, Found

BARS = 5
MOST_SHOWN = 24  # microbatches of the timeline
# What a device holds, apart from the colours of what it does in the timeline below.
PARTS = {
    "parameters": "#1f4e79",
    "gradients": "#5b9bbf",
    "optimizer": "#a9cce3",
    "activations": "#b5651d",
    "gathered": "#8e7cc3",
}
GIB = 2**30
BESIDES = "#b0b0b0"
FITS, DOES_NOT = "#2a9d8f", "#c0392b"


def draw_search(found: Found, limit: float, path: str) -> None:
    """Write the picture to `path`, of the format that its ending tells.

    Raises `OSError` if it cannot be written.
    """
    best = found.fit[:BARS]
    pipeline_inches = 1.2 + 0.09 * max(8, min(64, found.fit[0].config.parallel.pipeline))
    heights = [1.3 + 0.45 * len(best), 3.0, pipeline_inches]
    figure = new_figure(sum(heights))
    memory, times, pipeline = figure.subplots(3, 1, height_ratios=heights)
    draw_memory(memory, best, limit)
    draw_times(times, found, limit)
    draw_timeline(pipeline, found.fit[0])
    figure.savefig(path)


def draw_memory(axes: Any, best: list[Candidate], limit: float) -> None:
    """Draw what the fullest device holds in each of the best layouts."""
    for row, candidate in enumerate(best):
        _, memory, needs = candidate.memory
        amounts = {name: getattr(memory, name) / GIB for name in PARTS}
        amounts["besides tensors"] = needs - sum(amounts.values())
        left = 0.0
        for name, amount in amounts.items():
            label = name if row == 0 else None
            axes.barh(row, amount, left=left, height=0.6, color=PARTS.get(name, BESIDES), label=label)
            left += amount

        # The layout is written above its bar: as the bar's tick it would take a third of the width.
        text = f"{row + 1}. {candidate.seconds:.3g} s: {label_of(candidate)}"
        axes.annotate(text, (0, row - 0.34), (0, 0), textcoords="offset points", va="bottom", fontsize=SMALL)
    label_panel(axes, "memory of the fullest device in the best layouts", "GiB")
    axes.axvline(limit, color="black", linewidth=1, linestyle="--")
    axes.set_yticks([])
    axes.set_ylim(len(best) - 0.6, -0.9)
    axes.legend(fontsize=SMALL, ncols=1, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)


def draw_times(axes: Any, found: Found, limit: float) -> None:
    """Draw step time over memory of all layouts that were compared."""
    for candidates, colour, verdict in ((found.too_large, DOES_NOT, "do not fit"), (found.fit, FITS, "fit")):
        needs = [candidate.needs_gib for candidate in candidates]
        seconds = [candidate.seconds for candidate in candidates]
        axes.scatter(needs, seconds, s=10, color=colour, label=f"{len(candidates):,} {verdict}")
    axes.axvline(limit, color="black", linewidth=1, linestyle="--")
    axes.set_xlim(0, 3 * limit)
    label_panel(
        axes,
        f"layouts that were compared, up to {3 * limit:.0f} GiB",
        "GiB that a device must have",
        "s a step",
    )
    axes.legend(fontsize=SMALL, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)


def label_of(candidate: Candidate) -> str:
    """A layout in brief, as proofs name it, with what else the search chooses."""
    config = candidate.config
    train, parallel, engine = config.train, config.parallel, config.engine
    inner_first = AXES[::-1]
    order = sorted(inner_first, key=lambda axis: axis.title == "data")  # as in the names of layouts
    axes = " ".join(f"{axis.name}{config.sizes[axis.name]}" for axis in order if config.sizes[axis.name] > 1)
    schedule = f" @{parallel.schedule}" if parallel.pipeline > 1 else ""
    state = "fsdp" if engine.kind == "fsdp" else "sharded" if engine.shard_optimizer else "native"
    recompute = "" if train.recompute == "none" else f", recompute {train.recompute}"
    return (
        f"{axes}{' sp' * parallel.sequence}{schedule}, microbatch {train.micro_batch_size}, "
        f"{state}{recompute}"
    )


def draw_timeline(axes: Any, best: Candidate) -> None:
    """Draw the first microbatches of the best layout's pipeline."""
    config = best.config
    few = min(config.num_microbatches, max(MOST_SHOWN, 2 * config.parallel.pipeline))
    train = config.train.model_copy(
        update={"global_batch_size": few * config.train.micro_batch_size * config.data_size}
    )
    shown = partitioned(config.model_copy(update={"train": train}))
    for rank, row in enumerate(simulated(shown, plan_of(shown)).spans):
        for op, color in FACE.items():
            spans = [(s.start, s.end - s.start) for s in row if s.action.op in COMPUTE and s.action.op is op]
            label = NAMES.get(op, op.value) if rank == 0 and spans else None
            axes.broken_barh(
                spans, (rank - 0.45, 0.9), color=color, edgecolor="white", linewidth=0.3, label=label
            )
    stages = best.config.parallel.pipeline
    label_panel(
        axes, f"the best layout's pipeline, {few} of {config.num_microbatches} microbatches", "time",
        "pipeline rank",
    )  # fmt: skip
    axes.grid(visible=False)
    axes.invert_yaxis()
    axes.set_xticks([])
    axes.set_yticks([0, stages - 1] if stages > 1 else [0])
    # as wide as the panels above, whose legends have the column at the right
    axes.legend(fontsize=SMALL, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
