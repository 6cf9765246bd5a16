"""Weight gradients that layers add straight to the engine's sums: the product alone, then whole
models against plain autograd.
"""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from megacore.distributed import cpu
from megacore.distributed.communicator import SOLO
from megacore.engine.native import NativeEngine
from megacore.kernels.linear_cross_entropy import adds_in_fp32
from megacore.model.batch import Microbatch
from megacore.pipeline import generators
from megacore.pipeline.runtime import Runtime
from megacore.pipeline.schedule import Plan
from megacore.tensor_parallel.gradient import MainGradient
from megacore.tensor_parallel.linear import ColumnLinear
from tests.build import mesh_of, model_of, run_of
from tests.pieces import SPLIT
from tests.training import VOCAB_SIZE, write_config

CPU = torch.device("cpu")
TOKENS, OUTPUTS, INPUTS = 64, 24, 16
# Of a sum of 64 products: 2^-53 and 2^-24 a rounding, some times; and in the mean square 2^-9 once, where the
# product is rounded to bf16.
TOLERANCE = {torch.float64: 1e-14, torch.float32: 2e-6, torch.bfloat16: 2.0**-9}


def error_of_two_products(dtype: torch.dtype, device: str = "cpu") -> float:
    """The relative error of two products, the first of which is written over memory that holds no numbers."""
    generator = torch.Generator().manual_seed(0)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    main = MainGradient(torch.full((2, OUTPUTS // 2, INPUTS), torch.nan, dtype=wide, device=device))
    exact = torch.zeros(OUTPUTS, INPUTS, dtype=torch.float64)
    for _ in range(2):
        grad, x = (
            torch.randn(TOKENS, n, generator=generator, dtype=torch.float64).to(dtype)
            for n in (OUTPUTS, INPUTS)
        )
        main.add_product(grad.to(device), x.to(device))
        exact += grad.double().t() @ x.double()
    return float((main.total.flatten(0, 1).cpu() - exact).norm() / exact.norm())


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_products_add_up(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first is written, the second added; a product of bf16 is rounded once, or
    never where it is done in fp32.
    """
    monkeypatch.setattr(cpu, "WIDENED", set())
    assert error_of_two_products(dtype) < TOLERANCE[dtype]
    monkeypatch.setattr(cpu, "WIDENED", {torch.bfloat16})
    assert error_of_two_products(dtype) < min(TOLERANCE[dtype], TOLERANCE[torch.float32])


def test_rows_that_were_looked_up_add_up() -> None:
    """A row that occurs often, or in two microbatches, counts each time; no part
    is rounded to the tokens' bf16.
    """
    main, exact = MainGradient(torch.full((5, 3), torch.nan)), torch.zeros(5, 3, dtype=torch.float64)
    for seed, rows in enumerate(([1, 4, 1, 1], [4, 0])):
        grad = torch.randn(len(rows), 3, generator=torch.Generator().manual_seed(seed)).bfloat16()
        main.add_rows(grad, torch.tensor(rows))
        for row, own in zip(rows, grad.double(), strict=True):
            exact[row] += own
    assert float((main.total - exact).abs().max()) < 1e-6


def test_rows_add_up_in_one_order_whatever_threads_do() -> None:
    """A run repeats bitwise on a CPU, and tensor ranks' copies stay alike: each row's sum is that of
    its tokens one behind the other.
    """
    generator = torch.Generator().manual_seed(0)
    grad, rows = torch.randn(2048, 64, generator=generator), torch.randint(4, (2048,), generator=generator)
    exact = torch.zeros(4, 64)
    for row, own in zip(rows.tolist(), grad, strict=True):
        exact[row] += own
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for _ in range(5):
            main = MainGradient(torch.full((4, 64), torch.nan))
            main.add_rows(grad, rows)
            assert torch.equal(main.total, exact)
    finally:
        torch.set_num_threads(threads)


def test_a_gradient_that_never_comes_is_zero() -> None:
    """And not the sum of the step before."""
    parameter, main = nn.Parameter(torch.zeros(3)), MainGradient(torch.full((3,), torch.nan))
    main.take(parameter)
    assert not main.empty and not main.total.any()
    parameter.grad = torch.ones(3)
    main.take(parameter)
    assert parameter.grad is None and (main.total == 1).all()


WHOLE = generators.build("1f1b", 1, 3)


def gradients(path: str, overrides: str, plan: Plan | None = None) -> tuple[dict[str, Tensor], set[str]]:
    """Of the second of two steps of three microbatches, by the native engine or, without a plan, by autograd
    alone; and the parameters that autograd gives a gradient of their own.
    """
    config = run_of(path, "train.precision=fp64", *overrides.split())
    stage, given = model_of(config), set()
    for name, parameter in stage.named_parameters():
        parameter.register_hook(lambda gradient, name=name: given.add(name) if gradient is not None else None)
    train = config.train
    shape = (2, 3, 2, train.micro_batch_size, train.seq_len)
    steps = torch.randint(VOCAB_SIZE, shape, generator=torch.Generator().manual_seed(0))
    native = NativeEngine(config, [stage], mesh_of(config)) if plan else None
    for step in steps:
        if native is None or plan is None:
            stage.zero_grad()
            for key, (inputs, targets) in enumerate(step):
                stage.loss(stage.hidden(inputs, key), targets).backward()
        else:
            native.reducer.clear()
            batch = [Microbatch(inputs, targets, key) for key, (inputs, targets) in enumerate(step)]
            Runtime([stage], native, SOLO).run(plan, batch, {"cross_entropy": 1.0})
    if native is None:
        return {name: p.grad for name, p in stage.named_parameters() if p.grad is not None}, given
    found = {name: tensor.clone() for name, (tensor, _) in native.gradients().items()}
    native.close()
    assert not any(hasattr(p, "main_gradient") for p in stage.parameters()), (
        "a closed engine's sums must not be added to"
    )
    return found, given


MODELS = [
    "",
    "model.tie_embeddings=false model.position=rope",
    "model.tie_embeddings=false model.chunked_loss=true",
    "train.recompute=full model.dropout=0.1",
    "train.recompute=selective model.activation=swiglu model.attention=eager",
]


@pytest.mark.parametrize("plan", [WHOLE, SPLIT], ids=["whole", "split"])
@pytest.mark.parametrize("overrides", MODELS)
def test_a_step_equals_plain_autograd(tmp_path: Path, overrides: str, plan: Plan) -> None:
    """A weight's gradient that is lost, doubled, counted in the next step too, or made as
    a tensor of its own after all.
    """
    path = write_config(tmp_path, "unused", model={"num_layers": 2})
    right, _ = gradients(path, overrides)
    found, given = gradients(path, overrides, plan)
    assert found.keys() == right.keys()
    assert max(float((found[name] - right[name]).abs().max()) for name in right) < 1e-12
    assert {name for name in given if "norm" not in name and not name.endswith("bias")} == {
        "position"
    } & right.keys()


def test_a_compiled_graph_leaves_the_gradient_to_autograd() -> None:
    """A graph may not change what is outside it: the sum must get the gradient once, from autograd."""
    layer = ColumnLinear(
        INPUTS, (2, 4), bias=True, init_std=0.1, group=SOLO, sequence=False, dtype=torch.float64, device=CPU
    )
    nn.init.normal_(layer.weight)
    nn.init.zeros_(layer.bias)  # type: ignore[arg-type]
    main = MainGradient(torch.zeros_like(layer.weight, requires_grad=False))
    layer.weight.main_gradient = main  # type: ignore[attr-defined]
    x = torch.randn(5, INPUTS, dtype=torch.float64)
    torch.compile(layer, backend="aot_eager", fullgraph=True)(x).sum().backward()
    assert layer.weight.grad is not None and main.empty
    right = x.sum(0).expand_as(layer.weight)
    main.take(layer.weight)
    assert float((main.total - right).abs().max()) < 1e-12


def test_a_cpu_is_not_asked_for_what_it_lacks() -> None:
    """Where PyTorch learns to add products of bf16 in fp32 on a CPU, this says so, and
    benchmarks/results/performance_gpu_estimates.md is to be measured again.
    """
    assert not adds_in_fp32("cpu", torch.bfloat16)


def test_a_gpu_that_cannot_add_in_fp32_is_reported_once(monkeypatch, recwarn) -> None:
    """Products are then rounded and added by another kernel: slower, and less exact."""
    on_cpu = torch.zeros

    def addmm(*args: object, **options: object) -> None:
        raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED\nat a line of PyTorch")

    monkeypatch.setattr(torch, "zeros", lambda *size, device, **options: on_cpu(*size, **options))
    monkeypatch.setattr(torch, "addmm", addmm)
    adds_in_fp32.cache_clear()
    try:
        answers = [adds_in_fp32("cuda", torch.bfloat16) for _ in range(2)]
    finally:
        adds_in_fp32.cache_clear()
    assert answers == [False, False]
    (warning,) = recwarn
    assert str(warning.message) == (
        "this GPU adds no product of torch.bfloat16 in fp32, so products are rounded first "
        "(CUBLAS_STATUS_NOT_SUPPORTED)"
    )
