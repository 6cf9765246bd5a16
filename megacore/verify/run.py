"""The proof from start to end: a small case, the reference, every layout, and a search where one is found to differ."""

import contextlib
import math
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from megacore.config import load
from megacore.errors import ConfigError
from megacore.verify.compare import Difference, Records, against_reference, missing, rank_by_rank
from megacore.verify.layouts import Layout, impossible
from megacore.verify.locate import Parting, first_parting
from megacore.verify.shrink import load_whole, shrink, write_case
from megacore.verify.workers import RankFailed, Workers

ROOT = Path(__file__).resolve().parents[2]
STEPS = 3
Key = tuple[str, int, str]  # kind, step, name
# fp64 rounds to 1e-16; sums over some thousand terms in another order, through a few blocks and three updates, stay well below.
BOUND = 1e-9
# In bf16 a layout may be as wrong as one process in bf16 is, measured against fp64 at the tensor of the same kind that fares worst,
# up to this factor: rounding errors are random, and a layout rounds each partial sum once more. One unit in the last place is
# always allowed.
BF16_FACTOR, BF16_ULP = 3.0, 2.0**-8


@dataclass(frozen=True)
class Options:
    """What to prove."""

    config: str
    overrides: list[str]
    layouts: list[Layout]
    precision: str = "fp64"
    against: Path | None = None
    plant: str | None = None  # "module:function", see `worker.planted`


@dataclass
class Result:
    """What was found of one layout."""

    layout: Layout
    differences: dict[Key, Difference] = field(default_factory=dict)  # the worst rank's, by key
    beyond: list[Difference] = field(default_factory=list)  # those beyond their bound, in the order of a run
    missing: list[str] = field(default_factory=list)
    failure: RankFailed | None = None
    impossible: str | None = None
    parting: Parting | None = None

    @property
    def equal(self) -> bool:
        """Whether nothing speaks against the layout."""
        return self.failure is None and not self.beyond and not self.missing


@dataclass
class Proof:
    """All results, and what they are about."""

    options: Options
    names: list[str]  # parameters, in the model's order
    results: list[Result]

    @property
    def holds(self) -> bool:
        """The verdict."""
        return all(result.equal for result in self.results) and any(result.impossible is None for result in self.results)


def prove(options: Options, told: Callable[[Result], None] = lambda _: None, workers: Workers | None = None) -> Proof:
    """Runs everything; `told` hears of each layout when it is done. Raises `ConfigError` for what the user got wrong.

    `workers` of this checkout may be given, and live on; else they are started and ended here.
    """
    user = load_whole(options.config, options.overrides)
    reasons = {layout.name: impossible(layout, user) for layout in options.layouts}
    possible = [layout for layout in options.layouts if reasons[layout.name] is None]
    if not possible:
        raise ConfigError("--layouts", f"none is possible: {reasons[options.layouts[0].name]}", "layouts that divide the model")
    folder = Path(tempfile.mkdtemp(prefix="megacore_verify_"))
    try:
        case = write_case(folder, shrink(user, possible, STEPS, options.precision))
        for layout in possible:
            load(str(case), layout.overrides(), layout.world)  # refuses before anything starts
        with contextlib.ExitStack() as stack:
            ours = workers or stack.enter_context(Workers(ROOT))
            others = stack.enter_context(Workers(options.against.resolve())) if options.against else None
            prover = Prover(options, folder, case, ours, others)
            proof = Proof(options, prover.order, [])
            for layout in options.layouts:
                reason = reasons[layout.name]
                result = Result(layout, impossible=reason) if reason else prover.examine(layout)
                proof.results.append(result)
                told(result)
        return proof
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class Prover:
    """Runs a case in one layout after the other and compares."""

    def __init__(self, options: Options, folder: Path, case: Path, workers: Workers, others: Workers | None) -> None:
        self.options, self.folder, self.case = options, folder, case
        self.workers, self.others = workers, others  # `others` run the checkout that is compared with
        self.reference = self._run(self.workers, "reference", Layout("reference"))
        self.explained: dict[tuple[str, int], float] = {}  # bf16: the largest error of one process, by kind and step
        if options.precision != "fp64":
            alone = self._run(self.workers, "one", Layout("one"))
            for d in against_reference(alone, self.reference):
                self.explained[d.kind, d.step] = max(self.explained.get((d.kind, d.step), BF16_ULP), d.relative)

    @cached_property
    def order(self) -> list[str]:
        """The parameters, in the order of the model."""
        return [key.partition("|")[2] for key in self.reference.places[0] if key.startswith("parameter 0|")]

    def bound(self, difference: Difference) -> float:
        """The largest difference of this tensor that is rounding."""
        if self.options.precision == "fp64":
            return BOUND
        explained = self.explained.get((difference.kind, difference.step), BF16_ULP)
        return BF16_FACTOR * explained if math.isfinite(explained) else BF16_ULP  # nothing explains what is not a number

    def when(self, difference: Difference) -> tuple[int, int, int]:
        """Sorts differences as they come about in a run, and then as the model is written."""
        name = difference.name
        return *difference.moment, self.order.index(name) if name in self.order else -1

    def examine(self, layout: Layout) -> Result:
        """Runs a layout and, where it differs, finds out where first."""
        result = Result(layout)
        try:
            ours = self._run(self.workers, layout.name, layout)
            if self.others is None:
                found = against_reference(ours, self.reference)
                result.missing = missing(ours, self.reference)
            else:
                found = rank_by_rank(ours, self._run(self.others, f"{layout.name}_other", layout))
            result.differences = worst(found)
            result.beyond = sorted((d for d in result.differences.values() if d.relative > self.bound(d)), key=self.when)
            if result.beyond and result.beyond[0].name != "valid_loss" and result.beyond[0].kind in ("gradient", "figure"):
                self._locate(result, result.beyond[0].step)
        except RankFailed as failure:
            result.failure = failure
        return result

    def _locate(self, result: Result, step: int) -> None:
        """Traces the step whose loss, gradients or norm are the first to differ."""
        layout = result.layout
        traced = self._run(self.workers, f"{layout.name}_traced", layout, step, read=False)
        same = self.others is not None
        if self.others is not None:
            reference = self._run(self.others, f"{layout.name}_other_traced", layout, step, read=False)
        else:
            reference = self._run(self.workers, "reference_traced", Layout("reference"), step, read=False)
        bound = BOUND if self.options.precision == "fp64" else self._activations_bound(reference, step)
        result.parting = first_parting(traced, layout.world, layout.tensor, reference, bound, same_layout=same)

    def _activations_bound(self, reference: Path, step: int) -> float:
        """In bf16, what the worst activation or gradient of one process is off by."""
        one = self._run(self.workers, "one_traced", Layout("one"), step, read=False)
        low, high = BF16_ULP, 1.0
        while high - low > 0.01:  # the smallest bound under which one process parts nowhere
            middle = (low + high) / 2
            low, high = (low, middle) if first_parting(one, 1, 1, reference, middle) is None else (middle, high)
        return BF16_FACTOR * high

    def _run(self, workers: Workers, name: str, layout: Layout, traced_step: int | None = None, *, read: bool = True) -> Any:
        """Runs a layout, or the reference; its records, or with `read` False the folder that they and the traces are in."""
        out = self.folder / name
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()
        task = {
            "kind": "reference" if layout.name == "reference" else "layout",
            "config": str(self.case),
            "overrides": layout.overrides(),
            "out": str(out),
            "rounding": self.options.precision,
            "traced_step": traced_step,
            "plant": self.options.plant,
        }
        try:
            workers.run(layout.world, task)
        except RankFailed as failure:
            if workers is self.others:
                failure.args = (f"{workers.checkout}: {failure}",)
            raise
        return Records(out, layout.world) if read else out


def worst(differences: list[Difference]) -> dict[Key, Difference]:
    """Of each tensor the rank that is furthest off."""
    found: dict[Key, Difference] = {}
    for difference in differences:
        key = (difference.kind, difference.step, difference.name)
        if key not in found or difference.relative > found[key].relative:
            found[key] = difference
    return found
