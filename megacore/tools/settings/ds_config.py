"""Checks a ds_config, alone and against the run's own config.

What it says of the run itself: `from_ds_config`.

This does not need DeepSpeed. DeepSpeed itself reads its config late, ignores keys that it does not know, and
with some combinations silently hangs or trains something else.
"""

import json
import math
import sys
from typing import Any

from megacore.config.schema import Config
from megacore.errors import ConfigError
from megacore.tools.settings.ds_keys import (
    KNOWN,
    MONITORS,
    NULL_TOO,
    OFF,
    ON_BY_DEFAULT,
    REFUSED,
    REMOVED,
    RIGHT,
    SWITCHES,
)
from megacore.tools.settings.ds_settings import KEY, decided, ds_settings, read, without_refused
from megacore.tools.settings.from_ds_config import known_scheduler, section, taken_over
from megacore.tools.settings.other_words import near, other_word

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
        if key == "log.every":  # how often each of the two prints contradicts nothing: see `print_note`
            continue
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
            ours = config.train.precision if key == "train.precision" else value
            error = contradiction(path, given, key, ours)
            if path == "gradient_accumulation_steps" and type(given) is int:
                batch = given * config.train.micro_batch_size * config.data_size
                right = f'"auto" there, or train.global_batch_size={batch} here'
                error = ConfigError(error.where, error.wrong, right)
            raise error
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
    check_kinds(settings)
    for path, value in walk(settings):
        check_key(path, value)
    return taken_over(without_refused(settings), config.optim.lr)


def print_note(config: Config) -> str | None:
    """The line that a run prints if its ds_config states `steps_per_print`; None if it does not."""
    if config.engine.kind != "deepspeed":
        return None
    steps = read(config.engine.config).get("steps_per_print")
    if steps is None:
        return None
    every = config.log.every
    if every == steps:
        return f"{KEY}: steps_per_print={steps:g}: the run logs every {every} steps (log.every={every})"
    return (
        f"{KEY}: steps_per_print={steps:g} is DeepSpeed's own line, and the run logs every {every} steps, "
        f"because its config states log.every={every}"
    )


def check_kinds(settings: dict[str, Any]) -> None:
    """Refuse an optimizer or a scheduler that a run does not have, before what its parameters are called."""
    kind = section(settings, "optimizer").get("type", "auto")
    if str(kind).lower() in ONE_BIT:
        why = "DeepSpeed 0.19 has removed its 1-bit optimizers"
        raise ConfigError(
            f"{KEY}: optimizer.type", why, "AdamW; communication_data_type=bf16 halves the traffic of fp32"
        )
    if str(kind).lower() not in ("auto", "adam", "adamw"):
        wrong = f"{shown_kind(kind)} is not the run's optimizer"
        raise ConfigError(f"{KEY}: optimizer.type", wrong, "AdamW, or leave optimizer out")
    if "type" in section(settings, "scheduler"):
        known_scheduler(section(settings, "scheduler"))


def shown_kind(kind: Any) -> str:
    """A type as it is written, without the quotes of a string."""
    return kind if isinstance(kind, str) else json.dumps(kind)


def walk(settings: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Every dotted path with its value. A section comes before its keys."""
    found: list[tuple[str, Any]] = []
    for name, value in settings.items():
        found.append((f"{prefix}{name}", value))
        if isinstance(value, dict):
            found += walk(value, f"{prefix}{name}.")
    return found


def check_key(path: str, value: Any) -> None:
    """Refuse a key that this engine does not pass on, or that DeepSpeed does not know."""
    section, _, name = path.rpartition(".")
    if path in REMOVED:
        raise ConfigError(f"{KEY}: {path}", "DeepSpeed 0.19 has removed this key", REMOVED[path])
    if path in REFUSED:
        if not is_off(path, value):
            raise ConfigError(f"{KEY}: {path}", *REFUSED[path])
        return
    if section in MONITORS and name not in MONITORS[section].split():
        raise unknown(path, MONITORS[section].split())
    # Which parameters a scheduler has depends on its type, and `from_ds_config` knows.
    if section in KNOWN and section != "scheduler.params" and name not in KNOWN[section].split():
        raise unknown(path, KNOWN[section].split())
    if path in ("scheduler", "activation_checkpointing") and value in ("auto", None):
        return
    if path in KNOWN and not isinstance(value, dict):
        raise ConfigError(f"{KEY}: {path}", f"{json.dumps(value)} is not valid", "an object")
    right = RIGHT.get(name) if not section or section in KNOWN else None
    left = value == "auto" or (value is None and (not section or name in NULL_TOO))
    if right and not left and not fits(value, right):
        raise ConfigError(f"{KEY}: {path}", f"{json.dumps(value)} is not valid", right)


def is_off(path: str, value: Any) -> bool:
    """Whether the value of a refused key asks for nothing."""
    if value is None or value == "auto":
        return True
    if path not in SWITCHES:
        return any(same(value, harmless) for harmless in OFF.get(path, (False,)))
    if value == {}:
        return path not in ON_BY_DEFAULT
    switch, off = SWITCHES[path]
    return isinstance(value, dict) and any(same(value.get(switch), harmless) for harmless in off)


def unknown(path: str, known: list[str]) -> ConfigError:
    """The error of a key that is not one of its section, with what may be meant."""
    place, _, name = path.rpartition(".")
    wrong = "AdamW has no such parameter" if place == "optimizer.params" else "DeepSpeed has no such key"
    if f"stage3_{name}" in known:  # DeepSpeed takes the short name too
        return ConfigError(f"{KEY}: {path}", "is a short name", f"stage3_{name}")
    same_name = [f"{other}.{name}".lstrip(".") for other, names in KNOWN.items() if name in names.split()]
    if same_name:
        right = f"did you mean {' or '.join(same_name)} of the ds_config?"
    elif key := other_word(name):
        right = f"leave it out; the key of the run is {key}"
    else:
        similar = near(name, known)
        right = "leave it out" if similar is None else f"did you mean {similar}?"
    return ConfigError(f"{KEY}: {path}", wrong, right)


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
    params = given.get("params", {})
    if params.get("adam_w_mode", True) is not True:
        wrong = "false is Adam with weight decay in its gradient, which is not the run's optimizer"
        raise ConfigError(
            f"{KEY}: optimizer.params.adam_w_mode", wrong, "true: AdamW; or leave optimizer out"
        )
    if params.get("bias_correction", True) not in (True, "auto"):
        wrong = "the run's AdamW corrects the bias of its moments"
        raise ConfigError(f"{KEY}: optimizer.params.bias_correction", wrong, "true, or leave it out")
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
    # Several keys take no single value, and enabled=false is no precision.
    has_one_value = "," not in key and not isinstance(given, bool)
    right = f'"auto" there, or {key}={said} here' if has_one_value else '"auto", or leave it out'
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
