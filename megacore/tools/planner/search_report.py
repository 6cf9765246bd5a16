"""`launch/plan.py --search`: prints the best layouts, why others lost, what does
not fit, and what the run costs.
"""

import sys

from megacore.config.precision import GRADIENT_BYTES
from megacore.config.schema import Config
from megacore.errors import ConfigError
from megacore.tools.cli import next_command
from megacore.tools.planner.devices import Cluster, DeviceSpec, device_names, read_device
from megacore.tools.planner.error_bars import bar
from megacore.tools.planner.memory import CONTEXT, largest_part, optimizer_bytes
from megacore.tools.planner.parameters import parameters
from megacore.tools.planner.profile import Profile
from megacore.tools.planner.routing import Routing
from megacore.tools.planner.run_cost import cost_lines
from megacore.tools.planner.search import Candidate, Found, lost, search

SHOWN = 5
MORE = (2, 4, 8)  # times the devices, that are tried if nothing fits
MOST_DEVICES = 2**20


def report(
    config: Config,
    command: str,
    world: int,
    device: DeviceSpec,
    cluster: Cluster,
    profile: Profile,
    memory_gib: float | None,
    tokens: float | None,
    price: float | None,
    routing: Routing | None = None,
) -> tuple[Found, float]:
    """Searches, and prints what it finds, behind `command`: the config's path and overrides.

    Returns it with the GiB of a device. Raises `ConfigError` if nothing fits.
    """
    limit = memory_gib if memory_gib is not None else device.memory_gib
    if limit is None:
        raise ConfigError("--memory-gib", f"the memory of {device.name} is not known", "its GiB")
    if world > MOST_DEVICES:
        raise ConfigError(
            "--world", f"{world:,} devices are more than any run has", f"at most {MOST_DEVICES:,}"
        )
    if config.train.precision not in device.peak_flops:
        wrong = f"the {config.train.precision} peak of {device.name} is not known"
        raise ConfigError("--gpu", wrong, f"train.precision one of {', '.join(device.peak_flops)}")
    found = search(config, world, device, cluster, profile, limit, routing)
    if not found.fit:
        batch = config.train.global_batch_size
        if not found.counted:
            raise ConfigError(
                "train.global_batch_size",
                f"{batch} divides in no layout of {world} devices",
                "a multiple of their number",
            )
        raise too_small(config, found, world, device, cluster, profile, limit, routing)
    print(f"{world:,} × {device.name} over {cluster.name}")
    table(found, limit, cluster.node_ranks)
    best = found.fit[0]
    for number, candidate in enumerate(found.fit[:SHOWN], 1):
        start = f"{launcher(world, cluster.node_ranks)} launch/pretrain.py --config {command}"
        print(f"{number}. {next_command(start)} {' '.join(candidate.overrides())}")
    if tokens is not None:
        print(
            *cost_lines(best.config, best.seconds, tokens, cluster.node_ranks, price, device.power_watts),
            sep="\n",
        )
    return found, limit


def too_small(
    config: Config,
    found: Found,
    world: int,
    device: DeviceSpec,
    cluster: Cluster,
    profile: Profile,
    limit: float,
    routing: Routing | None,
) -> ConfigError:
    """How much memory lacks for the layout that needs least, and what would hold the run: a
    larger device, or more of them.
    """
    least = found.least
    assert least is not None
    needs = least.needs_gib
    smallest = f"the smallest, {least.describe()}, needs {needs:,.1f} GiB, {needs - limit:,.1f} more"
    most = f"most of it for {largest_part(least.memory[1])}"
    wrong = f"none of {found.counted:,} layouts fits in {limit:g} GiB: {smallest}, {most}"
    known = ((read_device(name).memory_gib or 0.0, name) for name in device_names())
    larger = [f"{name} {gib:g}" for gib, name in sorted(known) if gib >= needs][:SHOWN]
    such = f", such as {', '.join(larger)}" if larger else ""
    right = f"devices of {needs:,.1f} GiB{such}"
    room = limit * 2**30 - CONTEXT
    state = parameters(config) * (optimizer_bytes(config) + GRADIENT_BYTES[config.train.precision])
    more = [n * world for n in MORE if n * world <= MOST_DEVICES] if room > 0 else []  # else no number helps
    for devices in (n for n in more if state / n < room):
        if fit := search(config, devices, device, cluster, profile, limit, routing).fit:
            return ConfigError(
                "--memory-gib",
                wrong,
                f"{right}; or --world {devices}: {fit[0].describe()}, {fit[0].needs_gib:,.1f} GiB",
            )
    return ConfigError(
        "--memory-gib", wrong, f"{right}{f'; {more[-1]:,} devices are too few as well' if more else ''}"
    )


def launcher(world: int, host_ranks: int) -> str:
    """The words of a command that start `world` ranks: on one machine without help, on several with Slurm."""
    if world == 1:
        return "python"
    if world <= host_ranks:
        return f"torchrun --nproc-per-node {world}"
    return f"srun --ntasks {world} --ntasks-per-node {host_ranks} python"


def table(found: Found, limit: float, host_ranks: int) -> None:
    """Prints the best layouts, and those that just do not fit."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    console = Console(
        highlight=False, markup=False, soft_wrap=True, width=None if sys.stdout.isatty() else 160
    )
    console.print(
        f"{found.counted:,} layouts; compared: the fastest {len(found.fit):,} that fit in {limit:g} GiB, and "
        f"{len(found.too_large):,} that do not; {found.hopeless:,} cannot even hold the model's state"
    )
    rows = Table(box=SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    for name in ("", "step s", "tokens/s", "MFU", "causal", "GiB", "layout"):
        rows.add_column(name, justify="left" if name == "layout" else "right", no_wrap=True)
    best = found.fit[0]
    error = bar(best.config.world_size, best.config.parallel.pipeline, host_ranks)
    reasons = {}
    for number, candidate in enumerate(found.fit[:SHOWN], 1):
        rows.add_row(str(number), *figures(candidate), candidate.describe())
        if candidate is not best:
            tie = "tie: " if error.ties(best.seconds, candidate.seconds) else ""
            reasons[str(number)] = tie + lost(best, candidate)

    # Faster layouts that do not fit have letters: the numbers are those of the commands that are printed.
    faster = sorted(
        (candidate for candidate in found.too_large if candidate.seconds < best.seconds),
        key=lambda candidate: candidate.seconds,
    )
    for letter, candidate in zip("ab", faster[:2] or found.too_large[:1], strict=False):
        worst, memory, needs = candidate.memory
        rows.add_row(letter, *figures(candidate), candidate.describe())
        reasons[letter] = (
            f"does not fit: {needs - limit:,.1f} GiB too much on pipeline rank {worst}, most of it "
            f"{largest_part(memory)}"
        )
    console.print(rows)
    if reasons:
        console.print("Why not the others:")
    for label, reason in reasons.items():
        console.print(f"  {label}  {reason}")
    console.print()
    terms = sorted(best.prediction.terms.items(), key=lambda term: -term[1])
    shares = ", ".join(
        f"{name} {value / best.seconds:.0%}" for name, value in terms if value > 0.005 * best.seconds
    )
    console.print(f"The best layout's step: {shares}.")
    ties = sum(error.ties(best.seconds, candidate.seconds) for candidate in found.fit) - 1
    console.print(
        f"It takes {error.around(best.seconds)} s: {error}. {ties:,} others that fit tie with it within "
        "that error."
    )


def figures(candidate: Candidate) -> list[str]:
    """A candidate's numbers as text."""
    causal = "" if candidate.mfu_causal is None else f"{candidate.mfu_causal:.1%}"
    speed = [f"{candidate.seconds:.3f}", f"{candidate.tokens_per_second:,.0f}"]
    return [*speed, f"{candidate.mfu:.1%}", causal, f"{candidate.needs_gib:,.1f}"]
