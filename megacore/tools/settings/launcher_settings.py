"""Compares what a launcher says about training with the run's own config.

`accelerate launch` passes the settings of its own config to the ranks in environment variables, for its
`Accelerator` to read. A run takes its settings from megacore's config alone, so sharding, bf16 or tensor
parallelism that the user has asked for there would be ignored without a word. torchrun, deepspeed, srun,
mpirun, Ray and Kubernetes tell a rank only its place, its threads and its devices.

The variables and their defaults are those of accelerate's `utils/launch.py` (July 2026).
"""

import json
import os
import shlex
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from megacore.config.schema import Config
from megacore.errors import ConfigError
from megacore.tools.settings.ds_settings import read

# What accelerate takes for a flag's value.
TRUE = ("true", "1", "yes", "y", "on", "t")
FALSE = ("false", "0", "no", "n", "off", "f")
# Values of any variable that state nothing; accelerate writes "None" for an option that was not given.
SILENT = ("", "none", "auto")
NOTHING = object()  # the meaning of a value that is the launcher's default
# What is no key itself: train.global_batch_size and parallel.data decide it.
MICROBATCHES = "microbatches"
COPIES = "copies of the model"


def flag(on: Any, off: Any = NOTHING) -> dict[str, Any]:
    """Return the words of a flag, with the value of megacore's key for each."""
    return dict.fromkeys(TRUE, on) | dict.fromkeys(FALSE, off)


def size(text: str) -> Any:
    """Return the number of ranks that a variable states; 1 is the launcher's default."""
    return NOTHING if float(text) == 1 else int(text)


def clip(text: str) -> Any:
    """Return the norm at which Megatron-LM clips; 1.0 is the launcher's default."""
    return NOTHING if float(text) == 1 else float(text)


UNSUPPORTED = dict.fromkeys(FALSE, NOTHING)  # the words of a flag that has no equal in megacore
MACHINE = object()  # engine.shard_size is the number of ranks on a machine
SHARDING = {
    "full_shard": NOTHING,
    "1": NOTHING,
    "shard_grad_op": False,
    "2": False,
    "hybrid_shard": MACHINE,
    "4": MACHINE,
}
# For each switch (None: always) its variables: megacore's key, and the launcher's words with the value of
# that key, or a function of the text. A tuple holds all values that agree; the first one is suggested.
VARIABLES: dict[str | None, dict[str, tuple[str, Mapping[str, Any] | Callable[[str], Any]]]] = {
    None: {
        "ACCELERATE_USE_FSDP": ("engine.kind", flag("fsdp")),
        "ACCELERATE_USE_DEEPSPEED": ("engine.kind", flag("deepspeed")),
        "ACCELERATE_MIXED_PRECISION": ("train.precision", {"no": NOTHING, "bf16": "bf16", "fp16": "fp16"}),
        "ACCELERATE_DYNAMO_BACKEND": ("train.compile", {"no": NOTHING, "inductor": True}),
        "ACCELERATE_USE_CPU": ("train.device", flag(("cpu", "auto"))),
        "ACCELERATE_GRADIENT_CLIPPING": ("optim.grad_clip", float),
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": (MICROBATCHES, int),
    },
    "ACCELERATE_USE_FSDP": {
        "FSDP_OFFLOAD_PARAMS": ("engine.cpu_offload", flag(True)),
        "FSDP_ACTIVATION_CHECKPOINTING": ("train.recompute", flag("full")),
        "FSDP_SHARDING_STRATEGY": ("engine.reshard", SHARDING),  # of FSDP 1
        "FSDP_RESHARD_AFTER_FORWARD": ("engine.reshard", flag(NOTHING, False)),  # of FSDP 2
    },
    "ACCELERATE_USE_MEGATRON_LM": {
        "MEGATRON_LM_TP_DEGREE": ("parallel.tensor", size),
        "MEGATRON_LM_PP_DEGREE": ("parallel.pipeline", size),
        "MEGATRON_LM_CONTEXT_PARALLEL_SIZE": ("parallel.context", size),
        "MEGATRON_LM_EXPERT_MODEL_PARALLEL_SIZE": ("parallel.expert", size),
        "MEGATRON_LM_EXPERT_TENSOR_PARALLEL_SIZE": ("parallel.expert_tensor", size),
        "MEGATRON_LM_NUM_MICRO_BATCHES": (MICROBATCHES, int),
        "MEGATRON_LM_SEQUENCE_PARALLELISM": ("parallel.sequence", flag(True, False)),
        "MEGATRON_LM_USE_DISTRIBUTED_OPTIMIZER": ("engine.shard_optimizer", flag(True, False)),
        "MEGATRON_LM_USE_CUSTOM_FSDP": ("engine.kind", flag("fsdp")),
        "MEGATRON_LM_OPTIMIZER_CPU_OFFLOAD": ("engine.cpu_offload", flag(True)),
        "MEGATRON_LM_RECOMPUTE_ACTIVATIONS": ("train.recompute", flag(("selective", "full"))),
        "MEGATRON_LM_RECOMPUTE_GRANULARITY": ("train.recompute", {"selective": "selective", "full": "full"}),
        "MEGATRON_LM_GRADIENT_CLIPPING": ("optim.grad_clip", clip),
        "MEGATRON_LM_HIDDEN_DROPOUT": ("model.dropout", float),
        "MEGATRON_LM_ATTENTION_DROPOUT": ("model.dropout", float),
        "MEGATRON_LM_USE_ROTARY_POSITION_EMBEDDINGS": ("model.position", flag("rope")),
        "MEGATRON_LM_NO_LOAD_OPTIM": ("checkpoint.weights", UNSUPPORTED),
        "MEGATRON_LM_NO_SAVE_OPTIM": ("checkpoint.last", UNSUPPORTED),
        "MEGATRON_LM_EOD_MASK_LOSS": ("data.document_mask", UNSUPPORTED),
        "MEGATRON_LM_USE_PRECISION_AWARE_OPTIMIZER": ("train.precision", UNSUPPORTED),
    },
    "ACCELERATE_USE_PARALLELISM_CONFIG": {
        "PARALLELISM_CONFIG_TP_SIZE": ("parallel.tensor", size),
        "PARALLELISM_CONFIG_CP_SIZE": ("parallel.context", size),
        "PARALLELISM_CONFIG_SP_SIZE": ("parallel.context", size),
        "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": (COPIES, size),
        "PARALLELISM_CONFIG_DP_SHARD_SIZE": ("engine.shard_size", size),
    },
}
# The FSDP version that does not read a variable; accelerate sets both, one of them to its default.
IGNORED_BY = {"FSDP_SHARDING_STRATEGY": "2", "FSDP_RESHARD_AFTER_FORWARD": "1"}
DS_FILE = "ACCELERATE_DEEPSPEED_CONFIG_FILE"
ZERO_STAGE = "ACCELERATE_DEEPSPEED_ZERO_STAGE"
OFFLOADS = {
    "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "offload_optimizer",
    "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "offload_param",
}


class Statement(NamedTuple):
    """What one variable says: megacore's key, and the values of it that agree."""

    variable: str
    key: str
    values: tuple[Any, ...]


def check_launcher(config: Config, env: Mapping[str, str] = os.environ) -> None:
    """Raise `ConfigError` if the launcher's variables contradict the resolved config.

    The message names all of them, and the overrides with which the run does what they say.
    """
    wrong = [
        statement
        for statement in statements(config, env)
        if value_of(config, statement.key) not in statement.values
    ]
    if not wrong:
        return
    variables = ", ".join(f"{statement.variable}={env[statement.variable]}" for statement in wrong)
    ours = {statement.key: written(statement.key, value_of(config, statement.key)) for statement in wrong}
    asked = {statement.key: written(statement.key, statement.values[0]) for statement in wrong}
    verb, settings = ("contradicts", "this setting") if len(wrong) == 1 else ("contradict", "these settings")
    raise ConfigError(
        "environment",
        f"the launcher's {variables} {verb} the run's {', '.join(ours.values())}",
        f"{' '.join(asked.values())}, or a launch without {settings}",
    )


def statements(config: Config, env: Mapping[str, str]) -> Iterator[Statement]:
    """Yield what the launcher's variables say about training.

    Raises `ConfigError` for a value without an equal in megacore.
    """
    for switch, variables in VARIABLES.items():
        if switch is not None and not is_on(env, switch):
            continue
        for name, (key, words) in variables.items():
            if not is_stated(env, name) or IGNORED_BY.get(name) == env.get("FSDP_VERSION", "1"):
                continue
            value = meaning(env, name, key, words)
            if value is NOTHING:
                continue
            if key == MICROBATCHES:
                key = "train.global_batch_size"
                value *= config.train.micro_batch_size * config.data_size
            elif value is MACHINE:
                key = "engine.shard_size"
                value = int(env.get("LOCAL_WORLD_SIZE", "1"))
            elif key == COPIES:
                key = "parallel.data"
                value *= int(env.get("PARALLELISM_CONFIG_DP_SHARD_SIZE", "1"))
            yield Statement(name, key, value if isinstance(value, tuple) else (value,))
    if is_on(env, "ACCELERATE_USE_DEEPSPEED"):
        yield from deepspeed_statements(config, env)


def deepspeed_statements(config: Config, env: Mapping[str, str]) -> Iterator[Statement]:
    """Yield what accelerate says about DeepSpeed's config: a file of it, or a stage and offloading."""
    is_deepspeed = config.engine.kind == "deepspeed" and config.engine.config is not None
    ours = read(config.engine.config) if is_deepspeed else {}
    if is_stated(env, DS_FILE):
        theirs = None
        with suppress(ConfigError):  # a file that cannot be read is not the run's either
            theirs = read(env[DS_FILE])
        if not is_deepspeed or ours != theirs:
            yield Statement(DS_FILE, "engine.config", (env[DS_FILE],))
        return
    zero = ours.get("zero_optimization") or {}
    asked: dict[str, Any] = {}
    if is_stated(env, ZERO_STAGE):
        asked["stage"] = meaning(env, ZERO_STAGE, "engine.config", int)
    for name, section in OFFLOADS.items():
        if is_stated(env, name):
            asked[section] = {"device": env[name].lower()}
    differs = zero.get("stage", 0) != asked.get("stage", zero.get("stage", 0)) or any(
        (zero.get(section) or {}).get("device", "none") != asked[section]["device"]
        for section in OFFLOADS.values()
        if section in asked
    )
    if differs:
        name = next(name for name in (ZERO_STAGE, *OFFLOADS) if is_stated(env, name))
        yield Statement(name, "engine.config", ({"zero_optimization": asked},))


def check_device(env: Mapping[str, str] = os.environ) -> None:
    """Raise `ConfigError` if the launcher says CPU; called where `train.device=auto` has found a GPU."""
    if is_on(env, name := "ACCELERATE_USE_CPU"):
        wrong = f"the launcher's {name}={env[name]} contradicts train.device=auto, which takes a GPU here"
        raise ConfigError("environment", wrong, "train.device=cpu, or a launch without --cpu")


def is_stated(env: Mapping[str, str], name: str) -> bool:
    """Whether a variable has a value that states anything."""
    return env.get(name, "").strip().lower() not in SILENT


def is_on(env: Mapping[str, str], name: str) -> bool:
    """Whether a flag is set and true."""
    return env.get(name, "").strip().lower() in TRUE


def meaning(
    env: Mapping[str, str], name: str, key: str, words: Mapping[str, Any] | Callable[[str], Any]
) -> Any:
    """Return the value of megacore's key that a variable asks for, or `NOTHING`. Raises `ConfigError`."""
    text = env[name].strip().lower()
    if callable(words):
        try:
            return words(text)
        except (ValueError, OverflowError):
            raise ConfigError("environment", f"{name}={env[name]} is not a number", f"see {key}") from None
    if text not in words:
        aliases = (*TRUE[1:], *FALSE[1:], "2", "4")
        known = " or ".join(word for word in words if word not in aliases)
        wrong = f"the launcher's {name}={env[name]} has no equal in megacore"
        raise ConfigError("environment", wrong, f"{known}; the run's own key is {key}")
    return words[text]


def value_of(config: Config, key: str) -> Any:
    """Return a key's value in the resolved config, and for open ones the value that they stand for."""
    if key == "parallel.data":
        return config.data_size
    if key == "engine.shard_size" and config.engine.kind == "fsdp":
        return config.engine.shard_size or config.data_size
    if key == "parallel.expert_tensor":
        return config.parallel.expert_tensor or config.parallel.tensor
    section, name = key.split(".")
    return getattr(getattr(config, section), name)


def written(key: str, value: Any) -> str:
    """Return an override as it is typed in a shell."""
    return shlex.quote(f"{key}={value if isinstance(value, str) else json.dumps(value)}")
