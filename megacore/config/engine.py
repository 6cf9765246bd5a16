"""The section `engine`: who holds gradients and the optimizer's state, and how gradients travel."""

from typing import Annotated, Any, Literal

from pydantic import Field

from megacore.section import Count, Factor, Ranks, Section


class Int8Compression(Section):
    """Gradients are sent as 8-bit integers with one scale per block of consecutive elements.

    The rounding error of a step is added to the gradients of the next step (error feedback).
    """

    kind: Literal["int8"] = Field(
        description="int8: send each gradient as 8-bit integers with one scale per block"
    )
    block: Literal[64, 128, 256, 512, 1024] = Field(
        256, description="consecutive elements that share one scale"
    )
    rounding: Literal["nearest", "none"] = Field(
        "nearest",
        description="nearest: round to the nearest code; none: keep the blocks and scales but do not "
        "round, so that a proof can compare exact sums",
    )

    @property
    def exact(self) -> bool:
        """Whether the sum is the plain one, but for the order of additions."""
        return self.rounding == "none"

    def sent_bytes(self, numbers: int, number_bytes: int) -> int:
        """What so many numbers, which have `number_bytes` each, become: codes, and a scale for each block."""
        return numbers * (number_bytes if self.exact else 1) + numbers // self.block * number_bytes


class LowRankCompression(Section):
    """Gradient matrices are sent as two factors of `rank` columns (PowerSGD, Vogels et al. 2019).

    The approximation error of a step is added to the gradients of the next step (error feedback).
    """

    kind: Literal["low_rank"] = Field(
        description="low_rank: send each gradient matrix as two factors (PowerSGD)"
    )
    rank: Count | None = Field(
        4,
        description="columns of the two factors; null: the rank of the matrix, which is exact and saves "
        "no traffic, for proofs",
    )

    @property
    def exact(self) -> bool:
        """Whether the sum is the plain one, but for the order of additions."""
        return self.rank is None


Compression = Annotated[Int8Compression | LowRankCompression, Field(discriminator="kind")]


class EngineConfig(Section):
    """The engine that holds the optimizer state, reduces gradients and updates weights."""

    kind: Literal["native", "deepspeed", "fsdp"] = Field(
        "native",
        description="what holds the optimizer state, reduces gradients and updates weights: megacore's "
        "own engine, DeepSpeed, or PyTorch FSDP2",
    )
    config: str | dict[str, Any] | None = Field(
        None, description="deepspeed: the ds_config, as an object or as the path of a JSON file"
    )
    shard_optimizer: bool = Field(
        False,
        description="native: shard the optimizer state and the update over the data ranks (ZeRO stage 1)",
    )
    shard_size: Ranks | None = Field(
        None,
        description="fsdp: number of neighbouring data ranks that shard one copy of the state, with "
        "replicas between such groups (HSDP); null: all data ranks",
    )
    reshard: bool | None = Field(
        None,
        description="fsdp: gather a block's parameters for each pass and reduce its gradients after each "
        "microbatch (least memory), instead of once per step (least traffic); null: true "
        "without a pipeline, false with one",
    )
    cpu_offload: bool = Field(
        False,
        description="fsdp: keep parameters, gradients and optimizer state in host memory and update them "
        "there",
    )
    bucket_mib: Factor | None = Field(
        None,
        description="native: size of a gradient bucket, in MiB of fp32, that is reduced by one "
        "collective; null: 25, or 4 per data rank if that is larger",
    )
    reduce_dtype: Literal["fp32", "bf16"] = Field(
        "fp32",
        description="native: dtype in which gradients travel between data ranks; they are always added in "
        "fp32. With `reduce_levels=2`, bf16 applies to the links between hosts only",
    )
    reduce_levels: Literal[1, 2] = Field(
        1,
        description="native: 2 reduces gradients within each host first and then between hosts, so that "
        "less data crosses slow links",
    )
    compression: Compression | None = Field(
        None,
        description='native: compress gradients between data ranks, with error feedback: `{"kind": '
        '"int8"}` or `{"kind": "low_rank", "rank": 4}`; null: no compression',
    )
