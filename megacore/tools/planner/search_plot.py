"""Draws what a search found: the best layouts' memory, the best one's pipeline, and the time and
memory of all that were compared.
"""

from typing import Any

from megacore.distributed.axes import AXES
from megacore.pipeline.partition import plan_of
from megacore.pipeline.schedule import COMPUTE
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
BESIDES = "#b0b0b0"
FITS, DOES_NOT = "#2a9d8f", "#c0392b"


def draw_search(found: Found, limit: float, path: str) -> None:
    """Writes the picture to `path`, of the format that its ending names.

    Raises `OSError` if it cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 7), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(2, 2)
    memory, times, pipeline = (figure.add_subplot(place) for place in (grid[0, 0], grid[0, 1], grid[1, :]))
    bars(memory, found.fit[:BARS], limit)
    for candidates, color, name in ((found.too_large, DOES_NOT, "do not fit"), (found.fit, FITS, "fit")):
        times.scatter(
            [c.needs_gib for c in candidates],
            [c.seconds for c in candidates],
            s=8,
            color=color,
            label=f"{len(candidates):,} {name}",
        )
    times.axvline(limit, color="black", linewidth=1, linestyle="--")
    times.set(
        xlabel="GiB that a device must have",
        ylabel="seconds a step",
        xlim=(0, 3 * limit),
        title=f"the layouts that were compared, up to {3 * limit:g} GiB",
    )
    times.legend(fontsize=8)
    timeline(pipeline, found.fit[0])
    figure.savefig(path, dpi=80)


def bars(axes: Any, best: list[Candidate], limit: float) -> None:
    """What the fullest device holds in each of the best layouts."""
    for row, candidate in enumerate(best):
        _, memory, needs = candidate.memory
        left = 0.0
        amounts = {name: getattr(memory, name) / 2**30 for name in PARTS}
        amounts["besides tensors"] = needs - sum(amounts.values())
        for name, amount in amounts.items():
            axes.barh(
                row, amount, left=left, color=PARTS.get(name, BESIDES), label=name if row == 0 else None
            )
            left += amount
    axes.axvline(limit, color="black", linewidth=1, linestyle="--")
    axes.set_yticks(range(len(best)), [f"{label_of(c)}\n{c.seconds:.3g} s" for c in best], fontsize=8)
    axes.invert_yaxis()
    axes.set(xlabel="GiB of the fullest device", title="the best layouts")
    axes.legend(fontsize=7, ncols=3, loc="upper center", bbox_to_anchor=(0.4, -0.2))


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
        f"{axes}{' sp' * parallel.sequence}{schedule}\nmicrobatch {train.micro_batch_size}, "
        f"{state}{recompute}"
    )


def timeline(axes: Any, best: Candidate) -> None:
    """The first microbatches of the best layout's pipeline."""
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
    axes.invert_yaxis()
    axes.legend(fontsize=8, ncols=len(FACE), loc="lower right", bbox_to_anchor=(1.0, 1.0), frameon=False)
    axes.set(
        xticks=[],
        yticks=[0, best.config.parallel.pipeline - 1],
        ylabel="pipeline rank",
        xlabel=f"{few} of {config.num_microbatches} microbatches: {best.describe()}",
    )
