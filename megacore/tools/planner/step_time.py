"""Predicts how long a training step takes: named terms in seconds, which add up to the step.

The slowest stage of the pipeline sets the pace. Its time for a microbatch, forward and backward, is that of

- products: each by its shape and precision (`operations.Machine.product`);
- attention: fused, by its operations; otherwise also by its scores' passes through memory;
- passes: what norms, activations, residuals, gradient sums and the loss read from and write to memory;
- tensor and context collectives, as far as nothing hides them;
- or the host's, if it needs longer to start the work than the device to do it.

The step has as many of these as microbatches, and then

- pipeline: transfers that the schedule does not hide;
- bubble: filling and draining the pipeline;
- data: gathering parameters and summing gradients, as far as forward and backward do not hide it;
- optimizer: one pass over the parameters' state;
- host: what the host does once a step;
- stragglers: the slowest of many ranks is later than the mean one.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from operator import attrgetter
from typing import Any

from megacore.config.parallel import V_SHAPED
from megacore.distributed.axes import AXES
from megacore.pipeline.schedule import Op
from megacore.tools.choices.context_method import BACKWARD_ATTENTION, exposed
from megacore.tools.choices.layer_cost import LayerCost, Work
from megacore.tools.choices.partition import split_layers
from megacore.tools.planner.devices import Cluster, DeviceSpec
from megacore.tools.planner.operations import Machine
from megacore.tools.planner.profile import Profile
from megacore.tools.planner.workload import OwnRank, Setting

SECOND = 0.35  # every second of query, key, value, out, gate, up and down has so much of their operations
# The bubble's part of (ranks - 1) microbatches, where it is not 1 / chunks: a weight's gradient takes as long as an input's, and fills
# gaps (Qi et al. 2023 and 2024). Their simulations agree, with at least twice as many microbatches as ranks.
BUBBLES = {"zb_h1": 1 / 3, "zb_v": 0.0, "v_half": 1 / 2, "v_min": 2 / 3}
# What the time of a layer does not depend on, but for whether a pipeline crosses machines.
TITLES = {axis.name: axis.title for axis in AXES}
OF_THE_STEP = {"layers", "pipeline", "data", "chunks", "global_batch", "schedule", "tied", "zero", "shard_size", "gradient_bytes"}
OF_THE_STEP |= {"own", "own_message"}
_of_layers = attrgetter(*(field.name for field in fields(Setting) if field.name not in OF_THE_STEP))


@dataclass(frozen=True)
class Prediction:
    """A step's terms in seconds; their sum is the step."""

    terms: dict[str, float]

    @property
    def step(self) -> float:
        """Seconds of a step."""
        return sum(self.terms.values())

    @property
    def bubble_rate(self) -> float:
        """The part of the step in which the pipeline fills and drains."""
        return self.terms["bubble"] / self.step


@dataclass
class MicrobatchTime:
    """Seconds of a microbatch on a rank, by forward and backward."""

    forward: dict[str, float]
    backward: dict[str, float]

    def __add__(self, other: "MicrobatchTime") -> "MicrobatchTime":
        return MicrobatchTime(_sum(self.forward, other.forward), _sum(self.backward, other.backward))

    def __mul__(self, count: float) -> "MicrobatchTime":
        return MicrobatchTime(*({name: count * value for name, value in part.items()} for part in (self.forward, self.backward)))

    def term(self, name: str) -> float:
        """Forward and backward of one term."""
        return self.forward.get(name, 0.0) + self.backward.get(name, 0.0)

    def host_bound(self) -> tuple[float, float]:
        """Seconds of forward and of backward: what the device needs, or the host if it needs longer."""
        return tuple(max(sum(v for k, v in part.items() if k != "host"), part.get("host", 0.0)) for part in (self.forward, self.backward))  # type: ignore[return-value]


def _sum(one: dict[str, float], other: dict[str, float]) -> dict[str, float]:
    return {name: one.get(name, 0.0) + other.get(name, 0.0) for name in one | other}


def block_work(s: Setting, machine: Machine) -> MicrobatchTime:
    """One block's microbatch on a rank."""
    p, t, e, rows = machine.profile, s.tensor, s.element, s.tokens
    a, k, f = s.attention_size, s.kv_size, s.ffn
    # (inner, columns)
    shapes = (s.hidden, (a + 2 * k) / t), (a / t, s.hidden), (s.hidden, (2 if s.gated else 1) * f / t), (f / t, s.hidden)
    forward_products = sum(machine.product(rows, i, c, s.precision) for i, c in shapes)
    backward_products = sum(machine.product(rows, c, i, s.precision) + machine.product(i, rows, c, s.precision) for i, c in shapes)
    attention = machine.attention(rows, s.seq, a / t, s.precision, causal=s.flash)
    if s.context_method == "ring" and not p.ring_balanced:
        attention *= 2 - 1 / s.context  # of its keys the last rank meets half of its own, and all of the others'
    score_bytes = 0.0 if s.flash else e * rows * s.seq * s.heads / t
    width = f * (3 if s.gated else 2) / t
    # Two norms read and write, two residual sums read twice and write, the rotation of queries and keys, the activation.
    wide = s.hidden / t if s.sequence else s.hidden
    passes = p.passes * (p.compiled_passes if s.compiled else 1.0)
    moved = passes * e * rows * (10 * wide + 2 * (a + k) / t + width) + p.score_passes * score_bytes
    forward = {"products": forward_products, "attention": attention, "passes": machine.pass_over(moved)}
    backward = {
        "products": backward_products,
        "attention": attention * (BACKWARD_ATTENTION if s.flash else 2.0),
        "passes": machine.pass_over(1.5 * moved + p.accumulate_bytes * s.block_parameters),
    }
    calls = {"ring": s.context - 1, "ulysses": 4}.get(s.context_method, 1) if s.context > 1 else 0
    waits = exposed(s.divided, s.context_method, machine.rates(s.precision), (attention, backward["attention"]))
    forward["context"], backward["context"] = waits
    if t > 1:
        # Two gathers and two scatters, or two sums, each way; with sequence parallelism backward gathers two inputs again.
        one = machine.collective(1.0 if s.sequence else 2.0, e * rows * s.hidden, t)
        each = 4 if s.sequence else 2
        seen = 1 - (p.async_hidden if s.async_tensor else p.tensor_hidden)
        forward["tensor"] = seen * each * one
        backward["tensor"] = seen * (each + (2 if s.sequence else 0)) * one
        calls += each
    call_host = p.call_host + p.hop_host * (t - 1) * crosses(s, machine)
    forward["host"] = p.layer_host / 3 + calls * call_host
    backward["host"] = 2 * p.layer_host / 3 + calls * call_host * 1.5
    if s.recompute in ("full", "half"):
        share = 1.0 if s.recompute == "full" else 0.5
        backward = _sum(backward, {name: share * seconds for name, seconds in forward.items()})
    elif s.recompute == "per_op":
        backward = _sum(backward, {"products": SECOND * forward_products, "passes": forward["passes"]})
    elif s.recompute == "selective":
        repeated = machine.pass_over(p.score_passes * score_bytes + (0.0 if p.repeats_attention else passes * e * rows * width))
        backward = _sum(backward, {"passes": repeated, "attention": attention if p.repeats_attention or not s.flash else 0.0})
    return MicrobatchTime(forward, backward)


def measured_work(cost: LayerCost, s: Setting, machine: Machine) -> MicrobatchTime:
    """A layer's microbatch on a rank, by the operations that were measured of it. Nothing hides what context ranks send."""
    p = machine.profile
    forward, backward = (_timed(cost.work[op], s, machine) for op in (Op.FORWARD, Op.BACKWARD))
    backward["passes"] += machine.pass_over(p.accumulate_bytes * cost.parameters)
    forward["host"] += p.layer_host / 3
    backward["host"] = 1.5 * backward["host"] + 2 * p.layer_host / 3
    return MicrobatchTime(forward, backward)


def _timed(work: Work, s: Setting, machine: Machine) -> dict[str, float]:
    p, found = machine.profile, dict.fromkeys(("products", "attention", "tensor", "context", "host"), 0.0)
    for shape, count in work.products.items():
        found["products"] += count * machine.product(*shape, s.precision)
    for call, count in work.attention.items():
        one = machine.attention(call.queries, call.keys, call.size, s.precision, causal=call.causal)
        found["attention"] += count * one * (BACKWARD_ATTENTION if call.backward else 1.0)
    for sent, count in work.sent.items():
        moved, context = sent.elements * sent.element_bytes, TITLES.get(sent.group) == "context"
        one = machine.operation(sent.operation, moved, sent.size, s.tensor if context else 1)
        found["context" if context else "tensor"] += count * one * (1.0 if context else 1 - p.tensor_hidden)
        found["host"] += count * p.call_host
    return found | {"passes": machine.pass_over(p.passes * (p.compiled_passes if s.compiled else 1.0) * work.moved)}


def head_work(s: Setting, machine: Machine) -> MicrobatchTime:
    """Final product and loss of a microbatch."""
    rows, columns = s.tokens, s.vocab / s.tensor
    precision = "bf16" if s.precision in ("fp8", "nvfp4") else s.precision
    passes = machine.pass_over(machine.profile.logit_passes * s.element * rows * columns / 2)
    wide = s.tensor > 1
    one = machine.collective(1.0 if s.sequence else 2.0, s.element * rows * s.hidden, s.tensor) if wide else 0.0
    forward = {"products": machine.product(rows, s.hidden, columns, precision), "passes": passes, "tensor": one}
    products = machine.product(rows, columns, s.hidden, precision) + machine.product(s.hidden, rows, columns, precision)
    backward = {
        "products": products,
        "passes": passes + machine.pass_over(machine.profile.accumulate_bytes * s.vocabulary_parameters),
        "tensor": one,
    }
    return MicrobatchTime(forward, backward)


@dataclass(frozen=True)
class StageWork:
    """What a stage holds: blocks, and the ends."""

    blocks: int
    embedding: bool
    head: bool


def cut(s: Setting, rule: str) -> tuple[StageWork, ...]:
    """The stages of the model, in order, by a framework's rule.

    `cost`: megacore's, the most expensive stage is cheapest. `even`: as many blocks in each, the ends on top. `nanotron`: each stage
    takes blocks until the sum passes its share, so the head and the loss may stand alone.
    """
    block = s.hidden * (2 * s.attention_size + 2 * s.kv_size) + s.ffn_weights
    if rule == "nanotron":
        block = 4 * s.attention_size * s.hidden + s.ffn_weights
    return _cut(s.layers, s.pipeline * s.chunks, block, s.vocab * s.hidden, rule)


@lru_cache(maxsize=1024)
def _cut(layers: int, count: int, block: float, head: float, rule: str) -> tuple[StageWork, ...]:
    """`cut`, of blocks and a head with these costs."""
    if rule == "nanotron":
        return tuple(_nanotron(layers, count, block, head))
    if rule == "cost" and count <= layers:
        ranges = [len(own) for own in split_layers(layers, count, block, 0.0, head)]
    else:
        ranges = [layers // count + (i < layers % count) for i in range(count)]
    return tuple(StageWork(n, i == 0, i == count - 1) for i, n in enumerate(ranges))


def _nanotron(layers: int, count: int, block: float, head: float) -> list[StageWork]:
    """Each block goes to the current stage, which ends when the cost so far is above its share of the whole."""
    total, done, at = layers * block + head, 0.0, 0
    blocks, heads = [0] * count, [False] * count
    for _ in range(layers):
        blocks[at] += 1
        done += block
        at += done > total * (at + 1) / count
    heads[min(at, count - 1)] = True
    return [StageWork(n, i == 0, heads[i]) for i, n in enumerate(blocks)]


@lru_cache(maxsize=1024)
def _dealt(stages: tuple[StageWork, ...], ranks: int, v_shaped: bool) -> tuple[tuple[int, int, int], ...]:
    """What each rank of the pipeline holds: blocks, embeddings and heads."""
    held = [[stages[rank], stages[-1 - rank]] if v_shaped else stages[rank::ranks] for rank in range(ranks)]
    return tuple((sum(st.blocks for st in own), sum(st.embedding for st in own), sum(st.head for st in own)) for own in held)


class Predictor:
    """Predicts steps of settings on one machine. What several of them have in common is asked for once."""

    def __init__(self, device: DeviceSpec, cluster: Cluster, profile: Profile) -> None:
        if not device.overlaps:
            profile = replace(profile, tensor_hidden=0.0, data_hidden=0.0, gather_hidden=0.0, ring_hidden=0.0, pipeline_hidden=0.0)
        self.machine = Machine(device, cluster, profile)
        self.works: dict[tuple[object, ...], tuple[MicrobatchTime, MicrobatchTime]] = {}
        self.measured: dict[tuple[object, ...], MicrobatchTime] = {}

    def layers(self, s: Setting) -> tuple[MicrobatchTime, MicrobatchTime]:
        """The work of a block and of the head, which many layouts of a model share."""
        key = *_of_layers(s), crosses(s, self.machine)
        if key not in self.works:
            self.works[key] = block_work(s, self.machine), head_work(s, self.machine)
        return self.works[key]

    def own(self, rank: OwnRank, s: Setting) -> MicrobatchTime:
        """The work of a rank of the pipeline with layers of the user's own, of which many layouts have the same."""
        found = MicrobatchTime({}, {})
        for cost, count in rank.layers:
            key = cost, s.tensor, s.compiled
            if key not in self.measured:
                self.measured[key] = measured_work(cost, s, self.machine)
            found += self.measured[key] * count
        return found

    def ranks(self, s: Setting) -> tuple[Sequence[Any], dict[Any, MicrobatchTime], float]:
        """For each rank of the pipeline what it holds, the work of whoever holds that, and the parameters of the fullest."""
        if s.own:
            works = {rank: self.own(own, s) for rank, own in enumerate(s.own)}
            return range(s.pipeline), works, max(own.parameters for own in s.own)
        block, head = self.layers(s)
        held = _dealt(cut(s, self.machine.profile.stages), s.pipeline, s.schedule in V_SHAPED)
        of_blocks = {own: block * own[0] + head * own[2] for own in dict.fromkeys(held)}
        return held, of_blocks, max(_rank_parameters(s, list(of_blocks)))

    def __call__(self, s: Setting) -> Prediction:
        """A step's terms."""
        machine, profile, (held, works, parameters) = self.machine, self.machine.profile, self.ranks(s)
        times = {own: work.host_bound() for own, work in works.items()}
        host = profile.microbatch_host
        seconds = {own: sum(time) + host for own, time in times.items()}
        totals = [seconds[own] for own in held]
        slowest = max(range(s.pipeline), key=totals.__getitem__)
        m, work = s.microbatches, works[held[slowest]]
        terms = {name: m * work.term(name) for name in ("products", "attention", "passes", "tensor", "context")}
        terms["launch"] = m * totals[slowest] - sum(terms.values())
        terms["pipeline"], terms["bubble"] = _pipeline(s, machine, totals, slowest)
        gather, reduce = _data(s, machine, parameters)
        forward, backward = times[held[slowest]]
        # Chunks that take turns have their gradients one after the other, each a round of the pipeline's microbatches before the next.
        rounds = 1.0 if s.schedule in V_SHAPED else ((s.chunks - 1) * min(s.pipeline, m) + 1) / s.chunks
        hidden_gather, hidden_reduce = profile.gather_hidden * rounds * forward, profile.data_hidden * rounds * backward
        if s.zero == 3:  # each microbatch gathers, twice if it does not keep; each but the last of a no-sync run scatters
            terms["data"] = m * (max(0.0, gather - hidden_gather) + max(0.0, gather + reduce - hidden_reduce))
        else:
            terms["data"] = max(0.0, gather - hidden_gather) + max(0.0, reduce - hidden_reduce)
        divided = (s.shard_size or s.data * s.context) if s.zero else 1
        terms["optimizer"] = machine.pass_over(profile.optimizer_bytes * parameters / divided)
        terms["host"] = profile.step_host
        terms["stragglers"] = profile.jitter * math.sqrt(2 * math.log(s.world)) * sum(terms.values())
        return Prediction(terms)


def predict(s: Setting, device: DeviceSpec, cluster: Cluster, profile: Profile) -> Prediction:
    """A step's terms."""
    return Predictor(device, cluster, profile)(s)


def crosses(s: Setting, machine: Machine) -> bool:
    """Whether a pipeline's transfers cross machines."""
    return s.pipeline > 1 and s.world > machine.cluster.node_ranks


def _pipeline(s: Setting, machine: Machine, totals: list[float], slowest: int) -> tuple[float, float]:
    """Seconds of transfers that nothing hides, and of the bubble."""
    if s.pipeline == 1:
        return 0.0, 0.0
    p = machine.profile
    distance = s.tensor * s.context * s.data
    whole = s.element * s.tokens * s.hidden
    parts = s.tensor if s.sequence or p.scatters else 1
    gathered = machine.collective(1.0, whole, s.tensor) if p.scatters and not s.sequence else 0.0
    one = machine.transfer(s.own_message or whole / parts, distance) * (1 - p.pipeline_hidden) + gathered + p.transfer_host
    # A microbatch crosses two boundaries of a rank and chunk, there and back.
    sides = 2 if s.pipeline == 2 and s.chunks == 1 else 4
    exposed = s.microbatches * s.chunks * sides * one
    fill = (sum(totals) - totals[slowest]) * BUBBLES.get(s.schedule, 1 / s.chunks) + 2 * (s.pipeline - 1) * one
    return exposed, fill


def _rank_parameters(s: Setting, held: Sequence[tuple[int, int, int]]) -> list[float]:
    """Of ranks with so many blocks, embeddings and heads."""
    ends = [embeddings + heads * (not (s.tied and s.pipeline == 1)) for _, embeddings, heads in held]
    return [s.block_parameters * blocks + n * s.vocabulary_parameters for (blocks, _, _), n in zip(held, ends, strict=True)]


def _data(s: Setting, machine: Machine, parameters: float) -> tuple[float, float]:
    """Seconds to gather the fullest rank's parameters over the data ranks, and to sum its gradients."""
    size, stride = s.data * s.context, s.tensor
    if size == 1:
        return 0.0, 0.0
    gradients, weights = parameters * s.gradient_bytes, parameters * s.element
    if s.zero == 0:
        return 0.0, machine.collective(2.0, gradients, size, stride)
    return machine.collective(1.0, weights, size, stride), machine.collective(1.0, gradients, size, stride)
