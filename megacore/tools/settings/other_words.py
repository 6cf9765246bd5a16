"""What settings are called in Megatron-LM, torchtitan, nanoGPT and transformers, and what an unknown word may
mean.

The table of docs/coming_from.md is made of this one: `python -m megacore.tools.settings.other_words`.
"""

import difflib
import re
from collections.abc import Iterable
from functools import cache
from typing import NamedTuple

SIMILAR = 0.7  # of `difflib`: a transposed, missing or wrong letter or two
OPTION = re.compile(r"--?[A-Za-z][\w.-]*")


class Row(NamedTuple):
    """One setting, or some that belong together. Each field but the note is words between spaces."""

    keys: str
    megatron: str = ""
    torchtitan: str = ""
    nanogpt: str = ""
    transformers: str = ""
    note: str = ""


# Megatron-LM's flags are those of `megatron/training/arguments.py`, torchtitan's of `job_config.py`,
# nanoGPT's of `train.py`, transformers' of `TrainingArguments`, of its models' configs and of its and TRL's
# scripts.
TABLE: dict[str, list[Row]] = {
    "model": [
        Row("model.num_layers", "--num-layers", "", "n_layer", "num_hidden_layers n_layer"),
        Row("model.hidden_size", "--hidden-size", "", "n_embd", "hidden_size n_embd"),
        Row("model.num_heads", "--num-attention-heads", "", "n_head", "num_attention_heads n_head"),
        Row(
            "model.num_kv_heads",
            "--num-query-groups --group-query-attention",
            "",
            "",
            "num_key_value_heads",
        ),
        Row("model.head_size", "--kv-channels", "", "", "head_dim"),
        Row("model.ffn_size", "--ffn-hidden-size", "", "", "intermediate_size n_inner"),
        Row(
            "model.vocab_size",
            "--vocab-size --make-vocab-size-divisible-by",
            "",
            "",
            "vocab_size",
            "which you pad yourself",
        ),
        Row("model.norm", "--normalization", "", "", "", "`rmsnorm` or `layernorm`"),
        Row("model.norm_eps", "--norm-epsilon", "", "", "rms_norm_eps layer_norm_epsilon"),
        Row("model.activation", "--swiglu", "", "", "hidden_act activation_function", "such as `swiglu`"),
        Row("model.position", "--position-embedding-type", "", "", "", "`rope` or `learned`"),
        Row("model.rope_theta", "--rotary-base", "", "", "rope_theta"),
        Row(
            "model.max_positions",
            "--max-position-embeddings",
            "",
            "",
            "max_position_embeddings n_positions",
        ),
        Row("model.bias", "--disable-bias-linear", "", "bias", "mlp_bias"),
        Row("model.qkv_bias", "--add-qkv-bias", "", "", "attention_bias"),
        Row("model.qk_norm", "--qk-layernorm", "", "", ""),
        Row(
            "model.tie_embeddings",
            "--untie-embeddings-and-output-weights",
            "",
            "",
            "tie_word_embeddings",
        ),
        Row(
            "model.dropout",
            "--hidden-dropout --attention-dropout",
            "",
            "dropout",
            "resid_pdrop attn_pdrop embd_pdrop",
        ),
        Row("model.init_std", "--init-method-std", "", "", "initializer_range"),
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
        ),
        Row("model.expert_ffn_size", "--moe-ffn-hidden-size", "", "", "moe_intermediate_size"),
        Row(
            "model.shared_experts",
            "--moe-shared-expert-intermediate-size",
            "",
            "",
            "n_shared_experts",
            "their number; Megatron-LM states the features of all",
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
        ),
        Row(
            "model.expert_groups model.groups_per_token",
            "--moe-router-num-groups --moe-router-group-topk",
            "",
            "",
            "n_group topk_group",
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
        ),
        Row(
            "model.plain_size model.value_size",
            "--qk-head-dim --v-head-dim",
            "",
            "",
            "qk_nope_head_dim v_head_dim",
        ),
    ],
    "batch and steps": [
        Row(
            "train.micro_batch_size",
            "--micro-batch-size",
            "--training.local_batch_size --parallelism.pipeline_parallel_microbatch_size",
            "batch_size",
            "per_device_train_batch_size",
        ),
        Row(
            "train.global_batch_size",
            "--global-batch-size",
            "--training.global_batch_size",
            "gradient_accumulation_steps",
            "gradient_accumulation_steps",
            "sequences of a step; the number of microbatches follows",
        ),
        Row("train.seq_len", "--seq-length", "--training.seq_len", "block_size", "max_seq_length"),
        Row("train.steps", "--train-iters", "--training.steps", "max_iters", "max_steps num_train_epochs"),
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
        Row("train.compile", "", "--training.compile --compile.enable", "compile", "torch_compile"),
        Row("train.seed", "--seed", "--training.seed", "seed", "seed"),
        Row(
            "train.deterministic", "--deterministic-mode", "--training.deterministic", "", "full_determinism"
        ),
        Row("train.device", "", "", "device", "use_cpu"),
        Row("train.eval_every", "--eval-interval", "--validation.freq", "eval_interval", "eval_steps"),
        Row(
            "train.eval_batches",
            "--eval-iters",
            "--validation.steps",
            "eval_iters",
            "",
            "of the global size; nanoGPT's are of `batch_size`",
        ),
    ],
    "optimizer": [
        Row("optim.kind", "--optimizer", "--optimizer.name", "", "optim"),
        Row("optim.lr", "--lr", "--optimizer.lr", "learning_rate", "learning_rate"),
        Row(
            "optim.min_lr",
            "--min-lr",
            "--lr_scheduler.lr_min --lr_scheduler.min_lr_factor",
            "min_lr",
            "",
            "a rate; torchtitan's is a factor",
        ),
        Row(
            "optim.warmup_steps",
            "--lr-warmup-iters --lr-warmup-fraction",
            "--lr_scheduler.warmup_steps",
            "warmup_iters",
            "warmup_steps warmup_ratio",
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
            "optim.weight_decay", "--weight-decay", "--optimizer.weight_decay", "weight_decay", "weight_decay"
        ),
        Row(
            "optim.beta1 optim.beta2 optim.eps",
            "--adam-beta1 --adam-beta2 --adam-eps",
            "--optimizer.beta1 --optimizer.beta2 --optimizer.eps",
            "beta1 beta2",
            "adam_beta1 adam_beta2 adam_epsilon",
        ),
        Row("optim.grad_clip", "--clip-grad", "--training.max_norm", "grad_clip", "max_grad_norm"),
    ],
    "layout": [
        Row(
            "parallel.tensor",
            "--tensor-model-parallel-size",
            "--parallelism.tensor_parallel_degree",
            "",
            "tp_size",
        ),
        Row("parallel.sequence", "--sequence-parallel"),
        Row(
            "parallel.pipeline",
            "--pipeline-model-parallel-size",
            "--parallelism.pipeline_parallel_degree",
        ),
        Row("parallel.schedule", "", "--parallelism.pipeline_parallel_schedule"),
        Row("parallel.chunks", "--num-virtual-stages-per-pipeline-rank"),
        Row(
            "parallel.context",
            "--context-parallel-size",
            "--parallelism.context_parallel_degree",
            "",
            "cp_size",
        ),
        Row("parallel.context_method", "--cp-comm-type", "--parallelism.context_parallel_rotate_method"),
        Row(
            "parallel.expert parallel.expert_tensor",
            "--expert-model-parallel-size --expert-tensor-parallel-size",
            "--parallelism.expert_parallel_degree --parallelism.expert_tensor_parallel_degree",
        ),
        Row(
            "parallel.expert_halves",
            "--overlap-moe-expert-parallel-comm",
            "",
            "",
            "",
            "of one microbatch; Megatron-LM overlaps two",
        ),
        Row(
            "parallel.data",
            "",
            "--parallelism.data_parallel_replicate_degree",
            "",
            "",
            "which follows from the ranks",
        ),
        Row("engine.shard_optimizer", "--use-distributed-optimizer"),
        Row("engine.kind", "--use-torch-fsdp2", "", "", "fsdp deepspeed", "`fsdp` or `deepspeed`"),
        Row("engine.shard_size", "", "--parallelism.data_parallel_shard_degree"),
        Row(
            "engine.reshard",
            "--torch-fsdp2-no-reshard-after-forward",
            "--parallelism.fsdp_reshard_after_forward",
        ),
        Row("engine.cpu_offload", "--optimizer-cpu-offload", "--training.enable_cpu_offload"),
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
            "Megatron-LM's own files",
        ),
        Row(
            "data.tokenizer",
            "--tokenizer-model --tokenizer-type",
            "--model.tokenizer_path --model.hf_assets_path",
            "",
            "tokenizer_name",
        ),
        Row("data.document_mask", "--reset-attention-mask --reset-position-ids"),
        Row("data.packing", "", "", "", "packing"),
    ],
    "checkpoints and logs": [
        Row("log.dir", "--save --tensorboard-dir", "--job.dump_folder", "out_dir", "output_dir logging_dir"),
        Row("checkpoint.every", "--save-interval", "--checkpoint.interval", "", "save_steps"),
        Row(
            "checkpoint.keep checkpoint.keep_every",
            "",
            "--checkpoint.keep_latest_k",
            "",
            "save_total_limit",
        ),
        Row("checkpoint.keep_every", "--save-retain-interval"),
        Row("checkpoint.best", "", "", "always_save_checkpoint", "load_best_model_at_end"),
        Row("checkpoint.async", "--async-save", "--checkpoint.async_mode"),
        Row("checkpoint.resume", "--load", "--checkpoint.load_step", "init_from", "resume_from_checkpoint"),
        Row(
            "checkpoint.weights",
            "--pretrained-checkpoint --finetune",
            "--checkpoint.initial_load_path",
            "",
            "model_name_or_path",
        ),
        Row("log.every", "--log-interval", "--metrics.log_freq", "log_interval", "logging_steps"),
        Row("log.tensorboard", "", "--metrics.enable_tensorboard"),
        Row("log.wandb", "--wandb-project", "--metrics.enable_wandb", "wandb_log", "report_to"),
    ],
}
# Short words of the field, which are in no table.
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

    Where a row has as many words as keys they are pairs; else each word stands for all keys of the row.
    """
    found = {word: [key] for word, key in SHORT.items()}
    for row in (row for rows in TABLE.values() for row in rows):
        keys = row.keys.split()
        for trainer in TRAINERS:
            theirs = getattr(row, trainer).split()
            for index, word in enumerate(theirs):
                mine = [keys[index]] if len(theirs) == len(keys) else keys
                known = found.setdefault(plain(word), [])
                known += [key for key in mine if key not in known]
    return {word: tuple(keys) for word, keys in found.items()}


def other_word(word: str) -> str | None:
    """Return megacore's keys, joined by "or", for a word of another trainer; None if there are none.

    `word` is an option, a key, or a key of megacore's form whose name is another trainer's, such as
    `model.n_embd`.
    """
    name = plain(word)
    keys = words().get(name) or words().get(name.rpartition(".")[2])
    return " or ".join(keys) if keys else None


def near(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that is most like this one; None if none is like it."""
    return next(iter(difflib.get_close_matches(name, list(known), 1, SIMILAR)), None)


def meant(name: str, known: Iterable[str]) -> str | None:
    """Return what an unknown name may mean, as a question: megacore's key for another trainer's word, or the
    known name that is most like it; None if there is neither.
    """
    key = other_word(name)
    if key is not None:
        return f"did you mean {key}?"
    similar = near(name, known)
    return None if similar is None else f"did you mean {similar}?"


def meant_key(key: str, known: Iterable[str]) -> str:
    """Return what an unknown `section.key` may mean, as a question; or where all keys are listed.

    A key of the same name in another section comes before names that are like it.
    """
    all_keys = list(known)
    section, _, name = key.partition(".")
    exact = words().get(plain(key))
    same_name = [other for other in all_keys if other.partition(".")[2] == name]
    if exact or same_name:
        return f"did you mean {' or '.join(exact or same_name)}?"
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
    key = other_word(option[0]) if takes_overrides else None
    return None if key is None else f"did you mean {key}=VALUE?"


def table() -> str:
    """Return the rows for docs/coming_from.md."""

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
