"""A real run of a few steps, with validation and asynchronous checkpoints, over a strict wire or over
gloo, and how two runs differ.
"""

import contextlib
import io
import math
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from megacore.checkpoint import Reader, checkpoints_in
from megacore.distributed.shard import TensorSlice
from megacore.engine.compression import STATE
from megacore.model.stage import Stage
from megacore.pipeline.partition import layer_ranges, placement_of
from megacore.tools.launchers import place_from_environment
from megacore.tools.text.decoding import Decoder
from megacore.tools.text.sampling import Sampler
from megacore.tools.verify.layouts import Layout, parse
from megacore.tools.verify.worker import planted
from tests import training
from tests.build import mesh_of, run_of
from tests.pool import Pool, RankError, RankTimeout
from tests.strict import Rules, strict

TOLERANCE = 1e-9
STEPS = 3
SAVED = 2  # the step of a checkpoint that is written while training goes on
BATCH, MICRO_BATCH = 16, 2  # sequences, which every layout divides


@dataclass(frozen=True)
class Case:
    """A layout, with what goes with it."""

    layout: str  # as `launch/verify.py` names it
    overrides: tuple[str, ...] = ()
    # what it is compared with: one process, or over gloo the same layout, where sums are rounded on their way
    against: str = "one"
    generates: bool = False  # a text, in place of training

    @property
    def parsed(self) -> Layout:
        """The numbers of ranks."""
        return parse(self.layout)

    @property
    def name(self) -> str:
        """The layout, and what goes with it, in a few words."""
        words = [
            override.partition(".")[2].replace("kind=", "").replace("=true", "")
            for override in self.overrides
        ]
        return ", ".join([self.layout, *words, *(["generation"] if self.generates else [])])


@dataclass(frozen=True)
class Outcome:
    """What a run leaves behind."""

    figures: dict[str, float]  # losses, gradient norms and validation losses; of a text the tokens
    tensors: dict[str, Tensor]


class Runs:
    """Runs cases; processes and what one process finds are kept from one to the next."""

    def __init__(self, folder: Path) -> None:
        self.pool, self.folder, self.known = Pool(), folder, dict[tuple[str, ...], Outcome]()
        prefix = training.write_corpus(folder)
        self.config = training.write_config(
            folder,
            prefix,
            model={"num_layers": 8, "hidden_size": 16, "num_heads": 4},
            train={
                "steps": STEPS,
                "precision": "fp64",
                "micro_batch_size": MICRO_BATCH,
                "global_batch_size": BATCH,
                "eval_every": 1,
                "eval_batches": 1,
            },
            data={"train": prefix, "valid": prefix},
            engine={"bucket_mib": 0.01},
            checkpoint={"every": SAVED, "async": True, "keep": 9},
            parallel={"timeout_seconds": 600},
        )

    def close(self) -> None:
        """Ends the processes."""
        self.pool.close()

    def run(self, case: Case, rules: Rules | None = None, plant: str | None = None) -> Outcome:
        """A run over a strict wire, or without `rules` over gloo. Raises what went wrong in a rank."""
        function: Callable[..., Any] = generate if case.generates else train
        layout = case.parsed
        overrides = [*layout.overrides(), *case.overrides, "parallel.shared_memory=false"]
        out = self.folder / "run"
        shutil.rmtree(out, ignore_errors=True)
        return self.pool.run(
            layout.world,
            on_a_rank,
            function,
            self.config,
            overrides,
            str(out),
            layout.size("tensor"),
            rules,
            plant,
        )[0]

    def expected(self, case: Case) -> Outcome:
        """What a case is compared with."""
        model = [o for o in case.overrides if o.startswith(("model.", "data.", "train.", "checkpoint."))]
        other = case if case.against == "gloo" else Case("one", tuple(model), generates=case.generates)
        key = other.layout, *other.overrides, str(other.generates)
        if key not in self.known:
            self.known[key] = self.run(other)
        return self.known[key]

    def verdict(self, case: Case, rules: Rules | None = None, plant: str | None = None) -> str:
        """What is wrong with a run, in a line; empty if nothing is."""
        expected = self.expected(case)
        try:
            found = self.run(case, rules, plant)
        except (RankError, RankTimeout) as error:
            return str(error).strip().splitlines()[-1].removeprefix("RuntimeError: ")
        if case.against == "one":  # which keeps nothing for compressed sums
            plain = {
                name: x for name, x in found.tensors.items() if not name.partition(", ")[2].startswith(STATE)
            }
            found = Outcome(found.figures, plain)
        return difference(found, expected)


def difference(found: Outcome, expected: Outcome) -> str:
    """Where two runs first differ by more than rounding, and by how much; empty if they do not."""
    if found.tensors.keys() != expected.tensors.keys() or found.figures.keys() != expected.figures.keys():
        return "other tensors or figures"
    apart = {name: abs(found.figures[name] - x) / (abs(x) or 1.0) for name, x in expected.figures.items()}
    apart |= {
        name: float((found.tensors[name] - x).norm() / (x.norm() or 1.0))
        for name, x in expected.tensors.items()
    }
    wrong = next((name for name, off in apart.items() if not off <= TOLERANCE), None)
    if wrong is None:
        return ""
    return f"{wrong} is {'NaN' if math.isnan(apart[wrong]) else f'off by {apart[wrong]:.1e}'}"


def on_a_rank(
    function: Callable[..., Any],
    config: str,
    overrides: list[str],
    out: str,
    tensor: int,
    rules: Rules | None,
    plant: str | None,
) -> Any:
    """A rank's part of a run. Ranks take turns on two hosts, those of one tensor group together."""
    os.environ["MEGACORE_HOST"] = f"host {place_from_environment().rank // tensor % 2}"
    wire = contextlib.nullcontext() if rules is None else strict(rules)
    with wire, planted(plant), contextlib.redirect_stdout(io.StringIO()):
        return function(config, overrides, out)


def train(config: str, overrides: list[str], out: str) -> Outcome | None:
    """Trains as launch/pretrain.py does; rank 0 then reads what was logged and saved."""
    training.run_rank(config, overrides, out)
    if place_from_environment().rank:
        return None
    kinds = ("loss", "grad_norm", "valid_loss")
    logged = {
        f"{key} of step {line['step']}": line[key]
        for line in training.lines(out)
        for key in kinds
        if key in line
    }
    figures = {name: math.nan if value is None else value for name, value in logged.items()}
    tensors = {}
    for path in checkpoints_in(Path(out) / "checkpoints"):
        reader = Reader(path)
        for name in reader.names:
            shape = tuple(reader.manifest.tensors[name].shape)
            tensors[f"step {reader.step}, {name}"] = reader.read(
                name, TensorSlice(shape, (0,) * len(shape), shape)
            )
    return Outcome(figures, tensors)


def generate(config_path: str, overrides: list[str], out: str) -> Outcome:
    """Greedy texts after two prompts, the second longer than one window's half."""
    place = place_from_environment()
    config = run_of(config_path, *overrides, f"log.dir={out}", world=place.world_size)
    mesh = mesh_of(config)
    held = [layer_ranges(config)[stage] for stage in placement_of(config)[mesh.pp.rank]]
    stages = [Stage(config, layers, mesh, mesh.device).eval() for layers in held]
    decoder, sampler = Decoder(stages, mesh), Sampler(0.0, 1, 1.0, 0, config.model.vocab_size)
    tokens = [
        token for prompt in ([1, 2, 3], list(range(13))) for token in decoder.generate(prompt, 8, sampler)
    ]
    mesh.close()
    return Outcome({f"token {i}": float(token) for i, token in enumerate(tokens)}, {})
