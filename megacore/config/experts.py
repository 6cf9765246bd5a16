"""Keys of the section `model` for mixtures of experts: which blocks have them, how their router chooses,
and how it is kept in balance.
"""

from typing import Literal

from pydantic import Field

from megacore.section import Count, Factor, NonNegative, Rows, Section, Whole, Width


class ExpertSettings(Section):
    num_experts: Width | None = Field(
        None,
        description="number of experts in an MoE block; null: a dense model, with one feed-forward layer "
        "per block",
    )
    experts_per_token: Width = Field(
        2, description="number of experts that the router chooses for each token (top-k)"
    )
    expert_ffn_size: Rows | None = Field(None, description="hidden features of one expert; null: `ffn_size`")
    shared_experts: Whole = Field(
        0,
        description="number of experts that every token passes through in addition to the chosen ones; "
        "they are built as one layer, n times the size of an expert",
    )
    first_dense: Whole = Field(
        0, description="number of blocks at the start of the model that have a dense feed-forward layer"
    )
    experts_every: Count = Field(
        1, description="every n-th block after `first_dense` has experts; the others are dense"
    )
    router_scores: Literal["softmax", "sigmoid"] = Field(
        "softmax", description="function that turns the router's logits over all experts into scores"
    )
    router_normalised: bool = Field(
        True, description="divide the weights of a token's experts by their sum, so that they add up to 1"
    )
    router_scale: Factor = Field(1.0, description="factor on the weights of a token's experts")
    expert_groups: Width = Field(
        1,
        description="number of groups that the experts are divided into; each token first chooses "
        "`groups_per_token` groups and then experts within them (DeepSeek-V3)",
    )
    groups_per_token: Width = Field(1, description="number of groups that a token's experts may come from")
    capacity_factor: Factor | None = Field(
        None,
        description="maximum number of rows per expert and microbatch in training, as a multiple of the "
        "mean load; rows beyond it are dropped, those with the smallest weights first; null: "
        "no limit",
    )
    router_balance: Literal["none", "sequence", "global"] = Field(
        "none",
        description="auxiliary loss that spreads tokens over experts; sequence: based on the expert loads "
        "within each sequence; global: based on the loads of the previous step's global batch",
    )
    balance_coefficient: NonNegative = Field(
        0.01, description="coefficient of the balance loss of `router_balance`"
    )
    router_z_loss: NonNegative = Field(
        0.0,
        description="coefficient of the router z-loss, the mean squared log-sum-exp of the router's "
        "logits; 0: no such loss",
    )
    router_bias: bool | None = Field(
        None,
        description="choose experts by score plus a per-expert bias, which does not affect their weights; "
        "null: true if `router_bias_rate` is above 0",
    )
    router_bias_rate: NonNegative = Field(
        0.0,
        description="balancing without a loss (DeepSeek-V3): amount by which each step moves every "
        "expert's bias towards the mean load; 0: the biases stay fixed",
    )

    def has_experts(self, block: int) -> bool:
        """Whether a block's feed-forward layer is a mixture of experts, by its number from 0."""
        behind = block - self.first_dense
        return self.num_experts is not None and behind >= 0 and (behind + 1) % self.experts_every == 0
