"""Predicts how long a training step takes: named terms in seconds, which add up to the step.

The slowest stage of the pipeline sets the pace. Its time for a microbatch, forward and backward, is that of

- products: each by its shape and precision (`operations.Machine.product`);
- attention: fused, by its operations; otherwise also by its scores' passes through memory;
- passes: what norms, activations, residuals, gradient sums and the loss read from and write to memory;
- tensor and context collectives, and exchanges of experts' rows, as far as nothing hides them;
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
from operator import attrgetter
from typing import Any

from megacore.config.parallel import V_SHAPED
from megacore.tools.planner.devices import Cluster, DeviceSpec
from megacore.tools.planner.layer_time import MicrobatchTime, block_work, crosses, head_work, measured_work
from megacore.tools.planner.operations import Machine
from megacore.tools.planner.profile import Profile
from megacore.tools.planner.stages import cut, held_by_ranks
from megacore.tools.planner.workload import OwnRank, Setting

# The bubble's part of (ranks - 1) microbatches, where it is not 1 / chunks: a weight's gradient takes as long
# as an input's, and fills gaps (Qi et al. 2023 and 2024). Their simulations agree, with at least twice as
# many microbatches as ranks.
BUBBLES = {"zb_h1": 1 / 3, "zb_v": 0.0, "v_half": 1 / 2, "v_min": 2 / 3}
# What the time of a layer does not depend on, but for whether a pipeline crosses machines.
OF_THE_STEP = {
    "layers",
    "pipeline",
    "data",
    "chunks",
    "global_batch",
    "schedule",
    "tied",
    "zero",
    "shard_size",
    "gradient_bytes",
}
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


class Predictor:
    """Predicts steps of settings on one machine. What several of them have in common is asked for once."""

    def __init__(self, device: DeviceSpec, cluster: Cluster, profile: Profile) -> None:
        if not device.overlaps:
            none: dict[str, Any] = dict.fromkeys(
                ("tensor_hidden", "data_hidden", "gather_hidden", "ring_hidden", "pipeline_hidden"), 0.0
            )
            profile = replace(profile, sharded_hidden=None, **none)
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
        """The work of a rank of the pipeline with layers of the user's own, of
        which many layouts have the same.
        """
        found = MicrobatchTime({}, {})
        for cost, count in rank.layers:
            key = cost, s.tensor, s.compiled
            if key not in self.measured:
                self.measured[key] = measured_work(cost, s, self.machine)
            found += self.measured[key] * count
        return found

    def ranks(self, s: Setting) -> tuple[Sequence[Any], dict[Any, MicrobatchTime], float]:
        """For each rank of the pipeline what it holds, the work of whoever holds that, and
        the parameters of the fullest.
        """
        if s.own:
            works = {rank: self.own(own, s) for rank, own in enumerate(s.own)}
            return range(s.pipeline), works, max(own.parameters for own in s.own)
        block, head = self.layers(s)
        held = held_by_ranks(cut(s, self.machine.profile.stages), s.pipeline, s.schedule in V_SHAPED)
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
        named = ("products", "attention", "passes", "tensor", "context", *(("experts",) if s.mixture else ()))
        terms = {name: m * work.term(name) for name in named}
        terms["launch"] = m * totals[slowest] - sum(terms.values())
        terms["pipeline"], terms["bubble"] = _pipeline(s, machine, totals, slowest)
        sums = _sums(s, parameters, list(works))
        gather, reduce = (
            sum(seconds) for seconds in zip(*(_data(s, machine, *own) for own in sums), strict=True)
        )
        forward, backward = times[held[slowest]]
        # Chunks that take turns have their gradients one after the other, each a round of the pipeline's
        # microbatches before the next.
        rounds = 1.0 if s.schedule in V_SHAPED else ((s.chunks - 1) * min(s.pipeline, m) + 1) / s.chunks
        behind = (
            profile.data_hidden
            if s.zero not in (1, 2) or profile.sharded_hidden is None
            else profile.sharded_hidden
        )
        hidden_gather, hidden_reduce = profile.gather_hidden * rounds * forward, behind * rounds * backward
        # each microbatch gathers, twice if it does not keep; each but the last of a no-sync run scatters
        if s.zero == 3:
            terms["data"] = m * (max(0.0, gather - hidden_gather) + max(0.0, gather + reduce - hidden_reduce))
        else:
            terms["data"] = max(0.0, gather - hidden_gather) + max(0.0, reduce - hidden_reduce)
        state = sum(own / (min(s.shard_size or size, size) if s.zero else 1) for own, size, _ in sums)
        terms["optimizer"] = machine.pass_over(profile.optimizer_bytes * state) + _matrices(s, machine)
        terms["host"] = profile.step_host
        terms["stragglers"] = profile.jitter * math.sqrt(2 * math.log(s.world)) * sum(terms.values())
        return Prediction(terms)


def predict(s: Setting, device: DeviceSpec, cluster: Cluster, profile: Profile) -> Prediction:
    """A step's terms."""
    return Predictor(device, cluster, profile)(s)


def _pipeline(s: Setting, machine: Machine, totals: list[float], slowest: int) -> tuple[float, float]:
    """Seconds of transfers that nothing hides, and of the bubble."""
    if s.pipeline == 1:
        return 0.0, 0.0
    p = machine.profile
    distance = s.tensor * s.context * s.data
    whole = s.element * s.tokens * s.hidden
    parts = s.tensor if s.sequence or p.scatters else 1
    gathered = machine.collective(1.0, whole, s.tensor) if p.scatters and not s.sequence else 0.0
    one = (
        machine.transfer(s.own_message or whole / parts, distance) * (1 - p.pipeline_hidden)
        + gathered
        + p.transfer_host
    )
    # A microbatch crosses two boundaries of a rank and chunk, there and back.
    sides = 2 if s.pipeline == 2 and s.chunks == 1 else 4
    exposed = s.microbatches * s.chunks * sides * one
    fill = (sum(totals) - totals[slowest]) * BUBBLES.get(s.schedule, 1 / s.chunks) + 2 * (
        s.pipeline - 1
    ) * one
    return exposed, fill


def _matrices(s: Setting, machine: Machine) -> float:
    """Seconds of an optimizer's work on whole matrices: what travels is beside what is computed."""
    sent = sum(
        t.calls * machine.operation(t.operation, t.elements * t.element_bytes / t.calls, t.size)
        for t in s.matrix_transfers
    )
    return max(sent, s.matrix_operations / machine.rate(s.precision))


def _rank_parameters(s: Setting, held: Sequence[tuple[int, int, int]]) -> list[float]:
    """Of ranks with so many blocks, embeddings and heads."""
    ends = [embeddings + heads * (not (s.tied and s.pipeline == 1)) for _, embeddings, heads in held]
    return [
        s.block_parameters * blocks + n * s.vocabulary_parameters
        for (blocks, _, _), n in zip(held, ends, strict=True)
    ]


def _sums(s: Setting, parameters: float, held: Sequence[Any]) -> list[tuple[float, int, int]]:
    """The fullest rank's parameters by whom gradients are summed with: how many, over how
    many ranks that are so far apart.
    """
    size = s.data * s.context
    if s.mixture is None:
        return [(parameters, size, s.tensor)]
    of_experts = max(blocks for blocks, _, _ in held) * s.mixture.share * s.expert_parameters
    apart = s.mixture.ranks * s.mixture.parts
    return [(parameters - of_experts, size, s.tensor), (of_experts, size * s.tensor // apart, apart)]


def _data(s: Setting, machine: Machine, parameters: float, size: int, stride: int) -> tuple[float, float]:
    """Seconds to gather the fullest rank's parameters over ranks with other tokens, and
    to sum its gradients.
    """
    if size == 1:
        return 0.0, 0.0
    gradients, weights = parameters * s.gradient_bytes, parameters * s.element
    if s.zero == 0:
        return 0.0, machine.collective(2.0, gradients, size, stride)
    return machine.collective(1.0, weights, size, stride), machine.collective(1.0, gradients, size, stride)
