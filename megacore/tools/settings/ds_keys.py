"""The keys of a ds_config: which are passed on to DeepSpeed 0.19 and what each takes, which DeepSpeed has
removed, and which it reads that do not fit a run.

They are those of the config classes of DeepSpeed 0.19.8; tests compare the two.
"""

from typing import Any

# Keys that are passed on to DeepSpeed, or taken over. At the top DeepSpeed ignores keys that it does not
# know; in sections it fails with a traceback on every rank.
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
# The same of sections whose values DeepSpeed itself judges: they say what it prints, logs and times.
MONITORS = {
    "tensorboard": "enabled output_path job_name",
    "wandb": "enabled group team project",
    "csv_monitor": "enabled output_path job_name",
    "comet": """enabled samples_log_interval project workspace api_key experiment_name experiment_key online
        mode""",
    "comms_logger": "enabled prof_all prof_ops verbose debug",
    "flops_profiler": """enabled recompute_fwd_factor profile_step module_depth top_modules detailed
        output_file""",
    "timers": "throughput",
    "timers.throughput": "enabled synchronized",
    "zero_optimization.leaf_module": "classes names name_suffixes",
}

# Keys that DeepSpeed 0.19 has removed: it stops at them, whatever their value. What to use instead.
REMOVED = {
    "amp": "train.precision",
    "compression_training": "leave it out",
    "curriculum_learning": "leave it out",
    "eigenvalue": "leave it out",
    "elasticity": "leave it out; a run resumes on any number of ranks",
    "graph_harvesting": "leave it out",
    "nebula": "checkpoint.async",
    "progressive_layer_drop": "leave it out",
    "quantize_training": "leave it out",
    "sparse_attention": "model.window",
    "sparse_gradients": "leave it out",
    "zero_optimization.mics_hierarchical_params_gather": "zero_hpz_partition_size",
    "zero_optimization.mics_shard_size": "zero_hpz_partition_size",
    "zero_optimization.zeropp_loco_param": "leave it out",
}

# Keys that DeepSpeed reads and this engine does not pass on: why, and what to use instead. A value of `OFF`
# asks for nothing, passes, and is dropped.
REFUSED = {
    "allgather_size": (
        "DeepSpeed reads it only where zero_optimization is true, not an object",
        "zero_optimization.allgather_bucket_size",
    ),
    "autotuning": ("DeepSpeed's autotuner starts runs itself", "launch/plan.py --search"),
    "bfloat16": ("is an old name", "bf16"),
    "dataloader_drop_last": ("is of DeepSpeed's data loader, and the run has its own", "leave it out"),
    "datastates_ckpt": (
        "is of DeepSpeed's own checkpoints, which are not written",
        "the section checkpoint of the run's config",
    ),
    "expert_parallel": ("is DeepSpeed's own expert parallelism", "parallel.expert"),
    "hybrid_engine": ("is DeepSpeed's engine for reinforcement learning", "leave it out"),
    "seq_parallel_communication_data_type": (
        "is of DeepSpeed's own sequence parallelism",
        "leave it out",
    ),
    "use_data_before_expert_parallelism": ("orders the ranks of DeepSpeed's own experts", "leave it out"),
    "vocabulary_size": ("DeepSpeed only checks that 8 divides it", "model.vocab_size"),
    "weight_quantization": ("quantizes weights for DeepSpeed's inference", "leave it out"),
    "optimizer.legacy_fusion": (
        "is of DeepSpeed's own optimizers, and the run has its own AdamW",
        "leave it out",
    ),
    "optimizer.params.max_grad_norm": ("DeepSpeed does not accept it there", "gradient_clipping"),
    "optimizer.params.amsgrad": ("the run's AdamW has no AMSGrad", "leave it out"),
    "scheduler.params.last_batch_iteration": ("the run counts its own steps", "leave it out"),
    "data_types.buffer_dtype": ("buffers have the dtype that the model gives them", "leave it out"),
    "data_types.keep_in_fp32_modules": ("parameters are in train.precision", "leave it out"),
    "zero_optimization.cpu_offload_use_pin_memory": (
        "is an old name",
        "pin_memory in offload_optimizer or offload_param",
    ),
    "zero_optimization.legacy_stage1": ("is a stage 1 that DeepSpeed 0.5.9 has removed", "leave it out"),
    "zero_optimization.load_from_fp32_weights": ("is of DeepSpeed's own checkpoints", "leave it out"),
    "zero_optimization.pipeline_loading_checkpoint": (
        "is of loading DeepSpeed's own checkpoints",
        "leave it out",
    ),
    "zero_optimization.save_muon_momentum_buffer_in_memory": (
        "is of DeepSpeed's own Muon",
        "leave it out",
    ),
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": (
        "is an old name",
        "stage3_gather_16bit_weights_on_model_save",
    ),
    "zero_optimization.zero_quantized_nontrainable_weights": (
        "compression with custom CUDA kernels is not tested here",
        "leave it out",
    ),
    "zero_optimization.offload_optimizer.cpuadam_cores_perc": (
        "is of SuperOffload, which is unproven here",
        "leave it out",
    ),
    "checkpoint": (
        "is of DeepSpeed's own checkpoints, which are not written",
        "the section checkpoint of the run's config",
    ),
    "pipeline": ("is of DeepSpeed's own pipeline", "parallel.pipeline"),
    "tensor_parallel": ("is DeepSpeed's own tensor parallelism", "parallel.tensor"),
    "sequence_parallel_size": ("is DeepSpeed's own sequence parallelism", "parallel.sequence"),
    "torch_autocast": ("would round within the model again", "train.precision"),
    "compile": ("is DeepSpeed's own compiler, which replaces the model", "leave it out"),
    "data_efficiency": ("would reorder samples or drop tokens within layers", "leave it out"),
    "managed_gradient_accumulation": (
        "false updates at each call of step(), and the run calls it for each microbatch",
        "leave it out",
    ),
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
    "zero_optimization.zero_quantized_weights": (
        "compression with custom CUDA kernels is not tested here",
        "communication_data_type",
    ),
    "zero_optimization.zero_quantized_gradients": (
        "compression with custom CUDA kernels is not tested here",
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
REFUSED |= {
    f"optimizer.params.{name}": (
        "is of the optimizers of DeepSpeed and PyTorch, and the run has its own AdamW",
        "leave it out",
    )
    for name in (
        "capturable",
        "differentiable",
        "foreach",
        "fp32_optimizer_states",
        "fused",
        "maximize",
        "set_grad_none",
    )
}

# Values of the keys in `REFUSED` that ask for nothing; null and "auto" do so for any of them. Those of keys
# without an entry are false.
OFF: dict[str, tuple[Any, ...]] = {
    "allgather_size": (),
    "dataloader_drop_last": (False,),
    "datastates_ckpt": (False,),  # DeepSpeed takes any object for a request, an empty one too
    "seq_parallel_communication_data_type": ("fp32",),
    "vocabulary_size": (),
    "optimizer.params.max_grad_norm": (0,),
    "optimizer.params.fp32_optimizer_states": (True,),
    "optimizer.params.set_grad_none": (True, False),
    "scheduler.params.last_batch_iteration": (-1,),
    "data_types.buffer_dtype": (),
    "data_types.keep_in_fp32_modules": (),
    "data_types.param_dtype": (),
    "zero_optimization.load_from_fp32_weights": (True, False),
    "zero_optimization.compute_grad_norm": (True,),
    "zero_optimization.zenflow": (),
    "zero_optimization.offload_optimizer.cpuadam_cores_perc": (0.8,),
    "zero_optimization.offload_optimizer.ratio": (1.0,),
    "checkpoint": ({},),
    "pipeline": ({},),
    "sequence_parallel_size": (1,),
    "managed_gradient_accumulation": (True,),
    "gradient_allreduce_op": ("mean",),
}
# Sections of `REFUSED` with a key that switches them, and its values that switch them off.
SWITCHES: dict[str, tuple[str, tuple[Any, ...]]] = {
    "autotuning": ("enabled", (False,)),
    "bfloat16": ("enabled", (False,)),
    "compile": ("deepcompile", (False,)),
    "data_efficiency": ("enabled", (False,)),
    "expert_parallel": ("enabled", (False,)),
    "hybrid_engine": ("enabled", (False,)),
    "tensor_parallel": ("autotp_size", (0, 1)),
    "torch_autocast": ("enabled", (False,)),
    "weight_quantization": ("enabled", (False,)),
}
ON_BY_DEFAULT = ("weight_quantization",)  # an empty section is a request

# What DeepSpeed takes as a key's value. It looks late, and says so with a traceback on every rank, or takes a
# text for true.
VALUES = {
    "true or false": """enabled contiguous_gradients reduce_scatter use_multi_rank_bucket_allreduce
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
    "a whole number above 0": """train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps
        warmup_num_steps total_num_steps cycle_first_step_size cycle_second_step_size
        number_checkpoints
        reduce_bucket_size steps_per_print block_size queue_depth intra_op_parallelism loss_scale_window
        hysteresis zero_hpz_partition_size""",
    "a whole number, 0 or more": """allgather_bucket_size sub_group_size stage3_prefetch_bucket_size
        stage3_param_persistence_threshold
        stage3_model_persistence_threshold stage3_max_live_parameters stage3_max_reuse_distance
        stage3_module_granularity_threshold
        buffer_count buffer_size max_in_cpu initial_scale_power min_loss_scale""",
    "a number, 0 or more": """gradient_clipping lr eps weight_decay loss_scale gradient_predivide_factor
        warmup_min_lr warmup_max_lr
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
