"""Whether the config's own layout fits a device, and if not, which one change would make it fit."""

from collections.abc import Iterator
from typing import Any

from megacore.config.schema import Config
from megacore.distributed.axes import divisors
from megacore.errors import ConfigError
from megacore.tools.choices.partition import partitioned
from megacore.tools.planner.memory import fullest_rank, largest_part
from megacore.tools.planner.search import replace_config
from megacore.tools.settings.validation import check

Change = dict[str, Any]  # by key


def fit_lines(config: Config, limit: float, of: str) -> list[str]:
    """Whether the fullest rank fits in `limit` GiB, which are `of` a device or an option; if not, what would."""
    rank, memory, needs = fullest_rank(config)
    where = f"pipeline rank {rank} needs most, {needs:,.2f} GiB of {limit:g} ({of})"
    if needs <= limit:
        return [f"fits          yes: {where}; {limit - needs:,.2f} are left"]
    lines = [f"fits          NO: {where}: {needs - limit:,.2f} too many; most of it is {largest_part(memory)}"]
    tried = sorted(((fullest_rank(other)[2], words) for words, other in changed(config)), key=lambda pair: pair[0])
    enough = [f"{words} ({gib:,.2f})" for gib, words in tried if gib <= limit]
    if enough:
        return [*lines, f"              any of these would, with so many GiB: {'; '.join(enough)}"]
    least = f": the least is {tried[0][0]:,.2f} GiB, by {tried[0][1]}" if tried and tried[0][0] < needs else ""
    return [*lines, f"              no single change does{least}; --search tries all layouts"]


def changed(config: Config) -> Iterator[tuple[str, Config]]:
    """The config with one thing changed that saves memory, on as many ranks, and the settings that say so. Only what runs."""
    for change in changes(config):
        other = config
        for key, value in change.items():
            section, _, name = key.partition(".")
            other = replace_config(other, section, **{name: value})
        try:
            check(other, config.world_size)
            yield " ".join(f"{key}={str(value).lower() if value is True else value}" for key, value in change.items()), partitioned(other)
        except ConfigError:  # it would be refused
            continue


def changes(config: Config) -> Iterator[Change]:
    """What one can do about memory, by itself."""
    train, parallel, data = config.train, config.parallel, config.data_size
    modes = ("none", "selective", "full")
    for mode in modes[modes.index(train.recompute) + 1 :]:
        yield {"train.recompute": mode}
    for size in divisors(train.micro_batch_size)[-2::-1]:
        yield {"train.micro_batch_size": size}
    if config.engine.kind == "native" and config.token_ranks > 1:
        if not config.engine.shard_optimizer:
            yield {"engine.shard_optimizer": True}
        yield {"engine.kind": "fsdp", "engine.shard_optimizer": False}
    if data % 2 == 0:
        yield {"parallel.tensor": 2 * parallel.tensor, "parallel.data": data // 2}
        yield {"parallel.pipeline": 2 * parallel.pipeline, "parallel.data": data // 2}
