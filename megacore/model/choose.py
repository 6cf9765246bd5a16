"""Which layers a config's model has: the GPT's, or those of a file of the user's own."""

from typing import Any

import torch

from megacore.config import Config
from megacore.config.source import blaming, is_plain, source_of
from megacore.distributed.shard import Shard
from megacore.distributed.topology import Topology
from megacore.errors import ConfigError
from megacore.model.gpt import gpt
from megacore.model.layers import Layers, LayerSpec, check, losses_of, sharing
from megacore.model.z_loss import Z_LOSS


def layers_of(config: Config) -> Layers:
    """The layers of a config's model: a first one, `model.num_layers` others, and a last one.

    A file of `model.source` gives them by a function ``layers(config)``, or only its `Block`, which then is
    each of the others.
    """
    source = source_of(config)
    if is_plain(config):
        from megacore.model.plain.layers import plain_layers  # which only such models load

        with blaming(config):
            return custom(plain_layers(config))
    if source is None:
        return gpt(config)
    with source.blamed(", layers"):
        layers = source.layers(config) if source.layers else gpt(config, source.block)
        if len(layers) != config.model.num_layers + 2:
            raise ValueError(
                f"{len(layers)} of them; model.num_layers={config.model.num_layers} counts all but the "
                "first and the last"
            )
        check(layers)
    # a head of its own would ignore it, and nothing would say so
    if config.model.z_loss is not None and Z_LOSS not in losses_of(layers):
        wrong = f"no layer of {source.path} declares the loss {Z_LOSS}"
        raise ConfigError(
            f"model.{Z_LOSS}", wrong, "null, or a head whose class megacore.model.z_loss.head_of gives"
        )
    return custom(layers)


def sharing_of(config: Config) -> dict[str, tuple[int, ...]]:
    """Which custom layers use a parameter together, by its name."""
    with blaming(config, ", layers"):
        return sharing(layers_of(config), config)


def custom(layers: Layers) -> Layers:
    """The same layers, whose mistakes are the user's."""
    return [CustomSpec(spec.name, spec.kind, spec.arguments) for spec in layers]


class CustomSpec(LayerSpec):
    """A layer of a user's file or of a class of transformers: its mistakes are theirs."""

    def build(self, config: Config, mesh: Topology, dtype: torch.dtype, device: torch.device) -> Any:
        """See `LayerSpec`. Raises `ConfigError` if it cannot be made, or has a parameter without a record."""
        called = self.name.replace("blocks.", "block ")
        with blaming(config, f", {called}"):
            layer = super().build(config, mesh, dtype, device)
        for name, parameter in layer.named_parameters():
            if not isinstance(getattr(parameter, "shard", None), Shard):
                wrong = (
                    f"{config.model.source}: {name} of {called} does not say which part of the whole "
                    "tensor it is"
                )
                right = "a layer of megacore.tensor_parallel, or megacore.distributed.shard.new_parameter"
                raise ConfigError(config.model.custom_key, wrong, right)
        return layer
