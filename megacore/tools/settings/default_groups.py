"""Which parameters a rule for hidden matrices leaves to AdamW, where `optim.kind` names it:
as an entry of `optim.groups`.
"""

import re
from fnmatch import fnmatchcase
from typing import Any

from megacore.config import Config
from megacore.config.optim_groups import ParameterGroups
from megacore.config.source import blaming
from megacore.errors import ConfigError
from megacore.tools.settings.group_table import parameter_shards


def others_entry(config: Config) -> dict[str, Any] | None:
    """AdamW for all that no entry of `optim.groups` matches and that is no hidden matrix, by the
    placements that layers state; None if there is nothing of that kind. Raises `ConfigError` for a
    model without hidden matrices.
    """
    groups = ParameterGroups(config.optim)
    with blaming(config, ", layers"):
        shards = parameter_shards(config)
    rule, left = (
        groups.every[-1].rule,
        {name: shard for name, shard in shards.items() if groups.of(name).number == 0},
    )
    hidden = [name for name, shard in left.items() if shard.is_hidden]
    if not hidden:
        none = (
            "optim.groups gives all to others"
            if any(shard.is_hidden for shard in shards.values())
            else "the model has none"
        )
        raise ConfigError(
            "optim.kind", f"{rule.name} updates hidden matrices, and {none}", "adamw, or layers with matrices"
        )
    others = [name for name in left if name not in set(hidden)]
    entry = {"match": patterns(others, hidden), "kind": "adamw"}
    lr = getattr(rule.settings, rule.others_lr) if rule.others_lr else None
    return None if not others else entry if lr is None else entry | {"lr": lr}


def patterns(names: list[str], but: list[str]) -> list[str]:
    """Patterns that match all of `names`, and none of `but`: one for equal parts of several
    layers, where that is possible.
    """
    found: dict[str, None] = {}
    for name in names:
        folded = re.sub(r"(?<=\.)\d+(?=\.)", "*", name)
        found[name if any(fnmatchcase(other, folded) for other in but) else folded] = None
    return list(found)
