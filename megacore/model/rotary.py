"""The tables of rotary positions (Su et al. 2021), and how their frequencies are
stretched for longer texts.
"""

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from megacore.config.model import LinearRope, Llama3Rope, LongRope, NtkRope, RopeScaling, YarnRope


def rope_tables(
    positions: np.ndarray,
    head_size: int,
    theta: float,
    dtype: torch.dtype,
    device: torch.device,
    scaling: RopeScaling | None = None,
    share: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """cos and sin ``[positions, head]`` of rotary positions; feature i is paired with i + head/2.

    The first `share` of the pairs turn.

    Computed in fp64: at long contexts fp32 angles are off by more than bf16 resolves.
    """
    if device.type == "meta":  # tables of long texts take most of the time in which a plan measures layers
        cos, sin = (torch.empty(len(positions), head_size, dtype=dtype, device=device) for _ in range(2))
        return cos, sin
    turning = frequencies(int(head_size * share), theta, scaling)
    still = head_size // 2 - len(turning)
    angles = torch.outer(torch.from_numpy(positions).double(), F.pad(turning, (0, still))).repeat(1, 2)
    # YaRN and LongRoPE multiply queries and keys by one factor, and their rotation is linear: so the tables
    # can carry it.
    factor = attention_factor(scaling) if isinstance(scaling, YarnRope | LongRope) else 1.0
    factors = F.pad(torch.full_like(turning, factor), (0, still), value=1.0).repeat(2)
    return (factors * angles.cos()).to(device, dtype), (factors * angles.sin()).to(device, dtype)


def frequencies(head_size: int, theta: float, scaling: RopeScaling | None = None) -> Tensor:
    """Radians per position ``[head / 2]`` of every feature pair, in fp64."""
    if isinstance(scaling, NtkRope):
        theta = stretched_base(head_size, theta, scaling.factor)
    plain = theta ** (-torch.arange(0, head_size, 2, dtype=torch.float64) / head_size)
    if isinstance(scaling, LinearRope):
        return plain / scaling.factor
    if isinstance(scaling, Llama3Rope):
        turns = scaling.original_max_position_embeddings * plain / (2 * math.pi)
        kept = (
            (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
        ).clamp(0.0, 1.0)
        return plain * (kept + (1.0 - kept) / scaling.factor)
    if isinstance(scaling, YarnRope):
        start, end = yarn_ramp(head_size, theta, scaling)
        divided = ((torch.arange(head_size // 2, dtype=torch.float64) - start) / (end - start)).clamp(
            0.0, 1.0
        )
        return plain * (1.0 - divided + divided / scaling.factor)
    if isinstance(scaling, LongRope):
        return plain / torch.tensor(scaling.short_factor, dtype=torch.float64)
    return plain


def stretched_base(head_size: int, theta: float, factor: float) -> float:
    """The base with which the slowest of the frequencies is `factor` times
    slower, while the fastest stays at 1.
    """
    return theta * factor ** (head_size / (head_size - 2)) if head_size > 2 else theta


def yarn_ramp(head_size: int, theta: float, scaling: YarnRope) -> tuple[float, float]:
    """The feature pairs between which YaRN passes from keeping a frequency to dividing it by all of `factor`.

    Pair i turns original · theta^(-2i / head) / 2π times in the original length; solved for i.
    """
    start, end = (
        head_size
        * math.log(scaling.original_max_position_embeddings / (2 * math.pi * turns))
        / (2 * math.log(theta))
        for turns in (scaling.beta_fast, scaling.beta_slow)
    )
    if scaling.truncate:
        start, end = math.floor(start), math.ceil(end)
    start, end = max(start, 0), min(end, head_size - 1)
    return start, end if end != start else end + 0.001  # a step, not a division by zero


def attention_factor(scaling: YarnRope | LongRope) -> float:
    """What queries and keys are multiplied by; scores grow by its square."""
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    assert isinstance(scaling, YarnRope)  # LongRoPE's is always stated
    return 0.1 * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0
