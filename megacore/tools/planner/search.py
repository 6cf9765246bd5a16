"""Finds the layouts of a run that fit into a device's memory, and ranks them by predicted step time.

Every candidate is a whole setting: tensor, pipeline, schedule, chunks, context and its method, data,
microbatch, recomputation, engine and offload. Its time is that of `step_time.predict`, its memory that of
`memory.rank_memory` and what a device keeps besides tensors.
Nothing is sampled: all combinations that divide are counted.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from math import prod
from typing import Any

from megacore.config.parallel import CHUNKS
from megacore.config.precision import ELEMENT_BYTES, GRADIENT_BYTES
from megacore.config.schema import Config, resolved
from megacore.distributed.axes import divisors
from megacore.errors import ConfigError
from megacore.tools.choices.activations import layer_costs
from megacore.tools.choices.context_method import METHODS
from megacore.tools.choices.flops import model_flops
from megacore.tools.choices.partition import partitioned
from megacore.tools.choices.resolve_auto import context_method_of
from megacore.tools.planner.devices import Cluster, DeviceSpec
from megacore.tools.planner.memory import RankMemory, fullest_rank, optimizer_bytes, rank_memory
from megacore.tools.planner.parameters import held_by, rank_parameters
from megacore.tools.planner.profile import Profile
from megacore.tools.planner.routing import Routing
from megacore.tools.planner.step_time import Prediction, Predictor
from megacore.tools.planner.workload import Setting, routed, setting_of
from megacore.tools.settings.derive import BUCKET_MIB, PART_MIB
from megacore.tools.settings.ds_config import check_ds_config
from megacore.tools.settings.validation import check

MICROBATCHES = (1, 2, 4, 8, 16, 32)  # sequences of one
RECOMPUTE = ("none", "selective", "full")
MOST_CHUNKS = 8
MOST_STAGES = 64
# ranks of a pipeline whose schedules with split backwards, which take seconds to lay out, are counted
MOST_SPLIT = 32
SLOWEST = 1.25  # times the best layout's step, beyond which nobody asks for a layout's memory
HOST_BYTES_PER_SECOND = 2.5e10  # to host memory and back: what PCIe 4 with 16 lanes gives in practice
# tokens of a sequence that a context rank gets at least: as many as Llama 3's had (Grattafiori et al. 2024)
SHORTEST_PART = 8192

KEYS = ("tensor", "pipeline", "context", "context_method", "data", "sequence", "schedule", "chunks")
OF_EXPERTS = ("expert", "expert_tensor", "expert_halves")


@dataclass(frozen=True)
class Candidate:
    """A layout with its prediction."""

    config: Config
    prediction: Prediction
    peak: float  # operations a second of all devices
    routing: Routing | None = None  # by which experts' rows take memory; else they are balanced

    @cached_property
    def memory(self) -> tuple[int, RankMemory, float]:
        """The rank of the pipeline that needs most, its memory, and the GiB that its device must have."""
        return fullest_rank(self.config, self.routing)

    @property
    def needs_gib(self) -> float:
        """GiB that the fullest device must have."""
        return self.memory[2]

    @property
    def holds_gib(self) -> float:
        """GiB that parameters, gradients and optimizer state take at least."""
        if self.config.engine.kind != "native":
            return 0.0
        element, gradient = (
            ELEMENT_BYTES[self.config.train.precision],
            GRADIENT_BYTES[self.config.train.precision],
        )
        state = optimizer_bytes(self.config) / (
            self.config.token_ranks if self.config.engine.shard_optimizer else 1
        )
        return (
            max(
                held.elements * element + (held.elements - held.frozen) * (gradient + state)
                for held in held_by(self.config)
            )
            / 2**30
        )

    @property
    def seconds(self) -> float:
        """A step's time."""
        return self.prediction.step

    @property
    def tokens_per_second(self) -> float:
        """Of all devices."""
        return self.config.train.global_batch_size * self.config.train.seq_len / self.seconds

    @property
    def mfu(self) -> float:
        """Model FLOPs of a step, attention over all pairs, by what the devices could do."""
        flops = model_flops(self.config, causal=False)
        assert flops is not None, "a prediction needs layers that run without content"
        return self.tokens_per_second * flops / self.peak

    @property
    def mfu_causal(self) -> float | None:
        """The same, without the pairs that a causal mask hides.

        None of a model of the user's own, of which nobody says what is masked.
        """
        flops = model_flops(self.config, causal=True)
        return None if flops is None else self.tokens_per_second * flops / self.peak

    def overrides(self) -> list[str]:
        """The settings that make this layout of any config with the same model and batch."""
        train, parallel, engine = self.config.train, self.config.parallel, self.config.engine
        found = {
            f"parallel.{key}": getattr(parallel, key)
            for key in KEYS
            if parallel.context > 1 or key != "context_method"
        }
        found |= {
            f"parallel.{key}": getattr(parallel, key)
            for key in OF_EXPERTS
            if self.config.model.num_experts is not None
        }
        found |= {"train.micro_batch_size": train.micro_batch_size, "train.recompute": train.recompute}
        found |= {"train.offload_activations": train.offload_activations, "engine.kind": engine.kind}
        found |= {"engine.shard_optimizer": engine.shard_optimizer}
        return [
            f"{key}={str(value).lower() if isinstance(value, bool) else value}"
            for key, value in found.items()
        ]

    def describe(self) -> str:
        """The layout in words."""
        train, parallel, engine = self.config.train, self.config.parallel, self.config.engine
        chunks = f" × {parallel.chunks} chunks" if self.config.chunks > 1 else ""
        schedule = f" ({parallel.schedule}{chunks})" if parallel.pipeline > 1 else ""
        state = "fsdp" if engine.kind == "fsdp" else "sharded" if engine.shard_optimizer else "native"
        recompute = "" if train.recompute == "none" else f", recompute {train.recompute}"
        offload = ", offload" if train.offload_activations else ""
        context = (
            f" × context {parallel.context} ({context_method_of(self.config)})"
            if parallel.context > 1
            else ""
        )
        sizes = self.config.expert_sizes
        experts = (
            f", expert {sizes['ep']} × expert_tensor {sizes['etp']}"
            if self.config.model.num_experts is not None
            else ""
        )
        experts += " in halves" if parallel.expert_halves else ""
        axes = (
            f"tensor {parallel.tensor} × pipeline {parallel.pipeline}{schedule}{context} × data "
            f"{parallel.data}{experts}"
        )
        return f"{axes}, microbatch {train.micro_batch_size}, {state}{recompute}{offload}"


@dataclass(frozen=True)
class Found:
    """The candidates that fit, fastest first (of equally fast ones first what needs least), and those
    that do not, by what they need.
    """

    fit: list[Candidate]
    too_large: list[Candidate]
    hopeless: int  # whose parameters, gradients and optimizer state alone are too much
    counted: int  # with those whose memory was not asked for, because others are faster and fit
    least: Candidate | None = None  # what needs least, if nothing fits


def search(
    config: Config,
    world: int,
    device: DeviceSpec,
    cluster: Cluster,
    profile: Profile,
    memory_gib: float,
    routing: Routing | None = None,
) -> Found:
    """Every layout of `config`'s model and global batch on `world` devices, predicted; of
    experts with a load that was logged.
    """
    peak, predictor = world * device.peak_flops[config.train.precision], Predictor(device, cluster, profile)

    def predict(setting: Setting) -> Prediction:
        return predictor(routed(setting, routing))

    def predicted(layout: Config) -> Iterator[Candidate]:
        """Also with exchanges of rows in halves, where that is faster."""
        setting = setting_of(layout)
        yield (whole := Candidate(layout, predict(setting), peak))
        if (m := setting.mixture) is not None and m.ranks * m.parts > 1:
            halves = predict(replace(setting, mixture=replace(m, halves=True)))
            if halves.step < whole.seconds:
                yield Candidate(replace_config(layout, "parallel", expert_halves=True), halves, peak)

    every = [
        found for layout in map(partitioned, layouts(config, world, cluster)) for found in predicted(layout)
    ]
    found = fitting(every, memory_gib, routing)
    if found.fit:
        return found
    # Activations go to host memory where nothing else helps.
    none = (c.config for c in every if c.config.train.recompute == "none")
    away = (partitioned(replace_config(layout, "train", offload_activations=True)) for layout in none)
    other = fitting(
        [Candidate(layout, offloaded(layout, predict(setting_of(layout))), peak) for layout in away],
        memory_gib,
        routing,
    )
    return (
        other
        if other.fit
        else replace(other, least=least_of(c for c in (found.least, other.least) if c is not None))
    )


def fitting(candidates: list[Candidate], memory_gib: float, routing: Routing | None = None) -> Found:
    """Divides candidates by what they need.

    Memory is asked for from the fastest on, until what is left is much slower than what fits.

    With a run's routing, what a balanced load needs comes first, and leaves few: without a capacity the
    fullest rank needs no less.
    """
    candidates = sorted(candidates, key=lambda candidate: candidate.seconds)
    fit: list[Candidate] = []
    large: list[Candidate] = []
    hopeless: list[Candidate] = []
    for candidate in candidates:
        if fit and candidate.seconds > SLOWEST * fit[0].seconds:
            break
        if candidate.holds_gib > memory_gib:
            hopeless.append(candidate)
        else:
            if routing is not None and (
                candidate.config.model.capacity_factor or candidate.needs_gib <= memory_gib
            ):
                candidate = replace(candidate, routing=routing)
            (fit if candidate.needs_gib <= memory_gib else large).append(candidate)
    best = fit[0].seconds if fit else 1.0
    in_order = sorted(fit, key=lambda candidate: (round(candidate.seconds / best, 4), candidate.needs_gib))
    large.sort(key=lambda candidate: candidate.needs_gib)
    # To ask all for their memory would take longer than the search: of those whose state is too much, least
    # state and activations count.
    nearest = [*large[:1], *sorted(hopeless, key=state_and_activations)[:1]]
    nearest = [replace(candidate, routing=routing) for candidate in nearest]
    return Found(in_order, large, len(hopeless), len(candidates), None if fit else least_of(nearest))


def state_and_activations(candidate: Candidate) -> tuple[float, int, int]:
    """What orders candidates by memory without asking for it: their state, then their
    microbatch and what they recompute.
    """
    train = candidate.config.train
    return round(candidate.holds_gib, 2), train.micro_batch_size, -RECOMPUTE.index(train.recompute)


def least_of(candidates: Iterable[Candidate]) -> Candidate | None:
    """Of some candidates the one that needs least."""
    return min(candidates, key=lambda candidate: candidate.needs_gib, default=None)


def offloaded(config: Config, prediction: Prediction) -> Prediction:
    """With the time in which a device waits for activations on their way to host memory or back, as
    far as it does not compute then.
    """
    kept = replace_config(config, "train", offload_activations=False)
    away = max(memory.activations for memory in rank_memory(kept)) / max(
        1, min(config.num_microbatches, config.parallel.pipeline)
    )
    copies = 2 * config.num_microbatches * away / HOST_BYTES_PER_SECOND
    computes = sum(prediction.terms[name] for name in ("products", "attention", "passes"))
    return replace(prediction, terms=prediction.terms | {"offload": max(0.0, copies - computes)})


def layouts(config: Config, world: int, cluster: Cluster) -> Iterator[Config]:
    """Every setting of the config's model and global batch that divides on `world` devices."""
    model, train = config.model, config.train
    for tensor in divisors(world):
        if tensor > cluster.node_ranks or any(
            size % tensor for size in (model.num_heads, config.kv_heads, resolved(model.ffn_size))
        ):
            continue
        for pipeline in divisors(world // tensor):
            if pipeline > min(MOST_STAGES, model.num_layers):
                break
            for context, method in contexts(config, world // tensor // pipeline):
                data = world // tensor // pipeline // context
                sequence = tensor > 1 and train.seq_len // context % tensor == 0
                axes = tensor, pipeline, context, method, data, sequence
                every = product(
                    schedules(pipeline, model.num_layers), expert_ranks(config, tensor, context * data)
                )
                for (schedule, chunks), experts in every:
                    parallel = dict(zip(KEYS, (*axes, schedule, chunks), strict=True)) | experts
                    for micro in MICROBATCHES:
                        if train.global_batch_size % (micro * data):
                            continue
                        for engine in engines(data * context):
                            yield from _variants(config, parallel, micro, engine)


def _variants(
    config: Config, parallel: dict[str, Any], micro: int, engine: dict[str, Any]
) -> Iterator[Config]:
    token_ranks = parallel["data"] * parallel["context"]
    bucket = max(BUCKET_MIB, PART_MIB * token_ranks)
    laid_out = replace_config(
        replace_config(config, "parallel", **parallel), "engine", bucket_mib=bucket, **engine
    )
    laid_out = replace_config(laid_out, "train", micro_batch_size=micro, offload_activations=False)
    try:
        check(laid_out, parallel["tensor"] * parallel["pipeline"] * token_ranks)
        check_ds_config(laid_out)
        if config.model.is_custom:
            rank_parameters(laid_out)
            layer_costs(laid_out, range(config.model.num_layers))
    except ConfigError:  # a run would refuse it, or its layers cannot be divided so
        return
    for recompute in RECOMPUTE:
        yield replace_config(laid_out, "train", recompute=recompute)


def schedules(pipeline: int, layers: int) -> Iterator[tuple[str, int]]:
    """The schedules of a pipeline, with numbers of chunks that have a layer each."""
    if pipeline == 1:
        yield "1f1b", 1
        return
    for schedule, chunks in CHUNKS.items():
        if pipeline > MOST_SPLIT and schedule not in ("1f1b", "interleaved"):
            continue
        most = MOST_CHUNKS if schedule == "interleaved" else chunks
        for count in range(chunks, most + 1):
            if pipeline * count <= layers and (count == chunks or layers % (pipeline * count) == 0):
                yield schedule, count


def contexts(config: Config, ranks: int) -> Iterator[tuple[int, str]]:
    """How many of `ranks` may divide a sequence, and by which method; the config's own, if it names one."""
    own = config.parallel.context_method
    yield 1, own
    for context in divisors(ranks)[1:]:
        if config.train.seq_len // context < SHORTEST_PART:
            return
        yield from ((context, method) for method in (METHODS if own == "auto" else (own,)))


def expert_ranks(config: Config, tensor: int, token_ranks: int) -> list[dict[str, Any]]:
    """How many ranks may divide the experts, and one expert: as many as attention's tensor ranks, or none."""
    if config.model.num_experts is None:
        return [{}]
    sizes = product(divisors(config.model.num_experts), sorted({1, tensor}))
    return [
        dict(zip(OF_EXPERTS, (*pair, False), strict=True))
        for pair in sizes
        if token_ranks * tensor % prod(pair) == 0
    ]


def engines(token_ranks: int) -> Iterator[dict[str, Any]]:
    """The engines of so many ranks that sum gradients."""
    plain: dict[str, Any] = {"kind": "native", "shard_optimizer": False}
    yield plain
    if token_ranks > 1:
        yield plain | {"shard_optimizer": True}
        yield plain | {"kind": "fsdp"}


def replace_config(config: Config, section: str, **values: Any) -> Config:
    """The config with other values in one section."""
    return config.model_copy(update={section: getattr(config, section).model_copy(update=values)})


def lost(winner: Candidate, other: Candidate) -> str:
    """Why `other` is slower, or if it is as fast needs more: the term that differs most."""
    best, own = winner.prediction.terms, other.prediction.terms
    terms = {name: own.get(name, 0.0) - best.get(name, 0.0) for name in best | own}
    name = max(terms, key=terms.__getitem__)
    slower = other.seconds - winner.seconds
    if terms[name] <= 1e-6 * winner.seconds:
        return f"as fast, and needs {other.needs_gib - winner.needs_gib:.1f} GiB more"
    gains = {key: -value for key, value in terms.items() if value < -0.005 * winner.seconds}
    most = max(gains, key=gains.__getitem__, default="")
    instead = f", and saves {gains[most]:.3g} s of {most}" if most else ""
    return f"{slower:.3g} s slower: {terms[name]:.3g} s more of {name}{instead}"
