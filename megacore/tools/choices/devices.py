"""What the core knows of devices that it may meet: the dense peak at each precision (for MFU),
memory and links (for `auto`).

Constants are those that the makers publish; `megacore/tools/planner/devices` names each one's source.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

MACHINE = 8  # accelerators that one machine's links join, as is usual


@dataclass(frozen=True)
class Facts:
    """Of one device: operations and bytes a second.

    The links are what a rank sends, in a machine and from machine to machine.
    """

    torch_names: str  # a pattern of what torch calls it, besides its name here
    # by `train.precision`: dense (datasheets often print twice that), fp32 without TF32
    peaks: Mapping[str, float]
    memory: float
    link: float
    port: float


def _facts(
    half: float,
    fp32: float,
    fp64: float,
    memory: float,
    link: float,
    port: float,
    names: str = "",
    bf16: bool = True,
) -> Facts:
    """In units of 10^12 operations and 10^9 bytes. A peak of 0 is one that nobody states."""
    peaks = {"fp16": half, "bf16": half if bf16 else 0.0, "fp32": fp32, "fp64": fp64}
    return Facts(
        names,
        {name: peak * 1e12 for name, peak in peaks.items() if peak},
        memory * 1e9,
        link * 1e9,
        port * 1e9,
    )


KNOWN = {
    "a100": _facts(312, 19.5, 19.5, 2039, 300, 25, "a100-(sxm4|pcie)-(40|80)gb|a100 80gb pcie"),
    "a100 40gb": _facts(312, 19.5, 19.5, 1555, 300, 25),
    "a40": _facts(149.7, 37.4, 0, 696, 32, 25),
    "b200": _facts(2250, 75, 37, 8000, 900, 50),
    "b300": _facts(2250, 75, 0, 8000, 900, 50),
    "gb200": _facts(2500, 80, 40, 8000, 900, 50),
    "gb300": _facts(2500, 80, 0, 8000, 900, 50),
    "gh200": _facts(989.5, 67, 67, 4000, 450, 50, "gh200 480gb"),
    "h100": _facts(989.5, 67, 67, 3350, 450, 50, "h100 80gb hbm3"),
    "h100 96gb hbm2e": _facts(989.5, 67, 67, 2400, 450, 50),
    "h100 nvl": _facts(835.5, 60, 60, 3900, 64, 50),
    "h100 pcie": _facts(756.5, 51, 51, 2000, 64, 50),
    "h200": _facts(989.5, 67, 67, 4800, 450, 50),
    "h200 nvl": _facts(835.5, 60, 60, 4800, 450, 50),
    "l4": _facts(121, 30.3, 0, 300, 32, 25),
    "l40": _facts(181.05, 90.5, 0, 864, 32, 25),
    "l40s": _facts(362.05, 91.6, 0, 864, 32, 25),
    "mi300x": _facts(1307.4, 163.4, 163.4, 5300, 448, 50, "amd instinct mi300x( oam)?"),
    "rtx 3090": _facts(71, 35.6, 0, 936, 32, 25),
    "rtx 4090": _facts(165.2, 82.6, 0, 1008, 32, 25),
    "t4": _facts(65, 8.1, 0, 320, 16, 12.5, "(tesla )?t4", bf16=False),
    "v100": _facts(125, 15.7, 7.8, 900, 150, 12.5, "tesla v100-sxm2-(16|32)gb", bf16=False),
}


def known_as(device_name: str) -> str | None:
    """The entry of `KNOWN` for a device's name, its own or that of `torch.cuda.get_device_name()`.

    None if there is none: never a guess.

    torch's name must match as a whole: a laptop's "RTX 4090 Laptop GPU" or a slice "A100-SXM4-80GB MIG
    1g.10gb" is another device.
    """
    name = device_name.lower().strip().removeprefix("nvidia ").removeprefix("geforce ")
    return next(
        (
            own
            for own, facts in KNOWN.items()
            if name == own or (facts.torch_names and re.fullmatch(facts.torch_names, name))
        ),
        None,
    )


def peak_flops(device_name: str, precision: str) -> float | None:
    """The dense peak in operations a second of a device.

    None if the device, or its peak in this precision, is unknown.
    """
    name = known_as(device_name)
    return None if name is None else KNOWN[name].peaks.get(precision)
