"""What flows from layer to layer, and which losses layers have: declarations, known
on every rank and without torch.
"""

from dataclasses import dataclass

from megacore.config.schema import Config


@dataclass(frozen=True)
class Flow:
    """A tensor that layers hand on under a name.

    `dims`: of one rank's microbatch, each a number, or `batch`, `seq`, `tokens` (batch · seq), `hidden`,
    `heads`, `kv_heads` or `head`. The first has the tokens, if any do.
    """

    dims: tuple[str | int, ...] = ("tokens", "hidden")
    cp: bool = True  # context ranks divide the tokens; else each has all
    sp: bool = True  # under `parallel.sequence` tensor ranks divide the first dim
    tp: int | None = None  # the dim that tensor ranks divide always
    dtype: str = ""  # as in `train.precision`, which it is by default
    gradient: bool = True  # whether losses are differentiated through it

    def precision(self, config: Config) -> str:
        """The name of its dtype."""
        return self.dtype or config.train.precision

    def shape(self, config: Config, batch: int | None = None, seq: int | None = None) -> tuple[int, ...]:
        """What a rank holds of it: in a microbatch, or of `batch` sequences of
        which it has `seq` tokens each.
        """
        model, parallel = config.model, config.parallel
        batch = config.train.micro_batch_size if batch is None else batch
        if seq is None:
            seq = config.train.seq_len // (parallel.context if self.cp else 1)
        sizes = {
            "batch": batch,
            "seq": seq,
            "tokens": batch * seq,
            "hidden": model.hidden_size,
            "head": config.head_size,
        }
        sizes |= {"heads": model.num_heads, "kv_heads": config.kv_heads}
        shape = [sizes[dim] if isinstance(dim, str) else dim for dim in self.dims]
        if self.sp and parallel.sequence:
            shape[0] //= parallel.tensor
        if self.tp is not None:
            shape[self.tp] //= parallel.tensor
        return tuple(shape)


@dataclass(frozen=True)
class Loss:
    """A part of what training minimises: `coefficient` times the mean, over the global
    batch, of what layers give sums of.

    `over`: what it is the mean of: `tokens`, or a field of the batch, of which entries that are `IGNORED` do
    not count. So the weight of a rank's sum is known before its first backward, and is the same on every
    rank.
    """

    name: str
    over: str = "tokens"
    coefficient: float = 1.0
    # under `parallel.sequence` a tensor rank's sum is over its own tokens; else all give the same
    sp: bool = True
    # whether the sum over a batch is the sum over its samples alone; launch/verify.py checks it
    additive: bool = True


CROSS_ENTROPY = Loss("cross_entropy", over="targets", sp=False)
HIDDEN = Flow()
