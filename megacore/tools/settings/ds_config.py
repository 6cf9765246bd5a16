"""Checks a ds_config, alone and against the run's own config.

What it says of the run itself: `from_ds_config`.

This does not need DeepSpeed. DeepSpeed itself reads its config late, ignores keys that it does not know, and
with some combinations silently hangs or trains something else.
"""

import difflib
import json
import math
import sys
from typing import Any

from megacore.config.schema import Config
from megacore.errors import ConfigError
from megacore.tools.settings.ds_settings import KEY, decided, ds_settings, read
from megacore.tools.settings.from_ds_config import section, taken_over

# Keys that DeepSpeed 0.19 reads. It ignores others at the top; in sections it fails with a traceback on every
# rank.
KNOWN = {
    "": """train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps gradient_clipping
        optimizer scheduler
        zero_optimization zero_allow_untested_optimizer zero_force_ds_cpu_optimizer bf16 fp16 data_types
        communication_data_type
        prescale_gradients gradient_predivide_factor aio steps_per_print wall_clock_breakdown memory_breakdown
        dump_state log_level
        timers disable_allgather disable_python_gc comms_logger flops_profiler tensorboard wandb csv_monitor
        comet
        activation_checkpointing""",
    "zero_optimization": """stage contiguous_gradients reduce_scatter reduce_bucket_size
        use_multi_rank_bucket_allreduce
        allgather_partitions allgather_bucket_size overlap_comm compute_grad_norm offload_param
        offload_optimizer sub_group_size
        stage3_prefetch_bucket_size stage3_param_persistence_threshold stage3_model_persistence_threshold
        stage3_max_live_parameters stage3_max_reuse_distance stage3_module_granularity_threshold
        stage3_use_all_reduce_for_fetch_params stage3_allgather_sequential
        stage3_gather_16bit_weights_on_model_save
        ignore_unused_parameters parameter_alignment zero_hpz_partition_size memory_efficient_linear
        override_module_apply
        log_trace_cache_warnings enable_sanity_checks leaf_module""",
    "zero_optimization.offload_optimizer": "device nvme_path buffer_count pin_memory pipeline_read "
    "pipeline_write fast_init",
    "zero_optimization.offload_param": "device nvme_path buffer_count buffer_size max_in_cpu pin_memory",
    "bf16": "enabled check_grad_overflow immediate_grad_update",
    "fp16": "enabled loss_scale initial_scale_power loss_scale_window hysteresis consecutive_hysteresis "
    "min_loss_scale",
    "data_types": "grad_accum_dtype",
    "aio": "block_size queue_depth intra_op_parallelism single_submit overlap_events use_gds",
    "optimizer": "type params",
    "scheduler": "type params",
    "scheduler.params": """warmup_min_lr warmup_max_lr warmup_num_steps warmup_type total_num_steps
        warmup_min_ratio cos_min_ratio
        cycle_min_lr cycle_max_lr cycle_first_step_size cycle_second_step_size cycle_momentum
        cycle_first_stair_count
        cycle_second_stair_count decay_step_size decay_lr_rate cycle_min_mom cycle_max_mom decay_mom_rate""",
    "activation_checkpointing": """partition_activations cpu_checkpointing contiguous_memory_optimization
        number_checkpoints
        synchronize_checkpoint_boundary profile""",
    "optimizer.params": "lr betas eps weight_decay adam_w_mode torch_adam bias_correction",
}

# Keys that DeepSpeed knows (or knew) and this engine does not pass on: why, and what to use instead.
REFUSED = {
    "checkpoint": (
        "is of DeepSpeed's own checkpoints, which are not written",
        "the section checkpoint of the run's config",
    ),
    "pipeline": ("is of DeepSpeed's own pipeline", "parallel.pipeline"),
    "tensor_parallel": ("is DeepSpeed's own tensor parallelism", "parallel.tensor"),
    "sequence_parallel_size": ("is DeepSpeed's own sequence parallelism", "parallel.sequence"),
    "torch_autocast": ("would round within the model again", "train.precision"),
    "amp": ("DeepSpeed has removed it", "train.precision"),
    "compile": ("is DeepSpeed's own compiler, which replaces the model", "leave it out"),
    "data_efficiency": ("would change the order of samples", "leave it out"),
    "managed_gradient_accumulation": ("scales gradients by the number of microbatches", "leave it out"),
    "gradient_allreduce_op": ("gradients are scaled for DeepSpeed's mean already", "leave it out"),
    "zero_optimization.compute_grad_norm": ("the log needs the gradient norm", "leave it out"),
    "zero_optimization.zenflow": (
        "keeps parts of the optimizer's state where no checkpoint finds them",
        "offload_optimizer",
    ),
    "zero_optimization.round_robin_gradients": (
        "DeepSpeed's map of its partitions ignores the order",
        "leave it out",
    ),
    "zero_optimization.elastic_checkpoint": ("is of DeepSpeed's own checkpoints", "leave it out"),
    "zero_optimization.mics_shard_size": ("DeepSpeed 0.19 has removed MiCS", "zero_hpz_partition_size"),
    "zero_optimization.mics_hierarchical_params_gather": (
        "DeepSpeed 0.19 has removed MiCS",
        "zero_hpz_partition_size",
    ),
    "zero_optimization.zero_quantized_weights": (
        "compression with CUDA kernels of its own is unproven here",
        "communication_data_type",
    ),
    "zero_optimization.zero_quantized_gradients": (
        "compression with CUDA kernels of its own is unproven here",
        "communication_data_type",
    ),
    "zero_optimization.cpu_offload": ("is an old name", "offload_optimizer"),
    "zero_optimization.cpu_offload_param": ("is an old name", "offload_param"),
    "zero_optimization.offload_optimizer.ratio": (
        "keeps a part of the optimizer's state where no checkpoint finds it",
        "leave it out",
    ),
    "zero_optimization.offload_optimizer.super_offload": ("is unproven here", "leave it out"),
    "bf16.bf16_master_weights_and_grads": ("master weights are fp32", "leave it out"),
    "bf16.bf16_optimizer_states": ("moments are fp32", "leave it out"),
    "fp16.fp16_master_weights_and_grads": ("master weights are fp32", "leave it out"),
    "fp16.auto_cast": ("inputs are tokens or in the right precision already", "leave it out"),
    "data_types.param_dtype": ("parameters are in train.precision", "leave it out"),
}

# What DeepSpeed takes as a key's value. It looks late, and says so with a traceback on every rank, or takes a
# text for true.
VALUES = {
    "true or false": """contiguous_gradients reduce_scatter use_multi_rank_bucket_allreduce
        allgather_partitions overlap_comm
        stage3_use_all_reduce_for_fetch_params stage3_allgather_sequential
        stage3_gather_16bit_weights_on_model_save
        ignore_unused_parameters parameter_alignment memory_efficient_linear override_module_apply
        log_trace_cache_warnings
        enable_sanity_checks pin_memory pipeline_read pipeline_write fast_init check_grad_overflow
        immediate_grad_update
        consecutive_hysteresis single_submit overlap_events use_gds adam_w_mode torch_adam bias_correction
        zero_allow_untested_optimizer zero_force_ds_cpu_optimizer prescale_gradients wall_clock_breakdown
        memory_breakdown dump_state
        disable_allgather disable_python_gc partition_activations cpu_checkpointing
        contiguous_memory_optimization
        synchronize_checkpoint_boundary profile cycle_momentum""",
    "a whole number above 0": """warmup_num_steps total_num_steps cycle_first_step_size cycle_second_step_size
        number_checkpoints
        reduce_bucket_size steps_per_print block_size queue_depth intra_op_parallelism loss_scale_window
        hysteresis zero_hpz_partition_size""",
    "a whole number, 0 or more": """allgather_bucket_size sub_group_size stage3_prefetch_bucket_size
        stage3_param_persistence_threshold
        stage3_model_persistence_threshold stage3_max_live_parameters stage3_max_reuse_distance
        stage3_module_granularity_threshold
        buffer_count buffer_size max_in_cpu initial_scale_power min_loss_scale""",
    "a number, 0 or more": """loss_scale gradient_predivide_factor warmup_min_lr warmup_max_lr
        warmup_min_ratio cos_min_ratio
        cycle_min_lr cycle_max_lr cycle_first_stair_count cycle_second_stair_count decay_step_size
        decay_lr_rate cycle_min_mom
        cycle_max_mom decay_mom_rate""",
    "log or linear": "warmup_type",
    "fp32, bf16 or fp16": "communication_data_type grad_accum_dtype",
    "an object": "timers comms_logger flops_profiler tensorboard wandb csv_monitor comet leaf_module",
    "a text": "nvme_path log_level",
}
RIGHT = {name: right for right, names in VALUES.items() for name in names.split()}
# Where null is a value; at the top it leaves a key out.
NULL_TOO = (
    "overlap_comm",
    "nvme_path",
    "grad_accum_dtype",
    "warmup_max_lr",
    "cycle_second_step_size",
    "number_checkpoints",
)

ONE_BIT = ("onebitadam", "onebitlamb", "zerooneadam")


def check_ds_config(config: Config) -> None:
    """Refuses the ds_config of a resolved config, if the run has one, with which DeepSpeed
    would hang or train something else.

    Raises `ConfigError` for the first key that is unknown, contradicts the run's config, or cannot work with
    it.
    """
    if config.engine.kind != "deepspeed":
        return
    settings, taken = read(config.engine.config), stated(config)
    for key, (path, value) in taken.items():
        group, name = key.split(".")
        ours = getattr(getattr(config, group), name)
        if not same(value, list(ours) if isinstance(ours, tuple) else ours):
            raise contradiction(path, value, key, ours)
    check_optimizer(
        settings.get("optimizer", {}), config, takes_rates=taken.get("optim.lr", ("", 0))[0] == "scheduler"
    )
    for path, (key, value) in decided(config).items():
        place, _, name = path.rpartition(".")
        given = (section(settings, place) if place else settings).get(name, "auto")
        if not same(given, value):
            raise contradiction(
                path, given, key, config.train.precision if key == "train.precision" else value
            )
    completed = ds_settings(config)
    for path, value in walk(completed):
        if value == "auto":
            raise ConfigError(
                f"{KEY}: {path}", '"auto" has nothing to be filled from here', "a value, or leave it out"
            )
    check_stage(completed, config)


def stated(config: Config) -> dict[str, tuple[str, Any]]:
    """What the ds_config of a run says of keys of the run itself, by dotted key:
    the place there, and the value.
    """
    settings = read(config.engine.config)
    for path, value in walk(settings):
        check_key(path, value)
    return taken_over(settings, config.optim.lr)


def walk(settings: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Every dotted path with its value. A section comes before its keys."""
    found: list[tuple[str, Any]] = []
    for name, value in settings.items():
        found.append((f"{prefix}{name}", value))
        if isinstance(value, dict):
            found += walk(value, f"{prefix}{name}.")
    return found


def check_key(path: str, value: Any) -> None:
    """Refuses a key that this engine does not pass on, or that DeepSpeed does not know."""
    section, _, name = path.rpartition(".")
    if path in REFUSED:
        harmless = (False, "auto", None) if section else ("auto", None)
        if value not in harmless:
            raise ConfigError(f"{KEY}: {path}", *REFUSED[path])
        return
    if section in KNOWN and name not in KNOWN[section].split():
        nearest = difflib.get_close_matches(name, KNOWN[section].split(), 1, 0.0)[0]
        raise ConfigError(f"{KEY}: {path}", "DeepSpeed has no such key", f"did you mean {nearest}?")
    if path in ("scheduler", "activation_checkpointing") and value in ("auto", None):
        return
    if path in KNOWN and not isinstance(value, dict):
        raise ConfigError(f"{KEY}: {path}", f"{json.dumps(value)} is not valid", "an object")
    right = RIGHT.get(name) if not section or section in KNOWN else None
    left = value == "auto" or (value is None and (not section or name in NULL_TOO))
    if right and not left and not fits(value, right):
        raise ConfigError(f"{KEY}: {path}", f"{json.dumps(value)} is not valid", right)


def fits(value: Any, right: str) -> bool:
    """Whether a value is what `VALUES` calls `right`."""
    if "number" in right:
        number = (
            isinstance(value, int | float)
            and not isinstance(value, bool)
            and ("above 0" in right) <= value <= sys.maxsize
        )
        return number and ("whole" not in right or value == int(value))
    kinds = {"true or false": bool, "an object": dict, "a text": str}
    choices = ("log", "linear") if right == "log or linear" else ("fp32", "bf16", "fp16")
    return isinstance(value, kinds[right]) if right in kinds else value in choices


def same(given: Any, ours: Any) -> bool:
    """Whether a value of the ds_config equals the run's, or is left to it."""
    if isinstance(ours, list):
        return given == "auto" or (
            isinstance(given, list) and len(given) == len(ours) and all(map(same, given, ours))
        )
    if isinstance(ours, float) and isinstance(given, int | float) and not isinstance(given, bool):
        return abs(given) <= sys.float_info.max and math.isclose(given, ours, rel_tol=1e-9)
    return given == "auto" or (given == ours and isinstance(given, bool) == isinstance(ours, bool))


def check_optimizer(given: dict[str, Any], config: Config, takes_rates: bool) -> None:
    """Refuses an optimizer section that is not the AdamW of the run's config.

    `takes_rates`: DeepSpeed would take its rate elsewhere.
    """
    kind = str(given.get("type", "auto")).lower()
    if kind in ONE_BIT:
        why = "DeepSpeed 0.19 has removed its 1-bit optimizers"
        raise ConfigError(
            f"{KEY}: optimizer.type", why, "AdamW; communication_data_type=bf16 halves the traffic of fp32"
        )
    params = given.get("params", {})
    if kind not in ("auto", "adam", "adamw") or params.get("adam_w_mode", True) is not True:
        raise ConfigError(
            f"{KEY}: optimizer.type",
            f"{given.get('type')} is not the run's optimizer",
            "AdamW, or leave optimizer out",
        )
    optim = config.optim
    ours = {
        "lr": optim.lr,
        "betas": [optim.beta1, optim.beta2],
        "eps": optim.eps,
        "weight_decay": optim.weight_decay,
    }
    names = {
        "lr": "optim.lr",
        "betas": "optim.beta1, beta2",
        "eps": "optim.eps",
        "weight_decay": "optim.weight_decay",
    }
    for name, value in ours.items():
        if not same(params.get(name, "auto"), value) and not (takes_rates and name == "lr"):
            raise contradiction(f"optimizer.params.{name}", params[name], names[name], value)


def contradiction(path: str, given: Any, key: str, ours: Any) -> ConfigError:
    said = json.dumps(given)
    right = '"auto", or leave it out' if "," in key else f'"auto" there, or {key}={said} here'
    return ConfigError(f"{KEY}: {path}", f"{said} contradicts {key} {json.dumps(ours)}", right)


def check_stage(settings: dict[str, Any], config: Config) -> None:
    """Refuses settings with which DeepSpeed would hang or compute wrong results."""
    zero, parallel, train = settings["zero_optimization"], config.parallel, config.train
    stage = zero["stage"]
    where = f"{KEY}: zero_optimization.stage"
    if stage not in (0, 1, 2, 3) or isinstance(stage, bool):
        raise ConfigError(where, f"{json.dumps(stage)} is no ZeRO stage", "0, 1, 2 or 3")
    if parallel.pipeline > 1 and stage == 3:
        raise ConfigError(
            where, "3 deadlocks with a pipeline: its stages gather parameters at different times", "1 or 2"
        )
    if parallel.pipeline > 1 and stage == 0:
        raise ConfigError(where, "0 loses gradients with a pipeline", "1 or 2")
    if stage == 0 and train.precision != "fp32":
        raise ConfigError(
            where,
            f"0 trains {train.precision} without fp32 sums of gradients",
            "1, 2 or 3; or train.precision=fp32",
        )
    if train.precision == "fp64":
        raise ConfigError(
            "train.precision", "DeepSpeed keeps its sums and moments in fp32", "fp32, or engine.kind=native"
        )
    if train.precision == "fp16" and train.device == "cpu":
        raise ConfigError("train.precision", "DeepSpeed has no fp16 on CPUs", "bf16, or engine.kind=native")
    if train.compile is True:
        raise ConfigError(
            "train.compile",
            "DeepSpeed's hooks in a compiled block are unproven",
            "false, or engine.kind=native",
        )
    devices = {
        name: (zero.get(name) or {}).get("device", "none") for name in ("offload_optimizer", "offload_param")
    }
    for name, device in devices.items():
        needed = 3 if name == "offload_param" or device == "nvme" else 1
        if device not in ("none", "cpu", "nvme"):
            raise ConfigError(
                f"{KEY}: zero_optimization.{name}.device",
                f"{json.dumps(device)} is no place",
                "none, cpu or nvme",
            )
        if device != "none" and stage < needed:
            wrong = f"ZeRO stage {stage} would silently ignore {device}"
            raise ConfigError(
                f"{KEY}: zero_optimization.{name}.device",
                wrong,
                f"stage {needed}{' or above' if needed < 3 else ''}",
            )
    if zero.get("zero_hpz_partition_size", 1) > 1 and (stage < 3 or parallel.tensor > 1):
        wrong = "its groups are of neighbouring ranks, which must be data ranks of ZeRO stage 3"
        raise ConfigError(
            f"{KEY}: zero_optimization.zero_hpz_partition_size", wrong, "1; or stage 3 with parallel.tensor=1"
        )
