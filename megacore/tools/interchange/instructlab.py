"""Turns InstructLab's ``config.yaml`` into a config of megacore: its section `train`, for a model and
conversations that are prepared.

Every key of the section becomes a setting, or is told by its name with the reason why it is none, or is
refused. The keys are those of `_train` in InstructLab's `configuration.py` (configuration version 1.0.0),
with what its training library adds; and older ones.
"""

import difflib
import math
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megacore.config import Config
from megacore.data.indexed import IndexedTokens
from megacore.data.packing import WholeDocuments
from megacore.errors import ConfigError, DataError
from megacore.files import read_json, read_text
from megacore.tools.settings.load import resolve
from megacore.tools.text.encodings import needed

RIGHT = "a config.yaml that `ilab config init` has written, or a profile of its own"
NO_LORA = "belongs to low-rank adapters, of which there are none here"
PHASES = (
    "belongs to lab-multiphase; a phase is a recipe of its own, with its data, num_epochs, "
    "learning_rate and effective_batch_size"
)
OTHERS = "says how InstructLab itself works"
TOLD = {
    "model_path": "launch/checkpoint.py import has read it: --run",
    "data_path": "launch/prepare.py --chat has read it: --data",
    "chat_tmpl_path": "launch/prepare.py --chat --template takes a Jinja template",
    "ckpt_output_dir": "log.dir says where a run writes",
    "data_output_dir": "prepared tokens lie where launch/prepare.py --output says",
    "is_padding_free": "samples hold whole conversations, one behind the other (data.packing=best_fit)",
    "disable_flash_attn": "model.attention=auto takes what the device has",
    "use_liger": "model.kernels=auto takes fused kernels on GPUs",
    "pipeline": OTHERS,
    "process_data": OTHERS,
    "data_process_num_cpu_procs": OTHERS,
    "log_level": OTHERS,
    "training_journal": OTHERS,
    "accelerate_full_state_at_epoch": "every checkpoint has the whole state",
    "lora_quantize_dtype": NO_LORA,
    "lora_alpha": NO_LORA,
    "lora_dropout": NO_LORA,
    "lora_target_modules": NO_LORA,
    **{f"phased_{key}": PHASES for key in ("base_dir", "mt_bench_judge", "phase1_data", "phase2_data")},
    **{
        f"phased_phase{n}_{key}": PHASES
        for n in (1, 2)
        for key in ("num_epochs", "samples_per_save", "learning_rate", "effective_batch_size")
    },
}
READ = (
    "max_seq_len",
    "max_batch_len",
    "effective_batch_size",
    "num_epochs",
    "learning_rate",
    "warmup_steps",
    "save_samples",
    "device",
    "checkpoint_at_epoch",
    "keep_last_checkpoint_only",
    "nproc_per_node",
    "num_gpus",
    "random_seed",
    "distributed_backend",
    "distributed",
    "deepspeed_cpu_offload_optimizer",
    "deepspeed_cpu_offload_optimizer_ratio",
    "deepspeed_cpu_offload_optimizer_pin_memory",
    "fsdp_cpu_offload_optimizer",
    "lora_rank",
    "use_dolomite",
    "mock_data",
    "mixed_precision",
    "gradient_checkpointing",
    "gradient_accumulation_steps",
    "adamw_weight_decay",
    "adamw_betas",
    "adamw_eps",
    "lr_scheduler",
    "deepspeed.config_path",
    "deepspeed.zero_stage",
)
PRECISIONS = {"bf16": "bf16", "fp16": "fp16", "no": "fp32", "fp32": "fp32", None: "fp32", False: "fp32"}
# Our settings, and the keys of the recipe that they are made from.
ORIGINS = {
    "train.steps": "num_epochs",
    "train.seq_len": "max_seq_len",
    "train.micro_batch_size": "max_batch_len",
    "train.global_batch_size": "effective_batch_size",
    "train.seed": "random_seed",
    "optim.lr": "learning_rate",
    "optim.warmup_steps": "warmup_steps",
    "optim.eps": "adamw_eps",
    "optim.weight_decay": "adamw_weight_decay",
    "checkpoint.every": "save_samples",
    "engine.shard_size": "nproc_per_node",
    "engine.config": "deepspeed.config_path",
}
NONE = object()


class Recipe:
    """The keys of a section `train`, each read once; what is left in the end is told or refused."""

    def __init__(self, train: dict[str, Any]) -> None:
        self.values: dict[str, Any] = {}
        self.notes: list[str] = []
        for key, value in train.items():
            inner = (
                value if key in ("additional_args", "deepspeed") and isinstance(value, dict) else {key: value}
            )
            for name, each in inner.items():
                name = f"deepspeed.{name}" if key == "deepspeed" else name
                if name in self.values and self.values[name] != each:
                    self.refuse(
                        name, f"stands twice, as {self.values[name]!r} and as {each!r}", "one of them"
                    )
                self.values[name] = each
        for name in self.values:
            if name not in READ and name not in TOLD:
                near = difflib.get_close_matches(name, [*READ, *TOLD], 1)
                self.refuse(name, "is not known", f"{near[0]}?" if near else "no such key")
        self.notes += [f"train.{name}: {TOLD[name]}" for name in self.values if name in TOLD]

    def refuse(self, key: str, wrong: str, right: str) -> None:
        """Raises `ConfigError`."""
        raise ConfigError(f"train.{key}", wrong, right)

    def has(self, key: str) -> bool:
        """Whether the recipe has the key, with a value."""
        return self.values.get(key) is not None

    def number(self, key: str, default: Any = NONE, least: float = 1, whole: bool = True) -> Any:
        """A number. YAML takes ``2e-5`` for a text, and InstructLab for the number."""
        value = self.values.get(key)
        if value is None and default is not NONE:
            return default
        try:
            found = float(value) if not isinstance(value, bool) else math.nan  # type: ignore[arg-type]
        except (TypeError, ValueError, OverflowError):
            found = math.nan
        if not (math.isfinite(found) and found >= least) or (whole and found != int(found)):
            self.refuse(
                key, f"{value!r} is not valid", f"a {'whole ' if whole else ''}number of at least {least:g}"
            )
        return int(found) if whole else found

    def flag(self, key: str, default: bool = False) -> bool:
        """True or false."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, bool):
            self.refuse(key, f"{value!r} is not valid", "true or false")
        return default if value is None else value

    def one_of(self, key: str, known: dict[Any, Any], default: Any) -> Any:
        """What the value stands for."""
        value = self.values.get(key, default)
        if isinstance(value, list | dict) or value not in known:
            self.refuse(
                key,
                f"{value!r} is not known here",
                ", ".join(str(each) for each in known if isinstance(each, str)),
            )
        return known[value]


def resolve_converted(sections: dict[str, Any], name: str, processes: int) -> Config:
    """Return the checked config of converted sections.

    Raises `ConfigError` for what training would reject. It reports the recipe's key and not ours, which the
    user has not written.
    """
    try:
        return resolve(deepcopy(sections), [], name, processes).config
    except ConfigError as error:
        if error.where not in ORIGINS:
            raise
        wrong = f"as {error.where}: {error.wrong}"
        raise ConfigError(f"train.{ORIGINS[error.where]}", wrong, error.right) from None


def read_recipe(path: str) -> dict[str, Any]:
    """The section `train` of a ``config.yaml``. Raises `DataError`."""
    yaml = needed(path, "yaml")
    try:
        found = yaml.load(read_text(path), Loader=unique_keys(yaml.SafeLoader))
    except OSError as error:
        raise DataError(path, f"cannot be read: {error.strerror}", RIGHT) from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise DataError(path, f"is no YAML: {' '.join(str(error).split())[:200]}", RIGHT) from None
    train = found.get("train") if isinstance(found, dict) else None
    if not isinstance(train, dict) or not all(isinstance(key, str) for key in train):
        raise DataError(path, "has no section train", RIGHT)
    return train


def unique_keys(loader: type[Any]) -> type[Any]:
    """Return a YAML loader that raises `ValueError` for a key that is there twice; PyYAML takes the last."""

    class UniqueKeys(loader):  # type: ignore[misc]
        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            keys = [self.construct_object(key, deep=True) for key, _ in node.value]
            for key in keys:
                if isinstance(key, str) and keys.count(key) > 1:
                    raise ValueError(f"the key {key} twice in one object")
            return dict(super().construct_mapping(node, deep))

    return UniqueKeys


def converted(train: dict[str, Any], run: str, data: str) -> tuple[dict[str, Any], list[str], int]:
    """The sections of a config, what is to be told of keys that are none of its settings,
    and the processes on a machine.

    Args:
        train: InstructLab's section.
        run: the folder of the imported model.
        data: the prefix of the prepared conversations.
    """
    recipe = Recipe(train)
    for key in ("lora_rank", "use_dolomite", "mock_data"):
        if recipe.values.get(key):
            recipe.refuse(key, f"{recipe.values[key]!r} has no equal", "0" if key == "lora_rank" else "false")
    model = _model_of(run)
    seq_len = recipe.number("max_seq_len", 4096)
    most = model.get("max_positions")
    if isinstance(most, int) and seq_len > most:
        recipe.refuse("max_seq_len", f"{seq_len} is beyond the model's {most} positions", f"{most} at most")
    device_tokens = recipe.number("max_batch_len", seq_len)
    if device_tokens < seq_len:
        recipe.refuse("max_batch_len", f"{device_tokens} is below max_seq_len {seq_len}", "at least as much")
    processes = recipe.number("nproc_per_node", recipe.number("num_gpus", 1))
    if recipe.has("nproc_per_node") and recipe.has("num_gpus") and processes != recipe.number("num_gpus"):
        recipe.refuse("num_gpus", f"differs from nproc_per_node {processes}", "one of them")
    corpus = IndexedTokens(data)
    batch = _choose_batch(recipe, corpus, seq_len, device_tokens, processes)
    epoch = max(1, math.ceil(batch.sequences_in_data / batch.global_batch_size))
    recipe.notes.append(
        f"train.nproc_per_node: {processes} processes on each machine are the launcher's business"
    )
    sections = {
        "model": model,
        "train": {
            "steps": epoch * recipe.number("num_epochs", 10),
            "seq_len": batch.seq_len,
            "micro_batch_size": batch.micro_batch_size,
            "global_batch_size": batch.global_batch_size,
            "precision": recipe.one_of("mixed_precision", PRECISIONS, "bf16"),
            "recompute": "full" if recipe.flag("gradient_checkpointing", True) else "none",
            "seed": recipe.number("random_seed", 42, 0),
            "device": recipe.one_of("device", {"cuda": "cuda", "cpu": "cpu"}, "cuda"),
        },
        "optim": _optim(recipe),
        "data": {
            "train": data,
            "tokenizer": _tokenizer_of(run),
            "packing": "best_fit",
            "document_mask": True,
        },
        "checkpoint": {"weights": run} | _checkpoints(recipe, epoch, batch.conversations),
        "engine": _engine(recipe, processes),
    }
    return sections, recipe.notes, processes


@dataclass(frozen=True)
class Batch:
    """How the conversations of one optimizer step are laid out in sequences."""

    seq_len: int
    micro_batch_size: int
    global_batch_size: int  # in sequences
    sequences_in_data: int  # of this length, into which the whole corpus is packed
    conversations: float  # in a global batch, on average


def _choose_batch(
    recipe: Recipe, corpus: IndexedTokens, max_seq_len: int, device_tokens: int, processes: int
) -> Batch:
    """Choose the sequences of a step, so that it holds about `effective_batch_size` conversations.

    `effective_batch_size` is the batch of all processes. `max_batch_len` (`device_tokens`) only limits the
    tokens of one microbatch, so it decides how many microbatches a process accumulates. Every process takes
    the same number of sequences, so the nearest batch can be far off if each sequence holds many
    conversations. Shorter sequences, which hold fewer, come closer, as long as no conversation is cut.
    """
    most_rows = device_tokens // max_seq_len  # sequences of a microbatch
    if recipe.has("gradient_accumulation_steps"):
        if recipe.has("effective_batch_size"):
            recipe.refuse(
                "gradient_accumulation_steps",
                "and effective_batch_size both say how large a batch is",
                "one of them",
            )
        rows = most_rows * recipe.number("gradient_accumulation_steps")
        return _lay_out(corpus, max_seq_len, rows, most_rows, processes)

    stated = recipe.number("effective_batch_size", 3840)
    # A batch larger than the data would repeat conversations within one step.
    wanted = min(stated, corpus.num_documents)
    full = _lay_out(corpus, max_seq_len, 1, 1, processes)
    exact_rows = wanted / full.conversations  # sequences of full length for each process
    candidates = []
    for rows in {max(1, math.floor(exact_rows)), math.ceil(exact_rows)}:
        microbatches = math.ceil(rows / most_rows)
        micro = math.ceil(rows / microbatches)
        rows = micro * microbatches
        shorter = math.ceil(max_seq_len * exact_rows / rows / 8) * 8
        seq_len = min(max_seq_len, max(shorter, _longest(corpus) - 1))
        candidates.append(_lay_out(corpus, seq_len, rows, micro, processes))
    batch = min(candidates, key=lambda candidate: abs(candidate.conversations - wanted))
    recipe.notes.append(
        f"train.effective_batch_size: {stated} conversations are about {batch.conversations:.0f}, in "
        f"{batch.global_batch_size} sequences of {batch.seq_len} tokens, which hold "
        f"{batch.conversations / batch.global_batch_size:.2f} each"
    )
    return batch


def _lay_out(corpus: IndexedTokens, seq_len: int, rows: int, micro: int, processes: int) -> Batch:
    """Return the batch of `rows` sequences on each process, in microbatches of `micro`."""
    sequences = WholeDocuments(corpus, seq_len).count
    global_batch = rows * processes
    return Batch(seq_len, micro, global_batch, sequences, global_batch * corpus.num_documents / sequences)


def _longest(corpus: IndexedTokens) -> int:
    """Return the number of tokens of the longest conversation."""
    _, lengths = corpus.documents(0, corpus.num_documents)
    return int(lengths.max())


def _optim(recipe: Recipe) -> dict[str, Any]:
    betas = recipe.values.get("adamw_betas", [0.9, 0.95])
    if (
        not isinstance(betas, list | tuple)
        or len(betas) != 2
        or not all(isinstance(b, float | int) and 0 <= b < 1 for b in betas)
    ):
        recipe.refuse(
            "adamw_betas", f"{betas!r} is not valid", "two numbers from 0 to 1, such as [0.9, 0.95]"
        )
    schedules = {name: name for name in ("cosine", "linear", "constant")} | {
        "constant_with_warmup": "constant"
    }
    return {
        "kind": "adamw",
        "lr": recipe.number("learning_rate", 2e-5, 0, whole=False),
        "warmup_steps": recipe.number("warmup_steps", 0, 0),
        "schedule": recipe.one_of("lr_scheduler", schedules, "cosine"),
        "min_lr": 0.0,
        "beta1": betas[0],
        "beta2": betas[1],
        "eps": recipe.number("adamw_eps", 1e-8, 0, whole=False),
        "weight_decay": recipe.number("adamw_weight_decay", 0.0, 0, whole=False),
        "grad_clip": 1.0,
    }


def _checkpoints(recipe: Recipe, epoch: int, conversations: float) -> dict[str, Any]:
    """Where both are asked for, the samples decide, and the epochs are told."""
    samples, at_epoch = recipe.number("save_samples", 0, -math.inf), recipe.flag("checkpoint_at_epoch", True)
    kept = {"keep": 1} if recipe.flag("keep_last_checkpoint_only") else {}
    if samples > 0:
        if at_epoch:
            recipe.notes.append(
                f"train.checkpoint_at_epoch: checkpoint.every counts save_samples; an epoch has {epoch} steps"
            )
        return {"every": max(1, round(samples / conversations))} | kept
    if not at_epoch:
        return kept
    return {"every": epoch} | (kept or {"keep_every": epoch})


def _engine(recipe: Recipe, processes: int) -> dict[str, Any]:
    """As its training library has it: DeepSpeed at stage 2, or FSDP with the
    state divided within each machine.
    """
    ds_keys = [key for key in recipe.values if key.startswith("deepspeed.")]
    offload = recipe.flag("deepspeed_cpu_offload_optimizer")
    kinds: dict[Any, Any] = {"fsdp": "fsdp", "deepspeed": "deepspeed"}
    default = "deepspeed" if ds_keys or offload else "fsdp"
    named = "distributed" if recipe.has("distributed") else "distributed_backend"
    kind = recipe.one_of(
        named,
        kinds | ({True: default, False: "native"} if named == "distributed" else {None: default}),
        default,
    )
    if kind != "deepspeed":
        for key in [*ds_keys, *(["deepspeed_cpu_offload_optimizer"] if offload else [])]:
            recipe.refuse(key, f"does not go with {named} {kind}", f"{named} deepspeed, or without it")
    if recipe.number("deepspeed_cpu_offload_optimizer_ratio", 1, 0, whole=False) != 1:
        recipe.refuse(
            "deepspeed_cpu_offload_optimizer_ratio",
            "keeps a part of the optimizer's state where no checkpoint finds it",
            "1",
        )
    if kind == "fsdp" and processes == 1:
        if recipe.flag("fsdp_cpu_offload_optimizer"):
            recipe.refuse(
                "fsdp_cpu_offload_optimizer",
                "one process shards nothing, and keeps the optimizer's state on the device",
                "false, or distributed_backend deepspeed with deepspeed_cpu_offload_optimizer",
            )
        recipe.notes.append(f"train.{named}: one process shards nothing, so engine.kind is native")
        return {"kind": "native"}
    if kind == "fsdp":
        return {
            "kind": "fsdp",
            "shard_size": processes,
            "cpu_offload": recipe.flag("fsdp_cpu_offload_optimizer"),
        }
    if recipe.flag("fsdp_cpu_offload_optimizer"):
        recipe.refuse("fsdp_cpu_offload_optimizer", f"does not go with {kind}", "distributed_backend fsdp")
    if kind == "native":
        return {"kind": "native"}
    if recipe.has("deepspeed.config_path"):
        for key in ("deepspeed.zero_stage", "deepspeed_cpu_offload_optimizer"):
            if recipe.values.get(key):
                recipe.refuse(key, "and deepspeed.config_path both say it", "one of them")
        return {"kind": "deepspeed", "config": str(recipe.values["deepspeed.config_path"])}
    zero: dict[str, Any] = {
        "stage": recipe.one_of("deepspeed.zero_stage", {stage: stage for stage in range(4)}, 2)
    }
    if offload:
        zero["offload_optimizer"] = {
            "device": "cpu",
            "pin_memory": recipe.flag("deepspeed_cpu_offload_optimizer_pin_memory"),
        }
    return {"kind": "deepspeed", "config": {"zero_optimization": zero}}


def _model_of(run: str) -> dict[str, Any]:
    """The model of an imported run."""
    path = Path(run) / "config.json"
    try:
        return dict(read_json(read_text(path))["model"])
    except (OSError, ValueError, RecursionError, KeyError, TypeError):
        raise ConfigError(
            "--run",
            f"{path} is no config of a run",
            "the folder that launch/checkpoint.py import has written",
        ) from None


def _tokenizer_of(run: str) -> str | None:
    found = sorted(
        str(file)
        for file in (Path(run) / "tokenizer").glob("tokenizer.*")
        if file.suffix in (".json", ".model")
    )
    return found[0] if found else None
