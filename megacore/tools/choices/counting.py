"""Counts the products of layers that no formula knows, by running them on tensors without content."""

import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from megacore.config import Config
from megacore.config.source import blaming
from megacore.distributed.topology import alone
from megacore.errors import UserError
from megacore.model.batch import Microbatch, Samples
from megacore.model.choose import layers_of
from megacore.model.context import Context
from megacore.model.embedding import Embedding
from megacore.model.layers import DTYPES, Layers, crossing, fields_of
from megacore.model.rotary import rope_tables
from megacore.model.z_loss import head_of
from megacore.tools.choices.flops import Flops
from megacore.tools.settings.load import resolve

META = torch.device("meta")
Counted = tuple[Flops | None, ...]


def counted_layers(config: Config) -> Counted | None:
    """The operations a token that each layer of a model of the user's own executes: forward, and
    backward without `train.recompute`.

    A None among them is megacore's own first or last layer. None instead of all if they do not run without
    content. On one rank, so that all layouts count alike.
    """
    found = _of_config(config)
    return None if isinstance(found, str) else found


def why_uncounted(config: Config) -> str:
    """Why they do not run without content, for whoever can mend it: the line of the
    file, and what is wrong there.
    """
    found = _of_config(config)
    assert isinstance(found, str), "they are counted"
    return found


def _of_config(config: Config) -> Counted | str:
    model = config.model.model_dump(mode="json", by_alias=True) | {"dropout": 0.0, "kernels": "eager"}
    return _counted(json.dumps(model), config.train.seq_len)


@lru_cache(maxsize=16)
def _counted(model: str, seq_len: int) -> Counted | str:
    config = resolve(
        {"model": json.loads(model), "train": {"seq_len": seq_len, "precision": "fp32"}}, [], "counting", 1
    ).config
    layers = layers_of(config)
    try:
        with blaming(config, ", counting its products"):
            context, ends = context_of(config, layers), (Embedding, head_of(config))
            return tuple(
                None if spec.kind in ends else _of_layer(config, layers, i, context)
                for i, spec in enumerate(layers)
            )
    except UserError as error:
        return error.wrong


def context_of(config: Config, layers: Layers) -> Context:
    """The context of one sequence without content."""
    seq_len, tables, zeros = config.train.seq_len, None, np.zeros((1, config.train.seq_len), np.int64)
    if config.model.position == "rope":
        where = (
            config.head_size,
            config.model.rope_theta,
            torch.float32,
            META,
            config.model.rope_scaling,
            config.model.rotary_share,
        )
        tables = rope_tables(np.arange(seq_len), *where)
    more = {
        name: torch.from_numpy(np.ascontiguousarray(of(Samples(zeros, zeros)))).to(META)
        for name, of in fields_of(layers).items()
    }
    tokens = torch.from_numpy(zeros).to(META)
    batch = Microbatch(tokens, tokens, more=more)
    return Context(1, seq_len, tables, alone(config).tp, False, 0.0, 0, kernels="eager", batch=batch)


def _of_layer(config: Config, layers: Layers, number: int, context: Context) -> Flops:
    layer: nn.Module = layers[number].build(config, alone(config), DTYPES["fp32"], META)
    flows = crossing(layers, number)
    taken = [
        torch.empty(
            flows[name].shape(config, 1, context.seq_len),
            dtype=DTYPES[flows[name].precision(config)],
            device=META,
        )
        for name in layers[number].declared("reads")
    ]
    inputs = [x.requires_grad_() for x in taken if x.is_floating_point()]
    parameters = [parameter for parameter in layer.parameters() if parameter.requires_grad]

    def given() -> list[Tensor]:
        found = layer(*taken, context)
        return [y for y in (found if isinstance(found, tuple) else (found,)) if y.requires_grad]

    with FlopCounterMode(display=False) as forward:
        found = given()
    # Each backward has a forward of its own: a loss writes its gradient over the logits, so there is no
    # second one.
    counts = [forward.get_total_flops(), _backward(found, inputs), _backward(given(), [*inputs, *parameters])]
    products, of_inputs, both = (count / context.seq_len for count in counts)
    return Flops(products, both, both - of_inputs)


def _backward(given: Sequence[Tensor], wanted: Sequence[Tensor]) -> int:
    """The operations of backward from some tensors to others."""
    if not given or not wanted:
        return 0
    with FlopCounterMode(display=False) as backward:
        torch.autograd.grad(given, wanted, [torch.empty_like(y) for y in given], allow_unused=True)
    count: Any = backward.get_total_flops()
    return int(count)
