"""The maximal update parametrization (muP; Yang et al. 2022): scale initial weights and learning rates by how
much each parameter grows with the model's width.

To find what grows, the layers are built a second time at `model.base_width`, on the meta device, and their
parameters are compared with those of the model. This works for custom layers too. Sizes are those of logical
matrices, so the result does not depend on the layout. docs/research.md lists the rules.
"""

from collections.abc import Iterable
from dataclasses import replace
from math import prod, sqrt

import torch
from torch import nn

from megacore.config import Config
from megacore.config.implied import base_of
from megacore.distributed.shard import Shard, shard_of
from megacore.distributed.topology import alone
from megacore.errors import ConfigError
from megacore.model.choose import layers_of
from megacore.model.layers import DTYPES

KEY = "model.parametrization"


def scale_by_width(config: Config, layers: Iterable[tuple[int, nn.Module]]) -> None:
    """Completes the records of the parameters of some layers, each with its number in the model.

    Raises `ConfigError` if it cannot.
    """
    base = base_of(config)
    specs, how = layers_of(base), (base, alone(base), DTYPES[config.train.precision], torch.device("meta"))
    for number, layer in layers:
        small = dict(specs[number].build(*how).named_parameters())
        for name, parameter in layer.named_parameters():
            called = f"{specs[number].name}.{name}"
            if name not in small:
                raise ConfigError(
                    KEY,
                    f"{called} is not there at model.base_width {config.model.base_width}",
                    "the same parameters",
                )
            parameter.shard = scaled(called, shard_of(parameter), shard_of(small[name]))  # type: ignore[attr-defined]


def scaled(name: str, shard: Shard, base: Shard) -> Shard:
    """A parameter's record, given the one at the base width.

    A hidden matrix is drawn with a variance in proportion to 1 / fan-in, all else as it is at the base width.
    """
    if shard.table or not shard.decay:
        return replace(shard, width=prod(shard.global_shape) / prod(base.global_shape))
    found = {own / other for own, other in zip(fan_ins(shard), fan_ins(base), strict=True)}
    if len(found) != 1:
        wrong = (
            f"{name} "
            f"{'has matrices whose fan-ins do not grow alike' if found else 'does not say which matrices it has'}"  # noqa: E501
        )
        raise ConfigError(KEY, wrong, "two dims, or `matrices` of one fan-in (docs/blocks.md); or standard")
    (width,) = found
    return replace(
        shard, width=width, init_std=None if shard.init_std is None else shard.init_std / sqrt(width)
    )


def fan_ins(shard: Shard) -> list[int]:
    """The inputs of each kind of logical matrix in a parameter."""
    return [matrix.sizes(shard.global_shape)[2] for matrix in shard.logical_matrices]
