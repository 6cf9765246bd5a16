"""What a prediction is made for: a model, a batch and a layout, in plain numbers.

A `Setting` can be made from a config (`setting_of`) or from a row of a public table, so that both are
predicted by the same code.
"""

from dataclasses import dataclass, replace
from math import inf
from typing import Any

from megacore.config.implied import attention_of, compiles, reshards
from megacore.config.optim_groups import ParameterGroups
from megacore.config.schema import Config, resolved
from megacore.errors import ConfigError
from megacore.pipeline.partition import placement_of, stage_layers
from megacore.tools.choices.activations import layer_costs
from megacore.tools.choices.context_method import Divided, Method
from megacore.tools.choices.layer_cost import LayerCost
from megacore.tools.choices.partition import partitioned
from megacore.tools.choices.resolve_auto import context_method_of
from megacore.tools.planner.model_flow import flow_of
from megacore.tools.planner.operations import ACTIVATION_BYTES
from megacore.tools.planner.parameters import rank_parameters
from megacore.tools.planner.routing import Routing
from megacore.tools.planner.traffic import Transfer
from megacore.tools.settings.ds_settings import ds_settings


@dataclass(frozen=True)
class OwnRank:
    """What a rank of the pipeline has of a model of the user's own."""

    layers: tuple[tuple[LayerCost, int], ...]  # in runs of equal ones
    parameters: int


@dataclass(frozen=True)
class Mixture:
    """The experts of a model, and the ranks that divide them."""

    experts: int
    chosen: int  # of a token
    ffn: int  # features of one
    shared: int = 0  # features of those that all tokens go through
    share: float = 1.0  # of the blocks, those with experts
    ranks: int = 1  # that hold other experts (ep)
    parts: int = 1  # ranks that hold parts of the same (etp)
    copies: bool = True  # each rank with a part is sent the rows; else one of them is, and they gather
    # a token goes once to each machine with experts of its own, and is passed on there; else once for each
    # expert
    once: bool = False
    busiest: float = 1.0  # rows of the rank that has most, as a part of the mean
    most: float = inf  # rows that an expert takes, likewise (`model.capacity_factor`)
    halves: bool = False  # of a microbatch, which take turns in travelling and in their experts


@dataclass(frozen=True)
class Latent:
    """Latent attention: the small vectors of a token that its queries, keys and values are made
    of, and the features of a head.
    """

    keys: int
    queries: int  # 0: queries are made of the hidden states
    plain: int  # of a head's query and key, that do not turn
    turned: int  # of a head's query, and of the one key that all heads share
    value: int


@dataclass(frozen=True)
class Setting:
    """A model, a batch and a layout."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_size: int
    vocab: int
    seq: int
    gated: bool = False  # three feed-forward products (swiglu), not two
    tied: bool = False  # the LM head is the embedding
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    context_method: Method = "gather"
    data: int = 1
    chunks: int = 1  # of the model, a rank of the pipeline
    sequence: bool = False  # tokens are divided between tensor-parallel regions
    # collectives of tensor ranks run in pieces, beside the products before or behind them
    async_tensor: bool = False
    micro_batch: int = 1
    global_batch: int = 1
    precision: str = "bf16"
    # or selective, per_op (every second product, and what is no product), half (of the blocks), full
    recompute: str = "none"
    compiled: bool = False  # blocks: neighbouring passes are one kernel
    schedule: str = "1f1b"
    flash: bool = True  # attention keeps no scores, and skips the masked half
    # What the data ranks divide: 1 optimizer state, 2 gradients too, or parameters that are whole during a
    # step, 3 parameters too.
    zero: int = 0
    shard_size: int = 0  # ranks that divide it; 0: all data ranks
    gradient_bytes: float = 4  # of a number that is summed over data ranks
    # Of a model of the user's own, what was measured of each rank's layers, and the bytes of the largest
    # message between stages.
    own: tuple[OwnRank, ...] = ()
    own_message: int = 0
    mixture: Mixture | None = None  # of some blocks in place of the feed-forward layer
    # that attention has; then `head_size` is what its kernels take, in the mean of keys and values
    latent: Latent | None = None
    # Of whole matrices that an optimizer updates: the operations of the rank that has most, and what it sends
    # and receives.
    matrix_operations: float = 0.0
    matrix_transfers: tuple[Transfer, ...] = ()

    @property
    def world(self) -> int:
        """Ranks."""
        return self.tensor * self.pipeline * self.context * self.data

    @property
    def microbatches(self) -> int:
        """Microbatches of a data rank in a step."""
        return max(1, self.global_batch // (self.micro_batch * self.data))

    @property
    def tokens(self) -> int:
        """Tokens of a microbatch that a rank works on."""
        return self.micro_batch * self.seq // self.context

    @property
    def attention_size(self) -> int:
        """Features of all query heads."""
        return self.heads * self.head_size

    @property
    def kv_size(self) -> int:
        """Features of all key heads, or of all value heads."""
        return self.kv_heads * self.head_size

    @property
    def element(self) -> int:
        """Bytes of an activation's number."""
        return ACTIVATION_BYTES[self.precision]

    @property
    def divided(self) -> Divided:
        """Attention of a block, as context and tensor ranks divide it."""
        heads, kv_heads = self.heads / self.tensor, self.kv_heads / self.tensor
        return Divided(
            self.context, self.tensor, self.tokens, self.seq, heads, kv_heads, self.head_size, self.element
        )

    @property
    def projections(self) -> tuple[tuple[float, float, bool], ...]:
        """Attention's products: what goes in, what comes out, and whether tensor ranks divide them
        (not what latents are made by).
        """
        if (m := self.latent) is None:
            return (self.hidden, self.attention_size + 2 * self.kv_size, True), (
                self.attention_size,
                self.hidden,
                True,
            )
        queries = (m.queries or self.hidden, self.heads * (m.plain + m.turned), True)
        latents = (
            (self.hidden, m.keys + m.turned, False),
            *([(self.hidden, m.queries, False)] if m.queries else []),
        )
        return (
            *latents,
            queries,
            (m.keys, self.heads * (m.plain + m.value), True),
            (self.heads * m.value, self.hidden, True),
        )

    @property
    def attention_weights(self) -> float:
        """Parameters of one attention layer."""
        return sum(inner * columns for inner, columns, _ in self.projections)

    @property
    def ffn_weights(self) -> int:
        """Parameters of one feed-forward."""
        return (3 if self.gated else 2) * self.hidden * self.ffn

    @property
    def active_weights(self) -> float:
        """Parameters of feed-forward layers that a token goes through, the mean of blocks."""
        if self.mixture is None:
            return self.ffn_weights
        m = self.mixture
        active = (3 if self.gated else 2) * self.hidden * (m.chosen * m.ffn + m.shared)
        return self.ffn_weights + m.share * (active - self.ffn_weights)

    @property
    def expert_parameters(self) -> float:
        """Parameters of the experts of a block that has some, on a rank."""
        m = self.mixture
        return (
            0.0
            if m is None
            else (3 if self.gated else 2) * self.hidden * m.ffn * m.experts / (m.ranks * m.parts)
        )

    @property
    def block_parameters(self) -> float:
        """Parameters of one block on a rank: matrices only; the mean of blocks."""
        attention, dense = self.attention_weights, float(self.ffn_weights)
        if (m := self.mixture) is None:
            return attention / self.tensor + dense / self.tensor
        shared = (3 if self.gated else 2) * self.hidden * m.shared
        replaced = m.share * (self.expert_parameters + self.hidden * m.experts)
        return (attention + dense + m.share * (shared - dense)) / self.tensor + replaced

    @property
    def vocabulary_parameters(self) -> float:
        """Parameters of the embedding, or of the LM head, on a rank."""
        return self.vocab * self.hidden / self.tensor


def own_ranks(config: Config) -> tuple[OwnRank, ...]:
    """What was measured of each rank of the pipeline, given a model of the user's own."""
    layers, placement = stage_layers(config), placement_of(config)
    runs = (
        tuple(run for stage in stages for run in layer_costs(config, layers[stage])) for stages in placement
    )
    return tuple(map(OwnRank, runs, rank_parameters(config)))


def largest_message(config: Config) -> int:
    """Bytes of the largest that crosses a cut of the pipeline."""
    flow = flow_of(config)
    return max((flow.message_bytes(config, cut) for cut in range(len(stage_layers(config)) - 1)), default=0)


def matrices_of(config: Config) -> dict[str, Any]:
    """What updates of whole matrices take of the rank of the pipeline that has most of them."""
    if not any(group.rule.whole for group in ParameterGroups(config.optim).every):
        return {}
    from megacore.tools.planner.whole_updates import Place, whole_updates

    ranks = [
        updates
        for rank in range(config.parallel.pipeline)
        if (updates := whole_updates(config, Place(rank))) is not None
    ]
    most = max(ranks, key=lambda updates: updates.operations)
    return {
        "matrix_operations": most.operations,
        "matrix_transfers": tuple(t for t in most.transfers(config) if t.size > 1 and t.calls),
    }


def setting_of(config: Config) -> Setting:
    """The setting of a resolved config, whose experts have a balanced load.

    Raises `ConfigError` for those of a user's own model.
    """
    refuse_experts(config)
    config = partitioned(config)
    own = config.model.is_custom
    model, train, parallel, engine = config.model, config.train, config.parallel, config.engine
    kind_zero = {
        "native": int(engine.shard_optimizer),
        "fsdp": (3 if reshards(config) else 2) if config.token_ranks > 1 else 0,
    }
    zero = (
        int(ds_settings(config)["zero_optimization"]["stage"])
        if engine.kind == "deepspeed"
        else kind_zero[engine.kind]
    )
    return Setting(
        layers=model.num_layers,
        hidden=model.hidden_size,
        ffn=resolved(model.ffn_size),
        heads=model.num_heads,
        kv_heads=config.kv_heads,
        head_size=config.attended_size,
        vocab=model.vocab_size,
        seq=train.seq_len,
        gated=model.gated,
        tied=model.tie_embeddings,
        tensor=parallel.tensor,
        pipeline=parallel.pipeline,
        context=parallel.context,
        context_method=context_method_of(config) if parallel.context > 1 else "gather",
        data=config.data_size,
        chunks=config.chunks,
        sequence=parallel.sequence,
        micro_batch=train.micro_batch_size,
        global_batch=train.global_batch_size,
        precision=train.precision,
        recompute=train.recompute,
        compiled=compiles(config),
        schedule=parallel.schedule,
        flash=attention_of(config) == "sdpa",
        zero=zero,
        shard_size=engine.shard_size or 0,
        gradient_bytes=gradient_bytes(config),
        own=own_ranks(config) if own else (),
        own_message=largest_message(config) if own else 0,
        mixture=mixture_of(config),
        latent=latent_of(config),
        **matrices_of(config),
    )


def refuse_experts(config: Config) -> None:
    """Raises `ConfigError` for what is not predicted of a user's own model with experts: a step's time."""
    if config.model.num_experts is not None and config.model.is_custom:
        wrong = "how long a step with experts takes is not predicted of a model of your own"
        raise ConfigError(
            "model.source", wrong, "launch/plan.py without --search or --gpu with --cluster, or null"
        )


def mixture_of(config: Config) -> Mixture | None:
    """The experts of a config's model."""
    model, sizes = config.model, config.expert_sizes
    if model.num_experts is None:
        return None
    ffn, share = (
        resolved(model.expert_ffn_size),
        sum(map(model.has_experts, range(model.num_layers))) / model.num_layers,
    )
    chosen, shared = model.experts_per_token, model.shared_experts * ffn
    most = model.capacity_factor or inf
    halves = config.parallel.expert_halves and sizes["ep"] * sizes["etp"] > 1  # else no row travels
    ranks = sizes["ep"], sizes["etp"]
    return Mixture(
        model.num_experts,
        chosen,
        ffn,
        shared,
        share,
        *ranks,
        busiest=min(1.0, most),
        most=most,
        halves=halves,
    )


def latent_of(config: Config) -> Latent | None:
    """Latent attention of a config's model."""
    model = config.model
    if model.kv_rank is None:
        return None
    return Latent(model.kv_rank, model.q_rank or 0, model.plain_size, config.head_size, model.value_size)


def routed(s: Setting, routing: Routing | None) -> Setting:
    """The same with the load that a run logged."""
    if s.mixture is None or routing is None:
        return s
    return replace(s, mixture=replace(s.mixture, busiest=routing.busiest(s.mixture.ranks, s.mixture.most)))


def gradient_bytes(config: Config) -> float:
    """Bytes in which a gradient's number travels between data ranks; low rank sends other numbers,
    and is taken for none of them here.
    """
    engine, plain = config.engine, 8 if config.train.precision == "fp64" else 4
    if (
        engine.compression is not None
        and engine.compression.kind == "int8"
        and engine.compression.rounding == "nearest"
    ):
        return 1 + plain / engine.compression.block
    return 2 if engine.reduce_dtype == "bf16" else plain
