"""How one framework spends time around its products: a handful of constants, each with a meaning.

`fitted.json` holds them, with what was fitted, on which rows, and by which command.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

FITTED = Path(__file__).parent / "fitted.json"


@dataclass(frozen=True)
class Profile:
    """Constants of a framework.

    Rates are fractions of what the device's maker states; overlaps are fractions that are hidden.
    """

    name: str = "megacore"
    stages: str = "cost"  # how layers are cut into stages: cost, even, or nanotron (see `stages.cut`)
    # of the peak, by precision; by device, a factor on it
    product_rate: Mapping[str, float] = field(default_factory=dict)
    attention_rate: float = 0.5  # of the 16-bit peak, in fused attention
    # by device, a factor: a kernel made for an older one reaches less
    attention_on: Mapping[str, float] = field(default_factory=dict)
    memory_rate: float = 0.8  # of the memory's bandwidth
    passes: float = 1.0  # times that a block's activations go through memory, of one pass an operation
    compiled_passes: float = 0.5  # of those, in compiled blocks
    # times that a forward moves scores, where attention keeps them; with dropout, whose mask is a byte, 6.5
    score_passes: float = 5.0
    logit_passes: float = 8.0  # times that the logits go through memory, forward and backward
    accumulate_bytes: float = 8.0  # a parameter and microbatch, to add its gradient to the sum
    optimizer_bytes: float = 30.0  # a parameter and step
    link_rate: Mapping[str, float] = field(default_factory=dict)  # by link, of its bandwidth
    # by link, seconds a hop, in place of the cluster's
    link_latency: Mapping[str, float] = field(default_factory=dict)
    call: float = 2e-5  # seconds that a collective takes besides hops and bytes
    # under `selective`; megacore repeats the activation, and attention where it keeps scores
    repeats_attention: bool = True
    tensor_hidden: float = 0.0  # of the tensor ranks' collectives
    async_hidden: float = 0.5  # of them, where they run in pieces beside products
    # whether each context rank meets as many keys; otherwise the last one meets all
    ring_balanced: bool = True
    data_hidden: float = 0.8  # of the last backward, behind which gradients are summed
    # the same where data ranks divide the state (stages 1 and 2); None: as much
    sharded_hidden: float | None = None
    gather_hidden: float = 0.0  # of one forward, behind which parameters are gathered
    ring_hidden: float = 1.0  # of attention, behind which a ring of context ranks passes keys and values on
    # of attention over whole sequences: its speed over a method's pieces
    pieces_rate: Mapping[str, float] = field(default_factory=dict)
    # whether tensor ranks send a part each to the next stage, and gather there (Narayanan et al. 2021)
    scatters: bool = False
    pipeline_hidden: float = 0.0  # of a transfer between stages
    layer_host: float = 0.0  # seconds that the host needs to start a block, forward and backward
    call_host: float = 0.0  # and for each of its collectives
    hop_host: float = 0.0  # and for each hop of their rings, while transfers of a pipeline cross machines
    transfer_host: float = 0.0  # for a transfer between stages, in which the host waits
    microbatch_host: float = 0.0
    step_host: float = 0.0
    # spread of a rank's step time: the slowest of N ranks is later by jitter · sqrt(2 ln N)
    jitter: float = 0.0

    def with_constants(self, constants: Mapping[str, Any]) -> "Profile":
        """This profile with other constants; those of a table are added to it."""
        merged: dict[str, Any] = dict(constants)
        for name, value in constants.items():
            if isinstance(value, Mapping):
                merged[name] = {**getattr(self, name), **value}
        return replace(self, **merged)


# Between which values physics can explain a constant. Products and links stay below their datasheet's peak,
# and every activation is written once and read once, of which fusion saves some.
EXPLAINED = {
    "product_rate": (0.0, 0.92),
    "link_rate": (0.0, 0.95),
    "attention_rate": (0.0, 0.92),
    "passes": (0.5, 8.0),
}
EXPLAINED |= {"logit_passes": (0.5, 8.0)}


def unexplained(profile: Profile) -> list[str]:
    """The constants that no physics explains, with their values: what the model
    leaves out has gone into them.
    """
    found = []
    for name, (least, most) in EXPLAINED.items():
        value = getattr(profile, name)
        every = (
            [(k, v) for k, v in value.items() if k != "measured"]
            if isinstance(value, Mapping)
            else [("", value)]
        )
        found += [
            f"{name}{f'[{key}]' if key else ''} {own:.3g}"
            for key, own in every
            if own is not None and not least <= own <= most
        ]
    return found


@cache
def fitted() -> dict[str, Any]:
    """The file of fitted constants."""
    return json.loads(FITTED.read_text(encoding="utf-8"))


def profile_names() -> list[str]:
    """Frameworks whose constants are known."""
    return list(fitted()["profiles"])


def profile(name: str = "megacore") -> Profile:
    """The profile of a framework."""
    own = fitted()["profiles"][name]
    known = {f.name for f in fields(Profile)}
    return Profile(name).with_constants({key: value for key, value in own.items() if key in known})
