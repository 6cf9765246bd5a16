"""What there is to compile and to measure of kernels/: for each operation its inputs, its call
and the bytes that it must move.

One entry of `OPERATIONS` an operation: a new kernel needs a line here, and is then in the compile table, in
the bandwidth table and in the chart.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.kernel_inputs import (
    VOCABULARY,
    Inputs,
    Size,
    attention_scores,
    embedded_text,
    embedded_tokens,
    expert_rows,
    feed_forward,
    gate_and_up,
    grouped_heads,
    grouped_heads_and_bias,
    grouped_heads_and_norms,
    heads,
    hidden,
    hidden_and_vocabulary,
    logits,
    optimizer_state,
    parameters,
    queries,
    queries_keys_values,
    routed,
    rows_and_residual,
    rows_of,
    rows_of_experts,
    score_shape,
    scores,
    tensors,
    uniform,
    vocabulary,
    zipf,
)
from megacore.config import Config
from megacore.kernels.adamw import AdamW
from megacore.kernels.cross_entropy import Settings, cross_entropy, losses_and_gradients
from megacore.kernels.dropout import bias_dropout_residual
from megacore.kernels.embedding_grad import add_embedding_grad
from megacore.kernels.gelu import bias_gelu
from megacore.kernels.grad_norm import SumOfSquares
from megacore.kernels.grouped_product import grouped_outer, grouped_product
from megacore.kernels.layernorm import layer_norm, rms_norm
from megacore.kernels.linear_cross_entropy import linear_cross_entropy
from megacore.kernels.permute import combine, spread
from megacore.kernels.rope import rope, rope_qkv
from megacore.kernels.softmax import causal_softmax
from megacore.kernels.split_heads import split_heads
from megacore.kernels.swiglu import swiglu
from megacore.tools.settings.load import load

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
EPS, SCALE, PROBABILITY, KEY = 1e-5, 0.125, 0.1, 0x1234567_89ABCDEF
MODELS = ("gpt_124m", "gpt_350m", "gpt_1b", "gpt_7b", "llama_8b", "gpt_175b")  # of configs/


@dataclass(frozen=True)
class Operation:
    """`call(inputs, implementation)` of `inputs(size, dtype, device)`,
    differentiated by the inputs named in `by`.

    moved: (forward, backward) bytes that must be read and written, of a size and an element's bytes; None if
    memory is not the limit.
    used: the size at which a model's rank runs it, None if the model does not.
    goals: shares of a copy's speed, forward and backward, of rows longer than 1K; None where none is set.
    plain: what PyTorch offers for it, which is what torch.compile is given; by default the eager reference.
    liger: Liger-Kernel's, called with the module that has its functions.
    measured_at: sizes to measure instead of rows of 1K to 64K, 64 MB an operand.
    small: kernels that touch too little for the width of their loads to matter.
    """

    inputs: Callable[[Size, torch.dtype, torch.device], Inputs]
    call: Callable[[Inputs, Any], Any]
    used: Callable[[Config], Size | None]
    by: tuple[str, ...] = ()
    moved: Callable[[Size, int], tuple[int, int]] | None = None
    goals: tuple[float | None, float | None] = (0.95, None)
    plain: Callable[[Inputs], Any] | None = None
    liger: Callable[[Any, Inputs], Any] | None = None
    measured_at: tuple[Size, ...] = ()
    small: tuple[str, ...] = ()

    def goal(self, backward: bool, width: int) -> float | None:
        """Rows of 1K are too short for the full goal."""
        goal = self.goals[backward]
        return None if goal is None else min(goal, 0.85) if width <= 1024 else goal


def built(inputs: Inputs, name: str, build: Callable[[], Any]) -> Any:
    """What is built once for tensors that stay where they are, and used at every call."""
    if name not in inputs:
        inputs[name] = build()
    return inputs[name]


def adamw(inputs: Inputs, how: Any) -> tuple[Tensor, ...]:
    """One step; all that it writes."""
    state = {name: inputs[name] for name in ("masters", "gradients", "first_moments", "second_moments")}
    # a reference in fp64 rounds nothing
    copies = inputs["copies"] if state["masters"][0].dtype == torch.float32 else None
    settings = {"weight_decay": 0.1, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "copies": copies}
    built(inputs, how, lambda: AdamW(**state, **settings, implementation=how)).step(1e-3)
    return *state["masters"], *state["first_moments"], *state["second_moments"], *(copies or state["masters"])


def cross_entropy_with_gradient(inputs: Inputs, how: Any) -> tuple[Tensor, Tensor]:
    """Both in forward, as in training, where it is known what backward starts with."""
    gradient = built(inputs, "gradient", lambda: torch.ones((), device=inputs["logits"].device))
    (loss,) = losses_and_gradients(inputs["logits"], inputs["targets"], gradient, Settings(), how == "triton")
    return loss, inputs["logits"]


def torch_adamw(inputs: Inputs) -> None:
    """PyTorch's fused one, which leaves the copies to others."""

    def build() -> torch.optim.Optimizer:
        parameters = [t.detach().requires_grad_() for t in inputs["masters"]]
        for parameter, gradient in zip(parameters, inputs["gradients"], strict=True):
            parameter.grad = gradient
        return torch.optim.AdamW(parameters, fused=True)

    built(inputs, "optimizer", build).step()


def model_sizes(models: tuple[str, ...] = MODELS) -> list[tuple[str, Size]]:
    """Every operation at the size at which one rank of each model runs it."""
    found: dict[tuple[str, Size], None] = {}  # an ordered set
    for name in models:
        path = CONFIGS / f"{name}.json"
        parallel = json.loads(path.read_text(encoding="utf-8"))["parallel"]
        config = load(str(path), world_size=parallel["tensor"] * parallel["pipeline"]).config
        for operation in OPERATIONS:
            if size := OPERATIONS[operation].used(config):
                found[operation, size] = None
    return list(found)


def where(value: str, key: str, size: Callable[[Config], Size]) -> Callable[[Config], Size | None]:
    """The size in models whose `key` is `value`."""
    return lambda config: size(config) if getattr(config.model, key) == value else None


def passes(forward: float, backward: float) -> Callable[[Size, int], tuple[int, int]]:
    """So many times the bytes of the size's rows."""
    return lambda size, element: (
        int(forward * size.rows * size.width * element),
        int(backward * size.rows * size.width * element),
    )


def causal_passes(size: Size, element: int) -> tuple[int, int]:
    """What the mask hides is not read, but written."""
    _, heads, queries, keys = score_shape(size)
    visible, all_scores = (
        heads * (queries * (keys - queries) + queries * (queries + 1) // 2),
        prod(score_shape(size)),
    )
    return (visible + all_scores) * element, (2 * visible + all_scores) * element


def embedding_grad(inputs: Inputs, how: Any) -> Tensor:
    """Its result is in the total."""
    return add_embedding_grad(inputs["total"], inputs["grad"], inputs["ids"], implementation=how)


def embedding_passes(probabilities: Callable[[int], Tensor]) -> Callable[[Size, int], tuple[int, int]]:
    """Reads the gradients, and reads and writes the fp32 rows of all tokens that are expected to occur.

    `probabilities` takes the vocabulary's size. It is called late, because a computation while this module
    is imported would start threads, and processes that are forked afterwards would wait for those forever.
    """

    def moved(size: Size, element: int) -> tuple[int, int]:
        distinct = float((1 - (1 - probabilities(VOCABULARY)) ** size.rows).sum())
        return int((size.rows * element + 2 * 4 * distinct) * size.width), 0

    return moved


# Microbatches of the three smallest models. Tables with rows of 64K would be tens of gigabytes in fp64.
EMBEDDINGS = (Size(16384, 768), Size(8192, 1024), Size(8192, 2048))

OPERATIONS: dict[str, Operation] = {
    "layer_norm": Operation(
        rows_of,
        lambda i, how: layer_norm(i["x"], i["weight"], i["bias"], EPS, implementation=how),
        where("layernorm", "norm", hidden),
        by=("x", "weight", "bias"),
        moved=passes(2, 3),
        goals=(0.95, 0.85),
        plain=lambda i: F.layer_norm(i["x"], i["weight"].shape, i["weight"], i["bias"], EPS),
        liger=lambda liger, i: liger.liger_layer_norm(i["x"], i["weight"], i["bias"], EPS),
    ),
    "layer_norm with residual": Operation(
        rows_and_residual,
        lambda i, how: layer_norm(
            i["x"], i["weight"], i["bias"], EPS, residual=i["residual"], implementation=how
        ),
        where("layernorm", "norm", hidden),
        by=("x", "weight", "bias", "residual"),
        moved=passes(4, 4),
        goals=(0.95, 0.85),
    ),
    "rms_norm": Operation(
        rows_of,
        lambda i, how: rms_norm(i["x"], i["weight"], EPS, implementation=how),
        where("rmsnorm", "norm", hidden),
        by=("x", "weight"),
        moved=passes(2, 3),
        goals=(0.95, 0.85),
        plain=lambda i: F.rms_norm(i["x"], i["weight"].shape, i["weight"], EPS),
        liger=lambda liger, i: liger.liger_rms_norm(i["x"], i["weight"], EPS, in_place=False),
    ),
    "rms_norm with residual": Operation(
        rows_and_residual,
        lambda i, how: rms_norm(i["x"], i["weight"], EPS, residual=i["residual"], implementation=how),
        where("rmsnorm", "norm", hidden),
        by=("x", "weight", "residual"),
        moved=passes(4, 4),
        goals=(0.95, 0.85),
    ),
    "causal_softmax": Operation(
        scores,
        lambda i, how: causal_softmax(i["scores"], SCALE, how),
        attention_scores,
        by=("scores",),
        moved=causal_passes,
    ),
    "cross_entropy": Operation(
        logits,
        lambda i, how: cross_entropy(i["logits"], i["targets"], implementation=how),
        vocabulary,
        by=("logits",),
        moved=passes(1, 2),
        goals=(0.95, 0.95),
        plain=lambda i: F.cross_entropy(i["logits"].float(), i["targets"], reduction="none"),
        liger=lambda liger, i: liger.liger_cross_entropy(i["logits"], i["targets"], reduction="none"),
    ),
    "cross_entropy with gradient": Operation(
        logits,
        cross_entropy_with_gradient,
        vocabulary,
        moved=passes(2, 0),
    ),
    "linear_cross_entropy": Operation(
        hidden_and_vocabulary,
        lambda i, how: linear_cross_entropy(i["hidden"], i["weight"], i["targets"], implementation=how),
        vocabulary,
        by=("hidden", "weight"),
        plain=lambda i: F.cross_entropy(
            F.linear(i["hidden"], i["weight"]).float(), i["targets"], reduction="sum"
        ),
        measured_at=(Size(8192, 50304), Size(8192, 128256)),
    ),
    "gelu": Operation(
        rows_of,
        lambda i, how: bias_gelu(i["x"], implementation=how),
        where("gelu", "activation", feed_forward),
        by=("x",),
        moved=passes(2, 3),
        goals=(0.95, 0.95),
    ),
    "bias_gelu": Operation(
        rows_of,
        lambda i, how: bias_gelu(i["x"], i["bias"], implementation=how),
        where("gelu", "activation", feed_forward),
        by=("x", "bias"),
        moved=passes(2, 3),
        goals=(0.95, 0.85),
    ),
    "swiglu": Operation(
        gate_and_up,
        lambda i, how: swiglu(i["x"], implementation=how),
        where("swiglu", "activation", feed_forward),
        by=("x",),
        moved=passes(3, 5),
        goals=(0.95, 0.95),
        liger=lambda liger, i: liger.liger_swiglu(*i["x"].chunk(2, -1)),
    ),
    "rope": Operation(
        heads,
        lambda i, how: rope(i["x"], i["cos"], i["sin"], implementation=how),
        where("rope", "position", queries),
        by=("x",),
        moved=passes(2, 2),
        goals=(0.95, 0.95),
    ),
    "rope_qkv": Operation(
        grouped_heads,
        lambda i, how: rope_qkv(i["qkv"], i["cos"], i["sin"], implementation=how),
        where("rope", "position", queries_keys_values),
        by=("qkv",),
        moved=passes(2, 2),
        goals=(0.95, 0.95),
    ),
    "rope_qkv_norms": Operation(
        grouped_heads_and_norms,
        lambda i, how: rope_qkv(
            i["qkv"], i["cos"], i["sin"], norms=(i["q_weight"], i["k_weight"], EPS), implementation=how
        ),
        where("rope", "position", queries_keys_values),
        by=("qkv", "q_weight", "k_weight"),
        moved=passes(2, 3),
        goals=(0.95, 0.85),
    ),
    "split_heads": Operation(
        grouped_heads_and_bias,
        lambda i, how: split_heads(i["qkv"], i["bias"], implementation=how),
        where("learned", "position", queries_keys_values),
        by=("qkv", "bias"),
        moved=passes(0, 2),
        goals=(None, 0.85),
    ),
    "bias_dropout_residual": Operation(
        rows_and_residual,
        lambda i, how: bias_dropout_residual(
            i["x"], i["bias"], i["residual"], PROBABILITY, KEY, implementation=how
        ),
        hidden,
        by=("x", "bias", "residual"),
        moved=passes(3, 2),
        goals=(0.95, 0.85),
        plain=lambda i: i["residual"] + F.dropout(i["x"] + i["bias"], PROBABILITY),
    ),
    "spread and combine": Operation(
        routed,
        lambda i, how: combine(
            spread(i["x"], i["slots"], implementation=how), i["slots"], i["weights"], implementation=how
        ),
        expert_rows,
        by=("x", "weights"),
        moved=passes(3, 4.5),  # of the rows, of which there are twice as many as tokens
        goals=(None, None),
    ),
    "embedding_grad": Operation(
        embedded_tokens,
        embedding_grad,
        hidden,
        moved=embedding_passes(uniform),
        goals=(None, None),  # sorting the ids takes time, but moves few bytes
        measured_at=EMBEDDINGS,
    ),
    "embedding_grad of text": Operation(
        embedded_text,
        embedding_grad,
        hidden,
        moved=embedding_passes(zipf),
        goals=(None, None),
        measured_at=EMBEDDINGS,
    ),
    "grouped_product": Operation(  # with both of its gradients
        rows_of_experts,
        lambda i, how: (
            grouped_product(i["x"], i["weight"], i["ends"], implementation=how),
            grouped_product(i["grad"], i["weight"].mT, i["ends"], implementation=how),
            grouped_outer(i["grad"], i["x"], i["ends"], i["x"].dtype, implementation=how),
        ),
        expert_rows,
    ),
    "adamw": Operation(
        optimizer_state,
        adamw,
        parameters,
        moved=lambda size, element: ((28 + (2 if element == 2 else 0)) * size.rows * size.width, 0),
        plain=torch_adamw,
        measured_at=(Size(1024, 65536),),
        small=("_prepare_kernel",),
    ),
    "sum_of_squares": Operation(
        tensors,
        lambda i, how: built(i, how, lambda: SumOfSquares(i["tensors"], implementation=how))(),
        parameters,
        moved=passes(1, 0),
        plain=lambda i: torch.nn.utils.get_total_norm(i["tensors"]).square(),
        measured_at=(Size(1024, 65536),),
        small=("_total_kernel",),
    ),
}
