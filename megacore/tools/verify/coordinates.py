"""The coordinate check: sizes of activations and updates over the width of a model, in real layouts
(Yang et al. 2022, appendix D).

With muP none depends on the width. A slope is that of a line through the logarithms of sizes over those of
widths, after the last step.
"""

import contextlib
import json
import math
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from megacore.config import Config
from megacore.config.implied import heads_at, sizes_at
from megacore.errors import ConfigError
from megacore.files import ROOT
from megacore.optimizers.rule import RULES
from megacore.tools.prepare.indexed_writer import IndexedWriter
from megacore.tools.settings.load import apply, load, read
from megacore.tools.verify.layouts import Layout
from megacore.tools.verify.shrink import load_whole
from megacore.tools.verify.workers import ProofWorkers

STANDARD, MUP = "standard", "mup"
# of a slope with muP: one draw of first weights bends lines by up to 0.3; what is wrong has 0.5, 1 or more
LIMIT = 0.4
APART = 1e-3  # of a size in one layout and in another: fp32's rounding, grown over some steps
LAYERS, VOCABULARY, SEQ_LEN, SEQUENCES = 4, 256, 32, 8
KINDS = {"activation_rms": "activations", "moved_rms": "updates × fan-in"}
LOGITS = "logits"

Curve = tuple[str, str]  # kind and layer


@dataclass(frozen=True)
class Case:
    """One short run."""

    layout: str
    parametrization: str
    width: int


@dataclass
class Check:
    """What was measured: by case, for each step the sizes by kind and layer."""

    layouts: list[str]
    widths: list[int]
    limit: float
    judged: bool  # whether updates too have a size that muP foretells
    sizes: dict[Case, list[dict[Curve, float]]] = field(default_factory=dict)

    @property
    def curves(self) -> list[Curve]:
        """In the order of the model."""
        return list(next(iter(self.sizes.values()))[-1])

    def over_widths(self, layout: str, parametrization: str, curve: Curve) -> list[float]:
        """The sizes after the last step, for each width."""
        return [self.sizes[Case(layout, parametrization, width)][-1][curve] for width in self.widths]

    def slope(self, layout: str, parametrization: str, curve: Curve) -> float:
        """Of size over width, both as logarithms; infinite if a run has diverged."""
        sizes = np.array(self.over_widths(layout, parametrization, curve))
        if not (np.isfinite(sizes) & (sizes > 0)).all():
            return math.inf
        return float(np.polyfit(np.log(self.widths), np.log(sizes), 1)[0])

    def beyond(self, layout: str, curve: Curve) -> bool:
        """Whether muP's slope is outside the limit.

        Logits may shrink: at first they do, with the root of the width.
        """
        slope = self.slope(layout, MUP, curve)
        if curve[0] == "moved_rms" and not self.judged:
            return False
        return slope > self.limit or (slope < -self.limit and curve[1] != LOGITS)

    def counts(self, curve: Curve) -> bool:
        """Whether the limit is for its slope upwards and downwards."""
        return curve[1] != LOGITS and (curve[0] != "moved_rms" or self.judged)

    def faults(self) -> list[str]:
        """What is wrong with muP, and which layout is not the first one; in words."""
        found = []
        for layout in self.layouts:
            for kind, layer in self.curves:
                if self.beyond(layout, (kind, layer)):
                    found.append(
                        f"{layout}: {KINDS[kind]} of {layer} have a slope of "
                        f"{self.slope(layout, MUP, (kind, layer)):+.2f}"
                    )
        return found + [fault for layout in self.layouts[1:] if (fault := self._apart(layout))]

    def _apart(self, layout: str) -> str | None:
        """Where a layout first has another size than the first layout."""
        for parametrization in (STANDARD, MUP):
            for width in self.widths:
                pairs = zip(
                    *(self.sizes[Case(name, parametrization, width)] for name in (self.layouts[0], layout)),
                    strict=True,
                )
                for step, (right, own) in enumerate(pairs, 1):
                    for kind, layer in self.curves:
                        a, b = right[kind, layer], own[kind, layer]
                        if not abs(a - b) <= APART * abs(a):
                            what = f"{KINDS[kind]} of {layer} are {b:.3g}, and {a:.3g} in {self.layouts[0]}"
                            return f"{layout}: in step {step} at width {width}, {parametrization}, {what}"
        return None


def overrides_of(user: Config, case: Case, base: int, layout: Layout, steps: int, prefix: str) -> list[str]:
    """What makes the user's config a short run of this width."""
    mup = case.parametrization == MUP
    values = {f"model.{key}": value for key, value in sizes_at(user, case.width, user.head_size).items()} | {
        "model.num_layers": min(LAYERS, user.model.num_layers),
        "model.vocab_size": min(VOCABULARY, user.model.vocab_size),
        "model.max_positions": None,
        "model.parametrization": case.parametrization,
        "model.base_width": base if mup else None,
        "model.base_head_size": None,
        "model.base_layers": user.model.base_layers if mup else None,
        "train.steps": steps,
        "train.seq_len": min(SEQ_LEN, user.train.seq_len),
        "train.global_batch_size": SEQUENCES,
        "train.micro_batch_size": max(1, SEQUENCES // (2 * layout.size("data"))),
        "train.precision": "fp32",
        "train.compile": False,
        "train.eval_every": 0,
        "train.eval_batches": 0,
        "train.device": "cpu",
        "optim.warmup_steps": 0,
        "optim.schedule": "constant",
        "data.train": prefix,
        "data.valid": None,
        "data.tokenizer": None,
        "checkpoint.every": 0,
        "checkpoint.last": False,
        "checkpoint.best": False,
        "checkpoint.resume": "never",
        "checkpoint.weights": None,
        "log.every": 1,
        "log.statistics": {"every": 1},
        "log.profile": None,
        "log.tensorboard": False,
        "log.wandb": "off",
        "log.prometheus_port": None,
        "parallel.context": 1,
        "parallel.backend": "auto",
        "parallel.timeout_seconds": 60.0,
    }
    return [*(f"{key}={json.dumps(value)}" for key, value in values.items()), *layout.overrides()]


def check_widths(user: Config, widths: Sequence[int]) -> None:
    """Raises `ConfigError` unless there is a model of each width."""
    if len(set(widths)) < 2:
        raise ConfigError("--widths", "a slope needs two widths or more", "such as 64,128,256")
    for width in widths:
        if (heads := heads_at(user, width, user.head_size)).denominator > 1:
            wrong = f"{width} would have {float(heads):.4g} heads of head_size {user.head_size}"
            raise ConfigError(
                "--widths", wrong, "widths with whole numbers of heads, or another model.head_size"
            )


def measure(
    path: str,
    overrides: list[str],
    widths: Sequence[int],
    layouts: Sequence[Layout],
    steps: int,
    limit: float = LIMIT,
    plant: str | None = None,
    told: Callable[[str], None] = lambda _: None,
    workers: ProofWorkers | None = None,
) -> Check:
    """Runs every width in every layout, with the standard parametrization and with muP.

    Raises `ConfigError`, or `RankFailed`.

    The base width is `model.base_width`, or the smallest.
    """
    user = load_whole(path, overrides)
    check_widths(user, widths)
    base, widths = user.model.base_width or min(widths), sorted({*widths})
    folder = Path(tempfile.mkdtemp(prefix="megacore_coordinates_"))
    cases = [
        Case(layout.name, kind, width) for layout in layouts for width in widths for kind in (STANDARD, MUP)
    ]
    named = {layout.name: layout for layout in layouts}
    try:
        # Ranks run in the checkout, where a path that counts from the user's folder would name another file.
        sections = read(path)
        apply(overrides, sections)
        path = str(folder / "config.json")
        Path(path).write_text(json.dumps(sections), encoding="utf-8")

        write_walk(folder / "walk", min(VOCABULARY, user.model.vocab_size), steps * SEQUENCES * (SEQ_LEN + 1))
        settings = {}
        for case in cases:  # all are refused before any starts
            settings[case] = overrides_of(user, case, base, named[case.layout], steps, str(folder / "walk"))
            config = load(path, settings[case], named[case.layout].world).config
        check = Check(list(named), list(widths), limit, RULES[config.optim.kind].update_size is not None)
        with contextlib.ExitStack() as stack:
            ranks = workers or stack.enter_context(ProofWorkers(ROOT))
            for number, case in enumerate(cases):
                out = folder / str(number)
                out.mkdir()
                layout = named[case.layout]
                task = {
                    "kind": "coordinates",
                    "config": path,
                    "overrides": settings[case],
                    "tensor": layout.size("tensor"),
                }
                ranks.run(layout.world, task | {"out": str(out), "plant": plant})
                check.sizes[case] = [
                    sizes_of(line) for line in (out / "run/metrics.jsonl").read_text().splitlines()
                ]
                told(f"{case.layout}: width {case.width}, {case.parametrization}")
        return check
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def sizes_of(line: str) -> dict[Curve, float]:
    """The sizes in a line of metrics.jsonl.

    A layer's is under the layer's own name, and a matrix' under a longer one.
    """
    found: dict[Curve, float] = {}
    figures = json.loads(line)
    layers = [key.partition("/")[2] for key in figures if key.startswith("activation_rms/")]
    for kind in KINDS:
        for layer in layers:
            if (size := figures.get(f"{kind}/{layer}")) is not None:
                found[kind, layer] = size
    return found


def write_walk(prefix: Path, vocabulary: int, tokens: int) -> None:
    """A corpus in which a token says much about the next: a noisy walk through the vocabulary."""
    rng = np.random.default_rng(0)
    with IndexedWriter(str(prefix), np.uint16) as writer:
        writer.write((np.cumsum(rng.integers(0, 3, tokens)) % vocabulary).astype(np.uint16))
        writer.end_document()
