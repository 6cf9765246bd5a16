"""The section `model`: sizes and kinds of the layers, also of those in a file of a user's own."""

import hashlib
import json
from typing import Annotated, Any, Literal

from pydantic import Field

from megacore.config.experts import ExpertSettings
from megacore.config.latent import LatentSettings
from megacore.section import Count, Epsilon, Factor, Fraction, Positions, Rows, Section, Share, Width


class LinearRope(Section):
    """Divides rotary frequencies by `factor`, which interpolates positions (Chen et al. 2023)."""

    type: Literal["linear"]
    factor: Factor


class Llama3Rope(Section):
    """Divides low rotary frequencies by `factor` and keeps high ones, with a ramp between
    (Grattafiori et al. 2024, Llama 3.1).

    A frequency is low if it turns fewer than `low_freq_factor` times in `original_max_position_embeddings`
    positions, and high if it turns more than `high_freq_factor` times.
    """

    type: Literal["llama3"]
    factor: Factor
    low_freq_factor: Factor
    high_freq_factor: Factor
    original_max_position_embeddings: Positions


class NtkRope(Section):
    """Raises the base of the rotary frequencies so that the slowest one is divided by
    `factor` and the fastest one stays.

    "NTK-aware" scaling (described in Peng et al. 2023, YaRN).
    """

    type: Literal["ntk"]
    factor: Factor


class YarnRope(Section):
    """Divides slow rotary frequencies by `factor` and keeps fast ones, with a ramp between, and sharpens
    scores (Peng et al. 2023, YaRN).

    The ramp starts at the feature that turns `beta_fast` times in `original_max_position_embeddings`
    positions and ends at the one that turns `beta_slow` times; `truncate` widens it to whole features.
    Queries and keys are multiplied by `attention_factor`, which is 0.1·ln(factor) + 1 by default.
    """

    type: Literal["yarn"]
    factor: Factor
    original_max_position_embeddings: Positions
    beta_fast: Factor = 32.0
    beta_slow: Factor = 1.0
    attention_factor: Factor | None = None
    truncate: bool = True


FactorOfPair = Annotated[tuple[Factor, ...], Field(min_length=1, max_length=4096)]


class LongRope(Section):
    """Divides each rotary frequency by a factor of its own, and sharpens scores (Ding et al. 2024, LongRoPE).

    The factors are `short_factor` in a text of up to `original_max_position_embeddings` tokens, and
    `long_factor` in a longer one. A text of another length would thus be another function of the same
    weights. So here texts are at most that long, and the other factors are kept for an export.
    Queries and keys are multiplied by `attention_factor`.
    """

    type: Literal["longrope"]
    short_factor: FactorOfPair
    long_factor: FactorOfPair
    original_max_position_embeddings: Positions
    max_position_embeddings: Positions = Field(description="of the whole model, with long_factor")
    attention_factor: Factor = 1.0


RopeScaling = Annotated[LinearRope | Llama3Rope | NtkRope | YarnRope | LongRope, Field(discriminator="type")]


LastStep = Annotated[Count, Field(title="last step")]


class ModelConfig(ExpertSettings, LatentSettings):
    block: Literal["gpt"] = Field(
        "gpt", description="kind of block: a name in `BLOCKS` of megacore/model/gpt.py"
    )
    source: str | None = Field(
        None,
        min_length=1,
        description="your own file with the model's settings and blocks, which is executed; see "
        "docs/blocks.md",
    )
    source_digest: str | None = Field(
        None, min_length=1, description="of that file's text, SHA-256; null: what it is"
    )
    hf: str | None = Field(
        None,
        min_length=1,
        description="a folder with a config.json of transformers, or a name on the Hugging Face hub: its "
        "class is the model; docs/plain_modules.md",
    )
    hf_revision: str | None = Field(
        None, min_length=1, description="of a name on the hub, the commit; null: the newest"
    )
    hf_config: dict[str, Any] | None = Field(
        None, description="the content of that config.json; null: what it is"
    )
    hf_version: str | None = Field(
        None, min_length=1, description="of transformers, whose code computes; always the installed one"
    )
    num_layers: Count = 12
    hidden_size: Width = 768
    num_heads: Width = 12
    num_kv_heads: Width | None = Field(None, description="key/value heads; null: num_heads (no grouping)")
    head_size: Width | None = Field(
        None, description="features of one attention head; null: hidden_size / num_heads"
    )
    ffn_size: Rows | None = Field(
        None,
        description="null: 4 × hidden_size; where it is gated, as by swiglu, 8/3 × hidden_size, rounded "
        "up to a multiple of 64",
    )
    vocab_size: Rows = 50304
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    norm_offset: bool = Field(
        False, description="norms multiply by 1 + their weights, which begin at 0 (Gemma)"
    )
    norm_place: Literal["pre", "post", "both"] = Field(
        "pre",
        description="where a block's norms stand: before each branch, behind it (OLMo 2), or both (Gemma 2)",
    )
    branches: Literal["serial", "parallel", "shared_norm"] = Field(
        "serial",
        description="serial: the feed-forward layer reads what attention added; parallel: both read the "
        "same (GPT-NeoX); "
        "shared_norm: the same norm of it (GPT-J)",
    )
    embedding_norm: bool = Field(False, description="a norm of the hidden states that enter the first block")
    activation: Literal["gelu", "gelu_erf", "swiglu", "swiglu_clamped", "geglu", "geglu_erf", "relu2"] = (
        Field(
            "gelu",
            description="gelu: its tanh form, as in GPT-2; gelu_erf: exact; swiglu_clamped: gpt-oss's; "
            "geglu: as swiglu, with gelu; "
            "relu2: a ReLU's square",
        )
    )
    position: Literal["learned", "rope"] = "learned"
    max_positions: Positions | None = Field(
        None,
        description="rows of the learned position table, and the longest text that generation may make; "
        "null: train.seq_len",
    )
    rope_theta: Annotated[float, Field(ge=1e-3, le=1e15)] = Field(
        10000.0, description="base of the rotary frequencies"
    )
    window_rope_theta: Annotated[float, Field(ge=1e-3, le=1e15)] | None = Field(
        None,
        description="another base in blocks with a window, where frequencies are not stretched (Gemma 3); "
        "null: the same in all",
    )
    rope_scaling: RopeScaling | None = Field(
        None, description="how rotary frequencies are stretched for longer texts"
    )
    rotary_share: Share = Field(1.0, description="of a head's features, how many rotary positions turn")
    nope_every: Count | None = Field(
        None, description="every n-th block has no rotary positions (NoPE); null: none"
    )
    norm_eps: Epsilon = Field(1e-5, description="added to the variance inside the square root of every norm")
    bias: bool = Field(
        True, description="biases in the linear layers and layernorms, in experts and their routers"
    )
    qkv_bias: bool | None = Field(None, description="biases of queries, keys and values; null: bias")
    output_bias: bool | None = Field(None, description="a bias of attention's output; null: bias")
    qk_norm: bool = Field(
        False, description="an RMS norm over each head's queries and keys, before rotary positions"
    )
    qk_norm_heads: Literal["each", "all"] = Field(
        "each", description="whether it is of each head by itself, or over all (OLMo 2)"
    )
    attention_scale: Factor | None = Field(
        None, description="factor on attention's scores; null: 1 / sqrt(head_size)"
    )
    window: Positions | None = Field(
        None, description="tokens that a token attends to, itself among them; null: all before it"
    )
    window_schedule: Annotated[tuple[tuple[LastStep, Positions], ...], Field(max_length=64)] = Field(
        (),
        description="[[last step, window], …]: up to each of these steps windows are that small, then "
        "model.window",
    )
    global_every: Count | None = Field(
        None, description="every n-th block attends to all tokens, whatever the window; null: none"
    )
    attention_cap: Factor | None = Field(
        None, description="attention's scores s become cap · tanh(s / cap); null: no cap"
    )
    attention_sinks: bool = Field(
        False, description="of each head a learned logit in the softmax's denominator (gpt-oss)"
    )
    attention_gate: Literal["headwise", "elementwise"] | None = Field(
        None,
        description="attention's output times a sigmoid of a product with its input: one of each head, or "
        "of each of their features",
    )
    logit_cap: Factor | None = Field(None, description="the same of the logits")
    embedding_scale: Factor = Field(1.0, description="factor on the token vectors that enter the first block")
    residual_scale: Factor = Field(
        1.0, description="factor on what each half of a block adds to the residual"
    )
    logit_scale: Factor = Field(1.0, description="factor on the logits")
    tie_embeddings: bool = True
    head_bias: bool = Field(
        False,
        description="a bias of the logits, which is separate even where the head's weight is the embedding's "
        "(Phi-2)",
    )
    dropout: Fraction = Field(
        0.0,
        description="on the embedding and on what each block adds to the residual; the same mask in every "
        "layout",
    )
    attention: Literal["auto", "sdpa", "fused", "eager"] = Field(
        "auto",
        description="auto: eager for short sequences on CPUs, where it is faster; else sdpa, which keeps "
        "no scores",
    )
    kernels: Literal["auto", "triton", "eager"] = Field(
        "auto",
        description="fused Triton kernels; auto: on GPUs. triton: also in Triton's interpreter "
        "(TRITON_INTERPRET=1)",
    )
    chunked_loss: bool = Field(
        False,
        description="head and loss in chunks of tokens, so that the logits of a microbatch never exist as "
        "a whole",
    )
    z_loss: Factor | None = Field(
        None, description="weight in the loss of the mean square of the logits' log-sum-exp; null: none"
    )
    init_std: Factor = Field(
        0.02, description="of every weight; layers that write to the residual: / sqrt(2 × num_layers)"
    )
    parametrization: Literal["standard", "mup"] = Field(
        "standard",
        description="mup: first weights, rates and scales by width, so that a rate found at base_width is "
        "right at any; docs/mup.md",
    )
    base_width: Width | None = Field(
        None, description="mup: the hidden_size at which it is the standard parametrization"
    )
    base_head_size: Width | None = Field(
        None, description="mup: the head_size at base_width; null: head_size, and heads grow in number"
    )
    base_layers: Count | None = Field(
        None, description="mup: the num_layers from which residuals are scaled with depth; null: they are not"
    )
    zero_init: bool = Field(False, description="the layers that write to the residual begin at zero")

    def __hash__(self) -> int:
        """Hash all settings but `hf_config`, since JSON objects have no hash."""
        return hash(tuple(value for name, value in self if name != "hf_config"))

    @property
    def is_custom(self) -> bool:
        """Whether its layers are not megacore's own, but a file's or those of a class of transformers."""
        return self.source is not None or self.hf is not None

    @property
    def custom_key(self) -> str:
        """The key that gives such layers: errors in them are errors of this key."""
        return "model.hf" if self.hf is not None else "model.source"

    @property
    def custom_name(self) -> str | None:
        """The value of that key; None if the layers are megacore's own."""
        return self.source if self.hf is None else self.hf

    @property
    def hf_digest(self) -> str | None:
        """SHA-256 of `hf_config`, whatever the order of its keys; None if there is none."""
        if self.hf_config is None:
            return None
        text = json.dumps(self.hf_config, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def gated(self) -> bool:
        """Whether the feed-forward layer multiplies what it makes by a gate."""
        return self.activation in ("swiglu", "swiglu_clamped", "geglu", "geglu_erf")

    @property
    def arranged(self) -> bool:
        """Whether a block's norms or branches stand otherwise than in GPT-2."""
        return self.norm_place != "pre" or self.branches != "serial"

    def rotates(self, block: int) -> bool:
        """Whether a block has rotary positions, by its number from 0."""
        return self.position == "rope" and (self.nope_every is None or (block + 1) % self.nope_every > 0)

    def window_of(self, block: int, step: int | None = None) -> int | None:
        """How many tokens a token of a block sees; None: all before it.

        In a step, or behind all of `window_schedule`.
        """
        if self.global_every is not None and (block + 1) % self.global_every == 0:
            return None
        return next(
            (window for last, window in self.window_schedule if step is not None and step <= last),
            self.window,
        )

    def alike(self, block: int) -> int:
        """The first block that is of the same kind; their parameters are alike in all."""

        def kind(other: int) -> tuple[object, ...]:
            return self.rotates(other), self.window_of(other), self.has_experts(other)

        own = kind(block)
        return next(other for other in range(block + 1) if kind(other) == own)
