"""What settings are called in Megatron-LM, torchtitan, nanoGPT and transformers, and what an unknown word may
mean.

The table of docs/migrating.md is generated from this one: `python -m tests.pages`.
"""

import difflib
import re
from collections.abc import Iterable
from functools import cache
from typing import NamedTuple

SIMILAR = 0.7  # of `difflib`: a transposed, missing or wrong letter or two
OPTION = re.compile(r"--?[A-Za-z][\w.-]*")


class Row(NamedTuple):
    """One setting, or several that belong together, with the other trainers' words for it.

    Every field except `note` and `same` is a list of words, separated by spaces. `same` means that a value
    of another trainer's word has the same unit and meaning as a value of megacore's key, except for words
    that have an entry in `MEANINGS`.
    """

    keys: str
    megatron: str = ""
    torchtitan: str = ""
    nanogpt: str = ""
    transformers: str = ""
    note: str = ""
    same: bool = False


# The words come from these files of the other projects (docs/migrating.md states their versions):
# - Megatron-LM: `megatron/training/arguments.py`, and the dataclasses from which it makes flags
# - torchtitan: `torchtitan/config/job_config.py`, and the flags that its main branch renamed
# - nanoGPT: `train.py`
# - transformers: `TrainingArguments`, the configs of its models, its and TRL's training scripts, and
#   accelerate's `ParallelismConfig`
TABLE: dict[str, list[Row]] = {
    "model": [
        Row("model.num_layers", "--num-layers", "", "n_layer", "num_hidden_layers n_layer", same=True),
        Row("model.hidden_size", "--hidden-size", "", "n_embd", "hidden_size n_embd", same=True),
        Row(
            "model.num_heads", "--num-attention-heads", "", "n_head", "num_attention_heads n_head", same=True
        ),
        Row(
            "model.num_kv_heads",
            "--num-query-groups --group-query-attention",
            "",
            "",
            "num_key_value_heads",
            same=True,
        ),
        Row("model.head_size", "--kv-channels", "", "", "head_dim", same=True),
        Row("model.ffn_size", "--ffn-hidden-size", "", "", "intermediate_size n_inner", same=True),
        Row(
            "model.vocab_size",
            "--vocab-size --make-vocab-size-divisible-by",
            "",
            "",
            "vocab_size",
            "which you pad yourself",
            same=True,
        ),
        Row("model.norm", "--normalization", "", "", "", "`rmsnorm` or `layernorm`"),
        Row(
            "model.norm_eps",
            "--norm-epsilon",
            "",
            "",
            "rms_norm_eps layer_norm_eps layer_norm_epsilon",
            same=True,
        ),
        Row(
            "model.activation",
            "--swiglu --squared-relu",
            "",
            "",
            "hidden_act activation_function",
            "such as `swiglu`",
        ),
        Row("model.position", "--position-embedding-type", "", "", "", "`rope` or `learned`"),
        Row("model.rope_theta", "--rotary-base", "", "", "rope_theta", same=True),
        Row("model.rope_scaling", "--use-rope-scaling --rope-scaling-factor", "", "", "rope_parameters"),
        Row("model.rotary_share", "--rotary-percent", "", "", "partial_rotary_factor", same=True),
        Row("model.window", "--window-size", "", "", "sliding_window", same=True),
        Row("model.global_every", "--window-attn-skip-freq"),
        Row(
            "model.max_positions",
            "--max-position-embeddings",
            "",
            "",
            "max_position_embeddings n_positions",
            same=True,
        ),
        Row("model.bias", "--disable-bias-linear", "", "bias", "mlp_bias", same=True),
        Row("model.qkv_bias", "--add-qkv-bias", same=True),
        Row("model.qkv_bias model.output_bias", "", "", "", "attention_bias", "both"),
        Row("model.qk_norm", "--qk-layernorm", "", "", ""),
        Row(
            "model.tie_embeddings",
            "--untie-embeddings-and-output-weights",
            "",
            "",
            "tie_word_embeddings",
            same=True,
        ),
        Row(
            "model.dropout",
            "--hidden-dropout --attention-dropout",
            "",
            "dropout",
            "resid_pdrop attn_pdrop embd_pdrop",
        ),
        Row("model.init_std", "--init-method-std", "", "", "initializer_range", same=True),
        Row(
            "model.attention",
            "--attention-backend --use-flash-attn",
            "",
            "",
            "attn_implementation",
            "`auto` takes flash attention on GPUs",
        ),
    ],
    "experts and latent attention": [
        Row(
            "model.num_experts model.experts_per_token",
            "--num-experts --moe-router-topk",
            "",
            "",
            "num_local_experts num_experts_per_tok",
            same=True,
        ),
        Row("model.expert_ffn_size", "--moe-ffn-hidden-size", "", "", "moe_intermediate_size", same=True),
        Row(
            "model.shared_experts",
            "--moe-shared-expert-intermediate-size",
            "",
            "",
            "n_shared_experts",
            "a number of experts; Megatron-LM takes the features of all of them",
            same=True,
        ),
        Row(
            "model.router_normalised",
            "",
            "",
            "",
            "norm_topk_prob",
            same=True,
        ),
        Row(
            "model.first_dense model.experts_every",
            "--moe-layer-freq",
            "",
            "",
            "first_k_dense_replace decoder_sparse_step",
        ),
        Row(
            "model.router_scores model.router_scale",
            "--moe-router-score-function --moe-router-topk-scaling-factor",
            "",
            "",
            "scoring_func routed_scaling_factor",
            same=True,
        ),
        Row(
            "model.expert_groups model.groups_per_token",
            "--moe-router-num-groups --moe-router-group-topk",
            "",
            "",
            "n_group topk_group",
            same=True,
        ),
        Row("model.capacity_factor", "--moe-expert-capacity-factor"),
        Row(
            "model.router_balance model.balance_coefficient",
            "--moe-router-load-balancing-type --moe-aux-loss-coeff",
            "",
            "",
            "router_aux_loss_coef",
        ),
        Row("model.router_z_loss", "--moe-z-loss-coeff"),
        Row(
            "model.router_bias model.router_bias_rate",
            "--moe-router-enable-expert-bias --moe-router-bias-update-rate",
        ),
        Row(
            "model.kv_rank model.q_rank",
            "--kv-lora-rank --q-lora-rank",
            "",
            "",
            "kv_lora_rank q_lora_rank",
            same=True,
        ),
        Row(
            "model.plain_size model.head_size model.value_size",
            "--qk-head-dim --qk-pos-emb-head-dim --v-head-dim",
            "",
            "",
            "qk_nope_head_dim qk_rope_head_dim v_head_dim",
            same=True,
        ),
    ],
    "batch and steps": [
        Row(
            "train.micro_batch_size",
            "--micro-batch-size",
            "--training.local_batch_size --parallelism.pipeline_parallel_microbatch_size "
            "--training.num_tokens_per_microbatch_per_dp_rank",
            "batch_size",
            "per_device_train_batch_size",
            same=True,
        ),
        Row(
            "train.global_batch_size",
            "--global-batch-size",
            "--training.global_batch_size --training.num_tokens_per_train_step",
            "gradient_accumulation_steps",
            "gradient_accumulation_steps",
            "sequences per step; the number of microbatches follows",
            same=True,
        ),
        Row("train.batch_ramp", "--step-batch-size-schedule --rampup-batch-size"),
        Row(
            "train.seq_len",
            "--seq-length",
            "--training.seq_len --training.max_context_length",
            "block_size",
            "block_size max_length",
            same=True,
        ),
        Row(
            "train.steps",
            "--train-iters",
            "--training.steps",
            "max_iters",
            "max_steps num_train_epochs",
            same=True,
        ),
        Row(
            "train.precision",
            "--bf16 --fp16",
            "--training.mixed_precision_param --training.dtype",
            "dtype",
            "bf16 fp16 torch_dtype",
        ),
        Row(
            "train.recompute",
            "--recompute-granularity --recompute-activations",
            "--activation_checkpoint.mode",
            "",
            "gradient_checkpointing",
        ),
        Row("train.compile", "", "--compile.enable", "compile", "torch_compile", same=True),
        Row("train.seed", "--seed", "--debug.seed", "seed", "seed", same=True),
        Row(
            "train.deterministic",
            "--deterministic-mode",
            "--debug.deterministic",
            "",
            "full_determinism",
            same=True,
        ),
        Row("train.device", "", "", "device", "use_cpu"),
        Row(
            "train.eval_every",
            "--eval-interval",
            "--validation.freq --validator.freq",
            "eval_interval",
            "eval_steps",
            same=True,
        ),
        Row(
            "train.eval_batches",
            "--eval-iters",
            "--validation.steps --validator.steps",
            "eval_iters",
            "",
            "in global batches; nanoGPT counts batches of `batch_size`",
        ),
    ],
    "optimizer": [
        Row("optim.kind", "--optimizer", "--optimizer.name", "", "optim"),
        Row("optim.lr", "--lr", "--optimizer.lr", "learning_rate", "learning_rate", same=True),
        Row(
            "optim.min_lr",
            "--min-lr",
            "--lr_scheduler.min_lr_factor",
            "min_lr",
            "",
            "a rate; torchtitan takes a factor",
            same=True,
        ),
        Row(
            "optim.warmup_steps",
            "--lr-warmup-iters --lr-warmup-fraction",
            "--lr_scheduler.warmup_steps",
            "warmup_iters",
            "warmup_steps warmup_ratio",
            same=True,
        ),
        Row(
            "optim.decay_steps",
            "--lr-decay-iters --lr-wsd-decay-iters",
            "--lr_scheduler.decay_ratio",
            "lr_decay_iters",
            "",
        ),
        Row(
            "optim.schedule",
            "--lr-decay-style",
            "--lr_scheduler.decay_type",
            "decay_lr",
            "lr_scheduler_type",
        ),
        Row(
            "optim.weight_decay",
            "--weight-decay",
            "--optimizer.weight_decay",
            "weight_decay",
            "weight_decay",
            same=True,
        ),
        Row(
            "optim.beta1 optim.beta2",
            "--adam-beta1 --adam-beta2",
            "--optimizer.beta1 --optimizer.beta2",
            "beta1 beta2",
            "adam_beta1 adam_beta2",
            same=True,
        ),
        Row("optim.eps", "--adam-eps", "--optimizer.eps", "", "adam_epsilon", same=True),
        Row("optim.grad_clip", "--clip-grad", "--training.max_norm", "grad_clip", "max_grad_norm", same=True),
    ],
    "layout": [
        Row(
            "parallel.tensor",
            "--tensor-model-parallel-size",
            "--parallelism.tensor_parallel_degree",
            "",
            "tp_size",
            same=True,
        ),
        Row("parallel.sequence", "--sequence-parallel", "--parallelism.enable_sequence_parallel", same=True),
        Row(
            "parallel.pipeline",
            "--pipeline-model-parallel-size",
            "--parallelism.pipeline_parallel_degree",
            same=True,
        ),
        Row("parallel.schedule", "", "--parallelism.pipeline_parallel_schedule"),
        Row(
            "parallel.chunks",
            "--num-virtual-stages-per-pipeline-rank --num-layers-per-virtual-pipeline-stage",
            same=True,
        ),
        Row(
            "parallel.context",
            "--context-parallel-size",
            "--parallelism.context_parallel_degree",
            "",
            "cp_size",
            same=True,
        ),
        Row("parallel.context_method", "--cp-comm-type", "--parallelism.context_parallel_rotate_method"),
        Row(
            "parallel.expert parallel.expert_tensor",
            "--expert-model-parallel-size --expert-tensor-parallel-size",
            "--parallelism.expert_parallel_degree --parallelism.expert_tensor_parallel_degree",
            same=True,
        ),
        Row(
            "parallel.expert_halves",
            "--overlap-moe-expert-parallel-comm",
            "",
            "",
            "",
            "overlaps halves of one microbatch; Megatron-LM overlaps two microbatches",
        ),
        Row(
            "parallel.data",
            "",
            "--parallelism.data_parallel_replicate_degree",
            "",
            "dp_replicate_size",
            "which follows from the ranks",
        ),
        Row("engine.shard_optimizer", "--use-distributed-optimizer", same=True),
        Row(
            "engine.kind",
            "--use-torch-fsdp2 --use-megatron-fsdp",
            "",
            "",
            "fsdp deepspeed",
            "`fsdp` or `deepspeed`",
        ),
        Row("engine.shard_size", "", "--parallelism.data_parallel_shard_degree", "", "dp_shard_size"),
        Row(
            "engine.reshard",
            "--torch-fsdp2-no-reshard-after-forward",
            "--parallelism.fsdp_reshard_after_forward",
        ),
        Row("engine.cpu_offload", "--optimizer-cpu-offload", "--training.enable_cpu_offload"),
        Row("engine.reduce_dtype", "--grad-reduce-in-bf16", "--training.mixed_precision_reduce"),
        Row(
            "parallel.timeout_seconds",
            "--distributed-timeout-minutes",
            "--comm.train_timeout_seconds",
            "",
            "ddp_timeout",
        ),
    ],
    "data": [
        Row(
            "data.train data.valid",
            "--train-data-path --valid-data-path",
            "--training.dataset --validation.dataset",
            "dataset",
            "train_file validation_file",
        ),
        Row(
            "data.train",
            "--data-path",
            "--training.dataset_path --dataloader.dataset --dataloader.dataset_path",
            "",
            "dataset_name",
            "files that `launch/prepare.py` or Megatron-LM wrote",
        ),
        Row("data.valid", "--split", "--validation.dataset_path", "", "validation_split_percentage"),
        Row(
            "data.tokenizer",
            "--tokenizer-model --tokenizer-type",
            "--model.hf_assets_path --hf_assets_path",
            "",
            "tokenizer_name",
        ),
        Row("data.document_mask", "--reset-attention-mask --reset-position-ids"),
        Row("data.packing", "", "", "", "packing"),
    ],
    "checkpoints and logs": [
        Row(
            "log.dir",
            "--save --tensorboard-dir",
            "--job.dump_folder --dump_folder",
            "out_dir",
            "output_dir logging_dir",
        ),
        Row(
            "checkpoint.every",
            "--save-interval",
            "--checkpoint.interval",
            "always_save_checkpoint",
            "save_steps",
            same=True,
        ),
        Row("checkpoint.keep", "", "--checkpoint.keep_latest_k", "", "save_total_limit", same=True),
        Row("checkpoint.keep_every", "--save-retain-interval", same=True),
        Row("checkpoint.best", "", "", "", "load_best_model_at_end"),
        Row("checkpoint.async", "--async-save", "--checkpoint.async_mode", same=True),
        Row("checkpoint.resume", "--load", "--checkpoint.load_step", "init_from", "resume_from_checkpoint"),
        Row(
            "checkpoint.weights",
            "--pretrained-checkpoint --finetune",
            "--checkpoint.initial_load_path",
            "",
            "model_name_or_path",
        ),
        Row("log.every", "--log-interval", "--metrics.log_freq", "log_interval", "logging_steps", same=True),
        Row("log.tensorboard", "", "--metrics.enable_tensorboard"),
        Row("log.profile", "--profile", "--profiling.enable_profiling --profiler.enable_profiling"),
        Row("log.wandb", "--wandb-project", "--metrics.enable_wandb", "wandb_log", "report_to"),
    ],
}
# What to print for a word whose values differ from those of megacore's key, or that needs an explanation.
MEANINGS = {
    # Megatron-LM's
    "group_query_attention": "model.num_kv_heads: a number of heads",
    "make_vocab_size_divisible_by": "model.vocab_size: pad it yourself",
    "untie_embeddings_and_output_weights": "model.tie_embeddings: the opposite",
    "disable_bias_linear": "model.bias: the opposite",
    "moe_shared_expert_intermediate_size": "model.shared_experts: their number",
    "squared_relu": "model.activation=relu2",
    "swiglu": "model.activation=swiglu",
    "use_rope_scaling": "model.rope_scaling: an object, with its type and factor",
    "rope_scaling_factor": "model.rope_scaling: an object, with its type and factor",
    "window_size": "model.window: one number, the tokens that a token attends to, including itself",
    "step_batch_size_schedule": "train.batch_ramp: a list of [last step, size]",
    "rampup_batch_size": "train.batch_ramp: a list of [last step, size]",
    "num_layers_per_virtual_pipeline_stage": "parallel.chunks: the number of chunks of a pipeline rank",
    "use_megatron_fsdp": "engine.kind=fsdp",
    "grad_reduce_in_bf16": "engine.reduce_dtype=bf16",
    "split": "data.valid: a corpus, as prepare.py --valid-fraction writes it",
    "profile": "log.profile: an object, with steps and ranks",
    "recompute_activations": "train.recompute: none, selective or full",
    "lr_warmup_fraction": "optim.warmup_steps: a number of steps",
    "lr_wsd_decay_iters": "optim.decay_steps with optim.schedule=wsd",
    "use_torch_fsdp2": "engine.kind=fsdp",
    "torch_fsdp2_no_reshard_after_forward": "engine.reshard: the opposite",
    "distributed_timeout_minutes": "parallel.timeout_seconds: seconds",
    "load": "checkpoint.resume: auto, never or a checkpoint's path",
    "wandb_project": "log.wandb: off, offline or online",
    # torchtitan's
    "training.num_tokens_per_microbatch_per_dp_rank": "train.micro_batch_size: in sequences, not tokens",
    "training.num_tokens_per_train_step": "train.global_batch_size: in sequences, not tokens",
    "profiling.enable_profiling": "log.profile: an object, with steps and ranks",
    "profiler.enable_profiling": "log.profile: an object, with steps and ranks",
    "lr_scheduler.min_lr_factor": "optim.min_lr: a rate, not a factor",
    "lr_scheduler.decay_ratio": "optim.decay_steps: a number of steps",
    "checkpoint.load_step": "checkpoint.resume: auto, never or a checkpoint's path",
    # nanoGPT's
    "dtype": "train.precision: fp32, bf16, fp16 or fp64",
    "eval_iters": "train.eval_batches: batches of the global size",
    "decay_lr": "optim.schedule: constant or cosine",
    "always_save_checkpoint": "checkpoint.every: steps between checkpoints, whatever the loss",
    "init_from": "checkpoint.resume: auto, never or a checkpoint's path",
    "wandb_log": "log.wandb: off, offline or online",
    # transformers'
    "attention_bias": "model.qkv_bias and model.output_bias: it sets both",
    "mlp_bias": "model.bias with model.qkv_bias=false model.output_bias=false: only the MLP has biases",
    "hidden_act": "model.activation: such as swiglu for silu",
    "activation_function": "model.activation: such as gelu for gelu_new",
    "rope_parameters": "model.rope_scaling and model.rope_theta",
    "validation_split_percentage": "data.valid: a corpus, as prepare.py --valid-fraction writes it",
    "num_train_epochs": "train.steps: a number of steps",
    "bf16": "train.precision: fp32, bf16, fp16 or fp64",
    "fp16": "train.precision: fp32, bf16, fp16 or fp64",
    "torch_dtype": "train.precision: fp32, bf16, fp16 or fp64",
    "gradient_checkpointing": "train.recompute: none, selective or full",
    "use_cpu": "train.device: auto, cpu or cuda",
    "optim": "optim.kind: such as adamw",
    "warmup_ratio": "optim.warmup_steps: a number of steps",
    "fsdp": "engine.kind=fsdp",
    "packing": "data.packing: none or best_fit",
    "load_best_model_at_end": "checkpoint.best: keeps the best checkpoint, and does not load it",
    "resume_from_checkpoint": "checkpoint.resume: auto, never or a checkpoint's path",
    "report_to": "log.wandb: off, offline or online",
    # of several
    "gradient_accumulation_steps": "train.global_batch_size: sequences of a step, of all its microbatches "
    "and data ranks",
    "betas": "optim.beta1 and optim.beta2",
}
# What Python calls JSON's values: people type True.
LITERALS = {"True": "true", "False": "false", "None": "null"}
# Common abbreviations, which are not in the table. Their values are those of the key.
SHORT = {
    "tp": "parallel.tensor",
    "pp": "parallel.pipeline",
    "dp": "parallel.data",
    "cp": "parallel.context",
    "ep": "parallel.expert",
    "data_parallel_size": "parallel.data",
    "tensor_parallel_size": "parallel.tensor",
    "pipeline_parallel_size": "parallel.pipeline",
}
TRAINERS = {
    "megatron": "Megatron-LM",
    "torchtitan": "torchtitan",
    "nanogpt": "nanoGPT",
    "transformers": "transformers",
}


def plain(word: str) -> str:
    """Return a word as it is looked up: without dashes, in lower case."""
    return word.lstrip("-").replace("-", "_").lower()


@cache
def words() -> dict[str, tuple[str, ...]]:
    """Return megacore's keys by the words of the other trainers.

    Where a row has as many words as keys they are pairs; else each word means all keys of the row.
    """
    return {
        word: tuple(dict.fromkeys(key for key, _ in entries)) for word, entries in words_of_rows().items()
    }


@cache
def words_of_rows() -> dict[str, dict[tuple[str, bool], None]]:
    """Return for each word its keys in the table's order, each with whether its row is marked `same`."""
    entries = {word: {(key, True): None} for word, key in SHORT.items()}
    entries["betas"] = {("optim.beta1", False): None, ("optim.beta2", False): None}
    for row in (row for rows in TABLE.values() for row in rows):
        keys = row.keys.split()
        for trainer in TRAINERS:
            trainer_words = getattr(row, trainer).split()
            for index, word in enumerate(trainer_words):
                word_keys = [keys[index]] if len(trainer_words) == len(keys) else keys
                entries.setdefault(plain(word), {}).update({(key, row.same): None for key in word_keys})
    return entries


def known_word(word: str) -> str | None:
    """Return another trainer's word as `words` has it; None if it is not one.

    `word` is an option, a key, or a key of megacore's form whose name is another trainer's, such as
    `model.n_embd`.
    """
    name = plain(word)
    return next((known for known in (name, name.rpartition(".")[2]) if known in words()), None)


def other_word(word: str) -> str | None:
    """Return what a word of another trainer stands for: megacore's keys, joined by "or", or its entry in
    `MEANINGS`; None if it is not such a word.
    """
    name = known_word(word)
    return None if name is None else MEANINGS.get(name) or " or ".join(words()[name])


def suggested_override(word: str, value: str) -> str | None:
    """Return what an override with another trainer's word stands for; None if it is not such a word.

    The value is carried over only where it means the same for megacore's key.
    """
    name = known_word(word)
    if name is None:
        return None
    entries = list(words_of_rows()[name])
    if name in MEANINGS or len(entries) > 1 or not entries[0][1]:
        return other_word(word)
    return f"{entries[0][0]}={LITERALS.get(value, value)}"


def near(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that is most like this one; None if none is like it."""
    return next(iter(difflib.get_close_matches(name, list(known), 1, SIMILAR)), None)


def meant_key(key: str, known: Iterable[str]) -> str:
    """Return what an unknown `section.key` may mean, as a question; or where all keys are listed.

    A key of the same name in another section comes before names that are like it.
    """
    all_keys = list(known)
    section, _, name = key.partition(".")
    exact = other_word(key) if plain(key) in words() else None
    same_name = [other for other in all_keys if other.partition(".")[2] == name]
    if exact or same_name:
        return f"did you mean {exact or ' or '.join(same_name)}?"
    if other := other_word(key):
        return f"did you mean {other}?"
    keys_by_name = {other.partition(".")[2]: other for other in reversed(all_keys)}
    keys_by_name |= {other.partition(".")[2]: other for other in all_keys if other.startswith(f"{section}.")}
    similar = near(name, keys_by_name)
    if similar is None:
        return "launch/pretrain.py --print-config shows all keys"
    return f"did you mean {keys_by_name[similar]}?"


def meant_option(message: str, options: Iterable[str], takes_overrides: bool) -> str | None:
    """Return what the first option of argparse's message about unknown arguments may mean, as a question.

    An option of the script that is like it comes before another trainer's word for a setting.
    """
    option = OPTION.search(message)
    if option is None:
        return None
    similar = near(option[0], options)
    if similar is not None:
        return f"did you mean {similar}?"
    override = suggested_override(option[0], "VALUE") if takes_overrides else None
    return None if override is None else f"did you mean {override}?"


def table() -> str:
    """Return the rows for docs/migrating.md."""

    def cell(text: str) -> str:
        return ", ".join(f"`{word}`" for word in text.split()) or "–"

    lines = [f"| here | {' | '.join(TRAINERS.values())} |", "|---|---|---|---|---|"]
    for title, rows in TABLE.items():
        lines.append(f"| **{title}** | | | | |")
        for row in rows:
            here = cell(row.keys) + (f", {row.note}" if row.note else "")
            lines.append(f"| {here} | {' | '.join(cell(getattr(row, trainer)) for trainer in TRAINERS)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
