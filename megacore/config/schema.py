"""The schema of a run's config: its sections, and every key with its type, default and meaning.

Long sections are files beside this one. The classes hold values and check one section alone. Files and
overrides, and rules over several sections (does the batch divide, does the world fit):
`megacore.tools.settings`.
"""

from collections.abc import Mapping
from math import prod
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import Field, PrivateAttr

from megacore.config.engine import EngineConfig
from megacore.config.model import LastStep, ModelConfig
from megacore.config.optim import OptimConfig
from megacore.config.parallel import ParallelConfig
from megacore.distributed.axes import AXES, expert_view
from megacore.optimizers.rule import on_register
from megacore.section import Count, NonNegative, Positions, Section, Whole

Weight = Annotated[float, Field(ge=1e-9, le=1e9, title="weight")]
Prefix = Annotated[str, Field(min_length=1, title="prefix")]
WeightedPrefixes = Annotated[list[tuple[Weight, Prefix]], Field(min_length=1)]

T = TypeVar("T")

# a target that no loss counts: padding, the first token of another document, a token that is not to be
# learned
IGNORED = -100
MASK = ".mask.bin"  # ends the name of the file beside a corpus that says which of its tokens are learned


def resolved(value: T | None) -> T:
    """A value that `tools.settings.derive` has set, because the config may leave it open."""
    assert value is not None, "config was not resolved"
    return value


Size = Annotated[Count, Field(title="size")]


class TrainConfig(Section):
    """The training loop: steps, batches, precision, memory and validation."""

    steps: Count = Field(1000, description="optimizer steps of the run, counted from 1")
    seq_len: Positions = Field(1024, description="tokens per sample")
    micro_batch_size: Count = Field(
        1, description="samples that a data rank processes in one forward and backward pass"
    )
    global_batch_size: Count = Field(
        8,
        description="samples per optimizer step over all data ranks; a multiple of `micro_batch_size` × "
        "data ranks",
    )
    batch_ramp: Annotated[tuple[tuple[LastStep, Size], ...], Field(max_length=64)] = Field(
        (),
        description="smaller batches for the start of training: `[[last step, size], …]` uses each global "
        "batch size up to its last step, and `global_batch_size` after all of them",
    )
    precision: Literal["fp32", "bf16", "fp16", "fp64"] = Field(
        "bf16",
        description="dtype of parameters and activations; bf16 and fp16 keep fp32 master weights and "
        "gradient sums",
    )
    recompute: Literal["none", "selective", "full"] = Field(
        "none",
        description="activation checkpointing; selective: recompute attention scores and feed-forward "
        "activations in the backward pass; full: recompute whole blocks",
    )
    offload_activations: bool = Field(
        False,
        description="move the activations that blocks keep for the backward pass to host memory, with "
        "copies that overlap the computation",
    )
    seed: Whole = Field(0, description="seed of the initial weights, the order of samples and dropout")
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="device type; auto: cuda if a GPU is available, otherwise cpu"
    )
    compile: bool | Literal["auto"] = Field(
        "auto",
        description="torch.compile of every block, with graph breaks around MoE layers; auto: on CPUs, "
        "decided by a measurement before the first step of a long run; off on other devices",
    )
    deterministic: bool = Field(
        False,
        description="require bitwise-identical results of the same command on the same machines; "
        "operations without a deterministic implementation raise an error",
    )
    eval_every: Whole = Field(0, description="steps between validations; 0: only after the last step")
    eval_batches: Whole = Field(
        20,
        description="global batches per validation, the same ones each time, spread evenly over the "
        "validation set; 0: the whole set",
    )

    def batch_at(self, number: int) -> int:
        """The samples of the global batch `number`, from 1: that of the step, plus
        those that a run has gone around.
        """
        return next((size for last, size in self.batch_ramp if number <= last), self.global_batch_size)

    def samples_through(self, number: int) -> int:
        """The samples of the first `number` global batches."""
        total = before = 0
        for last, size in (*self.batch_ramp, (number, self.global_batch_size)):
            last = max(before, min(last, number))
            total, before = total + (last - before) * size, last
        return total

    def batches_in(self, samples: int) -> int:
        """How many whole global batches the first `samples` are."""
        before = 0
        for last, size in self.batch_ramp:
            if samples < (last - before) * size:
                return before + samples // size
            samples, before = samples - (last - before) * size, last
        return before + samples // self.global_batch_size


class DataConfig(Section):
    """The corpora and how samples are made of them."""

    document_mask: bool = Field(
        False,
        description="keep attention within each document, restart positions at its start, and learn no "
        "target across a document boundary",
    )
    packing: Literal["none", "best_fit"] = Field(
        "none",
        description="none: a sample is a run of consecutive tokens of a corpus; best_fit: whole documents "
        "packed into samples, with padding at the end",
    )
    train: Prefix | WeightedPrefixes | None = Field(
        None,
        description="training corpus: the prefix of a .bin/.idx pair, or a list of `[weight, prefix]` for "
        "a blend; required for training",
    )
    valid: Prefix | WeightedPrefixes | None = Field(
        None, description="validation corpus, in the same form as `train`; null: no validation"
    )
    tokenizer: str | None = Field(
        None,
        description="`bytes`, a sentencepiece .model file or a tokenizer.json; only needed where text is "
        "shown; null: none",
    )


class CheckpointConfig(Section):
    """When checkpoints are saved and which ones are kept, and what a run starts from."""

    every: Whole = Field(
        0,
        description="steps between checkpoints; 0: none during training; a run that is stopped always "
        "saves one",
    )
    last: bool = Field(True, description="save a checkpoint after the last step, independently of `every`")
    keep: Count = Field(2, description="number of recent complete checkpoints to keep")
    keep_every: Whole = Field(
        0, description="keep checkpoints of steps that are multiples of this number permanently; 0: none"
    )
    best: bool = Field(
        False,
        description="keep the checkpoint with the lowest validation loss in the folder best/ of the run; "
        "see docs/operations.md",
    )
    async_: bool = Field(
        False,
        alias="async",
        description="write checkpoints in a background thread from a copy in host memory, which needs as "
        "much memory as the checkpoint, while training continues",
    )
    mirror: str | None = Field(
        None,
        min_length=1,
        description="folder for second copies of checkpoints, written in the background; used if the "
        "copies in `log.dir` are damaged or missing; null: none",
    )
    on_failure: Literal["stop", "continue"] = Field(
        "stop",
        description="if a checkpoint cannot be saved, for example on a full disk: stop the run, or "
        "continue and try again at the next checkpoint",
    )
    resume: str = Field(
        "auto",
        min_length=1,
        description="auto: resume from the newest complete checkpoint in `log.dir`; never: start at step "
        "0; or the path of a checkpoint",
    )
    weights: str | None = Field(
        None,
        min_length=1,
        description="run or checkpoint whose weights initialize a new run at step 0, without its "
        "optimizer state; ignored if there is a checkpoint to resume; null: random initial "
        "weights",
    )


class CpuConfig(Section):
    """How ranks on CPUs use memory and compute matrix products; without effect on GPUs."""

    keep_memory: bool = Field(
        True,
        description="keep freed memory in the process, so that the system does not zero pages "
        "again (glibc only)",
    )
    onednn: bool = Field(
        True, description="compute fp32 matrix products with oneDNN where it keeps full fp32 precision"
    )
    widen: bool = Field(
        True,
        description="compute 16-bit matrix products in fp32 and round the result, on processors that "
        "would only emulate them",
    )


class ProfileConfig(Section):
    """The steps and ranks to profile."""

    steps: tuple[Count, Count] = Field(description="first and last step to profile")
    memory: bool = Field(False, description="also record a GPU's memory allocations")
    ranks: Annotated[tuple[Whole, ...], Field(min_length=1)] = Field(
        (0,), description="ranks whose steps are traced"
    )


class StatisticsConfig(Section):
    """How often weights, gradients, updates and activations are measured."""

    every: Count = Field(description="steps between measurements")


class LogConfig(Section):
    """The folder of the run, its metrics, and what is measured."""

    dir: str | None = Field(
        None,
        min_length=1,
        description="folder of the run, for logs and checkpoints; null: `runs/` and the config file's name",
    )
    every: Count = Field(
        10, description="steps between log lines; training waits for the device only at these steps"
    )
    figures: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(min_length=1)] = Field(
        ("*",),
        description="patterns of the metrics that TensorBoard and wandb receive, such as `train/*` or "
        "`speed/mfu`; metrics.jsonl always has all of them",
    )
    tensorboard: bool = Field(True, description="write the metrics to the folder tensorboard/ of the run")
    wandb: Literal["off", "offline", "online"] = Field(
        "off",
        description="send the metrics to Weights & Biases; offline: to a local file for `wandb sync`; "
        "online: directly",
    )
    price_per_device_hour: NonNegative | None = Field(
        None,
        description="price of one device for an hour, in any currency; metrics and the end of the run "
        "then report the cost; null: no cost",
    )
    prometheus_port: Count | None = Field(
        None,
        description="port on which the first rank of every host serves metrics for Prometheus; null: no "
        "server",
    )
    statistics: StatisticsConfig | None = Field(
        None,
        description="measure the sizes of weights, gradients, updates, activations and attention logits "
        'at some steps, such as `{"every": 100}`; null: off',
    )
    profile: ProfileConfig | None = Field(
        None,
        description="profile some steps: write a trace and a summary of where time is spent, for example "
        '`{"steps": [20, 22], "ranks": [0]}`; null: off',
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
    # `pipeline.partition.Partition`, and `None` until whoever starts a run has chosen it
    _partition: Any = PrivateAttr(None)

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
        """Chunks of the model that each rank of the pipeline has; where the schedule
        `auto` chooses them, 1 until it has.
        """
        if self.parallel.chunks is None and self.parallel.schedule == "auto":
            return 1 if self._partition is None else len(self._partition.layers) // self.parallel.pipeline
        return resolved(self.parallel.chunks)

    @property
    def sizes(self) -> dict[str, int]:
        """How many ranks each axis of the mesh has, from the outermost axis to the innermost."""
        assert isinstance(self.parallel.data, int), "config was not resolved"
        return {axis.name: getattr(self.parallel, axis.title) for axis in AXES}

    @property
    def expert_sizes(self) -> dict[str, int]:
        """The same of the view for experts (`axes.EXPERT_AXES`): all ranks of a stage, with `expert` and
        `expert_tensor` of them apart.
        """
        expert_tensor = self.parallel.expert_tensor or self.parallel.tensor
        return expert_view(self.sizes, self.parallel.expert, expert_tensor)

    @property
    def world_size(self) -> int:
        """The ranks of the whole mesh."""
        return prod(self.sizes.values())

    @property
    def token_ranks(self) -> int:
        """Ranks that hold the same parameters and compute on different tokens: data × context.

        They sum gradients.
        """
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
        """Ranks that divide one copy of the state among themselves under the fsdp
        engine: data and context ranks.
        """
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
    def attended_size(self) -> int:
        """Features of a head as attention's kernels take it: of query and key, or
        of the value if they are more.
        """
        model = self.model
        return (
            self.head_size
            if model.kv_rank is None
            else max(model.plain_size + self.head_size, model.value_size)
        )

    @property
    def residual_scale(self) -> float:
        """The factor on what each half of a block adds to the residual: `model.residual_scale`, by
        depth with `model.base_layers`.
        """
        model = self.model
        return model.residual_scale * ((model.base_layers or model.num_layers) / model.num_layers)

    @property
    def logit_scale(self) -> float:
        """The factor on the logits: `model.logit_scale`, by width with mup."""
        model = self.model
        return model.logit_scale * ((model.base_width or model.hidden_size) / model.hidden_size)

    @property
    def attention_sizes(self) -> tuple[int, int]:
        """The features of all query heads, and those of all key or value heads."""
        return self.model.num_heads * self.head_size, self.kv_heads * self.head_size

    @property
    def max_positions(self) -> int:
        """Rows of the learned position table, and the longest text that generation may make."""
        return resolved(self.model.max_positions)


@on_register
def _rebuild() -> None:
    """The section `optim` has the keys of one rule more, or less."""
    Config.model_rebuild(force=True)
