"""Rules of experts: which settings belong together, and what the ranks can divide."""

import json

from megacore.config.experts import ExpertSettings
from megacore.config.schema import Config, resolved
from megacore.errors import ConfigError


def check_experts(config: Config) -> None:
    """Raises `ConfigError` for the first rule of experts that a resolved config breaks."""
    model, parallel = config.model, config.parallel
    if model.num_experts is None:
        check_none(config)
        return
    count, groups = model.num_experts, model.expert_groups
    if model.experts_per_token > count:
        wrong = f"a token cannot go to {model.experts_per_token} of {count} experts"
        raise ConfigError("model.experts_per_token", wrong, f"at most model.num_experts {count}")
    if not any(map(model.has_experts, range(model.num_layers))):
        key = "model.first_dense" if model.first_dense >= model.num_layers else "model.experts_every"
        raise ConfigError(
            key,
            f"none of {model.num_layers} blocks has experts",
            "a smaller number, or model.num_experts=null",
        )
    divides("model.num_experts", count, "model.expert_groups", groups)
    if model.groups_per_token > groups:
        right = f"at most model.expert_groups {groups}"
        raise ConfigError(
            "model.groups_per_token",
            f"a token cannot choose {model.groups_per_token} of {groups} groups",
            right,
        )
    if (among := count // groups * model.groups_per_token) < model.experts_per_token:
        wrong = (
            f"{model.groups_per_token} of {groups} groups have {among} experts, and a token goes to "
            f"{model.experts_per_token}"
        )
        raise ConfigError("model.groups_per_token", wrong, "more groups a token, or fewer experts")
    usual = ExpertSettings.model_fields["balance_coefficient"].default
    if model.router_balance == "none" and model.balance_coefficient != usual:
        raise ConfigError(
            "model.balance_coefficient",
            "router_balance is none: there is no such loss",
            f"{usual}, or a router_balance",
        )
    if model.router_bias_rate and not model.router_bias:
        raise ConfigError(
            "model.router_bias",
            "is false, and router_bias_rate would move a bias",
            "true, or model.router_bias_rate=0",
        )
    check_others(config)
    divides("model.num_experts", count, "parallel.expert", parallel.expert)
    tensor = parallel.expert_tensor or parallel.tensor
    divides("model.expert_ffn_size", resolved(model.expert_ffn_size), "parallel.expert_tensor", tensor)
    if (shared := model.shared_experts * resolved(model.expert_ffn_size)) % parallel.tensor:
        wrong = (
            f"{shared} features of the experts that all tokens share are not a multiple of "
            f"parallel.tensor {parallel.tensor}"
        )
        raise ConfigError(
            "model.shared_experts", wrong, "with model.expert_ffn_size a product that tensor ranks divide"
        )
    if isinstance(parallel.data, int) and (ranks := config.token_ranks * parallel.tensor) % (
        parallel.expert * tensor
    ):
        key = "parallel.expert_tensor" if parallel.expert == 1 else "parallel.expert"
        wrong = (
            f"expert {parallel.expert} × expert_tensor {tensor} do not divide the {ranks} ranks of "
            "data × context × tensor"
        )
        raise ConfigError(key, wrong, f"sizes whose product divides {ranks}")
    if not parallel.sequence and config.rank_tokens % parallel.tensor:
        wrong = (
            f"tensor ranks divide the {config.rank_tokens} tokens of a microbatch among themselves "
            "before they go to experts"
        )
        raise ConfigError("parallel.tensor", wrong, f"a divisor of {config.rank_tokens}")


def check_none(config: Config) -> None:
    """Refuses settings of experts where there are none."""
    for key, field in ExpertSettings.model_fields.items():
        if getattr(config.model, key) != field.default:
            raise ConfigError(
                f"model.{key}", "there are no experts", f"{field.default or 'null'}, or model.num_experts=8"
            )
    for key, alone in (("expert", 1), ("expert_tensor", None), ("expert_halves", False)):
        if getattr(config.parallel, key) != alone:
            wrong, other = "there are no experts to divide", ", or model.num_experts=8"
            if config.model.hf is not None:
                wrong, other = "only experts of megacore's own layers have ranks of their own", ""
            raise ConfigError(f"parallel.{key}", wrong, f"{json.dumps(alone)}{other}")


def check_others(config: Config) -> None:
    """Refuses what experts do not go with."""
    model = config.model
    if model.arranged:
        if model.norm_place != "pre":
            wrong = f"{model.norm_place} puts norms behind the branches, where blocks with experts have none"
            raise ConfigError("model.norm_place", wrong, "pre")
        wrong = f"{model.branches} branches read the same, and experts read what attention added"
        raise ConfigError("model.branches", wrong, "serial")
    if model.parametrization == "mup":
        raise ConfigError("model.parametrization", "mup knows no rates for experts", "standard")
    if config.engine.kind == "deepspeed":
        raise ConfigError(
            "engine.kind",
            "DeepSpeed sums all gradients over the same ranks, and experts' over fewer",
            "native or fsdp",
        )


def divides(key: str, size: int, by_key: str, by: int) -> None:
    """Refuses a `size` at `key` that is not a multiple of `by`."""
    if size % by:
        down = size - size % by
        raise ConfigError(
            key,
            f"{size} is not a multiple of {by_key} {by}",
            f"{f'{down} or ' if down else ''}{down + by} would be",
        )
