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
    steps: Count = 1000
    seq_len: Positions = 1024
    micro_batch_size: Count = 1
    global_batch_size: Count = 8
    batch_ramp: Annotated[tuple[tuple[LastStep, Size], ...], Field(max_length=64)] = Field(
        (),
        description="[[last step, size], …]: up to each of these steps global batches have that size, "
        "then global_batch_size",
    )
    precision: Literal["fp32", "bf16", "fp16", "fp64"] = "bf16"
    recompute: Literal["none", "selective", "full"] = "none"
    offload_activations: bool = Field(
        False,
        description="what blocks keep for their backward waits in host memory, copied while the device "
        "computes",
    )
    seed: Whole = 0
    device: Literal["auto", "cpu", "cuda"] = "auto"
    compile: bool | Literal["auto"] = Field(
        "auto",
        description="torch.compile for every block: a graph that all blocks of a kind share, and that "
        "ends around a mixture of experts; "
        "auto: on a CPU, what a long run measures before its first step; elsewhere not so far",
    )
    deterministic: bool = Field(
        False,
        description="the same command on the same machines gives the same bits; operations that cannot do "
        "so fail",
    )
    eval_every: Whole = Field(0, description="steps between validations; 0: only after the last step")
    eval_batches: Whole = Field(
        20,
        description="global batches that a validation reads, the same each time, spread evenly over the "
        "validation set; 0: all of it",
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
    document_mask: bool = Field(
        False,
        description="attention stays within a document, positions start anew in each, and no target lies "
        "across a boundary",
    )
    packing: Literal["none", "best_fit"] = Field(
        "none",
        description="none: a sample is consecutive tokens of a corpus; best_fit: whole documents, with "
        "padding behind them",
    )
    train: Prefix | WeightedPrefixes | None = Field(
        None, description="prefix of .bin/.idx, or a list of [weight, prefix]"
    )
    valid: Prefix | WeightedPrefixes | None = None
    tokenizer: str | None = Field(
        None, description="bytes, a sentencepiece .model or a tokenizer.json; needed only where text is shown"
    )


class CheckpointConfig(Section):
    every: Whole = Field(
        0, description="steps between checkpoints; 0: none on the way. A run that is stopped always saves one"
    )
    last: bool = Field(True, description="a checkpoint after the last step, whatever `every` is")
    keep: Count = Field(2, description="newest whole checkpoints kept")
    keep_every: Whole = Field(
        0, description="checkpoints of steps that are multiples of it are kept for good; 0: none"
    )
    best: bool = Field(
        False,
        description="the checkpoint of the least validation loss is kept in the run's folder best/; see "
        "docs/checkpoints.md",
    )
    async_: bool = Field(
        False,
        alias="async",
        description="copy to host memory and go on training, while a thread writes; takes as much host "
        "memory",
    )
    mirror: str | None = Field(
        None,
        min_length=1,
        description="a folder for second copies, made beside training; used where those in log.dir are "
        "damaged or gone",
    )
    on_failure: Literal["stop", "continue"] = Field(
        "stop",
        description="where a checkpoint cannot be saved (a full disk): end the run, or go on without it "
        "and try again at the next",
    )
    resume: str = Field(
        "auto",
        min_length=1,
        description="auto: the newest whole checkpoint in log.dir; never; or a checkpoint's path",
    )
    weights: str | None = Field(
        None,
        min_length=1,
        description="where there is nothing to resume: start at step 0 from the weights alone of this run "
        "or checkpoint",
    )


class CpuConfig(Section):
    keep_memory: bool = Field(
        True,
        description="freed blocks stay with the process, so that the system does not zero them again (glibc)",
    )
    onednn: bool = Field(True, description="fp32 products go to oneDNN where they stay fp32-exact")
    widen: bool = Field(
        True, description="products in 16 bits that the processor would emulate are done in fp32, and rounded"
    )


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
        ("*",),
        description="patterns of the tags that TensorBoard and wandb show, such as train/* or speed/mfu; "
        "metrics.jsonl has all",
    )
    tensorboard: bool = True
    wandb: Literal["off", "offline", "online"] = Field(
        "off",
        description="Weights & Biases gets the figures of metrics.jsonl: offline in a file that wandb "
        "sync sends later, or online",
    )
    price_per_device_hour: NonNegative | None = Field(
        None, description="in any currency: figures and the run's end say what it has cost"
    )
    prometheus_port: Count | None = Field(
        None, description="the first rank of every machine serves figures there; null: nobody"
    )
    statistics: StatisticsConfig | None = Field(
        None,
        description='{"every": 100}: steps between sizes of weights, gradients, updates, activations and '
        "attention logits",
    )
    profile: ProfileConfig | None = Field(
        None,
        description='{"steps": [20, 22], "memory": true, "ranks": [0]}: a trace of steps 20 to 22 on '
        "these ranks, and where time goes",
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
        p = self.parallel
        return expert_view(self.sizes, p.expert, p.expert_tensor or p.tensor)

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
