"""Whether the model has what the engine and the optimizers of a config need, and the machine too; asked before there is a mesh."""

from collections import Counter

import torch
from torch import nn

from megacore.config import Config
from megacore.config.optim_groups import ParameterGroups
from megacore.config.source import source_of
from megacore.errors import ConfigError
from megacore.model.stage import whole_model
from megacore.pipeline.partition import layer_ranges, placement_of, shared_parameters
from megacore.tools.deepspeed.engine import check_machine
from megacore.tools.settings.group_table import parameter_shards


def check_engine(config: Config, device: torch.device) -> None:
    """Raises `ConfigError` if this machine lacks what `engine.kind` needs, or the model the parameters that `optim.groups` names."""
    groups = ParameterGroups(config.optim)
    if config.optim.groups or groups.every[-1].rule.whole:
        groups.check(parameter_shards(config))
    if config.model.source is not None:
        check_shared(config)
    if config.engine.kind == "deepspeed":
        check_machine(config, device)


def check_shared(config: Config) -> None:
    """Raises `ConfigError` if layers of a user's file do not share what they say, or have parameters of one name whose gradients nobody
    would sum; or if the engine cannot divide what they share."""
    source, shared = source_of(config), shared_parameters(config)
    assert source is not None
    with source.blamed(", layers"):
        model = whole_model(config, "meta")
    for rank, stages in enumerate(placement_of(config)):
        layers = [model.layers[number] for stage in stages for number in layer_ranges(config)[stage]]
        if not any(parameter.requires_grad for layer in layers for parameter in layer.parameters()):
            wrong = f"of the layers of pipeline rank {rank} no parameter is trained"
            raise ConfigError(
                "model.source", wrong, "one in each rank of the pipeline at least, or fewer ranks"
            )
    places = [place for place, _ in nn.Module.named_parameters(model, remove_duplicate=False)]
    own = Counter(model.logical_name(place) for place in places if place not in model.shared)
    if strangers := shared.keys() - own.keys():
        raise ConfigError(
            "model.source",
            f"a layer shares {min(strangers)}, which no layer has",
            "the full name of another's parameter",
        )
    pipeline = len(layer_ranges(config)) > 1
    if pipeline and config.model.tie_embeddings and "embedding.weight" not in shared:
        right = "false, or a last layer that does"
        raise ConfigError(
            "model.tie_embeddings", "says that layers share embedding.weight, and none does", right
        )
    if pipeline and (twice := [name for name, count in own.items() if count > 1]):
        wrong = f"several layers have a parameter of one name, {twice[0]}, and do not share it"
        raise ConfigError(
            "model.source", wrong, "names of their own, `shares` (docs/blocks.md), or parallel.pipeline=1"
        )
    rank_of = {stage: rank for rank, stages in enumerate(placement_of(config)) for stage in stages}
    if config.engine.kind == "fsdp" and config.token_ranks > 1:
        for name, stages in shared.items():
            if len({rank_of[stage] for stage in stages}) < len(stages):
                wrong = f"{config.parallel.schedule} gives one rank stages that share {name}, which fsdp cannot divide"
                raise ConfigError("parallel.schedule", wrong, "1f1b, or engine.kind=native")
