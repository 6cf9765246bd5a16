"""What the planner says of the config's own layout: whether it fits, what would, how long a step
takes, and what the run costs.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from megacore.config.schema import Config
from megacore.distributed.axes import divisors
from megacore.errors import ConfigError
from megacore.tools.choices.context_method import METHODS
from megacore.tools.choices.partition import partitioned
from megacore.tools.planner.calibrate import calibrate
from megacore.tools.planner.devices import Cluster, DeviceSpec
from megacore.tools.planner.error_bars import bar
from megacore.tools.planner.memory import fullest_rank, largest_part
from megacore.tools.planner.profile import Profile, profile, unexplained
from megacore.tools.planner.routing import Routing
from megacore.tools.planner.run_cost import cost_lines
from megacore.tools.planner.search import Candidate, replace_config
from megacore.tools.planner.step_time import predict
from megacore.tools.planner.workload import routed, setting_of
from megacore.tools.settings.ds_config import check_ds_config
from megacore.tools.settings.model import unexchanged
from megacore.tools.settings.validation import check

Change = dict[str, Any]  # by key


def fit_text(
    config: Config, device: DeviceSpec | None, memory_gib: float | None, routing: Routing | None = None
) -> str:
    """Whether the layout fits the device, or `--memory-gib`, and what would; nothing if
    neither says how much there is.
    """
    limit = memory_gib if memory_gib is not None else device.memory_gib if device else None
    if limit is None:
        return ""
    of = "--memory-gib" if memory_gib is not None or device is None else device.name
    return "\n" + "\n".join(fit_lines(config, limit, of, routing)) + "\n"


def fit_lines(config: Config, limit: float, of: str, routing: Routing | None = None) -> list[str]:
    """Whether the fullest rank fits in `limit` GiB, which are `of` a device or an
    option; if not, what would.
    """
    rank, memory, needs = fullest_rank(config, routing)
    where = f"pipeline rank {rank} needs most, {needs:,.2f} GiB of {limit:g} ({of})"
    if needs <= limit:
        return [f"fits          yes: {where}; {limit - needs:,.2f} GiB are left"]
    missing = f"{needs - limit:,.2f} GiB are missing"
    lines = [f"fits          NO: {where}; {missing}; most memory goes to {largest_part(memory)}"]
    tried = sorted(
        ((fullest_rank(other, routing)[2], words) for words, other in changed(config)),
        key=lambda pair: pair[0],
    )
    enough = [f"{words} ({gib:,.2f})" for gib, words in tried if gib <= limit]
    if enough:
        return [*lines, f"              each of these changes makes it fit (GiB): {'; '.join(enough)}"]
    least = (
        f": the least is {tried[0][0]:,.2f} GiB, by {tried[0][1]}" if tried and tried[0][0] < needs else ""
    )
    return [*lines, f"              no single change does{least}; --search tries all layouts"]


def changed(config: Config) -> Iterator[tuple[str, Config]]:
    """The config with one thing changed that saves memory, on as many ranks, and the settings that say so.

    Only what runs.
    """
    for change in changes(config):
        other = config
        for key, value in change.items():
            section, _, name = key.partition(".")
            other = replace_config(other, section, **{name: value})
        try:
            check(other, config.world_size)
            check_ds_config(other)
            yield (
                " ".join(
                    f"{key}={str(value).lower() if isinstance(value, bool) else value}"
                    for key, value in change.items()
                ),
                partitioned(other),
            )
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


def step_report(
    config: Config,
    device: DeviceSpec,
    cluster: Cluster,
    run_folder: str | None,
    tokens: float | None,
    price: float | None,
    routing: Routing | None = None,
) -> str:
    """The predicted step and its terms, and what the whole run costs, as lines. Raises `ConfigError`."""
    constants, source = profile("megacore"), "constants of megacore are estimates, not measured on a GPU"
    if run_folder is not None:
        constants, ran, seconds = calibrate(constants, run_folder, device, cluster)
        source = (
            f"calibrated by {seconds:.4g} s a step of {run_folder}, {ran.world} ranks and "
            f"{ran.global_batch} sequences"
        )
    setting = routed(setting_of(config), routing)
    found = predict(setting, device, cluster, constants)
    speed = setting.global_batch * setting.seq / found.step
    lines = [
        f"\npredicted     {found.step:.4g} s a step, {speed:,.0f} tokens/s on {device.name} over "
        f"{cluster.name}; {source}"
    ]
    for name, value in sorted(found.terms.items(), key=lambda term: -term[1]):
        if value > 5e-4 * found.step:
            lines.append(f"  {name:<12}{value:12.4f} s{value / found.step:8.1%}")
    if setting.mixture is not None:
        load = (
            "balanced"
            if routing is None
            else f"{setting.mixture.busiest:.2f} times the mean on the busiest rank, as that run logged"
        )
        lines.append(f"experts' load {load}")
    lines += [
        "",
        *worth(
            Candidate(config, found, config.world_size * device.peak_flops[setting.precision]),
            constants,
            cluster,
        ),
    ]
    train = config.train
    tokens = train.samples_through(train.steps) * train.seq_len if tokens is None else tokens
    steps, before, less = train.batches_in(math.ceil(tokens / train.seq_len)), 0, 0.0
    for last, size in train.batch_ramp:
        small = predict(replace(setting, global_batch=size), device, cluster, constants).step
        less, before = less + (min(last, steps) - min(before, steps)) * (found.step - small), last
    price = config.log.price_per_device_hour if price is None else price
    lines += [
        "",
        *cost_lines(config, found.step, tokens, cluster.node_ranks, price, device.power_watts, less),
    ]
    return "\n".join(lines + context_note(config, device, cluster, constants)) + "\n"


def worth(found: Candidate, constants: Profile, cluster: Cluster) -> list[str]:
    """How far off the prediction may be, what its terms are worth, and its MFU."""
    config, odd = found.config, unexplained(constants)
    error = bar(config.world_size, config.parallel.pipeline, cluster.node_ranks)
    causal = (
        ""
        if found.mfu_causal is None
        else f", and {found.mfu_causal:.1%} without what a causal mask hides (mfu_causal)"
    )
    lines = [f"error         {error.around(found.seconds)} s: {error}; none was megacore's own"]
    lines.append(
        "terms         are counts times constants, which also stand for what the model leaves out: no "
        "term is a measurement"
    )
    if odd:
        lines.append(f"              no physics explains {', '.join(odd)}")
    return [*lines, f"MFU           {found.mfu:.1%} over all pairs of tokens (mfu){causal}"]


def context_note(config: Config, device: DeviceSpec, cluster: Cluster, constants: Profile) -> list[str]:
    """A line if context ranks would be faster by another method than the config's, or than `auto`,
    which does not know these links.
    """
    setting = setting_of(config)
    possible = [method for method in METHODS if method != "ulysses" or unexchanged(config) is None]
    seconds = {
        method: predict(replace(setting, context_method=method), device, cluster, constants).step
        for method in possible
    }
    own, best = setting.context_method, min(seconds, key=seconds.__getitem__)
    saved = seconds[own] - seconds[best]
    if setting.context == 1 or saved <= 5e-4 * seconds[own]:
        return []
    chosen = " (auto)" if config.parallel.context_method == "auto" else ""
    return [
        f"Context ranks attend by {own}{chosen}; here {best} would save {saved:.3g} s a step: "
        f"parallel.context_method={best}"
    ]
