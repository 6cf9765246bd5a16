"""Devices and clusters as data: one JSON file each in `devices/` and `clusters/`, with constants that their makers publish.

A file of your own does as well: `benchmarks.throughput --peak --device-file` and `benchmarks.collectives --cluster-file` write one of
the machine at hand.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from megacore.errors import ConfigError
from megacore.files import read_text

ROOT = Path(__file__).parent
Constants = Mapping[str, float]


@dataclass(frozen=True)
class Device:
    """One device: operations and bytes a second."""

    name: str
    peak_flops: Constants  # by precision: dense (datasheets often print twice that), fp32 without TF32
    memory_gib: float | None = None
    memory_bytes_per_second: float | None = None
    multiprocessors: int | None = None  # among which a product's tiles are dealt out; None: no such grain
    power_watts: float | None = None
    overlaps: bool = True  # it computes while it sends; a CPU's cores do both


@dataclass(frozen=True)
class Level:
    """Links that join `ranks` consecutive ranks; None: any number. `bytes_per_second` are those that one rank sends."""

    link: str
    ranks: int | None
    bytes_per_second: float
    latency_seconds: float


@dataclass(frozen=True)
class Cluster:
    """How ranks are joined: the inside of a machine first, then what joins machines."""

    name: str
    levels: tuple[Level, ...]
    call_seconds: float | None = None  # of any call besides hops and bytes, where it was measured; None: a framework's constant

    @property
    def node_ranks(self) -> int:
        """Ranks that the innermost links join."""
        return self.levels[0].ranks or 1 << 30


@cache
def _files(folder: str) -> dict[str, dict[str, Any]]:
    """The content of every file of a folder here, by its name."""
    contents = [json.loads(path.read_text(encoding="utf-8")) for path in sorted((ROOT / folder).glob("*.json"))]
    return {content["name"]: content for content in contents}


def device_names() -> list[str]:
    """The devices that are known by name."""
    return list(_files("devices"))


def cluster_names() -> list[str]:
    """The clusters that are known by name."""
    return list(_files("clusters"))


def listed_device(device_name: str) -> Device | None:
    """The device of a name, its own or that of `torch.cuda.get_device_name()`. None if it is not known: never a guess.

    torch's name must match as a whole: a laptop's "RTX 4090 Laptop GPU" or a slice "A100-SXM4-80GB MIG 1g.10gb" is another device.
    """
    name = device_name.lower().strip().removeprefix("nvidia ").removeprefix("geforce ")
    for own, content in _files("devices").items():
        if name == own or any(re.fullmatch(pattern, name) for pattern in content["torch_names"]):
            return _device(content)
    return None


def peak_flops(device_name: str, precision: str) -> float | None:
    """The dense peak in operations a second of a device. None if the device, or its peak in this precision, is unknown."""
    device = listed_device(device_name)
    return None if device is None else device.peak_flops.get(precision)


def read_device(name_or_path: str, option: str = "--device") -> Device:
    """A device by name or from a JSON file. Raises `ConfigError`, naming the option."""
    device = listed_device(name_or_path)
    return device or _device(_read(name_or_path, option, device_names()), option, name_or_path)


def read_cluster(name_or_path: str, option: str = "--cluster") -> Cluster:
    """A cluster by name or from a JSON file. Raises `ConfigError`, naming the option."""
    content = _files("clusters").get(name_or_path) or _read(name_or_path, option, cluster_names())
    try:
        levels = tuple(
            Level(str(row["link"]), row["ranks"], float(row["bytes_per_second"]), float(row["latency_seconds"]))
            for row in content["levels"]
        )
        sizes = [level.ranks for level in levels]
        if not levels or sizes[-1] is not None or any(not isinstance(size, int) or size < 1 for size in sizes[:-1]):
            raise ValueError
        if sizes[:-1] != sorted(set(sizes[:-1])):  # type: ignore[type-var]
            raise ValueError
        if any(not (0 < level.bytes_per_second < math.inf and 0 <= level.latency_seconds < math.inf) for level in levels):
            raise ValueError
        call = content.get("call_seconds")
        if call is not None and not 0 <= float(call) < math.inf:
            raise ValueError
        return Cluster(str(content["name"]), levels, None if call is None else float(call))
    except (ValueError, KeyError, TypeError):
        raise ConfigError(
            option, f"{name_or_path} is no cluster file", "as in megacore/plan/clusters; the last level's ranks: null"
        ) from None


def _device(content: Any, option: str = "--device", path: str = "") -> Device:
    """A device from its file's content."""
    try:
        peaks = {str(name): float(peak) for name, peak in content["peak_flops"].items()}
        numbers = {name: content.get(name) for name in ("memory_gib", "memory_bytes_per_second", "multiprocessors", "power_watts")}
        if not peaks or any(not 0 < value < math.inf for value in (*peaks.values(), *(n for n in numbers.values() if n is not None))):
            raise ValueError
        overlaps = content.get("overlaps", True)
        if not isinstance(overlaps, bool):
            raise ValueError
        return Device(str(content["name"]), peaks, **numbers, overlaps=overlaps)
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ConfigError(option, f"{path} is no device file", "as in megacore/plan/devices") from None


def _read(path: str, option: str, known: list[str]) -> Any:
    """A JSON file's content."""
    try:
        return json.loads(read_text(path))
    except OSError as error:
        right = f"one of {', '.join(known)}, or a JSON file"
        raise ConfigError(option, f"{path} is not known, and cannot be read as a file: {error.strerror}", right) from None
    except (ValueError, RecursionError):
        raise ConfigError(option, f"{path} is not JSON", "a file as in megacore/plan") from None
