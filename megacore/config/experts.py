"""Keys of the section `model` for mixtures of experts: which blocks have them, how their router chooses,
and how it is kept in balance.
"""

from typing import Literal

from pydantic import Field

from megacore.section import Count, Factor, NonNegative, Rows, Section, Whole, Width


class ExpertSettings(Section):
    num_experts: Width | None = Field(
        None, description="experts of a block's feed-forward layer; null: it is one for all tokens"
    )
    experts_per_token: Width = Field(2, description="experts that the router chooses for each token")
    expert_ffn_size: Rows | None = Field(None, description="features within an expert; null: ffn_size")
    shared_experts: Whole = Field(
        0,
        description="experts that all tokens go through besides; they are one layer of so many times the "
        "size",
    )
    first_dense: Whole = Field(0, description="the first blocks that have no experts")
    experts_every: Count = Field(1, description="of the others, every n-th block has experts")
    router_scores: Literal["softmax", "sigmoid"] = Field(
        "softmax", description="what becomes of a token's logits over all experts"
    )
    router_normalised: bool = Field(
        True, description="the weights of a token's experts are divided by their sum"
    )
    router_scale: Factor = Field(1.0, description="factor on the weights of a token's experts")
    expert_groups: Width = Field(
        1,
        description="groups of experts, of which a token chooses some before it chooses experts "
        "(DeepSeek-V3)",
    )
    groups_per_token: Width = Field(1, description="groups from which a token's experts come")
    capacity_factor: Factor | None = Field(
        None,
        description="rows that an expert takes of a microbatch in training, as a part of the mean; others "
        "are dropped; null: all",
    )
    router_balance: Literal["none", "sequence", "global"] = Field(
        "none",
        description="the loss that spreads tokens over experts: by the counts of each sequence, or by "
        "those of the global batch before",
    )
    balance_coefficient: NonNegative = Field(0.01, description="of that loss")
    router_z_loss: NonNegative = Field(
        0.0, description="coefficient of the mean squared logsumexp of the router's logits; 0: no such loss"
    )
    router_bias: bool | None = Field(
        None,
        description="experts are chosen by their scores and a bias, which weighs nothing; null: where "
        "router_bias_rate is above 0",
    )
    router_bias_rate: NonNegative = Field(
        0.0,
        description="balance without a loss: a step moves each expert's bias by so much, towards the mean "
        "load; 0: it stays",
    )

    def has_experts(self, block: int) -> bool:
        """Whether a block's feed-forward layer is a mixture of experts, by its number from 0."""
        behind = block - self.first_dense
        return self.num_experts is not None and behind >= 0 and (behind + 1) % self.experts_every == 0
