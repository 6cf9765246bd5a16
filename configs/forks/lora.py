"""A GPT that learns small corrections of its matrices, and nothing else (Hu et al. 2021, LoRA).

Beside a matrix W stands ``alpha / rank · up · down``, of so few columns and rows that it is cheap to keep and
to update; `up` begins at
zero. All else is frozen: it has no gradient and no optimizer state. `model.adapt` says by patterns of names
which matrices get one. `checkpoint.weights` gives the first weights of what is frozen. `merge_lora.py` beside
this file puts adapters into their matrices.
"""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from functools import cache
from typing import Any, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from megacore.config import Config
from megacore.config.model import ModelConfig
from megacore.config.schema import DataConfig
from megacore.distributed.communicator import SOLO
from megacore.distributed.shard import Shard, new_parameter, replicated, shard_of
from megacore.distributed.topology import alone
from megacore.errors import ConfigError
from megacore.model.gpt import gpt
from megacore.model.layers import Layer, Layers, LayerSpec
from megacore.section import Count, Factor
from megacore.tensor_parallel.linear import ColumnLinear, RowLinear, column_linear


class Settings(ModelConfig):
    adapt: tuple[str, ...] = Field(
        ("*.attention.*", "*.feed_forward.*"),
        description="patterns of the names of the matrices that get adapters",
    )
    rank: Count = Field(8, description="rank of the adapters")
    alpha: Factor = Field(
        16.0, description="scale of the adapters: their output is multiplied by `alpha` / `rank`"
    )

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.attention_gate is not None:
            raise ValueError("model.attention_gate's products have no adapters (right: null)")
        return self


class Whole(nn.Module):
    """A matrix that every tensor rank has.

    With sequence parallelism each applies it to its own tokens, so its gradient is partial.
    """

    def __init__(
        self, shape: tuple[int, int], init_std: float, sequence: bool, where: dict[str, Any]
    ) -> None:
        super().__init__()
        shard = Shard(
            shape, (replicated(where["group"], partial=sequence),), decay=True, init_std=init_std or None
        )
        self.weight = new_parameter(shard, where["dtype"], where["device"])

    def forward(self, x: Tensor) -> Tensor:
        """``[tokens, in]`` → ``[tokens, out]``."""
        return column_linear(x, self.weight, None, SOLO, False)


class Adapter(nn.Module):
    """``up(down(x))`` beside a layer, of whose two matrices one is split over the
    tensor ranks as the layer's own.

    column    down is whole, and up has the outputs split; under sequence parallelism what is gathered is
              `rank` wide
    row       down has the inputs split, and up is whole; what is summed over the ranks is `rank` wide
    """

    def __init__(
        self, linear: ColumnLinear | RowLinear, rank: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        shard, where = shard_of(linear.weight), dict[str, Any](group=linear.group, dtype=dtype, device=device)
        *outputs, inputs = shard.global_shape
        std, options = (3 * inputs) ** -0.5, {"bias": False, "sequence": linear.sequence, **where}
        if isinstance(linear, ColumnLinear):
            (dim,) = shard.cuts
            self.down: nn.Module = Whole((rank, inputs), std, linear.sequence, where)
            self.up: nn.Module = ColumnLinear(
                rank, tuple(outputs), dim=dim, init_std=0.0, matrices=shard.matrices, **options
            )
        else:
            options |= {"activation": linear.activation, "recompute": linear.recompute}
            self.down = RowLinear(inputs, rank, init_std=std, **options)
            self.up = Whole((outputs[0], rank), 0.0, linear.sequence, where)

    def forward(self, *x: Tensor) -> Tensor:
        """What the layer is given → what is added to its result, up to a factor."""
        return self.up(self.down(*x))  # type: ignore[no-any-return]


def matrices_of(layer: nn.Module, name: str) -> dict[str, ColumnLinear | RowLinear]:
    """The matrices of a layer that may have adapters, by the names of their weights in the model."""
    return {
        f"{name}.{own}.weight": module
        for own, module in layer.named_modules()
        if isinstance(module, ColumnLinear | RowLinear)
    }


class Adapted(Layer):
    """A layer that is frozen but for its adapters, before it in the order of classes."""

    def __init__(self, name: str, *arguments: Any) -> None:
        super().__init__(*arguments)  # type: ignore[call-arg]
        config, _, dtype, device = arguments[-4:]
        model, scale = config.model, config.model.alpha / config.model.rank
        self.requires_grad_(False)
        for own, linear in matrices_of(self, name).items():
            if any(fnmatchcase(own, pattern) for pattern in model.adapt):
                linear.adapter = Adapter(linear, model.rank, dtype, device)
                linear.register_forward_hook(
                    lambda layer, given, y: torch.add(y, layer.adapter(*given), alpha=scale)
                )

    @classmethod
    def shares(cls, name: str, *arguments: Any) -> Mapping[str, str]:  # type: ignore[override]
        """See `Layer`."""
        return super().shares(*arguments)


@cache
def adapted(kind: type) -> type:
    """A class of layers with adapters."""
    return type(f"Adapted{kind.__name__}", (Adapted, kind), {})


@cache
def names_of(config: Config) -> tuple[str, ...]:
    """The matrices that may have adapters."""
    how = config, alone(config), torch.float32, torch.device("meta")
    return tuple(name for spec in gpt(config) for name in matrices_of(spec.build(*how), spec.name))


def layers(config: Config) -> Layers:
    """The GPT's, each with adapters. Whoever has other layers puts them in place of `gpt`."""
    names = names_of(config.model_copy(update={"data": DataConfig()}))  # a list of corpora is no key
    for pattern in config.model.adapt:  # type: ignore[attr-defined]
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigError(
                "model.adapt",
                f"{pattern} matches no matrix",
                f"a pattern of names such as {names[0]} and {names[-1]}",
            )
    return [LayerSpec(spec.name, adapted(spec.kind), (spec.name, *spec.arguments)) for spec in gpt(config)]  # type: ignore[arg-type]
