"""The runtime on one stage: what it computes, and what it lets go of."""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from megacore.config import Config
from megacore.config.schema import IGNORED
from megacore.distributed.communicator import SOLO
from megacore.engine.choose import build_stages
from megacore.engine.native import NativeEngine
from megacore.kernels import cross_entropy
from megacore.model.batch import Microbatch
from megacore.model.stage import Stage
from megacore.pipeline import generators, schedule
from megacore.pipeline.runtime import Runtime
from megacore.tools.choices.held import peak_live
from tests.build import mesh_of, model_of, run_of
from tests.pieces import SPLIT
from tests.training import VOCAB_SIZE, write_config

Configure = Callable[..., Config]


@pytest.fixture
def configure(tmp_path: Path) -> Configure:
    """`configure(overrides)`: the tests' small config in fp64, resolved."""
    path = write_config(tmp_path, "unused", model={"num_layers": 2}, train={"precision": "fp64"})
    return lambda overrides="": run_of(path, *overrides.split())


def engine_of(config: Config) -> tuple[list[Stage], NativeEngine]:
    """The stages of all chunks of one rank, with drawn weights, and their engine."""
    mesh = mesh_of(config)
    stages = build_stages(config, mesh)
    engine = NativeEngine(config, stages, mesh)
    copy = dict(model_of(config).named_parameters())
    with torch.no_grad():
        for stage in stages:
            for name, parameter in stage.named_parameters():
                parameter.copy_(copy[name])
    return stages, engine


def batch_of(config: Config, microbatches: int) -> list[Microbatch]:
    generator = torch.Generator().manual_seed(0)
    shape = (microbatches, 2, config.train.micro_batch_size, config.train.seq_len)
    tokens = torch.randint(VOCAB_SIZE, shape, generator=generator)
    return [Microbatch(inputs, targets, key) for key, (inputs, targets) in enumerate(tokens)]


@pytest.mark.parametrize("name", generators.GENERATORS)
@pytest.mark.parametrize("microbatches", [1, 5])
def test_a_plan_gives_the_sum_of_losses_and_their_gradient(
    configure: Configure, name: str, microbatches: int
) -> None:
    """A microbatch lost, repeated or weighted otherwise; the order of a schedule must not matter."""
    config = configure(f"model.dropout=0.1 parallel.schedule={name}")
    stages, engine = engine_of(config)
    batch = batch_of(config, microbatches)
    loss = Runtime(stages, engine, SOLO).run(
        generators.build(name, 1, microbatches), batch, {"cross_entropy": 0.125}
    )["cross_entropy"]

    copy = model_of(config)
    losses = torch.stack([copy.loss(copy.hidden(m.tokens, m.key), m.targets) for m in batch])
    (losses.sum() * 0.125).backward()
    assert float((loss - losses.sum()).detach().abs()) < 1e-10 and not loss.requires_grad
    gradients = engine.gradients()
    for parameter, right in copy.named_parameters():
        assert right.grad is not None
        assert float((gradients[parameter][0] - right.grad).abs().max()) < 1e-12


@pytest.mark.parametrize("name", ["1f1b", "zb_h1"])
def test_the_loss_writes_its_gradient_in_forward(
    configure: Configure, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Backward would read all logits once more to write it. Evaluation wants none, and pays for none."""
    calls: list[str] = []
    for function in (cross_entropy.losses, cross_entropy.write_gradients, cross_entropy.losses_and_gradients):

        def called(*args: Any, function: Any = function, **options: Any) -> Any:
            calls.append(function.__name__)
            return function(*args, **options)

        monkeypatch.setattr(cross_entropy, function.__name__, called)
    stages, engine = engine_of(config := configure(f"parallel.schedule={name}"))
    Runtime(stages, engine, SOLO).run(
        generators.build(name, 1, 3), batch_of(config, 3), {"cross_entropy": 0.125}
    )
    assert calls == ["losses_and_gradients"] * 3
    calls.clear()
    for stage in stages:
        stage.eval()
    Runtime(stages, None, SOLO).run(schedule.forward_only(schedule.looped(1), 3), batch_of(config, 3))
    assert calls == ["losses"] * 3


@contextmanager
def watched(stages: Sequence[nn.Module]) -> Iterator[list[StorageWeakRef]]:
    """Collects the memory of every block's output, without keeping it."""
    seen: list[StorageWeakRef] = []

    def note(module: nn.Module, args: Any, output: Tensor) -> None:
        seen.append(StorageWeakRef(output.untyped_storage()))

    blocks = [block for stage in stages for block in stage.get_submodule("blocks").children()]
    hooks = [block.register_forward_hook(note) for block in blocks]
    yield seen
    for hook in hooks:
        hook.remove()


@pytest.mark.parametrize("name", generators.GENERATORS)
@pytest.mark.parametrize("microbatches", [1, 6])
def test_activations_die_with_their_backward(configure: Configure, name: str, microbatches: int) -> None:
    """Memory would grow with the microbatches: under 1F1B one stage holds one at a
    time, under GPipe all of them.
    """
    config = configure(f"parallel.schedule={name}")
    stages, engine = engine_of(config)
    runtime = Runtime(stages, engine, SOLO)
    plan = generators.build(name, 1, microbatches)
    most = 0
    forward, gc_was_enabled = runtime.methods[schedule.Op.FORWARD], gc.isenabled()
    gc.disable()  # freed by reference counts alone, not when the collector happens to run
    with watched(stages) as seen:

        def counted(action: schedule.Action) -> None:
            nonlocal most
            forward(action)
            most = max(most, sum(not storage.expired() for storage in seen))

        runtime.methods[schedule.Op.FORWARD] = counted
        runtime.run(plan, batch_of(config, microbatches), {"cross_entropy": 1.0})
        alive = [storage.expired() for storage in seen].count(False)
    if gc_was_enabled:
        gc.enable()
    assert len(seen) == 2 * microbatches and alive == 0
    chunks = len(plan.placement[0])
    assert runtime.peak_live == peak_live(plan)[0] == chunks * (microbatches if name == "gpipe" else 1)
    assert most == 2 // chunks * runtime.peak_live
    assert not any((runtime.inputs, runtime.outputs, runtime.roots, runtime.parts, runtime.sending))
    assert not any((runtime.input_gradients, runtime.output_gradients))


def test_the_first_half_of_backward_frees_all_but_the_products(configure: Configure) -> None:
    """Weights' gradients that wait would hold whole graphs, and the memory that split schedules
    promise would not be what they take.
    """
    config = configure()
    stages, engine = engine_of(config)
    runtime = Runtime(stages, engine, SOLO)
    kept: dict[int, list[StorageWeakRef]] = {}
    outputs: dict[schedule.Op, int] = {}
    gc_was_enabled = gc.isenabled()
    gc.disable()
    with watched(stages) as seen:

        def counted(
            op: schedule.Op, method: Callable[[schedule.Action], None], action: schedule.Action
        ) -> None:
            method(action)
            outputs[op] = sum(not storage.expired() for storage in seen)
            pairs = {
                m: [t for part in parts for t in part.tensors] for (m, _), parts in runtime.parts.items()
            }
            waiting = {
                m: [StorageWeakRef(t.untyped_storage()) for t in pair if t.is_floating_point()]
                for m, pair in pairs.items()
            }
            del pairs
            kept.update(waiting)
            for microbatch, storages in kept.items():
                assert microbatch in waiting or all(storage.expired() for storage in storages), (
                    "multiplied, and not freed"
                )

        runtime.methods.update({op: partial(counted, op, method) for op, method in runtime.methods.items()})
        runtime.run(SPLIT, batch_of(config, 3), {"cross_entropy": 1.0})
    if gc_was_enabled:
        gc.enable()
    assert len(kept) == 3 and all(kept.values()) and not runtime.parts
    assert outputs[schedule.Op.BACKWARD_INPUT] == 0, "the graph outlives its pass"
    assert runtime.peak_live == peak_live(SPLIT)[0] == 3


def test_validation_needs_no_engine_and_keeps_nothing(configure: Configure) -> None:
    """A graph held for a backward that never comes would hold all of a validation's
    activations; dropout would blur its loss.
    """
    config = configure("model.dropout=0.3")
    stage = model_of(config).eval()
    batch = batch_of(config, 3)
    targets = batch[1].targets.clone()
    targets[0, 3:] = IGNORED
    batch[1] = Microbatch(batch[1].tokens, targets)
    runtime = Runtime([stage], None, SOLO)
    with watched([stage]) as seen:
        loss = runtime.run(schedule.forward_only(schedule.looped(1), 3), batch)["cross_entropy"]
        assert all(storage.expired() for storage in seen)
    plain = model_of(configure())
    right = sum(float(plain.loss(plain.hidden(m.tokens), m.targets).detach()) for m in batch)
    assert loss.item() == pytest.approx(right, rel=1e-13)
    assert runtime.peak_live == 0 and not runtime.roots
    stage.train()
    with pytest.raises(AssertionError, match="a plan with backward needs an engine"):
        runtime.run(generators.build("1f1b", 1, 3), batch, {"cross_entropy": 1.0})
