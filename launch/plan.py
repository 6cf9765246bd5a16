"""Predict a run's memory, traffic, pipeline bubble and step time, without a GPU."""

import os
import sys

# so that a checkout runs without being installed; an installed script has no such folder
if os.path.isdir(os.path.dirname(os.path.realpath(__file__)) + "/../megacore"):
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.realpath(__file__))))

import megacore.tools.interrupt  # noqa: F401  (first: Ctrl-C during the other imports prints no traceback)

# isort: split
import argparse
import math
import shlex
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from megacore.config import Config
from megacore.errors import ConfigError
from megacore.pipeline.partition import placement_of, plan_of, stage_layers
from megacore.tools.choices.bubble import bubble, bubble_warning
from megacore.tools.choices.context_method import DEVICE
from megacore.tools.choices.flops import counted_layers, model_flops
from megacore.tools.choices.layer_cost import BALANCED, Loads
from megacore.tools.choices.partition import alternatives, partitioned, simulated, stage_costs, step_times
from megacore.tools.cli import Parser, add_config, add_overrides, exit_with
from megacore.tools.output_files import check_output, replaced
from megacore.tools.planner.buckets import data_ranks_of_a_host
from megacore.tools.planner.devices import (
    Cluster,
    DeviceSpec,
    cluster_names,
    cluster_of,
    device_names,
    links_warning,
    read_cluster,
    read_device,
)
from megacore.tools.planner.memory import RankMemory, besides, communicators_of, rank_memory
from megacore.tools.planner.operations import Machine
from megacore.tools.planner.own_layout import fit_text, step_report
from megacore.tools.planner.parameters import parameters, rank_parameters
from megacore.tools.planner.plot import check_plot
from megacore.tools.planner.profile import profile
from megacore.tools.planner.routing import Routing, loads_of, read_routing
from megacore.tools.planner.traffic import rank_traffic, seconds_by_group, sent_by_group
from megacore.tools.planner.workload import refuse_experts
from megacore.tools.schedules.plan_file import write_plan
from megacore.tools.schedules.simulate import Timeline
from megacore.tools.settings.load import load, smallest_world
from megacore.tools.settings.validation import batch_equations

if TYPE_CHECKING:
    from rich.table import Table

CLUSTER = "dgx_h100"  # whose links one device does not use
AMOUNTS = ("memory_gib", "tokens", "price")  # options that are a number above 0
MOST_DRAWN = 8192  # actions of a rank in a picture

# columns, in this order
KNOWN_GROUPS = ("tp", "cp", "dp", "dp within a host", "dp between hosts", "shard", "replicate", "pp", "tied")
OF_ALL = ("loss", "norm")  # a few numbers, which have no column

EXAMPLE = "python launch/plan.py --config configs/gpt_7b.json --world 8 --gpu h100 --cluster dgx_h100"
NOTES = (
    "FLOPs count matrix products, and for attention those that its implementation executes. Memory is the "
    "peak of the fullest tensor rank. The bubble is simulated; the FLOPs of each stage are its time."
)
STATUS = "0 done, 1 a simulated rank differs from the prediction or would hang, 2 wrong arguments"


def parser() -> Parser:
    """Return the parser of the command line."""
    parser = Parser(
        "Predict a run's memory, traffic, pipeline bubble and step time, without a GPU.",
        example=EXAMPLE,
        notes=NOTES,
        status=STATUS,
        page="docs/planning.md",
    )
    add_config(parser)
    parser.add_argument(
        "--world",
        type=int,
        metavar="N",
        help="number of ranks (default: the fewest that the config fits)",
    )
    parser.add_argument(
        "--gpu",
        metavar="NAME",
        help=f"predict the step time on this GPU: {', '.join(device_names())}, or a JSON file",
    )
    parser.add_argument(
        "--cluster",
        metavar="NAME",
        help="predict communication over the links of this cluster, and with --gpu the whole step: "
        f"{', '.join(cluster_names())}, or a JSON file",
    )
    parser.add_argument(
        "--calibrate",
        metavar="RUN",
        help="folder of a run on this GPU and cluster, whose measured steps correct the prediction",
    )
    parser.add_argument(
        "--host-size", type=int, default=8, metavar="N", help="ranks on a host, for engine.reduce_levels=2"
    )
    parser.add_argument(
        "--compare-schedules",
        action="store_true",
        help="compare all pipeline schedules that this model and layout allow",
    )
    parser.add_argument(
        "--output",
        metavar="FILE.json",
        help="write the schedule as a plan for parallel.schedule=file:FILE.json",
    )
    parser.add_argument(
        "--plot", metavar="FILE.png", help="draw the simulated schedule, or the layouts that --search found"
    )
    parser.add_argument(
        "--simulate-ranks",
        metavar="RANKS",
        help="run one step of these ranks, such as 0,8-15, on tensors without data, and compare it with the "
        "prediction",
    )
    parser.add_argument(
        "--search", action="store_true", help="find the fastest layouts on --world GPUs that fit in memory"
    )
    parser.add_argument(
        "--routing",
        metavar="FILE.jsonl",
        help="metrics.jsonl of an MoE run, whose expert loads decide the busiest rank",
    )
    parser.add_argument(
        "--memory-gib",
        type=float,
        metavar="N",
        help="memory of a GPU that the run must fit in, in GiB (default: the memory of --gpu)",
    )
    parser.add_argument(
        "--tokens",
        type=float,
        metavar="N",
        help="tokens of the whole run, to predict its days, energy and failures (default: train.steps)",
    )
    parser.add_argument(
        "--price",
        type=float,
        metavar="PRICE",
        help="price of one GPU for one hour, to predict the cost (default: log.price_per_device_hour)",
    )
    add_overrides(parser)
    parser.add_alias("--device", "--gpu")
    parser.add_alias("--links", "--cluster")
    parser.add_alias("--write", "--output")
    parser.add_alias("--dry-run", "--simulate-ranks")
    return parser


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    return parser().parse_intermixed_args(argv)


def report(
    config: Config,
    device: DeviceSpec | None,
    cluster: Cluster | None,
    host_size: int,
    memory_gib: float | None = None,
    routing: Routing | None = None,
) -> None:
    """Prints the plan."""
    from rich.console import Console

    if config.model.is_custom and counted_layers(config) is None:
        from megacore.tools.dry_run import own_model

        own_model.report(config)
        return
    makespan, busy = step_times(config)

    train, parallel = config.train, config.parallel
    assert isinstance(parallel.data, int)
    world, step_tokens = config.world_size, train.global_batch_size * train.seq_len
    full, causal = (model_flops(config, c) for c in (False, True))
    assert full is not None
    counted = (
        "three times the products of every layer"
        if causal is None
        else f"{causal * step_tokens:.4g} with attention counted causally"
    )
    console = Console(
        highlight=False, markup=False, soft_wrap=True, width=None if sys.stdout.isatty() else 120
    )
    source = f", of the layers of {config.model.custom_name}" if config.model.is_custom else ""
    console.print(f"parameters    {parameters(config):,}{source}")
    console.print(f"ranks         {world} = {parallel.described()}")
    console.print("\n".join(f"batch         {line}" for line in batch_equations(config)))
    console.print(f"a step        {step_tokens:,} tokens, {full * step_tokens:.4g} model FLOPs ({counted})")
    console.print(f"bubble        {bubble(makespan, busy):.1%} under {parallel.schedule}")
    if warning := bubble_warning(config):
        console.print(warning)
    if device:
        peak = device.peak_flops[train.precision]
        console.print(
            f"step time     at least {makespan / peak:.4g} s on {device.name}: the bubble, and every "
            "product at the dense peak of "
            f"{peak / 1e12:g} TFLOP/s in {train.precision}; without memory traffic and communication"
        )
    console.print()
    loads = loads_of(config, routing)
    memories = rank_memory(config, loads=loads)
    console.print(stage_table(config, memories))
    console.print(peak_text(config, memories) + fit_text(config, device, memory_gib, routing))
    if config.model.num_experts is not None:
        balanced = "those of a balanced load: each expert gets as many tokens"
        fullest = (
            "those of the rank of each stage that gets most rows, in the step of that run in which "
            "it got most"
        )
        console.print(f"\nMemory and traffic are {balanced if routing is None else fullest}.")
    if world > 1 and config.engine.kind != "deepspeed":
        console.print(traffic_table(config, cluster, host_size, loads))
    elif world > 1:
        console.print("\nWhat is sent is predicted for the native engine and fsdp, not for deepspeed.")
    if note := one_level(config, host_size):
        console.print(note)


def stage_table(config: Config, memories: Sequence[RankMemory]) -> "Table":
    """A table of what each rank of the pipeline holds and does, and of its memory."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    tokens = config.rank_tokens
    layers, costs = stage_layers(config), stage_costs(config)
    placement = placement_of(config)
    work = [
        sum(costs[stage].total for stage in stages) * tokens / config.parallel.tensor for stages in placement
    ]
    unit, size = ("GiB", 2**30) if max(m.total for m in memories) >= 2**30 else ("MiB", 2**20)
    flop, scale = ("TFLOP", 1e12) if max(work) >= 1e12 else ("GFLOP", 1e9)
    caption = (
        f"Each pipeline rank at its peak, in {unit}. activ.: kept for backward; working: what the "
        "action at the peak needs;\n"
    )
    caption += f"sends: messages under way; {flop}: forward and backward of a microbatch."
    table = Table(
        caption=caption, caption_justify="left", box=SIMPLE_HEAD, collapse_padding=True, pad_edge=False
    )
    amounts = [memory_parts(memory) for memory in memories]
    shown = [name for name in amounts[0] if any(parts[name] for parts in amounts)]
    for name in ("pp", "layers", "parameters", *shown, flop):
        table.add_column(name, justify="right", no_wrap=True)
    for rank, (stages, count, parts, done) in enumerate(
        zip(placement, rank_parameters(config), amounts, work, strict=True)
    ):
        spans = (
            f"{own.start}–{own.stop - 1}" if len(own) > 1 else str(own.start)
            for own in (layers[stage] for stage in stages)
        )
        table.add_row(
            str(rank),
            ", ".join(spans),
            f"{count:,}" if count < 1e7 else f"{count / 1e6:,.1f} M",
            *(f"{parts[name] / size:.2f}" for name in shown),
            f"{done / scale:.2f}",
        )
    return table


def memory_parts(memory: RankMemory) -> dict[str, int]:
    """The bytes of a rank at its peak, by name, and their sum."""
    peak = memory.peak
    held = {
        "weights": memory.parameters,
        "grads": memory.gradients,
        "optim.": memory.optimizer,
        "compr.": memory.compression,
        "norm": memory.rows,
    }
    fleeting = {
        "activ.": peak.kept,
        "logits": peak.logits,
        "working": peak.working,
        "sends": peak.transfers,
        "gathered": memory.gathered,
    }
    return held | fleeting | {"total": memory.total}


def peak_text(config: Config, memories: Sequence[RankMemory]) -> str:
    """When the fullest rank is fullest, what lives then, and what its device needs besides."""
    rank, memory = max(enumerate(memories), key=lambda pair: pair[1].total)
    peak, chunks = memory.peak, len(memory.peak.live)

    def counted(numbers: tuple[int, ...]) -> str:
        return " and ".join(
            f"{n}" + (f" of chunk {c}" if chunks > 1 else "") for c, n in enumerate(numbers) if n
        )

    alive = [f"{counted(peak.live)} before their backward"] if any(peak.live) else []
    alive += [f"{counted(peak.waiting)} before their weights' gradients"] if any(peak.waiting) else []
    lines = [
        f"The peak is on pipeline rank {rank}, in {peak.moment}. Microbatches alive: {'; '.join(alive)}."
    ]
    if config.train.device != "cpu":
        extra = besides(memory, communicators_of(config))
        parts = ", ".join(
            f"{name} {getattr(extra, name) / 2**30:.2f}"
            for name in ("context", "communicators", "fragmentation")
        )
        lines.append(
            f"A GPU needs {(memory.total + extra.total) / 2**30:.2f} GiB: besides tensors {parts} "
            "(assumed, not measured)."
        )
    return "\n".join(lines) + "\n"


def one_level(config: Config, host_size: int) -> str:
    """A line if `engine.reduce_levels=2` makes no difference on hosts of so many ranks."""
    data = config.token_ranks
    if config.engine.reduce_levels == 1 or data == 1 or data_ranks_of_a_host(config, host_size) > 1:
        return ""
    each = host_size // config.parallel.tensor
    return (
        f"engine.reduce_levels=2 sums in one level here: a host of {host_size} ranks (--host-size) has "
        f"{each} of {data} data ranks."
    )


def traffic_table(
    config: Config, cluster: Cluster | None, host_size: int, loads: Loads = BALANCED
) -> "Table":
    """A table of what each rank of the pipeline sends in a step, by group; over a cluster's links
    also the time, without overlap.
    """
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    traffic = rank_traffic(config, host_size, loads=loads)
    sent, seconds = [sent_by_group(transfers) for transfers in traffic], [dict[str, float]() for _ in traffic]
    caption = "Sent by each rank of the pipeline in a step, in MB."
    if cluster is not None:
        machine = Machine(DeviceSpec("none", {}), cluster, profile("megacore"))  # asked for links alone
        seconds = [seconds_by_group(transfers, config, machine) for transfers in traffic]
        caption = (
            "Sent by each rank of the pipeline in a step, in MB;\nand in seconds over "
            f"{cluster.name}, one transfer after the other."
        )
    table = Table(
        caption=caption, caption_justify="left", box=SIMPLE_HEAD, collapse_padding=True, pad_edge=False
    )
    groups = [
        name
        for name in (
            *KNOWN_GROUPS,
            *sorted({name for own in sent for name in own} - {*KNOWN_GROUPS, *OF_ALL}),
        )
        if any(name in own for own in sent)
    ]
    table.add_column("pp", justify="right")
    for name in groups:
        table.add_column(name, justify="right", no_wrap=True)
    for rank, (amounts, times) in enumerate(zip(sent, seconds, strict=True)):
        timed = {name: f" ({times[name]:.3g} s)" if name in times else "" for name in groups}
        table.add_row(str(rank), *(f"{amounts.get(name, 0.0) / 1e6:,.1f}{timed[name]}" for name in groups))
    return table


def compare_schedules(config: Config, device: DeviceSpec | None) -> None:
    """Prints what every schedule would cost; fastest first."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table

    peak = device.peak_flops[config.train.precision] if device else None
    found = []
    with Progress(*Progress.get_default_columns(), console=Console(stderr=True), transient=True) as progress:
        others = alternatives(config)
        task = progress.add_task("", total=len(others))
        for other in others:
            progress.update(task, description=f"simulating {other.parallel.schedule}")
            other = partitioned(other)  # once, because every prediction asks for it
            found.append((step_times(other), max(rank_memory(other), key=lambda m: m.total), other))
            progress.advance(task)
    found.sort(key=lambda row: (row[0][0], row[1].total))
    longest = found[-1][1]
    unit, size = ("GiB", 2**30) if longest.total >= 2**30 else ("MiB", 2**20)
    at_peak = f", at their peak on {device.name}" if device else ""
    caption = f"Simulated with each stage's products as its time{at_peak}; without transfers.\n"
    table = Table(
        caption=caption + f"Memory of the fullest rank, in {unit}.",
        caption_justify="left",
        box=SIMPLE_HEAD,
        pad_edge=False,
    )
    step = "step, s" if peak else "step, PFLOP"
    for name in ("schedule", "chunks", "bubble", step, "of this config's", "activations", "memory"):
        table.add_column(name, justify="left" if name == "schedule" else "right", no_wrap=True)
    own = step_times(config)[0]
    for (makespan, busy), memory, other in found:
        table.add_row(
            other.parallel.schedule,
            str(other.chunks),
            f"{bubble(makespan, busy):.1%}",
            f"{makespan / (peak or 1e15):.4g}",
            f"{makespan / own:.3f}",
            f"{memory.activations / size:.2f}",
            f"{memory.total / size:.2f}",
        )
    Console(highlight=False, markup=False, soft_wrap=True, width=None if sys.stdout.isatty() else 120).print(
        table
    )


def run(argv: list[str]) -> int:
    """Everything that the script does; returns its exit status. Raises `UserError`."""
    args = parse(argv)
    if args.world is not None and args.world < 1:
        raise ConfigError("--world", f"{args.world} ranks cannot run anything", "a positive number")
    if args.host_size < 1:
        raise ConfigError("--host-size", f"{args.host_size} ranks cannot run anything", "a positive number")
    for name in AMOUNTS:
        value = getattr(args, name)
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(f"--{name.replace('_', '-')}", f"{value} is not usable", "a number above 0")
    if args.search:
        return search(args)
    for name in ("tokens", "price"):
        if getattr(args, name) is not None and None in (args.gpu, args.cluster):
            raise ConfigError(
                f"--{name}", "days and money follow from a predicted step", "also --gpu and --cluster"
            )
    if (
        args.routing is not None
        and args.gpu is None
        and args.memory_gib is None
        and args.simulate_ranks is None
    ):
        wrong = (
            "a run's loads decide how long a step takes and whether the fullest rank's memory "
            "suffices, and no device is named"
        )
        raise ConfigError(
            "--routing",
            wrong,
            "also --gpu, with --cluster for a step's time; or --memory-gib; or --simulate-ranks",
        )
    fewest = smallest_world(args.config, args.overrides) if args.world is None else None
    config = partitioned(load(args.config, args.overrides, fewest or args.world).config)
    if config.model.is_custom:
        check_source(config, args)
    if None not in (args.gpu, args.cluster):
        refuse_experts(config)
    device = None if args.gpu is None else read_device(args.gpu)
    if device is not None and config.train.precision not in device.peak_flops:
        wrong, known = (
            f"the {config.train.precision} peak of {device.name} is not known",
            ", ".join(device.peak_flops),
        )
        raise ConfigError("--gpu", wrong, f"train.precision is one of {known}, or another device")
    if device is None and args.calibrate:
        raise ConfigError(
            "--gpu", "a step is predicted for a device", f"also --gpu, such as {device_names()[0]}"
        )
    if args.calibrate and not args.cluster:
        raise ConfigError(
            "--cluster",
            "a run is explained by its device and its links",
            f"also --cluster, such as {cluster_names()[0]}",
        )
    routing = None if args.routing is None else read_routing(args.routing, config.model.num_experts)
    if args.simulate_ranks is not None:
        refuse_beside(
            "--simulate-ranks",
            args,
            ("gpu", "cluster", "calibrate", "compare_schedules", "output", "plot", "memory_gib"),
        )
        return dry_run(config, args.simulate_ranks, args.host_size, fewest, routing)
    if args.compare_schedules:
        refuse_beside("--compare-schedules", args, ("cluster", "calibrate", "memory_gib", "routing"))
    cluster = None if args.cluster is None else read_cluster(args.cluster)
    if device is not None and cluster is not None:
        warn_of_links(device, cluster)
    if args.output is not None:
        check_output("--output", args.output)
    if args.plot is not None:
        check_plot("--plot", args.plot)
        if (actions := 2 * config.num_microbatches * config.chunks) > MOST_DRAWN:
            wrong = f"{actions:,} actions of a rank are more than a picture shows"
            raise ConfigError(
                "--plot",
                wrong,
                f"at most {MOST_DRAWN:,}: a smaller train.global_batch_size draws the same pattern",
            )
    predicted = ""
    if device is not None and cluster is not None:
        predicted = step_report(config, device, cluster, args.calibrate, args.tokens, args.price, routing)
    print_default_world(fewest)
    if args.output is not None:
        write_plan("--output", args.output, plan_of(config))
        print(f"plan written in {args.output}")
    if args.compare_schedules:
        compare_schedules(config, device)
    else:
        report(config, device, cluster, args.host_size, args.memory_gib, routing)
    print(predicted, end="")
    if args.plot is not None:
        plot(config, simulated(config, plan_of(config)), args.plot)
    return 0


def print_default_world(fewest: int | None) -> None:
    """Print how many ranks the plan is for, unless `--world` says it and `fewest` is None."""
    if fewest is None:
        return
    ranks = "1 rank" if fewest == 1 else f"{fewest:,} ranks"
    print(f"plan for {ranks}, the fewest that this config fits; --world N plans for N ranks\n")


def warn_of_links(device: DeviceSpec, cluster: Cluster) -> None:
    """Says on stderr if these links are those of other devices."""
    if warning := links_warning(device, cluster):
        print(warning, file=sys.stderr)


def check_source(config: Config, args: argparse.Namespace) -> None:
    """Raises `ConfigError` if the file of a model of the user's own is wrong, and for what nobody
    knows of layers that need content.
    """
    from megacore.tools.choices.counting import why_uncounted  # imports torch, as the next does
    from megacore.tools.dry_run.own_model import check

    check(config)
    options = ("search", "gpu", "cluster", "calibrate", "compare_schedules", "plot", "memory_gib")
    if (
        beside := [f"--{name.replace('_', '-')}" for name in options if getattr(args, name)]
    ) and counted_layers(config) is None:
        wrong = (
            f"the layers of {config.model.custom_key} do not run on tensors without content: "
            f"{why_uncounted(config)}"
        )
        raise ConfigError(beside[0], wrong, f"without {', '.join(beside)}")


def refuse_beside(option: str, args: argparse.Namespace, others: tuple[str, ...]) -> None:
    """Raises `ConfigError` for options that would have no effect beside this one."""
    if beside := [f"--{name.replace('_', '-')}" for name in others if getattr(args, name)]:
        raise ConfigError(
            option, f"{', '.join(beside)} would have no effect beside it", "one after the other"
        )


def search(args: argparse.Namespace) -> int:
    """Finds layouts; the config's own is set aside."""
    from megacore.tools.planner.profile import profile
    from megacore.tools.planner.search_report import report

    refuse_beside("--search", args, ("calibrate", "compare_schedules", "output", "simulate_ranks"))
    if args.price is not None and args.tokens is None:
        raise ConfigError("--price", "money is that of a whole run", "also --tokens, such as 1e12")
    if args.world is None or args.world < 1:
        raise ConfigError("--world", f"{args.world or 'no'} devices cannot be searched", "a positive number")
    device = read_device(args.gpu or DEVICE)
    cluster = read_cluster(args.cluster or CLUSTER) if args.cluster or args.world == 1 else cluster_of(device)
    warn_of_links(device, cluster)
    smallest_world(args.config, args.overrides)  # what is set aside must be values all the same
    alone = [f"parallel.{axis}=1" for axis in ("tensor", "pipeline", "context", "data")]
    alone += ["parallel.expert=1", "parallel.expert_tensor=null", "parallel.expert_halves=false"]
    alone += ["parallel.sequence=false", "parallel.schedule=1f1b"]
    config = load(
        args.config, [*args.overrides, *alone, "parallel.chunks=1", "train.micro_batch_size=1"], 1
    ).config
    if config.model.is_custom:
        check_source(config, args)
    if config.engine.kind == "deepspeed":
        raise ConfigError("engine.kind", "the search lays out the native engine and fsdp", "native")
    if args.plot is not None:
        check_plot("--plot", args.plot)
    command = " ".join((args.config, *map(shlex.quote, args.overrides)))
    routing = None if args.routing is None else read_routing(args.routing, config.model.num_experts)
    found, limit = report(
        config,
        command,
        args.world,
        device,
        cluster,
        profile(),
        args.memory_gib,
        args.tokens,
        args.price,
        routing,
    )
    if args.plot is not None:
        from megacore.tools.planner.search_plot import draw_search

        drawn("search", args.plot, lambda path: draw_search(found, limit, path))
    return 0


def dry_run(
    config: Config, ranks: str, host_size: int, fewest: int | None, routing: Routing | None = None
) -> int:
    """Run ranks of the mesh in this process. `fewest` is the world's size if `--world` does not say it.

    Returns 1 if the ranks do not do what the formulas say, or would hang.
    """
    from megacore.tools.dry_run.dry_report import parse_ranks, report  # imports torch

    parse_ranks(ranks, config.world_size)  # a mistake ends the script before it prints
    print_default_world(fewest)
    wrong = report(config, ranks, host_size, routing)
    if note := one_level(config, host_size):
        print(note)
    print(*wrong, sep="\n", end="\n" if wrong else "", file=sys.stderr)
    return 1 if wrong else 0


def plot(config: Config, timeline: Timeline, path: str) -> None:
    """Draws the schedule."""
    from megacore.tools.planner.plot import draw

    drawn("schedule", path, lambda path: draw(timeline, config.parallel.schedule, path, unit="FLOP"))


def drawn(what: str, path: str, draw: Callable[[str], None]) -> None:
    """Draws a picture, and says where. Raises `ConfigError` if it cannot be written."""
    try:
        with replaced(path) as aside:
            draw(aside)
    except OSError as error:
        raise ConfigError(
            "--plot", f"cannot write {path}: {error.strerror}", "a writable path ending in .png, .svg or .pdf"
        ) from error
    print(f"{what} drawn in {path}")


if __name__ == "__main__":
    exit_with(run)
