"""Runs a proof: makes a small case, runs the reference and every layout, and locates differences."""

import contextlib
import math
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from megacore.config import Config
from megacore.config.implied import has_masks
from megacore.config.source import CALLBACKS, source_of
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
from megacore.tools.verify.self_check.export import NAME as EXPORT
from megacore.tools.verify.self_check.export import why_not_exported
from megacore.tools.verify.self_check.finding import Finding, Report
from megacore.tools.verify.shrink import explain_sizes, load_whole, shrink, write_case
from megacore.tools.verify.tolerances import BF16_ULP, BOUND, CONDITION_FACTOR, Bounds
from megacore.tools.verify.untouched import Comparison
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


@dataclass(frozen=True)
class WrongModel:
    """A model that differs from its untouched module already on one process."""

    untouched: Comparison
    differences: list[Difference]  # in the order of a run; never empty
    is_only_cause: bool  # the layout computes what megacore's model does on one process

    @property
    def first(self) -> Difference:
        """The first tensor that differs, or the first figure if no tensor does."""
        tensors = [difference for difference in self.differences if difference.kind != "figure"]
        return (tensors or self.differences)[0]

    def describe(self, difference: Difference) -> str:
        """In words, by the module's names for a parameter."""
        names = ", ".join(self.untouched.names.get(difference.name, [difference.name]))
        if names != difference.name:
            names += f" (here {difference.name})"
        return replace(difference, name=names).describe()


@dataclass
class Result:
    """The findings about one layout."""

    layout: Layout
    differences: dict[Key, Difference] = field(default_factory=dict)  # the worst rank's, by key
    # differences beyond their bound, in the order of a run
    beyond: list[Difference] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    failure: RankFailed | None = None
    impossible: str | None = None
    not_replayed: str = ""  # what of a 16-bit run could not be computed again
    parting: Parting | None = None
    race: Race | None = None
    # In fp64: the differences beyond their bound are rounding, which the model magnifies above any bound.
    is_magnified: bool = False
    wrong_model: "WrongModel | None" = None

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
    # parameters whose updates' directions are not compared, by their rules
    undirected: dict[str, int] = field(default_factory=dict)
    bounds: Bounds | None = None
    # the file of the model's source and its callbacks, which the layouts run and one process does not
    callbacks: str = ""
    # the untouched module that computed the reference; None if megacore's own layers did
    untouched: Comparison | None = None

    @property
    def holds(self) -> bool:
        """Whether all layouts are equal, and at least one was possible."""
        return all(result.equal for result in self.results) and any(
            result.impossible is None for result in self.results
        )


def checked_layouts(options: Options) -> tuple[Config, list[Layout], dict[str, str | None]]:
    """Return the user's config, the layouts to run, and by name why a layout is impossible.

    Raises `ConfigError` if the config is wrong, or no layout is possible.
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
    if all(reasons.values()):
        first = layouts[0].name
        raise ConfigError(
            "--layouts",
            f"none is possible: in {first}, {reasons[first]}",
            "layouts that suit the model, such as one",
        )
    return user, layouts, reasons


def run_self_checks(options: Options, workers: ProofWorkers, kind: str = "self_check") -> Report:
    """Run the self-checks of a small case of the config on one process, whatever the layouts.

    `workers` are this checkout's, also with `--against`. `kind` is the worker's task: "self_check" or
    "export_check". Raises what `prove` raises.
    """
    user, _, _ = checked_layouts(options)
    folder = Path(tempfile.mkdtemp(prefix="megacore_self_check_"))
    try:
        sections = shrink(user, [Layout("one")], STEPS, "fp64")
        with explain_sizes(user, sections):
            case = write_case(folder, sections, has_masks(user))
        task = {"kind": kind, "config": str(case), "out": str(folder), "plant": options.plant}
        workers.run(1, task)
        return Report.read(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def run_export_check(options: Options, workers: ProofWorkers) -> tuple[Finding, ...]:
    """Compare the model with its export in transformers, if transformers has a format for it.

    Importing transformers takes many seconds, so this check has a process of its own: it runs while the
    layouts are proved.
    """
    if reason := why_not_exported(checked_layouts(options)[0]):
        return (Finding(EXPORT, "not checked", reason),)
    try:
        return run_self_checks(options, workers, "export_check").findings
    except RankFailed as failure:
        return (Finding(EXPORT, "not checked", str(failure)),)


def prove(
    options: Options, told: Callable[[Result], None] = lambda _: None, workers: ProofWorkers | None = None
) -> Proof:
    """Runs a proof.

    `told` is called with each layout's result. Raises `ConfigError` if the user got something wrong.

    `workers` of this checkout may be given, and are kept; otherwise they are started and ended here.
    """
    user, layouts, reasons = checked_layouts(options)
    possible = [layout for layout in layouts if reasons[layout.name] is None]
    folder = Path(tempfile.mkdtemp(prefix="megacore_verify_"))
    try:
        sections = shrink(user, possible, STEPS, options.precision)
        with contextlib.ExitStack() as stack:
            stack.enter_context(explain_sizes(user, sections))
            case = write_case(folder, sections, has_masks(user))
            for layout in possible:
                load(str(case), layout.overrides(), layout.world)  # refuses before anything starts
            ours = workers or stack.enter_context(ProofWorkers(ROOT))
            others = stack.enter_context(ProofWorkers(options.against.resolve())) if options.against else None
            prover = Prover(options, folder, case, ours, others)
            compared = options.precision == "fp64" or options.against is not None
            proof = Proof(
                options,
                prover.order,
                results=[],
                undirected={} if compared else undirected(prover.config.optim, prover.trained),
                bounds=prover.bounds,
                untouched=prover.untouched,
            )
            source = source_of(user)
            if source is not None and source.callbacks:
                names = ", ".join(getattr(callback, "__name__", "?") for callback in source.callbacks)
                proof.callbacks = f"{CALLBACKS} of {source.path} ({names})"
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
        # The other checkout's layouts are not compared with the reference, so its layers may compute it.
        self.wants_untouched = options.against is None
        self.reference = self._run_reference("reference")
        self.untouched = Comparison.read(folder / "reference")
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
            replayed = list[Difference]()
            if self.others is None:
                if self.options.precision != "fp64":
                    replay = Replay(ours, self.config, self.trained)
                    replayed, result.not_replayed = replay.differences(), replay.lacking
                found = self._apart(ours) + replayed
                result.missing = missing(ours, self.reference)
            else:
                theirs = self._run(self.others, f"{layout.name}_other", layout)
                found = rank_by_rank(ours, theirs)
            result.differences = worst(found)
            result.beyond = self._beyond(found)
            if result.beyond and self.bounds.exact:
                self._judge_by_condition(result, found)
            if result.beyond and not result.is_magnified:
                if self.untouched is not None:
                    self._compare_with_one_process(result, ours, replayed, self.untouched)
                if result.wrong_model is None or not result.wrong_model.is_only_cause:
                    self._look_again(result, ours, theirs)
        except RankFailed as failure:
            result.failure = failure
        return result

    @cached_property
    def one_process(self) -> Records:
        """What megacore's model computes on one process where the reference is an untouched module's."""
        return self._run_reference("one_process", with_untouched=False)

    def _apart(self, run: Records, reference: Records | None = None) -> list[Difference]:
        """The differences between a run and a reference in fp64, by default the proof's."""
        reference = reference or self.reference
        found = against_reference(run, reference)
        if self.options.precision != "fp64":
            found += directions(run, reference, self.bounds.cancelled, self.bounds.gradient)
        return found

    def _beyond(self, found: list[Difference]) -> list[Difference]:
        """The differences that rounding does not explain, in the order of a run."""
        return sorted((d for d in worst(found).values() if d.relative > self.bounds.of(d)), key=self.when)

    def _judge_by_condition(self, result: Result, found: list[Difference]) -> None:
        """Compares a layout's differences with what the model's condition explains.

        The condition takes one more run of the reference, so it is measured when the first difference is
        beyond the usual bound.
        """
        if self.bounds.changes is None:
            moved = self._run_reference("reference_moved", unmoved="reference")
            self.bounds.take_condition(against_reference(moved, self.reference))
        beyond = self._beyond(found)
        mistakes = [difference for difference in beyond if not self.bounds.is_rounding(difference)]
        result.is_magnified = bool(beyond) and not mistakes
        result.beyond = mistakes or beyond

    def _compare_with_one_process(
        self, result: Result, ours: Records, replayed: list[Difference], untouched: Comparison
    ) -> None:
        """Tells a mistake in the model from one in a layout, by megacore's model on one process.

        If the model is wrong, what remains in `result.beyond` are the differences of the layout, if it has
        any.
        """
        apart = worst(against_reference(self.one_process, self.reference)).values()
        differs = [d for d in apart if d.relative > (self.bounds.of(d) if self.bounds.exact else BOUND)]
        if not differs:
            return
        layout_mistakes = self._beyond(self._apart(ours, self.one_process) + replayed)
        result.wrong_model = WrongModel(untouched, sorted(differs, key=self.when), not layout_mistakes)
        if layout_mistakes:
            result.beyond = layout_mistakes

    def _look_again(self, result: Result, ours: Records, theirs: Records | None) -> None:
        """Runs the layout once more.

        If the two runs differ, there is a race. Otherwise a trace shows what differs first.
        """
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
        self._run_reference("reference_traced", traced_step, with_untouched=False)
        bound = self.bounds.of_activations(self._worst_activation(traced_step))
        reference = self.folder / ("reference_traced" if theirs is None else f"{layout.name}_other_again")
        traced, same = self.folder / f"{layout.name}_again", self.others is not None
        result.parting = first_parting(
            traced,
            layout.world,
            layout.size("tensor"),
            reference,
            bound,
            same_layout=same,
            context=layout.size("context"),
            sequence=layout.sequence,
            seq_len=self.config.train.seq_len,
            micro_batch=self.config.train.micro_batch_size,
        )

    def _race(self, run: Records, again: Records, checkout: Path | None) -> Race | None:
        """The race between two runs of one layout, if they differ by more than rounding; else None."""
        apart = self._beyond(rank_by_rank(again, run, repeated=True))
        if not apart:
            return None
        return Race(apart[0], in_flight(run.flights[apart[0].rank], apart[0]), checkout)

    def _worst_activation(self, step: int) -> float:
        """The error of one process's worst activation or gradient: in bf16, or in fp64 after first weights
        are moved by one unit in the last place, which is not worth a run if it changes nothing else.
        """
        if self.bounds.exact:
            if max((self.bounds.changes or {}).values(), default=0.0) * CONDITION_FACTOR <= BOUND:
                return 0.0
            self._run_reference("one_traced", step, unmoved="reference", with_untouched=False)
        else:
            self._run(self.workers, "one_traced", Layout("one"), step)
        low, high = BOUND / CONDITION_FACTOR if self.bounds.exact else BF16_ULP, 1.0
        while high / low > 1.02:  # the smallest bound within which one process agrees everywhere
            middle = math.sqrt(low * high)
            parting = first_parting(
                self.folder / "one_traced", 1, 1, self.folder / "reference_traced", middle
            )
            low, high = (low, middle) if parting is None else (middle, high)
        return high

    def _run_reference(
        self,
        name: str,
        traced_step: int | None = None,
        unmoved: str | None = None,
        *,
        with_untouched: bool = True,
    ) -> Records:
        """Runs the reference, or with `unmoved`, the folder of one, a copy whose first weights are moved.

        Without `with_untouched` megacore's layers compute it. A trace needs them, because it compares modules
        of the same names.
        """
        asked = with_untouched and self.wants_untouched
        return self._run(self.workers, name, Layout("reference"), traced_step, unmoved, with_untouched=asked)

    def _run(
        self,
        workers: ProofWorkers,
        name: str,
        layout: Layout,
        traced_step: int | None = None,
        unmoved: str | None = None,
        *,
        with_untouched: bool = False,
    ) -> Records:
        """Runs a layout or the reference, and returns its records.

        The folder `name` holds records and traces.
        """
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
            "unmoved": None if unmoved is None else str(self.folder / unmoved),
            "with_untouched": with_untouched,
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
