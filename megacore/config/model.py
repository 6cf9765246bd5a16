"""The section `model`: sizes and kinds of the layers, also of those in a file of a user's own."""

import hashlib
import json
from typing import Annotated, Any, Literal

from pydantic import Field

from megacore.config.experts import ExpertSettings
from megacore.config.latent import LatentSettings
from megacore.section import Count, Epsilon, Factor, Fraction, Positions, Rows, Section, Share, Width


class LinearRope(Section):
    """Divide all rotary frequencies by `factor` (position interpolation, Chen et al. 2023)."""

    type: Literal["linear"] = Field(description="linear: position interpolation")
    factor: Factor = Field(description="divisor of all rotary frequencies")


class Llama3Rope(Section):
    """Divide low rotary frequencies by `factor` and keep high ones, with a ramp in between (Llama 3.1,
    Grattafiori et al. 2024).
    """

    type: Literal["llama3"] = Field(description="llama3: the scaling of Llama 3.1")
    factor: Factor = Field(description="divisor of the low rotary frequencies")
    low_freq_factor: Factor = Field(
        description="a frequency counts as low if it completes fewer turns than this within the original "
        "context length"
    )
    high_freq_factor: Factor = Field(
        description="a frequency counts as high, and is kept, if it completes more turns than this within "
        "the original context length"
    )
    original_max_position_embeddings: Positions = Field(description="original context length in tokens")


class NtkRope(Section):
    """Raise the base of the rotary frequencies so that the slowest one is divided by `factor` and the
    fastest one is unchanged ("NTK-aware" scaling, described in Peng et al. 2023, YaRN).
    """

    type: Literal["ntk"] = Field(description="ntk: NTK-aware scaling")
    factor: Factor = Field(
        description="divisor of the slowest rotary frequency; the fastest one is unchanged"
    )


class YarnRope(Section):
    """Divide slow rotary frequencies by `factor` and keep fast ones, with a ramp in between, and scale
    queries and keys (YaRN, Peng et al. 2023).
    """

    type: Literal["yarn"] = Field(description="yarn: the scaling of YaRN")
    factor: Factor = Field(description="divisor of the slow rotary frequencies")
    original_max_position_embeddings: Positions = Field(description="original context length in tokens")
    beta_fast: Factor = Field(
        32.0, description="number of turns within the original context length at which the ramp starts"
    )
    beta_slow: Factor = Field(
        1.0, description="number of turns within the original context length at which the ramp ends"
    )
    attention_factor: Factor | None = Field(
        None, description="factor on queries and keys; null: 0.1 · ln(`factor`) + 1"
    )
    truncate: bool = Field(True, description="widen the ramp to whole features")


FactorOfPair = Annotated[tuple[Factor, ...], Field(min_length=1, max_length=4096)]


class LongRope(Section):
    """Divide each rotary frequency by its own factor, and scale queries and keys (LongRoPE, Ding et al.
    2024).

    LongRoPE uses `short_factor` for texts of up to `original_max_position_embeddings` tokens and
    `long_factor` for longer ones, so the function that the weights compute would depend on the text's
    length. Here texts are limited to the original length, and `long_factor` is only kept for an export.
    """

    type: Literal["longrope"] = Field(description="longrope: the scaling of LongRoPE")
    short_factor: FactorOfPair = Field(
        description="divisors of the rotary frequencies, one for each pair of features, for texts up to "
        "the original context length"
    )
    long_factor: FactorOfPair = Field(
        description="divisors for longer texts; kept for an export only, because texts longer than the "
        "original context length are rejected"
    )
    original_max_position_embeddings: Positions = Field(
        description="original context length in tokens; the longest text that is accepted"
    )
    max_position_embeddings: Positions = Field(
        description="context length of the published model, with `long_factor`"
    )
    attention_factor: Factor = Field(1.0, description="factor on queries and keys")


RopeScaling = Annotated[LinearRope | Llama3Rope | NtkRope | YarnRope | LongRope, Field(discriminator="type")]


LastStep = Annotated[Count, Field(title="last step")]


class ModelConfig(ExpertSettings, LatentSettings):
    """The architecture: sizes, kinds and initialization of the layers."""

    block: Literal["gpt"] = Field(
        "gpt", description="kind of transformer block: a name in `BLOCKS` of `megacore/model/gpt.py`"
    )
    source: str | None = Field(
        None,
        min_length=1,
        description="path of a Python file with your own model settings and layers, which is executed; "
        "see docs/blocks.md",
    )
    source_digest: str | None = Field(
        None,
        min_length=1,
        description="SHA-256 of the text of `source`; a file with another digest is rejected; null: "
        "computed when the run starts",
    )
    hf: str | None = Field(
        None,
        min_length=1,
        description="model class of transformers to train: a folder with its config.json, or a model name "
        "on the Hugging Face hub; see docs/models.md",
    )
    hf_revision: str | None = Field(
        None, min_length=1, description="commit of a model on the hub; null: the newest"
    )
    hf_config: dict[str, Any] | None = Field(
        None, description="content of the config.json of `hf`; null: read when the run starts"
    )
    hf_version: str | None = Field(
        None,
        min_length=1,
        description="version of transformers that the run uses; recorded by the run, and always the "
        "installed version",
    )
    num_layers: Count = Field(12, description="number of transformer blocks")
    hidden_size: Width = Field(768, description="features of the hidden states")
    num_heads: Width = Field(12, description="number of query heads of attention")
    num_kv_heads: Width | None = Field(
        None, description="number of key/value heads, for grouped-query attention; null: `num_heads`"
    )
    head_size: Width | None = Field(
        None, description="features of one attention head; null: `hidden_size` / `num_heads`"
    )
    ffn_size: Rows | None = Field(
        None,
        description="hidden features of the feed-forward layer; null: 4 × `hidden_size`, or with a gated "
        "activation 8/3 × `hidden_size`, rounded up to a multiple of 64",
    )
    vocab_size: Rows = Field(50304, description="rows of the token embedding and number of logits")
    norm: Literal["layernorm", "rmsnorm"] = Field("layernorm", description="kind of normalization layer")
    norm_offset: bool = Field(
        False, description="norms multiply by 1 + weight, with weights that start at 0 (Gemma)"
    )
    norm_place: Literal["pre", "post", "both"] = Field(
        "pre",
        description="position of a block's norms: before each branch, after it (OLMo 2), or both (Gemma 2)",
    )
    branches: Literal["serial", "parallel", "shared_norm"] = Field(
        "serial",
        description="serial: the feed-forward layer reads the sum of the residual and attention's output; "
        "parallel: both branches read the residual (GPT-NeoX); shared_norm: both also share "
        "one norm (GPT-J)",
    )
    embedding_norm: bool = Field(
        False, description="apply a norm to the hidden states that enter the first block"
    )
    activation: Literal["gelu", "gelu_erf", "swiglu", "swiglu_clamped", "geglu", "geglu_erf", "relu2"] = (
        Field(
            "gelu",
            description="activation of the feed-forward layer; gelu: tanh approximation, as in GPT-2; "
            "gelu_erf: exact GELU; swiglu, geglu, geglu_erf: gated by SiLU, tanh GELU or exact "
            "GELU; swiglu_clamped: the gate of gpt-oss; relu2: squared ReLU",
        )
    )
    position: Literal["learned", "rope"] = Field(
        "learned", description="position encoding: a learned table, or rotary embeddings (RoPE)"
    )
    max_positions: Positions | None = Field(
        None,
        description="rows of the learned position table, and the longest text that generation may "
        "produce, in tokens; null: `train.seq_len`",
    )
    rope_theta: Annotated[float, Field(ge=1e-3, le=1e15)] = Field(
        10000.0, description="base of the rotary frequencies"
    )
    window_rope_theta: Annotated[float, Field(ge=1e-3, le=1e15)] | None = Field(
        None,
        description="base of the rotary frequencies in blocks with a `window`, which then do not use "
        "`rope_scaling` (Gemma 3); null: the same frequencies in all blocks",
    )
    rope_scaling: RopeScaling | None = Field(
        None, description="rescaling of the rotary frequencies for longer contexts; null: none"
    )
    rotary_share: Share = Field(
        1.0, description="fraction of a head's features that rotary positions apply to"
    )
    nope_every: Count | None = Field(
        None, description="every n-th block has no rotary positions (NoPE); null: all blocks have them"
    )
    norm_eps: Epsilon = Field(
        1e-5, description="epsilon that is added to the variance inside the square root of every norm"
    )
    bias: bool = Field(True, description="biases in linear layers, layernorms, experts and routers")
    qkv_bias: bool | None = Field(
        None, description="biases of the query, key and value projections; null: `bias`"
    )
    output_bias: bool | None = Field(None, description="bias of attention's output projection; null: `bias`")
    qk_norm: bool = Field(False, description="apply an RMS norm to queries and keys before rotary positions")
    qk_norm_heads: Literal["each", "all"] = Field(
        "each", description="scope of `qk_norm`: each head separately, or all heads together (OLMo 2)"
    )
    attention_scale: Factor | None = Field(
        None,
        description="factor on attention scores; null: 1 / √n for query heads of n features, with mup "
        "times √(`base_head_size` / n)",
    )
    window: Positions | None = Field(
        None,
        description="number of tokens that a token attends to, including itself; null: all previous tokens",
    )
    window_schedule: Annotated[tuple[tuple[LastStep, Positions], ...], Field(max_length=64)] = Field(
        (),
        description="windows for the start of training: `[[last step, window], …]` uses each window up to "
        "its last step, and `window` after all of them",
    )
    global_every: Count | None = Field(
        None,
        description="every n-th block attends to all previous tokens regardless of `window`; null: no "
        "such block",
    )
    attention_cap: Factor | None = Field(
        None, description="soft cap c on attention scores: s becomes c · tanh(s / c); null: no cap"
    )
    attention_sinks: bool = Field(
        False,
        description="learn one extra logit per head in the denominator of attention's softmax (gpt-oss)",
    )
    attention_gate: Literal["headwise", "elementwise"] | None = Field(
        None,
        description="multiply attention's output by the sigmoid of a linear function of its input, with "
        "one gate per head or per feature; null: no gate",
    )
    logit_cap: Factor | None = Field(
        None, description="soft cap c on the logits: x becomes c · tanh(x / c); null: no cap"
    )
    embedding_scale: Factor = Field(
        1.0, description="factor on the token embeddings that enter the first block"
    )
    residual_scale: Factor = Field(
        1.0,
        description="factor on the output of attention and of the feed-forward layer before it is added "
        "to the residual",
    )
    logit_scale: Factor = Field(1.0, description="factor on the logits")
    tie_embeddings: bool = Field(True, description="use the token embedding as the weight of the LM head")
    head_bias: bool = Field(
        False, description="bias of the LM head; a separate parameter also with tied embeddings (Phi-2)"
    )
    dropout: Fraction = Field(
        0.0,
        description="dropout probability on the embeddings and on what each block adds to the residual; "
        "masks are identical in every layout",
    )
    attention: Literal["auto", "sdpa", "fused", "eager"] = Field(
        "auto",
        description="implementation of attention; sdpa: PyTorch's scaled_dot_product_attention; fused: the "
        "plain formula with a fused softmax kernel; eager: the plain formula in PyTorch; auto: eager for "
        "short sequences on CPUs, where it is faster, otherwise sdpa",
    )
    kernels: Literal["auto", "triton", "eager"] = Field(
        "auto",
        description="fused Triton kernels; auto: on GPUs only; triton: everywhere, on CPUs in Triton's "
        "interpreter (TRITON_INTERPRET=1); eager: plain PyTorch",
    )
    chunked_loss: bool = Field(
        False,
        description="compute the LM head and the loss in chunks of tokens, so that the logits of a whole "
        "microbatch are never in memory",
    )
    z_loss: Factor | None = Field(
        None,
        description="coefficient of the z-loss, the mean squared log-sum-exp of the logits; null: no such "
        "loss",
    )
    init_std: Factor = Field(
        0.02,
        description="standard deviation of the initial weights; divided by √(2 × `num_layers`) for layers "
        "that write to the residual",
    )
    parametrization: Literal["standard", "mup"] = Field(
        "standard",
        description="mup: scale initial weights, learning rates and outputs with the width, so that a "
        "learning rate tuned at `base_width` holds at any width; see docs/research.md",
    )
    base_width: Width | None = Field(
        None,
        description="mup: `hidden_size` of the model that hyperparameters were tuned on, where mup equals "
        "the standard parametrization",
    )
    base_head_size: Width | None = Field(
        None,
        description="mup: `head_size` at `base_width`; null: `head_size`, so that a wider model has more "
        "heads",
    )
    base_layers: Count | None = Field(
        None,
        description="mup: `num_layers` of the model that hyperparameters were tuned on, for scaling "
        "residuals with depth; null: no scaling with depth",
    )
    zero_init: bool = Field(False, description="initialize the layers that write to the residual with zeros")

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
