"""Sums of random gradients that travel compressed, and what must hold of them: the same bits on every rank,
an error that rounding explains, and nothing lost for good.
"""

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megacore.distributed.mesh import Mesh
from megacore.tools.launchers import place_from_environment
from megacore.tools.verify.worker import planted
from tests import training
from tests.build import mesh_of, run_of, step_of

BLOCK = 64
LOW_RANK, INT8 = (
    'engine.compression={"kind": "low_rank", "rank": 2}',
    'engine.compression={"kind": "int8", "block": 64}',
)
ROUNDS, BAD = 5, 2  # sums, and the one in which a gradient is not finite


def write_config(folder: Path) -> str:
    """Several buckets, and parameters of odd sizes, so that there are gaps."""
    train = {"steps": 4, "global_batch_size": 8}
    return training.write_config(
        folder,
        training.write_corpus(folder),
        model={"num_layers": 4},
        engine={"bucket_mib": 0.02},
        train=train,
        optim={"warmup_steps": 1},
    )


def started(config_path: str, overrides: list[str]) -> tuple[Any, Mesh]:
    """A rank's config and mesh; ranks take turns on two hosts."""
    place = place_from_environment()
    os.environ["MEGACORE_HOST"] = "ab"[place.rank % 2] if place.world_size > 1 else "a"
    config = run_of(config_path, *overrides, world=place.world_size)
    return config, mesh_of(config)


def sums_on_a_rank(config_path: str, overrides: list[str], plant: str | None = None) -> dict[str, Tensor]:
    """Sums of random gradients, all buckets end to end: ``given`` and ``summed`` of every round, without
    the loss scale, which is another in every round; which elements of a sum are this rank's; and all that
    its residuals hold in the end.
    """
    step = step_of(*started(config_path, overrides))
    engine: Any = step.engine
    engine.settle()
    buckets = list(engine.compression.buckets.values())
    found: dict[str, list[Tensor]] = {"given": [], "summed": []}
    with planted(plant):
        for number in range(ROUNDS):
            engine.loss_scale.value.fill_(2.0**number)
            random = torch.Generator().manual_seed(100 * step.mesh.place.rank + number)
            for bucket in buckets:
                for slot in bucket.bucket.slots:
                    view = slot.view(bucket.buffer.gradients)
                    view.copy_(
                        2.0**number * torch.randn(view.shape, generator=random) * 10.0 ** (slot.position % 5)
                    )
            if number == BAD and step.mesh.place.rank == 1:
                buckets[1].bucket.slots[0].view(buckets[1].buffer.gradients).flatten()[3] = float("inf")
            found["given"].append(torch.cat([bucket.gradients for bucket in buckets]) / 2.0**number)
            works = [bucket.start_sum() for bucket in buckets]
            for work in works:
                work.wait()
            found["summed"].append(torch.cat([bucket.gradients for bucket in buckets]) / 2.0**number)
            engine.compression.keep(torch.tensor(float(number == BAD)))
    mine, held = [], []
    for bucket in buckets:
        own = torch.zeros_like(bucket.buffer.gradients)
        for part in bucket.buffer.ranges:
            own[part] = 1.0
        mine.append(own[bucket.bucket.start : bucket.bucket.stop])
        lost = torch.zeros_like(own)
        for residual in bucket.residuals:
            lost[residual.start : residual.start + residual.kept.numel()] += residual.kept
        held.append(lost[bucket.bucket.start : bucket.bucket.stop])
    gaps = sum(float(x.abs().sum()) for bucket in buckets for x in getattr(bucket, "gaps", ()))
    step.engine.close()
    step.mesh.close()
    return {name: torch.stack(rounds) for name, rounds in found.items()} | {
        "mine": torch.cat(mine),
        "held": torch.cat(held),
        "gaps": torch.tensor(gaps),
    }


def bound_of(given: list[Tensor], hosts: int) -> Tensor:
    """By how much an element of an int8 sum may err: half a code's width of each
    host's part, and of their sum.
    """

    def half_width(x: Tensor) -> Tensor:
        return (x.view(-1, BLOCK).abs().amax(1, keepdim=True) / 254).expand(-1, BLOCK).flatten()

    parts = [sum(given[host::hosts][1:], given[host]) for host in range(hosts)]
    lost = sum((half_width(part) for part in parts[1:]), half_width(parts[0]))
    return 1.001 * (lost + half_width(sum(parts[1:], parts[0])) + lost / 100)


def check_sums(ranks: list[dict[str, Tensor]], hosts: int | None) -> None:
    """`hosts`: of an int8 sum, those between which it travels."""
    given, mine = [rank["given"].double() for rank in ranks], [rank["mine"] for rank in ranks]
    exact = sum(given[1:], given[0])
    summed = torch.zeros_like(exact)
    for rank, own in zip(ranks, mine, strict=True):
        summed[:, own > 0] = rank["summed"][:, own > 0].double()
    for rank, own in zip(ranks, mine, strict=True):  # copies have the same bits
        same = rank["summed"].double()[:, own > 0], summed[:, own > 0]
        assert torch.equal(torch.nan_to_num(same[0]), torch.nan_to_num(same[1])), "ranks have different sums"
    if hosts is not None:
        assert bool(((summed[0] - exact[0]).abs() <= bound_of([g[0] for g in given], hosts)).all()), (
            "a sum errs by more than its rounding"
        )
    bad = ~exact[BAD].isfinite()
    assert bad.sum() == 1 and not summed[BAD, bad].isfinite().any(), "what is not finite is not seen"
    fine = [number for number in range(ROUNDS) if number != BAD]
    assert bool(summed[fine].isfinite().all()) and all(rank["gaps"] == 0 for rank in ranks), (
        "a skipped step has left its gradient"
    )
    lacking = exact[fine].sum(0) - summed[fine].sum(0)
    held = sum((rank["held"].double() for rank in ranks), torch.zeros_like(lacking))
    assert float((lacking - held).abs().max() / exact[fine].abs().max()) < 1e-6, (
        "what sums lack is not in the residuals"
    )
    assert float(lacking.abs().max()) > 0, "nothing was lost, so this proved nothing"
