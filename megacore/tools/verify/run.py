"""Runs a proof: makes a small case, runs the reference and every layout, and locates differences."""

import contextlib
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from megacore.config.implied import has_masks
from megacore.errors import ConfigError
from megacore.files import ROOT
from megacore.tools.settings.load import load
from megacore.tools.verify.compare import (
    ROUTING,
    Difference,
    Records,
    against_reference,
    missing,
    rank_by_rank,
)
from megacore.tools.verify.first_divergence import Parting, first_parting
from megacore.tools.verify.flight import in_flight
from megacore.tools.verify.layouts import Layout, impossible
from megacore.tools.verify.replay import Replay, cancelled, directions, undirected
from megacore.tools.verify.shrink import load_whole, shrink, write_case
from megacore.tools.verify.tolerances import BF16_ULP, Bounds
from megacore.tools.verify.workers import ProofWorkers, RankFailed

STEPS = 3
Key = tuple[str, int, str]  # kind, step, name


@dataclass(frozen=True)
class Options:
    """The options of a proof."""

    config: str
    overrides: list[str]
    layouts: list[Layout]
    precision: str = "fp64"
    against: Path | None = None
    plant: str | None = None  # "module:function", see `worker.planted`


@dataclass(frozen=True)
class Race:
    """A difference between two runs of one layout: where it is first, and what was under way then."""

    difference: Difference
    in_flight: list[str]
    checkout: Path | None  # the one of two compared checkouts whose code it is


@dataclass
class Result:
    """The findings about one layout."""

    layout: Layout
    differences: dict[Key, Difference] = field(default_factory=dict)  # the worst rank's, by key
    beyond: list[Difference] = field(
        default_factory=list
    )  # differences beyond their bound, in the order of a run
    missing: list[str] = field(default_factory=list)
    failure: RankFailed | None = None
    impossible: str | None = None
    not_replayed: str = ""  # what of a 16-bit run could not be computed again
    parting: Parting | None = None
    race: Race | None = None

    @property
    def equal(self) -> bool:
        """Whether the layout has no fault."""
        return self.failure is None and not self.beyond and not self.missing


@dataclass
class Proof:
    """All results of a proof."""

    options: Options
    names: list[str]  # parameters, in the model's order
    results: list[Result]
    undirected: dict[str, int] = field(
        default_factory=dict
    )  # parameters whose updates' directions are not compared, by their rules

    @property
    def holds(self) -> bool:
        """Whether all layouts are equal, and at least one was possible."""
        return all(result.equal for result in self.results) and any(
            result.impossible is None for result in self.results
        )


def prove(
    options: Options, told: Callable[[Result], None] = lambda _: None, workers: ProofWorkers | None = None
) -> Proof:
    """Runs a proof. `told` is called with each layout's result. Raises `ConfigError` if the user got something wrong.

    `workers` of this checkout may be given, and are kept; otherwise they are started and ended here.
    """
    user = load_whole(options.config, options.overrides)
    layouts = list(options.layouts)
    if (
        options.precision != "fp64"
        and options.against is None
        and all(layout.world > 1 for layout in layouts)
    ):
        layouts.append(Layout("one"))  # others are measured by it, so it must be right too
    reasons = {layout.name: impossible(layout, user) for layout in layouts}
    possible = [layout for layout in layouts if reasons[layout.name] is None]
    if not possible:
        first = layouts[0].name
        raise ConfigError(
            "--layouts",
            f"none is possible: in {first}, {reasons[first]}",
            "layouts that suit the model, such as one",
        )
    folder = Path(tempfile.mkdtemp(prefix="megacore_verify_"))
    try:
        case = write_case(folder, shrink(user, possible, STEPS, options.precision), has_masks(user))
        for layout in possible:
            load(str(case), layout.overrides(), layout.world)  # refuses before anything starts
        with contextlib.ExitStack() as stack:
            ours = workers or stack.enter_context(ProofWorkers(ROOT))
            others = stack.enter_context(ProofWorkers(options.against.resolve())) if options.against else None
            prover = Prover(options, folder, case, ours, others)
            compared = options.precision == "fp64" or options.against is not None
            proof = Proof(
                options, prover.order, [], {} if compared else undirected(prover.config.optim, prover.trained)
            )
            for layout in layouts:
                reason = reasons[layout.name]
                result = Result(layout, impossible=reason) if reason else prover.examine(layout)
                proof.results.append(result)
                told(result)
        return proof
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class Prover:
    """Runs a case in one layout after the other and compares."""

    def __init__(
        self, options: Options, folder: Path, case: Path, workers: ProofWorkers, others: ProofWorkers | None
    ) -> None:
        self.options, self.folder, self.case = options, folder, case
        self.workers, self.others = workers, others  # `others` run the checkout that is compared with
        self.config = load(str(case)).config
        self.reference = self._run(self.workers, "reference", Layout("reference"))
        sizes = {name: self.reference.whole[f"parameter 0|{name}"].size for name in self.order}
        moments = cancelled(self.reference, self.config.optim, self.order)
        rounds = self.config.engine.reduce_dtype == "bf16"
        self.bounds = Bounds(options.precision, self.config.model.num_layers, sizes, moments, rounds=rounds)
        self.alone: Records | None = None
        if options.precision != "fp64":
            self.alone = self._run(self.workers, "one", Layout("one"))
            self.bounds.explain(self._apart(self.alone))

    @cached_property
    def order(self) -> list[str]:
        """The parameters, in the order of the model."""
        return [key.partition("|")[2] for key in self.reference.places[0] if key.startswith("parameter 0|")]

    @property
    def trained(self) -> list[str]:
        """Those that are not frozen."""
        return [name for name in self.order if f"gradient 1|{name}" in self.reference.whole]

    def when(self, difference: Difference) -> tuple[int, int, int]:
        """A sort key: the order of a run, and then the order of the model."""
        name = difference.name
        return *difference.moment, self.order.index(name) if name in self.order else -1

    def examine(self, layout: Layout) -> Result:
        """Runs a layout. If it differs, finds out where it differs first."""
        result, theirs = Result(layout), None
        try:
            ours = (
                self.alone
                if self.alone is not None and layout.world == 1
                else self._run(self.workers, layout.name, layout)
            )
            if self.others is None:
                found = self._apart(ours)
                if self.options.precision != "fp64":
                    replay = Replay(ours, self.config, self.trained)
                    found, result.not_replayed = found + replay.differences(), replay.lacking
                result.missing = missing(ours, self.reference)
            else:
                theirs = self._run(self.others, f"{layout.name}_other", layout)
                found = rank_by_rank(ours, theirs)
            result.differences = worst(found)
            result.beyond = self._beyond(found)
            if result.beyond:
                self._look_again(result, ours, theirs)
        except RankFailed as failure:
            result.failure = failure
        return result

    def _apart(self, run: Records) -> list[Difference]:
        """The differences between a run and fp64 on one process."""
        found = against_reference(run, self.reference)
        if self.options.precision != "fp64":
            found += directions(run, self.reference, self.bounds.cancelled, self.bounds.gradient)
        return found

    def _beyond(self, found: list[Difference]) -> list[Difference]:
        """The differences that rounding does not explain, in the order of a run."""
        return sorted((d for d in worst(found).values() if d.relative > self.bounds.of(d)), key=self.when)

    def _look_again(self, result: Result, ours: Records, theirs: Records | None) -> None:
        """Runs the layout once more. If the two runs differ, there is a race. Otherwise a trace shows what differs first."""
        layout, first = result.layout, result.beyond[0]
        # No trace is needed for a run's own arithmetic, nor for moments and updates after equal gradients.
        activations = first.kind in ("gradient", ROUTING)
        traced_step = (
            first.step
            if activations or (first.kind == "figure" and first.name in ("loss", "grad_norm"))
            else None
        )
        again = self._run(self.workers, f"{layout.name}_again", layout, traced_step)
        result.race = self._race(ours, again, None)
        if theirs is not None and self.others is not None:
            others = self._run(self.others, f"{layout.name}_other_again", layout, traced_step)
            result.race = result.race or self._race(theirs, others, self.others.checkout)
        if result.race is not None or traced_step is None:
            return
        if self.others is not None:
            reference = self.folder / f"{layout.name}_other_again"
        else:
            self._run(self.workers, "reference_traced", Layout("reference"), traced_step)
            reference = self.folder / "reference_traced"
        bound = self.bounds.of_activations(
            0.0 if self.bounds.exact else self._worst_activation(reference, traced_step)
        )
        traced, same = self.folder / f"{layout.name}_again", self.others is not None
        divided = {"context": layout.size("context"), "seq_len": self.config.train.seq_len}
        result.parting = first_parting(
            traced, layout.world, layout.size("tensor"), reference, bound, same_layout=same, **divided
        )

    def _race(self, run: Records, again: Records, checkout: Path | None) -> Race | None:
        """The race between two runs of one layout, if they differ by more than rounding; else None."""
        apart = self._beyond(rank_by_rank(again, run, repeated=True))
        if not apart:
            return None
        return Race(apart[0], in_flight(run.flights[apart[0].rank], apart[0]), checkout)

    def _worst_activation(self, reference: Path, step: int) -> float:
        """The error of one process's worst activation or gradient in bf16."""
        self._run(self.workers, "one_traced", Layout("one"), step)
        low, high = BF16_ULP, 1.0
        while high - low > 0.01:  # the smallest bound within which one process agrees everywhere
            middle = (low + high) / 2
            parting = first_parting(self.folder / "one_traced", 1, 1, reference, middle)
            low, high = (low, middle) if parting is None else (middle, high)
        return high

    def _run(
        self, workers: ProofWorkers, name: str, layout: Layout, traced_step: int | None = None
    ) -> Records:
        """Runs a layout or the reference, and returns its records. The folder `name` holds records and traces."""
        out = self.folder / name
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()
        task = {
            "kind": "reference" if layout.name == "reference" else "layout",
            "config": str(self.case),
            "overrides": layout.overrides(),
            "tensor": layout.size("tensor"),
            "out": str(out),
            "rounding": self.options.precision,
            "traced_step": traced_step,
            "plant": self.options.plant,
            "reference": str(self.folder / "reference"),
        }
        try:
            workers.run(layout.world, task)
        except RankFailed as failure:
            if workers is self.others:
                failure.args = (f"{workers.checkout}: {failure}",)
            raise
        return Records(out, layout.world)


def worst(differences: list[Difference]) -> dict[Key, Difference]:
    """For each tensor, the difference of the rank where it is largest."""
    found: dict[Key, Difference] = {}
    for difference in differences:
        key = (difference.kind, difference.step, difference.name)
        if key not in found or difference.relative > found[key].relative:
            found[key] = difference
    return found
