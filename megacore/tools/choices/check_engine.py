"""Whether the model has what the engine and the optimizers of a config need, and the machine
too; asked before there is a mesh.
"""

import torch

from megacore.config import Config
from megacore.config.optim_groups import ParameterGroups
from megacore.config.source import blaming, is_plain
from megacore.errors import ConfigError
from megacore.model.stage import whole_model
from megacore.pipeline.partition import layer_ranges, placement_of, shared_parameters
from megacore.tools.deepspeed.engine import check_machine
from megacore.tools.settings.group_table import parameter_shards


def check_engine(config: Config, device: torch.device) -> None:
    """Raises `ConfigError` if this machine lacks what `engine.kind` needs, or the model the
    parameters that `optim.groups` names.
    """
    groups = ParameterGroups(config.optim)
    if config.optim.groups or groups.every[-1].rule.whole:
        groups.check(parameter_shards(config))
    if config.model.is_custom:
        check_shared(config)
    if config.engine.kind == "deepspeed":
        check_machine(config, device)


def check_shared(config: Config) -> None:
    """Raises `ConfigError` if custom layers do not share what they say, or have parameters of one
    name whose gradients nobody would sum; or if the engine cannot divide what they share.
    """
    shared = shared_parameters(config)
    with blaming(config, ", layers"):
        model = whole_model(config, "meta")
    for rank, stages in enumerate(placement_of(config)):
        layers = [model.layers[number] for stage in stages for number in layer_ranges(config)[stage]]
        if not any(parameter.requires_grad for layer in layers for parameter in layer.parameters()):
            wrong = f"of the layers of pipeline rank {rank} no parameter is trained"
            raise ConfigError(
                config.model.custom_key, wrong, "one in each rank of the pipeline at least, or fewer ranks"
            )
    # A plain module's weight has another name, and its layers were built only if it is tied as stated.
    must_share = config.model.tie_embeddings and not is_plain(config)
    if must_share and len(layer_ranges(config)) > 1 and "embedding.weight" not in shared:
        right = "false, or a last layer that does"
        raise ConfigError(
            "model.tie_embeddings", "says that layers share embedding.weight, and none does", right
        )
    rank_of = {stage: rank for rank, stages in enumerate(placement_of(config)) for stage in stages}
    if config.engine.kind == "fsdp" and config.token_ranks > 1:
        for name, stages in shared.items():
            if len({rank_of[stage] for stage in stages}) < len(stages):
                wrong = (
                    f"{config.parallel.schedule} gives one rank stages that share {name}, which fsdp "
                    "cannot divide"
                )
                raise ConfigError("parallel.schedule", wrong, "1f1b, or engine.kind=native")
