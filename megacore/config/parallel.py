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
    tensor: Ranks = 1
    pipeline: Ranks = 1
    data: Ranks | Literal["auto"] = Field("auto", description="auto: world size / all other axes")
    context: Ranks = Field(
        1, description="ranks that divide the tokens of every sample among themselves, in every layer"
    )
    expert: Ranks = Field(
        1,
        description="ranks that divide the experts of a block; they are taken from data, context and "
        "tensor ranks",
    )
    expert_tensor: Ranks | None = Field(
        None, description="ranks that divide each expert; null: as many as tensor"
    )
    expert_halves: bool = Field(
        False,
        description="tokens go to experts in two halves: rows of one travel while experts compute the other",
    )
    context_method: Literal["auto", "gather", "ring", "ulysses"] = Field(
        "auto",
        description="how context ranks attend: gather all keys and values; pass them round; exchange "
        "sequences for heads; "
        "auto: the fastest by the planner's estimate, see docs/long_texts.md",
    )
    sequence: bool = Field(
        False, description="split norms, dropout and residuals along the tokens over the tensor ranks"
    )
    schedule: (
        Literal["1f1b", "gpipe", "interleaved", "zb_h1", "zb_v", "v_half", "v_min", "auto"] | PlanFile
    ) = Field(
        "1f1b",
        description="docs/schedules.md compares them; some leave weights' gradients for gaps in the "
        "pipeline; "
        "auto: the fastest that a search finds; file: a plan of your own",
    )
    chunks: Ranks | None = Field(
        None,
        description="model chunks a rank; null: as many as the schedule needs at least, or as auto chooses",
    )
    backend: Literal["auto", "nccl", "gloo"] = Field("auto", description="auto: nccl on GPUs, gloo on CPUs")
    shared_memory: bool = Field(
        True,
        description="tensor ranks on one machine's CPU communicate through memory, not through gloo's "
        "sockets",
    )
    timeout_seconds: Seconds = Field(
        1800.0, description="for every collective of every group; more than 4 × hang_seconds"
    )
    hang_seconds: Seconds | None = Field(
        300.0,
        description="a rank that does nothing for so long ends the job with a verdict on the cause; "
        "longer than saving takes; "
        "before the first step it may take four times as long; null: never",
    )
    heartbeat_seconds: Annotated[float, Field(ge=1, le=1e8)] | None = Field(
        15.0,
        description="a host that others hear nothing of for so long is lost, and all ranks end; null: "
        "hosts are not watched",
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
