"""Keys of the section `model` for multi-head latent attention: how many numbers keys and values are
made of, and a head's features.
"""

from pydantic import Field

from megacore.section import Count, Section


class LatentSettings(Section):
    kv_rank: Count | None = Field(
        None,
        description="features of the latent vector from which the keys and values of all heads are "
        "computed (multi-head latent attention, DeepSeek-V2); null: plain attention",
    )
    q_rank: Count | None = Field(
        None,
        description="features of the latent vector from which queries are computed; null: queries are "
        "computed from the hidden states directly",
    )
    plain_size: Count = Field(
        128,
        description="with `kv_rank`: features of each query and key head without rotary positions; "
        "`head_size` further features have them",
    )
    value_size: Count = Field(128, description="with `kv_rank`: features of each value head")
