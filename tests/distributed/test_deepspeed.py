"""DeepSpeed's stages in every kind of layout, against the native engine; and a
run that moves between engines.
"""

import json
import math
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from megacore.model.batch import Microbatch
from megacore.tools.choices.run import trainer_of
from megacore.tools.deepspeed.engine import DeepSpeedEngine
from megacore.tools.inputs import Inputs
from megacore.tools.launchers import place_from_environment
from megacore.tools.machine.device import pick_device
from megacore.train.step import TrainStep
from tests import training
from tests.build import mesh_of, run_of
from tests.training import Figures, difference, figures

pytestmark = pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed")

TP2SP, PP2 = ["parallel.tensor=2", "parallel.sequence=true"], ["parallel.pipeline=2"]
# All of four ranks: DeepSpeed numbers modules through all engines of a process, and in stage 3 compares the
# numbers between ranks.
WORLD, STEPS = 4, 8
LAYOUTS = {
    "dp4": ["train.micro_batch_size=1"],
    "tp2sp dp2": TP2SP,
    "pp2 dp2": PP2,
    "tp2sp pp2": [*TP2SP, *PP2],
}
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
# several buckets, and parameters larger than one
SMALL = {"reduce_bucket_size": "auto", "overlap_comm": True}
FLOATING = 5e-6  # sums of fp32 in another order; what follows from them in some steps of this model was 4e-7


def engine(stage: int, precision: str = "fp32", **zero: Any) -> list[str]:
    settings = {"zero_optimization": {"stage": stage, **zero}}
    return ["engine.kind=deepspeed", f"engine.config={json.dumps(settings)}", f"train.precision={precision}"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small corpus and its config, as config.json."""
    folder = tmp_path_factory.mktemp("corpus")
    # Without decay_steps a run that is cut short would have another schedule.
    model = {**training.BASE["model"], "num_layers": 3}
    train = {**training.BASE["train"], "steps": STEPS}
    training.write_config(
        folder,
        training.write_corpus(folder),
        model=model,
        train=train,
        optim={**training.BASE["optim"], "decay_steps": 20},
    )
    return folder


@pytest.fixture(scope="module")
def native(pool: Any, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """`native(precision)`: (loss, gradient norm) of each step of the native engine on one rank."""
    known: dict[str, Figures] = {}

    def figures_of(precision: str = "fp32") -> Figures:
        if precision not in known:
            folder = tmp_path_factory.mktemp("native")
            assert pool.run(
                1,
                training.run_rank,
                str(corpus / "config.json"),
                [f"train.precision={precision}"],
                str(folder),
            ) == [0]
            known[precision] = figures(folder)
        return known[precision]

    yield figures_of


def run(
    pool: Any,
    corpus: Path,
    folder: Path,
    layout: str,
    overrides: list[str],
    function: Any = training.run_rank,
) -> list[Any]:
    """Trains in a layout; (loss, gradient norm) of each step."""
    arguments = (str(corpus / "config.json"), [*LAYOUTS[layout], *overrides], str(folder))
    assert pool.run(WORLD, function, *arguments) == [0] * WORLD
    return figures(folder)


CASES = [
    ("dp4", 3, SMALL),
    ("dp4", 3, {"zero_hpz_partition_size": 2}),
    ("pp2 dp2", 2, SMALL),
    ("tp2sp dp2", 3, {"stage3_param_persistence_threshold": 0}),
]


@pytest.mark.parametrize(
    ("layout", "stage", "zero"), CASES, ids=lambda value: "+".join(value) if isinstance(value, dict) else None
)
def test_equals_native(
    pool: Any, corpus: Path, native: Any, tmp_path: Path, layout: str, stage: int, zero: dict[str, Any]
) -> None:
    """Settings beyond those of the shipped files, over clipped steps."""
    mine = run(pool, corpus, tmp_path / "run", layout, engine(stage, **zero))
    assert sum(norm > 0.5 for _, norm in native()) > STEPS / 2, "clipping must be active"
    assert difference(mine, native()) < FLOATING


def without(method: str, config: str, overrides: list[str], log_dir: str) -> int:
    """A run of an engine that leaves something out."""
    whole = getattr(DeepSpeedEngine, method)
    setattr(DeepSpeedEngine, method, lambda self: None)
    try:
        return training.run_rank(config, overrides, log_dir)
    finally:
        setattr(DeepSpeedEngine, method, whole)


def without_tied(*args: Any) -> int:
    return without("reduce_tied", *args)


def without_partial(*args: Any) -> int:
    return without("reduce_gradients", *args)


@pytest.mark.parametrize(("layout", "fault"), [("pp2 dp2", without_tied), ("tp2sp dp2", without_partial)])
def test_a_sum_left_out_is_noticed(
    pool: Any, corpus: Path, native: Any, tmp_path: Path, layout: str, fault: Any
) -> None:
    """The planted faults: what the comparison above would let through, were its bound a
    thousand times wider.
    """
    overrides = [*engine(1), "train.steps=4"]
    mine = run(pool, corpus, tmp_path / "run", layout, overrides, fault)
    assert difference(mine, native()[:4]) > 1000 * FLOATING


@pytest.mark.parametrize("stage", [3])
def test_gradients_can_be_sent_in_bf16(
    pool: Any, corpus: Path, native: Any, tmp_path: Path, stage: int
) -> None:
    """Half the traffic, for an error of bf16's (2⁻⁹) in each gradient: seen, and no more than seen."""
    overrides = engine(stage)
    overrides[1] = overrides[1][:-1] + ', "communication_data_type": "bf16"}'
    mine = run(pool, corpus, tmp_path / "run", "dp4", [*overrides, "train.steps=5"])
    assert 1e-6 < difference(mine, native()[:5]) < 2**-9


def overflowing_rank(config: str, overrides: list[str], log_dir: str) -> int:
    """A run whose third step has gradients that are not finite."""
    whole, steps = TrainStep.forward_backward, count(1)

    def forward_backward(self: TrainStep, batch: list[Microbatch]) -> torch.Tensor:
        scale, factor = type(self.engine).loss_gradient, math.inf if next(steps) == 3 else 1.0
        self.engine.loss_gradient = lambda given: scale(self.engine, given) * factor  # type: ignore[method-assign]
        return whole(self, batch)

    with mock.patch.object(TrainStep, "forward_backward", forward_backward):
        return training.run_rank(config, overrides, log_dir)


@pytest.mark.parametrize(("stage", "zero"), [(0, {}), (2, OFFLOAD), (3, {})])
def test_a_gradient_that_is_not_finite_is_skipped(
    pool: Any, corpus: Path, tmp_path: Path, stage: int, zero: dict[str, Any]
) -> None:
    """As the native engine does; stage 0 would turn every weight into NaN, and stage 3
    log the norm of the step before.
    """
    config, overrides = str(corpus / "config.json"), [*LAYOUTS["dp4"], "train.steps=5"]
    assert pool.run(1, overflowing_rank, config, ["train.steps=5"], str(tmp_path / "native")) == [0]
    assert (
        pool.run(WORLD, overflowing_rank, config, [*overrides, *engine(stage, **zero)], str(tmp_path / "run"))
        == [0] * WORLD
    )
    mine, right = training.metrics(tmp_path / "run"), training.metrics(tmp_path / "native")
    assert [m["skipped"] for m in mine] == [m["skipped"] for m in right] == [0, 0, 1, 1, 1]
    assert mine[2]["grad_norm"] is None
    assert difference([(m["loss"], 1.0) for m in mine], [(m["loss"], 1.0) for m in right]) < FLOATING


MOVES = {
    "native to ZeRO 3 to native": [("tp2sp dp2", []), ("dp4", engine(3)), ("pp2 dp2", [])],
    "ZeRO 2 to 1 to 3": [
        ("tp2sp pp2", engine(2, **OFFLOAD)),
        ("pp2 dp2", engine(1)),
        ("dp4", engine(3, **OFFLOAD)),
    ],
}


@pytest.mark.parametrize("moves", MOVES.values(), ids=MOVES)
def test_a_run_moves_between_engines(
    pool: Any, corpus: Path, native: Any, tmp_path: Path, moves: list[tuple[str, list[str]]]
) -> None:
    """Masters, moments and counts, each way: what is lost shows in the steps behind the move."""
    for steps, (layout, overrides) in zip((3, 6, STEPS), moves, strict=True):
        moved = run(
            pool,
            corpus,
            tmp_path / "run",
            layout,
            [*overrides, f"train.steps={steps}", "checkpoint.every=100"],
        )
        assert len(moved) == steps
    assert difference(moved, native()) < 2 * FLOATING


def gathered_rank(config_path: str, overrides: list[str], log_dir: str) -> tuple[set[str], set[str]]:
    """Names of the parameters that stage 3 gathers in a forward pass, and of those whose
    memory is still taken behind it.
    """
    place = place_from_environment()
    config = run_of(config_path, *overrides, f"log.dir={log_dir}", world=place.world_size)
    mesh = mesh_of(config, device=pick_device(config, place))
    trainer = trainer_of(config, mesh, Inputs(config, place.rank))
    gathered = {}

    def note(module: torch.nn.Module, args: Any) -> None:
        gathered.update(
            {p: StorageWeakRef(p.data.untyped_storage()) for p in module.parameters(recurse=False)}
        )

    (stage,) = trainer.train_step.stages
    for module in stage.modules():
        module.register_forward_pre_hook(note)
    (batch, *_) = trainer.loader.read(1)
    loss = trainer.train_step.runtime.modules[0]({}, batch)[1]["cross_entropy"]
    names = {parameter: name for name, parameter in stage.named_parameters()}
    held = {names[parameter] for parameter, storage in gathered.items() if not storage.expired()}
    loss.backward()
    trainer.close()
    trainer.engine.close()
    return set(map(names.get, gathered)), held


@pytest.mark.parametrize("overrides", [["parallel.tensor=2"]], ids=["tp2 dp2"])
def test_stage_3_gives_back_what_it_gathered(
    pool: Any, corpus: Path, tmp_path: Path, overrides: list[str]
) -> None:
    """Autograd keeps views of the weights that have more than two dims: they would hold the
    gathered memory until backward.
    """
    always = {
        "stage3_param_persistence_threshold": 0,
        "stage3_max_live_parameters": 0,
        "stage3_max_reuse_distance": 0,
    }
    given = [*engine(3, **always), *overrides, "train.micro_batch_size=1", "model.activation=swiglu"]
    for gathered, held in pool.run(WORLD, gathered_rank, str(corpus / "config.json"), given, str(tmp_path)):
        assert {"blocks.0.attention.qkv.weight", "blocks.0.feed_forward.up.weight"} <= gathered
        assert held == set()


def gradients_rank(config_path: str, overrides: list[str], log_dir: str) -> dict[str, torch.Tensor]:
    """This rank's gradients of the first step."""
    place = place_from_environment()
    config = run_of(config_path, *overrides, f"log.dir={log_dir}", world=place.world_size)
    mesh = mesh_of(config, device=pick_device(config, place))
    trainer = trainer_of(config, mesh, Inputs(config, place.rank))
    trainer.step = 1
    trainer.train_step.forward_backward(trainer.next_batch())
    found = {name: gradient.clone() for name, (gradient, _) in trainer.engine.gradients().items()}
    trainer.close()
    trainer.engine.close()
    mesh.close()
    return found


@pytest.mark.parametrize(("layout", "stage"), [("dp4", 3)])
def test_gradients_equal_native(pool: Any, corpus: Path, tmp_path: Path, layout: str, stage: int) -> None:
    """Tensor by tensor, where a norm could hide that two are exchanged."""
    mesh = LAYOUTS[layout]
    config = str(corpus / "config.json")
    right = pool.run(WORLD, gradients_rank, config, mesh, str(tmp_path / "native"))
    found = pool.run(WORLD, gradients_rank, config, [*mesh, *engine(stage)], str(tmp_path / "deepspeed"))
    for mine, theirs in zip(found, right, strict=True):
        assert mine.keys() == theirs.keys()
        for name, gradient in theirs.items():
            torch.testing.assert_close(mine[name], gradient, rtol=1e-4, atol=1e-7, msg=name)


def test_one_rank_alone(pool: Any, corpus: Path, native: Any, tmp_path: Path) -> None:
    """Where the mesh has no process groups at all, which DeepSpeed insists on."""
    assert pool.run(
        1, training.run_rank, str(corpus / "config.json"), [*engine(2), "train.steps=3"], str(tmp_path)
    ) == [0]
    assert difference(figures(tmp_path), native()[:3]) < FLOATING
    assert pool.run(1, process_group_left) == [False]


def process_group_left() -> bool:
    return torch.distributed.is_initialized()
