"""Turns InstructLab's ``config.yaml`` into a config of megacore: its section `train`, for a model and
conversations that are prepared.

Every key of the section becomes a setting, or is told by its name with the reason why it is none, or is
refused. The keys are those of `_train` in InstructLab's `configuration.py` (configuration version 1.0.0),
with what its training library adds; and older ones.
"""

import difflib
import math
from pathlib import Path
from typing import Any

from megacore.data.indexed import IndexedTokens
from megacore.data.packing import WholeDocuments
from megacore.errors import ConfigError, DataError
from megacore.files import read_json, read_text
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


def read_recipe(path: str) -> dict[str, Any]:
    """The section `train` of a ``config.yaml``. Raises `DataError`."""
    yaml = needed(path, "yaml")
    try:
        found = yaml.safe_load(read_text(path))
    except OSError as error:
        raise DataError(path, f"cannot be read: {error.strerror}", RIGHT) from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise DataError(path, f"is no YAML: {' '.join(str(error).split())[:200]}", RIGHT) from None
    train = found.get("train") if isinstance(found, dict) else None
    if not isinstance(train, dict) or not all(isinstance(key, str) for key in train):
        raise DataError(path, "has no section train", RIGHT)
    return train


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
    batch = recipe.number("max_batch_len", seq_len)
    if batch < seq_len:
        recipe.refuse("max_batch_len", f"{batch} is below max_seq_len {seq_len}", "at least as much")
    processes = recipe.number("nproc_per_node", recipe.number("num_gpus", 1))
    if recipe.has("nproc_per_node") and recipe.has("num_gpus") and processes != recipe.number("num_gpus"):
        recipe.refuse("num_gpus", f"differs from nproc_per_node {processes}", "one of them")
    corpus = IndexedTokens(data)
    samples, micro = WholeDocuments(corpus, seq_len).count, max(1, batch // seq_len)
    global_batch, conversations = _global_batch(recipe, micro, processes, corpus.num_documents / samples)
    epoch = max(1, round(samples / global_batch))
    recipe.notes.append(
        f"train.nproc_per_node: {processes} processes on each machine are the launcher's business"
    )
    sections = {
        "model": model,
        "train": {
            "steps": epoch * recipe.number("num_epochs", 10),
            "seq_len": seq_len,
            "micro_batch_size": micro,
            "global_batch_size": global_batch,
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
        "checkpoint": {"weights": run} | _checkpoints(recipe, epoch, conversations),
        "engine": _engine(recipe, processes),
    }
    return sections, recipe.notes, processes


def _global_batch(recipe: Recipe, micro: int, processes: int, held: float) -> tuple[int, float]:
    """Sequences in a global batch, of which each holds so many conversations on
    average; and the conversations in it.
    """
    step = micro * processes
    if recipe.has("gradient_accumulation_steps"):
        if recipe.has("effective_batch_size"):
            recipe.refuse(
                "gradient_accumulation_steps",
                "and effective_batch_size both say how large a batch is",
                "one of them",
            )
        found = step * recipe.number("gradient_accumulation_steps")
        return found, found * held
    wanted = recipe.number("effective_batch_size", 3840)
    found = step * max(1, round(wanted / held / step))
    recipe.notes.append(
        f"train.effective_batch_size: {wanted} conversations are about {found * held:.0f}, in {found} "
        f"sequences of {held:.2f} each"
    )
    return found, found * held


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
