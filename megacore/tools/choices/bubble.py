"""How long a pipeline's ranks wait in a step, and when that is worth a warning."""

from collections.abc import Sequence

from megacore.config.schema import Config
from megacore.tools.choices.partition import step_times

LARGE = 0.4  # of a step: nearly half of the devices are paid for nothing
SMALL = 4  # microbatches for each rank of the pipeline but one, with which 1F1B waits for a fifth of a step


def bubble(makespan: float, busy: Sequence[float]) -> float:
    """The part of a step that the pipeline's ranks wait, by what `step_times` gives."""
    return 1 - sum(busy) / (len(busy) * makespan)


def bubble_warning(config: Config) -> str | None:
    """A line about a pipeline that waits for a large part of its step."""
    ranks, count = config.parallel.pipeline, config.num_microbatches
    if ranks == 1 or (waiting := bubble(*step_times(config))) < LARGE:
        return None
    more = "a larger train.global_batch_size, a smaller train.micro_batch_size, fewer data ranks, or "
    more = more if count < SMALL * (ranks - 1) else ""
    return (
        f"WARNING: the pipeline's ranks wait for {waiting:.1%} of a step, with {count} "
        f"microbatch{'es' * (count > 1)} for {ranks} ranks"
        f" ({more}another schedule: launch/plan.py --compare-schedules)"
    )
