"""The callbacks that a config asks for, and those of a custom model's file."""

import torch

from megacore.config import Config
from megacore.config.source import CALLBACKS, source_of
from megacore.distributed.rank_info import RankInfo
from megacore.tools.monitoring.cost import Cost
from megacore.tools.monitoring.expert_load import ExpertLoad
from megacore.tools.monitoring.profile import Profile
from megacore.tools.monitoring.progress import ProgressLine, has_terminal
from megacore.tools.monitoring.prometheus import Exporter
from megacore.tools.monitoring.slow_ranks import SlowRanks
from megacore.tools.monitoring.statistics import Statistics
from megacore.tools.monitoring.tensorboard import Board
from megacore.tools.monitoring.wandb import Tracker, check_wandb
from megacore.tools.records import Console
from megacore.train.callbacks import Callback


def callbacks_of(config: Config, place: RankInfo, device: torch.device) -> list[Callback]:
    """Return one rank's callbacks that show the run, in the order in which they are called.

    Raises:
        ConfigError: if a package is missing, or `log.prometheus_port` is in use.
    """
    log = config.log
    callbacks = list[Callback]()
    if place.rank == 0:
        check_wandb(config)
        callbacks.append(Console())
        callbacks.append(Cost())
        if has_terminal():
            callbacks.append(ProgressLine())
        if log.tensorboard:
            callbacks.append(Board())
        if log.wandb != "off":
            callbacks.append(Tracker())
    if log.prometheus_port is not None:
        callbacks.append(Exporter(log.prometheus_port, place, device))

    expert_load = None if config.model.num_experts is None else ExpertLoad()
    if expert_load is not None:
        callbacks.append(expert_load)
    callbacks.append(SlowRanks(expert_load))
    if log.statistics is not None:
        callbacks.append(Statistics())
    if log.profile is not None:
        callbacks.append(Profile())
    return [*callbacks, *source_callbacks(config)]


def source_callbacks(config: Config) -> list[Callback]:
    """Return the callbacks of a custom model's file."""
    source = source_of(config)
    if source is None:
        return []
    with source.blamed(f", {CALLBACKS}"):
        return [callback() for callback in source.callbacks]
