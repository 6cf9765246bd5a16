"""How long context ranks wait for each other's keys and values, by method (`parallel.context_method`), and which method is fastest.

With n keys and values of a rank, q its queries and c ranks, a block and microbatch costs what nothing hides:

| method | forward | backward |
|---|---|---|
| gather | a gather of c·n, before attention begins | another, and a scatter of the gradients |
| ring | c-1 times what a transfer of n takes longer than an c-th of attention | as often twice a transfer, and the gradients' way home |
| ulysses | exchanges of q, keys, values and the output, before and behind attention | as many |

Ring also merges its parts' outputs in fp32. Its transfers are messages from neighbour to neighbour: between machines a rank has one
port, where a gather uses those of all its ranks. Where attention over pieces of sequences is slower than over whole ones, gather and
ring also take the difference (`Profile.pieces_rate`).
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, get_args

from megacore.tools.planner.devices import Cluster, DeviceSpec, Level, read_cluster, read_device
from megacore.tools.planner.operations import BACKWARD_ATTENTION, Machine
from megacore.tools.planner.profile import Profile, profile

Method = Literal["gather", "ring", "ulysses"]
METHODS: tuple[Method, ...] = get_args(Method)
MERGED = 10  # bytes a feature to add a part to the output: it is read and written in fp32, and the part is read

# What predictions are for if nothing else is named: by `launch/plan.py --search`, and where `parallel.context_method=auto` chooses.
DEVICE, CLUSTER = "h100", "dgx_h100"
# Ranks of one machine's CPU over gloo, on which nothing overlaps. Four ranks on two cores of an EPYC measured attention over 4,096 tokens,
# forward and backward (`python -m benchmarks.context --tokens 4096`, 2026-11-22): a rank's operations a second over whole sequences, the
# bytes that it sends, and how much slower attention is over pieces, whose products are smaller and whose gradients are added up.
CPU = Machine(
    DeviceSpec("cpu", {"fp64": 1.5e10, "fp32": 3e10, "bf16": 3e10, "fp16": 3e10}),
    Cluster("cpu", (Level("gloo", None, 6.5e8, 1e-4),)),
    Profile("cpu", attention_rate=1.0, ring_hidden=0.0, pieces_rate={"gather": 0.79, "ring": 0.86}),
)


@dataclass(frozen=True)
class Divided:
    """Attention of a block over a microbatch, on one of the ranks that divide its tokens and heads."""

    context: int
    tensor: int
    tokens: int  # queries of the rank
    seq: int
    heads: float  # of a tensor rank
    kv_heads: float
    head_size: int
    precision: str
    element: int  # bytes

    @property
    def size(self) -> float:
        """Features of the query heads."""
        return self.heads * self.head_size


def exposed(own: Divided, method: str, machine: Machine, attention: tuple[float, float]) -> tuple[float, float]:
    """Seconds of forward and backward that a block's context ranks add to those of `attention`, forward and backward."""
    c, t, e = own.context, own.tensor, own.element
    if c == 1:
        return 0.0, 0.0
    keys = 2 * e * own.tokens * own.kv_heads * own.head_size
    forward, backward = (seconds * (1 / machine.profile.pieces_rate.get(method, 1.0) - 1) for seconds in attention)
    if method == "ring":
        step = machine.profile.call + machine.transfer(keys, t * (c - 1))
        forward += machine.pass_over(MERGED * own.tokens * own.size) * 3 / 4 * c  # three quarters of queries meet a rank's keys
        hidden = [seconds / c * machine.profile.ring_hidden for seconds in attention]
        return forward + (c - 1) * max(0.0, step - hidden[0]), backward + (c - 1) * max(0.0, 2 * step - hidden[1]) + step
    if method == "ulysses":
        dealt = e * own.tokens * own.head_size * max(own.kv_heads, c)
        one = 2 * (machine.exchange(e * own.tokens * own.size, c, t) + machine.exchange(dealt, c, t))
        return forward + one, backward + one
    gathered = machine.collective(1.0, keys * c, c, t)
    return forward + gathered, backward + 2 * gathered


def calls(method: str, context: int) -> int:
    """Calls of a communicator in a block's forward."""
    return {"ring": context - 1, "ulysses": 4}.get(method, 1) if context > 1 else 0


def fastest(own: Divided, machine: Machine, *, again: bool, exchanges: bool) -> Method:
    """The method whose ranks wait least in forward and backward, and `again` in a recomputed forward; of equals the first.

    `exchanges`: whether the heads can be dealt to the ranks, as ulysses needs it.
    """
    attention = machine.attention(own.tokens, own.seq, own.size, own.precision)

    def waits(method: Method) -> float:
        forward, backward = exposed(own, method, machine, (attention, BACKWARD_ATTENTION * attention))
        return (2 if again else 1) * forward + backward

    return min((method for method in METHODS if exchanges or method != "ulysses"), key=waits)


@lru_cache(maxsize=4096)
def chosen(own: Divided, *, on_cpu: bool, again: bool, exchanges: bool) -> Method:
    """The fastest method on a CPU, or on the default device and cluster: a run does not know its links, and all its ranks must agree."""
    machine = CPU if on_cpu else Machine(read_device(DEVICE), read_cluster(CLUSTER), profile())
    return fastest(own, machine, again=again, exchanges=exchanges)
