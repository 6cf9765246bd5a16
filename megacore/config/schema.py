"""The schema of a run's config: every section and key with its type, default and meaning.

Its classes hold values and check one section alone. Files and overrides, and rules over several sections (does the batch
divide, does the world fit): `megacore.tools.settings`.
"""

from collections.abc import Mapping
from math import prod
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import Field, PrivateAttr, SerializerFunctionWrapHandler, model_serializer
from pydantic.fields import FieldInfo

import megacore.optimizers.every  # noqa: F401 (whose settings are keys of `optim`)
from megacore.distributed.axes import AXES
from megacore.optimizers.adamw import AdamWSettings
from megacore.optimizers.rule import RULES, on_register
from megacore.optimizers.sgd import SGDSettings
from megacore.section import (  # noqa: F401 (others take them from here)
    MOST_RANKS,
    Count,
    Epsilon,
    Factor,
    Fraction,
    NonNegative,
    Positions,
    Ranks,
    Rows,
    Seconds,
    Section,
    Whole,
    Width,
)

Weight = Annotated[float, Field(ge=1e-9, le=1e9, title="weight")]
Prefix = Annotated[str, Field(min_length=1, title="prefix")]
WeightedPrefixes = Annotated[list[tuple[Weight, Prefix]], Field(min_length=1)]

PlanFile = Annotated[str, Field(pattern=r"^file:.", title="file:PLAN.json")]

T = TypeVar("T")


IGNORED = -100  # a target that no loss counts: padding, the first token of another document, a token that is not to be learned
MASK = ".mask.bin"  # ends the name of the file beside a corpus that says which of its tokens are learned

# The chunks of the model that a rank has under each schedule; under `interleaved` at least.
CHUNKS = {"1f1b": 1, "gpipe": 1, "interleaved": 2, "zb_h1": 1, "zb_v": 2, "v_half": 2, "v_min": 2}
V_SHAPED = ("zb_v", "v_half", "v_min")  # the chunks go there and back: the first rank has both ends of the model


def resolved(value: T | None) -> T:
    """A value that `tools.settings.derive` has set, because the config may leave it open."""
    assert value is not None, "config was not resolved"
    return value


class LinearRope(Section):
    """Divides rotary frequencies by `factor`, which interpolates positions (Chen et al. 2023)."""

    type: Literal["linear"]
    factor: Factor


class Llama3Rope(Section):
    """Divides low rotary frequencies by `factor` and keeps high ones, with a ramp between (Grattafiori et al. 2024, Llama 3.1).

    A frequency is low if it turns fewer than `low_freq_factor` times in `original_max_position_embeddings` positions, and high if it
    turns more than `high_freq_factor` times.
    """

    type: Literal["llama3"]
    factor: Factor
    low_freq_factor: Factor
    high_freq_factor: Factor
    original_max_position_embeddings: Positions


class NtkRope(Section):
    """Raises the base of the rotary frequencies so that the slowest one is divided by `factor` and the fastest one stays.

    "NTK-aware" scaling (described in Peng et al. 2023, YaRN).
    """

    type: Literal["ntk"]
    factor: Factor


class YarnRope(Section):
    """Divides slow rotary frequencies by `factor` and keeps fast ones, with a ramp between, and sharpens scores (Peng et al. 2023, YaRN).

    The ramp starts at the feature that turns `beta_fast` times in `original_max_position_embeddings` positions and ends at the one that
    turns `beta_slow` times; `truncate` widens it to whole features. Queries and keys are multiplied by `attention_factor`, which is
    0.1·ln(factor) + 1 by default.
    """

    type: Literal["yarn"]
    factor: Factor
    original_max_position_embeddings: Positions
    beta_fast: Factor = 32.0
    beta_slow: Factor = 1.0
    attention_factor: Factor | None = None
    truncate: bool = True


RopeScaling = Annotated[LinearRope | Llama3Rope | NtkRope | YarnRope, Field(discriminator="type")]


class ModelConfig(Section):
    block: Literal["gpt"] = Field("gpt", description="kind of block: a name in `BLOCKS` of megacore/model/gpt.py")
    source: str | None = Field(
        None, min_length=1, description="a file of your own with the model's settings and blocks, which is executed; see docs/blocks.md"
    )
    source_digest: str | None = Field(None, min_length=1, description="of that file's text, SHA-256; null: what it is")
    num_layers: Count = 12
    hidden_size: Width = 768
    num_heads: Width = 12
    num_kv_heads: Width | None = Field(None, description="key/value heads; null: num_heads (no grouping)")
    head_size: Width | None = Field(None, description="features of one attention head; null: hidden_size / num_heads")
    ffn_size: Rows | None = Field(
        None, description="null: 4 × hidden_size for gelu; 8/3 × hidden_size, rounded up to a multiple of 64, for swiglu"
    )
    vocab_size: Rows = 50304
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    activation: Literal["gelu", "gelu_erf", "swiglu"] = Field("gelu", description="gelu: its tanh form, as in GPT-2; gelu_erf: exact")
    position: Literal["learned", "rope"] = "learned"
    max_positions: Positions | None = Field(
        None, description="rows of the learned position table, and the longest text that generation may make; null: train.seq_len"
    )
    rope_theta: Annotated[float, Field(ge=1e-3, le=1e15)] = Field(10000.0, description="base of the rotary frequencies")
    rope_scaling: RopeScaling | None = Field(None, description="how rotary frequencies are stretched for longer texts")
    norm_eps: Epsilon = Field(1e-5, description="added to the variance inside the square root of every norm")
    bias: bool = Field(True, description="biases in the linear layers and layernorms")
    qkv_bias: bool | None = Field(None, description="biases of queries, keys and values; null: bias")
    qk_norm: bool = Field(False, description="an RMS norm over each head's queries and keys, before rotary positions")
    attention_scale: Factor | None = Field(None, description="factor on attention's scores; null: 1 / sqrt(head_size)")
    embedding_scale: Factor = Field(1.0, description="factor on the token vectors that enter the first block")
    residual_scale: Factor = Field(1.0, description="factor on what each half of a block adds to the residual")
    logit_scale: Factor = Field(1.0, description="factor on the logits")
    tie_embeddings: bool = True
    dropout: Fraction = Field(
        0.0, description="on the embedding and on what each block adds to the residual; the same mask in every layout"
    )
    attention: Literal["auto", "sdpa", "fused", "eager"] = Field(
        "auto", description="auto: eager for short sequences on CPUs, where it is faster; else sdpa, which keeps no scores"
    )
    kernels: Literal["auto", "triton", "eager"] = Field(
        "auto", description="fused Triton kernels; auto: on GPUs. triton: also in Triton's interpreter (TRITON_INTERPRET=1)"
    )
    chunked_loss: bool = Field(
        False, description="head and loss in chunks of tokens, so that the logits of a microbatch never exist as a whole"
    )
    init_std: Factor = Field(0.02, description="of every weight; layers that write to the residual: / sqrt(2 × num_layers)")


class ParallelConfig(Section):
    tensor: Ranks = 1
    pipeline: Ranks = 1
    data: Ranks | Literal["auto"] = Field("auto", description="auto: world size / all other axes")
    context: Ranks = Field(1, description="ranks that divide the tokens of every sample among themselves, in every layer")
    context_method: Literal["auto", "gather", "ring", "ulysses"] = Field(
        "auto",
        description="how context ranks attend: gather all keys and values; pass them round; exchange sequences for heads; "
        "auto: the fastest by the planner's estimate, see docs/long_texts.md",
    )
    sequence: bool = Field(False, description="split norms, dropout and residuals along the tokens over the tensor ranks")
    schedule: Literal["1f1b", "gpipe", "interleaved", "zb_h1", "zb_v", "v_half", "v_min", "auto"] | PlanFile = Field(
        "1f1b",
        description="docs/schedules.md compares them; some leave weights' gradients for gaps in the pipeline; "
        "auto: the fastest that a search finds; file: a plan of your own",
    )
    chunks: Ranks | None = Field(None, description="model chunks a rank; null: as many as the schedule needs at least, or as auto chooses")
    backend: Literal["auto", "nccl", "gloo"] = Field("auto", description="auto: nccl on GPUs, gloo on CPUs")
    shared_memory: bool = Field(
        True, description="tensor ranks on one machine's CPU communicate through memory, not through gloo's sockets"
    )
    timeout_seconds: Seconds = Field(1800.0, description="for every collective of every group; more than 4 × hang_seconds")
    hang_seconds: Seconds | None = Field(
        300.0,
        description="a rank that does nothing for so long ends the job with a verdict on the cause; longer than saving takes; "
        "before the first step it may take four times as long; null: never",
    )
    heartbeat_seconds: Annotated[float, Field(ge=1, le=1e8)] | None = Field(
        20.0, description="a host that others hear nothing of for so long is lost, and all ranks end; null: hosts are not watched"
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


class TrainConfig(Section):
    steps: Count = 1000
    seq_len: Positions = 1024
    micro_batch_size: Count = 1
    global_batch_size: Count = 8
    precision: Literal["fp32", "bf16", "fp16", "fp64"] = "bf16"
    recompute: Literal["none", "selective", "full"] = "none"
    offload_activations: bool = Field(
        False, description="what blocks keep for their backward waits in host memory, copied while the device computes"
    )
    seed: Whole = 0
    device: Literal["auto", "cpu", "cuda"] = "auto"
    compile: bool | Literal["auto"] = Field(
        "auto",
        description="torch.compile for every block: one graph, which all blocks share; "
        "auto: on a CPU, what a long run measures before its first step; elsewhere not so far",
    )
    deterministic: bool = Field(
        False, description="the same command on the same machines gives the same bits; operations that cannot do so fail"
    )
    eval_every: Whole = Field(0, description="steps between validations; 0: only after the last step")
    eval_batches: Whole = Field(
        20, description="global batches that a validation reads, the same each time, spread evenly over the validation set; 0: all of it"
    )


class OptimGroup(Section):
    """Settings of the parameters that it matches. What it leaves open is as in `optim`. It has the keys of all rules' settings too."""

    match: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(min_length=1)] = Field(
        description="patterns of parameters' names, such as blocks.*.attention.qkv.weight; the first entry that matches decides"
    )
    kind: str | None = None  # the names in `RULES`, see `take_in_rules`
    lr: NonNegative | None = None
    weight_decay: NonNegative | None = None

    @model_serializer(mode="wrap")
    def _without_what_is_open(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {key: value for key, value in handler(self).items() if value is not None}


class OptimSchedule(Section):
    """What all optimizers share."""

    kind: str = Field("adamw", description="a rule of megacore/optimizers; sgd has momentum; all have decoupled weight decay")
    lr: NonNegative = 3e-4
    min_lr: NonNegative = 0.0
    warmup_steps: Whole = 0
    warmup: Literal["linear", "log"] = Field("linear", description="log: the rate grows with the logarithm of the step, as DeepSpeed's do")
    warmup_lr: NonNegative = Field(0.0, description="the rate that warmup begins from")
    decay_steps: Count | None = Field(
        None, description="cosine, linear: the step that reaches min_lr (null: train.steps); wsd: length of the last decay (null: a tenth)"
    )
    schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    lag: tuple[Whole, Whole] = Field((0, 0), description="steps by which warmup and decay are late, as in libraries that count from 0")
    weight_decay: NonNegative = Field(0.1, description="on matrices only: not on biases, norms")
    groups: tuple[OptimGroup, ...] = Field(
        (), description="a list of {match, and a rule or settings of its own}, for the parameters that a pattern in `match` names"
    )
    grad_clip: NonNegative = Field(1.0, description="bound on the global gradient norm; 0: no clipping")
    spike_threshold: Annotated[float, Field(ge=1e-3, le=1e12)] | None = Field(
        None,
        description="skip a step whose gradient norm exceeds the median of the last 128 by more than this many robust deviations "
        "(1.4826 × the median absolute deviation), say 10; null: skip only what is not finite",
    )
    max_skips: Count = Field(100, description="after so many skipped steps in a row the run rolls back, or fails")
    max_rollbacks: Whole = Field(
        0, description="how often a run may go back to its last checkpoint and on from there with the samples behind the skipped ones"
    )


class OptimConfig(SGDSettings, AdamWSettings, OptimSchedule):
    """The section `optim`: what all optimizers share, and each one's own settings."""


class DataConfig(Section):
    document_mask: bool = Field(
        False, description="attention stays within a document, positions start anew in each, and no target lies across a boundary"
    )
    packing: Literal["none", "best_fit"] = Field(
        "none", description="none: a sample is consecutive tokens of a corpus; best_fit: whole documents, with padding behind them"
    )
    train: Prefix | WeightedPrefixes | None = Field(None, description="prefix of .bin/.idx, or a list of [weight, prefix]")
    valid: Prefix | WeightedPrefixes | None = None
    tokenizer: str | None = Field(None, description="bytes, a sentencepiece .model or a tokenizer.json; needed only where text is shown")


class CheckpointConfig(Section):
    every: Whole = Field(0, description="steps between checkpoints; 0: none on the way. A run that is stopped always saves one")
    last: bool = Field(True, description="a checkpoint after the last step, whatever `every` is")
    keep: Count = Field(2, description="newest whole checkpoints kept")
    keep_every: Whole = Field(0, description="checkpoints of steps that are multiples of it are kept for good; 0: none")
    best: bool = Field(
        False, description="the checkpoint of the least validation loss is kept in the run's folder best/; see docs/checkpoints.md"
    )
    async_: bool = Field(
        False, alias="async", description="copy to host memory and go on training, while a thread writes; takes as much host memory"
    )
    mirror: str | None = Field(
        None, min_length=1, description="a folder for second copies, made beside training; used where those in log.dir are damaged or gone"
    )
    on_failure: Literal["stop", "continue"] = Field(
        "stop", description="where a checkpoint cannot be saved (a full disk): end the run, or go on without it and try again at the next"
    )
    resume: str = Field("auto", min_length=1, description="auto: the newest whole checkpoint in log.dir; never; or a checkpoint's path")
    weights: str | None = Field(
        None, min_length=1, description="where there is nothing to resume: start at step 0 from the weights alone of this run or checkpoint"
    )


class Int8Compression(Section):
    """Gradients travel in 8 bits, with a scale for each block of consecutive numbers; what was rounded away is added in the next step."""

    kind: Literal["int8"]
    block: Literal[64, 128, 256, 512, 1024] = 256
    rounding: Literal["nearest", "none"] = Field("nearest", description="none: blocks and scales, but nothing is rounded or saved: a proof")

    @property
    def exact(self) -> bool:
        """Whether the sum is the plain one, but for the order of additions."""
        return self.rounding == "none"

    def sent_bytes(self, numbers: int, number_bytes: int) -> int:
        """What so many numbers, which have `number_bytes` each, become: codes, and a scale for each block."""
        return numbers * (number_bytes if self.exact else 1) + numbers // self.block * number_bytes


class LowRankCompression(Section):
    """Gradients of matrices travel as two factors of `rank` columns (PowerSGD); what these lack is added in the next step."""

    kind: Literal["low_rank"]
    rank: Count | None = Field(4, description="null: that of the matrix, which loses nothing and saves nothing: a proof")

    @property
    def exact(self) -> bool:
        """Whether the sum is the plain one, but for the order of additions."""
        return self.rank is None


Compression = Annotated[Int8Compression | LowRankCompression, Field(discriminator="kind")]


class EngineConfig(Section):
    kind: Literal["native", "deepspeed", "fsdp"] = "native"
    config: str | dict[str, Any] | None = Field(None, description="deepspeed: a ds_config as an object or a file's path")
    shard_optimizer: bool = Field(
        False, description="native: each data rank keeps and updates a part of the optimizer's state only (ZeRO stage 1)"
    )
    shard_size: Ranks | None = Field(
        None, description="fsdp: neighbouring data ranks that divide one copy of the state; others hold copies of it; null: all data ranks"
    )
    reshard: bool | None = Field(
        None,
        description="fsdp: gather a block's parameters for each pass and reduce its gradients after each microbatch (least memory), "
        "not once a step (least traffic); null: where there is no pipeline",
    )
    cpu_offload: bool = Field(False, description="fsdp: parameters, gradients and optimizer state rest, and are updated, in host memory")
    bucket_mib: Factor | None = Field(
        None,
        description="native: size of a gradient bucket, reduced as a whole, in MiB of fp32; null: 25, or 4 a data rank if that is more",
    )
    reduce_dtype: Literal["fp32", "bf16"] = Field(
        "fp32",
        description="native: the dtype in which gradients travel between data ranks; they are added up in fp32. "
        "With two levels bf16 is for the links between hosts",
    )
    reduce_levels: Literal[1, 2] = Field(
        1, description="native: 2: gradients are summed within each host first, and then between hosts, so that these send less"
    )
    compression: Compression | None = Field(
        None,
        description="native: how gradients are made smaller on their way between data ranks, with error feedback: "
        '{"kind": "int8"} or {"kind": "low_rank", "rank": 4}; null: they are not',
    )


class CpuConfig(Section):
    keep_memory: bool = Field(True, description="freed blocks stay with the process, so that the system does not zero them again (glibc)")
    onednn: bool = Field(True, description="fp32 products go to oneDNN where they stay fp32-exact")
    widen: bool = Field(True, description="products in 16 bits that the processor would emulate are done in fp32, and rounded")


class ProfileConfig(Section):
    """Which steps of which ranks are profiled."""

    steps: tuple[Count, Count]
    memory: bool = False
    ranks: Annotated[tuple[Whole, ...], Field(min_length=1)] = (0,)


class StatisticsConfig(Section):
    """How often weights, gradients, updates and activations are measured."""

    every: Count


class LogConfig(Section):
    dir: str | None = Field(None, min_length=1, description="null: runs/<the config file's name>")
    every: Count = Field(10, description="steps between log lines; the only steps that wait for the device")
    figures: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(min_length=1)] = Field(
        ("*",), description="patterns of the tags that TensorBoard and wandb show, such as train/* or speed/mfu; metrics.jsonl has all"
    )
    tensorboard: bool = True
    wandb: Literal["off", "offline", "online"] = Field(
        "off", description="Weights & Biases gets the figures of metrics.jsonl: offline in a file that wandb sync sends later, or online"
    )
    price_per_device_hour: NonNegative | None = Field(None, description="in any currency: figures and the run's end say what it has cost")
    prometheus_port: Count | None = Field(None, description="the first rank of every machine serves figures there; null: nobody")
    statistics: StatisticsConfig | None = Field(
        None, description='{"every": 100}: steps between sizes of weights, gradients, updates, activations and attention logits'
    )
    profile: ProfileConfig | None = Field(
        None,
        description='{"steps": [20, 22], "memory": true, "ranks": [0]}: a trace of steps 20 to 22 on these ranks, and where time goes',
    )


class Config(Section):
    """A whole run. Build it with `megacore.tools.settings.load`, which also resolves and checks it."""

    model: ModelConfig = Field(default_factory=ModelConfig)
    parallel: ParallelConfig = Field(default_factory=ParallelConfig)
    train: TrainConfig = Field(default_factory=TrainConfig)
    optim: OptimConfig = Field(default_factory=OptimConfig)
    data: DataConfig = Field(default_factory=DataConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    engine: EngineConfig = Field(default_factory=EngineConfig)
    cpu: CpuConfig = Field(default_factory=CpuConfig)
    log: LogConfig = Field(default_factory=LogConfig)
    _partition: Any = PrivateAttr(None)  # `pipeline.partition.Partition`, and `None` until whoever starts a run has chosen it

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """See `BaseModel`. A partition was chosen for all settings together: a copy with others has none."""
        copy = super().model_copy(update=update, deep=deep)
        copy._partition = None if update else self._partition
        return copy

    def with_partition(self, partition: Any) -> Self:
        """A copy whose model is cut into these stages, see `pipeline.partition`."""
        copy = self.model_copy()
        copy._partition = partition
        return copy

    @property
    def partition(self) -> Any:
        """How the model is cut into stages, see `pipeline.partition`."""
        return self._partition

    @property
    def data_size(self) -> int:
        """The ranks that read different samples: those of `data`, and of every other axis of that kind."""
        sizes = self.sizes
        return prod(sizes[axis.name] for axis in AXES if axis.samples)

    @property
    def chunks(self) -> int:
        """Chunks of the model that each rank of the pipeline has; where the schedule `auto` chooses them, 1 until it has."""
        if self.parallel.chunks is None and self.parallel.schedule == "auto":
            return 1 if self._partition is None else len(self._partition.layers) // self.parallel.pipeline
        return resolved(self.parallel.chunks)

    @property
    def sizes(self) -> dict[str, int]:
        """How many ranks each axis of the mesh has, from the outermost axis to the innermost."""
        assert isinstance(self.parallel.data, int), "config was not resolved"
        return {axis.name: getattr(self.parallel, axis.title) for axis in AXES}

    @property
    def world_size(self) -> int:
        """The ranks of the whole mesh."""
        return prod(self.sizes.values())

    @property
    def token_ranks(self) -> int:
        """Ranks that hold the same parameters and compute on different tokens: data × context. They sum gradients."""
        sizes = self.sizes
        return prod(sizes[axis.name] for axis in AXES if axis.tokens)

    @property
    def rank_tokens(self) -> int:
        """Tokens of a microbatch that a context rank holds."""
        return self.train.micro_batch_size * self.train.seq_len // self.parallel.context

    @property
    def num_microbatches(self) -> int:
        """Microbatches that each data-parallel rank runs in a step."""
        return self.train.global_batch_size // (self.train.micro_batch_size * self.data_size)

    @property
    def shard_size(self) -> int:
        """Ranks that divide one copy of the state among themselves under the fsdp engine: data and context ranks."""
        ranks = self.token_ranks
        return min(self.engine.shard_size or ranks, ranks)

    @property
    def kv_heads(self) -> int:
        """Key/value heads."""
        return resolved(self.model.num_kv_heads)

    @property
    def head_size(self) -> int:
        """Features of one attention head."""
        return resolved(self.model.head_size)

    @property
    def attention_sizes(self) -> tuple[int, int]:
        """The features of all query heads, and those of all key or value heads."""
        return self.model.num_heads * self.head_size, self.kv_heads * self.head_size

    @property
    def max_positions(self) -> int:
        """Rows of the learned position table, and the longest text that generation may make."""
        return resolved(self.model.max_positions)


_OPTIM, _ENTRY = dict(OptimConfig.model_fields), dict(OptimGroup.model_fields)  # without rules' settings


def take_in_rules() -> None:
    """Gives `optim`, and entries of `optim.groups`, the names and the settings of all rules that are registered."""
    kinds: Any = Literal[tuple(RULES)]
    fields, entry = OptimConfig.__pydantic_fields__, OptimGroup.__pydantic_fields__
    for held, own in ((fields, _OPTIM), (entry, _ENTRY)):
        held.clear()
        held.update(own)
    fields["kind"] = FieldInfo.merge_field_infos(fields["kind"], annotation=kinds)
    entry["kind"] = FieldInfo.from_annotation(kinds | None)
    entry["kind"].default = None
    for rule in RULES.values():
        for key, field in rule.settings_type.model_fields.items():
            assert key not in OptimSchedule.model_fields, f"{rule.name} has a setting called {key}, and so has every optimizer"
            fields[key] = field
            bounded: Any = Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation
            of_entry: Any = bounded | None
            entry[key] = FieldInfo.from_annotated_attribute(of_entry, None)
    for section in (OptimGroup, OptimConfig, Config):
        section.model_rebuild(force=True)


on_register(take_in_rules)
