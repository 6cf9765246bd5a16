"""Compares what a launcher says about training with the run's own config.

`accelerate launch` passes the settings of its own config to the ranks in environment variables, for its
`Accelerator` to read. A run takes its settings from megacore's config alone, so sharding, bf16 or tensor
parallelism that the user has asked for there would be ignored without a word. torchrun, deepspeed, srun,
mpirun, Ray and Kubernetes tell a rank only its place, its threads and its devices.

The variables and their defaults are those of accelerate's `utils/launch.py` (July 2026).
"""

import json
import math
import os
import shlex
import sys
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from megacore.config.schema import Config
from megacore.errors import ConfigError
from megacore.records import LARGEST
from megacore.tools.settings.ds_settings import EXAMPLE, read

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


class Number(NamedTuple):
    """The numbers that a variable may be: `right` says which in words; `default` asks for nothing."""

    right: str
    least: float
    most: float = sys.float_info.max
    is_whole: bool = True
    default: float | None = None

    def parse(self, env: Mapping[str, str], name: str) -> Any:
        """Return a variable's number, or `NOTHING` for the default. Raises `ConfigError`."""
        text = env[name].strip()
        try:
            number = int(text) if self.is_whole else float(text)
        except ValueError:
            number = math.nan
        if not self.least <= number <= self.most:
            raise ConfigError("environment", f"the launcher's {name}={env[name]} is not valid", self.right)
        return NOTHING if number == self.default else number


COUNT = Number("a whole number, 1 or more", 1, LARGEST)
SIZE = COUNT._replace(default=1)  # of a group of ranks
STAGE = Number("0, 1, 2 or 3", 0, 3)
NORM = Number("a number, 0 or more", 0, is_whole=False)
DROPOUT = Number("a number, 0 or more and below 1", 0, math.nextafter(1, 0), is_whole=False)
UNSUPPORTED = dict.fromkeys(FALSE, NOTHING)  # the words of a flag that has no equal in megacore
NO_KEY = ""  # megacore has no key for such a setting
MACHINE = object()  # engine.shard_size is the number of ranks on a machine
SHARDING = {
    "full_shard": NOTHING,
    "1": NOTHING,
    "shard_grad_op": False,
    "2": False,
    "hybrid_shard": MACHINE,
    "4": MACHINE,
}
DEVICES = {device: device for device in ("none", "cpu", "nvme")}
# For each switch (None: always) its variables: megacore's key, and the launcher's words with the value of
# that key, or the numbers that it may be. A tuple holds all values that agree; the first one is suggested.
VARIABLES: dict[str | None, dict[str, tuple[str, Mapping[str, Any] | Number]]] = {
    None: {
        "ACCELERATE_USE_FSDP": ("engine.kind", flag("fsdp")),
        "ACCELERATE_USE_DEEPSPEED": ("engine.kind", flag("deepspeed")),
        "ACCELERATE_MIXED_PRECISION": ("train.precision", {"no": NOTHING, "bf16": "bf16", "fp16": "fp16"}),
        "ACCELERATE_DYNAMO_BACKEND": ("train.compile", {"no": NOTHING, "inductor": True}),
        "ACCELERATE_USE_CPU": ("train.device", flag(("cpu", "auto"))),
        "ACCELERATE_GRADIENT_CLIPPING": ("optim.grad_clip", NORM),
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": (MICROBATCHES, COUNT),
    },
    "ACCELERATE_DYNAMO_BACKEND": {
        "ACCELERATE_DYNAMO_MODE": ("train.compile", {"default": NOTHING}),
        "ACCELERATE_DYNAMO_USE_FULLGRAPH": ("train.compile", UNSUPPORTED),
        "ACCELERATE_DYNAMO_USE_DYNAMIC": ("train.compile", UNSUPPORTED),
        "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION": ("train.compile", UNSUPPORTED),
    },
    "ACCELERATE_USE_FSDP": {
        "FSDP_OFFLOAD_PARAMS": ("engine.cpu_offload", flag(True)),
        "FSDP_ACTIVATION_CHECKPOINTING": ("train.recompute", flag("full")),
        "FSDP_SHARDING_STRATEGY": ("engine.reshard", SHARDING),  # of FSDP 1
        "FSDP_RESHARD_AFTER_FORWARD": ("engine.reshard", flag(NOTHING, False)),  # of FSDP 2
    },
    "ACCELERATE_USE_MEGATRON_LM": {
        "MEGATRON_LM_TP_DEGREE": ("parallel.tensor", SIZE),
        "MEGATRON_LM_PP_DEGREE": ("parallel.pipeline", SIZE),
        "MEGATRON_LM_CONTEXT_PARALLEL_SIZE": ("parallel.context", SIZE),
        "MEGATRON_LM_EXPERT_MODEL_PARALLEL_SIZE": ("parallel.expert", SIZE),
        "MEGATRON_LM_EXPERT_TENSOR_PARALLEL_SIZE": ("parallel.expert_tensor", SIZE),
        "MEGATRON_LM_NUM_MICRO_BATCHES": (MICROBATCHES, COUNT),
        "MEGATRON_LM_SEQUENCE_PARALLELISM": ("parallel.sequence", flag(True, False)),
        "MEGATRON_LM_USE_DISTRIBUTED_OPTIMIZER": ("engine.shard_optimizer", flag(True, False)),
        "MEGATRON_LM_USE_CUSTOM_FSDP": ("engine.kind", flag("fsdp")),
        "MEGATRON_LM_OPTIMIZER_CPU_OFFLOAD": ("engine.cpu_offload", flag(True)),
        "MEGATRON_LM_RECOMPUTE_ACTIVATIONS": ("train.recompute", flag(("selective", "full"))),
        "MEGATRON_LM_RECOMPUTE_GRANULARITY": ("train.recompute", {"selective": "selective", "full": "full"}),
        "MEGATRON_LM_RECOMPUTE_METHOD": ("train.recompute", {}),
        "MEGATRON_LM_RECOMPUTE_NUM_LAYERS": ("train.recompute", {}),
        "MEGATRON_LM_DECODER_LAST_PIPELINE_NUM_LAYERS": (NO_KEY, {}),
        "MEGATRON_LM_ATTENTION_SOFTMAX_IN_FP32": (NO_KEY, UNSUPPORTED),
        "MEGATRON_LM_CALCULATE_PER_TOKEN_LOSS": (NO_KEY, UNSUPPORTED),
        "MEGATRON_LM_GRADIENT_CLIPPING": ("optim.grad_clip", NORM._replace(default=1)),
        "MEGATRON_LM_HIDDEN_DROPOUT": ("model.dropout", DROPOUT),
        "MEGATRON_LM_ATTENTION_DROPOUT": ("model.dropout", DROPOUT),
        "MEGATRON_LM_USE_ROTARY_POSITION_EMBEDDINGS": ("model.position", flag("rope")),
        "MEGATRON_LM_NO_LOAD_OPTIM": ("checkpoint.weights", UNSUPPORTED),
        "MEGATRON_LM_NO_SAVE_OPTIM": ("checkpoint.last", UNSUPPORTED),
        "MEGATRON_LM_EOD_MASK_LOSS": (NO_KEY, UNSUPPORTED),
        "MEGATRON_LM_USE_PRECISION_AWARE_OPTIMIZER": ("train.precision", UNSUPPORTED),
    },
    "ACCELERATE_USE_PARALLELISM_CONFIG": {
        "PARALLELISM_CONFIG_TP_SIZE": ("parallel.tensor", SIZE),
        "PARALLELISM_CONFIG_CP_SIZE": ("parallel.context", SIZE),
        "PARALLELISM_CONFIG_SP_SIZE": ("parallel.context", SIZE),
        "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": (COPIES, SIZE),
        "PARALLELISM_CONFIG_DP_SHARD_SIZE": ("engine.shard_size", SIZE),
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
                value = read_count(env, "LOCAL_WORLD_SIZE")
            elif key == COPIES:
                key = "parallel.data"
                value *= read_count(env, "PARALLELISM_CONFIG_DP_SHARD_SIZE")
            yield Statement(name, key, value if isinstance(value, tuple) else (value,))
    if is_on(env, "ACCELERATE_USE_DEEPSPEED"):
        yield from deepspeed_statements(config, env)


def deepspeed_statements(config: Config, env: Mapping[str, str]) -> Iterator[Statement]:
    """Yield what accelerate says about DeepSpeed's config: a file of it, or a stage and offloading."""
    is_deepspeed = config.engine.kind == "deepspeed" and config.engine.config is not None
    ours = read(config.engine.config) if is_deepspeed else {}
    if is_stated(env, DS_FILE):
        try:
            theirs = read(env[DS_FILE])
        except ConfigError as error:
            wrong = f"the launcher's {DS_FILE}={env[DS_FILE]}: {error.wrong}"
            raise ConfigError("environment", wrong, f"a JSON file such as {EXAMPLE}") from None
        if not is_deepspeed or ours != theirs:
            yield Statement(DS_FILE, "engine.config", (env[DS_FILE],))
        return
    zero = ours.get("zero_optimization") or {}
    asked: dict[str, Any] = {}
    if is_stated(env, ZERO_STAGE):
        asked["stage"] = STAGE.parse(env, ZERO_STAGE)
    for name, section in OFFLOADS.items():
        if is_stated(env, name):
            asked[section] = {"device": meaning(env, name, "engine.config", DEVICES)}
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
    """Whether a flag is set and true, or the backend of torch.compile is one that a run has."""
    return env.get(name, "").strip().lower() in (*TRUE, "inductor")


def read_count(env: Mapping[str, str], name: str) -> int:
    """Return the number of ranks that a variable states, or 1. Raises `ConfigError`."""
    return int(COUNT.parse(env, name)) if is_stated(env, name) else 1


def meaning(env: Mapping[str, str], name: str, key: str, words: Mapping[str, Any] | Number) -> Any:
    """Return the value of megacore's key that a variable asks for, or `NOTHING`. Raises `ConfigError`."""
    if isinstance(words, Number):
        return words.parse(env, name)
    text = env[name].strip().lower()
    if text not in words:
        aliases = (*TRUE[1:], *FALSE[1:], "2", "4")
        known = " or ".join(word for word in words if word not in aliases) or "leave it unset"
        wrong = f"the launcher's {name}={env[name]} has no equal in megacore"
        right = known if key == NO_KEY else f"{known}; the run's own key is {key}"
        raise ConfigError("environment", wrong, right)
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
