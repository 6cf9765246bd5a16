"""Devices and clusters as data: one JSON file each in `devices/` and `clusters/`, with
constants that their makers publish.

A file of your own does as well: `benchmarks.throughput --peak --gpu-file` and
`benchmarks.collectives --cluster-file` write one of the machine at hand.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import Field, ValidationError

from megacore.errors import ConfigError
from megacore.files import read_json, read_text
from megacore.records import Record, complaint
from megacore.tools.choices.devices import known_as

ROOT = Path(__file__).parent
Constants = Mapping[str, float]


@dataclass(frozen=True)
class DeviceSpec:
    """One device: operations and bytes a second."""

    name: str
    peak_flops: Constants  # by precision: dense (datasheets often print twice that), fp32 without TF32
    memory_gib: float | None = None  # what a process can have: the driver and ECC keep some of the card's
    memory_bytes_per_second: float | None = None
    multiprocessors: int | None = None  # among which a product's tiles are dealt out; None: no such grain
    power_watts: float | None = None
    overlaps: bool = True  # it computes while it sends; a CPU's cores do both
    cluster: str | None = None  # its maker's own machines, by name; None: there are none that are known


@dataclass(frozen=True)
class Level:
    """Links that join `ranks` consecutive ranks; None: any number.

    `bytes_per_second` are those that one rank sends.
    """

    link: str
    ranks: int | None
    bytes_per_second: float
    latency_seconds: float


@dataclass(frozen=True)
class Cluster:
    """How ranks are joined: the inside of a machine first, then what joins machines."""

    name: str
    levels: tuple[Level, ...]
    # of any call besides hops and bytes, where it was measured; None: a framework's constant
    call_seconds: float | None = None
    devices: tuple[str, ...] = ()  # whose links these are; none: nobody says

    @property
    def node_ranks(self) -> int:
        """Ranks that the innermost links join."""
        return self.levels[0].ranks or 1 << 30


# Bounds far around any machine: what is divided by a rate stays a number.
Name = Annotated[str, Field(min_length=1, max_length=200)]
Rate = Annotated[float, Field(ge=1, le=1e24)]  # a second
Seconds = Annotated[float, Field(ge=0, le=1e4)]
Amount = Annotated[float, Field(ge=1e-6, le=1e9)]
Count = Annotated[int, Field(ge=1, le=1 << 24)]


class DeviceFile(Record):
    """What a device's file holds; `DeviceSpec` says what it means."""

    name: Name
    peak_flops: Annotated[dict[str, Rate], Field(min_length=1)]
    memory_gib: Amount | None = None
    memory_bytes_per_second: Rate | None = None
    multiprocessors: Count | None = None
    power_watts: Amount | None = None
    overlaps: bool = True
    cluster: Name | None = None

    def device(self) -> DeviceSpec:
        """The device."""
        return DeviceSpec(**self.model_dump())


class LevelRow(Record):
    """See `Level`."""

    link: Name
    ranks: Count | None
    bytes_per_second: Rate
    latency_seconds: Seconds


class ClusterFile(Record):
    """What a cluster's file holds; `Cluster` says what it means."""

    name: Name
    levels: Annotated[list[LevelRow], Field(min_length=1)]
    call_seconds: Seconds | None = None
    devices: tuple[Name, ...] = ()

    def cluster(self) -> Cluster:
        """The cluster."""
        return Cluster(
            self.name,
            tuple(Level(**row.model_dump()) for row in self.levels),
            self.call_seconds,
            self.devices,
        )


File = TypeVar("File", DeviceFile, ClusterFile)


@cache
def _devices() -> dict[str, DeviceFile]:
    """The devices in the folder here, by name."""
    return _known("devices", DeviceFile)


@cache
def _clusters() -> dict[str, ClusterFile]:
    """The clusters in the folder here, by name."""
    return _known("clusters", ClusterFile)


def _known(folder: str, kind: type[File]) -> dict[str, File]:
    files = (kind.model_validate_json(path.read_bytes()) for path in sorted((ROOT / folder).glob("*.json")))
    return {file.name: file for file in files}


def device_names() -> list[str]:
    """The devices that are known by name."""
    return list(_devices())


def cluster_names() -> list[str]:
    """The clusters that are known by name."""
    return list(_clusters())


def listed_device(device_name: str) -> DeviceSpec | None:
    """The device of a name, its own or that of `torch.cuda.get_device_name()`.

    None if it is not known: never a guess.
    """
    file = _devices().get(known_as(device_name) or "")
    return None if file is None else file.device()


def read_device(name_or_path: str, option: str = "--gpu") -> DeviceSpec:
    """A device by name or from a JSON file. Raises `ConfigError`, naming the option."""
    device = listed_device(name_or_path)
    return device or _read(name_or_path, option, DeviceFile, device_names()).device()


def read_cluster(name_or_path: str, option: str = "--cluster") -> Cluster:
    """A cluster by name or from a JSON file. Raises `ConfigError`, naming the option."""
    file = _clusters().get(name_or_path) or _read(name_or_path, option, ClusterFile, cluster_names())
    sizes = [level.ranks for level in file.levels]
    inner = [size for size in sizes[:-1] if size is not None]
    if sizes[-1] is not None or len(inner) < len(sizes) - 1 or inner != sorted(set(inner)):
        wrong = f"{name_or_path} is no cluster file: its levels' ranks are {sizes[:8]}"
        raise ConfigError(
            option,
            wrong,
            "more ranks from level to level, and null for the last, as in megacore/tools/planner/clusters",
        )
    return file.cluster()


def cluster_of(device: DeviceSpec) -> Cluster:
    """The cluster that a device is laid out on if none is named: its maker's.

    Raises `ConfigError` if none is known.
    """
    if device.cluster is None:
        raise ConfigError(
            "--cluster",
            f"the links of {device.name} are not known",
            f"one of {', '.join(cluster_names())}, or a JSON file",
        )
    return read_cluster(device.cluster)


def links_warning(device: DeviceSpec, cluster: Cluster) -> str:
    """A line if the cluster's links are those of other devices; else nothing, also
    where nobody says whose they are.
    """
    if not cluster.devices or device.name in cluster.devices:
        return ""
    own = [file.name for file in _clusters().values() if device.name in file.devices]
    right = f"--cluster {' or '.join(own)}" if own else "a cluster file of your own"
    return (
        f"warning: {cluster.name} has the links of {', '.join(cluster.devices)}, and not of "
        f"{device.name} (take {right})"
    )


def _read(path: str, option: str, kind: type[File], known: list[str]) -> File:
    """A file's content. Raises `ConfigError`, naming the option."""
    what = "device" if kind is DeviceFile else "cluster"
    right = f"as in megacore/tools/planner/{what}s"
    try:
        text = read_text(path)
        read_json(text)  # which rejects a key that is there twice; pydantic takes the last
        return kind.model_validate_json(text)
    except OSError as error:
        wrong = f"{path} is not known, and cannot be read as a file: {error.strerror}"
        raise ConfigError(option, wrong, f"one of {', '.join(known)}, or a JSON file") from None
    except UnicodeDecodeError:
        raise ConfigError(option, f"{path} is not JSON", right) from None
    except ValidationError as error:
        wrong = (
            f"{path} is not JSON"
            if error.errors()[0]["type"] == "json_invalid"
            else f"{path} is no {what} file: {complaint(error)}"
        )
        raise ConfigError(option, wrong, right) from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(option, f"{path} is not JSON: {error}", right) from None
