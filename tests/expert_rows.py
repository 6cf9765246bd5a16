"""The rows of the proof of mixtures: layouts and what goes with them, in a pairwise cover."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import product
from typing import Any
from unittest import mock

import torch

from megacore.config.parallel import CHUNKS
from megacore.errors import ConfigError
from megacore.expert_parallel.router import Router
from megacore.files import ROOT
from megacore.tools.settings.load import load
from megacore.tools.verify.layouts import Layout, impossible, parse
from megacore.tools.verify.shrink import load_whole
from tests.pairwise import Pair, Row, cover

CONFIG = str(ROOT / "configs/moe_tiny.json")
DEEP = "model.num_layers=8"  # for four ranks of a pipeline with two chunks each
Choice = dict[str, tuple[str, ...]]  # overrides, by what is chosen
SIZES = {"tp": (1, 2, 4), "pp": (1, 2, 4), "dp": (1, 2, 4), "cp": (1, 2), "ep": (1, 2, 4), "etp": (1, 2, 4)}
WORLDS = (4, 8)
SEED, DRAWN = 4, 32  # of the cover; settings that are drawn for each layout
ENGINES: Choice = {
    "native": (),
    "sharded": ("engine.shard_optimizer=true",),
    "two levels": ("engine.reduce_levels=2",),
    "fsdp": ("engine.kind=fsdp",),
}
DEEPSEEK = (
    "model.router_scores=sigmoid",
    "model.router_scale=2.5",
    "model.expert_groups=4",
    "model.groups_per_token=2",
    "model.router_bias_rate=0.01",
    "model.router_balance=global",
)
ROUTERS: Choice = {
    "softmax": (),
    "sigmoid": DEEPSEEK,
    "ties": (),
    "one expert": ("model.experts_per_token=1",),
}
BATCHES: Choice = {
    "even": (),
    "few tokens": ("train.seq_len=4", "train.micro_batch_size=1"),
    "uneven": (
        "train.seq_len=4",
        "train.micro_batch_size=3",
        "train.global_batch_size=24",
        "model.num_layers=9",
    ),
    "documents": ("data.document_mask=true", "data.packing=best_fit"),
}
CAPACITIES: Choice = {"all": (), "0.75": ("model.capacity_factor=0.75",)}
RECOMPUTE = ("none", "selective", "full")
HALVES: Choice = {"whole": (), "halves": ("parallel.expert_halves=true",)}
LAYERS: Choice = {
    "plain": (),
    "biases": ("model.bias=true",),
    "latent": (
        "model.head_size=16",
        "model.kv_rank=32",
        "model.q_rank=48",
        "model.plain_size=16",
        "model.value_size=16",
    ),
}
CHOICES: dict[str, Choice] = {
    "engine": ENGINES,
    "recompute": {kind: (f"train.recompute={kind}",) for kind in RECOMPUTE},
    "router": ROUTERS,
    "batch": BATCHES,
    "capacity": CAPACITIES,
    "exchange": HALVES,
    "layers": LAYERS,
}
FACTORS = (*SIZES, "sp", "schedule", *CHOICES, "ranks")


@dataclass(frozen=True)
class Proof:
    """A row of the cover."""

    row: Row

    @cached_property
    def of(self) -> dict[str, str]:
        """Values by factor."""
        return dict(zip(FACTORS, self.row, strict=True))

    @property
    def layout(self) -> Layout:
        """Its ranks and schedule."""
        return layout_of(self.row[: FACTORS.index("schedule") + 1])

    @property
    def settings(self) -> list[str]:
        """What goes with it, as overrides."""
        return [DEEP, *self.chosen(*CHOICES)]

    def chosen(self, *factors: str) -> list[str]:
        """Overrides of what is chosen for some factors."""
        return [override for name in factors for override in CHOICES[name][self.of[name]]]

    @property
    def plant(self) -> str | None:
        """What makes scores alike, in the layout and in the one process."""
        return {"ties": "tests.expert_rows:coarse", "one expert": "tests.expert_rows:alike"}.get(
            self.of["router"]
        )

    def allowed(self) -> bool:
        """Whether a run accepts it, as its config says and as the proof makes it small."""
        try:
            load(CONFIG, [*self.settings, "train.device=cpu", *self.layout.overrides()], self.layout.world)
            return impossible(self.layout, load_whole(CONFIG, self.settings)) is None
        except ConfigError:
            return False


def layout_of(row: Row) -> Layout:
    """The layout of the first values of a row."""
    *sizes, sp, schedule = row
    named = "".join(
        f"{axis}{size}" for axis, size in zip(SIZES, sizes, strict=True) if size != "1" or axis == "etp"
    )
    return parse(f"{named}{'sp' * (sp == 'yes')}{'' if schedule == 'none' else f'@{schedule}'}")


def every_row() -> Iterator[Row]:
    """All layouts whose numbers of ranks fit together, each with some settings drawn from all."""
    rng, settings = random.Random(SEED), list(product(*CHOICES.values()))
    for sizes in product(*SIZES.values()):
        of = dict(zip(SIZES, sizes, strict=True))
        stage = of["tp"] * of["dp"] * of["cp"]
        if (ranks := stage * of["pp"]) not in WORLDS or stage % (of["ep"] * of["etp"]):
            continue
        sequence = ("no", "yes") if of["tp"] > 1 else ("no",)
        schedules = tuple(CHUNKS) if of["pp"] > 1 else ("none",)
        for own in product(sequence, schedules):
            for rest in rng.sample(settings, DRAWN):
                yield (*map(str, sizes), *own, *rest, str(ranks))


@cache
def proofs() -> tuple[list[Proof], set[Pair]]:
    """The rows of the cover, and the pairs that no run accepts."""
    rows, never = cover(every_row(), lambda row: Proof(row).allowed(), SEED)
    return [Proof(row) for row in rows], never


def coarse() -> Any:
    """Scores in sixteenths: often several are equal."""
    return mock.patch.object(Router, "ranked", lambda self, scores: (scores.detach() * 16).round())


def alike() -> Any:
    """Scores that are all equal: every token goes to the first expert, ranks with others have no
    rows, and nobody chooses these.
    """
    return mock.patch.object(Router, "ranked", lambda self, scores: torch.zeros_like(scores))
