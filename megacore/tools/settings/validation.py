"""Checks every rule that can be checked before a process group exists; those of the model stand in model.py.

Each refusal names one key, says what is wrong with it, and what would be right.
"""

import re
from collections.abc import Iterator
from itertools import pairwise

from megacore.config.optim_groups import KEY as GROUPS
from megacore.config.optim_groups import ParameterGroups
from megacore.config.parallel import CHUNKS, V_SHAPED
from megacore.config.schema import Config, resolved
from megacore.errors import ConfigError
from megacore.optimizers.rule import AVERAGE, RULES
from megacore.records import LARGEST
from megacore.tools.settings.derive import chunks_of
from megacore.tools.settings.experts import divides
from megacore.tools.settings.model import check_model

RAMP = "train.batch_ramp"
# Bounds far above any run: no number in a config may make a script count or allocate without end.
MOST_TOKENS = 2**31  # of a microbatch
MOST_SAMPLES = 2**61  # of a run: they are counted in 64 bits
MOST_MICROBATCHES = 2**18  # of a step, times stages: a schedule with so many is simulated in seconds


def check_paths(config: Config) -> None:
    """Refuses paths that no file can have."""
    for section, values in config.model_dump(by_alias=True).items():
        for name, value in values.items():
            blend = section == "data" and isinstance(value, list)
            texts = (
                [prefix for _, prefix in value] if blend else value if isinstance(value, list) else [value]
            )
            if any(isinstance(text, str) and "\0" in text for text in texts):
                raise ConfigError(f"{section}.{name}", "holds a NUL, which no path can have", "a path")


def check(config: Config, world_size: int) -> None:
    """Raises `ConfigError` for the first rule that the resolved config breaks on `world_size` ranks."""
    check_available(config)
    if every := config.checkpoint.every:  # what is kept for good must be saved
        divides("checkpoint.keep_every", config.checkpoint.keep_every, "checkpoint.every", every)
    if config.checkpoint.best and not (every and config.train.eval_every and config.data.valid):
        wrong = (
            "the best checkpoint is that of the least validation loss, and nothing is saved or "
            "validated on the way"
        )
        raise ConfigError(
            "checkpoint.best", wrong, "false, or data.valid, train.eval_every and checkpoint.every"
        )
    if config.checkpoint.best:
        divides("checkpoint.every", every, "train.eval_every", config.train.eval_every)
    check_model(config)
    check_world(config, world_size)
    check_batch(config)
    check_optim(config)
    check_fsdp(config)
    check_links(config)


def check_available(config: Config) -> None:
    """Refuses settings that exclude one another, or that this version does not run."""
    schedule = config.parallel.schedule
    open_ended = schedule in ("interleaved", "auto")
    needed = 1 if schedule == "auto" else chunks_of(config)
    if config.chunks < needed or (config.chunks > needed and not open_ended):
        wrong = f"{schedule} has {'at least ' if open_ended else ''}{needed} a rank, not {config.chunks}"
        raise ConfigError("parallel.chunks", wrong, f"{needed}{' or more' if open_ended else ''}, or null")
    if config.train.compile is True and config.model.dropout:
        raise ConfigError(
            "train.compile",
            "cannot compile dropout, whose masks are drawn by name",
            "false, or model.dropout=0",
        )
    if config.train.compile is True and config.train.offload_activations:
        wrong = "a compiled block chooses itself what it keeps, and where"
        raise ConfigError("train.compile", wrong, "false, or train.offload_activations=false")
    if config.engine.kind != "deepspeed" and config.engine.config is not None:
        right = f"leave it out with engine.kind={config.engine.kind}"
        raise ConfigError("engine.config", "only the deepspeed engine reads a ds_config", right)
    if config.engine.kind == "deepspeed" and config.chunks > 1:
        wrong = f"{config.parallel.schedule} has {config.chunks} chunks a rank, and DeepSpeed wraps one"
        raise ConfigError("parallel.schedule", wrong, "1f1b, or engine.kind=native")
    if config.engine.kind == "deepspeed" and config.engine.shard_optimizer:
        raise ConfigError("engine.shard_optimizer", "is the native engine's", "false, and ZeRO stage 1")
    if config.engine.kind == "deepspeed" and config.optim.ema is not None:
        wrong = "DeepSpeed keeps the masters and updates them, and no average beside them"
        raise ConfigError("optim.ema", wrong, "null, or engine.kind=native or fsdp")
    if config.engine.kind == "deepspeed" and config.optim.spike_threshold is not None:
        wrong = "DeepSpeed takes the norm and the step at once, and skips only what is not finite"
        raise ConfigError("optim.spike_threshold", wrong, "null, or engine.kind=native or fsdp")
    if (port := config.log.prometheus_port) is not None and port > 65535:
        raise ConfigError("log.prometheus_port", f"{port} is no port", "from 1 to 65535")
    if (statistics := config.log.statistics) is not None:
        divides("log.statistics", statistics.every, "log.every", config.log.every)
        if config.engine.kind == "deepspeed":
            wrong = "DeepSpeed updates and clears gradients at once, so none can be measured between"
            raise ConfigError("log.statistics", wrong, "null, or engine.kind=native or fsdp")
    if (profile := config.log.profile) is not None:
        (first, last), steps, ranks = profile.steps, config.train.steps, config.world_size
        if not first <= last <= steps:
            wrong = f"{last} is beyond train.steps {steps}" if last > steps else f"{last} is before {first}"
            raise ConfigError(
                "log.profile", f"steps: {wrong}", f"the first step and the last, from 1 to {steps}"
            )
        if max(profile.ranks) >= ranks:
            raise ConfigError(
                "log.profile",
                f"ranks: there is no rank {max(profile.ranks)} among {ranks}",
                f"from 0 to {ranks - 1}",
            )


def check_world(config: Config, world_size: int) -> None:
    """Checks that the mesh has as many places as there are ranks."""
    others, p = config.parallel.ranks_besides_data, config.parallel
    if config.world_size != world_size:
        sizes = p.described()
        wrong = f"{sizes} = {config.world_size} ranks, but there are {world_size}"
        if world_size % others:
            raise ConfigError(
                "parallel",
                wrong,
                f"a multiple of {' × '.join(re.findall('[a-z_]+', sizes)[:-1])} = {others} ranks",
            )
        raise ConfigError("parallel.data", wrong, f"{world_size // others} or auto")


def check_batch(config: Config) -> None:
    """Checks that global_batch_size = micro_batch_size × microbatches × data, with at
    least one microbatch.
    """
    train, data = config.train, config.data_size
    per_round = train.micro_batch_size * data
    sizes = {train.global_batch_size: "train.global_batch_size"} | {
        size: RAMP for _, size in train.batch_ramp
    }
    for size, key in sizes.items():
        if size % per_round:
            wrong = (
                f"{size} = micro_batch_size {train.micro_batch_size} × microbatches × data {data} has "
                "no whole solution"
            )
            down = size - size % per_round
            raise ConfigError(
                key, wrong, f"a multiple of {per_round}: {f'{down} or ' if down else ''}{down + per_round}"
            )
    check_ramp(config)
    if (tokens := train.micro_batch_size * train.seq_len) > MOST_TOKENS:
        wrong = f"{train.micro_batch_size} × train.seq_len {train.seq_len} is {tokens:,} tokens"
        raise ConfigError("train.micro_batch_size", wrong, f"at most {MOST_TOKENS:,}")
    stages = config.parallel.pipeline
    if config.num_microbatches * stages > MOST_MICROBATCHES:
        wrong = f"{config.num_microbatches:,} microbatches a step" + (
            f" on {stages} stages" if stages > 1 else ""
        )
        right = (
            f"at most {MOST_MICROBATCHES // stages:,}: a larger train.micro_batch_size, or more data ranks"
        )
        raise ConfigError("train.global_batch_size", wrong, right)
    if train.steps * train.global_batch_size > MOST_SAMPLES:
        wrong = (
            f"{train.steps} × train.global_batch_size {train.global_batch_size} samples cannot be "
            "counted in 64 bits"
        )
        raise ConfigError("train.steps", wrong, f"at most {MOST_SAMPLES // train.global_batch_size}")


def batch_equations(config: Config) -> Iterator[str]:
    """The equation of the global batch, for each of its sizes."""
    train, data = config.train, config.data_size
    for last, size in (*train.batch_ramp, (0, train.global_batch_size)):
        phase = f"to step {last}, " if last else "then " if train.batch_ramp else ""
        count = size // (train.micro_batch_size * data)
        yield (
            f"{phase}global_batch_size {size} = micro_batch_size {train.micro_batch_size} × "
            f"microbatches {count} × data {data}"
        )


def check_ramp(config: Config) -> None:
    """Checks that batches grow with the steps, up to global_batch_size, and that engine and
    schedule can run several sizes.
    """
    train = config.train
    for (step, size), (later, larger) in pairwise((*train.batch_ramp, (LARGEST, train.global_batch_size))):
        if later <= step:
            raise ConfigError(
                RAMP, f"step {later} comes behind step {step}", "[last step, size] in the order of the steps"
            )
        if larger <= size:
            grown = "train.global_batch_size" if later == LARGEST else "the next size"
            raise ConfigError(
                RAMP,
                f"{size} does not grow to {grown} {larger}",
                "sizes that grow, below train.global_batch_size",
            )
    if train.batch_ramp and config.engine.kind == "deepspeed":
        raise ConfigError(
            RAMP,
            "DeepSpeed has one number of microbatches for all steps",
            "[], or engine.kind=native or fsdp",
        )
    if train.batch_ramp and (schedule := config.parallel.schedule) not in CHUNKS:
        wrong = f"parallel.schedule={schedule} is a plan for one number of microbatches"
        raise ConfigError(RAMP, wrong, f"[], or a schedule with a name: {', '.join(CHUNKS)}")


def check_optim(config: Config) -> None:
    """Checks that the learning rate's phases fit in order, and that a run that
    may roll back saves checkpoints.
    """
    optim, steps = config.optim, config.train.steps
    check_groups(config)
    if optim.max_rollbacks and not config.checkpoint.every:
        raise ConfigError(
            "optim.max_rollbacks",
            "without checkpoints there is nothing to go back to",
            "0, or checkpoint.every=1000",
        )
    if optim.min_lr > optim.lr:
        raise ConfigError(
            "optim.min_lr", f"{optim.min_lr} is above optim.lr {optim.lr}", f"at most {optim.lr}"
        )
    decay_steps = resolved(optim.decay_steps)
    if optim.schedule in ("cosine", "linear") and optim.warmup_steps > decay_steps:
        wrong = f"{optim.warmup_steps} steps of warmup end after the decay, at {decay_steps}"
        raise ConfigError("optim.warmup_steps", wrong, f"at most {decay_steps}")
    if optim.schedule == "wsd" and optim.warmup_steps < steps < optim.warmup_steps + decay_steps:
        wrong = f"warmup {optim.warmup_steps} and decay {decay_steps} do not fit in {steps} steps"
        raise ConfigError("optim.decay_steps", wrong, f"at most {max(1, steps - optim.warmup_steps)}")


def warmup_warning(config: Config) -> str | None:
    """Return a warning if the run ends before its learning rate has warmed up.

    Valid, because a long run may be tried out for a few steps, but rarely meant in a run that is to train.
    """
    warmup, steps = config.optim.warmup_steps, config.train.steps
    if warmup < steps:
        return None
    return (
        f"WARNING: optim.warmup_steps is {warmup} and train.steps {steps}, so the run ends while the "
        f"learning rate still rises (optim.warmup_steps below {steps}, or more steps)"
    )


def check_unused(config: Config) -> None:
    """Refuses a setting of an optimizer that no parameter has: it would do nothing, and nothing would say so.

    What is as by default may stand there, as it does in a run's record.
    """
    rules = {group.rule.name for group in ParameterGroups(config.optim).every}
    used = {key for name in rules for key in RULES[name].settings_type.model_fields}
    for rule in RULES.values():
        for key, setting in rule.settings_type.model_fields.items():
            if key not in used and (value := getattr(config.optim, key)) != setting.default:
                wrong = (
                    f"{value} is a setting of {rule.name}, and the parameters have "
                    f"{' and '.join(sorted(rules))}"
                )
                usual = "null" if setting.default is None else setting.default
                raise ConfigError(f"optim.{key}", wrong, f"{usual}, or optim.kind={rule.name}")


def check_groups(config: Config) -> None:
    """Refuses groups that no model could have; `ParameterGroups.check` goes by the names of a model."""
    optim = config.optim
    for entry in optim.groups:
        if entry.lr is not None and entry.lr != optim.lr and optim.lr == 0:
            raise ConfigError(
                GROUPS, f"lr {entry.lr:g} follows the schedule of optim.lr, which is 0", "an optim.lr above 0"
            )
    groups = ParameterGroups(optim)
    for group in groups.every if config.engine.kind == "deepspeed" else ():
        if group.rule.name != "adamw":
            key = GROUPS if group.number else "optim.kind"
            raise ConfigError(
                key,
                f"the deepspeed engine steps with AdamW, not {group.rule.name}",
                "adamw, or another engine.kind",
            )
    for group in groups.every if optim.ema is not None else ():
        if AVERAGE in group.rule.kinds:
            raise ConfigError(
                "optim.ema",
                f"{group.rule.name} has an average of the weights, of its own",
                "null, or another optim.kind",
            )
    for group in groups.every[:-1]:
        entry = optim.groups[group.number - 1]
        known = {"match", "kind", "lr", "weight_decay"} | group.rule.settings_type.model_fields.keys()
        if foreign := sorted(entry.model_fields_set - known):
            right = f"{', '.join(group.rule.settings_type.model_fields)} or another kind"
            raise ConfigError(GROUPS, f"{group.rule.name} has no setting {foreign[0]}", right)


def check_links(config: Config) -> None:
    """Refuses ways to sum gradients that an engine does not have."""
    engine = config.engine
    own = {
        "fsdp": ("fsdp sums gradients in fp32", "1, and engine.shard_size, which divides within a host"),
        "deepspeed": ("DeepSpeed has a setting of its own, with which it also sums in 16 bits", "1"),
    }
    if engine.kind != "native":
        wrong, right = own[engine.kind]
        if engine.reduce_dtype != "fp32":
            instead = (
                "fp32" if engine.kind == "fsdp" else "fp32, and communication_data_type in engine.config"
            )
            raise ConfigError("engine.reduce_dtype", wrong, f"{instead}; or engine.kind=native")
        if engine.reduce_levels != 1:
            raise ConfigError(
                "engine.reduce_levels",
                f"the {engine.kind} engine sums in one level",
                f"{right}; or engine.kind=native",
            )
        if engine.compression is not None:
            wrong = f"the {engine.kind} engine sums gradients by itself"
            raise ConfigError("engine.compression", wrong, "null, or engine.kind=native")
    if engine.reduce_dtype != "fp32" and engine.compression is not None:
        raise ConfigError(
            "engine.compression",
            "gradients that are compressed do not travel in bf16",
            "engine.reduce_dtype=fp32",
        )
    if engine.compression is not None and not engine.compression.exact and config.train.precision == "fp64":
        exact = {"int8": '"rounding": "none"', "low_rank": '"rank": null'}[engine.compression.kind]
        right = f"null, {exact} beside its kind, or train.precision=bf16"
        raise ConfigError("engine.compression", "fp64 is for proofs to 1e-9, and this loses more", right)
    if engine.reduce_dtype != "fp32" and config.train.precision == "fp64":
        wrong = f"fp64 is for proofs to 1e-9, and {engine.reduce_dtype} rounds to 2^-8"
        raise ConfigError("engine.reduce_dtype", wrong, "fp32, or train.precision=bf16")


def check_fsdp(config: Config) -> None:
    """Refuses settings that the fsdp engine does not support, and keys of fsdp under another engine."""
    engine, ranks = config.engine, config.token_ranks
    if engine.kind != "fsdp":
        for key in ("shard_size", "reshard", "cpu_offload"):
            if getattr(engine, key) not in (None, False):
                raise ConfigError(
                    f"engine.{key}",
                    f"the {engine.kind} engine does not read it",
                    "engine.kind=fsdp, or leave it out",
                )
        return
    if engine.shard_optimizer:
        raise ConfigError("engine.shard_optimizer", "fsdp divides the optimizer's state in any case", "false")
    both_ends = config.chunks > 1 and (config.parallel.schedule in V_SHAPED or config.parallel.pipeline == 1)
    if ranks > 1 and config.model.tie_embeddings and both_ends:
        wrong = (
            f"{config.parallel.schedule} gives one rank both ends, and fsdp cannot divide the "
            "embedding that they share"
        )
        raise ConfigError(
            "parallel.schedule", wrong, "1f1b, model.tie_embeddings=false, or engine.kind=native"
        )
    if config.train.compile is True:
        wrong = "fsdp gathers parameters in hooks around each block, which break a compiled block's graph"
        raise ConfigError("train.compile", wrong, "false, or engine.kind=native engine.shard_optimizer=true")
    if engine.shard_size == 1:
        wrong = "nothing is divided among 1 rank"
        raise ConfigError("engine.shard_size", wrong, "at least 2, or engine.kind=native, which holds copies")
    divides("parallel.data", ranks, "engine.shard_size", config.shard_size)
    if engine.cpu_offload and ranks == 1:
        wrong = (
            "with one data rank there is nothing to divide, and the native engine, which does its "
            "work, keeps all on the device"
        )
        raise ConfigError("engine.cpu_offload", wrong, "false, or at least 2 data ranks")
