"""How long context ranks wait for each other's keys and values, by method (`parallel.context_method`).

With n keys and values of a rank, q its queries and c ranks, a block and microbatch costs what nothing hides:

| method | forward | backward |
|---|---|---|
| gather | a gather of c·n, before attention begins | another, and a scatter of the gradients |
| ring | c-1 times what a transfer of n takes longer than an c-th of attention | as often twice a transfer, and the gradients' way home |
| ulysses | exchanges of q, keys, values and the output, before and behind attention | as many |

Ring also merges its parts' outputs in fp32. Its transfers are messages from neighbour to neighbour: between machines a rank has one
port, where a gather uses those of all its ranks.
"""

from megacore.plan.operations import Machine
from megacore.plan.setting import Setting

METHODS = ("gather", "ring", "ulysses")
MERGED = 10  # bytes a feature to add a part to the output: it is read and written in fp32, and the part is read


def exposed(s: Setting, machine: Machine, attention: tuple[float, float]) -> tuple[float, float]:
    """Seconds of forward and backward that a block's context ranks add to those of `attention`, forward and backward."""
    c, t, e = s.context, s.tensor, s.element
    if c == 1:
        return 0.0, 0.0
    own = 2 * e * s.tokens * s.kv_size / t
    if s.context_method == "ring":
        call, distance = machine.profile.call, t * (c - 1)
        step = call + machine.transfer(own, distance)
        merging = machine.pass_over(MERGED * s.tokens * s.attention_size / t) * 3 / 4 * c  # three quarters of queries meet a rank's keys
        hidden = [seconds / c for seconds in attention]
        return merging + (c - 1) * max(0.0, step - hidden[0]), (c - 1) * max(0.0, 2 * step - hidden[1]) + step
    if s.context_method == "ulysses":
        keys = e * s.tokens * max(s.kv_size / t, c * s.head_size)
        queries = e * s.tokens * s.attention_size / t
        one = 2 * (machine.exchange(queries, c, t) + machine.exchange(keys, c, t))
        return one, one
    gathered = machine.collective(1.0, own * c, c, t)
    return gathered, 2 * gathered


def calls(s: Setting) -> int:
    """Calls of a communicator in a block's forward."""
    return {"ring": s.context - 1, "ulysses": 4}.get(s.context_method, 1) if s.context > 1 else 0
