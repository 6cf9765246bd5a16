"""Fits the profile to one measured run, so that the same machine's other layouts
and sizes are predicted from it.
"""

from dataclasses import replace
from pathlib import Path
from statistics import median

from pydantic import ValidationError

from megacore.errors import ConfigError
from megacore.files import read_text
from megacore.records import Amount, Record, complaint
from megacore.tools.planner.devices import Cluster, DeviceSpec
from megacore.tools.planner.profile import Profile
from megacore.tools.planner.step_time import predict
from megacore.tools.planner.workload import Setting, setting_of
from megacore.tools.settings.load import load, read, smallest_world

OPTION = "--calibrate"
WARM_UP = 3  # logged steps that do not count, if there are more than twice as many
WIDEST = 100.0  # times slower or faster than the profile says: beyond that something else is wrong


class Timed(Record):
    """Of a record of metrics.jsonl what is read; a validation has none."""

    step_seconds: Amount | None = None


def slowed(profile: Profile, factor: float) -> Profile:
    """A profile whose device and host take `factor` times as long; links stay as they are."""
    rates = {name: getattr(profile, name) / factor for name in ("attention_rate", "memory_rate")}
    hosts = {
        name: getattr(profile, name) * factor
        for name in ("layer_host", "call_host", "microbatch_host", "step_host")
    }
    peaks = profile.product_rate or {"any": 0.75}
    # A device's own factor stands beside its precision's rate; only the rate is divided.
    products = {
        name: value / factor if name in ("any", "fp64", "fp32", "bf16", "fp16", "fp8", "nvfp4") else value
        for name, value in peaks.items()
    }
    return replace(profile, product_rate=products, **rates, **hosts)


def calibrated(
    profile: Profile, setting: Setting, seconds: float, device: DeviceSpec, cluster: Cluster
) -> Profile | None:
    """The profile, slowed or sped up until the setting takes so many seconds.

    None if no factor does that: its links alone take longer.
    """
    low, high = 1 / WIDEST, WIDEST

    def step(factor: float) -> float:
        return predict(setting, device, cluster, slowed(profile, factor)).step

    if not step(low) <= seconds <= step(high):
        return None
    for _ in range(60):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if step(middle) < seconds else (low, middle)
    return slowed(profile, low)


def read_run(folder: str) -> tuple[Setting, float]:
    """The setting of a run, and its median seconds a step, from config.json and metrics.jsonl.

    Raises `ConfigError`.
    """
    path = Path(folder)
    try:
        # a last line may be half written
        lines = read_text(path / "metrics.jsonl").rpartition("\n")[0].split("\n")
        steps = [Timed.model_validate_json(line) for line in lines]
        config = str(path / "config.json")
        # a file is executed only if it is named
        model = read(config).get("model", {})
        if (key := next((key for key in ("source", "hf") if model.get(key) is not None), None)) is not None:
            raise ConfigError(
                f"model.{key}",
                "a step of a model of the user's own is not predicted",
                "a run of megacore's own model",
            )
        setting = setting_of(load(config, [], smallest_world(config, [])).config)
    except OSError as error:
        raise ConfigError(
            OPTION, f"cannot read {error.filename or folder}: {error.strerror}", "a run's folder, log.dir"
        ) from None
    except ValidationError as error:
        raise ConfigError(
            OPTION, f"{folder} holds no run's metrics: {complaint(error)}", "a run's folder, log.dir"
        ) from None
    except ConfigError as error:
        raise ConfigError(
            OPTION, f"{folder} holds no run's config: {error.where}: {error.wrong}", error.right
        ) from None
    except UnicodeDecodeError:
        raise ConfigError(
            OPTION, f"{folder} holds no run's metrics: no text", "a run's folder, log.dir"
        ) from None
    seconds = [step.step_seconds for step in steps if step.step_seconds is not None]
    if not seconds or min(seconds) <= 0:
        raise ConfigError(OPTION, f"{folder} has logged no step", "a run of some steps, with log.every=1")
    counted = seconds[WARM_UP:] if len(seconds) > 2 * WARM_UP else seconds
    return setting, median(counted)


def calibrate(
    profile: Profile, folder: str, device: DeviceSpec, cluster: Cluster
) -> tuple[Profile, Setting, float]:
    """The profile that a run's folder gives, with what was run and its seconds a step.

    Raises `ConfigError`.
    """
    setting, seconds = read_run(folder)
    if setting.precision not in device.peak_flops:
        raise ConfigError(
            OPTION,
            f"the run's {setting.precision} peak of {device.name} is not known",
            "a device file that states it",
        )
    found = calibrated(profile, setting, seconds, device, cluster)
    if found is None:
        wrong = f"{seconds:.4g} s a step of {folder} cannot be explained by {device.name} and {cluster.name}"
        raise ConfigError(OPTION, wrong, "the device and the cluster on which it ran")
    return found, setting, seconds
