"""Predicted traffic: what a rank of every stage sends in a step, by group and operation, and how long that takes at least.

Notation: T tokens of a microbatch (b·s), h hidden size, t tensor ranks, d data ranks, Ψ parameters of a rank. A ring moves, of an
all-reduced tensor of n elements, 2·n·(t-1)/t through every rank (Chan et al. 2007); of a gathered or scattered one, whose whole is n,
n·(t-1)/t; point to point, n. So, in elements a rank and step:

| what | sent |
|---|---|
| tensor, a layer and microbatch | 8·T·h·(t-1)/t: two sums forward, two backward |
| the same with sequence parallelism | as many, gathered and scattered; and 2·T·h·(t-1)/t to gather again what backward did not keep |
| with full recomputation | one sum more, 2·T·h·(t-1)/t (two, or 12 together, as published: the block's last is not needed again) |
| pipeline, a microbatch, boundary and direction | T·h, with sequence parallelism T·h/t |
| data | 2·Ψ·(d-1)/d: the gradients' sum; with a sharded optimizer scattered, and the parameters gathered |

and at a step's ends (embedding, head, loss, partial gradients, tied embeddings, the gradient norm) what `stage_traffic` lists.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from megacore.config.schema import Config
from megacore.pipeline.partition import stage_layers
from megacore.plan.flops import norm_parameters, position_parameters
from megacore.plan.memory import ELEMENT_BYTES, GRADIENT_BYTES, stage_parameters


@dataclass(frozen=True)
class Transfer:
    """`calls` of one operation over a group in a step, which carry `elements` in all.

    Elements: of the tensor that is reduced; of the whole that is gathered or scattered; of what is sent.
    """

    group: str  # tp, dp, pp, tied (the two ends of the pipeline) or norm (the ranks over which the gradient's norm is summed)
    operation: str  # all_reduce, all_gather, reduce_scatter or send
    size: int  # ranks of the group
    elements: int
    element_bytes: int
    calls: int

    @property
    def sent_bytes(self) -> float:
        """What this rank sends in a ring."""
        return self.elements * self.element_bytes * ring_share(self.operation, self.size)


@dataclass(frozen=True)
class Line:
    """The time of one call: `alpha` seconds, and `beta` more for every byte that a rank sends (Hockney 1994)."""

    alpha: float
    beta: float

    def seconds(self, calls: int, sent_bytes: float) -> float:
        """Of several calls one after the other."""
        return self.alpha * calls + self.beta * sent_bytes


def ring_share(operation: str, size: int) -> float:
    """What a rank sends of each byte that an operation is called with: the factor from algorithm to bus bandwidth."""
    rounds = {"all_reduce": 2 * (size - 1) / size, "send": 1.0}
    return rounds.get(operation, (size - 1) / size)


def stage_traffic(config: Config) -> list[list[Transfer]]:
    """What a rank of every stage sends in a step of the native engine, on its fullest tensor rank.

    Paddings are left out: the native engine lays every parameter on a multiple of 64 elements, and divides buckets evenly.
    """
    layers = [0] * config.parallel.pipeline
    for virtual, own in enumerate(stage_layers(config)):
        layers[virtual % len(layers)] += len(own)
    traffic, parameters = [], stage_parameters(config)
    for stage, count in enumerate(layers):
        first, last = stage == 0, stage == len(layers) - 1
        partial = count * _partial_parameters(config) + _partial_ends(config, first, last)
        found = [*_tensor(config, count, first, last), *_pipeline(config, first, last), *_data(config, stage, parameters[stage], partial)]
        traffic.append([transfer for transfer in found if transfer.size > 1 and transfer.elements])
    return traffic


def _tensor(config: Config, layers: int, first: bool, last: bool) -> list[Transfer]:
    """Over tp, in the forward and backward passes of `layers` blocks, and at the ends where the stage has them."""
    t, microbatches, element = config.parallel.tensor, config.num_microbatches, ELEMENT_BYTES[config.train.precision]
    tokens = config.train.micro_batch_size * config.train.seq_len
    again = 1 if config.train.recompute == "full" else 0

    def over_tokens(operation: str, calls: int) -> Transfer:
        return Transfer("tp", operation, t, calls * microbatches * tokens * config.model.hidden_size, element, calls * microbatches)

    # Of each token its logarithm and its target's logit. They are gathered in fp32, under fp64 in fp64.
    statistics = Transfer("tp", "all_gather", t, 2 * tokens * t * microbatches * last, max(4, element), microbatches * last)
    if config.parallel.sequence:
        gathers = (6 + 2 * again) * layers + first + 2 * last - (last and config.model.chunked_loss)
        scatters = (4 + again) * layers + first + last
        return [over_tokens("all_gather", gathers), over_tokens("reduce_scatter", scatters), statistics]
    return [over_tokens("all_reduce", (4 + again) * layers + first + last), statistics]


def _pipeline(config: Config, first: bool, last: bool) -> list[Transfer]:
    """Activations to the next stage and gradients to the one before."""
    tokens = config.train.micro_batch_size * config.train.seq_len // (config.parallel.tensor if config.parallel.sequence else 1)
    sends = config.num_microbatches * ((not first) + (not last))
    element = ELEMENT_BYTES[config.train.precision]
    return [Transfer("pp", "send", config.parallel.pipeline, sends * tokens * config.model.hidden_size, element, sends)]


def _data(config: Config, stage: int, parameters: int, partial: int) -> list[Transfer]:
    """Gradients and parameters over dp, gradients that tensor ranks or the pipeline's ends have in parts, and the norm."""
    parallel, model = config.parallel, config.model
    d, t, p = int(parallel.data), parallel.tensor, parallel.pipeline
    gradient = GRADIENT_BYTES[config.train.precision]
    calls = max(1, round(parameters * gradient / (config.engine.bucket_mib * 2**20)))  # nearly: matrices and the rest have their own
    sharded = config.engine.shard_optimizer and d > 1
    if sharded:
        found = [
            Transfer("dp", "reduce_scatter", d, parameters, gradient, calls),
            Transfer("dp", "all_gather", d, parameters, ELEMENT_BYTES[config.train.precision], calls),
        ]
    else:
        found = [Transfer("dp", "all_reduce", d, parameters, gradient, calls)]
    found.append(Transfer("tp", "all_reduce", t, partial, gradient, 1))
    if model.tie_embeddings and p > 1 and stage in (0, p - 1):
        rows = -(-model.vocab_size // t) * model.hidden_size
        found.append(Transfer("tied", "all_reduce", 2, rows // (d if sharded else 1), gradient, 1))
    found.append(Transfer("norm", "all_reduce", t * p * d, 1, 8, 1))  # over all ranks, so that they decide alike
    return found


def _partial_parameters(config: Config) -> int:
    """Of a block, those that every tensor rank holds and applies to its own tokens, or (norms of heads) its own heads."""
    model = config.model
    count = 2 * config.head_size if model.qk_norm else 0
    if config.parallel.sequence:
        count += 2 * norm_parameters(config) + (2 * model.hidden_size if model.bias else 0)
    return count


def _partial_ends(config: Config, first: bool, last: bool) -> int:
    """The same of positions and the final norm."""
    if not config.parallel.sequence:
        return 0
    return position_parameters(config) * first + norm_parameters(config) * last


def sent_by_group(transfers: list[Transfer]) -> dict[str, float]:
    """Bytes that a rank sends in a step."""
    sent: dict[str, float] = {}
    for transfer in transfers:
        sent[transfer.group] = sent.get(transfer.group, 0.0) + transfer.sent_bytes
    return sent


def seconds_by_group(transfers: list[Transfer], lines: Mapping[tuple[str, str], Line]) -> dict[str, float]:
    """Seconds of a step's transfers one after the other, by lines fitted to (group, operation); those without one are left out."""
    seconds: dict[str, float] = {}
    for transfer in transfers:
        line = lines.get((transfer.group, transfer.operation))
        if line is not None:
            seconds[transfer.group] = seconds.get(transfer.group, 0.0) + line.seconds(transfer.calls, transfer.sent_bytes)
    return seconds
