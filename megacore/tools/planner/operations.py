"""How long a device takes for an operation: a matrix product, attention, a pass through
memory, a collective, a transfer.

A product's output is cut into tiles, which the multiprocessors compute in waves. The last wave may be half
empty, a tile may stick out of the output, and a short inner dim leaves the start of a tile unpaid: so small
products reach less of the peak than large ones.
"""

import math
from dataclasses import dataclass
from functools import cached_property

from megacore.tools.choices.context_method import Level, Links, Rates
from megacore.tools.planner.devices import Cluster, DeviceSpec
from megacore.tools.planner.profile import Profile

# Tiles of a product, and the share of a multiprocessor's speed that each reaches: small ones load more bytes
# an operation.
TILES = ((256, 128, 1.0), (128, 128, 0.92), (128, 64, 0.75), (64, 64, 0.55))
# a tile takes as long as if its inner dim were so much longer: it fills its pipeline, and writes its result
START = 256
# Bytes of one number, in memory and on the wire between ranks. Products in 8 and 4 bits keep 16-bit
# activations.
ACTIVATION_BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2, "fp8": 2, "nvfp4": 2}
# what attention computes in
WIDE = {"fp8": "bf16", "nvfp4": "bf16", "fp16": "fp16", "bf16": "bf16", "fp32": "fp32", "fp64": "fp64"}


@dataclass(frozen=True)
class Machine:
    """What an operation's time is asked of: a device, its links, and the framework on it."""

    device: DeviceSpec
    cluster: Cluster
    profile: Profile

    @property
    def call(self) -> float:
        """Seconds that any collective takes besides hops and bytes."""
        return self.profile.call if self.cluster.call_seconds is None else self.cluster.call_seconds

    def rate(self, precision: str) -> float:
        """Operations a second that a large product reaches."""
        own = self.profile.product_rate
        share = own.get(precision, own.get("any", 0.75)) * own.get(self.device.name, 1.0)
        return self.device.peak_flops[precision] * share

    def product(self, rows: float, inner: float, columns: float, precision: str, count: float = 1) -> float:
        """Seconds of `count` products [rows, inner] × [inner, columns] at once."""
        if min(rows, inner, columns) <= 0:
            return 0.0
        rate, units = self.rate(precision), self.device.multiprocessors
        if units is None:
            return 2 * count * rows * inner * columns / rate
        best = math.inf
        for height, width, share in TILES:
            tiles = count * math.ceil(rows / height) * math.ceil(columns / width)
            waves = tiles / units
            # half: kernels split the inner dim to fill the last wave
            waves += 0.5 * (math.ceil(waves) - waves)
            best = min(best, waves * units * height * width / share)
        seconds = 2 * best * (inner + START) / rate
        moved = (
            count
            * (rows * inner + inner * columns + rows * columns)
            * (1 if precision in ("fp8", "nvfp4") else 2)
        )
        return max(seconds, self.pass_over(moved))

    def attention(
        self, queries: float, keys: float, size: float, precision: str, *, causal: bool = True
    ) -> float:
        """Seconds of the forward of fused attention: each of `queries` meets `keys`,
        over `size` features of all heads.
        """
        return 4 * queries * keys * size * (0.5 if causal else 1.0) / self.attention_rate(precision)

    def attention_rate(self, precision: str) -> float:
        """Operations a second that fused attention reaches."""
        rate = self.profile.attention_rate * self.profile.attention_on.get(self.device.name, 1.0)
        return self.device.peak_flops[WIDE[precision]] * rate

    def pass_over(self, moved: float) -> float:
        """Seconds to read or write so many bytes of the device's memory."""
        bandwidth = self.device.memory_bytes_per_second
        return 0.0 if bandwidth is None else moved / (bandwidth * self.profile.memory_rate)

    @cached_property
    def links(self) -> Links:
        """The cluster's links as the framework uses them."""
        rate, own = self.profile.link_rate, self.profile.link_latency
        levels = []
        for level in self.cluster.levels:
            part, latency = (
                rate.get(level.link, rate.get("any", 1.0)),
                own.get(level.link, level.latency_seconds),
            )
            levels.append(Level(level.ranks, level.bytes_per_second * part, latency))
        return Links(tuple(levels), self.call)

    def rates(self, precision: str) -> Rates:
        """What the waits of context ranks are asked of."""
        own, bandwidth = self.profile, self.device.memory_bytes_per_second
        memory = math.inf if bandwidth is None else bandwidth * own.memory_rate
        return Rates(self.links, self.attention_rate(precision), memory, own.ring_hidden, own.pieces_rate)

    def collective(self, share: float, moved: float, size: int, stride: int = 1) -> float:
        """See `Links.collective`."""
        return self.links.collective(share, moved, size, stride)

    def operation(self, name: str, moved: float, size: int, stride: int = 1) -> float:
        """Seconds of a communicator's operation, by name (`traffic.Transfer`)."""
        if name == "send":
            return self.transfer(moved, stride * (size - 1))  # a ring waits for its slowest neighbours
        if name in ("all_to_all", "exchange"):
            return self.links.exchange(moved, size, stride)
        return self.collective(2.0 if name == "all_reduce" else 1.0, moved, size, stride)

    def transfer(self, moved: float, distance: int) -> float:
        """Seconds of a message to the rank that is `distance` away."""
        return (self.cluster.call_seconds or 0.0) + self.links.transfer(moved, distance)
