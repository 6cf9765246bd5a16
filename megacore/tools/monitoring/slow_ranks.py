"""Names the ranks that hold up the others, with their hosts, and says of each whether its device is
slow or the router sends it more.

A rank whose rows are as many times the usual ones as its seconds are, or more, may be slow by them alone: the
rest of its work is that of others. Beyond that it is its device.
"""

from statistics import fmean

import torch

from megacore.config import Config
from megacore.distributed.collectives import all_gather
from megacore.distributed.events import Slow
from megacore.distributed.mesh import Mesh
from megacore.distributed.rank_info import host_name
from megacore.tools.monitoring.expert_load import ExpertLoad, Rows
from megacore.train.callbacks import Callback, Report

NAME = 64  # bytes of a host's name
SHOWN = 8  # blocks that a line names


class SlowRanks(Callback):
    """Prints a line for each, once as long as it lasts."""

    def __init__(self, loads: ExpertLoad | None = None) -> None:
        """`loads`: who knows the rows of experts, if the model has any."""
        self.loads = loads
        self.named: set[int] = set()

    def on_start(self, config: Config, mesh: Mesh) -> None:
        """Gather the names of all hosts. Collective."""
        self.mesh = mesh
        own = torch.frombuffer(bytearray(host_name().encode()[:NAME].ljust(NAME, b"\0")), dtype=torch.uint8)
        told = all_gather(own[None].to(mesh.device), mesh.world).tolist()
        self.computes = "host" if mesh.device.type == "cpu" else "device"  # whose seconds grow with the rows
        self.hosts = [bytes(name).rstrip(b"\0").decode(errors="replace") for name in told]

    def on_log(self, report: Report) -> None:
        """Names those who hold up the others since this step."""
        step, seconds = report.metrics["step"], report.metrics["step_seconds"]
        for rank, slow in report.stragglers.items():
            if rank in self.named:
                continue
            rows = None
            if self.loads is not None and slow.of == self.computes:
                rows = self.loads.rows_of(rank, step)
            why = reason(f"host {self.hosts[rank]} rank {rank}", slow, rows)
            self.mesh.print(f"step {step}: {why}, busy for {slow.seconds:.2f} s of {seconds:.2f} s")
        self.named = set(report.stragglers)


def reason(who: str, slow: Slow, rows: Rows | None) -> str:
    """Why `who` holds up the others. `rows`: what the router sent there; None where that explains nothing."""
    if rows is None:
        return f"slow {slow.of}: {who} holds up the others"
    mean = fmean(rows.own.values())
    if mean <= 1 or slow.seconds * rows.usual > slow.usual * mean:
        return f"slow {slow.of}: {who} holds up the others with {mean:.2f} times the mean of rows"
    full = sorted((block for block, load in rows.own.items() if load > 1), key=lambda block: -rows.own[block])
    blocks = ", ".join(map(str, sorted(full[:SHOWN]))) + (
        f" and {len(full) - SHOWN} more" if len(full) > SHOWN else ""
    )
    where, times = "block" if len(full) == 1 else "blocks", fmean(rows.own[block] for block in full)
    return (
        f"slow by routing: {who} got {times:.2f} times the mean of rows in {where} {blocks} and holds "
        "up the others"
    )
