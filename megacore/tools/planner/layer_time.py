"""What a layer's microbatch takes on a rank: products, attention, passes through memory,
collectives, and the host's work.
"""

from dataclasses import dataclass

from megacore.distributed.axes import AXES
from megacore.pipeline.schedule import Op
from megacore.tools.choices.context_method import BACKWARD_ATTENTION, exposed
from megacore.tools.choices.layer_cost import LayerCost, Work
from megacore.tools.planner.mixture_time import mixture_times, without_mixture
from megacore.tools.planner.operations import Machine
from megacore.tools.planner.workload import Setting

SECOND = 0.35  # every second of query, key, value, out, gate, up and down has so much of their operations
TITLES = {axis.name: axis.title for axis in AXES}


@dataclass
class MicrobatchTime:
    """Seconds of a microbatch on a rank, by forward and backward."""

    forward: dict[str, float]
    backward: dict[str, float]

    def __add__(self, other: "MicrobatchTime") -> "MicrobatchTime":
        return MicrobatchTime(_sum(self.forward, other.forward), _sum(self.backward, other.backward))

    def __mul__(self, count: float) -> "MicrobatchTime":
        return MicrobatchTime(
            *({name: count * value for name, value in part.items()} for part in (self.forward, self.backward))
        )

    def term(self, name: str) -> float:
        """Forward and backward of one term."""
        return self.forward.get(name, 0.0) + self.backward.get(name, 0.0)

    def host_bound(self) -> tuple[float, float]:
        """Seconds of forward and of backward: what the device needs, or the host if it needs longer."""
        return tuple(
            max(sum(v for k, v in part.items() if k != "host"), part.get("host", 0.0))
            for part in (self.forward, self.backward)
        )  # type: ignore[return-value]


def _sum(one: dict[str, float], other: dict[str, float]) -> dict[str, float]:
    return {name: one.get(name, 0.0) + other.get(name, 0.0) for name in one | other}


def block_work(s: Setting, machine: Machine) -> MicrobatchTime:
    """One block's microbatch on a rank; with experts in some blocks, their mean."""
    if s.mixture is None:
        return plain_work(s, machine)
    mixed = plain_work(without_mixture(s, s.mixture.shared), machine) + MicrobatchTime(
        *mixture_times(s, machine)
    )
    return mixed * s.mixture.share + plain_work(without_mixture(s, s.ffn), machine) * (1 - s.mixture.share)


def plain_work(s: Setting, machine: Machine) -> MicrobatchTime:
    """A block with a plain feed-forward layer."""
    p, t, e, rows = machine.profile, s.tensor, s.element, s.tokens
    a, k, f = s.attention_size, s.kv_size, s.ffn
    # (rows, inner, columns)
    shapes = *_projections(s), (rows, s.hidden, (2 if s.gated else 1) * f / t), (rows, f / t, s.hidden)
    forward_products = sum(machine.product(r, i, c, s.precision) for r, i, c in shapes)
    backward_products = sum(
        machine.product(r, c, i, s.precision) + machine.product(i, r, c, s.precision) for r, i, c in shapes
    )
    attention = machine.attention(rows, s.seq, a / t, s.precision, causal=s.flash)
    if s.context_method == "ring" and not p.ring_balanced:
        # of its keys the last rank meets half of its own, and all of the others'
        attention *= 2 - 1 / s.context
    score_bytes = 0.0 if s.flash else e * rows * s.seq * s.heads / t
    width = f * (3 if s.gated else 2) / t
    # Two norms read and write, two residual sums read twice and write, the rotation of queries and keys, the
    # activation.
    wide = s.hidden / t if s.sequence else s.hidden
    passes = p.passes * (p.compiled_passes if s.compiled else 1.0)
    turned = 2 * (a + k) / t
    if s.latent is not None:  # each is norm'd, and queries and keys are put together of two parts
        turned += turned + 2 * (s.latent.keys + s.latent.queries) / (t if s.sequence else 1)
    moved = passes * e * rows * (10 * wide + turned + width) + p.score_passes * score_bytes
    forward = {"products": forward_products, "attention": attention, "passes": machine.pass_over(moved)}
    backward = {
        "products": backward_products,
        "attention": attention * (BACKWARD_ATTENTION if s.flash else 2.0),
        "passes": machine.pass_over(1.5 * moved + p.accumulate_bytes * s.block_parameters),
    }
    calls = {"ring": s.context - 1, "ulysses": 4}.get(s.context_method, 1) if s.context > 1 else 0
    waits = exposed(
        s.divided, s.context_method, machine.rates(s.precision), (attention, backward["attention"])
    )
    forward["context"], backward["context"] = waits
    if t > 1:
        # Two gathers and two scatters, or two sums, each way; with sequence parallelism backward gathers two
        # inputs again.
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
        repeated = machine.pass_over(
            p.score_passes * score_bytes + (0.0 if p.repeats_attention else passes * e * rows * width)
        )
        backward = _sum(
            backward,
            {"passes": repeated, "attention": attention if p.repeats_attention or not s.flash else 0.0},
        )
    return MicrobatchTime(forward, backward)


def _projections(s: Setting) -> list[tuple[float, float, float]]:
    """Rows, inner dim and columns of attention's products on a rank: tensor ranks divide columns, or what
    goes in of the last; or rows of latents, if they divide tokens.
    """
    found: list[tuple[float, float, float]] = []
    for number, (inner, columns, divided) in enumerate(s.projections, 1):
        if not divided:
            found.append((s.tokens / (s.tensor if s.sequence else 1), inner, columns))
        elif number == len(s.projections):
            found.append((s.tokens, inner / s.tensor, columns))
        else:
            found.append((s.tokens, inner, columns / s.tensor))
    return found


def measured_work(cost: LayerCost, s: Setting, machine: Machine) -> MicrobatchTime:
    """A layer's microbatch on a rank, by the operations that were measured of it.

    Nothing hides what context ranks send.
    """
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
    return found | {
        "passes": machine.pass_over(p.passes * (p.compiled_passes if s.compiled else 1.0) * work.moved)
    }


def head_work(s: Setting, machine: Machine) -> MicrobatchTime:
    """Final product and loss of a microbatch."""
    rows, columns = s.tokens, s.vocab / s.tensor
    precision = "bf16" if s.precision in ("fp8", "nvfp4") else s.precision
    passes = machine.pass_over(machine.profile.logit_passes * s.element * rows * columns / 2)
    wide = s.tensor > 1
    one = (
        machine.collective(1.0 if s.sequence else 2.0, s.element * rows * s.hidden, s.tensor) if wide else 0.0
    )
    forward = {
        "products": machine.product(rows, s.hidden, columns, precision),
        "passes": passes,
        "tensor": one,
    }
    products = machine.product(rows, columns, s.hidden, precision) + machine.product(
        s.hidden, rows, columns, precision
    )
    backward = {
        "products": products,
        "passes": passes + machine.pass_over(machine.profile.accumulate_bytes * s.vocabulary_parameters),
        "tensor": one,
    }
    return MicrobatchTime(forward, backward)


def crosses(s: Setting, machine: Machine) -> bool:
    """Whether a pipeline's transfers cross machines."""
    return s.pipeline > 1 and s.world > machine.cluster.node_ranks
