"""The section `engine`: who holds gradients and the optimizer's state, and how gradients travel."""

from typing import Annotated, Any, Literal

from pydantic import Field

from megacore.section import Count, Factor, Ranks, Section


class Int8Compression(Section):
    """Gradients travel in 8 bits, with a scale for each block of consecutive numbers; what was rounded
    away is added in the next step.
    """

    kind: Literal["int8"]
    block: Literal[64, 128, 256, 512, 1024] = 256
    rounding: Literal["nearest", "none"] = Field(
        "nearest", description="none: blocks and scales, but nothing is rounded or saved: a proof"
    )

    @property
    def exact(self) -> bool:
        """Whether the sum is the plain one, but for the order of additions."""
        return self.rounding == "none"

    def sent_bytes(self, numbers: int, number_bytes: int) -> int:
        """What so many numbers, which have `number_bytes` each, become: codes, and a scale for each block."""
        return numbers * (number_bytes if self.exact else 1) + numbers // self.block * number_bytes


class LowRankCompression(Section):
    """Gradients of matrices travel as two factors of `rank` columns (PowerSGD); what these
    lack is added in the next step.
    """

    kind: Literal["low_rank"]
    rank: Count | None = Field(
        4, description="null: that of the matrix, which loses nothing and saves nothing: a proof"
    )

    @property
    def exact(self) -> bool:
        """Whether the sum is the plain one, but for the order of additions."""
        return self.rank is None


Compression = Annotated[Int8Compression | LowRankCompression, Field(discriminator="kind")]


class EngineConfig(Section):
    kind: Literal["native", "deepspeed", "fsdp"] = "native"
    config: str | dict[str, Any] | None = Field(
        None, description="deepspeed: a ds_config as an object or a file's path"
    )
    shard_optimizer: bool = Field(
        False,
        description="native: each data rank keeps and updates a part of the optimizer's state only (ZeRO "
        "stage 1)",
    )
    shard_size: Ranks | None = Field(
        None,
        description="fsdp: neighbouring data ranks that divide one copy of the state; others hold copies "
        "of it; null: all data ranks",
    )
    reshard: bool | None = Field(
        None,
        description="fsdp: gather a block's parameters for each pass and reduce its gradients after each "
        "microbatch (least memory), "
        "not once a step (least traffic); null: where there is no pipeline",
    )
    cpu_offload: bool = Field(
        False,
        description="fsdp: parameters, gradients and optimizer state rest, and are updated, in host memory",
    )
    bucket_mib: Factor | None = Field(
        None,
        description="native: size of a gradient bucket, reduced as a whole, in MiB of fp32; null: 25, or "
        "4 a data rank if that is more",
    )
    reduce_dtype: Literal["fp32", "bf16"] = Field(
        "fp32",
        description="native: the dtype in which gradients travel between data ranks; they are added up in "
        "fp32. "
        "With two levels bf16 is for the links between hosts",
    )
    reduce_levels: Literal[1, 2] = Field(
        1,
        description="native: 2: gradients are summed within each host first, and then between hosts, so "
        "that these send less",
    )
    compression: Compression | None = Field(
        None,
        description="native: how gradients are made smaller on their way between data ranks, with error "
        "feedback: "
        '{"kind": "int8"} or {"kind": "low_rank", "rank": 4}; null: they are not',
    )
