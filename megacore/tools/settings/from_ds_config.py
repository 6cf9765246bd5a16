"""What a ds_config says of the run itself: precision, batch, optimizer, rates.

The run takes it over where its own config is silent.

`ds_config` checks what is left, which goes to DeepSpeed. The rates are those of DeepSpeed 0.19
(`runtime/lr_schedules.py`): its schedulers count from 0, step behind the optimizer, and begin with the first
rate twice, so they are two steps late; see `optim.lag`. Only WarmupCosineLR's very first rate differs: that
is 0 there, and here where warmup begins.
"""

import json
from typing import Any

from megacore.errors import ConfigError
from megacore.tools.settings.ds_settings import KEY

AUTO = "auto"
WARMUP = {"warmup_min_lr": 0.0, "warmup_max_lr": AUTO, "warmup_num_steps": 1000, "warmup_type": "log"}
COSINE = {
    "warmup_min_ratio": 0.0,
    "cos_min_ratio": 1e-4,
    "warmup_num_steps": 1000,
    "warmup_type": "log",
    "total_num_steps": None,
}
CYCLE = {
    "cycle_min_lr": None,
    "cycle_max_lr": None,
    "cycle_first_step_size": 2000,
    "cycle_second_step_size": None,
}
# Parameters of the four schedulers with their defaults; None: it has none, or is another one's value.
SCHEDULERS: dict[str, dict[str, Any]] = {
    "WarmupLR": WARMUP,
    "WarmupDecayLR": WARMUP | {"total_num_steps": None, "warmup_max_lr": 1e-3},
    "WarmupCosineLR": COSINE,
    "OneCycle": CYCLE
    | {"cycle_momentum": True}
    | dict.fromkeys(("decay_step_size", "decay_lr_rate", "cycle_first_stair_count"), 0),
}
NEEDED = ("total_num_steps", "cycle_min_lr", "cycle_max_lr")
# The keys of `optim` that each parameter says.
SAYS = {
    "warmup_min_lr": ("warmup_lr", "min_lr"),
    "warmup_max_lr": ("lr",),
    "warmup_num_steps": ("warmup_steps",),
    "warmup_type": ("warmup",),
    "total_num_steps": ("decay_steps",),
    "warmup_min_ratio": ("warmup_lr",),
    "cos_min_ratio": ("min_lr",),
    "cycle_min_lr": ("warmup_lr", "min_lr"),
    "cycle_max_lr": ("lr",),
    "cycle_first_step_size": ("warmup_steps", "decay_steps"),
    "cycle_second_step_size": ("decay_steps",),
}
# What says something of the run.
STATED = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "steps_per_print",
    "bf16",
    "fp16",
    "optimizer",
    "scheduler",
    "activation_checkpointing",
)
# Of the section activation_checkpointing, what megacore does otherwise.
CHECKPOINTING = {"partition_activations": "parallel.sequence"}


def taken_over(settings: dict[str, Any], lr: float) -> dict[str, tuple[str, Any]]:
    """The run's dotted keys that a ds_config states: the place there, and the value here.

    `lr`: the run's own peak rate.

    Its keys and values are checked already (`ds_config.check_key`). Raises `ConfigError` for a scheduler
    without an equal here.
    """
    found = {
        "train.global_batch_size": ("train_batch_size", settings.get("train_batch_size", AUTO)),
        "train.micro_batch_size": (
            "train_micro_batch_size_per_gpu",
            settings.get("train_micro_batch_size_per_gpu", AUTO),
        ),
        "optim.grad_clip": ("gradient_clipping", settings.get("gradient_clipping", AUTO)),
        "log.every": ("steps_per_print", settings.get("steps_per_print", AUTO)),
    }
    for precision in ("bf16", "fp16"):
        if section(settings, precision).get("enabled") is True:
            found["train.precision"] = (f"{precision}.enabled", precision)
    params = section(settings, "optimizer.params")
    for name in ("lr", "eps", "weight_decay"):
        found[f"optim.{name}"] = (f"optimizer.params.{name}", params.get(name, AUTO))
    betas = params.get("betas", AUTO)
    if isinstance(betas, list) and len(betas) == 2:
        found |= {f"optim.beta{i + 1}": ("optimizer.params.betas", beta) for i, beta in enumerate(betas)}
    if section(settings, "activation_checkpointing"):
        found |= checkpointing(settings["activation_checkpointing"])
    if section(settings, "scheduler"):
        peak = found["optim.lr"][1]
        found |= {
            f"optim.{key}": ("scheduler", value)
            for key, value in rates(settings["scheduler"], lr if peak == AUTO else peak).items()
        }
    return {
        key: (path, whole(key, value))
        for key, (path, value) in found.items()
        if value is not None and value != AUTO
    }


def section(settings: dict[str, Any], path: str) -> dict[str, Any]:
    """The object at a dotted path, or an empty one."""
    found: Any = settings
    for name in path.split("."):
        found = found.get(name) if isinstance(found, dict) else None
    return found if isinstance(found, dict) else {}


def checkpointing(given: dict[str, Any]) -> dict[str, tuple[str, Any]]:
    """Recomputation with activations in host memory, if that is what the section asks for."""
    for name, value in given.items():
        if name != "cpu_checkpointing" and value not in (False, None, AUTO):
            right = CHECKPOINTING.get(name, "leave it out; train.recompute decides")
            raise ConfigError(
                f"{KEY}: activation_checkpointing.{name}", f"{json.dumps(value)} has no equal here", right
            )
    path = "activation_checkpointing.cpu_checkpointing"
    return (
        {"train.recompute": (path, "full"), "train.offload_activations": (path, True)}
        if given.get("cpu_checkpointing") is True
        else {}
    )


def known_scheduler(scheduler: dict[str, Any]) -> dict[str, Any]:
    """The parameters of a scheduler's type, with their defaults.

    Raises `ConfigError` if the scheduler has no equal here.
    """
    kind = scheduler.get("type")
    if not isinstance(kind, str) or kind not in SCHEDULERS:
        raise ConfigError(
            f"{KEY}: scheduler.type", f"{json.dumps(kind)} has no equal here", ", ".join(SCHEDULERS)
        )
    return SCHEDULERS[kind]


def rates(scheduler: dict[str, Any], lr: float) -> dict[str, Any]:
    """The keys of `optim` whose rates are those of a scheduler; `lr` is the peak where that does not say it.

    What is "auto" is left out.
    """
    kind, params = str(scheduler.get("type")), section(scheduler, "params")
    known = known_scheduler(scheduler)
    if strange := [name for name in params if name not in known]:
        raise ConfigError(
            f"{KEY}: scheduler.params.{strange[0]}", f"{kind} has no such parameter here", ", ".join(known)
        )
    left = {name for name, value in params.items() if value == AUTO}
    p = (
        known
        | {name: value for name, value in params.items() if name not in left}
        | dict.fromkeys(left & set(NEEDED), 1)
    )
    if missing := [name for name in NEEDED if name in p and p[name] is None]:
        raise ConfigError(
            f"{KEY}: scheduler.params.{missing[0]}", "is missing", f"a number, as {kind} needs it"
        )
    if kind == "OneCycle":
        if p["cycle_momentum"] or any(
            p[name] for name in ("decay_step_size", "decay_lr_rate", "cycle_first_stair_count")
        ):
            wrong = "OneCycle with moving betas, stairs or a decay behind the cycle has no equal here"
            raise ConfigError(
                f"{KEY}: scheduler.params", wrong, '"cycle_momentum": false, without stairs and decay'
            )
        up, down = p["cycle_first_step_size"], p["cycle_second_step_size"]
        low, peak, end = p["cycle_min_lr"], p["cycle_max_lr"], up + (up if down is None else down)
        found = {"schedule": "linear", "min_lr": low, "decay_steps": end, "lag": [1, 1]}
        found |= {"lr": peak, "warmup_lr": low, "warmup_steps": up, "warmup": "linear"}
    else:
        found = {"warmup": p["warmup_type"], "warmup_steps": max(2, p["warmup_num_steps"]), "lag": [2, 2]}
        if kind == "WarmupCosineLR":  # its decay begins a step ahead of its warmup's end
            found |= {
                "warmup_lr": lr * p["warmup_min_ratio"],
                "min_lr": lr * p["cos_min_ratio"],
                "schedule": "cosine",
                "lag": [2, 1],
            }
        else:
            found |= {"warmup_lr": p["warmup_min_lr"], "schedule": "constant"}
            found |= {} if p["warmup_max_lr"] in (AUTO, None) else {"lr": p["warmup_max_lr"]}
        if kind == "WarmupDecayLR":
            found |= {"schedule": "linear", "min_lr": p["warmup_min_lr"]}
        found |= {"decay_steps": p["total_num_steps"]} if "total_num_steps" in p else {}
    dropped = {key for name in left for key in SAYS.get(name, ())}
    return {key: whole(key, value) for key, value in found.items() if key not in dropped}


def whole(key: str, value: Any) -> Any:
    """A value as the schema has it: 500.0 steps are 500."""
    return (
        int(value)
        if key.endswith(("_steps", "batch_size", "every")) and isinstance(value, float) and value.is_integer()
        else value
    )


def without_stated(settings: dict[str, Any]) -> dict[str, Any]:
    """A ds_config without what it says of the run."""
    return {name: value for name, value in settings.items() if name not in STATED}
