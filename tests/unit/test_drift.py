"""What keeps tensor ranks' copies of a parameter alike, and what compares them: without a process."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from megacore.distributed.communicator import Group
from megacore.distributed.mesh import Mesh
from megacore.distributed.topology import Topology
from megacore.model.stage import Stage
from megacore.tools import drift
from megacore.tools.choices.run import trainer_of
from megacore.tools.drift import MODULUS, Drift, Drifted
from megacore.tools.inputs import Inputs
from megacore.train.step import TrainStep
from tests import training
from tests.build import mesh_of, model_of, run_of, topology_of
from tests.unit.test_synchronisation import META, refusing


def drift_of(device: torch.device, folder: Path, rank: int, dtype: str = "fp32") -> Drift:
    config = run_of(training.write_config(folder, "nothing"), f"train.precision={dtype}")
    mesh: Any = SimpleNamespace(tp=Group("tp", (0, 1), rank), device=device)
    return comparing([Stage(config, range(3), topology_of(config), device)], mesh)


def comparing(stages: list[Stage], mesh: Mesh) -> Drift:
    """The callback of a rank that has these stages."""
    compared, step = Drift(), SimpleNamespace(stages=stages, mesh=mesh)
    compared.on_built(cast(TrainStep, step))
    return compared


def test_a_comparison_does_not_wait_for_its_device(tmp_path: Path) -> None:
    drift = drift_of(META, tmp_path, 1)
    with refusing():
        sums = drift.sums()
        assert len(sums) == 2 and drift.seen(sums).device == META


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp64"])
def test_one_bit_shows_in_the_sum_of_many_ranks(tmp_path: Path, dtype: str) -> None:
    """Of a hundred thousand ranks the sums must be exact, or equal copies would be called
    different, and one bit be lost.
    """
    a, b = (drift_of(torch.device("cpu"), tmp_path, rank, dtype) for rank in (0, 1))
    (a_sum, _), (_, b_sum) = a.sums(), b.sums()
    assert 0 < a_sum < MODULUS and a_sum == b_sum
    others = 100_000 * (MODULUS - 1.0)
    assert a.seen([a_sum + others, b_sum + others]) == 0
    weight = b.alike["blocks.0.norm1.weight"].detach()
    weight[3], weight[4] = (
        torch.nextafter(weight[3], weight[3] + 1),
        torch.nextafter(weight[4], weight[4] - 1),
    )
    assert a.seen([a_sum + others, b.sums()[1] + others]) == 1


class Widest(TorchDispatchMode):
    """The most numbers of 64 bits that an operation made."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.dtype == torch.int64:
            self.numbers = max(self.numbers, out.numel())
        return out


def test_a_comparison_takes_little_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Learned positions may be hundreds of millions of numbers: as 64 bits each, twice,
    they would not fit beside a model.
    """
    both = drift_of(torch.device("cpu"), tmp_path, 0)
    whole = both.sums()
    monkeypatch.setattr(drift, "PIECE", 10)
    with Widest() as widest:
        pieces = both.sums()
    most = max(parameter.numel() for parameter in both.alike.values())
    assert 0 < widest.numbers <= -(-most // 10) < most and pieces == whole, (
        "a sum for each piece is the widest"
    )


def test_one_bit_shows_in_every_parameter_of_every_chunk(tmp_path: Path) -> None:
    """A rank of an interleaved pipeline has several stages: what is not compared may drift apart for good."""
    config, cpu = run_of(training.write_config(tmp_path, "nothing")), torch.device("cpu")
    stages = [Stage(config, own, topology_of(config), cpu) for own in (range(2), range(2, 3))]
    mesh: Any = SimpleNamespace(tp=Group("tp", (0, 1), 0), device=cpu)
    compared = comparing(stages, mesh)
    held = [
        (name, parameter.detach().view(-1))
        for stage in stages
        for name, parameter in stage.named_parameters()
    ]
    assert {"blocks.0.norm1.weight", "blocks.1.norm1.weight"} <= {name for name, _ in held}
    for name, weight in held:
        before = compared.sums()[0]
        weight[-1] = torch.nextafter(weight[-1], weight[-1] + 1)
        assert compared.sums()[0] != before, name


def test_inductor_measures_nothing_where_ranks_must_agree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank would keep the reduction that was fastest on it, and some of these round differently."""
    asked: list[Any] = []
    monkeypatch.setattr(nn.Module, "compile", lambda self, options=None: asked.append(options))
    config = run_of(training.write_config(tmp_path, "nothing"), "train.compile=true")
    model_of(config)
    Stage(config, range(2), Topology(config, sizes={"tp": 2}), META)
    layers = config.model.num_layers
    assert asked == [None] * layers + [{"deterministic": True}]
    torch.compile(lambda x: x, options=asked[-1])  # raises where Inductor knows no such option


@pytest.mark.parametrize(
    ("backend", "summing", "fault"), [("gloo", 8, True), ("nccl", 2, True), ("nccl", 3, False)]
)
def test_only_sums_of_three_over_nccl_may_differ(backend: str, summing: int, fault: bool) -> None:
    """gloo adds up by the ranks' numbers, and two numbers have one sum; NCCL's rings
    follow each group's own places.
    """
    mesh: Any = SimpleNamespace(
        backend=backend,
        gradient_group=SimpleNamespace(size=summing),
        device=torch.device("cpu"),
        tp=Group("tp", (0, 1), 0),
    )
    assert comparing([], mesh).is_fault is fault


def test_a_run_that_went_back_is_not_judged_by_what_it_left(tmp_path: Path) -> None:
    """Its weights come from a checkpoint: a difference that was seen before, and
    is read only now, is not theirs.
    """
    compared = drift_of(torch.device("cpu"), tmp_path, 0)
    compared.found = 50, torch.ones((), dtype=torch.float64), None
    compared.last = torch.ones(1, 1)
    compared.on_step_begin(41, logged=False)
    compared.on_pause_begin("saving")
    compared.found = 50, torch.zeros((), dtype=torch.float64), None
    compared.on_step_begin(51, logged=False)
    assert compared.found is not None, "one on its way is not dropped"


def test_a_run_that_saves_nothing_is_judged_at_its_end(tmp_path: Path) -> None:
    """What a GPU finds in a run's last steps was read before a validation or a save only."""
    path = training.write_config(
        tmp_path, training.write_corpus(tmp_path), train={"steps": 1}, log={"dir": str(tmp_path / "run")}
    )
    config = run_of(path, "checkpoint.every=0", "checkpoint.last=false", "train.eval_every=0")
    mesh = mesh_of(config)
    trainer = trainer_of(config, mesh, Inputs(config, 0))
    late = comparing(trainer.train_step.stages, mesh)
    late.found, late.last = (0, torch.ones((), dtype=torch.float64), None), torch.zeros(1)
    mesh.listeners.add(late)
    with pytest.raises(Drifted, match="seen in step 0"):
        trainer.run()
    mesh.close()
