"""The section `parallel`: sizes of the mesh's axes, the schedule of the pipeline, and
how ranks communicate.
"""

from math import prod
from typing import Annotated, Literal

from pydantic import Field

from megacore.distributed.axes import AXES
from megacore.section import Ranks, Seconds, Section

PlanFile = Annotated[str, Field(pattern=r"^file:.", title="file:PLAN.json")]

# The chunks of the model that a rank has under each schedule; under `interleaved` at least.
CHUNKS = {"1f1b": 1, "gpipe": 1, "interleaved": 2, "zb_h1": 1, "zb_v": 2, "v_half": 2, "v_min": 2}
# the chunks go there and back: the first rank has both ends of the model
V_SHAPED = ("zb_v", "v_half", "v_min")


class ParallelConfig(Section):
    """The axes of the device mesh, the pipeline schedule, and communication between ranks."""

    tensor: Ranks = Field(
        1,
        description="tensor-parallel ranks: each weight matrix and its computation are split over this "
        "many ranks",
    )
    pipeline: Ranks = Field(
        1, description="pipeline-parallel ranks (stages): the blocks are split over this many ranks"
    )
    data: Ranks | Literal["auto"] = Field(
        "auto",
        description="data-parallel ranks, each of which trains on its own samples; auto: the world size "
        "divided by all other axes",
    )
    context: Ranks = Field(
        1,
        description="context-parallel ranks: the tokens of every sample are split over this many ranks in "
        "all layers",
    )
    expert: Ranks = Field(
        1,
        description="expert-parallel ranks: the experts of a block are split over this many ranks, which "
        "are taken from the data, context and tensor ranks",
    )
    expert_tensor: Ranks | None = Field(
        None, description="ranks that split each expert's matrices; null: the value of `tensor`"
    )
    expert_halves: bool = Field(
        False,
        description="exchange a microbatch's tokens with the experts in two halves, so that one half is "
        "communicated while the other is computed",
    )
    context_method: Literal["auto", "gather", "ring", "ulysses"] = Field(
        "auto",
        description="how context ranks attend: gather all keys and values, pass them around a ring, or "
        "exchange sequences for heads (Ulysses); auto: the fastest by the planner's estimate; "
        "see docs/long_texts.md",
    )
    sequence: bool = Field(
        False,
        description="sequence parallelism: split norms, dropout and residuals along the tokens over the "
        "tensor ranks",
    )
    schedule: (
        Literal["1f1b", "gpipe", "interleaved", "zb_h1", "zb_v", "v_half", "v_min", "auto"] | PlanFile
    ) = Field(
        "1f1b",
        description="pipeline schedule; auto: the fastest that a search finds; file:PLAN.json: your own "
        "plan; see docs/schedules.md",
    )
    chunks: Ranks | None = Field(
        None,
        description="model chunks per pipeline rank; null: the fewest that the schedule allows, or the "
        "choice of auto",
    )
    backend: Literal["auto", "nccl", "gloo"] = Field(
        "auto", description="communication backend of torch.distributed; auto: nccl on GPUs, gloo on CPUs"
    )
    shared_memory: bool = Field(
        True,
        description="let tensor ranks on the CPUs of one host communicate through shared memory instead "
        "of gloo's sockets",
    )
    timeout_seconds: Seconds = Field(
        1800.0, description="timeout of every collective, in seconds; must exceed 4 × `hang_seconds`"
    )
    hang_seconds: Seconds | None = Field(
        300.0,
        description="hang watchdog: seconds without progress on a rank after which the job ends with a "
        "diagnosis, four times as long before the first step; must exceed the time to save a "
        "checkpoint; null: no watchdog",
    )
    heartbeat_seconds: Annotated[float, Field(ge=1, le=1e8)] | None = Field(
        15.0,
        description="seconds without a heartbeat after which a host counts as lost and all ranks end; "
        "null: hosts are not watched",
    )

    def described(self) -> str:
        """The axes' sizes, such as `tensor 2 × pipeline 1 × data 4`."""
        told = [axis for axis in reversed(AXES) if not axis.rare or getattr(self, axis.title) > 1]
        told.sort(key=lambda axis: (axis.title == "data", axis.rare))
        return " × ".join(f"{axis.title} {getattr(self, axis.title)}" for axis in told)

    @property
    def ranks_besides_data(self) -> int:
        """The product of all axes but data, which has what remains of the world if it is `auto`."""
        return prod(getattr(self, axis.title) for axis in AXES if axis.title != "data")
