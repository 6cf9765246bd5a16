"""Keys of the section `model` for multi-head latent attention: how many numbers keys and values are
made of, and a head's features.
"""

from pydantic import Field

from megacore.section import Count, Section


class LatentSettings(Section):
    kv_rank: Count | None = Field(
        None,
        description="features of the latent that all heads' keys and values are made of (DeepSeek-V2); "
        "null: plain attention",
    )
    q_rank: Count | None = Field(
        None, description="features of the queries' latent; null: queries are made of the hidden states"
    )
    plain_size: Count = Field(
        128,
        description="with kv_rank: features of a head's query and key that do not turn; head_size others do",
    )
    value_size: Count = Field(128, description="with kv_rank: features of a head's value")
