"""Compares megacore's speed with a plain PyTorch loop's, with itself on one rank, and
with what its schedule predicts.

Each comparison is a race: every contender in processes of its own, which take turns of one training step in
interleaved rounds, so that whatever else the machine does meets all of them. A ratio is taken within each
round; its median counts.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import machine
from benchmarks.memory import ENGINES
from benchmarks.peers.process import SETTINGS
from benchmarks.rounds import ROOT, Contender, Failed, Processes, Record, race
from megacore.errors import ConfigError
from megacore.pipeline.generators import GENERATORS, build
from megacore.tools.cli import Parser, exit_with
from megacore.tools.crowd import OPENMPS_OWN
from megacore.tools.output_files import check_output
from megacore.tools.schedules.simulate import simulate
from megacore.tools.settings.load import load

EXAMPLE = "python -m benchmarks.speed --quick"
TINY = str(ROOT / "configs" / "gpt_tiny.json")
CONFIG = str(ROOT / "benchmarks" / "speed.json")
SETTING = load(CONFIG).config
TOKENS = SETTING.train.global_batch_size * SETTING.train.seq_len  # of a step
DOUBLE_BATCH = f"train.global_batch_size={2 * SETTING.train.global_batch_size}"


@dataclass(frozen=True)
class Ratio:
    """A comparison's result. `target` None: shown for information."""

    name: str
    meaning: str  # of what it is a multiple
    values: list[float]  # of every round
    target: float | None = None
    details: dict[str, Any] = field(default_factory=dict)  # for JSON

    @property
    def median(self) -> float:
        return median(self.values)


Say = Callable[[str], None]
Result = tuple[list[Ratio], dict[str, Record], list[list[float]]]


def raced(
    contenders: list[Contender], rounds: int, say: Say, rivals: Sequence[Sequence[str]] = ()
) -> tuple[dict[str, Record], list[list[float]]]:
    """`race` in which everybody must run: raises `Failed` otherwise."""
    result = race(contenders, CONFIG, rounds, say, rivals)
    for name, reason in result.failures.items():
        raise Failed(f"{name}: {reason}")
    return result.records, result.loads


def per_round(records: dict[str, Record], faster: str, slower: str) -> list[float]:
    """Tokens a second of `faster` over those of `slower`, in every round."""
    a, b = records[faster], records[slower]
    return [
        (a.contender.tokens / x) / (b.contender.tokens / y) for x, y in zip(a.seconds, b.seconds, strict=True)
    ]


def against_plain(precision: str, rounds: int, say: Say) -> Result:
    """One process, two threads, against the plain loop as it is, and with the settings of megacore's process.

    In bf16 each time against the better of the loop's two ways to do that.
    """
    override = (f"train.precision={precision}",)
    kinds = {f"plain loop, {precision}": "transformers"}
    if precision != "fp32":
        kinds = {
            f"plain loop, {precision} weights": "transformers-low",
            f"plain loop, {precision} autocast": "transformers",
        }
    ours = f"megacore, {precision}"
    contenders = [Contender(ours, "megacore", TOKENS, override, threads=2)]
    rivals: dict[str, list[str]] = {}
    for settings, words in SETTINGS.items():
        rivals[settings] = [f"{name}, {words}" for name in kinds]
        pairs = zip(rivals[settings], kinds.values(), strict=True)
        contenders += [
            Contender(name, kind, TOKENS, override, threads=2, settings=settings) for name, kind in pairs
        ]
    records, loads = raced(contenders, rounds, say, list(rivals.values()))
    ratios = [
        Ratio(f"one process, {precision}", f"of the {rival}", per_round(records, ours, rival), 1.0)
        for rival in records.keys() - {ours}
    ]
    return sorted(ratios, key=lambda ratio: ratio.meaning), records, loads


def fp32(rounds: int, say: Say) -> Result:
    """See `against_plain`."""
    return against_plain("fp32", rounds, say)


def bf16(rounds: int, say: Say) -> Result:
    """See `against_plain`."""
    return against_plain("bf16", rounds, say)


def scaling(rounds: int, say: Say) -> Result:
    """Two ranks of one thread against one rank of one thread; two runs that share only the
    memory show what the machine allows.
    """
    one, apart, weak, strong, tensor = (
        "one rank",
        "two runs side by side",
        "data=2, double batch",
        "data=2, same batch",
        "tensor=2",
    )
    contenders = [
        Contender(one, "megacore", TOKENS),
        Contender(apart, "megacore", 2 * TOKENS, ranks=2, apart=True),
        Contender(weak, "megacore", 2 * TOKENS, ("parallel.data=2", DOUBLE_BATCH), ranks=2),
        Contender(strong, "megacore", TOKENS, ("parallel.data=2",), ranks=2),
        Contender(tensor, "megacore", TOKENS, ("parallel.tensor=2",), ranks=2),
    ]
    records, loads = raced(contenders, rounds, say)
    ratios = [
        Ratio("data=2, weak scaling", "of one rank", per_round(records, weak, one), 1.9),
        Ratio("data=2, strong scaling", "of one rank", per_round(records, strong, one)),
        Ratio("two runs side by side", "of one", per_round(records, apart, one)),
        Ratio("tensor=2", "of twice one rank", [r / 2 for r in per_round(records, tensor, one)], 0.6),
    ]
    return ratios, records, loads


def pipeline(rounds: int, say: Say) -> Result:
    """Two stages of one thread against the simulated schedule, fed with what each
    stage takes when it is alone.

    The prediction leaves out transfers, the tied embeddings' reduction and the optimizer: the measured step
    has them.
    """
    layers = "model.num_layers=8"
    contenders = [
        Contender(
            "the stages, one by one",
            "two-stages",
            2 * SETTING.train.micro_batch_size * SETTING.train.seq_len,
            (layers,),
        ),
        Contender("pipeline=2", "megacore", TOKENS, (layers, "parallel.pipeline=2"), ranks=2),
    ]
    records, loads = raced(contenders, rounds, say)
    forward, backward, *_ = alone(records.pop("the stages, one by one"))
    plan = build(SETTING.parallel.schedule, 2, SETTING.num_microbatches)
    timeline = simulate(plan, forward, backward)
    say(
        "alone: "
        + ", ".join(f"stage {i} forward {forward[i]:.4f} s, backward {backward[i]:.4f} s" for i in range(2))
    )
    say(f"simulated step: {timeline.makespan:.3f} s, of which the stages wait {timeline.bubble_rate:.1%}")
    values = [timeline.makespan / seconds for seconds in records["pipeline=2"].seconds]
    details = {
        "forward_seconds": forward,
        "backward_seconds": backward,
        "simulated_step_seconds": timeline.makespan,
    }
    return [Ratio("pipeline=2, 8 layers", "of the simulated schedule", values, 0.8, details)], records, loads


def alone(record: Record) -> list[list[float]]:
    """Median seconds of forward, of backward and of its two halves, each for every
    stage; see `LoneStage.measure`.
    """
    times = [median(values) for values in zip(*record.turns, strict=True)]
    return [times[kind::4] for kind in range(4)]


def schedules(rounds: int, say: Say) -> Result:
    """Two ranks of one thread under every schedule, against 1F1B, beside what is
    simulated from the stages' own times.

    The prediction leaves out transfers, the tied embeddings' reduction and the optimizer: the measured steps
    have them.
    """
    layers, stages = "model.num_layers=8", {2: "two stages, one by one", 4: "four stages, one by one"}
    contenders = [Contender(name, f"{name.split()[0]}-stages", TOKENS, (layers,)) for name in stages.values()]
    for name in GENERATORS:
        contenders.append(
            Contender(
                name,
                "megacore",
                TOKENS,
                (layers, "parallel.pipeline=2", f"parallel.schedule={name}"),
                ranks=2,
            )
        )
    records, loads = raced(contenders, rounds, say)
    times = {count: alone(records.pop(name)) for count, name in stages.items()}
    predicted = {}
    for name in GENERATORS:
        plan = build(name, 2, SETTING.num_microbatches)
        forward, whole, inputs, weights = times[plan.stages]
        split = [a + b for a, b in zip(inputs, weights, strict=True)]
        predicted[name] = simulate(plan, forward, split if plan.splits else whole, weight=weights).makespan
    ratios = []
    for name in GENERATORS:
        expected = predicted["1f1b"] / predicted[name]
        details = {"simulated_ratio": expected, "simulated_step_seconds": predicted[name]}
        ratios.append(
            Ratio(
                name, f"of 1f1b (simulated: {expected:.3f})", per_round(records, name, "1f1b"), None, details
            )
        )
    return ratios, records, loads


def engines(rounds: int, say: Say) -> Result:
    """Two data ranks of one thread under each engine, against the native one with whole optimizer state."""
    names = [name for name in ENGINES if find_spec("deepspeed") or "deepspeed" not in name]
    contenders = [
        Contender(name, "megacore", TOKENS, ("parallel.data=2", *ENGINES[name]), ranks=2) for name in names
    ]
    records, loads = raced(contenders, rounds, say)
    native, sharded, *_ = names
    ratios = [
        Ratio(name, "of native", per_round(records, name, native), 0.97 if name == sharded else None)
        for name in names[1:]
    ]
    return ratios, records, loads


@contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """So many processes that take a core each for as long as it lasts."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def busy(rounds: int, say: Say) -> Result:
    """A small model beside 0, 2 and 8 busy loops: as it comes, against other numbers of
    threads and other ways to wait.
    """
    train, tensor = load(TINY).config.train, "parallel.tensor=2"
    shared = "megacore", train.global_batch_size * train.seq_len
    contenders = [
        Contender("one process", *shared, threads=None),
        Contender("1 thread", *shared),
        Contender("2 threads, passive", *shared, threads=2, environment={"OMP_WAIT_POLICY": "passive"}),
        Contender("2 threads, OpenMP's own waiting", *shared, threads=2, environment=OPENMPS_OWN),
        Contender("tensor=2", *shared, (tensor,), ranks=2),
        Contender("tensor=2 by gloo", *shared, (tensor, "parallel.shared_memory=false"), ranks=2),
    ]
    records: dict[str, Record] = {}
    ratios: list[Ratio] = []
    loads: list[list[float]] = []
    with ExitStack() as running:
        started = [
            running.enter_context(closing(Processes(contender, TINY, 1800.0))) for contender in contenders
        ]
        for each in started:
            each.wait_until_ready()
            each.turn(Record(each.contender))
        for count in (0, 2, 8):
            new = {each.contender.name: Record(each.contender, process=each.process) for each in started}
            with busy_loops(count):
                # the first turn is a warm-up: threads are fitted between steps
                for number in range(-1, rounds):
                    loads.append(list(os.getloadavg()))
                    say(
                        f"beside {count} loops, round {number + 1} of {rounds}; load average of the last "
                        f"minute {loads[-1][0]:.2f}"
                    )
                    for each in started[:: 1 if number % 2 else -1]:
                        each.turn(new[each.contender.name] if number >= 0 else Record(each.contender))
            for ours, others in (("one process", contenders[1:4]), ("tensor=2", contenders[5:])):
                best = min((other.name for other in others), key=lambda name: median(new[name].seconds))
                values = per_round(new, ours, best)
                ratios.append(
                    Ratio(
                        f"{ours}, {count} loops",
                        f"of {best}, the best of the others",
                        values,
                        0.5 if count else 0.97,
                    )
                )
            records |= {f"{name}, {count} loops": record for name, record in new.items()}
    return ratios, records, loads


COMPARISONS: dict[str, Callable[[int, Say], Result]] = {
    "fp32": fp32,
    "bf16": bf16,
    "scaling": scaling,
    "pipeline": pipeline,
    "schedules": schedules,
    "engines": engines,
    "busy": busy,
}


def tables(records: dict[str, Record], ratios: list[Ratio]) -> list[Table]:
    """Speeds, and the ratios against their targets."""
    speeds = Table("tokens a second", "ranks × threads")
    for column in ("median", "low", "high", "step, s", "MB"):
        speeds.add_column(column, justify="right")
    for name, record in records.items():
        summary, shape = (
            record.summary(),
            f"{record.contender.ranks} × {record.contender.threads or 'its own'}",
        )
        values = [f"{summary['tokens_per_second'][which]:,.0f}" for which in ("median", "lowest", "highest")]
        speeds.add_row(
            name, shape, *values, f"{median(record.seconds):.3f}", f"{record.memory_bytes / 1e6:,.0f}"
        )
    results = Table("ratio of tokens a second")
    for column in ("median", "low", "high", "target"):
        results.add_column(column, justify="right")
    results.add_column("")
    for ratio in ratios:
        values = [f"{v:.3f}" for v in (ratio.median, min(ratio.values), max(ratio.values))]
        reached = "" if ratio.target is None else "reached" if ratio.median >= ratio.target else "missed"
        results.add_row(
            f"{ratio.name}, {ratio.meaning}",
            *values,
            "" if ratio.target is None else f"{ratio.target:g}",
            reached,
        )
    return [speeds, results]


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = Parser(
        "Compare megacore's speed with a plain PyTorch loop and with its own predictions.",
        example=EXAMPLE,
        notes="Contenders take turns, one step each, in interleaved rounds. The median of each round's ratio "
        "counts.",
        page="benchmarks/README.md",
    )
    parser.add_argument("--quick", action="store_true", help="measure 3 rounds instead of 7")
    parser.add_argument(
        "--only",
        nargs="+",
        choices=COMPARISONS,
        default=list(COMPARISONS),
        metavar="NAME",
        help=f"some of {', '.join(COMPARISONS)} (default: all)",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE.json",
        help="results to write (default: benchmarks/results/speed_DATE.json)",
    )
    args = parser.parse_args(argv)
    if find_spec("transformers") is None and {"fp32", "bf16"} & set(args.only):
        wrong = "transformers, which has the plain loop's model, is not installed"
        raise ConfigError("--only", wrong, "pip install -e '.[benchmark]', or --only scaling pipeline")
    if args.output is not None:
        check_output("--output", str(args.output))
    return args


def main(argv: list[str]) -> None:
    """Runs the comparisons, shows them and writes them down."""
    args = parse(argv)
    console = Console(highlight=False, markup=False, soft_wrap=True)
    report: dict[str, Any] = machine.describe() | {
        "setting": SETTING.model_dump(by_alias=True, include={"model", "train", "optim"})
    }
    console.print(
        f"{report['machine']['processor']}, {report['machine']['cores']} cores, torch "
        f"{report['versions']['torch']}"
    )
    records: dict[str, Record] = {}
    ratios: list[Ratio] = []
    report["loads"] = {}
    for name in args.only:
        console.rule(name, align="left")
        new_ratios, new_records, report["loads"][name] = COMPARISONS[name](
            3 if args.quick else 7, console.print
        )
        records |= new_records
        ratios += new_ratios
    for table in tables(records, ratios):
        console.print(table)
    report["contenders"] = {name: record.summary() for name, record in records.items()}
    report["ratios"] = [asdict(ratio) | {"median": ratio.median} for ratio in ratios]
    output = args.output or ROOT / "benchmarks" / "results" / f"speed_{report['date'][:10]}.json"
    output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    console.print(f"written to {output}")


if __name__ == "__main__":
    exit_with(main)
