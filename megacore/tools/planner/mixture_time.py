"""What a mixture of experts takes of a block's microbatch on the rank whose experts have most rows: products
of groups of rows, passes through memory, and exchanges with the other ranks that hold experts.
"""

from dataclasses import replace

from megacore.tools.choices.context_method import Links
from megacore.tools.planner.operations import Machine
from megacore.tools.planner.workload import Setting


def mixture_times(s: Setting, machine: Machine) -> tuple[dict[str, float], dict[str, float]]:
    """Forward and backward of router and experts, without those that all tokens share:
    these are a feed-forward layer.
    """
    m, p, e = s.mixture, machine.profile, s.element
    assert m is not None
    own = s.tokens / s.tensor  # tensor ranks divide the tokens before they send them
    sent, held = own * m.chosen, m.experts / m.ranks
    rows, size, features = sent * m.parts * m.busiest, m.ranks * m.parts, m.ffn / m.parts
    shapes = (s.hidden, (2 if s.gated else 1) * features), (features, s.hidden)  # (inner, columns)
    routing = machine.product(own, s.hidden, m.experts, s.precision)
    turns = 2 if m.halves else 1  # each with as many of the rows
    each = rows / held / turns
    forward_products = sum(machine.product(each, i, c, s.precision, held) for i, c in shapes)
    backward_products = sum(
        machine.product(each, c, i, s.precision, held) + machine.product(i, each, c, s.precision, held)
        for i, c in shapes
    )
    width = features * (3 if s.gated else 2)
    # Rows are copied, once each: no other passes hide in that. What comes is sorted by expert, and back.
    permuted = e * s.hidden * (2 * own + 2 * sent + (4 * rows if size > 1 else 0.0))
    moved = p.passes * e * rows * width
    travels = e * rows * s.hidden / turns
    one = machine.links.exchange(travels, size)
    if m.once and m.parts == 1:
        one = exchange_once(machine.links, travels, m.ranks, m.chosen)
    elif not m.copies:
        between = machine.links.exchange(travels / m.parts, m.ranks, m.parts)
        one = between + machine.collective(1.0, travels, m.parts)
    counts = machine.links.exchange(8.0 * m.experts * m.parts * turns, size)
    added = p.accumulate_bytes * s.expert_parameters  # every half's gradients to a sum
    forward = {"products": routing + turns * forward_products, "passes": machine.pass_over(permuted + moved)}
    backward = {
        "products": 2 * routing + turns * backward_products,
        "passes": machine.pass_over(permuted + 1.5 * moved + turns * added),
    }
    forward["experts"], backward["experts"] = counts + 2 * turns * one, 2 * turns * one
    if machine.device.overlaps:  # rows travel while the shared experts compute, or experts another half
        works = (
            forward_products + machine.pass_over(moved / turns),
            backward_products + machine.pass_over(1.5 * moved / turns + added),
        )
        forward["experts"] = counts + waits(one, works[0], turns, shared_seconds(s, machine))
        backward["experts"] = waits(one, works[1], turns)
    if size > 1:
        forward["host"], backward["host"] = (1 + 2 * turns) * p.call_host, 2 * turns * p.call_host
    if s.recompute in ("full", "half"):
        again = 1.0 if s.recompute == "full" else 0.5
        backward = {name: seconds + again * forward.get(name, 0.0) for name, seconds in backward.items()}
    return forward, backward


def waits(one: float, work: float, parts: int, beside: float = 0.0) -> float:
    """Seconds in which the device waits for rows to come and to come back, in so many parts.

    An exchange takes `one`, and they follow each other; a part's experts take `work`, once it has come. Until
    the first has, `beside` is computed.
    """
    computed, back = beside, parts * one  # all have left; when they have come, the first may go back
    for part in range(1, parts + 1):
        computed = max(computed, part * one) + work
        back = max(back, computed) + one
    return back - beside - parts * work


def exchange_once(links: Links, moved: float, size: int, chosen: int) -> float:
    """Seconds of an exchange of `moved` bytes of rows in which a token goes once to each machine with some of
    its `chosen` experts, which may be anywhere, and is passed on there.
    """
    if size <= 1:
        return 0.0
    inside, longest, latency = 1, 0.0, 0.0
    for level in links.levels:
        within = size if level.ranks is None else min(size, level.ranks)
        if within > inside:
            machines = size / inside
            # of a token, by those of its experts
            copies = machines * (1 - (1 - 1 / machines) ** chosen) / chosen if inside > 1 else 1.0
            longest = max(longest, moved * copies * (within - inside) / within / level.rate)
            latency, inside = max(latency, level.latency), within
    return links.call + latency + longest


def shared_seconds(s: Setting, machine: Machine) -> float:
    """The forward of the experts that all tokens share."""
    assert s.mixture is not None
    features = s.mixture.shared / s.tensor
    up = machine.product(s.tokens, s.hidden, (2 if s.gated else 1) * features, s.precision)
    return up + machine.product(s.tokens, features, s.hidden, s.precision)


def without_mixture(s: Setting, ffn: int) -> Setting:
    """The same with a plain feed-forward layer in every block."""
    return replace(s, ffn=ffn, mixture=None)
