"""Which parameters have which optimizer and settings, as `--print-config` shows it."""

import re
from collections.abc import Iterable

from megacore.config import Config
from megacore.config.optim_groups import KEY, ParameterGroup, ParameterGroups
from megacore.distributed.shard import Shard, shard_of
from megacore.model.stage import whole_model


def group_table(config: Config) -> str:
    """The table, or "" if all parameters have the same. Raises `ConfigError` as `check_engine`."""
    if not config.optim.groups and config.model.parametrization == "standard":
        return ""
    groups, shards = ParameterGroups(config.optim), parameter_shards(config)
    groups.check(shards)
    members: dict[ParameterGroup, list[str]] = {group: [] for group in groups.every}
    for name, shard in shards.items():
        members.setdefault(groups.of(name, shard), []).append(name)
    lines = [f"{KEY}, as they apply (weight decay: to matrices alone):"]
    for group, own in members.items():
        settings = "".join(
            f" {key}={value:g}" if isinstance(value, float) else f" {key}={value}"
            for key, value in group.rule.settings
        )
        title = f"{KEY}[{group.number - 1}]" if group.number else "others"
        if group not in groups.every and group.factor:  # else its rate is 0 at every width
            title += f", rate by width × {group.factor / groups.every[group.number - 1].factor:.6g}"
        lines.append(
            f"  {title}: {group.rule.name} lr={group.lr:g} weight_decay={group.weight_decay:g}{settings}"
        )
        lines += [f"    {text}" for text in folded(own)] or ["    no parameter"]
    return "\n".join(lines)


def parameter_shards(config: Config) -> dict[str, Shard]:
    """The placement on one process of every trained parameter of a config's model, by name.

    Of megacore's own blocks one with experts and one without are built, where there are both: others differ
    from these in their names alone.
    """
    model, built = config.model, config
    if not model.is_custom:
        kinds = [model.has_experts(i) for i in range(model.num_layers)]
        of = [kinds.index(kind) for kind in kinds]  # the first block that is alike
        built = config.model_copy(update={"model": model.model_copy(update={"num_layers": max(of) + 1})})
    shards = {
        name: shard_of(parameter)
        for name, parameter in whole_model(built, "meta").named_parameters()
        if parameter.requires_grad
    }
    if model.is_custom:
        return shards
    parts = {first: [name for name in shards if name.startswith(f"blocks.{first}.")] for first in {*of}}
    blocks = {
        own.replace(f".{first}.", f".{i}.", 1): shards[own]
        for i, first in enumerate(of)
        for own in parts[first]
    }
    begin = next((i for i, name in enumerate(shards) if name.startswith("blocks.")), len(shards))
    ends = [(name, shard) for name, shard in shards.items() if not name.startswith("blocks.")]
    return dict(ends[:begin]) | blocks | dict(ends[begin:])


def folded(names: Iterable[str]) -> list[str]:
    """Names, those of equal parts of several blocks as one line: `blocks.{0,1,2}.norm.weight`."""
    found: dict[str, list[str]] = {}
    for name in names:
        number = re.search(r"(?<=\.)\d+(?=\.)", name)
        form = name if number is None else f"{name[: number.start()]}#{name[number.end() :]}"
        found.setdefault(form, []).append(number.group() if number else "")
    return [
        form if form not in found or numbers == [""] else form.replace("#", runs(numbers), 1)
        for form, numbers in found.items()
    ]


def runs(numbers: list[str]) -> str:
    """Numbers, ascending, as `3`, or as `{0-5,7}`."""
    runs: list[list[int]] = []
    for number in sorted(map(int, numbers)):
        if runs and runs[-1][-1] == number - 1:
            runs[-1] = [runs[-1][0], number]
        else:
            runs.append([number])
    texts = ["-".join(map(str, run)) for run in runs]
    return texts[0] if len(numbers) == 1 else f"{{{','.join(texts)}}}"
