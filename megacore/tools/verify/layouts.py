"""Reads layouts by name: tp2pp2dp2cp2sp is tensor, pipeline, data and context 2 with sequence parallelism,
pp4@zb_v has a schedule. In dp4ep2 pairs of these ranks divide experts, and in tp2etp1ep2 tensor ranks do; ep2
alone has as few data ranks as it can.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import gcd, prod

from megacore.config import Config
from megacore.config.parallel import CHUNKS, ParallelConfig
from megacore.distributed.axes import AXES, EXPERT_AXES
from megacore.errors import ConfigError
from megacore.tools.settings.model import check_model

EXPERT = {
    axis.name: axis.title
    for axis in EXPERT_AXES
    if axis.title in ParallelConfig.model_fields and axis not in AXES
}
TITLES = {axis.name: axis.title for axis in AXES} | EXPERT
MAX_WORLD = 64  # processes that one machine is asked for

# Every axis alone, in twos and fours, and together up to eight ranks. Three data ranks divide no bucket and
# no row evenly.
DEFAULT = (
    "one",
    "tp2",
    "tp2sp",
    "tp4",
    "tp4sp",
    "pp2",
    "pp4",
    "dp2",
    "dp3",
    "dp4",
    "cp4",
    "cp2tp2sp",
    "tp2pp2",
    "tp2pp2sp",
    "tp2dp2sp",
    "pp2dp2",
    "tp4pp2sp",
    "pp4dp2",
    "tp2pp2dp2",
    "tp2pp2dp2sp",
)

# Besides, for a model with experts: out of data, context and tensor ranks, and with others than tensor ranks
# dividing an expert.
EXPERTS = (
    "ep2",
    "dp4ep2",
    "ep4",
    "tp2ep2",
    "tp2ep2sp",
    "pp2ep2",
    "cp2ep2",
    "tp2etp1ep2",
    "tp2dp2etp1ep4sp",
    "dp2etp2",
    "tp2pp2etp1ep2@zb_v",
    "pp2ep2@interleaved",
)

# Every schedule in pipelines of two and four, and with each other axis.
SCHEDULES = tuple(
    f"{layout}@{schedule}" for schedule in CHUNKS for layout in ("pp2", "pp4", "tp2pp2", "tp2pp2sp", "pp2dp2")
)

CONTEXT = ("cp2", "cp4", "cp2tp2", "cp2tp2sp", "cp2pp2", "cp2dp2", "cp2tp2pp2sp")
DATA = ("dp3", "cp2dp2", "tp2dp3sp", "pp2dp3", "pp2dp2@interleaved", "pp2dp2@zb_v")
# What a change in a folder or file may break besides: layouts that are run in addition to the default ones.
BESIDES = {
    "megacore/context_parallel/": CONTEXT,
    "megacore/model/": ("cp2tp2", "cp2pp2", "pp4@interleaved"),
    "megacore/tensor_parallel/": ("cp2tp2", "tp2dp3sp", "tp2pp2sp@zb_h1"),
    "megacore/expert_parallel/": EXPERTS,
    "megacore/pipeline/": (*SCHEDULES, "cp2pp2"),
    "megacore/engine/": DATA,
    "megacore/data/": ("dp3", "cp2dp2", "pp2dp3"),
    "megacore/train/": ("dp3", "cp2dp2", "pp2dp3"),
    "megacore/distributed/": (*CONTEXT, *DATA),
    "kernels/": ("cp2tp2sp",),
}


def besides(changed: Iterable[str]) -> list[str]:
    """The layouts of `BESIDES` for files that a change touches, by their paths in the
    repository, each once.
    """
    touched = [layouts for path in changed for place, layouts in BESIDES.items() if path.startswith(place)]
    return list(dict.fromkeys(name for layouts in touched for name in layouts))


@dataclass(frozen=True)
class Layout:
    """The number of ranks along each axis, and the pipeline's schedule if it is not the config's.

    `one`: the trainer on one process.
    """

    name: str
    sizes: Mapping[str, int] = field(default_factory=dict)  # by the keys in `parallel`
    sequence: bool = False
    schedule: str | None = None

    def size(self, title: str) -> int:
        """The number of ranks along an axis."""
        return self.sizes.get(title, 1)

    @property
    def world(self) -> int:
        """The number of ranks."""
        return prod(self.size(axis.title) for axis in AXES)

    def overrides(self) -> list[str]:
        """The layout as overrides `section.key=value`."""
        sizes = [
            f"parallel.{axis.title}={self.size(axis.title)}"
            for axis in AXES
            if not axis.rare or self.size(axis.title) > 1
        ]
        sizes += [f"parallel.{title}={self.sizes[title]}" for title in EXPERT.values() if title in self.sizes]
        schedule = (
            [] if self.schedule is None else [f"parallel.schedule={self.schedule}", "parallel.chunks=null"]
        )
        return [*sizes, f"parallel.sequence={'true' if self.sequence else 'false'}", *schedule]

    def stages(self, config: Config) -> int:
        """The number of stages: of each rank of the pipeline as many as the schedule has chunks."""
        return self.size("pipeline") * (
            config.chunks if self.schedule is None else CHUNKS.get(self.schedule, 1)
        )


def parse(text: str) -> Layout:
    """Reads a name such as `tp2pp2dp2sp` or `pp4@zb_v`, with its parts in any order.

    Raises `ConfigError` if it names no layout.
    """
    name, at, schedule = text.partition("@")
    parts = re.findall(rf"({'|'.join(TITLES)})([1-9]\d{{0,2}})|(sp)", name)
    sizes = {TITLES[axis]: int(size) for axis, size, _ in parts if axis}
    sequence = any(sp for *_, sp in parts)
    named = len(sizes)
    if "data" not in sizes and EXPERT.keys() & {axis for axis, *_ in parts}:
        experts = sizes.get("expert", 1) * sizes.get("expert_tensor", sizes.get("tensor", 1))
        sizes["data"] = experts // gcd(experts, sizes.get("tensor", 1) * sizes.get("context", 1))
    whole = "".join(axis + size + sp for axis, size, sp in parts) == name
    if name != "one" and (not whole or not parts or named + sequence != len(parts)):
        right = (
            f"one, or such as tp2pp2dp2 or tp4sp: {', '.join(TITLES)} with a number, and sp, sequence "
            "parallelism"
        )
        raise ConfigError("--layouts", f"{name!r} is no layout", right)
    if at and schedule not in CHUNKS:
        raise ConfigError("--layouts", f"{schedule!r} is no schedule", f"one of {', '.join(CHUNKS)}")
    layout = Layout(text, sizes, sequence, schedule or None)
    if sequence and layout.size("tensor") == 1:
        raise ConfigError(
            "--layouts",
            f"{name}: sequence parallelism splits tokens over tensor ranks, and there is one",
            f"tp2{name}",
        )
    if layout.world > MAX_WORLD:
        raise ConfigError("--layouts", f"{name} has {layout.world} ranks", f"at most {MAX_WORLD}")
    return layout


def impossible(layout: Layout, config: Config) -> str | None:
    """Why the config does not allow the layout, in a few words; None if it does."""
    values: dict[str, int | bool | None] = {axis.title: layout.size(axis.title) for axis in AXES}
    values |= {"expert": layout.size("expert"), "expert_tensor": layout.sizes.get("expert_tensor")}
    values |= {"sequence": layout.sequence, "chunks": layout.stages(config) // layout.size("pipeline")}
    try:
        check_model(config.model_copy(update={"parallel": config.parallel.model_copy(update=values)}))
    except ConfigError as error:
        return f"{error.where}: {error.wrong}"
    return None
