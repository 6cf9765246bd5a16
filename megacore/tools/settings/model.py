"""Rules of the model: its sizes, its positions, its windows and its width, and what tensor, pipeline and
context ranks can divide of it.
"""

from itertools import pairwise
from math import gcd

from megacore.config.implied import heads_at
from megacore.config.model import Llama3Rope, LongRope, ModelConfig, YarnRope
from megacore.config.optim_groups import KEY as GROUPS
from megacore.config.optim_groups import ParameterGroups
from megacore.config.schema import Config, resolved
from megacore.config.source import BUILD, PARTS, source_of
from megacore.errors import ConfigError
from megacore.model.plain.folder import SIZES, check_weights
from megacore.records import LARGEST
from megacore.tools.settings.derive import derive
from megacore.tools.settings.experts import check_experts, divides
from megacore.tools.settings.latent import check_latent

# Bounds far above any run: no number in a config may make a script count or allocate without end.
MOST_ELEMENTS = 2**48  # of a tensor, as in a checkpoint's manifest
MOST_STAGES = 1024
MOST_LAYERS = 2**14  # a rank may have to build all of them

# The settings of megacore that a plain module takes; what it computes is its own code's to decide.
PLAIN_KEYS = {*SIZES, "source", "source_digest", "hf", "hf_revision", "hf_config", "hf_version"}
PLAIN_KEYS |= {"attention", "kernels"}


def check_model(config: Config) -> None:
    """Checks sizes that must divide: heads, key/value heads, feed-forward, vocabulary, layers, tokens."""
    model, parallel, train = config.model, config.parallel, config.train
    if model.source is None and model.source_digest is not None:
        raise ConfigError(
            "model.source_digest",
            "there is no model.source of which it could be the digest",
            "null, or a model.source",
        )
    check_plain(config)
    check_weights(config)
    if model.head_size is None:
        divides("model.hidden_size", model.hidden_size, "model.num_heads", model.num_heads)
    divides("model.num_heads", model.num_heads, "model.num_kv_heads", config.kv_heads)
    check_tensor_ranks(config)
    check_parametrization(config)
    if model.norm_place == "post" and model.branches == "shared_norm":
        wrong = "shared_norm is a norm before both branches, and model.norm_place=post has none there"
        raise ConfigError("model.branches", wrong, "parallel, or another model.norm_place")
    if model.norm_offset and model.norm == "layernorm" and model.bias:
        raise ConfigError(
            "model.norm_offset",
            "is for norms without biases",
            "false, model.norm=rmsnorm or model.bias=false",
        )
    if model.global_every is not None and model.window is None:
        raise ConfigError(
            "model.global_every",
            "every block attends to all tokens: there is no window",
            "null, or a model.window",
        )
    check_windows(model)
    if model.qk_norm_heads == "all" and not model.qk_norm:
        raise ConfigError(
            "model.qk_norm_heads", "there is no norm of queries and keys", "each, or model.qk_norm=true"
        )
    if model.window_rope_theta is not None and (model.window is None or model.position != "rope"):
        wrong = "no block has a window and rotary positions"
        raise ConfigError("model.window_rope_theta", wrong, "null, or a model.window and model.position=rope")
    if model.logit_cap is not None and model.chunked_loss:
        wrong = "head and loss in chunks have no cap of the logits"
        raise ConfigError("model.chunked_loss", wrong, "false, or model.logit_cap=null")
    if model.head_bias and (model.chunked_loss or config.logit_scale != 1.0):
        wrong = "head and loss in chunks, and scaled logits, have no bias"
        raise ConfigError(
            "model.head_bias", wrong, "false, or model.chunked_loss=false and logits with the scale 1"
        )
    check_positions(config)
    check_elements(config)
    # The vocabulary may be cut unevenly (pieces of ceil(V / tp)), but no rank may be left without a row.
    if (parallel.tensor - 1) * -(-model.vocab_size // parallel.tensor) >= model.vocab_size:
        wrong = f"{model.vocab_size} leaves a tensor rank of {parallel.tensor} without a row"
        raise ConfigError("model.vocab_size", wrong, "a larger vocabulary or a smaller parallel.tensor")
    if model.num_layers > MOST_LAYERS:
        raise ConfigError(
            "model.num_layers",
            f"{model.num_layers:,} layers are more than any run has",
            f"at most {MOST_LAYERS:,}",
        )
    if model.num_layers < parallel.pipeline * config.chunks:
        chunks = f" × {config.chunks} chunks" if config.chunks > 1 else ""
        wrong = f"{parallel.pipeline} stages{chunks} cannot each have one of {model.num_layers} layers"
        right = f"{'times parallel.chunks ' if chunks else ''}at most model.num_layers {model.num_layers}"
        raise ConfigError("parallel.pipeline", wrong, right)
    if parallel.pipeline > MOST_STAGES:
        raise ConfigError(
            "parallel.pipeline",
            f"{parallel.pipeline} stages are more than any run has",
            f"at most {MOST_STAGES}",
        )
    check_context(config)
    check_experts(config)
    check_latent(config)
    if parallel.sequence and config.rank_tokens % parallel.tensor:
        divides("train.seq_len", train.seq_len // parallel.context, "parallel.tensor", parallel.tensor)
    if model.kernels == "triton" and train.precision == "fp64":
        raise ConfigError(
            "model.kernels",
            "the Triton kernels keep their statistics in fp32, below fp64's precision",
            "auto or eager",
        )
    if model.attention == "fused" and train.precision == "fp64":
        raise ConfigError(
            "model.attention",
            "the fused softmax keeps its statistics in fp32, below fp64's precision",
            "sdpa or eager",
        )


def check_plain(config: Config) -> None:
    """Checks that one place gives a plain module, and that no setting would change what it computes."""
    model, source = config.model, source_of(config)
    if model.hf is None:
        for key in ("hf_revision", "hf_config", "hf_version"):
            if getattr(model, key) is not None:
                raise ConfigError(f"model.{key}", "there is no model.hf that it is of", "null, or a model.hf")
        if source is None or source.parts is None:
            return
        if source.build is None:
            wrong = f"{source.path} has {PARTS}, and nothing builds the module that it divides"
            raise ConfigError("model.source", wrong, f"a function {BUILD}(config) in it, or a model.hf")
        if model.parametrization == "mup":
            wrong = "how a plain module's weights begin is not scaled by width"
            raise ConfigError("model.parametrization", wrong, "standard")
        return  # its function reads any other setting that it wants
    if source is not None and source.parts is None:
        wrong = f"{source.path} has no {PARTS}, which is all that model.hf takes of a file"
        raise ConfigError("model.source", wrong, f"a file with {PARTS}, or no model.hf")
    if source is not None and source.build is not None:
        wrong = f"{source.path} has a function {BUILD}, so the model is not that of model.hf"
        raise ConfigError("model.source", wrong, f"a file with {PARTS} alone, or no model.hf")

    neutral = {
        name: field.get_default(call_default_factory=True)
        for name, field in ModelConfig.model_fields.items()
        if name not in PLAIN_KEYS
    }
    derived = derive(config.model_copy(update={"model": model.model_copy(update=neutral)}), "", 1)
    for name, default in neutral.items():
        value, expected = getattr(model, name), derived.get(f"model.{name}", default)
        if value not in (default, expected):
            wrong = f"{value} is a setting of megacore's own layers, and the module's own code decides"
            raise ConfigError(f"model.{name}", wrong, "leave it out")


def check_windows(model: ModelConfig) -> None:
    """Checks that windows grow with the steps, up to model.window."""
    key = "model.window_schedule"
    if model.window_schedule and model.window is None:
        raise ConfigError(key, "there is no window to grow to", "[], or a model.window")
    for (step, window), (later, wider) in pairwise(
        (*model.window_schedule, (LARGEST, model.window or LARGEST))
    ):
        if later <= step:
            raise ConfigError(
                key, f"step {later} comes behind step {step}", "[last step, window] in the order of the steps"
            )
        if wider <= window:
            raise ConfigError(
                key, f"{window} does not grow to {wider}", "windows that grow, below model.window"
            )


def check_longrope(config: Config, scaling: LongRope) -> None:
    """Check that there is a factor for each pair that turns, and that no text needs the other factors."""
    pairs = int(config.head_size * config.model.rotary_share) // 2
    for name in ("short_factor", "long_factor"):
        if (count := len(getattr(scaling, name))) != pairs:
            raise ConfigError(
                "model.rope_scaling", f"{name} has {count} numbers", f"{pairs}, one for each pair of features"
            )
    original = scaling.original_max_position_embeddings
    if config.max_positions > original:
        wrong = f"longrope has other frequencies for texts beyond {original} tokens, which no model here has"
        raise ConfigError("model.max_positions", wrong, f"at most {original}")


def check_tensor_ranks(config: Config) -> None:
    """Check that heads and the features of the feed-forward layer divide among the tensor ranks.

    Sizes of weights that exist, such as an imported model's, cannot change, so the error then reports the
    numbers of tensor ranks that are possible.
    """
    tensor = config.parallel.tensor
    sizes = {
        "model.num_heads": config.model.num_heads,
        "model.num_kv_heads": config.kv_heads,
        "model.ffn_size": resolved(config.model.ffn_size),
    }
    for key, size in sizes.items():
        if size % tensor and config.checkpoint.weights is not None:
            common = gcd(*sizes.values())
            possible = ", ".join(str(ranks) for ranks in range(1, common + 1) if common % ranks == 0)
            right = f"parallel.tensor {possible}: the sizes are those of checkpoint.weights"
            raise ConfigError(key, f"{size} is not a multiple of parallel.tensor {tensor}", right)
        divides(key, size, "parallel.tensor", tensor)


def check_positions(config: Config) -> None:
    """Checks that rotary positions have pairs of features, and that a sequence fits in the positions."""
    model, seq_len = config.model, config.train.seq_len
    if model.position == "rope" and config.head_size % 2:
        wrong = f"rotary positions turn pairs of features, and model.head_size {config.head_size} is odd"
        raise ConfigError("model.position", wrong, "an even head size, or learned")
    if model.position == "rope" and (turned := int(config.head_size * model.rotary_share)) % 2 + (
        turned == 0
    ):
        wrong = (
            f"{model.rotary_share} of model.head_size {config.head_size} is {turned} features, and "
            "rotary positions turn pairs"
        )
        raise ConfigError("model.rotary_share", wrong, "an even number of features")
    for key, plain in (("rotary_share", 1.0), ("nope_every", None)):
        if model.position == "learned" and model.source is None and getattr(model, key) != plain:
            raise ConfigError(
                f"model.{key}",
                "learned positions turn no features",
                f"{plain or 'null'}, or model.position=rope",
            )
    if model.nope_every == 1 and model.source is None:
        raise ConfigError("model.nope_every", "1 leaves no block with positions", "2 or more, or null")
    if model.position == "learned" and model.rope_scaling is not None:
        raise ConfigError(
            "model.rope_scaling",
            "learned positions have no frequencies to scale",
            "null, or model.position=rope",
        )
    if (
        isinstance(model.rope_scaling, Llama3Rope)
        and model.rope_scaling.high_freq_factor <= model.rope_scaling.low_freq_factor
    ):
        wrong = (
            f"high_freq_factor {model.rope_scaling.high_freq_factor} is not above low_freq_factor "
            f"{model.rope_scaling.low_freq_factor}"
        )
        raise ConfigError("model.rope_scaling", wrong, "a larger high_freq_factor")
    if (
        isinstance(model.rope_scaling, YarnRope)
        and model.rope_scaling.beta_fast <= model.rope_scaling.beta_slow
    ):
        wrong = (
            f"beta_fast {model.rope_scaling.beta_fast} is not above beta_slow {model.rope_scaling.beta_slow}"
        )
        raise ConfigError("model.rope_scaling", wrong, "a larger beta_fast")
    if isinstance(model.rope_scaling, YarnRope) and model.rope_theta <= 1:
        raise ConfigError(
            "model.rope_theta", f"{model.rope_theta} has no ramp of frequencies for YaRN", "a base above 1"
        )
    if isinstance(model.rope_scaling, LongRope):
        check_longrope(config, model.rope_scaling)
    if config.max_positions < seq_len:
        raise ConfigError(
            "model.max_positions",
            f"{config.max_positions} is less than train.seq_len {seq_len}",
            f"at least {seq_len}",
        )


def check_parametrization(config: Config) -> None:
    """Refuses a base width without a meaning: without mup, or where the base model could not be made."""
    model = config.model
    if model.parametrization == "standard":
        for key in ("base_width", "base_head_size", "base_layers"):
            if getattr(model, key) is not None:
                raise ConfigError(f"model.{key}", "only model.parametrization=mup reads it", "null, or mup")
        return
    if model.base_width is None:
        right = "the hidden_size at which the rate was found, such as 256"
        raise ConfigError(
            "model.base_width", "mup has no width at which its rates are those of the config", right
        )
    head_size = model.base_head_size or config.head_size
    if (heads := heads_at(config, model.base_width, head_size)).denominator > 1:
        each = f"of {'base_head_size' if model.base_head_size else 'head_size'} {head_size}"
        wrong = f"{model.base_width} would have {float(heads):.4g} heads {each}"
        right = "a width with a whole number of heads, or base_head_size for heads that grow in size"
        raise ConfigError("model.base_width", wrong, right)
    for group in ParameterGroups(config.optim).every:
        if group.rule.width_factor(True, 2.0) is None:
            wrong = (
                f"{group.rule.name} with these settings does not declare how large its updates are, "
                "so muP cannot scale its learning rate"
            )
            right = "`update_size` in its class (docs/blocks.md), or model.parametrization=standard"
            raise ConfigError(GROUPS if group.number else "optim.kind", wrong, right)


def check_elements(config: Config) -> None:
    """Refuses a tensor that is larger than a checkpoint can describe."""
    model = config.model
    features = (config.head_size * (model.num_heads + 2 * config.kv_heads), 2 * resolved(model.ffn_size))
    rows = {
        "num_heads": features[0],
        "ffn_size": features[1],
        "vocab_size": model.vocab_size,
        "max_positions": config.max_positions,
    }
    if model.num_experts is not None:  # whose weights are one tensor, and those of shared ones another
        expert = 2 * resolved(model.expert_ffn_size)
        rows |= {"num_experts": model.num_experts * expert, "shared_experts": model.shared_experts * expert}
    if model.kv_rank is not None:
        widest = model.num_heads * (model.plain_size + max(config.head_size, model.value_size))
        rows |= {"q_rank": model.q_rank or 0, "kv_rank": model.kv_rank + config.head_size}
        rows |= {
            "value_size": widest
            * max(model.q_rank or 0, model.kv_rank, model.hidden_size)
            // model.hidden_size
        }
    name, largest = max(rows.items(), key=lambda row: row[1])
    if (elements := largest * model.hidden_size) > MOST_ELEMENTS:
        wrong = f"with model.hidden_size {model.hidden_size} makes a tensor of {elements:.3g} elements"
        raise ConfigError(f"model.{name}", wrong, f"tensors of at most {MOST_ELEMENTS:.3g}")


def check_context(config: Config) -> None:
    """Checks that sequences, and under ulysses heads, divide among the context ranks,
    and that the engine knows them.
    """
    parallel = config.parallel
    if parallel.context == 1:
        return
    divides("train.seq_len", config.train.seq_len, "2 × parallel.context", 2 * parallel.context)
    if config.engine.kind == "deepspeed":
        wrong = "the deepspeed engine counts a batch by its data ranks, and context ranks share a sample"
        raise ConfigError("parallel.context", wrong, "1, or engine.kind=native or fsdp")
    if parallel.context_method == "ulysses" and (reason := unexchanged(config)) is not None:
        raise ConfigError("parallel.context_method", reason, "gather or ring, or another parallel.context")


def unexchanged(config: Config) -> str | None:
    """Why a tensor rank's heads cannot be dealt to the context ranks, in a few words; None if they can."""
    parallel = config.parallel
    if config.attended_size % 2:
        key = "model.head_size" if config.model.kv_rank is None else "their size"
        return f"ulysses takes heads in halves, and {key} {config.attended_size} is odd"
    heads, kv_heads = config.model.num_heads // parallel.tensor, config.kv_heads // parallel.tensor
    if heads % parallel.context:
        return f"ulysses cannot deal {heads} heads of a tensor rank to {parallel.context} context ranks"
    if kv_heads % parallel.context and parallel.context % kv_heads:
        return (
            f"ulysses cannot deal {kv_heads} key/value heads of a tensor rank to {parallel.context} "
            "context ranks"
        )
    return None
