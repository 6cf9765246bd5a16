"""The monitors that a config asks for, and those of its model's own file."""

import torch

from megacore.config import Config
from megacore.config.source import MONITORS, source_of
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
from megacore.train.logs import Monitor


def monitors_of(config: Config, place: RankInfo, device: torch.device) -> list[Monitor]:
    """One rank's part of them.

    Raises `ConfigError` if a package is missing, or the port of `log.prometheus_port` cannot be had.
    """
    log, found = config.log, list[Monitor]([Cost()])
    if place.rank == 0:
        check_wandb(config)
        found += [ProgressLine()] if has_terminal() else []
        found += [Board()] if log.tensorboard else []
        found += [Tracker()] if log.wandb != "off" else []
    if log.prometheus_port is not None:
        found.append(Exporter(log.prometheus_port, place, device))
    loads = None if config.model.num_experts is None else ExpertLoad()
    found += [SlowRanks()] if loads is None else [loads, SlowRanks(loads)]
    found += [Statistics()] if log.statistics is not None else []
    found += [Profile()] if log.profile is not None else []
    return found + source_monitors(config)


def source_monitors(config: Config) -> list[Monitor]:
    """The monitors of a model's own file."""
    source = source_of(config)
    if source is None:
        return []
    with source.blamed(f", {MONITORS}"):
        return [monitor() for monitor in source.monitors]
